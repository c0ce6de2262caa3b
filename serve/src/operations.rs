//! Dispatches FUSE operations to calls of the source.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use ferry_vfs::{
    Attr, Caller, CopyRange, Errno, Lock, LockKind, LockOutcome, Name, OFlags, Result, SetAttr, Statfs, checks,
};
use ferry_wire::fuse::abi::RemovemappingOne;
use ferry_wire::fuse::{InitFlags, LockRequest, Operation, Records, Reply};

use crate::carrier::{FuseCarrier, Served};
use crate::close_to_open::{ReportedSize, size_changed_by};
use crate::mappings::{Mapping, MappingReply, WHOLE};
use crate::opening::NewName;
use crate::reply;
use crate::request_text::RequestText;
use crate::server::{Context, Server};
use crate::session::Open;
use ferry_engine::ReplyBuffer;
use ferry_engine::requests::{LoggedRequest, Outcome};

/// The most that COPY_FILE_RANGE copies at a time: its reply counts in 32 bits.
const COPY_BYTES_MAX: u64 = 0xffff_f000;
/// POSIX ACLs: a client that knows nothing of them would not go by them, nor keep them and the mode in step.
const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
/// Linux's `nobody` and `nogroup`.
const NOBODY: u32 = 65534;
/// The block size of file systems that name none.
const BLOCK_BYTES: u32 = 4096;

impl Server {
    pub(crate) fn serve_operation(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        carrier: &mut impl FuseCarrier,
    ) -> Served {
        self.watched = LoggedRequest::begin(&self.share.name, cx.ino, Some(cx.caller.pid), &RequestText(operation));
        if let Some(file) = size_changed_by(cx.ino, operation).filter(|_| self.checks_size_on_open(cx)) {
            cx.session.set_reported_size(file, None);
        }
        let served = match self.share.read_only && changes_something(operation) {
            true => Err(Errno::ROFS),
            false => is_allowed(cx, operation)
                .and_then(|()| synced_before(cx, operation))
                .and_then(|()| self.dispatch(cx, operation, carrier)),
        };
        let served = match served {
            Err(errno) if self.is_replay => self.error_of_replay(cx, operation, errno, carrier),
            served => served,
        };
        if cx.session.mappings.is_some() && matches!(operation, Operation::Fallocate { .. }) {
            // What fails here fails again when the file is closed.
            let _ = cx.session.sync(cx.ino, WHOLE);
        }
        let outcome = match served {
            Ok(Served::Reply(bytes)) => Outcome::Bytes(bytes),
            Ok(_) => Outcome::Bytes(0),
            Err(errno) => Outcome::Error(errno),
        };
        // It is not there any more if somebody else will see the end.
        if let Some(watched) = self.watched.take() {
            watched.end(outcome);
        }
        match (served, operation.reply_kind()) {
            (Ok(served), _) => served,
            (Err(errno), Some(_)) => Served::Reply(reply::write_error(carrier, cx.unique, errno)),
            (Err(_), None) => Served::NoReply,
        }
    }

    fn dispatch(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        carrier: &mut impl FuseCarrier,
    ) -> Result<Served> {
        let source = Arc::clone(&self.share.source);
        let (caller, ino) = (&cx.caller, cx.ino);
        match *operation {
            Operation::Read(ref range) => return self.read(cx, range, carrier),
            Operation::Write { ref range, cached } => {
                let mut range = *range;
                if carrier.is_resubmitted() {
                    // It may have been appended already: it goes to where the client saw the end.
                    range.flags -= OFlags::APPEND;
                }
                return self.write(cx, &range, cached, carrier);
            }
            Operation::Lookup { name } => return self.lookup(cx, name, carrier),
            // For file handles of inodes that the client's kernel has forgotten.
            Operation::LookupSelf if !cx.session.negotiated().has(InitFlags::EXPORT_SUPPORT) => {
                return Err(Errno::STALE);
            }
            Operation::LookupSelf => return self.entry(cx, None, source.lookup_self(caller, ino)?, carrier),
            Operation::LookupParent => return self.entry(cx, None, source.lookup_parent(caller, ino)?, carrier),
            Operation::Forget { count } => cx.session.forget(ino, count),
            Operation::BatchForget { forgets } => {
                forgets.iter().for_each(|one| cx.session.forget(ferry_vfs::Ino(one.nodeid), one.nlookup));
            }
            Operation::Getattr { handle } => {
                // Linux names a handle only where it reads, writes or seeks; users' questions come without (fuse_getattr).
                if let Some(attr) = handle.and_then(|handle| source.getattr_hint(caller, ino, handle)) {
                    let (attr, timeout) = (self.visible_attr(cx, ino, checks::attr(attr)?), Duration::ZERO);
                    cx.session.sync_window_before_attr(ino);
                    return Ok(cx.done(carrier, &Reply::Attr { attr, timeout, dax: cx.session.dax(&attr) }));
                }
                return self.attr(cx, source.getattr(caller, ino, handle)?, carrier);
            }
            Operation::Statx { handle, .. } => {
                let attr = self.visible_attr(cx, ino, checks::attr(source.getattr(caller, ino, handle)?)?);
                self.tells_attr(cx, &attr);
                let timeout = self.share.policy.timeouts_of(cx.session, ino, &attr).attr;
                return Ok(cx.done(carrier, &Reply::Statx { attr, timeout }));
            }
            Operation::Setattr { handle, ref set, .. } => {
                if !clears_only(cx, set) {
                    return self.attr(cx, source.setattr(caller, ino, handle, set)?, carrier);
                }
                let set = SetAttr { clear_privileges: true, ..*set };
                // The kernel has found that one who is not named may not keep them: as nobody's who is in no group.
                let nobody = Caller { uid: NOBODY, gid: NOBODY, ..*caller };
                let caller = if caller.uid == Caller::UNKNOWN { &nobody } else { caller };
                return self.attr(cx, source.setattr(caller, ino, handle, &set)?, carrier);
            }
            Operation::Readlink => {
                let target = source.readlink(caller, ino)?;
                return Ok(cx.done(carrier, &Reply::Bytes(checks::target(&target)?)));
            }
            Operation::Symlink { name, target } => {
                let entry = self.apply_security_label(
                    cx,
                    source.symlink(caller, ino, name, target)?,
                    Some(NewName::Other(name)),
                )?;
                return self.entry(cx, Some(name), entry, carrier);
            }
            Operation::Mknod { name, ref new } => {
                let entry =
                    self.apply_security_label(cx, source.mknod(caller, ino, name, new)?, Some(NewName::Other(name)))?;
                return self.entry(cx, Some(name), entry, carrier);
            }
            Operation::Mkdir { name, ref new } => {
                let entry =
                    self.apply_security_label(cx, source.mkdir(caller, ino, name, new)?, Some(NewName::Dir(name)))?;
                return self.entry(cx, Some(name), entry, carrier);
            }
            Operation::Link { from, name } => {
                return self.entry(cx, Some(name), source.link(caller, from, ino, name)?, carrier);
            }
            Operation::Unlink { name } => {
                cx.session.removals.may_remove(&*source, caller, (ino, name))?;
                source.unlink(caller, ino, name)?;
                cx.session.removals.record_lookup((ino, name), None);
            }
            Operation::Rmdir { name } => {
                cx.session.removals.may_remove(&*source, caller, (ino, name))?;
                source.rmdir(caller, ino, name)?;
                cx.session.removals.record_lookup((ino, name), None);
            }
            Operation::Rename { name, new_dir, new_name, flags } => {
                let names = ((ino, name), (new_dir, new_name));
                cx.session.removals.may_rename(&*source, caller, names, flags)?;
                source.rename(caller, names.0, names.1, flags)?;
                cx.session.removals.record_lookup(names.0, None);
                cx.session.removals.record_lookup(names.1, None);
                cx.session.renamed(caller, &[(new_dir, new_name), (ino, name)]);
            }
            Operation::Open { flags, clear_privileges } => return self.open(cx, flags, clear_privileges, carrier),
            Operation::Create { name, ref new, flags, .. } => return self.create(cx, (name, new), flags, carrier),
            Operation::Tmpfile { ref new, flags } => {
                let (entry, handle) = source.tmpfile(caller, ino, new, flags)?;
                let apply_security_label = self.apply_security_label(cx, entry, None);
                let entry = apply_security_label.inspect_err(|_| source.release(caller, entry.ino, handle))?;
                return self.created(cx, None, (entry, handle), flags, carrier);
            }
            Operation::Opendir { flags } => return self.opendir(cx, flags, carrier),
            Operation::Readdir { ref at, bytes_max } => return self.readdir(cx, at, bytes_max, carrier),
            Operation::Flush { handle, owner } => {
                self.publish_passthrough_writes(cx, handle);
                cx.session.unlocked_all(ino, owner);
                source.flush(caller, ino, handle, owner)?;
            }
            Operation::Release(release) => {
                // Again: what was written through a mapping comes after the last FLUSH.
                self.publish_passthrough_writes(cx, release.handle);
                cx.session.release(caller, Open { ino, handle: release.handle, is_dir: false })?;
            }
            Operation::Releasedir(release) => {
                cx.session.release(caller, Open { ino, handle: release.handle, is_dir: true })?;
            }
            Operation::Fsync { handle, data_only } => {
                let file = source.fsync(caller, ino, handle, data_only)?;
                return Ok(self.sync(cx, file, data_only, carrier));
            }
            Operation::Fsyncdir { handle, data_only } => {
                let file = source.fsyncdir(caller, ino, handle, data_only)?;
                return Ok(self.sync(cx, file, data_only, carrier));
            }
            _ => return self.dispatch_rarer(cx, operation, carrier),
        }
        Ok(empty(cx, operation, carrier))
    }

    /// The operations that no load consists of.
    fn dispatch_rarer(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        carrier: &mut impl FuseCarrier,
    ) -> Result<Served> {
        let source = Arc::clone(&self.share.source);
        let (caller, ino) = (&cx.caller, cx.ino);
        match *operation {
            Operation::Syncfs => {
                let session = Arc::clone(cx.session);
                return Ok(self.aside(cx, carrier, move |caller| {
                    // What cannot be stored keeps nothing else from being made durable.
                    let stored = session.writeback_all();
                    source.syncfs(caller, ino)?;
                    stored.map(|()| Reply::Empty)
                }));
            }
            Operation::CopyFileRange(copy) => {
                let copy = CopyRange { len: copy.len.min(COPY_BYTES_MAX), ..copy };
                let session = Arc::clone(cx.session);
                return Ok(self.aside(cx, carrier, move |caller| {
                    let bytes = checks::at_most(source.copy_file_range(caller, &copy)?, copy.len)?;
                    session.sync(copy.to.0, WHOLE)?;
                    Ok(Reply::Write { bytes: u32::try_from(bytes).unwrap_or(u32::MAX) })
                }));
            }
            Operation::CopyFileRange64(copy) => {
                let session = Arc::clone(cx.session);
                return Ok(self.aside(cx, carrier, move |caller| {
                    let bytes = checks::at_most(source.copy_file_range(caller, &copy)?, copy.len)?;
                    session.sync(copy.to.0, WHOLE)?;
                    Ok(Reply::CopyFileRange64 { bytes })
                }));
            }
            Operation::Statfs => return Ok(cx.done(carrier, &Reply::Statfs(statfs(source.statfs(caller, ino))?))),
            Operation::Setxattr { .. }
            | Operation::Getxattr { .. }
            | Operation::Listxattr { .. }
            | Operation::Removexattr { .. }
                if !self.share.xattr =>
            {
                return Err(Errno::NOSYS);
            }
            Operation::Setxattr { name, .. } | Operation::Getxattr { name, .. } | Operation::Removexattr { name }
                if ACLS.contains(&name) && !cx.session.negotiated().has(InitFlags::POSIX_ACL) =>
            {
                return Err(Errno::OPNOTSUPP);
            }
            Operation::Setxattr { name, value, flags, clear_sgid } => {
                source.setxattr(caller, ino, name, value, flags, clear_sgid)?;
            }
            Operation::Getxattr { name, bytes_max } => {
                return xattr_reply(cx, &source.getxattr(caller, ino, name)?, bytes_max, carrier);
            }
            Operation::Listxattr { bytes_max } => {
                return xattr_reply(cx, &caller.visible_xattrs(source.listxattr(caller, ino)?), bytes_max, carrier);
            }
            Operation::Removexattr { name } => source.removexattr(caller, ino, name)?,
            Operation::Access { mask } => source.access(caller, ino, mask)?,
            Operation::GetLock(request) => {
                let lock = request.lock(caller.session);
                let found = checks::lock(source.get_lock(caller, ino, request.handle, &lock)?)?;
                return Ok(cx.done(carrier, &Reply::Lock(found)));
            }
            Operation::SetLock { lock, wait: false } => {
                let LockOutcome::Done = source.set_lock(caller, ino, lock.handle, &lock.lock(caller.session), None)?
                else {
                    // It has nobody to wake.
                    return Err(Errno::IO);
                };
                cx.session.locked(ino, &lock);
                return Ok(self.granted(cx, lock.kind, carrier));
            }
            Operation::SetLock { lock, wait: true } => return self.wait_for_lock(cx, &lock, carrier),
            Operation::Ioctl { handle, command, input, out_bytes_max, .. } => {
                let data = source.ioctl(caller, ino, handle, command, input, out_bytes_max as usize)?;
                checks::at_most(data.len() as u64, u64::from(out_bytes_max))?;
                return Ok(cx.done(carrier, &Reply::Ioctl { result: 0, data: &data }));
            }
            Operation::Fallocate { handle, offset, len, flags } => {
                source.fallocate(caller, ino, handle, offset, len, flags)?;
            }
            Operation::Lseek { handle, offset, seek } => {
                let found = source.lseek(caller, ino, handle, offset, seek)?;
                let offset = checks::at_most(found, i64::MAX.cast_unsigned())?;
                return Ok(cx.done(carrier, &Reply::Lseek { offset }));
            }
            Operation::Setupmapping { offset, len, window_offset, read, write, .. } => {
                return self.map(cx, (offset, len, window_offset), (read, write), carrier);
            }
            Operation::Removemapping { ref ranges } => return self.unmap(cx, ranges, carrier),
            Operation::Destroy if cx.session.mappings.is_some() => {
                let answer = self.mapped(cx, carrier);
                let mappings = cx.session.mappings.clone();
                self.end_session();
                // Before the answer: a virtual machine monitor that ends has no time for us any more.
                mappings.ok_or(Errno::NOSYS)?.clear(answer);
                return Ok(Served::Parked);
            }
            Operation::Destroy => {
                let served = cx.done(carrier, &Reply::Empty);
                self.end_session();
                return Ok(served);
            }
            Operation::Interrupt { unique } => cx.session.blocked_locks.interrupt(unique),
            // No block device below, nothing to poll for.
            _ => return Err(Errno::NOSYS),
        }
        Ok(empty(cx, operation, carrier))
    }

    /// SETUPMAPPING. Whatever its handle is: Linux names none.
    fn map(
        &mut self,
        cx: &Context<'_>,
        (offset, len, window_offset): (u64, u64, u64),
        (read, write): (bool, bool),
        carrier: &mut impl FuseCarrier,
    ) -> Result<Served> {
        let mappings = cx.session.mappings.as_ref().ok_or(Errno::NOSYS)?;
        let (by, ino) = (cx.caller.session, cx.ino);
        if !cx.session.knows(ino) {
            return Err(Errno::STALE);
        }
        if !read && !write {
            return Err(Errno::INVAL);
        }
        if write && self.share.read_only {
            return Err(Errno::ROFS);
        }
        let may_write = write || cx.session.writes_to(ino);
        let mapping = Mapping { by, ino, offset, len, window_offset, write, may_write };
        let answer = self.mapped(cx, carrier);
        mappings.map(mapping, answer);
        Ok(Served::Parked)
    }

    /// REMOVEMAPPING.
    fn unmap(
        &mut self,
        cx: &Context<'_>,
        ranges: &Records<'_, RemovemappingOne>,
        carrier: &mut impl FuseCarrier,
    ) -> Result<Served> {
        let mappings = cx.session.mappings.as_ref().ok_or(Errno::NOSYS)?;
        let ranges = ranges.iter().map(|range| (range.moffset, range.len)).collect();
        let answer = self.mapped(cx, carrier);
        mappings.unmap(cx.caller.session, ranges, answer);
        Ok(Served::Parked)
    }

    /// How a change of the client's window answers its request.
    fn mapped(&mut self, cx: &Context<'_>, carrier: &mut impl FuseCarrier) -> MappingReply {
        let (later, unique, negotiated) = (carrier.later(), cx.unique, *cx.session.negotiated());
        let watched = self.watched.take();
        Box::new(move |outcome| {
            later(reply::to_bytes(unique, &negotiated, outcome.map(|()| Reply::Empty)));
            if let Some(watched) = watched {
                watched.end(outcome.map(|()| 0).into());
            }
        })
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

    fn wait_for_lock(
        &mut self,
        cx: &Context<'_>,
        request: &LockRequest,
        carrier: &mut impl FuseCarrier,
    ) -> Result<Served> {
        let source = &self.share.source;
        let (lock, unique, negotiated) = (request.lock(cx.caller.session), cx.unique, *cx.session.negotiated());
        let (later, watched) = (carrier.later(), self.watched.take());
        let changes = source.changes().cloned();
        let (session, asked, on) = (Arc::downgrade(cx.session), *request, cx.ino);
        let answer = move |outcome: Result<()>| {
            if let (Ok(()), Some(session)) = (outcome, session.upgrade()) {
                session.locked(on, &asked);
            }
            let answer = move || {
                later(reply::to_bytes(unique, &negotiated, outcome.map(|()| Reply::Empty)));
                if let Some(watched) = watched {
                    watched.end(outcome.map(|()| 0).into());
                }
            };
            match changes {
                Some(changes) if outcome.is_ok() => changes.when_delivered(answer),
                _ => answer(),
            }
        };
        let (share, ino, handle) = (Arc::clone(&self.share), cx.ino, request.handle);
        let Caller { session: by, uid, gid, pid, .. } = cx.caller;
        let give_back = move || {
            // Whoever granted the lock may hold locks of its own, so this is for another thread.
            let source = Arc::clone(&share.source);
            share.blocking_pool.run(move || {
                let caller = Caller { session: by, uid, gid, pid, groups: &[] };
                let unlock = Lock { kind: LockKind::Unlock, ..lock };
                if let Err(error) = source.set_lock(&caller, ino, handle, &unlock, None) {
                    tracing::debug!(%error, "a lock that nobody waits for any more cannot be given back");
                }
            });
        };
        let (waiter, wait) = cx.session.blocked_locks.waiter(unique, answer, give_back);
        match source.set_lock(&cx.caller, ino, handle, &lock, Some(waiter)) {
            Ok(LockOutcome::Waiting) => {
                cx.session.blocked_locks.park(unique, wait);
                Ok(Served::Parked)
            }
            Ok(LockOutcome::Done) => {
                cx.session.locked(ino, request);
                Ok(self.granted(cx, lock.kind, carrier))
            }
            Err(errno) => Err(errno),
        }
    }

    /// Answers a client that has a lock, or has given one up, as soon as clients were told of what others had written
    /// before: what its kernel keeps is older than the lock.
    fn granted(&mut self, cx: &Context<'_>, kind: LockKind, carrier: &mut impl FuseCarrier) -> Served {
        match self.share.source.changes() {
            Some(changes) if kind != LockKind::Unlock && changes.is_behind() => {
                let (later, watched) = (carrier.later(), self.watched.take());
                let reply = reply::to_bytes(cx.unique, cx.session.negotiated(), Ok(Reply::Empty));
                changes.when_delivered(move || {
                    later(reply);
                    if let Some(watched) = watched {
                        watched.end(Ok(0).into());
                    }
                });
                Served::Later
            }
            _ => cx.done(carrier, &Reply::Empty),
        }
    }

    /// Has a call that may take long made by another thread.
    fn aside(
        &mut self,
        cx: &Context<'_>,
        carrier: &mut impl FuseCarrier,
        call: impl FnOnce(&Caller<'_>) -> Result<Reply<'static>> + Send + 'static,
    ) -> Served {
        let (later, unique, watched) = (carrier.later(), cx.unique, self.watched.take());
        let (session, Caller { session: by, uid, gid, pid, .. }) = (Arc::clone(cx.session), cx.caller);
        self.share.blocking_pool.run(move || {
            let caller = Caller { session: by, uid, gid, pid, groups: &[] };
            let outcome = catch_unwind(AssertUnwindSafe(|| call(&caller))).unwrap_or(Err(Errno::IO));
            later(reply::to_bytes(unique, session.negotiated(), outcome));
            if let Some(watched) = watched {
                watched.end(outcome.map(|_| 0).into());
            }
        });
        Served::Later
    }
}

/// Whether a SETATTR is there to clear suid and sgid alone. Linux then sends one that sets nothing (`fuse_setattr`, which takes
/// `ATTR_KILL_SUID` and `ATTR_KILL_SGID` away): before somebody who may not keep them writes, also to a backing file or in the
/// window, where no other request tells of it, and for a chown that changes no owner.
fn clears_only(cx: &Context<'_>, set: &SetAttr) -> bool {
    cx.session.negotiated().has(InitFlags::HANDLE_KILLPRIV_V2) && SetAttr { ctime: None, ..*set } == SetAttr::default()
}

/// Whether the client may have more open, where it asks for that.
fn is_allowed(cx: &Context<'_>, operation: &Operation<'_>) -> Result<()> {
    match operation {
        Operation::Open { .. } | Operation::Create { .. } | Operation::Tmpfile { .. } | Operation::Opendir { .. } => {
            cx.session.may_open()
        }
        _ => Ok(()),
    }
}

/// Sees to it that the file is what the client thinks it is, before it asks for what depends on that; and the client's window, before it opens
/// the file.
fn synced_before(cx: &Context<'_>, operation: &Operation<'_>) -> Result<()> {
    if cx.session.mappings.is_none() {
        return Ok(());
    }
    match operation {
        Operation::CopyFileRange(copy) | Operation::CopyFileRange64(copy) => {
            cx.session.writeback(copy.from.0, WHOLE)?;
            cx.session.writeback(copy.to.0, WHOLE)
        }
        Operation::Open { .. } => cx.session.sync(cx.ino, WHOLE),
        // Of a WRITE across the file's end, Linux has let the guest store what lies before that in its window until now.
        Operation::Read(range) | Operation::Write { range, .. } => {
            cx.session.writeback(cx.ino, range.offset..range.offset.saturating_add(range.len.into()))
        }
        Operation::Setattr { .. }
        | Operation::Flush { .. }
        | Operation::Fsync { .. }
        | Operation::Fallocate { .. }
        | Operation::Lseek { .. } => cx.session.writeback(cx.ino, WHOLE),
        Operation::Release(_) => {
            // It cannot fail; the FLUSH before it has told.
            let _ = cx.session.writeback(cx.ino, WHOLE);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Returns success, to whoever wants an answer.
fn empty(cx: &Context<'_>, operation: &Operation<'_>, carrier: &mut impl FuseCarrier) -> Served {
    match operation.reply_kind() {
        Some(_) => cx.done(carrier, &Reply::Empty),
        None => Served::NoReply,
    }
}

/// Whether the operation would change anything in the source.
fn changes_something(operation: &Operation<'_>) -> bool {
    match operation {
        Operation::Setattr { .. }
        | Operation::Symlink { .. }
        | Operation::Mknod { .. }
        | Operation::Mkdir { .. }
        | Operation::Unlink { .. }
        | Operation::Rmdir { .. }
        | Operation::Rename { .. }
        | Operation::Link { .. }
        | Operation::Create { .. }
        | Operation::Tmpfile { .. }
        | Operation::Write { .. }
        | Operation::CopyFileRange(_)
        | Operation::CopyFileRange64(_)
        | Operation::Fallocate { .. }
        | Operation::Setxattr { .. }
        | Operation::Removexattr { .. } => true,
        Operation::Open { flags, .. } => flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC),
        _ => false,
    }
}

/// A file system that does not count gives `df` and package managers zeros rather than an error, as libfuse does.
fn statfs(answer: Result<Statfs>) -> Result<Statfs> {
    match answer {
        Err(Errno::NOSYS) => {
            let (bsize, frsize) = (BLOCK_BYTES, BLOCK_BYTES);
            let namelen = reply::count(Name::BYTES_MAX);
            Ok(Statfs { bsize, frsize, namelen, ..Statfs::default() })
        }
        answer => answer,
    }
}

fn xattr_reply(cx: &Context<'_>, value: &[u8], bytes_max: u32, buffer: &mut impl ReplyBuffer) -> Result<Served> {
    let value = checks::xattr(value)?;
    if bytes_max == 0 {
        return Ok(cx.done(buffer, &Reply::XattrSize { bytes: reply::count(value.len()) }));
    }
    if value.len() > bytes_max as usize {
        return Err(Errno::RANGE);
    }
    Ok(cx.done(buffer, &Reply::Bytes(value)))
}
