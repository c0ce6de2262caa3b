//! POSIX locks. No thread waits for a lock: a request that must wait is parked with the source.

use std::sync::Arc;

use ferry_vfs::{Cancellation, Errno, Lock, LockKind, LockOutcome, LockOwner, Result, Waiter, checks};
use ferry_wire::ninep::{Fid, LockRequest, LockStatus, Reply};

use super::Context;
use crate::request_table::ReplyBytes;

/// The last byte of any file.
const END: u64 = i64::MAX as u64;

impl Context<'_> {
    fn wanted(&self, request: &LockRequest<'_>) -> Lock {
        let LockRequest { kind, start, end, pid, .. } = *request;
        let owner = LockOwner { session: self.session.id, id: self.session.owner(request) };
        Lock { kind, owner, start, end, pid, flock: false }
    }

    /// Sets or releases a lock; `None` if the request has to wait.
    pub(super) fn lock(&self, fid: Fid, request: &LockRequest<'_>, wait: bool) -> Result<Option<Reply<'static>>> {
        let (file, open) = self.session.open(fid)?;
        let lock = self.wanted(request);
        // Before the unlock, so that a concurrent lock of the owner is remembered.
        let all = lock.kind == LockKind::Unlock && lock.start == 0 && lock.end >= END;
        let known = all && open.unlocked_by(lock.owner.id);
        let gone = Arc::<Cancellation>::default();
        let waits = wait && lock.kind != LockKind::Unlock && self.client.may_park();
        let waiter = waits.then(|| self.waiter(file.node.ino, open.handle, lock, &gone));
        let cx = self.caller(file.user, None);
        let outcome = self.share.source.set_lock(&cx, file.node.ino, open.handle, &lock, waiter);
        let took = outcome.is_ok() && lock.kind != LockKind::Unlock;
        if took || known && outcome.is_err() {
            open.locked_by(lock.owner.id);
        }
        self.client.lock_owners_changed(&self.session.owner_count);
        match outcome {
            Ok(LockOutcome::Done) => Ok(Some(Reply::Lock(LockStatus::Success))),
            Ok(LockOutcome::Waiting) if waits => {
                self.client.park(self.ticket, &gone);
                Ok(None)
            }
            // No request waits.
            Ok(LockOutcome::Waiting) => Err(Errno::IO),
            Err(Errno::AGAIN | Errno::ACCESS) => Ok(Some(Reply::Lock(LockStatus::Blocked))),
            Err(Errno::NOSYS) => Err(Errno::NOLCK),
            Err(errno) => Err(errno),
        }
    }

    /// The source's waker. A lock that is granted after its request was cancelled is released.
    fn waiter(&self, ino: ferry_vfs::Ino, handle: ferry_vfs::Handle, lock: Lock, gone: &Arc<Cancellation>) -> Waiter {
        // The source keeps the waker as long as the handle is open, so it must keep nothing open itself.
        let (client, share) = (Arc::downgrade(&self.client), Arc::downgrade(self.share));
        let (ticket, unwanted) = (self.ticket.clone(), Arc::clone(gone));
        let waiter = Waiter::new(move |outcome: Result<()>| {
            let (Some(client), Some(share)) = (client.upgrade(), share.upgrade()) else { return };
            let mut reply = Vec::new();
            match outcome {
                Ok(()) => Reply::Lock(LockStatus::Success),
                Err(errno) => Reply::Error(errno),
            }
            .encode(ticket.tag, &mut reply);
            let told = client.finish(&ticket, ReplyBytes::Borrowed(&reply));
            if told || outcome.is_err() {
                return;
            }
            unwanted.cancel();
            // The granting thread may hold locks of the source, so another thread unlocks.
            let source = Arc::clone(&share.source);
            share.blocking_pool.run(move || {
                let cx = ferry_vfs::Caller { session: lock.owner.session, ..ferry_vfs::Caller::default() };
                let unlock = Lock { kind: LockKind::Unlock, ..lock };
                if let Err(error) = source.set_lock(&cx, ino, handle, &unlock, None) {
                    tracing::debug!(%error, "cannot release a lock of a cancelled request");
                }
            });
        });
        waiter.until(Arc::clone(gone))
    }

    /// Returns the conflicting lock. Its owner is known only for a process of the same client.
    pub(super) fn getlock<'a>(&self, fid: Fid, request: LockRequest<'a>) -> Result<Reply<'a>> {
        let (file, open) = self.session.open(fid)?;
        // Linux's client replaces the type by that of an unlock (`v9fs_file_getlock`). Any lock conflicts with a write lock.
        let kind = if request.kind == LockKind::Unlock { LockKind::Write } else { request.kind };
        let lock = Lock { kind, ..self.wanted(&request) };
        let found = self.share.source.get_lock(&self.caller(file.user, None), file.node.ino, open.handle, &lock);
        let found = match found {
            Err(Errno::NOSYS) => return Err(Errno::NOLCK),
            other => checks::lock(other?)?,
        };
        Ok(Reply::Getlock(match found {
            None => LockRequest { kind: LockKind::Unlock, ..request },
            Some(Lock { kind, start, end, pid, owner, .. }) => {
                let client = if owner.session == self.session.id { request.client } else { b"" };
                LockRequest { kind, start, end, pid, client }
            }
        }))
    }
}
