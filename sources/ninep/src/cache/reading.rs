//! Reading: copies cached data, requests missing data in long messages, and reads ahead of sequential readers.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use ferry_vfs::{Errno, Output, Result};

use super::file::CachedFile;
use super::limits::Limits;
use super::pages::{PAGE, PAGE_BYTES, Page, Span};
use super::state::{InFlightMessage, Kind, State};

/// Zeros for pages that the server does not have.
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// How far a read came.
enum ReadProgress {
    /// To its end, or that of the file, or until the output was full.
    ToTheEnd,
    /// To a missing byte.
    To(u64),
}

impl CachedFile {
    /// Reads up to `len` bytes from an offset; returns how many, fewer only at the end of the file.
    ///
    /// # Errors
    ///
    /// Those of the server. Some bytes may have been copied then.
    pub fn read(self: &Arc<Self>, offset: u64, len: usize, out: &mut dyn Output) -> Result<usize> {
        let asked_end = offset.saturating_add(len as u64);
        let limit = self.read_ahead_limit();
        let mut state = self.lock();
        if offset >= state.size || len == 0 {
            return Ok(0);
        }
        let since = state.last;
        let size = state.size;
        let stream = state.streams.note(offset, asked_end.min(size), limit);
        let mut at = offset;
        let mut looked_ahead = false;
        let mut missed = false;
        loop {
            let came = copy_out(&mut state, &mut at, asked_end, out);
            let end = asked_end.min(state.size).max(at);
            let ReadProgress::To(missing) = came else {
                if !looked_ahead && let Some(ahead) = state.streams.wants(stream, end, limit) {
                    let planned = self.plan(&mut state, ahead, true);
                    let reached = planned.1;
                    state.streams.reached(stream, reached);
                    drop(self.begin_reads(state, planned.0));
                }
                let count = if missed { &self.cache.totals.misses } else { &self.cache.totals.hits };
                count.fetch_add(1, Ordering::Relaxed);
                return usize::try_from(at - offset).map_err(|_| Errno::OVERFLOW);
            };
            missed = true;
            if let Some(error) = state.failure(missing, since) {
                return Err(error);
            }
            if state.pages.is_fetching(missing / PAGE) {
                if !looked_ahead {
                    state.streams.stalled(stream, limit);
                }
            } else {
                state.streams.fell_back(stream, missing);
            }
            let (mut planned, reached) = self.plan(&mut state, (missing, end), false);
            if !looked_ahead && reached >= end {
                looked_ahead = true;
                if let Some(ahead) = state.streams.wants(stream, end, limit) {
                    self.extend(&mut state, &mut planned, ahead, stream);
                } else if state.streams.is_single(stream) && !planned.is_empty() {
                    self.plan_read_around(&mut state, &mut planned, missing);
                }
            }
            state = if planned.is_empty() { self.wait(state) } else { self.begin_reads(state, planned) };
        }
    }

    /// Plans read-ahead, merged into the last planned message where it fits.
    fn extend(
        &self,
        state: &mut State,
        planned: &mut Vec<InFlightMessage>,
        ahead: (u64, u64),
        stream: super::stream::StreamId,
    ) {
        let message = self.read_ahead_limit().message_bytes;
        let mut from = ahead.0;
        if let Some(last) = planned.last_mut()
            && last.to == from.min(state.remote_size)
            && last.to % PAGE == 0
        {
            let room = (last.from + message).min(ahead.1).min(state.remote_size);
            while last.to < room && state.pages.needs_fetch(last.to / PAGE) && state.pages.get(last.to / PAGE).is_none()
            {
                state.pages.fetch(last.to / PAGE);
                last.to = (last.to / PAGE * PAGE + PAGE).min(room);
            }
            from = from.max(last.to);
            let (number, to) = (last.number, last.to);
            if let Some(flight) = state.in_flight.iter_mut().find(|flight| flight.number == number) {
                flight.to = to;
            }
        }
        let (more, reached) = self.plan(state, (from, ahead.1), true);
        planned.extend(more);
        state.streams.reached(stream, reached);
    }

    /// Plans the read-around of a byte, after the requests that a caller waits for.
    fn plan_read_around(&self, state: &mut State, planned: &mut Vec<InFlightMessage>, at: u64) {
        let Limits { around_bytes_max, bytes_max, .. } = self.cache.limits;
        let most = self.read_ahead_limit().message_bytes.min(around_bytes_max.min(bytes_max / 256) as u64);
        let bytes = self.cache.totals.link.around_bytes().min(most) / PAGE * PAGE;
        if bytes == 0 || !state.pages.around.pays() {
            return;
        }
        let from = at / bytes * bytes;
        let (around, _) = self.plan(state, (from, from + bytes), true);
        for flight in &around {
            flight.pages().for_each(|page| state.pages.fetch_around(page));
        }
        state.pages.around.blocks += u64::from(!around.is_empty());
        // `plan` has just appended them.
        let first = state.in_flight.len() - around.len();
        state.in_flight[first..].iter_mut().for_each(|flight| flight.around = true);
        planned.extend(around);
    }

    /// Plans messages for the missing parts of a range, up to the maximum in flight; also returns how far they reach.
    /// Read-ahead leaves one message free for readers that wait.
    pub(super) fn plan(&self, state: &mut State, range: (u64, u64), ahead: bool) -> (Vec<InFlightMessage>, u64) {
        self.message_bytes();
        let limit = self.read_ahead_limit();
        let depth = self.cache.limits.depth.max(1);
        let mut room = depth.saturating_sub(state.reads()).saturating_sub(usize::from(ahead));
        let mut planned = Vec::new();
        let end = range.1.min(state.remote_size);
        let mut page = range.0 / PAGE;
        while page * PAGE < end {
            if !state.pages.needs_fetch(page) {
                page += 1;
                continue;
            }
            if room == 0 {
                return (planned, page * PAGE);
            }
            let kind = Kind::Read { remote_size: state.remote_size };
            // A partially fetched page continues where it ended.
            let from = page * PAGE + state.pages.get(page).map_or(0, |content| content.fetch_from() as u64);
            let until = (from + limit.message_bytes).min(end.next_multiple_of(PAGE)).min(state.remote_size);
            if until <= from {
                // The server's part is known, and the rest of the page is zeros.
                let known = Span::of(page, 0, from).to;
                state.pages.fetched(page, Some(|content: &mut Page| content.fill_zeros(known)));
                page += 1;
                continue;
            }
            let mut to = from;
            while to < until && (to == from || state.pages.needs_fetch(to / PAGE)) {
                state.pages.fetch(to / PAGE);
                to = (to / PAGE * PAGE + PAGE).min(until);
            }
            room -= 1;
            page = to.div_ceil(PAGE);
            planned.push(state.begin(kind, from, to));
        }
        (planned, range.1.max(page * PAGE))
    }

    /// Releases the lock, sends the planned reads, and then drops pages beyond the limit.
    pub(super) fn begin_reads<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        planned: Vec<InFlightMessage>,
    ) -> MutexGuard<'a, State> {
        if planned.is_empty() {
            return state;
        }
        let is_new = !std::mem::replace(&mut state.listed, true);
        drop(state);
        if is_new {
            self.cache.list(self);
        }
        for flight in planned {
            let bytes = usize::try_from(flight.to - flight.from).unwrap_or_default();
            self.cache.totals.read.begun(bytes);
            self.remote().read(flight.from, self.cache.buffers.for_read(bytes), self.done(&flight));
        }
        self.cache.make_room();
        self.lock()
    }

    /// Stores the result of a read. `remote_size` is the server's file size at its request.
    pub(super) fn read_ended(
        &self,
        state: &mut State,
        flight: &InFlightMessage,
        remote_size: u64,
        moved: Result<&[u8]>,
    ) {
        if flight.stale {
            return;
        }
        let buffer = moved.unwrap_or_default();
        let came_to = flight.from + buffer.len() as u64;
        let is_whole = came_to == flight.to;
        for page in flight.pages() {
            let start = page * PAGE;
            let (from, to) = (flight.from.max(start), came_to.min(start + PAGE));
            if from >= to {
                state.pages.fetched(page, None::<fn(&mut Page)>);
                continue;
            }
            let inside = |at: u64, base: u64| usize::try_from(at - base).unwrap_or_default();
            let bytes = &buffer[inside(from, flight.from)..inside(to, flight.from)];
            let ends_here = is_whole && to == remote_size;
            let fill = |content: &mut Page| {
                content.fill(inside(from, start), bytes);
                if ends_here {
                    content.fill_zeros(inside(to, start));
                }
            };
            state.pages.fetched(page, Some(fill));
        }
        match moved {
            Err(error) => state.failed(flight, error),
            // A truncation by this client would have made this read stale, so another client has shortened the file.
            Ok([]) if state.remote_size == remote_size => state.resized_remotely(flight.from),
            Ok(_) => (),
        }
    }
}

/// Copies the cached part of a range.
fn copy_out(state: &mut State, at: &mut u64, end: u64, out: &mut dyn Output) -> ReadProgress {
    let end = end.min(state.size);
    while *at < end {
        let page = *at / PAGE;
        let span = Span::of(page, *at, end);
        if state.pages.get(page).is_some_and(|content| !content.has(span)) {
            state.fill_beyond_end(page);
        }
        let put = match state.pages.read(page) {
            Some(content) if content.has(span) => out.put(&content.data[span.from..span.to]),
            None if page * PAGE >= state.remote_size => out.put(&ZEROS[..span.len()]),
            _ => return ReadProgress::To(*at),
        };
        *at += put as u64;
        if put < span.len() {
            return ReadProgress::ToTheEnd;
        }
    }
    ReadProgress::ToTheEnd
}
