//! Looks after the workers of all exports: a worker that is blocked in a handler is replaced, and the request is given up in
//! the end where the export says so.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use ferry_vfs::Errno;

use crate::barrier::{barrier, register_barrier};
use crate::lease::{Lease, NotEnded, Term};
use crate::watch::{Seen, Watch};

/// How often workers are looked at. A look is a load for each.
const TICK: Duration = Duration::from_millis(5);

/// A handler that takes longer than this is blocked: longer than a disk's seek, shorter than people notice.
pub const BLOCKED: Duration = Duration::from_millis(20);

/// How often posts with blocked handlers are stirred.
const STIR: Duration = Duration::from_millis(100);

/// After this long without a request the monitor sleeps until the next one.
const QUIET: Duration = Duration::from_millis(500);

/// The longest sleep where `membarrier(2)` is missing, because the monitor may then miss the first request.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// The request that a worker is serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Serving {
    /// Its number.
    pub unique: u64,
    /// Where it lies: the index of an entry.
    pub place: usize,
    /// Who may answer it.
    pub term: Term,
    /// The handler's call.
    pub call: Seen,
}

/// What came of having somebody else go on in the place of a handler that is blocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relief {
    /// Somebody does.
    Found,
    /// No thread is to be had for it, or there are enough. To be tried again: one whose request is given up makes room.
    Nobody,
    /// The call has just ended.
    NotNeeded,
}

/// What the caller of a request is to be told in place of the outcome, if anything: given its number, the time, and since when it
/// has been under way.
pub type Verdict = dyn Fn(u64, Instant, Instant) -> Option<Errno> + Send;

/// Where requests are served, one at a time: a CPU's ring, a thread that reads /dev/fuse, the queues of a virtio device.
pub trait Post: Send + Sync {
    /// What its owner writes around each call.
    fn watch(&self) -> &Watch;
    /// The request that is being served; means something only while the watch does not change.
    fn serving(&self) -> Serving {
        Serving { unique: 0, place: 0, term: Lease::default().term(), call: self.watch().look() }
    }
    /// Whoever serves here is blocked: have somebody else go on.
    fn relieve(self: Arc<Self>, seen: Seen) -> Relief;
    /// Whether the request is not answered yet, and may be given up.
    fn runs(&self, _serving: &Serving) -> bool {
        false
    }
    /// Answers a request with an error, in place of its handler. If that has not come back, its thread does not count among
    /// those that there may be, until it does.
    ///
    /// # Errors
    /// Somebody else has answered, or the memory of the reply is in use.
    fn give_up(&self, _serving: &Serving, _errno: Errno) -> Result<(), NotEnded> {
        Err(NotEnded::Over)
    }
    /// Asks about each transfer that goes on by itself, and each request that another thread will answer, given its number and
    /// since when, and ends it if there is a verdict. Answers whether there are any.
    fn press(&self, _verdict: &dyn Fn(u64, Instant) -> Option<Errno>) -> bool {
        false
    }
    /// Called now and then while a handler is blocked: whatever may have been missed meanwhile is to be looked for.
    fn stir(&self) {}
    /// Called at every look; whether anything was served since the last one.
    fn tick(self: Arc<Self>, _served: bool) {}
}

#[derive(Default)]
struct Shared {
    posts: Mutex<Vec<Weak<dyn Post>>>,
    /// The monitor sleeps, or is about to, until somebody clears this and wakes it.
    sleeps: AtomicBool,
    stop: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

/// How workers reach the monitor.
#[derive(Clone, Default)]
pub struct Bell(Arc<Shared>);

impl std::fmt::Debug for Bell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bell")
    }
}

impl Bell {
    /// Has one more post looked after, until it is dropped.
    pub fn add(&self, post: Weak<dyn Post>) {
        self.0.posts.lock().unwrap_or_else(PoisonError::into_inner).push(post);
        self.ring();
    }

    /// A request is being served, which the post's watch shows already; costs one load unless the monitor sleeps.
    pub fn ring(&self) {
        if self.0.sleeps.load(Ordering::Relaxed) && self.0.sleeps.swap(false, Ordering::Relaxed) {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(thread) = &*self.0.thread.lock().unwrap_or_else(PoisonError::into_inner) {
            thread.unpark();
        }
    }
}

/// The thread that looks.
#[derive(Debug)]
pub struct Monitor {
    bell: Bell,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Starts looking.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn start(name: &str, bell: Bell, verdict: Box<Verdict>) -> std::io::Result<Self> {
        let shared = Arc::clone(&bell.0);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            Round { shared, verdict, seen: Vec::new(), blocked: Vec::new(), stirred: Instant::now() }.run();
        })?;
        *bell.0.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread.thread().clone());
        Ok(Self { bell, thread: Some(thread) })
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.bell.0.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It can only have panicked, which was reported.
            let _ = thread.join();
        }
    }
}

/// What was seen of a post.
struct Look {
    post: Weak<dyn Post>,
    seen: Seen,
    since: Instant,
    relieved: bool,
    /// It is among those that are blocked.
    is_noted: bool,
}

/// A handler that is blocked.
struct Blocked {
    post: Arc<dyn Post>,
    serving: Serving,
    since: Instant,
}

struct Round {
    shared: Arc<Shared>,
    verdict: Box<Verdict>,
    seen: Vec<Look>,
    blocked: Vec<Blocked>,
    /// When posts with blocked handlers were stirred last.
    stirred: Instant,
}

impl Round {
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

    /// Looks at everything once; returns whether anything goes on.
    fn is_busy(&mut self, now: Instant) -> bool {
        self.meet(now);
        self.look(now) | self.press(now)
    }

    /// Sleeps until a request comes, or for [`SLEEP_MAX`] without a barrier; returns whether anything goes on.
    ///
    /// A worker stores to its watch and then loads `sleeps`; here it is the other way round. Only the monitor pays for the
    /// order of the two: after its barrier either the worker sees `sleeps` and rings, or the monitor sees the request.
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

    /// Takes in posts that are new.
    fn meet(&mut self, now: Instant) {
        let mut new = std::mem::take(&mut *self.shared.posts.lock().unwrap_or_else(PoisonError::into_inner));
        self.seen.extend(new.drain(..).filter_map(|post| {
            let seen = post.upgrade()?.watch().look();
            Some(Look { post, seen, since: now, relieved: false, is_noted: false })
        }));
    }

    /// Looks at every post; answers whether anything goes on.
    fn look(&mut self, now: Instant) -> bool {
        let Self { seen: looks, blocked, verdict, .. } = self;
        let verdict = |unique: u64, since: Instant| verdict(unique, now, since);
        let mut stirs = false;
        looks.retain_mut(|look| {
            let Some(post) = look.post.upgrade() else { return false };
            let seen = post.watch().look();
            let served = seen != look.seen;
            if served {
                *look = Look { post: look.post.clone(), seen, since: now, relieved: false, is_noted: false };
                stirs = true;
            } else if seen.is_inside() {
                stirs = true;
                if !look.relieved && now.duration_since(look.since) >= BLOCKED {
                    let serving = post.serving();
                    if post.watch().look() == seen {
                        let relief = Arc::clone(&post).relieve(seen);
                        look.relieved = relief == Relief::Found;
                        // Without anybody to go on, too: its caller wants an answer all the more.
                        if relief != Relief::NotNeeded && !look.is_noted {
                            look.is_noted = true;
                            blocked.push(Blocked { post: Arc::clone(&post), serving, since: look.since });
                        }
                    }
                }
            }
            stirs |= post.press(&verdict);
            post.tick(served);
            true
        });
        stirs
    }

    /// Gives up handlers that have been blocked for too long; answers whether there are any left.
    fn press(&mut self, now: Instant) -> bool {
        let Self { blocked, verdict, .. } = self;
        blocked.retain(|one| {
            if !one.post.runs(&one.serving) {
                return false;
            }
            let Some(errno) = verdict(one.serving.unique, now, one.since) else { return true };
            // While the kernel moves data for it, its memory cannot be taken away: try again at the next look.
            one.post.give_up(&one.serving, errno) == Err(NotEnded::Held)
        });
        if !blocked.is_empty() && now.duration_since(self.stirred) >= STIR {
            self.stirred = now;
            blocked.iter().for_each(|one| one.post.stir());
        }
        !blocked.is_empty()
    }
}
