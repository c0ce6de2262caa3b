//! The names that this client removed: a written file that is not at its name any more need not become durable if this
//! client has removed it. Where another client has renamed it, nobody knows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};

use ferry_vfs::sync::{self, lock};
use ferry_vfs::{Ino, Name, NameBuf};

use crate::inode::{Inode, Inodes, Place, count_change, now_in_changes};

/// The maximum number of remembered names. With more, the files that had them are marked, which takes a look at each.
const NAMES_MAX: usize = 4096;

/// A directory and a name, and when it was removed, as a count of changes.
type Names = HashMap<(Ino, NameBuf), u64>;

/// The removals of a client.
#[derive(Debug, Default)]
pub(crate) struct Removals {
    names: Mutex<Names>,
    /// Held for reading while names are removed or renamed.
    under_way: RwLock<()>,
}

/// What is known of a file's name.
#[derive(Debug, Default)]
pub(crate) struct NameState {
    /// When it was last found by it, as a count of changes.
    found: AtomicU64,
    is_removed: AtomicBool,
}

impl NameState {
    /// The file was found by its name.
    pub(crate) fn found(&self) {
        self.found.store(now_in_changes(), Ordering::Release);
        self.is_removed.store(false, Ordering::Release);
    }
}

impl Inode {
    fn is_removed_in(&self, names: &Names) -> bool {
        let place = self.place().map(|Place { dir, name }| (dir.ino, name));
        let time = place.and_then(|place| names.get(&place).copied());
        time.is_some_and(|time| time > self.name_state.found.load(Ordering::Acquire))
    }
}

impl Inodes {
    /// Begins to remove or rename names, until the guard is dropped.
    pub(crate) fn begin_removal(&self) -> RwLockReadGuard<'_, ()> {
        sync::read(&self.removals.under_way)
    }

    /// Waits until the removals and renames under way are recorded.
    pub(crate) fn wait_for_removals(&self) {
        drop(sync::write(&self.removals.under_way));
    }

    /// Records that this client has removed a name, or has given it to another file.
    pub(crate) fn removed(&self, dir: &Inode, name: Name<'_>) {
        let mut names = lock(&self.removals.names);
        names.insert((dir.ino, name.to_buf()), count_change());
        if names.len() >= NAMES_MAX {
            self.mark_removed(names);
        }
    }

    /// Marks the files whose names were removed.
    fn mark_removed(&self, mut names: MutexGuard<'_, Names>) {
        for inode in self.all().iter().filter(|inode| inode.is_removed_in(&names)) {
            inode.name_state.is_removed.store(true, Ordering::Release);
        }
        names.clear();
    }

    /// Returns whether this client has removed the name of a file.
    pub(crate) fn is_removed(&self, inode: &Inode) -> bool {
        let names = lock(&self.removals.names);
        inode.name_state.is_removed.load(Ordering::Acquire) || inode.is_removed_in(&names)
    }
}
