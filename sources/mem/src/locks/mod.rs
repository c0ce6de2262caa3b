//! POSIX and flock locks. Nothing here waits: a request that must wait is parked with its inode, and granted, first come
//! first served, when a lock in its way goes.

mod ranges;
mod serve;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferry_vfs::{Errno, Handle, Ino, Lock, LockKind, LockOwner, Locked, Result, SessionId, Waiter};

use self::ranges::{Range, Ranges};

/// So many that lock requests for different inodes seldom meet; a power of two.
const SHARDS: usize = 16;
/// Requests that wait at one time. A client's kernel has a thread waiting for each, so it will not need more.
const WAITERS_MAX: usize = 65_536;
/// Ranges that one owner may lock in one file: each takes memory.
const RANGES_MAX: usize = 65_536;

/// What an owner has locked.
#[derive(Debug, Default)]
struct Owner {
    ranges: Ranges,
    /// The handles through which it locked: when all are gone, so are its locks, even if no flush told so.
    handles: Vec<Handle>,
}

/// A request that waits.
#[derive(Debug)]
struct Parked {
    handle: Handle,
    lock: Lock,
    waiter: Waiter,
}

#[derive(Debug, Default)]
struct InodeLocks {
    owners: HashMap<LockOwner, Owner>,
    /// flock locks; their owner is the handle.
    flocks: HashMap<Handle, LockKind>,
    waiters: Vec<Parked>,
}

/// Waiters whose fate is known, to be told when no lock is held.
type Outcomes = Vec<(Waiter, Result<()>)>;
type Shard = HashMap<Ino, InodeLocks>;
/// By the owner that waits: in which files, and for whom in each.
type Waits = HashMap<LockOwner, Vec<(Ino, Vec<LockOwner>)>>;

/// All locks of a tree.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    shards: [Mutex<Shard>; SHARDS],
    /// Inodes with anything in a shard: mostly none, and then nothing is looked up.
    inodes: AtomicUsize,
    /// Who waits for whom, to refuse a wait that would never end; locked within a shard. Only POSIX locks: flock locks are
    /// not checked on Linux either.
    waits: Mutex<Waits>,
    waiting: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl InodeLocks {
    /// The owners whose POSIX locks a request would have to wait for.
    fn blockers(&self, lock: &Lock) -> Vec<LockOwner> {
        let others = self.owners.iter().filter(|(owner, _)| **owner != lock.owner);
        let conflicts = others.filter(|(_, other)| other.ranges.conflict(lock.start, lock.end, lock.kind).is_some());
        conflicts.map(|(owner, _)| *owner).collect()
    }

    /// Takes, changes or gives up a lock if nothing is in the way.
    fn attempt(&mut self, handle: Handle, lock: &Lock) -> Result<()> {
        if lock.flock {
            return self.attempt_flock(handle, lock.kind);
        }
        let free = |other: &Owner| other.ranges.conflict(lock.start, lock.end, lock.kind).is_none();
        let unlocks = lock.kind == LockKind::Unlock;
        if !unlocks && !self.owners.iter().all(|(owner, other)| *owner == lock.owner || free(other)) {
            return Err(Errno::AGAIN);
        }
        if unlocks && !self.owners.contains_key(&lock.owner) {
            return Ok(());
        }
        let owner = self.owners.entry(lock.owner).or_default();
        // Unlocking the middle of a range makes two of it, so the bound may be passed by as many.
        if owner.ranges.len() >= RANGES_MAX && !unlocks {
            return Err(Errno::NOLCK);
        }
        if !owner.handles.contains(&handle) {
            owner.handles.push(handle);
        }
        owner.ranges.set(Range { start: lock.start, end: lock.end, kind: lock.kind, pid: lock.pid });
        if owner.ranges.is_empty() {
            self.owners.remove(&lock.owner);
        }
        Ok(())
    }

    /// As on Linux, one that asks for another kind loses what it had even if it must wait then.
    fn attempt_flock(&mut self, handle: Handle, kind: LockKind) -> Result<()> {
        if self.flocks.get(&handle) == Some(&kind) {
            return Ok(());
        }
        self.flocks.remove(&handle);
        let free = match kind {
            LockKind::Unlock => return Ok(()),
            LockKind::Read => self.flocks.values().all(|other| *other == LockKind::Read),
            LockKind::Write => self.flocks.is_empty(),
        };
        if !free {
            return Err(Errno::AGAIN);
        }
        self.flocks.insert(handle, kind);
        Ok(())
    }

    fn is_unused(&self) -> bool {
        self.owners.is_empty() && self.flocks.is_empty() && self.waiters.is_empty()
    }
}

impl Locks {
    fn shard(&self, ino: Ino) -> MutexGuard<'_, Shard> {
        let index = usize::try_from(ino.0 % (SHARDS as u64)).expect("smaller than SHARDS");
        lock(&self.shards[index])
    }

    /// Whether there may be any lock of an inode.
    pub(crate) fn any(&self, ino: Ino) -> bool {
        self.inodes.load(Ordering::Acquire) > 0 && self.shard(ino).contains_key(&ino)
    }

    /// Runs `f` on the locks of an inode, lets go on who can afterwards, and tells those whose wait that ended.
    fn with<T>(&self, ino: Ino, f: impl FnOnce(&mut InodeLocks, &mut Outcomes) -> T) -> T {
        let mut outcomes = Vec::new();
        let mut shard = self.shard(ino);
        let locks = shard.entry(ino).or_insert_with(|| {
            self.inodes.fetch_add(1, Ordering::Release);
            InodeLocks::default()
        });
        let result = f(locks, &mut outcomes);
        if !locks.waiters.is_empty() {
            self.settle(ino, locks, &mut outcomes);
        }
        if locks.is_unused() {
            shard.remove(&ino);
            self.inodes.fetch_sub(1, Ordering::Release);
        }
        drop(shard);
        for (waiter, outcome) in outcomes {
            waiter.wake(outcome);
        }
        result
    }

    /// Tries all that wait, in order, as often as that lets one go on.
    fn settle(&self, ino: Ino, locks: &mut InodeLocks, outcomes: &mut Outcomes) {
        loop {
            let mut progress = false;
            for parked in std::mem::take(&mut locks.waiters) {
                if !parked.waiter.is_waiting() {
                    self.unpark(ino, parked).dismiss();
                    continue;
                }
                match locks.attempt(parked.handle, &parked.lock) {
                    Err(Errno::AGAIN) => locks.waiters.push(parked),
                    outcome => {
                        progress = true;
                        outcomes.push((self.unpark(ino, parked), outcome));
                    }
                }
            }
            if !progress {
                break;
            }
        }
        let mut waits = lock(&self.waits);
        for parked in locks.waiters.iter().filter(|parked| !parked.lock.flock) {
            if let Some((_, blockers)) =
                waits.get_mut(&parked.lock.owner).and_then(|all| all.iter_mut().find(|(at, _)| *at == ino))
            {
                *blockers = locks.blockers(&parked.lock);
            }
        }
    }

    /// Forgets that a request waits.
    fn unpark(&self, ino: Ino, parked: Parked) -> Waiter {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        if !parked.lock.flock {
            let mut waits = lock(&self.waits);
            if let Some(all) = waits.get_mut(&parked.lock.owner) {
                if let Some(index) = all.iter().position(|(at, _)| *at == ino) {
                    all.swap_remove(index);
                }
                if all.is_empty() {
                    waits.remove(&parked.lock.owner);
                }
            }
        }
        parked.waiter
    }

    /// Whether one of `blockers` waits, directly or not, for `owner`.
    fn closes_a_ring(waits: &Waits, owner: LockOwner, blockers: &[LockOwner]) -> bool {
        let mut seen = HashSet::new();
        let mut next = blockers.to_vec();
        while let Some(blocker) = next.pop() {
            if blocker == owner {
                return true;
            }
            if seen.insert(blocker) {
                next.extend(waits.get(&blocker).into_iter().flatten().flat_map(|(_, blockers)| blockers));
            }
        }
        false
    }

    /// See [`ferry_vfs::FileSystem::set_lock`]; leaves the waiter there unless it was parked.
    fn set(&self, (ino, handle): (Ino, Handle), request: &Lock, wait: &mut Option<Waiter>) -> Result<Locked> {
        self.with(ino, |locks, _| {
            match locks.attempt(handle, request) {
                Ok(()) => return Ok(Locked::Done),
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error),
            }
            let Some(waiter) = wait.take() else { return Err(Errno::AGAIN) };
            let mut waits = lock(&self.waits);
            let blockers = if request.flock { Vec::new() } else { locks.blockers(request) };
            let refused = if !request.flock && Self::closes_a_ring(&waits, request.owner, &blockers) {
                Some(Errno::DEADLK)
            } else {
                (self.waiting.load(Ordering::Relaxed) >= WAITERS_MAX).then_some(Errno::NOLCK)
            };
            if let Some(error) = refused {
                *wait = Some(waiter);
                return Err(error);
            }
            if !request.flock {
                waits.entry(request.owner).or_default().push((ino, blockers));
            }
            drop(waits);
            self.waiting.fetch_add(1, Ordering::Relaxed);
            locks.waiters.push(Parked { handle, lock: *request, waiter });
            Ok(Locked::Waiting)
        })
    }

    /// A POSIX lock that is in the way of a request.
    fn get(&self, ino: Ino, request: &Lock) -> Option<Lock> {
        let shard = self.shard(ino);
        let others = shard.get(&ino)?.owners.iter().filter(|(owner, _)| **owner != request.owner);
        let mut conflicts = others.filter_map(|(owner, state)| {
            let Range { start, end, kind, pid } = *state.ranges.conflict(request.start, request.end, request.kind)?;
            Some(Lock { kind, owner: *owner, start, end, pid, flock: false })
        });
        conflicts.next()
    }

    /// Gives up an owner's POSIX locks.
    pub(crate) fn drop_owner(&self, ino: Ino, session: SessionId, id: u64) {
        self.with(ino, |locks, _| locks.owners.remove(&LockOwner { session, id }));
    }

    /// Ends what came through a handle: its waiters, its flock lock, and the locks of owners that have no other.
    pub(crate) fn drop_handle(&self, ino: Ino, handle: Handle) {
        let mut ended = Vec::new();
        self.with(ino, |locks, _| {
            for parked in std::mem::take(&mut locks.waiters) {
                if parked.handle == handle {
                    ended.push(self.unpark(ino, parked));
                } else {
                    locks.waiters.push(parked);
                }
            }
            locks.flocks.remove(&handle);
            locks.owners.retain(|_, owner| {
                owner.handles.retain(|known| *known != handle);
                !owner.handles.is_empty()
            });
        });
        // Those that waited end with INTR.
        drop(ended);
    }
}
