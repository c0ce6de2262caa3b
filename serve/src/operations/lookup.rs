//! LOOKUP, and the references that it counts.

use ferry_engine::{ReplyBuffer, requests};
use ferry_vfs::{Entry, Errno, Ino, Name, Result, checks};
use ferry_wire::fuse::{InitFlags, Reply};

use crate::carrier::ServeOutcome;
use crate::reply::ReplyOutcome;
use crate::server::{Context, Server};

impl Server {
    pub(crate) fn lookup(
        &mut self,
        cx: &Context<'_>,
        name: Name<'_>,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        match self.share.source.lookup(&cx.caller, cx.ino, name) {
            Ok(entry) => {
                cx.session.readdirplus_auto.record_lookup(cx.ino, name.as_bytes(), entry.attr.kind());
                self.entry(cx, Some(name), entry, buffer)
            }
            Err(Errno::NOENT) => {
                cx.session.removals.record_lookup((cx.ino, name), None);
                match self.share.policy.negative_timeout(cx.session, &*self.share.source, cx.ino) {
                    timeout if timeout.is_zero() => Err(Errno::NOENT),
                    timeout => Ok(cx.done(buffer, &Reply::Negative { timeout })),
                }
            }
            Err(errno) => Err(errno),
        }
    }

    /// LOOKUP of `.`, for file handles of inodes that the client's kernel has forgotten.
    pub(crate) fn lookup_self(&self, cx: &Context<'_>, buffer: &mut impl ReplyBuffer) -> Result<ServeOutcome> {
        if !cx.session.negotiated().has(InitFlags::EXPORT_SUPPORT) || !cx.session.may_find(cx.ino) {
            return Err(Errno::STALE);
        }
        self.entry(cx, None, self.share.source.lookup_self(&cx.caller, cx.ino)?, buffer)
    }

    /// LOOKUP of `..`.
    pub(crate) fn lookup_parent(&self, cx: &Context<'_>, buffer: &mut impl ReplyBuffer) -> Result<ServeOutcome> {
        self.entry(cx, None, self.share.source.lookup_parent(&cx.caller, cx.ino)?, buffer)
    }

    /// Replies with an inode, by its name in the request's directory, if it has one. Releases the reference if the
    /// reply is not delivered.
    pub(crate) fn entry(
        &self,
        cx: &Context<'_>,
        name: Option<Name<'_>>,
        entry: Entry,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let entry = cx.session.add_reference(self.prepare_entry(cx, name, self.check_entry(entry)?));
        cx.session.sync_window_before_attr(entry.ino);
        let timeouts = self.timeouts_of(cx, entry.ino, &entry.attr);
        let written = cx.reply(buffer, &Reply::Entry { entry, timeouts, dax: cx.session.dax(&entry.attr) });
        if let ReplyOutcome::Undelivered(_) = written {
            cx.session.forget(entry.ino, 1);
        }
        Ok(ServeOutcome::Reply(written.bytes()))
    }

    /// Returns an entry as this client must see it, by this name.
    pub(super) fn prepare_entry(&self, cx: &Context<'_>, name: Option<Name<'_>>, entry: Entry) -> Entry {
        if let Some(name) = name {
            cx.session.removals.record_lookup((cx.ino, name), Some(entry.ino));
            requests::record_name(&self.share.name, (cx.ino, name.as_bytes()), entry.ino);
        }
        Entry { attr: self.visible_attr(cx, entry.ino, entry.attr), ..entry }
    }

    /// Checks an entry; an invalid one is an error, and its reference is released.
    pub(super) fn check_entry(&self, entry: Entry) -> Result<Entry> {
        checks::entry(entry).inspect_err(|_| {
            self.share.ratelimited_log.warn(format_args!("the source returns an invalid inode: {entry:?}"));
            if entry.ino != Ino(0) {
                self.share.source.forget(entry.ino, 1);
            }
        })
    }
}
