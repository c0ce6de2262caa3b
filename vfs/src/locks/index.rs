//! An index of the locked ranges of one file, to find a conflicting lock.

use super::ranges::Range;
use super::tree::{Item, NodeIndex, Tree};
use crate::{LockKind, LockOwner};

/// Identifies a lock: its first byte and its owner.
pub(super) type HeldKey = (u64, LockOwner);

/// A locked range of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldLock {
    pub(super) owner: LockOwner,
    pub(super) start: u64,
    /// Inclusive.
    pub(super) end: u64,
    pub(super) is_write: bool,
}

/// The last end of ranges with its owner, and the last end of the other owners. Ends are exclusive; 0 means none.
#[derive(Clone, Copy, Debug)]
struct EndSummary {
    end: u64,
    owner: LockOwner,
    others_end: u64,
}

impl EndSummary {
    fn none(owner: LockOwner) -> Self {
        Self { end: 0, owner, others_end: 0 }
    }

    fn join(&self, other: &Self) -> Self {
        let (far, near) = if self.end >= other.end { (self, other) } else { (other, self) };
        let others_end = if near.owner == far.owner { near.others_end } else { near.end };
        Self { others_end: far.others_end.max(others_end), ..*far }
    }

    /// Returns the last end of the owners other than `except`.
    fn without(&self, except: Option<LockOwner>) -> u64 {
        if except == Some(self.owner) { self.others_end } else { self.end }
    }
}

/// The last ends of all locks and of write locks.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndSummaries {
    all: EndSummary,
    writes: EndSummary,
}

impl Item for HeldLock {
    type Key = HeldKey;
    type Summary = EndSummaries;

    fn key(&self) -> Self::Key {
        (self.start, self.owner)
    }

    fn summary(&self) -> EndSummaries {
        let none = EndSummary::none(self.owner);
        let all = EndSummary { end: self.end.saturating_add(1), ..none };
        EndSummaries { all, writes: if self.is_write { all } else { none } }
    }

    fn join(one: &EndSummaries, other: &EndSummaries) -> EndSummaries {
        EndSummaries { all: one.all.join(&other.all), writes: one.writes.join(&other.writes) }
    }
}

/// A search for locks that conflict with a request of a kind, begin at `start_max` or before, and end at `end_min` or
/// after.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query {
    pub(super) start_max: u64,
    pub(super) end_min: u64,
    pub(super) kind: LockKind,
    /// The owner whose locks do not count.
    pub(super) except: Option<LockOwner>,
}

impl Query {
    fn reaches(&self, summary: &EndSummaries) -> bool {
        let reach = match self.kind {
            LockKind::Read => &summary.writes,
            LockKind::Write => &summary.all,
            LockKind::Unlock => return false,
        };
        reach.without(self.except) > self.end_min
    }
}

#[derive(Debug, Default)]
pub(super) struct Index(Tree<HeldLock>);

impl Index {
    /// Replaces ranges of an owner.
    pub(super) fn replace(&mut self, owner: LockOwner, old: &[Range], new: &[Range]) {
        for range in old {
            self.0.remove((range.start, owner));
        }
        for &Range { start, end, kind, .. } in new {
            self.0.insert(HeldLock { owner, start, end, is_write: kind == LockKind::Write });
        }
    }

    /// Returns the first matching lock.
    pub(super) fn find(&self, query: &Query) -> Option<HeldLock> {
        let mut at = self.0.root();
        while let Some(node) = self.0.node(at) {
            if !query.reaches(&node.summary) {
                return None;
            }
            let before = self.0.node(node.left);
            at = if node.item.start > query.start_max || before.is_some_and(|before| query.reaches(&before.summary)) {
                node.left
            } else if query.reaches(&node.item.summary()) {
                return Some(node.item);
            } else {
                node.right
            };
        }
        None
    }

    /// Returns the last matching lock.
    pub(super) fn find_last(&self, query: &Query) -> Option<HeldLock> {
        self.last_below(query, self.0.root())
    }

    /// All locks that begin at `start_max` or before precede the first node that does not. So only summaries on the path to
    /// that node may include locks that do not match.
    fn last_below(&self, query: &Query, at: NodeIndex) -> Option<HeldLock> {
        let node = self.0.node(at).filter(|node| query.reaches(&node.summary))?;
        if node.item.start > query.start_max {
            return self.last_below(query, node.left);
        }
        let own = || query.reaches(&node.item.summary()).then_some(node.item);
        self.last_below(query, node.right).or_else(own).or_else(|| self.last_below(query, node.left))
    }

    /// Returns all matching locks; `None` if there are more than `count_max`.
    pub(super) fn find_all(&self, query: &Query, count_max: usize) -> Option<Vec<HeldLock>> {
        let mut found = Vec::new();
        self.collect(query, self.0.root(), count_max, &mut found).then_some(found)
    }

    fn collect(&self, query: &Query, at: NodeIndex, count_max: usize, found: &mut Vec<HeldLock>) -> bool {
        let Some(node) = self.0.node(at) else { return true };
        if !query.reaches(&node.summary) {
            return true;
        }
        if !self.collect(query, node.left, count_max, found) {
            return false;
        }
        if node.item.start > query.start_max {
            return true;
        }
        if query.reaches(&node.item.summary()) {
            if found.len() == count_max {
                return false;
            }
            found.push(node.item);
        }
        self.collect(query, node.right, count_max, found)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::SessionId;

    fn owner(id: u64) -> LockOwner {
        LockOwner { session: SessionId::default(), id }
    }

    proptest! {
        /// Compares with a linear search. Ranges may overlap here, unlike those of a lock table.
        #[test]
        fn searches_equal_a_linear_search(
            held in prop::collection::btree_map((0..20_u64, 0..4_u64), (0..10_u64, any::<bool>()), 0..40),
            queries in prop::collection::vec((0..24_u64, 0..24_u64, any::<bool>(), prop::option::of(0..4_u64)), 1..40),
        ) {
            let mut index = Index::default();
            let all: Vec<HeldLock> = held.into_iter().map(|((start, id), (len, is_write))| {
                HeldLock { owner: owner(id), start, end: start + len, is_write }
            }).collect();
            all.iter().for_each(|held| index.0.insert(*held));
            for (start_max, end_min, writes, except) in queries {
                let kind = if writes { LockKind::Write } else { LockKind::Read };
                let except = except.map(owner);
                let matches = |held: &&HeldLock| {
                    held.start <= start_max && held.end >= end_min && Some(held.owner) != except && (writes || held.is_write)
                };
                let expected: Vec<HeldLock> = all.iter().filter(matches).copied().collect();
                let query = Query { start_max, end_min, kind, except };
                prop_assert_eq!(index.find(&query), expected.first().copied());
                prop_assert_eq!(index.find_last(&query), expected.last().copied());
                prop_assert_eq!(index.find_all(&query, expected.len()), Some(expected.clone()));
                if let Some(fewer) = expected.len().checked_sub(1) {
                    prop_assert_eq!(index.find_all(&query, fewer), None);
                }
            }
        }
    }
}
