//! Changes by other processes of the host are noticed. Needs root and a file system with file handles.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::*;
use ferry_dir::{Options, OwnChanges, WatchError};
use ferry_vfs::*;

/// Longer than a change takes to be heard of on a machine that has a lot else to do.
const LIMIT: Duration = Duration::from_secs(60);

/// A watched directory and what was heard, or a word why that cannot be had here.
fn watched(ours: OwnChanges) -> Option<(Share, Heard)> {
    let share = Share::new(Options::default());
    match share.dir.watch(ours) {
        Ok(()) => {}
        Err(why @ (WatchError::Permission | WatchError::NoHandles | WatchError::Unsupported)) => {
            assert!(!is_root() || !share.dir.has_file_handles(), "{why}");
            ferry_skip::skip!("{why}");
            return None;
        }
        Err(error) => panic!("{error:?}"),
    }
    let all = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
    let heard = Arc::clone(&all);
    let subscription = share.dir.changes().unwrap().subscribe(move |change, by| {
        heard.0.lock().unwrap().push((change.clone(), by));
        heard.1.notify_all();
    });
    Some((share, Heard { all, _subscription: subscription }))
}

/// What was heard, and a bell.
type All = (Mutex<Vec<(Change, SessionId)>>, Condvar);

struct Heard {
    all: Arc<All>,
    _subscription: Subscription,
}

impl Heard {
    /// Waits until this was heard of nobody's doing, and answers how often anything was heard before.
    #[track_caller]
    fn wait_for(&self, change: &Change) -> usize {
        let end = Instant::now() + LIMIT;
        let mut all = self.all.0.lock().unwrap();
        loop {
            let is_it = |(heard, by): &(Change, SessionId)| heard == change && *by == SessionId::default();
            if let Some(at) = all.iter().position(is_it) {
                return at;
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{change:?} was not heard of: {all:?}");
            all = self.all.1.wait_timeout(all, left).unwrap().0;
        }
    }

    fn clear(&self) {
        self.all.0.lock().unwrap().clear();
    }
}

fn sh(share: &Share, script: &str) {
    assert!(Command::new("sh").args(["-euc", script]).current_dir(share.tmp.path()).status().unwrap().success());
}

#[test]
fn changes_by_others_are_published() {
    let Some((share, heard)) = watched(OwnChanges::Skip) else { return };
    sh(&share, "for file in a b c d file; do echo 1 >$file; done; mkdir folder; echo 1 >folder/inside");
    // One file for each kind of change of a file: changes are told twice.
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|path| share.ino(path));
    let [file, folder, inside] = ["file", "folder", "folder/inside"].map(|path| share.ino(path));
    let buf = |text| name(text).to_buf();
    let data = |ino| Change::Data { ino, offset: 0, len: u64::MAX };
    let root = |text| (Ino::ROOT, buf(text));
    let entry = |(dir, name)| Change::Entry { dir, name };
    for (script, changes) in [
        ("echo 2 >>a", vec![data(a)]),
        ("truncate -s 1 b", vec![data(b)]),
        ("chmod 600 c", vec![Change::Attr { ino: c }]),
        ("chmod 700 folder", vec![Change::Attr { ino: folder }]),
        ("touch -d @1 d", vec![data(d)]),
        ("echo 3 >folder/inside", vec![data(inside)]),
        ("echo 1 >new", vec![Change::Unsure { dir: Ino::ROOT, name: buf("new") }]),
        ("ln file link", vec![Change::Unsure { dir: Ino::ROOT, name: buf("link") }, Change::Attr { ino: file }]),
        ("rm link", vec![Change::Removed { dir: Ino::ROOT, name: buf("link"), ino: file }]),
        ("mv file folder/moved", vec![entry(root("file")), entry((folder, buf("moved"))), Change::Attr { ino: file }]),
        ("mv folder/moved folder/inside", vec![entry((folder, buf("moved"))), entry((folder, buf("inside")))]),
        ("rm -r folder", vec![Change::Removed { dir: Ino::ROOT, name: buf("folder"), ino: folder }]),
    ] {
        sh(&share, script);
        for change in changes {
            heard.wait_for(&change);
        }
        heard.clear();
    }
}

/// The kernel keeps the order of events, so that those of ours would have come before the mark.
#[test]
fn own_changes_are_skipped() {
    let Some((share, heard)) = watched(OwnChanges::Skip) else { return };
    sh(&share, "echo 1 >file");
    let file = share.ino("file");
    // Of a kind that the shell does nothing of.
    fs::set_permissions(share.path("file"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::write(share.path("ours"), "two").unwrap();
    sh(&share, "echo 1 >mark");
    let mark = heard.wait_for(&Change::Unsure { dir: Ino::ROOT, name: name("mark").to_buf() });
    let before = heard.all.0.lock().unwrap()[..mark].to_vec();
    let ours = |change: &Change| match change {
        Change::Attr { ino } => *ino == file,
        Change::Unsure { name, .. } => name.as_name().as_bytes() == b"ours",
        _ => false,
    };
    assert!(!before.iter().any(|(change, _)| ours(change)), "{before:?}");
}

#[test]
fn own_changes_are_published_on_request() {
    let Some((share, heard)) = watched(OwnChanges::Tell) else { return };
    fs::write(share.path("file"), "one").unwrap();
    heard.wait_for(&Change::Unsure { dir: Ino::ROOT, name: name("file").to_buf() });
    let file = share.ino("file");
    fs::write(share.path("file"), "two").unwrap();
    heard.wait_for(&Change::Data { ino: file, offset: 0, len: u64::MAX });
}

/// Each is told at once, and again for those whose answers were under way.
#[test]
fn changes_are_published_twice() {
    let Some((share, heard)) = watched(OwnChanges::Skip) else { return };
    sh(&share, "echo 1 >new");
    let change = Change::Unsure { dir: Ino::ROOT, name: name("new").to_buf() };
    let first = heard.wait_for(&change);
    heard.all.0.lock().unwrap().drain(..=first);
    heard.wait_for(&change);
}

/// While the one who listens is held up, more happens than the kernel keeps.
#[test]
fn too_many_changes_become_one() {
    /// More than that a machine is not to be troubled with.
    const MANY: usize = 200_000;
    let limit = fs::read_to_string("/proc/sys/fs/fanotify/max_queued_events").unwrap_or_default();
    let limit = limit.trim().parse().unwrap_or(usize::MAX);
    if limit > MANY {
        ferry_skip::skip!("the kernel keeps {limit} events");
        return;
    }
    let Some((share, heard)) = watched(OwnChanges::Tell) else { return };
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let held = Arc::clone(&gate);
    let _holds = share.dir.changes().unwrap().subscribe(move |_, _| {
        let open = held.1.wait_while(held.0.lock().unwrap(), |open| !*open).unwrap();
        drop(open);
    });
    // Names that come and go, so that no two events are one.
    for number in 0..limit + 1000 {
        let path = share.path(format!("{number}"));
        fs::write(&path, "").unwrap();
        fs::remove_file(path).unwrap();
    }
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    heard.wait_for(&Change::All);
}

/// Handles are what events name files by.
#[test]
fn watching_requires_file_handles() {
    let share = Share::new(Options { file_handles: false, ..Options::default() });
    assert!(matches!(share.dir.watch(OwnChanges::Skip), Err(WatchError::NoHandles)));
}
