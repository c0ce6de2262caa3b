//! What the files of a source share: memory, buffers, and the thread that writes behind.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use ferry_vfs::{Errno, Result};

use super::buffers::Buffers;
use super::file::CachedFile;
use super::limits::{Counts, Limits, Totals};
use super::pages::PAGE_BYTES;
use super::remote::Remote;
use super::writing::SIZE_MAX;

/// Chunks of a file that the eviction looks at before it goes on to the next file.
const EVICTION_CHUNKS: usize = 64;

/// Pages that are evicted beyond what is needed, so that not every request evicts.
const EVICTION_PAGES: usize = 256;

/// Rounds of the eviction over all files before it gives up: the first finds everything used.
const EVICTION_ROUNDS: usize = 3;

/// The cache of a source: what all its files have in common. Everything is to be flushed before it is dropped.
pub struct Cache {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What files know of their cache.
pub(super) struct Shared {
    pub limits: Limits,
    pub totals: Arc<Totals>,
    pub buffers: Buffers,
    /// Twice the times that the server was restarted; odd while what it may have lost is being looked for.
    pub restarts: AtomicU64,
    rewriting: Mutex<()>,
    /// Files of which something waits to be written or is kept for a restart.
    busy: Mutex<Vec<Arc<CachedFile>>>,
    /// Files with pages, next to be visited by the eviction.
    listed: Mutex<VecDeque<Weak<CachedFile>>>,
    /// The first error of any file that [`Cache::sync_all`] has not told yet.
    failed: Mutex<Option<Errno>>,
    poked: AtomicBool,
    work: Mutex<Work>,
    /// There is something to do for the thread.
    wanted: Condvar,
    /// There is less to be written, or kept.
    eased: Condvar,
}

#[derive(Debug, Default)]
struct Work {
    wanted: bool,
    stopped: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cache {
    /// A cache with these limits, and its thread.
    ///
    /// # Errors
    /// That of starting the thread.
    pub fn new(limits: Limits) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            buffers: Buffers::new(&limits),
            limits,
            totals: Arc::default(),
            restarts: AtomicU64::new(0),
            rewriting: Mutex::default(),
            busy: Mutex::default(),
            listed: Mutex::default(),
            failed: Mutex::default(),
            poked: AtomicBool::new(false),
            work: Mutex::default(),
            wanted: Condvar::new(),
            eased: Condvar::new(),
        });
        let worker = shared.clone();
        let thread = thread::Builder::new().name("write-behind".into()).spawn(move || worker.write_behind())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// A file of the size that the server said it has, in bytes. To be made once per inode: two do not know of each other.
    pub fn file(&self, remote: Arc<dyn Remote>, size: u64) -> Arc<CachedFile> {
        CachedFile::new(self.shared.clone(), remote, size.min(SIZE_MAX))
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        self.shared.totals.counts()
    }

    /// Memory of pages now, in bytes.
    pub fn bytes(&self) -> usize {
        self.shared.totals.pages.load(Ordering::Relaxed) * PAGE_BYTES
    }

    /// Writes everything of all files, and makes it durable, but for what was [let go](CachedFile::release_synced): see
    /// [`CachedFile::sync`].
    ///
    /// # Errors
    /// The first of any file since this was called last, whoever else was told of it.
    pub fn sync_all(&self) -> Result<()> {
        let files = lock(&self.shared.busy).clone();
        for file in files.iter().filter(|file| !file.is_durable()) {
            file.sync();
        }
        // Their last references may send messages: not under a lock.
        drop(files);
        lock(&self.shared.failed).take().map_or(Ok(()), Err)
    }

    /// The server was restarted: what was written and not made durable is written again. To be called before anything is sent by
    /// the new connection. Does not wait for the server.
    pub fn rewrite(&self) {
        // Before: a write that ends now, and was answered by the old server, is seen to be lost. Two at a time would undo that.
        let _one = lock(&self.shared.rewriting);
        self.shared.restarts.fetch_add(1, Ordering::SeqCst);
        let files = lock(&self.shared.busy).clone();
        for file in files {
            file.rewrite();
        }
        // And after, so that a sync that sees this number finds dirty what it has to write again.
        self.shared.restarts.fetch_add(1, Ordering::SeqCst);
        self.shared.wake_writer();
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        lock(&self.shared.work).stopped = true;
        self.shared.wanted.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            // Its panic was reported when it happened.
            let _ = thread.join();
        }
        // Without the lock: the last reference to a file may send messages.
        let files = std::mem::take(&mut *lock(&self.shared.busy));
        drop(files);
    }
}

impl Shared {
    /// Takes a file in that has something to be written.
    pub fn track_dirty(&self, file: &Arc<CachedFile>) {
        lock(&self.busy).push(file.clone());
    }

    /// Something of a file could not be written, or made durable.
    pub fn failed(&self, error: Errno) {
        lock(&self.failed).get_or_insert(error);
    }

    /// Wakes the thread.
    pub fn wake_writer(&self) {
        if !self.poked.swap(true, Ordering::SeqCst) {
            lock(&self.work).wanted = true;
            self.wanted.notify_one();
        }
    }

    fn unwritten_bytes(&self) -> usize {
        self.totals.unwritten.load(Ordering::Relaxed) * PAGE_BYTES
    }

    fn unstable_bytes(&self) -> usize {
        self.totals.unstable.load(Ordering::Relaxed) * PAGE_BYTES
    }

    /// Whether so much waits to be written that it is to be written at once.
    pub fn is_pressed(&self) -> bool {
        self.unwritten_bytes() > self.limits.dirty_bytes_max / 2 || self.is_keeping_much()
    }

    fn is_keeping_much(&self) -> bool {
        self.limits.unstable_bytes_max > 0 && self.unstable_bytes() > self.limits.unstable_bytes_max / 2
    }

    fn is_full(&self) -> bool {
        let keeps_too_much =
            self.limits.unstable_bytes_max > 0 && self.unstable_bytes() > self.limits.unstable_bytes_max;
        self.unwritten_bytes() > self.limits.dirty_bytes_max || keeps_too_much
    }

    /// Waits while too much waits to be written.
    pub fn throttle(&self) {
        if !self.is_full() {
            return;
        }
        self.wake_writer();
        let work = lock(&self.work);
        drop(self.eased.wait_while(work, |work| self.is_full() && !work.stopped));
    }

    /// Something was written, or made durable.
    pub fn release_throttled(&self) {
        // The lock is taken so that nobody is between looking and waiting.
        drop(lock(&self.work));
        self.eased.notify_all();
        if self.is_pressed() {
            self.wake_writer();
        }
    }

    /// Takes a file in that has pages.
    pub fn list(&self, file: &Arc<CachedFile>) {
        let mut listed = lock(&self.listed);
        if listed.len() == listed.capacity() {
            listed.retain(|file| file.strong_count() > 0);
        }
        listed.push_back(Arc::downgrade(file));
    }

    /// Evicts pages when there are too many. Called with no lock held.
    pub fn make_room(&self) {
        let pages_max = self.limits.bytes_max / PAGE_BYTES;
        let over = self.totals.pages.load(Ordering::Relaxed).saturating_sub(pages_max);
        if over == 0 {
            return;
        }
        let mut needed = over + EVICTION_PAGES.min(pages_max / 8);
        let mut visits = EVICTION_ROUNDS * (lock(&self.listed).len() + pages_max / (64 * EVICTION_CHUNKS) + 1);
        while needed > 0 && visits > 0 {
            visits -= 1;
            let Some(next) = lock(&self.listed).pop_front() else { return };
            let Some(visited) = next.upgrade() else { continue };
            let mut state = visited.lock();
            needed -= state.pages.evict(needed, EVICTION_CHUNKS);
            if state.pages.count == 0 {
                state.listed = false;
                continue;
            }
            drop(state);
            lock(&self.listed).push_back(next);
        }
    }

    /// The thread: writes what is due, until the cache is dropped.
    fn write_behind(&self) {
        let mut is_dirty = false;
        // Kept from round to round, so that writing out does not need memory.
        let mut files = Vec::new();
        loop {
            let mut work = lock(&self.work);
            while !work.wanted && !work.stopped {
                // Where nothing is dirty nothing comes to an age.
                work = if !is_dirty {
                    self.wanted.wait(work).unwrap_or_else(PoisonError::into_inner)
                } else {
                    let waited = self.wanted.wait_timeout(work, self.limits.dirty_age / 2);
                    let (mut work, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                    work.wanted |= timeout.timed_out();
                    work
                };
            }
            if work.stopped {
                return;
            }
            work.wanted = false;
            drop(work);
            self.poked.store(false, Ordering::SeqCst);
            is_dirty = self.write_what_is_due(&mut files);
        }
    }

    /// Begins to write what is due; returns whether anything is left that will be. `files` is empty, before and after.
    fn write_what_is_due(&self, files: &mut Vec<Arc<CachedFile>>) -> bool {
        files.extend(lock(&self.busy).iter().cloned());
        let now = Instant::now();
        for file in &*files {
            let (is_old, is_filled) = {
                let state = file.lock();
                let is_old = state.dirty_since.is_some_and(|since| now.duration_since(since) >= self.limits.dirty_age);
                (is_old, state.added >= file.message_bytes_before())
            };
            if is_filled {
                file.write_whole_messages();
            }
            if is_old || self.unwritten_bytes() > self.limits.dirty_bytes_max / 2 {
                file.write_in_background();
            }
            if self.is_keeping_much() {
                file.sync_in_background();
            }
        }
        let mut is_dirty = false;
        lock(&self.busy).retain(|file| {
            let mut state = file.lock();
            state.busy = state.pages.unwritten > 0 || state.pages.unstable > 0;
            is_dirty |= state.pages.unwritten > 0;
            if !state.busy {
                state.dirty_since = None;
                drop(state);
                files.push(Arc::clone(file));
                return false;
            }
            true
        });
        // Files are dropped without the lock: the last reference may send messages.
        files.clear();
        is_dirty
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("limits", &self.shared.limits).field("counts", &self.counts()).finish()
    }
}
