//! The location of a file's blocks: runs of blocks by logical block.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;

/// Consecutive blocks of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Run {
    /// The first block.
    pub(crate) block: u64,
    /// How many.
    pub(crate) count: u64,
}

/// Consecutive blocks of a file that are consecutive in a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The first block within the file.
    pub(crate) logical: u64,
    /// Where the first block is.
    pub(crate) block: u64,
    /// How many.
    pub(crate) count: u64,
    /// Whether there is data; otherwise the blocks are reserved and read as zeros.
    pub(crate) written: bool,
}

impl Piece {
    pub(crate) fn end(&self) -> u64 {
        self.logical + self.count
    }

    pub(crate) fn run(&self) -> Run {
        Run { block: self.block, count: self.count }
    }

    /// Returns the part of this piece within an overlapping range.
    fn within(&self, range: &Range<u64>) -> Self {
        let logical = self.logical.max(range.start);
        let count = self.end().min(range.end) - logical;
        Self { logical, block: self.block + (logical - self.logical), count, written: self.written }
    }

    fn continues(&self, before: &Self) -> bool {
        before.end() == self.logical && before.block + before.count == self.block && before.written == self.written
    }
}

/// Pieces by their first logical block. Nearly all files have at most one: a map per file would double its memory.
#[derive(Clone, Debug)]
enum Pieces {
    One(Option<Piece>),
    Many(BTreeMap<u64, Piece>),
}

impl Default for Pieces {
    fn default() -> Self {
        Self::One(None)
    }
}

impl PartialEq for Pieces {
    fn eq(&self, other: &Self) -> bool {
        self.all().eq(other.all())
    }
}

impl Eq for Pieces {}

impl Pieces {
    fn all(&self) -> impl Iterator<Item = Piece> + '_ {
        self.starting_in(0..u64::MAX)
    }

    /// Returns the pieces whose first block is in a range.
    fn starting_in(&self, range: Range<u64>) -> impl Iterator<Item = Piece> + '_ {
        let (one, many) = match self {
            Self::One(piece) => (piece.filter(|piece| range.contains(&piece.logical)), None),
            Self::Many(pieces) => (None, Some(pieces.range(range))),
        };
        one.into_iter().chain(many.into_iter().flatten().map(|(_, piece)| *piece))
    }

    /// Returns the last piece that begins at or before a block.
    fn last_up_to(&self, logical: u64) -> Option<Piece> {
        match self {
            Self::One(piece) => piece.filter(|piece| piece.logical <= logical),
            Self::Many(pieces) => pieces.range(..=logical).next_back().map(|(_, piece)| *piece),
        }
    }

    /// Returns the first piece that begins at or after a block.
    fn first_from(&self, logical: u64) -> Option<Piece> {
        self.starting_in(logical..u64::MAX).next()
    }

    fn insert(&mut self, piece: Piece) {
        match self {
            Self::One(Some(other)) if other.logical != piece.logical => {
                *self = Self::Many(BTreeMap::from([(other.logical, *other), (piece.logical, piece)]));
            }
            Self::One(one) => *one = Some(piece),
            Self::Many(pieces) => _ = pieces.insert(piece.logical, piece),
        }
    }

    fn remove(&mut self, logical: u64) {
        match self {
            Self::One(one) => *one = one.filter(|piece| piece.logical != logical),
            Self::Many(pieces) => {
                pieces.remove(&logical);
                if pieces.is_empty() {
                    *self = Self::default();
                }
            }
        }
    }
}

/// The blocks of one file. Pieces never overlap, and adjacent ones are merged where possible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extents {
    pieces: Pieces,
    blocks: u64,
}

impl Extents {
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the pieces within a range of logical blocks, cut to it.
    pub(crate) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Piece> + '_ {
        self.touched(range.clone()).map(move |piece| piece.within(&range))
    }

    /// Returns the pieces that overlap a range of logical blocks.
    fn touched(&self, range: Range<u64>) -> impl Iterator<Item = Piece> + '_ {
        let first = self.pieces.last_up_to(range.start).map_or(range.start, |piece| piece.logical);
        let pieces = self.pieces.starting_in(first..range.end.max(first));
        pieces.filter(move |piece| piece.end() > range.start)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Piece> + '_ {
        self.pieces.all()
    }

    /// Returns the piece with a logical block, from that block.
    pub(crate) fn at(&self, logical: u64) -> Option<Piece> {
        let piece = self.pieces.last_up_to(logical)?;
        (piece.end() > logical).then(|| piece.within(&(logical..piece.end())))
    }

    /// Returns the first logical block at or after this one that has a piece.
    pub(crate) fn next_from(&self, logical: u64) -> Option<Piece> {
        self.at(logical).or_else(|| self.pieces.first_from(logical))
    }

    /// Returns the ranges without a piece within a range of logical blocks.
    pub(crate) fn holes(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut holes = Vec::new();
        let mut from = range.start;
        for piece in self.within(range.clone()) {
            if piece.logical > from {
                holes.push(from..piece.logical);
            }
            from = piece.end();
        }
        if from < range.end {
            holes.push(from..range.end);
        }
        holes
    }

    /// Removes a range; returns its former pieces.
    pub(crate) fn remove(&mut self, range: Range<u64>) -> Vec<Piece> {
        let removed: Vec<Piece> = self.within(range.clone()).collect();
        if removed.is_empty() {
            return removed;
        }
        let touched: Vec<Piece> = self.touched(range.clone()).collect();
        for piece in touched {
            self.pieces.remove(piece.logical);
            if piece.logical < range.start {
                let left = piece.within(&(piece.logical..range.start));
                self.pieces.insert(left);
            }
            if piece.end() > range.end {
                let right = piece.within(&(range.end..piece.end()));
                self.pieces.insert(right);
            }
        }
        self.blocks -= removed.iter().map(|piece| piece.count).sum::<u64>();
        removed
    }

    /// Inserts a piece into a hole.
    pub(crate) fn insert(&mut self, mut piece: Piece) {
        debug_assert!(piece.count > 0 && self.within(piece.logical..piece.end()).next().is_none());
        self.blocks += piece.count;
        if let Some(before) = self.pieces.last_up_to(piece.logical)
            && piece.continues(&before)
        {
            piece = Piece { count: before.count + piece.count, ..before };
        }
        if let Some(after) = self.pieces.first_from(piece.end())
            && after.continues(&piece)
        {
            self.pieces.remove(after.logical);
            piece.count += after.count;
        }
        self.pieces.insert(piece);
    }

    /// Inserts a piece; returns the pieces that it replaces.
    pub(crate) fn replace(&mut self, piece: Piece) -> Vec<Piece> {
        let removed = self.remove(piece.logical..piece.end());
        self.insert(piece);
        removed
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "a test's numbers are small")]
mod tests {
    use super::*;

    fn piece(logical: u64, block: u64, count: u64) -> Piece {
        Piece { logical, block, count, written: true }
    }

    #[test]
    fn adjacent_pieces_are_merged_and_ranges_cut_pieces() {
        let mut extents = Extents::default();
        extents.insert(piece(0, 100, 2));
        extents.insert(piece(4, 104, 2));
        extents.insert(piece(2, 102, 2));
        assert_eq!(extents.all().collect::<Vec<_>>(), [piece(0, 100, 6)]);
        assert_eq!(extents.remove(1..3), [piece(1, 101, 2)]);
        assert_eq!(extents.all().collect::<Vec<_>>(), [piece(0, 100, 1), piece(3, 103, 3)]);
        assert_eq!(extents.holes(0..10), [1..3, 6..10]);
        assert_eq!((extents.at(4), extents.at(2)), (Some(piece(4, 104, 2)), None));
        assert_eq!(extents.next_from(1), Some(piece(3, 103, 3)));
        assert_eq!(extents.within(4..5).collect::<Vec<_>>(), [piece(4, 104, 1)]);
        assert_eq!(extents.blocks(), 4);
    }

    proptest::proptest! {
        #[test]
        fn agrees_with_an_array(steps in proptest::collection::vec((0u64..40, 1u64..12, 0u64..3), 1..60)) {
            let mut extents = Extents::default();
            let mut array = [None; 64];
            for (index, (logical, count, what)) in steps.into_iter().enumerate() {
                let range = logical..logical + count;
                if what == 0 {
                    extents.remove(range.clone());
                    range.for_each(|at| array[at as usize] = None);
                } else {
                    let new = Piece { logical, block: index as u64 * 100, count, written: what == 1 };
                    extents.replace(new);
                    range.for_each(|at| array[at as usize] = Some((new.block + at - logical, new.written)));
                }
                for (at, expected) in array.iter().enumerate() {
                    let found = extents.at(at as u64).map(|piece| (piece.block, piece.written));
                    proptest::prop_assert_eq!(found, *expected);
                }
                proptest::prop_assert_eq!(extents.blocks() as usize, array.iter().flatten().count());
            }
        }
    }
}
