//! The tree: names, inodes and attributes in memory, over a [`Store`] that has the bytes and the journal.
//!
//! An inode lives while it has a name, a reference of a client or an open handle ([`node`]). The order of locks is told in
//! [`rename`].

mod acl;
mod attrs;
mod dir;
mod files;
mod names;
pub(crate) mod node;
mod readdir;
mod rename;
mod replay;
mod serve;
pub(crate) mod space;
mod xattr;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ferry_vfs::{Changes, Errno, Handles, Ino, Locks, Result, Statfs};

use self::files::Open;
use self::node::{Body, State, Table};
use self::space::{Reservation, SpaceAmount, UsedSpace};
use crate::store::{Record, Store};

pub(crate) use self::node::Node;
pub use self::replay::{Replay, ReplayError, Snapshot};

/// What `statfs` counts in.
const BLOCK_BYTES: u32 = 4096;

/// What a tree may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most inodes, the root among them.
    pub inodes_max: u64,
    /// The most that inodes, names, targets of symbolic links and extended attributes may take. Each counts as in Linux's
    /// tmpfs (`tree/space.rs`).
    pub metadata_bytes_max: u64,
    /// Refuse every change.
    pub read_only: bool,
}

/// A file system whose tree is in memory and whose data are in a store. See the crate's front page.
#[derive(Debug)]
pub struct Tree<S: Store> {
    store: S,
    limits: Limits,
    table: Table<S>,
    handles: Handles<Open<S>>,
    locks: Locks<Open<S>>,
    changes: Changes,
    /// Held by whoever moves something between directories.
    renames: Mutex<()>,
    /// Held shared by every change where the store keeps a journal, exclusively by a checkpoint.
    gate: RwLock<()>,
    next_ino: AtomicU64,
    taken: UsedSpace,
}

/// Writes a record down, where the store does that at all.
fn log<'a, S: Store>(store: &S, record: impl FnOnce() -> Record<'a>) -> Result<()> {
    if S::JOURNALED { store.log(&record()) } else { Ok(()) }
}

/// How much a tree holds at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeUsage {
    /// Inodes, the root among them.
    pub inodes: u64,
    /// Open files and directories.
    pub handles: usize,
}

impl<S: Store> Tree<S> {
    fn empty(store: S, limits: Limits, root: State<S>) -> Self {
        let tree = Self {
            store,
            limits,
            table: Table::new(),
            handles: Handles::default(),
            locks: Locks::default(),
            changes: Changes::default(),
            renames: Mutex::new(()),
            gate: RwLock::new(()),
            next_ino: AtomicU64::new(Ino::ROOT.0 + 1),
            taken: UsedSpace::default(),
        };
        let root = Arc::new(Node::new(Ino::ROOT, Ino::ROOT, root));
        // The root is never given up, and neither is what it takes.
        tree.taken.add(SpaceAmount { inodes: 1, bytes: space::INODE_BYTES });
        root.hold();
        tree.table.insert(root);
        tree
    }

    /// The store below.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// How much is held at the moment, to be watched and tested.
    pub fn usage(&self) -> TreeUsage {
        TreeUsage { inodes: self.taken.inodes(), handles: self.handles.len() }
    }

    /// Keeps checkpoints out until the guard is dropped. Never taken twice by a thread.
    fn gate(&self) -> Option<RwLockReadGuard<'_, ()>> {
        S::JOURNALED.then(|| self.gate.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Begins a change.
    fn begin(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        if self.limits.read_only {
            return Err(Errno::ROFS);
        }
        self.store.admit(self)?;
        Ok(self.gate())
    }

    /// Takes what something needs that is about to be made; `NOSPC` where there is not as much left.
    fn reserve(&self, amount: SpaceAmount) -> Result<Reservation<'_>> {
        let max = SpaceAmount { inodes: self.limits.inodes_max, bytes: self.limits.metadata_bytes_max };
        self.taken.reserve(amount, max)
    }

    /// Takes holds away, and ends the inode if that was what kept it.
    fn release_hold(&self, node: &Arc<Node<S>>, count: u64) {
        if node.ino == Ino::ROOT {
            return;
        }
        if node.release_hold(count) && node.read().nlink == 0 {
            let _gate = self.gate();
            self.end_if_unused(node, node.write());
        }
    }

    /// Ends an inode that has neither names nor users. The caller holds the gate.
    fn end_if_unused(&self, node: &Arc<Node<S>>, mut state: RwLockWriteGuard<'_, State<S>>) {
        if state.nlink > 0 || state.ended || node.is_held() || node.ino == Ino::ROOT {
            return;
        }
        state.ended = true;
        let (ino, amount) = (node.ino, SpaceAmount { inodes: 1, bytes: state.metadata_bytes() });
        // A read-only tree keeps its orphans for the next start.
        if !self.limits.read_only {
            if let Err(error) = log(&self.store, || Record::Free { ino }) {
                tracing::warn!(ino = ino.0, %error, "the end of an inode; it is found at the next start");
            }
            if let Body::File(body) = &state.body
                && (body.has_data || body.unknown)
            {
                self.store.remove(ino);
            }
        }
        drop(state);
        self.table.remove(ino);
        self.taken.remove(amount);
    }

    fn inode_statfs(&self, ino: Ino) -> Result<Statfs> {
        self.table.get(ino)?;
        let space = self.store.space()?;
        let block = u64::from(BLOCK_BYTES);
        let by_number = self.limits.inodes_max.saturating_sub(self.taken.inodes());
        let by_size = self.limits.metadata_bytes_max.saturating_sub(self.taken.bytes()) / space::INODE_BYTES;
        Ok(Statfs {
            blocks: space.total / block,
            bfree: space.free / block,
            bavail: space.free / block,
            files: self.limits.inodes_max,
            ffree: by_number.min(by_size),
            bsize: BLOCK_BYTES,
            namelen: 255,
            frsize: BLOCK_BYTES,
        })
    }
}

impl<S: Store> Drop for Tree<S> {
    /// Takes the tree apart name by name: dropping a deep one as a whole would need a stack as deep.
    fn drop(&mut self) {
        for node in &self.table.drain() {
            if let Body::Dir(names) = &mut node.write().body {
                names.clear();
            }
        }
    }
}
