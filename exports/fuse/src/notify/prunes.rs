//! Inodes to prune from a kernel with a write-back cache, which uses its own length and times of a file while it knows
//! it.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use ferry_vfs::Ino;

use super::pending::{Job, NOTES_MAX, PendingNotifications};

/// When to prune an inode again that may have been in use at the first attempt: a close that is not answered yet keeps it for a
/// moment, a program for longer. Each time is at most twice as long.
const PRUNE_AGAIN: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];

/// Inodes that are given out once more.
#[derive(Debug, Default)]
struct Repetition {
    /// Those added since the last time, and those before it.
    young: HashSet<Ino>,
    old: HashSet<Ino>,
    next: Option<Instant>,
}

impl Repetition {
    /// Those whose time has come; adds others, whose time comes when `delay` has passed twice at the latest.
    fn due(&mut self, now: Instant, delay: Duration, new: &HashSet<Ino>) -> HashSet<Ino> {
        let mut due = HashSet::new();
        if self.next.is_some_and(|next| next <= now) {
            due = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
            self.next = None;
        }
        self.young.extend(new);
        if self.next.is_none() && !(self.young.is_empty() && self.old.is_empty()) {
            self.next = Some(now + delay);
        }
        due
    }
}

/// What is to be pruned: at once, and again ([`PRUNE_AGAIN`]).
#[derive(Debug, Default)]
pub(super) struct Prunes {
    new: HashSet<Ino>,
    again: [Repetition; 2],
    all: bool,
    /// When everything is pruned once more.
    all_again: [Option<Instant>; 2],
}

impl Prunes {
    pub(super) fn add(&mut self, notes: &PendingNotifications) {
        let (inodes, all) = notes.touched();
        self.new.extend(inodes);
        self.all |= all;
    }

    /// When something is to be given out again.
    pub(super) fn next(&self) -> Option<Instant> {
        self.again.iter().map(|again| again.next).chain(self.all_again).flatten().min()
    }

    /// Those whose time has come.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Job> {
        let new = std::mem::take(&mut self.new);
        let mut due = new.clone();
        for (again, delay) in self.again.iter_mut().zip(PRUNE_AGAIN) {
            due.extend(again.due(now, delay, &new));
        }
        if std::mem::take(&mut self.all) || self.again.iter().any(|again| again.young.len() > NOTES_MAX) {
            self.again = Default::default();
            self.all_again = PRUNE_AGAIN.map(|delay| Some(now + delay));
            return vec![Job::PruneAll];
        }
        let is_due = |again: &mut Option<Instant>| again.take_if(|time| *time <= now).is_some();
        if self.all_again.iter_mut().map(is_due).fold(false, |one, other| one | other) {
            return vec![Job::PruneAll];
        }
        due.into_iter().map(Job::Prune).collect()
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::Change;

    use super::*;

    #[test]
    fn pruned_inodes_are_pruned_again() {
        let mut prunes = Prunes::default();
        let noted = |ino| {
            let mut notes = PendingNotifications::default();
            notes.add(&Change::Attr { ino: Ino(ino) });
            notes
        };
        let begin = Instant::now();
        let due = |prunes: &mut Prunes, now| {
            let mut jobs = prunes.due(now);
            jobs.sort_by_key(Job::waits_for);
            jobs
        };
        let all = |inos: &[u64]| inos.iter().copied().map(Ino).map(Job::Prune).collect::<Vec<_>>();
        assert_eq!((due(&mut prunes, begin), prunes.next()), (all(&[]), None));
        prunes.add(&noted(2));
        let [soon, later] = PRUNE_AGAIN;
        assert_eq!((due(&mut prunes, begin), prunes.next()), (all(&[2]), Some(begin + soon)));
        prunes.add(&noted(3));
        assert_eq!(due(&mut prunes, begin), all(&[3]));
        for delay in [soon, later] {
            assert_eq!(due(&mut prunes, begin + delay), all(&[]), "not sooner than that after the last");
            assert_eq!(due(&mut prunes, begin + delay * 2), all(&[2, 3]));
        }
        let end = begin + later * 3;
        assert_eq!((due(&mut prunes, end), prunes.next()), (all(&[]), None));
        let mut overflow = PendingNotifications::default();
        overflow.add(&Change::All);
        prunes.add(&overflow);
        assert_eq!(due(&mut prunes, end), [Job::PruneAll]);
        for delay in PRUNE_AGAIN {
            assert_eq!(prunes.next(), Some(end + delay));
            assert_eq!(due(&mut prunes, end + delay), [Job::PruneAll]);
        }
        assert_eq!((due(&mut prunes, end + later * 2), prunes.next()), (all(&[]), None));
    }
}
