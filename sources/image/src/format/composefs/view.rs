//! How composefs uses extended attributes, and which ones users of an image see: those that overlayfs would show.
//!
//! Source: Documentation/filesystems/overlayfs.rst of Linux ("Metadata only copy up", "fs-verity support", "Nesting
//! overlayfs mounts").

use crate::format::digest::{Algorithm, Digest};

/// The prefix of overlayfs's own attributes.
pub(crate) const OVERLAY_PREFIX: &[u8] = b"trusted.overlay.";
/// The prefix of escaped attributes: they appear as overlayfs's own, for a nested mount.
const ESCAPED_PREFIX: &[u8] = b"trusted.overlay.overlay.";
/// The location of a file's bytes in the object store, with a leading slash.
pub(crate) const REDIRECT: &[u8] = b"trusted.overlay.redirect";
/// Marks an inode without bytes of its own, with their digest.
pub(crate) const METACOPY: &[u8] = b"trusted.overlay.metacopy";
/// Lower layers are hidden in this directory.
pub(crate) const OPAQUE: &[u8] = b"trusted.overlay.opaque";
pub(crate) const WHITEOUT: &[u8] = b"trusted.overlay.whiteout";
pub(crate) const WHITEOUTS: &[u8] = b"trusted.overlay.whiteouts";
pub(crate) const USER_OPAQUE: &[u8] = b"user.overlay.opaque";
pub(crate) const USER_WHITEOUT: &[u8] = b"user.overlay.whiteout";
pub(crate) const USER_WHITEOUTS: &[u8] = b"user.overlay.whiteouts";
/// `struct ovl_metacopy` with a digest: version, length, flags, algorithm (`FS_VERITY_HASH_ALG_SHA256`).
const METACOPY_HEAD: [u8; 4] = [0, 36, 0, 1];

/// Returns the escaped form of one of overlayfs's names.
pub(crate) fn escape(name: &[u8]) -> Vec<u8> {
    [ESCAPED_PREFIX, name.strip_prefix(OVERLAY_PREFIX).unwrap_or(name)].concat()
}

/// Returns the name that users see of an image's attribute; `None` for composefs's own.
pub(crate) fn visible_name(name: Vec<u8>) -> Option<Vec<u8>> {
    match name.strip_prefix(ESCAPED_PREFIX) {
        Some(rest) => Some([OVERLAY_PREFIX, rest].concat()),
        None if name.starts_with(OVERLAY_PREFIX) => None,
        None => Some(name),
    }
}

/// Returns the value of [`METACOPY`].
pub(crate) fn metacopy(digest: Option<Digest>) -> Vec<u8> {
    digest.map_or_else(Vec::new, |digest| [&METACOPY_HEAD[..], digest.bytes()].concat())
}

/// Returns the digest in a value of [`METACOPY`], if it has one; an error for an invalid value.
pub(crate) fn digest_of(metacopy: &[u8]) -> Result<Option<Digest>, ()> {
    match metacopy.split_first_chunk::<4>() {
        None if metacopy.is_empty() => Ok(None),
        Some((&METACOPY_HEAD, digest)) => {
            digest.try_into().map(|digest| Some(Digest::new(Algorithm::Verity, digest))).map_err(drop)
        }
        _ => Err(()),
    }
}

/// mkcomposefs's maximum size of a file in a line.
pub(crate) const CONTENT_BYTES_MAX: usize = 5000;
