//! What a user may do whom the server stands in for: every operation on every kind of file in every kind of directory, compared with a
//! local thread of the same ids in a directory of the same files. Needs root, as the other user's files do.

use std::fs::File;
use std::sync::Arc;

use ferry_ninep::{Identity, Users};
use ferry_vfs::{Errno, FileSystem, FileType, OFlags};

use local::Local;
use remote::Remote;

mod local;
mod remote;

const UID: u32 = 1000;
const GID: u32 = 100;
/// The user's other group, where there is one.
const GROUP: u32 = 200;
/// A group of others.
const OTHERS: u32 = 300;

/// Where files are made: many, and for a moment.
const MEMORY: &str = "/dev/shm";

/// A file, as it is made for a case.
#[derive(Clone, Copy, Debug)]
struct Made {
    kind: FileType,
    uid: u32,
    gid: u32,
    mode: u32,
}

const fn made(kind: FileType, uid: u32, gid: u32, mode: u32) -> Made {
    Made { kind, uid, gid, mode }
}

const OWN: Made = made(FileType::Directory, UID, GID, 0o755);

/// The directory `d`.
const DIRS: [Made; 9] = [
    OWN,
    made(FileType::Directory, 0, 0, 0o777),
    made(FileType::Directory, 0, 0, 0o1777),
    made(FileType::Directory, UID, GID, 0o1777),
    made(FileType::Directory, 0, 0, 0o700),
    made(FileType::Directory, 0, 0, 0o755),
    made(FileType::Directory, 0, OTHERS, 0o2777),
    made(FileType::Directory, 0, GROUP, 0o2775),
    made(FileType::Directory, 0, 0, 0o766),
];

/// The file `d/f`.
fn files() -> Vec<Made> {
    let owners = [(UID, GID), (UID, OTHERS), (0, 0), (2000, GID), (0, GROUP)];
    let modes = [0o600, 0o644, 0o666, 0o606, 0o4755, 0o4777, 0o2755, 0o2777, 0o2745, 0o2767];
    let regular =
        owners.iter().flat_map(|(uid, gid)| modes.iter().map(|mode| made(FileType::RegularFile, *uid, *gid, *mode)));
    let others = [
        OWN,
        made(FileType::Directory, 0, 0, 0o755),
        made(FileType::Directory, 0, 0, 0o777),
        made(FileType::Directory, 0, 0, 0o1777),
        made(FileType::Directory, UID, OTHERS, 0o2755),
        made(FileType::Symlink, 0, 0, 0o777),
        made(FileType::Symlink, UID, GID, 0o777),
        made(FileType::Fifo, 0, 0, 0o666),
        made(FileType::Fifo, UID, OTHERS, 0o644),
    ];
    regular.chain(others).collect()
}

/// One thing to do.
#[derive(Clone, Copy, Debug)]
enum Op {
    Stat,
    /// Opens, and then reads or writes, or sets the length by what is open.
    Open(OFlags),
    Read(OFlags),
    Write(OFlags),
    Cut,
    Create(&'static str, OFlags, u32),
    Mkdir(u32),
    Mknod(u32, u32),
    Symlink,
    Link(&'static str, &'static str),
    Unlink,
    Rmdir,
    Rename(&'static str, &'static str),
    Chmod(u32),
    Chown(Option<u32>, Option<u32>),
    Truncate,
    Times(Option<bool>, Option<bool>),
    Getxattr(&'static str),
    Setxattr(&'static str),
    Removexattr(&'static str),
    Listxattr,
    List,
    Readlink,
}

fn ops() -> Vec<Op> {
    let (read, write, both) = (OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR);
    let mut ops = vec![
        Op::Stat,
        Op::Cut,
        Op::Symlink,
        Op::Unlink,
        Op::Rmdir,
        Op::Truncate,
        Op::Listxattr,
        Op::List,
        Op::Readlink,
    ];
    let opens = [
        read,
        write,
        both,
        read | OFlags::TRUNC,
        write | OFlags::TRUNC,
        read | OFlags::NOATIME,
        write | OFlags::APPEND,
    ];
    ops.extend(opens.map(Op::Open));
    ops.extend([read, write, both].map(Op::Read));
    ops.extend([read, write, both].map(Op::Write));
    for mode in [0o644, 0o2755, 0o6777, 0o2745] {
        ops.extend([Op::Create("d/new", both | OFlags::EXCL, mode), Op::Mkdir(mode), Op::Mknod(0o100_000 | mode, 0)]);
    }
    ops.extend([
        Op::Create("d/f", both, 0o644),
        Op::Create("d/f", read, 0o644),
        Op::Create("d/f", both | OFlags::EXCL, 0o644),
    ]);
    ops.extend([
        Op::Mknod(0o010_644, 0),
        Op::Mknod(0o020_666, 0x103),
        Op::Mknod(0o020_666, 0),
        Op::Mknod(0o060_666, 0),
    ]);
    ops.extend([Op::Link("d/f", "own/l"), Op::Link("d/f", "d/l"), Op::Link("own/g", "d/l")]);
    ops.extend(
        [("d/f", "d/n"), ("d/f", "own/n"), ("own/g", "d/n"), ("own/g", "d/t"), ("d/f", "own/g")]
            .map(|(from, to)| Op::Rename(from, to)),
    );
    ops.extend([0o755, 0o2755, 0o2745, 0o4755, 0o6711, 0o1777].map(Op::Chmod));
    let ids = [
        (Some(UID), None),
        (Some(0), None),
        (Some(2000), None),
        (None, Some(GID)),
        (None, Some(GROUP)),
        (None, Some(OTHERS)),
        (None, Some(0)),
        (Some(UID), Some(GID)),
    ];
    ops.extend(ids.map(|(uid, gid)| Op::Chown(uid, gid)));
    let times = [
        (Some(true), Some(true)),
        (Some(false), Some(false)),
        (Some(true), None),
        (None, Some(true)),
        (None, Some(false)),
        (Some(true), Some(false)),
    ];
    ops.extend(times.map(|(atime, mtime)| Op::Times(atime, mtime)));
    ops.extend(["user.a", "trusted.b", "security.c", "user.none"].map(Op::Getxattr));
    ops.extend(["user.a", "user.new", "trusted.b", "security.c", "system.posix_acl_access"].map(Op::Setxattr));
    ops.extend(["user.a", "trusted.b"].map(Op::Removexattr));
    ops
}

/// What is left after a case: each name with type, mode, owner, group, length, links, and names of attributes.
type Tree = Vec<(String, u32, u32, u32, u64, u32, Vec<String>)>;
/// What came of an operation, beside the error: what was read or listed.
type Outcome = Result<Vec<u8>, Errno>;

const PIECE: &[u8] = b"12";
const CONTENT: &[u8] = b"text";
const PAST: i64 = 1_000_000;

/// The names of a list of attributes, without those that file systems and security modules add.
fn names_of(list: &[u8]) -> Vec<String> {
    let names = list.split(|byte| *byte == 0).map(|name| String::from_utf8_lossy(name).into_owned());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("user.") || name.starts_with("trusted.b")).collect();
    names.sort();
    names
}

fn lines(mut names: Vec<String>) -> Vec<u8> {
    names.sort();
    names.join("\n").into_bytes()
}

/// What an attribute is set to: an ACL says what a mode of 0645 does (`linux/posix_acl_xattr.h`).
fn value_of(name: &str) -> &'static [u8] {
    match name.starts_with("system.") {
        true => b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x04\0\x04\0\xff\xff\xff\xff\x20\0\x05\0\xff\xff\xff\xff",
        false => b"2",
    }
}

/// Attributes of the user's are for these only.
fn has_attributes(kind: FileType) -> bool {
    matches!(kind, FileType::RegularFile | FileType::Directory)
}

/// Whether both refuse, for another of several reasons.
fn is_refused_otherwise(local: &Outcome, remote: &Outcome) -> bool {
    let pair = (local.as_ref().err().copied(), remote.as_ref().err().copied());
    matches!(pair, (Some(Errno::EXIST | Errno::ISDIR | Errno::NOTDIR), Some(Errno::ACCESS)))
}

/// Whether a host that does not protect hard links lets through what is refused here.
fn is_unprotected(op: Op, local: &Outcome, remote: &Outcome) -> bool {
    let is_off =
        |what: &str| std::fs::read_to_string(format!("/proc/sys/fs/{what}")).is_ok_and(|text| text.trim() == "0");
    match (op, local, remote) {
        (Op::Link(..), Ok(_), Err(Errno::PERM)) => is_off("protected_hardlinks"),
        (Op::Create(..), Ok(_), Err(Errno::ACCESS)) => is_off("protected_regular"),
        _ => false,
    }
}

/// A tree without the bits that mark files for locking: whether they stay when somebody writes is for the source to say.
fn without_marks(mut tree: Tree) -> Tree {
    for (_, mode, ..) in &mut tree {
        let is_mark = FileType::from_raw_mode(*mode) == FileType::RegularFile && *mode & 0o2010 == 0o2000;
        *mode &= if is_mark { !0o2000 } else { !0 };
    }
    tree
}

/// What a 9P server does not do for its client, whose kernel opens these on its own, or answers on its own.
fn is_the_clients(op: Op, file: Made) -> bool {
    let opens = matches!(op, Op::Open(_) | Op::Read(_) | Op::Write(_) | Op::Cut | Op::Truncate | Op::Create("d/f", ..));
    let is_special = !matches!(file.kind, FileType::RegularFile | FileType::Directory);
    // open(2) of a directory for reading is Tlopen, but pread(2) and the rest are refused by the client.
    let is_of_links = file.kind == FileType::Symlink
        && matches!(op, Op::Chmod(_) | Op::Getxattr(_) | Op::Setxattr(_) | Op::Removexattr(_) | Op::Readlink);
    (opens && is_special) || is_of_links
}

/// Compares all operations in some directories and files.
fn compare(source: &Arc<dyn FileSystem>, groups: &[u32], cases: &[(Made, Made)]) {
    ferry_alone::clear_umask();
    let users = match groups {
        [] => Users::Squash { uid: UID, gid: GID },
        groups => Users::Only(vec![Identity { uid: UID, gid: GID, groups: groups.to_vec() }]),
    };
    let (local, mut remote) = (Local::new(groups), Remote::new(source, users));
    let mut differences = Vec::new();
    for (dir, file) in cases {
        let mut is_fresh = false;
        for op in ops() {
            if is_the_clients(op, *file) {
                continue;
            }
            if !is_fresh {
                local.clear();
                remote.clear("");
                let files =
                    [("d", *dir), ("d/f", *file), ("d/t", made(FileType::RegularFile, 0, 0, 0o644)), ("own", OWN)];
                let own = ("own/g", made(FileType::RegularFile, UID, GID, 0o644));
                for (at, made) in files.into_iter().chain([own]) {
                    local.make(at, made);
                    remote.make(at, made);
                }
            }
            let (here, there) = (local.act(op), remote.act(op));
            is_fresh = here.is_err() && there.is_err();
            if is_unprotected(op, &here, &there) || is_refused_otherwise(&here, &there) {
                continue;
            }
            if here != there {
                differences.push(format!("{op:?} of {file:?} in {dir:?}: {here:?} locally, {there:?} by 9P"));
            } else if here.is_ok() {
                let writes = matches!(op, Op::Open(_) | Op::Write(_) | Op::Cut | Op::Truncate | Op::Create("d/f", ..));
                let shown = if writes { without_marks } else { std::convert::identity };
                let (here, there) = (shown(local.tree()), shown(remote.tree()));
                if here != there {
                    differences.push(format!("{op:?} of {file:?} in {dir:?} leaves {here:?} locally, {there:?} by 9P"));
                }
            }
        }
    }
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
}

/// Each directory with one file.
fn each_dir() -> Vec<(Made, Made)> {
    DIRS.iter().map(|dir| (*dir, made(FileType::RegularFile, 0, 0, 0o644))).collect()
}

/// Some files of the user and of root in one directory.
fn each_file() -> Vec<(Made, Made)> {
    let is_quick = |file: &Made| {
        let is_some = matches!(file.mode & 0o7777, 0o600 | 0o644 | 0o666 | 0o4777 | 0o2777 | 0o2745);
        matches!((file.uid, file.gid), (UID, _) | (0, 0)) && (is_some || file.kind != FileType::RegularFile)
    };
    let files = files().into_iter().filter(is_quick);
    files.map(|file| (DIRS[1], file)).collect()
}

/// All.
fn all() -> Vec<(Made, Made)> {
    DIRS.iter().flat_map(|dir| files().into_iter().map(|file| (*dir, file))).collect()
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        ferry_skip::skip!("needs root, to make files of others");
    }
    is_root
}

fn dir(at: &str) -> (Arc<dyn FileSystem>, tempfile::TempDir) {
    let directory = tempfile::tempdir_in(at).unwrap();
    let path = directory.path().join("shared");
    std::fs::create_dir(&path).unwrap();
    (Arc::new(ferry_dir::Dir::open(&path, ferry_dir::Options::default()).unwrap()), directory)
}

fn mem() -> Arc<dyn FileSystem> {
    Arc::new(ferry_mem::Mem::new(&ferry_mem::Options { size_bytes: Some(64 << 20), ..Default::default() }).unwrap())
}

fn pmem() -> (Arc<dyn FileSystem>, tempfile::TempDir) {
    let directory = tempfile::tempdir_in(MEMORY).unwrap();
    let options = ferry_mem::pmem::Options { size_bytes: Some(64 << 20), ..Default::default() };
    File::create(directory.path().join("image")).unwrap();
    (Arc::new(ferry_mem::pmem::open(&directory.path().join("image"), &options).unwrap()), directory)
}

#[test]
fn directory_permissions_equal_those_of_a_local_user() {
    if is_root() {
        compare(&dir(MEMORY).0, &[], &each_dir());
        compare(&mem(), &[], &each_dir());
    }
}

#[test]
fn file_permissions_equal_those_of_a_local_user() {
    if is_root() {
        compare(&dir(MEMORY).0, &[GROUP], &each_file());
    }
}

#[test]
fn file_permissions_in_memory_equal_those_of_a_local_user() {
    if is_root() {
        compare(&mem(), &[GROUP], &each_file());
    }
}

#[test]
#[ignore = "takes minutes"]
fn permissions_on_every_source_equal_those_of_a_local_user() {
    if is_root() {
        for groups in [&[][..], &[GROUP]] {
            let ((dir, _kept), (pmem, _too)) = (dir("/var/tmp"), pmem());
            for source in [dir, mem(), pmem] {
                compare(&source, groups, &all());
            }
        }
    }
}
