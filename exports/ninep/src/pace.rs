//! Whether requests of a connection are served concurrently.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A slower request is blocked.
const SLOW: Duration = Duration::from_micros(250);
/// Requests that are served concurrently after two slow ones among 32.
const PARALLEL_REQUESTS: u32 = 64;

/// The latencies of a connection's requests. Lost updates do not matter.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// A bit per recent request: whether it was slow.
    slow: AtomicU32,
    /// Further requests to serve concurrently.
    parallel: AtomicU32,
}

impl Pace {
    /// Returns whether to serve the next request concurrently.
    pub(crate) fn is_parallel(&self) -> bool {
        let left = self.parallel.load(Ordering::Relaxed);
        self.parallel.store(left.saturating_sub(1), Ordering::Relaxed);
        left > 0
    }

    /// Records the latency of a request.
    pub(crate) fn record(&self, time: Duration) {
        let slow = self.slow.load(Ordering::Relaxed) << 1 | u32::from(time > SLOW);
        self.slow.store(slow, Ordering::Relaxed);
        if slow & 1 == 1 && slow.count_ones() > 1 {
            self.parallel.store(PARALLEL_REQUESTS, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_parallel_after_two_slow_ones() {
        let (pace, slow) = (Pace::default(), 2 * SLOW);
        pace.record(slow);
        // The first is forgotten meanwhile.
        (0..32).for_each(|_| pace.record(SLOW));
        pace.record(slow);
        assert!(!pace.is_parallel());
        pace.record(slow);
        assert!((0..PARALLEL_REQUESTS).all(|_| pace.is_parallel()) && !pace.is_parallel());
    }
}
