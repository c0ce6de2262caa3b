//! The requests that wait for locks on one file, and which of them can be granted when a lock is released.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;

use super::index::{HeldKey, HeldLock, Index, Query};
use super::tree::{Forest, Item, NodeIndex};
use crate::{Handle, Lock, LockKind, LockOwner, Waiter};

/// A waiting request.
#[derive(Debug)]
pub(super) struct ParkedRequest<T> {
    pub(super) open: Arc<T>,
    pub(super) handle: Handle,
    pub(super) lock: Lock,
    pub(super) waiter: Waiter,
}

impl<T> ParkedRequest<T> {
    /// Returns the last lock of another owner that conflicts with this request for a POSIX lock.
    fn blocker(&self, index: &Index) -> Option<HeldLock> {
        index.find_last(&Query::of(&self.lock))
    }
}

impl Query {
    /// Returns the search for locks that conflict with a request.
    pub(super) fn of(lock: &Lock) -> Self {
        Self { start_max: lock.end, end_min: lock.start, kind: lock.kind, except: Some(lock.owner) }
    }
}

/// The range of a waiting request for a POSIX lock.
#[derive(Clone, Copy, Debug)]
struct WaitRange {
    start: u64,
    end: u64,
    number: u64,
}

/// A summary of several ranges.
#[derive(Clone, Copy, Debug)]
struct WaitSummary {
    start_min: u64,
    start_max: u64,
    end_min: u64,
    end_max: u64,
    number_min: u64,
}

impl Item for WaitRange {
    type Key = (u64, u64);
    type Summary = WaitSummary;

    fn key(&self) -> Self::Key {
        (self.start, self.number)
    }

    fn summary(&self) -> WaitSummary {
        let Self { start, end, number } = *self;
        WaitSummary { start_min: start, start_max: start, end_min: end, end_max: end, number_min: number }
    }

    fn join(one: &WaitSummary, other: &WaitSummary) -> WaitSummary {
        WaitSummary {
            start_min: one.start_min.min(other.start_min),
            start_max: one.start_max.max(other.start_max),
            end_min: one.end_min.min(other.end_min),
            end_max: one.end_max.max(other.end_max),
            number_min: one.number_min.min(other.number_min),
        }
    }
}

/// A request, and the node of its range; none for flock locks, and if no lock of the table conflicts.
#[derive(Debug)]
struct Entry<T> {
    parked: ParkedRequest<T>,
    node: NodeIndex,
}

/// The roots of the trees of requests to read and to write.
#[derive(Clone, Copy, Debug)]
struct Roots([NodeIndex; 2]);

impl Roots {
    const NONE: Self = Self([NodeIndex::NONE; 2]);

    fn of(&mut self, is_write: bool) -> &mut NodeIndex {
        &mut self.0[usize::from(is_write)]
    }
}

/// The waiting requests by their ascending numbers.
///
/// A request for a POSIX lock is assigned to the last lock that conflicts with it, and is retried when that lock is
/// released. The requests of one lock form a tree, which is reassigned as a whole if another lock conflicts with all of
/// them.
#[derive(Debug)]
pub(super) struct Waiters<T> {
    all: BTreeMap<u64, Entry<T>>,
    /// The requests for POSIX locks by range, in a tree for each lock to which they are assigned.
    ranges: Forest<WaitRange>,
    /// The trees by the lock to which they are assigned; none: those to retry.
    assigned: HashMap<Option<HeldKey>, Roots>,
    /// The same by their roots.
    lock_of_root: HashMap<NodeIndex, (Option<HeldKey>, bool)>,
    /// The requests for flock locks.
    flock_reads: BTreeSet<u64>,
    flock_writes: BTreeSet<u64>,
    /// The same by handle.
    flocks_by_handle: HashMap<Handle, BTreeSet<u64>>,
    by_handle: HashMap<Handle, BTreeSet<u64>>,
    by_owner: HashMap<LockOwner, BTreeSet<u64>>,
    /// The requests that a lock outside this source refused.
    foreign: BTreeSet<u64>,
    /// The number at which [`Self::sweep`] continues.
    sweep_position: u64,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self {
            all: BTreeMap::new(),
            ranges: Forest::default(),
            assigned: HashMap::new(),
            lock_of_root: HashMap::new(),
            flock_reads: BTreeSet::new(),
            flock_writes: BTreeSet::new(),
            flocks_by_handle: HashMap::new(),
            by_handle: HashMap::new(),
            by_owner: HashMap::new(),
            foreign: BTreeSet::new(),
            sweep_position: 0,
        }
    }
}

fn remove_from<K: Eq + std::hash::Hash>(sets: &mut HashMap<K, BTreeSet<u64>>, key: &K, number: u64) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(&number);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}

impl<T> Waiters<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn get(&self, number: u64) -> Option<&ParkedRequest<T>> {
        self.all.get(&number).map(|entry| &entry.parked)
    }

    /// Returns the number of waiting requests of an owner; for flock locks, of a handle.
    pub(super) fn count_of(&self, handle: Handle, lock: &Lock) -> usize {
        let own = if lock.flock { self.flocks_by_handle.get(&handle) } else { self.by_owner.get(&lock.owner) };
        own.map_or(0, BTreeSet::len)
    }

    /// Returns whether an owner waits for a POSIX lock.
    pub(super) fn has_of(&self, owner: LockOwner) -> bool {
        self.by_owner.contains_key(&owner)
    }

    fn flocks(&mut self, kind: LockKind) -> &mut BTreeSet<u64> {
        if kind == LockKind::Write { &mut self.flock_writes } else { &mut self.flock_reads }
    }

    /// Parks a request that conflicts with `held`. Without `held`, `is_foreign` means that it waits for a lock outside this
    /// source; otherwise it waits for a flock lock of the table.
    pub(super) fn insert(&mut self, number: u64, parked: ParkedRequest<T>, held: Option<HeldLock>, is_foreign: bool) {
        let Lock { kind, owner, flock, .. } = parked.lock;
        self.by_handle.entry(parked.handle).or_default().insert(number);
        if flock {
            self.flocks(kind).insert(number);
            self.flocks_by_handle.entry(parked.handle).or_default().insert(number);
        } else {
            self.by_owner.entry(owner).or_default().insert(number);
        }
        self.all.insert(number, Entry { parked, node: NodeIndex::NONE });
        if let Some(held) = held {
            self.assign(number, &held);
        } else if is_foreign {
            self.foreign.insert(number);
        }
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<ParkedRequest<T>> {
        let Entry { parked, node } = self.all.remove(&number)?;
        let Lock { kind, owner, flock, .. } = parked.lock;
        remove_from(&mut self.by_handle, &parked.handle, number);
        if flock {
            self.flocks(kind).remove(&number);
            remove_from(&mut self.flocks_by_handle, &parked.handle, number);
        } else {
            remove_from(&mut self.by_owner, &owner, number);
            self.uproot(node);
        }
        self.foreign.remove(&number);
        Some(parked)
    }

    /// Removes a node; returns the new root of its tree.
    fn uproot(&mut self, place: NodeIndex) -> NodeIndex {
        if place == NodeIndex::NONE {
            return place;
        }
        let (before, root) = self.ranges.remove(place);
        if before == root {
            return root;
        }
        if let Some((key, is_write)) = self.lock_of_root.remove(&before) {
            self.set_assigned(key, is_write, root);
        }
        root
    }

    /// Assigns a request to a lock that conflicts with it.
    pub(super) fn assign(&mut self, number: u64, held: &HeldLock) {
        self.foreign.remove(&number);
        let Some(entry) = self.all.get_mut(&number) else { return };
        let Lock { kind, start, end, .. } = entry.parked.lock;
        if entry.node == NodeIndex::NONE {
            entry.node = self.ranges.insert_root(WaitRange { start, end, number });
        }
        let place = entry.node;
        self.add_assigned(Some(held.key()), kind == LockKind::Write, place);
    }

    /// Adds a tree to that of a lock.
    fn add_assigned(&mut self, key: Option<HeldKey>, is_write: bool, root: NodeIndex) {
        let before = *self.assigned.get_mut(&key).map_or(&mut Roots::NONE.clone(), |roots| roots).of(is_write);
        self.lock_of_root.remove(&before);
        let root = self.ranges.unite(before, root);
        self.set_assigned(key, is_write, root);
    }

    fn set_assigned(&mut self, key: Option<HeldKey>, is_write: bool, root: NodeIndex) {
        let roots = self.assigned.entry(key).or_insert(Roots::NONE);
        *roots.of(is_write) = root;
        if roots.0 == Roots::NONE.0 {
            self.assigned.remove(&key);
        }
        if root != NodeIndex::NONE {
            self.lock_of_root.insert(root, (key, is_write));
        }
    }

    /// Marks the requests of a released or changed lock for a retry.
    pub(super) fn lock_changed(&mut self, key: HeldKey) {
        let Some(Roots(roots)) = self.assigned.remove(&Some(key)) else { return };
        for (root, is_write) in roots.into_iter().zip([false, true]).filter(|(root, _)| *root != NodeIndex::NONE) {
            self.lock_of_root.remove(&root);
            self.add_assigned(None, is_write, root);
        }
    }

    /// Records that a lock outside this source refused a request.
    pub(super) fn set_foreign(&mut self, number: u64) {
        let place = self.all.get_mut(&number).map(|entry| std::mem::replace(&mut entry.node, NodeIndex::NONE));
        place.map(|place| self.uproot(place));
        self.foreign.insert(number);
    }

    /// Returns the requests that a lock outside this source refused.
    pub(super) fn foreign(&self) -> Vec<u64> {
        self.foreign.iter().copied().collect()
    }

    /// Returns the requests of a handle.
    pub(super) fn of_handle(&self, handle: Handle) -> Vec<u64> {
        self.by_handle.get(&handle).into_iter().flatten().copied().collect()
    }

    /// Checks the next few requests in order, and returns the cancelled ones.
    pub(super) fn sweep(&mut self, count_max: usize) -> Vec<u64> {
        let mut cancelled = Vec::new();
        let mut next = 0;
        for (number, entry) in self.all.range(self.sweep_position..).take(count_max) {
            if !entry.parked.waiter.is_waiting() {
                cancelled.push(*number);
            }
            next = number + 1;
        }
        // 0 after the last request.
        self.sweep_position = next;
        cancelled
    }

    /// Returns the first request for a flock lock that conflicts with no other handle.
    pub(super) fn next_flock(
        &self,
        held: &HashMap<Handle, LockKind>,
        writer: Option<Handle>,
        writes_too: bool,
    ) -> Option<u64> {
        let only = if held.len() == 1 { held.keys().next() } else { None };
        // A handle does not conflict with its own lock.
        let own = |kind| {
            let mut numbers = only.and_then(|handle| self.flocks_by_handle.get(handle)).into_iter().flatten();
            numbers.find(|number| self.get(**number).is_some_and(|parked| parked.lock.kind == kind))
        };
        let read = if writer.is_none() { self.flock_reads.first() } else { own(LockKind::Read) };
        let write = if held.is_empty() { self.flock_writes.first() } else { own(LockKind::Write) };
        write.filter(|_| writes_too).into_iter().chain(read).min().copied()
    }
}

/// The next candidate of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Candidate {
    One,
    Below { is_write: bool, at: NodeIndex },
}

/// A search for requests that no longer conflict, in order of arrival.
///
/// It begins with the trees of requests that were assigned to released locks. A tree that conflicts with one lock as a whole
/// is assigned to that lock. Otherwise its root and both subtrees are visited. So of thousands of requests that wait for one
/// lock only the granted one is visited, and of thousands that wait for different locks none whose lock stays.
#[derive(Debug, Default)]
pub(super) struct Search(BinaryHeap<Reverse<(u64, Candidate)>>);

impl Search {
    fn push<T>(&mut self, waiters: &Waiters<T>, is_write: bool, at: NodeIndex) {
        if let Some(node) = waiters.ranges.node(at) {
            self.0.push(Reverse((node.summary.number_min, Candidate::Below { is_write, at })));
        }
    }

    /// Returns the next request that does not conflict with the table.
    pub(super) fn next<T>(&mut self, waiters: &mut Waiters<T>, index: &Index) -> Option<u64> {
        loop {
            if let Some(Roots(roots)) = waiters.assigned.remove(&None) {
                for (root, is_write) in roots.into_iter().zip([false, true]) {
                    waiters.lock_of_root.remove(&root);
                    self.push(waiters, is_write, root);
                }
            }
            let Reverse((number, candidate)) = self.0.pop()?;
            match candidate {
                Candidate::One => {
                    let Some(parked) = waiters.get(number) else { continue };
                    match parked.blocker(index).filter(|_| parked.waiter.is_waiting()) {
                        Some(held) => waiters.assign(number, &held),
                        None => return Some(number),
                    }
                }
                Candidate::Below { is_write, at } => self.push_candidates(waiters, index, is_write, at),
            }
        }
    }

    fn push_candidates<T>(&mut self, waiters: &mut Waiters<T>, index: &Index, is_write: bool, at: NodeIndex) {
        let Some(node) = waiters.ranges.node(at) else { return };
        let (summary, number) = (node.summary, node.item.number);
        let kind = if is_write { LockKind::Write } else { LockKind::Read };
        // A lock that begins before the first of these ends, and ends after the last of them begins, conflicts with all.
        let query = Query { start_max: summary.end_min, end_min: summary.start_max, kind, except: None };
        let Some(held) = index.find_last(&query) else {
            let (left, right) = waiters.ranges.isolate(at);
            self.0.push(Reverse((number, Candidate::One)));
            self.push(waiters, is_write, left);
            self.push(waiters, is_write, right);
            return;
        };
        // But not with requests of its own owner, which are visited separately.
        let mut root = at;
        let own: Vec<u64> = waiters.by_owner.get(&held.owner).into_iter().flatten().copied().collect();
        for number in own {
            let place = waiters.all.get(&number).map_or(NodeIndex::NONE, |entry| entry.node);
            if place == NodeIndex::NONE || waiters.ranges.root_of(place) != root {
                continue;
            }
            root = waiters.uproot(place);
            if let Some(entry) = waiters.all.get_mut(&number) {
                let Lock { start, end, .. } = entry.parked.lock;
                entry.node = waiters.ranges.insert_root(WaitRange { start, end, number });
            }
            self.0.push(Reverse((number, Candidate::One)));
        }
        if root != NodeIndex::NONE {
            waiters.add_assigned(Some(held.key()), is_write, root);
        }
    }
}
