//! Chunks: what the layout flat has digests of, and keeps once.
//!
//! A file is cut every 64 KiB. Two versions of a large file share all chunks in which they are the same, a change costs one or two
//! chunks, and whoever reads a part of a file has no more to prove than the chunks that it lies in.

use std::io;

use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::{BLOCK_BITS, BLOCK_BYTES};

/// The size of a chunk; only a file's last one is smaller.
pub(crate) const CHUNK_BYTES: usize = 1 << CHUNK_BITS;
/// The same as a power of two.
const CHUNK_BITS: u8 = 16;
/// How many blocks a whole chunk takes.
pub(crate) const CHUNK_BLOCKS: u64 = (CHUNK_BYTES / BLOCK_BYTES) as u64;
/// The format of EROFS's chunks of the same size: what a block is to be multiplied by, as a power of two.
pub(crate) const CHUNK_FORMAT: u32 = (CHUNK_BITS - BLOCK_BITS) as u32;
const _: () = assert!(CHUNK_BYTES.is_multiple_of(BLOCK_BYTES));

/// How many chunks a file of so many bytes has.
pub(crate) fn count(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK_BYTES as u64)
}

/// The digest of a chunk.
pub(crate) fn digest(bytes: &[u8]) -> Digest {
    Algorithm::Blake3.of(bytes)
}

/// Whether all bytes are zeros.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(BLOCK_BYTES).all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}

/// What is found where a chunk should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The chunk, and zeros up to its last block's end.
    Sound,
    /// The chunk, but something else behind it in its last block.
    Padding,
    /// Something else.
    Damaged,
}

/// Reads a chunk from a place in a file, with what fills its last block, and looks whether it is what its digest says.
pub(crate) fn look(
    read: impl FnOnce(&mut [u8]) -> io::Result<()>,
    bytes: u64,
    digest: Digest,
    memory: &mut Vec<u8>,
) -> io::Result<Found> {
    let bytes = usize::try_from(bytes).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
    memory.resize(bytes.next_multiple_of(BLOCK_BYTES), 0);
    read(memory)?;
    let (chunk, padding) = memory.split_at(bytes);
    Ok(match (self::digest(chunk) == digest, is_zero(padding)) {
        (true, true) => Found::Sound,
        (true, false) => Found::Padding,
        (false, _) => Found::Damaged,
    })
}
