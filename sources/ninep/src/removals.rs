//! The names that this client removed: a written file that is not at its name any more need not become durable if this
//! client has removed it. Where another client has renamed it, nobody knows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock, RwLockReadGuard};

use ferry_vfs::sync::{self, lock};
use ferry_vfs::{Ino, Name, NameBuf};

use crate::change_count::{count_change, now_in_changes};

/// The maximum number of remembered names. With more, the files that had them are marked, which takes a look at each.
const NAMES_MAX: usize = 4096;

/// A directory and a name, and when it was removed, as a count of changes.
pub(crate) type Names = HashMap<(Ino, NameBuf), u64>;

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

    /// Returns whether this name of the file was removed after the file was found by it.
    pub(crate) fn is_removed_in(&self, names: &Names, place: Option<(Ino, NameBuf)>) -> bool {
        let time = place.and_then(|place| names.get(&place).copied());
        time.is_some_and(|time| time > self.found.load(Ordering::Acquire))
    }

    /// The name was removed, which is no longer remembered.
    pub(crate) fn mark_removed(&self) {
        self.is_removed.store(true, Ordering::Release);
    }
}

impl Removals {
    /// Begins to remove or rename names, until the guard is dropped.
    pub(crate) fn begin(&self) -> RwLockReadGuard<'_, ()> {
        sync::read(&self.under_way)
    }

    /// Waits until the removals and renames under way are recorded.
    pub(crate) fn wait(&self) {
        drop(sync::write(&self.under_way));
    }

    /// Records that this client has removed a name, or has given it to another file. `mark` marks the files that had one of
    /// the names, which are then forgotten.
    pub(crate) fn record(&self, dir: Ino, name: Name<'_>, mark: impl FnOnce(&Names)) {
        let mut names = lock(&self.names);
        names.insert((dir, name.to_buf()), count_change());
        if names.len() >= NAMES_MAX {
            mark(&names);
            names.clear();
        }
    }

    /// Returns whether this client has removed the name of a file, which was last found at this place.
    pub(crate) fn has(&self, state: &NameState, place: Option<(Ino, NameBuf)>) -> bool {
        let names = lock(&self.names);
        state.is_removed.load(Ordering::Acquire) || state.is_removed_in(&names, place)
    }
}
