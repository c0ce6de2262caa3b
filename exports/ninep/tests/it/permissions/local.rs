//! The operations by a thread of this host.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use ferry_vfs::{Errno, FileType, OFlags};
use rustix::fs::{AtFlags, Mode, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags};
use rustix::process::{Gid, Uid};

use super::{
    CONTENT, GID, MEMORY, Made, Op, Outcome, PAST, PIECE, Tree, UID, has_attributes, lines, names_of, value_of,
};

/// The directory on this host: made by root, used by a thread with only the user's ids.
pub(super) struct Local {
    path: PathBuf,
    root: Arc<OwnedFd>,
    _directory: tempfile::TempDir,
    /// Operations for the thread.
    user: mpsc::Sender<Op>,
    outcomes: mpsc::Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
}

impl Local {
    pub(super) fn new(groups: &[u32]) -> Self {
        let directory = tempfile::tempdir_in(MEMORY).unwrap();
        let path = directory.path().join("tree");
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
        Self { path, root, _directory: directory, user, outcomes, thread: Some(thread) }
    }

    pub(super) fn make(&self, at: &str, made: Made) {
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
                rustix::fs::setxattr(self.path.join(at), name, b"1", XattrFlags::empty()).unwrap();
            }
        }
    }

    pub(super) fn clear(&self) {
        for entry in std::fs::read_dir(&self.path).unwrap() {
            std::fs::remove_dir_all(entry.unwrap().path()).unwrap();
        }
    }

    pub(super) fn act(&self, op: Op) -> Outcome {
        self.user.send(op).unwrap();
        self.outcomes.recv().unwrap()
    }

    pub(super) fn tree(&self) -> Tree {
        let mut tree = Vec::new();
        let mut directories = vec![String::new()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(self.path.join(&directory)).unwrap() {
                let at = format!("{directory}{}", entry.unwrap().file_name().to_string_lossy());
                let path = self.path.join(&at);
                let st = rustix::fs::lstat(&path).unwrap();
                let kind = FileType::from_raw_mode(st.st_mode);
                let size = if kind == FileType::RegularFile { u64::try_from(st.st_size).unwrap() } else { 0 };
                let links = if kind == FileType::Directory { 0 } else { u32::try_from(st.st_nlink).unwrap() };
                let mut list = vec![0; 4096];
                let bytes = rustix::fs::llistxattr(&path, &mut list[..]).unwrap();
                tree.push((at.clone(), st.st_mode, st.st_uid, st.st_gid, size, links, names_of(&list[..bytes])));
                if kind == FileType::Directory {
                    directories.push(at + "/");
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
            rustix::fs::setxattr(path, name, value_of(name), XattrFlags::empty()).map(nothing)
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
