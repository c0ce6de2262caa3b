//! The shared state of a client.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use ferry_vfs::{
    Attr, Caller, Changes, Errno, Handle, Handles, Ino, Result, SetAttr, SetTime, Statfs, sync::lock,
    without_privileges,
};
use ferry_wire::ninep::{Fid, Getattr, Reply, Request, valid};

use crate::cache::{Cache, Limits};
use crate::connection::{Connection, Outcome, Outgoing, RequestError};
use crate::data::WaitingTransfers;
use crate::inode::{Inode, Inodes};
use crate::link::Link;
use crate::listing::OpenDir;
use crate::locks::ParkedLocks;
use crate::open_fids::OpenFile;
use crate::options::{self, Error};
use crate::session::{OwnedFid, Session};

/// The interval of checks for overdue requests.
const TICK: Duration = Duration::from_secs(1);
/// The interval of checks for callers that no longer wait for a lock.
const TICK_PARKED: Duration = Duration::from_millis(50);

/// How long the root's attributes and statistics may take before the last known ones are returned: umount(8) requests
/// them, and must not wait for a dead server.
const ROOT_PATIENCE: Duration = Duration::from_secs(1);

const PERMISSIONS: u32 = 0o7777;

impl Connection {
    /// Returns the negotiated message size.
    pub(crate) fn msize(&self) -> usize {
        usize::try_from(self.msize.load(std::sync::atomic::Ordering::Relaxed)).unwrap_or(usize::MAX)
    }
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) link: Link,
    pub(crate) inodes: Inodes,
    pub(crate) files: Handles<OpenFile>,
    pub(crate) dirs: Handles<OpenDir>,
    pub(crate) parked: ParkedLocks,
    pub(crate) changes: Changes,
    /// `None`: every read and write is a request.
    pub(crate) cache: Option<Cache>,
    pub(crate) waiting: Mutex<WaitingTransfers>,
    /// Of the root, as last returned by the server.
    totals: Mutex<Option<Statfs>>,
}

pub(crate) fn attributes(reply: Reply<'_>) -> Option<Getattr> {
    if let Reply::Getattr(found) = reply { Some(found) } else { None }
}

/// Returns the statistics in a reply.
fn totals(reply: Reply<'_>) -> Option<Statfs> {
    if let Reply::Statfs { totals, .. } = reply { Some(totals) } else { None }
}

/// The requested attributes of a file.
pub(crate) const WANTED: u64 = valid::BASIC | valid::BTIME | valid::GENERATION;

impl Shared {
    pub(crate) fn new(link: Link) -> std::result::Result<Arc<Self>, Error> {
        let inodes = Inodes::new(link.current().root_qid, link.has_events);
        let wants_cache = link.options.cache != options::Cache::None;
        let message_bytes_max = Self::message_bytes(&link.current());
        let mut limits = Limits { message_bytes_max, ..Limits::of(link.options.cache_bytes) };
        if link.options.depth <= limits.depth {
            // Other requests would wait behind unneeded data.
            limits.around_bytes_max = 0;
        }
        let cache = wants_cache.then(|| Cache::new(limits)).transpose();
        let cache = cache.inspect_err(|_| link.end()).map_err(Error::Threads)?;
        let shared = Arc::new(Self {
            link,
            inodes,
            files: Handles::default(),
            dirs: Handles::default(),
            parked: ParkedLocks::default(),
            changes: Changes::default(),
            cache,
            waiting: Mutex::default(),
            totals: Mutex::default(),
        });
        // A new one has none.
        let _ = shared.link.shared.set(Arc::downgrade(&shared));
        Ok(shared)
    }

    /// Returns the attributes of a file.
    pub(crate) fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        let inode = self.inodes.get(ino)?;
        let known = lock(&inode.seen).map(|(_, attr)| attr).filter(|_| ino == Ino::ROOT);
        known.map_or_else(|| self.getattr_of(&inode), |known| self.getattr_of_root(&inode, known))
    }

    /// Returns the attributes of the root, or `known` if the server does not reply in time.
    fn getattr_of_root(&self, root: &Inode, known: Attr) -> Result<Attr> {
        let request = |fid| Request::Getattr { fid, mask: WANTED };
        self.ask_of_root(root, request, attributes)?.map_or(Ok(known), |found| root.note(&found))
    }

    /// Returns the statistics of a file's file system.
    pub(crate) fn statfs(&self, _: &Caller<'_>, ino: Ino) -> Result<Statfs> {
        let inode = self.inodes.get(ino)?;
        let request = |fid| Request::Statfs { fid };
        let known = *lock(&self.totals);
        let found = match known.filter(|_| ino == Ino::ROOT) {
            Some(known) => self.ask_of_root(&inode, request, totals)?.unwrap_or(known),
            None => self.link.with_retry(|session| {
                self.by_any_fid(session, &inode, |fid| session.ask(&request(fid.fid()), totals))
            })?,
        };
        if ino == Ino::ROOT {
            *lock(&self.totals) = Some(found);
        }
        Ok(found)
    }

    /// Updates the root's attributes and statistics for callers while the server is gone; does not wait for a server
    /// that does not reply in time.
    pub(crate) fn refresh_root(&self) -> Result<()> {
        let root = self.inodes.get(Ino::ROOT)?;
        if let Some(found) = self.ask_of_root(&root, |fid| Request::Getattr { fid, mask: WANTED }, attributes)? {
            root.note(&found)?;
        }
        if let Some(found) = self.ask_of_root(&root, |fid| Request::Statfs { fid }, totals)? {
            *lock(&self.totals) = Some(found);
        }
        Ok(())
    }

    /// Sends a request about the root; `None` if the server does not reply in time.
    fn ask_of_root<T>(
        &self,
        root: &Inode,
        request: impl Fn(Fid) -> Request<'static>,
        take: fn(Reply<'_>) -> Option<T>,
    ) -> Result<Option<T>> {
        let until = Instant::now() + ROOT_PATIENCE;
        let found = self.link.with_retry_until(until, |session| {
            let fid = root.fid(session, &self.link.options)?;
            let ticket = session.send_one_later(Outgoing::new(&request(fid.fid())));
            let answer = ticket.wait_for(until.saturating_duration_since(Instant::now())).transpose()?;
            answer.map(|message| session.take(&message, take)).transpose()
        });
        if found.is_err() && self.link.current().is_broken() { Ok(None) } else { found }
    }

    /// Returns the attributes of a file. Unwritten data are written first, so that size and times are final.
    pub(crate) fn getattr_of(&self, inode: &Inode) -> Result<Attr> {
        if let Some(file) = inode.cached().filter(|file| file.is_dirty()) {
            file.write_out();
        }
        self.link.with_retry(|session| self.getattr_in(session, inode))
    }

    /// As [`Self::getattr_of`], in this session, and without unwritten data.
    pub(crate) fn getattr_in(&self, session: &Arc<Session>, inode: &Inode) -> Outcome<Attr> {
        let mark = inode.cached().map(|file| file.size_mark());
        let found = self.by_open_fid(session, inode, false, |fid| {
            session.ask(&Request::Getattr { fid: fid.fid(), mask: WANTED }, attributes)
        })?;
        let mut attr = inode.note(&found)?;
        if let (Some(file), Some(mark)) = (inode.cached(), mark)
            && !file.set_size(mark, attr.size)
        {
            attr.size = file.size();
        }
        Ok(attr)
    }

    /// Returns the known attributes of a file with unwritten data: the server does not know its size.
    pub(crate) fn getattr_hint(&self, _: &Caller<'_>, ino: Ino, _: Handle) -> Option<Attr> {
        let inode = self.inodes.get(ino).ok()?;
        let file = inode.cached().filter(|file| file.is_dirty())?;
        let seen = *lock(&inode.seen);
        seen.map(|(_, attr)| attr.with_size(file.size()))
    }

    /// Runs an operation with the file's fid, or with an open one if the server needs that after a removal of the name.
    pub(crate) fn by_any_fid<T>(
        &self,
        session: &Arc<Session>,
        inode: &Inode,
        mut act: impl FnMut(&OwnedFid) -> Outcome<T>,
    ) -> Outcome<T> {
        let first = inode.fid(session, &self.link.options).and_then(|fid| act(&fid));
        match first {
            Err(RequestError::Errno(errno @ (Errno::NOENT | Errno::STALE))) => match inode.opened_fid(session) {
                Some(fid) => act(&fid),
                None => Err(RequestError::Errno(errno)),
            },
            other => other,
        }
    }

    /// Runs an operation with an open fid of the file if there is one, otherwise as [`Self::by_any_fid`]: to some servers
    /// a fid that is not open is a path, and another client may have moved another file there. `writes`: the fid must be
    /// open for writing.
    pub(crate) fn by_open_fid<T>(
        &self,
        session: &Arc<Session>,
        inode: &Inode,
        writes: bool,
        mut act: impl FnMut(&OwnedFid) -> Outcome<T>,
    ) -> Outcome<T> {
        let open = if writes { inode.open_write_fid(session) } else { inode.opened_fid(session) };
        let outcome = open.map(|fid| act(&fid));
        match outcome {
            // diod finds attributes by path of an open fid, too, and this client may have renamed a directory above.
            None | Some(Err(RequestError::Errno(Errno::NOENT | Errno::STALE))) => self.by_any_fid(session, inode, act),
            Some(outcome) => outcome,
        }
    }

    /// Changes attributes; returns the new ones.
    pub(crate) fn setattr(&self, cx: &Caller<'_>, ino: Ino, set: &SetAttr) -> Result<Attr> {
        let inode = self.inodes.get(ino)?;
        let (mut set, wanted) = (*set, *set);
        if set.clear_privileges && set.mode.is_none() && !inode.is_dir() {
            set.mode = unprivileged(cx, &self.getattr_of(&inode)?);
        }
        if let Some(file) = inode.cached()
            && (set.atime.is_some() || set.mtime.is_some())
        {
            // A later write would change them again.
            file.write_out();
        }
        if let Some(size) = set.size.take() {
            self.truncate(&inode, size)?;
        }
        let ctime = set.ctime.is_some();
        let is_nothing = SetAttr { ctime: None, clear_privileges: false, ..set } == SetAttr::default();
        if !is_nothing || ctime {
            self.link.with_retry(|session| {
                let request = |fid| Request::Setattr { fid, set, ctime };
                self.by_open_fid(session, &inode, false, |fid| session.tell(&request(fid.fid())))
            })?;
        }
        inode.change();
        // The attributes are set, also if the server does not return them now.
        self.getattr_of(&inode).or_else(|errno| match *lock(&inode.seen) {
            Some((_, attr)) if errno != Errno::STALE => Ok(with_changes(attr, &SetAttr { mode: set.mode, ..wanted })),
            _ => Err(errno),
        })
    }

    /// Clears suid and sgid if the last known mode has them.
    pub(crate) fn clear_privileges(&self, cx: &Caller<'_>, inode: &Inode) -> Result<()> {
        let known = lock(&inode.seen).map(|(_, attr)| attr);
        let Some(mode) = known.and_then(|attr| unprivileged(cx, &attr)) else { return Ok(()) };
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        self.setattr(cx, inode.ino, &set).map(drop)
    }
}

/// Returns the permission bits after a write by a caller without the right to keep suid and sgid; `None` if they stay.
fn unprivileged(cx: &Caller<'_>, attr: &Attr) -> Option<u32> {
    let left = without_privileges(attr.mode, attr.gid, cx);
    (left != attr.mode).then_some(left & PERMISSIONS)
}

/// Returns the attributes after a change, except for times of the server's clock.
fn with_changes(attr: Attr, set: &SetAttr) -> Attr {
    let time = |set: Option<SetTime>, before| if let Some(SetTime::At(time)) = set { time } else { before };
    Attr {
        mode: set.mode.map_or(attr.mode, |mode| attr.mode & !PERMISSIONS | mode & PERMISSIONS),
        uid: set.uid.unwrap_or(attr.uid),
        gid: set.gid.unwrap_or(attr.gid),
        size: set.size.unwrap_or(attr.size),
        atime: time(set.atime, attr.atime),
        mtime: time(set.mtime, attr.mtime),
        ..attr
    }
}

impl Inode {
    /// Records attributes from the server, unless they are those of another file.
    pub(crate) fn note(&self, found: &Getattr) -> Result<Attr> {
        let is_other = found.qid.path != self.path && self.ino != Ino::ROOT;
        if found.attr.kind() != self.kind || is_other {
            return Err(Errno::STALE);
        }
        Ok(self.record_attr(found))
    }
}

/// The keeper: ends overdue requests, restores a lost connection, and cancels lock requests without a waiter.
pub(crate) fn keep(shared: &Weak<Shared>) {
    loop {
        let Some(shared) = shared.upgrade() else { return };
        let tick = if shared.parked.is_empty() { TICK } else { TICK_PARKED };
        shared.link.sleep(tick.min(shared.link.options.timeout));
        if shared.link.is_over() {
            return;
        }
        let session = shared.link.current();
        session.check();
        if session.is_broken() {
            shared.link.reconnect(|session| {
                // Before anything is sent on the new connection.
                if let Some(cache) = &shared.cache {
                    cache.rewrite();
                }
                shared.reacquire_locks(session);
            });
        }
        shared.check_blocked_locks();
    }
}
