//! Tracks which files are cold and which are in use again, to choose what moves between tiers.
//!
//! Files stand in a ring, and a hand goes round (the clock algorithm): a file that was used since the hand last passed is
//! spared once, another one is cold. So finding cold files takes a few steps each time, however many files there are.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferry_vfs::Ino;

use super::disk::File;

/// Files that wait to come back; more are not remembered, and wait for their next use.
const WARM_MAX: usize = 4096;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Heat {
    ring: Mutex<VecDeque<Ino>>,
    warm: Mutex<VecDeque<Ino>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Heat {
    /// Puts a new file into the ring.
    pub(crate) fn add(&self, ino: Ino) {
        lock(&self.ring).push_back(ino);
    }

    /// Files in the ring, and some that are gone.
    pub(crate) fn files(&self) -> usize {
        lock(&self.ring).len()
    }

    /// The file that the hand points at; the hand moves on. `find` knows the files that there still are.
    pub(crate) fn next(&self, find: impl Fn(Ino) -> Option<Arc<File>>) -> Option<Arc<File>> {
        loop {
            // `find` takes a lock that is held where files are added: the ring's must not be held meanwhile.
            let ino = lock(&self.ring).pop_front()?;
            if let Some(file) = find(ino) {
                lock(&self.ring).push_back(ino);
                return Some(file);
            }
        }
    }

    /// Takes note that data of a file were read from the second tier.
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

    /// The next file that is to come back.
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
    fn what_was_used_is_spared_once_and_what_is_gone_is_passed_over() {
        let (heat, files) = (Heat::default(), files(4));
        files.iter().for_each(|file| heat.add(file.ino));
        let find = |ino: Ino| files.iter().find(|file| file.ino == ino && ino != Ino(2)).cloned();
        files[0].touch();
        let round: Vec<_> = (0..6).map(|_| heat.next(find).map(|file| (file.ino.0, file.cool())).unwrap()).collect();
        assert_eq!(round, [(0, true), (1, false), (3, false), (0, false), (1, false), (3, false)]);
        assert_eq!(heat.files(), 3);
    }

    #[test]
    fn a_warm_file_waits_once() {
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
