//! How many threads read /dev/fuse.
//!
//! One is fastest for a single client: with two, each request wakes the other one, on a CPU that has gone idle. Several
//! clients want more, who then compete with them for the CPUs; past a few for each CPU, more only help while handlers
//! sleep. So it begins with one, the monitor adds one when requests wait, and one ends when not all are needed any more.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use ferry_engine::{MonitoredWorker, Watch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{Pid, gettid};

use super::cpu_affinity::CpuAffinity;
use super::{Reader, Work};
use crate::connection::{Connection, ServingThread};
use crate::deferred_replies::DeferredReplies;
use crate::machine::place_of;
use crate::sched_idle::SchedIdle;

/// The most threads that read the device of one mount. Past it, requests wait in the kernel.
const READERS_MAX: usize = 64;

/// As many with those that were given up: their callers wait for nothing any more, but each has a thread and memory.
const READERS_ALL_MAX: usize = 512;

/// Readers that are awake for each CPU. Clients compete with them for CPUs: with one for each, eight clients of two CPUs
/// had a sixth less than with four.
const PER_CPU: usize = 4;

/// So long without all readers being busy at once, and one of them ends.
const CALM: Duration = Duration::from_millis(50);

/// The threads that read one connection.
#[derive(Debug)]
pub(crate) struct Readers {
    pub(super) connection: Arc<Connection>,
    /// How many there are to begin with, and at least.
    base: usize,
    cpus: usize,
    /// Threads, but for those that are lost.
    threads: AtomicUsize,
    /// Threads whose request was given up and that have not come back.
    lost: AtomicUsize,
    /// Threads that wait for a request.
    idle: AtomicUsize,
    /// All were busy at once since the monitor looked last.
    stretched: AtomicBool,
    /// The next that is not needed ends.
    retire: AtomicBool,
    /// Since when not all were busy.
    calm_since: Mutex<Instant>,
    /// Those of [`Self::threads`] that have begun. Under its lock threads are lost and come back.
    running: Mutex<Vec<Pid>>,
    full: Once,
    /// The client of some request since the monitor looked last, 0 if it is not known.
    client: AtomicU32,
    /// There were requests of others, too.
    several: AtomicBool,
    pub(super) cpu_affinity: CpuAffinity,
    /// Requests that other threads will answer. On its own: whoever answers has it for longer than there is a mount.
    pub(super) deferred: Arc<DeferredReplies<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Readers {
    /// Starts `base` threads.
    ///
    /// # Errors
    /// Not even one thread can be had.
    pub(crate) fn start(connection: &Arc<Connection>, base: usize) -> io::Result<()> {
        let readers = Self::none(connection, base);
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
            base,
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
        })
    }

    fn add(self: &Arc<Self>) -> io::Result<()> {
        let reader = Arc::new(Reader::new(self, self.channel()?));
        let post: Arc<dyn MonitoredWorker> = reader.clone();
        let present = ServingThread::new(&self.connection);
        self.threads.fetch_add(1, Ordering::Relaxed);
        // Counted before it runs, so that the monitor does not start another meanwhile.
        self.idle.fetch_add(1, Ordering::Relaxed);
        let weak = Arc::downgrade(&post);
        drop(post);
        let started = std::thread::Builder::new().name("fuse-reader".into()).spawn(move || {
            let id = gettid();
            let _ = reader.thread.set(id);
            lock(&reader.readers.running).push(id);
            let _ = reader.way.set(SchedIdle::here());
            Work::new(&reader).run();
            lock(&reader.readers.running).retain(|running| *running != id);
            reader.readers.threads.fetch_sub(1, Ordering::Relaxed);
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

    /// A descriptor for one more reader.
    fn channel(&self) -> io::Result<OwnedFd> {
        // Without a descriptor of its own, a reader uses the first one.
        self.connection.device.channel().or_else(|error| {
            tracing::debug!("a reader shares the first descriptor: {error}");
            self.connection.device.as_fd().try_clone_to_owned()
        })
    }

    /// A request of a thread has come.
    pub(super) fn note_client(&self, client: u32) {
        // Written once or twice between two looks, whoever comes: readers do not fight for the line of memory.
        if !self.several.load(Ordering::Relaxed) && self.client.load(Ordering::Relaxed) != client {
            let before = self.client.swap(client, Ordering::Relaxed);
            self.several.store(before != 0, Ordering::Relaxed);
        }
    }

    /// A reader has come back from waiting.
    pub(super) fn has_work(&self) {
        self.idle.fetch_sub(1, Ordering::Relaxed);
    }

    /// A reader is about to wait; answers false if it is not needed any more.
    pub(super) fn is_free(&self) -> bool {
        let others = self.idle.fetch_add(1, Ordering::Relaxed);
        if others == 0 {
            if !self.stretched.load(Ordering::Relaxed) {
                self.stretched.store(true, Ordering::Relaxed);
            }
            return true;
        }
        let threads = self.threads.load(Ordering::Relaxed);
        let ends = threads > self.base
            && (others >= self.cpus.max(self.base)
                || self.retire.load(Ordering::Relaxed) && self.retire.swap(false, Ordering::Relaxed));
        if ends {
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
        !ends
    }

    /// A reader is blocked in a handler: somebody else must be there to read.
    pub(super) fn replace_blocked(self: &Arc<Self>) {
        if self.idle.load(Ordering::Relaxed) == 0 && !self.connection.end.is_ended() {
            self.reinforce();
        }
    }

    /// The request of a thread is given up, if `end` can end it: the thread does not count until it is back.
    pub(super) fn lose<E>(&self, thread: Option<Pid>, end: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut running = lock(&self.running);
        end()?;
        running.retain(|running| Some(*running) != thread);
        self.lost.fetch_add(1, Ordering::Relaxed);
        self.threads.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// A thread whose request was given up is back.
    pub(super) fn come_back(&self, thread: Option<Pid>) {
        let mut running = lock(&self.running);
        running.extend(thread);
        self.threads.fetch_add(1, Ordering::Relaxed);
        self.lost.fetch_sub(1, Ordering::Relaxed);
    }

    /// The monitor looks, once for each reader, who has this watch.
    pub(super) fn tick(self: &Arc<Self>, watch: &Watch) {
        if self.connection.end.is_ended() {
            return;
        }
        let several = self.several.load(Ordering::Relaxed);
        self.client.store(0, Ordering::Relaxed);
        self.several.store(false, Ordering::Relaxed);
        let seen = watch.look();
        // The next request of an only client may well be there before the reader has come back from sending its reply.
        // But one that waits while a handler runs is no client's that waits for that handler.
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

    /// Whether one more reader has a CPU to run on: none is idle, so whoever sleeps does so in a handler.
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
                    "all {threads} threads of a mount are busy or blocked in the source, {lost} others were given up: \
                     requests wait"
                );
            });
        } else if let Err(error) = self.add() {
            tracing::warn!("no thread can be had to take the place of those that are busy: {error}");
        }
    }
}

/// Whether a thread of ours sleeps, or has ended. Reading it costs microseconds, so it is for the monitor.
fn is_asleep(thread: Pid) -> bool {
    let stat = std::fs::read(format!("/proc/self/task/{}/stat", thread.as_raw_nonzero())).unwrap_or_default();
    place_of(&stat).is_none_or(|place| place.asleep)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleepers_are_told_from_those_who_run() {
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
