//! Files that are made shorter while other clients have them in their memory.
//!
//! The source then waits until those clients' virtual machine monitors have let go ([`ferry_vfs::Windows`]). What they do meanwhile may
//! need a worker of ours: QEMU tells all devices of a change of its memory, and their queues stop for it. So no worker waits;
//! the request is parked, and another thread makes the file shorter.

use std::sync::Arc;

use ferry_vfs::{Attr, Caller, Entry, FallocateFlags, Handle, Ino, Result, SetAttr, checks};
use ferry_wire::fuse::{Opened, Reply};

use crate::carrier::{Carrier, Served};
use crate::mount::Open;
use crate::server::{Context, Server};

impl Server {
    /// As [`Self::aside`], and no queue that stops waits for it.
    fn parked_aside(
        &mut self,
        cx: &Context<'_>,
        carrier: &mut impl Carrier,
        call: impl FnOnce(&Caller<'_>) -> Result<Reply<'static>> + Send + 'static,
    ) -> Served {
        match self.aside(cx, carrier, call) {
            Served::Later => Served::Parked,
            served => served,
        }
    }

    /// SETATTR with a size.
    pub(crate) fn setattr_aside(
        &mut self,
        cx: &Context<'_>,
        (handle, set): (Option<Handle>, SetAttr),
        carrier: &mut impl Carrier,
    ) -> Served {
        let (source, mount, ino) = (Arc::clone(&self.share.source), Arc::clone(cx.mount), cx.ino);
        let timeout = self.share.policy.attr_timeout;
        self.parked_aside(cx, carrier, move |caller| {
            let attr = checks::attr(source.setattr(caller, ino, handle, &set)?)?;
            // As for every answer that has attributes.
            let _ = mount.settle(ino);
            Ok(Reply::Attr { attr, timeout, dax: mount.dax(&attr) })
        })
    }

    /// FALLOCATE that takes a range out of the file.
    pub(crate) fn collapse_aside(
        &mut self,
        cx: &Context<'_>,
        (handle, offset, len, flags): (Handle, u64, u64, FallocateFlags),
        carrier: &mut impl Carrier,
    ) -> Served {
        let (source, mount, ino) = (Arc::clone(&self.share.source), Arc::clone(cx.mount), cx.ino);
        self.parked_aside(cx, carrier, move |caller| {
            source.fallocate(caller, ino, handle, offset, len, flags)?;
            // What fails here fails again when the file is closed.
            let _ = mount.settle(ino);
            Ok(Reply::Empty)
        })
    }

    /// The truncation of an OPEN; `opened` is its answer, and the client has the file open already.
    pub(crate) fn open_aside(
        &mut self,
        cx: &Context<'_>,
        (opened, set): (Opened, SetAttr),
        carrier: &mut impl Carrier,
    ) -> Served {
        let open = Open { ino: cx.ino, handle: opened.handle, is_dir: false };
        self.cut_open(cx, (open, set), carrier, move |_| Ok(Reply::Open(opened)), None)
    }

    /// The truncation of a CREATE that has found a file.
    pub(crate) fn create_aside(
        &mut self,
        cx: &Context<'_>,
        (entry, opened, set): (Entry, Opened, SetAttr),
        carrier: &mut impl Carrier,
    ) -> Served {
        let open = Open { ino: entry.ino, handle: opened.handle, is_dir: false };
        let timeouts = self.share.policy.timeouts(cx.mount.negotiated());
        let mount = Arc::clone(cx.mount);
        let reply = move |attr| {
            let entry = Entry { attr: checks::attr(attr)?, ..entry };
            Ok(Reply::Created { entry, timeouts, dax: mount.dax(&entry.attr), opened })
        };
        self.cut_open(cx, (open, set), carrier, reply, Some(entry.ino))
    }

    /// Has an open file truncated by another thread; if that fails, it is closed again, and `refers` forgotten.
    fn cut_open(
        &mut self,
        cx: &Context<'_>,
        (open, set): (Open, SetAttr),
        carrier: &mut impl Carrier,
        reply: impl FnOnce(Attr) -> Result<Reply<'static>> + Send + 'static,
        refers: Option<Ino>,
    ) -> Served {
        let (source, mount) = (Arc::clone(&self.share.source), Arc::clone(cx.mount));
        self.parked_aside(cx, carrier, move |caller| {
            let cut = source.setattr(caller, open.ino, Some(open.handle), &set).and_then(reply);
            if cut.is_err() {
                mount.release(caller, open)?;
                if let Some(ino) = refers {
                    mount.forget(ino, 1);
                }
            }
            cut
        })
    }
}
