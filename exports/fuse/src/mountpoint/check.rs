//! Looking at a mount point before anything is mounted on it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::table::Mounted;
use super::{MountError, helper};

/// The type that the table of mounts shows for ours.
const OUR_KIND: &str = "fuse.ferry";
/// How long a live server may take to answer one `stat`. One that takes longer helps nobody.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two questions to a server that is dying, which takes milliseconds.
const PAUSE: Duration = Duration::from_millis(10);
/// Dead mounts can lie on top of each other; more than a script that failed in a loop would leave is somebody's plan.
const DEAD_MAX: usize = 64;

/// Ask for the number of a mount that no later mount gets (Linux 6.8); before, the kernel answers the other one.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// What tells one mount from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    id: u64,
    major: u32,
    /// With `major` the file system's device number, for FUSE also its connection's number.
    pub(super) minor: u32,
}

impl Identity {
    /// The mount that a path leads to.
    pub(super) fn of(path: &Path) -> Result<Self, Errno> {
        let seen = statx_cached(path, MNT_ID_UNIQUE)?;
        Ok(Self { id: seen.stx_mnt_id, major: seen.stx_dev_major, minor: seen.stx_dev_minor })
    }
}

/// The number of the mount that a path is in, if `ferry` has made it; its server may have died.
pub(super) fn of_ferry(path: &Path) -> Option<u64> {
    let id = table_id(path).ok()?;
    Mounted::find(id).is_some_and(|mounted| mounted.kind == OUR_KIND).then_some(id)
}

/// Whether `ferry` has mounted something at this very path.
pub(super) fn is_mount_of_ferry(path: &Path) -> bool {
    let mounted = table_id(path).ok().and_then(Mounted::find);
    mounted.is_some_and(|mounted| mounted.kind == OUR_KIND && mounted.at == path)
}

/// The number that the table of mounts has for the mount that a path leads to.
fn table_id(path: &Path) -> Result<u64, Errno> {
    // Nothing is asked for: others' FUSE mounts refuse to show more, and this much the kernel always fills in.
    statx_cached(path, StatxFlags::empty()).map(|seen| seen.stx_mnt_id)
}

/// Looks at a path without asking a server anything, so that this works for dead mounts and hanging ones.
fn statx_cached(path: &Path, mask: StatxFlags) -> Result<rustix::fs::Statx, Errno> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    rustix::fs::statx(rustix::fs::CWD, path, flags, mask)
}

/// A mount point that can be mounted on.
#[derive(Debug)]
pub(super) struct Place {
    /// Absolute and without symbolic links.
    pub(super) path: PathBuf,
    /// The directory itself.
    pub(super) fd: OwnedFd,
}

/// Looks at a mount point, and takes away what a killed server of this kind left on it.
pub(super) fn prepare(path: &Path, kind: &str, nonempty: bool) -> Result<Place, MountError> {
    // Follows every link without asking what is mounted at the end.
    let path = &path.canonicalize().map_err(|error| reach_error(path, error))?;
    for _ in 0..DEAD_MAX {
        if !clear_dead(path, kind)? {
            break;
        }
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| reach_error(path, error.into()))?;
    if !nonempty && !is_empty(&fd).map_err(|error| reach_error(path, error.into()))? {
        return Err(MountError::NotEmpty { path: path.clone() });
    }
    Ok(Place { path: path.clone(), fd })
}

/// Unmounts a dead mount of ours, or of the program that is about to mount (`kind`); answers whether there was one. Live
/// ones, and dead ones of others, are errors.
fn clear_dead(path: &Path, kind: &str) -> Result<bool, MountError> {
    let id = table_id(path).map_err(|error| reach_error(path, error.into()))?;
    let above = path.parent().and_then(|parent| table_id(parent).ok());
    let mounted = if above == Some(id) { None } else { Mounted::find(id) };
    let Some(mounted) = mounted.filter(|mounted| mounted.kind.starts_with("fuse")) else { return Ok(false) };

    let ours = mounted.kind == OUR_KIND || mounted.kind == kind;
    match ask_until_clear(path) {
        Some(Err(Errno::NOTCONN | Errno::CONNABORTED)) if ours => {
            tracing::info!("the mount on {} was left by a server that has died: unmounting it", path.display());
            detach(path)?;
            Ok(true)
        }
        Some(Err(Errno::NOTCONN | Errno::CONNABORTED)) => {
            Err(MountError::DeadForeign { path: path.into(), kind: mounted.kind })
        }
        Some(_) if mounted.kind == OUR_KIND => {
            let source_name = mounted.source.to_string_lossy().into_owned();
            Err(MountError::Mounted { path: path.into(), source_name })
        }
        Some(_) => Ok(false),
        None => Err(MountError::Unresponsive { path: path.into(), kind: mounted.kind }),
    }
}

/// As [`ask`]; a server that is dying is asked until it is dead.
fn ask_until_clear(path: &Path) -> Option<Result<(), Errno>> {
    let begin = Instant::now();
    loop {
        match ask(path) {
            // The kernel takes io_uring's rings down after the process, and ends what is in them so.
            Some(Err(Errno::CANCELED)) if begin.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

/// Asks the server of a mount for its root; `None` if it does not answer. The thread that waits then is left behind:
/// the kernel ends its wait with this process, or with the mount.
fn ask(path: &Path) -> Option<Result<(), Errno>> {
    let (answer, answered) = mpsc::channel();
    let path = path.to_owned();
    let asking = move || {
        let flags = AtFlags::STATX_FORCE_SYNC | AtFlags::SYMLINK_NOFOLLOW;
        let result = rustix::fs::statx(rustix::fs::CWD, &path, flags, StatxFlags::BASIC_STATS);
        // Nobody listens any more where it took too long.
        let _ = answer.send(result.map(drop));
    };
    std::thread::Builder::new().name("mount-check".into()).spawn(asking).ok()?;
    answered.recv_timeout(PATIENCE).ok()
}

fn detach(path: &Path) -> Result<(), MountError> {
    match rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::PERM) => helper::unmount(path, true),
        Err(error) => Err(MountError::Unmount { path: path.into(), reason: io::Error::from(error).to_string() }),
    }
}

/// Whether a directory has no entries. One that may be mounted on but not listed passes for empty.
fn is_empty(fd: &OwnedFd) -> Result<bool, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let listed = match rustix::fs::openat(fd, ".", flags, Mode::empty()) {
        Err(Errno::ACCESS) => return Ok(true),
        listed => listed?,
    };
    for entry in Dir::new(listed)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

fn reach_error(path: &Path, error: io::Error) -> MountError {
    let path = path.to_owned();
    match Errno::from_io_error(&error) {
        Some(Errno::NOENT) => MountError::Missing { path },
        Some(Errno::NOTDIR) => MountError::NotDirectory { path },
        Some(Errno::ACCESS | Errno::PERM) => MountError::Access { path, reason: error },
        Some(Errno::MFILE | Errno::NFILE) => MountError::Descriptors,
        _ => MountError::System { path, reason: error },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_looked_at() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("empty")).expect("a directory");
        std::fs::create_dir(at("full")).expect("a directory");
        std::fs::write(at("full/file"), "").expect("a file");
        std::os::unix::fs::symlink("empty", at("link")).expect("a link");
        for (name, nonempty, words) in [
            ("none", false, "does not exist"),
            ("full/file", true, "is not a directory"),
            ("full/file/x", true, "is not a directory"),
            ("full", false, "is not empty"),
        ] {
            let error = prepare(&at(name), OUR_KIND, nonempty).expect_err(name).to_string();
            assert!(error.contains(words) && error.contains(name), "{name}: {error}");
        }
        prepare(&at("full"), OUR_KIND, true).expect("it was asked for");
        prepare(&at("empty"), OUR_KIND, false).expect("an empty directory");
        let place = prepare(&at("link"), OUR_KIND, false).expect("a link to an empty directory");
        assert_eq!(place.path, at("empty").canonicalize().expect("it exists"));
    }
}
