//! The grace period before a freed block is reused.
//!
//! A reader may have received an extent and still be transferring when the file is truncated. So every extent of an
//! epoch holds that epoch's descriptor, and each batch of freed blocks ends the epoch. The batch waits until the
//! descriptors of that epoch and of earlier ones are released.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use ferry_vfs::Backing;
use ferry_vfs::sync::{self, lock};

use super::extents::Run;

/// The descriptors of both tiers during one epoch.
#[derive(Debug, Default)]
struct Epoch([Option<Arc<Backing>>; 2]);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Grace {
    epoch: RwLock<Epoch>,
    waiting: Mutex<PendingFree>,
    blocks: AtomicU64,
}

#[derive(Debug, Default)]
struct PendingFree {
    epochs: VecDeque<(Epoch, Vec<Run>)>,
    /// Blocks freed when no descriptor was left for a new epoch: they join the next batch.
    late: Vec<Run>,
}

impl Epoch {
    fn is_over(&self) -> bool {
        self.0.iter().flatten().all(|backing| Arc::strong_count(backing) == 1)
    }

    /// Returns a new epoch with duplicated descriptors.
    fn next(&self) -> Option<Self> {
        let mut next = Self::default();
        for (new, old) in next.0.iter_mut().zip(&self.0) {
            if let Some(old) = old {
                let backing = Backing::new(old.as_fd().try_clone_to_owned().ok()?);
                backing.add_io_hints(old.io_hints());
                *new = Some(Arc::new(backing));
            }
        }
        Some(next)
    }
}

impl Grace {
    /// Creates the state for tiers with these descriptors, if they have any.
    pub(crate) fn new(backings: [Option<Backing>; 2]) -> Self {
        let epoch = RwLock::new(Epoch(backings.map(|backing| backing.map(Arc::new))));
        Self { epoch, waiting: Mutex::default(), blocks: AtomicU64::new(0) }
    }

    /// Returns the descriptor for an extent in a tier. The caller still has the lock under which it found the block.
    pub(crate) fn backing(&self, tier: usize) -> Option<Arc<Backing>> {
        sync::read(&self.epoch).0[tier].clone()
    }

    /// Blocks that wait.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Adds freed blocks, and calls `free` with those that no reader can use any more.
    pub(crate) fn reclaim(&self, runs: Vec<Run>, mut free: impl FnMut(&[Run])) {
        let mut guard = lock(&self.waiting);
        let PendingFree { epochs, late } = &mut *guard;
        self.blocks.fetch_add(count(&runs), Ordering::Relaxed);
        late.extend(runs);
        if !late.is_empty() {
            let mut epoch = sync::write(&self.epoch);
            if let Some(next) = epoch.next() {
                epochs.push_back((std::mem::replace(&mut *epoch, next), std::mem::take(late)));
            }
        }
        while epochs.front().is_some_and(|(epoch, _)| epoch.is_over()) {
            let Some((_, runs)) = epochs.pop_front() else { break };
            self.blocks.fetch_sub(count(&runs), Ordering::Relaxed);
            free(&runs);
        }
    }
}

fn count(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_wait_for_readers_of_their_epoch_and_earlier() {
        let backing = Backing::new(std::fs::File::open("/proc/self/exe").unwrap().into());
        let grace = Grace::new([Some(backing), None]);
        let freed = Mutex::new(Vec::new());
        let pass = |blocks: &[u64]| {
            let runs = blocks.iter().map(|&block| Run { block, count: 1 }).collect();
            grace.reclaim(runs, |runs| freed.lock().unwrap().extend(runs.iter().map(|run| run.block)));
            freed.lock().unwrap().clone()
        };
        assert_eq!(pass(&[1]), [1], "nobody reads");
        let early = grace.backing(0).unwrap();
        assert_eq!(pass(&[2]), [1]);
        let late = grace.backing(0).unwrap();
        assert_eq!(pass(&[3]), [1]);
        drop(late);
        assert_eq!(pass(&[]), [1], "the early reader may be reading 3, too");
        assert_eq!(grace.blocks(), 2);
        drop(early);
        assert_eq!(pass(&[]), [1, 2, 3]);
        assert_eq!(grace.blocks(), 0);
    }
}
