//! FLUSH, FALLOCATE, LSEEK, IOCTL and COPY_FILE_RANGE.

use std::sync::Arc;

use ferry_engine::ReplyBuffer;
use ferry_vfs::{CopyRange, Errno, FallocateFlags, Handle, Result, Seek, checks};
use ferry_wire::fuse::{InitFlags, Reply};

use crate::carrier::{FuseCarrier, ServeOutcome};
use crate::mappings::WHOLE;
use crate::server::{Context, Server};

/// The most bytes that COPY_FILE_RANGE copies: its reply counts in 32 bits.
const COPY_BYTES_MAX: u64 = 0xffff_f000;

impl Server {
    pub(crate) fn flush(&self, cx: &Context<'_>, handle: Handle, owner: u64) -> Result<()> {
        // Without locks, FLUSH of a file that was opened without a request has no use. After ENOSYS Linux sends none.
        if cx.session.negotiated().has(InitFlags::NO_OPEN_SUPPORT) {
            return Err(Errno::NOSYS);
        }
        // The owner's locks are released even after an error (close(2)).
        let stored = cx.session.writeback(cx.ino, WHOLE);
        self.publish_passthrough_writes(cx, handle);
        cx.session.unlocked_all(cx.ino, owner);
        self.share.source.flush(&cx.caller, cx.ino, handle, owner).and(stored)
    }

    pub(crate) fn fallocate(
        &self,
        cx: &Context<'_>,
        handle: Handle,
        (offset, len): (u64, u64),
        flags: FallocateFlags,
    ) -> Result<()> {
        self.share.source.fallocate(&cx.caller, cx.ino, handle, offset, len, flags)
    }

    pub(crate) fn lseek(
        &self,
        cx: &Context<'_>,
        handle: Handle,
        (offset, seek): (u64, Seek),
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let found = self.share.source.lseek(&cx.caller, cx.ino, handle, offset, seek)?;
        let offset = checks::at_most(found, i64::MAX.cast_unsigned())?;
        Ok(cx.done(buffer, &Reply::Lseek { offset }))
    }

    pub(crate) fn ioctl(
        &self,
        cx: &Context<'_>,
        handle: Handle,
        (command, input, out_bytes_max): (u32, &[u8], u32),
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let source = &self.share.source;
        let data = source.ioctl(&cx.caller, cx.ino, handle, command, input, out_bytes_max as usize)?;
        checks::at_most(data.len() as u64, u64::from(out_bytes_max))?;
        Ok(cx.done(buffer, &Reply::Ioctl { result: 0, data: &data }))
    }

    pub(crate) fn copy_file_range(
        &mut self,
        cx: &Context<'_>,
        copy: CopyRange,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        let copy = CopyRange { len: copy.len.min(COPY_BYTES_MAX), ..copy };
        let reply = |bytes| Reply::Write { bytes: u32::try_from(bytes).unwrap_or(u32::MAX) };
        Ok(self.copy(cx, copy, reply, carrier))
    }

    pub(crate) fn copy_file_range_64(
        &mut self,
        cx: &Context<'_>,
        copy: CopyRange,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        Ok(self.copy(cx, copy, |bytes| Reply::CopyFileRange64 { bytes }, carrier))
    }

    fn copy(
        &mut self,
        cx: &Context<'_>,
        copy: CopyRange,
        reply: fn(u64) -> Reply<'static>,
        carrier: &mut impl FuseCarrier,
    ) -> ServeOutcome {
        let (source, session) = (Arc::clone(&self.share.source), Arc::clone(cx.session));
        let limiter = self.share.limiter.clone();
        self.run_on_pool(cx, carrier, move |caller| {
            let bytes = checks::at_most(source.copy_file_range(caller, &copy)?, copy.len)?;
            if let Some(limiter) = limiter {
                limiter.charge_bytes(bytes);
            }
            session.sync(copy.to.0, WHOLE)?;
            Ok(reply(bytes))
        })
    }
}
