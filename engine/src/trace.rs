//! Requests for a trace: all workers add completed requests, and one thread takes them.
//!
//! Workers never wait for that thread: if it is slow, requests are dropped and counted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferry_vfs::Errno;
use ferry_vfs::sync::lock;

/// The maximum number of queued requests: a few MB, a tenth of a second of the fastest exports.
const WAITING_MAX: usize = 1 << 16;

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedRequest {
    /// The number of its export, see [`crate::metrics::Metrics::trace`].
    pub export: u32,
    /// The number of its operation, see [`crate::metrics::Metrics::operation_name`].
    pub operation: usize,
    /// Its start in nanoseconds since the start of the trace.
    pub begin_ns: u64,
    /// Its duration in nanoseconds.
    pub latency_ns: u64,
    /// The number of its data bytes, or its error.
    pub outcome: Result<usize, Errno>,
}

/// The requests of a trace.
#[derive(Debug)]
pub struct Tracer {
    begin: Instant,
    is_open: AtomicBool,
    waiting: Mutex<Waiting>,
    /// The queue is half full, or the trace ends.
    is_due: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    requests: Vec<TracedRequest>,
    left_out: u64,
}

impl Default for Tracer {
    /// Begins a trace.
    fn default() -> Self {
        let (waiting, is_due) = (Mutex::default(), Condvar::new());
        Self { begin: Instant::now(), is_open: AtomicBool::new(true), waiting, is_due }
    }
}

impl Tracer {
    /// Adds a completed request. Requests that began before the trace are ignored.
    pub(crate) fn add(
        &self,
        export: u32,
        operation: usize,
        (begin, latency_ns): (Instant, u64),
        outcome: Result<usize, Errno>,
    ) {
        if !self.is_open.load(Ordering::Relaxed) {
            return;
        }
        let Some(begin) = begin.checked_duration_since(self.begin) else { return };
        let begin_ns = u64::try_from(begin.as_nanos()).unwrap_or(u64::MAX);
        let mut waiting = lock(&self.waiting);
        if waiting.requests.len() >= WAITING_MAX {
            waiting.left_out += 1;
            return;
        }
        waiting.requests.push(TracedRequest { export, operation, begin_ns, latency_ns, outcome });
        if waiting.requests.len() == WAITING_MAX / 2 {
            self.is_due.notify_one();
        }
    }

    /// Waits until the time is over, the queue is half full, or the trace has ended; then moves the requests to `requests`, which must
    /// be empty. Returns the number of requests dropped since the last call.
    pub fn take(&self, wait: Duration, requests: &mut Vec<TracedRequest>) -> u64 {
        let waiting = lock(&self.waiting);
        let goes_on =
            |waiting: &mut Waiting| waiting.requests.len() < WAITING_MAX / 2 && self.is_open.load(Ordering::Relaxed);
        let waited = self.is_due.wait_timeout_while(waiting, wait, goes_on);
        let mut waiting = waited.unwrap_or_else(PoisonError::into_inner).0;
        std::mem::swap(&mut waiting.requests, requests);
        std::mem::take(&mut waiting.left_out)
    }

    /// Returns the time since its start.
    pub fn elapsed(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Ends the trace: later requests are ignored.
    pub fn close(&self) {
        let waiting = lock(&self.waiting);
        self.is_open.store(false, Ordering::Relaxed);
        drop(waiting);
        self.is_due.notify_all();
    }

    /// Returns whether it has not ended.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::metrics::{Metrics, Recorder};

    #[test]
    fn requests_are_part_of_a_trace_from_its_begin_to_its_end() {
        let metrics = Metrics::new(|operation| operation.to_string());
        let mut recorder = Recorder::new(&metrics);
        let before = recorder.begin(1);
        recorder.end_batch();
        let tracer = Arc::<Tracer>::default();
        metrics.trace(&tracer, 7);
        recorder.end(before, Ok(1));
        recorder.end_batch();
        let timer = recorder.begin(2);
        recorder.end(timer, Ok(3));
        let timer = metrics.begin(4);
        metrics.end(timer, Err(Errno::NOENT));
        let mut requests = Vec::new();
        assert_eq!(tracer.take(Duration::ZERO, &mut requests), 0);
        let [first, second] = requests[..] else { panic!("{requests:?}") };
        assert_eq!((first.export, first.operation, first.outcome), (7, 2, Ok(3)));
        assert_eq!((second.operation, second.outcome), (4, Err(Errno::NOENT)));
        assert!(first.begin_ns <= second.begin_ns && second.latency_ns > 0, "{requests:?}");
        // Workers that start later take part, too.
        let mut later = Recorder::new(&metrics);
        let timer = later.begin(5);
        later.end(timer, Ok(0));
        requests.clear();
        tracer.take(Duration::ZERO, &mut requests);
        assert_eq!(requests.len(), 1);
        tracer.close();
        let timer = later.begin(5);
        later.end(timer, Ok(0));
        requests.clear();
        // An ended trace does not wait.
        tracer.take(Duration::from_secs(3600), &mut requests);
        assert!(requests.is_empty() && !tracer.is_open());
    }

    #[test]
    fn an_absent_reader_costs_bounded_memory() {
        let tracer = Tracer::default();
        let now = Instant::now();
        for _ in 0..WAITING_MAX + 10 {
            tracer.add(0, 1, (now, 1), Ok(0));
        }
        let mut requests = Vec::new();
        assert_eq!(tracer.take(Duration::from_secs(3600), &mut requests), 10);
        assert_eq!(requests.len(), WAITING_MAX);
    }
}
