//! A 9P session, from a Tversion to the next: its fids and their resources.

use std::collections::hash_map::Entry as Slot;
use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use ferry_serve::events::{EventClient, Queue, subscribe};
use ferry_vfs::sync::lock;
use ferry_vfs::{
    Attr, Caller, Changes, Entry, Errno, FileSystem, FileType, Handle, Ino, Name, OFlags, RandomKey, Removals, Result,
    SessionId, Subscription, XattrFlags, checks,
};
use ferry_wire::ninep::{
    Fid, LockRequest, Qid, QidKind, READ_HEAD_BYTES, Reply, VERSION_OF_FERRY, VERSION_UNKNOWN, VersionReply, agree,
};

use crate::append_tracking::{AppendTracking, ClientEnds, TrackedWrite};
use crate::clients::{Charge, ConnectionAccount, LimitReached, Resource};
use crate::own_renames::{self, OwnRenames};
use crate::qids::{Paths, version};
use crate::read_ahead::Reader;
use crate::share::Share;
use crate::shrink::shrink;
use crate::users::User;

/// Values of extended attributes that the fids of one session may hold, in bytes: sixty of the longest.
const VALUES_BYTES_MAX: usize = 4 << 20;

/// Owners of locks that the fids of one session remember, to end their locks with the fid. Those of others end when the
/// last handle does through which they were taken, which is the same for a program that opens a file once.
const OWNERS_MAX: usize = 4096;

/// See the module.
pub(crate) struct Session {
    pub(crate) id: SessionId,
    /// The longest message, in bytes.
    pub(crate) msize: u32,
    source: Arc<dyn FileSystem>,
    fids: Mutex<HashMap<Fid, Arc<File>>>,
    paths: Arc<Paths>,
    owners: RandomKey,
    /// Owners that fids remember.
    pub(crate) owner_count: Arc<AtomicUsize>,
    values_bytes: Arc<AtomicUsize>,
    pub(crate) client_ends: ClientEnds,
    /// Names that users must look up again before a removal.
    pub(crate) removals: Removals,
    pub(crate) renames: OwnRenames<Node>,
    /// The account that is charged.
    pub(crate) holder: Arc<ConnectionAccount>,
    /// The client may send Tevents.
    pub(crate) has_events: bool,
    /// The queue of events, from the client's first Tevents on.
    events: OnceLock<(Arc<Queue>, Subscription)>,
}

impl EventClient for Session {
    const IS_AGENT: bool = false;

    fn session(&self) -> SessionId {
        self.id
    }

    fn source(&self) -> &dyn FileSystem {
        &*self.source
    }

    /// The client's numbers are the paths of qids.
    fn known(&self, ino: Ino) -> Option<(Ino, bool)> {
        self.paths.known(ino).map(|(path, is_dir)| (Ino(path), is_dir))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.holder.release(Resource::Entries, lock(&self.fids).len());
    }
}

/// The state of a fid.
#[derive(Clone)]
pub(crate) struct File {
    pub(crate) node: Arc<Node>,
    /// Its location, for Trename and Tremove.
    pub(crate) place: Option<Arc<Place>>,
    pub(crate) user: User,
    /// The root of the attached tree, which `..` does not leave.
    pub(crate) root: Ino,
    pub(crate) state: State,
}

/// Where a file was found.
pub(crate) type Place = own_renames::Place<Node>;

/// The use of a fid.
#[derive(Clone)]
pub(crate) enum State {
    /// Not opened yet.
    Path,
    /// Tlopen or Tlcreate.
    Open(Arc<Open>),
    /// Txattrwalk: to be read.
    Value(Arc<Value>),
    /// Txattrcreate: to be written, and set at the end.
    NewValue(Arc<NewValue>),
}

/// A reference to an inode of the source.
pub(crate) struct Node {
    pub(crate) ino: Ino,
    pub(crate) generation: u64,
    pub(crate) kind: FileType,
    path: u64,
    paths: Arc<Paths>,
    source: Arc<dyn FileSystem>,
    /// The source counts a reference.
    counted: bool,
}

impl Node {
    /// The qid for the client.
    pub(crate) fn qid(&self, attr: &Attr) -> Qid {
        Qid { kind: QidKind::of(self.kind), version: version(attr), path: self.path }
    }

    /// Returns the qid's path for an inode number shown to users, if that is the number of this inode.
    pub(crate) fn path(&self) -> u64 {
        self.path
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.paths.leave(self.ino);
        if self.counted {
            catch_release(|| self.source.forget(self.ino, 1));
        }
    }
}

/// An open file or directory.
pub(crate) struct Open {
    pub(crate) node: Arc<Node>,
    pub(crate) handle: Handle,
    flags: OFlags,
    /// The known end of the file, with `O_APPEND`.
    end: Option<Arc<AppendTracking>>,
    session: SessionId,
    user: User,
    source: Arc<dyn FileSystem>,
    /// The lock owners that used it.
    owners: Mutex<HashSet<u64>>,
    /// The number of owners of all fids of the session.
    owner_count: Arc<AtomicUsize>,
    holder: Arc<ConnectionAccount>,
    /// Its reads.
    pub(crate) reader: Mutex<Reader>,
}

impl Open {
    pub(crate) fn is_dir(&self) -> bool {
        self.node.kind == FileType::Directory
    }

    /// Whether it was opened for reading. The source's own descriptor may allow more.
    pub(crate) fn can_read(&self) -> bool {
        matches!(self.flags & OFlags::ACCMODE, OFlags::RDONLY | OFlags::RDWR)
    }

    /// Whether it was opened for writing.
    pub(crate) fn can_write(&self) -> bool {
        matches!(self.flags & OFlags::ACCMODE, OFlags::WRONLY | OFlags::RDWR)
    }

    /// The flags that it was opened with.
    pub(crate) fn flags(&self) -> OFlags {
        self.flags
    }

    /// The flags of a write.
    pub(crate) fn write_flags(&self, write: Option<&TrackedWrite>) -> OFlags {
        if write.is_none_or(|write| write.appends) { self.flags } else { self.flags - OFlags::APPEND }
    }

    /// Records the file's size at open.
    pub(crate) fn found(&self, session: &Session, size: u64) {
        if let Some(end) = &self.end {
            end.found(&session.client_ends, self.node.ino, size);
        }
    }

    /// Begins a write. Queries the file's size if it matters.
    pub(crate) fn begin_write(
        &self,
        offset: u64,
        bytes: usize,
        size: impl FnOnce() -> Option<u64>,
    ) -> Option<TrackedWrite> {
        self.end.as_ref().map(|end| end.begin_write(offset, bytes, size))
    }

    /// Records a lock owner whose locks must end with the handle.
    pub(crate) fn locked_by(&self, owner: u64) {
        let mut owners = lock(&self.owners);
        if owners.contains(&owner) || !raise(&self.owner_count, 1, OWNERS_MAX) {
            return;
        }
        match self.holder.take(Resource::Entries, 1) {
            Ok(()) => _ = owners.insert(owner),
            Err(LimitReached) => _ = self.owner_count.fetch_sub(1, Ordering::Relaxed),
        }
    }

    /// Called before an owner releases all locks on the file; returns whether it may have some.
    pub(crate) fn unlocked_by(&self, owner: u64) -> bool {
        let known = lock(&self.owners).remove(&owner);
        self.owner_count.fetch_sub(known.into(), Ordering::Relaxed);
        self.holder.release(Resource::Entries, known.into());
        known
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let caller = Caller { session: self.session, uid: self.user.uid, gid: self.user.gid, ..Caller::default() };
        let (ino, handle) = (self.node.ino, self.handle);
        let owners = std::mem::take(&mut *lock(&self.owners));
        self.owner_count.fetch_sub(owners.len(), Ordering::Relaxed);
        self.holder.release(Resource::Entries, owners.len());
        for owner in owners {
            // No client is left to receive an error.
            catch_release(|| _ = self.source.flush(&caller, ino, handle, owner));
        }
        catch_release(|| match self.is_dir() {
            true => self.source.releasedir(&caller, ino, handle),
            false => self.source.release(&caller, ino, handle),
        });
    }
}

/// Adds to a count that all fids of a session share, up to `most`; returns whether it fit.
fn raise(count: &AtomicUsize, by: usize, most: usize) -> bool {
    let fits = count.fetch_add(by, Ordering::Relaxed) + by <= most;
    if !fits {
        count.fetch_sub(by, Ordering::Relaxed);
    }
    fits
}

/// Releases one resource. A panic in one release does not skip the others.
fn catch_release(release: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(release)).is_err() {
        tracing::error!("the source panicked while releasing resources of a 9P client");
    }
}

/// The value of an extended attribute, or the list of their names.
#[derive(Debug)]
pub(crate) struct Value {
    pub(crate) bytes: Vec<u8>,
    total: Arc<AtomicUsize>,
    _charge: Charge,
}

impl Drop for Value {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes.len(), Ordering::Relaxed);
    }
}

/// A value that is being written.
#[derive(Debug)]
pub(crate) struct NewValue {
    pub(crate) name: Box<[u8]>,
    pub(crate) bytes: usize,
    pub(crate) flags: XattrFlags,
    pub(crate) value: Mutex<Vec<u8>>,
    total: Arc<AtomicUsize>,
    _charge: Charge,
}

impl Drop for NewValue {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Session {
    pub(crate) fn new(share: &Share, holder: &Arc<ConnectionAccount>, (msize, is_ferry): (u32, bool)) -> Self {
        Self {
            id: holder.session(),
            msize,
            source: Arc::clone(&share.source),
            fids: Mutex::default(),
            paths: Arc::default(),
            owners: RandomKey::new(),
            owner_count: Arc::default(),
            client_ends: ClientEnds::default(),
            values_bytes: Arc::default(),
            removals: Removals::default(),
            renames: OwnRenames::default(),
            holder: Arc::clone(holder),
            has_events: is_ferry && share.options.events,
            events: OnceLock::new(),
        }
    }

    /// Returns the queue of events; the first call creates it.
    pub(crate) fn events(self: &Arc<Self>, changes: &Changes) -> &Arc<Queue> {
        let bytes_max = usize::try_from(self.msize).unwrap_or(usize::MAX) - READ_HEAD_BYTES;
        let (queue, _) = self.events.get_or_init(|| {
            let queue = Arc::new(Queue::of_client(bytes_max));
            let subscription = subscribe(changes, self, &queue);
            (queue, subscription)
        });
        queue
    }

    /// Returns whether the client waits for events.
    pub(crate) fn waits_for_events(&self) -> bool {
        self.events.get().is_some_and(|(queue, _)| queue.is_waiting())
    }

    /// Returns the number of fids.
    pub(crate) fn fids(&self) -> usize {
        lock(&self.fids).len()
    }

    /// Returns the current location of a file in a directory.
    pub(crate) fn place(&self, dir: &Arc<Node>, name: Name<'_>) -> Arc<Place> {
        self.renames.place((dir, dir.ino), name)
    }

    /// Returns the state of a fid.
    pub(crate) fn get(&self, fid: Fid) -> Result<Arc<File>> {
        lock(&self.fids).get(&fid).cloned().ok_or(Errno::BADF)
    }

    /// Returns an open fid.
    pub(crate) fn open(&self, fid: Fid) -> Result<(Arc<File>, Arc<Open>)> {
        let file = self.get(fid)?;
        match &file.state {
            State::Open(open) => {
                let open = Arc::clone(open);
                Ok((file, open))
            }
            _ => Err(Errno::BADF),
        }
    }

    /// Returns a fid that is not open yet, to be opened by this request.
    pub(crate) fn closed(&self, fid: Fid) -> Result<Arc<File>> {
        let file = self.get(fid)?;
        if matches!(file.state, State::Path) { Ok(file) } else { Err(Errno::BADF) }
    }

    /// Returns whether another fid can be created.
    pub(crate) fn is_free(&self, fid: Fid) -> Result<()> {
        let fids = lock(&self.fids);
        match fids.contains_key(&fid) {
            _ if fid == Fid::NONE => Err(Errno::INVAL),
            true => Err(Errno::BADF),
            false if !self.holder.has_room(Resource::Entries) => Err(Errno::NFILE),
            false => Ok(()),
        }
    }

    /// Creates a fid.
    pub(crate) fn insert(&self, fid: Fid, file: File) -> Result<()> {
        self.holder.take(Resource::Entries, 1).map_err(|LimitReached| Errno::NFILE)?;
        let mut fids = lock(&self.fids);
        let outcome = match fids.entry(fid) {
            Slot::Vacant(slot) if fid != Fid::NONE => {
                slot.insert(Arc::new(file));
                Ok(())
            }
            Slot::Occupied(_) | Slot::Vacant(_) => Err(file),
        };
        drop(fids);
        // An unused reference is released only here, where no lock is held.
        outcome.map_err(|_| {
            self.holder.release(Resource::Entries, 1);
            Errno::BADF
        })
    }

    /// Replaces the state of a fid, unless another request did so meanwhile.
    pub(crate) fn replace(&self, fid: Fid, before: &Arc<File>, file: File) -> Result<()> {
        let mut fids = lock(&self.fids);
        let outcome = match fids.get_mut(&fid) {
            Some(now) if Arc::ptr_eq(now, before) => Ok(std::mem::replace(now, Arc::new(file))),
            _ => Err(file),
        };
        drop(fids);
        outcome.map(drop).map_err(|_| Errno::BADF)
    }

    /// Ends a fid.
    pub(crate) fn remove(&self, fid: Fid) -> Result<Arc<File>> {
        let mut fids = lock(&self.fids);
        let removed = fids.remove(&fid).ok_or(Errno::BADF)?;
        shrink(&mut fids);
        drop(fids);
        self.holder.release(Resource::Entries, 1);
        Ok(removed)
    }

    /// Returns the root of the source, which always has a reference.
    pub(crate) fn root(&self, attr: &Attr) -> Arc<Node> {
        let entry = Entry { ino: Ino::ROOT, generation: 0, attr: *attr };
        Arc::new(self.node_of(&entry, false))
    }

    /// Takes over the reference of an entry after checking its attributes; an invalid entry is released.
    pub(crate) fn node(&self, entry: Entry) -> Result<(Arc<Node>, Attr)> {
        match checks::entry(entry) {
            Ok(entry) => Ok((Arc::new(self.node_of(&entry, true)), entry.attr)),
            Err(errno) => {
                if entry.ino != Ino(0) {
                    self.source.forget(entry.ino, 1);
                }
                Err(errno)
            }
        }
    }

    fn node_of(&self, entry: &Entry, counted: bool) -> Node {
        Node {
            ino: entry.ino,
            generation: entry.generation,
            kind: entry.attr.kind(),
            path: self.paths.enter(entry.ino, &entry.attr),
            paths: Arc::clone(&self.paths),
            source: Arc::clone(&self.source),
            counted,
        }
    }

    /// Records an opened handle.
    pub(crate) fn opened(&self, node: &Arc<Node>, handle: Handle, flags: OFlags, user: User) -> Arc<Open> {
        Arc::new(Open {
            node: Arc::clone(node),
            handle,
            flags,
            end: flags.contains(OFlags::APPEND).then(Arc::default),
            session: self.id,
            user,
            source: Arc::clone(&self.source),
            owners: Mutex::default(),
            owner_count: Arc::clone(&self.owner_count),
            holder: Arc::clone(&self.holder),
            reader: Mutex::default(),
        })
    }

    /// Returns the source's name for a lock owner: client and process, hashed with a secret against chosen collisions.
    pub(crate) fn owner(&self, lock: &LockRequest<'_>) -> u64 {
        self.owners.hash_one((lock.pid, lock.client)) | 1
    }

    fn count_value(&self, bytes: usize) -> Result<(Arc<AtomicUsize>, Charge)> {
        if !raise(&self.values_bytes, bytes, VALUES_BYTES_MAX) {
            return Err(Errno::NOMEM);
        }
        match self.holder.charge(Resource::Bytes, bytes) {
            Ok(charge) => Ok((Arc::clone(&self.values_bytes), charge)),
            Err(LimitReached) => {
                self.values_bytes.fetch_sub(bytes, Ordering::Relaxed);
                Err(Errno::NOMEM)
            }
        }
    }

    /// Adds a value to be read.
    pub(crate) fn value(&self, bytes: Vec<u8>) -> Result<Arc<Value>> {
        let (total, charge) = self.count_value(bytes.len())?;
        Ok(Arc::new(Value { bytes, total, _charge: charge }))
    }

    /// Adds a value to be written.
    pub(crate) fn new_value(&self, name: &[u8], bytes: usize, flags: XattrFlags) -> Result<Arc<NewValue>> {
        let (total, charge) = self.count_value(bytes)?;
        Ok(Arc::new(NewValue { name: name.into(), bytes, flags, value: Mutex::default(), total, _charge: charge }))
    }
}

/// Returns the session that a Tversion begins, if any, and the reply.
pub(crate) fn agree_on(
    share: &Share,
    holder: &Arc<ConnectionAccount>,
    msize: u32,
    version: &[u8],
) -> (Option<Arc<Session>>, Reply<'static>) {
    match agree(msize, version, share.options.msize_max) {
        VersionReply::Session { msize, version } => {
            let agreed = (msize, version == VERSION_OF_FERRY);
            (Some(Arc::new(Session::new(share, holder, agreed))), Reply::Version { msize, version })
        }
        VersionReply::Unknown => (None, Reply::Version { msize, version: VERSION_UNKNOWN }),
        VersionReply::TooSmall => (None, Reply::Error(Errno::MSGSIZE)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::Clients;
    use crate::peer::Peer;

    /// A source without calls.
    struct Nothing;

    impl FileSystem for Nothing {}

    #[test]
    fn owners_of_locks_are_remembered_until_they_have_none_and_are_bounded() {
        let clients = Clients::new(1, 0);
        let holder = clients.welcome(Peer::Guest).unwrap();
        let session = Session::new(&Share::new(Arc::new(Nothing), crate::Options::default()), &holder, (8192, false));
        let count = || session.owner_count.load(Ordering::Relaxed);
        let root = session.root(&Attr::new(Ino::ROOT, FileType::Directory, 0o755));
        let user = User { uid: 0, gid: 0, checked: false };
        let open = || session.opened(&root, Handle(1), OFlags::RDWR, user);
        let (one, other) = (open(), open());
        for owner in 0..10_000 {
            one.locked_by(owner);
            one.locked_by(owner);
            assert_eq!(count(), 1);
            assert!(one.unlocked_by(owner) && !one.unlocked_by(owner));
        }
        (0..3000).for_each(|owner| one.locked_by(owner));
        (0..3000).for_each(|owner| other.locked_by(owner));
        assert_eq!(count(), OWNERS_MAX);
        drop(one);
        assert_eq!(count(), OWNERS_MAX - 3000);
        other.locked_by(5000);
        assert!(other.unlocked_by(5000));
        assert_eq!(clients.held(Resource::Entries), OWNERS_MAX - 3000);
        drop(other);
        assert_eq!((count(), clients.held(Resource::Entries)), (0, 0));
    }
}
