//! The shared state of a source's files: memory, buffers, and the write-behind thread.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use ferry_vfs::sync::{self, lock};
use ferry_vfs::{Errno, Result};

use super::buffers::Buffers;
use super::file::CachedFile;
use super::limits::{Counts, Limits, Totals};
use super::pages::PAGE_BYTES;
use super::remote::Remote;
use super::writing::SIZE_MAX;

/// Chunks of a file that the eviction visits before it continues with the next file.
const EVICTION_CHUNKS: usize = 64;

/// Additional pages to evict, so that not every request evicts.
const EVICTION_PAGES: usize = 256;

/// The maximum rounds of the eviction over all files: in the first, every page may be used.
const EVICTION_ROUNDS: usize = 3;

/// The cache of a source, shared by all its files. Flush everything before dropping it.
pub struct Cache {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The part of the cache that files access.
pub(super) struct Shared {
    pub limits: Limits,
    pub totals: Arc<Totals>,
    pub buffers: Buffers,
    /// Twice the number of restarts of the server; odd while lost data are being searched.
    pub restarts: AtomicU64,
    rewriting: Mutex<()>,
    /// Files with unwritten data, or data kept for a restart.
    busy: Mutex<Vec<Arc<CachedFile>>>,
    /// Files with pages, in the order of the eviction.
    listed: Mutex<VecDeque<Weak<CachedFile>>>,
    /// The first error of any file that [`Cache::sync_all`] has not returned yet.
    failed: Mutex<Option<Errno>>,
    poked: AtomicBool,
    work: Mutex<Work>,
    /// Signals work for the thread.
    wanted: Condvar,
    /// Signals a decrease of unwritten or unstable data.
    eased: Condvar,
}

#[derive(Debug, Default)]
struct Work {
    wanted: bool,
    stopped: bool,
}

impl Cache {
    /// Creates a cache with these limits, and its thread.
    ///
    /// # Errors
    ///
    /// Those of starting the thread.
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

    /// Returns a file of this size at the server, in bytes. Call it once per inode: instances do not know each other.
    pub fn file(&self, remote: Arc<dyn Remote>, size: u64) -> Arc<CachedFile> {
        CachedFile::new(self.shared.clone(), remote, size.min(SIZE_MAX))
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        self.shared.totals.counts()
    }

    /// Returns the current memory of pages, in bytes.
    pub fn bytes(&self) -> usize {
        self.shared.totals.pages.load(Ordering::Relaxed) * PAGE_BYTES
    }

    /// Writes and syncs all data except [released](CachedFile::release_synced) ones: see [`CachedFile::sync`].
    ///
    /// # Errors
    ///
    /// The first error of any file since the last call, even if other callers got it, too.
    pub fn sync_all(&self) -> Result<()> {
        let files = lock(&self.shared.busy).clone();
        for file in files.iter().filter(|file| !file.is_durable()) {
            file.sync();
        }
        // Dropping their last references may send messages, so not under a lock.
        drop(files);
        lock(&self.shared.failed).take().map_or(Ok(()), Err)
    }

    /// Called after a restart of the server: data that were not durable become dirty again. Call it before anything is
    /// sent on the new connection. Does not wait for the server.
    pub fn rewrite(&self) {
        // Before: a write that the old server acknowledged and that ends now is detected as lost. Two concurrent calls
        // would undo that.
        let _one = lock(&self.shared.rewriting);
        self.shared.restarts.fetch_add(1, Ordering::SeqCst);
        let files = lock(&self.shared.busy).clone();
        for file in files {
            file.rewrite();
        }
        // And after, so that a sync that sees this number finds the lost data dirty.
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
        // Without the lock: dropping the last reference to a file may send messages.
        let files = std::mem::take(&mut *lock(&self.shared.busy));
        drop(files);
    }
}

impl Shared {
    /// Adds a file with unwritten data.
    pub fn track_dirty(&self, file: &Arc<CachedFile>) {
        lock(&self.busy).push(file.clone());
    }

    /// Records that data could not be written or synced.
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

    /// Returns whether unwritten data must be written at once.
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

    /// Waits while there are too many unwritten data.
    pub fn throttle(&self) {
        if !self.is_full() {
            return;
        }
        self.wake_writer();
        let work = lock(&self.work);
        drop(self.eased.wait_while(work, |work| self.is_full() && !work.stopped));
    }

    /// Called when data were written or synced.
    pub fn release_throttled(&self) {
        // The lock ensures that no thread is between its check and its wait.
        drop(lock(&self.work));
        self.eased.notify_all();
        if self.is_pressed() {
            self.wake_writer();
        }
    }

    /// Adds a file with pages.
    pub fn list(&self, file: &Arc<CachedFile>) {
        let mut listed = lock(&self.listed);
        if listed.len() == listed.capacity() {
            listed.retain(|file| file.strong_count() > 0);
        }
        listed.push_back(Arc::downgrade(file));
    }

    /// Evicts pages if there are too many. Called without a lock.
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

    /// The thread: writes due data until the cache is dropped.
    fn write_behind(&self) {
        let mut is_dirty = false;
        // Reused, so that writing does not allocate.
        let mut files = Vec::new();
        loop {
            let mut work = lock(&self.work);
            while !work.wanted && !work.stopped {
                // Without dirty data nothing becomes due.
                work = if !is_dirty {
                    sync::wait(&self.wanted, work)
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

    /// Begins to write due data; returns whether more will become due. `files` is empty before and after.
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
        // Dropped without the lock: the last reference may send messages.
        files.clear();
        is_dirty
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("limits", &self.shared.limits).field("counts", &self.counts()).finish()
    }
}
