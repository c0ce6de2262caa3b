//! The cache of `O_PATH` descriptors and its eviction (CLOCK).

use std::collections::{HashSet, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Ino, Result};
use rustix::process::Resource;

use crate::table::{Inode, PathFd, Table};

/// The fraction of descriptors reserved for open files, sockets and guest memory.
const RESERVE_PART: u64 = 4;
/// The maximum with file handles, where a descriptor only saves a system call and is not worth more kernel memory.
const KEPT_MAX: u64 = 65_536;
/// The minimum, whatever the limits: a few lookups in flight.
const KEPT_MIN: usize = 16;
/// Descriptors that clients' open files leave free for lookups.
const FREE_MAX: u64 = 64;
/// Further descriptor numbers that requests in flight may have taken.
const IN_FLIGHT: RawFd = 8;
/// The maximum number of steps of the clock per descriptor, so that one request never pays for many.
const STEPS_MAX: usize = 128;
/// The number of descriptors to evict at once when the host has no more.
const BATCH: usize = 64;
/// The number of retries of an open after eviction.
const TRIES_MAX: usize = 4;
/// The maximum number of stale or repeated clock entries before a sweep.
const SLACK: usize = 1024;
/// The interval of idle eviction. A descriptor used once goes with the next turn, a file's used more often with the
/// second, a directory's with the fourth.
const TURN: Duration = Duration::from_secs(5);

/// The caches of this process, which share its limit.
static CACHES: AtomicUsize = AtomicUsize::new(0);

/// The numbers of inodes that hold a descriptor. Numbers keep no inode alive, so some are stale, or there twice.
#[derive(Debug, Default)]
struct Clock {
    inos: VecDeque<Ino>,
    /// It was found empty, and a thread waits for an entry.
    is_awaited: bool,
    /// The cache is being dropped.
    is_over: bool,
}

/// The clock of cached descriptors.
#[derive(Debug)]
pub(crate) struct Cache {
    /// The maximum of descriptors, if the configuration has one.
    descriptors_max: Option<usize>,
    /// What the process's limit allows for all caches.
    all_max: u64,
    /// The maximum descriptor number of a client's file. The kernel assigns the lowest free one, so it shows how many
    /// exist.
    number_max: RawFd,
    /// The last client file exceeded that.
    tight: AtomicBool,
    open: Arc<AtomicUsize>,
    clock: Mutex<Clock>,
    /// Signals that the clock has entries, or the cache is being dropped.
    wound: Condvar,
}

impl Cache {
    /// Creates a cache of at most `descriptors_max` descriptors, or of what the process's limit allows.
    pub(crate) fn new(descriptors_max: Option<usize>) -> Self {
        let limit = raise_limit();
        CACHES.fetch_add(1, Ordering::Relaxed);
        let number_max = limit - FREE_MAX.min(limit / RESERVE_PART);
        Self {
            descriptors_max,
            all_max: limit - limit / RESERVE_PART,
            number_max: RawFd::try_from(number_max).unwrap_or(RawFd::MAX - IN_FLIGHT),
            tight: AtomicBool::new(false),
            open: Arc::default(),
            clock: Mutex::default(),
            wound: Condvar::new(),
        }
    }

    /// How many descriptors are open.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// How many there may be: an equal part for each cache, for a cache can evict nothing of another one.
    pub(crate) fn budget(&self) -> usize {
        let part = || self.all_max / CACHES.load(Ordering::Relaxed).max(1) as u64;
        let of_limit = || usize::try_from(part().min(KEPT_MAX)).unwrap_or(KEPT_MIN);
        self.descriptors_max.unwrap_or_else(of_limit).max(KEPT_MIN)
    }

    /// Wraps a descriptor, so that it is counted.
    pub(crate) fn wrap(&self, fd: OwnedFd) -> Arc<PathFd> {
        Arc::new(PathFd::new(fd, &self.open))
    }

    /// Stores a descriptor in an inode unless it has one; returns the stored one.
    pub(crate) fn keep(&self, table: &Table, inode: &Inode, fd: Arc<PathFd>) -> Arc<PathFd> {
        let (fd, new) = inode.hold(fd);
        if new && inode.ino != Ino::ROOT {
            let clock = &mut *lock(&self.clock);
            if std::mem::take(&mut clock.is_awaited) {
                self.wound.notify_one();
            }
            let inos = &mut clock.inos;
            inos.push_back(inode.ino);
            if inos.len() > 2 * self.open() + SLACK {
                // One that is looked up and forgotten in turn has an entry for each time.
                let mut known = HashSet::new();
                inos.retain(|ino| known.insert(*ino) && table.peek(*ino).is_some_and(|inode| inode.is_held()));
            }
        }
        let too_many = self.open().saturating_sub(self.budget());
        if too_many > 0 {
            self.evict(table, too_many, STEPS_MAX, Inode::evict);
        }
        fd
    }

    /// Runs the clock, turn after turn, until [`Self::end`]; sleeps while the clock is empty.
    pub(crate) fn run_clock(&self, table: &Table) {
        loop {
            let clock = lock(&self.clock);
            // Checked again, because other threads may have evicted the entries.
            let clock = self.wound.wait_while(clock, |clock| {
                clock.is_awaited = clock.inos.is_empty() && !clock.is_over;
                clock.is_awaited
            });
            let clock = clock.unwrap_or_else(PoisonError::into_inner);
            let clock = self.wound.wait_timeout_while(clock, TURN, |clock| !clock.is_over);
            let (clock, _) = clock.unwrap_or_else(PoisonError::into_inner);
            if clock.is_over {
                return;
            }
            let mut left = clock.inos.len();
            drop(clock);
            while left > 0 {
                // Other threads wait for the lock meanwhile.
                let steps = left.min(STEPS_MAX);
                self.evict(table, steps, steps, Inode::evict_idle);
                left -= steps;
            }
        }
    }

    /// Ends [`Self::run_clock`].
    pub(crate) fn end(&self) {
        lock(&self.clock).is_over = true;
        self.wound.notify_all();
    }

    /// Moves the clock at most `steps` inodes on, to evict `count` descriptors.
    fn evict(&self, table: &Table, count: usize, steps: usize, give_up: fn(&Inode) -> Option<Arc<PathFd>>) {
        let mut victims = Vec::new();
        {
            let inos = &mut lock(&self.clock).inos;
            for _ in 0..steps {
                if victims.len() == count {
                    break;
                }
                let Some(ino) = inos.pop_front() else { break };
                let Some(inode) = table.peek(ino).filter(|inode| inode.is_held()) else { continue };
                match give_up(&inode) {
                    Some(fd) => victims.push((fd, inode)),
                    None => inos.push_back(ino),
                }
            }
        }
        // Closed without the lock.
        drop(victims);
    }

    /// As [`Self::retry_with_room`], for a descriptor that a client keeps open. It leaves descriptors for lookups:
    /// beyond that it returns `MFILE`, as if the client had reached its own limit.
    pub(crate) fn retry_with_room_to_keep(
        &self,
        table: &Table,
        mut open: impl FnMut() -> Result<OwnedFd>,
    ) -> Result<OwnedFd> {
        if self.tight.load(Ordering::Relaxed) {
            self.evict(table, BATCH, STEPS_MAX, Inode::evict);
            // A duplicate shows the next number before anything is created that would have to be undone.
            let number =
                self.retry_with_room(table, || rustix::io::fcntl_dupfd_cloexec(open_root(table)?, 0))?.as_raw_fd();
            if number > self.number_max + IN_FLIGHT {
                return Err(Errno::MFILE);
            }
            self.tight.store(false, Ordering::Relaxed);
        }
        let fd = self.retry_with_room(table, &mut open)?;
        if fd.as_raw_fd() >= self.number_max {
            self.tight.store(true, Ordering::Relaxed);
        }
        Ok(fd)
    }

    /// Runs a call that opens a descriptor. If the process or the host has no more, evicts some and retries.
    pub(crate) fn retry_with_room<T>(&self, table: &Table, mut open: impl FnMut() -> Result<T>) -> Result<T> {
        let mut tries = 0;
        loop {
            match open() {
                Err(Errno::MFILE | Errno::NFILE) if tries < TRIES_MAX && self.open() > 1 => {
                    tries += 1;
                    // Descriptors in use have credit, so several rounds may be needed.
                    let steps = lock(&self.clock).inos.len() * 4;
                    self.evict(table, BATCH << tries, steps, Inode::evict);
                }
                other => return other,
            }
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        CACHES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The thread that closes idle descriptors; ends when dropped.
#[derive(Debug)]
pub(crate) struct IdleEvictor {
    cache: Arc<Cache>,
    thread: Option<JoinHandle<()>>,
}

impl IdleEvictor {
    pub(crate) fn start(cache: &Arc<Cache>, table: &Arc<Table>) -> io::Result<Self> {
        let (tended, table) = (Arc::clone(cache), Arc::clone(table));
        let thread = std::thread::Builder::new().name("dir-idle".into()).spawn(move || tended.run_clock(&table))?;
        Ok(Self { cache: Arc::clone(cache), thread: Some(thread) })
    }
}

impl Drop for IdleEvictor {
    fn drop(&mut self) {
        self.cache.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the descriptor of the root, which is always held.
fn open_root(table: &Table) -> Result<Arc<PathFd>> {
    table.peek(Ino::ROOT).and_then(|root| root.fd()).ok_or(Errno::STALE)
}

/// Raises the limit of open descriptors as far as allowed; returns it.
fn raise_limit() -> u64 {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
        match rustix::process::setrlimit(Resource::Nofile, raised) {
            Ok(()) => limit = raised,
            Err(error) => tracing::warn!(%error, "cannot raise the limit of open files"),
        }
    }
    limit.current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use ferry_vfs::{Caller, FileSystem, Name};

    use super::*;
    use crate::{Dir, Options};

    /// As a guest without a cache does for each file in a directory. The clock is looked at by each lookup.
    #[test]
    fn an_inode_that_is_looked_up_again_and_again_does_not_fill_the_clock() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("file"), "").unwrap();
        let dir = Dir::open(directory.path(), Options::default()).unwrap();
        for _ in 0..5 * SLACK {
            let found = dir.lookup(&Caller::default(), Ino::ROOT, Name::new(b"file").unwrap()).unwrap();
            dir.getattr(&Caller::default(), found.ino, None).unwrap();
            dir.forget(found.ino, 1);
        }
        let entries = lock(&dir.cache.clock).inos.len();
        assert!(entries <= 2 * SLACK, "{entries}");
    }

    #[test]
    fn caches_share_the_limit_of_their_process() {
        let all: Vec<_> = (0..1000).map(|_| Cache::new(None)).collect();
        let part = usize::try_from(all[0].all_max).unwrap() / all.len();
        assert!(all.iter().all(|cache| cache.budget() <= part.max(KEPT_MIN)));
        assert_eq!(Cache::new(Some(500)).budget(), 500);
    }
}
