//! Paths as mount options.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// The longest string that fsconfig(2) takes.
pub(super) const STRING_BYTES_MAX: usize = 255;

/// Escapes a path for overlayfs, which removes backslashes. Colons separate layers.
pub(super) fn escaped(path: &Path) -> OsString {
    let escape = |byte: &u8| match byte {
        b':' | b'\\' => vec![b'\\', *byte],
        _ => vec![*byte],
    };
    OsString::from_vec(path.as_os_str().as_bytes().iter().flat_map(escape).collect())
}

/// Reverses [`escaped`].
pub(super) fn unescaped(path: OsString) -> PathBuf {
    let mut bytes = path.as_bytes().iter();
    let next = || bytes.next().and_then(|byte| if *byte == b'\\' { bytes.next() } else { Some(byte) }).copied();
    OsString::from_vec(std::iter::from_fn(next).collect()).into()
}
