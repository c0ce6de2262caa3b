//! Idle descriptors are closed, so that files deleted by others release their space. Needs root and a file system with
//! file handles; otherwise skipped.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use ferry_dir::Options;
use ferry_vfs::*;

/// Longer than a directory's descriptor stays, on a loaded machine.
const LIMIT: Duration = Duration::from_secs(90);
const TICK: Duration = Duration::from_millis(50);
/// Long enough for the descriptor of any file that is not used to go.
const SEVERAL_TURNS: Duration = Duration::from_secs(11);

/// What of a share this process has open, by its names.
fn open_in(share: &Share) -> Vec<PathBuf> {
    let entries = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let root = share.tmp.path().canonicalize().unwrap();
    let open = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    open.filter(|path| path.starts_with(&root) && *path != root).collect()
}

fn wait_until(mut is_so: impl FnMut() -> bool, what: &str) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        sleep(TICK);
    }
}

/// Each test of this file has descriptors of its own share only.
fn share() -> Option<Share> {
    let share = Share::new(Options::default());
    if !is_root() || !share.dir.has_file_handles() {
        ferry_skip::skip!("needs root, and a file system with file handles");
        return None;
    }
    Some(share)
}

#[test]
fn deleted_files_release_their_space_and_others_stay_known() {
    let Some(share) = share() else { return };
    let Share { dir, cx, .. } = &share;
    dir.begin();
    dir.begin();
    for path in ["deleted", "stays", "ours", "open"] {
        fs::write(share.path(path), path).unwrap();
    }
    fs::create_dir_all(share.path("a/b")).unwrap();
    let inos = ["deleted", "stays", "ours", "a/b"].map(|path| share.ino(path));
    for ino in inos {
        dir.getattr(cx, ino, None).unwrap();
    }
    let [deleted, stays, ours, below] = inos;
    let (open, handle) = share.open("open", OFlags::RDWR).unwrap();
    assert!(open_in(&share).len() >= 5, "{:?}", open_in(&share));
    // By others, and by a client that still knows it.
    fs::remove_file(share.path("deleted")).unwrap();
    fs::remove_file(share.path("open")).unwrap();
    dir.unlink(cx, Ino::ROOT, name("ours")).unwrap();
    // Directories last: the root, the unlinked inode that is known, and the file that is open are left.
    wait_until(|| dir.usage().descriptors == 2, "descriptors stay");
    let left = open_in(&share);
    assert!(left.len() == 2 && left.iter().all(|path| path.to_str().unwrap().ends_with(" (deleted)")), "{left:?}");
    assert_eq!(dir.getattr(cx, deleted, None).unwrap_err(), Errno::STALE);
    assert_eq!(dir.getattr(cx, stays, None).unwrap().ino, fs::metadata(share.path("stays")).unwrap().ino());
    assert_eq!(dir.getattr(cx, ours, None).unwrap().nlink, 0);
    for handle in [Some(handle), None] {
        assert_eq!(dir.getattr(cx, open, handle).unwrap().nlink, 0);
    }
    assert_eq!(share.read((open, handle), 0, 4).unwrap(), b"open");
    assert_eq!(dir.getattr(cx, below, None).unwrap().kind(), FileType::Directory);
    assert_eq!(share.ino("stays"), stays);
    assert_eq!(share.ino("a/b"), below);
}

#[test]
fn an_idle_evictor_resumes() {
    let Some(share) = share() else { return };
    let Share { dir, cx, .. } = &share;
    dir.begin();
    fs::write(share.path("file"), "").unwrap();
    let file = share.ino("file");
    for round in 0..2 {
        dir.getattr(cx, file, None).unwrap();
        wait_until(|| dir.usage().descriptors == 1, &format!("round {round}: the descriptor stays"));
    }
}

#[test]
fn descriptors_in_use_stay_open() {
    let Some(share) = share() else { return };
    let Share { dir, cx, .. } = &share;
    dir.begin();
    for path in ["used", "unused"] {
        fs::write(share.path(path), path).unwrap();
        dir.getattr(cx, share.ino(path), None).unwrap();
    }
    let used = share.ino("used");
    let is_open = |file: &str| open_in(&share).iter().any(|path| path.ends_with(file));
    let begun = Instant::now();
    while begun.elapsed() < SEVERAL_TURNS {
        assert!(is_open("used"), "after {:?}", begun.elapsed());
        dir.getattr(cx, used, None).unwrap();
        sleep(TICK);
    }
    assert!(!is_open("unused"));
}

#[test]
fn dropping_the_source_does_not_wait() {
    let Some(share) = share() else { return };
    share.dir.begin();
    fs::write(share.path("file"), "").unwrap();
    share.dir.getattr(&share.cx, share.ino("file"), None).unwrap();
    let begun = Instant::now();
    drop(share);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}
