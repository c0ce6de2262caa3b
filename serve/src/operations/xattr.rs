//! SETXATTR, GETXATTR, LISTXATTR and REMOVEXATTR.

use ferry_engine::ReplyBuffer;
use ferry_vfs::{Errno, Result, XattrFlags, checks};
use ferry_wire::fuse::{InitFlags, Reply};

use crate::carrier::ServeOutcome;
use crate::reply;
use crate::server::{Context, Server};

/// POSIX ACLs. A client without them would neither enforce them nor keep them consistent with the mode.
const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

impl Server {
    pub(crate) fn setxattr(
        &self,
        cx: &Context<'_>,
        (name, value): (&[u8], &[u8]),
        flags: XattrFlags,
        clear_sgid: bool,
    ) -> Result<()> {
        self.check_xattr(cx, name)?;
        self.share.source.setxattr(&cx.caller, cx.ino, name, value, flags, clear_sgid)
    }

    pub(crate) fn getxattr(
        &self,
        cx: &Context<'_>,
        name: &[u8],
        bytes_max: u32,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        self.check_xattr(cx, name)?;
        xattr_reply(cx, &self.share.source.getxattr(&cx.caller, cx.ino, name)?, bytes_max, buffer)
    }

    pub(crate) fn listxattr(
        &self,
        cx: &Context<'_>,
        bytes_max: u32,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        if !self.share.xattr {
            return Err(Errno::NOSYS);
        }
        let names = self.share.source.listxattr(&cx.caller, cx.ino)?;
        xattr_reply(cx, &cx.caller.visible_xattrs(names), bytes_max, buffer)
    }

    pub(crate) fn removexattr(&self, cx: &Context<'_>, name: &[u8]) -> Result<()> {
        self.check_xattr(cx, name)?;
        self.share.source.removexattr(&cx.caller, cx.ino, name)
    }

    /// Checks whether this client may use an attribute of this name.
    fn check_xattr(&self, cx: &Context<'_>, name: &[u8]) -> Result<()> {
        match ACLS.contains(&name) && !cx.session.negotiated().has(InitFlags::POSIX_ACL) {
            _ if !self.share.xattr => Err(Errno::NOSYS),
            true => Err(Errno::OPNOTSUPP),
            false => Ok(()),
        }
    }
}

fn xattr_reply(cx: &Context<'_>, value: &[u8], bytes_max: u32, buffer: &mut impl ReplyBuffer) -> Result<ServeOutcome> {
    let value = checks::xattr(value)?;
    if bytes_max == 0 {
        return Ok(cx.done(buffer, &Reply::XattrSize { bytes: reply::count(value.len()) }));
    }
    if value.len() > bytes_max as usize {
        return Err(Errno::RANGE);
    }
    Ok(cx.done(buffer, &Reply::Bytes(value)))
}
