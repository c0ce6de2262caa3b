//! Deadlock detection.

use std::collections::HashSet;

use super::index::{HeldLock, Query};
use super::{Lockable, Locks, lock};
use crate::{Ino, LockOwner};

/// Locks and owners that are looked at to find one ring: as many as take far less than a millisecond. A ring that is not found by then is not
/// found: Linux follows at most ten waits, and none but the first lock that is in the way.
const STEPS_MAX: usize = 1024;

impl<T: Lockable> Locks<T> {
    /// Whether somebody whom a request of `owner`'s waits for waits, directly or not, for `owner`.
    pub(super) fn is_deadlock(&self, ino: Ino, number: u64, owner: LockOwner) -> bool {
        // Nobody waits for who has no lock.
        if !self.registry().has_locks(owner) {
            return false;
        }
        let _one = lock(&self.deadlock);
        let mut steps = STEPS_MAX;
        let mut seen = HashSet::from([owner]);
        let mut waits = vec![(ino, number)];
        while let Some(wait) = waits.pop() {
            let blockers = self.waiting_blockers(wait, owner, &mut steps);
            if blockers.contains(&owner) {
                return true;
            }
            let registry = self.registry();
            for blocker in blockers {
                if seen.insert(blocker) {
                    waits.extend(registry.waits(blocker));
                }
            }
        }
        false
    }

    /// The owners that a request waits for that wait themselves, as far as the steps go; `owner` is one of them.
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
        // Mostly few locks are in the way. If there are many, who waits is looked at instead.
        match locks.find_all(&Query::of(&request), *steps) {
            Some(found) => {
                *steps -= found.len();
                found.iter().map(|held: &HeldLock| held.owner).filter(waits).collect()
            }
            None => {
                let looked_at = registry.waiting_owners().take(std::mem::take(steps));
                looked_at.filter(|other| locks.excludes(*other, &request)).collect()
            }
        }
    }
}
