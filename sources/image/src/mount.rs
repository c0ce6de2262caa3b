//! Mounts of images by the kernel's EROFS.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, fstat, openat};
use rustix::mount::{FsOpenFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsopen};

use crate::format::error::{Error, IoContext, Result};
use crate::format::image::Image;
use crate::store::layout::packs_directory;
use crate::store::packs::Store;

/// The longest string that fsconfig(2) takes.
const STRING_BYTES_MAX: usize = 255;

/// Permission to mount an image so that its files share the page cache with the same files of other images of its store: its
/// identities were verified.
#[derive(Clone, Debug)]
pub struct InodeShare {
    /// The kernel shares within a domain.
    domain: String,
}

impl InodeShare {
    /// Verifies the identities in the image of this file. No file of the image is read. Returns `None` for an image without identities.
    ///
    /// # Errors
    ///
    /// An identity is not that of a file's contents; the store cannot be inspected.
    pub fn of(image: &Image, path: &Path, store: &Store) -> Result<Option<Self>> {
        if !image.has_identities() {
            return Ok(None);
        }
        image.verify_identities().map_err(|reason| Error::Invalid { path: path.into(), reason })?;
        let packs = packs_directory(store.directory());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let found = openat(CWD, &packs, flags, Mode::empty()).and_then(fstat).doing("inspect", packs)?;
        Ok(Some(Self { domain: format!("ferry-{:x}-{:x}", found.st_dev, found.st_ino) }))
    }

    /// Shares only with mounts of which the kernel verifies each read, as it does of this one: pages of others may not be verified.
    #[must_use]
    pub fn verified(mut self) -> Self {
        self.domain += "-verity";
        self
    }

    fn configure(&self, context: &OwnedFd) -> rustix::io::Result<()> {
        fsconfig_set_string(context.as_fd(), "domain_id", &*self.domain)?;
        fsconfig_set_flag(context.as_fd(), "inode_share")
    }

    /// Returns why this kernel's EROFS cannot share the page cache between mounts, if it cannot.
    pub fn missing() -> Option<String> {
        let context = match fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC) {
            Ok(context) => context,
            Err(error) => return Some(format!("no mount of EROFS can be made here: {error}")),
        };
        let tried = Self { domain: "ferry".into() }.configure(&context);
        // A kernel without it may accept the option, and say that it does nothing.
        match (tried, kernel_messages(&context)) {
            (Ok(()), None) => None,
            (_, Some(messages)) => Some(messages),
            (Err(error), None) => Some(error.to_string()),
        }
    }
}

/// Configures a read-only mount of an image in a context of `fsopen(2)` for EROFS. The image is read from `source`, its packs
/// from `devices`: files, or block devices before Linux 6.12. Unlike mount(2), which has room for about forty packs,
/// fsconfig(2) takes any number. With `share`, equal files of such mounts have one page cache (Linux 7.0).
///
/// # Errors
///
/// Those of `fsconfig(2)`; [`kernel_messages`] are more precise.
pub fn configure_erofs(
    context: &OwnedFd,
    image: &Image,
    source: &Path,
    devices: &[impl AsRef<Path>],
    share: Option<&InodeShare>,
) -> rustix::io::Result<()> {
    let fs = context.as_fd();
    // Kept open until the kernel has opened them.
    let mut opened = Vec::new();
    opened.extend(set_path(context, "source", source)?);
    fsconfig_set_flag(fs, "ro")?;
    if let Some(share) = share {
        share.configure(context)?;
    }
    // composefs images would be scanned for ACLs, and overlayfs reads none from them.
    if !image.is_composefs() && !image.may_have_acls() {
        fsconfig_set_flag(fs, "noacl")?;
    }
    for device in devices {
        opened.extend(set_path(context, "device", device.as_ref())?);
    }
    fsconfig_create(fs)
}

/// Sets an option to a path. If that is too long, sets it to the path of a descriptor, which is returned.
fn set_path(context: &OwnedFd, key: &str, path: &Path) -> rustix::io::Result<Option<OwnedFd>> {
    if path.as_os_str().len() <= STRING_BYTES_MAX {
        return fsconfig_set_string(context.as_fd(), key, path).map(|()| None);
    }
    let file = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    fsconfig_set_string(context.as_fd(), key, format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok(Some(file))
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
