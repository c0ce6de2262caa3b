//! The packs of a guardian, and who else responds for them.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

use anyhow::{Context, Result};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::{FlockOperation, SeekFrom, flock, seek};

use super::{GUARDIANS_BEGIN, SERVED_BYTE, range_lock};
use crate::paths::descriptor_path;

/// The bits of a process id, of which the kernel has at most 2^22.
const PID_BITS: u32 = 22;

/// A pack that the guardian holds.
#[derive(Debug)]
pub struct PackHold {
    pub(super) file: File,
    /// The byte whose lock announces this guardian: the time in milliseconds, and the process id.
    pub(super) own_byte: i64,
}

impl PackHold {
    /// Opens a pack, and locks it against removal from its store.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        flock(&file, FlockOperation::NonBlockingLockShared)
            .with_context(|| format!("cannot lock {}", path.display()))?;
        let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let since_ms = since.tv_sec.saturating_mul(1000) + since.tv_nsec / 1_000_000;
        let own_byte = GUARDIANS_BEGIN + (since_ms << PID_BITS) + i64::from(std::process::id());
        let lock = range_lock(libc::F_RDLCK, own_byte, own_byte + 1);
        fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)).with_context(|| format!("cannot lock {}", path.display()))?;
        Ok(Self { file, own_byte })
    }

    /// Whether a later guardian responds for this pack. Two guardians would each take the other for a reader, and never end.
    pub(super) fn has_successor(&self) -> bool {
        self.locked_byte(self.own_byte + 1, SERVED_BYTE).is_some()
    }

    /// Whether a process is such a guardian.
    pub(super) fn has_successor_of(&self, pid: u32) -> bool {
        // Few guardians are there at once.
        let mut left = vec![(self.own_byte + 1, SERVED_BYTE)];
        while let Some((from, to)) = left.pop() {
            match self.locked_byte(from, to) {
                Some(byte) if (byte - GUARDIANS_BEGIN) & ((1 << PID_BITS) - 1) == i64::from(pid) => return true,
                Some(byte) => left.extend([(from, byte), (byte + 1, to)]),
                None => {}
            }
        }
        false
    }

    /// Returns the first byte of a lock of others in a range.
    fn locked_byte(&self, from: i64, to: i64) -> Option<i64> {
        let mut lock = range_lock(libc::F_WRLCK, from, to);
        let is_locked = from < to
            && fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock)).is_ok()
            && i32::from(lock.l_type) != libc::F_UNLCK;
        is_locked.then(|| lock.l_start.max(from))
    }

    /// Whether a server responds for this pack.
    pub(super) fn is_served(&self) -> bool {
        self.locked_byte(SERVED_BYTE, SERVED_BYTE + 1).is_some()
    }

    /// Whether no other process, nor EROFS, has it open.
    pub(super) fn is_unused(&self) -> bool {
        let lease = |kind: i32| {
            // SAFETY: no pointers; the descriptor is open as long as `self` is.
            unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_SETLEASE, kind) == 0 }
        };
        lease(libc::F_WRLCK) && lease(libc::F_UNLCK)
    }

    /// Whether all is here, or a later server or guardian responds for what is not.
    pub(super) fn has_next(&self) -> bool {
        self.is_whole() || self.is_served() || self.has_successor()
    }

    /// Whether it is complete: then its name has no suffix.
    pub(super) fn is_whole(&self) -> bool {
        let name = fs::read_link(descriptor_path(&self.file)).unwrap_or_default();
        name.is_absolute() && !name.file_name().is_some_and(|name| name.to_string_lossy().contains(".part"))
    }

    /// Whether a range has no missing data, as far as that is known: it has no holes, and blocks do not have bytes of two objects, of
    /// which one may be missing. Only verified data is written.
    pub(super) fn has(&self, (offset, bytes): (u64, u64), shares_blocks: bool) -> bool {
        let size = self.file.metadata().map_or(0, |found| found.len());
        let end = offset.saturating_add(bytes).min(size);
        // The file position belongs to the descriptor, which is not shared.
        let has_no_hole = || seek(&self.file, SeekFrom::Hole(offset)).is_ok_and(|hole| hole >= end);
        offset >= end || !shares_blocks && has_no_hole()
    }
}
