//! The requests that wait for locks of one file, and which of them can go on when locks go.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

use super::index::{Index, Query};
use super::tree::{Item, Link, Tree};
use crate::{Handle, Lock, LockKind, LockOwner, Waiter};

/// A request that waits.
#[derive(Debug)]
pub(super) struct Parked<T> {
    pub(super) open: Arc<T>,
    pub(super) handle: Handle,
    pub(super) lock: Lock,
    pub(super) waiter: Waiter,
}

impl<T> Parked<T> {
    /// Whether a lock of another owner is in the way of a POSIX lock.
    pub(super) fn is_blocked(&self, index: &Index) -> bool {
        index.find(&Query::of(&self.lock)).is_some()
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
struct Place {
    start: u64,
    end: u64,
    number: u64,
}

/// What is known of several places.
#[derive(Clone, Copy, Debug)]
struct Places {
    start_min: u64,
    start_max: u64,
    end_min: u64,
    end_max: u64,
    number_min: u64,
}

impl Item for Place {
    type Key = (u64, u64);
    type Sum = Places;

    fn key(&self) -> Self::Key {
        (self.start, self.number)
    }

    fn sum(&self) -> Places {
        let Self { start, end, number } = *self;
        Places { start_min: start, start_max: start, end_min: end, end_max: end, number_min: number }
    }

    fn join(one: &Places, other: &Places) -> Places {
        Places {
            start_min: one.start_min.min(other.start_min),
            start_max: one.start_max.max(other.start_max),
            end_min: one.end_min.min(other.end_min),
            end_max: one.end_max.max(other.end_max),
            number_min: one.number_min.min(other.number_min),
        }
    }
}

/// The requests that wait, by their numbers, which count up.
#[derive(Debug)]
pub(super) struct Waiters<T> {
    all: BTreeMap<u64, Parked<T>>,
    /// Those for POSIX locks, by place.
    reads: Tree<Place>,
    writes: Tree<Place>,
    /// Those for flock locks.
    flock_reads: BTreeSet<u64>,
    flock_writes: BTreeSet<u64>,
    /// The same by the handles that they are for.
    flocks_by_handle: HashMap<Handle, BTreeSet<u64>>,
    by_handle: HashMap<Handle, BTreeSet<u64>>,
    by_owner: HashMap<LockOwner, BTreeSet<u64>>,
    /// Those that somebody else was in the way of, whom this table does not know.
    foreign: BTreeSet<u64>,
    /// Places in the trees of requests that wait no more.
    stale: Vec<(LockKind, (u64, u64))>,
    /// Where [`Self::sweep`] goes on.
    swept: u64,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self {
            all: BTreeMap::new(),
            reads: Tree::default(),
            writes: Tree::default(),
            flock_reads: BTreeSet::new(),
            flock_writes: BTreeSet::new(),
            flocks_by_handle: HashMap::new(),
            by_handle: HashMap::new(),
            by_owner: HashMap::new(),
            foreign: BTreeSet::new(),
            stale: Vec::new(),
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

    pub(super) fn get(&self, number: u64) -> Option<&Parked<T>> {
        self.all.get(&number)
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

    fn tree(&mut self, kind: LockKind) -> &mut Tree<Place> {
        if kind == LockKind::Write { &mut self.writes } else { &mut self.reads }
    }

    fn flocks(&mut self, kind: LockKind) -> &mut BTreeSet<u64> {
        if kind == LockKind::Write { &mut self.flock_writes } else { &mut self.flock_reads }
    }

    pub(super) fn insert(&mut self, number: u64, parked: Parked<T>, is_foreign: bool) {
        let Lock { kind, owner, start, end, flock, .. } = parked.lock;
        self.by_handle.entry(parked.handle).or_default().insert(number);
        if flock {
            self.flocks(kind).insert(number);
            self.flocks_by_handle.entry(parked.handle).or_default().insert(number);
        } else {
            self.by_owner.entry(owner).or_default().insert(number);
            self.tree(kind).insert(Place { start, end, number });
        }
        self.all.insert(number, parked);
        if is_foreign {
            self.foreign.insert(number);
        }
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Parked<T>> {
        let parked = self.take(number);
        self.tidy();
        parked
    }

    /// As [`Self::remove`], during a search, which ends with [`Self::tidy`].
    pub(super) fn take(&mut self, number: u64) -> Option<Parked<T>> {
        let parked = self.all.remove(&number)?;
        let Lock { kind, owner, start, flock, .. } = parked.lock;
        remove_from(&mut self.by_handle, &parked.handle, number);
        if flock {
            self.flocks(kind).remove(&number);
            remove_from(&mut self.flocks_by_handle, &parked.handle, number);
        } else {
            remove_from(&mut self.by_owner, &owner, number);
            self.stale.push((kind, (start, number)));
        }
        self.foreign.remove(&number);
        Some(parked)
    }

    /// Brings the trees up to date.
    pub(super) fn tidy(&mut self) {
        for (kind, key) in std::mem::take(&mut self.stale) {
            self.tree(kind).remove(key);
        }
    }

    /// Somebody else is in the way of a request.
    pub(super) fn set_foreign(&mut self, number: u64) {
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
        for (number, parked) in self.all.range(self.swept..).take(count_max) {
            if !parked.waiter.is_waiting() {
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
            numbers.find(|number| self.all.get(number).is_some_and(|parked| parked.lock.kind == kind))
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
/// It goes down the trees of requests. What lies below a node is passed over as a whole if none of it touches a freed range, or if one lock
/// is in the way of all of it: the lock's own owner may wait there, too, and is looked at apart, unless a lock of another owner is in the way as
/// well. So no request of thousands that wait for one lock is looked at but the one that gets it.
#[derive(Debug, Default)]
pub(super) struct Search {
    /// In order, none touches another.
    freed: Vec<(u64, u64)>,
    next: BinaryHeap<Reverse<(u64, Candidate)>>,
    /// Owners whose requests are candidates already.
    owners: HashSet<LockOwner>,
    /// Requests that were returned already, and could not go on.
    tried: HashSet<u64>,
}

impl Search {
    /// Ranges were freed: everything that waits there may be able to go on.
    pub(super) fn add<T>(&mut self, freed: Vec<(u64, u64)>, waiters: &Waiters<T>) {
        if freed.is_empty() || waiters.all.is_empty() {
            return;
        }
        self.freed.extend(freed);
        self.freed.sort_unstable();
        self.freed.dedup_by(|next, range| {
            let overlaps = next.0 <= range.1;
            if overlaps {
                range.1 = range.1.max(next.1);
            }
            overlaps
        });
        self.owners.clear();
        for (tree, is_write) in [(&waiters.reads, false), (&waiters.writes, true)] {
            self.push(tree, tree.root(), is_write);
        }
    }

    fn push(&mut self, tree: &Tree<Place>, at: Link, is_write: bool) {
        if let Some(node) = tree.node(at) {
            self.next.push(Reverse((node.sum.number_min, Candidate::Below { is_write, at })));
        }
    }

    /// Whether a range meets one that was freed.
    fn touches(&self, start: u64, end: u64) -> bool {
        let before = self.freed.partition_point(|(first, _)| *first <= end);
        self.freed[..before].last().is_some_and(|(_, last)| *last >= start)
    }

    /// The next request that can go on, as far as the table knows. The caller tries it, and changes no tree meanwhile.
    pub(super) fn next<T>(&mut self, waiters: &Waiters<T>, index: &Index) -> Option<u64> {
        while let Some(Reverse((number, candidate))) = self.next.pop() {
            match candidate {
                Candidate::One => {
                    let Some(parked) = waiters.all.get(&number).filter(|_| !self.tried.contains(&number)) else {
                        continue;
                    };
                    if !parked.waiter.is_waiting() || !parked.is_blocked(index) {
                        self.tried.insert(number);
                        return Some(number);
                    }
                }
                Candidate::Below { is_write, at } => self.look_below(waiters, index, is_write, at),
            }
        }
        None
    }

    fn look_below<T>(&mut self, waiters: &Waiters<T>, index: &Index, is_write: bool, at: Link) {
        let tree = if is_write { &waiters.writes } else { &waiters.reads };
        let Some(node) = tree.node(at) else { return };
        let sum = node.sum;
        if !self.touches(sum.start_min, sum.end_max) {
            return;
        }
        let kind = if is_write { LockKind::Write } else { LockKind::Read };
        // It begins before the first of these ends, and ends after the last of them begins: it is in the way of all.
        let query = Query { start_max: sum.end_min, end_min: sum.start_max, kind, except: None };
        let Some(held) = index.find(&query) else {
            let place = node.item;
            if self.touches(place.start, place.end) {
                self.next.push(Reverse((place.number, Candidate::One)));
            }
            self.push(tree, node.left, is_write);
            self.push(tree, node.right, is_write);
            return;
        };
        let others = Query { except: Some(held.owner), ..query };
        if index.find(&others).is_none() && self.owners.insert(held.owner) {
            let own = waiters.by_owner.get(&held.owner).into_iter().flatten();
            self.next.extend(own.map(|number| Reverse((*number, Candidate::One))));
        }
    }
}
