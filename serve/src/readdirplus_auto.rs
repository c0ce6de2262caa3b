//! Decides per client whether READDIRPLUS pays.
//!
//! A listing can include its inodes (READDIRPLUS), which costs the server some system calls per name, and the client
//! an inode that it must forget again. That is cheaper than a LOOKUP per file if the client looks at every file, and
//! wasted if it needs only names. So the server tests: one file of a listing comes without its inode, and a client
//! that looks at files soon sends a LOOKUP for it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use ferry_vfs::{FileType, Ino};

/// Omitted files that are remembered. A tree walk reaches the first file of a directory soon after listing it, but
/// may list a few subdirectories before.
const TRIALS: usize = 4;
/// Directories that are remembered because all their files were omitted.
const PLAIN_DIRS: usize = 32;
/// Misses in a row (no LOOKUP for an omitted file) after which the inodes of all files are omitted.
const MISSES_MAX: u32 = 3;
/// Hits in a row after which only one listing in [`PERIOD`] omits a file.
const HITS_SURE: u32 = 4;
/// See [`HITS_SURE`].
const PERIOD: u32 = 16;

/// Which inodes a listing includes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListingMode {
    /// All inodes.
    All,
    /// All but that of the first file.
    AllButOne,
    /// Only those of directories, which a tree walk needs in any case.
    Dirs,
}

/// The state of one client. Workers share it without a lock: a lost update costs a trial.
#[derive(Debug, Default)]
pub(crate) struct ReaddirplusAuto {
    /// The client does not look at files.
    names_only: AtomicBool,
    hits: AtomicU32,
    misses: AtomicU32,
    listings: AtomicU32,
    /// The last omitted files, by a hash of directory and name; 0 is none.
    trials: [AtomicU64; TRIALS],
    tried: AtomicU32,
    /// The last directories whose files were all omitted; 0 is none.
    plain: [AtomicU64; PLAIN_DIRS],
    listed: AtomicU32,
}

impl ReaddirplusAuto {
    /// Returns which inodes a listing includes, from the beginning of a directory or from an offset.
    pub(crate) fn listing(&self, dir: Ino, from_the_beginning: bool) -> ListingMode {
        if self.names_only.load(Relaxed) {
            if from_the_beginning {
                next(&self.listed, &self.plain).store(dir.0, Relaxed);
            }
            return ListingMode::Dirs;
        }
        if !from_the_beginning {
            return ListingMode::All;
        }
        let is_sure = self.hits.load(Relaxed) >= HITS_SURE;
        match !is_sure || self.listings.fetch_add(1, Relaxed).is_multiple_of(PERIOD) {
            true => ListingMode::AllButOne,
            false => ListingMode::All,
        }
    }

    /// Records that a listing omitted a file's inode as a trial.
    pub(crate) fn record_omitted(&self, dir: Ino, name: &[u8]) {
        let number = number(dir, name);
        // Some programs list a directory twice before they do anything with it (rm checks first whether it is empty).
        if self.trials.iter().any(|trial| trial.load(Relaxed) == number) {
            return;
        }
        let before = next(&self.tried, &self.trials).swap(number, Relaxed);
        if before == 0 {
            return;
        }
        self.hits.store(0, Relaxed);
        if self.misses.fetch_add(1, Relaxed) + 1 >= MISSES_MAX {
            self.names_only.store(true, Relaxed);
        }
    }

    /// Records a LOOKUP of the client.
    pub(crate) fn record_lookup(&self, dir: Ino, name: &[u8], kind: FileType) {
        if kind == FileType::Directory {
            return;
        }
        if self.names_only.load(Relaxed) {
            if self.plain.iter().any(|listed| listed.load(Relaxed) == dir.0) {
                self.reset_counts();
            }
            return;
        }
        let number = number(dir, name);
        if let Some(trial) = self.trials.iter().find(|trial| trial.load(Relaxed) == number) {
            trial.store(0, Relaxed);
            self.misses.store(0, Relaxed);
            self.hits.fetch_add(1, Relaxed);
        }
    }

    fn reset_counts(&self) {
        self.trials.iter().chain(&self.plain).for_each(|mark| mark.store(0, Relaxed));
        self.hits.store(0, Relaxed);
        self.misses.store(0, Relaxed);
        self.names_only.store(false, Relaxed);
    }
}

fn next<'a>(count: &AtomicU32, ring: &'a [AtomicU64]) -> &'a AtomicU64 {
    &ring[count.fetch_add(1, Relaxed) as usize % ring.len()]
}

/// FNV-1a over directory and name, never 0. A collision makes one trial meaningless.
fn number(dir: Ino, name: &[u8]) -> u64 {
    let bytes = dir.0.to_le_bytes();
    let hash = bytes
        .iter()
        .chain(name)
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    hash | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileType = FileType::RegularFile;

    /// Lists a directory as a client that looks at its first file or not; returns which inodes were included.
    fn list(readdirplus_auto: &ReaddirplusAuto, dir: u64, looks: bool) -> ListingMode {
        let mode = readdirplus_auto.listing(Ino(dir), true);
        if mode == ListingMode::AllButOne {
            readdirplus_auto.record_omitted(Ino(dir), b"first");
        }
        if looks && mode != ListingMode::All {
            readdirplus_auto.record_lookup(Ino(dir), b"first", FILE);
        }
        mode
    }

    #[test]
    fn a_client_that_needs_names_gets_names() {
        let readdirplus_auto = ReaddirplusAuto::default();
        let included: Vec<_> = (2..20).map(|dir| list(&readdirplus_auto, dir, false)).collect();
        let trials = TRIALS + MISSES_MAX as usize;
        assert!(included[..trials].iter().all(|mode| *mode == ListingMode::AllButOne), "{included:?}");
        assert!(included[trials..].iter().all(|mode| *mode == ListingMode::Dirs), "{included:?}");
        assert_eq!(readdirplus_auto.listing(Ino(20), false), ListingMode::Dirs);
    }

    #[test]
    fn a_client_that_looks_at_files_gets_them_and_is_rarely_tried() {
        let readdirplus_auto = ReaddirplusAuto::default();
        let included: Vec<_> = (2..802).map(|dir| list(&readdirplus_auto, dir, true)).collect();
        assert!(!included.contains(&ListingMode::Dirs));
        let tried = included.iter().filter(|mode| **mode == ListingMode::AllButOne).count();
        assert_eq!(tried, HITS_SURE as usize + (800 - HITS_SURE as usize).div_ceil(PERIOD as usize));
        assert_eq!(readdirplus_auto.listing(Ino(3), false), ListingMode::All);
    }

    #[test]
    fn a_client_that_lists_twice_before_it_looks_is_tried_once() {
        let readdirplus_auto = ReaddirplusAuto::default();
        for dir in 2..100 {
            if readdirplus_auto.listing(Ino(dir), true) == ListingMode::AllButOne {
                readdirplus_auto.record_omitted(Ino(dir), b"first");
            }
            list(&readdirplus_auto, dir, true);
        }
        assert!(readdirplus_auto.hits.load(Relaxed) > HITS_SURE);
        assert_eq!(readdirplus_auto.misses.load(Relaxed), 0);
    }

    #[test]
    fn a_change_of_behaviour_is_followed_at_once() {
        let readdirplus_auto = ReaddirplusAuto::default();
        (2..20).for_each(|dir| _ = list(&readdirplus_auto, dir, false));
        // LOOKUPs of directories, and of files in directories that were not listed, do not count.
        readdirplus_auto.record_lookup(Ino(19), b"d", FileType::Directory);
        readdirplus_auto.record_lookup(Ino(500), b"file", FILE);
        assert_eq!(list(&readdirplus_auto, 20, false), ListingMode::Dirs);
        readdirplus_auto.record_lookup(Ino(20), b"file", FILE);
        assert_eq!(list(&readdirplus_auto, 20, true), ListingMode::AllButOne);
        // And back.
        (21..40).for_each(|dir| _ = list(&readdirplus_auto, dir, true));
        (40..200).for_each(|dir| _ = list(&readdirplus_auto, dir, false));
        assert_eq!(list(&readdirplus_auto, 200, false), ListingMode::Dirs);
    }
}
