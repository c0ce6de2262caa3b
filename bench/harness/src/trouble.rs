//! What failed how often, and when that is enough.

use std::collections::BTreeMap;
use std::time::Duration;

/// Runs of one row that may fail before a system is left alone there: qemu-storage-daemon 11.1 ends connections under some
/// loads only (bench/peers/README.md).
const FAILURES_MAX: usize = 2;
/// Rows in a row that a system did not reply in before it is left alone for good.
const STRIKES_MAX: usize = 2;
/// A run that failed sooner had a reply, so that the next rows lose little time by it. No reply is waited for less.
const NO_REPLY_MIN: Duration = Duration::from_secs(10);

/// The failures of systems, each known by a key.
#[derive(Debug)]
pub struct Failures<K> {
    /// In this row.
    failures: BTreeMap<K, RowFailures>,
    /// Rows without a good run and without a reply, in a row, and why.
    strikes: BTreeMap<K, (usize, String)>,
}

/// The failures of a system in one row.
#[derive(Debug)]
struct RowFailures {
    runs: usize,
    /// Why the last one failed.
    reason: String,
    /// Whether one of them had no reply.
    waited: bool,
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
        let failed = self.failures.get(&key).is_some_and(|row| row.runs >= FAILURES_MAX);
        let struck = self.strikes.get(&key).is_some_and(|(count, _)| *count >= STRIKES_MAX);
        !failed && !struck
    }

    /// A run of a system failed, after so long.
    pub fn note(&mut self, key: K, reason: String, took: Duration) {
        let before = self.failures.remove(&key);
        let runs = before.as_ref().map_or(0, |row| row.runs) + 1;
        let waited = before.is_some_and(|row| row.waited) || took >= NO_REPLY_MIN;
        self.failures.insert(key, RowFailures { runs, reason, waited });
    }

    /// A row has ended. A system that does not reply row after row is left alone, or each of its runs would wait for its time
    /// to end. One that a row is not for replies at once, and has its part in the next ones.
    pub fn end_row(&mut self, good: impl Fn(K) -> bool) {
        self.strikes.retain(|key, _| !good(*key));
        for (key, row) in self.failures.iter().filter(|(key, row)| row.waited && !good(**key)) {
            let strikes = self.strikes.entry(*key).or_insert((0, String::new()));
            *strikes = (strikes.0 + 1, row.reason.clone());
        }
    }

    /// What there is to say of a system in the row that ended, of so many runs.
    pub fn reason(&self, key: K, runs: usize) -> Option<String> {
        let struck = self.strikes.get(&key).filter(|(count, _)| *count >= STRIKES_MAX);
        match (self.failures.get(&key), struck) {
            (Some(row), _) => Some(format!("{} of {runs} runs failed: {}", row.runs, row.reason)),
            (None, Some((_, reason))) => Some(format!("failed before: {reason}")),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systems_that_never_reply_are_skipped() {
        let mut trouble = Failures::default();
        for row in 0..STRIKES_MAX {
            trouble.begin_row();
            for run in 0..FAILURES_MAX {
                assert!(trouble.is_able(1), "row {row}, run {run}");
                trouble.note(1, "no".into(), NO_REPLY_MIN);
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

    #[test]
    fn systems_that_refuse_some_rows_have_the_others() {
        let mut trouble = Failures::default();
        for _ in 0..2 * STRIKES_MAX {
            trouble.begin_row();
            assert!(trouble.is_able(1));
            (0..FAILURES_MAX).for_each(|_| trouble.note(1, "errno 22".into(), Duration::from_secs(1)));
            assert!(!trouble.is_able(1));
            trouble.end_row(|_| false);
        }
        trouble.begin_row();
        assert!(trouble.is_able(1));
        assert_eq!(trouble.reason(1, 5), None);
    }
}
