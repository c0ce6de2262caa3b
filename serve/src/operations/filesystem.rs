//! STATFS, SYNCFS and DESTROY.

use std::sync::Arc;

use ferry_engine::ReplyBuffer;
use ferry_vfs::{Errno, Name, Result, Statfs};
use ferry_wire::fuse::Reply;

use crate::carrier::{FuseCarrier, ServeOutcome};
use crate::reply;
use crate::server::{Context, Server};

/// The block size of file systems that report none.
const BLOCK_BYTES: u32 = 4096;

impl Server {
    pub(crate) fn statfs(&self, cx: &Context<'_>, buffer: &mut impl ReplyBuffer) -> Result<ServeOutcome> {
        let statfs = or_zeros(self.share.source.statfs(&cx.caller, cx.ino))?;
        Ok(cx.done(buffer, &Reply::Statfs(statfs)))
    }

    pub(crate) fn syncfs(&mut self, cx: &Context<'_>, carrier: &mut impl FuseCarrier) -> Result<ServeOutcome> {
        let (source, session, ino) = (Arc::clone(&self.share.source), Arc::clone(cx.session), cx.ino);
        Ok(self.run_on_pool(cx, carrier, move |caller| {
            // An error of one file does not keep the others from being made durable.
            let stored = session.writeback_all();
            source.syncfs(caller, ino)?;
            stored.map(|()| Reply::Empty)
        }))
    }

    pub(crate) fn destroy(&mut self, cx: &Context<'_>, carrier: &mut impl FuseCarrier) -> Result<ServeOutcome> {
        let Some(mappings) = cx.session.mappings.clone() else {
            let served = cx.done(carrier, &Reply::Empty);
            self.end_session();
            return Ok(served);
        };
        let reply = self.mapping_reply(cx, carrier);
        self.end_session();
        // Release the session before the reply: a VMM may end this process as soon as it has the reply.
        mappings.clear(reply);
        Ok(ServeOutcome::Parked)
    }
}

/// Returns zeros for a file system without STATFS: like libfuse, for `df` and package managers.
fn or_zeros(result: Result<Statfs>) -> Result<Statfs> {
    match result {
        Err(Errno::NOSYS) => {
            let (bsize, frsize) = (BLOCK_BYTES, BLOCK_BYTES);
            let namelen = reply::count(Name::BYTES_MAX);
            Ok(Statfs { bsize, frsize, namelen, ..Statfs::default() })
        }
        result => result,
    }
}
