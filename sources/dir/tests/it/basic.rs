//! Every operation, on the host's own file system, with and without file handles.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::sync::{Arc, Mutex};

use common::*;
use ferry_dir::{Dir, OpenError, Options};
use ferry_vfs::*;

#[test]
fn files_are_created_written_read_and_removed() {
    for options in both_modes() {
        let share = Share::new(options);
        let (entry, handle) = share.create(Ino::ROOT, "file", OFlags::RDWR).unwrap();
        let at = (entry.ino, handle);
        assert_eq!(share.write(at, 0, b"hello"), Ok(5));
        assert_eq!(share.read(at, 1, 100).unwrap(), b"ello");
        let attr = share.dir.getattr(&share.cx, entry.ino, None).unwrap();
        assert_eq!((attr.size, attr.mode & 0o7777, attr.nlink), (5, 0o644, 1));
        assert_eq!(attr, share.dir.getattr(&share.cx, entry.ino, Some(handle)).unwrap());
        let host = fs::metadata(share.path("file")).unwrap();
        assert_eq!((host.ino(), host.mode(), host.uid()), (attr.ino, attr.mode, attr.uid));
        assert_eq!(share.walk("file").unwrap().ino, entry.ino);
        share.dir.release(&share.cx, entry.ino, handle);
        share.dir.unlink(&share.cx, Ino::ROOT, name("file")).unwrap();
        assert!(!share.path("file").exists());
        assert_eq!(share.walk("file").unwrap_err(), Errno::NOENT);
        share.dir.forget(entry.ino, 2);
        assert_eq!(share.dir.usage().inodes, 1);
        assert_eq!(share.dir.usage().handles, 0);
        assert_eq!(share.dir.usage().descriptors, 1);
    }
}

#[test]
fn every_type_of_inode_is_created_and_listed() {
    for options in both_modes() {
        let share = Share::new(options);
        let Share { dir, cx, .. } = &share;
        let made = dir.mkdir(cx, Ino::ROOT, name("d"), &CreateArgs { mode: 0o777, umask: 0o027, rdev: 0 }).unwrap();
        assert_eq!((made.attr.kind(), made.attr.mode & 0o7777), (FileType::Directory, 0o750));
        let link = dir.symlink(cx, made.ino, name("s"), b"../d/target").unwrap();
        assert_eq!(link.attr.kind(), FileType::Symlink);
        assert_eq!(dir.readlink(cx, link.ino).unwrap(), b"../d/target");
        assert_eq!(dir.readlink(cx, made.ino).unwrap_err(), Errno::INVAL);
        assert_eq!(fs::read_link(share.path("d/s")).unwrap().as_os_str().as_bytes(), b"../d/target");
        let fifo = dir.mknod(cx, made.ino, name("p"), &new(0o010_600)).unwrap();
        assert_eq!(fifo.attr.kind(), FileType::Fifo);
        assert!(fs::metadata(share.path("d/p")).unwrap().file_type().is_fifo());
        let socket = dir.mknod(cx, made.ino, name("k"), &new(0o140_600)).unwrap();
        assert_eq!(socket.attr.kind(), FileType::Socket);
        let plain = dir.mknod(cx, made.ino, name("f"), &new(0o100_600)).unwrap();
        assert_eq!(plain.attr.kind(), FileType::RegularFile);
        assert_eq!(dir.mknod(cx, made.ino, name("x"), &new(0o040_700)).unwrap_err(), Errno::INVAL);
        if is_root() {
            // Major 8, minor 0x12345.
            let rdev = 0x45 | (8 << 8) | (0x123 << 20);
            let node = dir.mknod(cx, made.ino, name("b"), &CreateArgs { mode: 0o060_600, umask: 0, rdev }).unwrap();
            assert_eq!((node.attr.kind(), node.attr.rdev), (FileType::BlockDevice, rdev));
            let host = fs::metadata(share.path("d/b")).unwrap().rdev();
            assert_eq!((rustix::fs::major(host), rustix::fs::minor(host)), (8, 0x12345));
        }
        // Created and listed, never opened.
        for (file, error) in [("p", Errno::NXIO), ("k", Errno::NXIO), ("s", Errno::LOOP), ("", Errno::ISDIR)] {
            assert_eq!(share.open(&format!("d/{file}"), OFlags::RDONLY).unwrap_err(), error, "{file}");
            assert_eq!(share.open(&format!("d/{file}"), OFlags::RDWR).unwrap_err(), error, "{file}");
        }
        if is_root() {
            assert_eq!(share.open("d/b", OFlags::RDONLY).unwrap_err(), Errno::ACCESS);
        }
        for file in ["p", "k", "s"] {
            assert_eq!(dir.create(cx, made.ino, name(file), &new(0o644), OFlags::RDWR).unwrap_err(), Errno::EXIST);
            let size = SetAttr { size: Some(0), ..SetAttr::default() };
            assert_eq!(dir.setattr(cx, share.ino(&format!("d/{file}")), None, &size).unwrap_err(), Errno::INVAL);
        }
        assert_eq!(dir.opendir(cx, plain.ino, OFlags::RDONLY).unwrap_err(), Errno::NOTDIR);
        assert_eq!(dir.lookup(cx, plain.ino, name("x")).unwrap_err(), Errno::NOTDIR);
    }
}

#[test]
fn create_never_opens_an_existing_file() {
    for options in both_modes() {
        let share = Share::new(options);
        fs::write(share.path("old"), "content").unwrap();
        fs::create_dir(share.path("dir")).unwrap();
        symlink("nowhere", share.path("link")).unwrap();
        for file in ["old", "dir", "link"] {
            for flags in [OFlags::EXCL, OFlags::TRUNC, OFlags::empty()] {
                assert_eq!(share.create(Ino::ROOT, file, OFlags::RDWR | flags).unwrap_err(), Errno::EXIST, "{file}");
            }
        }
        assert_eq!(fs::read(share.path("old")).unwrap(), b"content");
        assert!(!share.path("nowhere").exists());
        assert_eq!(share.create(Ino::ROOT, "new", OFlags::ACCMODE).unwrap_err(), Errno::INVAL);
        assert_eq!((share.dir.usage().inodes, share.dir.usage().handles), (1, 0));
    }
}

#[test]
fn links_and_renames() {
    for options in both_modes() {
        let share = Share::new(options);
        let Share { dir, cx, .. } = &share;
        fs::write(share.path("a"), "a").unwrap();
        fs::create_dir_all(share.path("d/e")).unwrap();
        let (a, d) = (share.ino("a"), share.ino("d"));
        let linked = dir.link(cx, a, d, name("b")).unwrap();
        assert_eq!((linked.ino, linked.attr.nlink), (a, 2));
        assert_eq!(dir.link(cx, a, d, name("b")).unwrap_err(), Errno::EXIST);
        assert_eq!(dir.link(cx, d, Ino::ROOT, name("x")).unwrap_err(), Errno::PERM);
        symlink("nowhere", share.path("sym")).unwrap();
        let sym = share.ino("sym");
        assert_eq!(dir.link(cx, sym, d, name("sym2")).unwrap().ino, sym);
        assert!(fs::symlink_metadata(share.path("d/sym2")).unwrap().is_symlink());
        // Rename: plain, over another, refused, exchanged.
        let plain = RenameFlags::empty();
        dir.rename(cx, (d, name("b")), (Ino::ROOT, name("c")), plain).unwrap();
        assert_eq!(share.ino("c"), a);
        fs::write(share.path("victim"), "v").unwrap();
        let (victim, handle) = share.open("victim", OFlags::RDONLY).unwrap();
        let no_replace = dir.rename(cx, (Ino::ROOT, name("c")), (Ino::ROOT, name("victim")), RenameFlags::NOREPLACE);
        assert_eq!(no_replace.unwrap_err(), Errno::EXIST);
        dir.rename(cx, (Ino::ROOT, name("c")), (Ino::ROOT, name("victim")), RenameFlags::EXCHANGE).unwrap();
        assert_eq!((share.ino("c"), share.ino("victim")), (victim, a));
        dir.rename(cx, (Ino::ROOT, name("victim")), (Ino::ROOT, name("c")), plain).unwrap();
        assert_eq!(dir.getattr(cx, victim, None).unwrap().nlink, 0);
        assert_eq!(share.read((victim, handle), 0, 9).unwrap(), b"v");
        if is_root() {
            dir.rename(cx, (Ino::ROOT, name("c")), (Ino::ROOT, name("w")), RenameFlags::WHITEOUT).unwrap();
            let white = share.walk("c").unwrap();
            assert_eq!((white.attr.kind(), white.attr.rdev), (FileType::CharacterDevice, 0));
        }
        assert_eq!(dir.rmdir(cx, Ino::ROOT, name("d")).unwrap_err(), Errno::NOTEMPTY);
        assert_eq!(dir.unlink(cx, Ino::ROOT, name("d")).unwrap_err(), Errno::ISDIR);
        let e = share.ino("d/e");
        dir.rmdir(cx, d, name("e")).unwrap();
        assert_eq!(dir.getattr(cx, e, None).unwrap().nlink, 0);
        assert_eq!(dir.lookup(cx, e, name("x")).unwrap_err(), Errno::NOENT);
    }
}

#[test]
fn unlinked_inodes_stay_usable_by_number_and_by_handle() {
    for options in both_modes() {
        // With a minimal budget, so that descriptors are evicted as early as possible.
        let share = Share::new(Options { descriptors_max: Some(1), ..options });
        let Share { dir, cx, .. } = &share;
        fs::write(share.path("f"), "data").unwrap();
        fs::create_dir(share.path("d")).unwrap();
        let (f, d) = (share.ino("f"), share.ino("d"));
        dir.unlink(cx, Ino::ROOT, name("f")).unwrap();
        dir.rmdir(cx, Ino::ROOT, name("d")).unwrap();
        for index in 0..300 {
            fs::write(share.path(format!("x{index}")), "").unwrap();
            let ino = share.ino(&format!("x{index}"));
            dir.getattr(cx, ino, None).unwrap();
        }
        assert_eq!(dir.getattr(cx, f, None).unwrap().nlink, 0);
        assert_eq!(dir.getattr(cx, d, None).unwrap().kind(), FileType::Directory);
        let handle = dir.open(cx, f, OFlags::RDWR).unwrap();
        assert_eq!(share.read((f, handle), 0, 9).unwrap(), b"data");
        assert_eq!(share.write((f, handle), 4, b"!"), Ok(1));
        dir.release(cx, f, handle);
        let mode = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        assert_eq!(dir.setattr(cx, f, None, &mode).unwrap().size, 5);
        assert!(dir.usage().descriptors < 50, "{:?}", dir.usage());
        // A file without a name, which gets one.
        let (tmp, handle) = dir.tmpfile(cx, Ino::ROOT, &new(0o600), OFlags::RDWR).unwrap();
        assert_eq!(share.write((tmp.ino, handle), 0, b"tmp"), Ok(3));
        dir.release(cx, tmp.ino, handle);
        assert_eq!(dir.getattr(cx, tmp.ino, None).unwrap().nlink, 0);
        assert_eq!(dir.link(cx, tmp.ino, Ino::ROOT, name("named")).unwrap().ino, tmp.ino);
        assert_eq!(fs::read(share.path("named")).unwrap(), b"tmp");
        let (tmp, _) = dir.tmpfile(cx, Ino::ROOT, &new(0o600), OFlags::RDWR | OFlags::EXCL).unwrap();
        assert_eq!(dir.link(cx, tmp.ino, Ino::ROOT, name("n")).unwrap_err(), Errno::NOENT);
        assert_eq!(dir.tmpfile(cx, Ino::ROOT, &new(0o600), OFlags::RDONLY).unwrap_err(), Errno::INVAL);
        // Unlinked by the host: an error, or still there because its descriptor was held.
        let gone = share.ino("x0");
        fs::remove_file(share.path("x0")).unwrap();
        assert!(matches!(dir.getattr(cx, gone, None), Err(Errno::STALE) | Ok(Attr { nlink: 0, .. })));
    }
}

#[test]
fn a_reused_host_inode_number_is_another_inode() {
    for options in both_modes() {
        let share = Share::new(options);
        for _ in 0..100 {
            fs::write(share.path("f"), "1").unwrap();
            let first = share.walk("f").unwrap();
            fs::remove_file(share.path("f")).unwrap();
            fs::write(share.path("f"), "22").unwrap();
            let second = share.walk("f").unwrap();
            assert_eq!(second.attr.size, 2);
            assert_ne!(first.ino, second.ino);
            assert!(share.dir.getattr(&share.cx, first.ino, None).map_or(true, |attr| attr.nlink == 0));
            fs::remove_file(share.path("f")).unwrap();
            share.dir.forget(first.ino, 1);
            share.dir.forget(second.ino, 1);
        }
        assert_eq!(share.dir.usage().inodes, 1);
    }
}

#[test]
fn attributes_are_set() {
    for options in both_modes() {
        let share = Share::new(options);
        let Share { dir, cx, .. } = &share;
        fs::write(share.path("f"), "0123456789").unwrap();
        let ino = share.ino("f");
        let time = |sec, nsec| SetTime::At(Timespec { sec, nsec });
        let set = SetAttr {
            mode: Some(0o640),
            size: Some(4),
            atime: Some(time(-5, 7)),
            mtime: Some(time(1_000_000_000, 999_999_999)),
            ..SetAttr::default()
        };
        let attr = dir.setattr(cx, ino, None, &set).unwrap();
        assert_eq!((attr.mode & 0o7777, attr.size), (0o640, 4));
        assert_eq!(attr.atime, Timespec { sec: -5, nsec: 7 });
        assert_eq!(attr.mtime, Timespec { sec: 1_000_000_000, nsec: 999_999_999 });
        let now = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
        let after = dir.setattr(cx, ino, None, &now).unwrap();
        assert!(after.mtime.sec > 1_600_000_000);
        assert_eq!(after.atime, attr.atime);
        let bad = SetAttr { mtime: Some(time(0, 0x3fff_ffff)), ..SetAttr::default() };
        assert_eq!(dir.setattr(cx, ino, None, &bad).unwrap_err(), Errno::INVAL);
        for size in [u64::MAX, 1 << 63] {
            let bad = SetAttr { size: Some(size), ..SetAttr::default() };
            assert_eq!(dir.setattr(cx, ino, None, &bad).unwrap_err(), Errno::INVAL);
        }
        // Through a handle that cannot write, a size is still set.
        let handle = dir.open(cx, ino, OFlags::RDONLY).unwrap();
        let size = SetAttr { size: Some(2), ..SetAttr::default() };
        assert_eq!(dir.setattr(cx, ino, Some(handle), &size).unwrap().size, 2);
        assert_eq!(dir.setattr(cx, Ino::ROOT, None, &size).unwrap_err(), Errno::ISDIR);
        // A symbolic link has an owner and times of its own, but no mode.
        symlink("f", share.path("s")).unwrap();
        let link = share.ino("s");
        let mode = SetAttr { mode: Some(0), ..SetAttr::default() };
        assert_eq!(dir.setattr(cx, link, None, &mode).unwrap_err(), Errno::OPNOTSUPP);
        let set = SetAttr { mtime: Some(time(5, 0)), ..SetAttr::default() };
        assert_eq!(dir.setattr(cx, link, None, &set).unwrap().mtime.sec, 5);
        if is_root() {
            let owner = SetAttr { uid: Some(1), gid: Some(2), ..SetAttr::default() };
            assert_eq!(dir.setattr(cx, link, None, &owner).unwrap().uid, 1);
            assert_eq!(fs::metadata(share.path("f")).unwrap().uid(), 0);
            let attr = dir.setattr(cx, ino, None, &SetAttr { gid: Some(7), ..SetAttr::default() }).unwrap();
            assert_eq!((attr.uid, attr.gid), (0, 7));
        }
    }
}

#[test]
fn listings_show_all_names_with_resumable_offsets() {
    for options in both_modes() {
        let share = Share::new(options);
        let mut names = BTreeSet::from([".".to_owned(), "..".to_owned()]);
        for index in 0..1500 {
            let name = format!("file-with-a-name-of-some-length-{index}");
            fs::write(share.path(&name), "").unwrap();
            names.insert(name);
        }
        for (plus, per_call) in [(false, 7), (false, 100_000), (true, 7), (true, 100_000)] {
            let lines = share.list(Ino::ROOT, plus, per_call);
            assert_eq!(lines.len(), names.len());
            assert_eq!(lines.iter().map(|line| line.name.clone()).collect::<BTreeSet<_>>(), names);
            for line in &lines {
                let dot = line.name.starts_with('.');
                assert_eq!(line.entry.is_some(), plus && !dot);
                if let Some(entry) = line.entry {
                    assert_eq!((entry.attr.ino, entry.attr.kind()), (line.ino, line.kind));
                    assert_eq!(line.kind, FileType::RegularFile);
                    share.dir.forget(entry.ino, 1);
                }
            }
            // From any offset on.
            let handle = share.dir.opendir(&share.cx, Ino::ROOT, OFlags::RDONLY).unwrap();
            for at in [1000, 3, 1499, 0] {
                let mut out = Listing { lines: Vec::new(), max: 5 };
                let offset = lines[at].next;
                let range = DirRange { ino: Ino::ROOT, handle, offset, plus: false };
                share.dir.readdir(&share.cx, &range, &mut out).unwrap();
                let expected: Vec<_> = lines[at + 1..].iter().take(5).map(|line| &line.name).collect();
                assert_eq!(out.lines.iter().map(|line| &line.name).collect::<Vec<_>>(), expected);
            }
            share.dir.releasedir(&share.cx, Ino::ROOT, handle);
        }
        assert_eq!(share.dir.usage().inodes, 1);
        assert!(
            share
                .list(Ino::ROOT, false, 9)
                .iter()
                .any(|line| line.name == ".." && line.ino == fs::metadata(share.tmp.path()).unwrap().ino())
        );
    }
}

#[test]
fn names_that_stay_are_listed_once_while_others_come_and_go() {
    let share = Share::new(Options::default());
    for index in 0..800 {
        fs::write(share.path(format!("stay{index}")), "").unwrap();
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&done);
        scope.spawn(|| {
            let mut index = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let path = share.path(format!("go{index}"));
                fs::write(&path, "").unwrap();
                if index >= 50 {
                    fs::remove_file(share.path(format!("go{}", index - 50))).unwrap();
                }
                index += 1;
            }
        });
        for round in 0..30 {
            let lines = share.list(Ino::ROOT, round % 2 == 0, 13);
            let stay: Vec<_> = lines.iter().filter(|line| line.name.starts_with("stay")).collect();
            let set: BTreeSet<_> = stay.iter().map(|line| &line.name).collect();
            assert_eq!((stay.len(), set.len()), (800, 800));
        }
    });
}

/// ext4 refuses to seek in such a directory as if the offset were wrong.
#[test]
fn a_directory_that_was_removed_has_no_more_names() {
    let share = Share::new(Options::default());
    fs::create_dir(share.path("dir")).unwrap();
    fs::write(share.path("dir/file"), "").unwrap();
    let ino = share.ino("dir");
    let handle = share.dir.opendir(&share.cx, ino, OFlags::RDONLY).unwrap();
    let list = |offset| {
        let mut out = Listing { lines: Vec::new(), max: 100 };
        let range = DirRange { ino, handle, offset, plus: false };
        share.dir.readdir(&share.cx, &range, &mut out).map(|()| out.lines)
    };
    let lines = list(0).unwrap();
    assert_eq!(lines.len(), 3);
    fs::remove_dir_all(share.path("dir")).unwrap();
    for line in &lines {
        assert_eq!(list(line.next).map(|lines| lines.len()).unwrap_err(), Errno::NOENT, "{}", line.name);
    }
    share.dir.releasedir(&share.cx, ino, handle);
    share.dir.forget(ino, 1);
}

#[test]
fn parents_are_found_up_to_the_root_only() {
    for options in both_modes() {
        let share = Share::new(options);
        let Share { dir, cx, .. } = &share;
        fs::create_dir_all(share.path("a/b/c")).unwrap();
        let (a, b, c) = (share.ino("a"), share.ino("a/b"), share.ino("a/b/c"));
        assert_eq!(dir.lookup_parent(cx, c).unwrap().ino, b);
        assert_eq!(dir.lookup_parent(cx, b).unwrap().ino, a);
        assert_eq!(dir.lookup_parent(cx, a).unwrap().ino, Ino::ROOT);
        assert_eq!(dir.lookup_parent(cx, Ino::ROOT).unwrap().ino, Ino::ROOT);
        let outside = tempdir();
        fs::rename(share.path("a/b"), outside.path().join("b")).unwrap();
        for ino in [b, c] {
            assert_eq!(dir.lookup_parent(cx, ino).map(|entry| entry.ino), Err(Errno::STALE));
        }
    }
}

#[test]
fn ranges_are_allocated_sought_and_copied() {
    let share = Share::new(Options::default());
    let Share { dir, cx, .. } = &share;
    let (entry, handle) = share.create(Ino::ROOT, "f", OFlags::RDWR).unwrap();
    let at = (entry.ino, handle);
    dir.fallocate(cx, at.0, at.1, 0, 1 << 20, FallocateFlags::empty()).unwrap();
    assert_eq!(dir.getattr(cx, at.0, None).unwrap().size, 1 << 20);
    share.write(at, 0, &vec![1; 1 << 20]).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    dir.fallocate(cx, at.0, at.1, 1 << 16, 1 << 16, punch).unwrap();
    assert_eq!(dir.lseek(cx, at.0, at.1, 0, Seek::Hole), Ok(1 << 16));
    assert_eq!(dir.lseek(cx, at.0, at.1, 1 << 16, Seek::Data), Ok(1 << 17));
    assert_eq!(dir.lseek(cx, at.0, at.1, u64::MAX, Seek::Data), Err(Errno::NXIO));
    for flags in [FallocateFlags::ZERO_RANGE, FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE] {
        let result = dir.fallocate(cx, at.0, at.1, 1 << 17, 1 << 16, flags);
        assert!(matches!(result, Ok(()) | Err(Errno::OPNOTSUPP)), "{result:?}");
    }
    assert_eq!(dir.fallocate(cx, at.0, at.1, u64::MAX, 1, FallocateFlags::empty()), Err(Errno::INVAL));
    let (to, to_handle) = share.create(Ino::ROOT, "g", OFlags::RDWR).unwrap();
    let copy = CopyRange { from: (at.0, at.1, 10), to: (to.ino, to_handle, 5), len: 1000 };
    assert_eq!(dir.copy_file_range(cx, &copy), Ok(1000));
    assert_eq!(share.read((to.ino, to_handle), 0, 8).unwrap(), [0, 0, 0, 0, 0, 1, 1, 1]);
    let overlap = CopyRange { from: (at.0, at.1, 0), to: (at.0, at.1, 5), len: 10 };
    assert_eq!(dir.copy_file_range(cx, &overlap), Err(Errno::INVAL));
    dir.syncfs(cx, Ino::ROOT).unwrap();
    assert!(dir.fsync(cx, at.0, at.1, true).unwrap().is_some());
    let statfs = dir.statfs(cx, at.0).unwrap();
    assert!(statfs.blocks > 0 && statfs.namelen == 255 && statfs.frsize > 0);
}

#[test]
fn descriptors_follow_the_flags_of_the_clients_file() {
    let share = Share::new(Options::default());
    let (entry, handle) = share.create(Ino::ROOT, "f", OFlags::RDWR | OFlags::APPEND).unwrap();
    let at = (entry.ino, handle);
    let append = OFlags::RDWR | OFlags::APPEND;
    share.write_flags(at, 0, b"abc", append).unwrap();
    share.write_flags(at, 0, b"def", append).unwrap();
    share.write_flags(at, 0, b"X", OFlags::RDWR).unwrap();
    share.write_flags(at, 0, b"g", append).unwrap();
    assert_eq!(fs::read(share.path("f")).unwrap(), b"Xbcdefg");
    // Flags that the host would refuse are not passed on.
    let (ino, handle) = share.open("f", OFlags::WRONLY | OFlags::DIRECT | OFlags::SYNC | OFlags::NOATIME).unwrap();
    assert_eq!(share.write((ino, handle), 3, b"-"), Ok(1));
    let share = Share::new(Options { writeback: true, ..Options::default() });
    let (entry, handle) = share.create(Ino::ROOT, "f", OFlags::WRONLY | OFlags::APPEND).unwrap();
    let at = (entry.ino, handle);
    share.write_flags(at, 0, b"abc", append).unwrap();
    share.write_flags(at, 0, b"X", append).unwrap();
    assert_eq!(share.read(at, 0, 9).unwrap(), b"Xbc");
}

/// A transfer runs later than the request: others with other flags do not change where its bytes go.
#[test]
fn writes_of_a_clients_cache_are_not_appended_with_those_of_the_program() {
    let share = Share::new(Options::default());
    let append = OFlags::RDWR | OFlags::APPEND;
    let (entry, handle) = share.create(Ino::ROOT, "f", append).unwrap();
    let at = (entry.ino, handle);
    share.write_flags(at, 0, b"header", append).unwrap();
    let extent = |offset, flags| {
        let at = range(at.0, at.1, offset, 4, flags);
        let Data::Extent(extent) = share.dir.write(&share.cx, &at, &mut &b"...."[..]).unwrap() else {
            panic!("no extent")
        };
        extent
    };
    let [cached, appended, again] =
        [(0, OFlags::empty()), (6, append), (2, OFlags::RDWR)].map(|(at, flags)| extent(at, flags));
    assert_eq!(share.read(at, 0, 9).unwrap(), b"header");
    assert_eq!((cached.file.appends(), appended.file.appends(), again.file.appends()), (false, true, false));
    for (extent, bytes) in [(again, b"AD"), (appended, b"++"), (cached, b"HE")] {
        assert_eq!(rustix::io::pwrite(extent.file.as_fd(), bytes, extent.offset), Ok(2));
    }
    assert_eq!(fs::read(share.path("f")).unwrap(), b"HEADer++");
    // The host refuses to copy to files with O_APPEND, as the client's kernel does, which knows the file's flags now.
    let copy = CopyRange { from: (at.0, at.1, 0), to: (at.0, at.1, 6), len: 2 };
    assert_eq!(share.dir.copy_file_range(&share.cx, &copy), Ok(2));
    assert_eq!(fs::read(share.path("f")).unwrap(), b"HEADerHE");
}

#[test]
fn a_read_only_share_changes_nothing() {
    let share = Share::new(Options { read_only: true, ..Options::default() });
    let Share { dir, cx, .. } = &share;
    fs::write(share.path("f"), "x").unwrap();
    assert!(dir.features().read_only);
    let (ino, handle) = share.open("f", OFlags::RDONLY).unwrap();
    assert_eq!(share.read((ino, handle), 0, 9).unwrap(), b"x");
    let rofs = Some(Errno::ROFS);
    assert_eq!(share.open("f", OFlags::WRONLY).err(), rofs);
    assert_eq!(share.open("f", OFlags::RDONLY | OFlags::TRUNC).err(), rofs);
    assert_eq!(share.create(Ino::ROOT, "g", OFlags::RDWR).err(), rofs);
    assert_eq!(dir.mkdir(cx, Ino::ROOT, name("d"), &new(0o755)).err(), rofs);
    assert_eq!(dir.mknod(cx, Ino::ROOT, name("d"), &new(0o100_644)).err(), rofs);
    assert_eq!(dir.symlink(cx, Ino::ROOT, name("d"), b"x").err(), rofs);
    assert_eq!(dir.link(cx, ino, Ino::ROOT, name("d")).err(), rofs);
    assert_eq!(dir.unlink(cx, Ino::ROOT, name("f")).err(), rofs);
    assert_eq!(dir.rmdir(cx, Ino::ROOT, name("f")).err(), rofs);
    assert_eq!(dir.rename(cx, (Ino::ROOT, name("f")), (Ino::ROOT, name("g")), RenameFlags::empty()).err(), rofs);
    assert_eq!(dir.tmpfile(cx, Ino::ROOT, &new(0o600), OFlags::RDWR).err(), rofs);
    assert_eq!(dir.setattr(cx, ino, None, &SetAttr::default()).err(), rofs);
    assert_eq!(dir.setxattr(cx, ino, b"user.x", b"", XattrFlags::empty(), false).err(), rofs);
    assert_eq!(dir.removexattr(cx, ino, b"user.x").err(), rofs);
    assert_eq!(dir.fallocate(cx, ino, handle, 0, 1, FallocateFlags::empty()).err(), rofs);
    assert_eq!(dir.ioctl(cx, ino, handle, 0x4008_6602, &[0; 4], 0).err(), rofs);
    assert_eq!(
        dir.copy_file_range(cx, &CopyRange { from: (ino, handle, 0), to: (ino, handle, 0), len: 1 }).err(),
        rofs
    );
    assert_eq!(share.write((ino, handle), 0, b"y").err(), rofs);
    assert_eq!(fs::read_dir(share.tmp.path()).unwrap().count(), 1);
    assert_eq!(fs::read(share.path("f")).unwrap(), b"x");
}

#[test]
fn extended_attributes_of_every_kind_of_inode() {
    for options in both_modes() {
        let share = Share::new(options);
        let Share { dir, cx, .. } = &share;
        fs::write(share.path("f"), "x").unwrap();
        let ino = share.ino("f");
        let none = XattrFlags::empty();
        assert_eq!(dir.listxattr(cx, ino).unwrap(), b"");
        assert_eq!(dir.getxattr(cx, ino, b"user.a").unwrap_err(), Errno::NODATA);
        dir.setxattr(cx, ino, b"user.a", b"1", none, false).unwrap();
        assert_eq!(dir.setxattr(cx, ino, b"user.a", b"2", XattrFlags::CREATE, false), Err(Errno::EXIST));
        assert_eq!(dir.setxattr(cx, ino, b"user.b", b"2", XattrFlags::REPLACE, false), Err(Errno::NODATA));
        let long = vec![b'v'; 3000];
        dir.setxattr(cx, ino, b"user.long", &long, none, false).unwrap();
        assert_eq!(dir.getxattr(cx, ino, b"user.long").unwrap(), long);
        assert_eq!(dir.getxattr(cx, ino, b"user.a").unwrap(), b"1");
        let list = dir.listxattr(cx, ino).unwrap();
        let names: BTreeSet<_> = list.split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
        assert_eq!(names, BTreeSet::from([&b"user.a"[..], b"user.long"]));
        dir.removexattr(cx, ino, b"user.a").unwrap();
        assert_eq!(dir.getxattr(cx, ino, b"user.a").unwrap_err(), Errno::NODATA);
        assert_eq!(dir.getxattr(cx, ino, b"bad").unwrap_err(), Errno::OPNOTSUPP);
        assert_eq!(dir.getxattr(cx, ino, &[b'x'; 300]).unwrap_err(), Errno::RANGE);
        assert_eq!(dir.getxattr(cx, ino, b"user.\0").unwrap_err(), Errno::INVAL);
        assert_eq!(dir.setxattr(cx, ino, b"user.x", &vec![0; 1 << 17], none, false), Err(Errno::TOOBIG));
        // Not the target's: the link's own, where only trusted and security attributes are allowed.
        symlink("f", share.path("s")).unwrap();
        let link = share.ino("s");
        assert_eq!(dir.getxattr(cx, link, b"user.long").unwrap_err(), Errno::NODATA);
        assert_eq!(dir.setxattr(cx, link, b"user.x", b"", none, false), Err(Errno::PERM));
        if is_root() {
            dir.setxattr(cx, link, b"trusted.t", b"t", none, false).unwrap();
            assert_eq!(dir.listxattr(cx, link).unwrap(), b"trusted.t\0");
            assert_eq!(dir.getxattr(cx, ino, b"trusted.t").unwrap_err(), Errno::NODATA);
            let fifo = dir.mknod(cx, Ino::ROOT, name("p"), &new(0o010_600)).unwrap().ino;
            dir.setxattr(cx, fifo, b"security.x", b"y", none, false).unwrap();
            assert_eq!(dir.getxattr(cx, fifo, b"security.x").unwrap(), b"y");
        }
    }
}

#[test]
fn only_the_file_flag_ioctls_reach_the_host() {
    let share = Share::new(Options::default());
    let Share { dir, cx, .. } = &share;
    let (entry, handle) = share.create(Ino::ROOT, "f", OFlags::RDWR).unwrap();
    let ioctl = |command, input: &[u8], out| dir.ioctl(cx, entry.ino, handle, command, input, out);
    let flags = match ioctl(0x8008_6601, &[], 4) {
        Ok(flags) => flags,
        Err(error) => return ferry_skip::skip!("this file system has no flags: {error}"),
    };
    assert_eq!(flags.len(), 4);
    assert_eq!(ioctl(0x8008_6601, &[], 8).unwrap().len(), 8);
    let no_dump = (u32::from_ne_bytes(flags.try_into().unwrap()) | 0x40).to_ne_bytes();
    ioctl(0x4008_6602, &no_dump, 0).unwrap();
    assert_eq!(ioctl(0x8008_6601, &[], 4).unwrap(), no_dump);
    let xflags = ioctl(0x801c_581f, &[], 28).unwrap();
    assert_eq!(xflags.len(), 28);
    ioctl(0x401c_5820, &xflags, 0).unwrap();
    for (command, input, out) in [
        (0x8008_6601u32, 0, 3),
        (0x8008_6601, 0, 16),
        (0x4008_6602, 0, 0),
        (0x4008_6602, 5, 0),
        (0x801c_581f, 0, 27),
        (0x401c_5820, 29, 0),
    ] {
        assert_eq!(ioctl(command, &vec![0; input], out).unwrap_err(), Errno::INVAL, "{command:x}");
    }
    // FS_IOC32_GETFLAGS, FS_IOC32_SETFLAGS, FIONREAD, FS_IOC_FIEMAP, FICLONE, BLKRRPART, FS_IOC_ENABLE_VERITY, 0.
    for command in [0x8004_6601, 0x4004_6602, 0x541b, 0xc020_660b, 0x4004_9409, 0x125f, 0x4080_6685, 0] {
        assert_eq!(ioctl(command, &[0; 128], 128).unwrap_err(), Errno::NOTTY);
    }
}

#[test]
fn unknown_inodes_and_handles_are_refused() {
    let share = Share::new(Options::default());
    let Share { dir, cx, .. } = &share;
    let (entry, handle) = share.create(Ino::ROOT, "f", OFlags::RDWR).unwrap();
    for ino in [Ino(0), Ino(99), Ino(u64::MAX)] {
        assert_eq!(dir.getattr(cx, ino, None).unwrap_err(), Errno::STALE);
        assert_eq!(dir.lookup(cx, ino, name("x")).unwrap_err(), Errno::STALE);
        assert_eq!(dir.open(cx, ino, OFlags::RDONLY).unwrap_err(), Errno::STALE);
        dir.forget(ino, 5);
    }
    for bad in [Handle(handle.0 ^ 1), Handle(handle.0 + (1 << 32)), Handle(u64::MAX)] {
        assert_eq!(share.read((entry.ino, bad), 0, 1).unwrap_err(), Errno::BADF);
        dir.release(cx, entry.ino, bad);
    }
    // Another inode's handle, another session's handle.
    assert_eq!(share.read((Ino::ROOT, handle), 0, 1).unwrap_err(), Errno::BADF);
    let stranger = Caller { session: SessionId::unique(), ..*cx };
    assert_eq!(dir.getattr(&stranger, entry.ino, Some(handle)).unwrap_err(), Errno::BADF);
    dir.release(&stranger, entry.ino, handle);
    assert!(share.read((entry.ino, handle), 0, 1).is_ok());
    dir.release(cx, entry.ino, handle);
    assert_eq!(share.read((entry.ino, handle), 0, 1).unwrap_err(), Errno::BADF);
    // More references given back than there are; the root stays in any case.
    dir.forget(entry.ino, u64::MAX);
    dir.forget(Ino::ROOT, u64::MAX);
    assert_eq!(dir.getattr(cx, entry.ino, None).unwrap_err(), Errno::STALE);
    assert!(dir.getattr(cx, Ino::ROOT, None).is_ok());
    let handle = dir.opendir(cx, Ino::ROOT, OFlags::RDONLY).unwrap();
    assert_eq!(share.read((Ino::ROOT, handle), 0, 1).unwrap_err(), Errno::ISDIR);
}

/// The host replaces a file between a client's LOOKUP and its OPEN, and again when the client's kernel tries once more.
#[test]
fn a_late_watch_is_late_only_once() {
    let share = Share::new(Options::default());
    let Share { dir, cx, .. } = &share;
    let path = share.tmp.path().join("f");
    let replace = |content: &str| {
        std::fs::write(share.tmp.path().join("new"), content).unwrap();
        std::fs::rename(share.tmp.path().join("new"), &path).unwrap();
    };
    replace("one");
    let one = dir.lookup(cx, Ino::ROOT, name("f")).unwrap();
    replace("two");
    let late = dir.open(cx, one.ino, OFlags::RDONLY);
    assert!(late.is_ok() || dir.has_file_handles() && late == Err(Errno::STALE), "{late:?}");
    let two = dir.lookup(cx, Ino::ROOT, name("f")).unwrap();
    replace("three");
    let handle = dir.open(cx, two.ino, OFlags::RDONLY).unwrap();
    assert_eq!(share.read((two.ino, handle), 0, 10).unwrap(), b"two");
}

#[test]
fn changes_are_published() {
    let share = Share::new(Options::default());
    let Share { dir, cx, .. } = &share;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let _subscription = {
        let (seen, session) = (Arc::clone(&seen), cx.session);
        dir.changes().unwrap().subscribe(move |change, by| {
            assert_eq!(by, session, "the session that made the change");
            seen.lock().unwrap().push(change.clone());
        })
    };
    let entry_change = |file| Change::Entry { dir: Ino::ROOT, name: name(file).to_buf() };
    let (entry, handle) = share.create(Ino::ROOT, "f", OFlags::RDWR).unwrap();
    let ino = entry.ino;
    let take = || std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(take(), [entry_change("f")]);
    dir.setattr(cx, ino, None, &SetAttr { mode: Some(0o600), ..SetAttr::default() }).unwrap();
    assert_eq!(take(), [Change::Attr { ino }]);
    dir.setattr(cx, ino, None, &SetAttr { size: Some(3), ..SetAttr::default() }).unwrap();
    assert_eq!(take(), [Change::Data { ino, offset: 3, len: u64::MAX }]);
    if is_root() {
        // A link has no mode; its owner is another by then.
        let link = dir.symlink(cx, Ino::ROOT, name("link"), b"f").unwrap().ino;
        assert_eq!(take(), [entry_change("link")]);
        let half = SetAttr { uid: Some(1), mode: Some(0o600), ..SetAttr::default() };
        assert_eq!(dir.setattr(cx, link, None, &half), Err(Errno::OPNOTSUPP));
        assert_eq!(fs::symlink_metadata(share.path("link")).unwrap().uid(), 1);
        assert_eq!(take(), [Change::Attr { ino: link }]);
    }
    dir.link(cx, ino, Ino::ROOT, name("g")).unwrap();
    assert_eq!(take(), [entry_change("g"), Change::Attr { ino }]);
    dir.rename(cx, (Ino::ROOT, name("g")), (Ino::ROOT, name("h")), RenameFlags::empty()).unwrap();
    assert_eq!(take(), [entry_change("g"), entry_change("h")]);
    {
        let _other = dir.changes().unwrap().subscribe(|_, _| {});
        for (from, to) in [("h", "i"), ("i", "h")] {
            dir.rename(cx, (Ino::ROOT, name(from)), (Ino::ROOT, name(to)), RenameFlags::empty()).unwrap();
            assert_eq!(take(), [Change::Attr { ino }, entry_change(from), entry_change(to)], "its time of change");
        }
    }
    dir.unlink(cx, Ino::ROOT, name("h")).unwrap();
    assert_eq!(take(), [Change::Attr { ino }, Change::Removed { dir: Ino::ROOT, name: name("h").to_buf(), ino }]);
    fs::write(share.path("unknown"), "").unwrap();
    dir.unlink(cx, Ino::ROOT, name("unknown")).unwrap();
    assert_eq!(take(), [entry_change("unknown")]);
    dir.fallocate(cx, ino, handle, 0, 10, FallocateFlags::empty()).unwrap();
    assert_eq!(take(), [Change::Data { ino, offset: 0, len: 10 }]);
    let handle = dir.open(cx, ino, OFlags::RDWR | OFlags::TRUNC).unwrap();
    assert_eq!(take(), [Change::Data { ino, offset: 0, len: u64::MAX }]);
    dir.release(cx, ino, handle);
    assert!(dir.unlink(cx, Ino::ROOT, name("none")).is_err());
    assert_eq!(take(), []);
}

#[test]
fn an_unusable_path_is_one_sentence() {
    let tmp = tempdir();
    fs::write(tmp.path().join("file"), "").unwrap();
    let open = |path: &str| Dir::open(tmp.path().join(path), Options::default()).unwrap_err();
    let missing = open("none");
    assert!(matches!(missing, OpenError::Missing(_)));
    let path = tmp.path().join("none");
    assert_eq!(missing.to_string(), format!("cannot share {}: there is no such directory", path.display()));
    assert!(matches!(open("file"), OpenError::NotADirectory(_)));
    assert!(open("file").to_string().ends_with("it is not a directory"));
    fs::create_dir(tmp.path().join("closed")).unwrap();
    fs::set_permissions(tmp.path().join("closed"), fs::Permissions::from_mode(0o000)).unwrap();
    if !is_root() {
        assert!(matches!(open("closed"), OpenError::Permission(_)));
    }
}

/// All of the above, and the ACLs, as an ordinary user: without file handles or other ids.
#[test]
fn everything_works_without_privileges() {
    use std::os::unix::process::CommandExt;
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let tmp = tempdir();
    std::os::unix::fs::chown(tmp.path(), Some(65534), Some(65534)).unwrap();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["basic::", "acls::", "--skip", "everything_works_without_privileges", "--test-threads=1"])
        .env("FERRY_TEST_DIR", tmp.path())
        // Tests that need root are skipped there; they ran here.
        .env_remove("CI")
        .env_remove("FERRY_SKIPPED")
        .current_dir("/")
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains(" 0 failed"), "{text}");
}
