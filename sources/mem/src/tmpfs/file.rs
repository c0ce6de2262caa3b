//! The data of one inode.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use ferry_vfs::{Backing, Ino, Result, Timespec};
use rustix::fs::{Stat, Timestamps};

use crate::store::Usage;

/// An open data file.
#[derive(Debug)]
pub struct File {
    pub(super) ino: Ino,
    /// For everything at an offset.
    pub(super) plain: Arc<Backing>,
    /// For `O_APPEND`, opened when it is first asked for: appending is a flag of a descriptor.
    pub(super) append: OnceLock<Arc<Backing>>,
    /// All bytes below this are allocated; only memfds look at it, and hold it while they change what is allocated.
    pub(super) dense_to: Mutex<u64>,
}

impl File {
    pub(super) fn new(ino: Ino, fd: OwnedFd) -> Self {
        Self { ino, plain: Arc::new(Backing::new(fd)), append: OnceLock::new(), dense_to: Mutex::new(0) }
    }

    pub(super) fn usage(&self) -> Result<Usage> {
        Ok(usage(&rustix::fs::fstat(self.as_fd())?))
    }

    pub(super) fn set_times(&self, new: (Timespec, Timespec)) -> Result<()> {
        rustix::fs::futimens(self.as_fd(), &times(new))
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.plain.as_fd()
    }
}

/// What `stat` says of a data file.
#[allow(clippy::useless_conversion, clippy::unnecessary_fallible_conversions, reason = "types differ by architecture")]
pub(super) fn usage(stat: &Stat) -> Usage {
    let time = |sec, nsec| Timespec { sec, nsec: u32::try_from(nsec).unwrap_or_default() };
    Usage {
        size: u64::try_from(stat.st_size).unwrap_or_default(),
        blocks: u64::try_from(stat.st_blocks).unwrap_or_default(),
        times: Some((time(stat.st_atime, stat.st_atime_nsec), time(stat.st_mtime, stat.st_mtime_nsec))),
    }
}

pub(super) fn times((atime, mtime): (Timespec, Timespec)) -> Timestamps {
    let time = |time: Timespec| rustix::fs::Timespec { tv_sec: time.sec, tv_nsec: time.nsec.into() };
    Timestamps { last_access: time(atime), last_modification: time(mtime) }
}
