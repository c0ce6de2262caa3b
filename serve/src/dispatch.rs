//! Dispatches each FUSE operation to its method in `operations/`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ferry_engine::requests::Outcome;
use ferry_vfs::{Caller, Errno, Ino, OFlags, Result};
use ferry_wire::fuse::{Operation, Reply};

use crate::active_request::DetachedRequest;
use crate::carrier::{FuseCarrier, ServeOutcome};
use crate::close_to_open::size_changed_by;
use crate::mappings::WHOLE;
use crate::reply;
use crate::server::{Context, Server};

impl Server {
    pub(crate) fn serve_operation(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        carrier: &mut impl FuseCarrier,
    ) -> ServeOutcome {
        self.begin_request(cx, operation);
        if let Some(file) = size_changed_by(cx.ino, operation).filter(|_| self.checks_size_on_open(cx)) {
            cx.session.set_reported_size(file, None);
        }
        let served = match self.agent_request(cx, operation, carrier) {
            Some(served) => served,
            None if self.share.read_only && changes_something(operation) => Err(Errno::ROFS),
            None => is_allowed(cx, operation)
                .and_then(|()| synced_before(cx, operation))
                .and_then(|()| self.dispatch(cx, operation, carrier)),
        };
        let served = match served {
            Err(errno) if self.is_replay => self.error_of_replay(cx, operation, errno, carrier),
            served => served,
        };
        if cx.session.mappings.is_some() && matches!(operation, Operation::Fallocate { .. }) {
            // An error is reported when the file is closed.
            let _ = cx.session.sync(cx.ino, WHOLE);
        }
        let outcome = match served {
            Ok(ServeOutcome::Reply(bytes)) => Outcome::Bytes(bytes),
            Ok(_) => Outcome::Bytes(0),
            Err(errno) => Outcome::Error(errno),
        };
        // It was taken if another thread or a transfer ends the request.
        if let Some(active) = self.active.take() {
            active.end(&mut self.recorder, operation, outcome);
        }
        match served {
            Ok(served) => served,
            Err(errno) if operation.wants_reply() => ServeOutcome::Reply(reply::write_error(carrier, cx.unique, errno)),
            Err(_) => ServeOutcome::NoReply,
        }
    }

    fn dispatch(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        let done = match *operation {
            Operation::Read(ref range) => return self.read(cx, range, carrier),
            Operation::Write { ref range, cached } => {
                return match carrier.is_resubmitted() {
                    true => self.write_again(cx, range, cached, carrier),
                    false => self.write(cx, range, cached, carrier),
                };
            }
            Operation::Lookup { name } => return self.lookup(cx, name, carrier),
            Operation::LookupSelf => return self.lookup_self(cx, carrier),
            Operation::LookupParent => return self.lookup_parent(cx, carrier),
            Operation::Forget { count } => {
                cx.session.forget(cx.ino, count);
                return Ok(ServeOutcome::NoReply);
            }
            Operation::BatchForget { forgets } => {
                forgets.iter().for_each(|one| cx.session.forget(Ino(one.nodeid), one.nlookup));
                return Ok(ServeOutcome::NoReply);
            }
            Operation::Getattr { handle } => return self.getattr(cx, handle, carrier),
            Operation::Statx { handle, .. } => return self.statx(cx, handle, carrier),
            Operation::Setattr { handle, ref set, .. } => return self.setattr(cx, handle, set, carrier),
            Operation::Readlink => return self.readlink(cx, carrier),
            Operation::Symlink { name, target } => {
                let entry = self.share.source.symlink(&cx.caller, cx.ino, name, target)?;
                return self.reply_with_new(cx, (name, false), entry, carrier);
            }
            Operation::Mknod { name, ref new } => {
                let entry = self.share.source.mknod(&cx.caller, cx.ino, name, new)?;
                return self.reply_with_new(cx, (name, false), entry, carrier);
            }
            Operation::Mkdir { name, ref new } => {
                let entry = self.share.source.mkdir(&cx.caller, cx.ino, name, new)?;
                return self.reply_with_new(cx, (name, true), entry, carrier);
            }
            Operation::Link { from, name } => return self.link(cx, from, name, carrier),
            Operation::Unlink { name } => self.remove(cx, name, false),
            Operation::Rmdir { name } => self.remove(cx, name, true),
            Operation::Rename { name, new_dir, new_name, flags } => {
                self.rename(cx, (cx.ino, name), (new_dir, new_name), flags)
            }
            Operation::Open { flags, clear_privileges } => return self.open(cx, flags, clear_privileges, carrier),
            Operation::Create { name, ref new, flags, .. } => return self.create(cx, (name, new), flags, carrier),
            Operation::Tmpfile { ref new, flags } => return self.tmpfile(cx, new, flags, carrier),
            Operation::Opendir { flags } => return self.opendir(cx, flags, carrier),
            Operation::Readdir { ref at, bytes_max } => return self.readdir(cx, at, bytes_max, carrier),
            Operation::Flush { handle, owner } => self.flush(cx, handle, owner),
            Operation::Release(release) => self.release(cx, release.handle),
            Operation::Releasedir(release) => self.releasedir(cx, release.handle),
            Operation::Fsync { handle, data_only } => {
                let file = self.share.source.fsync(&cx.caller, cx.ino, handle, data_only)?;
                return Ok(self.sync(cx, file, data_only, carrier));
            }
            Operation::Fsyncdir { handle, data_only } => {
                let file = self.share.source.fsyncdir(&cx.caller, cx.ino, handle, data_only)?;
                return Ok(self.sync(cx, file, data_only, carrier));
            }
            Operation::Syncfs => return self.syncfs(cx, carrier),
            Operation::CopyFileRange(copy) => return self.copy_file_range(cx, copy, carrier),
            Operation::CopyFileRange64(copy) => return self.copy_file_range_64(cx, copy, carrier),
            Operation::Statfs => return self.statfs(cx, carrier),
            Operation::Setxattr { name, value, flags, clear_sgid } => {
                self.setxattr(cx, (name, value), flags, clear_sgid)
            }
            Operation::Getxattr { name, bytes_max } => return self.getxattr(cx, name, bytes_max, carrier),
            Operation::Listxattr { bytes_max } => return self.listxattr(cx, bytes_max, carrier),
            Operation::Removexattr { name } => self.removexattr(cx, name),
            Operation::Access { mask } => self.access(cx, mask),
            Operation::GetLock(request) => return self.getlk(cx, &request, carrier),
            Operation::SetLock { lock, wait: false } => return self.setlk(cx, &lock, carrier),
            Operation::SetLock { lock, wait: true } => return self.setlkw(cx, &lock, carrier),
            Operation::Ioctl { handle, command, input, out_bytes_max, .. } => {
                return self.ioctl(cx, handle, (command, input, out_bytes_max), carrier);
            }
            Operation::Fallocate { handle, offset, len, flags } => self.fallocate(cx, handle, (offset, len), flags),
            Operation::Lseek { handle, offset, seek } => return self.lseek(cx, handle, (offset, seek), carrier),
            Operation::Setupmapping { offset, len, window_offset, read, write, .. } => {
                return self.setupmapping(cx, (offset, len, window_offset), (read, write), carrier);
            }
            Operation::Removemapping { ref ranges } => return self.removemapping(cx, ranges, carrier),
            Operation::Destroy => return self.destroy(cx, carrier),
            Operation::Interrupt { unique } => {
                cx.session.blocked_locks.interrupt(unique);
                return Ok(ServeOutcome::NoReply);
            }
            // BMAP needs a block device, and no source can be polled.
            _ => Err(Errno::NOSYS),
        };
        done.map(|()| cx.done(carrier, &Reply::Empty))
    }

    /// Runs a long call on another thread.
    pub(crate) fn run_on_pool(
        &mut self,
        cx: &Context<'_>,
        carrier: &mut impl FuseCarrier,
        call: impl FnOnce(&Caller<'_>) -> Result<Reply<'static>> + Send + 'static,
    ) -> ServeOutcome {
        let (later, unique, request) =
            (carrier.later(), cx.unique, DetachedRequest::new(self.active.take(), &self.share.metrics));
        let (session, Caller { session: by, uid, gid, pid, .. }) = (Arc::clone(cx.session), cx.caller);
        self.share.blocking_pool.run(move || {
            let caller = Caller { session: by, uid, gid, pid, groups: &[] };
            let outcome = catch_unwind(AssertUnwindSafe(|| call(&caller))).unwrap_or(Err(Errno::IO));
            later(reply::to_bytes(unique, session.negotiated(), outcome));
            request.end(outcome.map(|_| 0));
        });
        ServeOutcome::Later
    }
}

/// Whether an operation that opens something is within the client's limit of open files.
fn is_allowed(cx: &Context<'_>, operation: &Operation<'_>) -> Result<()> {
    match operation {
        Operation::Open { .. } | Operation::Create { .. } | Operation::Tmpfile { .. } | Operation::Opendir { .. } => {
            cx.session.may_open()
        }
        _ => Ok(()),
    }
}

/// Writes back window stores that the operation depends on; before OPEN, also updates the window from the file.
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
        // For a WRITE across the end of the file, Linux lets the guest store what lies before the end in its window.
        Operation::Read(range) | Operation::Write { range, .. } => {
            cx.session.writeback(cx.ino, range.offset..range.offset.saturating_add(range.len.into()))
        }
        Operation::Setattr { .. } | Operation::Fsync { .. } | Operation::Fallocate { .. } | Operation::Lseek { .. } => {
            cx.session.writeback(cx.ino, WHOLE)
        }
        Operation::Release(_) => {
            // RELEASE cannot fail; FLUSH reported the error.
            let _ = cx.session.writeback(cx.ino, WHOLE);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Whether the operation changes the source.
pub(crate) fn changes_something(operation: &Operation<'_>) -> bool {
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
