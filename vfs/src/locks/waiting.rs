//! The requests that wait for locks on one file, and which of them can be granted when a lock is released.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;

use super::index::{HeldKey, HeldLock, Index, Query};
use super::tree::{Forest, Item, Link};
use crate::{Handle, Lock, LockKind, LockOwner, Waiter};

/// A request that waits.
#[derive(Debug)]
pub(super) struct ParkedRequest<T> {
    pub(super) open: Arc<T>,
    pub(super) handle: Handle,
    pub(super) lock: Lock,
    pub(super) waiter: Waiter,
}

impl<T> ParkedRequest<T> {
    /// The last lock of another owner that is in the way of a POSIX lock.
    fn blocker(&self, index: &Index) -> Option<HeldLock> {
        index.find_last(&Query::of(&self.lock))
    }
}

impl Query {
    /// The locks that a request would have to wait for.
    pub(super) fn of(lock: &Lock) -> Self {
        Self { start_max: lock.end, end_min: lock.start, kind: lock.kind, except: Some(lock.owner) }
    }
}

/// The place of a request for a POSIX lock.
#[derive(Clone, Copy, Debug)]
struct WaitRange {
    start: u64,
    end: u64,
    number: u64,
}

/// What is known of several places.
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
    type Sum = WaitSummary;

    fn key(&self) -> Self::Key {
        (self.start, self.number)
    }

    fn sum(&self) -> WaitSummary {
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

/// A request, and the node of its place; none for flock locks, and where no lock of the table is in its way.
#[derive(Debug)]
struct Entry<T> {
    parked: ParkedRequest<T>,
    place: Link,
}

/// The roots of the trees of requests to read and to write.
#[derive(Clone, Copy, Debug)]
struct Roots([Link; 2]);

impl Roots {
    const NONE: Self = Self([Link::NONE; 2]);

    fn of(&mut self, is_write: bool) -> &mut Link {
        &mut self.0[usize::from(is_write)]
    }
}

/// The requests that wait, by their numbers, which count up.
///
/// Of the locks that are in the way of a request for a POSIX lock it is noted with the last one, and is looked at when that one goes. What
/// is noted with one lock is a tree, which goes to another lock as a whole where that is in the way of all of it.
#[derive(Debug)]
pub(super) struct Waiters<T> {
    all: BTreeMap<u64, Entry<T>>,
    /// Those for POSIX locks, by place, in a tree for each lock that they are noted with.
    places: Forest<WaitRange>,
    /// The trees that are noted with a lock; with none: what is to be looked at.
    noted: HashMap<Option<HeldKey>, Roots>,
    /// The same by their roots.
    noted_with: HashMap<Link, (Option<HeldKey>, bool)>,
    /// Those for flock locks.
    flock_reads: BTreeSet<u64>,
    flock_writes: BTreeSet<u64>,
    /// The same by the handles that they are for.
    flocks_by_handle: HashMap<Handle, BTreeSet<u64>>,
    by_handle: HashMap<Handle, BTreeSet<u64>>,
    by_owner: HashMap<LockOwner, BTreeSet<u64>>,
    /// Those that somebody else was in the way of, whom this table does not know.
    foreign: BTreeSet<u64>,
    /// Where [`Self::sweep`] goes on.
    swept: u64,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self {
            all: BTreeMap::new(),
            places: Forest::default(),
            noted: HashMap::new(),
            noted_with: HashMap::new(),
            flock_reads: BTreeSet::new(),
            flock_writes: BTreeSet::new(),
            flocks_by_handle: HashMap::new(),
            by_handle: HashMap::new(),
            by_owner: HashMap::new(),
            foreign: BTreeSet::new(),
            swept: 0,
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

    /// How many requests of an owner wait; for flock locks, of a handle.
    pub(super) fn count_of(&self, handle: Handle, lock: &Lock) -> usize {
        let own = if lock.flock { self.flocks_by_handle.get(&handle) } else { self.by_owner.get(&lock.owner) };
        own.map_or(0, BTreeSet::len)
    }

    /// Whether an owner waits for a POSIX lock.
    pub(super) fn has_of(&self, owner: LockOwner) -> bool {
        self.by_owner.contains_key(&owner)
    }

    fn flocks(&mut self, kind: LockKind) -> &mut BTreeSet<u64> {
        if kind == LockKind::Write { &mut self.flock_writes } else { &mut self.flock_reads }
    }

    /// Parks a request that must wait for `held`, or, where that is none, for somebody whom this table does not know. For flock locks
    /// `held` is none, and `is_foreign` says which.
    pub(super) fn insert(&mut self, number: u64, parked: ParkedRequest<T>, held: Option<HeldLock>, is_foreign: bool) {
        let Lock { kind, owner, flock, .. } = parked.lock;
        self.by_handle.entry(parked.handle).or_default().insert(number);
        if flock {
            self.flocks(kind).insert(number);
            self.flocks_by_handle.entry(parked.handle).or_default().insert(number);
        } else {
            self.by_owner.entry(owner).or_default().insert(number);
        }
        self.all.insert(number, Entry { parked, place: Link::NONE });
        if let Some(held) = held {
            self.note(number, &held);
        } else if is_foreign {
            self.foreign.insert(number);
        }
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<ParkedRequest<T>> {
        let Entry { parked, place } = self.all.remove(&number)?;
        let Lock { kind, owner, flock, .. } = parked.lock;
        remove_from(&mut self.by_handle, &parked.handle, number);
        if flock {
            self.flocks(kind).remove(&number);
            remove_from(&mut self.flocks_by_handle, &parked.handle, number);
        } else {
            remove_from(&mut self.by_owner, &owner, number);
            self.uproot(place);
        }
        self.foreign.remove(&number);
        Some(parked)
    }

    /// Removes a place; returns the root that its tree has then.
    fn uproot(&mut self, place: Link) -> Link {
        if place == Link::NONE {
            return place;
        }
        let (before, root) = self.places.remove(place);
        if before == root {
            return root;
        }
        if let Some((key, is_write)) = self.noted_with.remove(&before) {
            self.set_noted(key, is_write, root);
        }
        root
    }

    /// Notes a request with a lock that is in its way.
    pub(super) fn note(&mut self, number: u64, held: &HeldLock) {
        self.foreign.remove(&number);
        let Some(entry) = self.all.get_mut(&number) else { return };
        let Lock { kind, start, end, .. } = entry.parked.lock;
        if entry.place == Link::NONE {
            entry.place = self.places.plant(WaitRange { start, end, number });
        }
        let place = entry.place;
        self.add_noted(Some(held.key()), kind == LockKind::Write, place);
    }

    /// Adds a tree to that of a lock.
    fn add_noted(&mut self, key: Option<HeldKey>, is_write: bool, root: Link) {
        let before = *self.noted.get_mut(&key).map_or(&mut Roots::NONE.clone(), |roots| roots).of(is_write);
        self.noted_with.remove(&before);
        let root = self.places.unite(before, root);
        self.set_noted(key, is_write, root);
    }

    fn set_noted(&mut self, key: Option<HeldKey>, is_write: bool, root: Link) {
        let roots = self.noted.entry(key).or_insert(Roots::NONE);
        *roots.of(is_write) = root;
        if roots.0 == Roots::NONE.0 {
            self.noted.remove(&key);
        }
        if root != Link::NONE {
            self.noted_with.insert(root, (key, is_write));
        }
    }

    /// A lock is no more, or another one: what is noted with it is to be looked at.
    pub(super) fn freed(&mut self, key: HeldKey) {
        let Some(Roots(roots)) = self.noted.remove(&Some(key)) else { return };
        for (root, is_write) in roots.into_iter().zip([false, true]).filter(|(root, _)| *root != Link::NONE) {
            self.noted_with.remove(&root);
            self.add_noted(None, is_write, root);
        }
    }

    /// Somebody else is in the way of a request.
    pub(super) fn set_foreign(&mut self, number: u64) {
        let place = self.all.get_mut(&number).map(|entry| std::mem::replace(&mut entry.place, Link::NONE));
        place.map(|place| self.uproot(place));
        self.foreign.insert(number);
    }

    /// The requests that somebody else was in the way of.
    pub(super) fn foreign(&self) -> Vec<u64> {
        self.foreign.iter().copied().collect()
    }

    /// The requests that came through a handle.
    pub(super) fn of_handle(&self, handle: Handle) -> Vec<u64> {
        self.by_handle.get(&handle).into_iter().flatten().copied().collect()
    }

    /// Looks at some requests after those that it looked at last, and returns those that nobody wants any more.
    pub(super) fn sweep(&mut self, count_max: usize) -> Vec<u64> {
        let mut gone = Vec::new();
        let mut next = 0;
        for (number, entry) in self.all.range(self.swept..).take(count_max) {
            if !entry.parked.waiter.is_waiting() {
                gone.push(*number);
            }
            next = number + 1;
        }
        // At the end it begins again.
        self.swept = next;
        gone
    }

    /// The first request for a flock lock that no other handle is in the way of.
    pub(super) fn next_flock(
        &self,
        held: &HashMap<Handle, LockKind>,
        writer: Option<Handle>,
        writes_too: bool,
    ) -> Option<u64> {
        let only = if held.len() == 1 { held.keys().next() } else { None };
        // A handle is not in its own way.
        let own = |kind| {
            let mut numbers = only.and_then(|handle| self.flocks_by_handle.get(handle)).into_iter().flatten();
            numbers.find(|number| self.get(**number).is_some_and(|parked| parked.lock.kind == kind))
        };
        let read = if writer.is_none() { self.flock_reads.first() } else { own(LockKind::Read) };
        let write = if held.is_empty() { self.flock_writes.first() } else { own(LockKind::Write) };
        write.filter(|_| writes_too).into_iter().chain(read).min().copied()
    }
}

/// What a search is to look at next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Candidate {
    One,
    Below { is_write: bool, at: Link },
}

/// A search for requests that nothing is in the way of any more, first come first served.
///
/// It begins with the trees of requests that were noted with locks that have gone. A tree that one lock is in the way of is noted with that as a
/// whole; otherwise its root is looked at, and what is below it on each side. So no request of thousands that wait for one lock is looked at
/// but the one that gets it, and of thousands of which each waits for another lock none that is noted with one that stays.
#[derive(Debug, Default)]
pub(super) struct Search(BinaryHeap<Reverse<(u64, Candidate)>>);

impl Search {
    fn push<T>(&mut self, waiters: &Waiters<T>, is_write: bool, at: Link) {
        if let Some(node) = waiters.places.node(at) {
            self.0.push(Reverse((node.sum.number_min, Candidate::Below { is_write, at })));
        }
    }

    /// The next request that can go on, as far as the table knows.
    pub(super) fn next<T>(&mut self, waiters: &mut Waiters<T>, index: &Index) -> Option<u64> {
        loop {
            if let Some(Roots(roots)) = waiters.noted.remove(&None) {
                for (root, is_write) in roots.into_iter().zip([false, true]) {
                    waiters.noted_with.remove(&root);
                    self.push(waiters, is_write, root);
                }
            }
            let Reverse((number, candidate)) = self.0.pop()?;
            match candidate {
                Candidate::One => {
                    let Some(parked) = waiters.get(number) else { continue };
                    match parked.blocker(index).filter(|_| parked.waiter.is_waiting()) {
                        Some(held) => waiters.note(number, &held),
                        None => return Some(number),
                    }
                }
                Candidate::Below { is_write, at } => self.push_candidates(waiters, index, is_write, at),
            }
        }
    }

    fn push_candidates<T>(&mut self, waiters: &mut Waiters<T>, index: &Index, is_write: bool, at: Link) {
        let Some(node) = waiters.places.node(at) else { return };
        let (sum, number) = (node.sum, node.item.number);
        let kind = if is_write { LockKind::Write } else { LockKind::Read };
        // It begins before the first of these ends, and ends after the last of them begins: it is in the way of all.
        let query = Query { start_max: sum.end_min, end_min: sum.start_max, kind, except: None };
        let Some(held) = index.find_last(&query) else {
            let (left, right) = waiters.places.isolate(at);
            self.0.push(Reverse((number, Candidate::One)));
            self.push(waiters, is_write, left);
            self.push(waiters, is_write, right);
            return;
        };
        // But not in the way of its owner, whose requests are looked at apart.
        let mut root = at;
        let own: Vec<u64> = waiters.by_owner.get(&held.owner).into_iter().flatten().copied().collect();
        for number in own {
            let place = waiters.all.get(&number).map_or(Link::NONE, |entry| entry.place);
            if place == Link::NONE || waiters.places.root_of(place) != root {
                continue;
            }
            root = waiters.uproot(place);
            if let Some(entry) = waiters.all.get_mut(&number) {
                let Lock { start, end, .. } = entry.parked.lock;
                entry.place = waiters.places.plant(WaitRange { start, end, number });
            }
            self.0.push(Reverse((number, Candidate::One)));
        }
        if root != Link::NONE {
            waiters.add_noted(Some(held.key()), is_write, root);
        }
    }
}
