//! Limits of requests and bytes per second.
//!
//! A [`TokenBucket`] holds the rates of a group of exports. Each export has a [`RateLimiter`], which takes tokens from the
//! bucket in portions of [`PORTION`]; the workers of the export share its tokens. A request that is served is charged,
//! even below zero; before a worker takes the next request, it waits while the tokens are used up. So a request costs two
//! atomic subtractions and no lock, and one load if there is no limit.
//!
//! Limiters with empty portions reserve the next one in turn, and wait for its time. So the exports of a group get equal
//! shares of the rate, whatever the size of their requests: a large request is paid by several portions.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;

/// The most requests per second: more than any machine serves.
pub const REQUESTS_MAX: u64 = 1_000_000_000;
/// The most bytes per second: 1 TiB/s, more than any memory moves.
pub const BYTES_MAX: u64 = 1 << 40;
/// The longest time whose unused rate may be used at once.
pub const BURST_MAX: Duration = Duration::from_secs(60);
/// The shortest such time: a worker that wakes up late does not lose what it waited for.
pub const BURST_MIN: Duration = Duration::from_millis(50);

/// What a limiter takes at once, in time at the whole rate: long enough to cost nothing, short enough to be fair.
const PORTION: Duration = Duration::from_millis(4);
/// The longest wait before the rates are read again, which may have changed.
const WAIT_MAX: Duration = Duration::from_millis(100);
/// The bytes that one request is charged at most. Longer copies end early.
const CHARGE_MAX: u64 = 1 << 40;
/// The tokens of something without a limit: enough for years.
const UNLIMITED: i64 = 1 << 62;
const SECOND_NS: u64 = 1_000_000_000;

/// Requests and bytes.
const KINDS: usize = 2;

/// Rates of a bucket. `None`: without a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// Requests per second, up to [`REQUESTS_MAX`].
    pub requests: Option<NonZeroU64>,
    /// Bytes of data per second, up to [`BYTES_MAX`].
    pub bytes: Option<NonZeroU64>,
    /// The time whose unused rate may be used at once, from [`BURST_MIN`] to [`BURST_MAX`].
    pub burst: Duration,
}

impl Rates {
    fn of_kinds(&self) -> [Option<NonZeroU64>; KINDS] {
        [self.requests, self.bytes]
    }
}

/// The rates of a group, and the time up to which they are handed out.
#[derive(Debug)]
struct Shared {
    rates: Option<Rates>,
    /// Counts changes of the rates.
    changes: u64,
    /// Up to when each kind of token is handed out, in nanoseconds.
    handed_out_ns: [u64; KINDS],
}

/// A token bucket that several exports use together.
#[derive(Debug)]
pub struct TokenBucket {
    origin: Instant,
    /// Identifies the current rates; 0: there is no limit.
    version: AtomicU64,
    /// Locked once per portion.
    shared: Mutex<Shared>,
}

impl TokenBucket {
    /// Creates a bucket with these rates, or without a limit.
    #[must_use]
    pub fn new(rates: Option<Rates>) -> Arc<Self> {
        let shared = Shared { rates: None, changes: 0, handed_out_ns: [0; KINDS] };
        let bucket = Self { origin: Instant::now(), version: AtomicU64::new(0), shared: Mutex::new(shared) };
        bucket.set(rates);
        Arc::new(bucket)
    }

    /// Changes the rates. Requests that wait notice it within a tenth of a second.
    pub fn set(&self, rates: Option<Rates>) {
        self.set_at(self.now_ns(), rates);
    }

    fn set_at(&self, now_ns: u64, rates: Option<Rates>) {
        let mut shared = lock(&self.shared);
        shared.rates = rates;
        shared.changes += 1;
        shared.handed_out_ns = [now_ns; KINDS];
        let version = if rates.is_some() { shared.changes } else { 0 };
        self.version.store(version, Ordering::Relaxed);
    }

    /// Returns the rates.
    pub fn rates(&self) -> Option<Rates> {
        lock(&self.shared).rates
    }

    fn now_ns(&self) -> u64 {
        nanoseconds(self.origin.elapsed())
    }
}

impl Shared {
    /// Hands out the next portion of one kind; returns when it may be used.
    fn reserve(&mut self, kind: usize, (tokens, rate): (u64, u64), burst_ns: u64, now_ns: u64) -> u64 {
        let start = self.handed_out_ns[kind].max(now_ns.saturating_sub(burst_ns));
        let length = u128::from(tokens) * u128::from(SECOND_NS) / u128::from(rate);
        self.handed_out_ns[kind] = start.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
        start
    }
}

/// When the next portion of each kind may be used, if it is reserved.
type Turns = [Option<u64>; KINDS];

/// The tokens of one export.
#[derive(Debug)]
pub struct RateLimiter {
    bucket: Arc<TokenBucket>,
    /// The version of the rates that the tokens are of.
    version: AtomicU64,
    /// The tokens of each kind that are left; below zero, what must be waited for.
    tokens: [AtomicI64; KINDS],
    turns: Mutex<Turns>,
    waits: AtomicU64,
}

impl RateLimiter {
    /// Creates the limiter of one export, without tokens.
    #[must_use]
    pub fn new(bucket: &Arc<TokenBucket>) -> Arc<Self> {
        let (bucket, turns) = (Arc::clone(bucket), Mutex::default());
        let (version, tokens, waits) = Default::default();
        Arc::new(Self { bucket, version, tokens, turns, waits })
    }

    /// Returns how many times requests had to wait for their next portion of tokens.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Returns whether there is a limit.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.bucket.version.load(Ordering::Relaxed) != 0
    }

    /// Charges a request with this many bytes of data.
    #[inline]
    pub fn charge(&self, bytes: u64) {
        if self.is_on() {
            self.tokens[0].fetch_sub(1, Ordering::Relaxed);
            self.charge_bytes(bytes);
        }
    }

    /// Charges bytes alone: data that a request has turned out to move.
    pub fn charge_bytes(&self, bytes: u64) {
        if self.is_on() {
            let bytes = i64::try_from(bytes.min(CHARGE_MAX)).unwrap_or(i64::MAX);
            self.tokens[1].fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Returns how long to wait before the next request; `None`: it may be served now. The wait is at most a tenth of a
    /// second, because the rates may change: call it again after that.
    #[inline]
    pub fn wait(&self) -> Option<Duration> {
        if self.may_go_on() { None } else { self.refill(self.bucket.now_ns()) }
    }

    #[inline]
    fn may_go_on(&self) -> bool {
        let version = self.bucket.version.load(Ordering::Relaxed);
        version == 0
            || version == self.version.load(Ordering::Relaxed)
                && self.tokens.iter().all(|tokens| tokens.load(Ordering::Relaxed) > 0)
    }

    /// Takes the portions whose time has come, and reserves the next ones.
    #[cold]
    fn refill(&self, now_ns: u64) -> Option<Duration> {
        let mut turns = lock(&self.turns);
        let mut shared = lock(&self.bucket.shared);
        let rates = shared.rates?;
        if self.version.swap(shared.changes, Ordering::Relaxed) != shared.changes {
            *turns = Turns::default();
            self.tokens.iter().for_each(|tokens| tokens.store(0, Ordering::Relaxed));
        }
        let burst_ns = nanoseconds(rates.burst);
        let mut wait_ns = 0;
        for (kind, rate) in rates.of_kinds().into_iter().enumerate() {
            let tokens = &self.tokens[kind];
            let Some(rate) = rate else {
                tokens.store(UNLIMITED, Ordering::Relaxed);
                continue;
            };
            let portion = portion(rate.get());
            while tokens.load(Ordering::Relaxed) <= 0 {
                let turn = &mut turns[kind];
                let start = *turn.get_or_insert_with(|| {
                    let start = shared.reserve(kind, (portion, rate.get()), burst_ns, now_ns);
                    self.waits.fetch_add(u64::from(start > now_ns), Ordering::Relaxed);
                    start
                });
                if start > now_ns {
                    wait_ns = wait_ns.max(start - now_ns);
                    break;
                }
                tokens.fetch_add(i64::try_from(portion).unwrap_or(i64::MAX), Ordering::Relaxed);
                *turn = None;
            }
        }
        (wait_ns > 0).then(|| Duration::from_nanos(wait_ns).min(WAIT_MAX))
    }
}

/// The tokens of a portion at this rate, at least one.
fn portion(rate: u64) -> u64 {
    (u128::from(rate) * PORTION.as_nanos() / u128::from(SECOND_NS)).try_into().unwrap_or(u64::MAX).max(1)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
