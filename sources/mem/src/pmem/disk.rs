//! A mounted image: media, log, allocators and the table of files.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ferry_vfs::sync::{self, CacheAligned, lock};
use ferry_vfs::{Errno, Ino, Result};

use super::alloc::Allocator;
use super::codec::{Map, map_bytes, put_map};
use super::extents::{Extents, Piece, Run};
use super::format::{BLOCK, BLOCK_BYTES, Layout, TIER2_FIRST};
use super::grace::Grace;
use super::heat::Heat;
use super::log::{Effects, Growth, Log, Reservation, Ticket};
use super::medium::{Medium, Ranges};

/// Shards of the table of files.
const TABLE_SHARDS: usize = 16;

type Shard = CacheAligned<RwLock<BTreeMap<Ino, Arc<File>>>>;

/// The maximum number of pieces in one record of a file's blocks, well below the limit of a payload.
pub(crate) const MAP_PIECES_MAX: usize = 32_768;

/// A tier: the location of its blocks, and which of them are free.
#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) blocks: Allocator,
    /// Offset of the first block.
    offset: u64,
    /// Number of the first block.
    first: u64,
}

impl Tier {
    /// Creates the first tier of an image.
    pub(crate) fn first(medium: Arc<dyn Medium>, layout: Layout, cpus: usize) -> Self {
        let blocks = Allocator::new(0, layout.data_blocks, cpus);
        Self { medium, blocks, offset: layout.data_offset(), first: 0 }
    }

    /// Creates the second tier with this number of blocks. Only one thread moves data there, so it has one shard.
    pub(crate) fn second(medium: Arc<dyn Medium>, blocks: u64) -> Self {
        Self { medium, blocks: Allocator::new(TIER2_FIRST, blocks, 1), offset: BLOCK_BYTES, first: TIER2_FIRST }
    }

    /// Returns whether it is the first tier.
    pub(crate) fn is_first(&self) -> bool {
        self.first == 0
    }

    /// Returns the offset of a block in the medium.
    pub(crate) fn at(&self, block: u64) -> u64 {
        self.offset + (block - self.first) * BLOCK_BYTES
    }

    /// Returns the range of a run in the medium.
    pub(crate) fn range(&self, run: Run) -> Range<u64> {
        self.at(run.block)..self.at(run.block + run.count)
    }
}

/// A regular file.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) ino: Ino,
    state: RwLock<State>,
    /// Ranges of the first tier's medium that were overwritten and are not durable.
    pub(crate) dirty: Mutex<Ranges>,
    /// Held while dirty ranges are synced, so that a thread that finds none waits for the one that took them.
    syncing: Mutex<()>,
    /// Read or written since the last check.
    used: AtomicBool,
    /// Queued to move back from the second tier.
    pub(crate) is_warm: AtomicBool,
}

/// The state behind a file's lock.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) size: u64,
    pub(crate) extents: Extents,
    /// The last record about size or blocks.
    pub(crate) ticket: Ticket,
    /// Counts all changes of bytes and blocks, for copies without the lock.
    pub(crate) version: u64,
    /// Whether the inode was deleted.
    pub(crate) removed: bool,
}

impl File {
    /// Creates a file with this size and these blocks.
    pub(crate) fn new(ino: Ino, size: u64, extents: Extents) -> Self {
        let state = State { size, extents, ..State::default() };
        Self {
            ino,
            state: RwLock::new(state),
            dirty: Mutex::default(),
            syncing: Mutex::default(),
            used: AtomicBool::new(false),
            is_warm: AtomicBool::new(false),
        }
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, State> {
        sync::read(&self.state)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, State> {
        sync::write(&self.state)
    }

    /// Marks the file as used.
    pub(crate) fn touch(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    /// Returns whether it was used since the last call.
    pub(crate) fn cool(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }
}

/// Why a change of a file's blocks is refused.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The first tier has too few free blocks. Others can be freed or moved to the second tier.
    Blocks,
    /// Anything else.
    Other(Errno),
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self::Other(errno)
    }
}

impl From<Refusal> for Errno {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Blocks => Self::NOSPC,
            Refusal::Other(errno) => errno,
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) tier1: Tier,
    pub(crate) tier2: Option<Tier>,
    pub(crate) log: Log,
    pub(crate) grace: Grace,
    pub(crate) read_only: bool,
    /// Ordered, so that iteration follows the order of creation in memory.
    files: Vec<Shard>,
    /// Held shared while blocks and sizes change, exclusively for a snapshot.
    gate: RwLock<()>,
    /// Empty without a second tier.
    pub(crate) heat: Heat,
}

impl Disk {
    /// Puts the parts together.
    pub(crate) fn new(tier1: Tier, tier2: Option<Tier>, log: Log, grace: Grace, read_only: bool) -> Self {
        let files = (0..TABLE_SHARDS).map(|_| CacheAligned::default()).collect();
        Self { tier1, tier2, log, grace, read_only, files, gate: RwLock::new(()), heat: Heat::default() }
    }

    /// Returns the tier of a block, and the tier's number from 0.
    pub(crate) fn tier(&self, block: u64) -> Result<(&Tier, usize)> {
        match &self.tier2 {
            _ if block < TIER2_FIRST => Ok((&self.tier1, 0)),
            Some(tier2) => Ok((tier2, 1)),
            None => Err(Errno::IO),
        }
    }

    fn shard(&self, ino: Ino) -> &Shard {
        &self.files[usize::try_from(ino.0 % TABLE_SHARDS as u64).unwrap_or(0)]
    }

    /// Returns the file of an inode, if it has data or was opened.
    pub(crate) fn file(&self, ino: Ino) -> Option<Arc<File>> {
        sync::read(self.shard(ino)).get(&ino).cloned()
    }

    /// Returns the file of an inode; creates it if necessary.
    pub(crate) fn file_or_new(&self, ino: Ino) -> Arc<File> {
        if let Some(file) = self.file(ino) {
            return file;
        }
        let mut shard = sync::write(self.shard(ino));
        let make = || {
            self.enter(ino);
            Arc::new(File::new(ino, 0, Extents::default()))
        };
        Arc::clone(shard.entry(ino).or_insert_with(make))
    }

    /// Adds a file to the table, during a mount.
    pub(crate) fn insert(&self, file: File) {
        self.enter(file.ino);
        let mut shard = sync::write(self.shard(file.ino));
        shard.insert(file.ino, Arc::new(file));
    }

    fn enter(&self, ino: Ino) {
        if self.tier2.is_some() {
            self.heat.add(ino);
        }
    }

    /// Returns all files; each shard is consistent.
    pub(crate) fn files(&self) -> Vec<Arc<File>> {
        let shards = self.files.iter().map(|shard| sync::read(shard));
        shards.flat_map(|shard| shard.values().cloned().collect::<Vec<_>>()).collect()
    }

    /// Marks a file as used.
    pub(crate) fn touch(&self, file: &File) {
        if self.tier2.is_some() {
            file.touch();
        }
    }

    /// Returns the total and the free blocks of both tiers, including those about to be freed.
    pub(crate) fn space(&self) -> (u64, u64) {
        let second = self.tier2.as_ref().map_or((0, 0), |tier| (tier.blocks.blocks(), tier.blocks.free_blocks()));
        let free = self.tier1.blocks.free_blocks() + self.grace.blocks() + self.log.freed_blocks();
        (self.tier1.blocks.blocks() + second.0, free + second.1)
    }

    /// Returns the guard to hold while blocks or sizes change.
    pub(crate) fn change(&self) -> RwLockReadGuard<'_, ()> {
        sync::read(&self.gate)
    }

    /// Returns the guard that blocks all changes.
    pub(crate) fn stop(&self) -> RwLockWriteGuard<'_, ()> {
        sync::write(&self.gate)
    }

    /// Allocates blocks of the first tier.
    pub(crate) fn allocate(&self, count: u64, goal: Option<u64>) -> std::result::Result<Vec<Run>, Refusal> {
        let cpu = crate::machine::cpu();
        self.tier1.blocks.take(count, goal, cpu).ok_or(Refusal::Blocks)
    }

    /// Frees blocks that are in no record.
    pub(crate) fn give_back(&self, runs: &[Run]) {
        for run in runs {
            match &self.tier2 {
                Some(tier2) if run.block >= TIER2_FIRST => tier2.blocks.put(std::slice::from_ref(run)),
                _ => self.tier1.blocks.put(std::slice::from_ref(run)),
            }
        }
    }

    /// Reserves room in the log for a record with this many pieces.
    pub(crate) fn reserve(&self, pieces: usize, growth: Growth) -> Result<Reservation> {
        self.log.reserve(map_bytes(pieces), growth)
    }

    /// Logs the size of a file and the location of a range of its blocks.
    pub(crate) fn record(
        &self,
        (file, state): (&File, &mut State),
        reservation: Reservation,
        blocks: Range<u64>,
        effects: Effects,
    ) {
        let pieces: Vec<Piece> = state.extents.within(blocks.clone()).collect();
        let map = Map { ino: file.ino, size: state.size, from: blocks.start, to: blocks.end, pieces };
        let mut payload = Vec::with_capacity(map_bytes(map.pieces.len()));
        put_map(&mut payload, &map);
        state.ticket = self.log.append(reservation, &payload, effects);
        state.version += 1;
    }

    /// Syncs a file's bytes and then the log, unless the log is not needed to find the bytes.
    pub(crate) fn sync_file(&self, file: &File, data_only: bool) -> Result<()> {
        let _syncing = lock(&file.syncing);
        self.log.check()?;
        let dirty = std::mem::take(&mut *lock(&file.dirty));
        let ticket = file.read().ticket;
        if data_only && self.log.is_durable(ticket) {
            if !dirty.is_empty() {
                self.tier1.medium.persist(&dirty.into_sorted()).map_err(|error| self.log.fail(&error))?;
            }
            // Some of the file's ranges may be part of a flush of all files.
            return self.log.sync_along();
        }
        self.log.flush_along(dirty);
        self.sync_log()
    }

    /// Makes the log durable.
    pub(crate) fn sync_log(&self) -> Result<()> {
        self.log.sync(self.log.last())?;
        self.collect();
        Ok(())
    }

    /// Makes everything durable.
    pub(crate) fn sync_all(&self) -> Result<()> {
        for file in self.files() {
            // A sync of the file that is under way has taken its ranges, and may fail.
            let _syncing = lock(&file.syncing);
            let mut dirty = lock(&file.dirty);
            // Under the lock: a sync of the file finds the ranges either in the file or in the log.
            self.log.flush_along(std::mem::take(&mut *dirty));
        }
        self.sync_log()
    }

    /// Returns freed blocks to the allocators once no reader uses them.
    pub(crate) fn collect(&self) {
        self.grace.reclaim(self.log.take_released(), |runs| self.give_back(runs));
    }

    /// Excludes a file from moves before it is deleted: no record of its blocks may follow the record of its deletion.
    pub(crate) fn end(&self, ino: Ino) {
        if let Some(file) = self.file(ino) {
            file.write().removed = true;
        }
    }

    /// Removes a deleted file. Its blocks become free when the record of the deletion is durable, or, if the log had no room for it,
    /// the next snapshot.
    pub(crate) fn remove(&self, ino: Ino, by_snapshot: bool) {
        let file = sync::write(self.shard(ino)).remove(&ino);
        if let Some(file) = file {
            let mut state = file.write();
            state.removed = true;
            state.version += 1;
            let runs: Vec<Run> = state.extents.remove(0..u64::MAX).iter().map(Piece::run).collect();
            if by_snapshot {
                self.log.free_by_snapshot(runs)
            } else {
                self.log.free(runs)
            }
            drop(state);
            if self.tier2.is_some() {
                self.heat.remove(|ino| self.file(ino).is_some());
            }
        }
    }

    /// Calls a function with a part of a block run, in either tier.
    pub(crate) fn look(&self, block: u64, skip: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> Result<()> {
        let (tier, _) = self.tier(block)?;
        tier.medium.look(tier.at(block) + skip, bytes, seen).map_err(|error| io_error(&error))
    }

    /// Returns a snapshot's records of a file's data, if it has any: at most [`MAP_PIECES_MAX`] pieces each.
    pub(crate) fn for_each_map(&self, ino: Ino, mut each: impl FnMut(&Map) -> Result<()>) -> Result<()> {
        let Some(file) = self.file(ino) else { return Ok(()) };
        let state = file.read();
        if state.size == 0 && state.extents.blocks() == 0 {
            return Ok(());
        }
        let all: Vec<Piece> = state.extents.all().collect();
        let mut from = 0;
        // A file of holes only has a size to log.
        let empty = all.is_empty().then_some(&*all);
        for pieces in all.chunks(MAP_PIECES_MAX).chain(empty) {
            let to = pieces.last().map_or(from, Piece::end);
            each(&Map { ino, size: state.size, from, to, pieces: pieces.to_vec() })?;
            from = to;
        }
        Ok(())
    }
}

/// Returns the error for a caller after a failure of the medium.
pub(crate) fn io_error(error: &io::Error) -> Errno {
    tracing::error!("the image failed: {error}");
    Errno::IO
}

/// Returns the logical block of a byte.
pub(crate) fn block_of(offset: u64) -> u64 {
    offset / BLOCK_BYTES
}

/// Returns the offset of a byte in its block.
pub(crate) fn skip_of(offset: u64) -> usize {
    usize::try_from(offset % BLOCK_BYTES).unwrap_or(0) & (BLOCK - 1)
}
