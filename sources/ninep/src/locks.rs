//! POSIX locks. The server owns them and implements waiting. This module records the locks to set again after a lost
//! connection, when the server has released them.

mod own_locks;

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{
    Caller, Change, Errno, Handle, Ino, Lock, LockKind, LockOutcome, LockOwner, RandomKey, Result, SessionId, Waiter,
};
use ferry_wire::ninep::{LockRequest, LockStatus, Reply, Request};

use crate::client::Shared;
use crate::connection::{Connection, Outcome, Outgoing, ParkedRequest, RequestEnd, RequestError, Wake};
use crate::inode::Inode;
use crate::open_fids::OpenFile;
use crate::options::Cache;
use crate::session::Session;
pub(crate) use own_locks::OwnLocks;
use own_locks::parts_of;

/// The retry interval for servers that do not let requests wait; Linux's client uses 30 s.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// The maximum number of owners per handle, which are processes that share it.
const HANDLE_OWNERS_MAX: usize = 65_536;
/// The maximum number of waiting requests: each has a waiting thread in a client's kernel.
const WAITS_MAX: usize = 16_384;

/// A request that waits for a lock.
#[derive(Debug)]
struct Wait {
    opened: Arc<OpenFile>,
    handle: Handle,
    lock: Lock,
    state: Mutex<WaitState>,
}

#[derive(Debug)]
struct WaitState {
    /// `None` once the handle was released, or it was woken.
    waiter: Option<Waiter>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The server has the request.
    Sent(Arc<Connection>, ParkedRequest),
    /// The server was told to cancel it.
    GivenUp,
    /// It is to be sent again at this time.
    Again(Instant),
    /// It has ended.
    Over,
}

impl WaitState {
    fn is_wanted(&self) -> bool {
        self.waiter.as_ref().is_some_and(Waiter::is_waiting)
    }
}

/// The waiting requests, and the names of owners.
#[derive(Debug, Default)]
pub(crate) struct ParkedLocks {
    waits: Mutex<Vec<Arc<Wait>>>,
    /// The number of ranges in all files.
    ranges: Arc<AtomicUsize>,
    /// Makes names of owners unique to this client.
    names: RandomKey,
}

impl ParkedLocks {
    /// Has a waiter wait for what a cancelled request for the same lock waits for: a call that a signal interrupted is often made
    /// again, and the server has that request still. Returns the waiter if there is none.
    fn take_over(&self, inode: &Arc<Inode>, handle: Handle, wanted: &Lock, waiter: Waiter) -> Option<Waiter> {
        let waits: Vec<Arc<Wait>> = lock(&self.waits).clone();
        let is_same =
            |wait: &&Arc<Wait>| Arc::ptr_eq(&wait.opened.inode, inode) && wait.handle == handle && wait.lock == *wanted;
        for wait in waits.iter().filter(is_same) {
            let mut state = lock(&wait.state);
            if matches!(state.stage, Stage::Over) || state.waiter.as_ref().is_none_or(Waiter::is_waiting) {
                continue;
            }
            let cancelled = state.waiter.replace(waiter);
            drop(state);
            cancelled.into_iter().for_each(|waiter| waiter.wake(Err(Errno::INTR)));
            return None;
        }
        Some(waiter)
    }

    /// Returns whether no request waits.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.waits).is_empty()
    }

    fn released(&self, handle: Handle) {
        for wait in lock(&self.waits).iter().filter(|wait| wait.handle == handle) {
            drop(lock(&wait.state).waiter.take());
        }
    }

    fn remove(&self, wait: &Arc<Wait>) {
        lock(&self.waits).retain(|other| !Arc::ptr_eq(other, wait));
    }

    /// Returns the client's name in a lock of an owner.
    fn name(&self, owner: LockOwner, by_node: bool) -> String {
        match by_node {
            true => rustix::system::uname().nodename().to_string_lossy().into_owned(),
            false => format!("{}{:016x}", self.prefix(), self.names.hash_one(owner)),
        }
    }

    /// Returns a process id that stands for an owner.
    fn pid(&self, owner: LockOwner) -> u32 {
        u32::try_from(self.names.hash_one(owner) >> 32).unwrap_or(0)
    }

    fn prefix(&self) -> String {
        format!("ferry-{:016x}-", self.names.hash_one(0))
    }
}

impl Inode {
    /// Syncs and forgets kept data before a lock is released: others must see earlier writes, and a rewrite after a
    /// server restart must not undo theirs.
    fn release_synced(&self) {
        if let Some(file) = self.cached() {
            file.write_out();
            file.release_synced();
        }
    }
}

impl Shared {
    /// A new holder of a lock must see what others wrote under it. So this client's cache is invalidated, as are the
    /// kernels of its clients, which query the file's length and time before further reads.
    fn forget_clean(&self, inode: &Inode) {
        let Some(file) = inode.cached() else { return };
        inode.release_synced();
        file.invalidate(0..u64::MAX);
        if self.link.options.cache == Cache::Auto {
            let ino = inode.ino;
            self.changes.publish(SessionId::default(), || Change::Attr { ino });
            // In case the server's clock is too coarse to show the change.
            self.changes.publish(SessionId::default(), || Change::Data { ino, offset: 0, len: u64::MAX });
        }
    }

    /// Passes a request for a lock to `act`. The server distinguishes owners by the client's name, or by the process ids if that is
    /// the node's.
    fn with_lock_request<T>(
        &self,
        (inode, wanted): (&Inode, &Lock),
        by_node: bool,
        act: impl FnOnce(LockRequest<'_>) -> T,
    ) -> T {
        let Lock { kind, owner, start, end, .. } = *wanted;
        let pid = if by_node { self.parked.pid(owner) } else { lock(&inode.locks).pid(wanted) };
        let client = self.parked.name(owner, by_node);
        act(LockRequest { kind, start, end, pid, client: client.as_bytes() })
    }

    /// Sets or releases a lock without waiting. Until the server has granted one, it may refuse the owner's name.
    fn lock_now(&self, session: &Arc<Session>, inode: &Inode, wanted: &Lock, reclaim: bool) -> Outcome<()> {
        let by_node = session.locks_by_node.load(Ordering::Relaxed);
        let outcome = self.request_lock(session, (inode, wanted), by_node, reclaim);
        let is_refused = outcome == Err(RequestError::Errno(Errno::INVAL)) && !reclaim && !by_node;
        // Another thread's lock may have been granted by the node's name meanwhile.
        let may_be_name =
            || !session.has_locked.load(Ordering::Acquire) || session.locks_by_node.load(Ordering::Relaxed);
        match is_refused && may_be_name() {
            true => self.request_lock(session, (inode, wanted), true, reclaim),
            false => outcome,
        }
    }

    /// Requests a lock or its release, by the node's name or the owner's.
    fn request_lock(
        &self,
        session: &Arc<Session>,
        (inode, wanted): (&Inode, &Lock),
        by_node: bool,
        reclaim: bool,
    ) -> Outcome<()> {
        let fid = match wanted.kind {
            LockKind::Unlock => inode.open_fid(self, session)?,
            _ => inode.locking(self, session)?,
        };
        let status = self.with_lock_request((inode, wanted), by_node, |lock| {
            let request = Request::Lock { fid: fid.fid(), lock, wait: false, reclaim };
            session.ask(&request, |reply| if let Reply::Lock(status) = reply { Some(status) } else { None })
        })?;
        if by_node {
            // The server takes this name, as opposed to the other one.
            session.locks_by_node.store(true, Ordering::Relaxed);
        }
        match status {
            LockStatus::Success => {
                session.has_locked.store(true, Ordering::Release);
                lock(&inode.locks).set(wanted, &self.parked.ranges);
                Ok(())
            }
            LockStatus::Blocked | LockStatus::Grace => Err(RequestError::Errno(Errno::AGAIN)),
            LockStatus::Error => Err(RequestError::Errno(Errno::NOLCK)),
        }
    }

    /// Records that an owner locks by a handle, within the limits.
    fn may_lock(&self, opened: &OpenFile, wanted: &Lock) -> bool {
        let mut owners = lock(&opened.owners);
        let has_room = owners.len() < HANDLE_OWNERS_MAX || owners.contains(&wanted.owner);
        let may = has_room && lock(&opened.inode.locks).has_room(wanted.owner, &self.parked.ranges);
        if may {
            owners.insert(wanted.owner);
        }
        may
    }

    pub(crate) fn set_lock(
        self: &Arc<Self>,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        wanted: &Lock,
        wait: Option<Waiter>,
    ) -> Result<LockOutcome> {
        let dismiss = |wait: Option<Waiter>| wait.into_iter().for_each(Waiter::dismiss);
        let opened = match self.files.get(cx.session, ino, handle) {
            Ok(opened) if !wanted.flock => opened,
            refused => {
                dismiss(wait);
                return Err(refused.err().unwrap_or(Errno::NOSYS));
            }
        };
        if wanted.kind != LockKind::Unlock && !self.may_lock(&opened, wanted) {
            dismiss(wait);
            return Err(Errno::NOLCK);
        }
        if wanted.kind == LockKind::Unlock {
            opened.inode.release_synced();
        }
        let wait = match wait {
            Some(waiter) => match self.parked.take_over(&opened.inode, handle, wanted, waiter) {
                None => return Ok(LockOutcome::Waiting),
                waiter => waiter,
            },
            None => None,
        };
        let outcome = self.link.with_retry(|session| self.lock_now(session, &opened.inode, wanted, false));
        if outcome.is_ok() && wanted.kind != LockKind::Unlock {
            self.forget_clean(&opened.inode);
            if self.files.get(cx.session, ino, handle).is_err() {
                // The process was killed while the server was silent, and its file is closed.
                dismiss(wait);
                let unlock = Lock { kind: LockKind::Unlock, ..*wanted };
                self.unlock(&opened.inode, &unlock)?;
                opened.inode.close_unused();
                return Err(Errno::INTR);
            }
        }
        match (outcome, wait) {
            (Err(Errno::AGAIN), Some(waiter)) if lock(&self.parked.waits).len() >= WAITS_MAX => {
                waiter.dismiss();
                Err(Errno::NOLCK)
            }
            (Err(Errno::AGAIN), Some(waiter)) => {
                let state = Mutex::new(WaitState { waiter: Some(waiter), stage: Stage::Again(Instant::now()) });
                let wait = Arc::new(Wait { opened, handle, lock: *wanted, state });
                lock(&self.parked.waits).push(Arc::clone(&wait));
                self.send_wait(&wait);
                // The keeper checks more often now.
                self.link.wake_keeper();
                Ok(LockOutcome::Waiting)
            }
            (outcome, wait) => {
                dismiss(wait);
                outcome.map(|()| LockOutcome::Done)
            }
        }
    }

    /// Sends a request that waits for a lock at the server.
    fn send_wait(self: &Arc<Self>, wait: &Arc<Wait>) {
        let session = self.link.current();
        let inode = &wait.opened.inode;
        let fid = match inode.locking(self, &session) {
            Ok(fid) => fid,
            Err(RequestError::Lost { .. }) => {
                lock(&wait.state).stage = Stage::Again(Instant::now());
                return;
            }
            Err(RequestError::Errno(errno)) => return self.end_wait(wait, Err(errno)),
        };
        let request =
            self.with_lock_request((inode, &wait.lock), session.locks_by_node.load(Ordering::Relaxed), |lock| {
                Outgoing::new(&Request::Lock { fid: fid.fid(), lock, wait: true, reclaim: false })
            });
        let (shared, other, connection) = (Arc::downgrade(self), Arc::clone(wait), Arc::clone(&session.connection));
        let wake = Wake::call(move |answer| {
            if let Some(shared) = Weak::upgrade(&shared) {
                shared.wait_answered(&other, &connection, answer);
            }
        });
        // Held until the tag is recorded, because the reply may arrive before.
        let mut state = lock(&wait.state);
        match session.park(request, wake) {
            Ok(Some(parked)) => state.stage = Stage::Sent(Arc::clone(&session.connection), parked),
            Ok(None) => state.stage = Stage::Again(Instant::now()),
            Err(errno) => {
                drop(state);
                self.end_wait(wait, Err(errno));
            }
        }
    }

    /// Called with the reply on the connection's reader thread, so it must not send requests.
    fn wait_answered(self: &Arc<Self>, wait: &Arc<Wait>, connection: &Connection, answer: RequestEnd) {
        let outcome = match answer {
            RequestEnd::Lost { .. } => Err(RequestError::Lost { harmless: true }),
            // Somebody may wait for it again; otherwise the keeper ends it.
            RequestEnd::Message(message) if message.is_flushed => Err(RequestError::Lost { harmless: true }),
            RequestEnd::Message(message) => {
                connection.take(&message, |reply| if let Reply::Lock(status) = reply { Some(status) } else { None })
            }
        };
        let (shared, wait, refused) = (Arc::clone(self), Arc::clone(wait), Arc::clone(wait));
        // A woken caller may unlock, which sends a request.
        let told = std::thread::Builder::new().name("9p-lock".into()).spawn(move || match outcome {
            Ok(LockStatus::Success) => shared.end_wait(&wait, Ok(())),
            Ok(LockStatus::Blocked | LockStatus::Grace) => {
                lock(&wait.state).stage = Stage::Again(Instant::now() + ASK_AGAIN);
            }
            Ok(LockStatus::Error) => shared.end_wait(&wait, Err(Errno::NOLCK)),
            Err(RequestError::Errno(errno)) => shared.end_wait(&wait, Err(errno)),
            Err(RequestError::Lost { .. }) => {
                lock(&wait.state).stage = Stage::Again(Instant::now());
                shared.link.wake_keeper();
            }
        });
        if let Err(error) = told {
            tracing::error!("cannot complete a lock request, because no thread can be started: {error}");
            // The same owner is granted it once more.
            lock(&refused.state).stage = Stage::Again(Instant::now() + ASK_AGAIN);
        }
    }

    /// Ends a wait. A lock that was granted after its request was cancelled is released.
    fn end_wait(&self, wait: &Arc<Wait>, outcome: Result<()>) {
        self.parked.remove(wait);
        let waiter = {
            let mut state = lock(&wait.state);
            state.stage = Stage::Over;
            state.waiter.take()
        };
        let inode = &wait.opened.inode;
        match (waiter, outcome) {
            // From here on it cannot be cancelled.
            (Some(waiter), Ok(())) if waiter.claim() => {
                lock(&inode.locks).set(&wait.lock, &self.parked.ranges);
                self.forget_clean(inode);
                waiter.wake(Ok(()));
            }
            (waiter, Ok(())) => {
                waiter.into_iter().for_each(|waiter| waiter.wake(Err(Errno::INTR)));
                if let Err(errno) = self.give_back(inode, &wait.lock) {
                    tracing::debug!("cannot release an unneeded lock: {errno}");
                }
            }
            (Some(waiter), Err(errno)) => waiter.wake(Err(errno)),
            (None, Err(_)) => {}
        }
    }

    /// Releases a granted lock that is no longer wanted. Ranges that its owner held before get their previous type again.
    fn give_back(&self, inode: &Inode, granted: &Lock) -> Result<()> {
        let held = lock(&inode.locks).within(granted);
        for part in parts_of(granted, &held) {
            match part.kind {
                LockKind::Unlock => self.unlock(inode, &part)?,
                _ => self.link.with_retry(|session| self.lock_now(session, inode, &part, false))?,
            }
        }
        Ok(())
    }

    /// Checks the waiting requests; called by the keeper.
    pub(crate) fn check_blocked_locks(self: &Arc<Self>) {
        let waits: Vec<Arc<Wait>> = lock(&self.parked.waits).clone();
        for wait in waits {
            let mut state = lock(&wait.state);
            let is_wanted = state.is_wanted();
            match &state.stage {
                Stage::Sent(connection, request) if !is_wanted => {
                    connection.give_up(*request);
                    state.stage = Stage::GivenUp;
                }
                Stage::Again(_) if !is_wanted => {
                    // From here on it cannot be taken over.
                    state.stage = Stage::Over;
                    drop(state);
                    self.end_wait(&wait, Err(Errno::INTR));
                }
                Stage::Again(then) if *then <= Instant::now() => {
                    drop(state);
                    self.send_wait(&wait);
                }
                _ => {}
            }
        }
    }

    /// Returns a conflicting lock. For an unlock: the first lock of the same owner.
    pub(crate) fn get_lock(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, wanted: &Lock) -> Result<Option<Lock>> {
        let opened = self.files.get(cx.session, ino, handle)?;
        if wanted.flock {
            return Err(Errno::NOSYS);
        }
        if wanted.kind == LockKind::Unlock {
            // Servers take it for the test of a write lock, because Linux's client sends it for every test.
            return Ok(lock(&opened.inode.locks).first_of_owner(wanted));
        }
        let prefix = self.parked.prefix();
        self.link.with_retry(|session| {
            if session.locks_by_node.load(Ordering::Relaxed) {
                // ganesha replies with the request, as if that conflicted.
                return Ok(None);
            }
            let fid = opened.inode.open_fid(self, session)?;
            let ask = |lock: LockRequest<'_>| {
                session.ask(&Request::Getlock { fid: fid.fid(), lock }, |reply| match reply {
                    Reply::Getlock(LockRequest { kind: LockKind::Unlock, .. }) => Some(None),
                    Reply::Getlock(LockRequest { kind, start, end, pid, client }) => {
                        // Process ids of other machines mean nothing here.
                        let pid = if client.starts_with(prefix.as_bytes()) { pid } else { 0 };
                        let owner = LockOwner { session: ferry_vfs::SessionId::default(), id: 0 };
                        Some(Some(Lock { kind, owner, start, end, pid, flock: false }))
                    }
                    _ => None,
                })
            };
            self.with_lock_request((&opened.inode, wanted), false, ask)
        })
    }

    /// Releases all locks of an owner on a file.
    pub(crate) fn drop_owner(&self, inode: &Inode, owner: LockOwner) -> Result<()> {
        if !lock(&inode.locks).has(owner) {
            return Ok(());
        }
        inode.release_synced();
        let end = i64::MAX.unsigned_abs();
        let unlock = Lock { kind: LockKind::Unlock, owner, start: 0, end, pid: 0, flock: false };
        self.unlock(inode, &unlock)
    }

    /// Releases a lock. If the server does not answer, it is not taken again on the next connection.
    fn unlock(&self, inode: &Inode, unlock: &Lock) -> Result<()> {
        let given = self.link.with_retry(|session| self.lock_now(session, inode, unlock, false));
        given.inspect_err(|_| lock(&inode.locks).set(unlock, &self.parked.ranges))
    }

    /// Releases a handle's locks, and ends its waits.
    pub(crate) fn release_locks(&self, opened: &OpenFile, handle: Handle) {
        self.parked.released(handle);
        let owners = std::mem::take(&mut *lock(&opened.owners));
        for owner in owners {
            if let Err(errno) = self.drop_owner(&opened.inode, owner) {
                tracing::debug!("cannot release a lock of a closed file: {errno}");
            }
        }
    }

    /// Sets the locks of an earlier connection again. If one is not granted, users of the file get `EIO` from now on,
    /// because others may have changed it.
    pub(crate) fn reacquire_locks(&self, session: &Arc<Session>) {
        for inode in self.inodes.all() {
            let locks = lock(&inode.locks).all();
            // Who did not wait so long has given it up.
            let wanted = locks.iter().filter(|wanted| lock(&inode.locks).has(wanted.owner));
            let taken = { wanted }.try_for_each(|wanted| match self.lock_now(session, &inode, wanted, true) {
                // diod and QEMU do not know the flag.
                Err(RequestError::Errno(Errno::INVAL)) => self.lock_now(session, &inode, wanted, false),
                other => other,
            });
            match taken {
                Ok(()) | Err(RequestError::Lost { .. }) => {}
                Err(RequestError::Errno(errno)) => {
                    tracing::error!("a lock was lost together with the connection to the 9P server: {errno}");
                    *lock(&inode.locks) = OwnLocks::default();
                    lock(&inode.io).lost_locks = true;
                }
            }
        }
    }
}
