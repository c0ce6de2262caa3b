//! Pending notifications, as sets and as a list of jobs.

use std::collections::{HashMap, HashSet};

use ferry_vfs::{Change, Ino, NameBuf};

/// The maximum number of pending changes. Beyond it the kernel drops everything.
pub(super) const NOTES_MAX: usize = 1 << 16;

/// Bytes of a file, the end exclusive.
pub(super) type Span = (u64, u64);

/// All of a file.
const WHOLE: Span = (0, u64::MAX);

/// The pending notifications. Equal ones are merged; their order does not matter, because they only drop cached data.
#[derive(Debug, Default)]
pub(super) struct PendingNotifications {
    attributes: HashSet<Ino>,
    data: HashMap<Ino, Span>,
    entries: HashSet<(Ino, NameBuf)>,
    removed: HashMap<(Ino, NameBuf), Ino>,
    unsure: HashSet<(Ino, NameBuf)>,
    /// There were too many: anything may have changed.
    overflow: bool,
}

/// A notification for the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Anything may have changed: names, and what [`of_all`] has.
    All,
    /// A name that meant an inode was removed.
    Removed(Ino, NameBuf, Ino),
    /// A name means something else.
    Entry(Ino, NameBuf),
    /// A name may mean something else.
    Unsure(Ino, NameBuf),
    /// Bytes of a file, or listings of a directory, and the attributes.
    Data(Ino, Span),
    /// The attributes.
    Attributes(Ino),
    /// The unused state of this inode is pruned.
    Prune(Ino),
    /// The unused state of all inodes is pruned.
    PruneAll,
}

impl Job {
    /// The inode whose lock, or pages, the kernel may wait for.
    pub(super) fn waits_for(&self) -> Option<Ino> {
        match *self {
            Self::Removed(ino, ..)
            | Self::Entry(ino, _)
            | Self::Unsure(ino, _)
            | Self::Data(ino, _)
            | Self::Prune(ino) => Some(ino),
            Self::Attributes(_) | Self::All | Self::PruneAll => None,
        }
    }
}

/// Returns the notifications that drop the data of all of these inodes, as separate jobs, so that none delays another.
pub(super) fn of_all(known: Vec<Ino>) -> impl Iterator<Item = Job> {
    known.into_iter().chain([Ino::ROOT]).map(|ino| Job::Data(ino, WHOLE))
}

impl PendingNotifications {
    fn len(&self) -> usize {
        self.attributes.len() + self.data.len() + self.entries.len() + self.removed.len() + self.unsure.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0 && !self.overflow
    }

    pub(super) fn add(&mut self, change: &Change) {
        match change {
            Change::Attr { ino } => self.put(Job::Attributes(*ino)),
            Change::Data { ino, offset, len } => self.put(Job::Data(*ino, (*offset, offset.saturating_add(*len)))),
            Change::Entry { dir, name } => {
                self.put(Job::Entry(*dir, name.clone()));
                self.put(Job::Data(*dir, WHOLE));
            }
            Change::Removed { dir, name, ino } => {
                self.put(Job::Removed(*dir, name.clone(), *ino));
                self.put(Job::Attributes(*ino));
                self.put(Job::Data(*dir, WHOLE));
            }
            Change::Unsure { dir, name } => {
                self.put(Job::Unsure(*dir, name.clone()));
                self.put(Job::Data(*dir, WHOLE));
            }
            // As is one of a kind that we do not know.
            _ => self.put(Job::All),
        }
    }

    /// Notes one job. What is to be pruned is not noted: it is only ever asked for once more.
    pub(super) fn put(&mut self, job: Job) {
        if self.overflow {
            return;
        }
        match job {
            Job::Attributes(ino) => {
                self.attributes.insert(ino);
            }
            Job::Data(ino, (start, end)) => {
                let span = self.data.entry(ino).or_insert((start, end));
                *span = (span.0.min(start), span.1.max(end));
            }
            Job::Entry(dir, name) => {
                self.entries.insert((dir, name));
            }
            Job::Removed(dir, name, ino) => {
                self.removed.insert((dir, name), ino);
            }
            Job::Unsure(dir, name) => {
                self.unsure.insert((dir, name));
            }
            Job::All => self.overflow = true,
            Job::Prune(_) | Job::PruneAll => {}
        }
        if self.overflow || self.len() > NOTES_MAX {
            *self = Self { overflow: true, ..Self::default() };
        }
    }

    /// The inodes whose data or attributes changed, and whether any may have.
    pub(super) fn touched(&self) -> (impl Iterator<Item = Ino>, bool) {
        (self.data.keys().chain(&self.attributes).copied(), self.overflow)
    }

    /// Returns everything, in the order of sending.
    pub(super) fn into_jobs(self) -> impl Iterator<Item = Job> {
        let Self { mut attributes, data, entries, removed, unsure, overflow } = self;
        attributes.retain(|ino| !data.contains_key(ino));
        let removed = removed.into_iter().map(|((dir, name), ino)| Job::Removed(dir, name, ino));
        let entries = entries.into_iter().map(|(dir, name)| Job::Entry(dir, name));
        let unsure = unsure.into_iter().map(|(dir, name)| Job::Unsure(dir, name));
        let data = data.into_iter().map(|(ino, span)| Job::Data(ino, span));
        let attributes = attributes.into_iter().map(Job::Attributes);
        overflow
            .then_some(Job::All)
            .into_iter()
            .chain(removed)
            .chain(entries)
            .chain(unsure)
            .chain(data)
            .chain(attributes)
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::Name;

    use super::*;

    #[test]
    fn equal_changes_fall_together_and_too_many_become_one() {
        let name = Name::new(b"x").unwrap().to_buf();
        let mut notes = PendingNotifications::default();
        for _ in 0..3 {
            notes.add(&Change::Attr { ino: Ino(2) });
            notes.add(&Change::Attr { ino: Ino(3) });
            notes.add(&Change::Data { ino: Ino(3), offset: 4096, len: 10 });
            notes.add(&Change::Data { ino: Ino(3), offset: 10, len: u64::MAX });
            notes.add(&Change::Entry { dir: Ino(1), name: name.clone() });
            notes.add(&Change::Removed { dir: Ino(1), name: name.clone(), ino: Ino(9) });
            notes.add(&Change::Unsure { dir: Ino(1), name: name.clone() });
        }
        let jobs: Vec<Job> = notes.into_jobs().collect();
        let names =
            [Job::Removed(Ino(1), name.clone(), Ino(9)), Job::Entry(Ino(1), name.clone()), Job::Unsure(Ino(1), name)];
        assert_eq!(jobs[..3], names);
        let has = |job: &Job| jobs[3..].contains(job);
        assert!(has(&Job::Data(Ino(3), (10, u64::MAX))) && has(&Job::Data(Ino(1), WHOLE)));
        assert!(has(&Job::Attributes(Ino(2))) && has(&Job::Attributes(Ino(9))));
        assert_eq!(jobs.len(), 7, "data notifications include attributes: {jobs:?}");
        let mut all = PendingNotifications::default();
        all.add(&Change::All);
        assert!(!all.is_empty());
        let mut many = PendingNotifications::default();
        for ino in 0..2 * NOTES_MAX as u64 {
            many.add(&Change::Attr { ino: Ino(ino) });
        }
        for notes in [all, many] {
            assert_eq!(notes.len(), 0);
            assert_eq!(notes.into_jobs().collect::<Vec<_>>(), [Job::All]);
        }
    }
}
