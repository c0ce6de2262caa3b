//! SYMLINK, READLINK, MKNOD, MKDIR, LINK, UNLINK, RMDIR and RENAME.

use ferry_engine::ReplyBuffer;
use ferry_vfs::{Entry, Ino, Name, RenameFlags, Result, XattrFlags, checks};
use ferry_wire::fuse::Reply;

use crate::carrier::ServeOutcome;
use crate::server::{Context, Server};

/// The name of a new inode.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewName<'a> {
    Dir(Name<'a>),
    Other(Name<'a>),
}

impl Server {
    pub(crate) fn readlink(&self, cx: &Context<'_>, buffer: &mut impl ReplyBuffer) -> Result<ServeOutcome> {
        let target = self.share.source.readlink(&cx.caller, cx.ino)?;
        Ok(cx.done(buffer, &Reply::Bytes(checks::target(&target)?)))
    }

    /// Ends SYMLINK, MKNOD and MKDIR: labels the new inode, and replies with it.
    pub(crate) fn reply_with_new(
        &self,
        cx: &Context<'_>,
        (name, is_dir): (Name<'_>, bool),
        entry: Entry,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let new_name = if is_dir { NewName::Dir(name) } else { NewName::Other(name) };
        let entry = self.apply_security_label(cx, entry, Some(new_name))?;
        self.entry(cx, Some(name), entry, buffer)
    }

    pub(crate) fn link(
        &self,
        cx: &Context<'_>,
        from: Ino,
        name: Name<'_>,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let entry = self.share.source.link(&cx.caller, from, cx.ino, name)?;
        // The recorded name may be removed before this one.
        cx.session.renamed(&cx.caller, &[(cx.ino, name)]);
        self.entry(cx, Some(name), entry, buffer)
    }

    /// UNLINK and RMDIR.
    pub(crate) fn remove(&self, cx: &Context<'_>, name: Name<'_>, is_dir: bool) -> Result<()> {
        let (source, at) = (&self.share.source, (cx.ino, name));
        cx.session.removals.may_remove(&**source, &cx.caller, at)?;
        if is_dir { source.rmdir(&cx.caller, cx.ino, name) } else { source.unlink(&cx.caller, cx.ino, name) }?;
        cx.session.removals.record_lookup(at, None);
        Ok(())
    }

    /// RENAME and RENAME2.
    pub(crate) fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let source = &self.share.source;
        cx.session.removals.may_rename(&**source, &cx.caller, (from, to), flags)?;
        source.rename(&cx.caller, from, to, flags)?;
        cx.session.removals.record_lookup(from, None);
        cx.session.removals.record_lookup(to, None);
        cx.session.renamed(&cx.caller, &[to, from]);
        Ok(())
    }

    /// Sets the security labels of the request on a new inode. If that fails, the inode is removed.
    pub(crate) fn apply_security_label(
        &self,
        cx: &Context<'_>,
        mut entry: Entry,
        name: Option<NewName<'_>>,
    ) -> Result<Entry> {
        if cx.security.is_empty() {
            return Ok(entry);
        }
        let source = &self.share.source;
        let set = |(name, value)| source.setxattr(&cx.caller, entry.ino, name, value, XattrFlags::empty(), false);
        let attr = cx.security.iter().try_for_each(set).and_then(|()| source.getattr(&cx.caller, entry.ino, None));
        match attr {
            Ok(attr) => {
                entry.attr = attr;
                Ok(entry)
            }
            Err(errno) => {
                let removed = match name {
                    Some(NewName::Dir(name)) => Some(source.rmdir(&cx.caller, cx.ino, name)),
                    Some(NewName::Other(name)) => Some(source.unlink(&cx.caller, cx.ino, name)),
                    None => None,
                };
                let outcome = match removed {
                    Some(Ok(())) => "; it is removed".into(),
                    Some(Err(errno)) => format!("; it cannot be removed: {errno}"),
                    None => String::new(),
                };
                self.share.ratelimited_log.warn(format_args!("a new file cannot be labelled: {errno}{outcome}"));
                source.forget(entry.ino, 1);
                Err(errno)
            }
        }
    }
}
