//! GETLK, SETLK and SETLKW.

use std::sync::Arc;

use ferry_engine::ReplyBuffer;
use ferry_vfs::{Caller, Errno, Lock, LockKind, LockOutcome, Result, checks};
use ferry_wire::fuse::{LockRequest, Reply};

use crate::active_request::DetachedRequest;
use crate::carrier::{FuseCarrier, ServeOutcome};
use crate::reply;
use crate::server::{Context, Server};

impl Server {
    pub(crate) fn getlk(
        &self,
        cx: &Context<'_>,
        request: &LockRequest,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let lock = request.lock(cx.caller.session);
        let found = checks::lock(self.share.source.get_lock(&cx.caller, cx.ino, request.handle, &lock)?)?;
        Ok(cx.done(buffer, &Reply::Lock(found)))
    }

    pub(crate) fn setlk(
        &mut self,
        cx: &Context<'_>,
        request: &LockRequest,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        let lock = request.lock(cx.caller.session);
        let outcome = self.share.source.set_lock(&cx.caller, cx.ino, request.handle, &lock, None)?;
        if outcome != LockOutcome::Done {
            // Without a waiter the source must not let the request wait.
            return Err(Errno::IO);
        }
        cx.session.locked(cx.ino, request);
        Ok(self.granted(cx, request.kind, carrier))
    }

    pub(crate) fn setlkw(
        &mut self,
        cx: &Context<'_>,
        request: &LockRequest,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        if !carrier.may_park() {
            let outcome = self.setlk(cx, request, carrier);
            return outcome.map_err(|errno| if errno == Errno::AGAIN { Errno::NOLCK } else { errno });
        }
        let source = &self.share.source;
        let (lock, unique, negotiated) = (request.lock(cx.caller.session), cx.unique, *cx.session.negotiated());
        let (later, active) = (carrier.later(), DetachedRequest::new(self.active.take(), &self.share.metrics));
        let changes = source.changes().cloned();
        let (session, granted, on) = (Arc::downgrade(cx.session), *request, cx.ino);
        let reply = move |outcome: Result<()>| {
            if let (Ok(()), Some(session)) = (outcome, session.upgrade()) {
                session.locked(on, &granted);
            }
            let send = move || {
                later(reply::to_bytes(unique, &negotiated, outcome.map(|()| Reply::Empty)));
                active.end(outcome.map(|()| 0));
            };
            match changes {
                Some(changes) if outcome.is_ok() => changes.when_delivered(send),
                _ => send(),
            }
        };
        let (share, ino, handle) = (Arc::clone(&self.share), cx.ino, request.handle);
        let Caller { session: by, uid, gid, pid, .. } = cx.caller;
        let release_lock = move || {
            // The granting thread may hold locks of the source, so another thread unlocks.
            let source = Arc::clone(&share.source);
            share.blocking_pool.run(move || {
                let caller = Caller { session: by, uid, gid, pid, groups: &[] };
                let unlock = Lock { kind: LockKind::Unlock, ..lock };
                if let Err(error) = source.set_lock(&caller, ino, handle, &unlock, None) {
                    tracing::debug!(%error, "cannot release the lock of a cancelled request");
                }
            });
        };
        let (waiter, wait) = cx.session.blocked_locks.waiter(unique, reply, release_lock);
        match source.set_lock(&cx.caller, ino, handle, &lock, Some(waiter)) {
            Ok(LockOutcome::Waiting) => {
                cx.session.blocked_locks.park(unique, wait);
                Ok(ServeOutcome::Parked)
            }
            Ok(LockOutcome::Done) => {
                cx.session.locked(ino, request);
                Ok(self.granted(cx, lock.kind, carrier))
            }
            Err(errno) => Err(errno),
        }
    }

    /// Replies to a lock request, after clients have been notified of writes that others made before it.
    fn granted(&mut self, cx: &Context<'_>, kind: LockKind, carrier: &mut impl FuseCarrier) -> ServeOutcome {
        match self.share.source.changes() {
            Some(changes) if kind != LockKind::Unlock && changes.is_behind() => {
                let (later, request) = (carrier.later(), DetachedRequest::new(self.active.take(), &self.share.metrics));
                let reply = reply::to_bytes(cx.unique, cx.session.negotiated(), Ok(Reply::Empty));
                changes.when_delivered(move || {
                    later(reply);
                    request.end(Ok(0));
                });
                ServeOutcome::Later
            }
            _ => cx.done(carrier, &Reply::Empty),
        }
    }
}
