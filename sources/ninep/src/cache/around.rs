//! Who reads here and there over a long link: while they wait for a page, the link carries what lies around it.
//!
//! A random read takes a round trip whatever it asks for, and the link is idle meanwhile. So as much is fetched around it, in
//! messages of its own behind the one that is waited for, as the link carries in one more round trip, and for as long as
//! enough of that is read later.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The least that is fetched around a read, in bytes, and the first.
const LEAST_BYTES: u64 = 64 << 10;

/// The most.
const MOST_BYTES: u64 = 4 << 20;

/// Once the link turned out to be too slow for the least: so many short reads until it is tried again.
const REST: u32 = 1000;

/// The longest message, in bytes, whose time is taken for that of a round trip.
const SHORT_BYTES: u64 = 16 << 10;

/// The least round trip that is worth it: machines side by side have less.
const FAR: Duration = Duration::from_micros(500);

/// Blocks that are fetched around the reads of a file before any page of them must have been of use.
const TRIAL_BLOCKS: u64 = 64;

/// A link, as the times of its messages show it.
#[derive(Debug, Default)]
pub(super) struct Link(Mutex<Estimate>);

#[derive(Clone, Copy, Debug)]
struct Estimate {
    /// Zero: not known.
    round_trip: Duration,
    /// What to fetch around a read, in bytes; it grows while what was fetched so comes within two round trips.
    around: u64,
    /// So many more short reads until it is tried again.
    rests: u32,
}

impl Default for Estimate {
    fn default() -> Self {
        Self { round_trip: Duration::ZERO, around: LEAST_BYTES, rests: 0 }
    }
}

impl Link {
    /// A read of so many bytes, that somebody waited for, took so long.
    pub fn note(&self, bytes: u64, took: Duration) {
        if bytes <= SHORT_BYTES {
            self.estimate().note(took);
        }
    }

    /// So many bytes that lie around a read took so long.
    pub fn note_around(&self, bytes: u64, took: Duration) {
        self.estimate().note_around(bytes, took);
    }

    /// How much to fetch around a read, in bytes: a power of two, or nothing.
    pub fn around_bytes(&self) -> u64 {
        self.estimate().around_bytes()
    }

    fn estimate(&self) -> MutexGuard<'_, Estimate> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Estimate {
    fn note(&mut self, took: Duration) {
        // What waits behind others takes longer, so a short time says more than a long one.
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

/// What became of the blocks of a file that were fetched because they lie around reads.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Evidence {
    pub blocks: u64,
    /// Pages of them that were read since.
    pub used: u64,
}

impl Evidence {
    /// Whether to go on with it. A block takes the link about a round trip, and a page that is read saves its reader one; but
    /// the link is idle otherwise, so one page of two blocks will do.
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
    fn nothing_is_fetched_around_on_a_short_link_or_before_it_is_known() {
        assert_eq!(Estimate::default().around_bytes(), 0);
        assert_eq!(with_round_trip(MS / 10).around_bytes(), 0);
        // A time that was long for other reasons is forgotten with the next.
        let mut near = with_round_trip(9 * MS);
        near.note(MS / 10);
        assert_eq!(near.around_bytes(), 0);
    }

    /// What is fetched around reads in the end, by a link of so many Mbit/s.
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
    fn a_block_is_what_the_link_carries_in_about_a_round_trip() {
        assert_eq!(with_round_trip(2 * MS).around_bytes(), LEAST_BYTES, "a first try");
        assert_eq!(settled(2 * MS, 1000), 256 << 10);
        assert_eq!(settled(20 * MS, 100), 256 << 10);
        assert_eq!(settled(2 * MS, 100_000), MOST_BYTES);
        // The least would fill the link.
        assert_eq!(settled(20 * MS, 10), 0);
    }

    #[test]
    fn a_link_that_was_slow_is_tried_again() {
        let mut link = with_round_trip(2 * MS);
        link.note_around(LEAST_BYTES, 50 * MS);
        for _ in 0..REST {
            assert_eq!(link.around_bytes(), 0);
            link.note(2 * MS);
        }
        assert_eq!(link.around_bytes(), LEAST_BYTES);
    }

    #[test]
    fn what_is_of_no_use_is_given_up() {
        assert!(Evidence::default().pays());
        assert!(Evidence { blocks: TRIAL_BLOCKS - 1, used: 0 }.pays());
        assert!(!Evidence { blocks: TRIAL_BLOCKS, used: 0 }.pays());
        assert!(Evidence { blocks: TRIAL_BLOCKS, used: TRIAL_BLOCKS / 2 }.pays());
    }
}
