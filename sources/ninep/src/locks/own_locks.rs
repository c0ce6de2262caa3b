//! The locks that the server has granted to each owner, by file.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferry_vfs::{Lock, LockKind, LockOwner};

/// The maximum number of ranges of an owner in one file, as in other sources ([`ferry_vfs::Locks`]).
const OWNER_RANGES_MAX: usize = 65_536;
/// The maximum number of ranges of all owners in all files of a server: 100 MB of memory.
const RANGES_MAX: usize = 1 << 20;

/// The locks of this client's owners on a file.
#[derive(Debug, Default)]
pub(crate) struct OwnLocks {
    owners: HashMap<LockOwner, OwnedRanges>,
    /// The number of ranges, which also counts towards the total.
    ranges: usize,
    all: Arc<AtomicUsize>,
}

/// Disjoint ranges that cannot be merged: first byte, and kind and last byte.
type Ranges = BTreeMap<u64, (LockKind, u64)>;

#[derive(Debug)]
struct OwnedRanges {
    /// The process id sent to the server; an owner keeps it, because the server identifies owners by it.
    pid: u32,
    ranges: Ranges,
}

impl OwnLocks {
    pub(super) fn pid(&self, lock: &Lock) -> u32 {
        self.owners.get(&lock.owner).map_or(lock.pid, |owned| owned.pid)
    }

    /// Returns whether an owner may lock another range, with `all` ranges in use.
    pub(super) fn has_room(&self, owner: LockOwner, all: &AtomicUsize) -> bool {
        let own = self.owners.get(&owner).map_or(0, |owned| owned.ranges.len());
        own < OWNER_RANGES_MAX && all.load(Ordering::Relaxed) < RANGES_MAX
    }

    /// Records locks that the server has granted; the ranges count in `all`.
    pub(super) fn set(&mut self, new: &Lock, all: &Arc<AtomicUsize>) {
        if self.owners.is_empty() {
            self.all = Arc::clone(all);
        }
        let owned = self.owners.entry(new.owner).or_insert(OwnedRanges { pid: new.pid, ranges: Ranges::new() });
        let before = owned.ranges.len();
        set(&mut owned.ranges, new);
        let after = owned.ranges.len();
        if after == 0 {
            self.owners.remove(&new.owner);
        }
        self.ranges = self.ranges + after - before;
        self.all.fetch_add(after, Ordering::Relaxed);
        self.all.fetch_sub(before, Ordering::Relaxed);
    }

    /// Returns what the owner of a lock has of its range, in order.
    pub(super) fn within(&self, of: &Lock) -> Vec<Lock> {
        let ranges = self.owners.get(&of.owner).into_iter().flat_map(|owned| owned.ranges.range(..=of.end));
        let met = ranges.filter(|(_, (_, end))| *end >= of.start);
        met.map(|(start, (kind, end))| Lock { kind: *kind, start: of.start.max(*start), end: of.end.min(*end), ..*of })
            .collect()
    }

    /// Returns the first lock of a request's owner in its range.
    pub(super) fn first_of_owner(&self, of: &Lock) -> Option<Lock> {
        let owned = self.owners.get(&of.owner)?;
        let (&start, &(kind, end)) = owned.ranges.range(..=of.end).find(|(_, (_, end))| *end >= of.start)?;
        Some(Lock { kind, start, end, pid: owned.pid, ..*of })
    }

    pub(super) fn has(&self, owner: LockOwner) -> bool {
        self.owners.contains_key(&owner)
    }

    pub(super) fn all(&self) -> Vec<Lock> {
        let of = |(owner, owned): (&LockOwner, &OwnedRanges)| {
            let (owner, pid) = (*owner, owned.pid);
            let lock = move |(&start, &(kind, end)): (&_, &_)| Lock { kind, owner, start, end, pid, flock: false };
            owned.ranges.iter().map(lock).collect::<Vec<_>>()
        };
        self.owners.iter().flat_map(of).collect()
    }
}

impl Drop for OwnLocks {
    fn drop(&mut self) {
        self.all.fetch_sub(self.ranges, Ordering::Relaxed);
    }
}

/// Returns the parts of a lock: those in `held`, which are in order and within it, and the rest as unlocks.
pub(super) fn parts_of(whole: &Lock, held: &[Lock]) -> Vec<Lock> {
    let unlock = |start, end| Lock { kind: LockKind::Unlock, start, end, ..*whole };
    let (mut parts, mut at) = (Vec::new(), whole.start);
    for lock in held {
        if at < lock.start {
            parts.push(unlock(at, lock.start - 1));
        }
        parts.push(*lock);
        match lock.end.checked_add(1) {
            Some(next) => at = next,
            None => return parts,
        }
    }
    if at <= whole.end {
        parts.push(unlock(at, whole.end));
    }
    parts
}

/// Inserts a range in place of overlapping ones, and merges it with adjacent ones of its type.
fn set(ranges: &mut Ranges, new: &Lock) {
    let (mut start, mut end) = (new.start, new.end);
    let reach = start.saturating_sub(1)..=end.saturating_add(1);
    let before = ranges.range(..*reach.start()).next_back().filter(|(_, (_, last))| last >= reach.start());
    let first = before.map_or(*reach.start(), |(first, _)| *first);
    let near: Vec<_> = ranges.range(first..=*reach.end()).map(|(start, (kind, end))| (*start, *kind, *end)).collect();
    for (near_start, kind, near_end) in near {
        ranges.remove(&near_start);
        if kind == new.kind {
            (start, end) = (start.min(near_start), end.max(near_end));
            continue;
        }
        if near_start < new.start {
            ranges.insert(near_start, (kind, near_end.min(new.start - 1)));
        }
        if near_end > new.end {
            ranges.insert(near_start.max(new.end + 1), (kind, near_end));
        }
    }
    if new.kind != LockKind::Unlock {
        ranges.insert(start, (new.kind, end));
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use ferry_vfs::SessionId;
    use proptest::prelude::*;

    use super::*;

    fn lock(kind: LockKind, id: u64, start: u64, end: u64) -> Lock {
        Lock { kind, owner: LockOwner { session: SessionId::default(), id }, start, end, pid: 1, flock: false }
    }

    fn kind() -> impl Strategy<Value = LockKind> {
        prop_oneof![Just(LockKind::Read), Just(LockKind::Write), Just(LockKind::Unlock)]
    }

    fn fill(bytes: &mut [LockKind], range: RangeInclusive<u64>, kind: LockKind) {
        let inside = (0..).zip(bytes).filter(|(at, _)| range.contains(at));
        inside.for_each(|(_, byte)| *byte = kind);
    }

    proptest! {
        /// The type of the lock of each byte.
        #[test]
        fn the_last_lock_of_each_byte_wins_in_a_minimal_number_of_ranges(
            steps in prop::collection::vec((kind(), 0..20_u64, 0..8_u64), 1..40),
            asked in 0..24_u64,
            asked_more in 0..8_u64,
        ) {
            let (mut locks, all, mut bytes) = (OwnLocks::default(), Arc::default(), [LockKind::Unlock; 32]);
            for (kind, start, more) in steps {
                locks.set(&lock(kind, 1, start, start + more), &all);
                fill(&mut bytes, start..=start + more, kind);
                let mut found = [LockKind::Unlock; 32];
                for lock in locks.all() {
                    fill(&mut found, lock.start..=lock.end, lock.kind);
                }
                prop_assert_eq!(found, bytes);
                let runs = bytes.chunk_by(|one, next| one == next).filter(|run| run[0] != LockKind::Unlock).count();
                prop_assert_eq!((locks.all().len(), all.load(Ordering::Relaxed)), (runs, runs));
                let whole = lock(LockKind::Write, 1, asked, asked + asked_more);
                let mut next = asked;
                for part in parts_of(&whole, &locks.within(&whole)) {
                    prop_assert_eq!(part.start, next);
                    next = part.end + 1;
                    let inside = (0..).zip(&bytes).filter(|(byte, _)| (part.start..next).contains(byte));
                    prop_assert!(inside.map(|(_, kind)| *kind).all(|kind| kind == part.kind));
                }
                prop_assert_eq!(next, asked + asked_more + 1);
            }
            drop(locks);
            prop_assert_eq!(all.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn locks_are_bounded_per_owner_and_in_total() {
        let (mut locks, all) = (OwnLocks::default(), Arc::new(AtomicUsize::new(0)));
        let owner = |id| lock(LockKind::Read, id, 0, 0).owner;
        for number in 0..OWNER_RANGES_MAX as u64 {
            assert!(locks.has_room(owner(1), &all));
            locks.set(&lock(LockKind::Read, 1, 2 * number, 2 * number), &all);
        }
        assert!(!locks.has_room(owner(1), &all) && locks.has_room(owner(2), &all));
        locks.set(&lock(LockKind::Unlock, 1, 0, 0), &all);
        assert!(locks.has_room(owner(1), &all));
        // Ranges of other files.
        all.fetch_add(RANGES_MAX, Ordering::Relaxed);
        assert!(!locks.has_room(owner(2), &all));
    }
}
