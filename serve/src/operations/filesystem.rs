//! STATFS, SYNCFS and DESTROY.

use std::sync::Arc;

use ferry_engine::ReplyBuffer;
use ferry_vfs::{Errno, Name, Result, Statfs};
use ferry_wire::fuse::Reply;

use crate::carrier::{FuseCarrier, Served};
use crate::reply;
use crate::server::{Context, Server};

/// The block size of file systems that name none.
const BLOCK_BYTES: u32 = 4096;

impl Server {
    pub(crate) fn statfs(&self, cx: &Context<'_>, buffer: &mut impl ReplyBuffer) -> Result<Served> {
        let statfs = or_zeros(self.share.source.statfs(&cx.caller, cx.ino))?;
        Ok(cx.done(buffer, &Reply::Statfs(statfs)))
    }

    pub(crate) fn syncfs(&mut self, cx: &Context<'_>, carrier: &mut impl FuseCarrier) -> Result<Served> {
        let (source, session, ino) = (Arc::clone(&self.share.source), Arc::clone(cx.session), cx.ino);
        Ok(self.aside(cx, carrier, move |caller| {
            // What cannot be stored keeps nothing else from being made durable.
            let stored = session.writeback_all();
            source.syncfs(caller, ino)?;
            stored.map(|()| Reply::Empty)
        }))
    }

    pub(crate) fn destroy(&mut self, cx: &Context<'_>, carrier: &mut impl FuseCarrier) -> Result<Served> {
        let Some(mappings) = cx.session.mappings.clone() else {
            let served = cx.done(carrier, &Reply::Empty);
            self.end_session();
            return Ok(served);
        };
        let answer = self.mapped(cx, carrier);
        self.end_session();
        // Before the answer: a virtual machine monitor that ends has no time for us any more.
        mappings.clear(answer);
        Ok(Served::Parked)
    }
}

/// A file system that does not count gives `df` and package managers zeros rather than an error, as libfuse does.
fn or_zeros(answer: Result<Statfs>) -> Result<Statfs> {
    match answer {
        Err(Errno::NOSYS) => {
            let (bsize, frsize) = (BLOCK_BYTES, BLOCK_BYTES);
            let namelen = reply::count(Name::BYTES_MAX);
            Ok(Statfs { bsize, frsize, namelen, ..Statfs::default() })
        }
        answer => answer,
    }
}
