//! Descriptors run out, directories are wide and deep: no name vanishes.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs;
use std::process::Command;

use common::*;
use ferry_dir::{Dir, Options};
use ferry_vfs::*;

const DIRS: usize = 25;
const FILES: usize = 2000;
const DESCRIPTORS_MAX: usize = 100;

#[test]
fn a_wide_tree_needs_few_descriptors() {
    let tmp = tempdir();
    for d in 0..DIRS {
        fs::create_dir(tmp.path().join(format!("d{d}"))).unwrap();
        for f in 0..FILES {
            fs::File::create(tmp.path().join(format!("d{d}/f{f}"))).unwrap();
        }
    }
    for options in both_modes() {
        let dir = Dir::open(tmp.path(), Options { descriptors_max: Some(DESCRIPTORS_MAX), ..options }).unwrap();
        let cx = Caller { session: SessionId::unique(), ..Caller::default() };
        let share = Share { tmp: tempdir(), dir, cx };
        let Share { dir, cx, .. } = &share;
        let mut inos = Vec::new();
        let dirs: Vec<_> = (0..DIRS).map(|d| share.ino(&format!("d{d}"))).collect();
        for f in 0..FILES {
            // Across all directories, so that their descriptors compete with the files'.
            for ino in &dirs {
                inos.push(dir.lookup(cx, *ino, name(&format!("f{f}"))).unwrap().ino);
            }
            assert!(dir.usage().descriptors <= DESCRIPTORS_MAX + 1, "{:?}", dir.usage());
        }
        assert_eq!(dir.usage().inodes, 1 + DIRS + DIRS * FILES);
        // Everything is still there, by name, by number and by listing.
        for (index, ino) in inos.iter().enumerate().step_by(97) {
            assert_eq!(dir.getattr(cx, *ino, None).unwrap().kind(), FileType::RegularFile);
            let handle = dir.open(cx, *ino, OFlags::RDWR).unwrap();
            dir.release(cx, *ino, handle);
            let (f, d) = (index / DIRS, index % DIRS);
            assert_eq!(dir.lookup(cx, dirs[d], name(&format!("f{f}"))).unwrap().ino, *ino);
            assert!(dir.usage().descriptors <= DESCRIPTORS_MAX + 1);
        }
        for ino in &dirs {
            let lines = share.list(*ino, true, 500);
            assert_eq!(lines.iter().filter(|line| line.entry.is_some()).count(), FILES);
            for line in lines {
                if let Some(entry) = line.entry {
                    assert!(inos.len() == DIRS * FILES && dir.getattr(cx, entry.ino, None).is_ok());
                    dir.forget(entry.ino, 1);
                }
            }
        }
        for ino in inos.iter().chain(&dirs) {
            dir.forget(*ino, 2);
        }
        assert_eq!(dir.usage().inodes, 1);
        assert_eq!(dir.usage().descriptors, 1);
    }
}

#[test]
fn a_deep_tree_is_walked_and_dropped() {
    const DEPTH: usize = 3000;
    for options in both_modes() {
        let share = Share::new(Options { descriptors_max: Some(1), ..options });
        let Share { dir, cx, .. } = &share;
        let mut inos = vec![Ino::ROOT];
        for _ in 0..DEPTH {
            inos.push(dir.mkdir(cx, inos[inos.len() - 1], name("d"), &new(0o755)).unwrap().ino);
        }
        // From the top to the bottom again, through directories whose descriptors are long gone.
        assert_eq!(dir.getattr(cx, inos[DEPTH], None).unwrap().kind(), FileType::Directory);
        assert_eq!(dir.getattr(cx, inos[1], None).unwrap().kind(), FileType::Directory);
        assert_eq!(dir.getattr(cx, inos[DEPTH / 2], None).unwrap().kind(), FileType::Directory);
        assert!(dir.usage().descriptors < 64, "{:?}", dir.usage());
        // Parents first, on a small stack: what the last one keeps alive goes without recursion.
        std::thread::scope(|scope| {
            let forget = || inos.iter().for_each(|ino| dir.forget(*ino, 1));
            std::thread::Builder::new().stack_size(128 << 10).spawn_scoped(scope, forget).unwrap();
        });
        assert_eq!(dir.usage().inodes, 1);
    }
}

#[test]
fn inodes_that_moved_are_found_or_stale_but_never_another() {
    let share = Share::new(Options { descriptors_max: Some(1), file_handles: false, ..Options::default() });
    let Share { dir, cx, .. } = &share;
    fs::create_dir_all(share.path("a/b")).unwrap();
    fs::create_dir(share.path("c")).unwrap();
    fs::write(share.path("a/b/f"), "1").unwrap();
    let (b, f, c) = (share.ino("a/b"), share.ino("a/b/f"), share.ino("c"));
    let flush = || {
        for index in 0..200 {
            let file = format!("x{index}");
            fs::write(share.path(&file), "").unwrap();
            dir.getattr(cx, share.ino(&file), None).unwrap();
        }
    };
    // Moved through us: followed.
    dir.rename(cx, (share.ino("a"), name("b")), (c, name("b2")), RenameFlags::empty()).unwrap();
    dir.rename(cx, (b, name("f")), (c, name("f2")), RenameFlags::empty()).unwrap();
    flush();
    assert_eq!(dir.getattr(cx, f, None).unwrap().size, 1);
    assert_eq!(dir.getattr(cx, b, None).unwrap().kind(), FileType::Directory);
    // Moved by the host, another in its place.
    flush();
    fs::rename(share.path("c/f2"), share.path("c/f3")).unwrap();
    fs::write(share.path("c/f2"), "22").unwrap();
    assert_eq!(dir.getattr(cx, f, None).map(|attr| attr.size), Err(Errno::STALE));
    // A lookup finds it again.
    assert_eq!(share.ino("c/f3"), f);
    assert_eq!(dir.getattr(cx, f, None).unwrap().size, 1);
}

/// A guest that stays may know numbers of files that the next server has not found.
#[test]
fn the_next_server_counts_elsewhere() {
    let options = || Options { file_handles: false, ..Options::default() };
    let share = Share::new(options());
    for file in ["a", "b"] {
        fs::write(share.path(file), "").unwrap();
    }
    let next = Dir::open(share.tmp.path(), options()).unwrap();
    let known = [share.ino("a"), share.ino("b")];
    let found = next.lookup(&share.cx, Ino::ROOT, name("b")).unwrap().ino;
    assert!(!known.contains(&found), "{found:?} {known:?}");
}

#[test]
fn names_do_not_vanish_when_the_process_has_no_descriptors_left() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "limits::with_few_descriptors", "--ignored", "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

#[test]
#[ignore = "lowers the limits of its process"]
fn with_few_descriptors() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    if !is_alone() {
        return;
    }
    for options in both_modes() {
        setrlimit(Resource::Nofile, Rlimit { current: Some(80), maximum: Some(80) }).unwrap();
        let share = Share::new(Options { descriptors_max: Some(100_000), ..options });
        let Share { dir, cx, .. } = &share;
        for index in 0..1000 {
            let made = dir.mkdir(cx, Ino::ROOT, name(&format!("d{index}")), &new(0o755)).unwrap();
            dir.create(cx, made.ino, name("f"), &new(0o644), OFlags::RDWR)
                .map(|(entry, handle)| dir.release(cx, entry.ino, handle))
                .unwrap();
        }
        let lines = share.list(Ino::ROOT, true, 10_000);
        assert_eq!(lines.iter().filter(|line| line.entry.is_some()).count(), 1000);
        // All but the last few are a client's open files now.
        let mut handles = Vec::new();
        let error = loop {
            let ino = share.ino(&format!("d{}/f", handles.len()));
            match dir.open(cx, ino, OFlags::RDONLY) {
                Ok(handle) => handles.push((ino, handle)),
                Err(error) => break error,
            }
            assert!(handles.len() < 80);
        };
        assert_eq!(error, Errno::MFILE);
        assert!(handles.len() > 40, "{}", handles.len());
        for index in 0..1000 {
            share.walk(&format!("d{index}/f")).unwrap();
        }
        let made = dir.create(cx, Ino::ROOT, name("none"), &new(0o644), OFlags::RDWR);
        assert_eq!(made.unwrap_err(), Errno::MFILE);
        assert_eq!(share.walk("none").unwrap_err(), Errno::NOENT);
        // As soon as one is closed, another can be opened.
        let (ino, handle) = handles.pop().unwrap();
        dir.release(cx, ino, handle);
        dir.open(cx, ino, OFlags::RDONLY).unwrap();
    }
}
