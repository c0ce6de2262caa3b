//! Counters and latency histograms of the requests of one export.
//!
//! A worker counts with a [`Recorder`] of its own: plain loads and stores, because it is the only writer. Other threads
//! count in [`Metrics`] itself, with atomic additions. Nothing is locked or allocated per request: the counters of an
//! operation are allocated when a worker serves it for the first time.
//!
//! ```
//! use ferry_engine::metrics::{Metrics, Recorder};
//! use std::sync::Arc;
//!
//! let metrics = Arc::new(Metrics::new(|operation| format!("operation {operation}")));
//! let mut recorder = Recorder::new(&metrics);
//! let timer = recorder.begin(3);
//! assert_eq!(metrics.snapshot().in_flight(), 1);
//! recorder.end(timer, Ok(4096));
//! let snapshot = metrics.snapshot();
//! assert_eq!((snapshot.in_flight(), snapshot.requests()), (0, 1));
//! assert_eq!(snapshot.operations[0].name, "operation 3");
//! ```

mod histogram;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use ferry_vfs::Errno;
use ferry_vfs::sync::lock;

pub use histogram::{BUCKETS, bucket_end_ns};

use crate::trace::Tracer;

/// The operations of a protocol, as numbers below this: FUSE has opcodes up to 53, 9P has even types up to 122.
pub const OPERATIONS_MAX: usize = 64;
/// Linux has error numbers up to 133; others count as 0.
const ERRNOS: usize = 134;

/// Whether requests are counted: off only to measure what counting costs.
static ON: AtomicBool = AtomicBool::new(true);

/// Stops counting in this process, to measure what it costs. Call it before the first export starts.
pub fn disable() {
    ON.store(false, Ordering::Relaxed);
}

/// The counters of an export.
#[derive(Debug)]
pub struct Metrics {
    name_of: fn(usize) -> String,
    /// The counters of threads without a [`Recorder`].
    shared: Shard,
    /// The counters of workers, also of those that have ended.
    shards: Mutex<Vec<Arc<Shard>>>,
    /// Requests that could not be decoded.
    invalid: AtomicU64,
    trace: Arc<OnceLock<Trace>>,
}

/// The trace that requests of an export are part of.
#[derive(Debug)]
struct Trace {
    export: u32,
    tracer: Arc<Tracer>,
}

/// The counters of one worker.
#[derive(Debug)]
pub struct Recorder {
    shard: Arc<Shard>,
    clock: BatchClock,
}

/// A request that has begun.
#[derive(Clone, Copy, Debug)]
pub struct Timer {
    operation: usize,
    begun: Option<Instant>,
}

/// Counters with one writer, or with writers that add atomically.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    operations: [OnceLock<Box<OperationCounters>>; OPERATIONS_MAX],
    /// That of [`Metrics`].
    trace: Arc<OnceLock<Trace>>,
}

#[derive(Debug)]
struct OperationCounters {
    begun: AtomicU64,
    bytes: AtomicU64,
    latency_ns: AtomicU64,
    /// Requests by latency.
    buckets: [AtomicU64; BUCKETS],
    /// Requests by error number.
    errors: OnceLock<Box<[AtomicU64; ERRNOS]>>,
}

/// How a shard's writer adds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writers {
    /// No other thread writes: no locked instruction.
    One,
    Many,
}

impl Writers {
    fn add(self, counter: &AtomicU64, count: u64) {
        match self {
            Self::One => counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed),
            Self::Many => {
                counter.fetch_add(count, Ordering::Relaxed);
            }
        }
    }
}

/// Reads the clock as rarely as the order of requests allows: a batch of transfers begins at one time and ends at one.
#[derive(Debug, Default)]
struct BatchClock {
    last: Option<Instant>,
    /// The last reading was that of the end of a transfer.
    is_end: bool,
}

impl BatchClock {
    /// Requests of a batch have begun when the first of them was taken, or when the one before was served.
    fn begin(&mut self) -> Instant {
        self.is_end = false;
        *self.last.get_or_insert_with(Instant::now)
    }

    /// Transfers that have ended in a row have ended together.
    fn end_transfer(&mut self) -> Instant {
        match self.last {
            Some(now) if self.is_end => now,
            _ => {
                self.is_end = true;
                *self.last.insert(Instant::now())
            }
        }
    }

    fn end(&mut self) -> Instant {
        *self.last.insert(Instant::now())
    }
}

impl Default for OperationCounters {
    fn default() -> Self {
        Self {
            begun: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            latency_ns: AtomicU64::new(0),
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            errors: OnceLock::new(),
        }
    }
}

impl Shard {
    fn new(trace: &Arc<OnceLock<Trace>>) -> Self {
        Self { operations: [const { OnceLock::new() }; OPERATIONS_MAX], trace: Arc::clone(trace) }
    }

    fn begin(&self, writers: Writers, operation: usize, now: impl FnOnce() -> Instant) -> Timer {
        if !ON.load(Ordering::Relaxed) {
            return Timer { operation, begun: None };
        }
        let operation = operation.min(OPERATIONS_MAX - 1);
        writers.add(&self.operations[operation].get_or_init(Box::default).begun, 1);
        Timer { operation, begun: Some(now()) }
    }

    fn end(&self, writers: Writers, timer: Timer, now: impl FnOnce() -> Instant, outcome: Result<usize, Errno>) {
        let Timer { operation, begun: Some(begun) } = timer else { return };
        let ns = u64::try_from(now().saturating_duration_since(begun).as_nanos()).unwrap_or(u64::MAX);
        let counters = self.operations[operation].get_or_init(Box::default);
        writers.add(&counters.buckets[histogram::bucket(ns)], 1);
        writers.add(&counters.latency_ns, ns);
        if let Some(trace) = self.trace.get() {
            trace.tracer.add(trace.export, operation, (begun, ns), outcome);
        }
        match outcome {
            Ok(0) => {}
            Ok(bytes) => writers.add(&counters.bytes, bytes as u64),
            Err(errno) => {
                let number = usize::try_from(errno.raw_os_error()).ok().filter(|number| *number < ERRNOS);
                let errors = counters.errors.get_or_init(|| Box::new([const { AtomicU64::new(0) }; ERRNOS]));
                writers.add(&errors[number.unwrap_or(0)], 1);
            }
        }
    }
}

impl Metrics {
    /// Creates counters; `name_of` returns the name of an operation by its number, for people.
    #[must_use]
    pub fn new(name_of: fn(usize) -> String) -> Self {
        let trace = Arc::default();
        Self { name_of, shared: Shard::new(&trace), shards: Mutex::default(), invalid: AtomicU64::new(0), trace }
    }

    /// A request begins on a thread without a [`Recorder`].
    #[must_use]
    pub fn begin(&self, operation: usize) -> Timer {
        self.shared.begin(Writers::Many, operation, Instant::now)
    }

    /// A request ends on a thread other than its worker, with so many bytes of data.
    pub fn end(&self, timer: Timer, outcome: Result<usize, Errno>) {
        self.shared.end(Writers::Many, timer, Instant::now, outcome);
    }

    /// Makes requests that begin from now on part of a trace, as those of this export. An export has one trace.
    pub fn trace(&self, tracer: &Arc<Tracer>, export: u32) {
        let _ = self.trace.set(Trace { export, tracer: Arc::clone(tracer) });
    }

    /// Returns the name of an operation.
    #[must_use]
    pub fn operation_name(&self, operation: usize) -> String {
        (self.name_of)(operation)
    }

    /// A request cannot be decoded. It has no operation, and so no latency.
    pub fn invalid(&self) {
        if ON.load(Ordering::Relaxed) {
            self.invalid.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the sums of all threads.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut sum = Snapshot { invalid: self.invalid.load(Ordering::Relaxed), ..Snapshot::default() };
        let shards = lock(&self.shards);
        let shards = || shards.iter().map(|shard| &**shard).chain([&self.shared]);
        for operation in 0..OPERATIONS_MAX {
            let counters: Vec<_> = shards().filter_map(|shard| shard.operations[operation].get()).collect();
            if !counters.is_empty() {
                let counters: Vec<&OperationCounters> = counters.into_iter().map(|counters| &**counters).collect();
                sum.operations.push(OperationSnapshot::sum((self.name_of)(operation), &counters));
            }
        }
        sum
    }
}

impl Recorder {
    /// Creates the counters of one more worker, or takes those of one that has ended.
    #[must_use]
    pub fn new(metrics: &Metrics) -> Self {
        let mut shards = lock(&metrics.shards);
        // Only this reference is left after the end of a worker.
        let free = shards.iter().find(|shard| Arc::strong_count(shard) == 1).cloned();
        let shard = free.unwrap_or_else(|| {
            let shard = Arc::new(Shard::new(&metrics.trace));
            shards.push(Arc::clone(&shard));
            shard
        });
        Self { shard, clock: BatchClock::default() }
    }

    /// A request begins.
    pub fn begin(&mut self, operation: usize) -> Timer {
        self.shard.begin(Writers::One, operation, || self.clock.begin())
    }

    /// A request that was served at once ends, with so many bytes of data.
    pub fn end(&mut self, timer: Timer, outcome: Result<usize, Errno>) {
        self.shard.end(Writers::One, timer, || self.clock.end(), outcome);
    }

    /// The transfer of a request has ended, and with it the request.
    pub fn end_transfer(&mut self, timer: Timer, outcome: Result<usize, Errno>) {
        self.shard.end(Writers::One, timer, || self.clock.end_transfer(), outcome);
    }

    /// No request of the batch is left to take: the worker transfers or waits next.
    pub fn end_batch(&mut self) {
        self.clock = BatchClock::default();
    }
}

/// The counters of an export at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The operations that were requested, by their numbers.
    pub operations: Vec<OperationSnapshot>,
    /// Requests that could not be decoded, which are none of these.
    pub invalid: u64,
}

/// The counters of an operation at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperationSnapshot {
    /// Its name.
    pub name: String,
    /// Requests that have begun and not ended.
    pub in_flight: u64,
    /// Bytes of data.
    pub bytes: u64,
    /// The sum of the latencies in nanoseconds.
    pub latency_ns: u64,
    /// Ended requests by latency; [`bucket_end_ns`] returns the longest of a bucket.
    pub buckets: Vec<u64>,
    /// Requests that failed, by error number; 0: another one than Linux has.
    pub errors: Vec<(i32, u64)>,
}

impl Snapshot {
    /// Returns the number of requests that have begun and not ended.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.operations.iter().map(|operation| operation.in_flight).sum()
    }

    /// Returns the number of requests that have ended.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.operations.iter().map(OperationSnapshot::requests).sum()
    }
}

impl OperationSnapshot {
    /// Returns the number of requests that have ended.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.buckets.iter().sum()
    }

    fn sum(name: String, counters: &[&OperationCounters]) -> Self {
        let total = |counter: &dyn Fn(&OperationCounters) -> u64| counters.iter().map(|one| counter(one)).sum::<u64>();
        let errors =
            |number: usize| total(&|one| one.errors.get().map_or(0, |errors| errors[number].load(Ordering::Relaxed)));
        let errors = (0..ERRNOS).map(|number| (i32::try_from(number).unwrap_or(0), errors(number)));
        // Ends are read first: what begins meanwhile makes the number in flight too large, never negative.
        let buckets: Vec<u64> = (0..BUCKETS).map(|at| total(&|one| one.buckets[at].load(Ordering::Relaxed))).collect();
        std::sync::atomic::fence(Ordering::Acquire);
        let begun = total(&|one| one.begun.load(Ordering::Relaxed));
        Self {
            name,
            in_flight: begun.saturating_sub(buckets.iter().sum()),
            bytes: total(&|one| one.bytes.load(Ordering::Relaxed)),
            latency_ns: total(&|one| one.latency_ns.load(Ordering::Relaxed)),
            buckets,
            errors: errors.filter(|(_, count)| *count > 0).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn metrics() -> Metrics {
        Metrics::new(|operation| operation.to_string())
    }

    #[test]
    fn workers_and_other_threads_count_together() {
        let metrics = metrics();
        let mut first = Recorder::new(&metrics);
        let mut second = Recorder::new(&metrics);
        let timers = [first.begin(1), second.begin(1), metrics.begin(2), first.begin(63)];
        assert_eq!(metrics.snapshot().in_flight(), 4);
        first.end(timers[0], Ok(10));
        second.end_transfer(timers[1], Ok(20));
        // Another thread ends what a worker has begun.
        metrics.end(timers[3], Err(Errno::NOENT));
        let seen = metrics.snapshot();
        assert_eq!((seen.in_flight(), seen.requests()), (1, 3));
        let [one, two, last] = &seen.operations[..] else { panic!("{seen:?}") };
        assert_eq!((two.in_flight, two.requests()), (1, 0));
        assert_eq!((one.name.as_str(), one.bytes, one.requests()), ("1", 30, 2));
        assert_eq!((last.name.as_str(), last.bytes, &*last.errors), ("63", 0, &[(2, 1)][..]));
        assert!(one.latency_ns > 0);
        metrics.end(timers[2], Err(Errno::from_raw_os_error(4000)));
        let seen = metrics.snapshot();
        assert_eq!((seen.in_flight(), &*seen.operations[1].errors), (0, &[(0, 1)][..]));
        metrics.invalid();
        let seen = metrics.snapshot();
        assert_eq!((seen.invalid, seen.requests()), (1, 4), "it is none of the operations");
    }

    #[test]
    fn counts_outlive_their_worker_whose_counters_are_used_again() {
        let metrics = metrics();
        for requests in 1..=3 {
            let mut recorder = Recorder::new(&metrics);
            let timer = recorder.begin(5);
            recorder.end(timer, Ok(0));
            assert_eq!(metrics.snapshot().requests(), requests);
        }
        assert_eq!(lock(&metrics.shards).len(), 1);
    }

    #[test]
    fn a_batch_of_transfers_reads_the_clock_twice() {
        let mut clock = BatchClock::default();
        let begun = clock.begin();
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(clock.begin(), begun);
        let ended = clock.end_transfer();
        assert!(ended >= begun + Duration::from_millis(1));
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(clock.end_transfer(), ended);
        // What was served at once ends when it was served, which is when the next one begins.
        let served = clock.end();
        assert!(served > ended);
        assert_eq!(clock.begin(), served);
    }
}
