//! The inode table.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock, RwLockReadGuard};
use std::time::Instant;

use ferry_vfs::sync::{self, lock};
use ferry_vfs::{Attr, Errno, FileType, Ino, Name, NameBuf, Result, Timespec};
use ferry_wire::ninep::{Fid, Getattr, Qid, Step, Steps, WALK_NAMES_MAX};
use ferry_wire::ninep::{Reply, Request};

use crate::cache::CachedFile;
use crate::change_count::count_change;
use crate::client::{WANTED, attributes};
use crate::connection::{Outcome, RequestError, is_shortage};
use crate::extra_connections::ExtraFids;
use crate::key::Key;
use crate::locks::OwnLocks;
use crate::open_fids::Io;
use crate::options::Options;
use crate::removals::{NameState, Removals};
use crate::session::{OwnedFid, Session};

/// The maximum depth at which a file is looked up again: deeper than any path of one Linux system call.
const DEPTH_MAX: usize = 4096;

/// The maximum number of files kept only to be synced by the next syncfs: each takes about 1 KiB.
const UNSYNCED_MAX: usize = 1 << 16;

/// The maximum number of files with the same key that are told apart by their places.
const TWINS_MAX: u32 = 16;

/// Distinguishes a file from a later one with the same, reused number.
#[derive(Clone, Copy, Debug, Default)]
struct BirthStamp {
    /// `None` if the server does not report it.
    time: Option<Timespec>,
    /// 0 if the server does not report it.
    generation: u64,
    /// The session of the last request for it. Within a session a fid stays with its file, but the time may change:
    /// overlayfs changes it when a file is first written.
    serial: u64,
}

impl BirthStamp {
    fn of(found: &Getattr, serial: u64) -> Self {
        Self { time: found.attr.btime, generation: found.generation, serial }
    }

    /// Returns whether that is the same file, as far as the server reports.
    fn is_of_same_file(&self, other: &Self) -> bool {
        let is_same_time = self.time.is_none() || other.time.is_none() || self.time == other.time;
        let is_told = self.generation != 0 && other.generation != 0;
        self.serial == other.serial || (is_same_time && (!is_told || self.generation == other.generation))
    }
}

/// A directory and a name in it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) dir: Arc<Inode>,
    pub(crate) name: NameBuf,
}

/// Distinguishes versions of a file's contents: version, modification time, size.
pub(crate) type Stamp = (u32, Timespec, u64);

/// A file of the server.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) ino: Ino,
    pub(crate) path: u64,
    /// The number that users see.
    shown: u64,
    pub(crate) kind: FileType,
    /// Where it was last found; `None` for the root.
    place: Mutex<Option<Place>>,
    /// Where a file was found before.
    former: Mutex<Option<Place>>,
    pub(crate) name_state: NameState,
    fid: Mutex<Option<Arc<OwnedFid>>>,
    born: Mutex<BirthStamp>,
    pub(crate) io: Mutex<Io>,
    pub(crate) beside: Mutex<ExtraFids>,
    pub(crate) locks: Mutex<OwnLocks>,
    pub(crate) cached: OnceLock<Arc<CachedFile>>,
    /// The state of the file when its cached data were requested.
    pub(crate) valid: Mutex<Option<Stamp>>,
    /// As last reported by the server.
    pub(crate) seen: Mutex<Option<(Qid, Attr)>>,
    /// The time of this client's last change: of names in a directory, otherwise of data and attributes.
    changed: AtomicU64,
    /// When it was found to have no capabilities, and the server's error.
    pub(crate) no_capabilities: Mutex<Option<(Instant, Errno)>>,
}

impl Inode {
    /// Returns the directory and the name by which it was last found.
    fn named(&self) -> Option<(Ino, NameBuf)> {
        self.place().map(|Place { dir, name }| (dir.ino, name))
    }

    fn new(ino: Ino, key: Key, place: Option<Place>, fid: Option<Arc<OwnedFid>>) -> Arc<Self> {
        let (place, fid) = (Mutex::new(place), Mutex::new(fid));
        let (path, shown, kind) = (key.path, key.shown(), FileType::from_raw_mode(key.kind));
        let name_state = NameState::default();
        name_state.found();
        Arc::new(Self {
            ino,
            path,
            shown,
            kind,
            place,
            former: Mutex::default(),
            name_state,
            fid,
            born: Mutex::default(),
            io: Mutex::default(),
            beside: Mutex::default(),
            locks: Mutex::default(),
            cached: OnceLock::new(),
            valid: Mutex::default(),
            seen: Mutex::default(),
            changed: AtomicU64::new(0),
            no_capabilities: Mutex::default(),
        })
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.kind == FileType::Directory
    }

    /// Records a change by this client, which invalidates earlier replies.
    pub(crate) fn change(&self) {
        self.changed.fetch_max(count_change(), Ordering::AcqRel);
    }

    /// Returns whether a reply to a request at this time is still valid, considering this client's own changes.
    pub(crate) fn is_unchanged_since(&self, time: u64) -> bool {
        self.changed.load(Ordering::Acquire) <= time
    }

    /// Returns the version of its contents, as last reported by the server.
    pub(crate) fn stamp(&self) -> Option<Stamp> {
        lock(&self.seen).map(|(qid, attr)| (qid.version, attr.mtime, attr.size))
    }

    /// Returns where it was last found.
    pub(crate) fn place(&self) -> Option<Place> {
        lock(&self.place).clone()
    }

    fn is_at(&self, place: &Place) -> bool {
        let known = lock(&self.place);
        known.as_ref().is_some_and(|known| known.dir.ino == place.dir.ino && known.name == place.name)
    }

    /// Returns whether a file that was found elsewhere is another one with the same number: then there is still one with it at
    /// the known place. Files with several names are the same, unless their times of birth differ.
    fn is_twin(&self, session: &Session, found: &Getattr, options: &Options) -> Outcome<bool> {
        let born = lock(&self.born).time;
        let is_other_time = born.is_some() && found.attr.btime.is_some() && born != found.attr.btime;
        // Ferry's paths are unique.
        if session.is_ferry || !(self.is_dir() || found.attr.nlink <= 1 || is_other_time) {
            return Ok(false);
        }
        match self.find_at(session, &session.root(options.uid, options)?, self.place()) {
            Ok(_) => Ok(true),
            Err(RequestError::Errno(Errno::NOENT | Errno::NOTDIR | Errno::STALE)) => Ok(false),
            // Whether it is there is unknown. If they were merged, data of one could be written to the other.
            Err(fail) => Err(fail),
        }
    }

    /// It was found there. Files may have several names.
    fn set_place(&self, now: Place) {
        let mut place = lock(&self.place);
        let is_same = place.as_ref().is_some_and(|place| place.dir.ino == now.dir.ino && place.name == now.name);
        let before = place.replace(now);
        self.name_state.found();
        drop(place);
        if !is_same && !self.is_dir() {
            *lock(&self.former) = before;
        }
    }

    /// Returns the names that lead to it from the root.
    pub(crate) fn names(&self) -> Result<Vec<NameBuf>> {
        Self::names_to(self.place())
    }

    fn names_to(place: Option<Place>) -> Result<Vec<NameBuf>> {
        let (mut names, mut next) = (Vec::new(), place);
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

    /// Returns a fid in this session. After a lost connection the file at its last location must be the same.
    pub(crate) fn fid(&self, session: &Session, options: &Options) -> Outcome<Arc<OwnedFid>> {
        let mut fid = lock(&self.fid);
        if let Some(fid) = fid.as_ref().filter(|fid| fid.is_of(session)) {
            return Ok(Arc::clone(fid));
        }
        let found = self.find(session, options.uid, options)?;
        self.verify_same_file(session, &found)?;
        *fid = Some(Arc::clone(&found));
        Ok(found)
    }

    /// Verifies that the file at its location on a new connection is the same.
    fn verify_same_file(&self, session: &Session, held: &OwnedFid) -> Outcome<()> {
        let born = *lock(&self.born);
        let is_told = born.time.is_some() || born.generation != 0;
        if self.ino == Ino::ROOT || born.serial == session.serial || !is_told {
            return Ok(());
        }
        let found = session.ask(&Request::Getattr { fid: held.fid(), mask: WANTED }, attributes)?;
        if found.qid.path == self.path && self.is_born(&found, session.serial) {
            return Ok(());
        }
        tracing::warn!("the 9P server has another file in the place of one that was open");
        Err(RequestError::Errno(Errno::STALE))
    }

    /// Returns whether attributes of a session belong to this file, not to a later one with its number.
    fn may_be(&self, found: &Getattr, serial: u64) -> bool {
        lock(&self.born).is_of_same_file(&BirthStamp::of(found, serial))
    }

    /// As [`Self::may_be`]; records them if they do.
    fn is_born(&self, found: &Getattr, serial: u64) -> bool {
        let now = BirthStamp::of(found, serial);
        let mut born = lock(&self.born);
        let is_same = born.is_of_same_file(&now);
        if is_same {
            let serial = serial.max(born.serial);
            *born = BirthStamp { time: now.time.or(born.time), serial, ..now };
        }
        is_same
    }

    /// Records attributes that were requested by a fid of this file; returns those that users see.
    pub(crate) fn record_attr(&self, found: &Getattr) -> Attr {
        let mut born = lock(&self.born);
        born.time = found.attr.btime.or(born.time);
        drop(born);
        let attr = Attr { ino: self.shown, ..found.attr };
        *lock(&self.seen) = Some((found.qid, attr));
        attr
    }

    /// Opens a fid for a user.
    pub(crate) fn find(&self, session: &Session, uid: u32, options: &Options) -> Outcome<Arc<OwnedFid>> {
        let root = session.root(uid, options)?;
        if self.ino == Ino::ROOT {
            return Ok(root);
        }
        let found = self.find_at(session, &root, self.place());
        let Err(RequestError::Errno(errno @ (Errno::NOENT | Errno::STALE))) = found else { return found };
        // Its last name is gone, and it may have another one.
        let former = lock(&self.former).clone().ok_or(errno)?;
        match self.find_at(session, &root, Some(former)) {
            Err(RequestError::Errno(other)) if !is_shortage(other) => Err(RequestError::Errno(errno)),
            found => found,
        }
    }

    fn find_at(&self, session: &Session, root: &Arc<OwnedFid>, place: Option<Place>) -> Outcome<Arc<OwnedFid>> {
        let names = Self::names_to(place)?;
        let (mut at, mut path) = (Arc::clone(root), None);
        for part in names.chunks(WALK_NAMES_MAX) {
            let (next, qid) = walk(session, at.fid(), part)?;
            (at, path) = (next, Some(qid.path));
        }
        if path != Some(self.path) {
            return Err(RequestError::Errno(Errno::STALE));
        }
        Ok(at)
    }
}

/// Walks along a few names; returns the file at their end.
pub(crate) fn walk(session: &Session, fid: Fid, names: &[NameBuf]) -> Outcome<(Arc<OwnedFid>, Qid)> {
    let mut buffer = Vec::new();
    let steps = Steps::write(&mut buffer, names.iter().map(|name| Step::Child(name.as_name())));
    let new_fid = session.new_fid();
    let walked = session.ask(&Request::Walk { fid, new_fid, steps }, walked(names.len()));
    session.note_walk(&walked);
    match walked {
        Ok(Some(qid)) => Ok((OwnedFid::new(session, new_fid), qid)),
        Ok(None) => {
            session.free_fid(new_fid);
            Err(RequestError::Errno(Errno::NOENT))
        }
        Err(fail) => {
            session.free_fid(new_fid);
            Err(fail)
        }
    }
}

/// Returns the last qid of a complete walk with this many steps.
pub(crate) fn walked(steps: usize) -> impl FnOnce(Reply<'_>) -> Option<Option<Qid>> {
    move |reply| match reply {
        Reply::Walk(qids) if qids.as_slice().len() == steps => Some(qids.as_slice().last().copied()),
        Reply::Walk(qids) if qids.as_slice().len() < steps => Some(None),
        _ => None,
    }
}

#[derive(Debug)]
struct InodeEntry {
    inode: Arc<Inode>,
    key: Key,
    references: u64,
}

#[derive(Debug, Default)]
struct Tables {
    inodes: HashMap<Ino, InodeEntry>,
    by_key: BTreeMap<Key, Ino>,
    next: u64,
    /// The number of unreferenced inodes that are kept for a sync.
    unsynced: usize,
    /// Some were not kept, because there were too many.
    is_overfull: bool,
}

impl Tables {
    /// Returns the files with a key and their twins.
    fn with_key(&self, key: Key) -> impl Iterator<Item = &Arc<Inode>> {
        let keys = Key { twin: 0, ..key }..=Key { twin: u32::MAX, ..key };
        self.by_key.range(keys).filter_map(|(_, ino)| self.inodes.get(ino)).map(|known| &known.inode)
    }

    /// Adds a reference.
    fn refer_to(&mut self, ino: Ino) {
        if let Some(known) = self.inodes.get_mut(&ino) {
            self.unsynced -= usize::from(known.references == 0);
            known.references += 1;
        }
    }

    fn remove(&mut self, ino: Ino) -> Option<InodeEntry> {
        let known = self.inodes.remove(&ino)?;
        if self.by_key.get(&known.key) == Some(&ino) {
            self.by_key.remove(&known.key);
        }
        Some(known)
    }
}

/// The files that clients hold references to.
#[derive(Debug)]
pub(crate) struct Inodes {
    root: Arc<Inode>,
    tables: RwLock<Tables>,
    pub(crate) removals: Removals,
    /// The server tells what others do to files that this client has fids of.
    has_events: bool,
}

impl Inodes {
    /// Begins to remove or rename names, until the guard is dropped.
    pub(crate) fn begin_removal(&self) -> RwLockReadGuard<'_, ()> {
        self.removals.begin()
    }

    /// Waits until the removals and renames under way are recorded.
    pub(crate) fn wait_for_removals(&self) {
        self.removals.wait();
    }

    /// Records that this client has removed a name, or has given it to another file.
    pub(crate) fn removed(&self, dir: &Inode, name: Name<'_>) {
        self.removals.record(dir.ino, name, |names| {
            // Only these are synced later. To look at every known file would make the removal of a million files slow.
            let matters = |inode: &Arc<Inode>| inode.is_unsynced() || !lock(&inode.io).is_closed();
            for inode in self.all().into_iter().filter(matters) {
                if inode.name_state.is_removed_in(names, inode.named()) {
                    inode.name_state.mark_removed();
                }
            }
        });
    }

    /// Returns whether this client has removed the name of a file.
    pub(crate) fn is_removed(&self, inode: &Inode) -> bool {
        self.removals.has(&inode.name_state, inode.named())
    }

    pub(crate) fn new(root: Qid, has_events: bool) -> Self {
        let key = Key { path: root.path, generation: 0, kind: FileType::Directory.as_raw_mode(), twin: 0 };
        let root = Inode::new(Ino::ROOT, key, None, None);
        let tables = RwLock::new(Tables { next: Ino::ROOT.0 + 1, ..Tables::default() });
        Self { root, tables, removals: Removals::default(), has_events }
    }

    /// Returns the files with this path: one, mostly.
    pub(crate) fn by_path(&self, path: u64) -> Vec<Arc<Inode>> {
        let root = Some(&self.root).filter(|root| root.path == path);
        let [first, last] = [0, u32::MAX].map(|max| Key { path, generation: max.into(), kind: max, twin: max });
        let last = Key { generation: u64::MAX, ..last };
        let tables = sync::read(&self.tables);
        let known = tables.by_key.range(first..=last).filter_map(|(_, ino)| tables.inodes.get(ino));
        root.into_iter().chain(known.map(|known| &known.inode)).map(Arc::clone).collect()
    }

    pub(crate) fn get(&self, ino: Ino) -> Result<Arc<Inode>> {
        if ino == Ino::ROOT {
            return Ok(Arc::clone(&self.root));
        }
        let tables = sync::read(&self.tables);
        let known = tables.inodes.get(&ino).filter(|known| known.references > 0);
        known.map(|known| Arc::clone(&known.inode)).ok_or(Errno::STALE)
    }

    pub(crate) fn dir(&self, ino: Ino) -> Result<Arc<Inode>> {
        let inode = self.get(ino)?;
        if inode.is_dir() { Ok(inode) } else { Err(Errno::NOTDIR) }
    }

    /// Adds a reference to the file found at a location, in a session.
    pub(crate) fn add_reference(
        &self,
        session: &Session,
        found: &Getattr,
        place: Place,
        fid: Arc<OwnedFid>,
        options: &Options,
    ) -> Outcome<Arc<Inode>> {
        let key = Key::of(found)?;
        let (mut twins, mut moved) = (Vec::new(), None);
        loop {
            let mut tables = sync::write(&self.tables);
            let known = tables.with_key(key).filter(|known| known.may_be(found, session.serial));
            let known: Vec<_> = known.filter(|known| !twins.contains(&known.ino)).map(Arc::clone).collect();
            let Some(inode) = known.iter().find(|known| known.is_at(&place)).or(known.first()) else {
                return Ok(self.insert(&mut tables, (found, session.serial), key, place, fid));
            };
            if !inode.is_at(&place) && moved != Some(inode.ino) {
                drop(tables);
                if inode.is_twin(session, found, options)? {
                    twins.push(inode.ino);
                } else {
                    moved = Some(inode.ino);
                }
                // Others may have found it there meanwhile.
                continue;
            }
            tables.refer_to(inode.ino);
            inode.is_born(found, session.serial);
            drop(tables);
            inode.set_place(place);
            // To some servers a fid is a path: the last one leads to the current file.
            let old = lock(&inode.fid).replace(fid);
            drop(old);
            return Ok(Arc::clone(inode));
        }
    }

    /// Adds a new file, with a reference. An earlier one with its number is still found by its own until it is forgotten.
    fn insert(
        &self,
        tables: &mut Tables,
        (found, serial): (&Getattr, u64),
        key: Key,
        place: Place,
        fid: Arc<OwnedFid>,
    ) -> Arc<Inode> {
        let is_root = key.path == self.root.path && key.kind == FileType::Directory.as_raw_mode();
        let first = u32::from(is_root);
        let is_free = |twin: &u32| {
            let known = tables.by_key.get(&Key { twin: *twin, ..key }).and_then(|ino| tables.inodes.get(ino));
            known.is_none_or(|known| !known.inode.may_be(found, serial))
        };
        let twin = (first..first + TWINS_MAX).find(is_free).unwrap_or(first + TWINS_MAX);
        let key = Key { twin, ..key };
        let ino = Ino(tables.next);
        tables.next += 1;
        let inode = Inode::new(ino, key, Some(place), Some(fid));
        *lock(&inode.born) = BirthStamp::of(found, serial);
        tables.inodes.insert(ino, InodeEntry { inode: Arc::clone(&inode), key, references: 1 });
        tables.by_key.insert(key, ino);
        inode
    }

    /// Drops all fids that are not open, so that files are opened again at their current locations.
    pub(crate) fn drop_fids(&self) {
        for inode in self.all() {
            let fid = lock(&inode.fid).take();
            drop(fid);
        }
    }

    /// Releases references. Inodes are dropped without a lock held. A file that must be synced stays.
    pub(crate) fn forget(&self, ino: Ino, count: u64) {
        // Before the tables are locked, because an open sends requests with the file's lock held.
        let is_unsynced = self.get(ino).is_ok_and(|inode| inode.is_unsynced());
        let mut guard = sync::write(&self.tables);
        let tables = &mut *guard;
        let Some(known) = tables.inodes.get_mut(&ino).filter(|known| known.references > 0) else { return };
        known.references = known.references.saturating_sub(count);
        if known.references > 0 {
            return;
        }
        if is_unsynced && tables.unsynced < UNSYNCED_MAX {
            tables.unsynced += 1;
            let inode = Arc::clone(&known.inode);
            drop(guard);
            // Otherwise the server would keep the file when it is removed.
            let fid = lock(&inode.fid).take();
            drop(fid);
            if let Some(file) = inode.cached().filter(|_| self.has_events) {
                // From now on nothing is told of it.
                file.forget();
            }
            return;
        }
        tables.is_overfull |= is_unsynced;
        let known = tables.remove(ino);
        drop(guard);
        // Files that were found in a directory may keep it.
        let fid = known.as_ref().and_then(|known| lock(&known.inode.fid).take());
        drop((fid, known));
    }

    /// Returns whether all files to sync are known; an unknown one is reported once.
    pub(crate) fn has_all_unsynced(&self) -> Result<()> {
        let mut tables = sync::write(&self.tables);
        if std::mem::take(&mut tables.is_overfull) {
            tracing::error!(
                "more than {UNSYNCED_MAX} files were written and forgotten: not all are known to be durable"
            );
            return Err(Errno::IO);
        }
        Ok(())
    }

    /// Removes durable files without references.
    pub(crate) fn drop_synced(&self) {
        let is_left = |known: &&InodeEntry| known.references == 0;
        let left: Vec<Arc<Inode>> = {
            let tables = sync::read(&self.tables);
            tables.inodes.values().filter(is_left).map(|known| Arc::clone(&known.inode)).collect()
        };
        for inode in left.iter().filter(|inode| !inode.is_unsynced()) {
            let mut tables = sync::write(&self.tables);
            if tables.inodes.get(&inode.ino).as_ref().is_some_and(is_left) {
                tables.unsynced -= 1;
                let known = tables.remove(inode.ino);
                drop(tables);
                drop(known);
            }
        }
    }

    /// Returns all known files.
    pub(crate) fn all(&self) -> Vec<Arc<Inode>> {
        let tables = sync::read(&self.tables);
        tables.inodes.values().map(|known| Arc::clone(&known.inode)).collect()
    }

    /// Returns the number of referenced files besides the root.
    pub(crate) fn len(&self) -> usize {
        let tables = sync::read(&self.tables);
        tables.inodes.len() - tables.unsynced
    }
}
