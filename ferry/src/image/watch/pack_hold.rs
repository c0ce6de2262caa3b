//! The guardian's work after a server of incomplete packs has died.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, SeekFrom, flock, seek};
use rustix::io::Errno;

use super::event::{PermissionEvent, read_event, respond_to_all};
use super::{
    ALLOW, CHECK_INTERVAL, DENY, DESCRIPTORS_MAX, GUARDIANS_BEGIN, RETRY_PAUSE, SERVED_BYTE, range_lock, server_lock,
};
use crate::paths::descriptor_path;

/// A pack that the guardian holds.
#[derive(Debug)]
pub struct PackHold {
    pub(super) file: File,
    /// The byte whose lock announces this guardian.
    pub(super) own_byte: i64,
}

impl PackHold {
    /// Opens a pack, and locks it against removal from its store.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        flock(&file, FlockOperation::NonBlockingLockShared)
            .with_context(|| format!("cannot lock {}", path.display()))?;
        let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let own_byte = GUARDIANS_BEGIN.saturating_add(since.tv_sec.saturating_mul(1_000_000_000) + since.tv_nsec);
        let lock = range_lock(libc::F_RDLCK, own_byte, own_byte + 1);
        fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)).with_context(|| format!("cannot lock {}", path.display()))?;
        Ok(Self { file, own_byte })
    }

    /// Whether a later guardian responds for this pack. Two guardians would each take the other for a reader, and never end.
    pub(super) fn has_successor(&self) -> bool {
        let mut lock = range_lock(libc::F_WRLCK, self.own_byte + 1, SERVED_BYTE);
        fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock)).is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
    }

    /// Whether a server responds for this pack.
    pub(super) fn is_served(&self) -> bool {
        let mut lock = server_lock(libc::F_WRLCK);
        fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock)).is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
    }

    /// Whether no other process, nor EROFS, has it open.
    pub(super) fn is_unused(&self) -> bool {
        let lease = |kind: i32| {
            // SAFETY: no pointers; the descriptor is open as long as `self` is.
            unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_SETLEASE, kind) == 0 }
        };
        lease(libc::F_WRLCK) && lease(libc::F_UNLCK)
    }

    /// Whether readers need no response of this guardian.
    pub(super) fn is_unneeded(&self) -> bool {
        self.is_whole() || self.is_served() || self.has_successor() || self.is_unused()
    }

    /// Whether it is complete: then its name has no suffix.
    pub(super) fn is_whole(&self) -> bool {
        let name = fs::read_link(descriptor_path(&self.file)).unwrap_or_default();
        name.is_absolute() && !name.to_string_lossy().contains(".part")
    }

    /// Whether a range has no holes. Only verified data is written.
    pub(super) fn has(&self, event: &PermissionEvent) -> bool {
        let size = self.file.metadata().map_or(0, |found| found.len());
        let (from, to) = (event.range.0, event.range.0.saturating_add(event.range.1).min(size));
        // The file position belongs to the descriptor, which is not shared.
        from >= to || seek(&self.file, SeekFrom::Hole(from)).is_ok_and(|hole| hole >= to)
    }
}

/// Responds in place of a server that is dead, with all of its threads: present data may be read, other reads fail with `EIO`.
/// Returns when it is no longer needed.
pub fn answer_for_dead_server(group: impl AsFd, packs: &[PackHold]) -> Result<()> {
    let keys: Vec<(u64, u64)> = packs
        .iter()
        .map(|pack| pack.file.metadata().map(|found| (found.dev(), found.ino())))
        .collect::<io::Result<_>>()
        .context("cannot inspect a pack")?;
    // Events without a response. Linux would allow their reads when the group is closed.
    respond_to_all(&group, event_descriptors_max(), DENY);
    // A next server has its own group, and may have marked the files after these events; so it does not get them.
    let mut are_earlier = true;
    loop {
        let is_there = {
            let group = group.as_fd();
            let interval = if are_earlier { &Timespec::default() } else { &CHECK_INTERVAL };
            poll(&mut [PollFd::new(&group, PollFlags::IN)], Some(interval))
        };
        match is_there {
            Ok(1..) => {
                let Ok(event) = read_event(&group) else {
                    thread::sleep(RETRY_PAUSE);
                    continue;
                };
                let pack = event.key().ok().and_then(|key| keys.iter().position(|other| *other == key));
                let may = pack.is_none_or(|at| {
                    let pack = &packs[at];
                    pack.is_whole() || pack.has(&event) || !are_earlier && pack.is_served()
                });
                event.respond(&group, if may { ALLOW } else { DENY });
            }
            Ok(0) if are_earlier => are_earlier = false,
            Ok(0) if packs.iter().all(PackHold::is_unneeded) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for events"),
        }
    }
}

/// The number of descriptors that a server can have open: this process has inherited its limit.
fn event_descriptors_max() -> i32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|limit| i32::try_from(limit).ok()).unwrap_or(DESCRIPTORS_MAX).min(DESCRIPTORS_MAX)
}
