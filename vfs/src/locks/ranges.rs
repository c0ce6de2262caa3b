//! The byte ranges that one owner holds in one file.

use std::collections::BTreeMap;

use crate::LockKind;

/// A locked range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    /// Inclusive.
    pub(super) end: u64,
    pub(super) kind: LockKind,
    pub(super) pid: u32,
}

/// A change of the ranges of an owner.
#[derive(Debug, Default)]
pub(super) struct Change {
    /// Removed ranges.
    pub(super) old: Vec<Range>,
    /// Added ranges.
    pub(super) new: Vec<Range>,
}

/// Disjoint ranges by their first byte.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges {
    all: BTreeMap<u64, Range>,
    /// The last bytes of the write locks among them.
    writes: BTreeMap<u64, u64>,
}

impl Ranges {
    /// Locks or unlocks a range, whatever its previous state.
    pub(super) fn set(&mut self, request: Range) -> Change {
        // Ranges that overlap or touch it.
        let before = self.all.range(..=request.end.saturating_add(1)).rev();
        let near = before.take_while(|(_, range)| range.end.saturating_add(1) >= request.start);
        let mut old: Vec<Range> = near.map(|(_, range)| *range).collect();
        old.reverse();
        let mut new = Vec::with_capacity(old.len() + 2);
        new.extend(old.iter().filter(|range| range.start < request.start).map(|range| {
            let end = range.end.min(request.start - 1);
            Range { end, ..*range }
        }));
        if request.kind != LockKind::Unlock {
            new.push(request);
        }
        new.extend(old.iter().filter(|range| range.end > request.end).map(|range| {
            let start = range.start.max(request.end + 1);
            Range { start, ..*range }
        }));
        // Adjacent ranges of one kind are merged, as in the kernel.
        new.dedup_by(|b, a| {
            let joins = a.kind == b.kind && a.pid == b.pid && a.end.checked_add(1) == Some(b.start);
            if joins {
                a.end = b.end;
            }
            joins
        });
        // Adjacent ranges that do not change.
        let is_known = |range: &Range| self.all.get(&range.start) == Some(range);
        let (kept, new): (Vec<Range>, Vec<Range>) = new.into_iter().partition(is_known);
        old.retain(|range| !kept.contains(range));
        for range in &old {
            self.all.remove(&range.start);
            self.writes.remove(&range.start);
        }
        for range in &new {
            self.all.insert(range.start, *range);
            if range.kind == LockKind::Write {
                self.writes.insert(range.start, range.end);
            }
        }
        Change { old, new }
    }

    /// Unlocks all.
    pub(super) fn take(&mut self) -> Change {
        let old: Vec<Range> = std::mem::take(self).all.into_values().collect();
        Change { old, new: Vec::new() }
    }

    /// Returns whether another owner's request conflicts with one of these.
    pub(super) fn excludes(&self, start: u64, end: u64, kind: LockKind) -> bool {
        match kind {
            LockKind::Write => self.all.range(..=end).next_back().is_some_and(|(_, range)| range.end >= start),
            LockKind::Read => self.writes.range(..=end).next_back().is_some_and(|(_, last)| *last >= start),
            LockKind::Unlock => false,
        }
    }

    /// Returns the first range with a byte between these.
    pub(super) fn first(&self, start: u64, end: u64) -> Option<&Range> {
        let before = self.all.range(..start).next_back().map(|(_, range)| range).filter(|range| range.end >= start);
        before.or_else(|| self.all.range(start..=end).next().map(|(_, range)| range))
    }

    /// Returns the range that begins at this byte.
    pub(super) fn get(&self, start: u64) -> Option<&Range> {
        self.all.get(&start)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BYTES: u8 = 24;

    fn kinds() -> impl Strategy<Value = LockKind> {
        prop_oneof![Just(LockKind::Read), Just(LockKind::Write), Just(LockKind::Unlock)]
    }

    proptest! {
        /// Against an array with the kind of every byte.
        #[test]
        fn sets_like_an_array(steps in prop::collection::vec((0..BYTES, 0..BYTES, kinds()), 1..40)) {
            let mut ranges = Ranges::default();
            let mut bytes = [LockKind::Unlock; 24];
            for (a, b, kind) in steps {
                let (start, end) = (a.min(b), a.max(b));
                let before = ranges.clone();
                let change = ranges.set(Range { start: start.into(), end: end.into(), kind, pid: 1 });
                bytes[usize::from(start)..=usize::from(end)].fill(kind);
                for (at, expected) in bytes.iter().enumerate() {
                    let place = at as u64;
                    let found = ranges.all.values().find(|range| range.start <= place && place <= range.end);
                    prop_assert_eq!(found.map_or(LockKind::Unlock, |range| range.kind), *expected);
                    prop_assert_eq!(ranges.excludes(place, place, LockKind::Write), *expected != LockKind::Unlock);
                    prop_assert_eq!(ranges.excludes(place, place, LockKind::Read), *expected == LockKind::Write);
                    let first = ranges.all.values().find(|range| range.end >= place && range.start <= place + 3);
                    prop_assert_eq!(ranges.first(place, place + 3), first);
                }
                let mut again: Vec<Range> = before.all.values().filter(|range| !change.old.contains(range)).copied().collect();
                again.extend(&change.new);
                again.sort_by_key(|range| range.start);
                prop_assert_eq!(&again, &ranges.all.values().copied().collect::<Vec<_>>());
                for pair in again.windows(2) {
                    prop_assert!(pair[0].end < pair[1].start);
                    prop_assert!(pair[0].kind != pair[1].kind || pair[0].end + 1 < pair[1].start);
                }
            }
        }
    }

    #[test]
    fn the_end_of_the_file_is_handled_as_any_other_offset() {
        let end = i64::MAX as u64;
        let mut ranges = Ranges::default();
        ranges.set(Range { start: 0, end, kind: LockKind::Write, pid: 1 });
        ranges.set(Range { start: 10, end, kind: LockKind::Unlock, pid: 1 });
        let left = Range { start: 0, end: 9, kind: LockKind::Write, pid: 1 };
        assert_eq!(ranges.all.values().collect::<Vec<_>>(), [&left]);
        ranges.set(Range { start: 0, end, kind: LockKind::Unlock, pid: 1 });
        assert_eq!(ranges, Ranges::default());
    }
}
