//! The tree: names, inodes and attributes in memory, over a [`Store`] with the bytes and the journal.
//!
//! An inode exists while it has a name, a reference or an open handle ([`node`]). [`rename`] has the order of locks.

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
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ferry_vfs::{Caller, Changes, Errno, Handles, Ino, Locks, Result, Statfs, sync};

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
    /// The maximum number of inodes, including the root.
    pub inodes_max: u64,
    /// The maximum size of inodes, names, targets of symbolic links and extended attributes in bytes. Each counts as in
    /// Linux's tmpfs (`tree/space.rs`).
    pub metadata_bytes_max: u64,
    /// Refuse every change.
    pub read_only: bool,
}

/// A file system with its tree in memory and its data in a store. See the crate documentation.
#[derive(Debug)]
pub struct Tree<S: Store> {
    store: S,
    limits: Limits,
    table: Table<S>,
    handles: Handles<Open<S>>,
    locks: Locks<Open<S>>,
    changes: Changes,
    /// Held while a name moves between directories.
    renames: Mutex<()>,
    /// Held shared by every change if the store keeps a journal, exclusively by a checkpoint.
    gate: RwLock<()>,
    next_ino: AtomicU64,
    taken: UsedSpace,
}

/// Logs a record, if the store keeps a journal.
fn log<'a, S: Store>(store: &S, record: impl FnOnce() -> Record<'a>) -> Result<()> {
    if S::JOURNALED { store.log(&record()) } else { Ok(()) }
}

/// The resources that a tree currently holds.
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
        // The root is never removed, nor is its space.
        tree.taken.add(SpaceAmount { inodes: 1, bytes: space::INODE_BYTES });
        root.hold();
        tree.table.insert(root);
        tree
    }

    /// The store below.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Returns the current use of resources, for monitoring and tests.
    pub fn usage(&self) -> TreeUsage {
        TreeUsage { inodes: self.taken.inodes(), handles: self.handles.len() }
    }

    /// Excludes checkpoints until the guard is dropped. A thread must not take it twice.
    fn gate(&self) -> Option<RwLockReadGuard<'_, ()>> {
        S::JOURNALED.then(|| sync::read(&self.gate))
    }

    /// Begins a change.
    fn begin(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        if self.limits.read_only {
            return Err(Errno::ROFS);
        }
        self.store.admit(self)?;
        Ok(self.gate())
    }

    /// Reserves space for a new object; `NOSPC` if there is not enough.
    fn reserve(&self, amount: SpaceAmount) -> Result<Reservation<'_>> {
        let max = SpaceAmount { inodes: self.limits.inodes_max, bytes: self.limits.metadata_bytes_max };
        self.taken.reserve(amount, max)
    }

    /// Releases holds, and ends the inode if they were the last.
    fn release_hold(&self, node: &Arc<Node<S>>, count: u64) {
        if node.ino == Ino::ROOT {
            return;
        }
        if node.release_hold(count) && node.read().nlink == 0 {
            let _gate = self.gate();
            self.end_if_unused(node, node.write());
        }
    }

    /// Ends an inode without names or users. The caller holds the gate.
    fn end_if_unused(&self, node: &Arc<Node<S>>, mut state: RwLockWriteGuard<'_, State<S>>) {
        if state.nlink > 0 || state.ended || node.is_held() || node.ino == Ino::ROOT {
            return;
        }
        state.ended = true;
        let (ino, amount) = (node.ino, SpaceAmount { inodes: 1, bytes: state.metadata_bytes() });
        // A read-only tree keeps its orphans until the next mount.
        if !self.limits.read_only {
            self.store.end(ino);
            if let Err(error) = log(&self.store, || Record::Free { ino }) {
                tracing::warn!(ino = ino.0, %error, "cannot remove an inode; the next mount removes it");
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

    fn statfs(&self, _: &Caller<'_>, ino: Ino) -> Result<Statfs> {
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
    /// Removes names one by one: a recursive drop of a deep tree would overflow the stack.
    fn drop(&mut self) {
        for node in &self.table.drain() {
            if let Body::Dir(names) = &mut node.write().body {
                names.clear();
            }
        }
    }
}
