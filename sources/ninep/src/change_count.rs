//! A count of the changes by clients of this process, which orders them.

use std::sync::atomic::{AtomicU64, Ordering};

static CHANGES: AtomicU64 = AtomicU64::new(0);

/// Returns the current time, as a count of changes.
pub(crate) fn now_in_changes() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

/// Counts a change, and returns its time.
pub(crate) fn count_change() -> u64 {
    CHANGES.fetch_add(1, Ordering::AcqRel) + 1
}
