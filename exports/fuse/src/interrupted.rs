//! FUSE INTERRUPT.
//!
//! The server ends a waiting request at once. This module is for the others: the monitor aborts a handler that
//! continues for long after its caller was interrupted.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_engine::AbortPolicy;
use ferry_vfs::Errno;
use ferry_vfs::sync::lock;

/// How long a handler may continue after its caller was interrupted.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long an interrupt is remembered: longer than the monitor needs.
const KEPT: Duration = Duration::from_secs(10);

/// The maximum number of remembered interrupts, and so of interrupted threads.
const KEPT_MAX: usize = 4096;

/// The requests whose callers were interrupted recently.
#[derive(Debug, Default)]
pub(crate) struct Interrupted(Mutex<Vec<(u64, Instant)>>);

impl Interrupted {
    /// Records that the caller of a request was interrupted.
    pub(crate) fn note(&self, unique: u64) {
        let mut notes = lock(&self.0);
        notes.retain(|(number, since)| *number != unique && since.elapsed() < KEPT);
        if notes.len() < KEPT_MAX {
            notes.push((unique, Instant::now()));
        }
    }

    /// Returns the error for the caller of a request that takes too long, if any.
    pub(crate) fn verdict(self: Arc<Self>, handler_timeout: Duration) -> Box<AbortPolicy> {
        Box::new(move |unique, now, since| {
            if !handler_timeout.is_zero() && now.saturating_duration_since(since) >= handler_timeout {
                tracing::warn!("a request took longer than {handler_timeout:?}: its caller gets EIO");
                Some(Errno::IO)
            } else {
                self.contains(unique, PATIENCE).then_some(Errno::INTR)
            }
        })
    }

    /// Returns whether the caller of a request was interrupted at least this long ago.
    pub(crate) fn contains(&self, unique: u64, at_least: Duration) -> bool {
        lock(&self.0).iter().any(|(number, since)| *number == unique && since.elapsed() >= at_least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_remembered_for_a_limited_time() {
        let interrupted = Interrupted::default();
        (0..2 * KEPT_MAX as u64).for_each(|unique| interrupted.note(unique));
        assert_eq!(lock(&interrupted.0).len(), KEPT_MAX);
        assert!(interrupted.contains(4, Duration::ZERO));
        assert!(!interrupted.contains(4, Duration::MAX));
        assert!(!interrupted.contains(u64::MAX, Duration::ZERO));
    }
}
