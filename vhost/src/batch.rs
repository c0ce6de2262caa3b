//! Waits for more requests to form a larger batch, as long as that delays nobody.
//!
//! A driver processes completions one by one, and makes another request with each. A fast worker would take each request as it
//! arrives, with a system call for each. But as long as the driver has completions to process, it does not wait for the worker.
//! So the worker waits until as many requests have arrived as completions are left: then both sides work in batches of half the
//! requests in flight, and neither sleeps. If the device has enough to do, the worker waits until no completion is left.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use ferry_engine::PollLimit;

/// How often to look before looking at the clock, which costs about as much as twenty looks.
const LOOKS_PER_CLOCK: u32 = 16;

/// A driver that looks at no answer for so long is asleep, does not say how far it is, or has no CPU. It is a few times
/// what one request costs a slow driver (QEMU's: 2 to 3 us).
const STALL: Duration = Duration::from_micros(8);

/// The longest that requests wait for others, however long polling may take: what a disk in memory needs for a deep queue.
pub(crate) const BOUND_MAX: Duration = Duration::from_micros(200);

/// With so many requests a device has enough to do for as long as we wait here.
pub(crate) const DEVICE_BUSY_FROM: usize = 8;

/// How long a busy device is given, after something ended, for what ends with it: little beside what it takes for each.
const RIPE: Duration = Duration::from_micros(10);

/// With fewer answers left the driver is soon done, and a request or two more are hardly cheaper together.
pub(crate) const ANSWERS_MIN: u16 = 8;

/// The longest row of batches that are taken without waiting after one that was waited for in vain.
const SKIPS_MAX: u32 = 1023;

/// Waits, and learns where that is in vain.
#[derive(Debug)]
pub(crate) struct Batcher {
    poll: PollLimit,
    max: Duration,
    skips: u32,
    skips_next: u32,
}

impl Batcher {
    /// Never waits longer than a worker polls, and than `max`.
    pub(crate) fn new(poll: PollLimit, max: Duration) -> Self {
        Self { poll, max, skips: 0, skips_next: 1 }
    }

    fn bound(&self) -> Duration {
        self.poll.get().min(self.max)
    }

    /// Waits for as long as `look` says that the driver is behind, and that it moves.
    #[inline]
    pub(crate) fn wait(&mut self, look: impl FnMut() -> Option<u32>) {
        match self.skips.checked_sub(1) {
            Some(left) => self.skips = left,
            None => self.wait_now(look),
        }
    }

    /// Waits a moment for what ends together, unless `is_disturbed`.
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
    fn gives_up_on_a_driver_that_stands_still_and_tries_again_ever_more_rarely() {
        let mut gather = Batcher::new(BOUND.into(), BOUND);
        let mut rows = Vec::new();
        let mut skipped = 0;
        while rows.len() < 12 {
            let mut looked = false;
            let start = Instant::now();
            gather.wait(|| {
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
        let mut gather = Batcher::new(Duration::from_millis(20).into(), BOUND);
        let (start, mut looks) = (Instant::now(), 0);
        gather.wait(|| {
            looks += 1;
            Some(looks)
        });
        assert!(start.elapsed() >= Duration::from_millis(20));
        let mut resubmitted = false;
        gather.wait(|| {
            resubmitted = true;
            None
        });
        assert!(resubmitted, "it was not in vain");
    }
}
