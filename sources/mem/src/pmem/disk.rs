//! A mounted image: media, log, allocators and the table of files.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

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

/// The most pieces in one record of a file's blocks, well below what fits into a payload.
pub(crate) const MAP_PIECES_MAX: usize = 32_768;

/// A tier: where its blocks are, and which of them are free.
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
    /// The first tier of an image.
    pub(crate) fn first(medium: Arc<dyn Medium>, layout: Layout, cpus: usize) -> Self {
        let blocks = Allocator::new(0, layout.data_blocks, cpus);
        Self { medium, blocks, offset: layout.data_offset(), first: 0 }
    }

    /// The second tier, with so many blocks. Only one thread moves data there: one shard.
    pub(crate) fn second(medium: Arc<dyn Medium>, blocks: u64) -> Self {
        Self { medium, blocks: Allocator::new(TIER2_FIRST, blocks, 1), offset: BLOCK_BYTES, first: TIER2_FIRST }
    }

    /// Whether it is the first tier.
    pub(crate) fn is_first(&self) -> bool {
        self.first == 0
    }

    /// Offset of a block in the medium.
    pub(crate) fn at(&self, block: u64) -> u64 {
        self.offset + (block - self.first) * BLOCK_BYTES
    }

    /// Range of a run in the medium.
    pub(crate) fn range(&self, run: Run) -> Range<u64> {
        self.at(run.block)..self.at(run.block + run.count)
    }
}

/// A regular file.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) ino: Ino,
    state: RwLock<State>,
    /// Ranges of the first tier's medium that were written in place and are not durable.
    dirty: Mutex<Ranges>,
    /// Held while dirty ranges are made durable: who finds none left waits for him who took them.
    syncing: Mutex<()>,
    /// It was read or written since somebody last looked.
    used: AtomicBool,
    /// It waits to come back from the second tier.
    pub(crate) is_warm: AtomicBool,
}

/// What a file's lock guards.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) size: u64,
    pub(crate) extents: Extents,
    /// The last record about size or blocks.
    pub(crate) ticket: Ticket,
    /// Counts all changes of bytes and blocks, for who copies without the lock.
    pub(crate) version: u64,
    /// The inode ended.
    pub(crate) removed: bool,
}

impl File {
    /// A file with this size and these blocks.
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
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn dirty(&self) -> MutexGuard<'_, Ranges> {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note that it is used.
    pub(crate) fn touch(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    /// Whether it was used since the last call.
    pub(crate) fn cool(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
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
    /// In order, so that going through all of them goes through memory as they were made.
    files: Vec<RwLock<BTreeMap<Ino, Arc<File>>>>,
    /// Held shared by whoever changes blocks and sizes, exclusively for a snapshot.
    gate: RwLock<()>,
    /// Filled only if there is a second tier.
    pub(crate) heat: Heat,
}

impl Disk {
    /// Puts the parts together.
    pub(crate) fn new(tier1: Tier, tier2: Option<Tier>, log: Log, grace: Grace, read_only: bool) -> Self {
        let files = (0..TABLE_SHARDS).map(|_| RwLock::default()).collect();
        Self { tier1, tier2, log, grace, read_only, files, gate: RwLock::new(()), heat: Heat::default() }
    }

    /// The tier that a block is in, and that tier's number counted from 0.
    pub(crate) fn tier(&self, block: u64) -> Result<(&Tier, usize)> {
        match &self.tier2 {
            _ if block < TIER2_FIRST => Ok((&self.tier1, 0)),
            Some(tier2) => Ok((tier2, 1)),
            None => Err(Errno::IO),
        }
    }

    fn shard(&self, ino: Ino) -> &RwLock<BTreeMap<Ino, Arc<File>>> {
        &self.files[usize::try_from(ino.0 % TABLE_SHARDS as u64).unwrap_or(0)]
    }

    /// The file of an inode, if it has any data or was opened.
    pub(crate) fn file(&self, ino: Ino) -> Option<Arc<File>> {
        self.shard(ino).read().unwrap_or_else(PoisonError::into_inner).get(&ino).cloned()
    }

    /// The file of an inode, made if there is none.
    pub(crate) fn file_or_new(&self, ino: Ino) -> Arc<File> {
        if let Some(file) = self.file(ino) {
            return file;
        }
        let mut shard = self.shard(ino).write().unwrap_or_else(PoisonError::into_inner);
        let make = || {
            self.enter(ino);
            Arc::new(File::new(ino, 0, Extents::default()))
        };
        Arc::clone(shard.entry(ino).or_insert_with(make))
    }

    /// Puts a file into the table, at a mount.
    pub(crate) fn insert(&self, file: File) {
        self.enter(file.ino);
        let mut shard = self.shard(file.ino).write().unwrap_or_else(PoisonError::into_inner);
        shard.insert(file.ino, Arc::new(file));
    }

    fn enter(&self, ino: Ino) {
        if self.tier2.is_some() {
            self.heat.add(ino);
        }
    }

    /// All files, at one moment for each shard.
    pub(crate) fn files(&self) -> Vec<Arc<File>> {
        let shards = self.files.iter().map(|shard| shard.read().unwrap_or_else(PoisonError::into_inner));
        shards.flat_map(|shard| shard.values().cloned().collect::<Vec<_>>()).collect()
    }

    /// Takes note that a file is used.
    pub(crate) fn touch(&self, file: &File) {
        if self.tier2.is_some() {
            file.touch();
        }
    }

    /// Blocks of both tiers, in all and free (those counted that are as good as free).
    pub(crate) fn space(&self) -> (u64, u64) {
        let second = self.tier2.as_ref().map_or((0, 0), |tier| (tier.blocks.blocks(), tier.blocks.free_blocks()));
        let free = self.tier1.blocks.free_blocks() + self.grace.blocks() + self.log.freed_blocks();
        (self.tier1.blocks.blocks() + second.0, free + second.1)
    }

    /// What must be held to change blocks or sizes.
    pub(crate) fn change(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds up all changes.
    pub(crate) fn stop(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes blocks of the first tier.
    pub(crate) fn allocate(&self, count: u64, goal: Option<u64>) -> Result<Vec<Run>> {
        let cpu = crate::machine::cpu();
        self.tier1.blocks.take(count, goal, cpu).ok_or(Errno::NOSPC)
    }

    /// Gives blocks back that no record ever mentioned.
    pub(crate) fn give_back(&self, runs: &[Run]) {
        for run in runs {
            match &self.tier2 {
                Some(tier2) if run.block >= TIER2_FIRST => tier2.blocks.put(std::slice::from_ref(run)),
                _ => self.tier1.blocks.put(std::slice::from_ref(run)),
            }
        }
    }

    /// Takes room in the log for a record about so many pieces.
    pub(crate) fn reserve(&self, pieces: usize, growth: Growth) -> Result<Reservation> {
        self.log.reserve(map_bytes(pieces), growth)
    }

    /// Writes down the size of a file and where a range of its blocks is now.
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

    /// Makes a file's bytes durable, and then, unless it is not needed to find them, the log.
    pub(crate) fn sync_file(&self, file: &File, data_only: bool) -> Result<()> {
        let _syncing = file.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        self.log.check()?;
        let dirty = std::mem::take(&mut *file.dirty());
        let ticket = file.read().ticket;
        if data_only && self.log.is_durable(ticket) {
            if !dirty.is_empty() {
                self.tier1.medium.persist(&dirty.into_sorted()).map_err(|error| self.log.fail(&error))?;
            }
            // Some of the file's may be on the way with those of all files.
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
            let mut dirty = file.dirty();
            // Under the lock: who syncs the file finds them there, or in the log.
            self.log.flush_along(std::mem::take(&mut *dirty));
        }
        self.sync_log()
    }

    /// Gives freed blocks to the allocators as far as nobody reads them any more.
    pub(crate) fn collect(&self) {
        self.grace.reclaim(self.log.take_released(), |runs| self.give_back(runs));
    }

    /// Forgets a file that ended; its blocks are free when the record that said so is durable, or, where there was no
    /// room for one, the next snapshot.
    pub(crate) fn remove(&self, ino: Ino, by_snapshot: bool) {
        let file = self.shard(ino).write().unwrap_or_else(PoisonError::into_inner).remove(&ino);
        if let Some(file) = file {
            let mut state = file.write();
            state.removed = true;
            state.version += 1;
            let runs: Vec<Run> = state.extents.remove(0..u64::MAX).iter().map(Piece::run).collect();
            if by_snapshot { self.log.free_by_snapshot(runs) } else { self.log.free(runs) }
        }
    }

    /// Shows a part of a block run, wherever it is.
    pub(crate) fn look(&self, block: u64, skip: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> Result<()> {
        let (tier, _) = self.tier(block)?;
        tier.medium.look(tier.at(block) + skip, bytes, seen).map_err(|error| io_error(&error))
    }

    /// What a snapshot says of a file's data, if it has any: records of at most [`MAP_PIECES_MAX`] pieces each.
    pub(crate) fn for_each_map(&self, ino: Ino, mut each: impl FnMut(&Map) -> Result<()>) -> Result<()> {
        let Some(file) = self.file(ino) else { return Ok(()) };
        let state = file.read();
        if state.size == 0 && state.extents.blocks() == 0 {
            return Ok(());
        }
        let all: Vec<Piece> = state.extents.all().collect();
        let mut from = 0;
        for pieces in chunks_or_one(&all) {
            let to = pieces.last().map_or(from, Piece::end);
            each(&Map { ino, size: state.size, from, to, pieces: pieces.to_vec() })?;
            from = to;
        }
        Ok(())
    }
}

/// The pieces in parts, or one empty part: a file of holes only has a size to be written down.
fn chunks_or_one(all: &[Piece]) -> impl Iterator<Item = &[Piece]> {
    let empty = all.is_empty().then_some(all);
    all.chunks(MAP_PIECES_MAX).chain(empty)
}

/// What a caller is told of a failure of the medium.
pub(crate) fn io_error(error: &io::Error) -> Errno {
    tracing::error!("the image failed: {error}");
    Errno::IO
}

/// The logical block that holds a byte.
pub(crate) fn block_of(offset: u64) -> u64 {
    offset / BLOCK_BYTES
}

/// Part of a block before a byte.
pub(crate) fn skip_of(offset: u64) -> usize {
    usize::try_from(offset % BLOCK_BYTES).unwrap_or(0) & (BLOCK - 1)
}
