//! The host, or another client, swaps directories and symbolic links during operations: nothing outside is reached.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::*;
use ferry_dir::Options;
use ferry_vfs::*;

/// How long the race is run at least.
const FOR: Duration = Duration::from_secs(2);
/// How long it may take, on a machine with much else to do, until each way to end has been seen [`SEEN`] times.
const AT_MOST: Duration = Duration::from_secs(120);
/// How often each way to end is to be seen.
const SEEN: u32 = 50;

/// How often a thing was found as it was looked for, and how often something else was in its place.
#[derive(Debug, Default)]
struct Ends {
    found: u32,
    no_directory: u32,
    opened: u32,
    not_opened: u32,
}

impl Ends {
    fn all_seen(&self) -> bool {
        [self.found, self.no_directory, self.opened, self.not_opened].iter().all(|count| *count >= SEEN)
    }
}

#[test]
fn swapped_in_symbolic_links_never_lead_outside() {
    for options in both_modes() {
        swap(options);
    }
}

fn swap(options: Options) {
    let outside = tempdir();
    fs::create_dir(outside.path().join("dir")).unwrap();
    fs::write(outside.path().join("dir/file"), "secret").unwrap();
    fs::write(outside.path().join("dir/exists-outside-only"), "secret").unwrap();
    let share = Share::new(options);
    let Share { dir, cx, .. } = &share;
    fs::create_dir(share.path("dir")).unwrap();
    fs::write(share.path("dir/file"), "inside").unwrap();
    symlink(outside.path().join("dir"), share.path("link")).unwrap();
    fs::write(share.path("plain"), "inside").unwrap();
    symlink(outside.path().join("dir/file"), share.path("filelink")).unwrap();
    let fifo = dir.mknod(cx, Ino::ROOT, name("fifo"), &new(0o010_600)).unwrap();
    let done = AtomicBool::new(false);
    let mut ends = Ends::default();
    std::thread::scope(|scope| {
        let _stop = Stop(&done);
        scope.spawn(|| {
            let exchange = |a: &str, b: &str| {
                let (a, b) = (share.path(a), share.path(b));
                rustix::fs::renameat_with(rustix::fs::CWD, &a, rustix::fs::CWD, &b, RenameFlags::EXCHANGE).unwrap();
            };
            while !done.load(Ordering::Relaxed) {
                exchange("dir", "link");
                exchange("plain", "filelink");
                exchange("plain", "fifo");
            }
        });
        let start = Instant::now();
        let mut round = 0;
        while start.elapsed() < FOR || !ends.all_seen() {
            assert!(start.elapsed() < AT_MOST, "the race was not run: {ends:?}");
            round += 1;
            if let Ok(d) = dir.lookup(cx, Ino::ROOT, name("dir")) {
                assert!(dir.lookup(cx, d.ino, name("exists-outside-only")).is_err());
                match dir.lookup(cx, d.ino, name("file")) {
                    Ok(file) => {
                        ends.found += 1;
                        let handle = dir.open(cx, file.ino, OFlags::RDWR).unwrap();
                        assert_eq!(share.read((file.ino, handle), 0, 9).unwrap(), b"inside");
                        dir.release(cx, file.ino, handle);
                        dir.forget(file.ino, 1);
                    }
                    // A link; or a number for which the host swapped the inode between two calls.
                    Err(error) => {
                        ends.no_directory += 1;
                        assert!(matches!(error, Errno::NOTDIR | Errno::STALE), "{error}");
                    }
                }
                let made = format!("made{round}");
                if let Ok((entry, handle)) = share.create(d.ino, &made, OFlags::RDWR) {
                    dir.release(cx, entry.ino, handle);
                    dir.forget(entry.ino, 1);
                    dir.unlink(cx, d.ino, name(&made)).unwrap();
                }
                let _ = dir.mkdir(cx, d.ino, name("made-dir"), &new(0o755)).map(|entry| dir.forget(entry.ino, 1));
                let _ = dir.rmdir(cx, d.ino, name("made-dir"));
                let _ = dir.opendir(cx, d.ino, OFlags::RDONLY).map(|handle| dir.releasedir(cx, d.ino, handle));
                dir.forget(d.ino, 1);
            }
            // A regular file, a link, a FIFO: whatever it was when it was looked up, nothing blocks.
            for plain in ["plain", "fifo"] {
                match share.open(plain, OFlags::RDWR) {
                    Ok((ino, handle)) => {
                        ends.opened += 1;
                        assert_eq!(share.read((ino, handle), 0, 9).unwrap(), b"inside");
                        dir.release(cx, ino, handle);
                    }
                    Err(error) => {
                        ends.not_opened += 1;
                        assert!(matches!(error, Errno::LOOP | Errno::NXIO | Errno::STALE), "{error}");
                    }
                }
                assert_eq!(share.create(Ino::ROOT, plain, OFlags::RDWR).unwrap_err(), Errno::EXIST);
                if let Ok(entry) = share.walk(plain) {
                    let size = SetAttr { size: Some(6), ..SetAttr::default() };
                    let _ = dir.setattr(cx, entry.ino, None, &size);
                }
            }
        }
    });
    println!("{ends:?}");
    dir.forget(fifo.ino, 1);
    let names: Vec<_> = fs::read_dir(outside.path().join("dir")).unwrap().collect();
    assert_eq!(names.len(), 2);
    assert_eq!(fs::read(outside.path().join("dir/file")).unwrap(), b"secret");
    assert_eq!(fs::metadata(outside.path().join("dir/file")).unwrap().len(), 6);
}

#[test]
fn numbers_of_many_threads_agree() {
    for options in both_modes() {
        let share = Share::new(Options { descriptors_max: Some(20), ..options });
        for index in 0..50 {
            fs::write(share.path(format!("f{index}")), "").unwrap();
        }
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let share = &share;
                scope.spawn(move || {
                    for round in 0..2000 {
                        let file = format!("f{}", (round * 7 + thread) % 50);
                        let entry = share.walk(&file).unwrap();
                        let attr = share.dir.getattr(&share.cx, entry.ino, None).unwrap();
                        assert_eq!(attr.ino, entry.attr.ino);
                        if round % 3 == 0 {
                            let handle = share.dir.open(&share.cx, entry.ino, OFlags::RDONLY).unwrap();
                            share.dir.release(&share.cx, entry.ino, handle);
                        }
                        share.dir.forget(entry.ino, 1);
                    }
                });
            }
        });
        let usage = share.dir.usage();
        assert_eq!((usage.inodes, usage.handles, usage.descriptors), (1, 0, 1));
    }
}
