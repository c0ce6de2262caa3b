//! Whole file systems, watched with fanotify. Events identify inodes by file handles, and the index [`HandleIndex`]
//! finds those that clients reference; all others are ignored.

use std::collections::BTreeSet;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ferry_vfs::sync::{CacheAligned, lock};
use ferry_vfs::{Change, Ino, NameBuf};

use super::changes::{OwnChanges, WatchError, changes_of};
use super::events::{Event, Handle};
use super::history::{History, Known, Names};
use crate::int_hasher::IntHasher;
use crate::sys;

/// Enough that workers that find inodes rarely contend; a power of two.
const SHARDS: usize = 64;
/// The events: all changes of what clients cache. A file that was open for writing is closed after its mappings.
const MASK: u64 = libc::FAN_MODIFY
    | libc::FAN_CLOSE_WRITE
    | libc::FAN_ATTRIB
    | libc::FAN_CREATE
    | libc::FAN_DELETE
    | libc::FAN_MOVED_FROM
    | libc::FAN_MOVED_TO
    | libc::FAN_RENAME
    | libc::FAN_ONDIR;

/// Checks that this process may watch the file system of a directory for changes. Where it may not, `Dir::watch`
/// watches the directories that clients know.
///
/// # Errors
/// It may not, or the kernel or the file system does not report them.
pub fn can_watch(directory: BorrowedFd<'_>) -> std::result::Result<(), WatchError> {
    // Everybody may have a group; a file system is for root.
    let group = Group::new()?;
    Ok(sys::fanotify_mark_file_system(group.as_fd(), directory, MASK)?)
}

/// A fanotify group.
#[derive(Debug)]
pub(crate) struct Group(OwnedFd);

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Group {
    pub(super) fn new() -> std::result::Result<Self, WatchError> {
        Ok(Self(sys::fanotify_group()?))
    }

    /// Watches a file system, too; `root` is a descriptor of it that is not `O_PATH`.
    pub(crate) fn add(&self, root: BorrowedFd<'_>) -> std::result::Result<(), WatchError> {
        Ok(sys::fanotify_mark_file_system(self.0.as_fd(), root, MASK)?)
    }
}

/// Hashes of handles with the inodes.
type Hashed = CacheAligned<Mutex<BTreeSet<(u64, Ino)>>>;

/// The inodes that clients reference, by the hash of their handles.
///
/// Handles with equal hashes, as on two file systems, are published together, which costs an unnecessary revalidation.
pub(crate) struct HandleIndex {
    shards: Box<[Hashed]>,
    /// How many events inodes were looked for. It is counted first: an inode that is added has either been found by an
    /// event, or the count is another than when its attributes were read.
    heard: AtomicU64,
    /// Some handle has several inodes: a directory of the share is mounted in another one. Their own changes are told
    /// to each other.
    has_shared_handles: AtomicBool,
}

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

fn of_hash(hash: u64) -> RangeInclusive<(u64, Ino)> {
    (hash, Ino(0))..=(hash, Ino(u64::MAX))
}

impl HandleIndex {
    pub(super) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| CacheAligned::default()).collect(),
            heard: AtomicU64::new(0),
            has_shared_handles: AtomicBool::new(false),
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below SHARDS")]
    fn shard(&self, hash: u64) -> &Hashed {
        &self.shards[(hash % SHARDS as u64) as usize]
    }

    /// Returns how many events were looked at.
    pub(super) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Acquire)
    }

    /// Adds an inode that a client references.
    pub(super) fn add(&self, handle: Option<&sys::HostHandle>, ino: Ino) {
        if let Some((kind, bytes)) = handle.map(sys::HostHandle::parts) {
            let hash = hash(kind, bytes);
            let mut shard = lock(self.shard(hash));
            shard.insert((hash, ino));
            if shard.range(of_hash(hash)).nth(1).is_some() {
                self.has_shared_handles.store(true, Ordering::Release);
                // An event before this may have been skipped.
                self.heard.fetch_add(1, Ordering::AcqRel);
            }
        }
    }

    /// Removes an inode that no client references.
    pub(super) fn remove(&self, handle: Option<&sys::HostHandle>, ino: Ino) {
        if let Some((kind, bytes)) = handle.map(sys::HostHandle::parts) {
            let hash = hash(kind, bytes);
            lock(self.shard(hash)).remove(&(hash, ino));
        }
    }

    /// Returns the inodes with this handle: one per mount through which it was found, usually one or none.
    fn find(&self, (kind, bytes): (i32, &[u8])) -> Vec<Ino> {
        let hash = hash(kind, bytes);
        lock(self.shard(hash)).range(of_hash(hash)).map(|(_, ino)| *ino).collect()
    }
}

impl HandleIndex {
    /// Returns a name with the directories that clients reference.
    fn names<'a>(&self, entry: Option<&'a (Handle<'_>, NameBuf)>) -> Option<Names<'a>> {
        entry.map(|(handle, name)| (self.find(*handle), name))
    }
}

/// Passes on what one event of fanotify tells: what is no longer valid to `tell`, and what happened to `history`.
pub(super) fn heard(
    index: &HandleIndex,
    ours: OwnChanges,
    event: &Event<'_>,
    history: &mut History,
    tell: &mut impl FnMut(Change),
) {
    if event.mask & libc::FAN_Q_OVERFLOW != 0 {
        index.heard.fetch_add(1, Ordering::AcqRel);
        tracing::debug!("the kernel's event queue has overflowed: clients drop all cached data");
        history.lost();
        return tell(Change::All);
    }
    let is_own = ours == OwnChanges::Skip && u32::try_from(event.pid) == Ok(std::process::id());
    if is_own && !index.has_shared_handles.load(Ordering::Acquire) {
        return;
    }
    index.heard.fetch_add(1, Ordering::AcqRel);
    let targets = event.target.map(|handle| index.find(handle)).unwrap_or_default();
    let (entry, new_entry) = (index.names(event.entry.as_ref()), index.names(event.new_entry.as_ref()));
    let are_several = |inos: &[Ino]| inos.len() > 1;
    if is_own && !are_several(&targets) && !entry.as_ref().is_some_and(|(dirs, _)| are_several(dirs)) {
        return;
    }
    // The kernel reports the two names of a rename separately, too.
    if event.mask & libc::FAN_RENAME == 0 {
        changes_of(event.mask, entry.as_ref().map(|(dirs, name)| (&**dirs, *name)), &targets, tell);
    }
    if is_own {
        return;
    }
    let target = event.target.map(|(kind, bytes)| hash(kind, bytes));
    history.add(&Known { mask: event.mask, entry, new_entry, targets, target });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adding_an_inode_detects_earlier_events() {
        let index = HandleIndex::new();
        let event =
            |pid| Event { mask: libc::FAN_MODIFY, pid, target: Some((1, b"handle")), entry: None, new_entry: None };
        let told = |pid| {
            let mut told = 0;
            heard(&index, OwnChanges::Skip, &event(pid), &mut History::default(), &mut |_| told += 1);
            told
        };
        let before = index.heard();
        assert_eq!(told(std::process::id().cast_signed()), 0);
        assert_eq!(index.heard(), before, "whoever makes a change of this process tells it");
        assert_eq!(told(0), 0, "no client knows the inode");
        assert_ne!(index.heard(), before);
        // What was lost may be about any inode.
        let before = index.heard();
        let lost = Event { mask: libc::FAN_Q_OVERFLOW, pid: 0, target: None, entry: None, new_entry: None };
        let mut told = Vec::new();
        heard(&index, OwnChanges::Skip, &lost, &mut History::default(), &mut |change| told.push(change));
        assert!(matches!(told[..], [Change::All]) && index.heard() != before);
    }
}
