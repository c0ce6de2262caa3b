//! The log matches the changes: a tree replayed from the records, and one from a snapshot, equal the original.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use common::{Share, name, new, range};
use ferry_mem::store::{At, Meta, Record, Space, Store, Usage, WriteAt};
use ferry_mem::{Limits, Replay, ReplayError, Tree};
use ferry_vfs::*;
use proptest::prelude::*;

type Bytes = Arc<Mutex<Vec<u8>>>;

/// Bytes in memory, and a second tree that does what is logged.
#[derive(Debug, Default)]
struct Recorder {
    files: Mutex<HashMap<Ino, Bytes>>,
    shadow: Option<Box<Mutex<Replay<Recorder>>>>,
    removed: Mutex<Vec<Ino>>,
}

const LIMITS: Limits = Limits { inodes_max: 1000, metadata_bytes_max: 1 << 30, read_only: false };

impl Store for Recorder {
    type File = Bytes;

    const JOURNALED: bool = true;

    fn log(&self, record: &Record<'_>) -> Result<()> {
        if let Some(shadow) = &self.shadow {
            shadow.lock().unwrap().apply(record).unwrap_or_else(|error| panic!("{error}: {record:?}"));
        }
        Ok(())
    }

    fn open(&self, ino: Ino, _: (Timespec, Timespec)) -> Result<Bytes> {
        Ok(self.files.lock().unwrap().entry(ino).or_default().clone())
    }

    fn usage(&self, ino: Ino, _: Option<&Bytes>) -> Result<Usage> {
        let files = self.files.lock().unwrap();
        let size = files.get(&ino).map_or(0, |file| file.lock().unwrap().len() as u64);
        Ok(Usage { size, blocks: size.div_ceil(512), times: None })
    }

    fn read(&self, file: &Bytes, offset: u64, len: u32, out: &mut dyn Output) -> Result<Data> {
        let file = file.lock().unwrap();
        let start = (offset as usize).min(file.len());
        let end = (start + len as usize).min(file.len());
        Ok(Data::Bytes(out.put(&file[start..end])))
    }

    fn write(&self, file: &Bytes, at: WriteAt, input: &mut dyn Input) -> Result<Data> {
        let mut file = file.lock().unwrap();
        let start = if at.append { file.len() } else { at.offset as usize };
        let end = start + at.len as usize;
        if file.len() < end {
            file.resize(end, 0);
        }
        Ok(Data::Bytes(input.take(&mut file[start..end])))
    }

    fn truncate(&self, file: &Bytes, size: u64) -> Result<()> {
        file.lock().unwrap().resize(size as usize, 0);
        Ok(())
    }

    fn fallocate(&self, _: &Bytes, _: u64, _: u64, _: FallocateFlags) -> Result<()> {
        Err(Errno::OPNOTSUPP)
    }

    fn seek(&self, _: &Bytes, _: u64, _: Seek) -> Result<u64> {
        Err(Errno::NXIO)
    }

    fn copy(&self, _: (&Bytes, u64), _: (&Bytes, u64), _: u64) -> Result<u64> {
        Err(Errno::OPNOTSUPP)
    }

    fn fsync(&self, _: Ino, _: Option<&Bytes>, _: bool) -> Result<Option<Arc<Backing>>> {
        Ok(None)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn remove(&self, ino: Ino) {
        self.files.lock().unwrap().remove(&ino);
        self.removed.lock().unwrap().push(ino);
    }

    fn space(&self) -> Result<Space> {
        Ok(Space::default())
    }
}

/// What the second tree has become.
fn shadow(share: &Share<Tree<Recorder>>) -> Replay<Recorder> {
    let empty = Replay::new(Recorder::default(), LIMITS);
    std::mem::replace(&mut *share.fs.store().shadow.as_ref().unwrap().lock().unwrap(), empty)
}

/// A tree whose records go to a second one.
fn recorded() -> Share<Tree<Recorder>> {
    let shadow = Some(Box::new(Mutex::new(Replay::new(Recorder::default(), LIMITS))));
    Share::over(Replay::new(Recorder { shadow, ..Recorder::default() }, LIMITS).finish().unwrap())
}

type Picture = BTreeMap<String, (Attr, Vec<u8>, Vec<(Vec<u8>, Vec<u8>)>)>;

/// Everything that a tree shows, without what only its store knows.
fn picture(share: &Share<Tree<Recorder>>) -> Picture {
    fn add(share: &Share<Tree<Recorder>>, dir: Ino, at: &str, picture: &mut Picture) {
        let mut names = share.names(dir);
        names.sort();
        for line in names {
            let entry = share.fs.lookup(&share.cx, dir, name(&line)).unwrap();
            share.forget(entry.ino);
            show(share, entry.ino, format!("{at}/{line}"), picture);
        }
    }
    fn show(share: &Share<Tree<Recorder>>, ino: Ino, path: String, picture: &mut Picture) {
        let (fs, cx) = (&share.fs, &share.cx);
        // Listing a directory moves its access time.
        let attr = Attr { size: 0, blocks: 0, atime: Timespec::default(), ..share.attr(ino) };
        let target = fs.readlink(cx, ino).unwrap_or_default();
        let list = fs.listxattr(cx, ino).unwrap();
        let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let xattrs = names.map(|name| (name.to_vec(), fs.getxattr(cx, ino, name).unwrap())).collect();
        let is_dir = attr.kind() == FileType::Directory;
        assert!(picture.insert(path.clone(), (attr, target, xattrs)).is_none());
        if is_dir {
            add(share, ino, &path, picture);
        }
    }
    let mut all = Picture::new();
    show(share, Ino::ROOT, String::new(), &mut all);
    all
}

fn same(ours: &Share<Tree<Recorder>>, theirs: Replay<Recorder>) -> std::result::Result<(), TestCaseError> {
    let theirs = Share::over(theirs.finish().unwrap());
    let (mut left, mut right) = (picture(ours), picture(&theirs));
    // Only what differs is worth reading.
    let same: Vec<String> =
        left.iter().filter(|(path, it)| right.get(*path) == Some(*it)).map(|(path, _)| path.clone()).collect();
    for path in same {
        left.remove(&path);
        right.remove(&path);
    }
    prop_assert_eq!(left, right);
    prop_assert_eq!(ours.fs.usage().inodes, theirs.fs.usage().inodes);
    Ok(())
}

impl Share<Tree<Recorder>> {
    /// Does something, in one of four directories with one of four names, chosen by `numbers`; that it often fails does
    /// not matter here.
    fn random(&self, numbers: (u8, u8, u8, u8), held: &mut Vec<(Ino, Handle)>) {
        let (fs, cx) = (&self.fs, &self.cx);
        let dirs = ["", "0", "1", "0/1"].map(|path| self.walk(path).map(|entry| entry.ino));
        let (verb, a, b, value) = numbers;
        if value == 0 {
            // A tick of the clock, now and then, for times to differ.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let at = |number: u8| (dirs[usize::from(number % 4)].unwrap_or(Ino::ROOT), word(number / 4));
        let ((dir, word), to) = (at(a), at(b));
        let found = fs.lookup(cx, dir, word);
        let mode = u32::from(value) | 0o400;
        let done = |made: Result<Entry>| made.map(|entry| self.forget(entry.ino)).unwrap_or_default();
        match (verb % 16, &found) {
            (0, _) => {
                if let Ok((entry, handle)) = fs.create(cx, dir, word, &new(mode), OFlags::RDWR | OFlags::EXCL) {
                    self.forget(entry.ino);
                    held.push((entry.ino, handle));
                }
            }
            (1 | 2, _) => done(fs.mkdir(cx, dir, word, &new(mode))),
            (3, _) => done(fs.symlink(cx, dir, word, &[value | 1])),
            (4, _) => done(fs.mknod(cx, dir, word, &CreateArgs { mode: 0o20000 | mode, rdev: value.into(), umask: 0 })),
            (5, Ok(entry)) => done(fs.link(cx, entry.ino, to.0, to.1)),
            (6, _) => fs.unlink(cx, dir, word).unwrap_or_default(),
            (7, _) => fs.rmdir(cx, dir, word).unwrap_or_default(),
            (8..=10, _) => {
                let flags =
                    [RenameFlags::empty(), RenameFlags::EXCHANGE, RenameFlags::WHITEOUT, RenameFlags::NOREPLACE];
                let _ = fs.rename(cx, (dir, word), to, flags[usize::from(value % 4)]);
            }
            (11, Ok(entry)) => {
                let set = SetAttr { mode: Some(mode), uid: Some(value.into()), ..SetAttr::default() };
                fs.setattr(cx, entry.ino, None, &set).unwrap();
            }
            (12, Ok(entry)) => {
                let acl = [&b"system.posix_acl_default"[..], b"security.capability", b"trusted.x"];
                let value: &[u8] = if value % 3 == 0 { DEFAULT_ACL } else { &[value; 9] };
                let index = numbers.3 % 3;
                let _ = fs.setxattr(cx, entry.ino, acl[usize::from(index)], value, XattrFlags::empty(), false);
            }
            (13, Ok(entry)) => fs.removexattr(cx, entry.ino, b"trusted.x").unwrap_or_default(),
            (14, _) => {
                if let Some(open) = held.last() {
                    self.write(*open, value.into(), b"bytes").unwrap();
                }
            }
            (15, _) => {
                if let Some(open) = held.pop() {
                    self.release(open);
                }
            }
            _ => {}
        }
        for ino in found.into_iter().map(|entry| entry.ino).chain(dirs.into_iter().flatten()) {
            self.forget(ino);
        }
    }
}

/// Owner rwx, user 9 rwx, group r, mask rw, others none.
const DEFAULT_ACL: &[u8] = &[
    2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 7, 0, 9, 0, 0, 0, 4, 0, 4, 0, 255, 255, 255, 255, 16, 0, 6, 0,
    255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
];

fn word(number: u8) -> Name<'static> {
    name(["0", "1", "2", "3"][usize::from(number % 4)])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn records_and_snapshots_make_the_same_tree(
        steps in prop::collection::vec((0_u8..16, any::<u8>(), any::<u8>(), any::<u8>()), 1..120)
    ) {
        let share = recorded();
        let mut held = Vec::new();
        for step in steps {
            share.random(step, &mut held);
        }
        // In the middle of things: open files without names are in the snapshot too.
        let mut copy = Replay::new(Recorder::default(), LIMITS);
        share.fs.checkpoint(|snapshot| {
            snapshot.for_each(&mut |record| {
                copy.apply(record).unwrap_or_else(|error| panic!("{error}: {record:?}"));
                Ok(())
            })
        }).unwrap();
        for open in held {
            share.release(open);
        }
        same(&share, copy)?;
        same(&share, shadow(&share))?;
    }
}

fn meta(mode: u32) -> Meta {
    Meta { mode, ..Meta::default() }
}

fn make(ino: u64, mode: u32, at: Option<(u64, &'static str)>) -> Record<'static> {
    let at = at.map(|(dir, word)| At { dir: Ino(dir), name: name(word) });
    Record::Make { ino: Ino(ino), meta: meta(mode), target: &[], xattrs: &[], at }
}

#[test]
fn invalid_records_are_refused() {
    let time = Timespec::default();
    let at = |dir, word| At { dir: Ino(dir), name: name(word) };
    let rename = |from, to, exchange, whiteout| Record::Rename { from, to, exchange, whiteout, time };
    let cases = [
        (make(1, 0o40755, Some((1, "x"))), ReplayError::BadNumber(1)),
        (make(0, 0o100644, Some((1, "x"))), ReplayError::BadNumber(0)),
        (make(u64::MAX, 0o100644, Some((1, "x"))), ReplayError::BadNumber(u64::MAX)),
        (make(2, 0o100644, Some((1, "x"))), ReplayError::BadNumber(2)),
        (make(9, 0o644, Some((1, "x"))), ReplayError::BadMode { ino: 9, mode: 0o644 }),
        (make(9, 0o100644, Some((1, "dir"))), ReplayError::EntryExists(1)),
        (make(9, 0o100644, Some((3, "x"))), ReplayError::NoDirectory(3)),
        (make(9, 0o100644, Some((8, "x"))), ReplayError::NoInode(8)),
        (Record::Link { ino: Ino(2), at: at(1, "x"), time }, ReplayError::Impossible(2)),
        (Record::Link { ino: Ino(7), at: at(1, "x"), time }, ReplayError::NoInode(7)),
        (Record::Unlink { at: at(1, "x"), time }, ReplayError::NoEntry(1)),
        (Record::Unlink { at: at(1, "dir"), time }, ReplayError::Impossible(2)),
        (rename(at(1, "x"), at(1, "y"), false, None), ReplayError::NoEntry(1)),
        (rename(at(1, "dir"), at(4, "y"), false, None), ReplayError::Impossible(2)),
        (rename(at(1, "dir"), at(2, "y"), false, None), ReplayError::Impossible(2)),
        (rename(at(1, "dir"), at(1, "file"), false, None), ReplayError::Impossible(2)),
        (rename(at(2, "sub"), at(1, "dir"), false, None), ReplayError::Impossible(4)),
        (rename(at(1, "file"), at(1, "x"), true, None), ReplayError::Impossible(3)),
        (
            rename(at(1, "file"), at(1, "x"), false, Some((Ino(9), meta(0o100644)))),
            ReplayError::BadMode { ino: 9, mode: 0o100644 },
        ),
        (rename(at(1, "file"), at(1, "x"), false, Some((Ino(2), meta(0o20000)))), ReplayError::BadNumber(2)),
        (Record::Attr { ino: Ino(2), meta: meta(0o100644) }, ReplayError::BadMode { ino: 2, mode: 0o100644 }),
        (Record::Free { ino: Ino(3) }, ReplayError::Impossible(3)),
        (Record::Free { ino: Ino(1) }, ReplayError::Impossible(1)),
    ];
    let mut replay = Replay::new(Recorder::default(), LIMITS);
    for good in [
        make(1, 0o40755, None),
        make(2, 0o40755, Some((1, "dir"))),
        make(3, 0o100644, Some((1, "file"))),
        make(4, 0o40755, Some((2, "sub"))),
        make(5, 0o100644, None),
    ] {
        replay.apply(&good).unwrap();
    }
    for (record, error) in cases {
        assert_eq!(replay.apply(&record), Err(error), "{record:?}");
    }
    let share = Share::over(replay.finish().unwrap());
    assert_eq!(share.names(Ino::ROOT), ["dir", "file"]);
    assert_eq!(share.names(share.ino("dir")), ["sub"]);
    // Inode 5 has no name.
    assert_eq!(*share.fs.store().removed.lock().unwrap(), [Ino(5)]);
    assert_eq!(share.fs.usage().inodes, 4);
    // Numbers go on after the highest.
    assert!(share.mkdir(Ino::ROOT, "next") > Ino(5));
}

#[test]
fn times_of_writes_are_logged_at_flush_and_release() {
    let share = recorded();
    let open = share.create(Ino::ROOT, "file", 0o644);
    let past = Some(SetTime::At(Timespec { sec: 1, nsec: 0 }));
    share.fs.setattr(&share.cx, open.0, None, &SetAttr { mtime: past, ..SetAttr::default() }).unwrap();
    assert_eq!(share.write_at(&range(open.0, open.1, 0, 3, OFlags::RDWR), b"abc"), Ok(3));
    let written = share.attr(open.0).mtime;
    assert!(written.sec > 1);
    share.release(open);
    assert_eq!(share.attr(open.0).mtime, written);
    let replayed = Share::over(shadow(&share).finish().unwrap());
    assert_eq!(replayed.walk("file").unwrap().attr.mtime, written);
}
