//! The owners of created files, and when files lose privileges. Needs root; otherwise every test is skipped.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use common::*;
use ferry_dir::Options;
use ferry_vfs::*;

fn caller<'a>(share: &Share, uid: u32, gid: u32, groups: &'a [u32]) -> Caller<'a> {
    Caller { session: share.cx.session, uid, gid, pid: 1, groups }
}

fn owner(share: &Share, path: &str) -> (u32, u32, u32) {
    let meta = fs::symlink_metadata(share.path(path)).unwrap();
    (meta.uid(), meta.gid(), meta.mode() & 0o7777)
}

#[test]
fn created_files_belong_to_the_caller() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    for options in both_modes() {
        let share = Share::new(options);
        let dir = &share.dir;
        // Only its owner, another than the caller, may write here: the client's kernel has decided already.
        fs::create_dir(share.path("d")).unwrap();
        chown(share.path("d"), Some(77), Some(77)).unwrap();
        fs::set_permissions(share.path("d"), fs::Permissions::from_mode(0o700)).unwrap();
        let d = share.ino("d");
        for (uid, gid) in [(1000, 2000), (0, 0), (0, 5), (1000, 0)] {
            let cx = caller(&share, uid, gid, &[]);
            let name_of = |kind: &str| format!("{kind}{uid}-{gid}");
            let (entry, handle) = dir.create(&cx, d, name(&name_of("f")), &new(0o640), OFlags::RDWR).unwrap();
            assert_eq!((entry.attr.uid, entry.attr.gid), (uid, gid));
            dir.release(&cx, entry.ino, handle);
            dir.mkdir(&cx, d, name(&name_of("d")), &new(0o750)).unwrap();
            dir.symlink(&cx, d, name(&name_of("s")), b"x").unwrap();
            dir.mknod(&cx, d, name(&name_of("p")), &new(0o010_640)).unwrap();
            // A device node: the client's kernel has asked for CAP_MKNOD.
            dir.mknod(&cx, d, name(&name_of("c")), &CreateArgs { mode: 0o020_640, umask: 0, rdev: 0x103 }).unwrap();
            for kind in ["f", "d", "s", "p", "c"] {
                let (file_uid, file_gid, _) = owner(&share, &format!("d/{}", name_of(kind)));
                assert_eq!((file_uid, file_gid), (uid, gid), "{kind}");
            }
            let (entry, _) = dir.tmpfile(&cx, d, &new(0o600), OFlags::RDWR).unwrap();
            assert_eq!((entry.attr.uid, entry.attr.gid), (uid, gid));
        }
        let (bad, worse) = (caller(&share, u32::MAX, 0, &[]), caller(&share, 0, u32::MAX, &[]));
        assert_eq!(dir.mkdir(&bad, d, name("bad"), &new(0o700)).unwrap_err(), Errno::INVAL);
        assert_eq!(dir.mkdir(&worse, d, name("bad"), &new(0o700)).unwrap_err(), Errno::INVAL);
    }
}

#[test]
fn setgid_directories_check_group_membership() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let share = Share::new(Options::default());
    let dir = &share.dir;
    fs::create_dir(share.path("d")).unwrap();
    chown(share.path("d"), Some(1), Some(3000)).unwrap();
    fs::set_permissions(share.path("d"), fs::Permissions::from_mode(0o2777)).unwrap();
    let d = share.ino("d");
    let make = |cx: &Caller<'_>, file: &str| {
        dir.mknod(cx, d, name(file), &new(0o102_775)).unwrap();
        owner(&share, &format!("d/{file}"))
    };
    // CVE-2018-13405: no sgid file for a group that the caller is not in.
    assert_eq!(make(&caller(&share, 1000, 2000, &[]), "stranger"), (1000, 3000, 0o775));
    assert_eq!(make(&caller(&share, 1000, 2000, &[3000]), "member"), (1000, 3000, 0o2775));
    assert_eq!(make(&caller(&share, 1000, 3000, &[]), "primary"), (1000, 3000, 0o2775));
    assert_eq!(make(&caller(&share, 1000, 2000, &[]), "again"), (1000, 3000, 0o775));
    assert_eq!(make(&caller(&share, 0, 0, &[]), "root"), (0, 3000, 0o2775));
    dir.mkdir(&caller(&share, 1000, 2000, &[]), d, name("sub"), &new(0o755)).unwrap();
    assert_eq!(owner(&share, "d/sub"), (1000, 3000, 0o2755));
    // The server's own groups are not the caller's: root's group 0 here.
    chown(share.path("d"), Some(1), Some(0)).unwrap();
    fs::set_permissions(share.path("d"), fs::Permissions::from_mode(0o2777)).unwrap();
    assert_eq!(make(&caller(&share, 1000, 2000, &[]), "zero"), (1000, 0, 0o775));
}

#[test]
fn umasks_do_not_mix_between_threads() {
    let share = Share::new(Options::default());
    std::thread::scope(|scope| {
        for umask in [0o000, 0o022, 0o027, 0o077] {
            let share = &share;
            scope.spawn(move || {
                for index in 0..200 {
                    let file = format!("{umask:o}-{index}");
                    let new = CreateArgs { mode: 0o777, umask, rdev: 0 };
                    let entry = share.dir.mkdir(&share.cx, Ino::ROOT, name(&file), &new).unwrap();
                    assert_eq!(entry.attr.mode & 0o777, 0o777 & !umask);
                }
            });
        }
    });
}

/// Makes a file with suid, sgid and a capability, and answers its number.
fn privileged_file(share: &Share, file: &str) -> Ino {
    fs::write(share.path(file), "content").unwrap();
    chown(share.path(file), Some(1000), Some(1000)).unwrap();
    fs::set_permissions(share.path(file), fs::Permissions::from_mode(0o6755)).unwrap();
    let ino = share.ino(file);
    // Version 2, cap_net_bind_service permitted.
    let mut capability = vec![0, 0, 0, 2];
    capability.extend_from_slice(&[0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    share.dir.setxattr(&share.cx, ino, b"security.capability", &capability, XattrFlags::empty(), false).unwrap();
    ino
}

#[test]
fn files_lose_privileges_as_on_a_local_file_system() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    for options in both_modes() {
        let share = Share::new(options);
        let dir = &share.dir;
        let user = caller(&share, 1000, 1000, &[]);
        let root = caller(&share, 0, 0, &[]);
        let mode = |file: &str| owner(&share, file).2;
        let capable = |ino| dir.getxattr(&root, ino, b"security.capability").is_ok();
        let clear = SetAttr { clear_privileges: true, ..SetAttr::default() };

        // Size, by whoever has CAP_FSETID, and not; by number and by handle.
        let ino = privileged_file(&share, "a");
        assert!(capable(ino));
        dir.setattr(&root, ino, None, &SetAttr { size: Some(3), ..SetAttr::default() }).unwrap();
        assert_eq!((mode("a"), capable(ino)), (0o6755, false));
        dir.setattr(&user, ino, None, &SetAttr { size: Some(2), ..clear }).unwrap();
        assert_eq!(mode("a"), 0o755);
        let ino = privileged_file(&share, "b");
        let handle = dir.open(&user, ino, OFlags::RDWR).unwrap();
        dir.setattr(&user, ino, Some(handle), &SetAttr { size: Some(2), ..clear }).unwrap();
        assert_eq!((mode("b"), capable(ino)), (0o755, false));

        // Owner: always.
        let ino = privileged_file(&share, "c");
        dir.setattr(&root, ino, None, &SetAttr { uid: Some(1), ..SetAttr::default() }).unwrap();
        assert_eq!((mode("c"), capable(ino)), (0o755, false));
        let ino = privileged_file(&share, "d");
        let set = SetAttr { gid: Some(7), mode: Some(0o4711), ..clear };
        dir.setattr(&root, ino, None, &set).unwrap();
        assert_eq!(mode("d"), 0o4711);

        // Nothing but the privileges.
        privileged_file(&share, "e");
        dir.setattr(&user, share.ino("e"), None, &clear).unwrap();
        assert_eq!(mode("e"), 0o755);
        fs::set_permissions(share.path("e"), fs::Permissions::from_mode(0o6745)).unwrap();
        dir.setattr(&user, share.ino("e"), None, &clear).unwrap();
        assert_eq!(mode("e"), 0o2745, "sgid without group execution is no privilege");

        // Open with truncation: who asks is not known for sure, so exports whose client says "clear" use setattr.
        let ino = privileged_file(&share, "f");
        dir.open(&user, ino, OFlags::RDWR | OFlags::TRUNC).unwrap();
        assert_eq!((mode("f"), capable(ino)), (0o6755, false));

        // Ranges.
        let ino = privileged_file(&share, "g");
        let handle = dir.open(&user, ino, OFlags::RDWR).unwrap();
        dir.fallocate(&root, ino, handle, 0, 100, FallocateFlags::empty()).unwrap();
        assert_eq!(mode("g"), 0o6755);
        dir.fallocate(&user, ino, handle, 0, 200, FallocateFlags::empty()).unwrap();
        assert_eq!(mode("g"), 0o755);
        let ino = privileged_file(&share, "h");
        let handle = dir.open(&user, ino, OFlags::RDWR).unwrap();
        let copy = CopyRange { from: (ino, handle, 0), to: (ino, handle, 100), len: 5 };
        assert_eq!(dir.copy_file_range(&user, &copy), Ok(5));
        assert_eq!(mode("h"), 0o755);
    }
}

#[test]
fn access_is_checked_for_the_caller() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let share = Share::new(Options::default());
    fs::write(share.path("f"), "").unwrap();
    chown(share.path("f"), Some(1000), Some(2000)).unwrap();
    fs::set_permissions(share.path("f"), fs::Permissions::from_mode(0o640)).unwrap();
    let ino = share.ino("f");
    let access = |uid, gid, groups: &[u32], mask| share.dir.access(&caller(&share, uid, gid, groups), ino, mask);
    assert_eq!(access(1000, 1, &[], 6), Ok(()));
    assert_eq!(access(1000, 1, &[], 1), Err(Errno::ACCESS));
    assert_eq!(access(5, 2000, &[], 4), Ok(()));
    assert_eq!(access(5, 5, &[2000], 4), Ok(()));
    assert_eq!(access(5, 2000, &[], 2), Err(Errno::ACCESS));
    assert_eq!(access(5, 5, &[], 4), Err(Errno::ACCESS));
    assert_eq!(access(5, 5, &[], 0), Ok(()));
    assert_eq!(access(0, 0, &[], 6), Ok(()));
    assert_eq!(access(0, 0, &[], 8), Err(Errno::INVAL));
}

const GETFLAGS: u32 = 0x8008_6601;
const SETFLAGS: u32 = 0x4008_6602;
const GETXFLAGS: u32 = 0x801c_581f;
const SETXFLAGS: u32 = 0x401c_5820;

/// The flags of an inode by either ioctl, and how they are set.
struct Flags<'a> {
    share: &'a Share,
    at: (Ino, Handle),
}

impl Flags<'_> {
    fn get(&self, cx: &Caller<'_>, command: u32) -> Result<Vec<u8>> {
        let bytes = if command == GETFLAGS { 4 } else { 28 };
        self.share.dir.ioctl(cx, self.at.0, self.at.1, command, &[], bytes)
    }

    /// Sets one flag, or removes it.
    fn change(&self, cx: &Caller<'_>, (get, set): (u32, u32), flag: u32, on: bool) -> Result<()> {
        let mut value = self.get(cx, get).unwrap();
        let old = u32::from_ne_bytes(value[..4].try_into().unwrap());
        let new = if on { old | flag } else { old & !flag };
        value[..4].copy_from_slice(&new.to_ne_bytes());
        self.share.dir.ioctl(cx, self.at.0, self.at.1, set, &value, 0).map(drop)
    }
}

/// Linux's rules, applied here again: a client's kernel before 5.13 applies none.
#[test]
fn file_flags_are_set_by_owner_and_root_only() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let share = Share::new(Options::default());
    fs::write(share.path("f"), "").unwrap();
    chown(share.path("f"), Some(1000), Some(1000)).unwrap();
    let (root, owner) = (share.cx, caller(&share, 1000, 1000, &[]));
    let (stranger, unknown) = (caller(&share, 1001, 1001, &[1000]), caller(&share, u32::MAX, u32::MAX, &[]));
    // A descriptor that only reads will do.
    let (ino, handle) = share.open("f", OFlags::RDONLY).unwrap();
    let flags = Flags { share: &share, at: (ino, handle) };
    if flags.get(&root, GETFLAGS).is_err() {
        ferry_skip::skip!("this file system has no flags of files");
        return;
    }
    for (commands, no_dump, root_only) in
        [((GETFLAGS, SETFLAGS), 0x40, [0x10, 0x20]), ((GETXFLAGS, SETXFLAGS), 0x80, [0x8, 0x10])]
    {
        for (who, cx) in [("root", &root), ("owner", &owner), ("stranger", &stranger), ("unknown", &unknown)] {
            assert!(flags.get(cx, commands.0).is_ok(), "{who} cannot look");
            let may = if matches!(who, "root" | "owner") { Ok(()) } else { Err(Errno::PERM) };
            for on in [true, false] {
                assert_eq!(flags.change(cx, commands, no_dump, on), may, "{who}, {on}");
            }
            for flag in root_only {
                let may = if who == "root" { Ok(()) } else { Err(Errno::PERM) };
                let set = flags.change(cx, commands, flag, true);
                flags.change(&root, commands, flag, true).unwrap();
                let removed = flags.change(cx, commands, flag, false);
                // In any case, no other user could remove the file.
                flags.change(&root, commands, flag, false).unwrap();
                assert_eq!((set, removed), (may, may), "{who}, {flag:x}");
            }
            if who != "root" && commands.0 == GETFLAGS {
                // FS_JOURNAL_DATA_FL; whether root may depends on the file system's journal.
                assert_eq!(flags.change(cx, commands, 0x4000, true), Err(Errno::PERM), "{who}");
            }
        }
    }
    // Quotas of the host go by projects.
    for (who, cx) in [("root", &root), ("owner", &owner)] {
        for (commands, inherits) in [((GETFLAGS, SETFLAGS), 0x2000_0000), ((GETXFLAGS, SETXFLAGS), 0x200)] {
            assert_eq!(flags.change(cx, commands, inherits, true), Err(Errno::INVAL), "{who}");
        }
        let mut value = flags.get(cx, GETXFLAGS).unwrap();
        assert_eq!(share.dir.ioctl(cx, ino, handle, SETXFLAGS, &value, 0).map(drop), Ok(()), "{who}: the same project");
        value[12] ^= 1;
        assert_eq!(share.dir.ioctl(cx, ino, handle, SETXFLAGS, &value, 0).map(drop), Err(Errno::INVAL), "{who}");
    }
    share.dir.release(&root, ino, handle);
}

/// A user namespace lacks most users; the client has them.
#[test]
fn an_owner_without_a_mapping_is_refused() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let run = std::process::Command::new("unshare")
        .args(["--user", "--map-root-user"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "privileges::with_one_user", "--ignored", "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "needs a user namespace of its own"]
fn with_one_user() {
    if !is_alone() {
        return;
    }
    for options in both_modes() {
        let share = Share::new(options);
        fs::write(share.path("f"), "").unwrap();
        let ino = share.ino("f");
        let set = |set| share.dir.setattr(&share.cx, ino, None, &set).map(drop);
        let own = |uid, gid| SetAttr { uid, gid, ..SetAttr::default() };
        assert_eq!(set(own(Some(0), Some(0))), Ok(()));
        for (uid, gid) in [(Some(1000), None), (None, Some(1000)), (Some(1000), Some(0)), (Some(0), Some(1000))] {
            assert_eq!(set(own(uid, gid)), Err(Errno::PERM), "{uid:?} {gid:?}");
        }
        // What nobody has is no owner anywhere.
        assert_eq!(set(own(Some(u32::MAX), None)), Err(Errno::INVAL));
    }
}

/// Without group execution sgid is only a mark, which members of the group keep; the host would ask who this server is.
#[test]
fn sgid_without_group_execution_stays_for_members() {
    if !is_root() {
        ferry_skip::skip!("needs root");
        return;
    }
    let share = Share::new(Options::default());
    let dir = &share.dir;
    type Change = (&'static str, fn(&ferry_dir::Dir, &Caller<'_>, Ino, Handle));
    let changes: [Change; 6] = [
        ("write", |dir, cx, ino, handle| {
            let (flags, owner) = (OFlags::RDWR, None);
            let at = IoRange { ino, handle, offset: 3, len: 4, flags, clear_privileges: true, owner };
            match dir.write(cx, &at, &mut &b"text"[..]).unwrap() {
                // Whoever does it has no CAP_FSETID then, and is in the group 0.
                Data::Extent(extent) => assert_eq!(extent.offset, 3),
                Data::Bytes(bytes) => assert_eq!(bytes, 4),
            }
        }),
        ("truncate", |dir, cx, ino, handle| {
            let set = SetAttr { size: Some(2), clear_privileges: true, ..SetAttr::default() };
            dir.setattr(cx, ino, Some(handle), &set).unwrap();
        }),
        ("fallocate", |dir, cx, ino, handle| {
            dir.fallocate(cx, ino, handle, 0, 200, FallocateFlags::empty()).unwrap();
        }),
        ("copy", |dir, cx, ino, handle| {
            let copy = CopyRange { from: (ino, handle, 0), to: (ino, handle, 100), len: 5 };
            assert_eq!(dir.copy_file_range(cx, &copy), Ok(5));
        }),
        ("chown", |dir, cx, ino, handle| {
            dir.setattr(cx, ino, Some(handle), &SetAttr { gid: Some(7), ..SetAttr::default() }).unwrap();
        }),
        ("nothing", |dir, cx, ino, _| {
            let set = SetAttr { clear_privileges: true, ..SetAttr::default() };
            dir.setattr(cx, ino, None, &set).unwrap();
        }),
    ];
    for gid in [0, 2000] {
        for (what, change) in changes {
            for (cx, stays) in [
                (caller(&share, 1000, gid, &[]), true),
                (caller(&share, 1000, 3, &[gid]), true),
                (caller(&share, 1000, 3, &[]), false),
                (caller(&share, Caller::UNKNOWN, Caller::UNKNOWN, &[]), true),
            ] {
                fs::write(share.path("f"), "content").unwrap();
                chown(share.path("f"), Some(1000), Some(gid)).unwrap();
                fs::set_permissions(share.path("f"), fs::Permissions::from_mode(0o6765)).unwrap();
                let ino = share.ino("f");
                let handle = dir.open(&cx, ino, OFlags::RDWR).unwrap();
                change(dir, &cx, ino, handle);
                assert_eq!(owner(&share, "f").2, if stays { 0o2765 } else { 0o765 }, "{what} by {cx:?} in {gid}");
                dir.release(&cx, ino, handle);
            }
        }
    }
    // What is written here goes where it belongs, also behind the end.
    fs::write(share.path("f"), "content").unwrap();
    chown(share.path("f"), Some(1000), Some(0)).unwrap();
    fs::set_permissions(share.path("f"), fs::Permissions::from_mode(0o2666)).unwrap();
    let (ino, cx) = (share.ino("f"), caller(&share, 1000, 0, &[]));
    let data: Vec<u8> = (0..300_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    for (flags, offset, expected) in [(OFlags::RDWR, 5, 5), (OFlags::RDWR | OFlags::APPEND, 5, 300_005)] {
        let handle = dir.open(&cx, ino, flags).unwrap();
        let len = u32::try_from(data.len()).unwrap();
        let at = IoRange { ino, handle, offset, len, flags, clear_privileges: true, owner: None };
        assert_eq!(dir.write(&cx, &at, &mut &data[..]).unwrap().bytes(), Some(data.len()));
        assert!(fs::read(share.path("f")).unwrap()[expected..] == data);
        dir.release(&cx, ino, handle);
    }
    assert_eq!(owner(&share, "f").2, 0o2666);
}
