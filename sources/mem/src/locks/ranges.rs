//! The byte ranges that one owner has locked in one file.

use ferry_vfs::LockKind;

/// A locked range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    /// Inclusive.
    pub(super) end: u64,
    pub(super) kind: LockKind,
    pub(super) pid: u32,
}

/// Ranges that do not overlap, in order; neighbours of one kind and process are one.
#[derive(Debug, Default)]
pub(super) struct Ranges(Vec<Range>);

impl Ranges {
    /// Locks a range anew, or unlocks it, whatever it was before.
    pub(super) fn set(&mut self, new: Range) {
        let before = self.0.iter().filter(|old| old.start < new.start);
        let mut next: Vec<Range> =
            before.map(|old| Range { end: old.end.min(new.start.saturating_sub(1)), ..*old }).collect();
        if new.kind != LockKind::Unlock {
            next.push(new);
        }
        let after = self.0.iter().filter(|old| old.end > new.end);
        next.extend(after.map(|old| Range { start: old.start.max(new.end.saturating_add(1)), ..*old }));
        next.dedup_by(|right, left| {
            let joins =
                (left.kind, left.pid) == (right.kind, right.pid) && left.end.checked_add(1) == Some(right.start);
            if joins {
                left.end = right.end;
            }
            joins
        });
        self.0 = next;
    }

    /// The first range that another owner's request would have to wait for.
    pub(super) fn conflict(&self, start: u64, end: u64, kind: LockKind) -> Option<&Range> {
        let overlaps = |range: &&Range| range.start <= end && start <= range.end;
        let excludes = |range: &&Range| range.kind == LockKind::Write || kind == LockKind::Write;
        self.0.iter().find(|range| overlaps(range) && excludes(range))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> impl Strategy<Value = LockKind> {
        prop_oneof![Just(LockKind::Read), Just(LockKind::Write), Just(LockKind::Unlock)]
    }

    proptest! {
        /// Against an array with the kind of every byte.
        #[test]
        fn sets_like_an_array(steps in prop::collection::vec((0_usize..24, 0_usize..24, kinds()), 1..40)) {
            let mut ranges = Ranges::default();
            let mut bytes = [LockKind::Unlock; 24];
            for (a, b, kind) in steps {
                let (start, end) = (a.min(b), a.max(b));
                ranges.set(Range { start: start as u64, end: end as u64, kind, pid: 1 });
                bytes[start..=end].fill(kind);
                for (at, expected) in bytes.iter().enumerate() {
                    let at = at as u64;
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
}
