//! The last renames of a session: fids keep the names by which they were found, for Trename and Tremove.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use ferry_vfs::sync::lock;
use ferry_vfs::{Ino, Name, NameBuf};

/// The maximum number of remembered renames. Each keeps a reference to a directory.
const RENAMES_MAX: usize = 256;

/// Where a file was found: a directory `D`, and a name in it.
#[derive(Debug)]
pub(crate) struct Place<D> {
    pub(crate) dir: Arc<D>,
    ino: Ino,
    pub(crate) name: NameBuf,
    /// The number of the session's renames before it was found there.
    renames: u64,
}

/// A renamed name, and where its file is now.
struct OwnRename<D> {
    dir: Ino,
    name: NameBuf,
    to: Arc<Place<D>>,
}

/// See the module.
pub(crate) struct OwnRenames<D>(Mutex<State<D>>);

struct State<D> {
    /// The number of all renames.
    count: u64,
    last: VecDeque<OwnRename<D>>,
}

impl<D> Default for OwnRenames<D> {
    fn default() -> Self {
        Self(Mutex::new(State { count: 0, last: VecDeque::new() }))
    }
}

impl<D> OwnRenames<D> {
    /// Returns the current location of a file, in a directory with this number.
    pub(crate) fn place(&self, (dir, ino): (&Arc<D>, Ino), name: Name<'_>) -> Arc<Place<D>> {
        let renames = lock(&self.0).count;
        Arc::new(Place { dir: Arc::clone(dir), ino, name: name.to_buf(), renames })
    }

    /// Records a rename.
    pub(crate) fn add(&self, from: (Ino, Name<'_>), (dir, ino): (&Arc<D>, Ino), name: Name<'_>) {
        let mut state = lock(&self.0);
        state.count += 1;
        let to = Arc::new(Place { dir: Arc::clone(dir), ino, name: name.to_buf(), renames: state.count });
        let forgotten = if state.last.len() >= RENAMES_MAX { state.last.pop_front() } else { None };
        state.last.push_back(OwnRename { dir: from.0, name: from.1.to_buf(), to });
        drop(state);
        // It may release a directory, which may block.
        drop(forgotten);
    }

    /// Returns where the renames since then have moved a file; `None` if they have not moved it.
    pub(crate) fn follow(&self, place: &Place<D>) -> Option<Arc<Place<D>>> {
        let state = lock(&self.0);
        let first = state.count - state.last.len() as u64;
        let mut now: Option<&Arc<Place<D>>> = None;
        let since = (first..).zip(&state.last).filter(|(number, _)| *number >= place.renames);
        for (_, rename) in since {
            let at = now.map_or(place, |now| now);
            if at.ino == rename.dir && at.name == rename.name {
                now = Some(&rename.to);
            }
        }
        now.cloned()
    }
}
