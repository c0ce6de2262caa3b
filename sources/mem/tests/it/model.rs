//! Random operations on a memory file system and on a tmpfs of the host: the same outcomes, errors and trees.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use common::{Share, both, name, new};
use ferry_mem::Options;
use ferry_vfs::*;
use proptest::prelude::*;
use rustix::fs::{AtFlags, Mode, Timestamps};

/// A directory out of three and a name out of four: operations meet often.
type At = (u8, u8);

#[derive(Clone, Debug)]
enum Step {
    Create(At, u32),
    Mkdir(At, u32),
    Fifo(At),
    Symlink(At),
    Link(At, At),
    Unlink(At),
    Rmdir(At),
    Rename(At, At, u8),
    Write(At, u16, u8),
    Append(At, u8),
    Truncate(At, u16),
    Punch(At, u16, u16),
    Allocate(At, u16, u16, bool),
    Chmod(At, u32),
    Chown(At, u32),
    Times(At, u32),
    SetXattr(At, u8, u8),
    RemoveXattr(At, u8),
}

/// What a step says: nothing, or an error.
type Outcome = std::result::Result<u64, Errno>;

const DIRS: [&str; 3] = ["", "d0", "d0/d1"];

fn at() -> impl Strategy<Value = At> {
    (0_u8..3, 0_u8..4)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (at(), 0_u32..0o10000).prop_map(|(at, mode)| Step::Create(at, mode)),
        3 => (at(), 0_u32..0o1000).prop_map(|(at, mode)| Step::Mkdir(at, mode)),
        1 => at().prop_map(Step::Fifo),
        1 => at().prop_map(Step::Symlink),
        2 => (at(), at()).prop_map(|(from, to)| Step::Link(from, to)),
        2 => at().prop_map(Step::Unlink),
        2 => at().prop_map(Step::Rmdir),
        4 => (at(), at(), 0_u8..4).prop_map(|(from, to, flags)| Step::Rename(from, to, flags)),
        3 => (at(), any::<u16>(), any::<u8>()).prop_map(|(at, offset, byte)| Step::Write(at, offset, byte)),
        1 => (at(), any::<u8>()).prop_map(|(at, byte)| Step::Append(at, byte)),
        2 => (at(), any::<u16>()).prop_map(|(at, size)| Step::Truncate(at, size)),
        1 => (at(), any::<u16>(), any::<u16>()).prop_map(|(at, offset, len)| Step::Punch(at, offset, len)),
        1 => (at(), any::<u16>(), any::<u16>(), any::<bool>())
            .prop_map(|(at, offset, len, keep)| Step::Allocate(at, offset, len, keep)),
        2 => (at(), 0_u32..0o10000).prop_map(|(at, mode)| Step::Chmod(at, mode)),
        1 => (at(), 0_u32..3).prop_map(|(at, uid)| Step::Chown(at, uid)),
        1 => (at(), any::<u32>()).prop_map(|(at, time)| Step::Times(at, time)),
        1 => (at(), 0_u8..3, any::<u8>()).prop_map(|(at, name, value)| Step::SetXattr(at, name, value)),
        1 => (at(), 0_u8..3).prop_map(|(at, name)| Step::RemoveXattr(at, name)),
    ]
}

/// The names that directories have are among those that steps use, so that these are moved and removed too.
fn word(index: u8) -> &'static str {
    ["d0", "d1", "a", "b"][usize::from(index)]
}

fn xattr(index: u8) -> &'static str {
    ["trusted.a", "security.b", "trusted.c"][usize::from(index)]
}

fn rename_flags(flags: u8) -> RenameFlags {
    [RenameFlags::empty(), RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE][usize::from(flags)]
}

impl Share {
    fn step(&self, step: &Step) -> Outcome {
        let (fs, cx) = (&self.fs, &self.cx);
        let dir = |at: At| {
            let entry = self.walk(DIRS[usize::from(at.0)])?;
            self.forget(entry.ino);
            if entry.attr.kind() == FileType::Directory { Ok(entry.ino) } else { Err(Errno::NOTDIR) }
        };
        let find = |at: At| {
            let entry = fs.lookup(cx, dir(at)?, name(word(at.1)))?;
            self.forget(entry.ino);
            Ok::<_, Errno>(entry)
        };
        let done = |entry: Entry| self.forget(entry.ino);
        let opened = |at: At, f: &dyn Fn(Ino, Handle) -> Outcome| {
            let ino = find(at)?.ino;
            let handle = fs.open(cx, ino, OFlags::RDWR)?;
            let outcome = f(ino, handle);
            fs.release(cx, ino, handle);
            outcome
        };
        let set = |at: At, set: SetAttr| fs.setattr(cx, find(at)?.ino, None, &set).map(|_| 0);
        match *step {
            Step::Create(at, mode) => {
                let (entry, handle) =
                    fs.create(cx, dir(at)?, name(word(at.1)), &new(mode), OFlags::RDWR | OFlags::EXCL)?;
                fs.release(cx, entry.ino, handle);
                done(entry);
            }
            Step::Mkdir(at, mode) => done(fs.mkdir(cx, dir(at)?, name(word(at.1)), &new(mode))?),
            Step::Fifo(at) => done(fs.mknod(cx, dir(at)?, name(word(at.1)), &new(0o10644))?),
            Step::Symlink(at) => done(fs.symlink(cx, dir(at)?, name(word(at.1)), b"target")?),
            Step::Link(from, to) => done(fs.link(cx, find(from)?.ino, dir(to)?, name(word(to.1)))?),
            Step::Unlink(at) => fs.unlink(cx, dir(at)?, name(word(at.1)))?,
            Step::Rmdir(at) => fs.rmdir(cx, dir(at)?, name(word(at.1)))?,
            Step::Rename(from, to, flags) => {
                let (from, to) = ((dir(from)?, name(word(from.1))), (dir(to)?, name(word(to.1))));
                fs.rename(cx, from, to, rename_flags(flags))?;
            }
            Step::Write(at, offset, byte) => {
                return opened(at, &|ino, handle| {
                    // Often enough for the file to be mapped meanwhile.
                    let write = || self.write((ino, handle), offset.into(), &[byte; 3000]);
                    (0..9).try_for_each(|_| write().map(drop))?;
                    write().map(|count| count as u64)
                });
            }
            Step::Append(at, byte) => {
                return opened(at, &|ino, handle| {
                    let at = common::range(ino, handle, 0, 300, OFlags::RDWR | OFlags::APPEND);
                    self.write_at(&at, &[byte; 300]).map(|count| count as u64)
                });
            }
            Step::Truncate(at, size) => {
                let kind = find(at)?.attr.kind();
                if kind == FileType::RegularFile {
                    set(at, SetAttr { size: Some(size.into()), ..SetAttr::default() })?;
                }
            }
            Step::Punch(at, offset, len) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                return opened(at, &|ino, handle| {
                    fs.fallocate(cx, ino, handle, offset.into(), len.into(), flags).map(|()| 0)
                });
            }
            Step::Allocate(at, offset, len, keep) => {
                let flags = if keep { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
                return opened(at, &|ino, handle| {
                    fs.fallocate(cx, ino, handle, offset.into(), len.into(), flags).map(|()| 0)
                });
            }
            Step::Chmod(at, mode) => {
                if find(at)?.attr.kind() != FileType::Symlink {
                    set(at, SetAttr { mode: Some(mode), ..SetAttr::default() })?;
                }
            }
            Step::Chown(at, uid) => {
                set(at, SetAttr { uid: Some(uid), gid: Some(uid), ..SetAttr::default() })?;
            }
            Step::Times(at, time) => {
                let time = Some(SetTime::At(Timespec { sec: time.into(), nsec: time % 1000 }));
                set(at, SetAttr { atime: time, mtime: time, ..SetAttr::default() })?;
            }
            Step::SetXattr(at, index, value) => {
                fs.setxattr(cx, find(at)?.ino, xattr(index).as_bytes(), &[value; 5], XattrFlags::empty(), false)?;
            }
            Step::RemoveXattr(at, index) => fs.removexattr(cx, find(at)?.ino, xattr(index).as_bytes())?,
        }
        Ok(0)
    }
}

struct Host {
    tmp: tempfile::TempDir,
    root: OwnedFd,
}

impl Host {
    fn new() -> Self {
        let tmp = tempfile::tempdir_in("/dev/shm").unwrap();
        let root = rustix::fs::open(tmp.path(), OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        Self { tmp, root }
    }

    /// The directory of a place, opened component by component without following links.
    fn dir(&self, at: At) -> Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let mut dir = rustix::io::dup(&self.root)?;
        for component in DIRS[usize::from(at.0)].split('/').filter(|component| !component.is_empty()) {
            dir = rustix::fs::openat(&dir, component, flags, Mode::empty())?;
        }
        Ok(dir)
    }

    fn open(&self, at: At, flags: OFlags) -> Result<OwnedFd> {
        let dir = self.dir(at)?;
        match FileType::from_raw_mode(rustix::fs::statat(&dir, word(at.1), AtFlags::SYMLINK_NOFOLLOW)?.st_mode) {
            FileType::RegularFile => rustix::fs::openat(&dir, word(at.1), flags | OFlags::RDWR, Mode::empty()),
            FileType::Directory => Err(Errno::ISDIR),
            FileType::Symlink => Err(Errno::LOOP),
            _ => Err(Errno::NXIO),
        }
    }

    fn path(&self, at: At) -> Result<std::path::PathBuf> {
        let dir = self.dir(at)?;
        rustix::fs::statat(dir, word(at.1), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(self.tmp.path().join(DIRS[usize::from(at.0)]).join(word(at.1)))
    }

    fn step(&self, step: &Step) -> Outcome {
        use rustix::fs;
        match *step {
            Step::Create(at, mode) => {
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                fs::openat(self.dir(at)?, word(at.1), flags, Mode::from_raw_mode(mode))?;
            }
            Step::Mkdir(at, mode) => fs::mkdirat(self.dir(at)?, word(at.1), Mode::from_raw_mode(mode))?,
            Step::Fifo(at) => {
                fs::mknodat(self.dir(at)?, word(at.1), FileType::Fifo, Mode::from_raw_mode(0o644), 0)?;
            }
            Step::Symlink(at) => fs::symlinkat("target", self.dir(at)?, word(at.1))?,
            Step::Link(from, to) => {
                // As the contract says it: what is linked is looked up before the place.
                let from_dir = self.dir(from)?;
                fs::statat(&from_dir, word(from.1), AtFlags::SYMLINK_NOFOLLOW)?;
                fs::linkat(from_dir, word(from.1), self.dir(to)?, word(to.1), AtFlags::empty())?;
            }
            Step::Unlink(at) => fs::unlinkat(self.dir(at)?, word(at.1), AtFlags::empty())?,
            Step::Rmdir(at) => fs::unlinkat(self.dir(at)?, word(at.1), AtFlags::REMOVEDIR)?,
            Step::Rename(from, to, flags) => {
                let (from_dir, to_dir) = (self.dir(from)?, self.dir(to)?);
                fs::renameat_with(from_dir, word(from.1), to_dir, word(to.1), rename_flags(flags))?;
            }
            Step::Write(at, offset, byte) => {
                let file = self.open(at, OFlags::empty())?;
                return rustix::io::pwrite(file, &[byte; 3000], offset.into()).map(|count| count as u64);
            }
            Step::Append(at, byte) => {
                let file = self.open(at, OFlags::APPEND)?;
                return rustix::io::write(file, &[byte; 300]).map(|count| count as u64);
            }
            Step::Truncate(at, size) => {
                let path = self.path(at)?;
                if path.symlink_metadata().unwrap().is_file() {
                    fs::ftruncate(self.open(at, OFlags::empty())?, size.into())?;
                }
            }
            Step::Punch(at, offset, len) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fs::fallocate(self.open(at, OFlags::empty())?, flags, offset.into(), len.into())?;
            }
            Step::Allocate(at, offset, len, keep) => {
                let flags = if keep { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
                fs::fallocate(self.open(at, OFlags::empty())?, flags, offset.into(), len.into())?;
            }
            Step::Chmod(at, mode) => {
                let path = self.path(at)?;
                if !path.is_symlink() {
                    fs::chmodat(fs::CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())?;
                }
            }
            Step::Chown(at, uid) => {
                let (uid, gid) = (fs::Uid::from_raw(uid), fs::Gid::from_raw(uid));
                fs::chownat(self.dir(at)?, word(at.1), Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Step::Times(at, time) => {
                let time = rustix::fs::Timespec { tv_sec: time.into(), tv_nsec: (time % 1000).into() };
                let times = Timestamps { last_access: time, last_modification: time };
                fs::utimensat(self.dir(at)?, word(at.1), &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Step::SetXattr(at, index, value) => {
                fs::lsetxattr(self.path(at)?, xattr(index), &[value; 5], XattrFlags::empty())?;
            }
            Step::RemoveXattr(at, index) => fs::lremovexattr(self.path(at)?, xattr(index))?,
        }
        Ok(0)
    }
}

/// All there is at a path: mode, names, owner, size, allocated blocks, rdev, content, extended attributes.
type Picture = BTreeMap<String, (u32, u32, u32, u64, u64, Vec<u8>, Vec<u8>)>;

fn picture(share: &Share, dir: Ino, at: &str, picture: &mut Picture) {
    let (fs, cx) = (&share.fs, &share.cx);
    for line in share.list(dir, true, 3) {
        let Some(entry) = line.entry else { continue };
        let attr = share.attr(entry.ino);
        let without_atime = |attr: Attr| Attr { atime: Timespec::default(), ..attr };
        assert_eq!(without_atime(attr), without_atime(entry.attr), "a listing tells what stat tells");
        assert!(attr.ctime >= attr.btime.unwrap(), "ctime never runs backwards");
        let path = format!("{at}/{}", line.name);
        let mut content = Vec::new();
        let (mut size, mut blocks) = (attr.size, attr.blocks);
        match attr.kind() {
            FileType::RegularFile => {
                let handle = fs.open(cx, entry.ino, OFlags::RDONLY).unwrap();
                content = share.read((entry.ino, handle), 0, attr.size as usize + 10).unwrap();
                share.release((entry.ino, handle));
            }
            FileType::Symlink => content = fs.readlink(cx, entry.ino).unwrap(),
            _ => (size, blocks) = (0, 0),
        }
        let list = fs.listxattr(cx, entry.ino).unwrap();
        let mut xattrs = Vec::new();
        for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            xattrs.extend_from_slice(name);
            xattrs.extend(fs.getxattr(cx, entry.ino, name).unwrap());
        }
        picture.insert(path.clone(), (attr.mode, attr.nlink, attr.uid, size, blocks, content, xattrs));
        if attr.kind() == FileType::Directory {
            self::picture(share, entry.ino, &path, picture);
        }
    }
}

fn host_picture(dir: &std::path::Path, at: &str, picture: &mut Picture) {
    use std::os::unix::fs::MetadataExt;
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let (meta, file) = (entry.metadata().unwrap(), entry.path());
        let path = format!("{at}/{}", entry.file_name().to_string_lossy());
        let (mut size, mut blocks, mut content) = (meta.size(), meta.blocks(), Vec::new());
        match FileType::from_raw_mode(meta.mode()) {
            FileType::RegularFile => content = std::fs::read(&file).unwrap(),
            FileType::Symlink => content = std::fs::read_link(&file).unwrap().into_os_string().into_encoded_bytes(),
            _ => (size, blocks) = (0, 0),
        }
        let mut list = vec![0; 4096];
        let count = rustix::fs::llistxattr(&file, &mut list[..]).unwrap();
        list.truncate(count);
        let mut names: Vec<&[u8]> = list.split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
        names.sort_unstable();
        let mut xattrs = Vec::new();
        for name in names {
            let mut value = [0; 100];
            let count = rustix::fs::lgetxattr(&file, name, &mut value[..]).unwrap();
            xattrs.extend_from_slice(name);
            xattrs.extend_from_slice(&value[..count]);
        }
        picture.insert(path.clone(), (meta.mode(), meta.nlink() as u32, meta.uid(), size, blocks, content, xattrs));
        if meta.is_dir() {
            host_picture(&file, &path, picture);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn behaves_like_tmpfs(steps in prop::collection::vec(step(), 1..80)) {
        if !rustix::process::geteuid().is_root() {
            ferry_skip::skip!("only root may do all that the model does");
            return Ok(());
        }
        ferry_alone::clear_umask();
        let descriptors = Share { memory: false, ..Share::new(Options::default()) };
        for share in both().into_iter().chain([descriptors]) {
            let host = Host::new();
            for step in &steps {
                prop_assert_eq!(share.step(step), host.step(step), "{:?}", step);
            }
            let (mut ours, mut theirs) = (Picture::new(), Picture::new());
            picture(&share, Ino::ROOT, "", &mut ours);
            host_picture(host.tmp.path(), "", &mut theirs);
            prop_assert_eq!(&ours, &theirs);
            prop_assert_eq!(share.fs.usage().handles, 0);
            let _ = host.root.as_fd();
        }
    }
}
