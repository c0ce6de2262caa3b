//! Each FUSE operation, as calls of the source.

use std::sync::Arc;

use ferry_vfs::{
    Attr, Caller, Copy as CopyRange, DirItem, DirOutput, DirRange, Entry, Errno, Handle, Name, New, OFlags, Result,
    SetAttr, Waiter,
};
use ferry_vhost::{Answer, Io};
use ferry_wire::fuse::{DirWriter, LockRequest, Opened, Operation, Reply};

use crate::handler::{Context, Handler};
use crate::mount::Mount;
use crate::reply::{self, HEADER_BYTES};

/// The most that COPY_FILE_RANGE copies at a time: its reply counts in 32 bits.
const COPY_BYTES_MAX: u64 = 0xffff_f000;

impl Handler {
    pub(crate) fn serve_operation(&mut self, cx: &Context<'_>, operation: &Operation<'_>, io: &mut Io<'_>) -> Answer {
        tracing::trace!(ino = cx.ino.0, ?operation, "request");
        if self.share.read_only && changes_something(operation) {
            return Answer::Done(reply::write_error(cx.chain, cx.unique, Errno::ROFS));
        }
        match self.dispatch(cx, operation, io) {
            Ok(answer) => answer,
            Err(errno) => Answer::Done(reply::write_error(cx.chain, cx.unique, errno)),
        }
    }

    fn dispatch(&mut self, cx: &Context<'_>, operation: &Operation<'_>, io: &mut Io<'_>) -> Result<Answer> {
        let source = Arc::clone(&self.share.source);
        let (caller, ino) = (&cx.caller, cx.ino);
        match *operation {
            Operation::Read(ref range) => return self.read(cx, range, io),
            Operation::Write { ref range, .. } => return self.write(cx, range, io),
            Operation::Lookup { name } => return self.lookup(cx, name),
            Operation::LookupSelf => return Err(Errno::NOSYS),
            Operation::LookupParent => return Ok(self.entry(cx, source.lookup_parent(caller, ino)?)),
            Operation::Forget { count } => cx.mount.forget(ino, count),
            Operation::BatchForget { forgets } => {
                forgets.iter().for_each(|one| cx.mount.forget(ferry_vfs::Ino(one.nodeid), one.nlookup));
            }
            Operation::Getattr { handle } => return Ok(self.attr(cx, source.getattr(caller, ino, handle)?)),
            Operation::Statx { handle, .. } => {
                let attr = source.getattr(caller, ino, handle)?;
                return Ok(cx.done(&Reply::Statx { attr, timeout: self.share.policy.timeouts.attr }));
            }
            Operation::Setattr { handle, ref set, .. } => {
                return Ok(self.attr(cx, source.setattr(caller, ino, handle, set)?));
            }
            Operation::Readlink => return Ok(cx.done(&Reply::Bytes(&source.readlink(caller, ino)?))),
            Operation::Symlink { name, target } => {
                return Ok(self.entry(cx, source.symlink(caller, ino, name, target)?));
            }
            Operation::Mknod { name, ref new } => return Ok(self.entry(cx, source.mknod(caller, ino, name, new)?)),
            Operation::Mkdir { name, ref new } => return Ok(self.entry(cx, source.mkdir(caller, ino, name, new)?)),
            Operation::Link { from, name } => return Ok(self.entry(cx, source.link(caller, from, ino, name)?)),
            Operation::Unlink { name } => source.unlink(caller, ino, name)?,
            Operation::Rmdir { name } => source.rmdir(caller, ino, name)?,
            Operation::Rename { name, new_dir, new_name, flags } => {
                source.rename(caller, (ino, name), (new_dir, new_name), flags)?;
            }
            Operation::Open { flags, clear_privileges } => return self.open(cx, flags, clear_privileges),
            Operation::Create { name, ref new, flags, clear_privileges } => {
                return self.create(cx, name, new, flags, clear_privileges);
            }
            Operation::Tmpfile { ref new, flags } => {
                return Ok(self.created(cx, source.tmpfile(caller, ino, new, flags)?));
            }
            Operation::Opendir { flags } => {
                let handle = source.opendir(caller, ino, flags)?;
                cx.mount.opened(ino, handle, true);
                return Ok(cx.done(&Reply::Open(Opened::new(handle, self.share.policy.dir_flags()))));
            }
            Operation::Readdir { ref at, bytes_max } => return self.readdir(cx, at, bytes_max),
            Operation::Flush { handle, owner } => source.flush(caller, ino, handle, owner)?,
            Operation::Release(release) => cx.mount.release(caller, release.handle, false)?,
            Operation::Releasedir(release) => cx.mount.release(caller, release.handle, true)?,
            Operation::Fsync { handle, data_only } => {
                let file = source.fsync(caller, ino, handle, data_only)?;
                return Ok(self.sync(cx, file, data_only, io));
            }
            Operation::Fsyncdir { handle, data_only } => {
                let file = source.fsyncdir(caller, ino, handle, data_only)?;
                return Ok(self.sync(cx, file, data_only, io));
            }
            Operation::Syncfs => {
                return Ok(self.aside(cx, io, move |caller| source.syncfs(caller, ino).map(|()| Reply::Empty)));
            }
            Operation::CopyFileRange(copy) => {
                let copy = CopyRange { len: copy.len.min(COPY_BYTES_MAX), ..copy };
                return Ok(self.aside(cx, io, move |caller| {
                    let bytes = source.copy_file_range(caller, &copy)?;
                    Ok(Reply::Write { bytes: u32::try_from(bytes).unwrap_or(u32::MAX) })
                }));
            }
            Operation::CopyFileRange64(copy) => {
                return Ok(self.aside(cx, io, move |caller| {
                    Ok(Reply::CopyFileRange64 { bytes: source.copy_file_range(caller, &copy)? })
                }));
            }
            Operation::Statfs => return Ok(cx.done(&Reply::Statfs(source.statfs(caller, ino)?))),
            Operation::Setxattr { .. }
            | Operation::Getxattr { .. }
            | Operation::Listxattr { .. }
            | Operation::Removexattr { .. }
                if !self.share.xattr =>
            {
                return Err(Errno::NOSYS);
            }
            Operation::Setxattr { name, value, flags, clear_sgid } => {
                source.setxattr(caller, ino, name, value, flags, clear_sgid)?;
            }
            Operation::Getxattr { name, bytes_max } => {
                return xattr_reply(cx, &source.getxattr(caller, ino, name)?, bytes_max);
            }
            Operation::Listxattr { bytes_max } => return xattr_reply(cx, &source.listxattr(caller, ino)?, bytes_max),
            Operation::Removexattr { name } => source.removexattr(caller, ino, name)?,
            Operation::Access { mask } => source.access(caller, ino, mask)?,
            Operation::GetLock(request) => {
                let lock = request.lock(caller.session);
                return Ok(cx.done(&Reply::Lock(source.get_lock(caller, ino, request.handle, &lock)?)));
            }
            Operation::SetLock { lock, wait } => return self.set_lock(cx, &lock, wait, io),
            Operation::Ioctl { handle, command, input, out_bytes_max, .. } => {
                let data = source.ioctl(caller, ino, handle, command, input, out_bytes_max as usize)?;
                let data = &data[..data.len().min(out_bytes_max as usize)];
                return Ok(cx.done(&Reply::Ioctl { result: 0, data }));
            }
            Operation::Fallocate { handle, offset, len, flags } => {
                source.fallocate(caller, ino, handle, offset, len, flags)?;
            }
            Operation::Lseek { handle, offset, seek } => {
                return Ok(cx.done(&Reply::Lseek { offset: source.lseek(caller, ino, handle, offset, seek)? }));
            }
            Operation::Destroy => {
                let answer = cx.done(&Reply::Empty);
                self.destroy();
                return Ok(answer);
            }
            // Interrupts never come over virtio-fs; waits end when their handle is released.
            Operation::Interrupt { .. } => {}
            // No block device below, nothing to poll for, no DAX window.
            _ => return Err(Errno::NOSYS),
        }
        Ok(match operation.reply_kind() {
            Some(_) => cx.done(&Reply::Empty),
            None => Answer::Done(0),
        })
    }

    fn lookup(&mut self, cx: &Context<'_>, name: Name<'_>) -> Result<Answer> {
        match self.share.source.lookup(&cx.caller, cx.ino, name) {
            Ok(entry) => Ok(self.entry(cx, entry)),
            Err(Errno::NOENT) => match self.share.policy.negative_timeout {
                timeout if timeout.is_zero() => Err(Errno::NOENT),
                timeout => Ok(cx.done(&Reply::Negative { timeout })),
            },
            Err(errno) => Err(errno),
        }
    }

    fn entry(&self, cx: &Context<'_>, entry: Entry) -> Answer {
        cx.mount.refer(entry.ino);
        cx.done(&Reply::Entry { entry, timeouts: self.share.policy.timeouts, dax: false })
    }

    fn attr(&self, cx: &Context<'_>, attr: Attr) -> Answer {
        cx.done(&Reply::Attr { attr, timeout: self.share.policy.timeouts.attr, dax: false })
    }

    fn opened(&self, handle: Handle) -> Opened {
        Opened::new(handle, self.share.policy.file_flags())
    }

    fn open(&mut self, cx: &Context<'_>, flags: OFlags, clear_privileges: bool) -> Result<Answer> {
        let source = &self.share.source;
        // The kernel of the host would keep suid, for the server may: so truncate as an unprivileged user does.
        let truncate_apart = clear_privileges && flags.contains(OFlags::TRUNC);
        let open_flags = if truncate_apart { flags - OFlags::TRUNC } else { flags };
        let handle = source.open(&cx.caller, cx.ino, open_flags)?;
        cx.mount.opened(cx.ino, handle, false);
        if truncate_apart {
            let set = SetAttr { size: Some(0), clear_privileges: true, ..SetAttr::default() };
            if let Err(errno) = source.setattr(&cx.caller, cx.ino, Some(handle), &set) {
                cx.mount.release(&cx.caller, handle, false)?;
                return Err(errno);
            }
        }
        Ok(cx.done(&Reply::Open(self.opened(handle))))
    }

    fn create(
        &mut self,
        cx: &Context<'_>,
        name: Name<'_>,
        new: &New,
        flags: OFlags,
        clear_privileges: bool,
    ) -> Result<Answer> {
        let source = &self.share.source;
        let truncate_apart = clear_privileges && flags.contains(OFlags::TRUNC) && !flags.contains(OFlags::EXCL);
        let open_flags = if truncate_apart { flags - OFlags::TRUNC } else { flags };
        let (mut entry, handle) = source.create(&cx.caller, cx.ino, name, new, open_flags)?;
        if truncate_apart && entry.attr.size > 0 {
            let set = SetAttr { size: Some(0), clear_privileges: true, ..SetAttr::default() };
            match source.setattr(&cx.caller, entry.ino, Some(handle), &set) {
                Ok(attr) => entry.attr = attr,
                Err(errno) => {
                    source.release(&cx.caller, entry.ino, handle);
                    source.forget(entry.ino, 1);
                    return Err(errno);
                }
            }
        }
        Ok(self.created(cx, (entry, handle)))
    }

    fn created(&self, cx: &Context<'_>, (entry, handle): (Entry, Handle)) -> Answer {
        cx.mount.refer(entry.ino);
        cx.mount.opened(entry.ino, handle, false);
        let timeouts = self.share.policy.timeouts;
        cx.done(&Reply::Created { entry, timeouts, dax: false, opened: self.opened(handle) })
    }

    fn readdir(&mut self, cx: &Context<'_>, at: &DirRange, bytes_max: u32) -> Result<Answer> {
        let room = cx.chain.writable_bytes().checked_sub(HEADER_BYTES).ok_or(Errno::IO)?;
        let bytes_max = room.min(bytes_max as usize);
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        let timeouts = self.share.policy.timeouts;
        let writer = DirWriter::new(&mut scratch, bytes_max, at.plus, timeouts, &cx.mount.negotiated);
        let mut listing = Listing { writer, mount: cx.mount };
        let outcome = self.share.source.readdir(&cx.caller, at, &mut listing);
        let answer = outcome.map(|()| cx.done(&Reply::Bytes(&scratch)));
        self.scratch = scratch;
        answer
    }

    fn set_lock(&mut self, cx: &Context<'_>, request: &LockRequest, wait: bool, io: &Io<'_>) -> Result<Answer> {
        let lock = request.lock(cx.caller.session);
        let waiter = wait.then(|| {
            let (port, token, unique) = (Arc::clone(&self.port), io.token(), cx.unique);
            let negotiated = cx.mount.negotiated;
            Waiter::new(move |outcome| {
                port.reply(token, reply::to_bytes(unique, &negotiated, outcome.map(|()| Reply::Empty)));
            })
        });
        match self.share.source.set_lock(&cx.caller, cx.ino, request.handle, &lock, waiter)? {
            ferry_vfs::Locked::Done => Ok(cx.done(&Reply::Empty)),
            ferry_vfs::Locked::Waiting => Ok(Answer::Parked),
        }
    }

    /// Has a call that may take long made by another thread.
    fn aside(
        &self,
        cx: &Context<'_>,
        io: &Io<'_>,
        call: impl FnOnce(&Caller<'_>) -> Result<Reply<'static>> + Send + 'static,
    ) -> Answer {
        let (port, token, unique) = (Arc::clone(&self.port), io.token(), cx.unique);
        let (mount, Caller { session, uid, gid, pid, .. }) = (Arc::clone(cx.mount), cx.caller);
        self.share.lane.run(move || {
            let caller = Caller { session, uid, gid, pid, groups: &[] };
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&caller)));
            let outcome = outcome.unwrap_or(Err(Errno::IO));
            port.reply(token, reply::to_bytes(unique, &mount.negotiated, outcome));
        });
        Answer::Later
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

fn xattr_reply(cx: &Context<'_>, value: &[u8], bytes_max: u32) -> Result<Answer> {
    if bytes_max == 0 {
        return Ok(cx.done(&Reply::XattrSize { bytes: reply::written(value.len()) }));
    }
    if value.len() > bytes_max as usize {
        return Err(Errno::RANGE);
    }
    Ok(cx.done(&Reply::Bytes(value)))
}

/// A listing that counts the references it hands out.
struct Listing<'a> {
    writer: DirWriter<'a>,
    mount: &'a Mount,
}

impl DirOutput for Listing<'_> {
    fn fits(&self, name: &[u8]) -> bool {
        self.writer.fits(name)
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        if let Some(entry) = entry {
            self.mount.refer(entry.ino);
        }
        self.writer.push(item, entry);
    }
}
