//! Privileges: suid, sgid and capabilities that must be cleared, owners of created files, ACLs, xattrs.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, XattrFlags, chmodat, chownat, copy_file_range, fallocate,
    mkdirat, mknodat, openat, statat, symlinkat,
};
use rustix::process::Uid;

use crate::Check;
use crate::sys::{NOBODY, as_nobody, become_user, errno, idmapped, mode, statx};

pub const CHECKS: &[Check] = &[
    ("suid-cleared-by-chown", suid_cleared_by_chown),
    ("capabilities-cleared", capabilities_cleared),
    ("sgid-directory", sgid_directory),
    ("owner-and-groups", owner_and_groups),
    ("idmapped-mount", idmapped_mount),
    ("sticky", sticky),
    ("denied", denied),
    ("xattr", xattr),
    ("xattr-namespaces", xattr_namespaces),
    ("xattr-listed", xattr_listed),
    ("acl", acl),
    ("acl-default", acl_default),
    ("acl-clears-sgid", acl_clears_sgid),
];

/// A file of root that every user may write and execute, with suid and sgid.
fn privileged(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, [1; 10_000]).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
    assert_eq!(mode(&path), 0o6777);
    path
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

pub type Change = (&'static str, fn(&Path));

/// Operations that clear suid and sgid.
pub const CHANGES: &[Change] = &[
    ("write", |path| open(path).write_all_at(b"x", 0).unwrap()),
    ("append", |path| std::io::Write::write_all(&mut File::options().append(true).open(path).unwrap(), b"x").unwrap()),
    ("direct", |path| {
        let mut options = File::options();
        let Ok(file) = options.write(true).custom_flags(libc::O_DIRECT).open(path) else {
            return open(path).write_all_at(b"x", 0).unwrap();
        };
        let buffer = vec![2; 8192];
        let start = buffer.as_ptr().align_offset(4096);
        file.write_all_at(&buffer[start..start + 4096], 0).unwrap();
    }),
    ("ftruncate", |path| open(path).set_len(5).unwrap()),
    ("truncate", |path| crate::sys::truncate(path, 5).unwrap()),
    ("open-trunc", |path| drop(File::options().write(true).truncate(true).open(path).unwrap())),
    ("create-trunc", |path| drop(File::create(path).unwrap())),
];

/// The same, with calls that not every protocol supports.
pub const RANGE_CHANGES: &[Change] = &[
    ("fallocate", |path| fallocate(open(path), FallocateFlags::empty(), 0, 20_000).unwrap()),
    ("punch", |path| {
        fallocate(open(path), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096).unwrap();
    }),
    ("copy", |path| {
        let file = open(path);
        let (mut from, mut to) = (0, 20_000);
        assert_eq!(copy_file_range(&file, Some(&mut from), &file, Some(&mut to), 100).unwrap(), 100);
    }),
];

fn suid_cleared_by_chown(dir: &Path) {
    let path = privileged(dir, "file");
    chown(&path, Some(NOBODY), None).unwrap();
    assert_eq!(mode(&path), 0o777);
    let path = privileged(dir, "directory-like");
    chown(&path, None, Some(NOBODY)).unwrap();
    assert_eq!(mode(&path), 0o777);
    let directory = dir.join("directory");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o6777)).unwrap();
    chown(&directory, Some(NOBODY), Some(NOBODY)).unwrap();
    assert_eq!(mode(&directory), 0o6777, "a directory keeps them");
    // Sgid that means nothing (no right to run for the group) stays.
    let path = privileged(dir, "not-run");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o2766)).unwrap();
    chown(&path, Some(NOBODY), None).unwrap();
    assert_eq!(mode(&path), 0o2766);
    // Changing a file's group to one that the caller is not in clears sgid.
    let own = dir.join("own");
    fs::write(&own, "").unwrap();
    chown(&own, Some(NOBODY), Some(12_345)).unwrap();
    as_nobody(|| fs::set_permissions(&own, fs::Permissions::from_mode(0o2755)).unwrap());
    assert_eq!(mode(&own), 0o755);
}

/// Who owns a file on the file system is another user through the mount, and the other way round for what is made there.
fn idmapped_mount(dir: &Path) {
    const FOLLOW_NOT: AtFlags = AtFlags::SYMLINK_NOFOLLOW;
    /// The same user on the file system, and through the mount; and one whom the mount does not know.
    const STORED: u32 = 1000;
    const SHOWN: u32 = 2000;
    const UNKNOWN: u32 = 3000;
    let tree = idmapped(dir, &[(0, 0), (STORED, SHOWN)]);
    let stored = |name: &str| statx(&dir.join(name)).stx_uid;
    let shown = |name: &str| statat(&tree, name, FOLLOW_NOT).unwrap().st_uid;
    let open = |name: &str, flags| openat(&tree, name, flags | OFlags::CLOEXEC, Mode::from(0o600));
    fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    for (name, owner) in [("theirs", STORED), ("nobodys", UNKNOWN)] {
        fs::write(dir.join(name), "before").unwrap();
        fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o600)).unwrap();
        chown(dir.join(name), Some(owner), Some(owner)).unwrap();
    }
    assert_eq!((shown("theirs"), shown("nobodys")), (SHOWN, NOBODY));
    become_user(SHOWN, SHOWN, &[], || {
        let file = File::from(open("theirs", OFlags::RDWR).unwrap());
        file.write_all_at(b"after!", 0).unwrap();
        open("file", OFlags::CREATE | OFlags::WRONLY).unwrap();
        mkdirat(&tree, "directory", Mode::from(0o700)).unwrap();
        symlinkat("file", &tree, "link").unwrap();
        mknodat(&tree, "fifo", FileType::Fifo, Mode::from(0o600), 0).unwrap();
        assert_eq!(errno(open("nobodys", OFlags::RDONLY)), libc::EACCES);
        chmodat(&tree, "file", Mode::from(0o640), AtFlags::empty()).unwrap();
    });
    assert_eq!(fs::read(dir.join("theirs")).unwrap(), b"after!");
    for name in ["theirs", "file", "directory", "link", "fifo"] {
        assert_eq!((stored(name), shown(name)), (STORED, SHOWN), "{name}");
    }
    // The user with the number of the file system is another one here.
    become_user(STORED, STORED, &[], || {
        assert_eq!(errno(open("theirs", OFlags::RDONLY)), libc::EACCES);
        assert_eq!(errno(open("theirs-too", OFlags::CREATE | OFlags::WRONLY)), libc::EOVERFLOW);
    });
    let own = |owner| chownat(&tree, "file", Some(Uid::from_raw(owner)), None, FOLLOW_NOT);
    own(0).unwrap();
    assert_eq!((stored("file"), shown("file")), (0, 0));
    own(SHOWN).unwrap();
    assert_eq!((stored("file"), shown("file")), (STORED, SHOWN));
    assert_eq!(errno(own(UNKNOWN)), libc::EOVERFLOW);
}

/// `security.capability`, version 2, with CAP_NET_RAW.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn capabilities_cleared(dir: &Path) {
    let has = |path: &Path| rustix::fs::getxattr(path, "security.capability", &mut [0_u8; 64][..]).is_ok();
    let mut wrong = Vec::new();
    for (name, change) in CHANGES.iter().chain(RANGE_CHANGES) {
        for root in [true, false] {
            let path = dir.join(format!("{name}-{root}"));
            fs::write(&path, [1; 10_000]).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
            rustix::fs::setxattr(&path, "security.capability", &CAPABILITY, XattrFlags::empty()).unwrap();
            assert!(has(&path));
            if root {
                change(&path)
            } else {
                as_nobody(|| change(&path))
            }
            if has(&path) {
                wrong.push(format!("{name} by {}", if root { "root" } else { "nobody" }));
            }
        }
    }
    let path = dir.join("chown");
    fs::write(&path, "").unwrap();
    rustix::fs::setxattr(&path, "security.capability", &CAPABILITY, XattrFlags::empty()).unwrap();
    chown(&path, Some(NOBODY), None).unwrap();
    if has(&path) {
        wrong.push("chown".into());
    }
    assert!(wrong.is_empty(), "capabilities stay after {wrong:?}");
}

fn sgid_directory(dir: &Path) {
    let shared = dir.join("shared");
    fs::create_dir(&shared).unwrap();
    chown(&shared, None, Some(4242)).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o2777)).unwrap();
    as_nobody(|| {
        fs::write(shared.join("file"), "").unwrap();
        fs::create_dir(shared.join("dir")).unwrap();
        File::options().write(true).create_new(true).mode(0o2755).open(shared.join("sgid")).unwrap();
        mkdirat(CWD, shared.join("made"), Mode::from_raw_mode(0o2755)).unwrap();
    });
    for name in ["file", "dir", "sgid", "made"] {
        let meta = fs::metadata(shared.join(name)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (NOBODY, 4242), "{name}");
    }
    assert_eq!(mode(&shared.join("dir")), 0o2755, "a directory takes sgid over");
    // CVE-2018-13405: sgid of a group that one is not in is not for the asking.
    assert_eq!(mode(&shared.join("sgid")), 0o755);
    as_nobody(|| {
        let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
        let file = rustix::fs::openat(CWD, &shared, flags, Mode::from_raw_mode(0o2755)).unwrap();
        let meta = File::from(file).metadata().unwrap();
        assert_eq!((meta.gid(), meta.mode() & 0o7777), (4242, 0o755), "O_TMPFILE");
    });
    become_user(NOBODY, NOBODY, &[4242], || {
        File::options().write(true).create_new(true).mode(0o2755).open(shared.join("member")).unwrap();
    });
    assert_eq!(mode(&shared.join("member")), 0o2755, "a member of the group may have it");
}

fn owner_and_groups(dir: &Path) {
    let directory = dir.join("of-a-group");
    fs::create_dir(&directory).unwrap();
    chown(&directory, Some(0), Some(5000)).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o770)).unwrap();
    assert_eq!(as_nobody(|| errno(fs::write(directory.join("x"), ""))), libc::EACCES);
    become_user(NOBODY, NOBODY, &[4999, 5000], || {
        fs::write(directory.join("file"), "x").unwrap();
        fs::create_dir(directory.join("dir")).unwrap();
        std::os::unix::fs::symlink("x", directory.join("link")).unwrap();
        rustix::fs::mknodat(CWD, directory.join("fifo"), rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o600), 0)
            .unwrap();
        chown(directory.join("file"), None, Some(5000)).unwrap();
        assert_eq!(errno(chown(directory.join("file"), None, Some(6000))), libc::EPERM);
    });
    for name in ["dir", "link", "fifo"] {
        let meta = fs::symlink_metadata(directory.join(name)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (NOBODY, NOBODY), "{name}");
    }
    assert_eq!(fs::metadata(directory.join("file")).unwrap().gid(), 5000);
}

fn sticky(dir: &Path) {
    let directory = dir.join("tmp");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o1777)).unwrap();
    fs::write(directory.join("of-root"), "").unwrap();
    as_nobody(|| {
        assert_eq!(errno(fs::remove_file(directory.join("of-root"))), libc::EPERM);
        assert_eq!(errno(fs::rename(directory.join("of-root"), directory.join("x"))), libc::EPERM);
        fs::write(directory.join("own"), "").unwrap();
        fs::remove_file(directory.join("own")).unwrap();
    });
    become_user(1234, 1234, &[], || fs::write(directory.join("of-1234"), "").unwrap());
    assert_eq!(as_nobody(|| errno(fs::remove_file(directory.join("of-1234")))), libc::EPERM);
}

fn denied(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, "secret").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    as_nobody(|| {
        assert_eq!(errno(File::open(&path)), libc::EACCES);
        assert_eq!(errno(fs::write(dir.join("new"), "")), libc::EACCES);
        assert_eq!(errno(fs::remove_file(&path)), libc::EACCES);
        assert_eq!(errno(fs::set_permissions(&path, fs::Permissions::from_mode(0o777))), libc::EPERM);
        assert_eq!(errno(rustix::fs::access(&path, rustix::fs::Access::READ_OK)), libc::EACCES);
        assert_eq!(errno(rustix::fs::setxattr(&path, "user.x", b"x", XattrFlags::empty())), libc::EACCES);
    });
    let directory = dir.join("directory");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("x"), "").unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o711)).unwrap();
    as_nobody(|| {
        assert_eq!(errno(fs::read_dir(&directory)), libc::EACCES);
        File::open(directory.join("x")).unwrap();
    });
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(as_nobody(|| errno(File::open(directory.join("x")))), libc::EACCES);
}

fn xattr(dir: &Path) {
    use rustix::fs::{getxattr, listxattr, removexattr, setxattr};
    let path = dir.join("file");
    fs::write(&path, "").unwrap();
    let get = |name: &str| {
        let mut buffer = vec![0; 65_536];
        getxattr(&path, name, &mut buffer[..]).map(|len| buffer[..len].to_vec())
    };
    assert_eq!(errno(get("user.none")), libc::ENODATA);
    setxattr(&path, "user.a", b"value \0 with NUL", XattrFlags::empty()).unwrap();
    setxattr(&path, "user.empty", b"", XattrFlags::empty()).unwrap();
    assert_eq!(get("user.a").unwrap(), b"value \0 with NUL");
    assert_eq!(get("user.empty").unwrap(), b"");
    assert_eq!(errno(setxattr(&path, "user.a", b"x", XattrFlags::CREATE)), libc::EEXIST);
    assert_eq!(errno(setxattr(&path, "user.b", b"x", XattrFlags::REPLACE)), libc::ENODATA);
    assert_eq!(errno(getxattr(&path, "user.a", &mut [0_u8; 3][..])), libc::ERANGE);
    let long = vec![7; 3000];
    setxattr(&path, "user.long", &long, XattrFlags::empty()).unwrap();
    assert_eq!(get("user.long").unwrap(), long);
    let name = format!("user.{}", "n".repeat(250));
    setxattr(&path, name.as_str(), b"x", XattrFlags::empty()).unwrap();
    assert_eq!(
        errno(setxattr(&path, format!("user.{}", "n".repeat(251)).as_str(), b"x", XattrFlags::empty())),
        libc::ERANGE
    );
    let mut buffer = vec![0; 65_536];
    let len = listxattr(&path, &mut buffer[..]).unwrap();
    let names: std::collections::BTreeSet<_> =
        buffer[..len].split(|&byte| byte == 0).filter(|name| !name.is_empty()).collect();
    let expected: [&[u8]; 4] = [b"user.a", b"user.empty", b"user.long", name.as_bytes()];
    assert!(expected.iter().all(|name| names.contains(name)), "a name is missing in the list");
    removexattr(&path, "user.a").unwrap();
    assert_eq!(errno(removexattr(&path, "user.a")), libc::ENODATA);
    setxattr(dir, "user.of-dir", b"d", XattrFlags::empty()).unwrap();
}

fn xattr_namespaces(dir: &Path) {
    use rustix::fs::{getxattr, lsetxattr, setxattr};
    let path = dir.join("file");
    fs::write(&path, "").unwrap();
    setxattr(&path, "trusted.x", b"t", XattrFlags::empty()).unwrap();
    setxattr(&path, "security.x", b"s", XattrFlags::empty()).unwrap();
    assert_eq!(getxattr(&path, "trusted.x", &mut [0_u8; 8][..]).unwrap(), 1);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    as_nobody(|| {
        assert_eq!(errno(getxattr(&path, "trusted.x", &mut [0_u8; 8][..])), libc::ENODATA);
        assert_eq!(errno(setxattr(&path, "trusted.x", b"t", XattrFlags::empty())), libc::EPERM);
        assert_eq!(errno(setxattr(&path, "security.x", b"t", XattrFlags::empty())), libc::EPERM);
    });
    std::os::unix::fs::symlink("file", dir.join("link")).unwrap();
    assert_eq!(errno(lsetxattr(dir.join("link"), "user.x", b"t", XattrFlags::empty())), libc::EPERM);
    lsetxattr(dir.join("link"), "trusted.x", b"l", XattrFlags::empty()).unwrap();
    assert_eq!(errno(setxattr(&path, "nonsense", b"t", XattrFlags::empty())), libc::EOPNOTSUPP);
}

/// The names of attributes for the administrator are his alone.
fn xattr_listed(dir: &Path) {
    use rustix::fs::{listxattr, setxattr};
    let path = dir.join("file");
    fs::write(&path, "").unwrap();
    for name in ["user.x", "trusted.x"] {
        setxattr(&path, name, b"t", XattrFlags::empty()).unwrap();
    }
    let listed = || {
        let mut buffer = [0_u8; 1024];
        let len = listxattr(&path, &mut buffer[..]).unwrap();
        let names = String::from_utf8_lossy(&buffer[..len]).into_owned();
        ["user.x\0", "trusted.x\0"].map(|name| names.contains(name))
    };
    assert_eq!(listed(), [true, true], "root");
    assert_eq!(as_nobody(listed), [true, false], "nobody");
}

/// An ACL as the kernel takes it: tag, rights, id.
fn acl_bytes(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(rights.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NO_ID: u32 = u32::MAX;

fn set_acl(path: &Path, name: &str, entries: &[(u16, u16, u32)]) -> Result<(), rustix::io::Errno> {
    rustix::fs::setxattr(path, name, &acl_bytes(entries), XattrFlags::empty())
}

fn get_acl(path: &Path, name: &str) -> Vec<u8> {
    let mut buffer = vec![0; 1024];
    let len = rustix::fs::getxattr(path, name, &mut buffer[..]).unwrap();
    buffer.truncate(len);
    buffer
}

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

fn acl(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, "text").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let entries = [(USER_OBJ, 6, NO_ID), (USER, 4, NOBODY), (GROUP_OBJ, 0, NO_ID), (MASK, 4, NO_ID), (OTHER, 0, NO_ID)];
    set_acl(&path, ACCESS, &entries).unwrap();
    assert_eq!(get_acl(&path, ACCESS), acl_bytes(&entries));
    assert_eq!(mode(&path), 0o640, "the mask shows as the group's rights");
    as_nobody(|| {
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        assert_eq!(errno(File::options().write(true).open(&path)), libc::EACCES);
    });
    assert_eq!(become_user(1234, 1234, &[], || errno(File::open(&path))), libc::EACCES);
    // chmod changes the mask, and with it what the user may.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(as_nobody(|| errno(File::open(&path))), libc::EACCES);
    let masked = [(USER_OBJ, 6, NO_ID), (USER, 4, NOBODY), (GROUP_OBJ, 0, NO_ID), (MASK, 0, NO_ID), (OTHER, 0, NO_ID)];
    assert_eq!(get_acl(&path, ACCESS), acl_bytes(&masked));
    let stranger = become_user(1234, 1234, &[], || set_acl(&path, ACCESS, &entries));
    assert_eq!(errno(stranger), libc::EPERM);
    assert_eq!(errno(set_acl(&path, ACCESS, &[(USER, 4, NOBODY)])), libc::EINVAL);
    rustix::fs::removexattr(&path, ACCESS).unwrap();
    assert_eq!(errno(rustix::fs::getxattr(&path, ACCESS, &mut [0_u8; 64][..])), libc::ENODATA);
}

fn acl_default(dir: &Path) {
    let directory = dir.join("directory");
    fs::create_dir(&directory).unwrap();
    let entries = [(USER_OBJ, 7, NO_ID), (USER, 6, NOBODY), (GROUP_OBJ, 5, NO_ID), (MASK, 7, NO_ID), (OTHER, 0, NO_ID)];
    set_acl(&directory, DEFAULT, &entries).unwrap();
    // The umask does not count where there is a default ACL.
    let file = File::options().write(true).create_new(true).mode(0o666).open(directory.join("file")).unwrap();
    drop(file);
    assert_eq!(mode(&directory.join("file")), 0o660);
    let made = [(USER_OBJ, 6, NO_ID), (USER, 6, NOBODY), (GROUP_OBJ, 5, NO_ID), (MASK, 6, NO_ID), (OTHER, 0, NO_ID)];
    assert_eq!(get_acl(&directory.join("file"), ACCESS), acl_bytes(&made));
    fs::create_dir(directory.join("sub")).unwrap();
    assert_eq!(get_acl(&directory.join("sub"), DEFAULT), acl_bytes(&entries));
    assert_eq!(mode(&directory.join("sub")), 0o770);
    set_acl(&directory, ACCESS, &[(USER_OBJ, 7, NO_ID), (GROUP_OBJ, 7, NO_ID), (OTHER, 7, NO_ID)]).unwrap();
    as_nobody(|| {
        File::options().read(true).write(true).open(directory.join("file")).unwrap();
        File::options().write(true).create_new(true).mode(0o644).open(directory.join("own")).unwrap();
    });
    assert_eq!(mode(&directory.join("own")), 0o640);
    assert_eq!(errno(set_acl(&directory.join("file"), DEFAULT, &entries)), libc::EACCES);
    rustix::fs::removexattr(&directory, DEFAULT).unwrap();
    fs::write(directory.join("plain"), "").unwrap();
    assert_eq!(mode(&directory.join("plain")), 0o644);
}

/// CVE-2016-7097: an owner outside the group who sets an ACL loses sgid.
fn acl_clears_sgid(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, "").unwrap();
    chown(&path, Some(NOBODY), Some(4242)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o2775)).unwrap();
    let entries = [(USER_OBJ, 7, NO_ID), (USER, 7, 1234), (GROUP_OBJ, 7, NO_ID), (MASK, 7, NO_ID), (OTHER, 5, NO_ID)];
    as_nobody(|| set_acl(&path, ACCESS, &entries).unwrap());
    assert_eq!(mode(&path), 0o775);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o2775)).unwrap();
    set_acl(&path, ACCESS, &entries).unwrap();
    assert_eq!(mode(&path), 0o2775, "root keeps it");
}
