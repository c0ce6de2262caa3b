//! Extended attributes: each value is a fid of its own.

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Result, XattrFlags, checks};
use ferry_wire::ninep::{Fid, Reply};

use super::Context;
use crate::session::{File, NewValue, State};

impl Context<'_> {
    fn has_xattr(&self, file: &File) -> Result<()> {
        match file.state {
            _ if !self.share.options.xattr => Err(Errno::OPNOTSUPP),
            State::Path | State::Open(_) => Ok(()),
            State::Value(_) | State::NewValue(_) => Err(Errno::BADF),
        }
    }

    pub(super) fn xattrwalk(&self, fid: Fid, new_fid: Fid, name: &[u8]) -> Result<Reply<'static>> {
        let file = self.session.get(fid)?;
        self.has_xattr(&file)?;
        self.session.is_free(new_fid)?;
        let (source, cx) = (&self.share.source, self.caller(file.user, None));
        let value = if name.is_empty() {
            source.listxattr(&cx, file.node.ino).map(|names| cx.visible_xattrs(names))
        } else {
            self.may_xattr(&file, name, false)?;
            source.getxattr(&cx, file.node.ino, name)
        };
        let value = value.map_err(unsupported)?;
        checks::xattr(&value)?;
        let bytes = value.len() as u64;
        let state = State::Value(self.session.value(value)?);
        self.session.insert(new_fid, File { state, ..File::clone(&file) })?;
        Ok(Reply::Xattrwalk { bytes })
    }

    pub(super) fn xattrcreate(&self, fid: Fid, name: &[u8], bytes: u64, flags: XattrFlags) -> Result<Reply<'static>> {
        let file = self.session.closed(fid)?;
        self.has_xattr(&file)?;
        self.may_xattr(&file, name, true)?;
        let bytes = usize::try_from(bytes).map_err(|_| Errno::TOOBIG)?;
        let state = State::NewValue(self.session.new_value(name, bytes, flags)?);
        self.session.replace(fid, &file, File { state, ..File::clone(&file) })?;
        Ok(Reply::Xattrcreate)
    }

    /// Sets the written value, which must be complete.
    pub(super) fn set_value(&self, file: &File, new: &NewValue) -> Result<()> {
        let value = lock(&new.value);
        if value.len() != new.bytes {
            return Err(Errno::INVAL);
        }
        // The user may have lost the permission since the fid was made.
        self.may_xattr(file, &new.name, true)?;
        let (source, cx) = (&self.share.source, self.caller(file.user, None));
        // This is how Linux's client requests a removal; an empty value has no such flag.
        if value.is_empty() && new.flags.contains(XattrFlags::REPLACE) {
            return source.removexattr(&cx, file.node.ino, &new.name).map_err(unsupported);
        }
        // The client's kernel clears sgid if an ACL requires it; for a user that is checked here, the server does.
        let clear_sgid = self.clears_sgid(file, &new.name)?;
        source.setxattr(&cx, file.node.ino, &new.name, &value, new.flags, clear_sgid).map_err(unsupported)
    }
}

/// Linux's client expects this error from a file system without attributes.
fn unsupported(errno: Errno) -> Errno {
    if errno == Errno::NOSYS { Errno::OPNOTSUPP } else { errno }
}
