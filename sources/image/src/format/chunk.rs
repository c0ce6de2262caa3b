//! Pieces: what the layout flat has digests of, and keeps once.
//!
//! A file is cut every 64 KiB. Two versions of a large file share all pieces in which they are the same, a change costs one or two
//! pieces, and whoever reads a part of a file has no more to prove than the pieces that it lies in.

use std::io;

use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::{BLOCK_BITS, BLOCK_BYTES};

/// The size of a piece; only a file's last one is smaller.
pub(crate) const PIECE_BYTES: usize = 1 << PIECE_BITS;
/// The same as a power of two.
const PIECE_BITS: u8 = 16;
/// How many blocks a whole piece takes.
pub(crate) const PIECE_BLOCKS: u64 = (PIECE_BYTES / BLOCK_BYTES) as u64;
/// The format of EROFS's chunks of the same size: what a block is to be multiplied by, as a power of two.
pub(crate) const CHUNK_FORMAT: u32 = (PIECE_BITS - BLOCK_BITS) as u32;
const _: () = assert!(PIECE_BYTES.is_multiple_of(BLOCK_BYTES));

/// How many pieces a file of so many bytes has.
pub(crate) fn count(bytes: u64) -> u64 {
    bytes.div_ceil(PIECE_BYTES as u64)
}

/// The digest of a piece.
pub(crate) fn digest(bytes: &[u8]) -> Digest {
    Algorithm::Blake3.of(bytes)
}

/// Whether all bytes are zeros.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(BLOCK_BYTES).all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}

/// What is found where a piece should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The piece, and zeros up to its last block's end.
    Sound,
    /// The piece, but something else behind it in its last block.
    Padding,
    /// Something else.
    Damaged,
}

/// Reads a piece from a place in a file, with what fills its last block, and looks whether it is what its digest says.
pub(crate) fn look(
    read: impl FnOnce(&mut [u8]) -> io::Result<()>,
    bytes: u64,
    digest: Digest,
    memory: &mut Vec<u8>,
) -> io::Result<Found> {
    let bytes = usize::try_from(bytes).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
    memory.resize(bytes.next_multiple_of(BLOCK_BYTES), 0);
    read(memory)?;
    let (piece, padding) = memory.split_at(bytes);
    Ok(match (self::digest(piece) == digest, is_zero(padding)) {
        (true, true) => Found::Sound,
        (true, false) => Found::Padding,
        (false, _) => Found::Damaged,
    })
}
