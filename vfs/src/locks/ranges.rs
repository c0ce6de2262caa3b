//! The byte ranges that one owner has locked in one file.

use crate::LockKind;

/// Whether two locks of different owners cannot be held at once.
pub(super) fn exclude(one: LockKind, other: LockKind) -> bool {
    use LockKind::{Read, Write};
    matches!((one, other), (Write, Read | Write) | (Read, Write))
}

/// A locked range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    /// Inclusive.
    pub(super) end: u64,
    pub(super) kind: LockKind,
    pub(super) pid: u32,
}

/// Ranges that do not overlap, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges(Vec<Range>);

impl Ranges {
    /// Locks a range anew, or unlocks it, whatever it was before.
    pub(super) fn set(&mut self, new: Range) {
        // Those that overlap it, or touch it.
        let from = self.0.partition_point(|old| old.end.saturating_add(1) < new.start);
        let count = self.0[from..].partition_point(|old| old.start <= new.end.saturating_add(1));
        let near = &self.0[from..from + count];
        let mut next = Vec::with_capacity(near.len() + 2);
        for old in near {
            if old.start < new.start {
                next.push(Range { end: old.end.min(new.start - 1), ..*old });
            }
        }
        if new.kind != LockKind::Unlock {
            next.push(new);
        }
        for old in near {
            if old.end > new.end {
                next.push(Range { start: old.start.max(new.end + 1), ..*old });
            }
        }
        // Neighbours of one kind are one lock, as in the kernel.
        next.dedup_by(|b, a| {
            let joins = a.kind == b.kind && a.pid == b.pid && a.end.checked_add(1) == Some(b.start);
            if joins {
                a.end = b.end;
            }
            joins
        });
        self.0.splice(from..from + count, next);
    }

    /// The first range that another owner's request would have to wait for.
    pub(super) fn conflict(&self, start: u64, end: u64, kind: LockKind) -> Option<&Range> {
        let from = self.0.partition_point(|range| range.end < start);
        self.0[from..].iter().take_while(|range| range.start <= end).find(|range| exclude(range.kind, kind))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
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
                ranges.set(Range { start: start.into(), end: end.into(), kind, pid: 1 });
                bytes[usize::from(start)..=usize::from(end)].fill(kind);
                for (at, expected) in bytes.iter().enumerate() {
                    let at = at as u64;
                    let found = ranges.0.iter().find(|range| range.start <= at && at <= range.end);
                    prop_assert_eq!(found.map_or(LockKind::Unlock, |range| range.kind), *expected);
                    prop_assert_eq!(ranges.conflict(at, at, LockKind::Write).is_some(), *expected != LockKind::Unlock);
                    prop_assert_eq!(ranges.conflict(at, at, LockKind::Read).is_some(), *expected == LockKind::Write);
                }
                for pair in ranges.0.windows(2) {
                    prop_assert!(pair[0].end < pair[1].start);
                    prop_assert!(pair[0].kind != pair[1].kind || pair[0].end + 1 < pair[1].start);
                }
            }
        }
    }

    #[test]
    fn the_end_of_the_file_is_a_place_like_others() {
        let end = i64::MAX as u64;
        let mut ranges = Ranges::default();
        ranges.set(Range { start: 0, end, kind: LockKind::Write, pid: 1 });
        ranges.set(Range { start: 10, end, kind: LockKind::Unlock, pid: 1 });
        assert_eq!(ranges.0, [Range { start: 0, end: 9, kind: LockKind::Write, pid: 1 }]);
        ranges.set(Range { start: 0, end, kind: LockKind::Unlock, pid: 1 });
        assert!(ranges.is_empty());
    }
}
