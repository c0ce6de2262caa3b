//! fs-verity digests: the root of a Merkle tree over blocks of 4 KiB, and the length.
//!
//! Source: Documentation/filesystems/fsverity.rst of Linux ("Merkle tree", "fs-verity descriptor"). composefs names its
//! objects by the same digests.

use std::io::{self, Read};

use sha2::{Digest as _, Sha256};

use crate::format::digest::{Algorithm, DIGEST_BYTES as HASH_BYTES, Digest};

/// The size of hashed blocks in bytes.
const BLOCK_BYTES: usize = 4096;
/// `FS_VERITY_HASH_ALG_SHA256`.
const SHA256: u8 = 1;

/// Returns the digest and the length of a reader's bytes.
///
/// # Errors
///
/// The reader's.
pub(crate) fn of_reader(mut reader: impl Read) -> io::Result<(Digest, u64)> {
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; 64 * BLOCK_BYTES];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok((hasher.finish(), hasher.bytes)),
            Ok(count) => hasher.update(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The bytes below a hash of the second level: as many blocks as hashes fit into a block.
pub(crate) const CHUNK_BYTES: usize = BLOCK_BYTES / HASH_BYTES * BLOCK_BYTES;

/// A hash of the second level.
pub(crate) type ChunkHash = [u8; HASH_BYTES];

/// A hash of the first level.
pub(crate) type BlockHash = [u8; HASH_BYTES];

/// Hashes a whole block for the first level.
pub(crate) fn hash_block(block: &[u8]) -> BlockHash {
    Sha256::digest(block).into()
}

/// Hashes a whole chunk for the second level.
pub(crate) fn hash_chunk(chunk: &[u8]) -> ChunkHash {
    let mut hashes = Sha256::new();
    chunk.chunks(BLOCK_BYTES).for_each(|block| hashes.update(Sha256::digest(block)));
    hashes.finalize().into()
}

/// Hashes bytes incrementally.
#[derive(Debug, Default)]
pub struct Hasher {
    /// The incomplete block.
    block: Vec<u8>,
    /// For each level of the tree the hashes of the incomplete block, and the number of all hashes.
    levels: Vec<(Vec<u8>, u64)>,
    bytes: u64,
}

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if !self.block.is_empty() {
            let count = bytes.len().min(BLOCK_BYTES - self.block.len());
            let (now, later) = bytes.split_at(count);
            self.block.extend_from_slice(now);
            bytes = later;
            if self.block.len() < BLOCK_BYTES {
                return;
            }
            let hash = Sha256::digest(&self.block);
            self.block.clear();
            self.add(0, &hash);
        }
        let mut blocks = bytes.chunks_exact(BLOCK_BYTES);
        for block in &mut blocks {
            let hash = Sha256::digest(block);
            self.add(0, &hash);
        }
        self.block.extend_from_slice(blocks.remainder());
    }

    /// Adds a whole chunk hashed by [`hash_chunk`], before any other bytes; more bytes must follow.
    pub(crate) fn add_chunk(&mut self, hash: &ChunkHash) {
        if self.levels.is_empty() {
            self.levels.push((Vec::with_capacity(BLOCK_BYTES), 0));
        }
        self.levels[0].1 += (CHUNK_BYTES / BLOCK_BYTES) as u64;
        self.bytes += CHUNK_BYTES as u64;
        self.add(1, hash);
    }

    /// Adds a whole block hashed by [`hash_block`], after whole blocks.
    pub(crate) fn add_block(&mut self, hash: &BlockHash) {
        debug_assert!(self.block.is_empty(), "only whole blocks come before it");
        self.bytes += BLOCK_BYTES as u64;
        self.add(0, hash);
    }

    /// Adds a hash to a level; a complete block is hashed for the next level.
    fn add(&mut self, level: usize, hash: &[u8]) {
        if self.levels.len() == level {
            self.levels.push((Vec::with_capacity(BLOCK_BYTES), 0));
        }
        let (hashes, count) = &mut self.levels[level];
        if hashes.len() == BLOCK_BYTES {
            let above = Sha256::digest(&*hashes);
            hashes.clear();
            hashes.extend_from_slice(hash);
            *count += 1;
            self.add(level + 1, &above);
        } else {
            hashes.extend_from_slice(hash);
            *count += 1;
        }
    }

    /// Returns the digest of what was added.
    pub fn finish(&mut self) -> Digest {
        if !self.block.is_empty() {
            self.block.resize(BLOCK_BYTES, 0);
            let hash = Sha256::digest(&self.block);
            self.block.clear();
            self.add(0, &hash);
        }
        let mut root = [0; HASH_BYTES];
        let mut level = 0;
        while level < self.levels.len() {
            let (hashes, count) = &mut self.levels[level];
            if *count == 1 {
                root.copy_from_slice(&hashes[..HASH_BYTES]);
                break;
            }
            hashes.resize(BLOCK_BYTES, 0);
            let above = Sha256::digest(&*hashes);
            self.add(level + 1, &above);
            level += 1;
        }
        descriptor_digest(self.bytes, &root)
    }
}

/// Returns the hash of `struct fsverity_descriptor`.
fn descriptor_digest(bytes: u64, root: &[u8; HASH_BYTES]) -> Digest {
    let mut descriptor = [0; 256];
    // Version, algorithm, size of a block as a power of two.
    descriptor[..3].copy_from_slice(&[1, SHA256, 12]);
    descriptor[8..16].copy_from_slice(&bytes.to_le_bytes());
    descriptor[16..16 + HASH_BYTES].copy_from_slice(root);
    Digest::new(Algorithm::Verity, Sha256::digest(descriptor).into())
}

impl Algorithm {
    /// Returns the digest of bytes in memory.
    pub fn of(self, bytes: &[u8]) -> Digest {
        match self {
            Self::Blake3 | Self::Tree => Digest::new(self, blake3::hash(bytes).into()),
            Self::Sha256 => Digest::new(self, Sha256::digest(bytes).into()),
            Self::Verity => {
                let mut hasher = Hasher::default();
                hasher.update(bytes);
                hasher.finish()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The tree, level by level, as the document describes it.
    fn by_the_book(bytes: &[u8]) -> Digest {
        let hash_all = |bytes: &[u8]| -> Vec<u8> {
            let hash = |block: &[u8]| {
                let mut block = block.to_vec();
                block.resize(BLOCK_BYTES, 0);
                Sha256::digest(block)
            };
            bytes.chunks(BLOCK_BYTES).flat_map(hash).collect()
        };
        let mut level = hash_all(bytes);
        while level.len() > HASH_BYTES {
            level = hash_all(&level);
        }
        level.resize(HASH_BYTES, 0);
        descriptor_digest(bytes.len() as u64, &level.try_into().expect("one hash is left"))
    }

    /// As `fsverity digest` prints it for an empty file.
    #[test]
    fn the_digest_of_nothing_is_known() {
        let digest = "sha256:3d248ca542a24fc62d1c43b916eae5016878e2533c88238480b26128a1f1af95";
        assert_eq!(Algorithm::Verity.of(&[]).to_string(), digest);
    }

    #[test]
    fn trees_of_every_height() {
        for bytes in [0, 1, 4095, 4096, 4097, 8192, 128 * 4096 - 1, 128 * 4096, 128 * 4096 + 1, 129 * 4096, 300 * 4096]
        {
            let data: Vec<u8> = (0..bytes).map(|at: usize| ((at * 31) >> 4).to_le_bytes()[0]).collect();
            assert_eq!(Algorithm::Verity.of(&data), by_the_book(&data), "{bytes} bytes");
        }
        // Three levels: more than 128 * 128 blocks.
        let data = vec![7; (128 * 128 + 1) * 4096];
        assert_eq!(Algorithm::Verity.of(&data), by_the_book(&data));
    }

    /// The bytes that remain after whole chunks are never none.
    #[test]
    fn chunks_hashed_apart_make_the_same_digest() {
        for bytes in [1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES - 1, 3 * CHUNK_BYTES, 130 * CHUNK_BYTES + 5000] {
            let data: Vec<u8> = (0..bytes).map(|at: usize| ((at * 31) >> 5).to_le_bytes()[0]).collect();
            let (whole, rest) = data.split_at((bytes - 1) / CHUNK_BYTES * CHUNK_BYTES);
            let mut hasher = Hasher::default();
            whole.chunks(CHUNK_BYTES).for_each(|chunk| hasher.add_chunk(&hash_chunk(chunk)));
            hasher.update(rest);
            assert_eq!(hasher.finish(), Algorithm::Verity.of(&data), "{bytes} bytes");
        }
    }

    #[test]
    fn blocks_hashed_apart_make_the_same_digest() {
        for blocks in [1, 2, 127, 128, 129, 300] {
            let data: Vec<u8> = (0..blocks * BLOCK_BYTES).map(|at: usize| ((at * 31) >> 5).to_le_bytes()[0]).collect();
            let mut hasher = Hasher::default();
            data.chunks(BLOCK_BYTES).for_each(|block| hasher.add_block(&hash_block(block)));
            assert_eq!(hasher.finish(), by_the_book(&data), "{blocks} blocks");
        }
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(data in proptest::collection::vec(any::<u8>(), 0..20_000), cuts in proptest::collection::vec(0usize..20_000, 0..5)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(data.len())).collect();
            cuts.sort_unstable();
            let mut hasher = Hasher::default();
            let mut from = 0;
            for cut in cuts {
                hasher.update(&data[from..cut]);
                from = cut;
            }
            hasher.update(&data[from..]);
            prop_assert_eq!(hasher.finish(), by_the_book(&data));
        }
    }
}
