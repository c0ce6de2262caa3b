//! What is known of the server's files, by the numbers that are given out for them.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Instant;

use ferry_vfs::{Attr, Errno, FileType, Ino, NameBuf, Result, Timespec};
use ferry_wire::ninep::{Fid, Getattr, Qid, QidKind, Step, Steps, WALK_NAMES_MAX};
use ferry_wire::ninep::{Reply, Request};

use crate::beside::Beside;
use crate::cache::CachedFile;
use crate::file::Io;
use crate::line::{Fail, Outcome, lock};
use crate::locks::OwnLocks;
use crate::options::Options;
use crate::session::{Held, Session};

/// How deep in the tree a file is looked for anew: deeper than any path that Linux takes in one call.
const DEPTH_MAX: usize = 4096;

/// What tells files of a server apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) path: u64,
    generation: u64,
    kind: u32,
}

impl Key {
    /// The key of a file with these attributes. A server whose qid says another type than the mode is lying.
    pub(crate) fn of(found: &Getattr) -> Result<Self> {
        let kind = found.attr.kind();
        if kind == FileType::Unknown || (found.qid.kind == QidKind::DIR) != (kind == FileType::Directory) {
            return Err(Errno::IO);
        }
        Ok(Self { path: found.qid.path, generation: found.generation, kind: kind.as_raw_mode() })
    }
}

/// A directory and a name in it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) dir: Arc<Inode>,
    pub(crate) name: NameBuf,
}

/// What tells a file's contents from earlier ones: version, time of the data, size.
pub(crate) type Stamp = (u32, Timespec, u64);

/// A file of the server.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) ino: Ino,
    pub(crate) path: u64,
    pub(crate) kind: FileType,
    /// How it was found last; none for the root.
    place: Mutex<Option<Place>>,
    fid: Mutex<Option<Arc<Held>>>,
    pub(crate) io: Mutex<Io>,
    pub(crate) beside: Mutex<Beside>,
    pub(crate) locks: Mutex<OwnLocks>,
    pub(crate) cached: OnceLock<Arc<CachedFile>>,
    /// What the file was like when what is kept of its data was asked for.
    pub(crate) valid: Mutex<Option<Stamp>>,
    /// As the server told last.
    pub(crate) seen: Mutex<Option<(Qid, Attr)>>,
    /// When it was seen to have no capabilities, and how that was told.
    pub(crate) no_capabilities: Mutex<Option<(Instant, Errno)>>,
}

impl Inode {
    fn new(ino: Ino, path: u64, kind: FileType, place: Option<Place>, fid: Option<Arc<Held>>) -> Arc<Self> {
        let (place, fid) = (Mutex::new(place), Mutex::new(fid));
        Arc::new(Self {
            ino,
            path,
            kind,
            place,
            fid,
            io: Mutex::default(),
            beside: Mutex::default(),
            locks: Mutex::default(),
            cached: OnceLock::new(),
            valid: Mutex::default(),
            seen: Mutex::default(),
            no_capabilities: Mutex::default(),
        })
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.kind == FileType::Directory
    }

    /// What its contents are told by, as the server told last.
    pub(crate) fn stamp(&self) -> Option<Stamp> {
        lock(&self.seen).map(|(qid, attr)| (qid.version, attr.mtime, attr.size))
    }

    /// Where it was found last.
    pub(crate) fn place(&self) -> Option<Place> {
        lock(&self.place).clone()
    }

    /// The names that lead here from the root.
    pub(crate) fn names(&self) -> Result<Vec<NameBuf>> {
        let (mut names, mut next) = (Vec::new(), self.place());
        while let Some(Place { dir, name }) = next {
            if names.len() == DEPTH_MAX {
                return Err(Errno::STALE);
            }
            names.push(name);
            next = dir.place();
        }
        names.reverse();
        Ok(names)
    }

    /// A fid of it in this session. After the connection was lost it is looked for where it was found last, and has
    /// to be the same file.
    pub(crate) fn fid(&self, session: &Session, options: &Options) -> Outcome<Arc<Held>> {
        let mut fid = lock(&self.fid);
        if let Some(fid) = fid.as_ref().filter(|fid| fid.is_of(session)) {
            return Ok(Arc::clone(fid));
        }
        let found = self.find(session, options.uid, options)?;
        *fid = Some(Arc::clone(&found));
        Ok(found)
    }

    /// A fid of it that is a user's.
    pub(crate) fn find(&self, session: &Session, uid: u32, options: &Options) -> Outcome<Arc<Held>> {
        let root = session.root(uid, options)?;
        if self.ino == Ino::ROOT {
            return Ok(root);
        }
        let names = self.names()?;
        let (mut at, mut path) = (root, None);
        for part in names.chunks(WALK_NAMES_MAX) {
            let (next, qid) = walk(session, at.fid(), part)?;
            (at, path) = (next, Some(qid.path));
        }
        if path != Some(self.path) {
            return Err(Fail::Errno(Errno::STALE));
        }
        Ok(at)
    }
}

/// Walks along a few names; answers what is at their end.
pub(crate) fn walk(session: &Session, fid: Fid, names: &[NameBuf]) -> Outcome<(Arc<Held>, Qid)> {
    let mut buffer = Vec::new();
    let steps = Steps::write(&mut buffer, names.iter().map(|name| Step::Child(name.as_name())));
    let new_fid = session.new_fid();
    let walked = session.ask(&Request::Walk { fid, new_fid, steps }, walked(names.len()));
    match walked {
        Ok(Some(qid)) => Ok((Held::new(session, new_fid), qid)),
        Ok(None) => {
            session.free_fid(new_fid);
            Err(Fail::Errno(Errno::NOENT))
        }
        Err(fail) => {
            session.free_fid(new_fid);
            Err(fail)
        }
    }
}

/// Takes the last qid of a walk of so many steps; none if it did not come so far.
pub(crate) fn walked(steps: usize) -> impl FnOnce(Reply<'_>) -> Option<Option<Qid>> {
    move |reply| match reply {
        Reply::Walk(qids) if qids.as_slice().len() == steps => Some(qids.as_slice().last().copied()),
        Reply::Walk(qids) if qids.as_slice().len() < steps => Some(None),
        _ => None,
    }
}

#[derive(Debug)]
struct Known {
    inode: Arc<Inode>,
    key: Key,
    references: u64,
}

#[derive(Debug, Default)]
struct Tables {
    inodes: HashMap<Ino, Known>,
    by_key: HashMap<Key, Ino>,
    next: u64,
}

/// The files that clients hold references to.
#[derive(Debug)]
pub(crate) struct Inodes {
    root: Arc<Inode>,
    tables: RwLock<Tables>,
}

impl Inodes {
    pub(crate) fn new(root: Qid) -> Self {
        let root = Inode::new(Ino::ROOT, root.path, FileType::Directory, None, None);
        Self { root, tables: RwLock::new(Tables { next: Ino::ROOT.0 + 1, ..Tables::default() }) }
    }

    pub(crate) fn get(&self, ino: Ino) -> Result<Arc<Inode>> {
        if ino == Ino::ROOT {
            return Ok(Arc::clone(&self.root));
        }
        let tables = self.tables.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        tables.inodes.get(&ino).map(|known| Arc::clone(&known.inode)).ok_or(Errno::STALE)
    }

    /// Directories only.
    pub(crate) fn dir(&self, ino: Ino) -> Result<Arc<Inode>> {
        let inode = self.get(ino)?;
        if inode.is_dir() { Ok(inode) } else { Err(Errno::NOTDIR) }
    }

    /// Counts a reference to what was found in a place.
    pub(crate) fn refer(&self, key: Key, place: Place, fid: Arc<Held>) -> Arc<Inode> {
        if key.path == self.root.path && key.kind == FileType::Directory.as_raw_mode() {
            return Arc::clone(&self.root);
        }
        let mut tables = self.tables.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Tables { inodes, by_key, next } = &mut *tables;
        let ino = match by_key.entry(key) {
            Slot::Occupied(slot) => *slot.get(),
            Slot::Vacant(slot) => {
                let ino = Ino(*next);
                *next += 1;
                let kind = FileType::from_raw_mode(key.kind);
                let inode = Inode::new(ino, key.path, kind, Some(place), Some(fid));
                inodes.insert(ino, Known { inode: Arc::clone(&inode), key, references: 1 });
                slot.insert(ino);
                return inode;
            }
        };
        let known = inodes.get_mut(&ino).expect("both tables have it");
        known.references += 1;
        let inode = Arc::clone(&known.inode);
        drop(tables);
        *lock(&inode.place) = Some(place);
        // To some servers a fid is a path: the last one leads to the file now.
        let old = lock(&inode.fid).replace(fid);
        drop(old);
        inode
    }

    /// Has all files looked for anew where they are now.
    pub(crate) fn drop_fids(&self) {
        for inode in self.all() {
            let fid = lock(&inode.fid).take();
            drop(fid);
        }
    }

    /// Gives references back. What this ends is dropped without a lock held.
    pub(crate) fn forget(&self, ino: Ino, count: u64) {
        let mut tables = self.tables.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(known) = tables.inodes.get_mut(&ino) else { return };
        known.references = known.references.saturating_sub(count);
        if known.references == 0
            && let Some(known) = tables.inodes.remove(&ino)
        {
            if tables.by_key.get(&known.key) == Some(&ino) {
                tables.by_key.remove(&known.key);
            }
            drop(tables);
            drop(known);
        }
    }

    /// All that are known.
    pub(crate) fn all(&self) -> Vec<Arc<Inode>> {
        let tables = self.tables.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        tables.inodes.values().map(|known| Arc::clone(&known.inode)).collect()
    }

    /// How many there are beside the root.
    pub(crate) fn len(&self) -> usize {
        self.tables.read().unwrap_or_else(std::sync::PoisonError::into_inner).inodes.len()
    }
}
