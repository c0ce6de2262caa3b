//! Writing: data stay in pages until they fill a message, become old, memory is short, or a caller flushes them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use ferry_vfs::{Errno, Input, Result};

use super::buffers::Size;
use super::errors::ErrorCursor;
use super::file::CachedFile;
use super::pages::{PAGE, PAGE_BYTES, Span};
use super::state::{InFlightMessage, Kind, State};

/// The maximum size of a file in bytes: offsets are signed.
pub(super) const SIZE_MAX: u64 = i64::MAX as u64;

/// Adjacent dirty pages.
struct Run {
    /// The page after its last one.
    end: u64,
    bytes: usize,
    /// The page at which to continue: the last one again, if only a part of it fits.
    next: u64,
}

impl CachedFile {
    /// Writes `len` bytes at an offset; returns how many, fewer if the input ends. Waits while too many are unwritten.
    ///
    /// # Errors
    ///
    /// `FBIG` beyond the maximum size of a file; those of the server if the rest of a page had to be fetched.
    /// [`Self::flush`] and [`Self::fsync`] return errors of write-behind.
    pub fn write(self: &Arc<Self>, offset: u64, len: usize, input: &mut dyn Input) -> Result<usize> {
        self.write_at(Some(offset), len, input).map(|(_, count)| count)
    }

    /// Writes at the end of the file, as [`Self::write`] does; returns the offset and the number of bytes.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn append(self: &Arc<Self>, len: usize, input: &mut dyn Input) -> Result<(u64, usize)> {
        self.write_at(None, len, input)
    }

    fn write_at(self: &Arc<Self>, place: Option<u64>, len: usize, input: &mut dyn Input) -> Result<(u64, usize)> {
        self.cache.throttle();
        let mut state = self.lock();
        let since = state.last;
        let offset = place.unwrap_or(state.size);
        let end = offset.checked_add(len as u64).filter(|&end| end <= SIZE_MAX).ok_or(Errno::FBIG)?;
        if place.is_none() {
            // Reserved at once, because the lock may be released below.
            state.size = end;
        }
        let mut at = offset;
        let mut result = Ok(());
        while at < end {
            let page = at / PAGE;
            let span = Span::of(page, at, end);
            if state.is_gap(page, span) {
                let missing = page * PAGE + state.pages.get(page).map_or(0, |content| content.fetch_from() as u64);
                if let Some(error) = state.failure(missing, since) {
                    result = Err(error);
                    break;
                }
                state = self.fetch(state, page);
                continue;
            }
            let took = state.store(page, span, input);
            at += took as u64;
            state.size = state.size.max(at);
            if took < span.len() {
                break;
            }
        }
        if at < end && place.is_none() && state.size == end {
            state.size = state.remote_size.max(state.pages.unwritten_end()).max(at);
        }
        let count = usize::try_from(at - offset).map_err(|_| Errno::FBIG)?;
        self.notify_writer(state, count);
        if count == 0 { result.map(|()| (offset, 0)) } else { Ok((offset, count)) }
    }

    /// Wakes the writer if the new data are due.
    fn notify_writer(self: &Arc<Self>, mut state: MutexGuard<'_, State>, count: usize) {
        if count == 0 {
            return;
        }
        let begins = state.dirty_since.is_none();
        state.dirty_since.get_or_insert_with(Instant::now);
        state.added += count;
        let due = state.added >= self.message_bytes_before();
        let joins = !std::mem::replace(&mut state.busy, true);
        let is_new = !std::mem::replace(&mut state.listed, true);
        drop(state);
        if joins {
            self.cache.track_dirty(self);
        }
        if joins || begins || due || self.cache.is_pressed() {
            self.cache.wake_writer();
        }
        if is_new {
            self.cache.list(self);
        }
        self.cache.make_room();
    }

    /// Writes everything, waits until it is written, and returns errors of earlier writes that `fsync` has not reported
    /// to this handle: what `close` does. They are still reported by the next `fsync`, because this `close` may be that
    /// of a child process, which ignores the error.
    ///
    /// # Errors
    ///
    /// The last error of writing that `fsync` has not reported to this handle.
    pub fn flush(self: &Arc<Self>, told: &ErrorCursor) -> Result<()> {
        self.write_out();
        self.lock_with_losses().errors.show(told)
    }

    /// Writes everything, syncs the file on the server, and returns errors of earlier writes that this handle has not
    /// reported.
    ///
    /// # Errors
    ///
    /// The last error of writing or syncing that this handle has not reported.
    pub fn fsync(self: &Arc<Self>, told: &ErrorCursor) -> Result<()> {
        self.write_out_and_sync();
        self.lock_with_losses().errors.tell(told)
    }

    /// As [`Self::fsync`], without a handle. Open handles and [`super::Cache::sync_all`] still report the errors.
    pub fn sync(self: &Arc<Self>) {
        self.write_out_and_sync();
        drop(self.lock_with_losses());
    }

    /// Locks the state, and records it if the server was restarted since unkept data were written.
    fn lock_with_losses(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        let restarts = self.restarts();
        let is_lost = |unkept: Option<u64>| unkept.is_some_and(|then| then != restarts);
        if is_lost(state.unkept) || is_lost(state.unkept_at_sync) {
            (state.unkept, state.unkept_at_sync) = (None, None);
            self.note(&mut state, Errno::IO);
        }
        state
    }

    fn note(&self, state: &mut State, error: Errno) {
        state.errors.note(error);
        self.cache.failed(error);
    }

    pub(super) fn write_out_and_sync(self: &Arc<Self>) {
        loop {
            // Data that the restarted server may have lost are dirty again, and written again.
            let restarts = self.restarts();
            self.write_out();
            let mut state = self.wait_while(self.lock(), State::is_syncing);
            let flight = state.begin_sync();
            drop(state);
            self.send_sync(&flight);
            drop(
                self.wait_while(self.lock(), |state| state.in_flight.iter().any(|other| other.number == flight.number)),
            );
            if self.restarts() == restarts {
                return;
            }
        }
    }

    fn send_sync(self: &Arc<Self>, flight: &InFlightMessage) {
        self.cache.totals.syncs.fetch_add(1, Ordering::Relaxed);
        self.remote().sync(self.done(flight));
    }

    /// Asks the server to sync kept data, unless it is doing so, and does not wait.
    pub(super) fn sync_in_background(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.pages.unstable == 0 || state.is_syncing() {
            return;
        }
        let flight = state.begin_sync();
        drop(state);
        self.send_sync(&flight);
    }

    /// Called when the last handle of the file was closed and flushed, or others may write now: data kept for a restart
    /// are released, and lost if the server crashes. A later sync reports an error if the server has restarted since.
    /// Does not wait.
    pub fn release_synced(&self) {
        let mut state = self.lock();
        if state.pages.unstable > 0 {
            self.unkept(&mut state);
        }
        state.each_unstable(|content| content.unstable = Span::NONE);
        drop(state);
        self.cache.release_throttled();
        self.cache.wake_writer();
    }

    /// Returns whether written data exist that are neither durable nor kept. Does not wait.
    pub fn is_unkept(&self) -> bool {
        let state = self.lock();
        state.unkept.is_some() || state.unkept_at_sync.is_some()
    }

    /// Returns whether all written data are durable. Does not wait.
    pub(super) fn is_durable(&self) -> bool {
        let state = self.lock();
        let waits = state.pages.unwritten > 0 || state.pages.unstable > 0;
        !waits && state.unkept.is_none() && state.unkept_at_sync.is_none()
    }

    /// The server has removed the file: nothing must become durable.
    pub fn mark_removed(&self) {
        let mut state = self.lock();
        (state.unkept, state.unkept_at_sync) = (None, None);
    }

    fn restarts(&self) -> u64 {
        self.cache.restarts.load(Ordering::SeqCst)
    }

    fn unkept(&self, state: &mut State) {
        state.unkept.get_or_insert(self.restarts());
    }

    /// Called after a restart of the server: data that may be lost become dirty. See [`super::Cache::rewrite`].
    pub(super) fn rewrite(&self) {
        let mut state = self.lock();
        state.each_unstable(|content| {
            content.dirty = content.dirty.and(content.unstable);
            content.unstable = Span::NONE;
        });
        state.dirty_since.get_or_insert_with(Instant::now);
    }

    /// Writes all currently dirty data, and waits for that.
    pub fn write_out(self: &Arc<Self>) {
        let (until, mut shorts) = {
            let mut state = self.lock();
            state.dirty_since = None;
            (state.size.div_ceil(PAGE), state.short_writes)
        };
        loop {
            let mut page = 0;
            while let Some(next) = self.write_some(page, until, true) {
                page = next;
            }
            let state = self.lock();
            let last = state.last;
            let state = self.wait_while(state, |state| state.is_writing(last));
            if state.short_writes == shorts {
                return;
            }
            shorts = state.short_writes;
        }
    }

    /// Begins to write dirty data, except pages being written, and waits for buffers only.
    pub(super) fn write_in_background(self: &Arc<Self>) {
        self.lock().dirty_since = None;
        let mut page = 0;
        while let Some(next) = self.write_some(page, u64::MAX, false) {
            page = next;
        }
        let mut state = self.lock();
        if state.pages.next_dirty(0).is_some() {
            state.dirty_since.get_or_insert_with(Instant::now);
        }
    }

    /// Begins to write the first dirty pages of a range, in ascending order so that it ends despite concurrent writes;
    /// returns where to continue. Waits for pages being written, or skips them.
    fn write_some(self: &Arc<Self>, from: u64, until: u64, waits: bool) -> Option<u64> {
        let buffers = &self.cache.buffers;
        let mut from = from;
        let mut state = self.lock();
        // None before the length of the write is known.
        let mut held_buffer: Option<(Vec<u8>, Size)> = None;
        loop {
            let held = state.held && !waits;
            let Some(page) = state.pages.next_dirty(from).filter(|&page| page < until && !held) else {
                drop(state);
                if let Some((buffer, size)) = held_buffer {
                    buffers.back_from_write(buffer, size);
                }
                return None;
            };
            if state.held || state.pages.is_writing(page) {
                if waits {
                    state = self.wait(state);
                } else {
                    from = page + 1;
                }
                continue;
            }
            let run = state.run(page, self.message_bytes());
            let size = buffers.size(run.bytes);
            match held_buffer.take_if(|(_, held)| *held == size) {
                Some((buffer, size)) => {
                    self.send_run(state, page, &run, buffer, size);
                    return Some(run.next);
                }
                None => {
                    // The dirty pages may change during the wait for a buffer.
                    drop(state);
                    if let Some((buffer, size)) = held_buffer.take() {
                        buffers.back_from_write(buffer, size);
                    }
                    held_buffer = Some((buffers.for_write(size), size));
                    state = self.lock();
                }
            }
        }
    }

    /// Begins to write data that fill whole messages. Waits for buffers only.
    pub(super) fn write_whole_messages(self: &Arc<Self>) {
        let message = self.message_bytes();
        let whole = if message >= PAGE_BYTES { message / PAGE_BYTES * PAGE_BYTES } else { 1 };
        let mut from = 0;
        self.lock().added = 0;
        loop {
            let buffer = self.cache.buffers.for_write(Size::Whole);
            let state = self.lock();
            let next = if state.held { None } else { state.next_whole_run(from, message, whole) };
            let Some((page, run)) = next else {
                drop(state);
                self.cache.buffers.back_from_write(buffer, Size::Whole);
                return;
            };
            self.send_run(state, page, &run, buffer, Size::Whole);
            from = run.next;
        }
    }

    /// Begins to write a run of pages, without the lock.
    fn send_run(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        page: u64,
        run: &Run,
        mut buffer: Vec<u8>,
        size: Size,
    ) {
        let flight = state.gather(page, run, &mut buffer, self.restarts(), size);
        drop(state);
        self.cache.totals.write.begun(buffer.len());
        self.remote().write(flight.from, buffer, self.done(&flight));
    }

    /// Records the end of a write.
    pub(super) fn write_ended(&self, state: &mut State, flight: &InFlightMessage, moved: Result<usize>) {
        let moved = moved.and_then(|count| if count == 0 { Err(Errno::IO) } else { Ok(count) });
        let written_to = flight.from + moved.unwrap_or(0) as u64;
        let keeps = self.cache.limits.unstable_bytes_max > 0;
        // The server before the restart may have written it.
        let is_lost = keeps && flight.restarts != self.restarts();
        for page in flight.pages() {
            let done = Span::of(page, flight.from, written_to);
            let rest = Span::of(page, flight.from.max(written_to), flight.to);
            state.pages.update(page, |content| {
                content.writing = Span::NONE;
                if is_lost {
                    content.dirty = content.dirty.and(done);
                } else if keeps {
                    content.unstable = content.unstable.and(done);
                }
                if moved.is_ok() {
                    content.dirty = content.dirty.and(rest);
                }
            });
            state.pages.not_in_sync(page);
            if moved.is_err() {
                state.pages.drop_clean(page);
            }
        }
        state.version += 1;
        if !keeps {
            self.unkept(state);
        }
        match moved {
            Ok(_) => state.remote_size = state.remote_size.max(written_to),
            Err(error) => {
                self.note(state, error);
                state.size = state.remote_size.max(state.pages.unwritten_end());
            }
        }
        if moved.is_ok() && (is_lost || written_to < flight.to) {
            state.short_writes += 1;
            state.dirty_since.get_or_insert_with(Instant::now);
        }
    }

    /// Records the end of a sync. After an error its data are released: a second sync would succeed without meaning.
    pub(super) fn sync_ended(&self, state: &mut State, result: Result<()>) {
        state.pages.sync_ended();
        state.unkept_at_sync = state.unkept_at_sync.filter(|&then| then != self.restarts());
        if let Err(error) = result {
            self.note(state, error);
        }
    }

    /// Waits for a page that must be known before it can be written.
    fn fetch<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State>, page: u64) -> MutexGuard<'a, State> {
        let planned = self.plan(&mut state, (page * PAGE, (page + 1) * PAGE), false).0;
        if planned.is_empty() { self.wait(state) } else { self.begin_reads(state, planned) }
    }
}

impl State {
    /// Returns whether this write leaves a gap of unknown bytes in the page. Beyond the server's end there are zeros.
    fn is_gap(&mut self, page: u64, span: Span) -> bool {
        self.fill_beyond_end(page);
        self.pages.get(page).is_some_and(|content| !content.valid.joins(span))
    }

    /// Zeroes the part beyond the server's end, which need not be fetched.
    pub(super) fn fill_beyond_end(&mut self, page: u64) {
        let Some(content) = self.pages.get(page) else { return };
        let known = content.fetch_from();
        let lacks = content.valid != Span::WHOLE;
        if lacks && page * PAGE + known as u64 >= self.remote_size && !self.pages.is_fetching(page) {
            self.pages.update(page, |content| content.fill_zeros(known));
        }
    }

    /// Stores bytes in a page; returns how many. The page is empty, or they are adjacent to its data.
    fn store(&mut self, page: u64, span: Span, input: &mut dyn Input) -> usize {
        let beyond = page * PAGE >= self.remote_size && self.pages.get(page).is_none();
        let took = self.pages.update(page, |content| {
            if beyond {
                content.fill_zeros(0);
            }
            let took = input.take(&mut content.data[span.from..span.to]).min(span.len());
            let got = Span { from: span.from, to: span.from + took };
            if got.is_empty() || !content.valid.joins(got) {
                return 0;
            }
            content.valid = content.valid.and(got);
            content.dirty = content.dirty.and(got);
            content.settle();
            took
        });
        if took == 0 {
            self.pages.drop_clean(page);
        }
        took
    }

    /// Returns the dirty pages from this one that fit into a message. A message smaller than a page takes a part.
    fn run(&self, first: u64, message_bytes: usize) -> Run {
        let mut run = Run { end: first, bytes: 0, next: first };
        while let Some(content) = self.pages.get(run.end) {
            let dirty = content.dirty;
            let follows = run.bytes == 0 || dirty.from == 0;
            if dirty.is_empty() || !content.writing.is_empty() || !follows {
                break;
            }
            if run.bytes + dirty.len() > message_bytes {
                if run.bytes == 0 {
                    return Run { end: first + 1, bytes: message_bytes, next: first };
                }
                break;
            }
            run.bytes += dirty.len();
            run.end += 1;
            if dirty.to < PAGE_BYTES {
                break;
            }
        }
        run.next = run.end;
        run
    }

    fn next_whole_run(&self, mut from: u64, message_bytes: usize, whole: usize) -> Option<(u64, Run)> {
        while let Some(page) = self.pages.next_dirty(from) {
            let run = self.run(page, message_bytes);
            if run.bytes >= whole {
                return Some((page, run));
            }
            from = run.end.max(page + 1);
        }
        None
    }

    /// Copies a run to the buffer of its message.
    fn gather(&mut self, first: u64, run: &Run, buffer: &mut Vec<u8>, restarts: u64, size: Size) -> InFlightMessage {
        let from = first * PAGE + self.pages.get(first).map_or(0, |content| content.dirty.from as u64);
        let to = from + run.bytes as u64;
        for page in first..run.end {
            let span = Span::of(page, from, to);
            self.pages.update(page, |content| {
                buffer.extend_from_slice(&content.data[span.from..span.to]);
                content.writing = span;
                content.dirty = content.dirty.since(span.to);
            });
        }
        let flight = self.begin(Kind::Write, from, to);
        if let Some(last) = self.in_flight.last_mut() {
            (last.restarts, last.size) = (restarts, size);
        }
        flight
    }

    fn begin_sync(&mut self) -> InFlightMessage {
        self.pages.sync_begins();
        self.unkept_at_sync = self.unkept_at_sync.or(self.unkept.take());
        self.begin(Kind::Sync, 0, 0)
    }

    fn each_unstable(&mut self, mut change: impl FnMut(&mut super::pages::Page)) {
        let mut next = 0;
        while let Some(page) = self.pages.next_unstable(next) {
            self.pages.update(page, &mut change);
            next = page + 1;
        }
    }
}
