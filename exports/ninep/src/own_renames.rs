//! The last renames of a session: fids keep the names by which they were found, for Trename and Tremove.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use ferry_vfs::sync::lock;
use ferry_vfs::{Ino, Name, NameBuf};

use crate::session::{Node, Place};

/// The maximum number of remembered renames. Each keeps a reference to a directory.
const RENAMES_MAX: usize = 256;

/// A renamed name, and where its file is now.
struct OwnRename {
    dir: Ino,
    name: NameBuf,
    to: Arc<Place>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct OwnRenames(Mutex<State>);

#[derive(Default)]
struct State {
    /// The number of all renames.
    count: u64,
    last: VecDeque<OwnRename>,
}

impl OwnRenames {
    /// Returns the current location of a file.
    pub(crate) fn place(&self, dir: &Arc<Node>, name: Name<'_>) -> Arc<Place> {
        Place::new(dir, name, lock(&self.0).count)
    }

    /// Records a rename.
    pub(crate) fn add(&self, from: (Ino, Name<'_>), to: (&Arc<Node>, Name<'_>)) {
        let mut state = lock(&self.0);
        state.count += 1;
        let to = Place::new(to.0, to.1, state.count);
        let forgotten = if state.last.len() >= RENAMES_MAX { state.last.pop_front() } else { None };
        state.last.push_back(OwnRename { dir: from.0, name: from.1.to_buf(), to });
        drop(state);
        // It may release a directory, which may block.
        drop(forgotten);
    }

    /// Returns where the renames since then have moved a file; `None` if they have not moved it.
    pub(crate) fn follow(&self, place: &Place) -> Option<Arc<Place>> {
        let state = lock(&self.0);
        let first = state.count - state.last.len() as u64;
        let mut now: Option<&Arc<Place>> = None;
        let since = (first..).zip(&state.last).filter(|(number, _)| *number >= place.renames);
        for (_, rename) in since {
            let at = now.map_or(place, |now| now);
            if at.dir.ino == rename.dir && at.name == rename.name {
                now = Some(&rename.to);
            }
        }
        now.cloned()
    }
}
