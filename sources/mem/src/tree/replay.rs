//! Replays records into a tree, and writes a tree as records.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_vfs::{Errno, FileType, Ino, Name, Result, Timespec, sync};

use super::attrs::S_IFMT;
use super::dir::Dir;
use super::node::{Body, FileBody, Node, State};
use super::space::SpaceAmount;
use super::{Limits, Tree, log};
use crate::store::{At, Meta, Record, Store, Xattr};

/// The limit of inode numbers, so that the counter cannot overflow.
const INO_END: u64 = 1 << 63;

/// Why a record cannot be replayed. The tree is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// It refers to a missing inode.
    #[error("the record names inode {0}, which does not exist")]
    NoInode(u64),
    /// It creates an existing inode, or one with an invalid number.
    #[error("the record creates inode {0}, which exists already or is not a valid number")]
    BadNumber(u64),
    /// It gives an inode an unsuitable file type.
    #[error("the record gives inode {ino} the mode {mode:o}, whose file type does not fit")]
    BadMode {
        /// The inode.
        ino: u64,
        /// The mode.
        mode: u32,
    },
    /// It refers to a location in an inode that is not a directory, or is removed.
    #[error("the record names an entry of inode {0}, which is not a directory with a name")]
    NoDirectory(u64),
    /// It refers to a missing entry.
    #[error("the record names an entry of directory {0} that does not exist")]
    NoEntry(u64),
    /// It creates an existing entry.
    #[error("the record creates an entry of directory {0} that exists already")]
    EntryExists(u64),
    /// It links a directory, removes a full one, moves one into itself, or frees an inode with names.
    #[error("the record changes inode {0} in a way that is not possible for it")]
    Impossible(u64),
    /// The number of inodes exceeds the limit.
    #[error("the records create more than {0} inodes; raise the limit of inodes")]
    TooMany(u64),
    /// The store refused the end of the replay.
    #[error("the replayed tree cannot be completed")]
    Store(#[source] Errno),
}

/// A directory, and the inode of a name in it.
type Place<S> = (Arc<Node<S>>, Option<Arc<Node<S>>>);

type ReplayResult<T> = std::result::Result<T, ReplayError>;

/// A tree under construction from records.
#[derive(Debug)]
pub struct Replay<S: Store> {
    tree: Tree<S>,
    has_root: bool,
}

impl<S: Store> Replay<S> {
    /// Begins with an empty root.
    pub fn new(store: S, limits: Limits) -> Self {
        let time = S::now();
        let mode = FileType::Directory.as_raw_mode() | 0o755;
        let meta = Meta { mode, atime: time, mtime: time, ctime: time, btime: time, ..Meta::default() };
        let root = State::new(meta, 2, Body::Dir(Box::<Dir<S>>::default()));
        Self { tree: Tree::empty(store, limits, root), has_root: false }
    }

    /// Applies a record. Records are untrusted, so their contents are checked.
    ///
    /// # Errors
    ///
    /// A [`ReplayError`]; the tree is then unchanged.
    pub fn apply(&mut self, record: &Record<'_>) -> ReplayResult<()> {
        match *record {
            Record::Make { ino: Ino::ROOT, meta, xattrs, at: None, .. } => {
                self.set_meta(Ino::ROOT, meta)?;
                self.put_xattrs(Ino::ROOT, xattrs)?;
                self.has_root = true;
                Ok(())
            }
            Record::Make { ino, meta, target, xattrs, at } => self.make(ino, meta, target, xattrs, at),
            Record::Link { ino, at, time } => self.link(ino, at, time),
            Record::Unlink { at, time } => self.unlink(at, time),
            Record::Rename { from, to, exchange, whiteout, time } => self.rename(from, to, exchange, whiteout, time),
            Record::Attr { ino, meta } => self.set_meta(ino, meta),
            Record::Xattr { ino, name, value, meta } => {
                self.set_meta(ino, meta)?;
                match value {
                    Some(value) => self.put_xattrs(ino, &[Xattr { name, value }])?,
                    None => self.change(&mut self.node(ino)?.write(), |state| state.put_xattr(name, None)),
                }
                Ok(())
            }
            Record::Free { ino } => self.free(ino),
        }
    }

    /// Returns whether there is a regular file with this number.
    pub fn is_file(&self, ino: Ino) -> bool {
        self.tree.table.get(ino).is_ok_and(|node| node.kind == FileType::RegularFile)
    }

    /// Returns the finished tree. Inodes without names are freed.
    ///
    /// # Errors
    ///
    /// [`ReplayError::Store`] if the store refuses the first record of an empty tree.
    pub fn finish(self) -> ReplayResult<Tree<S>> {
        let tree = self.tree;
        if !self.has_root && !tree.limits.read_only {
            let meta = tree.table.get(Ino::ROOT).map_err(ReplayError::Store)?.read().meta;
            let record = || Record::Make { ino: Ino::ROOT, meta, target: &[], xattrs: &[], at: None };
            log(&tree.store, record).map_err(ReplayError::Store)?;
        }
        for node in tree.table.select(|node| node.read().nlink == 0) {
            tree.end_if_unused(&node, node.write());
        }
        Ok(tree)
    }

    fn node(&self, ino: Ino) -> ReplayResult<Arc<Node<S>>> {
        self.tree.table.get(ino).map_err(|_| ReplayError::NoInode(ino.0))
    }

    /// Returns the directory of a location, and its inode.
    fn place(&self, at: At<'_>) -> ReplayResult<Place<S>> {
        let dir = self.node(at.dir)?;
        let found = match dir.write().dir_mut() {
            Ok(names) => names.get(at.name).cloned(),
            Err(_) => return Err(ReplayError::NoDirectory(at.dir.0)),
        };
        Ok((dir, found))
    }

    fn free_place(&self, at: At<'_>) -> ReplayResult<Arc<Node<S>>> {
        match self.place(at)? {
            (dir, None) => Ok(dir),
            (_, Some(_)) => Err(ReplayError::EntryExists(at.dir.0)),
        }
    }

    fn add_name(dir: &Node<S>, name: Name<'_>, node: &Arc<Node<S>>, time: Timespec) {
        let mut state = dir.write();
        if let Ok(names) = state.dir_mut() {
            names.insert(name, Arc::clone(node));
        }
        state.nlink += u32::from(node.is_dir());
        (state.meta.mtime, state.meta.ctime) = (time, time);
        drop(state);
        if node.is_dir() {
            node.parent.store(dir.ino.0, Ordering::Release);
        }
    }

    fn remove_name(dir: &Node<S>, name: Name<'_>, node: &Node<S>, time: Timespec) {
        let mut state = dir.write();
        if let Ok(names) = state.dir_mut() {
            names.remove(name);
        }
        state.nlink = state.nlink.saturating_sub(u32::from(node.is_dir()));
        (state.meta.mtime, state.meta.ctime) = (time, time);
    }

    fn set_meta(&self, ino: Ino, meta: Meta) -> ReplayResult<()> {
        let node = self.node(ino)?;
        if meta.mode & S_IFMT != node.kind.as_raw_mode() {
            return Err(ReplayError::BadMode { ino: ino.0, mode: meta.mode });
        }
        node.write().meta = meta;
        Ok(())
    }

    fn put_xattrs(&self, ino: Ino, xattrs: &[Xattr<'_>]) -> ReplayResult<()> {
        let node = self.node(ino)?;
        let mut state = node.write();
        for xattr in xattrs {
            // As for clients: an inode's attributes are bounded.
            if !state.xattrs.as_deref().is_none_or(|known| known.has_room(xattr.name, xattr.value.len())) {
                return Err(ReplayError::Impossible(ino.0));
            }
            self.change(&mut state, |state| state.put_xattr(xattr.name, Some(xattr.value)));
        }
        Ok(())
    }

    /// Changes what an inode takes.
    fn change(&self, state: &mut State<S>, change: impl FnOnce(&mut State<S>)) {
        let before = state.metadata_bytes();
        change(state);
        self.tree.taken.add(SpaceAmount { inodes: 0, bytes: state.metadata_bytes() });
        self.tree.taken.remove(SpaceAmount { inodes: 0, bytes: before });
    }

    /// Puts a new inode into the table.
    fn add_node(&mut self, ino: Ino, parent: Ino, meta: Meta, nlink: u32, body: Body<S>) -> ReplayResult<Arc<Node<S>>> {
        let tree = &mut self.tree;
        if ino <= Ino::ROOT || ino.0 >= INO_END || tree.table.get(ino).is_ok() {
            return Err(ReplayError::BadNumber(ino.0));
        }
        let state = State::new(meta, nlink, body);
        let amount = SpaceAmount { inodes: 1, bytes: state.metadata_bytes() };
        tree.reserve(amount).map_err(|_| ReplayError::TooMany(tree.limits.inodes_max))?.keep();
        let next = tree.next_ino.get_mut();
        *next = (*next).max(ino.0 + 1);
        let node = Arc::new(Node::new(ino, parent, state));
        tree.table.insert(Arc::clone(&node));
        Ok(node)
    }

    fn make(
        &mut self,
        ino: Ino,
        meta: Meta,
        target: &[u8],
        xattrs: &[Xattr<'_>],
        at: Option<At<'_>>,
    ) -> ReplayResult<()> {
        let body = match FileType::from_raw_mode(meta.mode) {
            FileType::Unknown => return Err(ReplayError::BadMode { ino: ino.0, mode: meta.mode }),
            FileType::RegularFile => Body::File(FileBody { unknown: true, ..FileBody::default() }),
            FileType::Directory => Body::Dir(Box::<Dir<S>>::default()),
            FileType::Symlink => Body::Symlink(target.into()),
            _ => Body::Special,
        };
        let nlink = match (&body, at) {
            (_, None) => 0,
            (Body::Dir(_), _) => 2,
            _ => 1,
        };
        let dir = at.map(|at| self.free_place(at)).transpose()?;
        let parent = at.map_or(Ino::ROOT, |at| at.dir);
        let node = self.add_node(ino, parent, meta, nlink, body)?;
        if let (Some(dir), Some(at)) = (dir, at) {
            Self::add_name(&dir, at.name, &node, meta.ctime);
        }
        self.put_xattrs(ino, xattrs)
    }

    fn link(&self, ino: Ino, at: At<'_>, time: Timespec) -> ReplayResult<()> {
        let (node, dir) = (self.node(ino)?, self.free_place(at)?);
        if node.is_dir() {
            return Err(ReplayError::Impossible(ino.0));
        }
        let mut state = node.write();
        let nlink = state.nlink.checked_add(1).ok_or(ReplayError::Impossible(ino.0))?;
        self.change(&mut state, |state| state.nlink = nlink);
        state.meta.ctime = time;
        drop(state);
        Self::add_name(&dir, at.name, &node, time);
        Ok(())
    }

    fn unlink(&self, at: At<'_>, time: Timespec) -> ReplayResult<()> {
        let (dir, node) = self.place(at)?;
        let node = node.ok_or(ReplayError::NoEntry(at.dir.0))?;
        self.unname(&node, time)?;
        Self::remove_name(&dir, at.name, &node, time);
        Ok(())
    }

    /// Removes the count of a name from an inode; a directory must be empty.
    fn unname(&self, node: &Node<S>, time: Timespec) -> ReplayResult<()> {
        let mut state = node.write();
        if state.dir().is_ok_and(|names| !names.is_empty()) {
            return Err(ReplayError::Impossible(node.ino.0));
        }
        self.tree.taken.remove(state.drop_link(time));
        Ok(())
    }

    fn rename(
        &mut self,
        from: At<'_>,
        to: At<'_>,
        exchange: bool,
        whiteout: Option<(Ino, Meta)>,
        time: Timespec,
    ) -> ReplayResult<()> {
        let ((from_dir, source), (to_dir, target)) = (self.place(from)?, self.place(to)?);
        let source = source.ok_or(ReplayError::NoEntry(from.dir.0))?;
        let impossible = ReplayError::Impossible(source.ino.0);
        let same = target.as_ref().is_some_and(|target| Arc::ptr_eq(target, &source));
        let into_itself = source.is_dir() && self.tree.is_above(&source, &to_dir);
        let other_into_itself =
            target.as_ref().is_some_and(|target| target.is_dir() && self.tree.is_above(target, &from_dir));
        let unlike = target.as_ref().is_some_and(|target| target.is_dir() != source.is_dir());
        if same || into_itself || other_into_itself || (unlike && !exchange) || (exchange && target.is_none()) {
            return Err(impossible);
        }
        if let Some((ino, meta)) = whiteout {
            if exchange || meta.mode & S_IFMT != FileType::CharacterDevice.as_raw_mode() {
                return Err(ReplayError::BadMode { ino: ino.0, mode: meta.mode });
            }
            self.add_node(ino, from.dir, meta, 1, Body::Special)?;
        }
        if let Some(target) = &target {
            if exchange {
                target.write().meta.ctime = time;
            } else if let Err(error) = self.unname(target, time) {
                self.drop_node(whiteout.map(|(ino, _)| ino));
                return Err(error);
            }
        }
        source.write().meta.ctime = time;
        Self::remove_name(&from_dir, from.name, &source, time);
        if let Some(target) = &target {
            Self::remove_name(&to_dir, to.name, target, time);
            if exchange {
                Self::add_name(&from_dir, from.name, target, time);
            }
        }
        Self::add_name(&to_dir, to.name, &source, time);
        if let Some((ino, _)) = whiteout {
            Self::add_name(&from_dir, from.name, &self.node(ino)?, time);
        }
        Ok(())
    }

    /// Removes an inode that was added by an invalid record.
    fn drop_node(&self, ino: Option<Ino>) {
        if let Some(node) = ino.and_then(|ino| self.tree.table.get(ino).ok()) {
            let bytes = node.read().metadata_bytes();
            self.tree.table.remove(node.ino);
            self.tree.taken.remove(SpaceAmount { inodes: 1, bytes });
        }
    }

    fn free(&self, ino: Ino) -> ReplayResult<()> {
        if self.node(ino)?.read().nlink > 0 || ino == Ino::ROOT {
            return Err(ReplayError::Impossible(ino.0));
        }
        self.drop_node(Some(ino));
        Ok(())
    }
}

/// A tree at rest.
#[derive(Debug)]
pub struct Snapshot<'a, S: Store>(&'a Tree<S>);

impl<S: Store> Snapshot<'_, S> {
    /// Calls `sink` with records that create this tree: about one per name and one more per directory.
    ///
    /// # Errors
    ///
    /// The first one of `sink`.
    pub fn for_each(&self, sink: &mut dyn FnMut(&Record<'_>) -> Result<()>) -> Result<()> {
        let root = self.0.table.get(Ino::ROOT)?;
        self.make(&root, None, sink)?;
        // Inodes with several names of which the first is written.
        let mut linked = HashSet::new();
        let mut queue = VecDeque::from([root]);
        while let Some(dir) = queue.pop_front() {
            let state = dir.read();
            for link in state.dir()?.between(0, u64::MAX) {
                let at = At { dir: dir.ino, name: link.name.as_name() };
                let (ino, is_dir) = (link.node.ino, link.node.is_dir());
                if is_dir || link.node.read().nlink == 1 || linked.insert(ino) {
                    self.make(&link.node, Some(at), sink)?;
                } else {
                    sink(&Record::Link { ino, at, time: link.node.read().meta.ctime })?;
                }
                if is_dir {
                    queue.push_back(Arc::clone(&link.node));
                }
            }
            // Creating its entries changed its times.
            sink(&Record::Attr { ino: dir.ino, meta: state.meta })?;
        }
        for ino in linked {
            let node = self.0.table.get(ino)?;
            let (meta, ..) = self.0.present(&node, &node.read())?;
            sink(&Record::Attr { ino, meta })?;
        }
        // Without a name, but used.
        for node in self.0.table.select(|node| node.read().nlink == 0) {
            self.make(&node, None, sink)?;
        }
        Ok(())
    }

    fn make(&self, node: &Node<S>, at: Option<At<'_>>, sink: &mut dyn FnMut(&Record<'_>) -> Result<()>) -> Result<()> {
        let state = node.read();
        let target: &[u8] = if let Body::Symlink(target) = &state.body { target } else { &[] };
        let ino = node.ino;
        // Includes unlogged changes.
        let (meta, ..) = self.0.present(node, &state)?;
        let xattrs = state.xattrs.iter().flat_map(|xattrs| xattrs.iter());
        let xattrs: Vec<_> = xattrs.map(|(name, value)| Xattr { name, value }).collect();
        sink(&Record::Make { ino, meta, target, xattrs: &xattrs, at })
    }
}

impl<S: Store> Tree<S> {
    /// Calls `f` while no change is in progress and none can begin. Must not be called from within a change.
    pub fn checkpoint<T>(&self, f: impl FnOnce(&Snapshot<'_, S>) -> T) -> T {
        let _gate = sync::write(&self.gate);
        f(&Snapshot(self))
    }
}
