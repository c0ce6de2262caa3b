//! The locks of one file.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::index::{HeldLock, Index, Query};
use super::ranges::{Change, Range, Ranges};
use super::waiting::{ParkedRequest, Search, Waiters};
use super::{END, LINKS, Lockable, Locks, OWNER_WAITERS_MAX, OWNERS, RANGES, RANGES_MAX, WAITERS};
use crate::{Errno, Handle, Ino, Lock, LockKind, LockOwner, Result, Waiter};

/// Waiters with their outcomes, to be woken when no lock is held.
pub(super) type Outcomes = Vec<(Waiter, Result<()>)>;

/// Requests that a lock outside this source refused: first and last byte, whether it is for writing, and whether it is a
/// flock lock. The owner makes no difference there.
type RefusedLocks = HashSet<(u64, u64, bool, bool)>;

/// The locks of an owner in one file.
#[derive(Debug)]
struct Owner<O> {
    holder: O,
    ranges: Ranges,
    /// The handles through which it locked. When all are closed, its locks end, even without a flush.
    handles: HashSet<Handle>,
}

/// The locks of one file, and the requests that wait for them.
#[derive(Debug)]
pub(super) struct InodeLocks<T: Lockable> {
    ino: Ino,
    owners: HashMap<LockOwner, Owner<T::Owner>>,
    /// The ranges of all owners.
    index: Index,
    /// The owners that locked through a handle.
    by_handle: HashMap<Handle, HashSet<LockOwner>>,
    /// flock locks; their owner is the handle.
    flocks: HashMap<Handle, LockKind>,
    /// The handle with the write lock among them.
    flock_writer: Option<Handle>,
    waiters: Waiters<T>,
    /// Owners that [`Self::drop_idle`] checks: they may have neither locks nor requests any more.
    maybe_idle: Vec<LockOwner>,
    /// The owner that unlocked last. It is kept, even without locks, while it has the file open: databases lock and unlock
    /// repeatedly, and a new holder each time would be expensive.
    last_unlocker: Option<LockOwner>,
}

impl<T: Lockable> InodeLocks<T> {
    pub(super) fn new(ino: Ino) -> Self {
        Self {
            ino,
            owners: HashMap::new(),
            index: Index::default(),
            by_handle: HashMap::new(),
            flocks: HashMap::new(),
            flock_writer: None,
            waiters: Waiters::default(),
            maybe_idle: Vec::new(),
            last_unlocker: None,
        }
    }

    pub(super) fn is_unused(&self) -> bool {
        self.owners.is_empty() && self.flocks.is_empty() && self.waiters.is_empty()
    }

    /// Returns the number of owners and of their ranges.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.owners.len(), self.owners.values().map(|owner| owner.ranges.len()).sum())
    }

    pub(super) fn has_waiters(&self) -> bool {
        !self.waiters.is_empty()
    }

    /// Returns the holder of an owner's locks.
    pub(super) fn owner(&self, owner: LockOwner) -> Option<&T::Owner> {
        self.owners.get(&owner).map(|state| &state.holder)
    }

    /// Returns the first matching POSIX lock.
    pub(super) fn find(&self, query: &Query) -> Option<Lock> {
        let HeldLock { owner, start, end, .. } = self.index.find(query)?;
        let range = self.owners.get(&owner)?.ranges.get(start)?;
        Some(Lock { kind: range.kind, owner, start, end, pid: range.pid, flock: false })
    }

    /// Returns the first lock of the request's owner in its range.
    pub(super) fn first_of_owner(&self, request: &Lock) -> Option<Lock> {
        let range = self.owners.get(&request.owner)?.ranges.first(request.start, request.end)?;
        let Range { start, end, kind, pid } = *range;
        Some(Lock { kind, start, end, pid, ..*request })
    }

    /// Returns all matching POSIX locks; `None` if there are more than `count_max`.
    pub(super) fn find_all(&self, query: &Query, count_max: usize) -> Option<Vec<HeldLock>> {
        self.index.find_all(query, count_max)
    }

    /// Returns whether a lock of an owner conflicts with another owner's request.
    pub(super) fn excludes(&self, owner: LockOwner, request: &Lock) -> bool {
        let state = self.owners.get(&owner).filter(|_| owner != request.owner);
        state.is_some_and(|state| state.ranges.excludes(request.start, request.end, request.kind))
    }

    /// Returns a waiting request.
    pub(super) fn waiter(&self, number: u64) -> Option<&ParkedRequest<T>> {
        self.waiters.get(number)
    }

    /// Finds or creates the owner of a request for a POSIX lock. Returns false if there is nothing to unlock.
    pub(super) fn prepare_owner(
        &mut self,
        all: &Locks<T>,
        handle: Handle,
        request: &Lock,
        make: impl FnOnce() -> Result<T::Owner>,
    ) -> Result<bool> {
        let (id, session) = (request.owner, request.owner.session);
        let owner = match self.owners.entry(id) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if request.kind == LockKind::Unlock => return Ok(false),
            Entry::Vacant(new) => {
                all.registry().add(session, OWNERS, |counts| &mut counts.owners)?;
                let holder =
                    make().inspect_err(|_| all.registry().change(session, |counts| &mut counts.owners, 1, 0))?;
                new.insert(Owner { holder, ranges: Ranges::default(), handles: HashSet::new() })
            }
        };
        let maybe_idle = match request.kind {
            LockKind::Unlock => self.last_unlocker.replace(id).filter(|before| *before != id),
            _ => Some(id),
        };
        self.maybe_idle.extend(maybe_idle);
        if request.kind != LockKind::Unlock && !owner.handles.contains(&handle) {
            all.registry().add(session, LINKS, |counts| &mut counts.links)?;
            owner.handles.insert(handle);
            self.by_handle.entry(handle).or_default().insert(id);
        }
        Ok(true)
    }

    /// Returns whether one of these locks conflicts with a request.
    fn is_taken(&self, handle: Handle, lock: &Lock) -> bool {
        match (lock.flock, lock.kind) {
            (false, _) => self.index.find(&Query::of(lock)).is_some(),
            (true, LockKind::Read) => self.flock_writer.is_some_and(|writer| writer != handle),
            (true, LockKind::Write) => self.flocks.len() > usize::from(self.flocks.contains_key(&handle)),
            (true, LockKind::Unlock) => false,
        }
    }

    /// Acquires, converts or releases a lock if nothing conflicts. Call [`Self::retry_waiters`] afterwards.
    pub(super) fn attempt(&mut self, all: &Locks<T>, open: &T, handle: Handle, lock: &Lock) -> Result<()> {
        let is_taken = self.is_taken(handle, lock);
        match lock.flock {
            true => self.attempt_flock(open, handle, lock.kind, is_taken),
            false if is_taken => Err(Errno::AGAIN),
            false => self.attempt_posix(all, lock),
        }
    }

    fn attempt_posix(&mut self, all: &Locks<T>, lock: &Lock) -> Result<()> {
        let owner = self.owners.get_mut(&lock.owner).ok_or(Errno::NOLCK)?;
        // Unlocking the middle of a range splits it, so the limit may be exceeded by as many ranges.
        let is_full = || !all.registry().has_room(lock.owner.session, RANGES, |counts| &mut counts.ranges);
        if lock.kind != LockKind::Unlock && (owner.ranges.len() >= RANGES_MAX || is_full()) {
            return Err(Errno::NOLCK);
        }
        T::set_posix(&owner.holder, lock)?;
        let change = owner.ranges.set(Range { start: lock.start, end: lock.end, kind: lock.kind, pid: lock.pid });
        self.changed(all, lock.owner, change);
        Ok(())
    }

    fn changed(&mut self, all: &Locks<T>, owner: LockOwner, change: Change) {
        let Change { old, new } = change;
        self.index.replace(owner, &old, &new);
        all.registry().ranges_changed(owner, old.len(), new.len());
        old.iter().for_each(|range| self.waiters.lock_changed((range.start, owner)));
    }

    /// As on Linux, a conversion releases the previous lock even if the request then has to wait.
    fn attempt_flock(&mut self, open: &T, handle: Handle, kind: LockKind, is_taken: bool) -> Result<()> {
        if self.flocks.get(&handle).copied().unwrap_or(LockKind::Unlock) == kind {
            return Ok(());
        }
        let had = self.forget_flock(handle);
        if is_taken {
            if had {
                open.set_flock(LockKind::Unlock)?;
            }
            return Err(Errno::AGAIN);
        }
        open.set_flock(kind)?;
        if kind != LockKind::Unlock {
            self.flocks.insert(handle, kind);
        }
        if kind == LockKind::Write {
            self.flock_writer = Some(handle);
        }
        Ok(())
    }

    /// Removes the flock lock of a handle; returns whether it had one.
    fn forget_flock(&mut self, handle: Handle) -> bool {
        self.flock_writer = self.flock_writer.filter(|writer| *writer != handle);
        self.flocks.remove(&handle).is_some()
    }

    /// Parks a request, or returns its waiter if too many requests wait.
    pub(super) fn park(
        &mut self,
        all: &Locks<T>,
        number: u64,
        parked: ParkedRequest<T>,
    ) -> std::result::Result<(), Waiter> {
        let (session, lock) = (parked.lock.owner.session, parked.lock);
        let mut registry = all.registry();
        if self.waiters.count_of(parked.handle, &lock) >= OWNER_WAITERS_MAX
            || registry.add(session, WAITERS, |counts| &mut counts.waiters).is_err()
        {
            return Err(parked.waiter);
        }
        if !lock.flock {
            registry.begin_wait(lock.owner, (self.ino, number));
        }
        let held = if lock.flock { None } else { self.index.find_last(&Query::of(&lock)) };
        let is_foreign = !self.is_taken(parked.handle, &lock);
        self.waiters.insert(number, parked, held, is_foreign);
        Ok(())
    }

    /// Removes a parked request; returns its waiter.
    pub(super) fn unpark(&mut self, all: &Locks<T>, number: u64) -> Option<Waiter> {
        let parked = self.waiters.remove(number)?;
        Some(self.unparked(all, number, parked))
    }

    fn unparked(&mut self, all: &Locks<T>, number: u64, parked: ParkedRequest<T>) -> Waiter {
        let owner = parked.lock.owner;
        let mut registry = all.registry();
        registry.change(owner.session, |counts| &mut counts.waiters, 1, 0);
        if !parked.lock.flock {
            registry.end_wait(owner, (self.ino, number));
            self.maybe_idle.push(owner);
        }
        parked.waiter
    }

    /// Removes some of the cancelled requests, which need no reply.
    pub(super) fn sweep(&mut self, all: &Locks<T>, count_max: usize) {
        for number in self.waiters.sweep(count_max) {
            if let Some(waiter) = self.unpark(all, number) {
                waiter.dismiss();
            }
        }
    }

    /// Retries a waiting request. Returns whether it no longer waits.
    fn attempt_parked(&mut self, all: &Locks<T>, number: u64, outcomes: &mut Outcomes) -> bool {
        let Some(parked) = self.waiters.get(number) else { return false };
        let (open, handle, lock) = (parked.open.clone(), parked.handle, parked.lock);
        let mut outcome = match parked.waiter.claim() {
            true => Some(self.attempt(all, &open, handle, &lock)),
            false => None,
        };
        if outcome == Some(Err(Errno::AGAIN)) {
            if self.waiters.get(number).is_some_and(|parked| parked.waiter.unclaim()) {
                self.waiters.set_foreign(number);
                return false;
            }
            outcome = Some(Err(Errno::INTR));
        }
        let Some(parked) = self.waiters.remove(number) else { return false };
        let waiter = self.unparked(all, number, parked);
        match outcome {
            Some(outcome) => outcomes.push((waiter, outcome)),
            None => waiter.dismiss(),
        }
        true
    }

    /// As [`Self::attempt_parked`], unless the table or a known lock outside this source conflicts.
    fn attempt_once(&mut self, all: &Locks<T>, number: u64, refused: &mut RefusedLocks, outcomes: &mut Outcomes) {
        let Some(parked) = self.waiters.get(number) else { return };
        let Lock { start, end, kind, flock, .. } = parked.lock;
        let same = (start, end, kind == LockKind::Write, flock);
        if parked.waiter.is_waiting() && self.is_taken(parked.handle, &parked.lock) {
            let held = if flock { None } else { self.index.find_last(&Query::of(&parked.lock)) };
            if let Some(held) = held {
                self.waiters.assign(number, &held);
            }
            return;
        }
        if refused.contains(&same) {
            self.waiters.set_foreign(number);
        } else if !self.attempt_parked(all, number, outcomes) {
            refused.insert(same);
        }
    }

    /// Grants the waiting requests that no longer conflict.
    pub(super) fn retry_waiters(&mut self, all: &Locks<T>, outcomes: &mut Outcomes) {
        self.retry_flock_waiters(all, outcomes);
        let (mut search, mut refused) = (Search::default(), RefusedLocks::default());
        while let Some(number) = search.next(&mut self.waiters, &self.index) {
            self.attempt_once(all, number, &mut refused, outcomes);
        }
    }

    fn retry_flock_waiters(&mut self, all: &Locks<T>, outcomes: &mut Outcomes) {
        // A lock outside this source that refuses a reader refuses all readers and writers.
        let mut writes_too = true;
        while let Some(number) = self.waiters.next_flock(&self.flocks, self.flock_writer, writes_too) {
            let is_write = self.waiters.get(number).is_some_and(|parked| parked.lock.kind == LockKind::Write);
            if self.attempt_parked(all, number, outcomes) {
                continue;
            }
            if !is_write {
                break;
            }
            writes_too = false;
        }
    }

    /// Retries requests that locks outside this source refused: one of those for the same range and kind.
    pub(super) fn retry(&mut self, all: &Locks<T>, outcomes: &mut Outcomes) {
        let mut refused = RefusedLocks::default();
        for number in self.waiters.foreign() {
            self.attempt_once(all, number, &mut refused, outcomes);
        }
        self.retry_waiters(all, outcomes);
    }

    /// Ends an owner's locks.
    pub(super) fn drop_owner(&mut self, all: &Locks<T>, owner: LockOwner) {
        let Some(state) = self.owners.get_mut(&owner) else { return };
        if !state.ranges.is_empty() {
            let unlock = Lock { kind: LockKind::Unlock, owner, start: 0, end: END, pid: 0, flock: false };
            // There is no request to which an error could be returned.
            let _ = T::set_posix(&state.holder, &unlock);
            let change = state.ranges.take();
            self.changed(all, owner, change);
        }
        self.maybe_idle.push(owner);
    }

    /// Ends all requests and locks of a handle. Returns the waiters.
    pub(super) fn drop_handle(&mut self, all: &Locks<T>, handle: Handle, open: &T) -> Vec<Waiter> {
        let mut ended = Vec::new();
        for number in self.waiters.of_handle(handle) {
            ended.extend(self.unpark(all, number));
        }
        if self.forget_flock(handle) {
            // There is no request to which an error could be returned.
            let _ = open.set_flock(LockKind::Unlock);
        }
        for owner in self.by_handle.remove(&handle).into_iter().flatten() {
            all.registry().change(owner.session, |counts| &mut counts.links, 1, 0);
            let Some(state) = self.owners.get_mut(&owner) else { continue };
            state.handles.remove(&handle);
            if state.handles.is_empty() {
                self.drop_owner(all, owner);
            }
        }
        ended
    }

    /// Removes the owners without locks and requests, with their holders.
    pub(super) fn drop_idle(&mut self, all: &Locks<T>) {
        for owner in std::mem::take(&mut self.maybe_idle) {
            let is_idle = |state: &Owner<T::Owner>| state.ranges.is_empty() && !self.waiters.has_of(owner);
            if !self.owners.get(&owner).is_some_and(is_idle) {
                continue;
            }
            let Some(state) = self.owners.remove(&owner) else { continue };
            let mut registry = all.registry();
            registry.change(owner.session, |counts| &mut counts.owners, 1, 0);
            registry.change(owner.session, |counts| &mut counts.links, state.handles.len(), 0);
            for handle in state.handles {
                if let Some(owners) = self.by_handle.get_mut(&handle) {
                    owners.remove(&owner);
                    if owners.is_empty() {
                        self.by_handle.remove(&handle);
                    }
                }
            }
        }
    }
}
