//! Records a client's state (inodes, open files, locks) as it changes.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use ferry_state::{Init, OpenFile, SavedLock, SessionStore, Slot};
use ferry_vfs::sync::lock;
use ferry_vfs::{Caller, FileSystem, Handle, IdentityScope, Ino, LockKind, OFlags, SessionId};

use crate::open_file::Open;

/// Why a client's session cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Other options than before.
    #[error(
        "the previous server negotiated the FUSE flags {before:#x}, this one would negotiate {now:#x}: start it with the \
         same options, on the same kind of file system"
    )]
    Agreed {
        /// The flags then.
        before: u64,
        /// The flags now.
        now: u64,
    },
    /// An unsupported FUSE version.
    #[error("the guest speaks FUSE 7.{0}, which this server does not")]
    Minor(u32),
}

/// The record of one client's session.
pub(crate) struct SessionRecord {
    store: Arc<SessionStore>,
    epoch: u32,
}

/// The record of an open file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpenRecord {
    pub(crate) slot: Option<Slot>,
    /// Its descriptor is stored, too.
    pub(crate) has_file: bool,
}

impl From<Open> for OpenFile {
    fn from(Open { ino, handle, is_dir }: Open) -> Self {
        Self { ino, handle, is_dir, flags: 0 }
    }
}

impl SessionRecord {
    /// Begins the record of a client; replaces that of the previous one.
    pub(crate) fn begin(store: &Arc<SessionStore>, init: Init) -> Self {
        Self { epoch: store.begin(Some(init)), store: Arc::clone(store) }
    }

    /// Continues the record of the restored client.
    pub(crate) fn resume(store: &Arc<SessionStore>) -> Self {
        Self { epoch: store.epoch(), store: Arc::clone(store) }
    }

    /// Whether the record is still that of this client.
    pub(crate) fn is_current(&self) -> bool {
        self.store.epoch() == self.epoch
    }

    pub(crate) fn node(&self, source: &dyn FileSystem, ino: Ino, in_window: bool) -> Option<Slot> {
        // The reference is counted already, so a panic must not pass.
        let identity =
            catch_unwind(AssertUnwindSafe(|| source.migrate()?.identify(ino, IdentityScope::Host).ok())).ok()??;
        self.store.node(self.epoch, ino, &identity, in_window)
    }

    #[inline]
    pub(crate) fn references(&self, slot: Slot, count: u64) {
        self.store.references(slot, count);
    }

    pub(crate) fn remove(&self, slot: Slot) {
        self.store.remove(slot);
    }

    pub(crate) fn opened(&self, source: &dyn FileSystem, session: SessionId, open: Open, flags: OFlags) -> OpenRecord {
        let caller = Caller { session, ..Caller::default() };
        let call = AssertUnwindSafe(|| source.backing(&caller, open.ino, open.handle));
        // The next server reopens directories.
        let file = if open.is_dir { None } else { catch_unwind(call).unwrap_or(None) };
        let saved = OpenFile { flags: flags.bits(), ..open.into() };
        let slot = self.store.open_file(self.epoch, saved, file.as_ref().map(|file| file.as_fd()));
        OpenRecord { slot, has_file: file.is_some() }
    }

    pub(crate) fn closed(&self, open_record: &OpenRecord) {
        if let Some(slot) = open_record.slot {
            self.store.close_file(slot, open_record.has_file);
        }
    }
}

/// A lock and its record.
type StoredLock = (SavedLock, Option<Slot>);

/// The locks of one inode.
#[derive(Default)]
struct InodeLocks {
    /// By handle.
    flocks: HashMap<Handle, StoredLock>,
    /// By owner and first byte. They do not overlap, and adjacent ranges of one kind are merged.
    ranges: HashMap<u64, BTreeMap<u64, StoredLock>>,
}

impl InodeLocks {
    fn is_empty(&self) -> bool {
        self.flocks.is_empty() && self.ranges.is_empty()
    }

    fn all(&self) -> impl Iterator<Item = &StoredLock> {
        self.flocks.values().chain(self.ranges.values().flat_map(BTreeMap::values))
    }

    fn insert(&mut self, lock: SavedLock, slot: Option<Slot>) {
        match lock.flock {
            true => self.flocks.insert(lock.handle, (lock, slot)),
            false => self.ranges.entry(lock.owner).or_default().insert(lock.start, (lock, slot)),
        };
    }

    /// Removes the locks that a change touches. Returns them, and the locks that replace them.
    fn change(&mut self, lock: &SavedLock, kind: LockKind) -> (Vec<StoredLock>, Vec<SavedLock>) {
        let mut now = SavedLock { kind, ..*lock };
        let (mut old, mut new) = (Vec::new(), Vec::new());
        if lock.flock {
            old.extend(self.flocks.remove(&lock.handle));
        } else if let Some(ranges) = self.ranges.get_mut(&lock.owner) {
            // Includes adjacent ranges.
            let up_to = ranges.range(..=lock.end.saturating_add(1)).rev();
            let near = up_to.take_while(|(_, (other, _))| lock.start <= other.end.saturating_add(1));
            let touched =
                near.filter(|(_, (other, _))| other.kind == kind || other.start <= lock.end && lock.start <= other.end);
            let touched: Vec<u64> = touched.map(|(start, _)| *start).collect();
            for (other, slot) in touched.into_iter().filter_map(|start| ranges.remove(&start)) {
                old.push((other, slot));
                if other.kind == kind {
                    (now.start, now.end) = (now.start.min(other.start), now.end.max(other.end));
                    continue;
                }
                if other.start < lock.start {
                    new.push(SavedLock { end: lock.start - 1, ..other });
                }
                if other.end > lock.end {
                    new.push(SavedLock { start: lock.end + 1, ..other });
                }
            }
            if ranges.is_empty() {
                self.ranges.remove(&lock.owner);
            }
        }
        if kind != LockKind::Unlock {
            new.push(now);
        }
        (old, new)
    }
}

/// The locks that a client holds. The source's limits bound their number.
#[derive(Default)]
pub(crate) struct HeldLocks(Mutex<HashMap<Ino, InodeLocks>>);

impl HeldLocks {
    pub(crate) fn list(&self) -> Vec<SavedLock> {
        lock(&self.0).values().flat_map(InodeLocks::all).map(|(lock, _)| *lock).collect()
    }

    /// Adds a lock that is recorded already.
    pub(crate) fn adopt(&self, saved: SavedLock, slot: Option<Slot>) {
        lock(&self.0).entry(saved.ino).or_default().insert(saved, slot);
    }

    /// Records that the client got a lock, or released it (`LockKind::Unlock`).
    pub(crate) fn set(&self, record: Option<&SessionRecord>, saved: &SavedLock, kind: LockKind) {
        let mut all = lock(&self.0);
        let held = all.entry(saved.ino).or_default();
        let (old, new) = held.change(saved, kind);
        // The new records come first: a server that starts in between finds too many, which the repeated request
        // corrects.
        for lock in new {
            held.insert(lock, record.and_then(|to| to.store.lock(to.epoch, lock)));
        }
        if held.is_empty() {
            all.remove(&saved.ino);
        }
        erase(record, old);
    }

    fn drop_matching(
        &self,
        record: Option<&SessionRecord>,
        ino: Ino,
        take: impl FnOnce(&mut InodeLocks) -> Vec<StoredLock>,
    ) {
        let mut all = lock(&self.0);
        let Some(held) = all.get_mut(&ino) else { return };
        erase(record, take(held));
        if held.is_empty() {
            all.remove(&ino);
        }
    }

    /// Drops the locks of an owner that has closed a descriptor of the inode.
    pub(crate) fn flushed(&self, record: Option<&SessionRecord>, ino: Ino, owner: u64) {
        self.drop_matching(record, ino, |held| {
            held.ranges.remove(&owner).into_iter().flat_map(BTreeMap::into_values).collect()
        });
    }

    /// Drops the locks of a closed handle; all locks of the inode if it was the last handle.
    pub(crate) fn released(&self, record: Option<&SessionRecord>, open: Open, is_last: bool) {
        if open.is_dir {
            return;
        }
        self.drop_matching(record, open.ino, |held| match is_last {
            true => std::mem::take(held).all().copied().collect(),
            false => held.flocks.remove(&open.handle).into_iter().collect(),
        });
    }
}

/// Removes the records of released locks.
fn erase(record: Option<&SessionRecord>, locks: Vec<StoredLock>) {
    let Some(record) = record else { return };
    locks.into_iter().filter_map(|(_, slot)| slot).for_each(|slot| record.remove(slot));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(handle: u64, owner: u64, start: u64, end: u64) -> SavedLock {
        let (ino, handle, pid, kind) = (Ino(2), Handle(handle), 1, LockKind::Read);
        SavedLock { ino, handle, owner, pid, kind, flock: false, start, end }
    }

    fn ranges(locks: &HeldLocks) -> Vec<(u64, u64, u64)> {
        let mut all: Vec<_> = locks.list().iter().map(|lock| (lock.owner, lock.start, lock.end)).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn locks_are_split_replaced_and_dropped_as_a_kernel_does() {
        let locks = HeldLocks::default();
        locks.set(None, &lock(1, 1, 0, 99), LockKind::Read);
        locks.set(None, &lock(1, 2, 50, 60), LockKind::Read);
        locks.set(None, &lock(1, 1, 10, 19), LockKind::Unlock);
        assert_eq!(ranges(&locks), [(1, 0, 9), (1, 20, 99), (2, 50, 60)]);
        locks.set(None, &lock(1, 1, 5, 30), LockKind::Write);
        assert_eq!(ranges(&locks), [(1, 0, 4), (1, 5, 30), (1, 31, 99), (2, 50, 60)]);
        locks.flushed(None, Ino(2), 1);
        assert_eq!(ranges(&locks), [(2, 50, 60)]);
        // Adjacent locks are merged, in any order and through any handle.
        for start in [0, 2, 1, 4, 3, u64::MAX] {
            locks.set(None, &lock(start % 3, 3, start, start), LockKind::Read);
        }
        assert_eq!(ranges(&locks), [(2, 50, 60), (3, 0, 4), (3, u64::MAX, u64::MAX)]);
        locks.flushed(None, Ino(2), 3);
        let flock = SavedLock { flock: true, ..lock(7, 9, 0, 0) };
        locks.set(None, &flock, LockKind::Read);
        locks.set(None, &flock, LockKind::Write);
        assert_eq!(locks.list().len(), 2);
        let open = |handle| Open { ino: Ino(2), handle: Handle(handle), is_dir: false };
        locks.released(None, open(7), false);
        assert_eq!(ranges(&locks), [(2, 50, 60)]);
        locks.released(None, open(8), true);
        assert!(locks.list().is_empty() && locks.0.lock().unwrap().is_empty());
    }
}
