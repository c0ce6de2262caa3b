//! One client's session, from INIT to DESTROY.

mod save_restore;
mod slot;

use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use ferry_state::{Init, JournalEntry, Slot};
use ferry_vfs::sync::{CacheAligned, lock};
use ferry_vfs::{
    Attr, ByNumber, Caller, Entry, Errno, FileSystem, FileType, Ino, OFlags, RandomKey, Removals, Result, SessionId,
};
use ferry_wire::fuse::{InitFlags, Negotiated};

use crate::blocking_locks::BlockedLocks;
use crate::close_to_open::{ReportedSize, StaleOpens};
use crate::events::{EventClient, SessionEvents};
use crate::mappings::Mappings;
use crate::open_file::Open;
use crate::passthrough::Passthrough;
use crate::persistence::{HeldLocks, OpenRecord, SessionRecord};
use crate::readdirplus_auto::ReaddirplusAuto;
use crate::usage::Usage;

pub use slot::SessionSlot;

/// The most files and directories that one client may have open: as many as a 9P client may have fids.
const OPENS_MAX: usize = 1 << 20;
/// Shards reduce contention between workers; a power of two.
const SHARDS: usize = 64;

/// An inode that the client knows.
#[derive(Default)]
struct InodeState {
    references: u64,
    /// Its record in the session store.
    slot: Option<Slot>,
    /// The size that the client was last told.
    size: Option<ReportedSize>,
    kind: Option<FileType>,
}

/// An open file or directory.
struct OpenState {
    count: u64,
    /// The union of the flags that it was opened with.
    flags: OFlags,
    /// Its record in the session store.
    open_record: OpenRecord,
}

#[derive(Default)]
struct Shard {
    references: HashMap<Ino, InodeState>,
    /// Inodes that the client maps through its DAX window, with per-inode DAX: the client decides once per inode.
    in_window: HashSet<Ino>,
    opens: HashMap<Open, OpenState>,
    /// The number of keys in `opens` per inode.
    open_inodes: HashMap<Ino, usize>,
}

impl Shard {
    /// Returns the state of an open file; adds it if it is new.
    fn opening(&mut self, open: Open) -> &mut OpenState {
        let open_inodes = &mut self.open_inodes;
        self.opens.entry(open).or_insert_with(|| {
            *open_inodes.entry(open.ino).or_default() += 1;
            OpenState { count: 0, flags: OFlags::empty(), open_record: OpenRecord::default() }
        })
    }

    /// Removes an open file; returns whether it was the last of its inode.
    fn remove(&mut self, open: Open) -> bool {
        let mut left = 0;
        if self.opens.remove(&open).is_some()
            && let Some(count) = self.open_inodes.get_mut(&open.ino)
        {
            *count -= 1;
            left = *count;
        }
        if left == 0 {
            self.open_inodes.remove(&open.ino);
        }
        left == 0
    }
}

impl EventClient for Session {
    const IS_AGENT: bool = true;

    fn session(&self) -> SessionId {
        self.id
    }

    fn source(&self) -> &dyn FileSystem {
        &*self.source
    }

    fn known(&self, ino: Ino) -> Option<(Ino, bool)> {
        self.knows(ino).then(|| (ino, self.kind_of(ino) == Some(FileType::Directory)))
    }
}

/// One client's session: the negotiated options, and the references, open files and locks to release when it ends.
pub struct Session {
    id: SessionId,
    negotiated: Negotiated,
    source: Arc<dyn FileSystem>,
    shards: [CacheAligned<Mutex<Shard>>; SHARDS],
    open_count: AtomicUsize,
    /// The key of generations, with which the client proves that it was told an inode number.
    generations: Option<RandomKey>,
    pub(crate) blocked_locks: Arc<BlockedLocks>,
    pub(crate) passthrough: Option<Passthrough>,
    /// Maps files into the client's memory, if that was negotiated.
    pub(crate) mappings: Option<Arc<dyn Mappings>>,
    pub(crate) readdirplus_auto: ReaddirplusAuto,
    pub(crate) refusals: StaleOpens,
    pub(crate) removals: Removals,
    pub(crate) events: SessionEvents,
    init: Init,
    /// The record of this session for the next server.
    record: Option<SessionRecord>,
    locks: HeldLocks,
    /// The locks were released for migration.
    locks_released: AtomicBool,
    /// Requests that the previous server had begun.
    journal_entries: Mutex<HashMap<u64, JournalEntry>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("id", &self.id).field("negotiated", &self.negotiated).finish_non_exhaustive()
    }
}

impl Session {
    pub(crate) fn new(
        source: Arc<dyn FileSystem>,
        negotiated: Negotiated,
        passthrough: Option<Passthrough>,
        mappings: Option<Arc<dyn Mappings>>,
        (init, record): (Init, Option<SessionRecord>),
    ) -> Self {
        let finds = negotiated.has(InitFlags::EXPORT_SUPPORT) && source.features().by_number == ByNumber::Host;
        // The record outlives the key.
        let generations = (finds && record.is_none()).then(RandomKey::new);
        let shards = std::array::from_fn(|_| CacheAligned::default());
        let (id, waits) = (SessionId::unique(), Arc::default());
        let (readdirplus_auto, locks, journal_entries) =
            (ReaddirplusAuto::default(), HeldLocks::default(), Mutex::default());
        let (open_count, locks_released, refusals) =
            (AtomicUsize::new(0), AtomicBool::new(false), StaleOpens::default());
        Self {
            id,
            negotiated,
            source,
            shards,
            open_count,
            generations,
            blocked_locks: waits,
            passthrough,
            mappings,
            readdirplus_auto,
            refusals,
            removals: Removals::default(),
            events: SessionEvents::default(),
            init,
            record,
            locks,
            locks_released,
            journal_entries,
        }
    }

    /// Whether a client with per-inode DAX uses its window for a file.
    pub(crate) fn dax(&self, attr: &Attr) -> bool {
        let Some(mappings) = self.mappings.as_ref().filter(|_| self.negotiated.has(InitFlags::HAS_INODE_DAX)) else {
            return false;
        };
        attr.kind() == FileType::RegularFile && mappings.takes(attr.size)
    }

    /// Whether the client reads and writes a file in its window.
    pub(crate) fn is_in_window(&self, ino: Ino) -> bool {
        match self.mappings.is_some() {
            true if self.negotiated.has(InitFlags::HAS_INODE_DAX) => self.shard(ino.0).in_window.contains(&ino),
            // Without per-inode DAX it uses the window for all files (`dax=always`).
            has_window => has_window,
        }
    }

    /// Returns the id of this session, the originator of its changes.
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Returns the negotiated options.
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// Returns the inodes that the client knows, except the root, for invalidating all of them.
    pub fn inodes(&self) -> Vec<Ino> {
        let shards = self.shards.iter().map(|shard| lock(shard));
        shards.flat_map(|shard| shard.references.keys().copied().collect::<Vec<_>>()).collect()
    }

    /// Counts what the client holds.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            inodes: self.shards.iter().map(|shard| lock(shard).references.len() as u64).sum(),
            open_files: self.open_count.load(Ordering::Relaxed) as u64,
            parked_locks: self.blocked_locks.count() as u64,
        }
    }

    fn shard(&self, number: u64) -> MutexGuard<'_, Shard> {
        let index = usize::try_from(number % SHARDS as u64).unwrap_or(0);
        lock(&self.shards[index])
    }

    /// Counts a reference to an inode that is sent to the client; returns the entry to send.
    pub(crate) fn add_reference(&self, entry: Entry) -> Entry {
        self.count_reference(&entry);
        match &self.generations {
            // Clients know the root from the beginning, with generation 0.
            Some(key) if entry.ino != Ino::ROOT => Entry { generation: key.hash_one(entry.ino) >> 32, ..entry },
            _ => entry,
        }
    }

    fn count_reference(&self, entry: &Entry) {
        let ino = entry.ino;
        let mut shard = self.shard(ino.0);
        let known = shard.references.entry(ino).or_default();
        known.references += 1;
        known.size = ReportedSize::of(&entry.attr);
        known.kind = Some(entry.attr.kind());
        if known.references == 1 && self.dax(&entry.attr) {
            shard.in_window.insert(ino);
        }
        let in_window = shard.in_window.contains(&ino);
        let Some(known) = shard.references.get_mut(&ino) else { return };
        let Some(record) = &self.record else { return };
        match known.slot {
            Some(slot) => record.references(slot, known.references),
            None if known.references == 1 => known.slot = record.node(&*self.source, ino, in_window),
            None => {}
        }
    }

    /// Records a file's size that is sent to the client, or (`None`) that the client changes it.
    pub(crate) fn set_reported_size(&self, ino: Ino, size: Option<ReportedSize>) {
        if let Some(known) = self.shard(ino.0).references.get_mut(&ino) {
            known.size = size;
        }
    }

    /// Returns the size that the client was last told, if it has not changed the file since.
    pub(crate) fn reported_size(&self, ino: Ino) -> Option<ReportedSize> {
        self.shard(ino.0).references.get(&ino).and_then(|known| known.size)
    }

    /// See [`Mappings::sync`].
    pub(crate) fn sync(&self, ino: Ino, part: Range<u64>) -> Result<()> {
        self.mappings.as_ref().map_or(Ok(()), |mappings| mappings.sync(ino, part))
    }

    /// See [`Mappings::writeback`].
    pub(crate) fn writeback(&self, ino: Ino, part: Range<u64>) -> Result<()> {
        self.mappings.as_ref().map_or(Ok(()), |mappings| mappings.writeback(ino, part))
    }

    /// See [`Mappings::writeback_all`].
    pub(crate) fn writeback_all(&self) -> Result<()> {
        self.mappings.as_ref().map_or(Ok(()), |mappings| mappings.writeback_all())
    }

    /// Updates the window before attributes are sent: they may show the client that the file has changed. Errors of
    /// reading are reported when the client accesses the data.
    pub(crate) fn sync_window_before_attr(&self, ino: Ino) {
        if let Some(mappings) = &self.mappings {
            let _ = mappings.sync_if_changed(ino);
        }
    }

    /// Gives all inodes generation 0: the client then finds by number only inodes that it knows.
    pub(crate) fn without_generations(mut self) -> Self {
        self.generations = None;
        self
    }

    /// Whether the client may find an inode by its number. A forged number may be that of a file outside the share.
    pub(crate) fn may_find(&self, ino: Ino) -> bool {
        self.generations.is_some() || self.source.features().by_number == ByNumber::Any || self.knows(ino)
    }

    /// Returns the file type of an inode that the client was told.
    pub(crate) fn kind_of(&self, ino: Ino) -> Option<FileType> {
        self.shard(ino.0).references.get(&ino).and_then(|known| known.kind)
    }

    /// Whether the client knows of an inode.
    pub(crate) fn knows(&self, ino: Ino) -> bool {
        ino == Ino::ROOT || self.shard(ino.0).references.contains_key(&ino)
    }

    /// Releases references of the client, never more than it has.
    pub(crate) fn forget(&self, ino: Ino, count: u64) {
        let mut shard = self.shard(ino.0);
        let Some(known) = shard.references.get_mut(&ino) else { return };
        let count = count.min(known.references);
        known.references -= count;
        let is_gone = known.references == 0;
        if let (Some(record), Some(slot)) = (&self.record, known.slot) {
            if is_gone { record.remove(slot) } else { record.references(slot, known.references) }
        }
        if is_gone {
            shard.references.remove(&ino);
            shard.in_window.remove(&ino);
        }
        // Under the shard's lock: the client may look the inode up again at once, and its new state must stay.
        if let Some(passthrough) = self.passthrough.as_ref().filter(|_| is_gone) {
            passthrough.forgotten(ino);
        }
        if let Some(mappings) = self.mappings.as_ref().filter(|_| is_gone) {
            mappings.forget(self.id, ino);
        }
        drop(shard);
        self.source.forget(ino, count);
    }

    /// Whether the client may open another file or directory. (Concurrent opens may exceed the limit slightly.)
    pub(crate) fn may_open(&self) -> Result<()> {
        if self.open_count.load(Ordering::Relaxed) < OPENS_MAX { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// Records that the client has opened a file with these flags.
    pub(crate) fn opened(&self, open: Open, flags: OFlags) {
        self.open_count.fetch_add(1, Ordering::Relaxed);
        let mut shard = self.shard(open.ino.0);
        let opening = shard.opening(open);
        opening.count += 1;
        opening.flags |= flags;
        if let (Some(record), 1) = (&self.record, opening.count) {
            opening.open_record = record.opened(&*self.source, self.id, open, flags);
        }
    }

    /// Whether the client has this open for writing.
    pub(crate) fn writes(&self, open: Open) -> bool {
        self.shard(open.ino.0).opens.get(&open).is_some_and(OpenState::writes)
    }

    /// Whether the client has a file open for writing, by any handle.
    pub(crate) fn writes_to(&self, ino: Ino) -> bool {
        self.shard(ino.0).opens.iter().any(|(open, opening)| open.ino == ino && opening.writes())
    }

    /// Closes a handle, which must be the client's own.
    pub(crate) fn release(&self, caller: &Caller<'_>, open: Open) -> Result<()> {
        let mut shard = self.shard(open.ino.0);
        let opening = shard.opens.get_mut(&open).ok_or(Errno::BADF)?;
        opening.count -= 1;
        let is_last = opening.count == 0 && {
            if let Some(record) = &self.record {
                record.closed(&opening.open_record);
            }
            shard.remove(open)
        };
        // Under the shard's lock: the client may open the file again at once, and lock it.
        self.locks.released(self.record.as_ref(), open, is_last);
        drop(shard);
        self.open_count.fetch_sub(1, Ordering::Relaxed);
        self.close(caller, open);
        Ok(())
    }

    fn close(&self, caller: &Caller<'_>, open: Open) {
        match open.is_dir {
            true => self.source.releasedir(caller, open.ino, open.handle),
            false => {
                if let Some(passthrough) = &self.passthrough {
                    passthrough.closed(open.ino);
                }
                self.source.release(caller, open.ino, open.handle);
            }
        }
    }
}

impl OpenState {
    fn writes(&self) -> bool {
        self.flags.intersects(OFlags::WRONLY | OFlags::RDWR)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.record.as_ref().is_some_and(SessionRecord::is_current) {
            // The server ends, not the client: everything, including locks, is left to the next server.
            return;
        }
        let caller = Caller { session: self.id, ..Caller::default() };
        // A panic in one release does not skip the others.
        let release = |call: &dyn Fn()| {
            if catch_unwind(AssertUnwindSafe(call)).is_err() {
                tracing::error!("the source panicked while releasing resources of a closed session");
            }
        };
        for shard in &self.shards {
            let Shard { references, opens, .. } = std::mem::take(&mut *lock(shard));
            for (open, opening) in opens {
                (0..opening.count).for_each(|_| release(&|| self.close(&caller, open)));
            }
            for (ino, known) in references {
                release(&|| self.source.forget(ino, known.references));
            }
        }
    }
}
