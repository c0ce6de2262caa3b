//! The kernel's support for images in general.

use std::fs::File;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::mount::{fsconfig_create, fsconfig_set_string};

use super::mount::context;
use super::watch;
use crate::paths::descriptor_path;

/// Checks that the kernel has a file system, if necessary as a module, and that this user may mount it.
pub fn has(kind: &str) -> Result<()> {
    context(kind).map(drop)
}

/// Whether the kernel mounts EROFS from files; `false`: only from block devices, or not from files of these file systems. Returns an
/// error if it does not mount EROFS at all.
pub fn erofs() -> Result<bool> {
    let context = || context("erofs");
    drop(context()?);
    let own = File::open("/proc/self/exe");
    // Neither file is an image, so the kernel refuses both; the error tells why.
    let others = ["/var/tmp", "/tmp"].map(tempfile::tempfile_in);
    for file in [own].into_iter().chain(others).flatten() {
        let context = context()?;
        fsconfig_set_string(context.as_fd(), "source", descriptor_path(&file)).context("erofs takes no source")?;
        if fsconfig_create(context.as_fd()) != Err(Errno::NOTBLK) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Checks that the kernel can delay reads of missing data.
pub fn waits() -> Result<()> {
    watch::is_possible()
}
