//! Tracks cold and warm files, to choose what moves between tiers.
//!
//! Files are in a ring with a hand (the clock algorithm): a file that was used since the hand last passed is skipped
//! once, others are cold. Finding cold files takes a few steps, whatever the number of files.
#![forbid(unsafe_code)]

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ferry_vfs::Ino;
use ferry_vfs::sync::lock;

use super::disk::File;

/// The maximum number of queued warm files; others wait for their next use.
const WARM_MAX: usize = 4096;
/// So many removed files may stay in the ring, however short it is.
const REMOVED_MAX: usize = 1024;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Heat {
    ring: Mutex<VecDeque<Ino>>,
    /// Files that were removed since removed ones were last taken out of the ring.
    removed: AtomicUsize,
    warm: Mutex<VecDeque<Ino>>,
}

impl Heat {
    /// Adds a new file to the ring.
    pub(crate) fn add(&self, ino: Ino) {
        lock(&self.ring).push_back(ino);
    }

    /// A file was removed. The ring has at most as many removed files as others, or some.
    pub(crate) fn remove(&self, exists: impl Fn(Ino) -> bool) {
        let removed = self.removed.fetch_add(1, Ordering::Relaxed) + 1;
        if removed <= (self.files() / 2).max(REMOVED_MAX) {
            return;
        }
        self.removed.store(0, Ordering::Relaxed);
        // As in `next`. Others use the ring meanwhile, and no number is used again.
        let known: Vec<Ino> = lock(&self.ring).iter().copied().collect();
        let gone: HashSet<Ino> = known.into_iter().filter(|ino| !exists(*ino)).collect();
        lock(&self.ring).retain(|ino| !gone.contains(ino));
    }

    /// Returns the length of the ring, which includes some removed files.
    pub(crate) fn files(&self) -> usize {
        lock(&self.ring).len()
    }

    /// Returns the file at the hand, and advances the hand. `find` returns existing files.
    pub(crate) fn next(&self, find: impl Fn(Ino) -> Option<Arc<File>>) -> Option<Arc<File>> {
        loop {
            // `find` takes a lock that is held while files are added, so the ring's lock must not be held.
            let ino = lock(&self.ring).pop_front()?;
            if let Some(file) = find(ino) {
                lock(&self.ring).push_back(ino);
                return Some(file);
            }
        }
    }

    /// Records that data of a file were read from the second tier.
    pub(crate) fn warm_up(&self, file: &File) {
        if !file.is_warm.swap(true, Ordering::Relaxed) {
            let mut warm = lock(&self.warm);
            if warm.len() < WARM_MAX {
                warm.push_back(file.ino);
            } else {
                file.is_warm.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Returns the next file to move back.
    pub(crate) fn next_warm(&self, find: impl Fn(Ino) -> Option<Arc<File>>) -> Option<Arc<File>> {
        loop {
            let ino = lock(&self.warm).pop_front()?;
            if let Some(file) = find(ino) {
                file.is_warm.store(false, Ordering::Relaxed);
                return Some(file);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmem::extents::Extents;

    fn files(count: u64) -> Vec<Arc<File>> {
        (0..count).map(|ino| Arc::new(File::new(Ino(ino), 0, Extents::default()))).collect()
    }

    #[test]
    fn used_files_are_skipped_once_and_removed_ones_always() {
        let (heat, files) = (Heat::default(), files(4));
        files.iter().for_each(|file| heat.add(file.ino));
        let find = |ino: Ino| files.iter().find(|file| file.ino == ino && ino != Ino(2)).cloned();
        files[0].touch();
        let round: Vec<_> = (0..6).map(|_| heat.next(find).map(|file| (file.ino.0, file.cool())).unwrap()).collect();
        assert_eq!(round, [(0, true), (1, false), (3, false), (0, false), (1, false), (3, false)]);
        assert_eq!(heat.files(), 3);
    }

    #[test]
    fn removed_files_do_not_fill_the_ring() {
        let heat = Heat::default();
        heat.add(Ino(0));
        for ino in 1..100_000 {
            heat.add(Ino(ino));
            heat.remove(|ino| ino == Ino(0));
            assert!(heat.files() <= REMOVED_MAX + 2, "{}", heat.files());
        }
        assert!(heat.files() >= 1);
    }

    #[test]
    fn a_warm_file_is_queued_once() {
        let (heat, files) = (Heat::default(), files(3));
        for index in [1, 0, 1, 2] {
            heat.warm_up(&files[index]);
        }
        let next = || heat.next_warm(|ino| files.iter().find(|file| file.ino == ino && ino != Ino(0)).cloned());
        assert_eq!([next(), next(), next()].map(|file| file.map(|file| file.ino.0)), [Some(1), Some(2), None]);
        heat.warm_up(&files[1]);
        assert!(next().is_some(), "it may wait again");
    }
}
