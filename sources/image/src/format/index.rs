//! The index of a pack: length and digest of each object.
//!
//! ```text
//! NAME.index   for each object its length (8 bytes, little-endian) and its BLAKE3 digest (32 bytes);
//!              then, in packs for fs-verity, 64 one bits and the pack's fs-verity digest (SHA-256, blocks of 4 KiB; 32 bytes)
//! ```
//!
//! NAME is the BLAKE3 digest of the index. The packs of containers' layers have other indexes
//! ([`crate::format::layer_index`]).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::format::chunk::{self, CHUNK_BYTES, ChunkState};
use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, Result};
use crate::format::layer_index::{self, LayerBlob, ParsedLayer};
use crate::format::object::{RECORD_BYTES, record};

pub use crate::format::object::Object;

/// The length in the last entry, which is the digest of the whole pack. No object is that long.
pub(crate) const WHOLE_PACK: u64 = u64::MAX;

/// A parsed index.
#[derive(Debug)]
pub struct Index {
    /// The pack's name.
    pub pack: Digest,
    /// First block, length and digest of each object, by block.
    pub objects: Vec<Object>,
    /// The number of the pack's blocks.
    pub blocks: u64,
    /// The fs-verity digest of the pack; older packs have none.
    pub verity: Option<Digest>,
    /// The blob of a container's layer that has the objects, compressed.
    pub layer: Option<LayerBlob>,
}

impl Index {
    /// Parses the index of a pack, and verifies it by the pack's name.
    pub(crate) fn of(store: &Path, pack: Digest, bytes: &[u8]) -> Result<Self> {
        let flawed = |reason: &str| Error::Pack { store: store.into(), pack, reason: reason.into() };
        if pack.algorithm().of(bytes) != pack || !bytes.len().is_multiple_of(RECORD_BYTES) {
            return Err(flawed("its index is damaged"));
        }
        if let Some(ParsedLayer { layer, objects, blocks }) = layer_index::parse(bytes).map_err(flawed)? {
            return Ok(Self { pack, objects, blocks, verity: None, layer: Some(layer) });
        }
        let mut objects = Vec::with_capacity(bytes.len() / RECORD_BYTES);
        let (mut block, mut verity) = (0_u64, None);
        for record in bytes.chunks_exact(RECORD_BYTES) {
            let (length, digest) = record.split_at(8);
            let bytes = length.try_into().map_or(0, u64::from_le_bytes);
            let digest = digest.try_into().unwrap_or_default();
            if verity.is_some() {
                return Err(flawed("its index goes on behind its end"));
            }
            if bytes == WHOLE_PACK {
                verity = Some(Digest::new(Algorithm::Verity, digest));
                continue;
            }
            let digest = Digest::new(Algorithm::Blake3, digest);
            if bytes > CHUNK_BYTES as u64 {
                return Err(flawed(
                    "its index tells of larger pieces than there are: another version of ferry has made it",
                ));
            }
            objects.push(Object::aligned(block, bytes, digest));
            block = block
                .checked_add(bytes.div_ceil(BLOCK_BYTES as u64))
                .ok_or_else(|| flawed("the lengths in its index are too large"))?;
        }
        Ok(Self { pack, objects, blocks: block, verity, layer: None })
    }

    /// Returns the objects that begin at a block: an empty one begins where the next one does.
    pub(crate) fn objects_at(&self, block: u64) -> impl Iterator<Item = &Object> {
        let from = self.objects.partition_point(|object| object.block < block);
        self.objects[from..].iter().take_while(move |object| object.block == block)
    }

    /// Returns the objects that others may look for: zeros are had without a pack.
    pub(crate) fn listed(&self) -> impl Iterator<Item = &Object> {
        self.objects.iter().filter(|object| !object.is_zeros())
    }

    /// Encodes the index.
    pub fn to_bytes(&self) -> Vec<u8> {
        if let Some(layer) = &self.layer {
            return layer_index::write(layer, &self.objects);
        }
        let objects = self.objects.iter().map(|object| record(object.bytes, object.digest));
        objects.chain(self.verity.map(|digest| record(WHOLE_PACK, digest))).flatten().collect()
    }
}

/// The pack and the block of objects.
pub(crate) type Places = HashMap<Digest, (Digest, u64)>;

/// Parses the file name of a pack.
pub(crate) fn pack_name(hex: &[u8]) -> Option<Digest> {
    Digest::from_hex(Algorithm::Blake3, hex)
}

/// Reads an object with its padding at an offset of a file; returns whether both are correct.
pub(crate) fn read_object(file: &File, at: u64, object: &Object, memory: &mut Vec<u8>) -> io::Result<bool> {
    look_at_object(file, at, object, memory).map(|found| found == ChunkState::Sound)
}

/// Reads an object with its padding at an offset of a file; returns its state.
pub(crate) fn look_at_object(file: &File, at: u64, object: &Object, memory: &mut Vec<u8>) -> io::Result<ChunkState> {
    let lengths = usize::try_from(object.bytes).ok().zip(usize::try_from(object.padded()).ok());
    let (bytes, padded) = lengths.ok_or(io::ErrorKind::OutOfMemory)?;
    memory.resize(padded, 0);
    file.read_exact_at(memory, at)?;
    let (found, padding) = memory.split_at(bytes);
    Ok(match (object.proves(found), chunk::is_zero(padding)) {
        (true, true) => ChunkState::Sound,
        (true, false) => ChunkState::Padding,
        (false, _) => ChunkState::Damaged,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::chunk;

    /// Entries of objects, and one of a whole pack, in any order; and some bytes that may be too many.
    fn entries() -> impl Strategy<Value = Vec<u8>> {
        let length = prop_oneof![0..=CHUNK_BYTES as u64, Just(WHOLE_PACK), Just(CHUNK_BYTES as u64 + 1), any::<u64>()];
        let entry =
            (length, any::<[u8; 32]>()).prop_map(|(length, digest)| [&length.to_le_bytes()[..], &digest].concat());
        let likely = (0..=CHUNK_BYTES as u64, any::<[u8; 32]>());
        let likely = likely.prop_map(|(length, digest)| [&length.to_le_bytes()[..], &digest].concat());
        let entries = prop::collection::vec(prop_oneof![9 => likely, 1 => entry], 0..20);
        (entries, prop_oneof![9 => Just(0), 1 => 0_usize..40]).prop_map(|(entries, more)| {
            let mut bytes = entries.concat();
            bytes.extend(std::iter::repeat_n(0, more));
            bytes
        })
    }

    fn index_of(bytes: &[u8]) -> Result<Index> {
        Index::of(Path::new("store"), Algorithm::Blake3.of(bytes), bytes)
    }

    proptest! {
        #[test]
        fn indexes_are_read_as_they_are_written_or_refused(bytes in entries()) {
            if let Ok(index) = index_of(&bytes) {
                prop_assert_eq!(index.to_bytes(), &bytes[..]);
                prop_assert_eq!(index.objects.len() + usize::from(index.verity.is_some()), bytes.len() / RECORD_BYTES);
                prop_assert_eq!(index.blocks, index.objects.iter().map(Object::blocks).sum::<u64>());
            }
        }
    }

    #[test]
    fn the_digest_of_the_whole_pack_is_the_last_entry_and_the_only_one() {
        let (object, whole) = (record(5000, chunk::digest(b"x")), record(WHOLE_PACK, Algorithm::Verity.of(b"x")));
        let index = index_of(&[object, whole].concat()).expect("it is right");
        assert_eq!((index.blocks, index.verity), (2, Some(Algorithm::Verity.of(b"x"))));
        assert_eq!(index_of(&object).expect("it is right").verity, None);
        for wrong in [[whole, object], [whole, whole]] {
            let error = index_of(&wrong.concat()).expect_err("something follows the end").to_string();
            assert!(error.contains("goes on behind its end"), "{error}");
        }
    }
}
