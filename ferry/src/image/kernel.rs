//! What this kernel offers for images, whichever image it is.

use std::fs::File;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::mount::{fsconfig_create, fsconfig_set_string};

use super::mount::context;
use super::watch;
use crate::paths::descriptor_path;

/// Checks that the kernel has a file system, which it may load, and that this user may mount it.
pub fn has(kind: &str) -> Result<()> {
    context(kind).map(drop)
}

/// Whether the kernel mounts EROFS from files; `false`: from block devices only, or not from files of these file systems. An error: it does
/// not mount EROFS.
pub fn erofs() -> Result<bool> {
    let context = || context("erofs");
    drop(context()?);
    let own = File::open("/proc/self/exe");
    // Neither is an image, so the kernel refuses them in any case.
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

/// Checks that the kernel can wait for bytes of an image that are not here yet.
pub fn waits() -> Result<()> {
    watch::is_possible()
}
