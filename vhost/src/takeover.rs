//! Lets another thread serve a worker's queues while its own thread is blocked in a handler.
//!
//! The owner of the queues leaves them here for each call of the handler, and takes them back afterwards. The monitor
//! detects a blocked call and starts another thread, which takes the queues over. The first thread hands over its
//! result ([`Completion`]) when the call returns, and ends. For a while ([`SLOW_FOR`]), slow requests then run on a
//! pool of threads ([`crate::pool`]): the next one would block the queues until the monitor detects it.

use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_engine::{BLOCKED, CallSnapshot, MonitorHandle, MonitoredWorker, Replacement, Watch};
use ferry_vfs::sync::lock;

use crate::chain::Chain;
use crate::pool::Pool;
use crate::worker::{ChainState, Command, Placement, Port, QueueHandler, Worker};

/// How long the pool serves requests after a slow one. Slow requests come in series.
const SLOW_FOR: Duration = Duration::from_secs(2);

/// The pool serves no more requests after so many quick ones in a row: passing those on (20 us each) took as long as the queues
/// will wait when the next slow one comes unexpected (5 to 10 ms).
const QUICK_MAX: u32 = 512;
/// A request that takes less is quick.
const QUICK: Duration = Duration::from_millis(1);

/// Checks of the monitor in a row (every 5 ms) that find a worker in a handler, before the rate of its calls is
/// judged.
const CHECKS: u32 = 20;
/// The most calls between two such checks for requests to count as slow: each takes a millisecond or more, and others
/// wait for it.
const CALLS_PER_CHECK_MAX: u32 = 5;

/// Whether requests of a connection are currently slow.
#[derive(Debug)]
pub(crate) struct SlowRequests {
    origin: Instant,
    /// The end in milliseconds since `origin`; 0: they are not slow.
    until_ms: AtomicU64,
    /// The requests that other threads than the queues' owners serve.
    elsewhere: AtomicU32,
    /// The quick ones among them in a row, each of which was the only one.
    quick: AtomicU32,
    /// Those that the pool has to serve [in an order](Placement::InOrder).
    pub(crate) ordered: AtomicU32,
}

impl SlowRequests {
    pub(crate) fn new() -> Self {
        Self {
            origin: Instant::now(),
            until_ms: AtomicU64::new(0),
            elsewhere: AtomicU32::new(0),
            quick: AtomicU32::new(0),
            ordered: AtomicU32::new(0),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Records a slow request.
    pub(crate) fn begin(&self) {
        let for_ms = u64::try_from(SLOW_FOR.as_millis()).unwrap_or(u64::MAX);
        self.quick.store(0, Ordering::Relaxed);
        self.until_ms.store(self.now_ms().saturating_add(for_ms), Ordering::Relaxed);
    }

    /// A request is now served by another thread than the owner of its queue.
    pub(crate) fn sent_elsewhere(&self) {
        self.elsewhere.fetch_add(1, Ordering::Relaxed);
    }

    /// That thread has served it, in this time; `None`: the queue was taken from that thread.
    pub(crate) fn served_elsewhere(&self, took: Option<Duration>) {
        let is_last = self.elsewhere.fetch_sub(1, Ordering::Relaxed) == 1;
        match took {
            Some(took) if took < QUICK => {
                if is_last && self.quick.fetch_add(1, Ordering::Relaxed) + 1 >= QUICK_MAX {
                    self.until_ms.store(0, Ordering::Relaxed);
                }
            }
            Some(took) if took >= BLOCKED => self.begin(),
            _ => self.quick.store(0, Ordering::Relaxed),
        }
    }

    /// Returns whether requests are slow; a single load if none was.
    pub(crate) fn is_on(&self) -> bool {
        let until = self.until_ms.load(Ordering::Relaxed);
        if until == 0 || self.now_ms() < until {
            return until != 0;
        }
        // A concurrent `begin` wins.
        let _ = self.until_ms.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
        false
    }

    /// Returns where a chain is served that may be served at `placement`. Once requests are no longer slow, only those with
    /// an order still go to the pool, as long as it has any.
    pub(crate) fn place(&self, placement: impl FnOnce() -> Placement) -> Placement {
        if self.is_on() {
            return placement();
        }
        match self.ordered.load(Ordering::Acquire) > 0 {
            true => Some(placement()).filter(|placement| matches!(placement, Placement::InOrder(_))),
            false => None,
        }
        .unwrap_or(Placement::Here)
    }
}

/// A completion that another thread hands over to the owner of the queues.
pub(crate) enum Completion<H: QueueHandler> {
    /// A served request.
    Served { token: u64, chain: Chain, state: ChainState },
    /// A finished transfer, and its pending request.
    Transferred { token: u64, outcome: io::Result<usize>, pending: Option<H::PendingTransfer> },
}

/// The monitor's counts of calls.
#[derive(Default)]
struct CallRate {
    last: Option<CallSnapshot>,
    inside: u32,
    calls: u64,
}

/// The place where the owner leaves the queues; see the module.
pub(crate) struct Takeover<H: QueueHandler> {
    pub(crate) watch: Watch,
    pub(crate) monitor_handle: MonitorHandle,
    pub(crate) slow: Arc<SlowRequests>,
    pub(crate) pool: Arc<Pool<H>>,
    port: Arc<Port<H::Message>>,
    /// The queues, while a handler runs: a box, or null. Only the owner that the watch names may touch it: a lock for each request
    /// would cost a twentieth of it.
    worker: AtomicPtr<Worker<H>>,
    completions: Mutex<Vec<Completion<H>>>,
    /// Starts a thread that takes the queues over from a call.
    start: Box<dyn Fn(CallSnapshot) -> io::Result<()> + Send + Sync>,
    checks: Mutex<CallRate>,
}

impl<H: QueueHandler> Takeover<H> {
    pub(crate) fn new(
        port: Arc<Port<H::Message>>,
        monitor_handle: MonitorHandle,
        slow: Arc<SlowRequests>,
        pool: Arc<Pool<H>>,
        start: impl Fn(CallSnapshot) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            watch: Watch::default(),
            monitor_handle,
            slow,
            pool,
            port,
            worker: AtomicPtr::default(),
            completions: Mutex::default(),
            start: Box::new(start),
            checks: Mutex::default(),
        }
    }

    /// Leaves the queues here; called by the owner, before it enters a handler.
    pub(crate) fn put(&self, worker: Box<Worker<H>>)
    where
        // Another thread may take them.
        Worker<H>: Send,
    {
        self.worker.store(Box::into_raw(worker), Ordering::Relaxed);
    }

    /// Takes the queues.
    ///
    /// # Safety
    ///
    /// The caller owns the queues: [`Watch::leave`] or [`Watch::take`] has just said so, which also orders this after [`Self::put`].
    pub(crate) unsafe fn take(&self) -> Option<Box<Worker<H>>> {
        let worker = self.worker.load(Ordering::Relaxed);
        self.worker.store(null_mut(), Ordering::Relaxed);
        // SAFETY: a pointer that is not null is of a box that `put` left, and no other thread takes it: the caller is the one owner.
        (!worker.is_null()).then(|| unsafe { Box::from_raw(worker) })
    }

    /// Hands a completion over to the owner and wakes it.
    pub(crate) fn complete(&self, completion: Completion<H>) {
        lock(&self.completions).push(completion);
        self.port.0.post(Command::Completion);
    }

    /// Removes and returns the completions.
    pub(crate) fn completions(&self) -> Vec<Completion<H>> {
        std::mem::take(&mut *lock(&self.completions))
    }
}

impl<H: QueueHandler> Drop for Takeover<H> {
    fn drop(&mut self) {
        // SAFETY: nobody else has this place any more. Queues are here only if a handler panicked in a way that nothing catches.
        drop(unsafe { self.take() });
    }
}

impl<H: QueueHandler> MonitoredWorker for Takeover<H> {
    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn replace_worker(self: Arc<Self>, seen: CallSnapshot) -> Replacement {
        self.slow.begin();
        match (self.start)(seen) {
            Ok(()) => Replacement::Found,
            Err(error) => {
                tracing::debug!("cannot start a thread to take over the queues of a blocked one: {error}");
                Replacement::Nobody
            }
        }
    }

    fn tick(self: Arc<Self>, _: bool) {
        let seen = self.watch.look();
        let mut checks = lock(&self.checks);
        let calls = checks.last.replace(seen).and_then(|last| seen.calls_since(last));
        match calls.filter(|_| seen.is_inside()) {
            Some(calls) => {
                checks.inside += 1;
                checks.calls += calls;
            }
            None => (checks.inside, checks.calls) = (0, 0),
        }
        if checks.inside >= CHECKS {
            if checks.calls <= u64::from(CHECKS * CALLS_PER_CHECK_MAX) {
                self.slow.begin();
            }
            (checks.inside, checks.calls) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowness_expires() {
        let slow = SlowRequests::new();
        assert!(!slow.is_on());
        slow.begin();
        assert!(slow.is_on());
        let all = [Placement::Here, Placement::Anywhere, Placement::InOrder(3)];
        assert_eq!(all.map(|placement| slow.place(|| placement)), all);
        slow.ordered.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(SLOW_FOR + Duration::from_millis(10));
        assert!(!slow.is_on());
        let ordered = [Placement::Here, Placement::Here, Placement::InOrder(3)];
        assert_eq!(all.map(|placement| slow.place(|| placement)), ordered, "the pool still has such a request");
        slow.ordered.fetch_sub(1, Ordering::Relaxed);
        assert_eq!(slow.place(|| unreachable!("no request is elsewhere")), Placement::Here);
        assert_eq!(slow.until_ms.load(Ordering::Relaxed), 0, "and costs only a load");
    }

    #[test]
    fn slowness_ends_by_quick_requests_in_a_row() {
        let slow = SlowRequests::new();
        let serve = |count: u32, took: Option<Duration>| {
            (0..count).for_each(|_| {
                slow.sent_elsewhere();
                slow.served_elsewhere(took);
            });
        };
        slow.begin();
        serve(QUICK_MAX - 1, Some(Duration::ZERO));
        for other in [Some(QUICK), Some(BLOCKED), None] {
            serve(1, other);
            serve(QUICK_MAX - 1, Some(Duration::ZERO));
            assert!(slow.is_on(), "{other:?} was not quick");
        }
        slow.sent_elsewhere();
        serve(2 * QUICK_MAX, Some(Duration::ZERO));
        assert!(slow.is_on(), "one is still out");
        slow.served_elsewhere(Some(Duration::ZERO));
        assert!(!slow.is_on());
        slow.begin();
        assert!(slow.is_on());
    }
}
