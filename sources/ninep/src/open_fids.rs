//! The open fids of a file, which all its openers share: one for reading and one for writing.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, LockOwner, OFlags, SetAttr};
use ferry_wire::ninep::{Reply, Request};

use crate::cache::ErrorCursor;
use crate::client::Shared;
use crate::connection::{Outcome, RequestError};
use crate::inode::Inode;
use crate::session::{OwnedFid, Session};

/// An open fid.
#[derive(Clone, Debug)]
struct OpenFid {
    held: Arc<OwnedFid>,
    can_read: bool,
}

/// The open fids of a file, and their users.
#[derive(Debug, Default)]
pub(crate) struct Io {
    reads: Option<OpenFid>,
    writes: Option<OpenFid>,
    readers: usize,
    writers: usize,
    /// A lock was asked for through one of the fids: it ends with that.
    has_locked: bool,
    /// The session of the earliest write without a successful fsync.
    pub(crate) unsynced: Option<u64>,
    /// The number of writes.
    pub(crate) written: u64,
    /// Locks were lost with a connection: their holders must get errors.
    pub(crate) lost_locks: bool,
}

/// An open file of a client.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) inode: Arc<Inode>,
    pub(crate) access: Access,
    /// The owners of locks set through it.
    pub(crate) owners: Mutex<HashSet<LockOwner>>,
    /// The errors of write-behind that it has reported.
    pub(crate) errors: Option<ErrorCursor>,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    reads: bool,
    writes: bool,
}

impl Access {
    fn of(flags: OFlags) -> Self {
        let writes = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        Self { reads: !flags.contains(OFlags::WRONLY), writes }
    }
}

impl OpenFile {
    fn new(inode: &Arc<Inode>, access: Access) -> Self {
        Self { inode: Arc::clone(inode), access, owners: Mutex::default(), errors: None }
    }
}

impl Io {
    fn add(&mut self, access: Access) {
        self.readers += usize::from(access.reads);
        self.writers += usize::from(access.writes);
    }

    /// Removes an open file; returns whether it was the last.
    fn remove(&mut self, access: Access) -> bool {
        self.readers -= usize::from(access.reads);
        self.writers -= usize::from(access.writes);
        if self.is_closed() {
            let Self { unsynced, written, .. } = *self;
            *self = Self { unsynced, written, ..Self::default() };
        } else if self.has_locked {
            // Whose lock it is is not known: another's may end with the fid.
        } else if self.writers == 0 && self.reads.is_some() {
            self.writes = None;
        } else if self.readers == 0 && self.writes.is_some() {
            self.reads = None;
        }
        self.is_closed()
    }

    /// Returns whether the file is not open.
    pub(crate) fn is_closed(&self) -> bool {
        self.readers + self.writers == 0
    }

    fn reading(&self, session: &Session) -> Option<Arc<OwnedFid>> {
        let reads = self.reads.iter().chain(self.writes.iter().filter(|open| open.can_read));
        reads.map(|open| &open.held).find(|held| held.is_of(session)).map(Arc::clone)
    }

    fn writing(&self, session: &Session) -> Option<Arc<OwnedFid>> {
        self.writes.iter().map(|open| &open.held).find(|held| held.is_of(session)).map(Arc::clone)
    }

    fn any(&self, session: &Session) -> Option<Arc<OwnedFid>> {
        self.writing(session).or_else(|| self.reading(session))
    }
}

/// Opens a fid of the file, with `O_TRUNC` if that is in `flags`.
pub(crate) fn open_fid(
    shared: &Shared,
    session: &Arc<Session>,
    inode: &Inode,
    flags: OFlags,
) -> Outcome<Arc<OwnedFid>> {
    let path = inode.fid(session, &shared.link.options)?;
    let held = session.clone_of(path.fid())?;
    let qid = session.ask(&Request::Open { fid: held.fid(), flags }, |reply| match reply {
        Reply::Open { qid, .. } => Some(qid),
        _ => None,
    })?;
    // diod's fids are paths, so another file may be there now.
    if qid.path == inode.path { Ok(held) } else { Err(RequestError::Errno(Errno::STALE)) }
}

/// Opens for writing: for reading as well where the server allows it, for partially written pages.
fn open_writing(shared: &Shared, session: &Arc<Session>, inode: &Inode, truncate: OFlags) -> Outcome<OpenFid> {
    match open_fid(shared, session, inode, OFlags::RDWR | truncate) {
        Ok(held) => Ok(OpenFid { held, can_read: true }),
        Err(RequestError::Errno(Errno::ACCESS | Errno::PERM)) => {
            let held = open_fid(shared, session, inode, OFlags::WRONLY | truncate)?;
            Ok(OpenFid { held, can_read: false })
        }
        Err(fail) => Err(fail),
    }
}

impl Inode {
    pub(crate) fn reading(&self, shared: &Shared, session: &Arc<Session>) -> Outcome<Arc<OwnedFid>> {
        let mut io = lock(&self.io);
        if let Some(held) = io.reading(session) {
            return Ok(held);
        }
        let held = open_fid(shared, session, self, OFlags::RDONLY)?;
        io.reads = Some(OpenFid { held: Arc::clone(&held), can_read: true });
        Ok(held)
    }

    /// The fid to write by.
    pub(crate) fn writing(&self, shared: &Shared, session: &Arc<Session>) -> Outcome<Arc<OwnedFid>> {
        let mut io = lock(&self.io);
        if let Some(held) = io.writing(session) {
            return Ok(held);
        }
        let open = open_writing(shared, session, self, OFlags::empty())?;
        let held = Arc::clone(&open.held);
        io.writes = Some(open);
        Ok(held)
    }

    /// Returns an open fid for any purpose.
    pub(crate) fn open_fid(&self, shared: &Shared, session: &Arc<Session>) -> Outcome<Arc<OwnedFid>> {
        let (open, is_written) = {
            let io = lock(&self.io);
            (io.any(session), io.writers > 0)
        };
        match open {
            Some(held) => Ok(held),
            // A write lock requires a fid for writing.
            None => self.fid_for(shared, session, !is_written),
        }
    }

    /// Returns an open fid to lock by; it stays open until the file is closed.
    pub(crate) fn locking(&self, shared: &Shared, session: &Arc<Session>) -> Outcome<Arc<OwnedFid>> {
        lock(&self.io).has_locked = true;
        self.open_fid(shared, session)
    }

    /// Returns the fid for reading or writing.
    pub(crate) fn fid_for(&self, shared: &Shared, session: &Arc<Session>, reads: bool) -> Outcome<Arc<OwnedFid>> {
        if reads { self.reading(shared, session) } else { self.writing(shared, session) }
    }

    /// Returns the fid for reading, if it is open.
    pub(crate) fn open_read_fid(&self, session: &Session) -> Option<Arc<OwnedFid>> {
        lock(&self.io).reading(session)
    }

    /// Returns the fid for writing, if it is open.
    pub(crate) fn open_write_fid(&self, session: &Session) -> Option<Arc<OwnedFid>> {
        lock(&self.io).writing(session)
    }

    pub(crate) fn opened_fid(&self, session: &Session) -> Option<Arc<OwnedFid>> {
        lock(&self.io).any(session)
    }

    /// Adds an open file to the sharers of the fids, which are opened if necessary.
    pub(crate) fn open(self: &Arc<Self>, shared: &Shared, session: &Arc<Session>, flags: OFlags) -> Outcome<OpenFile> {
        let access = Access::of(flags);
        let truncate = flags & OFlags::TRUNC;
        let mut io = lock(&self.io);
        let mut is_truncated = truncate.is_empty();
        if access.writes && io.writing(session).is_none() {
            io.writes = Some(open_writing(shared, session, self, truncate)?);
            is_truncated = true;
        } else if !access.writes && io.reading(session).is_none() {
            let held = open_fid(shared, session, self, OFlags::RDONLY | truncate)?;
            io.reads = Some(OpenFid { held, can_read: true });
            is_truncated = true;
        }
        if !is_truncated {
            let fid = io.any(session).ok_or(RequestError::Errno(Errno::IO))?;
            let set = SetAttr { size: Some(0), ..SetAttr::default() };
            session.tell(&Request::Setattr { fid: fid.fid(), set, ctime: false })?;
        }
        io.add(access);
        Ok(OpenFile::new(self, access))
    }

    pub(crate) fn add_created(self: &Arc<Self>, held: Arc<OwnedFid>, flags: OFlags) -> OpenFile {
        let access = Access::of(flags);
        let open = OpenFid { held, can_read: access.reads };
        let mut io = lock(&self.io);
        let has_locked = io.has_locked;
        let place = if access.writes { &mut io.writes } else { &mut io.reads };
        let is_kept = has_locked
            && place.as_ref().is_some_and(|known| Arc::ptr_eq(known.held.connection(), open.held.connection()));
        let old = if is_kept { Some(open) } else { place.replace(open) };
        io.add(access);
        drop(io);
        drop(old);
        OpenFile::new(self, access)
    }

    /// Returns whether it has written data that are neither durable nor kept.
    pub(crate) fn is_unsynced(&self) -> bool {
        let is_past_cache = lock(&self.io).unsynced.is_some();
        is_past_cache || self.cached().is_some_and(|file| file.is_unkept())
    }

    /// Releases fids that no open file uses.
    pub(crate) fn close_unused(&self) {
        let mut io = lock(&self.io);
        let old = if io.is_closed() { (io.reads.take(), io.writes.take()) } else { (None, None) };
        io.has_locked &= !io.is_closed();
        drop(io);
        drop(old);
    }

    /// Called when an open file is closed.
    pub(crate) fn closed(&self, access: Access) {
        let is_last = lock(&self.io).remove(access);
        if is_last {
            self.close_extra_fids();
        }
        if let Some(file) = self.cached().filter(|_| is_last) {
            file.release_synced();
        }
    }
}
