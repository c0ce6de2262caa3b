//! The rules of POSIX and Linux, each on its own, on both places for data.

use crate::common;

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use common::{Share, both, name, new, range};
use ferry_mem::{Error, Mem, Options};
use ferry_vfs::*;

/// Somebody who is not root, on no connection of his own.
fn user() -> Caller<'static> {
    Caller { uid: 1000, gid: 1000, pid: 1, ..Caller::default() }
}

fn set_mode(mode: u32) -> SetAttr {
    SetAttr { mode: Some(mode), ..SetAttr::default() }
}

#[test]
fn privileges_are_cleared_as_linux_does() {
    let chown = SetAttr { uid: Some(7), ..SetAttr::default() };
    let cleared = SetAttr { size: Some(3), clear_privileges: true, ..SetAttr::default() };
    let kept = SetAttr { size: Some(3), ..SetAttr::default() };
    let both_at_once = SetAttr { mode: Some(0o6755), uid: Some(7), ..SetAttr::default() };
    for share in both() {
        let (fs, cx) = (&share.fs, &share.cx);
        for (index, (set, mode, after, capable)) in [
            (chown, 0o6755, 0o755, false),
            (chown, 0o6745, 0o2745, false),
            (cleared, 0o6755, 0o755, false),
            (kept, 0o6755, 0o6755, false),
            (both_at_once, 0o755, 0o6755, false),
            (set_mode(0o4711), 0o755, 0o4711, true),
        ]
        .into_iter()
        .enumerate()
        {
            let ino = share.file(Ino::ROOT, &format!("f{index}"), b"bytes");
            fs.setxattr(cx, ino, b"security.capability", b"all", XattrFlags::empty(), false).unwrap();
            fs.setattr(cx, ino, None, &set_mode(mode)).unwrap();
            let attr = fs.setattr(cx, ino, None, &set).unwrap();
            assert_eq!(attr.mode & 0o7777, after, "{set:?} of {mode:o}");
            assert_eq!(fs.getxattr(cx, ino, b"security.capability").is_ok(), capable, "{set:?}");
        }
        let dir = share.mkdir(Ino::ROOT, "dir");
        fs.setattr(cx, dir, None, &set_mode(0o2777)).unwrap();
        assert_eq!(fs.setattr(cx, dir, None, &chown).unwrap().mode & 0o7777, 0o2777, "directories keep sgid");
    }
}

#[test]
fn writes_clear_privileges_on_request() {
    for share in both() {
        let open = share.create(Ino::ROOT, "f", 0o6755);
        share.fs.setxattr(&share.cx, open.0, b"security.capability", b"all", XattrFlags::empty(), false).unwrap();
        let at = range(open.0, open.1, 0, 1, OFlags::RDWR);
        assert_eq!(share.write_at(&at, b"x"), Ok(1));
        assert_eq!(share.attr(open.0).mode & 0o7777, 0o6755);
        assert_eq!(share.fs.getxattr(&share.cx, open.0, b"security.capability"), Err(Errno::NODATA));
        assert_eq!(share.write_at(&IoRange { clear_privileges: true, ..at }, b"x"), Ok(1));
        assert_eq!(share.attr(open.0).mode & 0o7777, 0o755);
    }
}

#[test]
fn new_files_inherit_from_their_directory() {
    let share = Share::new(Options::default());
    let fs = &share.fs;
    let dir = share.mkdir(Ino::ROOT, "dir");
    let set = SetAttr { mode: Some(0o2777), gid: Some(50), ..SetAttr::default() };
    fs.setattr(&share.cx, dir, None, &set).unwrap();
    let sub = fs.mkdir(&user(), dir, name("sub"), &new(0o755)).unwrap();
    assert_eq!((sub.attr.mode & 0o7777, sub.attr.uid, sub.attr.gid), (0o2755, 1000, 50));
    // Not a member of group 50: no program that runs as it.
    let (file, _) = fs.create(&user(), dir, name("f"), &new(0o2755), OFlags::RDWR).unwrap();
    assert_eq!((file.attr.mode & 0o7777, file.attr.gid), (0o755, 50));
    let member = Caller { groups: &[50], ..user() };
    let (file, _) = fs.create(&member, dir, name("g"), &new(0o2755), OFlags::RDWR).unwrap();
    assert_eq!(file.attr.mode & 0o7777, 0o2755);
    let masked = CreateArgs { mode: 0o666, umask: 0o027, rdev: 0 };
    assert_eq!(fs.mknod(&user(), Ino::ROOT, name("m"), &masked).unwrap().attr.mode, 0o100640);
}

/// An ACL's value from `(tag, permissions, id)`.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = vec![2, 0, 0, 0];
    for (tag, perm, id) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(perm.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

#[test]
fn acls_and_modes_agree() {
    const ACCESS: &[u8] = b"system.posix_acl_access";
    const DEFAULT: &[u8] = b"system.posix_acl_default";
    let share = Share::new(Options::default());
    let (fs, cx) = (&share.fs, &share.cx);
    let set = |ino, name: &[u8], value: &[u8]| fs.setxattr(cx, ino, name, value, XattrFlags::empty(), false);
    let named = acl(&[(1, 7, !0), (2, 6, 1000), (4, 5, !0), (16, 6, !0), (32, 0, !0)]);
    let plain = acl(&[(1, 6, !0), (4, 0, !0), (32, 4, !0)]);
    let file = share.file(Ino::ROOT, "f", b"");
    set(file, ACCESS, &named).unwrap();
    assert_eq!(share.attr(file).mode, 0o100760, "the mask is the group's bits");
    assert_eq!(fs.access(&user(), file, 6), Ok(()));
    fs.setattr(cx, file, None, &set_mode(0o700)).unwrap();
    let narrowed = acl(&[(1, 7, !0), (2, 6, 1000), (4, 5, !0), (16, 0, !0), (32, 0, !0)]);
    assert_eq!(fs.getxattr(cx, file, ACCESS).unwrap(), narrowed, "chmod changes the mask");
    assert_eq!(fs.access(&user(), file, 4), Err(Errno::ACCESS));
    set(file, ACCESS, &plain).unwrap();
    assert_eq!(share.attr(file).mode, 0o100604);
    assert_eq!(fs.getxattr(cx, file, ACCESS), Err(Errno::NODATA), "the mode says it all");
    assert_eq!(set(file, DEFAULT, &named), Err(Errno::ACCESS), "only directories have a default");
    assert_eq!(set(file, ACCESS, &named[..20]), Err(Errno::INVAL));
    let dir = share.mkdir(Ino::ROOT, "d");
    set(dir, DEFAULT, &named).unwrap();
    let made = fs.mknod(&user(), dir, name("f"), &CreateArgs { mode: 0o640, umask: 0o777, rdev: 0 }).unwrap();
    assert_eq!(made.attr.mode, 0o100640, "the umask does not matter, the mode does");
    let inherited = acl(&[(1, 6, !0), (2, 6, 1000), (4, 5, !0), (16, 4, !0), (32, 0, !0)]);
    assert_eq!(fs.getxattr(cx, made.ino, ACCESS).unwrap(), inherited);
    let sub = fs.mkdir(&user(), dir, name("sub"), &CreateArgs { mode: 0o777, umask: 0o22, rdev: 0 }).unwrap();
    assert_eq!(fs.getxattr(cx, sub.ino, DEFAULT).unwrap(), named);
    let link = fs.symlink(&user(), dir, name("link"), b"x").unwrap();
    assert_eq!(fs.listxattr(cx, link.ino).unwrap(), b"");
    fs.setattr(cx, file, None, &set_mode(0o2755)).unwrap();
    fs.setxattr(cx, file, ACCESS, &named, XattrFlags::empty(), true).unwrap();
    assert_eq!(share.attr(file).mode & 0o7777, 0o760);
    assert_eq!(fs.removexattr(cx, dir, ACCESS), Ok(()), "there is none, which is fine");
}

#[test]
fn times_never_run_backwards_from_one_file_to_the_next() {
    for share in both() {
        let (fs, cx) = (&share.fs, &share.cx);
        for round in 0..100 {
            let at = share.create(Ino::ROOT, &format!("file{round}"), 0o644);
            // What was looked at has a finer time at its next change.
            share.attr(at.0);
            share.write(at, 0, b"data").unwrap();
            let written = share.attr(at.0).mtime;
            let link = fs.symlink(cx, Ino::ROOT, name(&format!("link{round}")), b"target").unwrap();
            assert!(link.attr.mtime >= written, "{round}: {:?} after {written:?}", link.attr.mtime);
        }
    }
}

#[test]
fn extended_attributes_have_their_rules() {
    let share = Share::new(Options::default());
    let (fs, cx) = (&share.fs, &share.cx);
    let file = share.file(Ino::ROOT, "f", b"");
    let fifo = fs.mknod(cx, Ino::ROOT, name("p"), &new(0o10644)).unwrap().ino;
    let (large, huge) = (vec![1; 64 << 10], vec![1; (64 << 10) + 1]);
    let long = [&b"user."[..], &[b'x'; 251]].concat();
    for (ino, name, value, flags, outcome) in [
        (file, &b"user.a"[..], &b"1"[..], XattrFlags::REPLACE, Err(Errno::NODATA)),
        (file, b"user.a", b"1", XattrFlags::CREATE, Ok(())),
        (file, b"user.a", b"2", XattrFlags::CREATE, Err(Errno::EXIST)),
        (file, b"user.a", b"2", XattrFlags::REPLACE, Ok(())),
        (file, b"user.", b"2", XattrFlags::empty(), Err(Errno::OPNOTSUPP)),
        (file, b"other.a", b"2", XattrFlags::empty(), Err(Errno::OPNOTSUPP)),
        (file, b"system.a", b"2", XattrFlags::empty(), Err(Errno::OPNOTSUPP)),
        (file, &long, b"2", XattrFlags::empty(), Err(Errno::RANGE)),
        (file, b"trusted.large", &large, XattrFlags::empty(), Ok(())),
        (file, b"trusted.huge", &huge, XattrFlags::empty(), Err(Errno::TOOBIG)),
        (fifo, b"user.a", b"2", XattrFlags::empty(), Err(Errno::PERM)),
        (fifo, b"security.a", b"2", XattrFlags::empty(), Ok(())),
        (Ino(999), b"user.a", b"2", XattrFlags::empty(), Err(Errno::STALE)),
    ] {
        assert_eq!(fs.setxattr(cx, ino, name, value, flags, false), outcome, "{} {flags:?}", name.escape_ascii());
    }
    assert_eq!(fs.getxattr(cx, file, b"user.a").unwrap(), b"2");
    assert_eq!(fs.listxattr(cx, file).unwrap(), b"trusted.large\0user.a\0");
    assert_eq!(fs.listxattr(&user(), file).unwrap(), b"user.a\0", "users do not see what they may not read");
    assert_eq!(fs.removexattr(cx, file, b"user.b"), Err(Errno::NODATA));
    let full = (0..20)
        .map(|index| fs.setxattr(cx, file, format!("user.{index}").as_bytes(), &large, XattrFlags::empty(), false));
    assert_eq!(full.filter(|set| *set == Err(Errno::NOSPC)).count(), 6, "an inode's attributes have a limit");
}

#[test]
fn an_unlinked_file_lives_while_it_is_used() {
    // A process that another test starts has copies of the open files until it runs its program.
    if !ferry_alone::in_own_process() {
        return;
    }
    for share in both() {
        let (fs, cx) = (&share.fs, &share.cx);
        let open = share.create(Ino::ROOT, "f", 0o644);
        fs.lookup(cx, Ino::ROOT, name("f")).unwrap();
        share.write(open, 0, b"bytes").unwrap();
        fs.unlink(cx, Ino::ROOT, name("f")).unwrap();
        assert_eq!(share.attr(open.0).nlink, 0);
        assert_eq!(share.read(open, 0, 9).unwrap(), b"bytes");
        assert_eq!(fs.link(cx, open.0, Ino::ROOT, name("back")), Err(Errno::NOENT));
        share.release(open);
        // The reference is enough.
        let again = (open.0, fs.open(cx, open.0, OFlags::RDONLY).unwrap());
        assert_eq!(share.read(again, 0, 9).unwrap(), b"bytes");
        share.forget(open.0);
        assert_eq!(share.read(again, 0, 9).unwrap(), b"bytes");
        share.release(again);
        assert_eq!(fs.getattr(cx, open.0, None), Err(Errno::STALE));
        assert_eq!(fs.usage().inodes, 1);
        let free = fs.statfs(cx, Ino::ROOT).unwrap();
        assert_eq!(free.bfree, free.blocks, "its data are gone");
    }
}

#[test]
fn temporary_files_can_be_linked_unless_exclusive() {
    for share in both() {
        let (fs, cx) = (&share.fs, &share.cx);
        for (word, flags, outcome) in
            [("a", OFlags::RDWR, Ok(())), ("b", OFlags::RDWR | OFlags::EXCL, Err(Errno::NOENT))]
        {
            let (entry, handle) = fs.tmpfile(cx, Ino::ROOT, &new(0o600), flags).unwrap();
            assert_eq!(entry.attr.nlink, 0);
            share.write((entry.ino, handle), 0, b"bytes").unwrap();
            assert_eq!(fs.link(cx, entry.ino, Ino::ROOT, name(word)).map(|entry| share.forget(entry.ino)), outcome);
            share.release((entry.ino, handle));
            share.forget(entry.ino);
        }
        assert_eq!(share.names(Ino::ROOT), ["a"]);
        assert_eq!(share.walk("a").unwrap().attr.size, 5);
        assert_eq!(fs.usage().inodes, 2);
    }
}

#[test]
fn a_removed_directory_accepts_no_names() {
    let share = Share::new(Options::default());
    let (fs, cx) = (&share.fs, &share.cx);
    let dir = fs.mkdir(cx, Ino::ROOT, name("d"), &new(0o755)).unwrap().ino;
    let handle = fs.opendir(cx, dir, OFlags::RDONLY).unwrap();
    fs.rmdir(cx, Ino::ROOT, name("d")).unwrap();
    share.file(Ino::ROOT, "f", b"");
    let made = fs.create(cx, dir, name("x"), &new(0o644), OFlags::RDWR);
    assert_eq!(made.map(drop), Err(Errno::NOENT));
    assert_eq!(fs.mkdir(cx, dir, name("x"), &new(0o755)), Err(Errno::NOENT));
    let moved = fs.rename(cx, (Ino::ROOT, name("f")), (dir, name("x")), RenameFlags::empty());
    assert_eq!(moved, Err(Errno::NOENT));
    assert_eq!(share.list_some(dir, handle, (2, false), 9).len(), 0);
    fs.releasedir(cx, dir, handle);
    share.forget(dir);
    assert_eq!(fs.lookup(cx, dir, name("x")), Err(Errno::STALE));
}

#[test]
fn renames_have_their_rules() {
    let share = Share::new(Options::default());
    let (fs, cx) = (&share.fs, &share.cx);
    let outer = share.mkdir(Ino::ROOT, "outer");
    let inner = share.mkdir(outer, "inner");
    share.file(Ino::ROOT, "f", b"");
    let rename =
        |from: (Ino, &str), to: (Ino, &str), flags| fs.rename(cx, (from.0, name(from.1)), (to.0, name(to.1)), flags);
    let none = RenameFlags::empty();
    let exchange = RenameFlags::EXCHANGE;
    assert_eq!(rename((Ino::ROOT, "outer"), (inner, "x"), none), Err(Errno::INVAL));
    assert_eq!(rename((Ino::ROOT, "outer"), (outer, "x"), none), Err(Errno::INVAL));
    assert_eq!(rename((outer, "inner"), (Ino::ROOT, "outer"), none), Err(Errno::NOTEMPTY));
    assert_eq!(rename((outer, "inner"), (Ino::ROOT, "outer"), exchange), Err(Errno::INVAL));
    assert_eq!(rename((Ino::ROOT, "f"), (Ino::ROOT, "outer"), RenameFlags::NOREPLACE), Err(Errno::EXIST));
    assert_eq!(rename((Ino::ROOT, "f"), (Ino::ROOT, "x"), exchange), Err(Errno::NOENT));
    assert_eq!(rename((Ino::ROOT, "f"), (Ino::ROOT, "x"), exchange | RenameFlags::NOREPLACE), Err(Errno::INVAL));
    assert_eq!(rename((Ino::ROOT, "f"), (outer, "inner"), exchange), Ok(()));
    assert_eq!(fs.lookup_parent(cx, inner).unwrap().ino, Ino::ROOT);
    assert_eq!((share.attr(Ino::ROOT).nlink, share.attr(outer).nlink), (4, 2));
    assert_eq!(rename((outer, "inner"), (Ino::ROOT, "g"), RenameFlags::WHITEOUT), Ok(()));
    let whiteout = share.walk("outer/inner").unwrap().attr;
    assert_eq!((whiteout.kind(), whiteout.rdev), (FileType::CharacterDevice, 0));
}

#[test]
fn listings_are_stable_while_names_come_and_go() {
    let share = Share::new(Options::default());
    let (fs, cx) = (&share.fs, &share.cx);
    for index in 0..100 {
        share.file(Ino::ROOT, &format!("stays{index}"), b"");
        share.file(Ino::ROOT, &format!("goes{index}"), b"");
    }
    let handle = fs.opendir(cx, Ino::ROOT, OFlags::RDONLY).unwrap();
    let (mut offset, mut seen, mut round) = (0, Vec::new(), 0);
    loop {
        let lines = share.list_some(Ino::ROOT, handle, (offset, round % 2 == 0), 7);
        let Some(last) = lines.last() else { break };
        offset = last.next;
        seen.extend(lines.into_iter().map(|line| line.name).filter(|name| name.starts_with("stays")));
        if round < 100 {
            fs.unlink(cx, Ino::ROOT, name(&format!("goes{round}"))).unwrap();
            share.file(Ino::ROOT, &format!("comes{round}"), b"");
        }
        round += 1;
    }
    assert_eq!(seen, (0..100).map(|index| format!("stays{index}")).collect::<Vec<_>>());
}

#[test]
fn names_that_stay_are_listed_whatever_they_mean() {
    for share in both() {
        let (fs, cx) = (&share.fs, &share.cx);
        let expected: Vec<String> = (0..2000).map(|index| index.to_string()).collect();
        for file in &expected {
            share.file(Ino::ROOT, file, b"");
        }
        let handle = fs.opendir(cx, Ino::ROOT, OFlags::RDONLY).unwrap();
        let mut lines = share.list_some(Ino::ROOT, handle, (0, false), 1000);
        for (from, to, flags) in [("1500", "1600", RenameFlags::EXCHANGE), ("1700", "new", RenameFlags::WHITEOUT)] {
            fs.rename(cx, (Ino::ROOT, name(from)), (Ino::ROOT, name(to)), flags).unwrap();
        }
        let offset = lines.last().unwrap().next;
        lines.extend(share.list_some(Ino::ROOT, handle, (offset, false), 2000));
        fs.releasedir(cx, Ino::ROOT, handle);
        let names: Vec<String> =
            lines.into_iter().map(|line| line.name).filter(|name| !name.starts_with('.')).collect();
        assert!(names == expected, "{} names", names.len());
    }
}

/// As xfstests' generic/736: a name that is renamed gets behind all others.
#[test]
fn a_listing_ends_while_its_names_are_renamed() {
    for share in both() {
        let (fs, cx) = (&share.fs, &share.cx);
        for index in 0..20 {
            share.file(Ino::ROOT, &format!("0-{index}"), b"");
        }
        share.file(Ino::ROOT, "replaced", b"");
        let handle = fs.opendir(cx, Ino::ROOT, OFlags::RDONLY).unwrap();
        // The second one starts again, and finds the current names.
        for pass in 0..2 {
            let (mut offset, mut round, mut lines) = (0, 0, Vec::new());
            loop {
                let some = share.list_some(Ino::ROOT, handle, (offset, false), 3);
                let Some(last) = some.last() else { break };
                offset = last.next;
                lines.extend(some.into_iter().map(|line| line.name));
                for index in 0..20 {
                    let of = |round| format!("{round}-{index}");
                    let (old, new) = (of(pass * 100 + round), of(pass * 100 + round + 1));
                    fs.rename(cx, (Ino::ROOT, name(&old)), (Ino::ROOT, name(&new)), RenameFlags::empty()).unwrap();
                }
                share.file(Ino::ROOT, "new", b"");
                fs.rename(cx, (Ino::ROOT, name("new")), (Ino::ROOT, name("replaced")), RenameFlags::empty()).unwrap();
                round += 1;
                assert!(round < 100, "it does not end");
            }
            assert!(lines.iter().filter(|name| *name == "replaced").count() == 1, "{pass}: {lines:?}");
            let first_of_all =
                (0..20).map(|index| (format!("{}-{index}", pass * 100 + round), format!("{}-{index}", 100)));
            for (old, new) in first_of_all {
                fs.rename(cx, (Ino::ROOT, name(&old)), (Ino::ROOT, name(&new)), RenameFlags::empty()).unwrap();
            }
        }
        fs.releasedir(cx, Ino::ROOT, handle);
    }
}

#[test]
fn times_follow_changes_of_the_data() {
    for share in both() {
        let (fs, cx) = (&share.fs, &share.cx);
        let open = share.create(Ino::ROOT, "f", 0o644);
        let at = |sec| Some(SetTime::At(Timespec { sec, nsec: 5 }));
        let past = SetAttr { atime: at(10), mtime: at(20), ..SetAttr::default() };
        let told = |attr: Attr| (attr.atime.sec, attr.mtime.sec, attr.mtime.nsec);
        assert_eq!(told(fs.setattr(cx, open.0, None, &past).unwrap()), (10, 20, 5));
        share.write(open, 0, b"bytes").unwrap();
        let written = share.attr(open.0);
        assert!(written.mtime.sec > 20 && written.ctime >= written.mtime);
        assert_eq!((written.size, written.blocks), (5, 8));
        // Explicit times win over what is in the data file, open or not.
        assert_eq!(told(fs.setattr(cx, open.0, None, &past).unwrap()), (10, 20, 5));
        share.release(open);
        assert_eq!(told(share.attr(open.0)), (10, 20, 5));
        assert_eq!(told(fs.setattr(cx, open.0, None, &past).unwrap()), (10, 20, 5));
        let again = (open.0, fs.open(cx, open.0, OFlags::RDWR).unwrap());
        assert_eq!(told(share.attr(open.0)), (10, 20, 5));
        share.read(again, 0, 5).unwrap();
        assert!(share.attr(open.0).atime.sec > 20, "reads move the access time");
        share.write(again, 4, b"x").unwrap();
        share.release(again);
        assert!(share.attr(open.0).mtime.sec > 20);
    }
}

#[test]
fn writes_through_a_backing_descriptor_are_visible() {
    let share = Share::new(Options::default());
    let (fs, cx) = (&share.fs, &share.cx);
    if !fs.features().backing {
        ferry_skip::skip!("this user may not mount a tmpfs");
        return;
    }
    let open = share.create(Ino::ROOT, "f", 0o644);
    let backing = fs.backing(cx, open.0, open.1).unwrap();
    let other = (open.0, fs.open(cx, open.0, OFlags::RDONLY).unwrap());
    assert!(Arc::ptr_eq(&backing, &fs.backing(cx, other.0, other.1).unwrap()), "one file for all handles");
    rustix::io::pwrite(backing.as_fd(), b"through", 100).unwrap();
    assert_eq!(share.attr(open.0).size, 107);
    assert_eq!(share.read(other, 100, 9).unwrap(), b"through");
    share.release(open);
    share.release(other);
    // As a mapping does, after the last close.
    rustix::io::pwrite(backing.as_fd(), b"later", 1 << 20).unwrap();
    assert_eq!(share.walk("f").unwrap().attr.size, (1 << 20) + 5);
    let privileged = share.create(Ino::ROOT, "suid", 0o4755);
    assert!(fs.backing(cx, privileged.0, privileged.1).is_none(), "writes there could not clear suid");
}

#[test]
fn fallocate_supports_its_modes() {
    for share in both() {
        let (fs, cx) = (&share.fs, &share.cx);
        let open = share.create(Ino::ROOT, "f", 0o644);
        share.write(open, 0, &[7; 16384]).unwrap();
        let keep = FallocateFlags::KEEP_SIZE;
        let run = |offset, len, flags| fs.fallocate(cx, open.0, open.1, offset, len, flags);
        for (offset, len, flags, outcome, size, blocks) in [
            (4096, 4096, FallocateFlags::PUNCH_HOLE | keep, Ok(()), 16384, 24),
            (4096, 4096, FallocateFlags::empty(), Ok(()), 16384, 32),
            (0, 100, FallocateFlags::ZERO_RANGE, Ok(()), 16384, 32),
            (16000, 4480, FallocateFlags::ZERO_RANGE | keep, Ok(()), 16384, 40),
            (16000, 4480, FallocateFlags::ZERO_RANGE, Ok(()), 20480, 40),
            (20480, 8192, keep, Ok(()), 20480, 56),
            (0, 4096, FallocateFlags::COLLAPSE_RANGE, Err(Errno::OPNOTSUPP), 20480, 56),
            (0, 4096, FallocateFlags::INSERT_RANGE, Err(Errno::OPNOTSUPP), 20480, 56),
            (0, 0, FallocateFlags::empty(), Err(Errno::INVAL), 20480, 56),
            (1, i64::MAX as u64, FallocateFlags::empty(), Err(Errno::FBIG), 20480, 56),
        ] {
            assert_eq!(run(offset, len, flags), outcome, "{offset} {len} {flags:?}");
            let attr = share.attr(open.0);
            assert_eq!((attr.size, attr.blocks), (size, blocks), "{offset} {len} {flags:?}");
        }
        let content = share.read(open, 0, 20480).unwrap();
        assert!(content[..100] == [0; 100] && content[100..4096].iter().all(|byte| *byte == 7));
        run(0, 4096, FallocateFlags::PUNCH_HOLE | keep).unwrap();
        // Whether what is allocated and was never written is data is the kernel's to say.
        assert!([Ok(4096), Ok(8192)].contains(&fs.lseek(cx, open.0, open.1, 0, Seek::Data)));
        assert_eq!(fs.lseek(cx, open.0, open.1, 0, Seek::Hole), Ok(0));
        assert_eq!(fs.lseek(cx, open.0, open.1, 1 << 30, Seek::Data), Err(Errno::NXIO));
        let to = share.create(Ino::ROOT, "g", 0o644);
        let copy = CopyRange { from: (open.0, open.1, 8192), to: (to.0, to.1, 10), len: 1 << 40 };
        assert_eq!(fs.copy_file_range(cx, &copy), Ok(20480 - 8192));
        assert_eq!(share.read(to, 10, 3).unwrap(), [7; 3]);
        let empty = share.create(Ino::ROOT, "h", 0o644);
        assert_eq!(fs.copy_file_range(cx, &CopyRange { from: (empty.0, empty.1, 0), ..copy }), Ok(0));
    }
}

fn posix(kind: LockKind, owner: u64, start: u64, end: u64) -> Lock {
    let owner = LockOwner { session: SessionId::default(), id: owner };
    Lock { kind, owner, start, end, pid: 1, flock: false }
}

#[test]
fn locks_wait_are_granted_and_never_deadlock() {
    let share = Share::new(Options::default());
    let (fs, cx) = (&share.fs, &share.cx);
    let (a, b) = (share.create(Ino::ROOT, "a", 0o644), share.create(Ino::ROOT, "b", 0o644));
    let set = |at: (Ino, Handle), lock: Lock, wait| fs.set_lock(cx, at.0, at.1, &lock, wait);
    let (send, woken) = mpsc::channel();
    let waiter = |tag: u8| {
        let send = send.clone();
        Some(Waiter::new(move |outcome| send.send((tag, outcome)).unwrap()))
    };
    let write = |owner| posix(LockKind::Write, owner, 0, 9);
    assert_eq!(set(a, write(1), None), Ok(LockOutcome::Done));
    assert_eq!(set(b, write(2), None), Ok(LockOutcome::Done));
    assert_eq!(set(a, write(2), None), Err(Errno::AGAIN));
    assert_eq!(fs.get_lock(cx, a.0, a.1, &write(2)).unwrap().unwrap().owner.id, 1);
    assert_eq!(set(a, write(2), waiter(2)), Ok(LockOutcome::Waiting));
    assert_eq!(set(b, write(1), waiter(1)), Err(Errno::DEADLK));
    assert!(woken.try_recv().is_err());
    assert_eq!(set(a, posix(LockKind::Unlock, 1, 0, 9), None), Ok(LockOutcome::Done));
    assert_eq!(woken.recv_timeout(Duration::from_secs(5)), Ok((2, Ok(()))));
    // A close gives the owner's locks up; a client that gave up gets none.
    let gone = Arc::<Cancellation>::default();
    assert!(gone.cancel());
    assert_eq!(set(a, write(3), waiter(3).map(|waiter| waiter.until(gone))), Ok(LockOutcome::Waiting));
    assert_eq!(set(a, write(4), waiter(4)), Ok(LockOutcome::Waiting));
    fs.flush(cx, a.0, a.1, 2).unwrap();
    assert_eq!(woken.recv_timeout(Duration::from_secs(5)), Ok((4, Ok(()))));
    // The end of a handle ends who waits through it.
    let other = (a.0, fs.open(cx, a.0, OFlags::RDWR).unwrap());
    assert_eq!(set(other, write(5), waiter(5)), Ok(LockOutcome::Waiting));
    share.release(other);
    assert_eq!(woken.recv_timeout(Duration::from_secs(5)), Ok((5, Err(Errno::INTR))));
    let flock = |kind| Lock { flock: true, ..posix(kind, 9, 0, 0) };
    let other = (a.0, fs.open(cx, a.0, OFlags::RDONLY).unwrap());
    assert_eq!(set(a, flock(LockKind::Read), None), Ok(LockOutcome::Done));
    assert_eq!(set(other, flock(LockKind::Read), None), Ok(LockOutcome::Done));
    assert_eq!(set(other, flock(LockKind::Write), waiter(6)), Ok(LockOutcome::Waiting));
    share.release(a);
    assert_eq!(woken.recv_timeout(Duration::from_secs(5)), Ok((6, Ok(()))));
    assert_eq!(set(other, write(7), None), Err(Errno::BADF), "a write lock needs a handle that writes");
}

#[test]
fn changes_are_published_with_their_session() {
    let share = Share::new(Options::default());
    let (fs, cx) = (&share.fs, &share.cx);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&seen);
    let session = cx.session;
    let listening = fs.changes().unwrap().subscribe(move |change, by| {
        assert_eq!(by, session);
        notes.lock().unwrap().push(change.clone());
    });
    let file = share.file(Ino::ROOT, "f", b"");
    fs.setattr(cx, file, None, &set_mode(0o600)).unwrap();
    fs.setattr(cx, file, None, &SetAttr { size: Some(9), ..SetAttr::default() }).unwrap();
    share.fs.link(cx, file, Ino::ROOT, name("g")).unwrap();
    fs.rename(cx, (Ino::ROOT, name("f")), (Ino::ROOT, name("h")), RenameFlags::empty()).unwrap();
    fs.unlink(cx, Ino::ROOT, name("g")).unwrap();
    drop(listening);
    let entry = |word| Change::Entry { dir: Ino::ROOT, name: name(word).to_buf() };
    let attr = || Change::Attr { ino: file };
    let expected = [
        entry("f"),
        // Nothing was written, but it was asked for.
        Change::Data { ino: file, offset: 0, len: 0 },
        attr(),
        Change::Data { ino: file, offset: 9, len: u64::MAX },
        entry("g"),
        attr(),
        entry("f"),
        entry("h"),
        attr(),
        Change::Removed { dir: Ino::ROOT, name: name("g").to_buf(), ino: file },
        attr(),
    ];
    let mut seen = seen.lock().unwrap().clone();
    seen.retain(|change| !matches!(change, Change::Data { len: 0, .. }));
    assert_eq!(
        seen,
        expected.into_iter().filter(|change| !matches!(change, Change::Data { len: 0, .. })).collect::<Vec<_>>()
    );
}

#[test]
fn a_read_only_file_system_refuses_every_change() {
    let share = Share::new(Options { read_only: true, ..Options::default() });
    let (fs, cx) = (&share.fs, &share.cx);
    assert_eq!(fs.mkdir(cx, Ino::ROOT, name("d"), &new(0o755)), Err(Errno::ROFS));
    assert_eq!(fs.setattr(cx, Ino::ROOT, None, &set_mode(0)), Err(Errno::ROFS));
    assert_eq!(fs.setxattr(cx, Ino::ROOT, b"user.a", b"", XattrFlags::empty(), false), Err(Errno::ROFS));
    assert_eq!(share.list(Ino::ROOT, true, 9).len(), 2);
}

#[test]
fn invalid_options_have_one_sentence() {
    for (options, text) in [
        (
            Options { size_bytes: Some(10), ..Options::default() },
            "a memory file system cannot have 10 bytes; choose a size from 4096 to 9223372036854775807 bytes",
        ),
        (
            Options { inodes_max: Some(1), ..Options::default() },
            "a memory file system cannot have 1 inodes; choose at least 2, including the root",
        ),
        (
            Options { memfds: true, huge: true, ..Options::default() },
            "huge pages and doing without swap need a private tmpfs, which this user may not mount; run as root, or \
             leave these options out",
        ),
    ] {
        let error: Error = Mem::new(&options).unwrap_err();
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn create_never_opens_an_existing_file() {
    for share in both() {
        let (fs, cx) = (&share.fs, &share.cx);
        let ino = share.file(Ino::ROOT, "f", b"secret");
        for flags in [OFlags::RDWR, OFlags::RDWR | OFlags::TRUNC, OFlags::RDONLY | OFlags::EXCL] {
            let made = fs.create(cx, Ino::ROOT, name("f"), &new(0o644), flags);
            assert_eq!(made.map(drop), Err(Errno::EXIST), "{flags:?}");
        }
        assert_eq!(share.attr(ino).size, 6);
    }
}
