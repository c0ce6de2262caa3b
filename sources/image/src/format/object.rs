//! Objects of packs, and the entries of indexes.

use crate::format::chunk;
use crate::format::digest::{Algorithm, DIGEST_BYTES, Digest};
use crate::format::erofs::BLOCK_BYTES;

/// The size of an entry in bytes.
pub(crate) const RECORD_BYTES: usize = 40;
/// The digest of objects that consist of zeros.
pub(crate) const ZEROS: Digest = Digest::new(Algorithm::Sha256, [0; DIGEST_BYTES]);

/// An object: a file or a chunk in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// The first block in the pack.
    pub block: u64,
    /// Where it begins in that block, in bytes; not 0 only for chunks of a layer's file that precedes it.
    pub skip: u16,
    /// Zeros between its end and the next object.
    pub padding: u16,
    /// Length in bytes.
    pub bytes: u64,
    /// The digest of its bytes.
    pub digest: Digest,
}

impl Object {
    /// Creates an object that begins at a block, as the next one does.
    pub(crate) fn aligned(block: u64, bytes: u64, digest: Digest) -> Self {
        let rest = (BLOCK_BYTES as u64 - bytes % BLOCK_BYTES as u64) % BLOCK_BYTES as u64;
        Self { block, skip: 0, padding: u16::try_from(rest).unwrap_or_default(), bytes, digest }
    }

    /// Returns its offset in the pack, in bytes.
    pub(crate) fn begin(&self) -> u64 {
        self.block * BLOCK_BYTES as u64 + u64::from(self.skip)
    }

    /// Returns the offset of its end.
    pub(crate) fn end(&self) -> u64 {
        self.begin() + self.bytes
    }

    /// Returns the number of blocks that it touches.
    pub(crate) fn blocks(&self) -> u64 {
        (u64::from(self.skip) + self.bytes).div_ceil(BLOCK_BYTES as u64)
    }

    /// Returns its length with its padding, in bytes.
    pub(crate) fn padded(&self) -> u64 {
        self.bytes + u64::from(self.padding)
    }

    /// Returns whether it consists of zeros, and has no other digest.
    pub(crate) fn is_zeros(&self) -> bool {
        self.digest == ZEROS
    }

    /// Returns whether these are its bytes.
    pub(crate) fn proves(&self, bytes: &[u8]) -> bool {
        bytes.len() as u64 == self.bytes
            && if self.is_zeros() { chunk::is_zero(bytes) } else { self.digest.algorithm().of(bytes) == self.digest }
    }
}

/// Encodes an entry of an index.
pub(crate) fn record(bytes: u64, digest: Digest) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[..8].copy_from_slice(&bytes.to_le_bytes());
    record[8..].copy_from_slice(digest.bytes());
    record
}
