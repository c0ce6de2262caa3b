//! The locations of a file's bytes in packs, as runs.

use std::ops::Range;

use crate::format::chunk::CHUNK_BYTES;
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Flaw, ImageResult};

/// The size of a chunk's index entry in bytes: the number of its first block in the address space of the image.
pub(crate) const ENTRY_BYTES: usize = 4;

/// The unverified locations of the chunks of a file that is not a single run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkIndex<'a> {
    pub(crate) packs: &'a [PackRef],
    /// The number of the first block of each chunk.
    pub(crate) index: &'a [u8],
    /// Its offset in the image.
    pub(crate) at: u64,
}

impl ChunkIndex<'_> {
    /// Returns the pack of a chunk, and its offset there.
    fn place(&self, piece: u64, bytes: u64) -> ImageResult<(usize, u64)> {
        let flaw = |what| Flaw { what, offset: self.at + piece * ENTRY_BYTES as u64 };
        let from = usize::try_from(piece).ok().and_then(|piece| piece.checked_mul(ENTRY_BYTES));
        let entry = from.and_then(|from| self.index.get(from..)?.first_chunk());
        let first = u64::from(u32::from_le_bytes(*entry.ok_or_else(|| flaw("a piece that is not there"))?));
        let pack = self.packs.iter().position(|pack| first >= pack.first_block && first < pack.end());
        let pack = pack.ok_or_else(|| flaw("a piece outside of all packs"))?;
        if bytes.div_ceil(BLOCK_BYTES as u64) > self.packs[pack].end() - first {
            return Err(flaw("a piece that ends outside of its pack"));
        }
        Ok((pack, (first - self.packs[pack].first_block) * BLOCK_BYTES as u64))
    }
}

/// A contiguous part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index in [`crate::Image::packs`].
    pub pack: usize,
    /// The offset there.
    pub at: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Iterates over the runs of a part of a file.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    data: Data<'a>,
    /// The file's length, in bytes.
    bytes: u64,
    /// The rest of the part.
    left: Range<u64>,
    /// Whether adjacent chunks form one run.
    merges: bool,
}

impl<'a> Data<'a> {
    /// Returns the runs of a part of a file of this length; none for bytes outside of packs. A flaw ends the iteration.
    pub fn runs(self, bytes: u64, part: Range<u64>) -> Runs<'a> {
        Runs { data: self, bytes, left: part.start..part.end.min(bytes), merges: true }
    }

    /// Returns the chunks of a file of this length, one by one.
    pub(crate) fn pieces(self, bytes: u64) -> Runs<'a> {
        Runs { merges: false, ..self.runs(bytes, 0..bytes) }
    }
}

impl Runs<'_> {
    fn place(&self, piece: u64, bytes: u64) -> Option<ImageResult<(usize, u64)>> {
        match self.data {
            Data::Near(..) | Data::Object { .. } => None,
            Data::Far { pack, block } => Some(Ok((pack, block * BLOCK_BYTES as u64 + piece * CHUNK_BYTES as u64))),
            Data::Chunks(pieces) => Some(pieces.place(piece, bytes)),
        }
    }

    /// Returns the length of a chunk.
    fn length(&self, piece: u64) -> u64 {
        (self.bytes - piece * CHUNK_BYTES as u64).min(CHUNK_BYTES as u64)
    }
}

impl Iterator for Runs<'_> {
    type Item = ImageResult<Run>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left.is_empty() {
            return None;
        }
        let whole = CHUNK_BYTES as u64;
        let from = self.left.start;
        let (piece, inside) = (from / whole, from % whole);
        let (pack, at) = match self.place(piece, self.length(piece))? {
            Ok(place) => place,
            Err(flaw) => {
                self.left = 0..0;
                return Some(Err(flaw));
            }
        };
        let mut end = (piece + 1) * whole;
        if matches!(self.data, Data::Far { .. }) && self.merges {
            end = self.left.end;
        }
        while self.merges && end < self.left.end {
            let next = end / whole;
            // A flaw is reported by the next iteration.
            if !matches!(self.place(next, self.length(next)), Some(Ok(place)) if place == (pack, at + end - piece * whole))
            {
                break;
            }
            end += whole;
        }
        let end = end.min(self.left.end);
        self.left.start = end;
        Some(Ok(Run { pack, at: at + inside, bytes: end - from }))
    }
}

/// A pack of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackRef {
    /// Its name.
    pub name: Digest,
    /// The number of its blocks.
    pub blocks: u64,
    /// Whether a workload needs all of it first, in its order.
    pub ahead: bool,
    /// The number of its first block in the address space of the image.
    pub(crate) first_block: u64,
}

/// Where the bytes of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data<'a> {
    /// In the image: whole blocks, and the rest after the inode.
    Near(&'a [u8], &'a [u8]),
    /// In a pack.
    Far {
        /// Index in `Image::packs`.
        pack: usize,
        /// The first block there.
        block: u64,
    },
    /// In packs, chunk by chunk.
    Chunks(ChunkIndex<'a>),
    /// In composefs's object store.
    Object {
        /// The path below its directory `objects`.
        path: Option<&'a [u8]>,
        /// The digest of the bytes.
        digest: Option<Digest>,
    },
}

impl PackRef {
    pub(crate) fn end(&self) -> u64 {
        self.first_block + self.blocks
    }
}
