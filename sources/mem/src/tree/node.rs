//! Inodes and the table of them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ferry_vfs::sync::CacheAligned;
use ferry_vfs::{Errno, FileType, Ino, Result, Timespec, sync};

use super::attrs::after;
use super::dir::Dir;
use super::xattr::Xattrs;
use crate::machine::{later, nanoseconds, timespec};
use crate::store::{Meta, Store};

/// An inode. It stays in the table while it has a name or a hold.
#[derive(Debug)]
pub(crate) struct Node<S: Store> {
    pub(crate) ino: Ino,
    pub(crate) kind: FileType,
    /// References of clients and open handles.
    holds: AtomicU64,
    /// The parent of a directory; changes only under [`super::Tree`]'s rename lock.
    pub(crate) parent: AtomicU64,
    /// The time of the last write without the exclusive lock, in nanoseconds since the epoch; 0: none since the state
    /// was refreshed. Only used if the store keeps no times.
    wrote_ns: AtomicI64,
    state: RwLock<State<S>>,
}

/// What an inode's lock guards.
#[derive(Debug)]
pub(crate) struct State<S: Store> {
    pub(crate) meta: Meta,
    pub(crate) nlink: u32,
    /// It was removed from the table.
    pub(crate) ended: bool,
    /// It has no name yet but may get one (`O_TMPFILE` without `O_EXCL`).
    pub(crate) linkable: bool,
    /// None for most inodes.
    pub(crate) xattrs: Option<Box<Xattrs>>,
    pub(crate) body: Body<S>,
}

/// What an inode has by its type.
#[derive(Debug)]
pub(crate) enum Body<S: Store> {
    File(FileBody<S>),
    Dir(Box<Dir<S>>),
    Symlink(Box<[u8]>),
    Special,
}

/// A regular file's data.
#[derive(Debug)]
pub(crate) struct FileBody<S: Store> {
    /// The last size from the store; see [`Self::is_live`].
    pub(crate) size: u64,
    pub(crate) blocks: u64,
    /// The open data, while there are handles.
    pub(crate) file: Option<Arc<S::File>>,
    /// Open handles.
    pub(crate) opens: u32,
    /// The store has data for it.
    pub(crate) has_data: bool,
    /// The descriptor was passed to a client: a mapping may change bytes even after the last close.
    pub(crate) passed: bool,
    /// The store was not queried since a replay.
    pub(crate) unknown: bool,
}

impl<S: Store> Default for FileBody<S> {
    fn default() -> Self {
        Self { size: 0, blocks: 0, file: None, opens: 0, has_data: false, passed: false, unknown: false }
    }
}

impl<S: Store> FileBody<S> {
    /// Returns whether only the store has the current size, blocks and times.
    pub(crate) fn is_live(&self) -> bool {
        self.file.is_some() || self.passed || self.unknown
    }
}

impl<S: Store> State<S> {
    pub(crate) fn new(meta: Meta, nlink: u32, body: Body<S>) -> Self {
        Self { meta, nlink, ended: false, linkable: false, xattrs: None, body }
    }

    /// The directory's names.
    pub(crate) fn dir(&self) -> Result<&Dir<S>> {
        match &self.body {
            Body::Dir(dir) => Ok(dir),
            _ => Err(Errno::NOTDIR),
        }
    }

    /// Returns the names of a directory for a change; a removed directory accepts no names.
    pub(crate) fn dir_mut(&mut self) -> Result<&mut Dir<S>> {
        match &mut self.body {
            Body::Dir(_) if self.nlink == 0 => Err(Errno::NOENT),
            Body::Dir(dir) => Ok(dir),
            _ => Err(Errno::NOTDIR),
        }
    }

    /// The regular file's data.
    pub(crate) fn file(&self) -> Result<&FileBody<S>> {
        match &self.body {
            Body::File(file) => Ok(file),
            Body::Dir(_) => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }

    /// Returns a regular file's data for a change.
    pub(crate) fn file_mut(&mut self) -> Result<&mut FileBody<S>> {
        match &mut self.body {
            Body::File(file) => Ok(file),
            Body::Dir(_) => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }
}

impl<S: Store> Node<S> {
    pub(crate) fn new(ino: Ino, parent: Ino, state: State<S>) -> Self {
        Self {
            ino,
            kind: FileType::from_raw_mode(state.meta.mode),
            holds: AtomicU64::new(0),
            parent: AtomicU64::new(parent.0),
            wrote_ns: AtomicI64::new(0),
            state: RwLock::new(state),
        }
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.kind == FileType::Directory
    }

    /// Locks the state shared. A panic elsewhere does not poison it: each change is logged before it is applied, in
    /// steps that cannot fail.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, State<S>> {
        sync::read(&self.state)
    }

    /// The state, exclusively.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, State<S>> {
        sync::write(&self.state)
    }

    /// The state of an inode that a client knows, exclusively. Another request may have ended it meanwhile.
    pub(crate) fn write_live(&self) -> Result<RwLockWriteGuard<'_, State<S>>> {
        let state = self.write();
        if state.ended { Err(Errno::STALE) } else { Ok(state) }
    }

    /// Adds a reference or a handle. The caller has a hold, or the lock of a directory with a name of the inode.
    pub(crate) fn hold(&self) {
        self.holds.fetch_add(1, Ordering::Relaxed);
    }

    /// Releases references or a handle, at most the existing ones. Returns whether none is left.
    pub(crate) fn release_hold(&self, count: u64) -> bool {
        let less = |holds: u64| Some(holds.saturating_sub(count));
        // Release and acquire: the thread that frees the inode sees all changes of other users.
        let before = self.holds.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).unwrap_or_default();
        before <= count
    }

    pub(crate) fn is_held(&self) -> bool {
        self.holds.load(Ordering::Acquire) != 0
    }

    /// Records a write with the state's lock held shared, at a time later than every time that was shown before.
    pub(crate) fn note_write(&self, meta: &Meta) {
        let now = nanoseconds(S::now());
        // It always advances, because the recorded time may have been shown.
        let next = |noted: i64| Some(if noted == 0 { after(now, [meta.mtime, meta.ctime]) } else { later(now, noted) });
        let _ = self.wrote_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }

    /// Returns the last recorded write.
    pub(crate) fn noted_write(&self) -> Option<Timespec> {
        let ns = self.wrote_ns.load(Ordering::Relaxed);
        (ns != 0).then(|| timespec(ns))
    }

    /// The state includes the recorded write now.
    pub(crate) fn forget_write(&self) {
        self.wrote_ns.store(0, Ordering::Relaxed);
    }
}

/// Enough that threads rarely contend; a power of two.
const SHARDS: usize = 64;
const SHARDS_LOG2: u32 = SHARDS.trailing_zeros();

/// Spreads inode numbers, which are sequential, over all bits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InoHasher(u64);

impl Hasher for InoHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 ^ u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 divided by the golden ratio: adjacent numbers are hashed far apart.
        self.0 = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

/// Returns whether a hash table is so sparse that it should shrink. Tables of fewer than 64 are not worth it, and a
/// table that was just shrunk to half full is not copied again soon.
pub(crate) fn is_sparse(len: usize, capacity: usize) -> bool {
    capacity >= 64 && len < capacity / 8
}

type Shard<S> = HashMap<u64, Arc<Node<S>>, BuildHasherDefault<InoHasher>>;

/// All inodes, by number.
#[derive(Debug)]
pub(crate) struct Table<S: Store>([CacheAligned<RwLock<Shard<S>>>; SHARDS]);

impl<S: Store> Table<S> {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| CacheAligned::default()))
    }

    fn shard(&self, ino: Ino) -> (&RwLock<Shard<S>>, u64) {
        let mask = (1 << SHARDS_LOG2) - 1;
        let index = usize::try_from(ino.0 & mask).expect("the mask is smaller than any usize");
        (&self.0[index], ino.0 >> SHARDS_LOG2)
    }

    /// Returns the inode of this number; `STALE` if there is none.
    pub(crate) fn get(&self, ino: Ino) -> Result<Arc<Node<S>>> {
        let (shard, key) = self.shard(ino);
        sync::read(shard).get(&key).cloned().ok_or(Errno::STALE)
    }

    pub(crate) fn insert(&self, node: Arc<Node<S>>) {
        let (shard, key) = self.shard(node.ino);
        sync::write(shard).insert(key, node);
    }

    pub(crate) fn remove(&self, ino: Ino) {
        let (shard, key) = self.shard(ino);
        let mut shard = sync::write(shard);
        let removed = shard.remove(&key);
        if is_sparse(shard.len(), shard.capacity()) {
            let len = shard.len();
            shard.shrink_to(2 * len);
        }
        drop(shard);
        // Dropped without the shard's lock, because it may take a while.
        drop(removed);
    }

    /// Returns the current inodes that are `wanted`, by number.
    pub(crate) fn select(&self, wanted: impl Fn(&Node<S>) -> bool) -> Vec<Arc<Node<S>>> {
        let mut found = Vec::new();
        for shard in &self.0 {
            // Without the shard's lock: a thread with an inode's lock may wait for the shard's.
            let all: Vec<_> = sync::read(shard).values().cloned().collect();
            found.extend(all.into_iter().filter(|node| wanted(node)));
        }
        found.sort_unstable_by_key(|node| node.ino);
        found
    }

    /// Removes all inodes, ordered by number: usually their order in memory, in which freeing is much faster.
    pub(crate) fn drain(&mut self) -> Vec<Arc<Node<S>>> {
        let mut all = Vec::new();
        for (shard, index) in self.0.iter_mut().zip(0_u64..) {
            let shard = std::mem::take(shard.get_mut().unwrap_or_else(PoisonError::into_inner));
            all.extend(shard.into_iter().map(|(key, node)| (key << SHARDS_LOG2 | index, node)));
        }
        // The numbers are in the vector, so sorting does not access the inodes.
        all.sort_unstable_by_key(|(ino, _)| *ino);
        all.into_iter().map(|(_, node)| node).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::hash::BuildHasher;

    use super::*;

    #[test]
    fn neighbouring_numbers_hash_to_different_buckets_and_tags() {
        let build = BuildHasherDefault::<InoHasher>::default();
        let hashes: Vec<u64> = (0_u64..4096).map(|number| build.hash_one(number)).collect();
        for (low, name) in [(true, "buckets"), (false, "tags")] {
            let part = |hash: &u64| if low { hash & 0xfff } else { hash >> 57 };
            let distinct: std::collections::HashSet<u64> = hashes.iter().map(part).collect();
            assert!(distinct.len() > if low { 2000 } else { 100 }, "{name}: {}", distinct.len());
        }
    }
}
