//! POSIX and flock locks that the host's processes see and respect.
//!
//! A POSIX lock is an open-file-description lock on a descriptor that is opened per inode and owner; a flock lock is
//! on the handle's own descriptor. Nothing here waits: a request that must wait is parked with its inode and tried
//! again, first come first served, when a lock of ours on the inode goes, and from time to time for the sake of
//! locks that host processes hold, which nobody tells us about.

mod ranges;
mod waits;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use ferry_vfs::{Caller, Errno, Handle, Ino, Lock, LockKind, LockOwner, Locked, OFlags, Result, SessionId, Waiter};
use rustix::fs::FlockOperation;

use crate::Dir;
use crate::handles::Open;
use crate::sys::{self, RawLock};
use crate::table::{BuildMix, lock};
use ranges::{Range, Ranges};
use waits::Waits;

/// So many that lock requests for different inodes seldom meet; a power of two.
const SHARDS: usize = 16;
/// Requests that wait at one time. A client's kernel has a thread waiting for each, so it will not need more.
const WAITERS_MAX: usize = 65_536;
/// Ranges that one owner may lock in one file: each takes memory here and in the kernel.
const RANGES_MAX: usize = 65_536;
/// The end of the file, wherever that is.
const END: u64 = i64::MAX as u64;
/// How soon and how seldom a lock held by a host process is tried again.
const RETRY_MIN: Duration = Duration::from_millis(10);
const RETRY_MAX: Duration = Duration::from_millis(100);

/// The lock descriptor of an owner and what it has locked.
#[derive(Debug)]
struct Owner {
    file: OwnedFd,
    ranges: Ranges,
    /// The handles through which it locked: when all are gone, so are its locks, even if no flush told so.
    handles: Vec<Handle>,
}

/// A request that waits.
#[derive(Debug)]
struct Parked {
    number: u64,
    open: Arc<Open>,
    handle: Handle,
    lock: Lock,
    waiter: Waiter,
    /// None of our owners is in the way: a host process must be.
    host: bool,
}

#[derive(Debug, Default)]
struct InodeLocks {
    owners: HashMap<LockOwner, Owner>,
    waiters: Vec<Parked>,
}

type Shard = HashMap<Ino, InodeLocks, BuildMix>;
/// Waiters whose fate is known, to be told when no lock is held.
type Outcomes = Vec<(Waiter, Result<()>)>;

#[derive(Debug, Default)]
struct Shared {
    shards: [Mutex<Shard>; SHARDS],
    waits: Mutex<Waits>,
    /// Inodes with anything in a shard: most shares have none, and then nothing is looked up.
    inodes: AtomicUsize,
    waiting: AtomicUsize,
    next: AtomicU64,
}

/// All locks that were taken through a share.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    shared: Arc<Shared>,
    timer: Arc<Timer>,
}

/// The thread that tries again.
#[derive(Debug, Default)]
struct Timer {
    state: Mutex<TimerState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct TimerState {
    running: bool,
    /// A request was parked since the last look.
    fresh: bool,
    ended: bool,
}

impl Drop for Locks {
    fn drop(&mut self) {
        lock(&self.timer.state).ended = true;
        self.timer.changed.notify_all();
    }
}

impl InodeLocks {
    /// The owners whose locks a request would have to wait for.
    fn blockers(&self, lock: &Lock) -> Vec<LockOwner> {
        let others = self.owners.iter().filter(|(owner, _)| **owner != lock.owner);
        let conflicts = others.filter(|(_, other)| other.ranges.conflict(lock.start, lock.end, lock.kind).is_some());
        conflicts.map(|(owner, _)| *owner).collect()
    }

    /// Asks the kernel for a lock, now.
    fn attempt(&mut self, open: &Open, lock: &Lock) -> Result<()> {
        if lock.flock {
            return attempt_flock(open, lock.kind);
        }
        let owner = self.owners.get_mut(&lock.owner).ok_or(Errno::NOLCK)?;
        if owner.ranges.len() >= RANGES_MAX && lock.kind != LockKind::Unlock {
            return Err(Errno::NOLCK);
        }
        sys::ofd_set(owner.file.as_fd(), &raw(lock)).map_err(|error| match error {
            Errno::ACCESS => Errno::AGAIN,
            other => other,
        })?;
        owner.ranges.set(Range { start: lock.start, end: lock.end, kind: lock.kind, pid: lock.pid });
        Ok(())
    }

    /// Tries all that wait, in order, as often as that lets one go on.
    fn settle(&mut self, shared: &Shared, outcomes: &mut Outcomes) {
        self.drop_interrupted(shared);
        loop {
            let mut progress = false;
            for parked in std::mem::take(&mut self.waiters) {
                match self.attempt(&parked.open, &parked.lock) {
                    Err(Errno::AGAIN) => self.waiters.push(parked),
                    outcome => {
                        progress = true;
                        outcomes.push((shared.unpark(parked), outcome));
                    }
                }
            }
            if !progress {
                break;
            }
        }
        // What is in the way may have changed.
        for index in 0..self.waiters.len() {
            let parked = &self.waiters[index];
            let blockers = if parked.lock.flock { Vec::new() } else { self.blockers(&parked.lock) };
            self.waiters[index].host = blockers.is_empty();
            let parked = &self.waiters[index];
            if !parked.lock.flock {
                lock(&shared.waits).set(parked.number, parked.lock.owner, blockers);
            }
        }
    }

    /// Forgets the requests whose clients wait no more: they were answered already.
    fn drop_interrupted(&mut self, shared: &Shared) {
        for parked in self.waiters.extract_if(.., |parked| !parked.waiter.is_waiting()) {
            shared.unpark(parked).dismiss();
        }
    }

    /// Ends an owner's locks, and its descriptor unless it still waits for something.
    fn drop_owner(&mut self, owner: LockOwner) -> bool {
        let Some(state) = self.owners.get_mut(&owner) else { return false };
        let had = !state.ranges.is_empty();
        if had {
            // Closing the descriptor would not do: a process that this one has forked, and that has not reached its
            // exec yet, has a copy.
            let all = RawLock { kind: libc::F_UNLCK, start: 0, len: 0 };
            if let Err(error) = sys::ofd_set(state.file.as_fd(), &all) {
                tracing::warn!(%error, "unlock");
            }
            state.ranges.clear();
        }
        if !self.waiters.iter().any(|parked| !parked.lock.flock && parked.lock.owner == owner) {
            self.owners.remove(&owner);
        }
        had
    }

    fn is_empty(&self) -> bool {
        self.owners.is_empty() && self.waiters.is_empty()
    }
}

/// flock never tells who is in the way, and a failed conversion loses the lock that was held, as it does locally.
fn attempt_flock(open: &Open, kind: LockKind) -> Result<()> {
    let operation = match kind {
        LockKind::Read => FlockOperation::NonBlockingLockShared,
        LockKind::Write => FlockOperation::NonBlockingLockExclusive,
        LockKind::Unlock => FlockOperation::NonBlockingUnlock,
    };
    let result = rustix::fs::flock(open.file.as_fd(), operation);
    open.flocked.store(result.is_ok() && kind != LockKind::Unlock, Ordering::Release);
    result
}

fn raw(lock: &Lock) -> RawLock {
    let kind = match lock.kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
        LockKind::Unlock => libc::F_UNLCK,
    };
    let len = if lock.end >= END { 0 } else { lock.end - lock.start + 1 };
    // Both are at most i64::MAX: `checked` saw to it.
    RawLock { kind, start: lock.start.cast_signed(), len: len.cast_signed() }
}

/// A request with a sound range and the caller's own session.
fn checked(cx: &Caller<'_>, lock: &Lock) -> Result<Lock> {
    let end = lock.end.min(END);
    if lock.start > end && !lock.flock {
        return Err(Errno::INVAL);
    }
    Ok(Lock { owner: LockOwner { session: cx.session, id: lock.owner.id }, end, ..*lock })
}

impl Shared {
    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below SHARDS")]
    fn shard(&self, ino: Ino) -> &Mutex<Shard> {
        &self.shards[(ino.0 % SHARDS as u64) as usize]
    }

    /// Runs `f` on the locks of an inode, and tells those whose wait that ended.
    fn with<T>(&self, ino: Ino, f: impl FnOnce(&mut InodeLocks, &mut Outcomes) -> T) -> T {
        let mut outcomes = Vec::new();
        let mut shard = lock(self.shard(ino));
        let locks = shard.entry(ino).or_insert_with(|| {
            self.inodes.fetch_add(1, Ordering::Release);
            InodeLocks::default()
        });
        let result = f(locks, &mut outcomes);
        if locks.is_empty() {
            shard.remove(&ino);
            self.inodes.fetch_sub(1, Ordering::Release);
        }
        drop(shard);
        tell(outcomes);
        result
    }

    /// As [`Self::with`], for an inode that may have nothing to do with locks.
    fn with_known(&self, ino: Ino, f: impl FnOnce(&mut InodeLocks, &mut Outcomes)) {
        if self.inodes.load(Ordering::Acquire) > 0 && lock(self.shard(ino)).contains_key(&ino) {
            self.with(ino, f);
        }
    }

    /// A parked request is parked no more.
    fn unpark(&self, parked: Parked) -> Waiter {
        lock(&self.waits).remove(parked.number);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        parked.waiter
    }

    /// Tries again whatever a host process may have been in the way of; answers whether anything waits.
    fn retry(&self) -> bool {
        for shard in &self.shards {
            let mut outcomes = Vec::new();
            for locks in lock(shard).values_mut() {
                if locks.waiters.iter().any(|parked| parked.host) {
                    locks.settle(self, &mut outcomes);
                }
            }
            tell(outcomes);
        }
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

fn tell(outcomes: Outcomes) {
    for (waiter, outcome) in outcomes {
        waiter.wake(outcome);
    }
}

impl Locks {
    /// Starts the thread that tries again, or lets it know.
    fn watch(&self) {
        let mut state = lock(&self.timer.state);
        state.fresh = true;
        if state.running {
            self.timer.changed.notify_all();
            return;
        }
        let (shared, timer) = (Arc::downgrade(&self.shared), Arc::clone(&self.timer));
        let spawned = std::thread::Builder::new().name("ferry-locks".into()).spawn(move || timer.run(&shared));
        match spawned {
            Ok(_) => state.running = true,
            Err(error) => tracing::warn!(%error, "locks held by host processes are not watched"),
        }
    }

    /// An owner closed a descriptor of the file: it has no POSIX locks on it any more.
    pub(crate) fn drop_owner(&self, open: &Open, owner: u64) {
        let owner = LockOwner { session: open.session, id: owner };
        self.shared.with_known(open.inode.ino, |locks, outcomes| {
            if locks.drop_owner(owner) {
                locks.settle(&self.shared, outcomes);
            }
        });
    }

    /// A handle ends: its flock, what waits through it, and the locks of owners that have no other.
    pub(crate) fn drop_handle(&self, open: &Open, handle: Handle) {
        let flocked = open.flocked.load(Ordering::Acquire);
        if flocked && let Err(error) = attempt_flock(open, LockKind::Unlock) {
            tracing::warn!(%error, "flock");
        }
        let mut ended = Vec::new();
        self.shared.with_known(open.inode.ino, |locks, outcomes| {
            for parked in std::mem::take(&mut locks.waiters) {
                if parked.handle == handle {
                    ended.push(self.shared.unpark(parked));
                } else {
                    locks.waiters.push(parked);
                }
            }
            let mut orphans = Vec::new();
            for (owner, state) in &mut locks.owners {
                state.handles.retain(|known| *known != handle);
                if state.handles.is_empty() {
                    orphans.push(*owner);
                }
            }
            let mut changed = flocked;
            for owner in orphans {
                changed |= locks.drop_owner(owner);
            }
            if changed || !ended.is_empty() {
                locks.settle(&self.shared, outcomes);
            }
        });
        // Those that waited end with INTR.
        drop(ended);
    }
}

impl Timer {
    fn run(&self, shared: &Weak<Shared>) {
        let mut pause = RETRY_MIN;
        loop {
            let state = lock(&self.state);
            let (mut state, _) = self
                .changed
                .wait_timeout_while(state, pause, |state| !state.ended)
                .unwrap_or_else(PoisonError::into_inner);
            if state.ended {
                return;
            }
            pause = if std::mem::take(&mut state.fresh) { RETRY_MIN } else { (pause * 3 / 2).min(RETRY_MAX) };
            drop(state);
            let waits = shared.upgrade().is_some_and(|shared| shared.retry());
            let mut state = lock(&self.state);
            if !waits && !state.fresh {
                state.running = false;
                return;
            }
        }
    }
}

impl Dir {
    /// The descriptor that carries an owner's POSIX locks on a file.
    fn open_lock_file(&self, open: &Open) -> Result<OwnedFd> {
        let read = |errno| match errno {
            // Read locks are still possible.
            Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::TXTBSY => self.open_data(&open.inode, OFlags::RDONLY),
            other => Err(other),
        };
        let opened = if self.options.read_only {
            self.open_data(&open.inode, OFlags::RDONLY)
        } else {
            self.open_data(&open.inode, OFlags::RDWR).or_else(read)
        };
        match opened {
            Err(Errno::ACCESS) => self.open_data(&open.inode, OFlags::WRONLY),
            Err(Errno::MFILE | Errno::NFILE) => Err(Errno::NOLCK),
            other => other,
        }
    }

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
            let access = open.flags() & OFlags::ACCMODE;
            if (request.kind == LockKind::Read && access == OFlags::WRONLY)
                || (request.kind == LockKind::Write && access == OFlags::RDONLY)
                || open.stream.is_some()
            {
                return Err(Errno::BADF);
            }
        }
        let shared = &self.locks.shared;
        let locked = shared.with(ino, |locks, outcomes| {
            if !request.flock {
                match locks.owners.get_mut(&request.owner) {
                    Some(owner) if !owner.handles.contains(&handle) => owner.handles.push(handle),
                    Some(_) => {}
                    None if request.kind == LockKind::Unlock => return Ok(Locked::Done),
                    None => {
                        let file = self.open_lock_file(&open)?;
                        let owner = Owner { file, ranges: Ranges::default(), handles: vec![handle] };
                        locks.owners.insert(request.owner, owner);
                    }
                }
            }
            let flocked = open.flocked.load(Ordering::Acquire);
            match locks.attempt(&open, &request) {
                Ok(()) => {
                    // Unlocked or downgraded, perhaps; or now in the way of those that wait.
                    if !locks.waiters.is_empty() {
                        locks.settle(shared, outcomes);
                    }
                    return Ok(Locked::Done);
                }
                Err(Errno::AGAIN) => {}
                // The lock descriptor could only be opened for reading.
                Err(Errno::BADF) => return Err(Errno::NOLCK),
                Err(error) => return Err(error),
            }
            if flocked && request.flock {
                // What it held is lost.
                locks.settle(shared, outcomes);
            }
            let Some(waiter) = wait.take() else { return Err(Errno::AGAIN) };
            locks.drop_interrupted(shared);
            let blockers = if request.flock { Vec::new() } else { locks.blockers(&request) };
            let number = shared.next.fetch_add(1, Ordering::Relaxed);
            if !request.flock {
                let mut waits = lock(&shared.waits);
                let refused = if waits.closes_a_ring(request.owner, &blockers) {
                    Some(Errno::DEADLK)
                } else {
                    (shared.waiting.load(Ordering::Relaxed) >= WAITERS_MAX).then_some(Errno::NOLCK)
                };
                if let Some(error) = refused {
                    *wait = Some(waiter);
                    return Err(error);
                }
                waits.set(number, request.owner, blockers.clone());
            }
            shared.waiting.fetch_add(1, Ordering::Relaxed);
            let host = blockers.is_empty();
            locks.waiters.push(Parked { number, open: Arc::clone(&open), handle, lock: request, waiter, host });
            Ok(Locked::Waiting)
        });
        if matches!(locked, Ok(Locked::Waiting)) {
            self.locks.watch();
            // The handle may have been released between finding it and parking.
            if self.handles.get(cx.session, ino, handle).is_err() {
                self.locks.drop_handle(&open, handle);
            }
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
        if request.flock || request.kind == LockKind::Unlock || open.stream.is_some() {
            return Err(Errno::INVAL);
        }
        self.locks.shared.with(ino, |locks, _| {
            for (owner, state) in locks.owners.iter().filter(|(owner, _)| **owner != request.owner) {
                if let Some(range) = state.ranges.conflict(request.start, request.end, request.kind) {
                    let Range { start, end, kind, pid } = *range;
                    return Ok(Some(Lock { kind, owner: *owner, start, end, pid, flock: false }));
                }
            }
            // Its own locks are no conflict only if the kernel is asked through the descriptor that has them.
            let own = locks.owners.get(&request.owner).map(|owner| owner.file.as_fd());
            let found = sys::ofd_get(own.unwrap_or(open.file.as_fd()), &raw(&request))?;
            Ok(found.map(|found| {
                let start = found.start.cast_unsigned();
                let end = if found.len == 0 { END } else { start.saturating_add(found.len.cast_unsigned()) - 1 };
                let kind = if found.kind == libc::F_RDLCK { LockKind::Read } else { LockKind::Write };
                // A process of the host: it has no number that the client could know.
                let owner = LockOwner { session: SessionId::default(), id: 0 };
                Lock { kind, owner, start, end, pid: 0, flock: false }
            }))
        })
    }
}
