//! OPEN, OPENDIR, CREATE, TMPFILE, RELEASE and RELEASEDIR.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ferry_engine::ReplyBuffer;
use ferry_vfs::{
    Attr, Change, CreateArgs, Entry, Errno, Event, Handle, Ino, Name, OFlags, Place, Result, SessionId, SetAttr,
};
use ferry_wire::fuse::{InitFlags, OpenFlags, Opened, Reply};

use super::names::NewName;
use crate::carrier::Served;
use crate::open_file::Open;
use crate::reply::ReplyOutcome;
use crate::server::{Context, Server};

/// How often a file is to be made whose name comes and goes: Linux looks again only once, and programs see an error then.
const CREATE_TRIES: usize = 8;

impl Server {
    pub(crate) fn open(
        &mut self,
        cx: &Context<'_>,
        flags: OFlags,
        clear_privileges: bool,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<Served> {
        // Linux then opens files without a request, and sends no RELEASE.
        if cx.session.negotiated().has(InitFlags::NO_OPEN_SUPPORT) {
            return Err(Errno::NOSYS);
        }
        let source = &self.share.source;
        let truncate_apart = clear_privileges && flags.contains(OFlags::TRUNC);
        let open_flags = if truncate_apart { flags - OFlags::TRUNC } else { flags };
        let handle = source.open(&cx.caller, cx.ino, open_flags)?;
        // The host's kernel would keep suid and sgid at an open, for we may.
        let truncate = SetAttr { size: Some(0), clear_privileges: true, ..SetAttr::default() };
        if truncate_apart && let Err(errno) = source.setattr(&cx.caller, cx.ino, Some(handle), &truncate) {
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
        let written = cx.tell(buffer, &Reply::Open(opened));
        if let ReplyOutcome::Instead(_) = written {
            cx.session.release(&cx.caller, Open { ino: cx.ino, handle, is_dir: false })?;
        }
        Ok(Served::Reply(written.bytes()))
    }

    pub(crate) fn opendir(&mut self, cx: &Context<'_>, flags: OFlags, buffer: &mut impl ReplyBuffer) -> Result<Served> {
        // Linux then asks for no directory again, and keeps listings as `dir_flags` would let it.
        if cx.session.negotiated().has(InitFlags::NO_OPENDIR_SUPPORT) {
            return Err(Errno::NOSYS);
        }
        let handle = self.share.source.opendir(&cx.caller, cx.ino, flags)?;
        let open = Open { ino: cx.ino, handle, is_dir: true };
        cx.session.opened(open, flags);
        let written = cx.tell(buffer, &Reply::Open(Opened::new(handle, self.share.policy.dir_flags(cx.session))));
        if let ReplyOutcome::Instead(_) = written {
            cx.session.release(&cx.caller, open)?;
        }
        Ok(Served::Reply(written.bytes()))
    }

    pub(crate) fn create(
        &mut self,
        cx: &Context<'_>,
        (name, new): (Name<'_>, &CreateArgs),
        flags: OFlags,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<Served> {
        let source = &self.share.source;
        // What somebody else has made since the client looked is not opened: whether the caller may, nobody has checked. After STALE
        // Linux looks the name up again, and opens what it finds as it opens any file.
        let exclusive = (flags | OFlags::EXCL) - OFlags::TRUNC;
        let create = || source.create(&cx.caller, cx.ino, name, new, exclusive);
        let mut made = create();
        if !flags.contains(OFlags::EXCL) {
            let tries = if source.features().waits { 1 } else { CREATE_TRIES };
            for _ in 1..tries {
                if !matches!(made, Err(Errno::EXIST)) {
                    break;
                }
                made = create();
            }
            made = made.map_err(|errno| if errno == Errno::EXIST { Errno::STALE } else { errno });
        }
        let (entry, handle) = made?;
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
    ) -> Result<Served> {
        let source = &self.share.source;
        let (entry, handle) = source.tmpfile(&cx.caller, cx.ino, new, flags)?;
        let labelled = self.apply_security_label(cx, entry, None);
        let entry = labelled.inspect_err(|_| source.release(&cx.caller, entry.ino, handle))?;
        self.created(cx, None, (entry, handle), flags, buffer)
    }

    pub(crate) fn release(&self, cx: &Context<'_>, handle: Handle) -> Result<()> {
        // Again: what was written through a mapping comes after the last FLUSH.
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

    /// Tells the client of a file that was made and opened. What it does not get to know of is given back.
    pub(crate) fn created(
        &self,
        cx: &Context<'_>,
        name: Option<Name<'_>>,
        (entry, handle): (Entry, Handle),
        flags: OFlags,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<Served> {
        let entry =
            self.check_entry(entry).inspect_err(|_| self.share.source.release(&cx.caller, entry.ino, handle))?;
        let entry = cx.session.add_reference(self.prepare_entry(cx, name, entry));
        let opened = self.opened(cx, (entry.ino, handle), flags, Some(&entry.attr));
        cx.session.sync_window_before_attr(entry.ino);
        let timeouts = self.share.policy.timeouts_of(cx.session, entry.ino, &entry.attr);
        let dax = cx.session.dax(&entry.attr);
        let written = cx.tell(buffer, &Reply::Created { entry, timeouts, dax, opened });
        if let ReplyOutcome::Instead(_) = written {
            cx.session.release(&cx.caller, Open { ino: entry.ino, handle, is_dir: false })?;
            cx.session.forget(entry.ino, 1);
        }
        Ok(Served::Reply(written.bytes()))
    }

    /// Notes that the client opened a file with these attributes, and decides how it is to be read and written.
    fn opened(&self, cx: &Context<'_>, (ino, handle): (Ino, Handle), flags: OFlags, attr: Option<&Attr>) -> Opened {
        cx.session.opened(Open { ino, handle, is_dir: false }, flags);
        let plain = Opened::new(handle, self.share.policy.file_flags(cx.session, flags, cx.session.is_in_window(ino)));
        let Some(passthrough) = &cx.session.passthrough else { return plain };
        let source = &self.share.source;
        // This must not fail: the open was counted already.
        let backing = || {
            let ask = AssertUnwindSafe(|| source.backing(&cx.caller, ino, handle));
            catch_unwind(ask).unwrap_or(None)
        };
        let is_set_id = || match attr {
            Some(attr) => attr.is_set_id(),
            None => {
                let ask = AssertUnwindSafe(|| source.getattr(&cx.caller, ino, Some(handle)));
                // Of what nobody knows the server does the writes.
                !matches!(catch_unwind(ask), Ok(Ok(attr)) if !attr.is_set_id())
            }
        };
        let closes = self.share.policy.close_flags(flags);
        let Some(passed) = passthrough.opened((ino, flags), &self.share.ratelimited_log, is_set_id, backing) else {
            return plain;
        };
        if passed.is_first_mapping
            && let Some(changes) = source.changes()
        {
            // What the client keeps of the attributes is from before. As no session's change, all are told at once.
            changes.publish(SessionId::default(), || Change::Attr { ino });
        }
        // No flag of the page cache's: with KEEP_CACHE the kernel refuses, with DIRECT_IO the server reads and writes.
        let by_server = match passed.mappings_only {
            true => OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES,
            false => OpenFlags::empty(),
        };
        Opened { handle, flags: OpenFlags::PASSTHROUGH | by_server | closes, backing_id: passed.backing_id }
    }

    /// The client is done with a file that its kernel may have written on its own: only now can others be told.
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
