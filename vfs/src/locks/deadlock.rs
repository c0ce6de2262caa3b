//! Deadlock detection.

use std::collections::HashSet;

use super::index::{HeldLock, Query};
use super::{Lockable, Locks, lock};
use crate::{Ino, LockOwner};

/// The maximum number of locks and owners visited to find one cycle; it takes far less than a millisecond. Longer cycles are
/// not detected: Linux follows at most ten waits, and only the first conflicting lock.
const STEPS_MAX: usize = 1024;

impl<T: Lockable> Locks<T> {
    /// Returns whether an owner that blocks this request of `owner` waits, directly or indirectly, for `owner`.
    pub(super) fn is_deadlock(&self, ino: Ino, number: u64, owner: LockOwner) -> bool {
        // No owner waits for one without locks.
        if !self.registry().has_locks(owner) {
            return false;
        }
        let _one = lock(&self.deadlock);
        let mut steps = STEPS_MAX;
        let mut visited = HashSet::from([owner]);
        let mut waits = vec![(ino, number)];
        while let Some(wait) = waits.pop() {
            let blockers = self.waiting_blockers(wait, owner, &mut steps);
            if blockers.contains(&owner) {
                return true;
            }
            let registry = self.registry();
            for blocker in blockers {
                if visited.insert(blocker) {
                    waits.extend(registry.waits(blocker));
                }
            }
        }
        false
    }

    /// Returns the owners that block a request and wait themselves, within the number of steps; `owner` counts as waiting.
    fn waiting_blockers(&self, (ino, number): (Ino, u64), owner: LockOwner, steps: &mut usize) -> HashSet<LockOwner> {
        let shard = self.shard(ino);
        let Some(locks) = shard.inodes.get(&ino) else { return HashSet::new() };
        let Some(parked) = locks.waiter(number).filter(|parked| parked.waiter.is_waiting()) else {
            return HashSet::new();
        };
        let request = parked.lock;
        if locks.excludes(owner, &request) {
            return HashSet::from([owner]);
        }
        let registry = self.registry();
        let waits = |other: &LockOwner| registry.waits(*other).next().is_some();
        // Mostly few locks conflict. If there are many, the waiting owners are visited instead.
        match locks.find_all(&Query::of(&request), *steps) {
            Some(found) => {
                *steps -= found.len();
                found.iter().map(|held: &HeldLock| held.owner).filter(waits).collect()
            }
            None => {
                let candidates = registry.waiting_owners().take(std::mem::take(steps));
                candidates.filter(|other| locks.excludes(*other, &request)).collect()
            }
        }
    }
}
