//! Where the bytes of a file are in packs, run by run.

use std::ops::Range;

use crate::format::chunk::CHUNK_BYTES;
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Checked, Flaw};

/// What one piece's entry takes, in bytes: its first block's number in the address space of the image.
pub(crate) const ENTRY_BYTES: usize = 4;

/// The places of the pieces of a file that are not all in one run. Nothing of them was looked at yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkIndex<'a> {
    pub(crate) packs: &'a [PackRef],
    /// For each piece its first block's number.
    pub(crate) index: &'a [u8],
    /// Where that is in the image.
    pub(crate) at: u64,
}

impl ChunkIndex<'_> {
    /// The pack of a piece, and where it begins there, in bytes.
    fn place(&self, piece: u64, bytes: u64) -> Checked<(usize, u64)> {
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

/// A part of a file that is in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which of [`crate::Image::packs`].
    pub pack: usize,
    /// Where it begins there, in bytes.
    pub at: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// The runs of a part of a file.
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    data: Data<'a>,
    /// The file's length, in bytes.
    bytes: u64,
    /// What is left of the part.
    left: Range<u64>,
    /// Whether neighbouring pieces are one run.
    merges: bool,
}

impl<'a> Data<'a> {
    /// The runs in which a part of a file is that has so many bytes; none of what is not in packs. A flaw is the last thing that comes.
    pub fn runs(self, bytes: u64, part: Range<u64>) -> Runs<'a> {
        Runs { data: self, bytes, left: part.start..part.end.min(bytes), merges: true }
    }

    /// The pieces of a file that has so many bytes, one by one.
    pub(crate) fn pieces(self, bytes: u64) -> Runs<'a> {
        Runs { merges: false, ..self.runs(bytes, 0..bytes) }
    }
}

impl Runs<'_> {
    fn place(&self, piece: u64, bytes: u64) -> Option<Checked<(usize, u64)>> {
        match self.data {
            Data::Near(..) | Data::Object { .. } => None,
            Data::Far { pack, block } => Some(Ok((pack, block * BLOCK_BYTES as u64 + piece * CHUNK_BYTES as u64))),
            Data::Chunks(pieces) => Some(pieces.place(piece, bytes)),
        }
    }

    /// How long a piece is.
    fn length(&self, piece: u64) -> u64 {
        (self.bytes - piece * CHUNK_BYTES as u64).min(CHUNK_BYTES as u64)
    }
}

impl Iterator for Runs<'_> {
    type Item = Checked<Run>;

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
            // What is wrong with it is told when its turn comes.
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

/// A pack that an image names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackRef {
    /// Its name.
    pub name: Digest,
    /// How many blocks it has.
    pub blocks: u64,
    /// Whether a workload needs all of it first, in the order in which it is there.
    pub ahead: bool,
    /// The first one's number in the address space of the image.
    pub(crate) first_block: u64,
}

/// Where the bytes of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data<'a> {
    /// In the image: whole blocks, and what is left behind the inode.
    Near(&'a [u8], &'a [u8]),
    /// In a pack.
    Far {
        /// Which of `Image::packs`.
        pack: usize,
        /// The first block there.
        block: u64,
    },
    /// In packs, piece by piece.
    Chunks(ChunkIndex<'a>),
    /// In an object store, as composefs has one.
    Object {
        /// Where, below its folder `objects`.
        path: Option<&'a [u8]>,
        /// What they are.
        digest: Option<Digest>,
    },
}

impl PackRef {
    pub(crate) fn end(&self) -> u64 {
        self.first_block + self.blocks
    }
}
