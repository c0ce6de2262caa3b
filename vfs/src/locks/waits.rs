//! Who waits for whom, to refuse a wait that would never end.

use std::collections::{HashMap, HashSet};

use crate::LockOwner;

/// The waiting requests of all inodes, by owner: each has a number, and the owners that it waits for.
#[derive(Debug, Default)]
pub(super) struct Waits(HashMap<LockOwner, Vec<(u64, Vec<LockOwner>)>>);

impl Waits {
    /// Whether one of `blockers` waits, directly or not, for `owner`.
    pub(super) fn closes_a_ring(&self, owner: LockOwner, blockers: &[LockOwner]) -> bool {
        let mut seen = HashSet::new();
        let mut next = blockers.to_vec();
        while let Some(blocker) = next.pop() {
            if blocker == owner {
                return true;
            }
            if seen.insert(blocker) {
                next.extend(self.0.get(&blocker).into_iter().flatten().flat_map(|(_, blockers)| blockers));
            }
        }
        false
    }

    pub(super) fn set(&mut self, number: u64, owner: LockOwner, blockers: Vec<LockOwner>) {
        let waits = self.0.entry(owner).or_default();
        match waits.iter_mut().find(|(known, _)| *known == number) {
            Some((_, known)) => *known = blockers,
            None => waits.push((number, blockers)),
        }
    }

    pub(super) fn remove(&mut self, number: u64, owner: LockOwner) {
        if let Some(waits) = self.0.get_mut(&owner) {
            waits.retain(|(known, _)| *known != number);
            if waits.is_empty() {
                self.0.remove(&owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SessionId;

    #[test]
    fn finds_rings_of_any_length() {
        let owner = |id| LockOwner { session: SessionId::default(), id };
        let mut waits = Waits::default();
        waits.set(1, owner(1), vec![owner(2), owner(9)]);
        waits.set(2, owner(2), vec![owner(3)]);
        assert!(waits.closes_a_ring(owner(3), &[owner(1)]));
        assert!(waits.closes_a_ring(owner(2), &[owner(1)]));
        assert!(!waits.closes_a_ring(owner(4), &[owner(1)]));
        assert!(!waits.closes_a_ring(owner(3), &[]));
        let stranger = LockOwner { session: SessionId::unique(), id: 3 };
        assert!(!waits.closes_a_ring(stranger, &[owner(1)]));
        // An owner may wait for several locks at a time, and for others than before.
        waits.set(3, owner(2), vec![owner(5)]);
        waits.set(2, owner(2), vec![owner(6)]);
        assert!(waits.closes_a_ring(owner(5), &[owner(1)]) && waits.closes_a_ring(owner(6), &[owner(1)]));
        assert!(!waits.closes_a_ring(owner(3), &[owner(1)]));
        waits.remove(2, owner(2));
        assert!(waits.closes_a_ring(owner(5), &[owner(1)]) && !waits.closes_a_ring(owner(6), &[owner(1)]));
        waits.remove(3, owner(2));
        waits.remove(1, owner(1));
        assert!(waits.0.is_empty());
    }
}
