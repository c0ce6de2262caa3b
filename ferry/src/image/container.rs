//! Finds a container on layers of ferry-snapshotter by the kernel's mount table, independent of the runtime.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ferry_fuse::MountEntry;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

/// The minimum length of an abbreviated container name.
const PREFIX_BYTES_MIN: usize = 8;
/// The prefix of a manifest's digest.
const DIGEST: &str = "sha256:";

/// A container with a layer that is fetched on demand.
#[derive(Debug, PartialEq, Eq)]
pub struct Container {
    /// Its root directory, as containerd sees it.
    pub at: PathBuf,
    /// Its mount.
    pub id: u64,
    /// The digits of its image's manifest.
    pub manifest: String,
    /// Where the snapshotter has mounted the image.
    pub layer: PathBuf,
    /// The root of the snapshotter.
    root: PathBuf,
}

impl Container {
    /// Returns the container with this name, or one whose image has a manifest with this digest, unless its upper directory is in the
    /// list.
    ///
    /// # Errors
    ///
    /// Several containers match, or the container is not on the snapshotter's layers, or none of them is fetched on demand.
    pub fn find(name: &str, before: &BTreeSet<PathBuf>) -> Result<Option<Self>> {
        let mounts = MountEntry::all().context("cannot read the kernel's mount table")?;
        let overlays = mounts.iter().filter(|mount| mount.kind == "overlay");
        if let Some(manifest) = name.strip_prefix(DIGEST) {
            let new = overlays.filter(|mount| upper(mount).is_some_and(|upper| !before.contains(&upper)));
            return Ok(new.filter_map(of_mount).find(|found| found.manifest == manifest));
        }
        let named: Vec<_> = overlays.filter(|mount| is_named(&mount.at, name)).collect();
        let mount = match named[..] {
            [] => return Ok(None),
            [mount] => mount,
            [one, two, ..] => {
                bail!("{name} matches {} and {}: give a longer name", one.at.display(), two.at.display());
            }
        };
        let found = of_mount(mount).with_context(|| {
            format!(
                "{} has no layer of ferry-snapshotter that is fetched when it is read; name the directory and --output \
                 instead of --container to record what is opened there",
                mount.at.display()
            )
        })?;
        Ok(Some(found))
    }

    /// Returns the path where the snapshotter expects the list of the container's image.
    pub fn list(&self) -> PathBuf {
        self.root.join("traces").join(&self.manifest)
    }

    /// Returns the upper directories of all overlayfs mounts. Unlike mount ids, the snapshotter's directories are never reused.
    pub fn uppers() -> Result<BTreeSet<PathBuf>> {
        let mounts = MountEntry::all().context("cannot read the kernel's mount table")?;
        Ok(mounts.iter().filter_map(upper).collect())
    }

    /// Whether a process has its root directory.
    pub fn has_processes(&self) -> bool {
        let Some(root) = directory(&self.at) else { return false };
        let is_process = |name: &OsStr| name.as_bytes().iter().all(u8::is_ascii_digit);
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        processes
            .filter(|entry| is_process(&entry.file_name()))
            .any(|entry| directory(&entry.path().join("root")) == Some(root))
    }

    /// Whether its mount is still there.
    pub fn is_mounted(&self) -> bool {
        MountEntry::all().is_ok_and(|mounts| mounts.iter().any(|mount| mount.id == self.id && mount.at == self.at))
    }
}

/// The kernel's mount table.
pub struct Table(File);

impl Table {
    pub fn open() -> Result<Self> {
        File::open("/proc/self/mountinfo").map(Self).context("cannot open the kernel's mount table")
    }

    /// Waits for a change, at most this long; returns whether there was one since the last call.
    pub fn changes(&self, time: &Timespec) -> bool {
        poll(&mut [PollFd::new(&self.0, PollFlags::PRI)], Some(time)).is_ok_and(|count| count > 0)
    }
}

/// Returns the identity of a directory, from the kernel's cache only: its server may not respond.
pub(super) fn directory(path: &Path) -> Option<(u32, u32, u64)> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
}

/// Whether a mount is the root of a container: containerd names a directory after it, with the mount on it or on `rootfs` in it.
fn is_named(at: &Path, name: &str) -> bool {
    let at = if at.file_name() == Some(OsStr::new("rootfs")) { at.parent().unwrap_or(at) } else { at };
    let found = at.file_name().map(OsStr::as_bytes).unwrap_or_default();
    found == name.as_bytes() || name.len() >= PREFIX_BYTES_MIN && found.starts_with(name.as_bytes())
}

/// Returns the upper directory of an overlayfs: ROOT/snapshots/ID/fs.
fn upper(mount: &MountEntry) -> Option<PathBuf> {
    mount.option("upperdir").map(PathBuf::from)
}

fn of_mount(mount: &MountEntry) -> Option<Container> {
    let upper = upper(mount)?;
    let snapshot = upper.parent()?;
    let root = snapshot.parent()?.parent()?;
    let lower = mount.values("lowerdir").chain(mount.values("lowerdir+"));
    let lower: Vec<_> = lower.flat_map(|all| split(&all)).collect();
    // containerd shortens names; with the users of a container, a layer has another mount of the same file system. If containerd has made
    // that, its name is gone, and the snapshotter's link leads to the layer.
    let link = snapshot.join("lower/layer");
    let paths = lower.iter().chain([&link]);
    let devices: BTreeSet<u64> = paths.filter_map(|path| Some(fs::metadata(root.join(path)).ok()?.dev())).collect();
    for entry in fs::read_dir(root.join("lazy")).ok()?.flatten() {
        let layer = entry.path().join("layer");
        let (Ok(found), Ok(directory)) = (fs::metadata(&layer), fs::metadata(entry.path())) else { continue };
        if found.dev() == directory.dev() || !devices.contains(&found.dev()) {
            continue;
        }
        // MANIFEST-LAYERS
        let name = entry.file_name();
        let Some((manifest, _)) = name.to_str().and_then(|name| name.rsplit_once('-')) else { continue };
        return Some(Container {
            at: mount.at.clone(),
            id: mount.id,
            manifest: manifest.into(),
            layer,
            root: root.into(),
        });
    }
    None
}

/// Splits the layers of an option: the snapshotter's paths have no colons.
fn split(layers: &OsStr) -> Vec<PathBuf> {
    layers.as_bytes().split(|byte| *byte == b':').map(|path| OsStr::from_bytes(path).into()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_a_container_have_its_root() {
        let container = |at: &str| Container {
            at: at.into(),
            id: 0,
            manifest: String::new(),
            layer: PathBuf::new(),
            root: PathBuf::new(),
        };
        assert!(container("/").has_processes());
        assert!(!container("/proc/self").has_processes() && !container("/nowhere").has_processes());
    }

    #[test]
    fn directories_with_other_names_are_skipped() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let odd = (0..20).map(|number| format!("odd{number}"));
        for name in odd.chain(["5e1f-2".into()]) {
            fs::create_dir_all(at("lazy").join(&name)).expect("directories can be made");
            // A layer is a mount, as is this.
            std::os::unix::fs::symlink("/proc", at("lazy").join(name).join("layer")).expect("links can be made");
        }
        let line =
            format!("36 35 0:1 / /c rw - overlay o rw,lowerdir=/proc,upperdir={}", at("snapshots/1/fs").display());
        let found = of_mount(&MountEntry::read(line.as_bytes())[0]);
        assert_eq!(found.map(|container| container.manifest).as_deref(), Some("5e1f"));
    }

    #[test]
    fn containers_are_identified_by_their_directories() {
        let task = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/0123456789abcdef/rootfs";
        for (at, name, expected) in [
            (task, "0123456789abcdef", true),
            (task, "01234567", true),
            (task, "0123456", false),
            (task, "12345678", false),
            (task, "rootfs", false),
            ("/var/lib/docker/rootfs/overlayfs/web", "web", true),
            ("/", "web", false),
        ] {
            assert_eq!(is_named(Path::new(at), name), expected, "{at} {name}");
        }
    }
}
