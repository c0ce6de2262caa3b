//! Open files and directories, by number.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ferry_vfs::{Backing, Errno, Handle, Ino, OFlags, Result, SessionId};

use crate::readdir::Stream;
use crate::table::Inode;

/// So many that threads which open and close seldom meet; a power of two.
const SHARDS: usize = 16;
const SHARD_BITS: u32 = SHARDS.trailing_zeros();
/// Slots per shard: the index has the 32 bits below the generation, less the shard's.
const SLOTS_MAX: usize = 1 << (32 - SHARD_BITS);

/// An open file or directory.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) session: SessionId,
    pub(crate) inode: Arc<Inode>,
    pub(crate) file: Arc<Backing>,
    /// The flags that the descriptor has.
    pub(crate) flags: AtomicU32,
    /// The listing, of a directory.
    pub(crate) stream: Option<Mutex<Stream>>,
    /// A flock was taken through it, so that its end may let others go on.
    pub(crate) flocked: AtomicBool,
}

impl Open {
    pub(crate) fn new(session: SessionId, inode: Arc<Inode>, file: OwnedFd, flags: OFlags) -> Self {
        let stream = inode.is_dir().then(Mutex::default);
        Self {
            session,
            inode,
            file: Arc::new(Backing::new(file)),
            flags: AtomicU32::new(flags.bits()),
            stream,
            flocked: AtomicBool::new(false),
        }
    }

    /// The flags that the descriptor has.
    pub(crate) fn flags(&self) -> OFlags {
        OFlags::from_bits_retain(self.flags.load(Ordering::Relaxed))
    }
}

#[derive(Debug, Default)]
struct Shard {
    slots: Vec<Slot>,
    free: Vec<usize>,
}

#[derive(Debug, Default)]
struct Slot {
    /// Counts the users of this slot, so that a stale number finds nothing.
    generation: u32,
    open: Option<Arc<Open>>,
}

/// All open files and directories. A number is made of generation (32 bits), slot and shard.
#[derive(Debug)]
pub(crate) struct Handles {
    shards: [RwLock<Shard>; SHARDS],
    next: AtomicUsize,
}

#[allow(clippy::cast_possible_truncation, reason = "takes the number apart")]
fn parts(handle: Handle) -> (u32, usize, usize) {
    let low = handle.0 as u32;
    ((handle.0 >> 32) as u32, (low >> SHARD_BITS) as usize, low as usize % SHARDS)
}

impl Handles {
    pub(crate) fn new() -> Self {
        Self { shards: std::array::from_fn(|_| RwLock::default()), next: AtomicUsize::new(0) }
    }

    /// Adds an open file.
    pub(crate) fn insert(&self, open: Open) -> Result<Handle> {
        let shard_index = self.next.fetch_add(1, Ordering::Relaxed) % SHARDS;
        let mut shard = self.shards[shard_index].write().unwrap_or_else(PoisonError::into_inner);
        let index = match shard.free.pop() {
            Some(index) => index,
            None if shard.slots.len() < SLOTS_MAX => {
                shard.slots.push(Slot::default());
                shard.slots.len() - 1
            }
            None => return Err(Errno::NFILE),
        };
        let slot = &mut shard.slots[index];
        slot.open = Some(Arc::new(open));
        let low = (index << SHARD_BITS) | shard_index;
        Ok(Handle((u64::from(slot.generation) << 32) | low as u64))
    }

    /// Calls `f` with an open file of this session and inode.
    pub(crate) fn with<T>(
        &self,
        session: SessionId,
        ino: Ino,
        handle: Handle,
        f: impl FnOnce(&Arc<Open>) -> Result<T>,
    ) -> Result<T> {
        let (generation, index, shard) = parts(handle);
        let shard = self.shards[shard].read().unwrap_or_else(PoisonError::into_inner);
        let slot = shard.slots.get(index).filter(|slot| slot.generation == generation);
        let open = slot.and_then(|slot| slot.open.as_ref());
        f(open.filter(|open| open.session == session && open.inode.ino == ino).ok_or(Errno::BADF)?)
    }

    /// An open file of this session and inode.
    pub(crate) fn get(&self, session: SessionId, ino: Ino, handle: Handle) -> Result<Arc<Open>> {
        self.with(session, ino, handle, |open| Ok(Arc::clone(open)))
    }

    /// Takes an open file out.
    pub(crate) fn remove(&self, session: SessionId, ino: Ino, handle: Handle) -> Result<Arc<Open>> {
        self.with(session, ino, handle, |_| Ok(()))?;
        let (generation, index, shard) = parts(handle);
        let mut shard = self.shards[shard].write().unwrap_or_else(PoisonError::into_inner);
        let slot = shard.slots.get_mut(index).filter(|slot| slot.generation == generation).ok_or(Errno::BADF)?;
        let open = slot.open.take().ok_or(Errno::BADF)?;
        slot.generation = slot.generation.wrapping_add(1);
        shard.free.push(index);
        Ok(open)
    }

    /// How many files and directories are open.
    pub(crate) fn len(&self) -> usize {
        let count = |shard: &RwLock<Shard>| {
            let shard = shard.read().unwrap_or_else(PoisonError::into_inner);
            shard.slots.len() - shard.free.len()
        };
        self.shards.iter().map(count).sum()
    }
}
