//! What failed how often, and when that is enough.

use std::collections::BTreeMap;

/// Runs of one row that may fail before a system is left alone there: qemu-storage-daemon 11.1 ends connections under some
/// loads only (bench/peers/README.md).
const FAILURES_MAX: usize = 2;
/// Rows in a row without a single good run before a system is left alone for good.
const STRIKES_MAX: usize = 2;

/// The failures of systems, each known by a key.
#[derive(Debug)]
pub struct Failures<K> {
    /// In this row: how many runs, and why the last one.
    failures: BTreeMap<K, (usize, String)>,
    /// Rows without a good run, in a row, and why.
    strikes: BTreeMap<K, (usize, String)>,
}

impl<K> Default for Failures<K> {
    fn default() -> Self {
        Self { failures: BTreeMap::new(), strikes: BTreeMap::new() }
    }
}

impl<K: Ord + Copy> Failures<K> {
    /// A row begins.
    pub fn begin_row(&mut self) {
        self.failures.clear();
    }

    /// Whether a system has not failed too often.
    pub fn is_able(&self, key: K) -> bool {
        let failed = self.failures.get(&key).is_some_and(|(count, _)| *count >= FAILURES_MAX);
        let struck = self.strikes.get(&key).is_some_and(|(count, _)| *count >= STRIKES_MAX);
        !failed && !struck
    }

    /// A run of a system failed.
    pub fn note(&mut self, key: K, reason: String) {
        let count = self.failures.get(&key).map_or(0, |(count, _)| *count);
        self.failures.insert(key, (count + 1, reason));
    }

    /// A row has ended. A system that fails row after row is left alone, or each of its runs would wait for its time to end.
    pub fn end_row(&mut self, good: impl Fn(K) -> bool) {
        self.strikes.retain(|key, _| !good(*key));
        for (key, (_, reason)) in self.failures.iter().filter(|(key, _)| !good(**key)) {
            let strikes = self.strikes.entry(*key).or_insert((0, String::new()));
            *strikes = (strikes.0 + 1, reason.clone());
        }
    }

    /// What there is to say of a system in the row that ended, of so many runs.
    pub fn reason(&self, key: K, runs: usize) -> Option<String> {
        match (self.failures.get(&key), self.strikes.get(&key)) {
            (Some((count, reason)), _) => Some(format!("{count} of {runs} runs failed: {reason}")),
            (None, Some((_, reason))) => Some(format!("failed before: {reason}")),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systems_that_keep_failing_are_skipped() {
        let mut trouble = Failures::default();
        for row in 0..STRIKES_MAX {
            trouble.begin_row();
            for run in 0..FAILURES_MAX {
                assert!(trouble.is_able(1), "row {row}, run {run}");
                trouble.note(1, "no".into());
            }
            assert!(!trouble.is_able(1) && trouble.is_able(2));
            trouble.end_row(|_| false);
            assert_eq!(trouble.reason(1, 5), Some("2 of 5 runs failed: no".into()));
        }
        trouble.begin_row();
        assert!(!trouble.is_able(1));
        assert_eq!((trouble.reason(1, 5), trouble.reason(2, 5)), (Some("failed before: no".into()), None));
        trouble.end_row(|key| key == 1);
        assert!(trouble.is_able(1));
    }
}
