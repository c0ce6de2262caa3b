//! Waits for more requests to form a larger batch while the driver is busy with completions.
//!
//! A driver processes completions one by one, and sends another request with each. A fast worker would take each
//! request as it arrives, with a system call per request. But a driver that still has completions to process is not
//! waiting for the worker. So the worker waits until as many requests have arrived as completions are left: then both
//! sides work in batches of half the requests in flight, and neither sleeps. If the device is busy, the worker waits
//! until no completion is left.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use ferry_engine::PollLimit;

/// Checks per reading of the clock, which costs about as much as twenty checks.
const LOOKS_PER_CLOCK: u32 = 16;

/// A driver that processes no completion for this long is asleep, does not report its progress, or has no CPU. A slow
/// driver (QEMU's) takes 2 to 3 us per request.
const STALL: Duration = Duration::from_micros(8);

/// The longest wait for more requests, whatever the poll limit: what a disk in memory needs for a deep queue.
pub(crate) const BOUND_MAX: Duration = Duration::from_micros(200);

/// With this many requests a device is busy for longer than a wait here.
pub(crate) const DEVICE_BUSY_FROM: usize = 8;

/// How long to wait, after a transfer of a busy device has ended, for others that end with it.
const RIPE: Duration = Duration::from_micros(10);

/// With fewer completions left the driver is done soon, and one or two more requests hardly make a batch cheaper.
pub(crate) const COMPLETIONS_MIN: u16 = 8;

/// The most batches in a row that are taken without waiting after a useless wait.
const SKIPS_MAX: u32 = 1023;

/// Waits for batches, and backs off if that is useless.
#[derive(Debug)]
pub(crate) struct Batcher {
    poll: PollLimit,
    max: Duration,
    skips: u32,
    skips_next: u32,
}

impl Batcher {
    /// Creates a batcher that never waits longer than the poll limit and `max`.
    pub(crate) fn new(poll: PollLimit, max: Duration) -> Self {
        Self { poll, max, skips: 0, skips_next: 1 }
    }

    fn bound(&self) -> Duration {
        self.poll.get().min(self.max)
    }

    /// Waits while `look` returns the driver's position, as long as that moves. `None`: there is enough work.
    #[inline]
    pub(crate) fn wait(&mut self, look: impl FnMut() -> Option<u32>) {
        match self.skips.checked_sub(1) {
            Some(left) => self.skips = left,
            None => self.wait_now(look),
        }
    }

    /// Waits a moment for transfers that end together, unless `is_disturbed`.
    pub(crate) fn wait_for_peers(&self, mut is_disturbed: impl FnMut() -> bool) {
        let (start, bound) = (Instant::now(), self.bound());
        while start.elapsed() < RIPE.min(bound) {
            for _ in 0..LOOKS_PER_CLOCK {
                if is_disturbed() {
                    return;
                }
                spin_loop();
            }
        }
    }

    fn wait_now(&mut self, mut look: impl FnMut() -> Option<u32>) {
        let Some(begin) = look() else { return };
        let start = Instant::now();
        let (mut at, mut moved) = (begin, start);
        loop {
            let before = at;
            for _ in 0..LOOKS_PER_CLOCK {
                spin_loop();
                let Some(now) = look() else {
                    self.skips_next = 1;
                    return;
                };
                at = now;
            }
            let now = Instant::now();
            if at != before {
                moved = now;
            }
            if now - moved >= STALL || now - start >= self.bound() {
                break;
            }
        }
        if at == begin {
            self.skips = self.skips_next;
            self.skips_next = (2 * self.skips_next + 1).min(SKIPS_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(5);

    #[test]
    fn waits_while_the_driver_moves_and_until_enough_is_there() {
        let mut looks = 0;
        Batcher::new(BOUND.into(), BOUND).wait(|| {
            looks += 1;
            (looks < 100_000).then_some(looks)
        });
        assert_eq!(looks, 100_000);
    }

    #[test]
    fn backs_off_from_a_driver_that_does_not_move() {
        let mut batcher = Batcher::new(BOUND.into(), BOUND);
        let mut rows = Vec::new();
        let mut skipped = 0;
        while rows.len() < 12 {
            let mut looked = false;
            let start = Instant::now();
            batcher.wait(|| {
                looked = true;
                Some(7)
            });
            if looked {
                assert!(start.elapsed() >= STALL);
                rows.push(std::mem::take(&mut skipped));
            } else {
                skipped += 1;
            }
        }
        assert_eq!(rows, [0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023, 1023]);
    }

    #[test]
    fn never_waits_longer_than_the_bound() {
        let mut batcher = Batcher::new(Duration::from_millis(20).into(), BOUND);
        let (start, mut looks) = (Instant::now(), 0);
        batcher.wait(|| {
            looks += 1;
            Some(looks)
        });
        assert!(start.elapsed() >= Duration::from_millis(20));
        let mut resubmitted = false;
        batcher.wait(|| {
            resubmitted = true;
            None
        });
        assert!(resubmitted, "it was not in vain");
    }
}
