//! The state of incomplete packs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::format::index::Places;
use crate::read::cache_limit::CacheLimit;
use crate::read::fetch_locks::FetchLocks;
use crate::read::singleflight::Singleflight;
use crate::store::fetch::{FAR_RUN_BYTES_MAX, FetchOptions, RUN_BYTES_MAX};
use crate::store::packs::Store;
use crate::store::places::StorePlaces;

/// What the incomplete packs of an image share.
#[derive(Debug)]
pub(crate) struct PartialPacks {
    pub store: PathBuf,
    pub missing: FetchOptions,
    pub limit: Option<Arc<CacheLimit>>,
    /// Fetches of other processes.
    pub locks: FetchLocks,
    /// The locations of objects in other packs of the store.
    elsewhere: OnceLock<StorePlaces>,
    pub fetched_bytes: AtomicU64,
    /// Bytes of objects that other packs of the store had.
    pub deduplicated_bytes: AtomicU64,
    pub demand: Demand,
    pub requests: RequestTimes,
}

/// Shorter requests say nothing about the rate: all of one may come with its first byte.
const RATE_BYTES_MIN: u64 = 1 << 20;

/// What requests for missing objects take: means, in which later ones count more. What is lost between two threads does not matter.
#[derive(Debug, Default)]
pub(crate) struct RequestTimes {
    /// From the request to its first byte, in microseconds.
    latency_us: AtomicU64,
    /// After that, in bytes of objects per millisecond, of requests of some length.
    rate: AtomicU64,
}

impl RequestTimes {
    /// A request took so long until its first byte, and then so long for so many bytes.
    pub(crate) fn note(&self, latency: Duration, rest: Duration, bytes: u64) {
        let mean = |mean: &AtomicU64, new: u64| {
            let old = mean.load(Ordering::Relaxed);
            mean.store(if old == 0 { new } else { old / 4 * 3 + new / 4 }, Ordering::Relaxed);
        };
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        mean(&self.latency_us, micros(latency));
        if bytes >= RATE_BYTES_MIN {
            mean(&self.rate, bytes.saturating_mul(1000) / micros(rest).max(1));
        }
    }

    /// The size of requests that wait for their first byte for a third of their time, in bytes, within limits.
    pub(crate) fn run_bytes(&self) -> u64 {
        let [latency_us, rate] = [&self.latency_us, &self.rate].map(|mean| mean.load(Ordering::Relaxed));
        (latency_us / 1000).saturating_mul(rate).saturating_mul(2).clamp(RUN_BYTES_MAX, FAR_RUN_BYTES_MAX)
    }
}

/// How long readers have waited for what was not here.
#[derive(Debug)]
pub(crate) struct Demand {
    since: Instant,
    /// How many have begun to wait.
    readers: AtomicU64,
    /// In nanoseconds, by all.
    waited: AtomicU64,
    /// When the last one had to wait, in nanoseconds after `since`.
    last: AtomicU64,
}

impl Demand {
    fn new() -> Self {
        let (readers, waited, last) = Default::default();
        Self { since: Instant::now(), readers, waited, last }
    }

    /// Has a reader wait.
    pub(crate) fn wait<T>(&self, work: impl FnOnce() -> T) -> T {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let begun = Instant::now();
        self.readers.fetch_add(1, Ordering::Relaxed);
        let found = work();
        self.waited.fetch_add(nanoseconds(begun.elapsed()), Ordering::Relaxed);
        self.last.fetch_max(nanoseconds(self.since.elapsed()), Ordering::Relaxed);
        found
    }

    /// Whether any reader had to wait.
    pub(crate) fn has_readers(&self) -> bool {
        self.readers.load(Ordering::Relaxed) > 0
    }

    /// Returns how long readers have waited, and how long none has.
    pub(crate) fn times(&self) -> (Duration, Duration) {
        let [waited, last] = [&self.waited, &self.last].map(|time| Duration::from_nanos(time.load(Ordering::Relaxed)));
        (waited, self.since.elapsed().saturating_sub(last))
    }
}

impl PartialPacks {
    pub(crate) fn new(store: &Path, missing: FetchOptions) -> Arc<Self> {
        let limit = missing.cache_bytes.map(|bytes| Arc::new(CacheLimit::new(bytes)));
        Arc::new(Self {
            store: store.into(),
            missing,
            limit,
            locks: FetchLocks::of(store),
            elsewhere: OnceLock::new(),
            fetched_bytes: AtomicU64::new(0),
            deduplicated_bytes: AtomicU64::new(0),
            demand: Demand::new(),
            requests: RequestTimes::default(),
        })
    }

    pub(crate) fn elsewhere(&self) -> &StorePlaces {
        self.elsewhere.get_or_init(|| {
            let found = Store::open(&self.store).and_then(|store| store.places(false));
            found.unwrap_or_else(|error| {
                tracing::warn!("{error}: objects are fetched even where other packs have them");
                StorePlaces::known(Places::new())
            })
        })
    }
}

/// The state of an incomplete pack.
#[derive(Debug)]
pub(crate) struct PartialPack {
    pub common: Arc<PartialPacks>,
    /// The index of the image's pack.
    pub number: usize,
    /// Whether concurrent fetches of other processes are ignored.
    pub alone: bool,
    pub flights: Singleflight,
}

impl PartialPack {
    pub(crate) fn new(common: &Arc<PartialPacks>, number: usize) -> Self {
        Self { common: Arc::clone(common), number, alone: common.limit.is_some(), flights: Singleflight::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_longer_the_longer_they_wait() {
        for (latency_ms, mib_per_second, mib) in
            [(0, 1000, 4), (1, 500, 4), (50, 100, 10), (50, 1000, 32), (5000, 1, 10)]
        {
            let times = RequestTimes::default();
            assert_eq!(times.run_bytes(), RUN_BYTES_MAX);
            times.note(Duration::from_millis(latency_ms), Duration::from_secs(1), mib_per_second << 20);
            assert_eq!((times.run_bytes() + (1 << 19)) >> 20, mib, "{latency_ms} ms");
            // Of a short request all comes at once.
            let before = times.run_bytes();
            times.note(Duration::from_millis(latency_ms), Duration::from_micros(10), 200_000);
            assert_eq!(times.run_bytes(), before);
            // What has changed is found out.
            (0..30).for_each(|_| times.note(Duration::ZERO, Duration::from_secs(1), 1 << 20));
            assert_eq!(times.run_bytes(), RUN_BYTES_MAX);
        }
        let times = RequestTimes::default();
        times.note(Duration::MAX, Duration::ZERO, u64::MAX);
        assert_eq!(times.run_bytes(), FAR_RUN_BYTES_MAX);
    }
}
