//! The expected contents of each block of a disk, for verified loads.
//!
//! Every write of a block is another generation of it, and its data tell generation and place. A block is never in
//! flight twice. So a write that was acknowledged and lost, one that was carried out once more after a later one, and
//! one that is torn all show when everything is read back.

use super::pattern::{self, Cursor};

/// Keeps the data of one generation away from those of the others for disks of up to 8 TiB.
const GENERATION_SHIFT: u32 = 40;

/// The generations of a part of a disk.
#[derive(Debug)]
pub(super) struct Ledger {
    base: u64,
    block: u64,
    generations: Vec<u32>,
    in_flight: Vec<bool>,
}

/// What a block that is not as it must be holds instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    /// The write before the last one: the last is lost, or the one before was repeated.
    Older,
    /// Nothing that was ever written there as a whole.
    Other,
}

impl Ledger {
    /// Of lane `lane` out of `lanes`, which share a disk of `size` bytes; each has a part of its own.
    pub(super) fn new(size: u64, block: u64, lane: usize, lanes: usize) -> Self {
        let blocks = Self::blocks(size, block, lanes);
        let count = usize::try_from(blocks).unwrap_or(0);
        let base = lane as u64 * blocks * block;
        Self { base, block, generations: vec![0; count], in_flight: vec![false; count] }
    }

    /// How many blocks each lane has.
    pub(super) fn blocks(size: u64, block: u64, lanes: usize) -> u64 {
        size / block.max(1) / lanes.max(1) as u64
    }

    /// The offsets of this part.
    pub(super) fn cursor(&self, random: bool, lane: usize) -> Cursor {
        Cursor::new(self.generations.len() as u64 * self.block, self.block, random, lane, 1)
    }

    /// The next offset that is not in flight; it is from now on. There must be one.
    pub(super) fn begin(&mut self, cursor: &mut Cursor) -> u64 {
        loop {
            let within = cursor.next();
            let index = usize::try_from(within / self.block).unwrap_or(0);
            if !std::mem::replace(&mut self.in_flight[index], true) {
                return self.base + within;
            }
        }
    }

    /// The request at `offset` is over.
    pub(super) fn end(&mut self, offset: u64, written: bool) {
        let index = self.index(offset);
        self.in_flight[index] = false;
        self.generations[index] += u32::from(written);
    }

    /// The data of the next write at `offset`.
    pub(super) fn fill_next(&self, bytes: &mut [u8], offset: u64) {
        pattern::fill(bytes, offset, seed(self.generations[self.index(offset)] + 1));
    }

    /// Whether `bytes`, whole blocks, are what was last written at `offset`; otherwise the first that are not.
    pub(super) fn check(&self, bytes: &[u8], offset: u64) -> Result<(), (u64, Flaw)> {
        let size = usize::try_from(self.block).unwrap_or(usize::MAX);
        for (block, at) in bytes.chunks(size).zip((offset..).step_by(size)) {
            let generation = self.generations[self.index(at)];
            if pattern::matches(block, at, seed(generation)) {
                continue;
            }
            let older = generation > 0 && pattern::matches(block, at, seed(generation - 1));
            return Err((at, if older { Flaw::Older } else { Flaw::Other }));
        }
        Ok(())
    }

    /// The unit.
    pub(super) fn block_bytes(&self) -> u64 {
        self.block
    }

    /// The part that it is about.
    pub(super) fn range(&self) -> std::ops::Range<u64> {
        self.base..self.base + self.generations.len() as u64 * self.block
    }

    /// How many blocks were written.
    pub(super) fn written(&self) -> u64 {
        self.generations.iter().filter(|generation| **generation > 0).count() as u64
    }

    fn index(&self, offset: u64) -> usize {
        usize::try_from((offset - self.base) / self.block).unwrap_or(usize::MAX)
    }
}

/// The seed of the data of a generation; 0 is what the disk is filled with at first.
pub(super) fn seed(generation: u32) -> u64 {
    pattern::SEED_INITIAL + (u64::from(generation) << GENERATION_SHIFT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_repeated_and_torn_writes_show() {
        let mut ledger = Ledger::new(64 * 512, 512, 1, 2);
        assert_eq!(ledger.range(), 32 * 512..64 * 512);
        let at = ledger.range().start + 512;
        let block = |generation| {
            let mut bytes = vec![0; 512];
            pattern::fill(&mut bytes, at, seed(generation));
            bytes
        };
        assert_eq!(ledger.check(&block(0), at), Ok(()));
        let mut next = vec![0; 512];
        ledger.fill_next(&mut next, at);
        assert_eq!(next, block(1));
        ledger.end(at, true);
        assert_eq!((ledger.check(&block(1), at), ledger.written()), (Ok(()), 1));
        assert_eq!(ledger.check(&block(0), at), Err((at, Flaw::Older)));
        let torn = [&block(1)[..256], &block(2)[256..]].concat();
        assert_eq!(ledger.check(&torn, at), Err((at, Flaw::Other)));
    }

    #[test]
    fn no_block_is_in_flight_twice() {
        let mut ledger = Ledger::new(8 * 512, 512, 0, 1);
        let mut cursor = ledger.cursor(true, 0);
        let mut offsets: Vec<u64> = (0..8).map(|_| ledger.begin(&mut cursor)).collect();
        offsets.sort_unstable();
        assert_eq!(offsets, (0..8).map(|n| n * 512).collect::<Vec<_>>());
        ledger.end(1024, false);
        assert_eq!(ledger.begin(&mut cursor), 1024);
    }
}
