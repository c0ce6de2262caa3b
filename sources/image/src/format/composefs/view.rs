//! How composefs uses extended attributes, and what users of an image see of them: what overlayfs would show.
//!
//! Source: Documentation/filesystems/overlayfs.rst of Linux ("Metadata only copy up", "fs-verity support", "Nesting overlayfs
//! mounts").

use crate::format::digest::{Algorithm, Digest};

/// What overlayfs keeps for itself.
pub(crate) const OVERLAY_PREFIX: &[u8] = b"trusted.overlay.";
/// An attribute of this name is shown as one of overlayfs, which a mount on top of the mount uses.
const ESCAPED_PREFIX: &[u8] = b"trusted.overlay.overlay.";
/// Where a file's bytes are, below the object store, with a slash first.
pub(crate) const REDIRECT: &[u8] = b"trusted.overlay.redirect";
/// Says that an inode has no bytes of its own, and what digest they have.
pub(crate) const METACOPY: &[u8] = b"trusted.overlay.metacopy";
/// Nothing of lower layers is to be seen in this directory.
pub(crate) const OPAQUE: &[u8] = b"trusted.overlay.opaque";
pub(crate) const WHITEOUT: &[u8] = b"trusted.overlay.whiteout";
pub(crate) const WHITEOUTS: &[u8] = b"trusted.overlay.whiteouts";
pub(crate) const USER_OPAQUE: &[u8] = b"user.overlay.opaque";
pub(crate) const USER_WHITEOUT: &[u8] = b"user.overlay.whiteout";
pub(crate) const USER_WHITEOUTS: &[u8] = b"user.overlay.whiteouts";
/// `struct ovl_metacopy` with a digest: version, length, flags, algorithm (`FS_VERITY_HASH_ALG_SHA256`).
const METACOPY_HEAD: [u8; 4] = [0, 36, 0, 1];

/// The name under which a name of overlayfs is kept.
pub(crate) fn escape(name: &[u8]) -> Vec<u8> {
    [ESCAPED_PREFIX, name.strip_prefix(OVERLAY_PREFIX).unwrap_or(name)].concat()
}

/// What users see of a name that is in an image; nothing of what is composefs's own.
pub(crate) fn shown(name: Vec<u8>) -> Option<Vec<u8>> {
    match name.strip_prefix(ESCAPED_PREFIX) {
        Some(rest) => Some([OVERLAY_PREFIX, rest].concat()),
        None if name.starts_with(OVERLAY_PREFIX) => None,
        None => Some(name),
    }
}

/// The value of [`METACOPY`].
pub(crate) fn metacopy(digest: Option<Digest>) -> Vec<u8> {
    digest.map_or_else(Vec::new, |digest| [&METACOPY_HEAD[..], digest.bytes()].concat())
}

/// The digest in a value of [`METACOPY`], which may have none; an error is a value that means nothing.
pub(crate) fn digest_of(metacopy: &[u8]) -> Result<Option<Digest>, ()> {
    match metacopy.split_first_chunk::<4>() {
        None if metacopy.is_empty() => Ok(None),
        Some((&METACOPY_HEAD, digest)) => {
            digest.try_into().map(|digest| Some(Digest::new(Algorithm::Verity, digest))).map_err(drop)
        }
        _ => Err(()),
    }
}

/// The largest file that a line may hold; mkcomposefs's limit.
pub(crate) const CONTENT_BYTES_MAX: usize = 5000;
