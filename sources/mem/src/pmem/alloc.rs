//! The block allocator of a tier.
//!
//! The tier is divided into shards, each with its own lock. A writer begins with the shard of its CPU, so that writers
//! on different CPUs do not contend; if it needs more, it takes from other shards, too.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use ferry_vfs::sync::{CacheAligned, lock};

use super::extents::Run;

/// The minimum size of a shard, 16 MiB: smaller shards would only fragment large files.
const SHARD_BLOCKS_MIN: u64 = 4096;
/// The maximum number of shards; more CPUs share them.
const SHARDS_MAX: u64 = 64;

/// How often reserved blocks are searched for.
const SEARCHES_MAX: usize = 100;

/// The free blocks of one tier.
#[derive(Debug)]
pub(crate) struct Allocator {
    first: u64,
    blocks: u64,
    shard_blocks: u64,
    shards: Vec<CacheAligned<Mutex<Shard>>>,
    free: AtomicU64,
}

/// Free runs by first block.
#[derive(Debug, Default)]
struct Shard {
    runs: BTreeMap<u64, u64>,
    /// The end of the last allocation, where the next one continues.
    next: u64,
}

impl Allocator {
    /// Creates a tier of `blocks` free blocks, numbered from `first`.
    pub(crate) fn new(first: u64, blocks: u64, cpus: usize) -> Self {
        let wanted = (cpus as u64).clamp(1, SHARDS_MAX).min((blocks / SHARD_BLOCKS_MIN).max(1));
        let shard_blocks = blocks.div_ceil(wanted).max(1);
        let shard = |index: u64| {
            let start = first + index * shard_blocks;
            let count = shard_blocks.min((first + blocks).saturating_sub(start));
            let runs = if count > 0 { BTreeMap::from([(start, count)]) } else { BTreeMap::new() };
            CacheAligned(Mutex::new(Shard { runs, next: start }))
        };
        Self { first, blocks, shard_blocks, shards: (0..wanted).map(shard).collect(), free: AtomicU64::new(blocks) }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(crate) fn free_blocks(&self) -> u64 {
        self.free.load(Ordering::Relaxed)
    }

    /// Returns whether a run is within this tier.
    pub(crate) fn contains(&self, run: Run) -> bool {
        run.block >= self.first && run.block.checked_add(run.count).is_some_and(|end| end <= self.first + self.blocks)
    }

    /// Takes `count` blocks or none, in as few runs as possible, from `goal` if that is free, else in the shard of
    /// `cpu`.
    pub(crate) fn take(&self, count: u64, goal: Option<u64>, cpu: usize) -> Option<Vec<Run>> {
        // So many are free for this caller, wherever they are.
        self.free.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |free| free.checked_sub(count)).ok()?;
        for _ in 0..SEARCHES_MAX {
            if let Some(taken) = self.search(count, goal, cpu) {
                return Some(taken);
            }
            // Others have freed blocks in shards that were searched already, and taken those of later ones.
            std::thread::yield_now();
        }
        self.free.fetch_add(count, Ordering::AcqRel);
        None
    }

    /// Takes reserved blocks, or none if they are in other places than when the search began.
    fn search(&self, count: u64, goal: Option<u64>, cpu: usize) -> Option<Vec<Run>> {
        let mut taken: Vec<Run> = Vec::new();
        let mut missing = count;
        if let Some(goal) = goal.filter(|goal| self.contains(Run { block: *goal, count: 1 }))
            && let Some(run) = self.shard(self.index(goal)).take_at(goal, missing)
        {
            missing -= run.count;
            taken.push(run);
        }
        let start = cpu % self.shards.len();
        for whole in [true, false] {
            let mut index = 0;
            while index < self.shards.len() && missing > 0 {
                let shard = (start + index) % self.shards.len();
                match self.shard(shard).take_next(missing, whole) {
                    Some(run) => {
                        missing -= run.count;
                        taken.push(run);
                    }
                    None => index += 1,
                }
            }
        }
        if missing > 0 {
            self.put_back(&taken);
            return None;
        }
        Some(taken)
    }

    /// Takes exactly this run, for a mount; returns `false` if any of it is not free or does not exist.
    #[must_use]
    pub(crate) fn take_exactly(&self, run: Run) -> bool {
        if run.count == 0 || !self.contains(run) {
            return false;
        }
        let mut done = 0;
        while done < run.count {
            let at = run.block + done;
            // Not inside the match, which would hold the shard's lock while its blocks are returned.
            let part = self.shard(self.index(at)).take_at(at, run.count - done);
            match part {
                Some(part) => done += part.count,
                None => {
                    self.put_back(&[Run { block: run.block, count: done }]);
                    return false;
                }
            }
        }
        self.free.fetch_sub(run.count, Ordering::AcqRel);
        true
    }

    /// Gives runs back.
    pub(crate) fn put(&self, runs: &[Run]) {
        self.put_back(runs);
        self.free.fetch_add(runs.iter().map(|run| run.count).sum(), Ordering::AcqRel);
    }

    fn put_back(&self, runs: &[Run]) {
        for run in runs {
            let mut at = *run;
            while at.count > 0 {
                let index = self.index(at.block);
                let shard_end = self.first + (index as u64 + 1) * self.shard_blocks;
                let count = at.count.min(shard_end - at.block);
                self.shard(index).put(Run { block: at.block, count });
                at = Run { block: at.block + count, count: at.count - count };
            }
        }
    }

    fn index(&self, block: u64) -> usize {
        usize::try_from((block - self.first) / self.shard_blocks).unwrap_or(usize::MAX).min(self.shards.len() - 1)
    }

    fn shard(&self, index: usize) -> MutexGuard<'_, Shard> {
        lock(&self.shards[index])
    }
}

impl Shard {
    /// Takes up to `max` free blocks from `block`.
    fn take_at(&mut self, block: u64, max: u64) -> Option<Run> {
        let (&start, &count) =
            self.runs.range(..=block).next_back().filter(|(start, count)| *start + *count > block)?;
        let end = start + count;
        let run = Run { block, count: max.min(end - block) };
        self.runs.remove(&start);
        if start < block {
            self.runs.insert(start, block - start);
        }
        let rest = run.block + run.count;
        if rest < end {
            self.runs.insert(rest, end - rest);
        }
        self.next = rest;
        Some(run)
    }

    /// Takes from the next free run after the last allocation; with `whole`, only from one that is long enough.
    fn take_next(&mut self, max: u64, whole: bool) -> Option<Run> {
        let suits = |(_, count): &(&u64, &u64)| !whole || **count >= max;
        let after = self.runs.range(self.next..).find(suits);
        let (&start, _) = after.or_else(|| self.runs.range(..self.next).find(suits))?;
        self.take_at(start, max)
    }

    fn put(&mut self, mut run: Run) {
        if let Some((&start, &count)) = self.runs.range(..run.block).next_back() {
            debug_assert!(start + count <= run.block, "a block was freed twice");
            if start + count == run.block {
                run = Run { block: start, count: count + run.count };
            }
        }
        if let Some(count) = self.runs.remove(&(run.block + run.count)) {
            run.count += count;
        }
        self.runs.insert(run.block, run.count);
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "a test's numbers are small")]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_all_or_nothing_and_can_be_freed() {
        let allocator = Allocator::new(1000, 20_000, 4);
        assert_eq!(allocator.shards.len(), 4);
        let most = allocator.take(15_000, None, 1).unwrap();
        assert_eq!(most.iter().map(|run| run.count).sum::<u64>(), 15_000);
        assert_eq!(allocator.take(5_001, None, 0), None);
        assert_eq!(allocator.free_blocks(), 5_000);
        let rest = allocator.take(5_000, None, 0).unwrap();
        let mut seen = vec![false; 20_000];
        for run in most.iter().chain(&rest) {
            for block in run.block..run.block + run.count {
                assert!(!std::mem::replace(&mut seen[(block - 1000) as usize], true), "{block} twice");
            }
        }
        allocator.put(&most);
        allocator.put(&rest);
        assert_eq!(allocator.free_blocks(), 20_000);
        assert!(allocator.take_exactly(Run { block: 1000, count: 20_000 }), "runs grow together again");
    }

    #[test]
    fn writers_on_different_cpus_do_not_contend() {
        const CPUS: usize = 4;
        let allocator = Allocator::new(1000, 20_000, CPUS);
        let shard_of = |run: &Run| (run.block - 1000) / 5_000;
        // In turn, so that a common position would show.
        for _ in 0..50 {
            for cpu in 0..CPUS {
                let runs = allocator.take(20, None, cpu).unwrap();
                assert!(runs.iter().all(|run| shard_of(run) == cpu as u64), "{cpu}: {runs:?}");
            }
        }
        // More CPUs than shards share them, and an empty shard takes from others.
        assert_eq!(shard_of(&allocator.take(1, None, CPUS + 2).unwrap()[0]), 2);
        let rest = allocator.take(4_500, None, 3).unwrap();
        assert!(rest.iter().any(|run| shard_of(run) == 3) && rest.iter().any(|run| shard_of(run) != 3), "{rest:?}");
        assert_eq!(Allocator::new(0, 20_000, 64).shards.len(), 4, "shards are not smaller than is useful");
    }

    #[test]
    fn what_is_free_can_be_taken_while_others_take_and_free() {
        let allocator = Allocator::new(0, 64 * 1024, 4);
        // In single blocks, so that a search takes long.
        let all = allocator.take(64 * 1024, None, 0).unwrap();
        assert_eq!(all.iter().map(|run| run.count).sum::<u64>(), 64 * 1024);
        (0..32 * 1024).for_each(|number| allocator.put(&[Run { block: 2 * number, count: 1 }]));
        std::thread::scope(|scope| {
            for cpu in 0..4 {
                let allocator = &allocator;
                scope.spawn(move || {
                    for round in 0..100 {
                        // Together never more than are free.
                        let taken = allocator.take(8 * 1024, None, cpu + round).expect("so many are free");
                        assert_eq!(taken.iter().map(|run| run.count).sum::<u64>(), 8 * 1024);
                        taken.iter().for_each(|run| allocator.put(std::slice::from_ref(run)));
                    }
                });
            }
        });
        assert_eq!(allocator.free_blocks(), 32 * 1024);
    }

    #[test]
    fn allocation_continues_at_the_goal() {
        let allocator = Allocator::new(0, 100, 1);
        assert_eq!(allocator.take(2, None, 0), Some(vec![Run { block: 0, count: 2 }]));
        assert_eq!(allocator.take(3, Some(50), 0), Some(vec![Run { block: 50, count: 3 }]));
        assert_eq!(allocator.take(3, Some(53), 0), Some(vec![Run { block: 53, count: 3 }]));
    }

    #[test]
    fn a_block_has_one_owner() {
        let allocator = Allocator::new(0, 100, 1);
        assert!(allocator.take_exactly(Run { block: 10, count: 10 }));
        for bad in [(10, 1), (5, 6), (19, 2), (95, 6), (200, 1), (u64::MAX, 2), (0, 0)] {
            assert!(!allocator.take_exactly(Run { block: bad.0, count: bad.1 }), "{bad:?}");
        }
        assert_eq!(allocator.free_blocks(), 90);
    }
}
