//! POSIX and flock locks.
//!
//! No operation visits all locks or all requests of a file: [`index`] finds a conflicting lock, and [`waiting`] the
//! requests that can be granted. Waiting requests are stored as received; who waits for whom is computed on demand
//! ([`deadlock`]).

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
use std::sync::{Arc, Mutex, MutexGuard};

use self::index::Query;
use self::inode::{InodeLocks, Outcomes};
use self::registry::{LINKS, OWNERS, RANGES, Registry, WAITERS};
use self::waiting::ParkedRequest;
use crate::sync::{CacheAligned, lock};
use crate::{
    Caller, Errno, Handle, Handles, Ino, Lock, LockKind, LockOutcome, LockOwner, OFlags, Result, SessionId, Waiter,
};

/// The number of shards: enough that lock requests for different inodes rarely contend; a power of two.
const SHARDS: usize = 16;
/// The maximum number of ranges that one owner may lock in one file.
const RANGES_MAX: usize = 65_536;
/// The maximum number of waiting requests of one owner (the threads of one process) in one file. They are visited one by
/// one where a lock of this owner conflicts with others.
const OWNER_WAITERS_MAX: usize = 1024;
/// The number of waiting requests that each operation checks for cancellation.
const SWEEP_COUNT: usize = 4;
/// The same number for [`Locks::retry`].
const RETRY_SWEEP_COUNT: usize = 4096;
/// The end of the file, whatever its size.
const END: u64 = i64::MAX as u64;

/// An open file in [`Locks`].
///
/// The last three methods are for files that are also locked outside this source, such as files of the host by its
/// kernel. They are called under a lock of the table, and only for requests that do not conflict with the table; they must
/// not block. If no one else locks the files, they need not be implemented, and [`Self::Owner`] is `()`.
#[allow(unused_variables, reason = "the defaults need none of their arguments")]
pub trait Lockable: fmt::Debug {
    /// The holder of the POSIX locks of one owner on one inode, such as a descriptor.
    type Owner: fmt::Debug;

    /// Returns the flags with which the file was opened.
    fn flags(&self) -> OFlags;

    /// Returns whether it is a directory, which has no POSIX locks.
    fn is_dir(&self) -> bool;

    /// Acquires, converts or releases an owner's POSIX lock; `AGAIN` if a lock outside this source conflicts.
    fn set_posix(owner: &Self::Owner, lock: &Lock) -> Result<()> {
        Ok(())
    }

    /// Acquires, converts or releases the open file's flock lock. `AGAIN` if a lock outside this source conflicts: the file
    /// then has no lock any more.
    fn set_flock(&self, kind: LockKind) -> Result<()> {
        Ok(())
    }

    /// Returns a POSIX lock outside this source that conflicts with a request; `owner` is that of the request, if known.
    fn get_posix(&self, owner: Option<&Self::Owner>, lock: &Lock) -> Result<Option<Lock>> {
        Ok(None)
    }
}

/// A file of which only the open flags are known.
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
    /// The inodes with waiting requests.
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
/// No method blocks. A request that must wait is parked with its inode, and granted in order of arrival when a conflicting
/// lock is released. A source calls [`Self::drop_owner`] in `flush` and [`Self::drop_handle`] in `release`.
#[derive(Debug)]
pub struct Locks<T: Lockable> {
    shards: [CacheAligned<Mutex<Shard<T>>>; SHARDS],
    /// The number of inodes in all shards. It is mostly 0, and then no shard is locked.
    inodes: AtomicUsize,
    /// Locked while a shard is locked.
    registry: Mutex<Registry>,
    /// Serializes deadlock detection: of two requests that close a cycle together, the second one sees both. Shards are
    /// locked while it is held.
    deadlock: Mutex<()>,
    next: AtomicU64,
}

fn wake_all(outcomes: Outcomes) {
    for (waiter, outcome) in outcomes {
        waiter.wake(outcome);
    }
}

/// Returns a request with a valid range and the session of the caller.
fn checked(cx: &Caller<'_>, lock: &Lock) -> Result<Lock> {
    let end = lock.end.min(END);
    if lock.start > end && !lock.flock {
        return Err(Errno::INVAL);
    }
    Ok(Lock { owner: LockOwner { session: cx.session, id: lock.owner.id }, end, ..*lock })
}

/// Returns whether the open flags of a file allow this kind of POSIX lock.
fn permits(open: &impl Lockable, kind: LockKind) -> bool {
    let access = open.flags() & OFlags::ACCMODE;
    !open.is_dir()
        && match kind {
            LockKind::Read => access != OFlags::WRONLY,
            LockKind::Write => access != OFlags::RDONLY,
            LockKind::Unlock => true,
        }
}

/// The outcome of a request.
enum Attempt {
    Done,
    /// The request waits under this number.
    Parked(u64),
}

impl<T: Lockable> Default for Locks<T> {
    fn default() -> Self {
        Self {
            shards: std::array::from_fn(|_| CacheAligned::default()),
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

    /// Runs `f` on the locks of an inode, and wakes the waiters whose requests are decided.
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

    /// Removes the unused state of an inode after an operation.
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

    /// As [`Self::with`], but does nothing for an inode without locks and requests.
    fn with_known(&self, ino: Ino, f: impl FnOnce(&mut InodeLocks<T>, &mut Outcomes)) {
        if self.inodes.load(Ordering::Acquire) > 0 && self.shard(ino).inodes.contains_key(&ino) {
            self.with(ino, f);
        }
    }

    /// Implements [`FileSystem::set_lock`](crate::FileSystem::set_lock). `owner` creates the holder for an owner that is new
    /// in this inode; it is called under a lock of the table.
    ///
    /// # Errors
    /// Those of `set_lock`: `BADF` also if the file was not opened for such a lock, `INVAL` for a range that ends before it
    /// begins, `NOLCK` for too many locks, owners or waiters; and those of `owner` and `T`.
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
                    // It may have been granted meanwhile.
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

    /// Attempts a request, or parks it with the waiter. `wait` keeps the waiter unless the request was parked.
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

    /// Cancels a request, if it still waits.
    fn cancel(&self, ino: Ino, number: u64) -> Option<Waiter> {
        self.with(ino, |locks, _| locks.unpark(self, number))
    }

    /// Implements [`FileSystem::get_lock`](crate::FileSystem::get_lock).
    ///
    /// # Errors
    /// Those of `get_lock`: `INVAL` also for flock locks, which cannot be tested, and for directories.
    pub fn get(
        &self,
        handles: &Handles<T>,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        request: &Lock,
    ) -> Result<Option<Lock>> {
        let open = handles.get(cx.session, ino, handle)?;
        let request = checked(cx, request)?;
        if request.flock || open.is_dir() {
            return Err(Errno::INVAL);
        }
        let shard = self.shard(ino);
        let known = shard.inodes.get(&ino);
        if request.kind == LockKind::Unlock {
            return Ok(known.and_then(|locks| locks.first_of_owner(&request)));
        }
        if let Some(found) = known.and_then(|locks| locks.find(&Query::of(&request))) {
            return Ok(Some(found));
        }
        open.get_posix(known.and_then(|locks| locks.owner(request.owner)), &request)
    }

    /// Releases all POSIX locks of an owner on the file, because it closed a descriptor.
    pub fn drop_owner(&self, ino: Ino, session: SessionId, id: u64) {
        self.with_known(ino, |locks, outcomes| {
            locks.drop_owner(self, LockOwner { session, id });
            locks.retry_waiters(self, outcomes);
        });
    }

    /// Ends all requests and locks of a handle, which is removed already: its waiting requests, its flock lock, and the
    /// POSIX locks of owners without another handle.
    pub fn drop_handle(&self, ino: Ino, handle: Handle, open: &T) {
        let mut ended = Vec::new();
        self.with_known(ino, |locks, outcomes| {
            ended = locks.drop_handle(self, handle, open);
            locks.retry_waiters(self, outcomes);
        });
        // Dropped waiters end with INTR.
        drop(ended);
    }

    /// Retries requests that wait for locks outside this source, for a `T` that is not notified when those are released.
    /// Returns whether any request waits.
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
