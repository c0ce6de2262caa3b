//! Mounts by the kernel's EROFS.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::{fs, io};

use ferry_image::{Image, InodeShare, configure_erofs, kernel_messages};
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statfs, statx};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsmount, fsopen, move_mount, unmount,
};

use crate::error::{Error, IoContext, Result};

/// `EROFS_SUPER_MAGIC_V1`
const MAGIC: u64 = 0xe0f5_e1e2;

/// Mounts an image on a directory, read-only. Set-user-id programs and device nodes take effect, as in the directories of layers: only
/// root can enter the directory above. With `share`, its files share memory with those of other images.
///
/// # Errors
///
/// The kernel has no EROFS, or refuses the image.
pub fn mount(image: &Image, path: &Path, packs: &[PathBuf], at: &Path, share: Option<&InodeShare>) -> Result<()> {
    let failed = |messages: &str, error: Errno| Error::Mount {
        path: path.into(),
        messages: messages.into(),
        error: error.into(),
    };
    let context = fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(|error| failed("no EROFS", error))?;
    configure_erofs(&context, image, path, packs, share).map_err(|error| failed(&messages(&context), error))?;
    let flags = FsMountFlags::FSMOUNT_CLOEXEC;
    let mounted = fsmount(context.as_fd(), flags, MountAttrFlags::MOUNT_ATTR_RDONLY);
    let mounted = mounted.map_err(|error| failed("fsmount", error))?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(mounted.as_fd(), "", CWD, at, flags).map_err(|error| failed("move_mount", error))
}

/// Returns the kernel's messages for a failed mount, or the operation that failed.
pub(crate) fn messages(context: &OwnedFd) -> String {
    kernel_messages(context).unwrap_or_else(|| "fsconfig".into())
}

/// Whether an EROFS is mounted on a directory.
///
/// # Errors
///
/// The directory cannot be inspected.
pub fn is_mounted(at: &Path) -> Result<bool> {
    let is_erofs = || statfs(at).is_ok_and(|found| u64::try_from(found.f_type) == Ok(MAGIC));
    Ok(is_mount_point(at)? && is_erofs())
}

/// Whether the mount with this number is one of EROFS, without a request to a server.
///
/// # Errors
///
/// The table of mounts cannot be read.
pub fn is_erofs(mount: u64) -> Result<bool> {
    const TABLE: &str = "/proc/self/mountinfo";
    let table = fs::read(TABLE).doing("read", Path::new(TABLE))?;
    let number = format!("{mount} ");
    let line = table.split(|byte| *byte == b'\n').find(|line| line.starts_with(number.as_bytes()));
    // Behind the optional fields, which a hyphen ends: proc_pid_mountinfo(5).
    Ok(line.is_some_and(|line| line.windows(9).any(|window| window == b" - erofs ")))
}

/// Whether something is mounted on a directory.
///
/// # Errors
///
/// The directory cannot be inspected.
pub fn is_mount_point(at: &Path) -> Result<bool> {
    match statx(CWD, at, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE) {
        Err(Errno::NOENT) => Ok(false),
        found => Ok(found.doing("inspect", at)?.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)),
    }
}

/// Whether the current file system of a layer is mounted at `at`, with a running server if it has one.
///
/// # Errors
///
/// The mount point or the image cannot be inspected.
pub fn shows(at: &Path, layer: &Path) -> Result<bool> {
    // Attributes from the kernel's cache only, without a request to a server.
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    let found = match statx(CWD, at, flags, StatxFlags::TYPE) {
        Err(Errno::NOENT | Errno::NOTCONN | Errno::CONNABORTED) => return Ok(false),
        found => found.doing("inspect", at)?,
    };
    let layer = statx(CWD, layer, flags, StatxFlags::TYPE).doing("inspect", layer)?;
    let is_same = (found.stx_dev_major, found.stx_dev_minor) == (layer.stx_dev_major, layer.stx_dev_minor);
    Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) && is_same)
}

/// Unmounts a directory lazily, if something is mounted there: processes that use the mount keep it.
///
/// # Errors
///
/// The kernel refuses.
pub fn unmount_all(at: &Path) -> Result<()> {
    loop {
        match unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // No mount point, or no such directory.
            Err(Errno::INVAL | Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            Err(error) => return Err(io::Error::from(error)).doing("unmount", at),
        }
    }
}
