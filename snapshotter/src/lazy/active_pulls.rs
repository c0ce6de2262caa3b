//! The pulls that store packs before their image is recorded.

use std::sync::{Condvar, Mutex, MutexGuard};

use ferry_vfs::sync::{lock, wait};

/// The number of pulls. None begins while it is locked.
#[derive(Debug, Default)]
pub(super) struct ActivePulls {
    count: Mutex<usize>,
    ended: Condvar,
}

/// A pull, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct ActivePull<'a>(&'a ActivePulls);

impl ActivePulls {
    /// Begins a pull.
    pub fn begin(&self) -> ActivePull<'_> {
        *lock(&self.count) += 1;
        ActivePull(self)
    }

    /// Prevents pulls; returns `None` if there is one.
    pub fn block(&self) -> Option<MutexGuard<'_, usize>> {
        Some(lock(&self.count)).filter(|count| **count == 0)
    }

    /// Waits until there is none, and prevents none.
    pub fn wait(&self) {
        let mut count = lock(&self.count);
        while *count > 0 {
            count = wait(&self.ended, count);
        }
    }
}

impl Drop for ActivePull<'_> {
    fn drop(&mut self) {
        let mut count = lock(&self.0.count);
        *count -= 1;
        if *count == 0 {
            self.0.ended.notify_all();
        }
    }
}
