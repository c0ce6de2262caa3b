//! A table of open files and directories by handle.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use crate::sync::{CacheAligned, read, write};
use crate::{Errno, Handle, Ino, Result, SessionId};

/// The number of shards: enough that threads which open and close files rarely contend; a power of two.
const SHARDS: usize = 16;
const SHARD_BITS: u32 = SHARDS.trailing_zeros();
/// The maximum number of slots in a shard: the index has the 32 bits below the generation, less those of the shard.
const SLOTS_MAX: usize = 1 << (32 - SHARD_BITS);

#[derive(Debug)]
struct Open<T> {
    session: SessionId,
    ino: Ino,
    value: Arc<T>,
}

#[derive(Debug)]
struct Slot<T> {
    /// Counts the uses of this slot, so that a stale handle finds nothing.
    generation: u32,
    open: Option<Open<T>>,
}

#[derive(Debug)]
struct Shard<T> {
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
}

/// The maximum number of slots in a shard after [`Handles::adopt`]: a million open files in all, more than a process has
/// descriptors. The adopted numbers may be forged.
const ADOPTED_SLOTS_MAX: usize = 1 << 16;

/// The open files and directories of a source: a value for each [`Handle`]. A handle is only found with its session and
/// inode. A removed handle finds nothing, also when its slot is reused (until 2^32 later handles had the slot).
#[derive(Debug)]
pub struct Handles<T> {
    shards: [CacheAligned<RwLock<Shard<T>>>; SHARDS],
    next: AtomicUsize,
}

/// Splits a handle into generation, slot and shard.
#[allow(clippy::cast_possible_truncation, reason = "splits the number")]
fn parts(handle: Handle) -> (u32, usize, usize) {
    let low = handle.0 as u32;
    ((handle.0 >> 32) as u32, (low >> SHARD_BITS) as usize, low as usize % SHARDS)
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        let shard = |_| CacheAligned(RwLock::new(Shard { slots: Vec::new(), free: Vec::new() }));
        Self { shards: std::array::from_fn(shard), next: AtomicUsize::new(0) }
    }
}

impl<T> Handles<T> {
    /// Adds an open file. Shards are filled in turn, so that threads rarely contend.
    ///
    /// # Errors
    /// `NFILE` if the shard has 2^28 files.
    pub fn insert(&self, session: SessionId, ino: Ino, value: T) -> Result<Handle> {
        let shard_index = self.next.fetch_add(1, Ordering::Relaxed) % SHARDS;
        let mut shard = write(&self.shards[shard_index]);
        let index = match shard.free.pop() {
            Some(index) => index,
            None if shard.slots.len() < SLOTS_MAX => {
                shard.slots.push(Slot { generation: 0, open: None });
                shard.slots.len() - 1
            }
            None => return Err(Errno::NFILE),
        };
        let slot = &mut shard.slots[index];
        slot.open = Some(Open { session, ino, value: Arc::new(value) });
        let low = index << SHARD_BITS | shard_index;
        Ok(Handle((u64::from(slot.generation) << 32) | low as u64))
    }

    /// Adds an open file under the number that it had in another process.
    ///
    /// # Errors
    /// `NFILE` for a number that is too large, `EXIST` for one that is in use.
    pub fn adopt(&self, session: SessionId, ino: Ino, handle: Handle, value: T) -> Result<()> {
        let (generation, index, shard) = parts(handle);
        let mut shard = write(&self.shards[shard]);
        if index >= ADOPTED_SLOTS_MAX {
            return Err(Errno::NFILE);
        }
        while shard.slots.len() <= index {
            let new = shard.slots.len();
            shard.slots.push(Slot { generation: 0, open: None });
            shard.free.push(new);
        }
        let slot = &mut shard.slots[index];
        if slot.open.is_some() {
            return Err(Errno::EXIST);
        }
        slot.generation = generation;
        slot.open = Some(Open { session, ino, value: Arc::new(value) });
        shard.free.retain(|free| *free != index);
        Ok(())
    }

    /// Calls `f` with an open file of this session and inode. The read lock of its shard is held.
    ///
    /// # Errors
    /// `BADF` if there is none, and those of `f`.
    pub fn with<R>(
        &self,
        session: SessionId,
        ino: Ino,
        handle: Handle,
        f: impl FnOnce(&Arc<T>) -> Result<R>,
    ) -> Result<R> {
        let (generation, index, shard) = parts(handle);
        let shard = read(&self.shards[shard]);
        let slot = shard.slots.get(index).filter(|slot| slot.generation == generation);
        let open = slot.and_then(|slot| slot.open.as_ref());
        f(&open.filter(|open| open.session == session && open.ino == ino).ok_or(Errno::BADF)?.value)
    }

    /// Returns an open file of this session and inode.
    ///
    /// # Errors
    /// `BADF` if there is none.
    pub fn get(&self, session: SessionId, ino: Ino, handle: Handle) -> Result<Arc<T>> {
        self.with(session, ino, handle, |open| Ok(Arc::clone(open)))
    }

    /// Removes an open file and returns it.
    ///
    /// # Errors
    /// `BADF` if there is none.
    pub fn remove(&self, session: SessionId, ino: Ino, handle: Handle) -> Result<Arc<T>> {
        let (generation, index, shard) = parts(handle);
        let mut shard = write(&self.shards[shard]);
        let slot = shard.slots.get_mut(index).filter(|slot| slot.generation == generation).ok_or(Errno::BADF)?;
        let open = slot.open.take_if(|open| open.session == session && open.ino == ino).ok_or(Errno::BADF)?;
        slot.generation = slot.generation.wrapping_add(1);
        shard.free.push(index);
        Ok(open.value)
    }

    /// Returns the number of open files and directories.
    pub fn len(&self) -> usize {
        let count = |shard: &CacheAligned<RwLock<Shard<T>>>| {
            let shard = read(shard);
            shard.slots.len() - shard.free.len()
        };
        self.shards.iter().map(count).sum()
    }

    /// Whether nothing is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_found_by_its_session_with_its_inode_until_it_is_removed() {
        let handles = Handles::default();
        let (session, other) = (SessionId::unique(), SessionId::unique());
        let made: Vec<Handle> = (0..40).map(|n| handles.insert(session, Ino(n), n).unwrap()).collect();
        assert_eq!((handles.len(), handles.is_empty()), (40, false));
        for (n, handle) in made.iter().enumerate() {
            let ino = Ino(n as u64);
            assert_eq!(handles.get(session, ino, *handle).as_deref(), Ok(&ino.0));
            assert_eq!(handles.get(other, ino, *handle), Err(Errno::BADF));
            assert_eq!(handles.get(session, Ino(99), *handle), Err(Errno::BADF));
            assert_eq!(handles.remove(other, ino, *handle), Err(Errno::BADF));
            assert_eq!(handles.remove(session, Ino(99), *handle), Err(Errno::BADF));
            assert_eq!(handles.remove(session, ino, *handle).as_deref(), Ok(&ino.0));
            assert_eq!(handles.remove(session, ino, *handle), Err(Errno::BADF));
        }
        assert!(handles.is_empty());
        // The places are used again, the numbers are not.
        let again: Vec<Handle> = (0..40).map(|n| handles.insert(session, Ino(n), n).unwrap()).collect();
        assert!(again.iter().all(|handle| !made.contains(handle)));
        for handle in made.iter().chain([&Handle(u64::MAX), &Handle(1 << 31)]) {
            assert!((0..40).all(|n| handles.get(session, Ino(n), *handle).is_err()));
        }
    }

    #[test]
    fn adopted_handles_keep_their_numbers_and_leave_the_others_free() {
        let session = SessionId::unique();
        let before = Handles::default();
        let made: Vec<Handle> = (0..100).map(|n| before.insert(session, Ino(n), n).unwrap()).collect();
        let after = Handles::default();
        for (n, handle) in made.iter().enumerate().filter(|(n, _)| n % 3 == 0).rev() {
            after.adopt(session, Ino(n as u64), *handle, n as u64).unwrap();
            assert_eq!(after.adopt(session, Ino(n as u64), *handle, 0), Err(Errno::EXIST));
        }
        assert_eq!(after.len(), 34);
        let more: Vec<Handle> = (0..100).map(|n| after.insert(session, Ino(1000), n).unwrap()).collect();
        assert!(more.iter().all(|new| made.iter().step_by(3).all(|old| old != new)));
        for (n, handle) in made.iter().enumerate().step_by(3) {
            assert_eq!(after.remove(session, Ino(n as u64), *handle).as_deref(), Ok(&(n as u64)));
        }
        for wild in [Handle(u64::MAX), Handle(u64::from(u32::MAX))] {
            assert_eq!(after.adopt(session, Ino(1), wild, 0), Err(Errno::NFILE));
        }
    }
}
