//! Tread, Twrite and Tfsync.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_engine::metrics::Timer;
use ferry_engine::{DataInput, DataOutput, TransferRequest};
use ferry_vfs::sync::lock;
use ferry_vfs::{Change, Data, Errno, Extent, Ino, IoRange, OFlags, Result, SessionId};
use ferry_wire::ninep::{Fid, READ_HEAD_BYTES, Reply, WRITE_HEAD_BYTES, encode_data_head, kind};

use super::{Context, ReplyPlace, encode};
use crate::append_tracking::TrackedWrite;
use crate::carrier::{NinepCarrier, NinepReply};
use crate::read_ahead::ReadAhead;
use crate::request_table::Ticket;
use crate::session::{File, NewValue, Open, State};
use crate::share::Share;

/// Writes with one of these are durable when they complete.
const DURABLE_FLAGS: OFlags = OFlags::SYNC.union(OFlags::DSYNC);

/// The length of the pieces in which the value of an extended attribute is copied.
const VALUE_PIECE_BYTES: usize = 4096;

/// A request whose transfer has not ended.
#[derive(Debug)]
pub(crate) struct PendingTransfer {
    pub(crate) ticket: Ticket,
    session: SessionId,
    kind: Kind,
    timer: Option<Timer>,
}

#[derive(Debug)]
enum Kind {
    Read {
        bytes_max: usize,
    },
    Write {
        ino: Ino,
        offset: u64,
        bytes_max: usize,
        tracked: Option<TrackedWrite>,
    },
    /// An fsync after a write of `bytes` that the source made itself.
    Durable {
        bytes: usize,
    },
    Fsync,
}

impl PendingTransfer {
    /// Finishes the reply of an ended transfer.
    pub(crate) fn end(
        mut self,
        share: &Share,
        buffer: &mut impl NinepReply,
        outcome: Result<usize>,
    ) -> Result<ReplyPlace> {
        if let Some(timer) = self.timer {
            share
                .metrics
                .end(timer, outcome.map(|moved| if let Kind::Durable { bytes } = self.kind { bytes } else { moved }));
        }
        if let Kind::Write { bytes_max, tracked, .. } = &mut self.kind {
            ended(tracked.take(), outcome.unwrap_or_default().min(*bytes_max));
        }
        let (tag, moved) = (self.ticket.tag, outcome?);
        let reply = match self.kind {
            Kind::Read { bytes_max } => return Ok(read_done(buffer, &self.ticket, moved.min(bytes_max))),
            Kind::Write { ino, offset, bytes_max, .. } => {
                let bytes = moved.min(bytes_max);
                publish(share, self.session, ino, offset, bytes);
                written(bytes)
            }
            Kind::Durable { bytes } => written(bytes),
            Kind::Fsync => Reply::Fsync,
        };
        encode(buffer, tag, &reply);
        Ok(ReplyPlace::Short)
    }
}

/// Records the end of a write of this many bytes.
fn ended(tracked: Option<TrackedWrite>, bytes: usize) {
    if let Some(write) = tracked {
        write.ended(bytes);
    }
}

fn written(bytes: usize) -> Reply<'static> {
    Reply::Write { bytes: u32::try_from(bytes).unwrap_or(u32::MAX) }
}

/// Writes the head of an Rread whose data is in place.
fn read_done(buffer: &mut impl NinepReply, ticket: &Ticket, bytes: usize) -> ReplyPlace {
    let count = u32::try_from(bytes).unwrap_or(u32::MAX);
    buffer.write_at(0, &encode_data_head(kind::TREAD, ticket.tag, count));
    ReplyPlace::Long(READ_HEAD_BYTES + bytes)
}

fn publish(share: &Share, by: SessionId, ino: Ino, offset: u64, bytes: usize) {
    if let Some(changes) = share.source.changes() {
        changes.publish(by, || Change::Data { ino, offset, len: bytes as u64 });
    }
}

impl Context<'_> {
    /// Leaves a transfer to the carrier.
    fn transfer(&self, carrier: &mut impl NinepCarrier, request: TransferRequest, kind: Kind) -> Result<ReplyPlace> {
        carrier.transfer(request);
        let ended = carrier.ended();
        self.finish_transfer(carrier, kind, ended)
    }

    /// The carrier has the transfer: it has ended, or another thread completes it.
    fn finish_transfer(
        &self,
        carrier: &mut impl NinepCarrier,
        kind: Kind,
        ended: Option<Result<usize>>,
    ) -> Result<ReplyPlace> {
        // A transfer that has ended is counted here.
        let timer = if ended.is_none() { self.timer.take() } else { None };
        let moving = PendingTransfer { ticket: self.ticket.clone(), session: self.session.id, kind, timer };
        match ended {
            Some(outcome) => moving.end(self.share, carrier, outcome),
            None => {
                carrier.expect(moving);
                Ok(ReplyPlace::Later)
            }
        }
    }

    pub(super) fn read(
        &self,
        carrier: &mut impl NinepCarrier,
        fid: Fid,
        offset: u64,
        bytes_max: u32,
    ) -> Result<ReplyPlace> {
        let room = carrier.room().min(self.session.msize as usize).saturating_sub(READ_HEAD_BYTES);
        let bytes_max = room.min(usize::try_from(bytes_max).unwrap_or(usize::MAX));
        let file = self.session.get(fid)?;
        match &file.state {
            State::Open(open) => self.read_open(carrier, &file, open, (offset, bytes_max)),
            State::Value(value) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let rest = value.bytes.get(start..).unwrap_or_default();
                let bytes = carrier.write_at(READ_HEAD_BYTES, &rest[..rest.len().min(bytes_max)]);
                Ok(read_done(carrier, self.ticket, bytes))
            }
            State::Path | State::NewValue(_) => Err(Errno::BADF),
        }
    }

    fn range(file: &File, open: &Open, (offset, bytes): (u64, usize), flags: OFlags) -> IoRange {
        IoRange {
            ino: file.node.ino,
            handle: open.handle,
            offset,
            len: u32::try_from(bytes).unwrap_or(u32::MAX),
            flags,
            clear_privileges: false,
            owner: None,
        }
    }

    fn read_open(
        &self,
        carrier: &mut impl NinepCarrier,
        file: &File,
        open: &Arc<Open>,
        (offset, bytes_max): (u64, usize),
    ) -> Result<ReplyPlace> {
        if open.is_dir() {
            return Err(Errno::ISDIR);
        }
        if !open.can_read() {
            return Err(Errno::BADF);
        }
        let range = Self::range(file, open, (offset, bytes_max), open.flags());
        let mut out = DataOutput::new(carrier, READ_HEAD_BYTES, bytes_max);
        match self.share.source.read(&self.caller(file.user, None), &range, &mut out)? {
            // The bytes after `done` belong to an earlier reply, maybe of another client.
            Data::Bytes(claimed) if claimed > out.done() => Err(self.check_claim("read", claimed, out.done())),
            Data::Bytes(claimed) => Ok(read_done(carrier, self.ticket, claimed)),
            Data::Extent(extent) => {
                let ahead = self.ahead(open, &extent, (offset, bytes_max));
                carrier.transfer(TransferRequest::read(extent, READ_HEAD_BYTES, bytes_max));
                let ended = carrier.ended();
                // Reads beyond the end of a file are empty.
                let is_short = ended.as_ref().is_some_and(|moved| !matches!(moved, Ok(moved) if *moved == bytes_max));
                if let Some(ahead) = ahead.filter(|_| !is_short) {
                    let bytes = ahead.range.end - ahead.range.start;
                    self.share.read_ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
                    carrier.read_ahead(&self.share.blocking_pool, ahead);
                }
                self.finish_transfer(carrier, Kind::Read { bytes_max }, ended)
            }
        }
    }

    /// Returns the range to read ahead after this read: an extent continues in its file as the read continues.
    fn ahead(&self, open: &Open, extent: &Extent, (offset, bytes): (u64, usize)) -> Option<ReadAhead> {
        // Memory is there, and past the page cache nothing can be kept.
        if extent.file.memory().is_some() || extent.file.waits() {
            return None;
        }
        let range = lock(&open.reader).note(offset, bytes as u64, self.share.options.read_ahead_bytes_max)?;
        let place = |at: u64| extent.offset.checked_add(at.checked_sub(offset)?);
        Some(ReadAhead { file: Arc::clone(&extent.file), range: place(range.start)?..place(range.end)? })
    }

    /// Logs that a source claims to have moved more bytes than it can have.
    fn check_claim(&self, what: &str, claimed: usize, most: usize) -> Errno {
        self.share.ratelimited_log.warn(format_args!("the source claims a {what} of {claimed} bytes, of {most}"));
        Errno::IO
    }

    pub(super) fn write(
        &self,
        carrier: &mut impl NinepCarrier,
        fid: Fid,
        offset: u64,
        bytes: usize,
    ) -> Result<ReplyPlace> {
        let file = self.session.get(fid)?;
        match &file.state {
            State::Open(open) if !open.can_write() => Err(Errno::BADF),
            State::Open(open) => self.write_open(carrier, &file, open, (offset, bytes)),
            State::NewValue(value) => {
                let bytes = write_value(value, offset, carrier, bytes)?;
                self.done(carrier, &written(bytes))
            }
            State::Path | State::Value(_) => Err(Errno::BADF),
        }
    }

    fn write_open(
        &self,
        carrier: &mut impl NinepCarrier,
        file: &File,
        open: &Arc<Open>,
        (offset, bytes_max): (u64, usize),
    ) -> Result<ReplyPlace> {
        let cx = self.writer(file.user);
        let source = &self.share.source;
        let tracked = open.begin_write(offset, bytes_max, || {
            source.getattr(&cx, file.node.ino, Some(open.handle)).ok().map(|attr| attr.size)
        });
        let clear_privileges = file.user.clears_privileges();
        let flags = open.write_flags(tracked.as_ref());
        let range = IoRange { clear_privileges, ..Self::range(file, open, (offset, bytes_max), flags) };
        let mut input = DataInput::new(&*carrier, WRITE_HEAD_BYTES, bytes_max);
        let bytes = match source.write(&cx, &range, &mut input) {
            Err(errno) => {
                ended(tracked, 0);
                return Err(errno);
            }
            Ok(Data::Bytes(claimed)) => {
                let most = input.written_max();
                ended(tracked, claimed.min(most));
                if claimed > most {
                    return Err(self.check_claim("write", claimed, most));
                }
                claimed
            }
            Ok(Data::Extent(extent)) => {
                let waits = range.flags.intersects(DURABLE_FLAGS);
                let data = (WRITE_HEAD_BYTES, bytes_max);
                let request = TransferRequest::write(extent, data, clear_privileges, waits);
                let kind = Kind::Write { ino: range.ino, offset, bytes_max, tracked };
                return self.transfer(carrier, request, kind);
            }
        };
        publish(self.share, self.session.id, range.ino, offset, bytes);
        if bytes > 0 && range.flags.intersects(DURABLE_FLAGS) {
            // O_SYNC includes the bit of O_DSYNC.
            let data_only = !range.flags.contains(OFlags::SYNC);
            match source.fsync(&cx, range.ino, range.handle, data_only) {
                // A source without fsync has no durable storage.
                Ok(None) | Err(Errno::NOSYS) => {}
                Ok(Some(backing)) => {
                    return self.transfer(carrier, TransferRequest::fsync(backing, data_only), Kind::Durable { bytes });
                }
                Err(errno) => return Err(errno),
            }
        }
        self.done(carrier, &written(bytes))
    }

    pub(super) fn fsync(&self, carrier: &mut impl NinepCarrier, fid: Fid, data_only: bool) -> Result<ReplyPlace> {
        let (file, open) = self.session.open(fid)?;
        let (cx, ino) = (self.caller(file.user, None), file.node.ino);
        let begun = match open.is_dir() {
            true => self.share.source.fsyncdir(&cx, ino, open.handle, data_only),
            false => self.share.source.fsync(&cx, ino, open.handle, data_only),
        };
        match begun {
            Ok(None) | Err(Errno::NOSYS) => self.done(carrier, &Reply::Fsync),
            Ok(Some(file)) => self.transfer(carrier, TransferRequest::fsync(file, data_only), Kind::Fsync),
            Err(errno) => Err(errno),
        }
    }
}

/// Values are written in order, as clients do.
fn write_value(new: &NewValue, offset: u64, carrier: &impl NinepCarrier, bytes: usize) -> Result<usize> {
    let mut value = lock(&new.value);
    if usize::try_from(offset) != Ok(value.len()) {
        return Err(Errno::INVAL);
    }
    if bytes > new.bytes - value.len() {
        return Err(Errno::NOSPC);
    }
    let mut piece = [0; VALUE_PIECE_BYTES];
    let mut done = 0;
    while done < bytes {
        let wanted = piece.len().min(bytes - done);
        let count = carrier.read_at(WRITE_HEAD_BYTES + done, &mut piece[..wanted]);
        if count == 0 {
            return Err(Errno::IO);
        }
        value.extend_from_slice(&piece[..count]);
        done += count;
    }
    Ok(done)
}
