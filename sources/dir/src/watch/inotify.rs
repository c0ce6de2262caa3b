//! The directories that clients know, watched with inotify: for processes that may not watch whole file systems, and
//! file systems without handles.
//!
//! An event names a directory and a name in it. The index of names finds the inode that a client has under that name,
//! so no event costs a system call, and nothing is opened by its path. A lookup enters a name into the index *before*
//! it reads the attributes, so a change is either in the attributes or notified.
//!
//! The number of watches is bounded. When there are too many, the least recently used quarter is removed, and clients
//! revalidate everything: so they trust nothing in a directory that is not watched any more.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use ferry_vfs::sync::lock;
use ferry_vfs::{Change, Changes, Errno, Ino, Name, NameBuf, Result};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use super::WakeFd;
use super::changes::changes_of;
use super::directory_history::{DirectoryEvent, DirectoryHistory};
use super::history::DELAY;
use super::history::History;
use super::own::{OperationGuard, Operations};
use crate::int_hasher::IntHasher;
use crate::table::Inode;

/// The maximum number of watched directories, unless the kernel allows fewer (`fs.inotify.max_user_watches`). A watch
/// and the inode that it keeps in memory take the kernel about 2 KiB.
pub(super) const DIRECTORIES_MAX: usize = 65_536;
/// If the kernel allows fewer, none is removed for another: clients would revalidate everything at nearly each lookup.
const DIRECTORIES_MIN: usize = 64;
/// The part that is removed at once, so that revalidation is rare.
const EVICTED_PART: usize = 4;
/// The maximum number of names by which one inode is found. A further one replaces them all, and clients look up again those
/// that they use.
const NAMES_MAX: usize = 256;
/// The maximum number of stale entries of the clock before they are removed.
const SLACK: usize = 1024;
/// `struct inotify_event` up to its name: watch descriptor, mask, cookie, length.
const HEADER_BYTES: usize = 16;

/// All changes of what clients cache, as for fanotify. `EXCL_UNLINK`: not those of files without a name here.
const MASK: WatchFlags = WatchFlags::MODIFY
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::EXCL_UNLINK);

// `changes_of` takes the masks of both.
const _: () = assert!(
    libc::IN_MODIFY as u64 == libc::FAN_MODIFY
        && libc::IN_CLOSE_WRITE as u64 == libc::FAN_CLOSE_WRITE
        && libc::IN_ATTRIB as u64 == libc::FAN_ATTRIB
        && libc::IN_CREATE as u64 == libc::FAN_CREATE
        && libc::IN_DELETE as u64 == libc::FAN_DELETE
        && libc::IN_MOVED_FROM as u64 == libc::FAN_MOVED_FROM
        && libc::IN_MOVED_TO as u64 == libc::FAN_MOVED_TO
);

/// A hash of a directory's number and a name in it. Names with equal hashes are published together, which costs an
/// unnecessary revalidation.
type NameHash = u64;

fn hash(dir: Ino, name: &[u8]) -> NameHash {
    let mut mix = IntHasher::default();
    (dir.0, name).hash(&mut mix);
    mix.finish()
}

/// The names by which clients found inodes. A name that an inode has lost stays: a client may have found another inode
/// there before the event arrives, and that entry must not be removed.
#[derive(Debug, Default)]
struct NameIndex {
    by_name: BTreeSet<(NameHash, Ino)>,
    by_ino: BTreeSet<(Ino, NameHash)>,
}

impl NameIndex {
    fn names(&self, ino: Ino) -> impl Iterator<Item = (NameHash, Ino)> {
        self.by_ino.range((ino, 0)..=(ino, u64::MAX)).map(|(ino, name)| (*name, *ino))
    }

    fn is_full(&self, ino: Ino) -> bool {
        self.names(ino).count() >= NAMES_MAX
    }

    fn find(&self, name: NameHash) -> Vec<Ino> {
        self.by_name.range((name, Ino(0))..=(name, Ino(u64::MAX))).map(|(_, ino)| *ino).collect()
    }

    /// Returns false if it is there already.
    fn insert(&mut self, name: NameHash, ino: Ino) -> bool {
        if self.by_name.contains(&(name, ino)) {
            return false;
        }
        if self.is_full(ino) {
            self.forget(ino);
        }
        self.by_ino.insert((ino, name));
        self.by_name.insert((name, ino))
    }

    /// Removes all names of an inode.
    fn forget(&mut self, ino: Ino) {
        let names: Vec<_> = self.names(ino).collect();
        for (name, ino) in names {
            self.by_name.remove(&(name, ino));
            self.by_ino.remove(&(ino, name));
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// By watch descriptor; several inodes are one directory that was found through several mounts.
    watched: HashMap<i32, Vec<Arc<Inode>>>,
    /// The clock of watch descriptors for eviction; some are stale.
    clock: VecDeque<i32>,
    names: NameIndex,
    /// The last name that was moved away, and the cookie that the event of its new place has as well.
    moved: Option<(u32, Vec<NameHash>)>,
    /// Directories are no longer watched, or were not while clients knew them.
    is_behind: bool,
    /// Files that were found under another name than before: writes by that name may have been missed.
    renamed: HashSet<Ino>,
}

impl State {
    /// Removes a watch from the tables.
    fn take(&mut self, wd: i32) -> bool {
        let inodes = self.watched.remove(&wd).unwrap_or_default();
        inodes.iter().for_each(|inode| inode.watch.set(None));
        !inodes.is_empty()
    }
}

/// The watched directories.
pub(crate) struct Directories {
    inotify: OwnedFd,
    max: usize,
    state: Mutex<State>,
    wake_fd: Arc<WakeFd>,
    /// It was logged that some directories cannot be watched.
    has_warned: AtomicBool,
    /// The events for listeners, if there are any.
    history: OnceLock<Mutex<DirectoryHistory>>,
    /// What this process does meanwhile.
    operations: Operations,
}

impl fmt::Debug for Directories {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Directories")
    }
}

impl AsFd for Directories {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

impl Directories {
    pub(super) fn new(max: usize, wake_fd: Arc<WakeFd>) -> Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let has_warned = AtomicBool::new(false);
        Ok(Self {
            inotify,
            max: max.max(1),
            state: Mutex::default(),
            wake_fd,
            has_warned,
            history: OnceLock::new(),
            operations: Operations::default(),
        })
    }

    /// Tells what happens from now on, too.
    pub(super) fn tell_events(&self, changes: &Changes) {
        self.history.get_or_init(|| Mutex::new(DirectoryHistory::new(changes)));
    }

    /// Begins an operation of a client, if it is told what happens.
    pub(crate) fn begin_operation(&self) -> Option<OperationGuard<'_>> {
        self.history.get().map(|_| self.operations.begin())
    }

    /// A client's file that was open for writing is closed, by an operation under way.
    pub(crate) fn closed(&self, ino: Ino) {
        if let Some(history) = self.history.get() {
            lock(history).closed(ino);
        }
    }

    /// Waits until it is recorded what clients have done, if it is told what happens.
    pub(super) fn wait_for_records(&self) {
        if self.history.get().is_some() {
            std::thread::sleep(DELAY);
            self.operations.wait();
        }
    }

    /// Whether half of a rename waits for the other.
    pub(super) fn is_waiting(&self) -> bool {
        self.history.get().is_some_and(|history| lock(history).is_waiting())
    }

    /// Returns what happened as far as nothing more can come of it.
    pub(super) fn flush(&self) -> Vec<ferry_vfs::Event> {
        let mut told = History::default();
        if let Some(history) = self.history.get() {
            lock(history).flush(&mut told);
        }
        told.finish()
    }

    /// How many directories are watched.
    pub(crate) fn len(&self) -> usize {
        lock(&self.state).watched.len()
    }

    /// Notes that a directory is in use. Returns true if it is not watched.
    pub(crate) fn is_new(&self, dir: &Inode) -> bool {
        !dir.watch.is_used()
    }

    /// Watches a directory, whose descriptor is `fd`. Returns true if it was not watched before.
    pub(crate) fn watch(&self, dir: &Arc<Inode>, fd: BorrowedFd<'_>) -> bool {
        let state = &mut *lock(&self.state);
        if dir.watch.get().is_some() {
            return false;
        }
        if state.watched.len() >= self.max {
            self.evict(state);
        }
        // The descriptor, not a path: the host may have put another directory at its place.
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let add = || inotify::add_watch(&self.inotify, &link, MASK);
        let mut added = add();
        if added == Err(Errno::NOSPC) && state.watched.len() >= DIRECTORIES_MIN {
            self.evict(state);
            added = add();
        }
        let wd = match added {
            Ok(wd) => wd,
            Err(error) => {
                if !self.has_warned.swap(true, Ordering::Relaxed) {
                    let why = if error == Errno::NOSPC {
                        "fs.inotify.max_user_watches is reached".into()
                    } else {
                        error.to_string()
                    };
                    tracing::warn!("cannot watch some directories: {why}; changes in them appear when caches expire");
                }
                return false;
            }
        };
        let same = state.watched.entry(wd).or_default();
        if same.is_empty() {
            state.clock.push_back(wd);
        }
        same.push(Arc::clone(dir));
        dir.watch.set(Some(wd));
        // Forgotten meanwhile: the table does not remove it any more.
        if !dir.has_references() {
            self.unwatch(state, dir);
        }
        if state.clock.len() > 2 * state.watched.len() + SLACK {
            let watched = &state.watched;
            state.clock.retain(|wd| watched.contains_key(wd));
        }
        true
    }

    /// Removes the least recently used part of the watches.
    fn evict(&self, state: &mut State) {
        let count = (state.watched.len() / EVICTED_PART).max(1);
        let mut evicted = 0;
        // After the first round none has been used since the last.
        for _ in 0..2 * state.clock.len() {
            if evicted == count {
                break;
            }
            let Some(wd) = state.clock.pop_front() else { break };
            let Some(inodes) = state.watched.get(&wd) else { continue };
            if inodes.iter().fold(false, |used, inode| used | inode.watch.take_used()) {
                state.clock.push_back(wd);
            } else {
                state.take(wd);
                let _ = inotify::remove_watch(&self.inotify, wd);
                evicted += 1;
            }
        }
        tracing::debug!(evicted, "more directories are in use than can be watched: clients revalidate everything");
        state.is_behind = true;
        self.wake_fd.wake();
    }

    fn unwatch(&self, state: &mut State, dir: &Inode) {
        let Some(wd) = dir.watch.get() else { return };
        dir.watch.set(None);
        let Some(same) = state.watched.get_mut(&wd) else { return };
        same.retain(|inode| !std::ptr::eq(&**inode, dir));
        if same.is_empty() {
            state.watched.remove(&wd);
            // It may be gone with its directory.
            let _ = inotify::remove_watch(&self.inotify, wd);
        }
    }

    /// Records under which name a client finds an inode. Returns true if that is new: then its attributes may be older
    /// than the record.
    pub(crate) fn name(&self, dir: &Inode, name: &[u8], inode: &Inode) -> bool {
        let state = &mut *lock(&self.state);
        let was_named = state.names.names(inode.ino).next().is_some();
        let loses_names = state.names.is_full(inode.ino);
        if !state.names.insert(hash(dir.ino, name), inode.ino) {
            return false;
        }
        state.is_behind |= loses_names;
        if was_named {
            state.renamed.insert(inode.ino);
            self.wake_fd.wake();
        }
        if !inode.has_references() {
            state.names.forget(inode.ino);
        }
        true
    }

    /// Records that clients know inodes of a former server: what they know was not watched.
    pub(crate) fn adopt(&self) {
        lock(&self.state).is_behind = true;
        self.wake_fd.wake();
    }

    /// Removes an inode that no client references.
    pub(crate) fn remove(&self, inode: &Inode) {
        let state = &mut *lock(&self.state);
        state.names.forget(inode.ino);
        state.renamed.remove(&inode.ino);
        self.unwatch(state, inode);
    }

    /// Passes on what lookups have noticed.
    pub(super) fn noticed(&self, mut tell: impl FnMut(Change)) {
        let (is_behind, renamed) = {
            let state = &mut *lock(&self.state);
            (std::mem::take(&mut state.is_behind), std::mem::take(&mut state.renamed))
        };
        if is_behind {
            return tell(Change::All);
        }
        for ino in renamed {
            tell(Change::Data { ino, offset: 0, len: u64::MAX });
        }
    }

    /// Passes on what a read from inotify tells; returns what happened. `read_all`: when the read began, if nothing was
    /// left by it. Malformed data ends it without a panic.
    pub(super) fn events(
        &self,
        mut bytes: &[u8],
        read_all: Option<Instant>,
        mut tell: impl FnMut(Change),
    ) -> Vec<ferry_vfs::Event> {
        let mut told = History::default();
        while let Some((event, rest)) = Event::split(bytes) {
            self.event(&event, &mut tell, &mut told);
            bytes = rest;
        }
        if let (Some(begin), Some(history)) = (read_all, self.history.get()) {
            lock(history).seen_until(begin);
        }
        told.finish()
    }

    fn event(&self, event: &Event<'_>, tell: &mut impl FnMut(Change), told: &mut History) {
        if event.mask & libc::IN_Q_OVERFLOW != 0 {
            tracing::debug!("the kernel's event queue has overflowed: clients drop all cached data");
            if let Some(history) = self.history.get() {
                lock(history).lose(told);
            }
            return tell(Change::All);
        }
        let name = Name::new(event.name).ok().map(|name| name.to_buf());
        let (dirs, targets) = {
            let state = &mut *lock(&self.state);
            if event.mask & libc::IN_IGNORED != 0 {
                // The directory is deleted, or its file system unmounted.
                state.take(event.wd);
                return;
            }
            let Some(dirs) = state.watched.get(&event.wd) else { return };
            let dirs: Vec<_> = dirs.iter().map(|dir| dir.ino).collect();
            let targets = match &name {
                Some(name) => targets(state, event, &dirs, name),
                None => dirs.clone(),
            };
            (dirs, targets)
        };
        changes_of(event.mask.into(), name.as_ref().map(|name| (&*dirs, name)), &targets, tell);
        if let Some(history) = self.history.get() {
            let (mask, cookie) = (event.mask, event.cookie);
            let event = DirectoryEvent { mask, cookie, dirs: &dirs, name: name.as_ref(), targets: &targets };
            lock(history).add(&event, told);
        }
    }
}

/// Returns the inodes that a client has under a name, and follows a rename.
fn targets(state: &mut State, event: &Event<'_>, dirs: &[Ino], name: &NameBuf) -> Vec<Ino> {
    let names: Vec<_> = dirs.iter().map(|dir| hash(*dir, name.as_name().as_bytes())).collect();
    let find = |state: &State, names: &[NameHash]| names.iter().flat_map(|name| state.names.find(*name)).collect();
    if event.mask & libc::IN_MOVED_TO != 0 {
        let moved = state.moved.take().filter(|(cookie, _)| *cookie == event.cookie);
        let moved: Vec<Ino> = find(state, &moved.map(|(_, names)| names).unwrap_or_default());
        for (name, ino) in names.iter().flat_map(|name| moved.iter().map(move |ino| (*name, *ino))) {
            // It forgets all others.
            state.is_behind |= state.names.is_full(ino);
            state.names.insert(name, ino);
        }
        return moved;
    }
    let found = find(state, &names);
    if event.mask & libc::IN_MOVED_FROM != 0 {
        state.moved = Some((event.cookie, names));
    }
    found
}

/// One `struct inotify_event`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Event<'a> {
    wd: i32,
    mask: u32,
    /// The same for both names of a rename.
    cookie: u32,
    /// Empty: the directory itself.
    name: &'a [u8],
}

impl<'a> Event<'a> {
    /// Returns the first event, and the bytes after it.
    fn split(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let [wd, mask, cookie, len] = [0, 4, 8, 12].map(|at| {
            // The ranges are inside the header.
            u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        });
        let (name, rest) = rest.split_at_checked(len as usize)?;
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        Some((Self { wd: wd.cast_signed(), mask, cookie, name }, rest))
    }
}

/// The watch of a directory's inode.
#[derive(Debug, Default)]
pub(crate) struct WatchMark {
    /// The watch descriptor, or 0; changed under the lock of [`Directories`].
    wd: std::sync::atomic::AtomicI32,
    /// A lookup has used the directory since the clock passed.
    used: AtomicBool,
}

impl WatchMark {
    fn get(&self) -> Option<i32> {
        match self.wd.load(Ordering::Acquire) {
            0 => None,
            wd => Some(wd),
        }
    }

    fn set(&self, wd: Option<i32>) {
        self.used.store(wd.is_some(), Ordering::Relaxed);
        self.wd.store(wd.unwrap_or(0), Ordering::Release);
    }

    /// Marks a watched directory as used.
    fn is_used(&self) -> bool {
        let is_watched = self.get().is_some();
        if is_watched && !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        is_watched
    }

    fn take_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(wd: i32, mask: u32, cookie: u32, name: &[u8]) -> Vec<u8> {
        let mut padded = name.to_vec();
        padded.resize(name.len().next_multiple_of(16), 0);
        let mut event = wd.to_ne_bytes().to_vec();
        for word in [mask, cookie, u32::try_from(padded.len()).unwrap()] {
            event.extend(word.to_ne_bytes());
        }
        event.extend(padded);
        event
    }

    fn all(mut bytes: &[u8]) -> Vec<Event<'_>> {
        let mut all = Vec::new();
        while let Some((event, rest)) = Event::split(bytes) {
            all.push(event);
            bytes = rest;
        }
        all
    }

    #[test]
    fn events_have_directories_and_names() {
        let bytes = [
            event(1, libc::IN_CREATE, 0, b"name"),
            event(2, libc::IN_ATTRIB, 0, b""),
            event(-1, libc::IN_Q_OVERFLOW, 7, b""),
        ];
        let expected = [
            Event { wd: 1, mask: libc::IN_CREATE, cookie: 0, name: b"name" },
            Event { wd: 2, mask: libc::IN_ATTRIB, cookie: 0, name: b"" },
            Event { wd: -1, mask: libc::IN_Q_OVERFLOW, cookie: 7, name: b"" },
        ];
        assert_eq!(all(&bytes.concat()), expected);
        let whole = event(1, libc::IN_CREATE, 0, b"name");
        for len in 0..whole.len() {
            assert_eq!(all(&whole[..len]), [], "{len}");
        }
    }

    #[test]
    fn an_inode_has_a_limited_number_of_names() {
        let mut index = NameIndex::default();
        for number in 0..1000_u64 {
            assert!(index.insert(number, Ino(7)));
            assert!(!index.insert(number, Ino(7)));
            assert_eq!(index.find(number), [Ino(7)]);
            assert!(index.by_name.len() <= NAMES_MAX && index.by_ino.len() <= NAMES_MAX);
        }
        index.insert(999, Ino(8));
        assert_eq!(index.find(999), [Ino(7), Ino(8)]);
        index.forget(Ino(7));
        index.forget(Ino(8));
        assert!(index.by_name.is_empty() && index.by_ino.is_empty());
    }
}
