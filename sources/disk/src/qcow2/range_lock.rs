//! Locks on ranges of clusters.

use std::ops::Range;
use std::sync::{Condvar, Mutex};

use ferry_vfs::sync::{self, lock};

/// Serializes changes of the same clusters. A list is enough: each thread that changes the image has one range.
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
        let mut held = lock(&self.held);
        while held.iter().any(|other| other.start < range.end && range.start < other.end) {
            held = sync::wait(&self.released, held);
        }
        held.push(range.clone());
        LockedRange { lock: self, range }
    }
}

impl Drop for LockedRange<'_> {
    fn drop(&mut self) {
        let mut held = lock(&self.lock.held);
        if let Some(index) = held.iter().position(|range| *range == self.range) {
            held.swap_remove(index);
        }
        self.lock.released.notify_all();
    }
}
