//! The number of system calls per operation, as in the crate documentation. Needs `strace`, root and a file system with
//! file handles; otherwise skipped.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs;
use std::process::Command;

use common::*;
use ferry_dir::Options;
use ferry_vfs::*;

/// Operation, calls with file handles, calls without.
const EXPECTED: &[(&str, usize, usize)] = &[
    ("lookup, new inode", 2, 3),
    ("lookup, known inode", 2, 1),
    ("lookup, held inode", 1, 1),
    ("lookup, no such name", 1, 1),
    ("getattr, first", 2, 1),
    ("getattr", 1, 1),
    ("getattr by handle", 1, 1),
    ("open, first", 3, 1),
    ("open", 1, 1),
    ("read, write, fsync", 0, 0),
    ("flush", 0, 0),
    ("release", 1, 1),
    ("create", 3, 3),
    ("create as another user", 8, 8),
    ("mkdir", 3, 4),
    ("symlink", 3, 4),
    ("unlink", 3, 2),
    ("rename over nothing", 2, 3),
    ("chmod", 2, 2),
    ("truncate by handle", 2, 2),
    ("opendir", 1, 1),
    ("readdir, 100 names", 2, 2),
    ("readdirplus, 100 new inodes", 202, 302),
    ("readdirplus, 100 held inodes", 102, 102),
    ("getxattr", 1, 1),
    ("POSIX lock, first of an owner", 2, 2),
    ("POSIX lock", 1, 1),
    ("POSIX unlock", 1, 1),
];

#[test]
fn operations_make_the_documented_number_of_system_calls() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    for (mode, handles) in [("handles", true), ("path", false)] {
        let tmp = tempdir();
        let log = tmp.path().join("log");
        let run = Command::new("strace")
            .args(["-f", "-s", "64", "-o"])
            .arg(&log)
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "syscalls::counted", "--ignored", "--nocapture", "--test-threads=1"])
            .env("COUNT_MODE", mode)
            .output();
        let output = match run {
            Ok(output) => output,
            Err(error) => return ferry_skip::skip!("no strace: {error}"),
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = fs::read_to_string(&log).unwrap();
        let mut wrong = Vec::new();
        for (operation, with, without) in EXPECTED {
            let expected = if handles { *with } else { *without };
            let calls = between(&text, operation);
            if calls.len() != expected {
                wrong.push(format!("{mode}: {operation}: {} calls, not {expected}: {calls:#?}", calls.len()));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

/// The calls between the two marks of an operation; memory is the allocator's business, and the check before each
/// close is that of a standard library with debug assertions.
fn between<'a>(log: &'a str, operation: &str) -> Vec<&'a str> {
    let (begin, end) = (format!("/begin {operation}\""), format!("/end {operation}\""));
    let lines = log.lines().skip_while(|line| !line.contains(&begin)).skip(1);
    lines
        .take_while(|line| !line.contains(&end))
        .filter(|line| {
            !["brk(", "mmap(", "munmap(", "mprotect(", "madvise(", "F_GETFD"].iter().any(|call| line.contains(call))
        })
        .collect()
}

fn count<T>(operation: &str, f: impl FnOnce() -> T) -> T {
    let mark =
        |what: &str| assert!(rustix::fs::access(format!("/{what} {operation}"), rustix::fs::Access::EXISTS).is_err());
    mark("begin");
    let result = f();
    mark("end");
    result
}

#[test]
#[ignore = "only run under strace"]
fn counted() {
    let file_handles = std::env::var("COUNT_MODE").is_ok_and(|mode| mode == "handles");
    let share = Share::new(Options { file_handles, ..Options::default() });
    let Share { dir, cx, .. } = &share;
    for file in ["f", "g", "h", "u"] {
        fs::write(share.path(file), "content").unwrap();
    }
    fs::create_dir(share.path("d")).unwrap();
    for index in 0..100 {
        fs::write(share.path(format!("d/{index}")), "").unwrap();
    }
    let lookup = |file| dir.lookup(cx, Ino::ROOT, name(file));
    count("lookup, new inode", || lookup("f")).unwrap();
    let f = count("lookup, known inode", || lookup("f")).unwrap().ino;
    count("getattr, first", || dir.getattr(cx, f, None)).unwrap();
    count("getattr", || dir.getattr(cx, f, None)).unwrap();
    count("lookup, held inode", || lookup("f")).unwrap();
    count("lookup, no such name", || lookup("none")).unwrap_err();
    let g = lookup("g").unwrap().ino;
    let handle = count("open, first", || dir.open(cx, g, OFlags::RDWR)).unwrap();
    let again = count("open", || dir.open(cx, g, OFlags::RDWR)).unwrap();
    count("getattr by handle", || dir.getattr(cx, g, Some(handle))).unwrap();
    let flags = OFlags::RDWR;
    let at = IoRange { ino: g, handle, offset: 0, len: 1, flags, clear_privileges: false, owner: None };
    count("read, write, fsync", || {
        assert!(matches!(dir.read(cx, &at, &mut Vec::new()), Ok(Data::Extent(_))));
        assert!(matches!(dir.write(cx, &at, &mut &b"x"[..]), Ok(Data::Extent(_))));
        dir.fsync(cx, g, handle, false)
    })
    .unwrap();
    count("flush", || dir.flush(cx, g, handle, 1)).unwrap();
    count("release", || dir.release(cx, g, again));
    // The first of a thread gives it a umask of its own.
    dir.mkdir(cx, Ino::ROOT, name("warm"), &new(0o755)).unwrap();
    count("create", || dir.create(cx, Ino::ROOT, name("c"), &new(0o644), flags)).unwrap();
    let user = Caller { uid: 1000, gid: 1000, ..*cx };
    dir.mkdir(&user, Ino::ROOT, name("warm2"), &new(0o755)).unwrap();
    count("create as another user", || dir.create(&user, Ino::ROOT, name("c2"), &new(0o644), flags)).unwrap();
    let d = count("mkdir", || dir.mkdir(cx, Ino::ROOT, name("made"), &new(0o755))).unwrap();
    count("symlink", || dir.symlink(cx, Ino::ROOT, name("s"), b"x")).unwrap();
    lookup("u").unwrap();
    count("unlink", || dir.unlink(cx, Ino::ROOT, name("u"))).unwrap();
    lookup("h").unwrap();
    let (from, to) = ((Ino::ROOT, name("h")), (Ino::ROOT, name("h2")));
    count("rename over nothing", || dir.rename(cx, from, to, RenameFlags::empty())).unwrap();
    let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    count("chmod", || dir.setattr(cx, f, None, &mode)).unwrap();
    let size = SetAttr { size: Some(5), ..SetAttr::default() };
    count("truncate by handle", || dir.setattr(cx, g, Some(handle), &size)).unwrap();
    dir.getattr(cx, d.ino, None).unwrap();
    let ino = lookup("d").unwrap().ino;
    dir.getattr(cx, ino, None).unwrap();
    let listing = count("opendir", || dir.opendir(cx, ino, OFlags::RDONLY)).unwrap();
    let list = |handle, plus| {
        let mut out = Listing { lines: Vec::with_capacity(200), max: 200 };
        dir.readdir(cx, &DirRange { ino, handle, offset: 0, plus }, &mut out).unwrap();
        assert_eq!(out.lines.len(), 102);
        out.lines
    };
    count("readdir, 100 names", || list(listing, false));
    let listing = dir.opendir(cx, ino, OFlags::RDONLY).unwrap();
    for line in count("readdirplus, 100 new inodes", || list(listing, true)) {
        if let Some(entry) = line.entry {
            dir.getattr(cx, entry.ino, None).unwrap();
        }
    }
    let listing = dir.opendir(cx, ino, OFlags::RDONLY).unwrap();
    count("readdirplus, 100 held inodes", || list(listing, true));
    let _ = count("getxattr", || dir.getxattr(cx, f, b"user.none"));
    let lock = |kind| {
        let owner = LockOwner { session: cx.session, id: 1 };
        let lock = Lock { kind, owner, start: 0, end: 9, pid: 1, flock: false };
        assert_eq!(dir.set_lock(cx, g, handle, &lock, None), Ok(LockOutcome::Done));
    };
    count("POSIX lock, first of an owner", || lock(LockKind::Write));
    count("POSIX lock", || lock(LockKind::Read));
    count("POSIX unlock", || lock(LockKind::Unlock));
}
