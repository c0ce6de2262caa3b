//! The mounts that containerd makes of layers.

use std::path::{Path, PathBuf};

use rustix::fd::AsFd;
use rustix::mount::{FsOpenFlags, fsconfig_create, fsconfig_set_string, fsopen};

use crate::api::{Kind, Mount};
use crate::erofs::messages;
use crate::error::{Error, Result};
use crate::idmap::IdMaps;

/// Exists if this kernel's overlayfs knows the option `index`.
const INDEX_PARAMETER: &str = "/sys/module/overlay/parameters/index";

/// The directories of a snapshot.
#[derive(Debug)]
pub struct Layers<'a> {
    /// Active or a view.
    pub kind: Kind,
    /// Its own files.
    pub upper: &'a Path,
    /// The work directory of an active one.
    pub work: &'a Path,
    /// The layers below, nearest first.
    pub lower: &'a [PathBuf],
    /// The maps by which containerd is to map the ids of the only layer below ([`engine_maps_ids`]).
    pub maps: Option<&'a IdMaps>,
}

/// Whether containerd itself can map the ids of these layers: then it also can leave that out, where it fills volumes with the files of an
/// image. It takes one range of ids.
///
/// From 2.1.5 on it clones the directory above all layers, without the mounts in it. The path of a single layer ends with a slash, so that
/// it is that directory itself. Where containerd only looks into an image, for users, it makes the upper directory one more layer; so the path is a
/// link from there ([`crate::layers::Layers::link`]), which leads to the layer from a clone, too.
pub fn engine_maps_ids(kind: Kind, lower: &[PathBuf], maps: &IdMaps) -> bool {
    kind == Kind::Active && lower.len() == 1 && ![&maps.users, &maps.groups].iter().any(|map| map.contains(','))
}

impl Layers<'_> {
    /// Returns the mounts, with the options of containerd's own overlayfs snapshotter. A single directory is a bind mount, because
    /// overlayfs needs an upper directory or two lower ones.
    #[must_use]
    pub fn mounts(&self) -> Vec<Mount> {
        let mut options = Vec::new();
        let is_writable = self.kind == Kind::Active;
        let bound = match (is_writable, self.lower) {
            (_, []) => Some(self.upper),
            (false, [only]) => Some(only.as_path()),
            _ => None,
        };
        let (kind, source) = match bound {
            Some(path) => {
                options.extend([if is_writable { "rw" } else { "ro" }, "rbind"].map(str::to_owned));
                ("bind", text(path))
            }
            None => {
                if is_writable {
                    options.push(format!("workdir={}", text(self.work)));
                    options.push(format!("upperdir={}", text(self.upper)));
                }
                let end = if self.maps.is_some() { "/" } else { "" };
                let lower: Vec<String> = self.lower.iter().map(|path| text(path) + end).collect();
                options.push(format!("lowerdir={}", lower.join(":")));
                if let Some(IdMaps { users, groups, .. }) = self.maps {
                    options.extend([format!("uidmap={users}"), format!("gidmap={groups}")]);
                }
                // Layers can change below an existing mount, which would invalidate an index.
                if Path::new(INDEX_PARAMETER).exists() {
                    options.push("index=off".into());
                }
                ("overlay", "overlay".into())
            }
        };
        vec![Mount { r#type: kind.into(), source, target: String::new(), options }]
    }
}

/// Returns a path as text: [`crate::directories`] refuses roots that are none.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Checks that overlayfs accepts these directories: upper, work, and a layer.
///
/// # Errors
///
/// It does not; the error has the kernel's reason.
pub fn check(upper: &Path, work: &Path, lower: &Path) -> Result<()> {
    let failed =
        |messages: String, error: rustix::io::Errno| Error::Mount { path: upper.into(), messages, error: error.into() };
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC);
    let context = context.map_err(|error| failed("no overlayfs".into(), error))?;
    let configured = || -> rustix::io::Result<()> {
        let fs = context.as_fd();
        fsconfig_set_string(fs, "source", "overlay")?;
        fsconfig_set_string(fs, "lowerdir", lower)?;
        fsconfig_set_string(fs, "upperdir", upper)?;
        fsconfig_set_string(fs, "workdir", work)?;
        fsconfig_create(fs)
    };
    configured().map_err(|error| failed(messages(&context), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_equal_those_of_containerd() {
        let lower: Vec<PathBuf> = ["/s/2/layer", "/s/1/fs"].map(PathBuf::from).into();
        for (kind, count, expected) in [
            (Kind::Active, 0, "bind /s/9/fs rw rbind"),
            (Kind::View, 0, "bind /s/9/fs ro rbind"),
            (Kind::View, 1, "bind /s/2/layer ro rbind"),
            (Kind::View, 2, "overlay overlay lowerdir=/s/2/layer:/s/1/fs"),
            (Kind::Active, 1, "overlay overlay workdir=/s/9/work upperdir=/s/9/fs lowerdir=/s/2/layer"),
            (Kind::Active, 2, "overlay overlay workdir=/s/9/work upperdir=/s/9/fs lowerdir=/s/2/layer:/s/1/fs"),
        ] {
            let (upper, work) = (Path::new("/s/9/fs"), Path::new("/s/9/work"));
            let mounts = Layers { kind, upper, work, lower: &lower[..count], maps: None }.mounts();
            let [Mount { r#type, source, target, options }] = &mounts[..] else { panic!("{mounts:?}") };
            let options = options.iter().filter(|option| *option != "index=off").cloned().collect::<Vec<_>>().join(" ");
            assert_eq!((format!("{} {source} {options}", r#type), &**target), (expected.to_owned(), ""));
        }
    }

    #[test]
    fn containerd_maps_the_ids_of_a_single_layer() {
        let lower: Vec<PathBuf> = ["/s/2/merged", "/s/1/layer"].map(PathBuf::from).into();
        let maps = |users: &str| IdMaps { users: users.into(), groups: "0:200000:9".into(), root: (1, 1) };
        let (one, two) = (maps("0:100000:9"), maps("0:100000:5,5:300000:4"));
        for (kind, count, maps, expected) in [
            (Kind::Active, 0, &one, false),
            (Kind::Active, 1, &one, true),
            (Kind::Active, 1, &two, false),
            (Kind::Active, 2, &one, false),
            (Kind::View, 1, &one, false),
        ] {
            assert_eq!(engine_maps_ids(kind, &lower[..count], maps), expected, "{kind:?} {count} {maps:?}");
        }
        let (upper, work) = (Path::new("/s/9/fs"), Path::new("/s/9/work"));
        let layers = Layers { kind: Kind::Active, upper, work, lower: &lower[..1], maps: Some(&one) };
        let options = layers.mounts().remove(0).options.join(" ");
        let expected = "workdir=/s/9/work upperdir=/s/9/fs lowerdir=/s/2/merged/ uidmap=0:100000:9 gidmap=0:200000:9";
        assert_eq!(options.strip_suffix(" index=off").unwrap_or(&options), expected);
    }
}
