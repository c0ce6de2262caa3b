//! Chunks that are hashed and written together.

use std::sync::Arc;

use crate::format::chunk::{self, CHUNK_BYTES};
use crate::format::digest::{Algorithm, DIGEST_BYTES, Digest};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::verity::{BlockHash, hash_block};
use crate::store::places::StorePlaces;

/// The maximum size of a batch in bytes.
pub(crate) const BATCH_BYTES: usize = 1 << 20;
const _: () = assert!(BATCH_BYTES.is_multiple_of(CHUNK_BYTES));
/// A placeholder for a digest that is not yet computed.
const UNHASHED: Digest = Digest::new(Algorithm::Blake3, [0; DIGEST_BYTES]);

/// Consecutive block-aligned chunks, as in a pack.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Chunks that these packs do not have are also hashed for fs-verity, which takes longer than BLAKE3.
    hashes_unless_in: Option<Arc<StorePlaces>>,
    /// These hashes, of each block of the selected chunks, in order.
    leaves: Vec<BlockHash>,
    /// The buffer, and the offset of its first block that is aligned for direct I/O.
    memory: Vec<u8>,
    skew: usize,
    used: usize,
    chunks: Vec<Place>,
}

/// A chunk in a batch.
#[derive(Debug)]
struct Place {
    /// Its offset in bytes.
    at: usize,
    /// Its length in bytes.
    bytes: usize,
    /// Its digest.
    digest: Digest,
    /// The index of the hash of its first block, if it is hashed.
    leaf: Option<usize>,
}

/// A chunk for a pack.
#[derive(Debug)]
pub(crate) struct Chunk<'a> {
    /// Its bytes with padding.
    pub padded: &'a [u8],
    /// Its length without padding.
    pub bytes: usize,
    pub digest: Digest,
    /// The hash of each block for fs-verity, if selected.
    pub leaves: Option<&'a [BlockHash]>,
}

impl Batch {
    /// Creates an empty batch.
    pub(crate) fn new(hashes_unless_in: Option<Arc<StorePlaces>>) -> Self {
        let memory = vec![0; BATCH_BYTES + BLOCK_BYTES];
        let skew = memory.as_ptr().align_offset(BLOCK_BYTES).min(BLOCK_BYTES);
        Self { hashes_unless_in, leaves: Vec::new(), memory, skew, used: 0, chunks: Vec::new() }
    }

    /// Returns whether a chunk of this length fits.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        self.used + bytes.next_multiple_of(BLOCK_BYTES) <= BATCH_BYTES
    }

    /// Adds a chunk, which must fit, by `fill`; returns its digest.
    pub(crate) fn add<E>(&mut self, bytes: usize, fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Digest, E> {
        self.add_unhashed(bytes, fill)?;
        self.hash_from(self.chunks.len() - 1);
        Ok(self.chunks.last().map_or(UNHASHED, |chunk| chunk.digest))
    }

    /// As [`Self::add`], without the digest: call [`Self::hash`] before it is used.
    pub(crate) fn add_unhashed<E>(
        &mut self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (at, padded) = (self.used, bytes.next_multiple_of(BLOCK_BYTES));
        let place = &mut self.memory[self.skew + at..][..padded];
        let (chunk, padding) = place.split_at_mut(bytes);
        fill(chunk)?;
        padding.fill(0);
        self.chunks.push(Place { at, bytes, digest: UNHASHED, leaf: None });
        self.used += padded;
        Ok(())
    }

    /// Computes the digests of all chunks.
    pub(crate) fn hash(&mut self) {
        self.hash_from(0);
    }

    fn hash_from(&mut self, first: usize) {
        for chunk in &mut self.chunks[first..] {
            let padded = &self.memory[self.skew + chunk.at..][..chunk.bytes.next_multiple_of(BLOCK_BYTES)];
            chunk.digest = chunk::digest(&padded[..chunk.bytes]);
            if self.hashes_unless_in.as_ref().is_some_and(|packs| !packs.contains(&chunk.digest)) {
                chunk.leaf = Some(self.leaves.len());
                self.leaves.extend(padded.chunks(BLOCK_BYTES).map(hash_block));
            }
        }
    }

    pub(crate) fn chunks(&self) -> impl Iterator<Item = Chunk<'_>> {
        self.chunks.iter().map(move |place| {
            let padded = &self.memory[self.skew + place.at..][..place.bytes.next_multiple_of(BLOCK_BYTES)];
            let leaves = place.leaf.and_then(|leaf| self.leaves.get(leaf..leaf + padded.len() / BLOCK_BYTES));
            Chunk { padded, bytes: place.bytes, digest: place.digest, leaves }
        })
    }

    /// Returns the bytes of all chunks, as in a pack.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.memory[self.skew..self.skew + self.used]
    }

    /// Returns the number of chunks.
    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Removes all chunks.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.leaves.clear();
        self.chunks.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::format::index::Places;

    #[test]
    fn pieces_begin_at_blocks_and_end_with_zeros() {
        let known = chunk::digest(&[3; 4097]);
        let mut batch = Batch::new(Some(Arc::new(StorePlaces::known(Places::from([(known, (known, 0))])))));
        for round in 0..2 {
            for (byte, length) in [(1_u8, 1), (2, 4096), (3, 4097), (4, CHUNK_BYTES), (5, 0)] {
                let fill = |chunk: &mut [u8]| -> Result<(), ()> {
                    chunk.fill(byte + round);
                    Ok(())
                };
                batch.add(length, fill).expect("there is room");
            }
            let found: Vec<_> =
                batch.chunks().map(|chunk| (chunk.padded.to_vec(), chunk.bytes, chunk.digest)).collect();
            assert_eq!(found.iter().map(|(bytes, ..)| bytes.len() / 4096).collect::<Vec<_>>(), [1, 1, 2, 16, 0]);
            for ((bytes, length, name), byte) in found.iter().zip(1 + round..) {
                let (chunk, rest) = bytes.split_at(*length);
                assert!(chunk.iter().all(|found| *found == byte) && chunk::is_zero(rest));
                assert_eq!(*name, chunk::digest(chunk));
            }
            assert!(batch.chunks().all(|chunk| (chunk.padded.as_ptr() as usize).is_multiple_of(BLOCK_BYTES)));
            for Chunk { padded, digest, leaves, .. } in batch.chunks() {
                let hashes: Vec<_> = padded.chunks(BLOCK_BYTES).map(hash_block).collect();
                assert_eq!(leaves, (digest != known).then_some(&*hashes), "hashes of what is to be stored");
            }
            assert!(batch.has_room(BATCH_BYTES - 20 * 4096) && !batch.has_room(BATCH_BYTES - 20 * 4096 + 1));
            batch.clear();
        }
        assert_eq!(batch.len(), 0);
    }
}
