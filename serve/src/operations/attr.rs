//! GETATTR, STATX, SETATTR and ACCESS.

use std::time::Duration;

use ferry_engine::ReplyBuffer;
use ferry_vfs::{Attr, Caller, Errno, Handle, Ino, Result, SetAttr, checks};
use ferry_wire::fuse::{InitFlags, Reply, Timeouts};

use crate::carrier::ServeOutcome;
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
    ) -> Result<ServeOutcome> {
        let (source, caller, ino) = (&self.share.source, &cx.caller, cx.ino);
        // Linux sends a handle only when it reads, writes or seeks; GETATTR for stat(2) has none (`fuse_getattr`).
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
    ) -> Result<ServeOutcome> {
        let attr = self.share.source.getattr(&cx.caller, cx.ino, handle)?;
        // Linux sends STATX once per inode for the birth time. After ENOSYS it uses the attributes that it has.
        if attr.btime.is_none() && self.share.source.features().constant {
            return Err(Errno::NOSYS);
        }
        let attr = self.visible_attr(cx, cx.ino, checks::attr(attr)?);
        self.prepare_attr(cx, &attr);
        let timeout = self.timeouts_of(cx, cx.ino, &attr).attr;
        Ok(cx.done(buffer, &Reply::Statx { attr, timeout }))
    }

    pub(crate) fn setattr(
        &self,
        cx: &Context<'_>,
        handle: Option<Handle>,
        set: &SetAttr,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let (source, caller, ino) = (&self.share.source, &cx.caller, cx.ino);
        if !clears_only(cx, set) {
            return self.attr(cx, source.setattr(caller, ino, handle, set)?, buffer);
        }
        let set = SetAttr { clear_privileges: true, ..*set };
        // The kernel has decided that an unnamed caller loses the bits. So the call is made as a user without rights.
        let nobody = Caller { uid: NOBODY, gid: NOBODY, ..*caller };
        let caller = if caller.uid == Caller::UNKNOWN { &nobody } else { caller };
        self.attr(cx, source.setattr(caller, ino, handle, &set)?, buffer)
    }

    pub(crate) fn access(&self, cx: &Context<'_>, mask: u32) -> Result<()> {
        self.share.source.access(&cx.caller, cx.ino, mask)
    }

    fn attr(&self, cx: &Context<'_>, attr: Attr, buffer: &mut impl ReplyBuffer) -> Result<ServeOutcome> {
        let attr = self.visible_attr(cx, cx.ino, checks::attr(attr)?);
        self.prepare_attr(cx, &attr);
        let timeout = self.timeouts_of(cx, cx.ino, &attr).attr;
        Ok(cx.done(buffer, &Reply::Attr { attr, timeout, dax: cx.session.dax(&attr) }))
    }

    /// Returns how long a client may cache this inode.
    pub(super) fn timeouts_of(&self, cx: &Context<'_>, ino: Ino, attr: &Attr) -> Timeouts {
        let misses_changes = self.share.policy.misses_changes(cx.session, &*self.share.source, ino);
        self.share.policy.timeouts_of(cx.session, misses_changes, ino, attr)
    }

    /// Prepares for sending an inode's attributes.
    fn prepare_attr(&self, cx: &Context<'_>, attr: &Attr) {
        cx.session.sync_window_before_attr(cx.ino);
        if self.checks_size_on_open(cx) {
            cx.session.set_reported_size(cx.ino, ReportedSize::of(attr));
        }
    }

    /// Returns the attributes as this client must see them: a client that does not check ACLs uses the mode alone.
    pub(crate) fn visible_attr(&self, cx: &Context<'_>, ino: Ino, attr: Attr) -> Attr {
        if cx.session.negotiated().has(InitFlags::POSIX_ACL) {
            return attr;
        }
        Attr { mode: self.share.source.mode_without_acl(&cx.caller, ino, &attr), ..attr }
    }
}

/// Whether a SETATTR only clears suid and sgid. Linux then sends one that sets nothing (`fuse_setattr` removes
/// `ATTR_KILL_SUID` and `ATTR_KILL_SGID`): before an unprivileged caller writes, also to a backing file or in the
/// window, where no other request shows the write, and for a chown that changes no owner.
fn clears_only(cx: &Context<'_>, set: &SetAttr) -> bool {
    cx.session.negotiated().has(InitFlags::HANDLE_KILLPRIV_V2) && SetAttr { ctime: None, ..*set } == SetAttr::default()
}
