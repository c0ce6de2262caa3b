//! The host mounts within a share, and their features.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, Weak};

use ferry_vfs::sync::lock;
use ferry_vfs::{FileType, OFlags, Result};
use rustix::fs::{Mode, major, minor};
use rustix::path::DecInt;

use crate::sys;
use crate::watch::{Group, WatchError};

/// A mount: one file system at one mount point of the host.
#[derive(Debug)]
pub(crate) struct Mount {
    pub(crate) id: u64,
    /// An open (not `O_PATH`) descriptor, for calls that require one.
    real: Option<OwnedFd>,
    /// File handles can be created and opened.
    handles: bool,
    /// Handles also lead to inodes that the kernel has evicted.
    pub(crate) handles_survive_eviction: bool,
    /// Closing a file may report an error of an earlier write.
    pub(crate) flushes: bool,
    /// Timestamps are multigrain: a change gets a distinct change time if the previous one was queried. This applies to
    /// inodes with a birth time. The small inodes of ext2 and ext4 have none, and store seconds.
    pub(crate) multigrain: bool,
}

/// File systems without a flush operation at close (`f_type`): ext2 to ext4, XFS, btrfs, tmpfs, f2fs, EROFS, squashfs,
/// bcachefs, ZFS.
const NO_FLUSH: [u32; 9] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010, 0xe0f5_e1e2, 0x7371_7368, 0xca45_1a4e, 0x2fc1_2fc1];

/// File systems with multigrain timestamps since [`MULTIGRAIN_SINCE`] (`f_type`): ext4, XFS, btrfs, tmpfs.
const MULTIGRAIN: [u32; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994];
/// Linux 6.13.
const MULTIGRAIN_SINCE: (u32, u32) = (6, 13);

static HAS_MULTIGRAIN: LazyLock<bool> = LazyLock::new(|| {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= MULTIGRAIN_SINCE
});

/// File systems that find an inode by its handle only while the kernel caches it (`f_type`): FUSE, unless its server
/// says otherwise, and FAT, unless it is mounted with `nfs=nostale_ro`.
const FORGETFUL: [u32; 2] = [0x6573_5546, 0x4d44];

impl Mount {
    /// Examines the mount of `path_fd`, an `O_PATH` descriptor of an inode of this type.
    fn probe(id: u64, kind: FileType, path_fd: BorrowedFd<'_>, proc_fds: BorrowedFd<'_>, handles: bool) -> Self {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        let real = match kind {
            FileType::Directory => rustix::fs::openat(path_fd, ".", flags | OFlags::DIRECTORY, Mode::empty()).ok(),
            FileType::RegularFile => rustix::fs::openat(proc_fds, DecInt::from_fd(path_fd), flags, Mode::empty()).ok(),
            _ => None,
        };
        let handles = handles
            && real.as_ref().is_some_and(|real| {
                sys::name_to_handle(path_fd, b"")
                    .and_then(|handle| sys::open_by_handle(real.as_fd(), &handle, OFlags::PATH))
                    .is_ok()
            });
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "magic numbers have 32 bits")]
        let kind = rustix::fs::fstatfs(path_fd).map(|statfs| statfs.f_type as u32);
        let flushes = kind.map_or(true, |kind| !NO_FLUSH.contains(&kind));
        let handles_survive_eviction = kind.is_ok_and(|kind| !FORGETFUL.contains(&kind));
        let multigrain = *HAS_MULTIGRAIN && kind.is_ok_and(|kind| MULTIGRAIN.contains(&kind));
        tracing::debug!(id, handles, handles_survive_eviction, flushes, multigrain, "mount");
        Self { id, real, handles, handles_survive_eviction, flushes, multigrain }
    }

    /// Returns the descriptor for opening file handles, if the mount has them.
    pub(crate) fn handles(&self) -> Option<BorrowedFd<'_>> {
        self.real.as_ref().filter(|_| self.handles).map(AsFd::as_fd)
    }

    /// Returns an open (not `O_PATH`) descriptor.
    pub(crate) fn real(&self) -> Option<BorrowedFd<'_>> {
        self.real.as_ref().map(AsFd::as_fd)
    }
}

/// The mounts of inodes in use.
#[derive(Debug)]
pub(crate) struct Mounts {
    handles: bool,
    known: Mutex<HashMap<u64, Weak<Mount>>>,
    /// The fanotify group that watches them.
    watching: OnceLock<Arc<Group>>,
}

impl Mounts {
    /// Creates an empty set. `handles`: use file handles where they work.
    pub(crate) fn new(handles: bool) -> Self {
        Self { handles, known: Mutex::default(), watching: OnceLock::new() }
    }

    /// Returns the mount with this id, on which `path_fd`, an `O_PATH` descriptor of an inode of this type, is.
    pub(crate) fn get(&self, id: u64, kind: FileType, path_fd: BorrowedFd<'_>, proc_fds: BorrowedFd<'_>) -> Arc<Mount> {
        if let Some(mount) = self.known(id) {
            return mount;
        }
        let mount = Arc::new(Mount::probe(id, kind, path_fd, proc_fds, self.handles));
        let mut known = lock(&self.known);
        known.retain(|_, mount| mount.strong_count() > 0);
        if let Some(there) = known.get(&id).and_then(Weak::upgrade) {
            return there;
        }
        known.insert(id, Arc::downgrade(&mount));
        drop(known);
        if let Some(group) = self.watching.get()
            && let Err(error) = mount.handles().ok_or(WatchError::NoHandles).and_then(|root| group.add(root))
        {
            // Once per mount.
            tracing::warn!(id, "cannot watch for changes on a file system that is mounted below the share: {error}");
        }
        mount
    }

    /// Watches these mounts and later ones.
    pub(crate) fn watch(&self, group: Arc<Group>) {
        let _ = self.watching.set(group);
    }

    /// Returns the mount with this id, if an inode of it is in use.
    pub(crate) fn known(&self, id: u64) -> Option<Arc<Mount>> {
        lock(&self.known).get(&id).and_then(Weak::upgrade)
    }

    /// Returns a mount in use with this device number, as `Key` has it.
    pub(crate) fn of_device(&self, dev: u64) -> Option<Arc<Mount>> {
        let mounts: Vec<_> = lock(&self.known).values().filter_map(Weak::upgrade).collect();
        let is_it = |mount: &Arc<Mount>| {
            let st = mount.real().and_then(|real| rustix::fs::fstat(real).ok());
            st.is_some_and(|st| (u64::from(major(st.st_dev)) << 32) | u64::from(minor(st.st_dev)) == dev)
        };
        mounts.into_iter().find(is_it)
    }

    /// Calls `f` for each mount in use.
    pub(crate) fn for_each(&self, mut f: impl FnMut(&Mount) -> Result<()>) -> Result<()> {
        let mounts: Vec<_> = lock(&self.known).values().filter_map(Weak::upgrade).collect();
        mounts.iter().try_for_each(|mount| f(mount))
    }
}
