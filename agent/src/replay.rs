//! Replays an event as a system call.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ferry_vfs::Ino;
use ferry_wire::events::{Kind, Record};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Statx, StatxFlags, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::{Errno, Result};

use crate::sys;

/// The most directories that are open at one time.
const DIRECTORIES_MAX: usize = 64;

/// Replays the events of one message.
pub(crate) struct Replayer<'a> {
    root: &'a OwnedFd,
    directories: HashMap<Ino, OwnedFd>,
}

impl<'a> Replayer<'a> {
    pub(crate) fn new(root: &'a OwnedFd) -> Self {
        Self { root, directories: HashMap::new() }
    }

    /// Opens a directory that the kernel knows.
    fn open(&mut self, dir: Ino) -> Result<()> {
        if dir == Ino::ROOT || self.directories.contains_key(&dir) {
            return Ok(());
        }
        if self.directories.len() >= DIRECTORIES_MAX {
            self.directories.clear();
        }
        let opened = sys::open_inode(self.root, dir, false)?;
        self.directories.insert(dir, opened);
        Ok(())
    }

    fn dir(&self, dir: Ino) -> Result<BorrowedFd<'_>> {
        match dir {
            Ino::ROOT => Ok(self.root.as_fd()),
            dir => self.directories.get(&dir).map(AsFd::as_fd).ok_or(Errno::STALE),
        }
    }

    /// Announces an event, and makes its call.
    pub(crate) fn replay(&mut self, record: &Record<'_>) -> Result<()> {
        // With a name, it is a directory.
        if record.name.is_some() {
            self.open(record.ino)?;
        }
        if let Some((dir, _)) = record.to {
            // Opening two may have closed the first.
            self.open(dir)?;
            self.open(record.ino)?;
        }
        let mode = sys::announce(self.root, record.number)?;
        match (self.call(record, mode), record.name) {
            // The kernel may have cached that the name is absent, and then sends a create request, which the server
            // refuses.
            (Err(Errno::NOENT), Some(name)) if record.kind != Kind::Created => {
                let _ = create(self.dir(record.ino)?, name.as_bytes(), FileType::RegularFile.as_raw_mode());
                self.call(record, mode)
            }
            (outcome, _) => outcome,
        }
    }

    fn call(&self, record: &Record<'_>, mode: u32) -> Result<()> {
        match (record.kind, record.name, record.to) {
            (Kind::Created, Some(name), _) => create(self.dir(record.ino)?, name.as_bytes(), mode),
            (Kind::Removed, Some(name), _) => {
                let flags = if record.is_dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                let remove = |flags| rustix::fs::unlinkat(self.dir(record.ino)?, name.as_bytes(), flags);
                match remove(flags) {
                    // The server may not know the inode's type.
                    Err(Errno::ISDIR) => remove(AtFlags::REMOVEDIR),
                    Err(Errno::NOTDIR) => remove(AtFlags::empty()),
                    outcome => outcome,
                }
            }
            (Kind::Renamed, Some(name), Some((new_dir, new_name))) => {
                let flags = if record.exchanged { RenameFlags::EXCHANGE } else { RenameFlags::empty() };
                let (dir, new_dir) = (self.dir(record.ino)?, self.dir(new_dir)?);
                if record.exchanged && is_one_inode((dir, name.as_bytes()), (new_dir, new_name.as_bytes())) {
                    // The kernel would exchange nothing. It looks up names for creation again, and the server refuses
                    // the creation.
                    let _ = create(new_dir, new_name.as_bytes(), FileType::RegularFile.as_raw_mode());
                }
                rustix::fs::renameat_with(dir, name.as_bytes(), new_dir, new_name.as_bytes(), flags)
            }
            (kind, Some(name), _) => {
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = rustix::fs::openat(self.dir(record.ino)?, name.as_bytes(), flags, Mode::empty())?;
                touch(&file, kind)
            }
            (kind, None, _) => touch(&sys::open_inode(self.root, record.ino, true)?, kind),
        }
    }
}

/// Whether the kernel has one inode under both names, one of which is stale.
fn is_one_inode(one: (BorrowedFd<'_>, &[u8]), other: (BorrowedFd<'_>, &[u8])) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    let ino = |(dir, name)| rustix::fs::statx(dir, name, flags, StatxFlags::INO).map(|found| found.stx_ino);
    matches!((ino(one), ino(other)), (Ok(one), Ok(other)) if one == other)
}

/// Creates a name. The server supplies the type; it ignores the other attributes.
fn create(dir: BorrowedFd<'_>, name: &[u8], mode: u32) -> Result<()> {
    match FileType::from_raw_mode(mode) {
        FileType::Directory => rustix::fs::mkdirat(dir, name, Mode::RWXU),
        FileType::Symlink => rustix::fs::symlinkat("replay", dir, name),
        FileType::Unknown => Err(Errno::INVAL),
        kind => rustix::fs::mknodat(dir, name, kind, Mode::RUSR | Mode::WUSR, 0),
    }
}

/// Replays a change of a file, whose descriptor is a path.
fn touch(file: &OwnedFd, kind: Kind) -> Result<()> {
    if kind == Kind::Closed {
        return close(file);
    }
    // The kernel requests the attributes, and drops the pages of a file whose mtime has changed.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let look = || rustix::fs::statx(file, "", flags, StatxFlags::BASIC_STATS);
    // The first reply may be ESTALE.
    let found = look().or_else(|_| look())?;
    let times = match kind {
        // Both times: IN_ATTRIB. The time of change alone: IN_MODIFY.
        Kind::Attributes => times(&found, found.stx_atime.tv_nsec.into()),
        _ => times(&found, UTIME_OMIT),
    };
    rustix::fs::utimensat(file, "", &times, AtFlags::EMPTY_PATH)
}

/// The current times of a file.
fn times(found: &Statx, atime_nsec: rustix::fs::Nsecs) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: found.stx_atime.tv_sec, tv_nsec: atime_nsec },
        last_modification: Timespec { tv_sec: found.stx_mtime.tv_sec, tv_nsec: found.stx_mtime.tv_nsec.into() },
    }
}

/// Opens a file for writing, and closes it. The kernel asks for its attributes: stores to mappings have no other event.
fn close(file: &OwnedFd) -> Result<()> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let found = rustix::fs::statx(file, "", flags, StatxFlags::BASIC_STATS)?;
    if FileType::from_raw_mode(found.stx_mode.into()) != FileType::RegularFile {
        return Ok(());
    }
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(link, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).map(drop)
}
