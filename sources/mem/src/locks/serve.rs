//! The contract's side of locks.

use std::sync::atomic::Ordering;

use ferry_vfs::{Caller, Errno, Handle, Ino, Lock, LockKind, LockOwner, Locked, OFlags, Result, Waiter};

use crate::store::Store;
use crate::tree::Tree;

/// The end of the file, wherever that is.
const END: u64 = i64::MAX as u64;

/// A request with a sound range and the caller's own session.
fn checked(cx: &Caller<'_>, lock: &Lock) -> Result<Lock> {
    let end = lock.end.min(END);
    if lock.start > end && !lock.flock {
        return Err(Errno::INVAL);
    }
    Ok(Lock { owner: LockOwner { session: cx.session, id: lock.owner.id }, end, ..*lock })
}

impl<S: Store> Tree<S> {
    pub(crate) fn set_lock_(
        &self,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        request: &Lock,
        wait: Option<Waiter>,
    ) -> Result<Locked> {
        let mut wait = wait;
        let result = self.set_or_park(cx, (ino, handle), request, &mut wait);
        if let Some(waiter) = wait {
            waiter.dismiss();
        }
        result
    }

    fn set_or_park(
        &self,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        request: &Lock,
        wait: &mut Option<Waiter>,
    ) -> Result<Locked> {
        let open = self.handles.get(cx.session, ino, handle)?;
        let request = checked(cx, request)?;
        if !request.flock {
            let access = open.flags & OFlags::ACCMODE;
            if (request.kind == LockKind::Read && access == OFlags::WRONLY)
                || (request.kind == LockKind::Write && access == OFlags::RDONLY)
                || open.node.is_dir()
            {
                return Err(Errno::BADF);
            }
        }
        open.locked.store(true, Ordering::Release);
        let locked = self.locks.set((ino, handle), &request, wait);
        // The handle may have been released between finding it and locking.
        if self.handles.get(cx.session, ino, handle).is_err() {
            self.locks.drop_handle(ino, handle);
        }
        locked
    }

    pub(crate) fn get_lock_(
        &self,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        request: &Lock,
    ) -> Result<Option<Lock>> {
        let open = self.handles.get(cx.session, ino, handle)?;
        let request = checked(cx, request)?;
        if request.flock || request.kind == LockKind::Unlock || open.node.is_dir() {
            return Err(Errno::INVAL);
        }
        Ok(self.locks.get(ino, &request))
    }
}
