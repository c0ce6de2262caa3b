//! Locks on ranges of clusters.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Serializes changes of the same clusters. There are as many ranges as threads that change the image, so a list is
/// enough.
#[derive(Default)]
pub(super) struct RangeLock {
    held: Mutex<Vec<Range<u64>>>,
    released: Condvar,
}

/// A range that is locked until this is dropped.
pub(super) struct LockedRange<'a> {
    lock: &'a RangeLock,
    range: Range<u64>,
}

impl RangeLock {
    /// Waits until no other holder overlaps the range.
    pub(super) fn take(&self, range: Range<u64>) -> LockedRange<'_> {
        let mut held = self.held();
        while held.iter().any(|other| other.start < range.end && range.start < other.end) {
            held = self.released.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        held.push(range.clone());
        LockedRange { lock: self, range }
    }

    fn held(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LockedRange<'_> {
    fn drop(&mut self) {
        let mut held = self.lock.held();
        if let Some(index) = held.iter().position(|range| *range == self.range) {
            held.swap_remove(index);
        }
        self.lock.released.notify_all();
    }
}
