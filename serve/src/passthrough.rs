//! FUSE passthrough.
//!
//! Linux wants all opens of an inode that overlap in time to agree (`fs/fuse/iomode.c`): either all pass through, to
//! the same backing file, or none does; otherwise `open` fails with EIO. So the first open of an inode decides, and
//! its decision holds until the last is closed. The kernel counts a file as closed before it sends RELEASE, so what
//! is counted here is never less than what the kernel counts.
//!
//! An open that must not write to the backing file on its own, though the inode passes through, has its reads and
//! writes come to the server (`FOPEN_DIRECT_IO` beside `FOPEN_PASSTHROUGH`); only its mappings are the backing file's:
//! * with `O_APPEND`: the kernel opens the backing file with it, and `fcntl` takes it from the client's file alone;
//! * of a file with suid or sgid, for writing: each request says whether to clear these bits, and the backing file does not know it;
//! * for writing, if other clients must be told of writes ([`Backings::takes_writers`]).
//!
//! What is stored through a mapping of the backing file changes its times, and no request tells the client's kernel of that. So
//! it keeps no attributes of a file that it may have mapped to write (one opened for reading and writing), and only for
//! [`MAPPED_TIMEOUT`] when the file is closed: a mapping outlives the descriptor that it was made of.

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
/// The kernel reads and writes a backing file with the credentials of the thread that registers it, and does not ask
/// the server to clear suid and sgid. Without `CAP_FSETID` the host's file system does.
pub trait Backings: Send + Sync {
    /// Registers a file; returns its number.
    ///
    /// # Errors
    /// Those of the ioctl; the file is then served without passthrough.
    fn register(&self, file: BorrowedFd<'_>) -> io::Result<i32>;

    /// Ends a registration; files that are open through it stay so.
    fn unregister(&self, id: i32);

    /// Whether writes pass through as well as reads. Other clients are told at once of writes by the server, but of the
    /// kernel's own writes only when the file is closed.
    ///
    /// The first open of an inode decides for all that overlap with it. A file that is being read when somebody opens it for
    /// writing must stay passed through. Reads and writes of that open then go to the server, shared mappings to the file.
    fn takes_writers(&self) -> bool {
        true
    }
}

/// Shards, so that opens of different inodes rarely wait for each other; a power of two.
const SHARDS: usize = 16;

/// How long the client may keep attributes of a file that it has closed: stores through a mapping are seen that late.
const MAPPED_TIMEOUT: Duration = Duration::from_secs(1);

/// An inode that is open.
struct OpenInode {
    /// The registration that all opens use; `None`: the server reads and writes.
    backing_id: Option<i32>,
    opens: u64,
    /// One of them can map the backing file to write.
    is_mapped: bool,
}

#[derive(Default)]
struct Shard {
    open: HashMap<Ino, OpenInode>,
    /// What was closed and may still be mapped, as long as the client knows it.
    mapped: HashSet<Ino>,
}

/// How an open of an inode passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PassthroughOpen {
    /// The registration to use.
    pub(crate) backing_id: i32,
    /// Reads and writes come to the server.
    pub(crate) mappings_only: bool,
    /// From now on the client may change the file without a request.
    pub(crate) is_first_mapping: bool,
}

/// How each inode that a client has open is read and written.
pub(crate) struct Passthrough {
    backings: Arc<dyn Backings>,
    shards: [CacheAligned<Mutex<Shard>>; SHARDS],
    /// The kernel refuses it for good.
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

    /// Adds an open of an inode; returns how it passes through, if it does. Calls `file` for a first open that may pass
    /// through, and `is_set_id` for an open for writing.
    pub(crate) fn opened(
        &self,
        (ino, flags): (Ino, OFlags),
        ratelimited_log: &RatelimitedLog,
        is_set_id: impl FnOnce() -> bool,
        file: impl FnOnce() -> Option<Arc<Backing>>,
    ) -> Option<PassthroughOpen> {
        let writes = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        // The server writes such a file, whatever the open's flags.
        let is_kept = writes && (!self.backings.takes_writers() || is_set_id());
        // Two first opens must not decide differently, so the lock is held while one of them registers.
        let mut shard = self.shard(ino);
        let in_use = match shard.open.entry(ino) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let backing_id = if is_kept { None } else { self.register(ratelimited_log, file) };
                entry.insert(OpenInode { backing_id, opens: 0, is_mapped: false })
            }
        };
        in_use.opens += 1;
        let backing_id = in_use.backing_id?;
        let maps = flags & OFlags::ACCMODE == OFlags::RDWR;
        let is_first_mapping = maps && !in_use.is_mapped;
        in_use.is_mapped |= maps;
        let mappings_only = is_kept || writes && flags.contains(OFlags::APPEND);
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
        // The others are about one file: its file system is stacked too deep (ELOOP), or there are too many.
        let for_good = [Errno::PERM, Errno::NOTTY, Errno::OPNOTSUPP, Errno::INVAL];
        if Errno::from_io_error(&error).is_some_and(|errno| for_good.contains(&errno)) {
            self.refused.store(true, Ordering::Relaxed);
        }
        if !self.has_logged.swap(true, Ordering::Relaxed) {
            ratelimited_log
                .warn(format_args!("the kernel refuses backing files ({error}): served without passthrough"));
        }
        None
    }

    /// Whether the client's kernel reads and writes this inode on its own now.
    pub(crate) fn is_used(&self, ino: Ino) -> bool {
        self.shard(ino).open.get(&ino).is_some_and(|in_use| in_use.backing_id.is_some())
    }

    /// How long the client may keep attributes of this inode at most.
    pub(crate) fn attr_timeout_max(&self, ino: Ino) -> Duration {
        let shard = self.shard(ino);
        match shard.open.get(&ino) {
            Some(in_use) if in_use.is_mapped => Duration::ZERO,
            _ if shard.mapped.contains(&ino) => MAPPED_TIMEOUT,
            _ => Duration::MAX,
        }
    }

    /// One open of an inode has ended.
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

    /// The client does not know an inode any more.
    pub(crate) fn forgotten(&self, ino: Ino) {
        self.shard(ino).mapped.remove(&ino);
    }
}
