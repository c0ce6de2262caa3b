//! Monitors the workers of all exports: replaces a worker that is blocked in a handler, and finally aborts its request
//! if the export's policy requires it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use ferry_vfs::Errno;

use crate::barrier::{barrier, register_barrier};
use crate::generation::{Generation, GenerationCell, NotEnded};
use crate::watch::{CallSnapshot, Watch};
use ferry_vfs::sync::lock;

/// How often workers are checked. A check costs one load per worker.
const TICK: Duration = Duration::from_millis(5);

/// A handler that takes longer than this is blocked: longer than a disk seek, shorter than people notice.
pub const BLOCKED: Duration = Duration::from_millis(20);

/// How often workers with blocked handlers are polled.
const POLL_BLOCKED_EVERY: Duration = Duration::from_millis(100);

/// After this long without a request the monitor sleeps until the next one.
const QUIET: Duration = Duration::from_millis(500);

/// The longest sleep where `membarrier(2)` is missing, because the monitor may then miss the first request.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// The request that a worker is serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentRequest {
    /// Its number.
    pub unique: u64,
    /// The index of its entry.
    pub place: usize,
    /// The generation that may send its reply.
    pub generation: Generation,
    /// The handler's call.
    pub call: CallSnapshot,
}

/// The outcome of replacing a blocked worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replacement {
    /// Another thread has taken over.
    Found,
    /// No thread is available, or there are enough. Retry: aborting a request makes room.
    Nobody,
    /// The call has just ended.
    NotNeeded,
}

/// Returns the error for a request that takes too long, if any, by its number, the current time, and its start.
pub type AbortPolicy = dyn Fn(u64, Instant, Instant) -> Option<Errno> + Send;

/// A place that serves one request at a time: a CPU's ring, a thread that reads /dev/fuse, a device's queues.
pub trait MonitoredWorker: Send + Sync {
    /// Returns the watch that the owner updates around each call.
    fn watch(&self) -> &Watch;
    /// Returns the current request; valid only while the watch does not change.
    fn serving(&self) -> CurrentRequest {
        CurrentRequest {
            unique: 0,
            place: 0,
            generation: GenerationCell::default().current(),
            call: self.watch().look(),
        }
    }
    /// Replaces the blocked worker by another thread.
    fn replace_worker(self: Arc<Self>, seen: CallSnapshot) -> Replacement;
    /// Returns whether the request has no reply yet and may be aborted.
    fn runs(&self, _serving: &CurrentRequest) -> bool {
        false
    }
    /// Replies to a request with an error in place of its handler, whose thread does not count against the maximum.
    ///
    /// # Errors
    ///
    /// The request has a reply already, or the memory of the reply is in use.
    fn abort(&self, _serving: &CurrentRequest, _errno: Errno) -> Result<(), NotEnded> {
        Err(NotEnded::Over)
    }
    /// Calls the policy for each transfer in flight and each request that another thread will reply to, with its number
    /// and start, and ends it if the policy returns an error. Returns whether there are any.
    fn apply_policy(&self, _verdict: &dyn Fn(u64, Instant) -> Option<Errno>) -> bool {
        false
    }
    /// Called periodically while a handler is blocked, to find events that were missed.
    fn poll_blocked(&self) {}
    /// Called at every check; `_served` is whether requests were served since the last one.
    fn tick(self: Arc<Self>, _served: bool) {}
}

#[derive(Default)]
struct Shared {
    workers: Mutex<Vec<Weak<dyn MonitoredWorker>>>,
    /// The monitor sleeps, or is about to. Workers clear this and wake it.
    sleeps: AtomicBool,
    stop: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

/// The handle with which workers wake the monitor.
#[derive(Clone, Default)]
pub struct MonitorHandle(Arc<Shared>);

impl std::fmt::Debug for MonitorHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MonitorHandle")
    }
}

impl MonitorHandle {
    /// Monitors another worker until it is dropped.
    pub fn add(&self, post: Weak<dyn MonitoredWorker>) {
        lock(&self.0.workers).push(post);
        self.ring();
    }

    /// Announces a request, which the watch shows already; costs one load unless the monitor sleeps.
    pub fn ring(&self) {
        if self.0.sleeps.load(Ordering::Relaxed) && self.0.sleeps.swap(false, Ordering::Relaxed) {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(thread) = &*lock(&self.0.thread) {
            thread.unpark();
        }
    }
}

/// The monitor thread.
#[derive(Debug)]
pub struct Monitor {
    monitor_handle: MonitorHandle,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Starts looking.
    ///
    /// # Errors
    ///
    /// Those of starting a thread.
    pub fn start(name: &str, monitor_handle: MonitorHandle, verdict: Box<AbortPolicy>) -> std::io::Result<Self> {
        let shared = Arc::clone(&monitor_handle.0);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            MonitorLoop { shared, verdict, seen: Vec::new(), blocked: Vec::new(), polled: Instant::now() }.run();
        })?;
        *lock(&monitor_handle.0.thread) = Some(thread.thread().clone());
        Ok(Self { monitor_handle, thread: Some(thread) })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.monitor_handle.0.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread can only have panicked, which was reported.
            let _ = thread.join();
        }
    }
}

/// The last look at a worker.
struct Observation {
    post: Weak<dyn MonitoredWorker>,
    seen: CallSnapshot,
    since: Instant,
    relieved: bool,
    /// It is in the list of blocked workers.
    is_noted: bool,
}

/// A worker that is blocked in a handler.
struct BlockedWorker {
    post: Arc<dyn MonitoredWorker>,
    serving: CurrentRequest,
    since: Instant,
}

struct MonitorLoop {
    shared: Arc<Shared>,
    verdict: Box<AbortPolicy>,
    seen: Vec<Observation>,
    blocked: Vec<BlockedWorker>,
    /// When blocked workers were last polled.
    polled: Instant,
}

impl MonitorLoop {
    fn run(&mut self) {
        let has_barrier = register_barrier();
        let mut quiet_since = Instant::now();
        while !self.shared.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            if self.is_busy(now) {
                quiet_since = now;
            }
            if now.duration_since(quiet_since) < QUIET {
                std::thread::park_timeout(TICK);
            } else if self.sleep(has_barrier) {
                quiet_since = Instant::now();
            }
        }
    }

    /// Checks everything once; returns whether there is any activity.
    fn is_busy(&mut self, now: Instant) -> bool {
        self.add_new_workers(now);
        self.observe_all(now) | self.apply_policy(now)
    }

    /// Sleeps until a request comes, or for [`SLEEP_MAX`] without a barrier; returns whether there is any activity.
    ///
    /// A worker stores to its watch and then loads `sleeps`; the monitor does the reverse. After the monitor's barrier
    /// either the worker sees `sleeps` and wakes it, or it sees the request.
    fn sleep(&mut self, has_barrier: bool) -> bool {
        self.shared.sleeps.store(true, Ordering::Relaxed);
        let is_certain = has_barrier && barrier();
        if !self.is_busy(Instant::now()) && !self.shared.stop.load(Ordering::Acquire) {
            if is_certain {
                std::thread::park();
            } else {
                std::thread::park_timeout(SLEEP_MAX);
            }
        }
        !self.shared.sleeps.swap(false, Ordering::Relaxed)
    }

    /// Takes over new workers.
    fn add_new_workers(&mut self, now: Instant) {
        let mut new = std::mem::take(&mut *lock(&self.shared.workers));
        self.seen.extend(new.drain(..).filter_map(|post| {
            let seen = post.upgrade()?.watch().look();
            Some(Observation { post, seen, since: now, relieved: false, is_noted: false })
        }));
    }

    /// Checks every worker; returns whether there is any activity.
    fn observe_all(&mut self, now: Instant) -> bool {
        let Self { seen: looks, blocked, verdict, .. } = self;
        let verdict = |unique: u64, since: Instant| verdict(unique, now, since);
        let mut stirs = false;
        looks.retain_mut(|look| {
            let Some(post) = look.post.upgrade() else { return false };
            let seen = post.watch().look();
            let served = seen != look.seen;
            if served {
                *look = Observation { post: look.post.clone(), seen, since: now, relieved: false, is_noted: false };
                stirs = true;
            } else if seen.is_inside() {
                stirs = true;
                if !look.relieved && now.duration_since(look.since) >= BLOCKED {
                    let serving = post.serving();
                    if post.watch().look() == seen {
                        let relief = Arc::clone(&post).replace_worker(seen);
                        look.relieved = relief == Replacement::Found;
                        // Also without a replacement: then the caller needs a reply even more.
                        if relief != Replacement::NotNeeded && !look.is_noted {
                            look.is_noted = true;
                            blocked.push(BlockedWorker { post: Arc::clone(&post), serving, since: look.since });
                        }
                    }
                }
            }
            stirs |= post.apply_policy(&verdict);
            post.tick(served);
            true
        });
        stirs
    }

    /// Aborts handlers that have been blocked for too long; returns whether any are left.
    fn apply_policy(&mut self, now: Instant) -> bool {
        let Self { blocked, verdict, .. } = self;
        blocked.retain(|one| {
            if !one.post.runs(&one.serving) {
                return false;
            }
            let Some(errno) = verdict(one.serving.unique, now, one.since) else { return true };
            // While the kernel transfers data for it, its memory cannot be taken away: retry at the next check.
            one.post.abort(&one.serving, errno) == Err(NotEnded::Held)
        });
        if !blocked.is_empty() && now.duration_since(self.polled) >= POLL_BLOCKED_EVERY {
            self.polled = now;
            blocked.iter().for_each(|one| one.post.poll_blocked());
        }
        !blocked.is_empty()
    }
}
