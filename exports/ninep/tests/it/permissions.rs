//! What a user may do whom the server stands in for: every operation on every kind of file in every kind of directory, compared with a
//! local thread of the same ids in a directory of the same files. Needs root, as the other user's files do.

use crate::common;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use common::{Client, Link, ROOT, Server, name};
use ferry_ninep::{Identity, Options, Users};
use ferry_vfs::{Errno, FileSystem, FileType, Name, OFlags, SetAttr, SetTime, Timespec, XattrFlags};
use ferry_wire::ninep::*;
use rustix::fs::{AtFlags, Mode, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags as HostXattrFlags};
use rustix::process::{Gid, Uid};

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

/// The directory on this host: made by root, used by a thread that is nobody but the user.
struct Local {
    path: PathBuf,
    root: Arc<OwnedFd>,
    _folder: tempfile::TempDir,
    /// Operations for the thread.
    user: mpsc::Sender<Op>,
    outcomes: mpsc::Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
}

impl Local {
    fn new(groups: &[u32]) -> Self {
        let folder = tempfile::tempdir_in(MEMORY).unwrap();
        let path = folder.path().join("tree");
        std::fs::create_dir(&path).unwrap();
        rustix::fs::chmod(&path, Mode::from_raw_mode(0o755)).unwrap();
        let root = Arc::new(rustix::fs::open(&path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap());
        let groups: Vec<Gid> = groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
        let ((user, ops), (told, outcomes)) = (mpsc::channel(), mpsc::channel());
        let of_thread = Arc::clone(&root);
        let thread = std::thread::spawn(move || {
            let (uid, gid) = (Uid::from_raw(UID), Gid::from_raw(GID));
            rustix::thread::set_thread_groups(&groups).unwrap();
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            for op in ops {
                if told.send(do_locally(&of_thread, op)).is_err() {
                    return;
                }
            }
        });
        Self { path, root, _folder: folder, user, outcomes, thread: Some(thread) }
    }

    fn make(&self, at: &str, made: Made) {
        let (dir, mode) = (self.root.as_fd(), Mode::from_raw_mode(made.mode));
        match made.kind {
            FileType::Directory => rustix::fs::mkdirat(dir, at, mode).unwrap(),
            FileType::Symlink => rustix::fs::symlinkat("target", dir, at).unwrap(),
            FileType::RegularFile => std::fs::write(self.path.join(at), CONTENT).unwrap(),
            kind => rustix::fs::mknodat(dir, at, kind, mode, 0).unwrap(),
        }
        let (uid, gid) = (Uid::from_raw(made.uid), Gid::from_raw(made.gid));
        rustix::fs::chownat(dir, at, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).unwrap();
        if made.kind != FileType::Symlink {
            rustix::fs::chmodat(dir, at, mode, AtFlags::empty()).unwrap();
        }
        if has_attributes(made.kind) {
            for name in ["user.a", "trusted.b"] {
                rustix::fs::setxattr(self.path.join(at), name, b"1", HostXattrFlags::empty()).unwrap();
            }
        }
    }

    fn clear(&self) {
        for entry in std::fs::read_dir(&self.path).unwrap() {
            std::fs::remove_dir_all(entry.unwrap().path()).unwrap();
        }
    }

    fn act(&self, op: Op) -> Outcome {
        self.user.send(op).unwrap();
        self.outcomes.recv().unwrap()
    }

    fn tree(&self) -> Tree {
        let mut tree = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(self.path.join(&folder)).unwrap() {
                let at = format!("{folder}{}", entry.unwrap().file_name().to_string_lossy());
                let path = self.path.join(&at);
                let st = rustix::fs::lstat(&path).unwrap();
                let kind = FileType::from_raw_mode(st.st_mode);
                let size = if kind == FileType::RegularFile { u64::try_from(st.st_size).unwrap() } else { 0 };
                let links = if kind == FileType::Directory { 0 } else { u32::try_from(st.st_nlink).unwrap() };
                let mut list = vec![0; 4096];
                let bytes = rustix::fs::llistxattr(&path, &mut list[..]).unwrap();
                tree.push((at.clone(), st.st_mode, st.st_uid, st.st_gid, size, links, names_of(&list[..bytes])));
                if kind == FileType::Directory {
                    folders.push(at + "/");
                }
            }
        }
        tree.sort();
        tree
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.user = mpsc::channel().0;
        drop(self.thread.take().map(JoinHandle::join));
    }
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

/// The operation by system calls of this thread.
fn do_locally(root: &OwnedFd, op: Op) -> Outcome {
    let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let open = |at: &str, more: OFlags| rustix::fs::openat(root, at, flags | more, Mode::empty());
    let nothing = |()| Vec::new();
    // By a name of what is there, which the calls for attributes follow.
    let path = || {
        let fd = rustix::fs::openat(root, "d/f", OFlags::PATH | flags, Mode::empty())?;
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        Ok::<_, Errno>((fd, path))
    };
    match op {
        Op::Stat => {
            rustix::fs::statat(root, "d/f", AtFlags::SYMLINK_NOFOLLOW).map(|st| st.st_mode.to_le_bytes().to_vec())
        }
        Op::Open(more) => open("d/f", more).map(|_| Vec::new()),
        Op::Read(more) => {
            let mut bytes = vec![0; 100];
            let count = rustix::io::pread(open("d/f", more)?, &mut bytes, 0)?;
            bytes.truncate(count);
            Ok(bytes)
        }
        Op::Write(more) => rustix::io::pwrite(open("d/f", more)?, PIECE, 0).map(|_| Vec::new()),
        Op::Cut => rustix::fs::ftruncate(open("d/f", OFlags::RDWR)?, 1).map(nothing),
        Op::Create(at, more, mode) => {
            rustix::fs::openat(root, at, flags | more | OFlags::CREATE, Mode::from_raw_mode(mode)).map(|_| Vec::new())
        }
        Op::Mkdir(mode) => rustix::fs::mkdirat(root, "d/new", Mode::from_raw_mode(mode)).map(nothing),
        Op::Mknod(mode, rdev) => {
            let device = rustix::fs::makedev(rdev >> 8, rdev & 0xff);
            let kind = FileType::from_raw_mode(mode);
            rustix::fs::mknodat(root, "d/new", kind, Mode::from_raw_mode(mode & 0o7777), device).map(nothing)
        }
        Op::Symlink => rustix::fs::symlinkat("x", root, "d/new").map(nothing),
        Op::Link(from, to) => rustix::fs::linkat(root, from, root, to, AtFlags::empty()).map(nothing),
        Op::Unlink => rustix::fs::unlinkat(root, "d/f", AtFlags::empty()).map(nothing),
        Op::Rmdir => rustix::fs::unlinkat(root, "d/f", AtFlags::REMOVEDIR).map(nothing),
        Op::Rename(from, to) => rustix::fs::renameat(root, from, root, to).map(nothing),
        Op::Chmod(mode) => rustix::fs::chmodat(root, "d/f", Mode::from_raw_mode(mode), AtFlags::empty()).map(nothing),
        Op::Chown(uid, gid) => {
            let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
            rustix::fs::chownat(root, "d/f", uid, gid, AtFlags::SYMLINK_NOFOLLOW).map(nothing)
        }
        // As truncate(2), but for files that it does not take.
        Op::Truncate => rustix::fs::ftruncate(open("d/f", OFlags::WRONLY)?, 0).map(nothing),
        Op::Times(atime, mtime) => {
            let time = |time: Option<bool>| match time {
                None => rustix::fs::Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
                Some(true) => rustix::fs::Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
                Some(false) => rustix::fs::Timespec { tv_sec: PAST, tv_nsec: 0 },
            };
            let times = Timestamps { last_access: time(atime), last_modification: time(mtime) };
            rustix::fs::utimensat(root, "d/f", &times, AtFlags::SYMLINK_NOFOLLOW).map(nothing)
        }
        Op::Getxattr(name) => {
            let (_fd, path) = path()?;
            let mut value = vec![0; 100];
            let bytes = rustix::fs::getxattr(path, name, &mut value[..])?;
            value.truncate(bytes);
            Ok(value)
        }
        Op::Setxattr(name) => {
            let (_fd, path) = path()?;
            rustix::fs::setxattr(path, name, value_of(name), HostXattrFlags::empty()).map(nothing)
        }
        Op::Removexattr(name) => {
            let (_fd, path) = path()?;
            rustix::fs::removexattr(path, name).map(nothing)
        }
        Op::Listxattr => {
            let (_fd, path) = path()?;
            let mut list = vec![0; 4096];
            let bytes = rustix::fs::listxattr(path, &mut list[..])?;
            Ok(lines(names_of(&list[..bytes])))
        }
        Op::List => {
            let dir = rustix::fs::Dir::new(open("d", OFlags::DIRECTORY)?)?;
            let names = dir.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
            Ok(lines(names.collect()))
        }
        Op::Readlink => rustix::fs::readlinkat(root, "d/f", Vec::new()).map(|target| target.into_bytes()),
    }
}

/// A source that is served as the user, and for root, who makes its files.
struct Remote {
    root: Client<Link>,
    user: Client<Link>,
    _servers: [Server; 2],
}

impl Remote {
    fn new(source: &Arc<dyn FileSystem>, users: Users) -> Self {
        let for_root = Server::of(Arc::clone(source), Options::default());
        let for_user = Server::of(Arc::clone(source), Options { users, ..Options::default() });
        let mut root = for_root.attached(0);
        set(&mut root, ROOT, SetAttr { mode: Some(0o755), ..SetAttr::default() }).unwrap();
        Self { root, user: for_user.attached(UID), _servers: [for_root, for_user] }
    }

    fn make(&mut self, at: &str, made: Made) {
        let root = &mut self.root;
        let (folder, file) = at.rsplit_once('/').unwrap_or(("", at));
        root.walk(ROOT, Fid(1), folder).unwrap();
        let (dir, name_of) = (Fid(1), name(file));
        let mode = made.mode;
        match made.kind {
            FileType::Directory => root.ok(&Request::Mkdir { dir, name: name_of, mode, gid: 0 }),
            FileType::Symlink => root.ok(&Request::Symlink { dir, name: name_of, target: b"target", gid: 0 }),
            kind => root.ok(&Request::Mknod { dir, name: name_of, mode: kind.as_raw_mode() | mode, rdev: 0, gid: 0 }),
        }
        .unwrap();
        root.walk(dir, Fid(2), file).unwrap();
        if made.kind == FileType::RegularFile {
            root.walk(Fid(2), Fid(3), "").unwrap();
            root.open(Fid(3), OFlags::WRONLY).unwrap();
            root.write(Fid(3), 0, CONTENT).unwrap();
            clunk(root, Fid(3));
        }
        set(root, Fid(2), SetAttr { uid: Some(made.uid), gid: Some(made.gid), ..SetAttr::default() }).unwrap();
        if made.kind != FileType::Symlink {
            set(root, Fid(2), SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
        }
        if has_attributes(made.kind) {
            for name in ["user.a", "trusted.b"] {
                set_xattr(root, Fid(2), name, b"1").unwrap();
            }
        }
        clunk(root, Fid(2));
        clunk(root, Fid(1));
    }

    /// Removes everything below a directory.
    fn clear(&mut self, at: &str) {
        for (file, is_dir) in list(&mut self.root, at) {
            let path = format!("{at}/{file}");
            if is_dir {
                self.clear(&path);
            }
            self.root.walk(ROOT, Fid(1), at).unwrap();
            self.root.ok(&Request::Unlinkat { dir: Fid(1), name: name(&file), is_dir }).unwrap();
            clunk(&mut self.root, Fid(1));
        }
    }

    fn tree(&mut self) -> Tree {
        let mut tree = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for (file, is_dir) in list(&mut self.root, &folder) {
                let at = format!("{folder}{file}");
                self.root.walk(ROOT, Fid(1), &at).unwrap();
                let attr = self.root.getattr(Fid(1)).unwrap().attr;
                let size = if attr.kind() == FileType::RegularFile { attr.size } else { 0 };
                let links = if is_dir { 0 } else { attr.nlink };
                let names = value(&mut self.root, Fid(1), "").map(|list| names_of(&list)).unwrap_or_default();
                tree.push((at.clone(), attr.mode, attr.uid, attr.gid, size, links, names));
                clunk(&mut self.root, Fid(1));
                if is_dir {
                    folders.push(at + "/");
                }
            }
        }
        tree.sort();
        tree
    }

    /// The operation by messages of the user's client.
    fn act(&mut self, op: Op) -> Outcome {
        let mut fids = Fids { client: &mut self.user, made: Vec::new() };
        let outcome = fids.act(op);
        let made = std::mem::take(&mut fids.made);
        made.into_iter().for_each(|fid| clunk(&mut self.user, fid));
        outcome
    }
}

fn set(client: &mut Client<Link>, fid: Fid, set: SetAttr) -> Result<(), Errno> {
    client.ok(&Request::Setattr { fid, set, ctime: false })
}

fn clunk(client: &mut Client<Link>, fid: Fid) {
    // It ends in any case.
    let _ = client.ok(&Request::Clunk { fid });
}

/// The value of an attribute, or the list of their names.
fn value(client: &mut Client<Link>, fid: Fid, name: &str) -> Outcome {
    client.ok(&Request::Xattrwalk { fid, new_fid: Fid(90), name: name.as_bytes() })?;
    let value = client.read(Fid(90), 0, 4096);
    clunk(client, Fid(90));
    value
}

fn set_xattr(client: &mut Client<Link>, fid: Fid, name: &str, value: &[u8]) -> Result<(), Errno> {
    let flags = if value.is_empty() { XattrFlags::REPLACE } else { XattrFlags::empty() };
    client.walk(fid, Fid(91), "")?;
    let made =
        client.ok(&Request::Xattrcreate { fid: Fid(91), name: name.as_bytes(), bytes: value.len() as u64, flags });
    if made.is_ok() && !value.is_empty() {
        client.write(Fid(91), 0, value)?;
    }
    let ended = client.ok(&Request::Clunk { fid: Fid(91) });
    made.and(ended)
}

/// The names in a directory, and whether each is one.
fn list(client: &mut Client<Link>, at: &str) -> Vec<(String, bool)> {
    client.open_path(Fid(80), at, OFlags::RDONLY).unwrap();
    let entries = client.readdir(Fid(80), 0, 60_000).unwrap();
    clunk(client, Fid(80));
    let entries = entries.into_iter().filter(|(name, ..)| !matches!(name.as_str(), "." | ".."));
    entries.map(|(name, _, qid)| (name, qid.kind == QidKind::DIR)).collect()
}

/// Fids of one operation.
struct Fids<'a> {
    client: &'a mut Client<Link>,
    made: Vec<Fid>,
}

impl Fids<'_> {
    /// Walks name by name, so that the error of each is told.
    fn walk(&mut self, path: &str) -> Result<Fid, Errno> {
        let mut at = ROOT;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let fid = Fid(10 + u32::try_from(self.made.len()).unwrap());
            self.client.walk(at, fid, part)?;
            self.made.push(fid);
            at = fid;
        }
        if at == ROOT {
            let fid = Fid(10 + u32::try_from(self.made.len()).unwrap());
            self.client.walk(ROOT, fid, "")?;
            self.made.push(fid);
            at = fid;
        }
        Ok(at)
    }

    fn parent<'p>(&mut self, path: &'p str) -> Result<(Fid, Name<'p>), Errno> {
        let (folder, file) = path.rsplit_once('/').unwrap();
        Ok((self.walk(folder)?, name(file)))
    }

    fn act(&mut self, op: Op) -> Outcome {
        let nothing = |()| Vec::new();
        // That the server sends, though Linux's client does it by itself.
        let open = |fids: &mut Self, flags| {
            let fid = fids.walk("d/f")?;
            fids.client.open(fid, flags).map(|_| fid)
        };
        match op {
            Op::Stat => {
                let fid = self.walk("d/f")?;
                self.client.getattr(fid).map(|found| found.attr.mode.to_le_bytes().to_vec())
            }
            Op::Open(flags) => open(self, flags).map(|_| Vec::new()),
            Op::Read(flags) => {
                let fid = open(self, flags)?;
                self.client.read(fid, 0, 100)
            }
            Op::Write(flags) => {
                let fid = open(self, flags)?;
                self.client.write(fid, 0, PIECE).map(|_| Vec::new())
            }
            Op::Cut => {
                let fid = open(self, OFlags::RDWR)?;
                set(self.client, fid, SetAttr { size: Some(1), ..SetAttr::default() }).map(nothing)
            }
            Op::Create(at, flags, mode) => {
                let (fid, name) = self.parent(at)?;
                self.client.ok(&Request::Create { fid, name, flags, mode, gid: GID }).map(nothing)
            }
            Op::Mkdir(mode) => {
                let (dir, name) = self.parent("d/new")?;
                self.client.ok(&Request::Mkdir { dir, name, mode, gid: GID }).map(nothing)
            }
            Op::Mknod(mode, rdev) => {
                let (dir, name) = self.parent("d/new")?;
                self.client.ok(&Request::Mknod { dir, name, mode, rdev, gid: GID }).map(nothing)
            }
            Op::Symlink => {
                let (dir, name) = self.parent("d/new")?;
                self.client.ok(&Request::Symlink { dir, name, target: b"x", gid: GID }).map(nothing)
            }
            Op::Link(from, to) => {
                let fid = self.walk(from)?;
                let (dir, name) = self.parent(to)?;
                self.client.ok(&Request::Link { dir, fid, name }).map(nothing)
            }
            Op::Unlink | Op::Rmdir => {
                let (dir, name) = self.parent("d/f")?;
                self.client.ok(&Request::Unlinkat { dir, name, is_dir: matches!(op, Op::Rmdir) }).map(nothing)
            }
            Op::Rename(from, to) => {
                let ((dir, name), (new_dir, new_name)) = (self.parent(from)?, self.parent(to)?);
                self.client.ok(&Request::Renameat { dir, name, new_dir, new_name }).map(nothing)
            }
            Op::Chmod(mode) => self.set(SetAttr { mode: Some(mode), ..SetAttr::default() }),
            Op::Chown(uid, gid) => self.set(SetAttr { uid, gid, ..SetAttr::default() }),
            Op::Truncate => self.set(SetAttr { size: Some(0), ..SetAttr::default() }),
            Op::Times(atime, mtime) => {
                let past = SetTime::At(Timespec { sec: PAST, nsec: 0 });
                let time = |time: Option<bool>| time.map(|is_now| if is_now { SetTime::Now } else { past });
                self.set(SetAttr { atime: time(atime), mtime: time(mtime), ..SetAttr::default() })
            }
            Op::Getxattr(name) => {
                let fid = self.walk("d/f")?;
                value(self.client, fid, name)
            }
            Op::Setxattr(name) | Op::Removexattr(name) => {
                let fid = self.walk("d/f")?;
                let value = if matches!(op, Op::Setxattr(_)) { value_of(name) } else { b"" };
                set_xattr(self.client, fid, name, value).map(nothing)
            }
            Op::Listxattr => {
                let fid = self.walk("d/f")?;
                value(self.client, fid, "").map(|list| lines(names_of(&list)))
            }
            Op::List => {
                let fid = self.walk("d")?;
                self.client.open(fid, OFlags::RDONLY)?;
                let names = self.client.readdir(fid, 0, 60_000)?;
                Ok(lines(names.into_iter().map(|(name, ..)| name).collect()))
            }
            Op::Readlink => {
                let fid = self.walk("d/f")?;
                self.client.get(&Request::Readlink { fid }, |reply| match reply {
                    Reply::Readlink { target } => Some(target.to_vec()),
                    _ => None,
                })
            }
        }
    }

    fn set(&mut self, attributes: SetAttr) -> Outcome {
        let fid = self.walk("d/f")?;
        set(self.client, fid, attributes).map(|()| Vec::new())
    }
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
        eprintln!("not run: it takes root to make files of others");
    }
    is_root
}

fn dir(at: &str) -> (Arc<dyn FileSystem>, tempfile::TempDir) {
    let folder = tempfile::tempdir_in(at).unwrap();
    let path = folder.path().join("shared");
    std::fs::create_dir(&path).unwrap();
    (Arc::new(ferry_dir::Dir::open(&path, ferry_dir::Options::default()).unwrap()), folder)
}

fn mem() -> Arc<dyn FileSystem> {
    Arc::new(ferry_mem::Mem::new(&ferry_mem::Options { size_bytes: Some(64 << 20), ..Default::default() }).unwrap())
}

fn pmem() -> (Arc<dyn FileSystem>, tempfile::TempDir) {
    let folder = tempfile::tempdir_in(MEMORY).unwrap();
    let options = ferry_mem::pmem::Options { size_bytes: Some(64 << 20), ..Default::default() };
    File::create(folder.path().join("image")).unwrap();
    (Arc::new(ferry_mem::pmem::open(&folder.path().join("image"), &options).unwrap()), folder)
}

#[test]
fn a_user_may_do_in_each_directory_what_a_local_one_may() {
    if is_root() {
        compare(&dir(MEMORY).0, &[], &each_dir());
        compare(&mem(), &[], &each_dir());
    }
}

#[test]
fn a_user_may_do_with_each_file_what_a_local_one_may() {
    if is_root() {
        compare(&dir(MEMORY).0, &[GROUP], &each_file());
    }
}

#[test]
fn a_user_may_do_with_each_file_in_memory_what_a_local_one_may() {
    if is_root() {
        compare(&mem(), &[GROUP], &each_file());
    }
}

#[test]
#[ignore = "takes minutes"]
fn a_user_may_do_on_every_source_what_a_local_one_may() {
    if is_root() {
        for groups in [&[][..], &[GROUP]] {
            let ((dir, _kept), (pmem, _too)) = (dir("/var/tmp"), pmem());
            for source in [dir, mem(), pmem] {
                compare(&source, groups, &all());
            }
        }
    }
}
