//! OPEN, OPENDIR, CREATE, TMPFILE, RELEASE and RELEASEDIR.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ferry_engine::ReplyBuffer;
use ferry_vfs::{
    Attr, Change, CreateArgs, Entry, Errno, Event, Handle, Ino, Name, OFlags, Place, Result, SessionId, SetAttr,
};
use ferry_wire::fuse::{InitFlags, OpenFlags, OpenReply, Reply};

use super::names::NewName;
use crate::carrier::ServeOutcome;
use crate::open_file::Open;
use crate::reply::ReplyOutcome;
use crate::server::{Context, Server};

/// Attempts to create a file whose name is removed and created concurrently. Linux retries only once, and programs
/// then see an error.
const CREATE_ATTEMPTS: usize = 8;

impl Server {
    pub(crate) fn open(
        &mut self,
        cx: &Context<'_>,
        flags: OFlags,
        clear_privileges: bool,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        // Linux then opens files without a request, and sends no RELEASE.
        if cx.session.negotiated().has(InitFlags::NO_OPEN_SUPPORT) {
            return Err(Errno::NOSYS);
        }
        let source = &self.share.source;
        let truncate_later = clear_privileges && flags.contains(OFlags::TRUNC);
        let open_flags = if truncate_later { flags - OFlags::TRUNC } else { flags };
        let handle = source.open(&cx.caller, cx.ino, open_flags)?;
        // The host's kernel would keep suid and sgid at an open by this process, which is privileged.
        let truncate = SetAttr { size: Some(0), clear_privileges: true, ..SetAttr::default() };
        if truncate_later && let Err(errno) = source.setattr(&cx.caller, cx.ino, Some(handle), &truncate) {
            source.release(&cx.caller, cx.ino, handle);
            return Err(errno);
        }
        if flags.contains(OFlags::TRUNC) {
            cx.session.set_reported_size(cx.ino, None);
        } else if self.must_revalidate(cx, flags, handle) {
            source.release(&cx.caller, cx.ino, handle);
            return Err(Errno::STALE);
        }
        let opened = self.opened(cx, (cx.ino, handle), flags, None);
        let written = cx.reply(buffer, &Reply::Open(opened));
        if let ReplyOutcome::Undelivered(_) = written {
            cx.session.release(&cx.caller, Open { ino: cx.ino, handle, is_dir: false })?;
        }
        Ok(ServeOutcome::Reply(written.bytes()))
    }

    pub(crate) fn opendir(
        &mut self,
        cx: &Context<'_>,
        flags: OFlags,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        // After ENOSYS Linux opens directories without a request, and caches listings as with `dir_flags`.
        if cx.session.negotiated().has(InitFlags::NO_OPENDIR_SUPPORT) {
            return Err(Errno::NOSYS);
        }
        let handle = self.share.source.opendir(&cx.caller, cx.ino, flags)?;
        let open = Open { ino: cx.ino, handle, is_dir: true };
        cx.session.opened(open, flags);
        let flags = self.share.policy.dir_flags(cx.session, &*self.share.source, cx.ino);
        let written = cx.reply(buffer, &Reply::Open(OpenReply::new(handle, flags)));
        if let ReplyOutcome::Undelivered(_) = written {
            cx.session.release(&cx.caller, open)?;
        }
        Ok(ServeOutcome::Reply(written.bytes()))
    }

    pub(crate) fn create(
        &mut self,
        cx: &Context<'_>,
        (name, new): (Name<'_>, &CreateArgs),
        flags: OFlags,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let source = &self.share.source;
        // A file that another client has created meanwhile is not opened: its permissions are unchecked. After ESTALE
        // Linux looks the name up again and opens the file as any other.
        let exclusive = (flags | OFlags::EXCL) - OFlags::TRUNC;
        let create = || source.create(&cx.caller, cx.ino, name, new, exclusive);
        let mut created = create();
        if !flags.contains(OFlags::EXCL) {
            let attempts = if source.features().waits { 1 } else { CREATE_ATTEMPTS };
            for _ in 1..attempts {
                if !matches!(created, Err(Errno::EXIST)) {
                    break;
                }
                created = create();
            }
            created = created.map_err(|errno| if errno == Errno::EXIST { Errno::STALE } else { errno });
        }
        let (entry, handle) = created?;
        let labelled = self.apply_security_label(cx, entry, Some(NewName::Other(name)));
        let entry = labelled.inspect_err(|_| source.release(&cx.caller, entry.ino, handle))?;
        self.created(cx, Some(name), (entry, handle), flags, buffer)
    }

    pub(crate) fn tmpfile(
        &self,
        cx: &Context<'_>,
        new: &CreateArgs,
        flags: OFlags,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let source = &self.share.source;
        let (entry, handle) = source.tmpfile(&cx.caller, cx.ino, new, flags)?;
        let labelled = self.apply_security_label(cx, entry, None);
        let entry = labelled.inspect_err(|_| source.release(&cx.caller, entry.ino, handle))?;
        self.created(cx, None, (entry, handle), flags, buffer)
    }

    pub(crate) fn release(&self, cx: &Context<'_>, handle: Handle) -> Result<()> {
        // Once more: stores through a mapping may come after the last FLUSH.
        self.publish_passthrough_writes(cx, handle);
        let (ino, open) = (cx.ino, Open { ino: cx.ino, handle, is_dir: false });
        if let Some(changes) = self.share.source.changes() {
            let closed = || Event::Closed(Place { ino, name: None });
            changes.publish_event(cx.caller.session, || cx.session.writes(open).then(closed));
        }
        cx.session.release(&cx.caller, open)
    }

    pub(crate) fn releasedir(&self, cx: &Context<'_>, handle: Handle) -> Result<()> {
        cx.session.events.lease.closed(handle);
        cx.session.release(&cx.caller, Open { ino: cx.ino, handle, is_dir: true })
    }

    /// Replies with a file that was created and opened. Releases what the reply could not deliver.
    pub(crate) fn created(
        &self,
        cx: &Context<'_>,
        name: Option<Name<'_>>,
        (entry, handle): (Entry, Handle),
        flags: OFlags,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let entry =
            self.check_entry(entry).inspect_err(|_| self.share.source.release(&cx.caller, entry.ino, handle))?;
        let entry = cx.session.add_reference(self.prepare_entry(cx, name, entry));
        let opened = self.opened(cx, (entry.ino, handle), flags, Some(&entry.attr));
        cx.session.sync_window_before_attr(entry.ino);
        let timeouts = self.timeouts_of(cx, entry.ino, &entry.attr);
        let dax = cx.session.dax(&entry.attr);
        let written = cx.reply(buffer, &Reply::Created { entry, timeouts, dax, opened });
        if let ReplyOutcome::Undelivered(_) = written {
            cx.session.release(&cx.caller, Open { ino: entry.ino, handle, is_dir: false })?;
            cx.session.forget(entry.ino, 1);
        }
        Ok(ServeOutcome::Reply(written.bytes()))
    }

    /// Records that the client opened a file with these attributes, and decides how it is read and written.
    fn opened(&self, cx: &Context<'_>, (ino, handle): (Ino, Handle), flags: OFlags, attr: Option<&Attr>) -> OpenReply {
        cx.session.opened(Open { ino, handle, is_dir: false }, flags);
        let (file, in_window) = ((&*self.share.source, ino), cx.session.is_in_window(ino));
        let plain = OpenReply::new(handle, self.share.policy.file_flags(cx.session, file, flags, in_window));
        let Some(passthrough) = &cx.session.passthrough else { return plain };
        let source = &self.share.source;
        // A panic must not pass: the open was counted already.
        let backing = || {
            let call = AssertUnwindSafe(|| source.backing(&cx.caller, ino, handle));
            catch_unwind(call).unwrap_or(None)
        };
        let is_set_id = || match attr {
            Some(attr) => attr.is_set_id(),
            None => {
                let call = AssertUnwindSafe(|| source.getattr(&cx.caller, ino, Some(handle)));
                // The server writes files of unknown state.
                !matches!(catch_unwind(call), Ok(Ok(attr)) if !attr.is_set_id())
            }
        };
        let closes = self.share.policy.close_flags(flags);
        let Some(passed) = passthrough.opened((ino, flags), &self.share.ratelimited_log, is_set_id, backing) else {
            return plain;
        };
        if passed.is_first_mapping
            && let Some(changes) = source.changes()
        {
            // The client's cached attributes predate the mapping. Without a session, all clients are notified at
            // once.
            changes.publish(SessionId::default(), || Change::Attr { ino });
        }
        // No flags of the page cache: with KEEP_CACHE the kernel refuses the open; with DIRECT_IO the server reads
        // and writes.
        let by_server = match passed.mappings_only {
            true => OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES,
            false => OpenFlags::empty(),
        };
        OpenReply { handle, flags: OpenFlags::PASSTHROUGH | by_server | closes, backing_id: passed.backing_id }
    }

    /// Publishes the writes that the client's kernel may have made itself, when the client closes the file.
    pub(super) fn publish_passthrough_writes(&self, cx: &Context<'_>, handle: Handle) {
        let Some(passthrough) = &cx.session.passthrough else { return };
        let ino = cx.ino;
        if !cx.session.writes(Open { ino, handle, is_dir: false }) || !passthrough.is_used(ino) {
            return;
        }
        if self.checks_size_on_open(cx) {
            cx.session.set_reported_size(ino, None);
        }
        if let Some(changes) = self.share.source.changes() {
            changes.publish(cx.caller.session, || Change::Data { ino, offset: 0, len: u64::MAX });
        }
    }
}
