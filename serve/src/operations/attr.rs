//! GETATTR, STATX, SETATTR and ACCESS.

use std::time::Duration;

use ferry_engine::ReplyBuffer;
use ferry_vfs::{Attr, Caller, Errno, Handle, Ino, Result, SetAttr, checks};
use ferry_wire::fuse::{InitFlags, Reply};

use crate::carrier::Served;
use crate::close_to_open::ReportedSize;
use crate::server::{Context, Server};

/// Linux's `nobody` and `nogroup`.
const NOBODY: u32 = 65534;

impl Server {
    pub(crate) fn getattr(
        &self,
        cx: &Context<'_>,
        handle: Option<Handle>,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<Served> {
        let (source, caller, ino) = (&self.share.source, &cx.caller, cx.ino);
        // Linux names a handle only where it reads, writes or seeks; users' questions come without (fuse_getattr).
        if let Some(attr) = handle.and_then(|handle| source.getattr_hint(caller, ino, handle)) {
            let (attr, timeout) = (self.visible_attr(cx, ino, checks::attr(attr)?), Duration::ZERO);
            cx.session.sync_window_before_attr(ino);
            return Ok(cx.done(buffer, &Reply::Attr { attr, timeout, dax: cx.session.dax(&attr) }));
        }
        self.attr(cx, source.getattr(caller, ino, handle)?, buffer)
    }

    pub(crate) fn statx(
        &self,
        cx: &Context<'_>,
        handle: Option<Handle>,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<Served> {
        let attr = self.share.source.getattr(&cx.caller, cx.ino, handle)?;
        // Linux sends STATX once per inode for the birth time. Without any it then uses the attributes that it has.
        if attr.btime.is_none() && self.share.source.features().constant {
            return Err(Errno::NOSYS);
        }
        let attr = self.visible_attr(cx, cx.ino, checks::attr(attr)?);
        self.tells_attr(cx, &attr);
        let timeout = self.share.policy.timeouts_of(cx.session, cx.ino, &attr).attr;
        Ok(cx.done(buffer, &Reply::Statx { attr, timeout }))
    }

    pub(crate) fn setattr(
        &self,
        cx: &Context<'_>,
        handle: Option<Handle>,
        set: &SetAttr,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<Served> {
        let (source, caller, ino) = (&self.share.source, &cx.caller, cx.ino);
        if !clears_only(cx, set) {
            return self.attr(cx, source.setattr(caller, ino, handle, set)?, buffer);
        }
        let set = SetAttr { clear_privileges: true, ..*set };
        // The kernel has found that one who is not named may not keep them: as nobody's who is in no group.
        let nobody = Caller { uid: NOBODY, gid: NOBODY, ..*caller };
        let caller = if caller.uid == Caller::UNKNOWN { &nobody } else { caller };
        self.attr(cx, source.setattr(caller, ino, handle, &set)?, buffer)
    }

    pub(crate) fn access(&self, cx: &Context<'_>, mask: u32) -> Result<()> {
        self.share.source.access(&cx.caller, cx.ino, mask)
    }

    fn attr(&self, cx: &Context<'_>, attr: Attr, buffer: &mut impl ReplyBuffer) -> Result<Served> {
        let attr = self.visible_attr(cx, cx.ino, checks::attr(attr)?);
        self.tells_attr(cx, &attr);
        let timeout = self.share.policy.timeouts_of(cx.session, cx.ino, &attr).attr;
        Ok(cx.done(buffer, &Reply::Attr { attr, timeout, dax: cx.session.dax(&attr) }))
    }

    /// The client is about to be told of the attributes of the inode that it asks for.
    fn tells_attr(&self, cx: &Context<'_>, attr: &Attr) {
        cx.session.sync_window_before_attr(cx.ino);
        if self.checks_size_on_open(cx) {
            cx.session.set_reported_size(cx.ino, ReportedSize::of(attr));
        }
    }

    /// The attributes as this client is to see them: one that does not check ACLs goes by the mode alone.
    pub(crate) fn visible_attr(&self, cx: &Context<'_>, ino: Ino, attr: Attr) -> Attr {
        if cx.session.negotiated().has(InitFlags::POSIX_ACL) {
            return attr;
        }
        Attr { mode: self.share.source.mode_without_acl(&cx.caller, ino, &attr), ..attr }
    }
}

/// Whether a SETATTR is there to clear suid and sgid alone. Linux then sends one that sets nothing (`fuse_setattr`, which takes
/// `ATTR_KILL_SUID` and `ATTR_KILL_SGID` away): before somebody who may not keep them writes, also to a backing file or in the
/// window, where no other request tells of it, and for a chown that changes no owner.
fn clears_only(cx: &Context<'_>, set: &SetAttr) -> bool {
    cx.session.negotiated().has(InitFlags::HANDLE_KILLPRIV_V2) && SetAttr { ctime: None, ..*set } == SetAttr::default()
}
