//! Looks up directories in the layers below an unpacked layer, as containerd does: each layer resolves its own symbolic links, and the
//! first layer with the name decides.

use std::ffi::CString;
use std::path::{Path, PathBuf};

use ferry_image::LowerDirectory;
use ferry_vfs::Timespec;
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, fgetxattr, flistxattr, fstat, openat, openat2};
use rustix::io::Errno;

use crate::error::{IoContext, Result};

/// The kernel's maximum size in bytes of a list of attribute names, and of a value.
const XATTR_BYTES_MAX: usize = 64 << 10;

/// The maximum number of times that a path is resolved again.
const TRIES_MAX: usize = 1000;

/// Returns a directory of layers, nearest first.
pub(super) fn find(layers: &[PathBuf], path: &Path) -> Result<Option<LowerDirectory>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    for layer in layers {
        let root = openat(CWD, layer, flags, Mode::empty()).doing("open", layer)?;
        let inside = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let mut tries = 0..TRIES_MAX;
        let opened = loop {
            // A rename or mount on this host happened while `..` was resolved.
            match openat2(&root, inside, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN) if tries.next().is_some() => {}
                opened => break opened,
            }
        };
        match opened {
            Ok(found) => return describe(&found).doing("inspect", layer.join(path)).map(Some),
            Err(Errno::NOENT) => {}
            // The name is not a directory there, such as a whiteout.
            Err(Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG) => return Ok(None),
            Err(error) => return Err(error).doing("open", layer.join(path)),
        }
    }
    Ok(None)
}

fn describe(directory: &OwnedFd) -> rustix::io::Result<LowerDirectory> {
    let found = fstat(directory)?;
    let mut names = vec![0; XATTR_BYTES_MAX];
    let count = match flistxattr(directory, &mut names[..]) {
        Err(Errno::NOTSUP) => 0,
        listed => listed?,
    };
    let mut xattrs = Vec::new();
    let mut value = vec![0; if count > 0 { XATTR_BYTES_MAX } else { 0 }];
    for name in names[..count].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let Ok(text) = CString::new(name) else { continue };
        match fgetxattr(directory, &text, &mut value[..]) {
            Err(Errno::NODATA) => {}
            read => xattrs.push((name.to_vec(), value[..read?].to_vec())),
        }
    }
    let nsec = u32::try_from(found.st_mtime_nsec).unwrap_or_default();
    Ok(LowerDirectory {
        mode: u16::try_from(found.st_mode & 0o7777).unwrap_or_default(),
        uid: found.st_uid,
        gid: found.st_gid,
        mtime: Timespec { sec: found.st_mtime, nsec },
        xattrs,
    })
}
