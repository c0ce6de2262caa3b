//! Changes by other processes of the host are noticed: by watching the file system, which needs root and file handles,
//! and by watching the directories that clients know.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::*;
use ferry_dir::{Options, OwnChanges, WatchKind};
use ferry_vfs::*;

/// Longer than a change takes to be heard of on a machine that has a lot else to do.
const LIMIT: Duration = Duration::from_secs(60);

/// A directory on a watched file system and what was heard, or a word why that cannot be had here.
fn watched(ours: OwnChanges) -> Option<(Share, Heard)> {
    let share = Share::new(Options::default());
    if share.dir.watch(ours).unwrap() == WatchKind::Directories {
        assert!(!is_root() || !share.dir.has_file_handles());
        ferry_skip::skip!("needs root and a file system with file handles");
        return None;
    }
    let heard = Heard::of(&share);
    Some((share, heard))
}

/// A share of which at most so many directories are watched, and what was heard.
fn watched_directories(max: Option<usize>) -> (Share, Heard) {
    let share = Share::new(Options { file_handles: false, watches_max: max, ..Options::default() });
    assert_eq!(share.dir.watch(OwnChanges::Skip).unwrap(), WatchKind::Directories);
    assert_eq!(share.dir.watch(OwnChanges::Skip).unwrap(), WatchKind::Directories, "no effect");
    let heard = Heard::of(&share);
    (share, heard)
}

/// How many watches the kernel has for this process's inotify descriptors on directories of the share.
fn watches_in_kernel(share: &Share) -> usize {
    let below = fs::read_dir(share.tmp.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().ino());
    let inos: HashSet<u64> = below.chain([fs::metadata(share.tmp.path()).unwrap().ino()]).collect();
    let fds = fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    let infos = fds.filter_map(|fd| fs::read_to_string(fd.path()).ok());
    let of_line = |line: &str| {
        let ino = line.strip_prefix("inotify ")?.split(' ').find_map(|word| word.strip_prefix("ino:"))?;
        u64::from_str_radix(ino, 16).ok()
    };
    infos.map(|info| info.lines().filter_map(of_line).filter(|ino| inos.contains(ino)).count()).sum()
}

/// What was heard, and a bell.
type All = (Mutex<Vec<(Change, SessionId)>>, Condvar);

struct Heard {
    all: Arc<All>,
    _subscription: Subscription,
}

impl Heard {
    fn of(share: &Share) -> Self {
        let all = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        let heard = Arc::clone(&all);
        let subscription = share.dir.changes().unwrap().subscribe(move |change, by| {
            heard.0.lock().unwrap().push((change.clone(), by));
            heard.1.notify_all();
        });
        Self { all, _subscription: subscription }
    }

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
    sh(&share, "for file in a b c d file; do echo 1 >$file; done; mkdir directory; echo 1 >directory/inside");
    // One file for each kind of change of a file: changes are told twice.
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|path| share.ino(path));
    let [file, directory, inside] = ["file", "directory", "directory/inside"].map(|path| share.ino(path));
    let buf = |text| name(text).to_buf();
    let root = |text| (Ino::ROOT, buf(text));
    let entry = |(dir, name)| Change::Entry { dir, name };
    for (script, changes) in [
        ("echo 2 >>a", vec![data(a)]),
        ("truncate -s 1 b", vec![data(b)]),
        ("chmod 600 c", vec![Change::Attr { ino: c }]),
        ("chmod 700 directory", vec![Change::Attr { ino: directory }]),
        ("touch -d @1 d", vec![data(d)]),
        ("echo 3 >directory/inside", vec![data(inside)]),
        ("echo 1 >new", vec![Change::Unsure { dir: Ino::ROOT, name: buf("new") }]),
        ("ln file link", vec![Change::Unsure { dir: Ino::ROOT, name: buf("link") }, Change::Attr { ino: file }]),
        ("rm link", vec![Change::Removed { dir: Ino::ROOT, name: buf("link"), ino: file }]),
        (
            "mv file directory/moved",
            vec![entry(root("file")), entry((directory, buf("moved"))), Change::Attr { ino: file }],
        ),
        (
            "mv directory/moved directory/inside",
            vec![entry((directory, buf("moved"))), entry((directory, buf("inside")))],
        ),
        ("rm -r directory", vec![Change::Removed { dir: Ino::ROOT, name: buf("directory"), ino: directory }]),
    ] {
        sh(&share, script);
        for change in changes {
            heard.wait_for(&change);
        }
        heard.clear();
    }
}

/// Package stores and backups have files with hundreds of links.
#[test]
fn files_with_many_names_do_not_become_stale() {
    let (share, heard) = watched_directories(None);
    sh(&share, "echo 1 >file; for i in $(seq 300); do ln file link$i; done");
    let file = share.ino("file");
    (1..=100).for_each(|number| assert_eq!(share.ino(&format!("link{number}")), file));
    sh(&share, "echo 2 >>link3");
    heard.wait_for(&data(file));
    heard.clear();
    // More than are kept: clients look up again those that they use.
    (101..=300).for_each(|number| assert_eq!(share.ino(&format!("link{number}")), file));
    heard.wait_for(&Change::All);
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

fn data(ino: Ino) -> Change {
    Change::Data { ino, offset: 0, len: u64::MAX }
}

#[test]
fn changes_in_known_directories_are_published() {
    let (share, heard) = watched_directories(None);
    sh(&share, "for file in a b c d e file; do echo 1 >$file; done; mkdir directory other; echo 1 >directory/inside");
    let [a, b, c, d, e] = ["a", "b", "c", "d", "e"].map(|path| share.ino(path));
    let [file, directory, inside, other] =
        ["file", "directory", "directory/inside", "other"].map(|path| share.ino(path));
    let buf = |text| name(text).to_buf();
    let entry = |dir, text| Change::Entry { dir, name: buf(text) };
    for (script, changes) in [
        ("echo 2 >>a", vec![data(a)]),
        ("truncate -s 1 b", vec![data(b)]),
        ("chmod 600 c", vec![Change::Attr { ino: c }]),
        ("chmod 700 directory", vec![Change::Attr { ino: directory }]),
        ("touch -d @1 d", vec![data(d)]),
        ("echo 3 >directory/inside", vec![data(inside)]),
        ("echo 1 >new", vec![Change::Unsure { dir: Ino::ROOT, name: buf("new") }]),
        // A directory in which no name was looked up yet.
        ("echo 1 >other/new", vec![Change::Unsure { dir: other, name: buf("new") }]),
        ("rm e", vec![Change::Removed { dir: Ino::ROOT, name: buf("e"), ino: e }, Change::Attr { ino: e }]),
        (
            "mv file directory/moved",
            vec![entry(Ino::ROOT, "file"), entry(directory, "moved"), Change::Attr { ino: file }],
        ),
        // By the name that no client has looked up.
        ("echo 4 >directory/moved", vec![data(file)]),
        ("mv directory/moved directory/inside", vec![entry(directory, "moved"), entry(directory, "inside")]),
        ("echo 5 >directory/inside", vec![data(file)]),
        ("mv directory other/directory", vec![entry(Ino::ROOT, "directory"), entry(other, "directory")]),
        // The watch moved along.
        ("echo 6 >other/directory/inside", vec![data(file)]),
        ("rm -r other/directory", vec![Change::Removed { dir: other, name: buf("directory"), ino: directory }]),
    ] {
        sh(&share, script);
        for change in changes {
            heard.wait_for(&change);
        }
        heard.clear();
    }
}

/// A link at a directory's place is not followed, and what it leads to is not watched.
#[test]
fn symbolic_links_are_not_watched() {
    let (share, heard) = watched_directories(None);
    let outside = tempdir();
    fs::write(outside.path().join("file"), "one").unwrap();
    std::os::unix::fs::symlink(outside.path(), share.path("link")).unwrap();
    share.ino("link");
    assert_eq!(share.dir.usage().watches, 1, "the root");
    fs::write(outside.path().join("file"), "two").unwrap();
    fs::write(share.path("mark"), "").unwrap();
    let before = heard.wait_for(&Change::Unsure { dir: Ino::ROOT, name: name("mark").to_buf() });
    let before = heard.all.0.lock().unwrap()[..before].to_vec();
    assert!(!before.iter().any(|(change, _)| matches!(change, Change::Data { .. })), "{before:?}");
}

/// A file is written where no client knows the directory, and then found there.
#[test]
fn a_file_found_under_another_name_counts_as_changed() {
    let (share, heard) = watched_directories(None);
    sh(&share, "mkdir -p unknown/directory; echo 1 >file");
    let file = share.ino("file");
    sh(&share, "mv file unknown/directory/file; echo 2 >unknown/directory/file");
    heard.wait_for(&Change::Entry { dir: Ino::ROOT, name: name("file").to_buf() });
    heard.clear();
    assert_eq!(share.ino("unknown/directory/file"), file);
    heard.wait_for(&data(file));
}

/// More directories than may be watched: clients revalidate everything, and what they use then is watched again.
#[test]
fn least_recently_used_directories_are_unwatched_and_everything_revalidated() {
    const MAX: usize = 8;
    let (share, heard) = watched_directories(Some(MAX));
    sh(&share, "for n in $(seq 20); do mkdir $n; echo 1 >$n/file; done");
    let used = share.ino("1/file");
    for n in 2..=20 {
        share.ino(&format!("{n}/file"));
        // Used all along.
        share.ino("1/file");
        assert!(share.dir.usage().watches <= MAX);
        assert_eq!(watches_in_kernel(&share), share.dir.usage().watches);
    }
    heard.wait_for(&Change::All);
    sh(&share, "echo 2 >1/file");
    heard.wait_for(&data(used));
    // The first one that was unwatched is watched as soon as a client looks again.
    let second = share.ino("2/file");
    sh(&share, "echo 2 >2/file");
    heard.wait_for(&data(second));
}

/// What a client knows of a directory that is not watched any more lasts a second, until it is watched again.
#[test]
fn what_is_not_watched_is_said() {
    let (share, heard) = watched_directories(Some(4));
    sh(&share, "for n in $(seq 9); do mkdir $n; echo 1 >$n/file; done; echo 1 >file");
    let (directory, file, other) = (share.ino("1"), share.ino("1/file"), share.ino("file"));
    assert!([directory, file, other, Ino::ROOT].iter().all(|ino| share.dir.is_watched(*ino)));
    for n in 2..=9 {
        share.ino(&format!("{n}/file"));
    }
    heard.wait_for(&Change::All);
    assert!(!share.dir.is_watched(directory) && !share.dir.is_watched(file));
    assert!(share.dir.is_watched(share.ino("9/file")) && share.dir.is_watched(other));
    // A file whose other name is in such a directory.
    sh(&share, "ln 9/file 1/link");
    let linked = share.ino("1/link");
    assert!(share.dir.is_watched(linked) && share.dir.is_watched(file));
}

#[test]
fn more_names_of_a_file_than_are_kept_are_told_at_once() {
    let (share, heard) = watched_directories(None);
    sh(&share, "echo 1 >file; for i in $(seq 255); do ln file link$i; done");
    let file = share.ino("file");
    (1..=255).for_each(|number| assert_eq!(share.ino(&format!("link{number}")), file));
    heard.clear();
    sh(&share, "mv link1 moved");
    heard.wait_for(&Change::All);
}

/// The directory that a client knows lives on under another name.
#[test]
fn another_directory_of_a_former_name_is_removed() {
    let (share, heard) = watched_directories(None);
    sh(&share, "mkdir known");
    let known = share.ino("known");
    sh(&share, "mv known moved; mkdir known; rmdir known; echo >mark");
    heard.wait_for(&Change::Unsure { dir: Ino::ROOT, name: name("mark").to_buf() });
    let all = heard.all.0.lock().unwrap().clone();
    let is_removed = |change: &Change| matches!(change, Change::Removed { ino, .. } if *ino == known);
    assert!(!all.iter().any(|(change, _)| is_removed(change)), "{all:?}");
}

/// A program of the host goes on to write to a file that it has removed or replaced.
#[test]
fn removed_files_are_still_watched() {
    let (share, heard) = watched_directories(None);
    sh(&share, "echo 1 >file; ln file link");
    let file = share.ino("file");
    let mut writer = File::options().append(true).open(share.path("file")).unwrap();
    sh(&share, "echo 2 >other; mv other file");
    heard.wait_for(&Change::Attr { ino: file });
    sh(&share, "rm file");
    heard.clear();
    writer.write_all(b"more").unwrap();
    drop(writer);
    heard.wait_for(&data(file));
}

#[test]
fn own_changes_are_told_to_another_mount_of_a_directory() {
    if !is_root() {
        ferry_skip::skip!("only root can mount");
        return;
    }
    let Some((share, heard)) = watched(OwnChanges::Skip) else { return };
    sh(&share, "mkdir bind origin; echo 1 >origin/file");
    sh(&share, "mount --bind origin bind");
    let found = ["origin/file", "bind/file"].map(|path| share.walk(path));
    let written = fs::write(share.path("origin/file"), "two");
    sh(&share, "umount -l bind");
    written.unwrap();
    let [one, other] = found.map(|entry| entry.unwrap().ino);
    assert_ne!(one, other);
    heard.wait_for(&data(other));
}

#[test]
fn watches_are_removed_when_clients_forget() {
    let (share, heard) = watched_directories(None);
    sh(&share, "for n in $(seq 200); do mkdir $n; echo 1 >$n/file; done");
    for round in 0..3 {
        let mut inos = Vec::new();
        for n in 1..=200 {
            let dir = share.ino(&n.to_string());
            inos.extend([dir, share.dir.lookup(&share.cx, dir, name("file")).unwrap().ino]);
        }
        assert_eq!((share.dir.usage().watches, watches_in_kernel(&share)), (201, 201), "round {round}");
        for ino in inos {
            share.dir.forget(ino, 1);
        }
        assert_eq!((share.dir.usage().watches, watches_in_kernel(&share)), (1, 1), "round {round}");
    }
    assert_eq!(share.dir.usage().inodes, 1);
    assert!(share.dir.usage().descriptors <= 1);
    // A directory that is removed while clients know it, and one that comes after it.
    let first = share.ino("1");
    sh(&share, "rm -r 1");
    share.dir.forget(first, 1);
    assert_eq!(share.dir.usage().watches, 1);
    sh(&share, "mkdir 1");
    let second = share.ino("1");
    sh(&share, "echo 1 >1/new");
    heard.wait_for(&Change::Unsure { dir: second, name: name("new").to_buf() });
}

/// As for the other way to watch: more happens than the kernel keeps.
#[test]
fn too_many_changes_in_directories_become_one() {
    const MANY: usize = 200_000;
    let limit = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap_or_default();
    let limit = limit.trim().parse().unwrap_or(usize::MAX);
    if limit > MANY {
        ferry_skip::skip!("the kernel keeps {limit} events");
        return;
    }
    let (share, heard) = watched_directories(None);
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let held = Arc::clone(&gate);
    let _holds = share.dir.changes().unwrap().subscribe(move |_, _| {
        let open = held.1.wait_while(held.0.lock().unwrap(), |open| !*open).unwrap();
        drop(open);
    });
    for number in 0..limit / 2 + 1000 {
        let path = share.path(format!("{number}"));
        fs::write(&path, "").unwrap();
        fs::remove_file(path).unwrap();
    }
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    heard.wait_for(&Change::All);
}

/// While files change all the time, nobody who looks and listens believes an old state: each change is in the attributes
/// of a lookup or heard of after it.
#[test]
fn no_change_is_missed_between_a_lookup_and_its_watch() {
    let (share, heard) = watched_directories(None);
    for round in 0..100_u64 {
        let directory = share.path(format!("{round}"));
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("file"), "").unwrap();
        let writer = std::thread::spawn(move || {
            File::options().append(true).open(directory.join("file")).unwrap().write_all(b"more").unwrap();
        });
        let found = share.walk(&format!("{round}/file")).unwrap();
        writer.join().unwrap();
        if found.attr.size == 0 {
            heard.wait_for(&data(found.ino));
        }
    }
}
