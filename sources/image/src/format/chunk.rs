//! Chunks: the units of digests and deduplication in the flat layout.
//!
//! A file is split every 64 KiB. Two versions of a large file share all equal chunks, a change costs one or two chunks,
//! and a partial read verifies only the chunks that it touches.

use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::{BLOCK_BITS, BLOCK_BYTES};

/// The size of a chunk; only a file's last one may be smaller.
pub(crate) const CHUNK_BYTES: usize = 1 << CHUNK_BITS;
/// The same as a power of two.
const CHUNK_BITS: u8 = 16;
/// The number of blocks of a whole chunk.
pub(crate) const CHUNK_BLOCKS: u64 = (CHUNK_BYTES / BLOCK_BYTES) as u64;
/// The format of EROFS's chunks of this size: the factor of a block, as a power of two.
pub(crate) const CHUNK_FORMAT: u32 = (CHUNK_BITS - BLOCK_BITS) as u32;
const _: () = assert!(CHUNK_BYTES.is_multiple_of(BLOCK_BYTES));

/// Returns the number of chunks of a file of this length.
pub(crate) fn count(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK_BYTES as u64)
}

/// Returns the digest of a chunk.
pub(crate) fn digest(bytes: &[u8]) -> Digest {
    Algorithm::Blake3.of(bytes)
}

pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(BLOCK_BYTES).all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}

/// The state of stored bytes that should be a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkState {
    /// The chunk, and zeros up to the end of its last block.
    Sound,
    /// The chunk, but other bytes after it in its last block.
    Padding,
    /// Other bytes.
    Damaged,
}
