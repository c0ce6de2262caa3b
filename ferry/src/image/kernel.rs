//! The kernel's support for images in general.

use std::fs::File;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::mount::{fsconfig_create, fsconfig_set_string};

use super::mount::context;
use super::watch::{self, KernelMountError};
use crate::paths::descriptor_path;

/// Checks that the kernel has a file system, if necessary as a module, and that this user may mount it.
pub fn has(kind: &str) -> Result<()> {
    context(kind).map(drop)
}

/// Checks that this user can mount EROFS with any number of packs.
pub fn can_mount_erofs() -> Result<()> {
    let context = context("erofs")?;
    if fsconfig_set_string(context.as_fd(), "device", "/").is_err() {
        return KernelMountError::fail("this kernel's EROFS takes one device only (Linux 5.16 or later takes more)");
    }
    // Without a source it fails in any case. The permission is checked first: root of a user namespace lacks it.
    match fsconfig_create(context.as_fd()) {
        Err(Errno::PERM) => KernelMountError::fail("only root of the host can mount erofs"),
        _ => Ok(()),
    }
}

/// Whether the kernel mounts EROFS from this file; `false`: only from block devices.
pub fn mounts_from(file: &File) -> Result<bool> {
    let context = context("erofs")?;
    fsconfig_set_string(context.as_fd(), "source", descriptor_path(file)).context("erofs takes no source")?;
    // Any other error does not count: a file may be no image, and the packs of an image are missing here.
    Ok(fsconfig_create(context.as_fd()) != Err(Errno::NOTBLK))
}

/// Whether the kernel mounts EROFS from files; `false`: only from block devices, or not from files of these file systems. Returns an
/// error if it does not mount EROFS at all.
pub fn erofs() -> Result<bool> {
    can_mount_erofs()?;
    let own = File::open("/proc/self/exe");
    let others = ["/var/tmp", "/tmp"].map(tempfile::tempfile_in);
    for file in [own].into_iter().chain(others).flatten() {
        if mounts_from(&file)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Checks that the kernel can delay reads of missing data.
pub fn waits() -> Result<()> {
    watch::is_possible()
}
