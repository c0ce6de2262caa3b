//! Lets another thread serve a worker's queues while its own thread is blocked in a handler.
//!
//! Whoever owns the queues leaves them here for each call of the handler, and takes them back afterwards. The monitor finds a
//! call that does not end, and starts another thread, which takes the queues over; the first thread hands in its result
//! ([`Returned`]) when it is back, and ends. From then on, and for a while ([`SLOW_FOR`]), requests that may wait are served by a pool
//! of threads ([`crate::pool`]), for the next one would hold up the queues as long as it takes to notice that.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_engine::{CallSnapshot, MonitorHandle, MonitoredWorker, Replacement, Watch};
use ferry_vfs::sync::lock;

use crate::chain::Chain;
use crate::pool::Pool;
use crate::worker::{Answer, Command, Port, QueueHandler, Worker};

/// How long requests are served by the pool after one that was slow. Slow ones come in series.
const SLOW_FOR: Duration = Duration::from_secs(2);

/// So many looks of the monitor in a row (every 5 ms) find a worker in a handler ...
const LOOKS: u32 = 20;
/// ... and between two of them so many calls end, or fewer: then each takes a millisecond or more, and others wait for it.
const CALLS_PER_LOOK_MAX: u32 = 5;

/// Whether requests of a connection are slow at the moment.
#[derive(Debug)]
pub(crate) struct SlowRequests {
    origin: Instant,
    /// Until when, in milliseconds; 0: they are not.
    until_ms: AtomicU64,
}

impl SlowRequests {
    pub(crate) fn new() -> Self {
        Self { origin: Instant::now(), until_ms: AtomicU64::new(0) }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// One request was.
    pub(crate) fn begin(&self) {
        let for_ms = u64::try_from(SLOW_FOR.as_millis()).unwrap_or(u64::MAX);
        self.until_ms.store(self.now_ms().saturating_add(for_ms), Ordering::Relaxed);
    }

    /// Costs one load where none was.
    pub(crate) fn is_on(&self) -> bool {
        let until = self.until_ms.load(Ordering::Relaxed);
        if until == 0 || self.now_ms() < until {
            return until != 0;
        }
        // Where it was set again meanwhile, that stays.
        let _ = self.until_ms.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed);
        false
    }
}

/// What another thread hands to the owner of the queues.
pub(crate) enum Returned<H: QueueHandler> {
    /// A request that it has served.
    Served { token: u64, chain: Chain, answer: Answer },
    /// A transfer that it has made, and what is to be done about it.
    Transferred { token: u64, outcome: io::Result<usize>, moving: Option<H::PendingTransfer> },
}

/// What the monitor has seen of the calls.
#[derive(Default)]
struct CallRate {
    last: Option<CallSnapshot>,
    inside: u32,
    calls: u64,
}

/// See the module.
pub(crate) struct Takeover<H: QueueHandler> {
    pub(crate) watch: Watch,
    pub(crate) monitor_handle: MonitorHandle,
    pub(crate) slow: Arc<SlowRequests>,
    pub(crate) pool: Arc<Pool<H>>,
    port: Arc<Port<H::Message>>,
    /// The queues, while a handler runs.
    worker: Mutex<Option<Box<Worker<H>>>>,
    returns: Mutex<Vec<Returned<H>>>,
    /// Starts a thread that takes the queues over from a call.
    start: Box<dyn Fn(CallSnapshot) -> io::Result<()> + Send + Sync>,
    looks: Mutex<CallRate>,
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
            worker: Mutex::default(),
            returns: Mutex::default(),
            start: Box::new(start),
            looks: Mutex::default(),
        }
    }

    /// The owner leaves the queues here.
    pub(crate) fn put(&self, worker: Box<Worker<H>>) {
        *lock(&self.worker) = Some(worker);
    }

    /// For the owner alone.
    pub(crate) fn take(&self) -> Option<Box<Worker<H>>> {
        lock(&self.worker).take()
    }

    /// Hands something in to the owner, and wakes it.
    pub(crate) fn give_back(&self, back: Returned<H>) {
        lock(&self.returns).push(back);
        self.port.0.post(Command::Returned);
    }

    /// What was handed in.
    pub(crate) fn returns(&self) -> Vec<Returned<H>> {
        std::mem::take(&mut *lock(&self.returns))
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
                tracing::debug!("no thread can be had to go on with the queues of one that is blocked: {error}");
                Replacement::Nobody
            }
        }
    }

    fn tick(self: Arc<Self>, _: bool) {
        let seen = self.watch.look();
        let mut looks = lock(&self.looks);
        let calls = looks.last.replace(seen).and_then(|last| seen.calls_since(last));
        match calls.filter(|_| seen.is_inside()) {
            Some(calls) => {
                looks.inside += 1;
                looks.calls += calls;
            }
            None => (looks.inside, looks.calls) = (0, 0),
        }
        if looks.inside >= LOOKS {
            if looks.calls <= u64::from(LOOKS * CALLS_PER_LOOK_MAX) {
                self.slow.begin();
            }
            (looks.inside, looks.calls) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_slow_is_not_for_good() {
        let slow = SlowRequests::new();
        assert!(!slow.is_on());
        slow.begin();
        assert!(slow.is_on());
        std::thread::sleep(SLOW_FOR + Duration::from_millis(10));
        assert!(!slow.is_on());
        assert_eq!(slow.until_ms.load(Ordering::Relaxed), 0, "and costs nothing any more");
    }
}
