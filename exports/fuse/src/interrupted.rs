//! FUSE INTERRUPT.
//!
//! A request that is parked is ended by the server at once. This is for the others: a handler that goes on for long
//! after its caller was interrupted is given up by the monitor.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferry_engine::AbortPolicy;
use ferry_vfs::Errno;

/// How long a handler may go on after its caller was interrupted.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long an interrupt is remembered: longer than the monitor needs to act on it.
const KEPT: Duration = Duration::from_secs(10);

/// The most interrupts remembered; a caller has one request under way, so that many threads must have been interrupted.
const KEPT_MAX: usize = 4096;

/// The requests whose callers were interrupted lately.
#[derive(Debug, Default)]
pub(crate) struct Interrupted(Mutex<Vec<(u64, Instant)>>);

impl Interrupted {
    fn lock(&self) -> MutexGuard<'_, Vec<(u64, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller of a request was interrupted.
    pub(crate) fn note(&self, unique: u64) {
        let mut notes = self.lock();
        notes.retain(|(number, since)| *number != unique && since.elapsed() < KEPT);
        if notes.len() < KEPT_MAX {
            notes.push((unique, Instant::now()));
        }
    }

    /// What the caller of a request that has been under way for long is to be told instead of its outcome, if anything.
    pub(crate) fn verdict(self: Arc<Self>, handler_timeout: Duration) -> Box<AbortPolicy> {
        Box::new(move |unique, now, since| {
            if !handler_timeout.is_zero() && now.saturating_duration_since(since) >= handler_timeout {
                tracing::warn!("a request took longer than {handler_timeout:?}: its caller is told EIO");
                Some(Errno::IO)
            } else {
                self.contains(unique, PATIENCE).then_some(Errno::INTR)
            }
        })
    }

    /// Whether the caller of a request was interrupted so long ago.
    pub(crate) fn contains(&self, unique: u64, at_least: Duration) -> bool {
        self.lock().iter().any(|(number, since)| *number == unique && since.elapsed() >= at_least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_lately_and_not_without_end() {
        let interrupted = Interrupted::default();
        (0..2 * KEPT_MAX as u64).for_each(|unique| interrupted.note(unique));
        assert_eq!(interrupted.lock().len(), KEPT_MAX);
        assert!(interrupted.contains(4, Duration::ZERO));
        assert!(!interrupted.contains(4, Duration::MAX));
        assert!(!interrupted.contains(u64::MAX, Duration::ZERO));
    }
}
