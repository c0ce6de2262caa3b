//! The data of one inode.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use ferry_vfs::{Backing, Ino, Memory, Result, Timespec};
use rustix::fs::Timestamps;

use super::mapped::{MappedFile, usage};
use crate::store::Usage;

/// An open data file.
#[derive(Debug)]
pub struct File {
    pub(super) ino: Ino,
    /// For everything at an offset.
    pub(super) plain: Arc<Backing>,
    /// For `O_APPEND`, opened at its first use: appending is a flag of a descriptor.
    pub(super) append: OnceLock<Arc<Backing>>,
    /// For transfers without a system call; memfds have none.
    mapped: Option<Arc<MappedFile>>,
    /// All bytes below this are allocated. Only memfds use it, and hold it while they change the allocation.
    pub(super) dense_to: Mutex<u64>,
}

impl File {
    /// Creates a file whose pages only this process can remove. Clients have seen this mtime.
    pub(super) fn new(ino: Ino, fd: OwnedFd, mtime: Timespec) -> Self {
        let mapped = Arc::new(MappedFile::new(mtime));
        let plain = Backing::with_memory(fd, Arc::clone(&mapped) as Arc<dyn Memory>);
        Self { mapped: Some(mapped), ..Self::unmapped(ino, plain) }
    }

    pub(super) fn memfd(ino: Ino, fd: OwnedFd) -> Self {
        Self::unmapped(ino, Backing::new(fd))
    }

    fn unmapped(ino: Ino, plain: Backing) -> Self {
        Self { ino, plain: Arc::new(plain), append: OnceLock::new(), mapped: None, dense_to: Mutex::new(0) }
    }

    pub(super) fn usage(&self) -> Result<Usage> {
        let look = || Ok(usage(&rustix::fs::fstat(self.as_fd())?));
        match &self.mapped {
            Some(mapped) => mapped.show(look),
            None => look(),
        }
    }

    pub(super) fn set_times(&self, new: (Timespec, Timespec)) -> Result<()> {
        let set = || rustix::fs::futimens(self.as_fd(), &times(new));
        match &self.mapped {
            Some(mapped) => mapped.setting_times(set),
            None => set(),
        }
    }

    /// Sets the size by `change`.
    pub(super) fn resizing(&self, size: u64, change: impl FnOnce() -> Result<()>) -> Result<()> {
        match &self.mapped {
            Some(mapped) => mapped.resizing(size, change),
            None => change(),
        }
    }

    /// Takes pages away by `change`.
    pub(super) fn removing(&self, bytes: Range<u64>, change: impl FnOnce() -> Result<()>) -> Result<()> {
        match &self.mapped {
            Some(mapped) => mapped.removing(bytes, change),
            None => change(),
        }
    }

    /// Called when the last handle is closed. Transfers through earlier extents then use the descriptor: the next
    /// opener may remove pages and does not know this mapping.
    pub(super) fn closing(&self) {
        let Some(mapped) = &self.mapped else { return };
        mapped.end(|| {
            if let Err(error) = self.keep_times(mapped) {
                tracing::warn!(ino = self.ino.0, %error, "cannot store the times of the last read and write");
            }
        });
    }

    /// Sets the data file's times to those of transfers that the kernel did not see.
    fn keep_times(&self, mapped: &MappedFile) -> Result<()> {
        let Some(known) = usage(&rustix::fs::fstat(self.as_fd())?).times else { return Ok(()) };
        let all = mapped.times(known);
        if all == known { Ok(()) } else { rustix::fs::futimens(self.as_fd(), &times(all)) }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.plain.as_fd()
    }
}

pub(super) fn times((atime, mtime): (Timespec, Timespec)) -> Timestamps {
    let time = |time: Timespec| rustix::fs::Timespec { tv_sec: time.sec, tv_nsec: time.nsec.into() };
    Timestamps { last_access: time(atime), last_modification: time(mtime) }
}
