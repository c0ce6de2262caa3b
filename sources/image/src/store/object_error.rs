//! Why an object's bytes cannot be had.

use std::path::PathBuf;

use crate::format::digest::Digest;
use crate::format::error::Flaw;

/// Why an object's bytes cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// The image names a place where no object of this length begins.
    #[error("no object of {bytes} bytes begins at block {block} of the pack {pack}")]
    NoObject {
        /// The pack's name.
        pack: Digest,
        /// The block.
        block: u64,
        /// The length.
        bytes: u64,
    },
    /// The bytes are not what the digest says.
    #[error("the object {digest} in the pack {pack} is damaged")]
    Damaged {
        /// The pack's name.
        pack: Digest,
        /// The object.
        digest: Digest,
    },
    /// The image is damaged where it tells of them.
    #[error("the image is damaged: {0}")]
    Image(#[from] Flaw),
    /// The image does not tell where they are.
    #[error("the image does not say which object has its bytes")]
    NoPath,
    /// The image does not tell what they are.
    #[error("the image has no digest for the object {}, so nothing proves its bytes", path.display())]
    NoDigest {
        /// The object.
        path: PathBuf,
    },
    /// A pack is not what its index says.
    #[error("the pack {pack} has the fs-verity digest {found}, but its index names {wanted}: one of both is wrong")]
    Sum {
        /// The pack's name.
        pack: Digest,
        /// What the index names.
        wanted: Digest,
        /// What it has.
        found: Digest,
    },
    /// An object has another name than the one that others would find it by.
    #[error("the image has the object {digest} as {}, which is not its name", path.display())]
    Elsewhere {
        /// The name.
        path: PathBuf,
        /// The object.
        digest: Digest,
    },
    /// An object has another length than the file.
    #[error("the object {} is damaged: it has {found} bytes, not {bytes}", path.display())]
    Length {
        /// The object.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The file's.
        bytes: u64,
    },
    /// An object's bytes are not what the image says.
    #[error("the object {} is damaged: its bytes have the digest {digest}", path.display())]
    Changed {
        /// The object.
        path: PathBuf,
        /// What was found.
        digest: Digest,
    },
    /// An object cannot be read.
    #[error("cannot read the object {}: {source}", path.display())]
    Object {
        /// The object.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// An object that is not here cannot be fetched.
    #[error("cannot fetch the object {digest} of {pack}: {source}")]
    Fetch {
        /// The pack's name, or the digest of composefs's image.
        pack: Digest,
        /// The object.
        digest: Digest,
        /// Why not.
        source: std::io::Error,
    },
    /// What was fetched is not what the digest says.
    #[error("the object {digest} of {pack} came damaged, and was not kept")]
    Received {
        /// The pack's name, or the digest of composefs's image.
        pack: Digest,
        /// The object.
        digest: Digest,
    },
    /// An object that somebody else was fetching, without success.
    #[error("the object {digest} of {pack} could not be fetched just now")]
    Other {
        /// The pack's name, or the digest of composefs's image.
        pack: Digest,
        /// The object.
        digest: Digest,
    },
    /// What was fetched cannot be kept.
    #[error("cannot keep what was fetched of {pack}: {source}")]
    Keep {
        /// The pack's name, or the digest of composefs's image.
        pack: Digest,
        /// Why not.
        source: std::io::Error,
    },
    /// What is kept of a pack is bounded, so it has no lasting place.
    #[error("what is kept of the pack {pack} is bounded, so its objects have no place that lasts")]
    Passing {
        /// The pack's name.
        pack: Digest,
    },
    /// They cannot be read.
    #[error("cannot read the object {digest} in the pack {pack}: {source}")]
    Unreadable {
        /// The pack's name.
        pack: Digest,
        /// The object.
        digest: Digest,
        /// Why not.
        source: std::io::Error,
    },
}

impl ObjectError {
    /// Whether it says nothing of other objects: neither the server nor the store is to blame.
    pub(crate) fn is_of_object(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Received { .. } | Self::Unreadable { .. })
    }
}
