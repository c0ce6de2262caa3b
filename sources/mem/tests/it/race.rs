//! Threads that create, move and remove files in one tree: no deadlock, and a consistent tree at the end.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Share, name, new};
use ferry_mem::Options;
use ferry_vfs::*;

const THREADS: u64 = 4;
const TIME: Duration = Duration::from_secs(2);

/// Numbers that follow from a seed (a linear congruential generator, high bits).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// What one thread does until the time is over; what fails, fails.
fn disturb(share: &Share, seed: u64) -> u64 {
    let (fs, cx) = (&share.fs, &share.cx);
    let mut numbers = Numbers(seed);
    let (start, mut count) = (Instant::now(), 0);
    let mut dirs = vec![Ino::ROOT];
    while start.elapsed() < TIME {
        let mut place = |dirs: &[Ino]| {
            let word = ["a", "b", "c", "d"][numbers.below(4)];
            (dirs[numbers.below(dirs.len())], name(word))
        };
        let (from, to) = (place(&dirs), place(&dirs));
        let done = match numbers.below(10) {
            0 | 1 => fs.mkdir(cx, from.0, from.1, &new(0o755)).map(|entry| dirs.push(entry.ino)),
            2 => fs.create(cx, from.0, from.1, &new(0o644), OFlags::RDWR).map(|(entry, handle)| {
                // The tree may grow until it is full.
                let _ = share.write((entry.ino, handle), 0, b"bytes");
                share.release((entry.ino, handle));
                share.forget(entry.ino);
            }),
            3 => fs.unlink(cx, from.0, from.1),
            4 => fs.rmdir(cx, from.0, from.1),
            5 => fs.lookup(cx, from.0, from.1).and_then(|entry| {
                let linked = fs.link(cx, entry.ino, to.0, to.1).map(|entry| share.forget(entry.ino));
                share.forget(entry.ino);
                linked
            }),
            6 => {
                share.list(from.0, true, 3);
                fs.lookup_parent(cx, from.0).map(|entry| share.forget(entry.ino))
            }
            7 => fs.rename(cx, from, to, RenameFlags::EXCHANGE),
            _ => fs.rename(cx, from, to, RenameFlags::empty()),
        };
        count += u64::from(done.is_ok());
        if dirs.len() > 12 {
            let index = 1 + numbers.below(11);
            share.forget(dirs.swap_remove(index));
        }
    }
    for dir in dirs {
        share.forget(dir);
    }
    count
}

/// Walks the tree; counts the names of each inode and checks what directories say of themselves.
fn check(share: &Share) -> HashMap<Ino, u32> {
    let mut names = HashMap::new();
    let mut dirs = vec![(Ino::ROOT, Ino::ROOT)];
    while let Some((dir, parent)) = dirs.pop() {
        assert_eq!(share.fs.lookup_parent(&share.cx, dir).unwrap().ino, parent);
        share.forget(parent);
        let mut subdirectories = 0;
        for entry in share.list(dir, true, 10).into_iter().filter_map(|line| line.entry) {
            *names.entry(entry.ino).or_default() += 1;
            if entry.attr.kind() == FileType::Directory {
                assert_eq!(names[&entry.ino], 1, "a directory has one name");
                subdirectories += 1;
                dirs.push((entry.ino, dir));
            }
        }
        assert_eq!(share.attr(dir).nlink, 2 + subdirectories);
    }
    names
}

#[test]
fn the_tree_stays_sound() {
    // A process that another test starts has copies of the open files until it runs its program.
    if !ferry_alone::in_own_process() {
        return;
    }
    let share = Share::new(Options { size_bytes: Some(64 << 20), ..Options::default() });
    let done: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=THREADS)
            .map(|seed| {
                scope.spawn({
                    let share = &share;
                    move || disturb(share, seed)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("{done} changes and looks by {THREADS} threads");
    assert!(done > 1000, "{done}");
    let names = check(&share);
    let mut blocks = 0;
    for (ino, count) in &names {
        let attr = share.attr(*ino);
        blocks += attr.blocks;
        if attr.kind() != FileType::Directory {
            assert_eq!(attr.nlink, *count);
        }
    }
    assert_eq!(share.fs.usage().inodes, names.len() as u64 + 1, "nothing lives that has no name");
    assert_eq!(share.fs.usage().handles, 0);
    let stat = share.fs.statfs(&share.cx, Ino::ROOT).unwrap();
    assert_eq!((stat.blocks - stat.bfree) * 8, blocks, "no data live that have no inode");
}

/// An exchange of two directories, a listing, and a move between directories of which one has come below a younger one.
#[test]
fn moves_and_listings_do_not_wait_for_each_other_in_a_circle() {
    let share = Arc::new(Share::new(Options::default()));
    let sub = share.mkdir(Ino::ROOT, "sub");
    let parent = share.mkdir(Ino::ROOT, "p");
    let (a, b) = (share.mkdir(parent, "a"), share.mkdir(parent, "b"));
    share.fs.rename(&share.cx, (Ino::ROOT, name("sub")), (b, name("sub")), RenameFlags::empty()).unwrap();
    for number in 0..500 {
        share.forget(share.mkdir(b, &format!("{number}")));
    }
    let file = share.create(sub, "x", 0o644);
    share.release(file);
    let (told, ended) = std::sync::mpsc::channel();
    let start = Instant::now();
    let run = |step: fn(&Share, [Ino; 4])| {
        let (share, told) = (Arc::clone(&share), told.clone());
        std::thread::spawn(move || {
            while start.elapsed() < TIME {
                step(&share, [sub, parent, a, b]);
            }
            told.send(()).unwrap();
        })
    };
    run(|share, [_, parent, ..]| {
        share.fs.rename(&share.cx, (parent, name("a")), (parent, name("b")), RenameFlags::EXCHANGE).unwrap();
    });
    run(|share, [.., b]| drop(share.list(b, true, 1000)));
    run(|share, [sub, _, a, _]| {
        for (from, to) in [((sub, name("x")), (a, name("y"))), ((a, name("y")), (sub, name("x")))] {
            share.fs.rename(&share.cx, from, to, RenameFlags::empty()).unwrap();
        }
    });
    for _ in 0..3 {
        ended.recv_timeout(TIME + Duration::from_secs(60)).expect("nobody waits for ever");
    }
}

/// Requests on a file that others end meanwhile leave an image that is sound.
#[test]
fn nothing_is_recorded_of_an_inode_that_has_ended() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let sized = ferry_mem::pmem::Options { size_bytes: Some(8 << 20), ..Default::default() };
    let fs = ferry_mem::pmem::open(&path, &sized).unwrap();
    let cx = crate::pmem_common::cx();
    let free = fs.statfs(&cx, Ino::ROOT).unwrap().bfree;
    let start = Instant::now();
    while start.elapsed() < TIME {
        let (entry, handle) = fs.create(&cx, Ino::ROOT, name("f"), &new(0o644), OFlags::RDWR).unwrap();
        let ino = entry.ino;
        fs.unlink(&cx, Ino::ROOT, name("f")).unwrap();
        let begun = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begun.wait();
                fs.release(&cx, ino, handle);
                fs.forget(ino, 1);
            });
            scope.spawn(|| {
                begun.wait();
                let _ = fs.setattr(&cx, ino, None, &SetAttr { size: Some(5000), ..SetAttr::default() });
            });
            scope.spawn(|| {
                begun.wait();
                let _ = fs.fallocate(&cx, ino, handle, 0, 20_000, FallocateFlags::empty());
            });
            scope.spawn(|| {
                begun.wait();
                if let Ok(handle) = fs.open(&cx, ino, OFlags::RDWR) {
                    fs.release(&cx, ino, handle);
                }
            });
        });
    }
    fs.syncfs(&cx, Ino::ROOT).unwrap();
    assert_eq!(fs.statfs(&cx, Ino::ROOT).unwrap().bfree, free);
    drop(fs);
    let report = ferry_mem::pmem::fsck(&path, None, false).unwrap();
    assert!(report.is_clean(), "{report:?}");
    ferry_mem::pmem::open(&path, &ferry_mem::pmem::Options::default()).unwrap();
}

#[test]
fn creators_of_one_name_agree() {
    let share = Share::new(Options::default());
    for round in 0..200 {
        let word = format!("f{}", round % 3);
        let made: u64 = std::thread::scope(|scope| {
            let create = || {
                let made = share.fs.create(&share.cx, Ino::ROOT, name(&word), &new(0o644), OFlags::RDWR | OFlags::EXCL);
                made.map_or(0, |(entry, handle)| {
                    share.release((entry.ino, handle));
                    share.forget(entry.ino);
                    1
                })
            };
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(create)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(made, 1);
        share.fs.unlink(&share.cx, Ino::ROOT, name(&word)).unwrap();
    }
    assert_eq!(share.fs.usage().inodes, 1);
}

#[test]
fn a_deep_tree_ends_without_a_deep_stack() {
    let share = Share::new(Options { inodes_max: Some(200_000), ..Options::default() });
    let mut at = Ino::ROOT;
    for _ in 0..100_000 {
        at = share.mkdir(at, "d");
    }
    drop(share);
}
