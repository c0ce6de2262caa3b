//! Handles requests: from descriptor chains to the disk and back.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ferry_engine::metrics::Recorder;
use ferry_engine::requests::LoggedRequest;
use ferry_engine::{RateLimiter, TransferRequest};
use ferry_vfs::{BlockRange, Data, Errno, Ino, Input, Output};
use ferry_vhost::{Chain, ChainState, Io, Port, QueueHandler};
use ferry_wire::blk::{
    HEADER_BYTES, ID_BYTES, Limits, RANGE_BYTES, RANGES_MAX, Range, Refusal, Request, Sizes, Status,
};

use crate::jobs::{self, Job, Reply};
use crate::metrics::ActiveRequest;
use crate::request_text::RequestText;
use crate::state::{CopyPermit, State};

/// The maximum number of bytes that are zeroed for a failed request; Linux sends no larger ones.
const FILLED_BYTES_MAX: usize = 4 << 20;

/// The chunk in bytes of a request that exceeds the copy budget.
const PIECE_BYTES: usize = 1 << 20;

static ZEROS: [u8; 4096] = [0; 4096];

/// A transfer under way.
#[derive(Default)]
struct PendingTransfer {
    /// The number of bytes to transfer for success.
    bytes: usize,
    is_read: bool,
    active: Option<ActiveRequest>,
    logged: Option<Box<LoggedRequest>>,
}

/// Serves one worker's queues.
pub(crate) struct Handler {
    state: Arc<State>,
    port: Arc<Port<Reply>>,
    logical_block_bytes: u32,
    limiter: Option<Arc<RateLimiter>>,
    /// By the low half of the token.
    under_way: Vec<PendingTransfer>,
    recorder: Recorder,
    /// The request being served.
    active: Option<ActiveRequest>,
    /// The request being served, if requests are logged.
    logged: Option<Box<LoggedRequest>>,
    /// The status of the request that was served last, if it has failed.
    failed: Cell<Option<Status>>,
}

/// The part of a chain that a read fills.
struct ReadBuffer<'a> {
    chain: &'a Chain,
    filled: usize,
    room: usize,
}

impl Output for ReadBuffer<'_> {
    fn put(&mut self, bytes: &[u8]) -> usize {
        let count = self.chain.write_at(self.filled, &bytes[..bytes.len().min(self.room - self.filled)]);
        self.filled += count;
        count
    }
}

/// The part of a chain that a write sends.
struct WriteBuffer<'a> {
    chain: &'a Chain,
    taken: usize,
}

impl Input for WriteBuffer<'_> {
    fn take(&mut self, bytes: &mut [u8]) -> usize {
        let count = self.chain.read_at(HEADER_BYTES + self.taken, bytes);
        self.taken += count;
        count
    }
}

impl Handler {
    pub(crate) fn new(state: Arc<State>, port: Arc<Port<Reply>>, limiter: Option<Arc<RateLimiter>>) -> Self {
        let logical_block_bytes = state.geometry().logical_block_bytes;
        let recorder = Recorder::new(&state.metrics);
        let (under_way, active, logged, failed) = (Vec::new(), None, None, Cell::new(None));
        Self { state, port, logical_block_bytes, limiter, under_way, recorder, active, logged, failed }
    }

    fn read(&mut self, chain: &Chain, io: &mut Io<'_>, offset: u64, bytes: usize) -> ChainState {
        let at = BlockRange { offset, bytes: bytes as u64, alignment: alignment(chain.writable(0, bytes)) };
        if self.state.features.slow {
            return match self.state.budget.take(bytes) {
                Some(room) => self.run_on_pool(io, Job::Read(at), Some(room)),
                None => self.in_pieces(chain, (offset, bytes), bytes, |at, from| {
                    let data = Job::Read(at).carry_out(&*self.state.disk)?;
                    if chain.write_at(from, &data) == data.len() { Ok(()) } else { Err(Errno::FAULT) }
                }),
            };
        }
        match self.state.disk.read(&at, &mut ReadBuffer { chain, filled: 0, room: bytes }) {
            Ok(Data::Bytes(count)) if count == bytes => ChainState::Done(end(chain, Status::Ok, bytes)),
            Ok(Data::Bytes(_)) => self.fail(chain, Errno::IO),
            Ok(Data::Extent(extent)) => {
                self.note(io.token(), PendingTransfer { bytes, is_read: true, ..PendingTransfer::default() });
                io.transfer(TransferRequest::read(extent, 0, bytes))
            }
            Err(error) => self.fail(chain, error),
        }
    }

    fn write(&mut self, chain: &Chain, io: &mut Io<'_>, offset: u64, bytes: usize) -> ChainState {
        let at = BlockRange { offset, bytes: bytes as u64, alignment: alignment(chain.readable(HEADER_BYTES, bytes)) };
        let durable = !self.state.is_writeback();
        if self.state.disk.write_waits(&at) {
            let copy = |from: usize, bytes: usize| {
                let mut copy = vec![0; bytes];
                if chain.read_at(HEADER_BYTES + from, &mut copy) == bytes { Ok(copy) } else { Err(Errno::FAULT) }
            };
            return match self.state.budget.take(bytes) {
                Some(room) => match copy(0, bytes) {
                    Ok(bytes) => self.run_on_pool(io, Job::Write { at, durable, bytes }, Some(room)),
                    Err(error) => self.fail(chain, error),
                },
                None => self.in_pieces(chain, (offset, bytes), 0, |at, from| {
                    let bytes = copy(from, PIECE_BYTES.min(bytes - from))?;
                    Job::Write { at, durable, bytes }.carry_out(&*self.state.disk).map(drop)
                }),
            };
        }
        match self.state.disk.write(&at, durable, &mut WriteBuffer { chain, taken: 0 }) {
            Ok(Data::Bytes(count)) if count == bytes => ChainState::Done(end(chain, Status::Ok, 0)),
            Ok(Data::Bytes(_)) => self.fail(chain, Errno::IO),
            Ok(Data::Extent(extent)) => {
                self.note(io.token(), PendingTransfer { bytes, ..PendingTransfer::default() });
                io.transfer(TransferRequest::write(extent, (HEADER_BYTES, bytes), false, durable))
            }
            Err(error) => self.fail(chain, error),
        }
    }

    fn flush(&mut self, chain: &Chain, io: &mut Io<'_>) -> ChainState {
        if self.state.disk.flush_waits() {
            return self.run_on_pool(io, Job::Flush, None);
        }
        match self.state.disk.flush() {
            Ok(None) => ChainState::Done(end(chain, Status::Ok, 0)),
            Ok(Some(file)) => {
                self.note(io.token(), PendingTransfer::default());
                io.transfer(TransferRequest::fsync(file, true))
            }
            Err(error) => self.fail(chain, error),
        }
    }

    fn id(&self, chain: &Chain, bytes: usize) -> ChainState {
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(self.state.disk.serial().bytes()) {
            *to = from;
        }
        chain.write_at(0, &id[..bytes]);
        ChainState::Done(end(chain, Status::Ok, bytes))
    }

    fn ranges(
        &mut self,
        chain: &Chain,
        io: &mut Io<'_>,
        request: Request,
        count: usize,
        limits: &Limits,
    ) -> ChainState {
        let mut room = [0; RANGES_MAX * RANGE_BYTES];
        let bytes = &mut room[..count * RANGE_BYTES];
        chain.read_at(HEADER_BYTES, bytes);
        let decode = match request {
            Request::Discard { .. } => Range::decode_discard,
            _ => Range::decode_write_zeroes,
        };
        match decode(bytes, limits) {
            Ok(ranges) => {
                if let (Some(limiter), Request::WriteZeroes { .. }) = (&self.limiter, request) {
                    limiter.charge_bytes(ranges.iter().map(|range| range.bytes).fold(0, u64::saturating_add));
                }
                self.run_on_pool(io, Job::of_ranges(request, ranges, !self.state.is_writeback()), None)
            }
            Err(refusal) => self.refuse(chain, refusal),
        }
    }

    fn run_on_pool(&mut self, io: &Io<'_>, job: Job, room: Option<CopyPermit>) -> ChainState {
        let (port, token, active, logged) = (Arc::clone(&self.port), io.token(), self.active, self.logged.take());
        jobs::run(&self.state, job, room, move |reply| port.reply(token, Reply { active, logged, ..reply }));
        ChainState::Later
    }

    /// Carries out a request in chunks on this thread, when the copy budget is exhausted: that bounds the memory.
    /// `piece` gets each chunk with its distance from the first byte.
    fn in_pieces(
        &self,
        chain: &Chain,
        (offset, bytes): (u64, usize),
        filled_bytes: usize,
        piece: impl Fn(BlockRange, usize) -> Result<(), Errno>,
    ) -> ChainState {
        let mut pieces = (0..bytes).step_by(PIECE_BYTES).map(|from| {
            let bytes = PIECE_BYTES.min(bytes - from) as u64;
            piece(BlockRange { offset: offset + from as u64, bytes, alignment: 1 }, from)
        });
        match pieces.try_for_each(|outcome| outcome) {
            Ok(()) => ChainState::Done(end(chain, Status::Ok, filled_bytes)),
            Err(error) => self.fail(chain, error),
        }
    }

    fn note(&mut self, token: u64, wanted: PendingTransfer) {
        let wanted = PendingTransfer { active: self.active, logged: self.logged.take(), ..wanted };
        let slot = low_half(token);
        if slot >= self.under_way.len() {
            self.under_way.resize_with(slot + 1, PendingTransfer::default);
        }
        self.under_way[slot] = wanted;
    }

    fn refuse(&self, chain: &Chain, refusal: Refusal) -> ChainState {
        self.state.ratelimited_log.warn(format_args!("the guest sent an invalid request: {refusal}"));
        self.end_failed(chain, refusal.status())
    }

    fn fail(&self, chain: &Chain, error: Errno) -> ChainState {
        self.state.ratelimited_log.warn(format_args!("a request failed: {error}"));
        self.end_failed(chain, Reply::failed(error).status)
    }

    fn end_failed(&self, chain: &Chain, status: Status) -> ChainState {
        self.failed.set(Some(status));
        ChainState::Done(end(chain, status, 0))
    }
}

/// Charges a request. A flush, which others' data may wait for, is free.
fn charge(limiter: &RateLimiter, request: &Result<Request, Refusal>) {
    match request {
        Ok(Request::Read { bytes, .. } | Request::Write { bytes, .. }) => limiter.charge(*bytes as u64),
        Ok(Request::Flush) => {}
        _ => limiter.charge(0),
    }
}

/// Logs the end of a request, if requests were logged when it began.
fn end_logged(logged: Option<Box<LoggedRequest>>, active: Option<ActiveRequest>, status: Status) {
    if let (Some(logged), Some(active)) = (logged, active) {
        logged.end(active.outcome(status).into());
    }
}

/// Returns the low half of a token, a small number.
fn low_half(token: u64) -> usize {
    usize::try_from(token & u64::from(u32::MAX)).expect("a number of 32 bits")
}

/// Returns the largest power of two that divides every address and length.
fn alignment(segments: impl Iterator<Item = ferry_engine::Segment>) -> usize {
    let bits = segments.fold(0, |bits, segment| bits | segment.address.addr() | segment.bytes);
    1 << bits.trailing_zeros().min(usize::BITS - 1)
}

/// Ends a request. The status is the last byte that the device may write (section 5.2.6), and drivers only look for it
/// if the length in the used ring covers it. It covers all before it, too, so unwritten bytes are zeroed.
fn end(chain: &Chain, status: Status, data_bytes: usize) -> u32 {
    let Some(room) = chain.writable_bytes().checked_sub(1) else { return 0 };
    chain.write_at(room, &[status as u8]);
    if room - data_bytes.min(room) > FILLED_BYTES_MAX {
        return u32::try_from(data_bytes).unwrap_or(u32::MAX);
    }
    let mut at = data_bytes;
    while at < room {
        match chain.write_at(at, &ZEROS[..ZEROS.len().min(room - at)]) {
            // The guest has removed the memory of the status, so the driver does not look for it.
            0 => return u32::try_from(at).unwrap_or(u32::MAX),
            count => at += count,
        }
    }
    u32::try_from(room + 1).unwrap_or(u32::MAX)
}

impl QueueHandler for Handler {
    type Message = Reply;
    type PendingTransfer = ();

    fn serve(&mut self, chain: &Chain, io: &mut Io<'_>) -> ChainState {
        let mut header = [0; HEADER_BYTES];
        chain.read_at(0, &mut header);
        let sizes = Sizes { readable: chain.readable_bytes(), writable: chain.writable_bytes() };
        let limits = self.state.request_limits(self.logical_block_bytes);
        let request = Request::decode(&header, sizes, &limits);
        if let Some(limiter) = &self.limiter {
            charge(limiter, &request);
        }
        let request = match request {
            Ok(request) => request,
            Err(refusal) => {
                self.state.metrics.invalid();
                return self.refuse(chain, refusal);
            }
        };
        let active = ActiveRequest::begin(&mut self.recorder, request);
        (self.active, self.failed) = (Some(active), Cell::new(None));
        self.logged = LoggedRequest::begin(&self.state.name, Ino::ROOT, None, &RequestText(request));
        let state = match request {
            Request::Read { offset, bytes } => self.read(chain, io, offset, bytes),
            Request::Write { offset, bytes } => self.write(chain, io, offset, bytes),
            Request::Flush => self.flush(chain, io),
            Request::Id { bytes } => self.id(chain, bytes),
            Request::Discard { ranges } | Request::WriteZeroes { ranges } => {
                self.ranges(chain, io, request, ranges, &limits)
            }
        };
        self.active = None;
        if matches!(state, ChainState::Done(_)) {
            let status = self.failed.get().unwrap_or(Status::Ok);
            active.end(&mut self.recorder, status);
            end_logged(self.logged.take(), Some(active), status);
        }
        state
    }

    fn finish_transfer(&mut self, token: u64, chain: &Chain, outcome: io::Result<usize>) -> u32 {
        let wanted = self.under_way.get_mut(low_half(token)).map(std::mem::take).unwrap_or_default();
        let what = if wanted.is_read { "read" } else { "write or flush" };
        let is_done = outcome.as_ref().is_ok_and(|moved| *moved == wanted.bytes);
        let status = if is_done { Status::Ok } else { Status::IoError };
        if let Some(active) = wanted.active {
            active.end_transfer(&mut self.recorder, status);
        }
        end_logged(wanted.logged, wanted.active, status);
        match outcome {
            Ok(moved) if is_done => end(chain, Status::Ok, if wanted.is_read { moved } else { 0 }),
            Ok(moved) => {
                let bytes = wanted.bytes;
                self.state.ratelimited_log.warn(format_args!("a {what} of {bytes} bytes ended after {moved}"));
                end(chain, Status::IoError, 0)
            }
            Err(error) => {
                self.state.ratelimited_log.warn(format_args!("a {what} failed: {error}"));
                end(chain, Status::IoError, 0)
            }
        }
    }

    fn deliver(&mut self, chain: &Chain, reply: Reply) -> u32 {
        let Reply { status, data, room, active, logged } = reply;
        let is_there = chain.write_at(0, &data) == data.len();
        let outcome = if is_there { status } else { Status::IoError };
        if let Some(active) = active {
            active.end(&mut self.recorder, outcome);
        }
        end_logged(logged, active, outcome);
        let bytes = data.len();
        drop((data, room));
        if !is_there {
            self.state.ratelimited_log.warn(format_args!("a read has no memory to go to: it was there when it began"));
            return end(chain, Status::IoError, 0);
        }
        end(chain, status, bytes)
    }

    fn delay(&self, _queue: usize) -> Option<Duration> {
        self.limiter.as_ref()?.wait()
    }

    fn write_error(&mut self, chain: &Chain) -> u32 {
        let active = self.active.take();
        if let Some(active) = active {
            active.end(&mut self.recorder, Status::IoError);
        }
        end_logged(self.logged.take(), active, Status::IoError);
        end(chain, Status::IoError, 0)
    }

    fn end_batch(&mut self) {
        self.recorder.end_batch();
    }
}
