//! Open files and directories, by number.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use ferry_vfs::{Errno, Handle, Ino, OFlags, Result, SessionId};

use crate::store::Store;
use crate::tree::Node;

/// So many that threads which open and close seldom meet; a power of two.
const SHARDS: usize = 16;
const SHARD_BITS: u32 = SHARDS.trailing_zeros();
/// The index has the 32 bits below the generation, less the shard's.
const SLOTS_MAX: usize = 1 << (32 - SHARD_BITS);

/// An open file or directory.
#[derive(Debug)]
pub(crate) struct Open<S: Store> {
    pub(crate) session: SessionId,
    pub(crate) node: Arc<Node<S>>,
    /// The flags that it was opened with.
    pub(crate) flags: OFlags,
    /// A lock was asked for through it, so its end must be told to the locks.
    pub(crate) locked: AtomicBool,
}

#[derive(Debug)]
struct Slot<S: Store> {
    /// Counts the users of this slot, so that a stale number finds nothing.
    generation: u32,
    open: Option<Arc<Open<S>>>,
}

#[derive(Debug)]
struct Shard<S: Store> {
    slots: Vec<Slot<S>>,
    free: Vec<usize>,
}

/// All open files and directories. A number is made of generation (32 bits), slot and shard.
#[derive(Debug)]
pub(crate) struct Handles<S: Store> {
    shards: [RwLock<Shard<S>>; SHARDS],
    next: AtomicUsize,
}

/// Generation, slot and shard.
#[allow(clippy::cast_possible_truncation, reason = "takes the number apart")]
fn parts(handle: Handle) -> (u32, usize, usize) {
    let low = handle.0 as u32;
    ((handle.0 >> 32) as u32, (low >> SHARD_BITS) as usize, low as usize % SHARDS)
}

impl<S: Store> Handles<S> {
    pub(crate) fn new() -> Self {
        let shard = |_| RwLock::new(Shard { slots: Vec::new(), free: Vec::new() });
        Self { shards: std::array::from_fn(shard), next: AtomicUsize::new(0) }
    }

    /// Adds an open file. Each thread prefers a shard of its own only by chance: they are filled in turn.
    pub(crate) fn insert(&self, open: Open<S>) -> Result<Handle> {
        let shard_index = self.next.fetch_add(1, Ordering::Relaxed) % SHARDS;
        let mut shard = self.shards[shard_index].write().unwrap_or_else(PoisonError::into_inner);
        let index = match shard.free.pop() {
            Some(index) => index,
            None if shard.slots.len() < SLOTS_MAX => {
                shard.slots.push(Slot { generation: 0, open: None });
                shard.slots.len() - 1
            }
            None => return Err(Errno::NFILE),
        };
        let slot = &mut shard.slots[index];
        slot.open = Some(Arc::new(open));
        let low = (index << SHARD_BITS) | shard_index;
        Ok(Handle((u64::from(slot.generation) << 32) | low as u64))
    }

    /// Calls `f` with an open file of this session and inode, with the lock of its shard held shared.
    pub(crate) fn with<T>(
        &self,
        session: SessionId,
        ino: Ino,
        handle: Handle,
        f: impl FnOnce(&Arc<Open<S>>) -> Result<T>,
    ) -> Result<T> {
        let (generation, index, shard) = parts(handle);
        let shard = self.shards[shard].read().unwrap_or_else(PoisonError::into_inner);
        let slot = shard.slots.get(index).filter(|slot| slot.generation == generation);
        let open = slot.and_then(|slot| slot.open.as_ref());
        f(open.filter(|open| open.session == session && open.node.ino == ino).ok_or(Errno::BADF)?)
    }

    /// An open file of this session and inode.
    pub(crate) fn get(&self, session: SessionId, ino: Ino, handle: Handle) -> Result<Arc<Open<S>>> {
        self.with(session, ino, handle, |open| Ok(Arc::clone(open)))
    }

    /// Takes an open file out.
    pub(crate) fn remove(&self, session: SessionId, ino: Ino, handle: Handle) -> Result<Arc<Open<S>>> {
        let (generation, index, shard) = parts(handle);
        let mut shard = self.shards[shard].write().unwrap_or_else(PoisonError::into_inner);
        let slot = shard.slots.get_mut(index).filter(|slot| slot.generation == generation).ok_or(Errno::BADF)?;
        let known = slot.open.as_ref().is_some_and(|open| open.session == session && open.node.ino == ino);
        let open = slot.open.take_if(|_| known).ok_or(Errno::BADF)?;
        slot.generation = slot.generation.wrapping_add(1);
        shard.free.push(index);
        Ok(open)
    }

    /// How many files and directories are open.
    pub(crate) fn len(&self) -> usize {
        let count = |shard: &RwLock<Shard<S>>| {
            let shard = shard.read().unwrap_or_else(PoisonError::into_inner);
            shard.slots.len() - shard.free.len()
        };
        self.shards.iter().map(count).sum()
    }
}
