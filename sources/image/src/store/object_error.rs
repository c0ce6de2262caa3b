//! Why an object is unavailable.

use std::path::PathBuf;

use crate::format::digest::Digest;
use crate::format::error::Flaw;

/// Why an object is unavailable.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The image names a location where no object of this length begins.
    #[error("no object of {bytes} bytes begins at block {block} of the pack {pack}")]
    NoObject {
        /// The pack's name.
        pack: Digest,
        /// The block.
        block: u64,
        /// The length.
        bytes: u64,
    },
    /// The bytes do not have the digest.
    #[error("the object {digest} in the pack {pack} is damaged")]
    Damaged {
        /// The pack's name.
        pack: Digest,
        /// The object.
        digest: Digest,
    },
    /// The image is damaged.
    #[error("the image is damaged: {0}")]
    Image(Flaw),
    /// The image does not locate the object.
    #[error("the image does not say which object has its bytes")]
    NoPath,
    /// The image has no digest of the object.
    #[error("the image has no digest for the object {}, so nothing proves its bytes", path.display())]
    NoDigest {
        /// The object.
        path: PathBuf,
    },
    /// A pack does not match its index.
    #[error("the pack {pack} has the fs-verity digest {found}, but its index names {wanted}: one of both is wrong")]
    Sum {
        /// The pack's name.
        pack: Digest,
        /// The digest in the index.
        wanted: Digest,
        /// Its digest.
        found: Digest,
    },
    /// An object has another name than that of its digest.
    #[error("the image has the object {digest} as {}, which is not its name", path.display())]
    Elsewhere {
        /// The name.
        path: PathBuf,
        /// The object.
        digest: Digest,
    },
    /// An object and its file in the image differ in length.
    #[error("the object {} is damaged: it has {found} bytes, not {bytes}", path.display())]
    Length {
        /// The object.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The file's.
        bytes: u64,
    },
    /// An object's bytes have another digest than in the image.
    #[error("the object {} is damaged: its bytes have the digest {digest}", path.display())]
    Changed {
        /// The object.
        path: PathBuf,
        /// Its digest.
        digest: Digest,
    },
    /// An object cannot be read.
    #[error("cannot read the object {}: {reason}", path.display())]
    Object {
        /// The object.
        path: PathBuf,
        /// The cause.
        reason: std::io::Error,
    },
    /// A missing object cannot be fetched.
    #[error("cannot fetch the object {digest} of {pack}: {reason}")]
    Fetch {
        /// The pack's name, or the digest of composefs's image.
        pack: Digest,
        /// The object.
        digest: Digest,
        /// The cause.
        reason: std::io::Error,
    },
    /// A fetched object does not have its digest.
    #[error("the object {digest} of {pack} came damaged, and was not kept")]
    Received {
        /// The pack's name, or the digest of composefs's image.
        pack: Digest,
        /// The object.
        digest: Digest,
    },
    /// Another thread failed to fetch the object.
    #[error("the object {digest} of {pack} could not be fetched just now")]
    Other {
        /// The pack's name, or the digest of composefs's image.
        pack: Digest,
        /// The object.
        digest: Digest,
    },
    /// A fetched object cannot be stored.
    #[error("cannot keep what was fetched of {pack}: {reason}")]
    Keep {
        /// The pack's name, or the digest of composefs's image.
        pack: Digest,
        /// The cause.
        reason: std::io::Error,
    },
    /// A pack with a cache limit has no permanent location.
    #[error("the cache of the pack {pack} is limited, so its objects have no permanent file")]
    Passing {
        /// The pack's name.
        pack: Digest,
    },
    /// An object in a pack cannot be read.
    #[error("cannot read the object {digest} in the pack {pack}: {reason}")]
    Unreadable {
        /// The pack's name.
        pack: Digest,
        /// The object.
        digest: Digest,
        /// The cause.
        reason: std::io::Error,
    },
}

impl From<Flaw> for ObjectError {
    fn from(flaw: Flaw) -> Self {
        Self::Image(flaw)
    }
}

impl ObjectError {
    /// Returns whether it concerns this object only: neither the server nor the store is at fault.
    pub(crate) fn is_of_object(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Received { .. } | Self::Unreadable { .. })
    }
}
