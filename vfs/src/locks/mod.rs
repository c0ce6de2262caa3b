//! POSIX and flock locks.
//!
//! No operation looks at all locks or all requests of a file: [`index`] finds a lock that is in the way, [`waiting`] the requests that can go
//! on. What waits is noted as it was asked for, and who waits for whom is found out when it is needed ([`deadlock`]).

mod deadlock;
mod index;
mod inode;
mod ranges;
mod registry;
#[cfg(test)]
mod tests;
mod tree;
mod waiting;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::index::Query;
use self::inode::{InodeLocks, Outcomes};
use self::registry::{LINKS, OWNERS, RANGES, Registry, WAITERS};
use self::waiting::ParkedRequest;
use crate::{
    Caller, Errno, Handle, Handles, Ino, Lock, LockKind, LockOutcome, LockOwner, OFlags, Result, SessionId, Waiter,
};

/// So many that lock requests for different inodes seldom meet; a power of two.
const SHARDS: usize = 16;
/// Ranges that one owner may lock in one file.
const RANGES_MAX: usize = 65_536;
/// Requests of one owner that may wait in one file: of threads of one process. They are looked at one by one where a lock of this owner is
/// in the way of others.
const OWNER_WAITERS_MAX: usize = 1024;
/// Requests that are looked at with each operation, whether anybody wants them still.
const SWEEP_COUNT: usize = 4;
/// The same where [`Locks::retry`] looks.
const RETRY_SWEEP_COUNT: usize = 4096;
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

/// A file of which nothing is known but how it was opened.
impl Lockable for OFlags {
    type Owner = ();

    fn flags(&self) -> OFlags {
        *self
    }

    fn is_dir(&self) -> bool {
        self.contains(Self::DIRECTORY)
    }
}

/// The locks of some inodes.
#[derive(Debug)]
struct Shard<T: Lockable> {
    inodes: HashMap<Ino, InodeLocks<T>>,
    /// Those where requests wait.
    waiting: HashSet<Ino>,
}

impl<T: Lockable> Default for Shard<T> {
    fn default() -> Self {
        Self { inodes: HashMap::new(), waiting: HashSet::new() }
    }
}

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
    /// Locked within a shard.
    registry: Mutex<Registry>,
    /// Held by whoever looks for a ring of owners that wait for each other: of two that would close one together, the second sees both.
    /// Shards are locked within.
    deadlock: Mutex<()>,
    next: AtomicU64,
}

/// Locks, also after a panic elsewhere: no critical section here leaves its data half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wake_all(outcomes: Outcomes) {
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

/// What became of a request.
enum Attempt {
    Done,
    /// It waits under this number.
    Parked(u64),
}

impl<T: Lockable> Default for Locks<T> {
    fn default() -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            inodes: AtomicUsize::new(0),
            registry: Mutex::default(),
            deadlock: Mutex::new(()),
            next: AtomicU64::new(0),
        }
    }
}

impl<T: Lockable> Locks<T> {
    fn shard(&self, ino: Ino) -> MutexGuard<'_, Shard<T>> {
        let index = usize::try_from(ino.0 % (SHARDS as u64)).expect("smaller than SHARDS");
        lock(&self.shards[index])
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        lock(&self.registry)
    }

    /// Runs `f` on the locks of an inode, and tells those whose wait that ended.
    fn with<R>(&self, ino: Ino, f: impl FnOnce(&mut InodeLocks<T>, &mut Outcomes) -> R) -> R {
        let mut outcomes = Vec::new();
        let mut shard = self.shard(ino);
        let locks = shard.inodes.entry(ino).or_insert_with(|| {
            self.inodes.fetch_add(1, Ordering::Release);
            InodeLocks::new(ino)
        });
        let result = f(locks, &mut outcomes);
        self.finish(&mut shard, ino);
        drop(shard);
        wake_all(outcomes);
        result
    }

    /// Forgets what an inode that was just looked at has no more.
    fn finish(&self, shard: &mut Shard<T>, ino: Ino) {
        let Some(locks) = shard.inodes.get_mut(&ino) else { return };
        locks.drop_idle(self);
        let (waits, is_unused) = (locks.has_waiters(), locks.is_unused());
        if waits {
            shard.waiting.insert(ino);
        } else {
            shard.waiting.remove(&ino);
        }
        if is_unused {
            shard.inodes.remove(&ino);
            self.inodes.fetch_sub(1, Ordering::Release);
        }
    }

    /// As [`Self::with`], for an inode that may have nothing to do with locks.
    fn with_known(&self, ino: Ino, f: impl FnOnce(&mut InodeLocks<T>, &mut Outcomes)) {
        if self.inodes.load(Ordering::Acquire) > 0 && self.shard(ino).inodes.contains_key(&ino) {
            self.with(ino, f);
        }
    }

    /// Implements [`FileSystem::set_lock`](crate::FileSystem::set_lock). `owner` makes what the locks of an owner hang on
    /// that has none in this inode yet; it is called under a lock of the table.
    ///
    /// # Errors
    /// Those of `set_lock`: `BADF` also where the file was not opened for such a lock, `INVAL` for a range that ends
    /// before it begins; `NOLCK` where there are too many locks, owners or waiters; and what `owner` and `T` return.
    pub fn set(
        &self,
        handles: &Handles<T>,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        request: &Lock,
        mut wait: Option<Waiter>,
        owner: impl FnOnce(&Arc<T>) -> Result<T::Owner>,
    ) -> Result<LockOutcome> {
        let result = handles.get(cx.session, ino, handle).and_then(|open| {
            let request = checked(cx, request)?;
            if !request.flock && !permits(&*open, request.kind) {
                return Err(Errno::BADF);
            }
            let attempt = self.with(ino, |locks, outcomes| {
                if !request.flock && !locks.prepare_owner(self, handle, &request, || owner(&open))? {
                    return Ok(Attempt::Done);
                }
                self.attempt_or_park((locks, outcomes), (&open, handle), request, &mut wait)
            });
            let locked = match attempt {
                Ok(Attempt::Done) => Ok(LockOutcome::Done),
                Ok(Attempt::Parked(number)) if !request.flock && self.is_deadlock(ino, number, request.owner) => {
                    wait = self.cancel(ino, number);
                    // It may have been granted just now.
                    if wait.is_some() { Err(Errno::DEADLK) } else { Ok(LockOutcome::Waiting) }
                }
                Ok(Attempt::Parked(_)) => Ok(LockOutcome::Waiting),
                Err(error) => Err(error),
            };
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
    ) -> Result<Attempt> {
        locks.sweep(self, SWEEP_COUNT);
        let outcome = locks.attempt(self, open, handle, &request);
        locks.retry_waiters(self, outcomes);
        match outcome {
            Ok(()) => return Ok(Attempt::Done),
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error),
        }
        let Some(waiter) = wait.take() else { return Err(Errno::AGAIN) };
        let parked = ParkedRequest { open: Arc::clone(open), handle, lock: request, waiter };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        match locks.park(self, number, parked) {
            Ok(()) => Ok(Attempt::Parked(number)),
            Err(waiter) => {
                *wait = Some(waiter);
                Err(Errno::NOLCK)
            }
        }
    }

    /// Takes a request back, if it still waits.
    fn cancel(&self, ino: Ino, number: u64) -> Option<Waiter> {
        self.with(ino, |locks, _| locks.unpark(self, number))
    }

    /// Implements [`FileSystem::get_lock`](crate::FileSystem::get_lock).
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
        let known = shard.inodes.get(&ino);
        if let Some(found) = known.and_then(|locks| locks.find(&Query::of(&request))) {
            return Ok(Some(found));
        }
        open.get_posix(known.and_then(|locks| locks.owner(request.owner)), &request)
    }

    /// An owner closed a descriptor of the file: it has no POSIX locks on it any more.
    pub fn drop_owner(&self, ino: Ino, session: SessionId, id: u64) {
        self.with_known(ino, |locks, outcomes| {
            locks.drop_owner(self, LockOwner { session, id });
            locks.retry_waiters(self, outcomes);
        });
    }

    /// Ends what came through a handle, which is removed already: what waits through it, its flock lock, and the POSIX
    /// locks of owners that have no other.
    pub fn drop_handle(&self, ino: Ino, handle: Handle, open: &T) {
        let mut ended = Vec::new();
        self.with_known(ino, |locks, outcomes| {
            ended = locks.drop_handle(self, handle, open);
            locks.retry_waiters(self, outcomes);
        });
        // Those that waited end with INTR.
        drop(ended);
    }

    /// Tries again what waits for somebody that the table does not know: for a `T` that nobody tells when that one lets
    /// go. Returns whether anything waits.
    pub fn retry(&self) -> bool {
        for shard in &self.shards {
            let mut outcomes = Vec::new();
            let mut shard = lock(shard);
            let waiting: Vec<Ino> = shard.waiting.iter().copied().collect();
            for ino in waiting {
                if let Some(locks) = shard.inodes.get_mut(&ino) {
                    locks.sweep(self, RETRY_SWEEP_COUNT);
                    locks.retry(self, &mut outcomes);
                }
                self.finish(&mut shard, ino);
            }
            drop(shard);
            wake_all(outcomes);
        }
        self.registry().total().waiters > 0
    }
}
