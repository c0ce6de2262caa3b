//! Reading, writing and making durable.

use std::os::fd::AsFd;
use std::sync::Arc;

use ferry_engine::WithoutFsetid;
use ferry_vfs::{Backing, Change, Data, Errno, Extent, Input, IoRange, OFlags, Output, Result};
use ferry_wire::ninep::{Fid, READ_HEAD_BYTES, Reply, encode_data_head, kind};

use super::{Buffers, Context, Done};
use crate::hub::lock;
use crate::session::{File, NewValue, Open, State};

/// Writes with one of these are durable when they are answered.
const DURABLE_FLAGS: OFlags = OFlags::SYNC.union(OFlags::DSYNC);

/// Where a source puts the bytes of a read.
struct DataOutput<'a> {
    room: &'a mut [u8],
    done: usize,
}

impl Output for DataOutput<'_> {
    fn put(&mut self, bytes: &[u8]) -> usize {
        let room = self.room.get_mut(self.done..).unwrap_or_default();
        let count = room.len().min(bytes.len());
        room[..count].copy_from_slice(&bytes[..count]);
        self.done += count;
        count
    }
}

/// Where a source takes the bytes of a write from.
struct DataInput<'a> {
    left: &'a [u8],
}

impl Input for DataInput<'_> {
    fn take(&mut self, bytes: &mut [u8]) -> usize {
        self.left.take(bytes)
    }
}

impl Context<'_> {
    pub(super) fn read(&self, buffers: &mut Buffers, fid: Fid, offset: u64, bytes_max: u32) -> Result<Done> {
        let room = self.session.msize.saturating_sub(u32::try_from(READ_HEAD_BYTES).unwrap_or(u32::MAX));
        let len = bytes_max.min(room);
        let file = self.session.get(fid)?;
        let end = READ_HEAD_BYTES + len as usize;
        if buffers.data.len() < end {
            buffers.data.resize(end, 0);
        }
        let (head, body) = buffers.data[..end].split_at_mut(READ_HEAD_BYTES);
        let bytes = match &file.state {
            State::Open(open) => self.read_open(&file, open, offset, body)?,
            State::Value(value) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let rest = value.bytes.get(start..).unwrap_or_default();
                let count = rest.len().min(body.len());
                body[..count].copy_from_slice(&rest[..count]);
                count
            }
            State::Path | State::NewValue(_) => return Err(Errno::BADF),
        };
        let count = u32::try_from(bytes).unwrap_or(u32::MAX);
        head.copy_from_slice(&encode_data_head(kind::TREAD, self.ticket.tag, count));
        Ok(Done::Data(READ_HEAD_BYTES + bytes))
    }

    fn range(file: &File, open: &Open, offset: u64, bytes: usize) -> IoRange {
        IoRange {
            ino: file.node.ino,
            handle: open.handle,
            offset,
            len: u32::try_from(bytes).unwrap_or(u32::MAX),
            flags: open.flags,
            clear_privileges: false,
            owner: None,
        }
    }

    fn read_open(&self, file: &File, open: &Arc<Open>, offset: u64, body: &mut [u8]) -> Result<usize> {
        if open.is_dir() {
            return Err(Errno::ISDIR);
        }
        let range = Self::range(file, open, offset, body.len());
        let mut out = DataOutput { room: body, done: 0 };
        match self.hub.source.read(&self.caller(file.user, None), &range, &mut out)? {
            // What lies behind `done` is from an earlier reply, maybe somebody else's.
            Data::Bytes(claimed) if claimed > out.done => Err(self.lied("read", claimed, out.done)),
            Data::Bytes(claimed) => Ok(claimed),
            Data::Extent(extent) => read_extent(&extent, out.room),
        }
    }

    /// A source claims to have moved more bytes than it can have.
    fn lied(&self, what: &str, claimed: usize, most: usize) -> Errno {
        self.hub.complaints.warn(format_args!("the source claims a {what} of {claimed} bytes, of {most}"));
        Errno::IO
    }

    pub(super) fn write(&self, fid: Fid, offset: u64, data: &[u8]) -> Result<Reply<'static>> {
        let file = self.session.get(fid)?;
        let bytes = match &file.state {
            State::Open(open) if open.is_dir() => return Err(Errno::ISDIR),
            State::Open(open) => self.write_open(&file, open, offset, data)?,
            State::NewValue(value) => write_value(value, offset, data)?,
            State::Path | State::Value(_) => return Err(Errno::BADF),
        };
        Ok(Reply::Write { bytes: u32::try_from(bytes).unwrap_or(u32::MAX) })
    }

    fn write_open(&self, file: &File, open: &Arc<Open>, offset: u64, data: &[u8]) -> Result<usize> {
        let clear_privileges = file.user.clears_privileges();
        let range = IoRange { clear_privileges, ..Self::range(file, open, offset, data.len()) };
        let cx = self.caller(file.user, None);
        let source = &self.hub.source;
        let mut input = DataInput { left: data };
        let bytes = match source.write(&cx, &range, &mut input)? {
            Data::Bytes(claimed) => {
                // A source that throws data away need not look at it; who has looked at some cannot have written more.
                let taken = data.len() - input.left.len();
                let most = if taken == 0 { data.len() } else { taken };
                if claimed > most {
                    return Err(self.lied("write", claimed, most));
                }
                claimed
            }
            Data::Extent(extent) => {
                let bytes = write_extent(&extent, data, clear_privileges)?;
                self.publish(file, offset, bytes);
                return Ok(bytes);
            }
        };
        self.publish(file, offset, bytes);
        if bytes > 0 && range.flags.intersects(DURABLE_FLAGS) {
            // O_SYNC is O_DSYNC and one bit more.
            let data_only = !range.flags.contains(OFlags::SYNC);
            finish_sync(source.fsync(&cx, range.ino, range.handle, data_only), data_only)?;
        }
        Ok(bytes)
    }

    fn publish(&self, file: &File, offset: u64, bytes: usize) {
        if let Some(changes) = self.hub.source.changes() {
            let ino = file.node.ino;
            changes.publish(self.session.id, || Change::Data { ino, offset, len: bytes as u64 });
        }
    }

    pub(super) fn fsync(&self, fid: Fid, data_only: bool) -> Result<Reply<'static>> {
        let (file, open) = self.session.open(fid)?;
        let (cx, ino) = (self.caller(file.user, None), file.node.ino);
        let begun = match open.is_dir() {
            true => self.hub.source.fsyncdir(&cx, ino, open.handle, data_only),
            false => self.hub.source.fsync(&cx, ino, open.handle, data_only),
        };
        finish_sync(begun, data_only).map(|()| Reply::Fsync)
    }
}

/// Does what a source leaves to its export. One without fsync has nothing that could be lost or kept.
fn finish_sync(begun: Result<Option<Arc<Backing>>>, data_only: bool) -> Result<()> {
    match begun {
        Ok(None) | Err(Errno::NOSYS) => Ok(()),
        Ok(Some(file)) if data_only => rustix::fs::fdatasync(file.as_fd()),
        Ok(Some(file)) => rustix::fs::fsync(file.as_fd()),
        Err(errno) => Err(errno),
    }
}

fn read_extent(extent: &Extent, room: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    while done < room.len() {
        match rustix::io::pread(extent.file.as_fd(), &mut room[done..], extent.offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

fn write_extent(extent: &Extent, data: &[u8], clear_privileges: bool) -> Result<usize> {
    let _without = if clear_privileges { Some(WithoutFsetid::enter()?) } else { None };
    let mut done = 0;
    while done < data.len() {
        match rustix::io::pwrite(extent.file.as_fd(), &data[done..], extent.offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            // What was written is told; what was not will be tried again, and tell the error.
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Values are written in order, as clients do.
fn write_value(new: &NewValue, offset: u64, data: &[u8]) -> Result<usize> {
    let mut value = lock(&new.value);
    if usize::try_from(offset) != Ok(value.len()) {
        return Err(Errno::INVAL);
    }
    if data.len() > new.bytes - value.len() {
        return Err(Errno::NOSPC);
    }
    value.extend_from_slice(data);
    Ok(data.len())
}
