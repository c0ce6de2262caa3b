//! Trees whose owner changes them while they are built.

use crate::common;

use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Bench, bytes, set_time};
use ferry_image::{BuildOptions, Error, Layout, Store, build};
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// How many files come before the one that is changed: more than are read ahead.
const FILES: usize = 100;
const LENGTH: usize = 5000;

/// Builds a tree, whose last file is changed once it was found and before it is read; answers whether that was noticed.
fn is_noticed(layout: Layout, change: &(dyn Fn(&Path, &Path) + Sync)) -> bool {
    let bench = Bench::new();
    // Larger than what may be read ahead.
    let first = File::create(bench.tree().join("a")).expect("files can be made");
    first.set_len(32 << 20).expect("files can grow");
    for number in 0..FILES {
        let path = bench.tree().join(format!("file-{number:03}"));
        fs::write(&path, bytes(number, LENGTH)).expect("files can be made");
        set_time(&path, 1_600_000_000, 0);
    }
    let last = bench.tree().join(format!("file-{:03}", FILES - 1));
    let secret = bench.path("secret");
    fs::write(&secret, bytes(FILES, LENGTH)).expect("files can be made");
    let is_changed = AtomicBool::new(false);
    let progress = |done: usize, found: usize| {
        // Clocks of file systems may be slow.
        std::thread::sleep(Duration::from_millis(5));
        if found > FILES && done < FILES / 2 && !is_changed.swap(true, Ordering::Relaxed) {
            change(&last, &secret);
        }
    };
    let options = BuildOptions { threads: 1, layout, ..BuildOptions::default() };
    let store = Store::create(&bench.store()).expect("it can be made");
    let outcome = build(&bench.tree(), &bench.path("image"), store, &options, &progress);
    assert!(is_changed.load(Ordering::Relaxed), "the tree was found too late");
    match outcome {
        Ok(_) => false,
        Err(Error::Changed(path)) => {
            assert_eq!(path.file_name(), last.file_name());
            assert!(!bench.path("image").exists());
            true
        }
        Err(error) => panic!("{error}"),
    }
}

fn both(change: &(dyn Fn(&Path, &Path) + Sync)) {
    for layout in [Layout::Flat, Layout::Composefs { version: None }] {
        assert!(is_noticed(layout, change), "{layout:?}");
    }
}

#[test]
fn a_link_that_replaces_a_file_is_not_followed() {
    both(&|file, secret| {
        fs::remove_file(file).expect("files can be removed");
        std::os::unix::fs::symlink(secret, file).expect("links can be made");
    });
}

#[test]
fn another_file_is_not_taken_for_the_one_that_was_found() {
    both(&|file, secret| {
        set_time(secret, 1_600_000_000, 0);
        fs::rename(secret, file).expect("files can be renamed");
    });
}

#[test]
fn a_pipe_that_replaces_a_file_does_not_block() {
    both(&|file, _| {
        fs::remove_file(file).expect("files can be removed");
        mknodat(CWD, file, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("pipes can be made");
    });
}

#[test]
fn a_rewritten_file_with_equal_size_and_mtime_is_detected() {
    both(&|file, _| {
        fs::write(file, bytes(7, LENGTH)).expect("files can be written");
        set_time(file, 1_600_000_000, 0);
    });
}

#[test]
fn an_unchanging_tree_is_built() {
    for layout in [Layout::Flat, Layout::Composefs { version: None }] {
        assert!(!is_noticed(layout, &|_, _| {}), "{layout:?}");
    }
}
