//! The session store: shared memory with its descriptors.
//!
//! ```text
//! head, 64 words:  magic | epoch | slots used | session there | minor | read-ahead | offered | agreed | workers | entries
//!                  | restarts
//! journals:        workers x entries x 32 words
//! slots:           16 words each
//! ```

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use ferry_vfs::sync::{CacheAligned, lock};
use ferry_vfs::{Backing, Ino};

use crate::connection::{Commit, InheritedConnection};
use crate::journal::{self, EntryUse, Journal, JournalEntry};
use crate::keeper::{CONNECTION, KeeperConnection, KeeperError};
use crate::memory::Memory;
use crate::saved::{Init, LOCK, NODE, Node, OPEN, OpenFile, SavedLock, SavedSession};
use crate::slots::{self, Slot, Slots};

/// The version of the memory's format.
const MAGIC: u64 = u64::from_le_bytes(*b"FERRYST\x03");
const HEAD_WORDS: usize = 64;
const EPOCH: usize = 1;
const HIGH_WATER: usize = 2;
const THERE: usize = 3;
const INIT: usize = 4;
const WORKERS: usize = 8;
const ENTRIES: usize = 9;
const RESTARTS: usize = 10;
/// The maximum number of inodes, open files and locks together: 512 MiB of memory if all are in use.
const SLOTS_MAX: usize = 1 << 22;

/// Record types besides those of [`crate::saved`]: an inode that uses the client's window, and a mapping in it.
const NODE_IN_WINDOW: u8 = 4;
const MAPPED: u8 = 5;

/// The keys of descriptors.
const MEMORY: u64 = 0;
const IN_FLIGHT: u64 = 1;
/// Keys of open files: this plus the slot's index.
pub(crate) const FILES: u64 = 16;

/// The size of the journals. The server chooses both numbers, the same for all servers of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Workers that write journals.
    pub workers: usize,
    /// Entries of each.
    pub entries: usize,
}

impl Geometry {
    fn journal_words(self) -> usize {
        self.workers * self.entries * journal::WORDS
    }

    fn words(self) -> usize {
        HEAD_WORDS + self.journal_words() + SLOTS_MAX * slots::WORDS
    }
}

/// Why state cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The keeper.
    #[error(transparent)]
    Line(#[from] KeeperError),
    /// The memory.
    #[error("cannot allocate memory for the state: {0}")]
    Memory(std::io::Error),
    /// The stored state is of another version or has other options.
    #[error(
        "what was kept is of another version of ferry, or of a server with another number of queues; start it as it was \
         started before, or end the guest first"
    )]
    Other,
}

/// The stored state of a share's client. A server writes it, and the next server reads it.
#[derive(Debug)]
pub struct SessionStore {
    memory: Memory,
    geometry: Geometry,
    slots: Slots,
    /// Of each worker's journal.
    places: Vec<CacheAligned<Mutex<EntryUse>>>,
    epoch: AtomicU64,
    /// The connection to the keeper, the last descriptor of this process that closes.
    line: Arc<Backing>,
    in_flight: Mutex<Option<File>>,
    /// The state that the previous server left.
    left: Mutex<Option<PreviousSession>>,
    inherited_connection: Mutex<Option<InheritedConnection>>,
    /// The keeper holds the connection of a front end.
    has_connection: AtomicBool,
    /// The keeper's process id, if it sent one.
    keeper: Option<u32>,
    /// A lack of room was logged.
    said: AtomicBool,
}

/// A mapping in a client's window, as recorded by the previous server.
#[derive(Debug)]
pub struct MappedFile {
    /// Where it is written down.
    pub slot: Slot,
    /// The state number that was recorded last.
    pub state: u64,
    /// What it is.
    pub bytes: Vec<u8>,
    /// Its descriptor, if it has one.
    pub file: Option<OwnedFd>,
}

/// The state that the previous server left.
#[derive(Debug, Default)]
pub struct PreviousSession {
    /// What the client holds.
    pub saved: SavedSession,
    /// The slots of its inodes.
    pub node_slots: HashMap<Ino, Slot>,
    /// The slots of its open files.
    pub open_slots: HashMap<OpenFile, Slot>,
    /// The slots of its locks.
    pub lock_slots: Vec<Slot>,
    /// The descriptors of its open files.
    pub files: HashMap<OpenFile, OwnedFd>,
    /// The inodes that use its window.
    pub in_window: HashSet<Ino>,
    /// What is in its window.
    pub mapped: Vec<MappedFile>,
    /// Requests in progress, and the last completed ones.
    pub journal_entries: HashMap<u64, JournalEntry>,
}

impl SessionStore {
    /// Takes over the keeper's state, or begins a new one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn open(line: KeeperConnection, geometry: Geometry) -> Result<Self, StoreError> {
        let keeper = line.keeper();
        let (socket, mut files, records) = line.take();
        let line = Arc::new(Backing::new(socket).long_lived());
        let (file, is_new) = match files.remove(&MEMORY) {
            Some(fd) => (File::from(fd), false),
            None => (Memory::file(geometry.words()).map_err(StoreError::Memory)?, true),
        };
        let memory = Memory::map(&file, geometry.words());
        let memory = memory.map_err(|error| if is_new { StoreError::Memory(error) } else { StoreError::Other })?;
        let numbers = [(0, MAGIC), (WORKERS, geometry.workers as u64), (ENTRIES, geometry.entries as u64)];
        if is_new {
            numbers.iter().for_each(|(at, number)| memory[*at].store(*number, Ordering::Release));
            memory[EPOCH].store(1, Ordering::Release);
            KeeperConnection::put(line.as_fd(), MEMORY, file.as_fd())?;
        } else if numbers.iter().any(|(at, number)| memory[*at].load(Ordering::Acquire) != *number) {
            return Err(StoreError::Other);
        } else {
            memory[RESTARTS].fetch_add(1, Ordering::AcqRel);
        }
        let in_flight = Mutex::new(files.remove(&IN_FLIGHT).map(File::from));
        let inherited_connection = files.remove(&CONNECTION).map(|socket| InheritedConnection { socket, records });
        let epoch = memory[EPOCH].load(Ordering::Acquire);
        let kept = Self {
            memory,
            geometry,
            slots: Slots::default(),
            places: (0..geometry.workers).map(|_| CacheAligned::default()).collect(),
            epoch: AtomicU64::new(epoch),
            line,
            in_flight,
            left: Mutex::default(),
            has_connection: AtomicBool::new(inherited_connection.is_some()),
            inherited_connection: Mutex::new(inherited_connection),
            keeper,
            said: AtomicBool::new(false),
        };
        let left = kept.load(files)?;
        *lock(&kept.left) = left;
        Ok(kept)
    }

    fn load(&self, mut files: HashMap<u64, OwnedFd>) -> Result<Option<PreviousSession>, StoreError> {
        let high_water = u32::try_from(self.memory[HIGH_WATER].load(Ordering::Acquire)).unwrap_or(u32::MAX);
        let found = self.slots.load(self.slot_words(), self.epoch(), high_water);
        let number = |at: usize| self.memory[INIT + at].load(Ordering::Acquire);
        let short = |at: usize| u32::try_from(number(at)).unwrap_or(0);
        let init = Init { minor: short(0), max_readahead_bytes: short(1), offered: number(2), agreed: number(3) };
        let mut left =
            PreviousSession { saved: SavedSession { init, ..SavedSession::default() }, ..PreviousSession::default() };
        for mut one in found {
            if one.kind == MAPPED {
                let file = files.remove(&(FILES + u64::from(one.slot.index)));
                left.mapped.push(MappedFile { slot: one.slot, state: one.count, bytes: one.bytes, file });
                continue;
            }
            let is_in_window = one.kind == NODE_IN_WINDOW;
            if is_in_window {
                one.kind = NODE;
            }
            // An invalid record was written by a server while it was killed.
            if left.saved.add(one.kind, one.count, &one.bytes).is_err() {
                continue;
            }
            match one.kind {
                NODE => left.saved.nodes.last().map(|node| {
                    if is_in_window {
                        left.in_window.insert(node.ino);
                    }
                    left.node_slots.insert(node.ino, one.slot)
                }),
                OPEN => left.saved.opens.last().map(|open| {
                    if let Some(file) = files.remove(&(FILES + u64::from(one.slot.index))) {
                        left.files.insert(*open, file);
                    }
                    left.open_slots.insert(*open, one.slot)
                }),
                _ => {
                    left.lock_slots.push(one.slot);
                    None
                }
            };
        }
        // These belong to files that were closed while the server was killed.
        files.keys().try_for_each(|key| KeeperConnection::drop_key(self.line.as_fd(), *key))?;
        left.journal_entries = journal::load(self.journals(), self.epoch());
        Ok(self.has_client().then_some(left))
    }

    /// Returns the state that the previous server left, once. `None`: there was no server, or it had no client.
    pub fn take_left(&self) -> Option<PreviousSession> {
        lock(&self.left).take()
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    pub(crate) fn journals(&self) -> &[AtomicU64] {
        &self.memory[HEAD_WORDS..HEAD_WORDS + self.geometry.journal_words()]
    }

    pub(crate) fn places(&self, worker: usize) -> Option<MutexGuard<'_, EntryUse>> {
        self.places.get(worker).map(|place| lock(place))
    }

    fn slot_words(&self) -> &[AtomicU64] {
        &self.memory[HEAD_WORDS + self.geometry.journal_words()..]
    }

    /// Returns the number of the client; every client has another one.
    #[inline]
    pub fn epoch(&self) -> u32 {
        u32::try_from(self.epoch.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// Returns how often a server has taken over from the one before.
    pub fn restarts(&self) -> u64 {
        self.memory[RESTARTS].load(Ordering::Relaxed)
    }

    /// Returns the descriptor that must outlive all operations of this process: the keeper waits for its close.
    pub fn line(&self) -> &Arc<Backing> {
        &self.line
    }

    /// Returns the memory of requests in flight, if any is stored.
    ///
    /// # Errors
    ///
    /// No descriptors are left.
    pub fn in_flight(&self) -> std::io::Result<Option<File>> {
        lock(&self.in_flight).as_ref().map(File::try_clone).transpose()
    }

    /// Stores memory of requests in flight.
    ///
    /// # Errors
    ///
    /// The keeper is gone, or no descriptors are left.
    pub fn keep_in_flight(&self, file: &File) -> Result<(), StoreError> {
        KeeperConnection::put(self.line.as_fd(), IN_FLIGHT, file.as_fd())?;
        *lock(&self.in_flight) = Some(file.try_clone().map_err(StoreError::Memory)?);
        Ok(())
    }

    /// Returns whether there is a client, from INIT to its end.
    pub fn has_client(&self) -> bool {
        self.memory[THERE].load(Ordering::Acquire) == 1
    }

    /// Returns whether the keeper outlives this server, because there is a client or a connection to continue.
    pub fn outlives_server(&self) -> bool {
        self.has_client() || self.has_connection.load(Ordering::Relaxed)
    }

    /// Returns the keeper's process id, if it sent one.
    pub fn keeper(&self) -> Option<u32> {
        self.keeper
    }

    /// Returns the connection that the previous server left, once.
    pub fn take_connection(&self) -> Option<InheritedConnection> {
        lock(&self.inherited_connection).take()
    }

    /// Stores a new connection.
    ///
    /// # Errors
    ///
    /// The keeper is gone.
    pub fn keep_connection(&self, socket: BorrowedFd<'_>) -> Result<(), KeeperError> {
        KeeperConnection::put(self.line.as_fd(), CONNECTION, socket)?;
        self.has_connection.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Takes, records and answers a message of the connection. Only the connection's thread may call this.
    ///
    /// # Errors
    ///
    /// [`KeeperError::Full`]: nothing was done. [`KeeperError::Gone`]: it is unknown what was done.
    pub fn commit(&self, commit: &Commit<'_>) -> Result<(), KeeperError> {
        KeeperConnection::commit(self.line.as_fd(), commit)
    }

    /// Forgets the connection: the front end is gone, or the server stops listening to it.
    pub fn end_connection(&self) {
        drop(self.take_connection());
        self.has_connection.store(false, Ordering::Relaxed);
        self.forget_client(KeeperConnection::forget_connection(self.line.as_fd()));
    }

    /// Returns a worker's journal, for one of its threads.
    pub fn journal(self: &Arc<Self>, worker: usize) -> Journal {
        Journal::new(Arc::clone(self), worker)
    }

    /// Clears the state and begins another client, with its `init`. Returns its number.
    pub fn begin(&self, init: Option<Init>) -> u32 {
        let epoch = (self.epoch.load(Ordering::Relaxed) + 1) & u64::from(u32::MAX);
        self.memory[THERE].store(0, Ordering::Release);
        self.memory[EPOCH].store(epoch, Ordering::Release);
        self.memory[HIGH_WATER].store(0, Ordering::Release);
        self.epoch.store(epoch, Ordering::Release);
        self.slots.begin(self.epoch());
        drop(lock(&self.left).take());
        self.forget_client(KeeperConnection::clear(self.line.as_fd(), init.is_some()));
        if let Some(init) = init {
            let numbers = [u64::from(init.minor), u64::from(init.max_readahead_bytes), init.offered, init.agreed];
            for (word, number) in self.memory[INIT..].iter().zip(numbers) {
                word.store(number, Ordering::Release);
            }
            self.memory[THERE].store(1, Ordering::Release);
        }
        self.epoch()
    }

    fn forget_client(&self, outcome: Result<(), KeeperError>) {
        if let Err(error) = outcome
            && !self.said.swap(true, Ordering::Relaxed)
        {
            tracing::error!(
                "should this server be killed, the guest will not find all of its open files again: {error}"
            );
        }
    }

    fn put(&self, epoch: u32, kind: u8, bytes: &[u8], count: u64, file: Option<BorrowedFd<'_>>) -> Option<Slot> {
        let slot = self.slots.prepare(self.slot_words(), epoch, bytes, count);
        let Some(slot) = slot else {
            if epoch == self.epoch() && !self.said.swap(true, Ordering::Relaxed) {
                tracing::error!(
                    "should this server be killed, the guest will find no more than {SLOTS_MAX} inodes again"
                );
            }
            return None;
        };
        if let Some(file) = file {
            self.forget_client(KeeperConnection::put(self.line.as_fd(), FILES + u64::from(slot.index), file));
        }
        self.memory[HIGH_WATER].fetch_max(self.slots.high_water().into(), Ordering::Release);
        Slots::commit(self.slot_words(), slot, kind, bytes.len());
        Some(slot)
    }

    /// Records an inode that the client references, and whether it uses the window.
    pub fn node(&self, epoch: u32, ino: Ino, identity: &[u8], in_window: bool) -> Option<Slot> {
        let kind = if in_window { NODE_IN_WINDOW } else { NODE };
        self.put(epoch, kind, &Node::to_bytes(ino, identity), 1, None)
    }

    /// Records a mapping in the client's window, with a state number that [`Self::mapping`] changes.
    pub fn mapped(&self, bytes: &[u8], state: u64, file: Option<BorrowedFd<'_>>) -> Option<Slot> {
        self.put(self.epoch(), MAPPED, bytes, state, file)
    }

    /// Changes the state number of a mapping.
    pub fn mapping(&self, slot: Slot, state: u64) {
        self.references(slot, state);
    }

    /// Records the number of the client's references.
    #[inline]
    pub fn references(&self, slot: Slot, count: u64) {
        if slot.epoch == self.epoch() {
            Slots::count(self.slot_words(), slot, count);
        }
    }

    /// The client has opened something.
    pub fn open_file(&self, epoch: u32, open: OpenFile, file: Option<BorrowedFd<'_>>) -> Option<Slot> {
        self.put(epoch, OPEN, &open.to_bytes(), 1, file)
    }

    /// Records that the client has closed a file or unmapped a mapping.
    pub fn close_file(&self, slot: Slot, had_file: bool) {
        if had_file && slot.epoch == self.epoch() {
            self.forget_client(KeeperConnection::drop_key(self.line.as_fd(), FILES + u64::from(slot.index)));
        }
        self.remove(slot);
    }

    /// The client has a lock.
    pub fn lock(&self, epoch: u32, lock: SavedLock) -> Option<Slot> {
        self.put(epoch, LOCK, &lock.to_bytes(), 1, None)
    }

    /// Forgets one thing.
    pub fn remove(&self, slot: Slot) {
        self.slots.remove(self.slot_words(), slot);
    }
}
