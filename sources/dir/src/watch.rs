//! Watches for changes by other processes of the host, and publishes them: with fanotify where this process may watch
//! the file system, otherwise with inotify. A fanotify group watches whole file systems, because no smaller watch covers
//! everything below a directory.
//!
//! Each change is published twice: at once, and one to two seconds later. A reply from just before the change may still
//! be in flight when the client receives the first notification.
//!
//! The kernel has no events for stores to shared mappings and for writes by `io_submit`. Those are published when the
//! file is closed. Changes on other hosts of a network file system are not noticed.

mod changes;
mod directory_history;
mod events;
mod fanotify;
mod history;
mod inotify;
mod name_index;
mod own;

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{Change, Changes, Errno, Event, Ino, NameBuf, SessionId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::Dir;
use crate::sys;
use crate::table::Inode;
use events::events;
use fanotify::{HandleIndex, heard};
use history::History;

pub use changes::{OwnChanges, WatchError};
pub(crate) use fanotify::Group;
pub use fanotify::can_watch;
pub(crate) use inotify::{Directories, WatchMark};
pub(crate) use own::OperationGuard;

/// The size of a read in bytes: a few hundred events of at most about 600 bytes.
const READ_BYTES: usize = 64 << 10;
/// Longer than any event: a read that leaves more room than this has left none.
const EVENT_BYTES_MAX: usize = 1024;
/// The maximum number of changes to publish again. Beyond it everything counts as changed.
const AGAIN_MAX: usize = 1 << 16;
/// Changes are published again after one to two of these, longer than a reply is in flight on a loaded machine.
const AGAIN: Duration = Duration::from_secs(1);
/// The pause after an error of the kernel, so that a permanent one takes no CPU.
const REST: Duration = Duration::from_secs(1);

/// What is watched for changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchKind {
    /// The whole file system, with fanotify.
    FileSystem,
    /// The directories that clients know, with inotify.
    Directories,
}

/// How changes are noticed.
#[derive(Debug)]
pub(crate) enum Watched {
    /// Of whole file systems.
    FileSystems {
        /// What watches them.
        group: Arc<Group>,
        /// The inodes that clients reference.
        index: HandleIndex,
        /// Whether changes of this process are published.
        ours: OwnChanges,
        /// What happened.
        history: Mutex<History>,
    },
    /// In the directories that clients know.
    Directories(Box<Directories>),
}

impl AsFd for Watched {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::FileSystems { group, .. } => group.as_fd(),
            Self::Directories(directories) => directories.as_fd(),
        }
    }
}

impl Watched {
    /// Adds an inode that a client references.
    pub(crate) fn add(&self, inode: &Inode) {
        if let Self::FileSystems { index, .. } = self {
            index.add(inode.found.handle.as_ref(), inode.ino);
        }
    }

    /// Adds an inode that a client of a former server references.
    pub(crate) fn adopt(&self, inode: &Inode) {
        match self {
            Self::FileSystems { index, .. } => index.add(inode.found.handle.as_ref(), inode.ino),
            Self::Directories(directories) => directories.adopt(),
        }
    }

    /// Removes an inode that no client references.
    pub(crate) fn remove(&self, inode: &Inode) {
        match self {
            Self::FileSystems { index, .. } => index.remove(inode.found.handle.as_ref(), inode.ino),
            Self::Directories(directories) => directories.remove(inode),
        }
    }

    /// Returns a number that changes with each change that is noticed of an inode that was not added yet.
    pub(crate) fn heard(&self) -> u64 {
        match self {
            Self::FileSystems { index, .. } => index.heard(),
            Self::Directories(_) => 0,
        }
    }

    /// Passes on what a read from the kernel tells; returns what happened, as far as its order is known.
    fn read(&self, bytes: &[u8], begin: Instant, mut tell: impl FnMut(Change)) -> Vec<Event> {
        match self {
            Self::FileSystems { index, ours, history, .. } => {
                let history = &mut *lock(history);
                events(bytes, |event| heard(index, *ours, &event, history, &mut tell));
                history.take(begin)
            }
            Self::Directories(directories) => {
                directories.wait_for_records();
                let is_all = bytes.len() < READ_BYTES - EVENT_BYTES_MAX;
                let happened = directories.events(bytes, is_all.then_some(begin), &mut tell);
                directories.noticed(tell);
                happened
            }
        }
    }

    /// Whether half of something waits for the other.
    fn is_waiting(&self) -> bool {
        match self {
            Self::FileSystems { history, .. } => lock(history).is_waiting(),
            Self::Directories(directories) => directories.is_waiting(),
        }
    }

    /// Returns what waits: nothing more can come of it.
    fn flush(&self) -> Vec<Event> {
        match self {
            Self::FileSystems { history, .. } => std::mem::take(&mut *lock(history)).finish(),
            Self::Directories(directories) => directories.flush(),
        }
    }
}

/// Wakes the thread that watches.
#[derive(Debug)]
pub(crate) struct WakeFd {
    fd: OwnedFd,
    /// The thread is to end.
    is_over: AtomicBool,
}

impl WakeFd {
    fn new() -> std::result::Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, is_over: AtomicBool::new(false) })
    }

    fn wake(&self) {
        // Fails only if the thread is about to be woken already.
        let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

/// The changes to publish again.
#[derive(Debug, Default)]
struct Republished {
    attributes: HashSet<Ino>,
    data: HashSet<Ino>,
    names: HashSet<(Ino, NameBuf)>,
    all: bool,
}

impl Republished {
    fn is_empty(&self) -> bool {
        self.attributes.is_empty() && self.data.is_empty() && self.names.is_empty() && !self.all
    }

    fn add(&mut self, change: &Change) {
        if self.all {
            return;
        }
        match change {
            Change::Attr { ino } => {
                self.attributes.insert(*ino);
            }
            Change::Data { ino, .. } => {
                self.data.insert(*ino);
            }
            Change::Entry { dir, name } | Change::Unsure { dir, name } | Change::Removed { dir, name, .. } => {
                self.names.insert((*dir, name.clone()));
            }
            _ => self.all = true,
        }
        if self.all || self.attributes.len() + self.data.len() + self.names.len() > AGAIN_MAX {
            *self = Self { all: true, ..Self::default() };
        }
    }

    fn publish(self, changes: &Changes) {
        let by = SessionId::default();
        if self.all {
            changes.publish(by, || Change::All);
        }
        for (dir, name) in self.names {
            changes.publish(by, || Change::Unsure { dir, name });
        }
        for ino in self.data {
            changes.publish(by, || Change::Data { ino, offset: 0, len: u64::MAX });
        }
        for ino in self.attributes {
            changes.publish(by, || Change::Attr { ino });
        }
    }
}

/// What the thread works with.
struct Watcher {
    watched: Arc<Watched>,
    changes: Changes,
    wake_fd: Arc<WakeFd>,
    /// The changes published since the last repetition, and those before it.
    republished: [Republished; 2],
}

impl Watcher {
    fn run(mut self) {
        let mut buffer = vec![0; READ_BYTES];
        let mut next = Instant::now();
        let watched = Arc::clone(&self.watched);
        loop {
            let waits = !self.republished.iter().all(Republished::is_empty);
            if waits && Instant::now() >= next {
                let [new, old] = &mut self.republished;
                std::mem::replace(old, std::mem::take(new)).publish(&self.changes);
                next = Instant::now() + AGAIN;
                continue;
            }
            let left = waits.then(|| next.saturating_duration_since(Instant::now()));
            let is_waiting = watched.is_waiting();
            let left = if is_waiting { Some(history::DELAY) } else { left };
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = [PollFd::new(&*watched, PollFlags::IN), PollFd::new(&self.wake_fd.fd, PollFlags::IN)];
            let polled = poll(&mut fds, left.as_ref());
            let [is_there, is_woken] = fds.map(|fd| !fd.revents().is_empty());
            if self.wake_fd.is_over.load(Ordering::Acquire) {
                return;
            }
            if !waits && (is_there || is_woken) {
                next = Instant::now() + AGAIN;
            }
            if let (true, Watched::Directories(directories)) = (is_woken, &*watched) {
                self.wake_fd.clear();
                directories.noticed(|change| self.tell(change));
            }
            if is_waiting && !is_there {
                self.publish_events(watched.flush());
            }
            let begin = Instant::now();
            let read = match polled {
                Ok(_) if is_there => rustix::io::read(&*watched, &mut buffer[..]),
                Ok(_) | Err(Errno::INTR) => continue,
                Err(error) => Err(error),
            };
            match read {
                // `len` never exceeds the buffer.
                Ok(len) => {
                    let bytes = buffer.get(..len).unwrap_or_default();
                    let happened = watched.read(bytes, begin, |change| self.tell(change));
                    self.publish_events(happened);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => {
                    tracing::warn!(
                        "changes on the host may have been missed: {error}; clients are to forget everything"
                    );
                    self.tell(Change::All);
                    self.changes.publish_event(SessionId::default(), || Some(Event::Lost));
                    std::thread::sleep(REST);
                }
            }
        }
    }

    fn publish_events(&self, events: Vec<Event>) {
        for event in events {
            self.changes.publish_event(SessionId::default(), || Some(event));
        }
    }

    fn tell(&mut self, change: Change) {
        self.republished[0].add(&change);
        self.changes.publish(SessionId::default(), || change);
    }
}

/// Watching, until dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    wake_fd: Arc<WakeFd>,
    thread: Option<JoinHandle<()>>,
    kind: WatchKind,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.wake_fd.is_over.store(true, Ordering::Release);
        self.wake_fd.wake();
        // That thread itself may drop the last reference to the directory.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Dir {
    /// Watches for changes by other processes of the host until the directory is dropped, and publishes them without a
    /// session. Returns what is watched; further calls have no effect.
    ///
    /// If this process may watch the file system, every change of any file on it is examined, inside the directory or
    /// not. Otherwise the directories that clients know are watched, up to [`crate::Options::watches_max`] of them. When
    /// the kernel's queue overflows (`fs.fanotify.max_queued_events`, `fs.inotify.max_queued_events`), [`Change::All`]
    /// is published.
    ///
    /// # Errors
    ///
    /// [`WatchError`] says in one sentence why the host cannot be watched.
    pub fn watch(&self, ours: OwnChanges) -> std::result::Result<WatchKind, WatchError> {
        if let Some(watch) = self.watch.get() {
            return Ok(watch.kind);
        }
        let wake_fd = Arc::new(WakeFd::new()?);
        let (watched, kind) = match self.watch_file_system(ours) {
            Ok(watched) => (watched, WatchKind::FileSystem),
            Err(why) => {
                // Also if only the limit of groups is reached (`user.max_fanotify_groups`).
                tracing::debug!("watching directories: {why}");
                let max = self.options.watches_max.unwrap_or(inotify::DIRECTORIES_MAX);
                (Watched::Directories(Box::new(Directories::new(max, Arc::clone(&wake_fd))?)), WatchKind::Directories)
            }
        };
        let watched = Arc::new(watched);
        let watcher = Watcher {
            watched: Arc::clone(&watched),
            changes: self.changes.clone(),
            wake_fd: Arc::clone(&wake_fd),
            republished: Default::default(),
        };
        let thread = std::thread::Builder::new().name("dir-watch".into()).spawn(move || watcher.run());
        let thread = thread.map_err(|error| WatchError::Host(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        if self.watch.set(Watch { wake_fd, thread: Some(thread), kind }).is_ok() {
            if let Watched::FileSystems { group, .. } = &*watched {
                self.mounts.watch(Arc::clone(group));
            }
            self.table.watch(watched);
            self.watch_directory(&self.root);
        }
        Ok(kind)
    }

    /// Publishes events as well, where directories are watched; a watched file system always has them. Those that clients
    /// of this source cause are left out, as far as they can be told from those of others. Call it after [`Self::watch`].
    pub fn tell_events(&self) {
        if let Some(directories) = self.table.directories() {
            directories.tell_events(&self.changes);
        }
    }

    fn watch_file_system(&self, ours: OwnChanges) -> std::result::Result<Watched, WatchError> {
        let mount = &self.root.found.mount;
        let handles = mount.handles().ok_or(WatchError::NoHandles)?;
        let group = Arc::new(Group::new()?);
        group.add(handles)?;
        let index = HandleIndex::new();
        // The root is found by its descriptor, so the table has no handle for it.
        let root = self.path_fd(&self.root)?;
        index.add(Some(&sys::name_to_handle(root.as_fd(), b"")?), Ino::ROOT);
        Ok(Watched::FileSystems { group, index, ours, history: Mutex::default() })
    }

    /// Watches a directory that a client knows, if directories are watched. Returns true if it was not watched before.
    pub(crate) fn watch_directory(&self, dir: &Arc<Inode>) -> bool {
        let Some(directories) = self.table.directories() else { return false };
        directories.is_new(dir) && self.path_fd(dir).is_ok_and(|fd| directories.watch(dir, fd.as_fd()))
    }
}
