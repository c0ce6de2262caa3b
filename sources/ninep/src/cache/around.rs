//! Read-around for random readers over a long link: while they wait for a page, it also carries the bytes around.
//!
//! A random read takes a round trip, whatever its size, and the link is otherwise idle. So additional messages fetch as
//! many bytes around it as the link carries in another round trip, as long as enough of them are read later.

use std::sync::Mutex;
use std::time::Duration;

use ferry_vfs::sync::lock;

/// The minimum and initial size of a read-around, in bytes.
const LEAST_BYTES: u64 = 64 << 10;

/// The most.
const MOST_BYTES: u64 = 4 << 20;

/// The number of short reads before another attempt, after the link was too slow for the minimum.
const REST: u32 = 1000;

/// The maximum message in bytes whose duration counts as a round trip.
const SHORT_BYTES: u64 = 16 << 10;

/// The minimum round trip for which read-around pays; machines in one network have less.
const FAR: Duration = Duration::from_micros(500);

/// The number of blocks fetched around a file's reads before any page of them must have been used.
const TRIAL_BLOCKS: u64 = 64;

/// A link, with times estimated from its messages.
#[derive(Debug, Default)]
pub(super) struct Link(Mutex<Estimate>);

#[derive(Clone, Copy, Debug)]
struct Estimate {
    /// Zero: not known.
    round_trip: Duration,
    /// The size of a read-around in bytes; it grows while read-arounds take at most two round trips.
    around: u64,
    /// The number of short reads before the next attempt.
    rests: u32,
}

impl Default for Estimate {
    fn default() -> Self {
        Self { round_trip: Duration::ZERO, around: LEAST_BYTES, rests: 0 }
    }
}

impl Link {
    /// Records the duration of a read that a caller waited for.
    pub fn note(&self, bytes: u64, took: Duration) {
        if bytes <= SHORT_BYTES {
            lock(&self.0).note(took);
        }
    }

    /// Records the duration of a read-around.
    pub fn note_around(&self, bytes: u64, took: Duration) {
        lock(&self.0).note_around(bytes, took);
    }

    /// Returns the size of a read-around in bytes: a power of two, or 0.
    pub fn around_bytes(&self) -> u64 {
        lock(&self.0).around_bytes()
    }
}

impl Estimate {
    fn note(&mut self, took: Duration) {
        // Queued messages take longer, so short times are more significant than long ones.
        let more = took.saturating_sub(self.round_trip) / 8;
        let is_shorter = self.round_trip.is_zero() || took < self.round_trip;
        self.round_trip = if is_shorter { took } else { self.round_trip + more };
        if self.rests > 0 {
            self.rests -= 1;
            if self.rests == 0 {
                self.around = LEAST_BYTES;
            }
        }
    }

    fn note_around(&mut self, bytes: u64, took: Duration) {
        if took <= self.round_trip * 2 {
            self.around = (self.around + bytes).min(MOST_BYTES);
        } else if took > self.round_trip * 3 {
            self.around /= 2;
            if self.around < LEAST_BYTES {
                (self.around, self.rests) = (0, REST);
            }
        }
    }

    fn around_bytes(&self) -> u64 {
        if self.round_trip < FAR || self.around == 0 { 0 } else { 1 << self.around.ilog2() }
    }
}

/// The use of the blocks that were fetched around a file's reads.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Evidence {
    pub blocks: u64,
    /// The number of their pages that were read since.
    pub used: u64,
}

impl Evidence {
    /// Returns whether read-around pays. A block costs about a round trip, and a used page saves its reader one. The
    /// link is otherwise idle, so one page of two blocks is enough.
    pub fn pays(self) -> bool {
        self.blocks < TRIAL_BLOCKS || self.used.saturating_mul(2) >= self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn with_round_trip(took: Duration) -> Estimate {
        let mut estimate = Estimate::default();
        estimate.note(took);
        estimate
    }

    #[test]
    fn no_read_around_on_a_short_or_unknown_link() {
        assert_eq!(Estimate::default().around_bytes(), 0);
        assert_eq!(with_round_trip(MS / 10).around_bytes(), 0);
        // One long time for another reason is forgotten with the next one.
        let mut near = with_round_trip(9 * MS);
        near.note(MS / 10);
        assert_eq!(near.around_bytes(), 0);
    }

    /// Returns the final read-around of a link with this many Mbit/s.
    fn settled(round_trip: Duration, megabits: u64) -> u64 {
        let mut link = with_round_trip(round_trip);
        for _ in 0..50 {
            link.note(round_trip);
            let bytes = link.around_bytes();
            if bytes > 0 {
                link.note_around(bytes, round_trip + Duration::from_micros(bytes * 8 / megabits));
            }
        }
        link.around_bytes()
    }

    #[test]
    fn a_block_takes_about_a_round_trip() {
        assert_eq!(with_round_trip(2 * MS).around_bytes(), LEAST_BYTES, "a first try");
        assert_eq!(settled(2 * MS, 1000), 256 << 10);
        assert_eq!(settled(20 * MS, 100), 256 << 10);
        assert_eq!(settled(2 * MS, 100_000), MOST_BYTES);
        // The least would fill the link.
        assert_eq!(settled(20 * MS, 10), 0);
    }

    #[test]
    fn a_slow_link_is_tried_again() {
        let mut link = with_round_trip(2 * MS);
        link.note_around(LEAST_BYTES, 50 * MS);
        for _ in 0..REST {
            assert_eq!(link.around_bytes(), 0);
            link.note(2 * MS);
        }
        assert_eq!(link.around_bytes(), LEAST_BYTES);
    }

    #[test]
    fn useless_read_around_ends() {
        assert!(Evidence::default().pays());
        assert!(Evidence { blocks: TRIAL_BLOCKS - 1, used: 0 }.pays());
        assert!(!Evidence { blocks: TRIAL_BLOCKS, used: 0 }.pays());
        assert!(Evidence { blocks: TRIAL_BLOCKS, used: TRIAL_BLOCKS / 2 }.pays());
    }
}
