//! POSIX and flock locks.

mod ranges;
#[cfg(test)]
mod tests;
mod waits;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::ranges::{Range, Ranges, exclude};
use self::waits::Waits;
use crate::{
    Caller, Errno, Handle, Handles, Ino, Lock, LockKind, LockOwner, Locked, OFlags, Result, SessionId, Waiter,
};

/// So many that lock requests for different inodes seldom meet; a power of two.
const SHARDS: usize = 16;
/// Requests that wait at one time. A client's kernel has a thread waiting for each, so it will not need more.
const WAITERS_MAX: usize = 65_536;
/// Ranges that one owner may lock in one file: each takes memory, here and in whoever must agree.
const RANGES_MAX: usize = 65_536;
/// Owners that one session may have, counted once for each file: each may take a descriptor of the host's. Databases lock
/// every file that they have open, and have tens of thousands.
const OWNERS_MAX: usize = 65_536;
/// Ranges that one session may have locked in all.
const SESSION_RANGES_MAX: usize = 1 << 20;
/// The end of the file, wherever that is.
const END: u64 = i64::MAX as u64;

/// What [`Locks`] wants to know of an open file, and who must agree to its locks.
///
/// The last three are for files that somebody locks who does not ask this source: for a host's file, the host's kernel.
/// They are called under a lock of the table, and only for what the table has nothing against; they never wait. Where
/// nobody else locks the files, they need not be written, and [`Self::Owner`] is `()`.
#[allow(unused_variables, reason = "the defaults need none of their arguments")]
pub trait Lockable: fmt::Debug {
    /// What the POSIX locks of one owner on one inode hang on, such as a descriptor.
    type Owner: fmt::Debug;

    /// The flags that the file was opened with.
    fn flags(&self) -> OFlags;

    /// Whether it is a directory, which has no POSIX locks.
    fn is_dir(&self) -> bool;

    /// Takes, changes or gives up an owner's POSIX lock; `AGAIN` where somebody else's is in the way.
    fn set_posix(owner: &Self::Owner, lock: &Lock) -> Result<()> {
        Ok(())
    }

    /// Takes, changes or gives up the open file's flock lock; `AGAIN` where somebody else's is in the way: then it has
    /// none any more.
    fn set_flock(&self, kind: LockKind) -> Result<()> {
        Ok(())
    }

    /// A POSIX lock of somebody else that is in the way of a request; `owner` is that of the request, if it is known.
    fn get_posix(&self, owner: Option<&Self::Owner>, lock: &Lock) -> Result<Option<Lock>> {
        Ok(None)
    }
}

/// What an owner has locked in one file.
#[derive(Debug)]
struct Owner<O> {
    own: O,
    ranges: Ranges,
    /// The handles through which it locked: when all are gone, so are its locks, even if no flush told so.
    handles: Vec<Handle>,
}

/// A request that waits.
#[derive(Debug)]
struct Parked<T> {
    number: u64,
    open: Arc<T>,
    handle: Handle,
    lock: Lock,
    waiter: Waiter,
}

#[derive(Debug)]
struct InodeLocks<T: Lockable> {
    owners: HashMap<LockOwner, Owner<T::Owner>>,
    /// flock locks; their owner is the handle.
    flocks: HashMap<Handle, LockKind>,
    waiters: Vec<Parked<T>>,
    /// Owners that may have nothing any more, and wait for nothing: for [`Self::drop_idle`].
    lapsed: Vec<LockOwner>,
    /// Who unlocked something last. He stays, whatever is left to him, as long as he has the file open: databases lock and
    /// unlock again and again, and what their locks hang on need not be made each time.
    spared: Option<LockOwner>,
}

type Shard<T> = HashMap<Ino, InodeLocks<T>>;
/// Waiters whose fate is known, to be told when no lock is held.
type Outcomes = Vec<(Waiter, Result<()>)>;

/// The POSIX and flock locks of a source: all that [`get_lock`](crate::FileSystem::get_lock) and
/// [`set_lock`](crate::FileSystem::set_lock) take, for open files that are in a table of [`Handles`].
///
/// Nothing here waits. A request that must is parked with its inode and granted, first come first served, when a lock in
/// its way goes. A source calls [`Self::drop_owner`] in `flush` and [`Self::drop_handle`] in `release`.
#[derive(Debug)]
pub struct Locks<T: Lockable> {
    shards: [Mutex<Shard<T>>; SHARDS],
    /// Inodes with anything in a shard: mostly none, and then nothing is looked up.
    inodes: AtomicUsize,
    /// Who waits for whom; locked within a shard. Only POSIX locks: flock locks are not checked on Linux either.
    waits: Mutex<Waits>,
    /// What the sessions have that have any owners; locked within a shard.
    sessions: Mutex<HashMap<SessionId, Counts>>,
    waiting: AtomicUsize,
    next: AtomicU64,
}

/// How much one session has.
#[derive(Debug, Default)]
struct Counts {
    owners: usize,
    /// Locked ranges of all these.
    ranges: usize,
}

/// Locks, also after a panic elsewhere: no critical section here leaves its data half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tell(outcomes: Outcomes) {
    for (waiter, outcome) in outcomes {
        waiter.wake(outcome);
    }
}

/// A request with a sound range and the caller's own session.
fn checked(cx: &Caller<'_>, lock: &Lock) -> Result<Lock> {
    let end = lock.end.min(END);
    if lock.start > end && !lock.flock {
        return Err(Errno::INVAL);
    }
    Ok(Lock { owner: LockOwner { session: cx.session, id: lock.owner.id }, end, ..*lock })
}

/// Whether a file that was opened like this may have such a POSIX lock.
fn permits(open: &impl Lockable, kind: LockKind) -> bool {
    let access = open.flags() & OFlags::ACCMODE;
    !open.is_dir()
        && match kind {
            LockKind::Read => access != OFlags::WRONLY,
            LockKind::Write => access != OFlags::RDONLY,
            LockKind::Unlock => true,
        }
}

impl<T: Lockable> Default for InodeLocks<T> {
    fn default() -> Self {
        Self { owners: HashMap::new(), flocks: HashMap::new(), waiters: Vec::new(), lapsed: Vec::new(), spared: None }
    }
}

impl<T: Lockable> InodeLocks<T> {
    /// The ranges of others that a request for a POSIX lock would have to wait for, one of each owner.
    fn conflicts(&self, lock: &Lock) -> impl Iterator<Item = (LockOwner, &Range)> {
        let others = self.owners.iter().filter(move |(owner, _)| **owner != lock.owner);
        others.filter_map(move |(owner, state)| Some((*owner, state.ranges.conflict(lock.start, lock.end, lock.kind)?)))
    }

    /// The owners whose POSIX locks a request would have to wait for.
    fn blockers(&self, lock: &Lock) -> Vec<LockOwner> {
        if lock.flock { Vec::new() } else { self.conflicts(lock).map(|(owner, _)| owner).collect() }
    }

    /// Whether one of these locks is in the way of a request.
    fn is_taken(&self, handle: Handle, lock: &Lock) -> bool {
        if !lock.flock {
            return self.conflicts(lock).next().is_some();
        }
        self.flocks.iter().any(|(other, kind)| *other != handle && exclude(*kind, lock.kind))
    }

    /// Takes, changes or gives up a lock if nothing is in the way.
    fn attempt(&mut self, all: &Locks<T>, open: &T, handle: Handle, lock: &Lock) -> Result<()> {
        let taken = self.is_taken(handle, lock);
        if lock.flock {
            return self.attempt_flock(open, handle, lock.kind, taken);
        }
        if taken {
            return Err(Errno::AGAIN);
        }
        let owner = self.owners.get_mut(&lock.owner).ok_or(Errno::NOLCK)?;
        // Unlocking the middle of a range makes two of it, so the bound may be passed by as many.
        let before = owner.ranges.len();
        if lock.kind != LockKind::Unlock && (before >= RANGES_MAX || all.is_full(lock.owner.session)) {
            return Err(Errno::NOLCK);
        }
        T::set_posix(&owner.own, lock)?;
        owner.ranges.set(Range { start: lock.start, end: lock.end, kind: lock.kind, pid: lock.pid });
        all.ranges_changed(lock.owner.session, before, owner.ranges.len());
        Ok(())
    }

    /// As on Linux, one that asks for another kind loses what it had even if it must wait then.
    fn attempt_flock(&mut self, open: &T, handle: Handle, kind: LockKind, taken: bool) -> Result<()> {
        if self.flocks.get(&handle).copied().unwrap_or(LockKind::Unlock) == kind {
            return Ok(());
        }
        let had = self.flocks.remove(&handle).is_some();
        if taken {
            if had {
                open.set_flock(LockKind::Unlock)?;
            }
            return Err(Errno::AGAIN);
        }
        open.set_flock(kind)?;
        if kind != LockKind::Unlock {
            self.flocks.insert(handle, kind);
        }
        Ok(())
    }

    /// Tries all that wait, in order, as often as that lets one go on.
    fn settle(&mut self, all: &Locks<T>, outcomes: &mut Outcomes) {
        self.drop_interrupted(all);
        let mut progress = true;
        while std::mem::take(&mut progress) {
            for parked in std::mem::take(&mut self.waiters) {
                let flocks = self.flocks.len();
                match self.attempt(all, &parked.open, parked.handle, &parked.lock) {
                    Err(Errno::AGAIN) => {
                        progress |= self.flocks.len() < flocks;
                        self.waiters.push(parked);
                    }
                    outcome => {
                        progress = true;
                        self.lapsed.push(parked.lock.owner);
                        outcomes.push((all.unpark(parked), outcome));
                    }
                }
            }
        }
        // What is in the way may have changed.
        for parked in self.waiters.iter().filter(|parked| !parked.lock.flock) {
            lock(&all.waits).set(parked.number, parked.lock.owner, self.blockers(&parked.lock));
        }
    }

    /// Forgets the requests whose clients wait no more: they were answered already.
    fn drop_interrupted(&mut self, all: &Locks<T>) {
        for parked in self.waiters.extract_if(.., |parked| !parked.waiter.is_waiting()) {
            self.lapsed.push(parked.lock.owner);
            all.unpark(parked).dismiss();
        }
    }

    /// Ends an owner's locks. Answers whether it had any.
    fn drop_owner(&mut self, all: &Locks<T>, owner: LockOwner) -> bool {
        let Some(state) = self.owners.get_mut(&owner) else { return false };
        let had = !state.ranges.is_empty();
        if had {
            let unlock = Lock { kind: LockKind::Unlock, owner, start: 0, end: END, pid: 0, flock: false };
            // Nobody is there to be told of an error.
            let _ = T::set_posix(&state.own, &unlock);
            all.ranges_changed(owner.session, state.ranges.len(), 0);
            state.ranges.clear();
        }
        self.lapsed.push(owner);
        had
    }

    /// Forgets the owners that have nothing any more and wait for nothing, with what their locks hung on.
    fn drop_idle(&mut self, all: &Locks<T>) {
        let mut lapsed = std::mem::take(&mut self.lapsed);
        lapsed.retain(|owner| self.owners.get(owner).is_some_and(|state| state.ranges.is_empty()));
        if lapsed.is_empty() {
            return;
        }
        let waiting = self.waiters.iter().filter(|parked| !parked.lock.flock).map(|parked| parked.lock.owner);
        let waiting: HashSet<LockOwner> = waiting.collect();
        for owner in lapsed {
            if !waiting.contains(&owner) && self.owners.remove(&owner).is_some() {
                all.owner_gone(owner.session);
            }
        }
    }

    fn is_unused(&self) -> bool {
        self.owners.is_empty() && self.flocks.is_empty() && self.waiters.is_empty()
    }
}

impl<T: Lockable> Default for Locks<T> {
    fn default() -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            inodes: AtomicUsize::new(0),
            waits: Mutex::default(),
            sessions: Mutex::default(),
            waiting: AtomicUsize::new(0),
            next: AtomicU64::new(0),
        }
    }
}

impl<T: Lockable> Locks<T> {
    fn shard(&self, ino: Ino) -> MutexGuard<'_, Shard<T>> {
        let index = usize::try_from(ino.0 % (SHARDS as u64)).expect("smaller than SHARDS");
        lock(&self.shards[index])
    }

    /// Runs `f` on the locks of an inode, and tells those whose wait that ended.
    fn with<R>(&self, ino: Ino, f: impl FnOnce(&mut InodeLocks<T>, &mut Outcomes) -> R) -> R {
        let mut outcomes = Vec::new();
        let mut shard = self.shard(ino);
        let locks = shard.entry(ino).or_insert_with(|| {
            self.inodes.fetch_add(1, Ordering::Release);
            InodeLocks::default()
        });
        let result = f(locks, &mut outcomes);
        locks.drop_idle(self);
        if locks.is_unused() {
            shard.remove(&ino);
            self.inodes.fetch_sub(1, Ordering::Release);
        }
        drop(shard);
        tell(outcomes);
        result
    }

    /// As [`Self::with`], for an inode that may have nothing to do with locks.
    fn with_known(&self, ino: Ino, f: impl FnOnce(&mut InodeLocks<T>, &mut Outcomes)) {
        if self.inodes.load(Ordering::Acquire) > 0 && self.shard(ino).contains_key(&ino) {
            self.with(ino, f);
        }
    }

    /// Counts one owner more of a session.
    fn owner_comes(&self, session: SessionId) -> Result<()> {
        let mut sessions = lock(&self.sessions);
        let counts = sessions.entry(session).or_default();
        if counts.owners >= OWNERS_MAX {
            return Err(Errno::NOLCK);
        }
        counts.owners += 1;
        Ok(())
    }

    /// Whether a session has locked as many ranges as it may.
    fn is_full(&self, session: SessionId) -> bool {
        lock(&self.sessions).get(&session).is_some_and(|counts| counts.ranges >= SESSION_RANGES_MAX)
    }

    /// An owner of a session has locked so many ranges now, instead of so many.
    fn ranges_changed(&self, session: SessionId, before: usize, now: usize) {
        if before != now
            && let Some(counts) = lock(&self.sessions).get_mut(&session)
        {
            counts.ranges = counts.ranges + now - before;
        }
    }

    fn owner_gone(&self, session: SessionId) {
        let mut sessions = lock(&self.sessions);
        if let Some(counts) = sessions.get_mut(&session) {
            counts.owners -= 1;
            if counts.owners == 0 {
                sessions.remove(&session);
            }
        }
    }

    /// A parked request is parked no more.
    fn unpark(&self, parked: Parked<T>) -> Waiter {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        if !parked.lock.flock {
            lock(&self.waits).remove(parked.number, parked.lock.owner);
        }
        parked.waiter
    }

    /// Answers [`FileSystem::set_lock`](crate::FileSystem::set_lock). `owner` makes what the locks of an owner hang on
    /// that has none in this inode yet; it is called under a lock of the table.
    ///
    /// # Errors
    /// Those of `set_lock`: `BADF` also where the file was not opened for such a lock, `INVAL` for a range that ends
    /// before it begins; `NOLCK` where there are too many locks, owners or waiters; and what `owner` and `T` answer.
    pub fn set(
        &self,
        handles: &Handles<T>,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        request: &Lock,
        mut wait: Option<Waiter>,
        owner: impl FnOnce(&Arc<T>) -> Result<T::Owner>,
    ) -> Result<Locked> {
        let result = handles.get(cx.session, ino, handle).and_then(|open| {
            let request = checked(cx, request)?;
            if !request.flock && !permits(&*open, request.kind) {
                return Err(Errno::BADF);
            }
            let locked = self.with(ino, |locks, outcomes| {
                if !request.flock {
                    match locks.owners.get_mut(&request.owner) {
                        Some(state) if !state.handles.contains(&handle) => state.handles.push(handle),
                        Some(_) => {}
                        None if request.kind == LockKind::Unlock => return Ok(Locked::Done),
                        None => {
                            self.owner_comes(cx.session)?;
                            let own = owner(&open).inspect_err(|_| self.owner_gone(cx.session))?;
                            let state = Owner { own, ranges: Ranges::default(), handles: vec![handle] };
                            locks.owners.insert(request.owner, state);
                        }
                    }
                    let lapsed = match request.kind {
                        LockKind::Unlock => {
                            locks.spared.replace(request.owner).filter(|before| *before != request.owner)
                        }
                        _ => Some(request.owner),
                    };
                    locks.lapsed.extend(lapsed);
                }
                self.attempt_or_park((locks, outcomes), (&open, handle), request, &mut wait)
            });
            // The handle may have been released between finding it and locking.
            if handles.get(cx.session, ino, handle).is_err() {
                self.drop_handle(ino, handle, &open);
            }
            locked
        });
        if let Some(waiter) = wait {
            waiter.dismiss();
        }
        result
    }

    /// Leaves the waiter there unless the request was parked.
    fn attempt_or_park(
        &self,
        (locks, outcomes): (&mut InodeLocks<T>, &mut Outcomes),
        (open, handle): (&Arc<T>, Handle),
        request: Lock,
        wait: &mut Option<Waiter>,
    ) -> Result<Locked> {
        let flocks = locks.flocks.len();
        let outcome = locks.attempt(self, open, handle, &request);
        // Unlocked or downgraded, perhaps, or now in the way of those that wait; or what it had is lost.
        if outcome.is_ok() || locks.flocks.len() < flocks {
            locks.settle(self, outcomes);
        }
        match outcome {
            Ok(()) => return Ok(Locked::Done),
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error),
        }
        let Some(waiter) = wait.take() else { return Err(Errno::AGAIN) };
        locks.drop_interrupted(self);
        let blockers = locks.blockers(&request);
        let mut waits = lock(&self.waits);
        let refused = if waits.closes_a_ring(request.owner, &blockers) {
            Some(Errno::DEADLK)
        } else {
            (self.waiting.load(Ordering::Relaxed) >= WAITERS_MAX).then_some(Errno::NOLCK)
        };
        if let Some(error) = refused {
            *wait = Some(waiter);
            return Err(error);
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if !request.flock {
            waits.set(number, request.owner, blockers);
        }
        drop(waits);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        locks.waiters.push(Parked { number, open: Arc::clone(open), handle, lock: request, waiter });
        Ok(Locked::Waiting)
    }

    /// Answers [`FileSystem::get_lock`](crate::FileSystem::get_lock).
    ///
    /// # Errors
    /// Those of `get_lock`: `INVAL` also for flock locks, which cannot be asked for, and for directories.
    pub fn get(
        &self,
        handles: &Handles<T>,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        request: &Lock,
    ) -> Result<Option<Lock>> {
        let open = handles.get(cx.session, ino, handle)?;
        let request = checked(cx, request)?;
        if request.flock || request.kind == LockKind::Unlock || open.is_dir() {
            return Err(Errno::INVAL);
        }
        let shard = self.shard(ino);
        let known = shard.get(&ino);
        if let Some((owner, range)) = known.and_then(|locks| locks.conflicts(&request).next()) {
            let Range { start, end, kind, pid } = *range;
            return Ok(Some(Lock { kind, owner, start, end, pid, flock: false }));
        }
        let own = known.and_then(|locks| locks.owners.get(&request.owner)).map(|state| &state.own);
        open.get_posix(own, &request)
    }

    /// An owner closed a descriptor of the file: it has no POSIX locks on it any more.
    pub fn drop_owner(&self, ino: Ino, session: SessionId, id: u64) {
        self.with_known(ino, |locks, outcomes| {
            if locks.drop_owner(self, LockOwner { session, id }) {
                locks.settle(self, outcomes);
            }
        });
    }

    /// Ends what came through a handle, which is removed already: what waits through it, its flock lock, and the POSIX
    /// locks of owners that have no other.
    pub fn drop_handle(&self, ino: Ino, handle: Handle, open: &T) {
        let mut ended = Vec::new();
        self.with_known(ino, |locks, outcomes| {
            for parked in locks.waiters.extract_if(.., |parked| parked.handle == handle) {
                locks.lapsed.push(parked.lock.owner);
                ended.push(self.unpark(parked));
            }
            let mut changed = !ended.is_empty();
            if locks.flocks.remove(&handle).is_some() {
                // Nobody is there to be told of an error.
                let _ = open.set_flock(LockKind::Unlock);
                changed = true;
            }
            let mut orphans = Vec::new();
            for (owner, state) in &mut locks.owners {
                state.handles.retain(|known| *known != handle);
                if state.handles.is_empty() {
                    orphans.push(*owner);
                }
            }
            for owner in orphans {
                changed |= locks.drop_owner(self, owner);
            }
            if changed {
                locks.settle(self, outcomes);
            }
        });
        // Those that waited end with INTR.
        drop(ended);
    }

    /// Tries again what waits for somebody that the table does not know: for a `T` that nobody tells when that one lets
    /// go. Answers whether anything waits.
    pub fn retry(&self) -> bool {
        for shard in &self.shards {
            let mut outcomes = Vec::new();
            let mut shard = lock(shard);
            let before = shard.len();
            shard.retain(|_, locks| {
                let ends =
                    |parked: &Parked<T>| !parked.waiter.is_waiting() || !locks.is_taken(parked.handle, &parked.lock);
                if locks.waiters.iter().any(ends) {
                    locks.settle(self, &mut outcomes);
                    locks.drop_idle(self);
                }
                !locks.is_unused()
            });
            self.inodes.fetch_sub(before - shard.len(), Ordering::Release);
            drop(shard);
            tell(outcomes);
        }
        self.waiting.load(Ordering::Relaxed) > 0
    }
}
