//! The directories that clients know, watched with inotify: for processes that may not watch whole file systems, and
//! file systems without handles.
//!
//! An event names a directory and a name in it. The index of names finds the inode that a client has under that name,
//! so no event costs a system call, and nothing is opened by its path. A lookup enters a name into the index *before*
//! it reads the attributes, so a change is either in the attributes or notified.
//!
//! The number of watches is bounded. When there are too many, the least recently used quarter is removed, and clients
//! revalidate everything: so they trust nothing in a directory that is not watched any more.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
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
use super::name_index::{NameHash, NameIndex, hash};
use super::own::{OperationGuard, Operations};
use crate::resolve::statx;
use crate::table::Inode;

/// The maximum number of watched directories, unless the kernel allows fewer (`fs.inotify.max_user_watches`). A watch
/// and the inode that it keeps in memory take the kernel about 2 KiB.
pub(super) const DIRECTORIES_MAX: usize = 65_536;
/// If the kernel allows fewer, none is removed for another: clients would revalidate everything at nearly each lookup.
const DIRECTORIES_MIN: usize = 64;
/// The part that is removed at once, so that revalidation is rare.
const EVICTED_PART: usize = 4;
/// The maximum number of stale entries of the clock before they are removed.
const SLACK: usize = 1024;
/// `struct inotify_event` up to its name: watch descriptor, mask, cookie, length.
const HEADER_BYTES: usize = 16;

/// The maximum number of renames whose second event has not come yet. Those of several directories mix.
const MOVES_MAX: usize = 64;

/// All changes of what clients cache, as for fanotify. Also those of files that are removed and still written.
const MASK: WatchFlags = WatchFlags::MODIFY
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ONLYDIR);

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

#[derive(Debug, Default)]
struct State {
    /// By watch descriptor; several inodes are one directory that was found through several mounts.
    watched: HashMap<i32, Vec<Arc<Inode>>>,
    /// The same by their numbers.
    by_number: HashMap<Ino, Arc<Inode>>,
    /// How many watches were removed.
    removals: u64,
    /// The clock of watch descriptors for eviction; some are stale.
    clock: VecDeque<i32>,
    names: NameIndex,
    /// The names that were moved away, and the cookies that the events of their new places have as well.
    moves: VecDeque<(u32, Vec<NameHash>)>,
    /// Directories are no longer watched, or were not while clients knew them.
    is_behind: bool,
    /// Files that were found under another name than before: writes by that name may have been missed.
    renamed: HashSet<Ino>,
}

impl State {
    /// Removes a watch from the tables.
    fn take(&mut self, wd: i32) -> bool {
        let inodes = self.watched.remove(&wd).unwrap_or_default();
        self.removals += 1;
        for inode in &inodes {
            inode.watch.set(None);
            self.by_number.remove(&inode.ino);
        }
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
    /// Clients may know an inode of which not every directory with a name is watched.
    has_unwatched: AtomicBool,
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
            has_unwatched: AtomicBool::new(false),
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
        // The descriptor, not a path: the host may have put another directory at its place.
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let mut has_made_room = false;
        loop {
            let removals = {
                let state = &mut *lock(&self.state);
                if state.watched.len() >= self.max {
                    self.evict(state);
                }
                state.removals
            };
            // Without the lock: the file system of the directory may be asked for permission, and not answer.
            let added = inotify::add_watch(&self.inotify, &link, MASK);
            let state = &mut *lock(&self.state);
            if dir.watch.get().is_some() {
                return false;
            }
            match added {
                Ok(wd) if state.removals == removals || state.watched.contains_key(&wd) => {
                    self.record(state, dir, wd);
                    return true;
                }
                // It may have been removed meanwhile, as that of another inode.
                Ok(_) => {}
                Err(Errno::NOSPC) if !has_made_room && state.watched.len() >= DIRECTORIES_MIN => {
                    self.evict(state);
                    has_made_room = true;
                }
                Err(error) => {
                    self.cannot_watch(error);
                    return false;
                }
            }
        }
    }

    fn cannot_watch(&self, error: Errno) {
        self.has_unwatched.store(true, Ordering::Release);
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            let why = match error {
                Errno::NOSPC => "fs.inotify.max_user_watches is reached".into(),
                error => error.to_string(),
            };
            tracing::warn!("cannot watch some directories: {why}; clients ask for what is in them each second");
        }
    }

    fn record(&self, state: &mut State, dir: &Arc<Inode>, wd: i32) {
        let same = state.watched.entry(wd).or_default();
        if same.is_empty() {
            state.clock.push_back(wd);
        }
        same.push(Arc::clone(dir));
        state.by_number.insert(dir.ino, Arc::clone(dir));
        dir.watch.set(Some(wd));
        // Forgotten meanwhile: the table does not remove it any more.
        if !dir.has_references() {
            self.unwatch(state, dir);
        }
        if state.clock.len() > 2 * state.watched.len() + SLACK {
            let watched = &state.watched;
            state.clock.retain(|wd| watched.contains_key(wd));
        }
    }

    /// Returns whether all that clients know has always been watched.
    pub(crate) fn has_all(&self) -> bool {
        !self.has_unwatched.load(Ordering::Acquire)
    }

    /// Returns whether clients hear of every change of an inode by others: all directories with names of it are watched,
    /// and so is a directory itself.
    pub(crate) fn is_watched(&self, inode: &Inode) -> bool {
        let state = &*lock(&self.state);
        let mut dirs = state.names.dirs(inode.ino).peekable();
        let is_found = inode.is_dir() || dirs.peek().is_some();
        is_found && dirs.chain(inode.is_dir().then_some(inode.ino)).all(|dir| state.by_number.contains_key(&dir))
    }

    /// Notes that a client knows an inode without a name.
    pub(crate) fn note_unnamed(&self) {
        self.has_unwatched.store(true, Ordering::Release);
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
        self.has_unwatched.store(true, Ordering::Release);
        state.is_behind = true;
        self.wake_fd.wake();
    }

    /// Returns whether directories are certainly removed.
    fn are_removed(&self, dirs: &[Ino]) -> bool {
        let inodes: Vec<_> = {
            let state = lock(&self.state);
            dirs.iter().map(|dir| state.by_number.get(dir).cloned()).collect()
        };
        let is_removed =
            |inode: Arc<Inode>| inode.fd().is_some_and(|fd| statx(fd.as_fd(), b"").is_ok_and(|st| st.stx_nlink == 0));
        inodes.into_iter().all(|inode| inode.is_some_and(is_removed))
    }

    fn unwatch(&self, state: &mut State, dir: &Inode) {
        let Some(wd) = dir.watch.get() else { return };
        dir.watch.set(None);
        state.by_number.remove(&dir.ino);
        let Some(same) = state.watched.get_mut(&wd) else { return };
        same.retain(|inode| !std::ptr::eq(&**inode, dir));
        if same.is_empty() {
            state.watched.remove(&wd);
            state.removals += 1;
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
        if !state.names.insert((dir.ino, hash(dir.ino, name)), inode.ino) {
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
        self.note_unnamed();
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
        let (dirs, targets, replaced) = {
            let state = &mut *lock(&self.state);
            if event.mask & libc::IN_IGNORED != 0 {
                // The directory is deleted, or its file system unmounted.
                if state.take(event.wd) {
                    self.has_unwatched.store(true, Ordering::Release);
                }
                return;
            }
            let Some(dirs) = state.watched.get(&event.wd) else { return };
            let dirs: Vec<_> = dirs.iter().map(|dir| dir.ino).collect();
            let (targets, replaced) = match &name {
                Some(name) => targets(state, event, &dirs, name),
                None => (dirs.clone(), Vec::new()),
            };
            (dirs, targets, replaced)
        };
        let mut mask = event.mask;
        if mask & (libc::IN_DELETE | libc::IN_ISDIR) == libc::IN_DELETE | libc::IN_ISDIR && !self.are_removed(&targets)
        {
            // Another directory may have had the name for a while: a client that is told that the one it knows is removed
            // finds nothing in it any more.
            mask ^= libc::IN_DELETE | libc::IN_MOVED_FROM;
        }
        changes_of(mask.into(), name.as_ref().map(|name| (&*dirs, name)), &targets, tell);
        for ino in replaced {
            // It has a link less.
            tell(Change::Attr { ino });
        }
        if let Some(history) = self.history.get() {
            let (mask, cookie) = (event.mask, event.cookie);
            let event = DirectoryEvent { mask, cookie, dirs: &dirs, name: name.as_ref(), targets: &targets };
            lock(history).add(&event, told);
        }
    }
}

/// Returns the inodes that a client has under a name, and follows a rename; besides those that a rename has replaced.
fn targets(state: &mut State, event: &Event<'_>, dirs: &[Ino], name: &NameBuf) -> (Vec<Ino>, Vec<Ino>) {
    let names: Vec<_> = dirs.iter().map(|dir| (*dir, hash(*dir, name.as_name().as_bytes()))).collect();
    let hashes = || names.iter().map(|(_, name)| *name);
    let find = |state: &State, names: &mut dyn Iterator<Item = NameHash>| -> Vec<Ino> {
        names.flat_map(|name| state.names.find(name)).collect()
    };
    let found = find(state, &mut hashes());
    if event.mask & libc::IN_MOVED_TO != 0 {
        let at = state.moves.iter().position(|(cookie, _)| *cookie == event.cookie);
        let moved = at.and_then(|at| state.moves.remove(at)).map(|(_, names)| names).unwrap_or_default();
        let moved = find(state, &mut moved.into_iter());
        for (name, ino) in names.iter().flat_map(|name| moved.iter().map(move |ino| (*name, *ino))) {
            // It forgets all others.
            state.is_behind |= state.names.is_full(ino);
            state.names.insert(name, ino);
        }
        let replaced = found.into_iter().filter(|ino| !moved.contains(ino)).collect();
        return (moved, replaced);
    }
    if event.mask & libc::IN_MOVED_FROM != 0 {
        if state.moves.len() >= MOVES_MAX {
            state.moves.pop_front();
        }
        state.moves.push_back((event.cookie, hashes().collect()));
    }
    (found, Vec::new())
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

    /// The kernel queues the two events of a rename one by one.
    #[test]
    fn renames_at_once_are_told_apart() {
        let (dir, mut state) = (Ino(1), State::default());
        let hash = |name: &str| (dir, hash(dir, name.as_bytes()));
        state.names.insert(hash("a"), Ino(10));
        state.names.insert(hash("x"), Ino(11));
        let (from, to) = (libc::IN_MOVED_FROM, libc::IN_MOVED_TO);
        for (mask, cookie, name) in [(from, 1, "a"), (from, 2, "x"), (to, 1, "b"), (to, 2, "y")] {
            let event = Event { wd: 1, mask, cookie, name: name.as_bytes() };
            let name = Name::new(name.as_bytes()).unwrap().to_buf();
            assert_eq!(targets(&mut state, &event, &[dir], &name).0.len(), 1, "{name:?}");
        }
        assert_eq!((state.names.find(hash("b").1), state.names.find(hash("y").1)), (vec![Ino(10)], vec![Ino(11)]));
        assert!(state.moves.is_empty());
        for cookie in (0..).take(2 * MOVES_MAX) {
            let event = Event { wd: 1, mask: from, cookie, name: b"gone" };
            targets(&mut state, &event, &[dir], &Name::new(b"gone").unwrap().to_buf());
        }
        assert_eq!(state.moves.len(), MOVES_MAX);
    }
}
