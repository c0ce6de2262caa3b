//! Pieces: what the layout flat has digests of, and keeps once.
//!
//! A file is cut every 64 KiB. Two versions of a large file share all pieces in which they are the same, a change costs one or two
//! pieces, and whoever reads a part of a file has no more to prove than the pieces that it lies in.

use std::io;

use crate::format::digest::{Algorithm, DIGEST_BYTES, Digest};
use crate::format::erofs::{BLOCK_BITS, BLOCK_BYTES};
use crate::format::verity::{BlockHash, hash_block};
use crate::store::packs::Leaves;

/// The size of a piece; only a file's last one is smaller.
pub(crate) const PIECE_BYTES: usize = 1 << PIECE_BITS;
/// The same as a power of two.
const PIECE_BITS: u8 = 16;
/// How many blocks a whole piece takes.
pub(crate) const PIECE_BLOCKS: u64 = (PIECE_BYTES / BLOCK_BYTES) as u64;
/// The format of EROFS's chunks of the same size: what a block is to be multiplied by, as a power of two.
pub(crate) const CHUNK_FORMAT: u32 = (PIECE_BITS - BLOCK_BITS) as u32;

/// How many bytes of pieces are hashed and written together.
pub(crate) const BATCH_BYTES: usize = 1 << 20;

const _: () = assert!(BATCH_BYTES.is_multiple_of(PIECE_BYTES) && PIECE_BYTES.is_multiple_of(BLOCK_BYTES));

/// What stands for a digest that is still to be made.
const UNHASHED: Digest = Digest::new(Algorithm::Blake3, [0; DIGEST_BYTES]);

/// How many pieces a file of so many bytes has.
pub(crate) fn count(bytes: u64) -> u64 {
    bytes.div_ceil(PIECE_BYTES as u64)
}

/// The digest of a piece.
pub(crate) fn digest(bytes: &[u8]) -> Digest {
    Algorithm::Blake3.of(bytes)
}

/// Pieces one after the other, each from a block's beginning on, as they are in a pack.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Which pieces are hashed for fs-verity, too.
    wanted: Leaves,
    /// Those hashes, of each block of pieces that have them, in their order.
    leaves: Vec<BlockHash>,
    /// Memory, and where a block begins in it that a disk can be given.
    memory: Vec<u8>,
    skew: usize,
    used: usize,
    pieces: Vec<Place>,
}

/// A piece in a batch.
#[derive(Debug)]
struct Place {
    /// Where it begins, in bytes.
    at: usize,
    /// How long it is.
    bytes: usize,
    /// How it is named.
    digest: Digest,
    /// Which of the hashes is that of its first block, if it has any.
    leaf: Option<usize>,
}

/// A piece as it is put into a pack.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    /// Its bytes, and what fills the last block.
    pub padded: &'a [u8],
    /// How many of them count.
    pub bytes: usize,
    pub digest: Digest,
    /// The hash of each block for fs-verity, if it was wanted.
    pub leaves: Option<&'a [BlockHash]>,
}

impl Batch {
    /// Without any. Pieces are hashed for fs-verity, too, where that is wanted.
    pub(crate) fn new(wanted: Leaves) -> Self {
        let memory = vec![0; BATCH_BYTES + BLOCK_BYTES];
        let skew = memory.as_ptr().align_offset(BLOCK_BYTES).min(BLOCK_BYTES);
        Self { wanted, leaves: Vec::new(), memory, skew, used: 0, pieces: Vec::new() }
    }

    /// Whether a piece of so many bytes finds room.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        self.used + bytes.next_multiple_of(BLOCK_BYTES) <= BATCH_BYTES
    }

    /// Adds a piece, which has room and is read by `fill`, into as many bytes as it has; answers its digest.
    pub(crate) fn add<E>(&mut self, bytes: usize, fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Digest, E> {
        self.add_unhashed(bytes, fill)?;
        self.hash_from(self.pieces.len() - 1);
        Ok(self.pieces.last().map_or(UNHASHED, |piece| piece.digest))
    }

    /// The same without its digest: [`Self::hash`] is to be called before anybody asks for it.
    pub(crate) fn add_unhashed<E>(
        &mut self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (at, padded) = (self.used, bytes.next_multiple_of(BLOCK_BYTES));
        let place = &mut self.memory[self.skew + at..][..padded];
        let (piece, padding) = place.split_at_mut(bytes);
        fill(piece)?;
        padding.fill(0);
        self.pieces.push(Place { at, bytes, digest: UNHASHED, leaf: None });
        self.used += padded;
        Ok(())
    }

    /// Makes the digests of all pieces.
    pub(crate) fn hash(&mut self) {
        self.hash_from(0);
    }

    fn hash_from(&mut self, first: usize) {
        for piece in &mut self.pieces[first..] {
            let padded = &self.memory[self.skew + piece.at..][..piece.bytes.next_multiple_of(BLOCK_BYTES)];
            piece.digest = self::digest(&padded[..piece.bytes]);
            if self.wanted.are_wanted(&piece.digest) {
                piece.leaf = Some(self.leaves.len());
                self.leaves.extend(padded.chunks(BLOCK_BYTES).map(hash_block));
            }
        }
    }

    /// The pieces.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        self.pieces.iter().map(move |place| {
            let padded = &self.memory[self.skew + place.at..][..place.bytes.next_multiple_of(BLOCK_BYTES)];
            let leaves = place.leaf.and_then(|leaf| self.leaves.get(leaf..leaf + padded.len() / BLOCK_BYTES));
            Piece { padded, bytes: place.bytes, digest: place.digest, leaves }
        })
    }

    /// All of them as they are in a pack.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.memory[self.skew..self.skew + self.used]
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Begins anew.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.leaves.clear();
        self.pieces.clear();
    }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::packs::Places;
    use crate::store::places::StorePlaces;

    #[test]
    fn pieces_begin_at_blocks_and_end_with_zeros() {
        let known = digest(&[3; 4097]);
        let mut batch = Batch::new(Leaves::OfNew(Arc::new(StorePlaces::known(Places::from([(known, (known, 0))])))));
        for round in 0..2 {
            for (byte, length) in [(1_u8, 1), (2, 4096), (3, 4097), (4, PIECE_BYTES), (5, 0)] {
                let fill = |piece: &mut [u8]| -> Result<(), ()> {
                    piece.fill(byte + round);
                    Ok(())
                };
                batch.add(length, fill).expect("there is room");
            }
            let found: Vec<_> =
                batch.pieces().map(|piece| (piece.padded.to_vec(), piece.bytes, piece.digest)).collect();
            assert_eq!(found.iter().map(|(bytes, ..)| bytes.len() / 4096).collect::<Vec<_>>(), [1, 1, 2, 16, 0]);
            for ((bytes, length, name), byte) in found.iter().zip(1 + round..) {
                let (piece, rest) = bytes.split_at(*length);
                assert!(piece.iter().all(|found| *found == byte) && is_zero(rest));
                assert_eq!(*name, digest(piece));
            }
            assert!(batch.pieces().all(|piece| (piece.padded.as_ptr() as usize).is_multiple_of(BLOCK_BYTES)));
            for Piece { padded, digest, leaves, .. } in batch.pieces() {
                let hashes: Vec<_> = padded.chunks(BLOCK_BYTES).map(hash_block).collect();
                assert_eq!(leaves, (digest != known).then_some(&*hashes), "hashes of what is to be stored");
            }
            assert!(batch.has_room(BATCH_BYTES - 20 * 4096) && !batch.has_room(BATCH_BYTES - 20 * 4096 + 1));
            batch.clear();
        }
        assert_eq!(batch.len(), 0);
    }
}
