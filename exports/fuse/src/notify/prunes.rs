//! Inodes to prune from a kernel with a write-back cache, which uses its own length and times of a file while it knows
//! it.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use ferry_vfs::Ino;

use super::pending::{Job, NOTES_MAX, PendingNotifications};

/// When to prune again an inode that the kernel has written: it may have been in use at the first attempt.
const PRUNE_AGAIN: Duration = Duration::from_secs(1);

/// What is to be pruned: at once, and again one to two seconds later.
#[derive(Debug, Default)]
pub(super) struct Prunes {
    new: HashSet<Ino>,
    /// The inodes pruned since the last repetition, and those before it.
    again: [HashSet<Ino>; 2],
    all: bool,
    /// When something is to be given out again.
    pub(super) next: Option<Instant>,
}

impl Prunes {
    pub(super) fn add(&mut self, notes: &PendingNotifications) {
        let (inodes, all) = notes.touched();
        self.new.extend(inodes);
        self.all |= all;
    }

    /// Those whose time has come.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Job> {
        let mut due = HashSet::new();
        let [young, old] = &mut self.again;
        if self.next.is_some_and(|next| next <= now) {
            due = std::mem::replace(old, std::mem::take(young));
            self.next = None;
        }
        young.extend(&self.new);
        due.extend(self.new.drain());
        let all = std::mem::take(&mut self.all) || young.len() > NOTES_MAX;
        if all {
            young.clear();
        }
        if self.next.is_none() && !(young.is_empty() && old.is_empty()) {
            self.next = Some(now + PRUNE_AGAIN);
        }
        if all { vec![Job::PruneAll] } else { due.into_iter().map(Job::Prune).collect() }
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
        assert_eq!((due(&mut prunes, begin), prunes.next), (all(&[]), None));
        prunes.add(&noted(2));
        assert_eq!((due(&mut prunes, begin), prunes.next), (all(&[2]), Some(begin + PRUNE_AGAIN)));
        prunes.add(&noted(3));
        assert_eq!(due(&mut prunes, begin), all(&[3]));
        let [first, second, third] = [1, 2, 3].map(|times| begin + PRUNE_AGAIN * times);
        assert_eq!(due(&mut prunes, first), all(&[]), "not sooner than a second after the last");
        assert_eq!(due(&mut prunes, second), all(&[2, 3]));
        assert_eq!((due(&mut prunes, third), prunes.next), (all(&[]), None));
        let mut overflow = PendingNotifications::default();
        overflow.add(&Change::All);
        prunes.add(&overflow);
        assert_eq!(due(&mut prunes, third), [Job::PruneAll]);
    }
}
