//! The inodes that clients hold references to, by our number and by the host's. Both tables are sharded;
//! no lock is shared by all requests.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use ferry_vfs::{Errno, FileId, FileType, Ino, Result, Timespec};

use crate::mount::Mount;
use crate::number::{self, HandleNumbers};
use crate::sys::HostHandle;
use crate::watch::HandleIndex;

/// So many that workers on as many CPUs seldom meet; a power of two.
const SHARDS: usize = 64;

/// Entries that a shard keeps room for, whatever it holds.
const ROOM_MIN: usize = 1024;
/// One that could hold so many times what it holds gives room back: a walk over millions of files leaves none of it behind.
const ROOM_PART: usize = 8;

/// Locks, also after a panic elsewhere: no critical section of this crate leaves its data half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mixes integers: the keys are numbers that the kernel or this crate chose.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IntHasher(u64);

impl Hasher for IntHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64((*byte).into());
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = u128::from(self.0 ^ value ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        #[allow(clippy::cast_possible_truncation, reason = "folds the upper half onto the lower")]
        {
            self.0 = mixed as u64 ^ (mixed >> 64) as u64;
        }
    }
}

/// Builds [`IntHasher`].
pub(crate) type BuildIntHasher = BuildHasherDefault<IntHasher>;

/// Where the host has an inode: unique among the inodes that exist at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) dev: u64,
    pub(crate) ino: u64,
    pub(crate) mount: u64,
}

impl Key {
    /// As `stat` has it, for what other parts of the process know of the file.
    pub(crate) fn file_id(&self) -> FileId {
        #[allow(clippy::cast_possible_truncation, reason = "two numbers of 32 bits were put together")]
        let dev = rustix::fs::makedev((self.dev >> 32) as u32, self.dev as u32);
        FileId { dev, ino: self.ino }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below SHARDS")]
    fn shard(&self) -> usize {
        let mut mix = IntHasher::default();
        self.hash(&mut mix);
        // The upper bits: the maps use the lower ones.
        ((mix.finish() >> 48) % SHARDS as u64) as usize
    }
}

/// An `O_PATH` descriptor of an inode, counted as long as anybody uses it.
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

/// A directory and a name that led to an inode: how to find it again where there are no file handles.
pub(crate) type PlaceInDir = (Arc<Inode>, Box<[u8]>);

/// What of an inode changes.
#[derive(Debug, Default)]
struct State {
    fd: Option<Arc<PathFd>>,
    place: Option<Box<PlaceInDir>>,
}

/// What is known of an inode when it is first met.
#[derive(Debug)]
pub(crate) struct FoundInode {
    pub(crate) key: Key,
    pub(crate) kind: FileType,
    pub(crate) btime: Option<Timespec>,
    pub(crate) mount: Arc<Mount>,
    pub(crate) handle: Option<HostHandle>,
    /// The root of a mount below the share's root.
    pub(crate) mount_root: bool,
    /// Key and handle were read from one descriptor, so they surely belong together.
    pub(crate) verified: bool,
}

/// An inode that clients know.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) ino: Ino,
    pub(crate) found: FoundInode,
    refs: AtomicU64,
    verified: AtomicBool,
    /// A descriptor is held, so that the host cannot give this inode's number to another.
    held: AtomicBool,
    /// Unlinked, or about to be: the descriptor is the only way left to it.
    pinned: AtomicBool,
    /// Rounds of the eviction clock that this inode's descriptor survives without use.
    credit: AtomicU8,
    /// When it was looked at last, it had sgid without group execution; see [`crate::Dir::lose_privileges`].
    sgid_mark: AtomicBool,
    /// Of which change it was found that no ACL takes anything away from the mode: its time, in nanoseconds, or 0.
    plain: AtomicU64,
    state: Mutex<State>,
}

/// The greatest number that is adopted and not made of a handle: it leaves more numbers than anybody will ever use.
const ADOPTED_MAX: u64 = 1 << 62;

/// Directories lead to other inodes: their descriptors stay longer.
const CREDIT_DIRECTORY: u8 = 3;
const CREDIT_OTHER: u8 = 1;

/// A time as one number, which no other of six centuries has.
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
            state: Mutex::default(),
        }
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

    /// Whether this is the change of which [`Self::set_known_without_acl`] was told.
    pub(crate) fn is_known_without_acl(&self, changed: Timespec) -> bool {
        let stamp = nanoseconds(changed);
        stamp != 0 && self.plain.load(Ordering::Relaxed) == stamp
    }

    /// As it was changed last, no ACL takes anything away from the mode.
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

    /// Pins it, so that nobody gives up the descriptor that it holds, or is given next; returns whether it holds one.
    pub(crate) fn pin(&self) -> bool {
        let state = lock(&self.state);
        self.set_pinned(true);
        state.fd.is_some()
    }

    /// The descriptor, if one is held.
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

    /// Keeps a descriptor, unless there is one; returns the one that is kept, and whether it is this one.
    pub(crate) fn hold(&self, fd: Arc<PathFd>) -> (Arc<PathFd>, bool) {
        let mut state = lock(&self.state);
        if let Some(there) = &state.fd {
            return (Arc::clone(there), false);
        }
        state.fd = Some(Arc::clone(&fd));
        self.held.store(true, Ordering::Release);
        (fd, true)
    }

    /// Gives the descriptor up, unless it was used lately or is the only way to the inode.
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
        // Without a handle or a place there is no other way to the inode.
        if self.found.handle.is_none() && state.place.is_none() {
            return None;
        }
        self.held.store(false, Ordering::Release);
        state.fd.take()
    }

    /// Whether a file handle leads to the inode, whatever becomes of its name, for as long as it has one.
    pub(crate) fn has_persistent_handle(&self) -> bool {
        self.found.handle.is_some() && self.found.mount.lasting
    }

    /// As [`Self::evict`], if the descriptor can surely be had again.
    pub(crate) fn evict_idle(&self) -> Option<Arc<PathFd>> {
        if self.has_persistent_handle() { self.evict() } else { None }
    }

    pub(crate) fn place(&self) -> Option<PlaceInDir> {
        lock(&self.state).place.as_deref().cloned()
    }

    /// Remembers where the inode was found last, where that is the way to find it again.
    pub(crate) fn set_place(&self, dir: &Arc<Inode>, name: &[u8]) {
        // Where a mount's root is, is also how a server that takes over finds the mount.
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
        // Dropped only now: it may be the last reference to a directory.
        drop(former);
    }

    /// Whether `found` is this inode, found again.
    fn is(&self, found: &FoundInode) -> bool {
        match (&self.found.handle, &found.handle) {
            (Some(a), Some(b)) => a == b,
            // A held inode keeps its number. One that is not held is told from a later one with the same number
            // by its birth.
            (None, None) => self.is_held() || (self.found.btime == found.btime && self.found.kind == found.kind),
            _ => false,
        }
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        // A chain of directories must not be dropped by recursion: clients decide how deep it is.
        let mut next = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).place.take();
        while let Some(place) = next {
            next = Arc::into_inner(place.0)
                .and_then(|mut dir| dir.state.get_mut().unwrap_or_else(PoisonError::into_inner).place.take());
        }
    }
}

type ByIno = RwLock<HashMap<u64, Arc<Inode>, BuildIntHasher>>;
type ByKey = Mutex<HashMap<Key, Arc<Inode>, BuildIntHasher>>;

/// Each time a quarter stays, so that removing takes no longer on the whole.
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
    /// The next number of an inode that has none by its handle.
    next: AtomicU64,
    /// What numbers inodes of the root's own mount, where those can be found by them.
    numbers: Option<HandleNumbers>,
    /// The same inodes by their handles, while the host's changes are watched.
    watched: OnceLock<Arc<HandleIndex>>,
}

impl Table {
    /// A table that holds the root.
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
        (table, root)
    }

    /// Has inodes entered into an index of those that are watched from now on; those that are there already, too. Once.
    pub(crate) fn watch(&self, known: Arc<HandleIndex>) {
        if self.watched.set(Arc::clone(&known)).is_err() {
            return;
        }
        for shard in &self.by_ino {
            for inode in shard.read().unwrap_or_else(PoisonError::into_inner).values() {
                known.add(inode);
            }
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below SHARDS")]
    fn shard(&self, ino: Ino) -> &ByIno {
        &self.by_ino[(ino.0 % SHARDS as u64) as usize]
    }

    /// The inode with this number of ours.
    pub(crate) fn get(&self, ino: Ino) -> Result<Arc<Inode>> {
        self.peek(ino).ok_or(Errno::STALE)
    }

    /// The inode with this number of ours, if it has references.
    pub(crate) fn peek(&self, ino: Ino) -> Option<Arc<Inode>> {
        self.shard(ino).read().unwrap_or_else(PoisonError::into_inner).get(&ino.0).cloned()
    }

    /// The inode at this place of the host, without a new reference.
    pub(crate) fn at(&self, key: &Key) -> Option<Arc<Inode>> {
        lock(&self.by_key[key.shard()]).get(key).cloned()
    }

    /// The inode with this number of ours, with a new reference, if it has any.
    pub(crate) fn find_numbered(&self, ino: Ino) -> Option<Arc<Inode>> {
        let inode = self.peek(ino)?;
        let _shard = lock(&self.by_key[inode.found.key.shard()]);
        // The last one is given back under the shard's lock.
        if inode.refs.load(Ordering::Relaxed) == 0 {
            return None;
        }
        inode.refs.fetch_add(1, Ordering::Relaxed);
        Some(Arc::clone(&inode))
    }

    /// The inode at this place of the host, with a new reference, if a descriptor proves that it is still that one.
    pub(crate) fn find_by_descriptor(&self, key: &Key) -> Option<Arc<Inode>> {
        let shard = lock(&self.by_key[key.shard()]);
        let inode = shard.get(key).filter(|inode| inode.is_held() && inode.is_verified())?;
        inode.refs.fetch_add(1, Ordering::Relaxed);
        Some(Arc::clone(inode))
    }

    /// The inode at this place of the host, with a new reference, if it was born then.
    pub(crate) fn find_by_btime(&self, key: &Key, kind: FileType, btime: Option<Timespec>) -> Option<Arc<Inode>> {
        let shard = lock(&self.by_key[key.shard()]);
        let inode = shard
            .get(key)
            .filter(|inode| inode.found.handle.is_none() && inode.found.btime == btime && inode.found.kind == kind)?;
        inode.refs.fetch_add(1, Ordering::Relaxed);
        Some(Arc::clone(inode))
    }

    /// The inode that was found, with a new reference, and whether it is new to the table.
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
        // An older inode that had this number on the host stays known by our number until it is forgotten.
        let former = shard.insert(key, Arc::clone(&inode));
        drop(shard);
        drop(former);
        (inode, true)
    }

    /// Gives a new inode its number, and enters it by that.
    fn enter(&self, found: FoundInode) -> Arc<Inode> {
        let by_handle = self.numbers.as_ref().filter(|numbers| numbers.is_of(&found.mount)).zip(found.handle.as_ref());
        let by_handle = by_handle.and_then(|(numbers, handle)| numbers.number(handle));
        let counted = || Ino(self.next.fetch_add(1, Ordering::Relaxed));
        let mut ino = by_handle.unwrap_or_else(counted);
        let mut by_ino = self.shard(ino).write().unwrap_or_else(PoisonError::into_inner);
        // An inode that had its attributes and handle read of two files may have it, or one that was adopted.
        while by_ino.contains_key(&ino.0) {
            drop(by_ino);
            ino = counted();
            by_ino = self.shard(ino).write().unwrap_or_else(PoisonError::into_inner);
        }
        let inode = Arc::new(Inode::new(ino, found));
        by_ino.insert(ino.0, Arc::clone(&inode));
        if let Some(known) = self.watched.get() {
            known.add(&inode);
        }
        inode
    }

    /// The handle of an inode that is not known any more; `None` if its number was not made of one.
    pub(crate) fn handle_of(&self, ino: Ino) -> Option<HostHandle> {
        self.numbers.as_ref()?.handle(ino)
    }

    /// Lets an inode be known by a number that it had in another process, with so many references.
    pub(crate) fn adopt(&self, ino: Ino, references: u64, found: FoundInode) -> Result<Arc<Inode>> {
        let is_counted = !number::is_of_handle(ino);
        if ino.0 <= Ino::ROOT.0 || is_counted && ino.0 > ADOPTED_MAX || references == 0 {
            return Err(Errno::INVAL);
        }
        let key = found.key;
        let inode = Arc::new(Inode::new(ino, found));
        inode.refs.store(references, Ordering::Relaxed);
        let mut shard = lock(&self.by_key[key.shard()]);
        let mut by_ino = self.shard(ino).write().unwrap_or_else(PoisonError::into_inner);
        if by_ino.contains_key(&ino.0) {
            return Err(Errno::EXIST);
        }
        by_ino.insert(ino.0, Arc::clone(&inode));
        if let Some(known) = self.watched.get() {
            known.add(&inode);
        }
        drop(by_ino);
        shard.entry(key).or_insert_with(|| Arc::clone(&inode));
        drop(shard);
        if is_counted {
            self.next.fetch_max(ino.0 + 1, Ordering::Relaxed);
        }
        Ok(inode)
    }

    /// Gives references back.
    pub(crate) fn forget(&self, ino: Ino, count: u64) {
        if ino == Ino::ROOT {
            return;
        }
        let Some(inode) = self.peek(ino) else { return };
        let mut shard = lock(&self.by_key[inode.found.key.shard()]);
        // Only changed under the shard's lock, so that nobody finds an inode that is about to go.
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
        // Under the shard's lock as well: the same inode may come back, by the same number.
        let mut by_ino = self.shard(ino).write().unwrap_or_else(PoisonError::into_inner);
        let removed = by_ino.remove(&ino.0);
        shrink_tables(&mut by_ino);
        if let Some(known) = self.watched.get() {
            known.remove(&inode);
        }
        drop(by_ino);
        drop(shard);
        // Both go, and with them perhaps a descriptor, with no lock held.
        drop((former, removed));
    }

    /// How many inodes have references.
    pub(crate) fn len(&self) -> usize {
        self.by_ino.iter().map(|shard| shard.read().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_forgotten_takes_no_room() {
        let mut map: HashMap<u64, u64, BuildIntHasher> = (0..100_000).map(|number| (number, number)).collect();
        for number in 10..100_000 {
            map.remove(&number);
            shrink_tables(&mut map);
            assert!(map.capacity() <= ROOM_MIN * 2 || map.capacity() <= (map.len() + 1) * ROOM_PART * 2);
        }
        assert!(map.capacity() <= ROOM_MIN * 2 && (0..10).all(|number| map[&number] == number));
    }
}
