//! The inodes that clients reference, by the source's number and by the host's. Both tables are sharded, so requests
//! share no single lock.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use ferry_engine::FileId;
use ferry_vfs::sync::{self, CacheAligned, lock};
use ferry_vfs::{Errno, FileType, Ino, Result, Timespec, random_u64};

use crate::int_hasher::{BuildIntHasher, IntHasher};
use crate::mount::Mount;
use crate::number::{self, HandleNumbers};
use crate::sys::HostHandle;
use crate::watch::{Directories, WatchMark, Watched};

/// Enough that workers on as many CPUs rarely contend; a power of two.
const SHARDS: usize = 64;

/// The minimum capacity of a shard.
const ROOM_MIN: usize = 1024;
/// A shard with this many times the needed capacity shrinks, so a walk over many files leaves no unused memory.
const ROOM_PART: usize = 8;

/// The host's identification of an inode, unique among existing inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) dev: u64,
    pub(crate) ino: u64,
    pub(crate) mount: u64,
}

impl Key {
    /// Returns the device and inode number as `stat` shows them, for other parts of the process.
    pub(crate) fn file_id(&self) -> FileId {
        #[allow(clippy::cast_possible_truncation, reason = "two numbers of 32 bits were put together")]
        let dev = rustix::fs::makedev((self.dev >> 32) as u32, self.dev as u32);
        FileId { dev, ino: self.ino }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below SHARDS")]
    fn shard(&self) -> usize {
        let mut mix = IntHasher::default();
        self.hash(&mut mix);
        // The upper bits, because the maps use the lower ones.
        ((mix.finish() >> 48) % SHARDS as u64) as usize
    }
}

/// An `O_PATH` descriptor of an inode, counted while it is in use.
#[derive(Debug)]
pub(crate) struct PathFd {
    fd: OwnedFd,
    open: Arc<AtomicUsize>,
}

impl PathFd {
    pub(crate) fn new(fd: OwnedFd, open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        Self { fd, open: Arc::clone(open) }
    }
}

impl AsFd for PathFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for PathFd {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A directory and a name: how to find an inode again without file handles.
pub(crate) type PlaceInDir = (Arc<Inode>, Box<[u8]>);

/// What of an inode changes.
#[derive(Debug, Default)]
struct State {
    fd: Option<Arc<PathFd>>,
    place: Option<Box<PlaceInDir>>,
}

/// An inode as it was found.
#[derive(Debug)]
pub(crate) struct FoundInode {
    pub(crate) key: Key,
    pub(crate) kind: FileType,
    pub(crate) btime: Option<Timespec>,
    pub(crate) mount: Arc<Mount>,
    pub(crate) handle: Option<HostHandle>,
    /// The root of a mount below the share's root.
    pub(crate) mount_root: bool,
    /// Key and handle were read from one descriptor, so they belong together.
    pub(crate) verified: bool,
}

/// An inode that clients know.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) ino: Ino,
    pub(crate) found: FoundInode,
    refs: AtomicU64,
    verified: AtomicBool,
    /// A descriptor is held, so the host cannot reuse the inode's number.
    held: AtomicBool,
    /// Unlinked, or about to be: the descriptor is the only access to it.
    pinned: AtomicBool,
    /// Rounds of the clock that the unused descriptor survives.
    credit: AtomicU8,
    /// At the last check it had sgid without group execution; see [`crate::Dir::lose_privileges`].
    sgid_mark: AtomicBool,
    /// The change time in nanoseconds at which no ACL restricted the mode, or 0.
    plain: AtomicU64,
    /// Its watch, if it is a directory and directories are watched.
    pub(crate) watch: WatchMark,
    state: Mutex<State>,
}

/// The maximum adopted number that encodes no handle; enough numbers are left above it.
const ADOPTED_MAX: u64 = 1 << 62;
/// Counting begins in a range from here.
const FIRST_COUNTED: u64 = 1 << 32;
const COUNTED_RANGE: u64 = 1 << 61;

/// Directories lead to other inodes, so their descriptors stay longer.
const CREDIT_DIRECTORY: u8 = 3;
const CREDIT_OTHER: u8 = 1;

/// Returns a time as one number, unique within six centuries.
fn nanoseconds(time: Timespec) -> u64 {
    time.sec.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(time.nsec.into())
}

impl Inode {
    fn new(ino: Ino, found: FoundInode) -> Self {
        Self {
            ino,
            verified: AtomicBool::new(found.verified),
            found,
            refs: AtomicU64::new(1),
            held: AtomicBool::new(false),
            pinned: AtomicBool::new(false),
            credit: AtomicU8::new(0),
            sgid_mark: AtomicBool::new(false),
            plain: AtomicU64::new(0),
            watch: WatchMark::default(),
            state: Mutex::default(),
        }
    }

    /// Returns whether a client references the inode.
    pub(crate) fn has_references(&self) -> bool {
        self.refs.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.found.kind == FileType::Directory
    }

    pub(crate) fn has_sgid_mark(&self) -> bool {
        self.sgid_mark.load(Ordering::Relaxed)
    }

    pub(crate) fn set_sgid_mark(&self, is_marked: bool) {
        if self.has_sgid_mark() != is_marked {
            self.sgid_mark.store(is_marked, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_verified(&self) -> bool {
        self.verified.load(Ordering::Acquire)
    }

    pub(crate) fn set_verified(&self) {
        self.verified.store(true, Ordering::Release);
    }

    /// Returns whether [`Self::set_known_without_acl`] was called for this change time.
    pub(crate) fn is_known_without_acl(&self, changed: Timespec) -> bool {
        let stamp = nanoseconds(changed);
        stamp != 0 && self.plain.load(Ordering::Relaxed) == stamp
    }

    /// Records that no ACL restricts the mode as of this change.
    pub(crate) fn set_known_without_acl(&self, changed: Timespec) {
        self.plain.store(nanoseconds(changed), Ordering::Relaxed);
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Acquire)
    }

    pub(crate) fn set_pinned(&self, pinned: bool) {
        self.pinned.store(pinned, Ordering::Release);
    }

    /// Pins the current or next descriptor, which is then never evicted; returns whether there is one.
    pub(crate) fn pin(&self) -> bool {
        let state = lock(&self.state);
        self.set_pinned(true);
        state.fd.is_some()
    }

    /// Returns the descriptor, if one is held.
    pub(crate) fn fd(&self) -> Option<Arc<PathFd>> {
        let fd = lock(&self.state).fd.clone();
        if fd.is_some() {
            let credit = if self.is_dir() { CREDIT_DIRECTORY } else { CREDIT_OTHER };
            if self.credit.load(Ordering::Relaxed) != credit {
                self.credit.store(credit, Ordering::Relaxed);
            }
        }
        fd
    }

    /// Stores a descriptor unless there is one; returns the stored one, and whether it is the new one.
    pub(crate) fn hold(&self, fd: Arc<PathFd>) -> (Arc<PathFd>, bool) {
        let mut state = lock(&self.state);
        if let Some(there) = &state.fd {
            return (Arc::clone(there), false);
        }
        state.fd = Some(Arc::clone(&fd));
        self.held.store(true, Ordering::Release);
        (fd, true)
    }

    /// Evicts the descriptor, unless it was used lately or is the only access to the inode.
    pub(crate) fn evict(&self) -> Option<Arc<PathFd>> {
        let mut state = lock(&self.state);
        if self.is_pinned() {
            return None;
        }
        let credit = self.credit.load(Ordering::Relaxed);
        if credit > 0 {
            self.credit.store(credit - 1, Ordering::Relaxed);
            return None;
        }
        // Without a handle or a location there is no other access to the inode.
        if self.found.handle.is_none() && state.place.is_none() {
            return None;
        }
        self.held.store(false, Ordering::Release);
        state.fd.take()
    }

    /// Returns whether a file handle leads to the inode as long as it has any name.
    pub(crate) fn has_persistent_handle(&self) -> bool {
        self.found.handle.is_some() && self.found.mount.handles_survive_eviction
    }

    /// As [`Self::evict`], if the descriptor can certainly be reopened.
    pub(crate) fn evict_idle(&self) -> Option<Arc<PathFd>> {
        if self.has_persistent_handle() { self.evict() } else { None }
    }

    pub(crate) fn place(&self) -> Option<PlaceInDir> {
        lock(&self.state).place.as_deref().cloned()
    }

    /// Records the last location of the inode, if it is needed to find the inode again.
    pub(crate) fn set_place(&self, dir: &Arc<Inode>, name: &[u8]) {
        // A server that takes over finds a mount by the location of its root.
        if self.found.handle.is_some() && !self.found.mount_root {
            return;
        }
        let former = {
            let mut state = lock(&self.state);
            match &mut state.place {
                Some(place) if Arc::ptr_eq(&place.0, dir) && *place.1 == *name => None,
                place => place.replace(Box::new((Arc::clone(dir), name.into()))),
            }
        };
        // Dropped without the lock: it may be the last reference to a directory.
        drop(former);
    }

    /// Returns whether `found` is this inode.
    fn is(&self, found: &FoundInode) -> bool {
        match (&self.found.handle, &found.handle) {
            (Some(a), Some(b)) => a == b,
            // An inode with a descriptor keeps its number. Otherwise the birth time distinguishes it from a later one.
            (None, None) => self.is_held() || (self.found.btime == found.btime && self.found.kind == found.kind),
            _ => false,
        }
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        // A chain of directories must not be dropped recursively: clients decide its depth.
        let mut next = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).place.take();
        while let Some(place) = next {
            next = Arc::into_inner(place.0)
                .and_then(|mut dir| dir.state.get_mut().unwrap_or_else(PoisonError::into_inner).place.take());
        }
    }
}

type ByIno = CacheAligned<RwLock<HashMap<u64, Arc<Inode>, BuildIntHasher>>>;
type ByKey = CacheAligned<Mutex<HashMap<Key, Arc<Inode>, BuildIntHasher>>>;

/// A quarter stays each time, so that the amortized cost of removal is constant.
fn shrink_tables<K: Eq + Hash, V>(map: &mut HashMap<K, V, BuildIntHasher>) {
    if map.capacity() > ROOM_MIN && map.len() < map.capacity() / ROOM_PART {
        map.shrink_to((map.len() * 2).max(ROOM_MIN));
    }
}

/// All inodes with references.
#[derive(Debug)]
pub(crate) struct Table {
    by_ino: Box<[ByIno]>,
    by_key: Box<[ByKey]>,
    /// The next number of an inode without one from its handle.
    next: AtomicU64,
    /// Assigns numbers to inodes of the root's own mount, if they can be found by number.
    numbers: Option<HandleNumbers>,
    /// How changes on the host are noticed, while they are.
    watched: OnceLock<Arc<Watched>>,
}

impl Table {
    /// Creates a table with the root.
    pub(crate) fn new(root: FoundInode, numbers: Option<HandleNumbers>) -> (Self, Arc<Inode>) {
        let table = Self {
            by_ino: (0..SHARDS).map(|_| ByIno::default()).collect(),
            by_key: (0..SHARDS).map(|_| ByKey::default()).collect(),
            next: AtomicU64::new(Ino::ROOT.0),
            numbers,
            watched: OnceLock::new(),
        };
        let (root, _) = table.insert(root);
        debug_assert_eq!(root.ino, Ino::ROOT);
        // A client of an earlier process may know numbers of inodes that no longer exist. They must not name other inodes, so each process
        // starts at a random number.
        table.next.store(FIRST_COUNTED + random_u64() % COUNTED_RANGE, Ordering::Relaxed);
        (table, root)
    }

    /// Tells `watched` of all current and future inodes. Call it once.
    pub(crate) fn watch(&self, watched: Arc<Watched>) {
        if self.watched.set(Arc::clone(&watched)).is_err() {
            return;
        }
        for shard in &self.by_ino {
            for inode in sync::read(shard).values().filter(|inode| inode.ino != Ino::ROOT) {
                watched.adopt(inode);
            }
        }
    }

    /// The watched directories, if changes are noticed by these.
    pub(crate) fn directories(&self) -> Option<&Directories> {
        match &**self.watched.get()? {
            Watched::Directories(directories) => Some(directories),
            Watched::FileSystems { .. } => None,
        }
    }

    /// Returns a number to compare, from before an inode's attributes were read: if it is another when the inode is in the
    /// table, a change may have been missed in between ([`Watched::heard`]).
    pub(crate) fn heard(&self) -> u64 {
        self.watched.get().map_or(0, |watched| watched.heard())
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below SHARDS")]
    fn shard(&self, ino: Ino) -> &ByIno {
        &self.by_ino[(ino.0 % SHARDS as u64) as usize]
    }

    /// Returns the inode with this number of the source.
    pub(crate) fn get(&self, ino: Ino) -> Result<Arc<Inode>> {
        self.peek(ino).ok_or(Errno::STALE)
    }

    /// Returns the inode with this number of the source, if it has references.
    pub(crate) fn peek(&self, ino: Ino) -> Option<Arc<Inode>> {
        sync::read(self.shard(ino)).get(&ino.0).cloned()
    }

    /// Returns the inode with this host identification, without a new reference.
    pub(crate) fn at(&self, key: &Key) -> Option<Arc<Inode>> {
        lock(&self.by_key[key.shard()]).get(key).cloned()
    }

    /// Returns the inode with this number of the source, with a new reference, if it has any.
    pub(crate) fn find_numbered(&self, ino: Ino) -> Option<Arc<Inode>> {
        let inode = self.peek(ino)?;
        let _shard = lock(&self.by_key[inode.found.key.shard()]);
        // The last reference is released under the shard's lock.
        if inode.refs.load(Ordering::Relaxed) == 0 {
            return None;
        }
        inode.refs.fetch_add(1, Ordering::Relaxed);
        Some(Arc::clone(&inode))
    }

    /// Returns the inode of this key, with a new reference, if a descriptor proves that it is the same.
    pub(crate) fn find_by_descriptor(&self, key: &Key) -> Option<Arc<Inode>> {
        let shard = lock(&self.by_key[key.shard()]);
        let inode = shard.get(key).filter(|inode| inode.is_held() && inode.is_verified())?;
        inode.refs.fetch_add(1, Ordering::Relaxed);
        Some(Arc::clone(inode))
    }

    /// Returns the inode with this host identification, with a new reference, if its birth time matches.
    pub(crate) fn find_by_btime(&self, key: &Key, kind: FileType, btime: Option<Timespec>) -> Option<Arc<Inode>> {
        let shard = lock(&self.by_key[key.shard()]);
        let inode = shard
            .get(key)
            .filter(|inode| inode.found.handle.is_none() && inode.found.btime == btime && inode.found.kind == kind)?;
        inode.refs.fetch_add(1, Ordering::Relaxed);
        Some(Arc::clone(inode))
    }

    /// Returns the inode that was found, with a new reference, and whether it is new to the table.
    pub(crate) fn insert(&self, found: FoundInode) -> (Arc<Inode>, bool) {
        let mut shard = lock(&self.by_key[found.key.shard()]);
        if let Some(inode) = shard.get(&found.key).filter(|inode| inode.is(&found)) {
            inode.refs.fetch_add(1, Ordering::Relaxed);
            if found.verified {
                inode.set_verified();
            }
            return (Arc::clone(inode), false);
        }
        let key = found.key;
        let inode = self.enter(found);
        // An older inode with this host number stays known by the source's number until it is forgotten.
        let former = shard.insert(key, Arc::clone(&inode));
        drop(shard);
        drop(former);
        (inode, true)
    }

    /// Assigns a number to a new inode, and enters it.
    fn enter(&self, found: FoundInode) -> Arc<Inode> {
        let by_handle = self.numbers.as_ref().filter(|numbers| numbers.is_of(&found.mount)).zip(found.handle.as_ref());
        let by_handle = by_handle.and_then(|(numbers, handle)| numbers.number(handle));
        let counted = || Ino(self.next.fetch_add(1, Ordering::Relaxed));
        let mut ino = by_handle.unwrap_or_else(counted);
        let mut by_ino = sync::write(self.shard(ino));
        // An inode may have the number whose attributes and handle are of two files, or that was adopted.
        while by_ino.contains_key(&ino.0) {
            drop(by_ino);
            ino = counted();
            by_ino = sync::write(self.shard(ino));
        }
        let inode = Arc::new(Inode::new(ino, found));
        by_ino.insert(ino.0, Arc::clone(&inode));
        if let Some(watched) = self.watched.get() {
            watched.add(&inode);
        }
        inode
    }

    /// Returns the handle of an inode that is no longer known; `None` if its number encodes none.
    pub(crate) fn handle_of(&self, ino: Ino) -> Option<HostHandle> {
        self.numbers.as_ref()?.handle(ino)
    }

    /// Enters an inode with its number and references from another process.
    pub(crate) fn adopt(&self, ino: Ino, references: u64, found: FoundInode) -> Result<Arc<Inode>> {
        let is_counted = !number::is_of_handle(ino);
        if ino.0 <= Ino::ROOT.0 || is_counted && ino.0 > ADOPTED_MAX || references == 0 {
            return Err(Errno::INVAL);
        }
        let key = found.key;
        let inode = Arc::new(Inode::new(ino, found));
        inode.refs.store(references, Ordering::Relaxed);
        let mut shard = lock(&self.by_key[key.shard()]);
        let mut by_ino = sync::write(self.shard(ino));
        if by_ino.contains_key(&ino.0) {
            return Err(Errno::EXIST);
        }
        by_ino.insert(ino.0, Arc::clone(&inode));
        if let Some(watched) = self.watched.get() {
            watched.adopt(&inode);
        }
        drop(by_ino);
        shard.entry(key).or_insert_with(|| Arc::clone(&inode));
        drop(shard);
        Ok(inode)
    }

    /// Gives references back.
    pub(crate) fn forget(&self, ino: Ino, count: u64) {
        if ino == Ino::ROOT {
            return;
        }
        let Some(inode) = self.peek(ino) else { return };
        let mut shard = lock(&self.by_key[inode.found.key.shard()]);
        // Only changed under the shard's lock, so that no lookup finds an inode that is being removed.
        let left = inode.refs.load(Ordering::Relaxed).saturating_sub(count);
        inode.refs.store(left, Ordering::Relaxed);
        if left > 0 {
            return;
        }
        let mut former = None;
        if shard.get(&inode.found.key).is_some_and(|there| Arc::ptr_eq(there, &inode)) {
            former = shard.remove(&inode.found.key);
            shrink_tables(&mut shard);
        }
        // Under the shard's lock as well: the same inode may come back with the same number.
        let mut by_ino = sync::write(self.shard(ino));
        let removed = by_ino.remove(&ino.0);
        shrink_tables(&mut by_ino);
        if let Some(watched) = self.watched.get() {
            watched.remove(&inode);
        }
        drop(by_ino);
        drop(shard);
        // Dropping either may close a descriptor, so it happens without a lock.
        drop((former, removed));
    }

    /// How many inodes have references.
    pub(crate) fn len(&self) -> usize {
        self.by_ino.iter().map(|shard| sync::read(shard).len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgotten_inodes_release_their_memory() {
        let mut map: HashMap<u64, u64, BuildIntHasher> = (0..100_000).map(|number| (number, number)).collect();
        for number in 10..100_000 {
            map.remove(&number);
            shrink_tables(&mut map);
            assert!(map.capacity() <= ROOM_MIN * 2 || map.capacity() <= (map.len() + 1) * ROOM_PART * 2);
        }
        assert!(map.capacity() <= ROOM_MIN * 2 && (0..10).all(|number| map[&number] == number));
    }
}
