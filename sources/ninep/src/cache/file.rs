//! A file with its pages.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Result, sync};

use super::around::Link;
use super::errors::ErrorCursor;
use super::limits::Limits;
use super::pages::{PAGE, PAGE_BYTES};
use super::pool::Shared;
use super::remote::{Completion, OnCompletion, Remote};
use super::state::{InFlightMessage, Kind, State};
use super::stream::ReadAheadLimit;
use super::writing::SIZE_MAX;

/// An inode of a remote file system, with its cached data. Methods may wait for the server unless documented.
pub struct CachedFile {
    pub(super) cache: Arc<Shared>,
    remote: Arc<dyn Remote>,
    state: Mutex<State>,
    /// Signals changes of the state.
    changed: Condvar,
    message_bytes: AtomicUsize,
}

/// The time of a request for attributes; see [`CachedFile::set_size`].
#[derive(Clone, Copy, Debug)]
pub struct SizeMark {
    /// The state's version; `None` if the reply cannot be used.
    version: Option<u64>,
    number: u64,
}

impl CachedFile {
    pub(super) fn new(cache: Arc<Shared>, remote: Arc<dyn Remote>, size: u64) -> Arc<Self> {
        let state = Mutex::new(State::new(cache.totals.clone(), size));
        let message_bytes = AtomicUsize::new(1);
        let file = Arc::new(Self { cache, remote, state, changed: Condvar::new(), message_bytes });
        file.message_bytes();
        file
    }

    /// The file at the server.
    pub fn remote(&self) -> &Arc<dyn Remote> {
        &self.remote
    }

    /// Returns the size in bytes, including unwritten data. Does not wait.
    pub fn size(&self) -> u64 {
        self.lock().size
    }

    /// Returns a mark, before the server is asked for attributes. Does not wait.
    pub fn size_mark(&self) -> SizeMark {
        let mut state = self.lock();
        state.last_mark += 1;
        let version = (!state.is_writing(u64::MAX) && !state.held).then_some(state.version);
        SizeMark { version, number: state.last_mark }
    }

    /// Sets the size from attributes that were requested after the mark. It is ignored if this client has changed the
    /// size since, or a later mark was used, because the reply may be older. Returns whether users may see this size; otherwise use
    /// [`Self::size`]. Does not wait.
    pub fn set_size(&self, mark: SizeMark, size: u64) -> bool {
        let mut state = self.lock();
        let is_newest = mark.version == Some(state.version) && mark.number > state.used_mark;
        if is_newest && !state.is_writing(u64::MAX) && !state.held {
            state.used_mark = mark.number;
            state.resized_remotely(size.min(SIZE_MAX));
        }
        state.size == size
    }

    /// Returns whether unwritten data exist. Does not wait.
    pub fn is_dirty(&self) -> bool {
        self.lock().pages.unwritten > 0
    }

    /// Returns the error cursor of a new handle.
    pub fn error_cursor(&self) -> ErrorCursor {
        self.lock().errors.cursor()
    }

    /// Changes the size: drops unwritten data beyond it, and truncates by `at_server`; nothing is written meanwhile.
    ///
    /// # Errors
    ///
    /// That of `at_server`; the file is then unchanged.
    pub fn truncate(&self, size: u64, at_server: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = self.wait_while(self.lock(), |state| state.held);
        state.held = true;
        // A write in flight could arrive after the truncation and restore the bytes.
        state = self.wait_while(state, |state| state.is_writing(u64::MAX));
        drop(state);
        let held = TruncateGuard(self);
        let result = at_server();
        let mut state = self.lock();
        if result.is_ok() {
            let end = size.min(state.remote_size);
            state.make_stale(end, u64::MAX);
            state.cut(size);
            (state.size, state.remote_size) = (size, size);
            state.version += 1;
        }
        drop(state);
        drop(held);
        result
    }

    /// Drops the cached data of a range, so that the next read asks the server. Unwritten data are written first, and
    /// synced if they are kept for a restart of the server; open handles get errors of that.
    pub fn invalidate(self: &Arc<Self>, range: Range<u64>) {
        self.write_out();
        if self.lock().pages.unstable > 0 {
            self.write_out_and_sync();
        }
        self.lock().forget_clean(range.start, range.end);
    }

    /// Drops the cached data that the server has, too, and does not wait. Data kept for a restart of the server stay.
    pub fn forget(&self) {
        self.lock().forget_clean(0, u64::MAX);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn wait_while<'a>(
        &self,
        state: MutexGuard<'a, State>,
        condition: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        self.changed.wait_while(state, |state| condition(state)).unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        sync::wait(&self.changed, state)
    }

    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Returns the maximum data of one message, in bytes.
    pub(super) fn message_bytes(&self) -> usize {
        let bytes = self.remote.message_bytes().clamp(1, self.cache.limits.message_bytes_max.max(1));
        self.message_bytes.store(bytes, Ordering::Relaxed);
        bytes
    }

    /// As [`Self::message_bytes`], as of the last sent message, without access to the connection.
    pub(super) fn message_bytes_before(&self) -> usize {
        self.message_bytes.load(Ordering::Relaxed)
    }

    /// Returns the read-ahead limits of one message: whole pages, if it carries one.
    pub(super) fn read_ahead_limit(&self) -> ReadAheadLimit {
        let Limits { depth, bytes_max, .. } = self.cache.limits;
        let message = self.message_bytes_before();
        let message = if message >= PAGE_BYTES { message / PAGE_BYTES * PAGE_BYTES } else { message };
        let window = (depth.saturating_sub(1) * message).min(bytes_max / 8);
        ReadAheadLimit { message_bytes: message as u64, window_bytes_max: window as u64 / PAGE * PAGE }
    }

    pub(super) fn done(self: &Arc<Self>, flight: &InFlightMessage) -> Completion {
        Completion::new(self.clone(), flight.number)
    }
}

/// Ends the wait for a truncation, also after a panic.
struct TruncateGuard<'a>(&'a CachedFile);

impl Drop for TruncateGuard<'_> {
    fn drop(&mut self) {
        self.0.lock().held = false;
        self.0.notify();
    }
}

impl OnCompletion for CachedFile {
    fn ended(&self, number: u64, buffer: Vec<u8>, moved: Result<usize>) {
        let mut state = self.lock();
        let Some(flight) = state.end(number) else { return };
        let asked = flight.to - flight.from;
        let moved = moved.and_then(|count| if count as u64 > asked { Err(Errno::IO) } else { Ok(count) });
        match flight.kind {
            Kind::Read { remote_size } => {
                let moved = moved.and_then(|count| buffer.get(..count).ok_or(Errno::IO));
                if let Ok(bytes) = moved {
                    let note = if flight.around { Link::note_around } else { Link::note };
                    note(&self.cache.totals.link, bytes.len() as u64, flight.begun.elapsed());
                }
                self.read_ended(&mut state, &flight, remote_size, moved);
                self.cache.totals.read.ended();
                self.cache.buffers.back_from_read(buffer);
            }
            Kind::Write => {
                self.write_ended(&mut state, &flight, moved);
                self.cache.totals.write.ended();
                self.cache.buffers.back_from_write(buffer, flight.size);
            }
            Kind::Sync => self.sync_ended(&mut state, moved.map(drop)),
        }
        drop(state);
        self.notify();
        match flight.kind {
            Kind::Read { .. } => (),
            Kind::Write => self.cache.release_throttled(),
            Kind::Sync => {
                self.cache.release_throttled();
                // The writer thread may have stopped watching this file.
                self.cache.wake_writer();
            }
        }
    }
}

impl fmt::Debug for CachedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedFile").field("state", &self.state).finish_non_exhaustive()
    }
}
