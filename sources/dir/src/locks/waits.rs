//! Who waits for whom, to refuse a wait that would never end.

use std::collections::{HashMap, HashSet};

use ferry_vfs::LockOwner;

/// The waiting requests of all inodes, by number, each with its owner and the owners that it waits for.
#[derive(Debug, Default)]
pub(super) struct Waits(HashMap<u64, (LockOwner, Vec<LockOwner>)>);

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
                let waits = self.0.values().filter(|(waiting, _)| *waiting == blocker);
                next.extend(waits.flat_map(|(_, blockers)| blockers));
            }
        }
        false
    }

    pub(super) fn set(&mut self, request: u64, owner: LockOwner, blockers: Vec<LockOwner>) {
        self.0.insert(request, (owner, blockers));
    }

    pub(super) fn remove(&mut self, request: u64) {
        self.0.remove(&request);
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::SessionId;

    use super::*;

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
        waits.remove(2);
        assert!(!waits.closes_a_ring(owner(3), &[owner(1)]));
    }
}
