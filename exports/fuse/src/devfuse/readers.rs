//! How many threads read /dev/fuse.
//!
//! One reader is fastest for a single client: with two, each request wakes the other one on an idle CPU. Several
//! clients benefit from more readers, which compete with them for CPUs; beyond a few per CPU, more only help while
//! handlers sleep. So there is one at first. The monitor adds one when requests wait, and one ends when not all are
//! needed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use ferry_engine::{MonitoredWorker, RateLimiter, Watch};
use ferry_serve::is_limited;
use ferry_vfs::Errno;
use ferry_vfs::sync::lock;
use ferry_wire::fuse::peek;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{Pid, gettid};

use super::cpu_affinity::CpuAffinity;
use super::{Reader, Work};
use crate::connection::{Connection, ServingThread};
use crate::deferred_replies::DeferredReplies;
use crate::delayed_requests::DelayedRequests;
use crate::machine::place_of;
use crate::sched_idle::SchedIdle;

/// The maximum number of reader threads of one mount. Beyond it, requests wait in the kernel.
const READERS_MAX: usize = 64;

/// The maximum including threads with aborted requests: no caller waits for them, but each takes a thread and memory.
const READERS_ALL_MAX: usize = 512;

/// Active readers per CPU. Clients compete with them for CPUs, but one reader per CPU is slower for many clients.
const PER_CPU: usize = 4;

/// One reader ends after not all readers were busy for this long.
const CALM: Duration = Duration::from_millis(50);

/// Requests that wait for a limit of rates, and their bytes, at most. Beyond them no more are read: a mount has at most 128
/// background requests and one of each thread that uses it.
const DELAYED_MAX: usize = 4096;
const DELAYED_BYTES_MAX: usize = 32 << 20;

/// What a reader does next.
pub(super) enum Turn {
    /// Serve this request, which has waited for a limit, and reply by the descriptor that it was received by.
    Serve(Vec<u8>, Arc<OwnedFd>),
    /// Receive a request.
    Receive,
    /// Receive a request if there is one: others wait for a limit, and must be served in time.
    TryReceive,
    /// Look again.
    Nothing,
}

/// The reader threads of one connection.
pub(crate) struct Readers {
    pub(super) connection: Arc<Connection>,
    /// The initial and minimum number.
    base: usize,
    cpus: usize,
    /// The number of threads, without lost ones. Those that end, or are lost, leave it under the lock of [`Self::running`].
    threads: AtomicUsize,
    /// Threads whose request was aborted and that have not returned.
    lost: AtomicUsize,
    /// Threads that wait for a request.
    idle: AtomicUsize,
    /// All were busy at once since the last check of the monitor.
    stretched: AtomicBool,
    /// The next unneeded thread ends.
    retire: AtomicBool,
    /// Since when not all were busy.
    calm_since: Mutex<Instant>,
    /// Those of [`Self::threads`] that have started. Threads are lost and return under its lock.
    running: Mutex<Vec<Pid>>,
    full: Once,
    /// The client of a request since the last check of the monitor, 0 if unknown.
    client: AtomicU32,
    /// There were requests of other clients, too.
    several: AtomicBool,
    pub(super) cpu_affinity: CpuAffinity,
    /// Requests that other threads will reply to. Shared, because those threads may outlive the mount.
    pub(super) deferred: Arc<DeferredReplies<Arc<OwnedFd>>>,
    /// Requests that wait for a limit. As long as there are any, at least one reader serves them in time: the one that has
    /// received the last of them does, and the monitor starts another one when its handler is blocked.
    delayed: DelayedRequests<(Vec<u8>, Arc<OwnedFd>)>,
    delayed_bytes: AtomicUsize,
}

impl Readers {
    /// Starts `base` threads, or at least one.
    pub(crate) fn start(connection: &Arc<Connection>, base: usize) -> io::Result<()> {
        let readers = Self::none(connection, base);
        let base = readers.base;
        for started in 0..base {
            match readers.add() {
                Ok(()) => {}
                Err(error) if started == 0 => return Err(error),
                Err(error) => {
                    tracing::warn!("{started} instead of {base} threads read /dev/fuse: {error}");
                    break;
                }
            }
        }
        Ok(())
    }

    /// No threads yet.
    pub(super) fn none(connection: &Arc<Connection>, base: usize) -> Arc<Self> {
        Arc::new(Self {
            connection: Arc::clone(connection),
            base: base.max(1),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            threads: AtomicUsize::new(0),
            lost: AtomicUsize::new(0),
            idle: AtomicUsize::new(0),
            stretched: AtomicBool::new(false),
            retire: AtomicBool::new(false),
            calm_since: Mutex::new(Instant::now()),
            running: Mutex::default(),
            full: Once::new(),
            client: AtomicU32::new(0),
            several: AtomicBool::new(false),
            cpu_affinity: CpuAffinity::default(),
            deferred: Arc::default(),
            delayed: DelayedRequests::default(),
            delayed_bytes: AtomicUsize::new(0),
        })
    }

    fn add(self: &Arc<Self>) -> io::Result<()> {
        let reader = Arc::new(Reader::new(self, self.channel()?));
        let post: Arc<dyn MonitoredWorker> = reader.clone();
        let present = ServingThread::new(&self.connection);
        self.threads.fetch_add(1, Ordering::Relaxed);
        // Counted before it runs, so that the monitor does not start another one meanwhile.
        self.idle.fetch_add(1, Ordering::Relaxed);
        let weak = Arc::downgrade(&post);
        drop(post);
        let started = std::thread::Builder::new().name("fuse-reader".into()).spawn(move || {
            let id = gettid();
            let _ = reader.thread.set(id);
            lock(&reader.readers.running).push(id);
            let _ = reader.way.set(SchedIdle::here());
            Work::new(&reader).run(id);
            drop(reader);
            drop(present);
        });
        match started {
            Ok(_) => {
                self.connection.monitor_handle.add(weak);
                Ok(())
            }
            Err(error) => {
                self.threads.fetch_sub(1, Ordering::Relaxed);
                self.idle.fetch_sub(1, Ordering::Relaxed);
                Err(error)
            }
        }
    }

    /// Returns a descriptor for another reader.
    fn channel(&self) -> io::Result<OwnedFd> {
        if self.connection.outlives_server {
            return self.connection.device.as_fd().try_clone_to_owned();
        }
        // Without its own descriptor, a reader uses the first one.
        self.connection.device.channel().or_else(|error| {
            tracing::debug!("a reader shares the first descriptor: {error}");
            self.connection.device.as_fd().try_clone_to_owned()
        })
    }

    /// Puts a request that was received behind others that wait for a limit, if it must wait. Returns whether it does.
    pub(super) fn delay(&self, request: &[u8], channel: &Arc<OwnedFd>) -> bool {
        let Some(header) = request.first_chunk().map(peek) else { return false };
        let must_wait = |limiter: &Arc<RateLimiter>| is_limited(header.opcode) && self.delayed.must_wait(limiter);
        if !self.connection.share.limiter().is_some_and(must_wait) {
            return false;
        }
        self.delayed_bytes.fetch_add(request.len(), Ordering::Relaxed);
        self.delayed.push(header.unique, (request.to_vec(), Arc::clone(channel)));
        true
    }

    /// Removes the request that waits for a limit and whose caller was interrupted; returns the descriptor for the reply.
    pub(super) fn interrupt_delayed(&self, interrupted: u64) -> Option<Arc<OwnedFd>> {
        let mut ended = self.delayed.end_by(|unique| (unique == interrupted).then_some(Errno::INTR));
        let (_, (request, channel), _) = ended.pop()?;
        self.delayed_bytes.fetch_sub(request.len(), Ordering::Relaxed);
        Some(channel)
    }

    /// Returns what a reader does next. While requests wait for a limit, it waits for the next one of them or another request.
    pub(super) fn turn(&self, channel: BorrowedFd<'_>) -> Turn {
        if self.delayed.count() == 0 {
            return Turn::Receive;
        }
        let Some(wait) = self.connection.share.limiter().and_then(|limiter| limiter.wait()) else {
            let Some((request, channel)) = self.delayed.pop() else { return Turn::Receive };
            self.delayed_bytes.fetch_sub(request.len(), Ordering::Relaxed);
            return Turn::Serve(request, channel);
        };
        let is_full =
            self.delayed.count() >= DELAYED_MAX || self.delayed_bytes.load(Ordering::Relaxed) >= DELAYED_BYTES_MAX;
        // The end of the connection is always reported.
        let events = if is_full { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = [PollFd::from_borrowed_fd(channel, events)];
        match poll(&mut fds, wait.try_into().ok().as_ref()) {
            Ok(1..) => Turn::TryReceive,
            _ => Turn::Nothing,
        }
    }

    /// Records the client of a request.
    pub(super) fn note_client(&self, client: u32) {
        // Written at most twice between two checks, so that readers do not contend for the cache line.
        if !self.several.load(Ordering::Relaxed) && self.client.load(Ordering::Relaxed) != client {
            let before = self.client.swap(client, Ordering::Relaxed);
            self.several.store(before != 0, Ordering::Relaxed);
        }
    }

    /// Called when a reader returns from waiting.
    pub(super) fn has_work(&self) {
        self.idle.fetch_sub(1, Ordering::Relaxed);
    }

    /// Called when a reader is about to wait; returns false if it is no longer needed. Then it does not count as a thread any more.
    pub(super) fn is_free(&self, thread: Pid) -> bool {
        // One that ends never counts as idle: others would end, or not be replaced, because of it.
        let others = self.idle.load(Ordering::Relaxed);
        if others == 0 {
            if !self.stretched.load(Ordering::Relaxed) {
                self.stretched.store(true, Ordering::Relaxed);
            }
        } else if self.threads.load(Ordering::Relaxed) > self.base
            && self.delayed.count() == 0
            && (others >= self.cpus.max(self.base)
                || self.retire.load(Ordering::Relaxed) && self.retire.swap(false, Ordering::Relaxed))
        {
            // Under the lock: two must not end because of the same third one.
            let mut running = lock(&self.running);
            if self.threads.load(Ordering::Relaxed) > self.base {
                self.threads.fetch_sub(1, Ordering::Relaxed);
                running.retain(|running| *running != thread);
                return false;
            }
        }
        self.idle.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Called when a reader is blocked in a handler: ensures that another one reads.
    pub(super) fn replace_blocked(self: &Arc<Self>) {
        let is_needed = self.idle.load(Ordering::Relaxed) == 0 || self.delayed.count() > 0;
        if is_needed && !self.connection.end.is_ended() {
            self.reinforce();
        }
    }

    /// Aborts the request of a thread if `end` can end it; the thread does not count until it returns.
    pub(super) fn lose<E>(&self, thread: Option<Pid>, end: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut running = lock(&self.running);
        end()?;
        running.retain(|running| Some(*running) != thread);
        self.lost.fetch_add(1, Ordering::Relaxed);
        self.threads.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// Called when a thread with an aborted request returns.
    pub(super) fn come_back(&self, thread: Option<Pid>) {
        let mut running = lock(&self.running);
        running.extend(thread);
        self.threads.fetch_add(1, Ordering::Relaxed);
        self.lost.fetch_sub(1, Ordering::Relaxed);
    }

    /// Called at each check of the monitor, for each reader with its watch.
    pub(super) fn tick(self: &Arc<Self>, watch: &Watch) {
        if self.connection.end.is_ended() {
            return;
        }
        let several = self.several.load(Ordering::Relaxed);
        self.client.store(0, Ordering::Relaxed);
        self.several.store(false, Ordering::Relaxed);
        let seen = watch.look();
        // The next request of a single client may arrive before the reader returns from sending its reply. But a
        // request that waits during a handler comes from another client.
        let short = self.idle.load(Ordering::Relaxed) == 0
            && (several || seen.is_inside())
            && self.requests_wait()
            && (several || watch.look() == seen)
            && self.would_help();
        if short {
            self.reinforce();
        }
        let now = Instant::now();
        let mut calm_since = lock(&self.calm_since);
        self.cpu_affinity.look(!several && self.threads.load(Ordering::Relaxed) == 1, self.connection.counters.sum());
        if self.stretched.swap(false, Ordering::Relaxed) || self.threads.load(Ordering::Relaxed) <= self.base {
            *calm_since = now;
        } else if now.duration_since(*calm_since) >= CALM {
            *calm_since = now;
            self.retire.store(true, Ordering::Relaxed);
        }
    }

    fn requests_wait(&self) -> bool {
        let mut fds = [PollFd::new(&*self.connection.device, PollFlags::IN)];
        let waits = poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0);
        waits && !fds[0].revents().contains(PollFlags::ERR)
    }

    /// Returns whether another reader has a CPU to run on: none is idle, so sleeping ones sleep in handlers.
    fn would_help(&self) -> bool {
        let room = PER_CPU * self.cpus;
        self.threads.load(Ordering::Relaxed) < room
            || lock(&self.running).iter().filter(|id| !is_asleep(**id)).count() < room
    }

    fn reinforce(self: &Arc<Self>) {
        self.cpu_affinity.stop();
        let (threads, lost) = (self.threads.load(Ordering::Relaxed), self.lost.load(Ordering::Relaxed));
        if threads >= READERS_MAX || threads + lost >= READERS_ALL_MAX {
            self.full.call_once(|| {
                tracing::warn!(
                    "all {threads} threads of a mount are busy or blocked in the source, {lost} were abandoned: \
                     requests wait"
                );
            });
        } else if let Err(error) = self.add() {
            tracing::warn!("cannot start a thread to assist busy readers: {error}");
        }
    }
}

/// Returns whether a thread of this process sleeps, or has ended. It costs microseconds, so only the monitor calls it.
fn is_asleep(thread: Pid) -> bool {
    let stat = std::fs::read(format!("/proc/self/task/{}/stat", thread.as_raw_nonzero())).unwrap_or_default();
    place_of(&stat).is_none_or(|place| place.asleep)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that ends takes its time until it has ended, and others decide meanwhile.
    #[test]
    fn the_last_reader_never_ends() {
        const THREADS: usize = 8;
        let threads = |readers: &Readers| readers.threads.load(Ordering::Relaxed);
        for base in [0, 1, 2] {
            let (readers, least) = (Readers::none(&Connection::without_kernel(), base), base.max(1));
            readers.threads.store(THREADS, Ordering::Relaxed);
            readers.idle.store(1, Ordering::Relaxed);
            let ends = || {
                readers.retire.store(true, Ordering::Relaxed);
                !readers.is_free(gettid())
            };
            let ended = (0..THREADS).take_while(|_| ends()).count();
            assert_eq!((ended, threads(&readers)), (THREADS - least, least), "{base}");

            // The same at once.
            readers.threads.store(THREADS, Ordering::Relaxed);
            readers.idle.store(0, Ordering::Relaxed);
            let start = std::sync::Barrier::new(THREADS);
            let serve = || {
                start.wait();
                (0..20_000).any(|_| {
                    readers.retire.store(true, Ordering::Relaxed);
                    let ends = !readers.is_free(gettid());
                    if !ends {
                        readers.has_work();
                    }
                    ends
                })
            };
            let ended = std::thread::scope(|scope| {
                let all: Vec<_> = (0..THREADS).map(|_| scope.spawn(serve)).collect();
                all.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum::<usize>()
            });
            assert!(ended <= THREADS - least, "{ended} of {THREADS} ended, {least} must stay");
            assert_eq!((threads(&readers), readers.idle.load(Ordering::Relaxed)), (THREADS - ended, 0));
        }
    }

    #[test]
    fn sleeping_threads_are_distinguished_from_running_ones() {
        assert!(!is_asleep(gettid()), "it runs this test");
        let (told, id) = std::sync::mpsc::channel();
        let (_keep, wait) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            told.send(gettid()).unwrap();
            let _ = wait.recv();
        });
        let id = id.recv().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while !is_asleep(id) {
            assert!(Instant::now() < until, "it waits");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
