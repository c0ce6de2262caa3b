//! Decides per client whether READDIRPLUS pays.
//!
//! A listing can bring its inodes along (READDIRPLUS), which costs the server some system calls for each name, and the
//! client an inode that it has to forget again. That is cheaper than a LOOKUP per file if
//! the client looks at every file, and wasted if it needs only names. The server cannot know in advance, so it tests:
//! one file of a listing comes without its inode, and a client that looks at files soon sends a LOOKUP for it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use ferry_vfs::{FileType, Ino};

/// The number of left-out files that are remembered. A tree walk reaches the first file of a directory soon after
/// listing it, but may list a few subdirectories before.
const TRIALS: usize = 4;
/// So many directories whose files were left out altogether.
const PLAIN_DIRS: usize = 32;
/// After so many files in a row that nobody asked for, all are left out.
const MISSES_MAX: u32 = 3;
/// After so many in a row that were asked for, only one listing in [`PERIOD`] is tried.
const HITS_SURE: u32 = 4;
/// See [`HITS_SURE`].
const PERIOD: u32 = 16;

/// What a listing is to bring along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListingMode {
    /// All inodes.
    All,
    /// All but that of the first file.
    AllButOne,
    /// Those of directories: a tree walk needs them in any case.
    Dirs,
}

/// What is known of one client. Workers share it without a lock: an update that is lost costs a trial.
#[derive(Debug, Default)]
pub(crate) struct ReaddirplusAuto {
    /// Nobody looks at files.
    names_only: AtomicBool,
    hits: AtomicU32,
    misses: AtomicU32,
    listings: AtomicU32,
    /// The last files that were left out, by a number made of directory and name; 0 is none.
    trials: [AtomicU64; TRIALS],
    tried: AtomicU32,
    /// The last directories whose files were left out altogether; 0 is none.
    plain: [AtomicU64; PLAIN_DIRS],
    listed: AtomicU32,
}

impl ReaddirplusAuto {
    /// A directory is listed, from its beginning or from somewhere else.
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

    /// A file of a listing was left out, to see what comes of it.
    pub(crate) fn record_omitted(&self, dir: Ino, name: &[u8]) {
        let number = number(dir, name);
        // Some programs list a directory twice before they do anything with it (rm asks first whether it is empty).
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

    /// The client has asked for what a name means.
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

/// FNV-1a over directory and name, never 0. Two that share a number cost a trial that says nothing.
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

    /// Lists a directory as a client does that looks at its first file, or does not; answers what it was brought.
    fn list(readdirplus_auto: &ReaddirplusAuto, dir: u64, looks: bool) -> ListingMode {
        let brings = readdirplus_auto.listing(Ino(dir), true);
        if brings == ListingMode::AllButOne {
            readdirplus_auto.record_omitted(Ino(dir), b"first");
        }
        if looks && brings != ListingMode::All {
            readdirplus_auto.record_lookup(Ino(dir), b"first", FILE);
        }
        brings
    }

    #[test]
    fn who_wants_names_gets_names() {
        let readdirplus_auto = ReaddirplusAuto::default();
        let brought: Vec<_> = (2..20).map(|dir| list(&readdirplus_auto, dir, false)).collect();
        let trials = TRIALS + MISSES_MAX as usize;
        assert!(brought[..trials].iter().all(|brings| *brings == ListingMode::AllButOne), "{brought:?}");
        assert!(brought[trials..].iter().all(|brings| *brings == ListingMode::Dirs), "{brought:?}");
        assert_eq!(readdirplus_auto.listing(Ino(20), false), ListingMode::Dirs);
    }

    #[test]
    fn who_looks_at_files_gets_them_and_is_rarely_tried() {
        let readdirplus_auto = ReaddirplusAuto::default();
        let brought: Vec<_> = (2..802).map(|dir| list(&readdirplus_auto, dir, true)).collect();
        assert!(!brought.contains(&ListingMode::Dirs));
        let tried = brought.iter().filter(|brings| **brings == ListingMode::AllButOne).count();
        assert_eq!(tried, HITS_SURE as usize + (800 - HITS_SURE as usize).div_ceil(PERIOD as usize));
        assert_eq!(readdirplus_auto.listing(Ino(3), false), ListingMode::All);
    }

    #[test]
    fn who_lists_twice_before_he_looks_is_tried_once() {
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
    fn who_changes_his_mind_is_served_at_once() {
        let readdirplus_auto = ReaddirplusAuto::default();
        (2..20).for_each(|dir| _ = list(&readdirplus_auto, dir, false));
        // Walking down, and looking at files of directories that were not listed, is no sign.
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
