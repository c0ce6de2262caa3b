//! FUSE passthrough.
//!
//! Linux requires all overlapping opens of an inode to agree (`fs/fuse/iomode.c`): either all pass through to the
//! same backing file, or none does; otherwise `open` fails with EIO. So the first open of an inode decides until the
//! last one is closed. The kernel counts a file as closed before it sends RELEASE, so the count here is never less
//! than the kernel's.
//!
//! Some opens must not write to the backing file although the inode passes through. Their reads and writes go to the
//! server (`FOPEN_DIRECT_IO` beside `FOPEN_PASSTHROUGH`); only their mappings use the backing file:
//! * with `O_APPEND`: the kernel opens the backing file with it, and `fcntl` removes it from the client's file only;
//! * of a file with suid or sgid, for writing: a request says whether to clear these bits, the backing file cannot;
//! * for writing, if other clients must be notified of writes ([`Backings::takes_writers`]).
//!
//! A store through a mapping of the backing file changes its times without a request to the client's kernel. So the
//! client does not cache attributes of a file that it may have mapped writable (one opened for reading and writing),
//! and caches them only for [`MAPPED_TIMEOUT`] after the file is closed: a mapping outlives its descriptor.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ferry_engine::RatelimitedLog;
use ferry_vfs::sync::{CacheAligned, lock};
use ferry_vfs::{Backing, Errno, Ino, OFlags};

/// Registers backing files with the client's kernel (`FUSE_DEV_IOC_BACKING_OPEN` and `..._CLOSE`).
///
/// The kernel reads and writes a backing file with the credentials of the thread that registers it, and clears suid
/// and sgid without a request to the server: the host's file system does so if the thread lacks `CAP_FSETID`.
pub trait Backings: Send + Sync {
    /// Registers a file; returns its backing id.
    ///
    /// # Errors
    /// Those of the ioctl; the file is then served without passthrough.
    fn register(&self, file: BorrowedFd<'_>) -> io::Result<i32>;

    /// Ends a registration; files that use it stay open.
    fn unregister(&self, id: i32);

    /// Whether writes pass through as well as reads. Other clients are notified at once of the server's writes, but
    /// of the kernel's own writes only when the file is closed.
    ///
    /// The first open of an inode decides for all overlapping ones. A file that is open for reading stays passed
    /// through when it is opened for writing. Reads and writes of that open go to the server, shared mappings to the
    /// backing file.
    fn takes_writers(&self) -> bool {
        true
    }
}

/// Shards reduce contention between opens of different inodes; a power of two.
const SHARDS: usize = 16;

/// How long the client may cache attributes of a file that it has closed: stores through a mapping become visible
/// that late.
const MAPPED_TIMEOUT: Duration = Duration::from_secs(1);

/// An inode that is open.
struct OpenInode {
    /// The backing id that all opens use; `None`: the server reads and writes.
    backing_id: Option<i32>,
    opens: u64,
    /// One of the opens can map the backing file writable.
    is_mapped: bool,
}

#[derive(Default)]
struct Shard {
    open: HashMap<Ino, OpenInode>,
    /// Closed inodes that may still be mapped, as long as the client knows them.
    mapped: HashSet<Ino>,
}

/// How an open of an inode passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PassthroughOpen {
    /// The backing id to use.
    pub(crate) backing_id: i32,
    /// Reads and writes go to the server.
    pub(crate) mappings_only: bool,
    /// From now on the client may change the file without a request.
    pub(crate) is_first_mapping: bool,
}

/// Decides how each open inode of a client is read and written.
pub(crate) struct Passthrough {
    backings: Arc<dyn Backings>,
    shards: [CacheAligned<Mutex<Shard>>; SHARDS],
    /// The kernel does not support or permit passthrough.
    refused: AtomicBool,
    has_logged: AtomicBool,
}

impl Passthrough {
    pub(crate) fn new(backings: Arc<dyn Backings>) -> Self {
        let shards = std::array::from_fn(|_| CacheAligned::default());
        Self { backings, shards, refused: AtomicBool::new(false), has_logged: AtomicBool::new(false) }
    }

    fn shard(&self, ino: Ino) -> MutexGuard<'_, Shard> {
        let index = usize::try_from(ino.0 % SHARDS as u64).unwrap_or(0);
        lock(&self.shards[index])
    }

    /// Adds an open of an inode; returns how it passes through, if it does. Calls `file` for a first open that may
    /// pass through, and `is_set_id` for an open for writing.
    pub(crate) fn opened(
        &self,
        (ino, flags): (Ino, OFlags),
        ratelimited_log: &RatelimitedLog,
        is_set_id: impl FnOnce() -> bool,
        file: impl FnOnce() -> Option<Arc<Backing>>,
    ) -> Option<PassthroughOpen> {
        let writes = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        // The server makes the writes of such an open.
        let by_server = writes && (!self.backings.takes_writers() || is_set_id());
        // Two concurrent first opens must decide alike, so the lock is held during registration.
        let mut shard = self.shard(ino);
        let in_use = match shard.open.entry(ino) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let backing_id = if by_server { None } else { self.register(ratelimited_log, file) };
                entry.insert(OpenInode { backing_id, opens: 0, is_mapped: false })
            }
        };
        in_use.opens += 1;
        let backing_id = in_use.backing_id?;
        let maps = flags & OFlags::ACCMODE == OFlags::RDWR;
        let is_first_mapping = maps && !in_use.is_mapped;
        in_use.is_mapped |= maps;
        let mappings_only = by_server || writes && flags.contains(OFlags::APPEND);
        Some(PassthroughOpen { backing_id, mappings_only, is_first_mapping })
    }

    fn register(&self, ratelimited_log: &RatelimitedLog, file: impl FnOnce() -> Option<Arc<Backing>>) -> Option<i32> {
        if self.refused.load(Ordering::Relaxed) {
            return None;
        }
        let file = file()?;
        let error = match self.backings.register(file.as_fd()) {
            Ok(id) => return Some(id),
            Err(error) => error,
        };
        // Other errors concern one file: its file system is stacked too deep (ELOOP), or too many are registered.
        let permanent = [Errno::PERM, Errno::NOTTY, Errno::OPNOTSUPP, Errno::INVAL];
        if Errno::from_io_error(&error).is_some_and(|errno| permanent.contains(&errno)) {
            self.refused.store(true, Ordering::Relaxed);
        }
        if !self.has_logged.swap(true, Ordering::Relaxed) {
            ratelimited_log
                .warn(format_args!("the kernel refuses backing files ({error}): served without passthrough"));
        }
        None
    }

    /// Whether the client's kernel reads and writes this inode itself now.
    pub(crate) fn is_used(&self, ino: Ino) -> bool {
        self.shard(ino).open.get(&ino).is_some_and(|in_use| in_use.backing_id.is_some())
    }

    /// Returns how long the client may cache attributes of this inode.
    pub(crate) fn attr_timeout_max(&self, ino: Ino) -> Duration {
        let shard = self.shard(ino);
        match shard.open.get(&ino) {
            Some(in_use) if in_use.is_mapped => Duration::ZERO,
            _ if shard.mapped.contains(&ino) => MAPPED_TIMEOUT,
            _ => Duration::MAX,
        }
    }

    /// Removes an open of an inode.
    pub(crate) fn closed(&self, ino: Ino) {
        let mut shard = self.shard(ino);
        let Some(in_use) = shard.open.get_mut(&ino) else { return };
        in_use.opens -= 1;
        if in_use.opens > 0 {
            return;
        }
        let (id, is_mapped) = (in_use.backing_id, in_use.is_mapped);
        shard.open.remove(&ino);
        if is_mapped {
            shard.mapped.insert(ino);
        }
        drop(shard);
        if let Some(id) = id {
            self.backings.unregister(id);
        }
    }

    /// Records that the client has forgotten an inode.
    pub(crate) fn forgotten(&self, ino: Ino) {
        self.shard(ino).mapped.remove(&ino);
    }
}
