//! Watches for changes by other processes of the host with fanotify, and publishes them.
//!
//! Events identify inodes by file handles, and the index [`HandleIndex`] finds those that clients reference; all others
//! are ignored. A group watches whole file systems, because no smaller watch covers everything below a directory.
//!
//! Each change is published twice: at once, and one to two seconds later. A reply from just before the change may still
//! be in flight when the client receives the first notification.
//!
//! The kernel has no events for stores to shared mappings and for writes by `io_submit`. Those are published when the
//! file is closed. Changes on other hosts of a network file system are not noticed.

mod events;

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{Change, Changes, Errno, Ino, NameBuf, SessionId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::Dir;
use crate::mount::Mount;
use crate::sys;
use crate::table::{Inode, IntHasher};
use events::{Event, events};

/// Enough that workers that find inodes rarely contend; a power of two.
const SHARDS: usize = 64;
/// The size of a read in bytes: a few hundred events of at most about 600 bytes.
const READ_BYTES: usize = 64 << 10;
/// The maximum number of changes to publish again. Beyond it everything counts as changed.
const AGAIN_MAX: usize = 1 << 16;
/// Changes are published again after one to two of these, longer than a reply is in flight on a loaded machine.
const AGAIN: Duration = Duration::from_secs(1);
/// The pause after an error of the kernel, so that a permanent one takes no CPU.
const REST: Duration = Duration::from_secs(1);

/// The events: all changes of what clients cache. A file that was open for writing is closed after its mappings.
const MASK: u64 = libc::FAN_MODIFY
    | libc::FAN_CLOSE_WRITE
    | libc::FAN_ATTRIB
    | libc::FAN_CREATE
    | libc::FAN_DELETE
    | libc::FAN_MOVED_FROM
    | libc::FAN_MOVED_TO
    | libc::FAN_ONDIR;

/// The handling of changes that this process makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnChanges {
    /// Ignore them: the code that makes them publishes them, as all operations of one [`Dir`] do.
    Skip,
    /// Publish them, too: other sources of this process change the same files.
    Tell,
}

/// Why the host cannot be watched for changes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WatchError {
    /// Watching a file system requires `CAP_SYS_ADMIN`.
    #[error("only root can watch for changes on the host (CAP_SYS_ADMIN)")]
    Permission,
    /// Events name files by handles.
    #[error("the share does not use file handles, which changes on the host are reported by")]
    NoHandles,
    /// The kernel or the file system does not support it.
    #[error("this kernel or file system does not report changes (fanotify with names and targets: Linux 5.17)")]
    Unsupported,
    /// Another error of the host.
    #[error("cannot watch for changes on the host")]
    Host(#[source] Errno),
}

impl From<Errno> for WatchError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PERM | Errno::ACCESS => Self::Permission,
            Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::XDEV | Errno::NODEV => Self::Unsupported,
            errno => Self::Host(errno),
        }
    }
}

/// Checks that this process may watch the file system of a directory for changes.
///
/// # Errors
/// It may not, or the kernel or the file system does not report them.
pub fn can_watch(directory: BorrowedFd<'_>) -> std::result::Result<(), WatchError> {
    // Everybody may have a group; a file system is for root.
    let group = sys::fanotify_group()?;
    Ok(sys::fanotify_mark_file_system(group.as_fd(), directory, MASK)?)
}

/// A fanotify group.
#[derive(Debug)]
pub(crate) struct Group(OwnedFd);

impl Group {
    /// Watches this mount's file system, too.
    pub(crate) fn add(&self, mount: &Mount) -> std::result::Result<(), WatchError> {
        let real = mount.handles().ok_or(WatchError::NoHandles)?;
        Ok(sys::fanotify_mark_file_system(self.0.as_fd(), real, MASK)?)
    }
}

/// Hashes of handles with the inodes.
type Hashed = Mutex<BTreeSet<(u64, Ino)>>;

/// The inodes that clients reference, by the hash of their handles.
///
/// Handles with equal hashes, as on two file systems, are published together, which costs an unnecessary revalidation.
pub(crate) struct HandleIndex(Box<[Hashed]>);

impl fmt::Debug for HandleIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HandleIndex")
    }
}

fn hash(kind: i32, bytes: &[u8]) -> u64 {
    let mut mix = IntHasher::default();
    (kind, bytes).hash(&mut mix);
    mix.finish()
}

impl HandleIndex {
    fn new() -> Self {
        Self((0..SHARDS).map(|_| Mutex::default()).collect())
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below SHARDS")]
    fn shard(&self, hash: u64) -> &Hashed {
        &self.0[(hash % SHARDS as u64) as usize]
    }

    fn add_by(&self, handle: &sys::HostHandle, ino: Ino) {
        let (kind, bytes) = handle.parts();
        let hash = hash(kind, bytes);
        lock(self.shard(hash)).insert((hash, ino));
    }

    /// Adds an inode that a client references.
    pub(crate) fn add(&self, inode: &Inode) {
        if let Some(handle) = &inode.found.handle {
            self.add_by(handle, inode.ino);
        }
    }

    /// Removes an inode that no client references.
    pub(crate) fn remove(&self, inode: &Inode) {
        if let Some(handle) = &inode.found.handle {
            let (kind, bytes) = handle.parts();
            let hash = hash(kind, bytes);
            lock(self.shard(hash)).remove(&(hash, inode.ino));
        }
    }

    /// Returns the inodes with this handle: one per mount through which it was found, usually one or none.
    fn find(&self, (kind, bytes): (i32, &[u8])) -> Vec<Ino> {
        let hash = hash(kind, bytes);
        lock(self.shard(hash)).range((hash, Ino(0))..=(hash, Ino(u64::MAX))).map(|(_, ino)| *ino).collect()
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
    group: Arc<Group>,
    known: Arc<HandleIndex>,
    changes: Changes,
    ours: OwnChanges,
    stop: Arc<OwnedFd>,
    /// The changes published since the last repetition, and those before it.
    republished: [Republished; 2],
}

impl Watcher {
    fn run(mut self) {
        let mut buffer = vec![0; READ_BYTES];
        let mut next = Instant::now();
        loop {
            let waits = !self.republished.iter().all(Republished::is_empty);
            if waits && Instant::now() >= next {
                let [new, old] = &mut self.republished;
                std::mem::replace(old, std::mem::take(new)).publish(&self.changes);
                next = Instant::now() + AGAIN;
                continue;
            }
            let left = waits.then(|| next.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = [PollFd::new(&self.group.0, PollFlags::IN), PollFd::new(&*self.stop, PollFlags::IN)];
            let polled = poll(&mut fds, left.as_ref());
            let [is_there, ends] = fds.map(|fd| !fd.revents().is_empty());
            if ends {
                return;
            }
            let read = match polled {
                Ok(_) if is_there => rustix::io::read(&self.group.0, &mut buffer[..]),
                Ok(_) | Err(Errno::INTR) => continue,
                Err(error) => Err(error),
            };
            match read {
                Ok(len) => {
                    if !waits {
                        next = Instant::now() + AGAIN;
                    }
                    // `len` never exceeds the buffer.
                    events(buffer.get(..len).unwrap_or_default(), |event| self.heard(&event));
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => {
                    tracing::warn!(
                        "changes on the host may have been missed: {error}; clients are to forget everything"
                    );
                    self.tell(Change::All);
                    std::thread::sleep(REST);
                }
            }
        }
    }

    fn tell(&mut self, change: Change) {
        self.republished[0].add(&change);
        self.changes.publish(SessionId::default(), || change);
    }

    fn heard(&mut self, event: &Event<'_>) {
        if event.mask & libc::FAN_Q_OVERFLOW != 0 {
            tracing::debug!("the kernel's event queue has overflowed: clients drop all cached data");
            return self.tell(Change::All);
        }
        if self.ours == OwnChanges::Skip && u32::try_from(event.pid) == Ok(std::process::id()) {
            return;
        }
        let targets = event.target.map(|handle| self.known.find(handle)).unwrap_or_default();
        let has = |mask: u64| event.mask & mask != 0;
        if let Some((handle, name)) = &event.entry
            && has(libc::FAN_CREATE | libc::FAN_DELETE | libc::FAN_MOVED_FROM | libc::FAN_MOVED_TO)
        {
            for dir in self.known.find(*handle) {
                for change in names(event.mask, dir, name, &targets) {
                    self.tell(change);
                }
            }
        }
        for ino in targets {
            if has(libc::FAN_MODIFY | libc::FAN_CLOSE_WRITE) {
                self.tell(Change::Data { ino, offset: 0, len: u64::MAX });
            } else {
                self.tell(Change::Attr { ino });
            }
        }
    }
}

/// Returns the changes of a name. The kernel merges events of one name, so several may have happened.
fn names(mask: u64, dir: Ino, name: &NameBuf, targets: &[Ino]) -> Vec<Change> {
    let [is_new, was_removed, came, went] =
        [libc::FAN_CREATE, libc::FAN_DELETE, libc::FAN_MOVED_TO, libc::FAN_MOVED_FROM].map(|kind| mask & kind != 0);
    let name = name.clone();
    match targets {
        // Clients that found the new name already need no notification.
        _ if is_new && !(was_removed || came || went) => vec![Change::Unsure { dir, name }],
        [ino] if was_removed && !(is_new || came) => vec![Change::Removed { dir, name, ino: *ino }],
        _ => vec![Change::Entry { dir, name }],
    }
}

/// Watching, until dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Cannot fail: the value is far below the maximum of an eventfd.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Dir {
    /// Watches for changes by other processes of the host until the directory is dropped, and publishes them without a
    /// session.
    ///
    /// Every change of any file on the file system is examined, inside the directory or not. When the kernel's queue
    /// overflows (`fs.fanotify.max_queued_events`), [`Change::All`] is published. Further calls have no effect.
    ///
    /// # Errors
    ///
    /// [`WatchError`] says in one sentence why the host cannot be watched.
    pub fn watch(&self, ours: OwnChanges) -> std::result::Result<(), WatchError> {
        if self.watch.get().is_some() {
            return Ok(());
        }
        let mount = &self.root.found.mount;
        if mount.handles().is_none() {
            return Err(WatchError::NoHandles);
        }
        let group = Arc::new(Group(sys::fanotify_group()?));
        group.add(mount)?;
        let known = Arc::new(HandleIndex::new());
        // The root is found by its descriptor, so the table has no handle for it.
        let root = self.path_fd(&self.root)?;
        known.add_by(&sys::name_to_handle(root.as_fd(), b"")?, Ino::ROOT);
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let watcher = Watcher {
            group: Arc::clone(&group),
            known: Arc::clone(&known),
            changes: self.changes.clone(),
            ours,
            stop: Arc::clone(&stop),
            republished: Default::default(),
        };
        let thread = std::thread::Builder::new().name("dir-watch".into()).spawn(move || watcher.run());
        let thread = thread.map_err(|error| WatchError::Host(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        if self.watch.set(Watch { stop, thread: Some(thread) }).is_ok() {
            self.mounts.watch(group);
            self.table.watch(known);
        }
        Ok(())
    }
}
