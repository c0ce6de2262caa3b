//! READ, WRITE and FSYNC: where the bytes go.

use std::sync::Arc;

use ferry_vfs::{Backing, Change, Data, Errno, IoRange, OFlags, Result};
use ferry_vhost::{Answer, Io};
use ferry_wire::fuse::{Reply, WRITE_HEAD_BYTES};

use crate::handler::{Context, Handler, Moving};
use crate::reply::{self, ChainInput, ChainOutput, HEADER_BYTES};

/// Writes with one of these wait for the disk.
const WAITING_FLAGS: OFlags = OFlags::SYNC.union(OFlags::DSYNC).union(OFlags::DIRECT);

impl Handler {
    pub(crate) fn read(&mut self, cx: &Context<'_>, range: &IoRange, io: &mut Io<'_>) -> Result<Answer> {
        let room = cx.chain.writable_bytes().checked_sub(HEADER_BYTES).ok_or(Errno::IO)?;
        let bytes_max = room.min(range.len as usize);
        let range = IoRange { len: reply::written(bytes_max), ..*range };
        let mut out = ChainOutput { chain: cx.chain, done: 0, bytes_max };
        match self.share.source.read(&cx.caller, &range, &mut out)? {
            Data::Bytes(_) => {
                let done = out.done;
                cx.chain.write_at(0, &Reply::encode_bytes_head(cx.unique, done));
                Ok(Answer::Done(reply::written(HEADER_BYTES + done)))
            }
            Data::Extent(extent) => {
                self.expect(io, Moving::Read { unique: cx.unique });
                Ok(io.read(extent.file, extent.offset, HEADER_BYTES, bytes_max))
            }
        }
    }

    pub(crate) fn write(&mut self, cx: &Context<'_>, range: &IoRange, io: &mut Io<'_>) -> Result<Answer> {
        // The decoder has checked that the message is as long as it says.
        let len = range.len as usize;
        let mut input = ChainInput { chain: cx.chain, offset: WRITE_HEAD_BYTES, left: len };
        match self.share.source.write(&cx.caller, range, &mut input)? {
            Data::Bytes(count) => {
                if let Some(changes) = self.share.source.changes() {
                    changes.publish(|| Change::Data { ino: range.ino, offset: range.offset, len: count as u64 });
                }
                Ok(cx.done(&Reply::Write { bytes: reply::written(count) }))
            }
            Data::Extent(extent) => {
                let waits = range.flags.intersects(WAITING_FLAGS);
                self.expect(io, Moving::Write { unique: cx.unique, ino: range.ino, offset: range.offset });
                Ok(io.write(extent.file, extent.offset, (WRITE_HEAD_BYTES, len), range.clear_privileges, waits))
            }
        }
    }

    /// Finishes FSYNC and FSYNCDIR.
    pub(crate) fn sync(
        &mut self,
        cx: &Context<'_>,
        file: Option<Arc<Backing>>,
        data_only: bool,
        io: &mut Io<'_>,
    ) -> Answer {
        match file {
            None => cx.done(&Reply::Empty),
            Some(file) => {
                self.expect(io, Moving::Fsync { unique: cx.unique });
                io.fsync(file, data_only)
            }
        }
    }
}
