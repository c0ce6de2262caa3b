//! Where a file's blocks are: runs of blocks by logical block.
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

/// Consecutive blocks of a file that are consecutive blocks of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The first block within the file.
    pub(crate) logical: u64,
    /// Where the first block is.
    pub(crate) block: u64,
    /// How many.
    pub(crate) count: u64,
    /// Whether there is data; else the blocks are only reserved and read as zeros.
    pub(crate) written: bool,
}

impl Piece {
    pub(crate) fn end(&self) -> u64 {
        self.logical + self.count
    }

    pub(crate) fn run(&self) -> Run {
        Run { block: self.block, count: self.count }
    }

    /// The part of this piece within a range that it overlaps.
    fn within(&self, range: &Range<u64>) -> Self {
        let logical = self.logical.max(range.start);
        let count = self.end().min(range.end) - logical;
        Self { logical, block: self.block + (logical - self.logical), count, written: self.written }
    }

    fn continues(&self, before: &Self) -> bool {
        before.end() == self.logical && before.block + before.count == self.block && before.written == self.written
    }
}

/// The blocks of one file. Pieces never overlap, and neighbours that can be one are one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extents {
    pieces: BTreeMap<u64, Piece>,
    blocks: u64,
}

impl Extents {
    /// Blocks in all.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The pieces within a range of logical blocks, cut to it.
    pub(crate) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Piece> + '_ {
        let first = self.pieces.range(..=range.start).next_back().map_or(range.start, |(logical, _)| *logical);
        let end = range.end.max(first);
        let pieces = self.pieces.range(first..end).map(|(_, piece)| *piece);
        pieces.filter(move |piece| piece.end() > range.start).map({
            let range = range.clone();
            move |piece| piece.within(&range)
        })
    }

    /// All pieces.
    pub(crate) fn all(&self) -> impl Iterator<Item = Piece> + '_ {
        self.pieces.values().copied()
    }

    /// The piece that holds a logical block, from that block on.
    pub(crate) fn at(&self, logical: u64) -> Option<Piece> {
        let (_, piece) = self.pieces.range(..=logical).next_back()?;
        (piece.end() > logical).then(|| piece.within(&(logical..piece.end())))
    }

    /// The first logical block at or after this one that has a piece.
    pub(crate) fn next_from(&self, logical: u64) -> Option<Piece> {
        self.at(logical).or_else(|| self.pieces.range(logical..).next().map(|(_, piece)| *piece))
    }

    /// The ranges of logical blocks that have no piece, within a range.
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

    /// Takes a range out; answers what was there.
    pub(crate) fn remove(&mut self, range: Range<u64>) -> Vec<Piece> {
        let removed: Vec<Piece> = self.within(range.clone()).collect();
        if removed.is_empty() {
            return removed;
        }
        let first = self.pieces.range(..=range.start).next_back().map_or(range.start, |(logical, _)| *logical);
        let touched: Vec<Piece> = self
            .pieces
            .range(first..range.end)
            .map(|(_, piece)| *piece)
            .filter(|piece| piece.end() > range.start)
            .collect();
        for piece in touched {
            self.pieces.remove(&piece.logical);
            if piece.logical < range.start {
                let left = piece.within(&(piece.logical..range.start));
                self.pieces.insert(left.logical, left);
            }
            if piece.end() > range.end {
                let right = piece.within(&(range.end..piece.end()));
                self.pieces.insert(right.logical, right);
            }
        }
        self.blocks -= removed.iter().map(|piece| piece.count).sum::<u64>();
        removed
    }

    /// Puts a piece where nothing is.
    pub(crate) fn insert(&mut self, mut piece: Piece) {
        debug_assert!(piece.count > 0 && self.within(piece.logical..piece.end()).next().is_none());
        self.blocks += piece.count;
        if let Some((_, before)) = self.pieces.range(..piece.logical).next_back()
            && piece.continues(before)
        {
            piece = Piece { count: before.count + piece.count, ..*before };
        }
        if let Some(after) = self.pieces.get(&piece.end()).copied()
            && after.continues(&piece)
        {
            self.pieces.remove(&after.logical);
            piece.count += after.count;
        }
        self.pieces.insert(piece.logical, piece);
    }

    /// Puts a piece, in place of whatever was there.
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
    fn neighbours_become_one_and_ranges_cut_pieces() {
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
