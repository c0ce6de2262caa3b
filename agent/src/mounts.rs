//! The mount table, and the identities of mounts.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Statx, StatxAttributes, StatxFlags, statx};
use rustix::io::Result;

use crate::shutdown::Shutdown;

/// The identity of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MountId {
    /// The number of the mount; 0 before Linux 5.8.
    number: u64,
    device: (u32, u32),
}

impl From<Statx> for MountId {
    fn from(found: Statx) -> Self {
        Self { number: found.stx_mnt_id, device: (found.stx_dev_major, found.stx_dev_minor) }
    }
}

impl MountId {
    /// Returns the mount of an open file.
    pub(crate) fn of(file: BorrowedFd<'_>) -> Result<Self> {
        // No request is sent for any of these attributes.
        Ok(statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID)?.into())
    }

    /// Returns the mount that a path leads to.
    pub(crate) fn at(path: &Path) -> Result<Self> {
        Ok(statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID)?.into())
    }
}

/// Whether an open directory is the root of a mount. Before Linux 5.8: of one with another device than its parent.
pub(crate) fn is_mount_root(dir: BorrowedFd<'_>) -> bool {
    let stat = |path, flags| statx(dir, path, flags | AtFlags::STATX_DONT_SYNC, StatxFlags::empty());
    stat("", AtFlags::EMPTY_PATH).is_ok_and(|found| match found.stx_attributes_mask {
        known if known.contains(StatxAttributes::MOUNT_ROOT) => {
            found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
        }
        _ => {
            stat("..", AtFlags::empty()).is_ok_and(|parent| MountId::from(parent).device != MountId::from(found).device)
        }
    })
}

/// The mount table of this process's namespace.
#[derive(Debug)]
pub(crate) struct MountTable(File);

impl MountTable {
    /// Opens it. Changes from now on are noticed.
    pub(crate) fn open() -> std::io::Result<Self> {
        File::open("/proc/self/mountinfo").map(Self)
    }

    /// Waits until something was mounted or unmounted since the last wait; returns false if agents are to end.
    pub(crate) fn wait(&self, shutdown: &Shutdown) -> Result<bool> {
        shutdown.wait_urgent(self.0.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_differ_from_each_other_and_from_directories() {
        let (proc, root) = (Path::new("/proc"), Path::new("/"));
        let file = File::open(proc).expect("/proc is mounted");
        assert_eq!(MountId::of(file.as_fd()), MountId::at(proc));
        assert_ne!(MountId::at(root), MountId::at(proc));
        assert!(is_mount_root(file.as_fd()));
        assert!(!is_mount_root(File::open("/proc/self").expect("/proc is mounted").as_fd()));
    }

    #[test]
    fn waiting_for_mounts_ends_when_agents_are_to() {
        let shutdown = std::sync::Arc::new(Shutdown::new().expect("a descriptor"));
        let table = MountTable::open().expect("/proc is mounted");
        let other = std::sync::Arc::clone(&shutdown);
        let thread = std::thread::spawn(move || {
            // Others may mount something meanwhile.
            while table.wait(&shutdown).expect("polled") {}
        });
        // Fails without privileges, but no agent waits here.
        let _ = other.end();
        thread.join().expect("no panic");
    }
}
