//! Mounts of images by the kernel's EROFS.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::mount::{fsconfig_create, fsconfig_set_flag, fsconfig_set_string};

use crate::format::image::Image;

/// Configures a read-only mount of an image in a context of `fsopen(2)` for EROFS. The image is read from `source`, its packs
/// from `devices`: files, or block devices before Linux 6.12. Unlike mount(2), which has room for about forty packs,
/// fsconfig(2) takes any number.
///
/// # Errors
///
/// Those of `fsconfig(2)`; [`kernel_messages`] are more precise.
pub fn configure_erofs(
    context: &OwnedFd,
    image: &Image,
    source: &Path,
    devices: &[impl AsRef<Path>],
) -> rustix::io::Result<()> {
    let fs = context.as_fd();
    fsconfig_set_string(fs, "source", source)?;
    fsconfig_set_flag(fs, "ro")?;
    // composefs images would be scanned for ACLs, and overlayfs reads none from them.
    if !image.is_composefs() && !image.may_have_acls() {
        fsconfig_set_flag(fs, "noacl")?;
    }
    for device in devices {
        fsconfig_set_string(fs, "device", device.as_ref())?;
    }
    fsconfig_create(fs)
}

/// Returns the kernel's messages for a failed mount of any type, which are more precise than the error number.
pub fn kernel_messages(context: &OwnedFd) -> Option<String> {
    let mut words = Vec::new();
    let mut line = [0; 4096];
    while let Ok(count @ 1..) = rustix::io::read(context, &mut line) {
        // Messages begin with a letter for their severity.
        words.push(String::from_utf8_lossy(line.get(2..count).unwrap_or_default()).trim_end().to_owned());
    }
    (!words.is_empty()).then(|| words.join("; "))
}
