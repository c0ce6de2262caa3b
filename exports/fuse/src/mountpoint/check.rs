//! Checks of a mount point before mounting.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::table::MountEntry;
use super::{MountError, helper};

/// The file system type of ferry mounts in the mount table.
const OUR_KIND: &str = "fuse.ferry";
/// How long a live server may take to reply to one `stat`.
const PATIENCE: Duration = Duration::from_secs(5);
/// The delay between two requests to a server that is ending, which takes milliseconds.
const PAUSE: Duration = Duration::from_millis(10);
/// The maximum number of stacked dead mounts to remove; more would not be accidental.
const DEAD_MAX: usize = 64;

/// Requests a mount id that is never reused (Linux 6.8); older kernels return the other one.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// Identifies a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    id: u64,
    major: u32,
    /// With `major` the device number of the file system; for FUSE also its connection's number.
    pub(super) minor: u32,
}

impl Identity {
    /// Returns the mount of a path.
    pub(super) fn of(path: &Path) -> Result<Self, Errno> {
        let seen = statx_cached(path, MNT_ID_UNIQUE)?;
        Ok(Self { id: seen.stx_mnt_id, major: seen.stx_dev_major, minor: seen.stx_dev_minor })
    }

    /// Returns whether the mount has ended. `false` if the kernel cannot tell (before Linux 6.8).
    ///
    /// Unlike a look at the path this holds no reference to a mount that another process has made there since, whose
    /// `umount` would fail with `EBUSY` at that moment.
    pub(super) fn has_ended(self) -> bool {
        let request = MountRequest { bytes: MOUNT_REQUEST_BYTES, spare: 0, id: self.id, mask: STATMOUNT_MNT_BASIC };
        let mut reply = [0_u64; STATMOUNT_BYTES / size_of::<u64>()];
        // SAFETY: statmount(2) reads a request of the length that it begins with, and writes at most `STATMOUNT_BYTES`
        // to the reply. Both live until it returns.
        let outcome =
            unsafe { libc::syscall(SYS_STATMOUNT, &raw const request, reply.as_mut_ptr(), STATMOUNT_BYTES, 0_usize) };
        outcome < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOENT)
    }
}

/// The number of statmount(2) (Linux 6.8), the same on all architectures.
const SYS_STATMOUNT: libc::c_long = 457;
/// Requests the ids and the flags of a mount.
const STATMOUNT_MNT_BASIC: u64 = 0x2;
/// The length of `struct statmount` in bytes, without strings.
const STATMOUNT_BYTES: usize = 512;
/// `MNT_ID_REQ_SIZE_VER0`: the length of [`MountRequest`] in bytes.
const MOUNT_REQUEST_BYTES: u32 = 24;

/// `struct mnt_id_req` of `linux/mount.h`.
#[repr(C)]
struct MountRequest {
    bytes: u32,
    spare: u32,
    id: u64,
    mask: u64,
}

const _: () = assert!(size_of::<MountRequest>() == MOUNT_REQUEST_BYTES as usize);

/// Returns the id of the mount of a path, if it is a ferry mount; its server may have died.
pub(super) fn of_ferry(path: &Path) -> Option<u64> {
    let id = table_id(path).ok()?;
    MountEntry::find(id).is_some_and(|mounted| mounted.kind == OUR_KIND).then_some(id)
}

/// Returns whether a ferry mount is at exactly this path.
pub(super) fn is_mount_of_ferry(path: &Path) -> bool {
    let mounted = table_id(path).ok().and_then(MountEntry::find);
    mounted.is_some_and(|mounted| mounted.kind == OUR_KIND && mounted.at == path)
}

/// Returns the id in the mount table of the mount of a path.
fn table_id(path: &Path) -> Result<u64, Errno> {
    // Requests no field, because other FUSE mounts may refuse; the kernel always fills in the id.
    statx_cached(path, StatxFlags::empty()).map(|seen| seen.stx_mnt_id)
}

/// Queries a path without a request to any server, so it works for dead and hanging mounts.
fn statx_cached(path: &Path, mask: StatxFlags) -> Result<rustix::fs::Statx, Errno> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    rustix::fs::statx(rustix::fs::CWD, path, flags, mask)
}

/// A checked mount point.
#[derive(Debug)]
pub(super) struct Place {
    /// Absolute and without symbolic links.
    pub(super) path: PathBuf,
    /// The directory itself.
    pub(super) fd: OwnedFd,
}

/// Checks a mount point, and removes dead mounts of this kind from it.
pub(super) fn prepare(path: &Path, kind: &str, nonempty: bool) -> Result<Place, MountError> {
    // Follows every link without a request to the final mount.
    let path = &path.canonicalize().map_err(|error| reach_error(path, error))?;
    remove_dead(path, kind)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| reach_error(path, error.into()))?;
    if !nonempty && !is_empty(&fd).map_err(|error| reach_error(path, error.into()))? {
        return Err(MountError::NotEmpty(path.clone()));
    }
    Ok(Place { path: path.clone(), fd })
}

/// Unmounts dead mounts of ferry or of this kind.
pub(super) fn remove_dead(path: &Path, kind: &str) -> Result<(), MountError> {
    for _ in 0..DEAD_MAX {
        if !clear_dead(path, kind)? {
            break;
        }
    }
    Ok(())
}

/// Unmounts a dead mount of ferry or of this kind; returns whether there was one. Other mounts are errors.
fn clear_dead(path: &Path, kind: &str) -> Result<bool, MountError> {
    let id = table_id(path).map_err(|error| reach_error(path, error.into()))?;
    let above = path.parent().and_then(|parent| table_id(parent).ok());
    let mounted = if above == Some(id) { None } else { MountEntry::find(id) };
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

/// As [`ask`]; repeats the request while the server is ending.
fn ask_until_clear(path: &Path) -> Option<Result<(), Errno>> {
    let begin = Instant::now();
    loop {
        match ask(path) {
            // The kernel removes io_uring's rings after the process, and cancels their requests with this error.
            Some(Err(Errno::CANCELED)) if begin.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
}

/// Requests the root from the server of a mount; `None` if it does not reply. The waiting thread is then abandoned: the
/// kernel ends its wait with this process, or with the mount.
fn ask(path: &Path) -> Option<Result<(), Errno>> {
    let (answer, answered) = mpsc::channel();
    let path = path.to_owned();
    let asking = move || {
        let flags = AtFlags::STATX_FORCE_SYNC | AtFlags::SYMLINK_NOFOLLOW;
        let result = rustix::fs::statx(rustix::fs::CWD, &path, flags, StatxFlags::BASIC_STATS);
        // The receiver is gone if it took too long.
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

/// Returns whether a directory has no entries. A directory that may not be listed counts as empty.
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
        Some(Errno::NOENT) => MountError::Missing(path),
        Some(Errno::NOTDIR) => MountError::NotDirectory(path),
        Some(Errno::ACCESS | Errno::PERM) => MountError::Access { path, reason: error },
        Some(Errno::MFILE | Errno::NFILE) => MountError::Descriptors,
        _ => MountError::System { path, reason: error },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_checked() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
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
        prepare(&at("full"), OUR_KIND, true).expect("a nonempty directory is allowed");
        prepare(&at("empty"), OUR_KIND, false).expect("an empty directory");
        let place = prepare(&at("link"), OUR_KIND, false).expect("a link to an empty directory");
        assert_eq!(place.path, at("empty").canonicalize().expect("it exists"));
    }
}
