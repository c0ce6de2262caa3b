//! Who reads here and there over a long link: while they wait for a page, the link carries what lies around it.
//!
//! A random read takes a round trip whatever it asks for, and the link is idle meanwhile. So as much is fetched around it, in
//! messages of its own behind the one that is waited for, as the link carries in one more round trip, and for as long as
//! enough of that is read later.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::pages::PAGE;

/// The least that is fetched around a read, in bytes, and what is tried before the link's rate is known.
const LEAST_BYTES: u64 = 64 << 10;

/// The longest message, in bytes, whose time is taken for that of a round trip.
const SHORT_BYTES: u64 = 16 << 10;

/// The least round trip that is worth it: machines side by side have less.
const FAR: Duration = Duration::from_micros(500);

/// What is fetched around the reads of a file before any of it must have been of use, in pages: 16 MiB.
const TRIAL_PAGES: u64 = (16 << 20) / PAGE;

/// Then one of so many pages must be: with 2 ms and 1 Gbit/s a page that is of use saves what the link carries of 60 pages.
const PAGES_PER_USE: u64 = 64;

/// A link, as the times of its messages show it.
#[derive(Debug, Default)]
pub(super) struct Link(Mutex<Estimate>);

#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    /// Zero: not known.
    round_trip: Duration,
    /// In bytes for each second. Zero: not known.
    rate: u64,
}

impl Link {
    /// A read of so many bytes took so long.
    pub fn note(&self, bytes: u64, took: Duration) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note(bytes, took);
    }

    /// How much to fetch around a read, in bytes: a power of two, or nothing.
    pub fn around_bytes(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).around_bytes()
    }
}

impl Estimate {
    fn note(&mut self, bytes: u64, took: Duration) {
        if bytes <= SHORT_BYTES {
            // What waits behind others takes longer, so a short time says more than a long one.
            let more = took.saturating_sub(self.round_trip) / 8;
            let is_shorter = self.round_trip.is_zero() || took < self.round_trip;
            self.round_trip = if is_shorter { took } else { self.round_trip + more };
        } else if bytes >= LEAST_BYTES && !self.round_trip.is_zero() {
            // Of several messages under way each counts the others' time, too: the rate is rather too small.
            let carried = took.saturating_sub(self.round_trip).max(took / 32).as_nanos().max(1);
            let rate = u64::try_from(u128::from(bytes) * 1_000_000_000 / carried).unwrap_or(u64::MAX);
            self.rate = if self.rate == 0 { rate } else { self.rate - self.rate / 4 + rate / 4 };
        }
    }

    fn around_bytes(&self) -> u64 {
        if self.round_trip < FAR {
            return 0;
        }
        if self.rate == 0 {
            return LEAST_BYTES;
        }
        let carries = u128::from(self.rate) * self.round_trip.as_nanos() / 1_000_000_000;
        let carries = u64::try_from(carries).unwrap_or(u64::MAX);
        if carries < LEAST_BYTES { 0 } else { 1 << carries.ilog2() }
    }
}

/// What became of the pages of a file that were fetched because they lie around others.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Evidence {
    pub fetched: u64,
    /// Of these, read since.
    pub used: u64,
}

impl Evidence {
    /// Whether to go on with it.
    pub fn pays(self) -> bool {
        self.fetched < TRIAL_PAGES || self.used.saturating_mul(PAGES_PER_USE) >= self.fetched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn estimate(times: &[(u64, u64)]) -> u64 {
        let mut estimate = Estimate::default();
        for &(bytes, micros) in times {
            estimate.note(bytes, Duration::from_micros(micros));
        }
        estimate.around_bytes()
    }

    #[test]
    fn nothing_is_fetched_around_on_a_short_link_or_before_it_is_known() {
        assert_eq!(estimate(&[]), 0);
        assert_eq!(estimate(&[(MIB, 3000)]), 0, "without a round trip");
        assert_eq!(estimate(&[(4096, 60), (MIB, 400)]), 0);
        // A time that was long for other reasons is forgotten with the next.
        assert_eq!(estimate(&[(4096, 9000), (4096, 60)]), 0);
    }

    #[test]
    fn a_link_carries_one_round_trip_more() {
        assert_eq!(estimate(&[(4096, 2000)]), LEAST_BYTES, "a first try");
        // 1 Gbit/s, 2 ms: 250,000 bytes.
        assert_eq!(estimate(&[(4096, 2000), (125_000, 3000)]), 128 << 10);
        assert_eq!(estimate(&[(4096, 2000), (MIB, 3000)]), 2 * MIB);
        // 10 Mbit/s, 20 ms: it would fill the link.
        assert_eq!(estimate(&[(4096, 20_000), (64 << 10, 72_000)]), 0);
        // Less time than a round trip for much: no division by nothing.
        assert!(estimate(&[(4096, 2000), (MIB, 1000)]) >= MIB);
        assert!(estimate(&[(4096, 2000), (u64::MAX, 0)]) >= MIB);
    }

    #[test]
    fn what_is_of_no_use_is_given_up() {
        assert!(Evidence::default().pays());
        assert!(Evidence { fetched: TRIAL_PAGES - 1, used: 0 }.pays());
        assert!(!Evidence { fetched: TRIAL_PAGES, used: 0 }.pays());
        assert!(Evidence { fetched: TRIAL_PAGES, used: TRIAL_PAGES / PAGES_PER_USE }.pays());
    }
}
