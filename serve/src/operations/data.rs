//! READ, WRITE and FSYNC.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use ferry_vfs::{Backing, Change, Data, Errno, Ino, IoRange, OFlags, Result, SessionId};
use ferry_wire::fuse::{InitFlags, Negotiated, Reply, WRITE_HEAD_BYTES};

use crate::active_request::ActiveRequest;
use crate::carrier::{FuseCarrier, HEADER_BYTES, ServeOutcome};
use crate::persistence::{PriorAppend, prior_append};
use crate::reply;
use crate::server::{Context, Server};
use crate::session::Session;
use crate::share::Share;
use ferry_engine::metrics::Timer;
use ferry_engine::{DataInput, DataOutput, ReplyBuffer, TransferRequest};

/// Writes with one of these flags are durable when the reply is sent.
pub(crate) const DURABLE_FLAGS: OFlags = OFlags::SYNC.union(OFlags::DSYNC);

/// A transfer that has not ended.
#[derive(Debug)]
pub(crate) struct PendingTransfer {
    unique: u64,
    kind: Kind,
    request: Option<ActiveRequest>,
    /// The client, if it has a window that must show the written data.
    window_of: Option<Arc<Session>>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read {
        bytes_max: usize,
    },
    Write {
        by: SessionId,
        ino: Ino,
        offset: u64,
        bytes_max: usize,
        /// See [`Server::write`].
        cached: bool,
    },
    /// An fsync after a write that the source made itself; `bytes` were written.
    Durable {
        bytes: usize,
    },
    Fsync,
}

impl Server {
    fn begin(&mut self, cx: &Context<'_>, carrier: &impl FuseCarrier, kind: Kind) {
        let request = self.active.take();
        let window_of = cx.session.mappings.as_ref().map(|_| Arc::clone(cx.session));
        self.register_transfer(carrier.token(), PendingTransfer { unique: cx.unique, kind, request, window_of });
    }

    pub(crate) fn read(
        &mut self,
        cx: &Context<'_>,
        range: &IoRange,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        let room = carrier.room().checked_sub(HEADER_BYTES).ok_or(Errno::IO)?;
        let bytes_max = room.min(range.len as usize);
        let range = IoRange { len: reply::count(bytes_max), ..*range };
        let mut out = DataOutput::new(carrier, HEADER_BYTES, bytes_max);
        match self.share.source.read(&cx.caller, &range, &mut out)? {
            Data::Bytes(claimed) => {
                // Beyond `done` the memory holds old data.
                if claimed > out.done() {
                    return Err(self.check_claim(cx.ino, "read", claimed, out.done()));
                }
                Ok(ServeOutcome::Reply(reply::write_data_head(carrier, cx.unique, claimed)))
            }
            Data::Extent(extent) => {
                self.begin(cx, carrier, Kind::Read { bytes_max });
                carrier.transfer(TransferRequest::read(extent, HEADER_BYTES, bytes_max));
                Ok(ServeOutcome::Transfer)
            }
        }
    }

    /// Serves WRITE. For writes from the client's page cache (`cached`), Linux takes any success for the whole
    /// (`fuse_writepage_end`). So a short write is an error, which fsync or close then reports.
    pub(crate) fn write(
        &mut self,
        cx: &Context<'_>,
        range: &IoRange,
        cached: bool,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        // The decoder has checked that the message is as long as it says.
        let bytes_max = range.len as usize;
        let mut input = DataInput::new(&*carrier, WRITE_HEAD_BYTES, bytes_max);
        match self.share.source.write(&cx.caller, range, &mut input)? {
            Data::Bytes(claimed) => {
                let most = input.written_max();
                if claimed > most {
                    return Err(self.check_claim(cx.ino, "write", claimed, most));
                }
                publish(&self.share, cx.caller.session, range.ino, range.offset, claimed);
                // An error is reported when the file is closed.
                let _ = cx.session.sync(range.ino, part(range.offset, claimed));
                is_whole(cached, claimed, bytes_max)?;
                self.written(cx, range, claimed, carrier)
            }
            Data::Extent(extent) => {
                let waits = range.flags.intersects(self.share.waiting_flags);
                let (by, ino, offset) = (cx.caller.session, range.ino, range.offset);
                self.begin(cx, carrier, Kind::Write { by, ino, offset, bytes_max, cached });
                let message = (WRITE_HEAD_BYTES, bytes_max);
                carrier.transfer(TransferRequest::write(extent, message, range.clear_privileges, waits));
                Ok(ServeOutcome::Transfer)
            }
        }
    }

    /// Serves a WRITE that a previous server may have executed. What it appended is not appended again.
    pub(crate) fn write_again(
        &mut self,
        cx: &Context<'_>,
        range: &IoRange,
        cached: bool,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        // A client with a write-back cache places appended bytes itself.
        let places = cached || cx.session.negotiated().has(InitFlags::WRITEBACK_CACHE);
        let is_append = !places && range.len > 0 && range.flags.contains(OFlags::APPEND);
        let by = (&*self.share.source, &cx.caller);
        match is_append.then(|| prior_append(by, range, carrier)).transpose()? {
            Some(PriorAppend::Nothing) => self.write(cx, range, cached, carrier),
            Some(PriorAppend::Whole) => {
                let bytes = range.len as usize;
                // Where the bytes are is not known.
                publish(&self.share, cx.caller.session, range.ino, range.offset, usize::MAX);
                // An error is reported when the file is closed.
                let _ = cx.session.sync(range.ino, range.offset..u64::MAX);
                self.written(cx, range, bytes, carrier)
            }
            Some(PriorAppend::Part) | None => {
                let range = IoRange { flags: range.flags - OFlags::APPEND, ..*range };
                self.write(cx, &range, cached, carrier)
            }
        }
    }

    /// Logs that a source claims to have moved more bytes than it can have.
    fn check_claim(&self, ino: Ino, what: &str, claimed: usize, most: usize) -> Errno {
        let share = &self.share;
        share.ratelimited_log.warn(format_args!("the source claims a {what} of {claimed} bytes of {ino:?}, of {most}"));
        Errno::IO
    }

    /// Replies to a write that the source made itself, after an fsync if its flags require one.
    fn written(
        &mut self,
        cx: &Context<'_>,
        range: &IoRange,
        bytes: usize,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        if bytes > 0 && range.flags.intersects(DURABLE_FLAGS) {
            // O_SYNC includes the bit of O_DSYNC.
            let data_only = !range.flags.contains(OFlags::SYNC);
            match self.share.source.fsync(&cx.caller, range.ino, range.handle, data_only) {
                // A source without fsync has no durable storage.
                Ok(None) | Err(Errno::NOSYS) => {}
                Ok(Some(file)) => {
                    self.begin(cx, carrier, Kind::Durable { bytes });
                    carrier.transfer(TransferRequest::fsync(file, data_only));
                    return Ok(ServeOutcome::Transfer);
                }
                Err(errno) => return Err(errno),
            }
        }
        Ok(cx.done(carrier, &Reply::Write { bytes: reply::count(bytes) }))
    }

    /// Finishes FSYNC and FSYNCDIR.
    pub(crate) fn sync(
        &mut self,
        cx: &Context<'_>,
        file: Option<Arc<Backing>>,
        data_only: bool,
        carrier: &mut impl FuseCarrier,
    ) -> ServeOutcome {
        match file {
            None => cx.done(carrier, &Reply::Empty),
            Some(file) => {
                self.begin(cx, carrier, Kind::Fsync);
                carrier.transfer(TransferRequest::fsync(file, data_only));
                ServeOutcome::Transfer
            }
        }
    }
}

/// A request whose transfer has not ended, detached from the server that began it.
#[derive(Debug)]
pub struct DetachedTransfer {
    pub(crate) share: Arc<Share>,
    pub(crate) transfer: PendingTransfer,
}

impl DetachedTransfer {
    /// Finishes the reply after the transfer; returns the bytes of the reply.
    pub fn finish(self, buffer: &mut impl ReplyBuffer, outcome: io::Result<usize>) -> usize {
        self.transfer.finish(&self.share, buffer, outcome, |timer, outcome| self.share.metrics.end(timer, outcome))
    }
}

impl PendingTransfer {
    /// Writes the reply of a transfer that has ended; returns its bytes. `count` records the request in the metrics.
    pub(crate) fn finish(
        self,
        share: &Share,
        buffer: &mut impl ReplyBuffer,
        outcome: io::Result<usize>,
        count: impl FnOnce(Timer, Result<usize>),
    ) -> usize {
        let Self { unique, kind, request, window_of } = self;
        let outcome = outcome.map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
        let result = match (&kind, outcome) {
            (Kind::Write { bytes_max, cached, .. }, Ok(bytes)) => is_whole(*cached, bytes, *bytes_max).map(|()| bytes),
            (Kind::Durable { bytes }, Ok(_)) => Ok(*bytes),
            _ => outcome,
        };
        if let Some(request) = request {
            request.end_transfer(result, count);
        }
        let reply = match (kind, outcome) {
            (_, Err(errno)) => return reply::write_error(buffer, unique, errno),
            (Kind::Read { bytes_max }, Ok(bytes)) => {
                return reply::write_data_head(buffer, unique, bytes.min(bytes_max));
            }
            (Kind::Write { by, ino, offset, bytes_max, .. }, Ok(bytes)) => {
                let bytes = bytes.min(bytes_max);
                publish(share, by, ino, offset, bytes);
                if let Some(session) = window_of {
                    // An error is reported when the file is closed.
                    let _ = session.sync(ino, part(offset, bytes));
                }
                if let Err(errno) = result {
                    return reply::write_error(buffer, unique, errno);
                }
                Reply::Write { bytes: reply::count(bytes) }
            }
            (Kind::Durable { bytes }, Ok(_)) => Reply::Write { bytes: reply::count(bytes) },
            (Kind::Fsync, Ok(_)) => Reply::Empty,
        };
        reply::write(buffer, unique, &Negotiated::BEFORE_INIT, &reply).bytes()
    }
}

/// Whether a write is long enough; see [`Server::write`]. A short write has no errno; ENOSPC is the usual cause.
fn is_whole(cached: bool, bytes: usize, bytes_max: usize) -> Result<()> {
    if cached && bytes < bytes_max { Err(Errno::NOSPC) } else { Ok(()) }
}

/// The range of a file from `offset` on.
fn part(offset: u64, bytes: usize) -> Range<u64> {
    offset..offset.saturating_add(bytes as u64)
}

fn publish(share: &Share, by: SessionId, ino: Ino, offset: u64, bytes: usize) {
    if let Some(changes) = share.source.changes() {
        changes.publish(by, || Change::Data { ino, offset, len: bytes as u64 });
    }
}
