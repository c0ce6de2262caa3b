//! Access control lists: kept for clients that check them, and seen in the modes that others are shown.

use crate::common;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use common::*;
use ferry_dir::Options;
use ferry_vfs::*;

#[test]
fn access_control_lists() {
    let share = Share::new(Options::default());
    let Share { dir, cx, .. } = &share;
    if !dir.features().posix_acl {
        return ferry_skip::skip!("this file system has no access control lists");
    }
    // Version 2; user::rwx user:1000:rwx group::r-x mask::rwx other::---
    let acl: Vec<u8> =
        [(1u16, 7u16, u32::MAX), (2, 7, 1000), (4, 5, u32::MAX), (0x10, 7, u32::MAX), (0x20, 0, u32::MAX)].iter().fold(
            2u32.to_le_bytes().to_vec(),
            |mut acl, (tag, perm, id)| {
                acl.extend_from_slice(&tag.to_le_bytes());
                acl.extend_from_slice(&perm.to_le_bytes());
                acl.extend_from_slice(&id.to_le_bytes());
                acl
            },
        );
    let d = dir.mkdir(cx, Ino::ROOT, name("d"), &new(0o755)).unwrap();
    dir.setxattr(cx, d.ino, b"system.posix_acl_default", &acl, XattrFlags::empty(), false).unwrap();
    // The default ACL takes the umask's place.
    let made = CreateArgs { mode: 0o666, umask: 0o077, rdev: 0 };
    let (entry, _) = dir.create(cx, d.ino, name("f"), &made, OFlags::RDWR).unwrap();
    assert_eq!(entry.attr.mode & 0o777, 0o660);
    let (entry, _) = dir.create(cx, Ino::ROOT, name("f"), &made, OFlags::RDWR).unwrap();
    assert_eq!(entry.attr.mode & 0o777, 0o600);
    // Setting an ACL clears sgid if the client says so.
    let sgid = SetAttr { mode: Some(0o2755), ..SetAttr::default() };
    dir.setattr(cx, entry.ino, None, &sgid).unwrap();
    dir.setxattr(cx, entry.ino, b"system.posix_acl_access", &acl, XattrFlags::empty(), false).unwrap();
    assert_eq!(dir.getattr(cx, entry.ino, None).unwrap().mode & 0o7777, 0o2770);
    dir.setxattr(cx, entry.ino, b"system.posix_acl_access", &acl, XattrFlags::empty(), true).unwrap();
    assert_eq!(dir.getattr(cx, entry.ino, None).unwrap().mode & 0o7777, 0o770);
}

/// An ACL that gives the owner 6, the group 0 and others 0, with a mask of 6, which the mode shows as the group's.
fn acl_of_no_group() -> Vec<u8> {
    let entry = |tag: u16, perm: u16| [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &u32::MAX.to_le_bytes()].concat();
    [&2_u32.to_le_bytes()[..], &entry(1, 6), &entry(4, 0), &entry(0x10, 6), &entry(0x20, 0)].concat()
}

/// Makes a file of mode 0660 on the host, with an ACL or without.
fn make(share: &Share, file: &str, bytes: &str, acl: Option<&[u8]>) {
    let path = share.path(file);
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o660)).unwrap();
    if let Some(acl) = acl {
        rustix::fs::setxattr(&path, "system.posix_acl_access", acl, XattrFlags::empty()).unwrap();
    }
}

/// An inode is checked by name when a look-up or a listing first finds it, once a client checks modes without ACLs.
#[test]
fn an_acl_is_seen_when_a_file_is_first_found() {
    let share = Share::new(Options::default());
    let Share { dir, cx, .. } = &share;
    if !dir.features().posix_acl {
        ferry_skip::skip!("this file system has no ACLs");
        return;
    }
    let shown = |entry: &Entry| dir.mode_without_acl(cx, entry.ino, &entry.attr) & 0o777;
    let acl = acl_of_no_group();
    for (file, acl) in [("first", None), ("plain", None), ("acl", Some(&*acl))] {
        make(&share, file, "x", acl);
    }
    let look = |file: &str| {
        let entry = dir.lookup(cx, Ino::ROOT, name(file)).unwrap();
        let shown = shown(&entry);
        dir.forget(entry.ino, 1);
        (entry.attr.mode & 0o777, shown)
    };
    // From the first one on the client is known to check.
    assert_eq!(look("first"), (0o660, 0o660));
    assert_eq!(look("plain"), (0o660, 0o660));
    assert_eq!(look("acl"), (0o660, 0o600));
    let mut listed = Vec::new();
    for line in share.list(Ino::ROOT, true, 64) {
        listed.extend(line.entry.map(|entry| (line.name, shown(&entry))));
    }
    listed.sort();
    let expected = [("acl", 0o600), ("first", 0o660), ("plain", 0o660)];
    assert_eq!(listed, expected.map(|(name, mode)| (name.to_owned(), mode)));
}

/// The host repeatedly exchanges a file with an ACL and one without, while a client looks.
#[test]
fn no_exchange_of_names_hides_an_acl() {
    const LOOKS: usize = 5_000;
    let share = Share::new(Options::default());
    let Share { dir, cx, .. } = &share;
    if !dir.features().posix_acl {
        ferry_skip::skip!("this file system has no ACLs");
        return;
    }
    let acl = acl_of_no_group();
    make(&share, "a", "x", Some(&acl));
    make(&share, "b", "longer", None);
    let (one, other) = (share.path("a"), share.path("b"));
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let (mut with, mut without) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(rustix::fs::CWD, &one, rustix::fs::CWD, &other, flags).unwrap();
            }
        });
        for _ in 0..LOOKS {
            // Renamed more often than a look-up retries.
            let Ok(entry) = dir.lookup(cx, Ino::ROOT, name("a")) else { continue };
            let shown = dir.mode_without_acl(cx, entry.ino, &entry.attr) & 0o777;
            dir.forget(entry.ino, 1);
            if entry.attr.size == 1 {
                with += 1;
                if shown != 0o600 {
                    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
                }
                assert_eq!(shown, 0o600);
            } else {
                without += 1;
            }
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(with > 0 && without > 0, "{with} {without}");
}

/// For clients that check no ACLs. An inode is not checked again unless it changes.
#[test]
fn modes_without_acls_follow_every_change_of_an_acl() {
    let share = Share::new(Options::default());
    let Share { dir, cx, .. } = &share;
    if !dir.features().posix_acl {
        ferry_skip::skip!("this file system has no ACLs");
        return;
    }
    let acl = acl_of_no_group();
    let shown = |ino| {
        let attr = dir.getattr(cx, ino, None).unwrap();
        (attr.mode & 0o777, dir.mode_without_acl(cx, ino, &attr) & 0o777)
    };
    let follows = |file: &str| {
        let ino = share.ino(file);
        assert_eq!(shown(ino), (0o660, 0o660), "{file}");
        dir.setxattr(cx, ino, b"system.posix_acl_access", &acl, XattrFlags::empty(), false).unwrap();
        assert_eq!(shown(ino), (0o660, 0o600), "{file}");
        dir.removexattr(cx, ino, b"system.posix_acl_access").unwrap();
        let (mode, without) = shown(ino);
        assert_eq!(mode, without, "{file}");
    };
    // Within one tick of the clock by which changes get their times.
    for number in 0..100 {
        make(&share, &format!("f{number}"), "", None);
        follows(&format!("f{number}"));
    }
    make(&share, "old", "", None);
    std::thread::sleep(std::time::Duration::from_millis(3100));
    follows("old");
}
