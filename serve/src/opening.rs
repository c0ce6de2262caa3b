//! LOOKUP, OPEN, OPENDIR and CREATE, and the references they hand out.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ferry_engine::requests;
use ferry_vfs::{
    Attr, Change, CreateArgs, Entry, Errno, Handle, Ino, Name, OFlags, Result, SessionId, SetAttr, XattrFlags, checks,
};
use ferry_wire::fuse::{InitFlags, OpenFlags, Opened, Reply};

use crate::carrier::Served;
use crate::reply::ReplyOutcome;
use crate::server::{Context, Server};
use crate::session::Open;
use ferry_engine::ReplyBuffer;

/// What a truncation at open is where suid and sgid are to go: the host's kernel would keep them, for we may.
const TRUNCATE: SetAttr = SetAttr {
    mode: None,
    uid: None,
    gid: None,
    size: Some(0),
    atime: None,
    mtime: None,
    ctime: None,
    clear_privileges: true,
};

/// How often a file is to be made whose name comes and goes: Linux looks again only once, and programs see an error then.
const CREATE_TRIES: usize = 8;

/// What was made, by its name.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewName<'a> {
    Dir(Name<'a>),
    Other(Name<'a>),
}

impl Server {
    pub(crate) fn lookup(&mut self, cx: &Context<'_>, name: Name<'_>, buffer: &mut impl ReplyBuffer) -> Result<Served> {
        match self.share.source.lookup(&cx.caller, cx.ino, name) {
            Ok(entry) => {
                cx.session.readdirplus_auto.record_lookup(cx.ino, name.as_bytes(), entry.attr.kind());
                self.entry(cx, Some(name), entry, buffer)
            }
            Err(Errno::NOENT) => {
                cx.session.removals.record_lookup((cx.ino, name), None);
                match self.share.policy.negative_timeout(cx.session.negotiated()) {
                    timeout if timeout.is_zero() => Err(Errno::NOENT),
                    timeout => Ok(cx.done(buffer, &Reply::Negative { timeout })),
                }
            }
            Err(errno) => Err(errno),
        }
    }

    /// Tells the client of an inode, by its name in the request's directory, if it has one. A reference that it does not get to know of is given
    /// back.
    pub(crate) fn entry(
        &self,
        cx: &Context<'_>,
        name: Option<Name<'_>>,
        entry: Entry,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<Served> {
        let entry = cx.session.add_reference(self.prepare_entry(cx, name, self.check_entry(entry)?));
        cx.session.sync_window_before_attr(entry.ino);
        let timeouts = self.share.policy.timeouts_of(cx.session, entry.ino, &entry.attr);
        let written = cx.tell(buffer, &Reply::Entry { entry, timeouts, dax: cx.session.dax(&entry.attr) });
        if let ReplyOutcome::Instead(_) = written {
            cx.session.forget(entry.ino, 1);
        }
        Ok(Served::Reply(written.bytes()))
    }

    /// An entry as this client is to see it, by this name.
    fn prepare_entry(&self, cx: &Context<'_>, name: Option<Name<'_>>, entry: Entry) -> Entry {
        if let Some(name) = name {
            cx.session.removals.record_lookup((cx.ino, name), Some(entry.ino));
            requests::record_name(&self.share.name, (cx.ino, name.as_bytes()), entry.ino);
        }
        Entry { attr: self.visible_attr(cx, entry.ino, entry.attr), ..entry }
    }

    /// The attributes as this client is to see them: one that does not check ACLs goes by the mode alone.
    pub(crate) fn visible_attr(&self, cx: &Context<'_>, ino: Ino, attr: Attr) -> Attr {
        if cx.session.negotiated().has(InitFlags::POSIX_ACL) {
            return attr;
        }
        Attr { mode: self.share.source.mode_without_acl(&cx.caller, ino, &attr), ..attr }
    }

    /// An entry that can be told; what cannot is given back.
    fn check_entry(&self, entry: Entry) -> Result<Entry> {
        checks::entry(entry).inspect_err(|_| {
            self.share.ratelimited_log.warn(format_args!("the source answers an impossible inode: {entry:?}"));
            if entry.ino != Ino(0) {
                self.share.source.forget(entry.ino, 1);
            }
        })
    }

    pub(crate) fn open(
        &mut self,
        cx: &Context<'_>,
        flags: OFlags,
        clear_privileges: bool,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<Served> {
        let source = &self.share.source;
        let truncate_apart = clear_privileges && flags.contains(OFlags::TRUNC);
        let open_flags = if truncate_apart { flags - OFlags::TRUNC } else { flags };
        let handle = source.open(&cx.caller, cx.ino, open_flags)?;
        if truncate_apart && let Err(errno) = source.setattr(&cx.caller, cx.ino, Some(handle), &TRUNCATE) {
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
        let written = cx.tell(buffer, &Reply::Open(Opened::new(handle, self.share.policy.dir_flags())));
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
        let apply_security_label = self.apply_security_label(cx, entry, Some(NewName::Other(name)));
        let entry = apply_security_label.inspect_err(|_| source.release(&cx.caller, entry.ino, handle))?;
        self.created(cx, Some(name), (entry, handle), flags, buffer)
    }

    /// Gives what was just made the labels that came with the request. Where that fails nothing is left of it: a file without
    /// its label is another file to a security module.
    pub(crate) fn apply_security_label(
        &self,
        cx: &Context<'_>,
        mut entry: Entry,
        made: Option<NewName<'_>>,
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
                let unmade = match made {
                    Some(NewName::Dir(name)) => Some(source.rmdir(&cx.caller, cx.ino, name)),
                    Some(NewName::Other(name)) => Some(source.unlink(&cx.caller, cx.ino, name)),
                    None => None,
                };
                let outcome = match unmade {
                    Some(Ok(())) => "; it is removed".into(),
                    Some(Err(errno)) => format!("; nor can it be removed: {errno}"),
                    None => String::new(),
                };
                self.share.ratelimited_log.warn(format_args!("a new file cannot be labelled: {errno}{outcome}"));
                source.forget(entry.ino, 1);
                Err(errno)
            }
        }
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

    /// Notes that the client opened a file, and decides how it is to be read and written. `attr` are its attributes, if they
    /// are known.
    fn opened(&self, cx: &Context<'_>, (ino, handle): (Ino, Handle), flags: OFlags, attr: Option<&Attr>) -> Opened {
        cx.session.opened(Open { ino, handle, is_dir: false }, flags);
        let plain = Opened::new(handle, self.share.policy.file_flags(flags, cx.session.is_in_window(ino)));
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
            // What the client keeps of the attributes is from before. As the change of no session it is told at once, also to
            // the client that opens the file.
            changes.publish(SessionId::default(), || Change::Attr { ino });
        }
        // No flag of the page cache's: with KEEP_CACHE the kernel refuses, with DIRECT_IO the server reads and writes.
        let by_server = match passed.mappings_only {
            true => OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES,
            false => OpenFlags::empty(),
        };
        Opened { handle, flags: OpenFlags::PASSTHROUGH | by_server | closes, backing_id: passed.backing_id }
    }

    /// The client is done with a file that its kernel may have written on its own: only now can others be told, and how
    /// long it is then the client knows better.
    pub(crate) fn publish_passthrough_writes(&self, cx: &Context<'_>, handle: Handle) {
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
