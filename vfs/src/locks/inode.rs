//! The locks of one file.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::index::{HeldLock, Index, Query};
use super::ranges::{Change, Range, Ranges};
use super::waiting::{ParkedRequest, Search, Waiters};
use super::{END, LINKS, Lockable, Locks, OWNER_WAITERS_MAX, OWNERS, RANGES, RANGES_MAX, WAITERS};
use crate::{Errno, Handle, Ino, Lock, LockKind, LockOwner, Result, Waiter};

/// Waiters whose fate is known, to be told when no lock is held.
pub(super) type Outcomes = Vec<(Waiter, Result<()>)>;

/// What somebody else was found to be in the way of: first and last bytes, whether it is for writing, and whether it is a flock
/// lock. To him all owners are alike.
type RefusedLocks = HashSet<(u64, u64, bool, bool)>;

/// What an owner has locked in one file.
#[derive(Debug)]
struct Owner<O> {
    own: O,
    ranges: Ranges,
    /// The handles through which it locked: when all are gone, so are its locks, even if no flush told so.
    handles: HashSet<Handle>,
}

/// The locks of one file, and what waits for them.
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
    /// Owners that may have nothing any more, and wait for nothing: for [`Self::drop_idle`].
    lapsed: Vec<LockOwner>,
    /// Who unlocked something last. He stays, whatever is left to him, as long as he has the file open: databases lock and
    /// unlock again and again, and what their locks hang on need not be made each time.
    spared: Option<LockOwner>,
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
            lapsed: Vec::new(),
            spared: None,
        }
    }

    pub(super) fn is_unused(&self) -> bool {
        self.owners.is_empty() && self.flocks.is_empty() && self.waiters.is_empty()
    }

    /// Owners, and their ranges.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.owners.len(), self.owners.values().map(|owner| owner.ranges.len()).sum())
    }

    pub(super) fn has_waiters(&self) -> bool {
        !self.waiters.is_empty()
    }

    /// What an owner's locks hang on.
    pub(super) fn owner(&self, owner: LockOwner) -> Option<&T::Owner> {
        self.owners.get(&owner).map(|state| &state.own)
    }

    /// The first POSIX lock that is looked for.
    pub(super) fn find(&self, query: &Query) -> Option<Lock> {
        let HeldLock { owner, start, end, .. } = self.index.find(query)?;
        let range = self.owners.get(&owner)?.ranges.get(start)?;
        Some(Lock { kind: range.kind, owner, start, end, pid: range.pid, flock: false })
    }

    /// All POSIX locks that are looked for; `None` if there are more than `count_max`.
    pub(super) fn find_all(&self, query: &Query, count_max: usize) -> Option<Vec<HeldLock>> {
        self.index.find_all(query, count_max)
    }

    /// Whether a lock of one owner is in the way of another's request.
    pub(super) fn excludes(&self, owner: LockOwner, request: &Lock) -> bool {
        let state = self.owners.get(&owner).filter(|_| owner != request.owner);
        state.is_some_and(|state| state.ranges.excludes(request.start, request.end, request.kind))
    }

    /// A request that waits.
    pub(super) fn waiter(&self, number: u64) -> Option<&ParkedRequest<T>> {
        self.waiters.get(number)
    }

    /// Finds or makes the owner of a request for a POSIX lock. Returns whether there is anything to do for it.
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
                let own = make().inspect_err(|_| all.registry().change(session, |counts| &mut counts.owners, 1, 0))?;
                new.insert(Owner { own, ranges: Ranges::default(), handles: HashSet::new() })
            }
        };
        let lapsed = match request.kind {
            LockKind::Unlock => self.spared.replace(id).filter(|before| *before != id),
            _ => Some(id),
        };
        self.lapsed.extend(lapsed);
        if request.kind != LockKind::Unlock && !owner.handles.contains(&handle) {
            all.registry().add(session, LINKS, |counts| &mut counts.links)?;
            owner.handles.insert(handle);
            self.by_handle.entry(handle).or_default().insert(id);
        }
        Ok(true)
    }

    /// Whether one of these locks is in the way of a request.
    fn is_taken(&self, handle: Handle, lock: &Lock) -> bool {
        match (lock.flock, lock.kind) {
            (false, _) => self.index.find(&Query::of(lock)).is_some(),
            (true, LockKind::Read) => self.flock_writer.is_some_and(|writer| writer != handle),
            (true, LockKind::Write) => self.flocks.len() > usize::from(self.flocks.contains_key(&handle)),
            (true, LockKind::Unlock) => false,
        }
    }

    /// Takes, changes or gives up a lock if nothing is in the way. [`Self::retry_waiters`] is to be called afterwards.
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
        // Unlocking the middle of a range makes two of it, so the bound may be passed by as many.
        let is_full = || !all.registry().has_room(lock.owner.session, RANGES, |counts| &mut counts.ranges);
        if lock.kind != LockKind::Unlock && (owner.ranges.len() >= RANGES_MAX || is_full()) {
            return Err(Errno::NOLCK);
        }
        T::set_posix(&owner.own, lock)?;
        let change = owner.ranges.set(Range { start: lock.start, end: lock.end, kind: lock.kind, pid: lock.pid });
        self.changed(all, lock.owner, change);
        Ok(())
    }

    fn changed(&mut self, all: &Locks<T>, owner: LockOwner, change: Change) {
        let Change { old, new } = change;
        self.index.replace(owner, &old, &new);
        all.registry().ranges_changed(owner, old.len(), new.len());
        old.iter().for_each(|range| self.waiters.freed((range.start, owner)));
    }

    /// As on Linux, one that asks for another kind loses what it had even if it must wait then.
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

    /// A handle has no flock lock any more; returns whether it had one.
    fn forget_flock(&mut self, handle: Handle) -> bool {
        self.flock_writer = self.flock_writer.filter(|writer| *writer != handle);
        self.flocks.remove(&handle).is_some()
    }

    /// Parks a request, or returns its waiter if too many wait.
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

    /// A request is parked no more.
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
            self.lapsed.push(owner);
        }
        parked.waiter
    }

    /// Forgets some of the requests whose clients wait no more: they were answered already.
    pub(super) fn sweep(&mut self, all: &Locks<T>, count_max: usize) {
        for number in self.waiters.sweep(count_max) {
            if let Some(waiter) = self.unpark(all, number) {
                waiter.dismiss();
            }
        }
    }

    /// Tries a request that waits. Returns whether it waits no more.
    fn attempt_parked(&mut self, all: &Locks<T>, number: u64, outcomes: &mut Outcomes) -> bool {
        let Some(parked) = self.waiters.get(number) else { return false };
        let (open, handle, lock) = (parked.open.clone(), parked.handle, parked.lock);
        let outcome = match parked.waiter.is_waiting() {
            true => Some(self.attempt(all, &open, handle, &lock)),
            false => None,
        };
        if outcome == Some(Err(Errno::AGAIN)) {
            self.waiters.set_foreign(number);
            return false;
        }
        let Some(parked) = self.waiters.remove(number) else { return false };
        let waiter = self.unparked(all, number, parked);
        match outcome {
            Some(outcome) => outcomes.push((waiter, outcome)),
            None => waiter.dismiss(),
        }
        true
    }

    /// The same, unless somebody else is known to be in the way.
    fn attempt_once(&mut self, all: &Locks<T>, number: u64, refused: &mut RefusedLocks, outcomes: &mut Outcomes) {
        let Some(parked) = self.waiters.get(number) else { return };
        let Lock { start, end, kind, flock, .. } = parked.lock;
        let same = (start, end, kind == LockKind::Write, flock);
        if parked.waiter.is_waiting() && self.is_taken(parked.handle, &parked.lock) {
            let held = if flock { None } else { self.index.find_last(&Query::of(&parked.lock)) };
            if let Some(held) = held {
                self.waiters.note(number, &held);
            }
            return;
        }
        if refused.contains(&same) {
            self.waiters.set_foreign(number);
        } else if !self.attempt_parked(all, number, outcomes) {
            refused.insert(same);
        }
    }

    /// Grants what waits and can go on since something was unlocked.
    pub(super) fn retry_waiters(&mut self, all: &Locks<T>, outcomes: &mut Outcomes) {
        self.retry_flock_waiters(all, outcomes);
        let (mut search, mut refused) = (Search::default(), RefusedLocks::default());
        while let Some(number) = search.next(&mut self.waiters, &self.index) {
            self.attempt_once(all, number, &mut refused, outcomes);
        }
    }

    fn retry_flock_waiters(&mut self, all: &Locks<T>, outcomes: &mut Outcomes) {
        // Whom somebody else keeps from reading he keeps from writing, and all others as well.
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

    /// Tries again what somebody else was in the way of: one request of those that ask for the same.
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
            // Nobody is there to be told of an error.
            let _ = T::set_posix(&state.own, &unlock);
            let change = state.ranges.take();
            self.changed(all, owner, change);
        }
        self.lapsed.push(owner);
    }

    /// Ends what came through a handle. Returns the waiters.
    pub(super) fn drop_handle(&mut self, all: &Locks<T>, handle: Handle, open: &T) -> Vec<Waiter> {
        let mut ended = Vec::new();
        for number in self.waiters.of_handle(handle) {
            ended.extend(self.unpark(all, number));
        }
        if self.forget_flock(handle) {
            // Nobody is there to be told of an error.
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

    /// Forgets the owners that have nothing any more and wait for nothing, with what their locks hung on.
    pub(super) fn drop_idle(&mut self, all: &Locks<T>) {
        for owner in std::mem::take(&mut self.lapsed) {
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
