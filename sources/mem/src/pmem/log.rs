//! The log: records are buffered in memory and written together.
//!
//! A flush first syncs the bytes of newly allocated blocks, then the records that make those blocks reachable, so a
//! crash never exposes previous contents of a block. Callers of [`Log::sync`] during a flush wait for it, and then one
//! of them flushes for all (group commit).
#![forbid(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Result};

use super::extents::Run;
use super::format::{BLOCK, BLOCK_BYTES, PAYLOAD_BYTES_MAX, Superblock, push_record, record_bytes};
use super::medium::{Medium, Ranges};

/// Buffered records of at least this size are written, but not synced.
const PENDING_BYTES_MAX: usize = 1 << 20;

/// The approximate length of a snapshot's records: long enough to make their headers negligible.
const SNAPSHOT_PAYLOAD_BYTES: usize = PAYLOAD_BYTES_MAX / 4;

/// Metadata with less room for growth counts as full, in bytes: the record of a large write needs about as much.
const FULL_BYTES: u64 = 8 << 10;

/// The number of records appended since the mount, up to and including one of them.
pub(crate) type Ticket = u64;

/// The log of a mounted image.
#[derive(Debug)]
pub(crate) struct Log {
    medium: Arc<dyn Medium>,
    pending: Mutex<Pending>,
    /// Held for the length of a flush.
    writer: Mutex<Writer>,
    durable: AtomicU64,
    /// Free once a snapshot without them is durable: there was no room for their record.
    released_by_snapshot: Mutex<Vec<Run>>,
    /// Blocks that became free and were not collected yet.
    released: Mutex<Vec<Run>>,
    /// After an error it is unknown what is durable, so every operation that depends on it fails.
    failed: AtomicBool,
}

#[derive(Debug)]
struct Pending {
    superblock: Superblock,
    bytes: Vec<u8>,
    next_index: u64,
    /// Stale data follow the last valid record, so nothing is appended before a new log begins.
    is_mounting: bool,
    appended: Ticket,
    /// Bytes of the area that are written, pending or reserved.
    used: u64,
    /// [`Self::used`] after the last snapshot.
    used_by_snapshot: u64,
    /// Must be durable before the records.
    before: Ranges,
    /// Must be durable together with the records.
    along: Ranges,
    /// Free once the records are durable.
    freed: Vec<Run>,
}

#[derive(Debug)]
struct Writer {
    position: u64,
}

/// Room in the log for one future record.
#[derive(Debug)]
#[must_use]
pub(crate) struct Reservation(u64);

/// Effects of a record.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Newly allocated blocks that it makes reachable, as ranges of the medium.
    pub(crate) before: Ranges,
    /// Blocks that it frees.
    pub(crate) freed: Vec<Run>,
    /// Bytes that a snapshot needs for it beyond its own length.
    pub(crate) more: u64,
}

/// The effect of a record on the size of the next snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// It makes the snapshot longer: refused when metadata takes three quarters of the area.
    Grows,
    /// It does not: it may use the rest, so that files can be removed from a full file system.
    Keeps,
}

impl Pending {
    fn is_full(&self) -> bool {
        self.used + FULL_BYTES > self.superblock.layout.log_bytes() / 4 * 3
    }
}

impl Log {
    /// Continues an existing log at this record and this byte of the area.
    pub(crate) fn new(medium: Arc<dyn Medium>, superblock: Superblock, next_index: u64, position: u64) -> Self {
        let pending = Pending {
            superblock,
            bytes: Vec::new(),
            next_index,
            is_mounting: true,
            appended: 0,
            used: position,
            used_by_snapshot: position,
            before: Ranges::default(),
            along: Ranges::default(),
            freed: Vec::new(),
        };
        Self {
            medium,
            pending: Mutex::new(pending),
            writer: Mutex::new(Writer { position }),
            durable: AtomicU64::new(0),
            released_by_snapshot: Mutex::default(),
            released: Mutex::default(),
            failed: AtomicBool::new(false),
        }
    }

    /// Reserves room for a record with a payload of at most this length.
    pub(crate) fn reserve(&self, payload_bytes: usize, growth: Growth) -> Result<Reservation> {
        if payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(Errno::NOSPC);
        }
        self.check()?;
        let bytes = record_bytes(payload_bytes) as u64;
        let mut pending = lock(&self.pending);
        let capacity = pending.superblock.layout.log_bytes();
        let limit = if growth == Growth::Grows { capacity / 4 * 3 } else { capacity };
        if pending.used + bytes > limit {
            return Err(Errno::NOSPC);
        }
        pending.used += bytes;
        Ok(Reservation(bytes))
    }

    /// Appends a record with reserved room.
    pub(crate) fn append(&self, reservation: Reservation, payload: &[u8], effects: Effects) -> Ticket {
        let mut guard = lock(&self.pending);
        let pending = &mut *guard;
        let sequence = pending.superblock.sequence(pending.next_index);
        push_record(&mut pending.bytes, pending.superblock.salt, sequence, payload);
        pending.next_index += 1;
        pending.appended += 1;
        pending.used += effects.more;
        pending.used -= reservation.0.saturating_sub(record_bytes(payload.len()) as u64);
        pending.before.add_all(effects.before);
        pending.freed.extend(effects.freed);
        let (ticket, full) = (pending.appended, pending.bytes.len() >= PENDING_BYTES_MAX && !pending.is_mounting);
        drop(guard);
        if full {
            // The next caller that requires durability gets the error.
            let _ = self.sync(ticket);
        }
        ticket
    }

    /// Gives room back.
    pub(crate) fn cancel(&self, reservation: Reservation) {
        lock(&self.pending).used -= reservation.0;
    }

    /// Adds blocks that become free once everything appended so far is durable.
    pub(crate) fn free(&self, runs: impl IntoIterator<Item = Run>) {
        lock(&self.pending).freed.extend(runs);
    }

    /// Returns the number of blocks that wait for the next flush.
    pub(crate) fn freed_blocks(&self) -> u64 {
        lock(&self.pending).freed.iter().map(|run| run.count).sum()
    }

    /// Adds blocks that only the next snapshot frees.
    pub(crate) fn free_by_snapshot(&self, runs: impl IntoIterator<Item = Run>) {
        lock(&self.released_by_snapshot).extend(runs);
    }

    /// Returns whether records that make metadata grow are refused.
    pub(crate) fn is_full(&self) -> bool {
        lock(&self.pending).is_full()
    }

    /// Adds ranges of the medium to sync with the next flush.
    pub(crate) fn flush_along(&self, ranges: Ranges) {
        lock(&self.pending).along.add_all(ranges);
    }

    /// Syncs all ranges of [`Self::flush_along`], including those that another thread is flushing.
    pub(crate) fn sync_along(&self) -> Result<()> {
        // A flush holds it until all is durable.
        let writer = lock(&self.writer);
        let nothing = lock(&self.pending).along.is_empty();
        drop(writer);
        if nothing { self.check() } else { self.sync(self.last()) }
    }

    /// Returns the ticket of the last record.
    pub(crate) fn last(&self) -> Ticket {
        lock(&self.pending).appended
    }

    /// Whether a record is durable.
    pub(crate) fn is_durable(&self, ticket: Ticket) -> bool {
        self.durable.load(Ordering::Acquire) >= ticket
    }

    /// Returns whether the log is so full that a snapshot is due and would help.
    pub(crate) fn wants_snapshot(&self) -> bool {
        let pending = lock(&self.pending);
        let capacity = pending.superblock.layout.log_bytes();
        let since = pending.used - pending.used_by_snapshot;
        let is_due = pending.used > capacity / 8 * 5 && since >= capacity / 16;
        // It frees what was removed since, and what the records of that take.
        is_due || pending.is_full() && since >= (capacity / 512).max(FULL_BYTES)
    }

    /// Whether the image is being loaded: nothing is written before that ends.
    pub(crate) fn is_mounting(&self) -> bool {
        lock(&self.pending).is_mounting
    }

    /// Returns the number of records in the active log.
    pub(crate) fn records(&self) -> u64 {
        lock(&self.pending).next_index
    }

    /// Returns an error if the log has failed.
    pub(crate) fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) { Err(Errno::IO) } else { Ok(()) }
    }

    /// Returns the blocks that became free since the last call.
    pub(crate) fn take_released(&self) -> Vec<Run> {
        std::mem::take(&mut *lock(&self.released))
    }

    /// Syncs everything appended up to `ticket`, and all ranges added so far.
    pub(crate) fn sync(&self, ticket: Ticket) -> Result<()> {
        let mut writer = lock(&self.writer);
        self.check()?;
        let mut pending = lock(&self.pending);
        let nothing = pending.along.is_empty() && pending.before.is_empty() && pending.freed.is_empty();
        if pending.is_mounting || nothing && self.is_durable(ticket) {
            return Ok(());
        }
        let (bytes, freed) = (std::mem::take(&mut pending.bytes), std::mem::take(&mut pending.freed));
        let (before, mut along) = (std::mem::take(&mut pending.before), std::mem::take(&mut pending.along));
        let (appended, generation, layout) =
            (pending.appended, pending.superblock.generation, pending.superblock.layout);
        drop(pending);
        let start = layout.log_offset(generation) + writer.position;
        let flush = || -> io::Result<()> {
            if !before.is_empty() {
                self.medium.persist(&before.into_sorted())?;
            }
            if !bytes.is_empty() {
                self.medium.write(start, &bytes)?;
                along.add(start..start + bytes.len() as u64);
            }
            self.medium.persist(&along.into_sorted())
        };
        flush().map_err(|error| self.fail(&error))?;
        writer.position += bytes.len() as u64;
        self.durable.store(appended, Ordering::Release);
        lock(&self.released).extend(freed);
        Ok(())
    }

    /// Begins a new log in the other area with the complete snapshot that `fill` writes. It includes the changes of
    /// pending records, which are then dropped. No record may be appended meanwhile. After an error the old log
    /// continues.
    pub(crate) fn restart(&self, fill: impl FnOnce(&mut SnapshotWriter<'_>) -> Result<()>) -> Result<()> {
        self.check()?;
        // Without a lock: only this call changes the superblock, and the area is not in use.
        let mut snapshot = SnapshotWriter::new(self, &lock(&self.pending).superblock);
        fill(&mut snapshot)?;
        let (next, bytes) = snapshot.finish()?;
        let mut writer = lock(&self.writer);
        self.check()?;
        let mut guard = lock(&self.pending);
        let pending = &mut *guard;
        let mut data = pending.before.clone();
        data.add_all(pending.along.clone());
        let write = || {
            self.medium.persist(&data.into_sorted())?;
            write_superblocks(&*self.medium, &next)
        };
        write().map_err(|error| self.fail(&error))?;
        pending.bytes = Vec::new();
        (pending.before, pending.along) = (Ranges::default(), Ranges::default());
        pending.superblock = next;
        pending.next_index = next.snapshot_records;
        pending.used = bytes;
        pending.used_by_snapshot = bytes;
        pending.is_mounting = false;
        writer.position = bytes;
        self.durable.store(pending.appended, Ordering::Release);
        let by_snapshot = std::mem::take(&mut *lock(&self.released_by_snapshot));
        let mut released = lock(&self.released);
        released.extend(by_snapshot);
        released.append(&mut pending.freed);
        Ok(())
    }

    /// Records that the medium failed.
    pub(crate) fn fail(&self, error: &io::Error) -> Errno {
        if !self.failed.swap(true, Ordering::AcqRel) {
            tracing::error!(
                "the image cannot be written ({error}): nothing more is made durable; unmount it and run fsck"
            );
        }
        Errno::IO
    }
}

/// Writes a snapshot to the inactive log area, a chunk at a time.
#[derive(Debug)]
pub(crate) struct SnapshotWriter<'a> {
    log: &'a Log,
    /// Counts the records.
    next: Superblock,
    /// Items of the incomplete record.
    payload: Vec<u8>,
    /// Complete records that are not written.
    records: Vec<u8>,
    /// Bytes of the area that are written.
    written: u64,
}

impl<'a> SnapshotWriter<'a> {
    fn new(log: &'a Log, current: &Superblock) -> Self {
        let next = Superblock {
            salt: random_u32(),
            generation: current.generation + 1,
            snapshot_records: 0,
            previous_records: current.snapshot_records,
            previous_salt: current.salt,
            ..*current
        };
        Self { log, next, payload: Vec::new(), records: Vec::new(), written: 0 }
    }

    /// Adds an item.
    pub(crate) fn put(&mut self, item: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        let before = self.payload.len();
        item(&mut self.payload);
        if self.payload.len() > PAYLOAD_BYTES_MAX {
            let long = self.payload.split_off(before);
            self.end_record()?;
            self.payload = long;
        }
        if self.payload.len() >= SNAPSHOT_PAYLOAD_BYTES { self.end_record() } else { Ok(()) }
    }

    fn end_record(&mut self) -> Result<()> {
        let sequence = self.next.sequence(self.next.snapshot_records);
        push_record(&mut self.records, self.next.salt, sequence, &self.payload);
        self.next.snapshot_records += 1;
        self.payload.clear();
        if self.records.len() >= PENDING_BYTES_MAX { self.write() } else { Ok(()) }
    }

    fn write(&mut self) -> Result<()> {
        let end = self.written + self.records.len() as u64;
        if end > self.next.layout.log_bytes() {
            return Err(Errno::NOSPC);
        }
        let start = self.next.layout.log_offset(self.next.generation) + self.written;
        self.log.medium.write(start, &self.records).map_err(|error| self.log.fail(&error))?;
        self.written = end;
        self.records.clear();
        Ok(())
    }

    /// Syncs the snapshot. Returns the superblock that activates it, and the used bytes of the area.
    fn finish(mut self) -> Result<(Superblock, u64)> {
        if !self.payload.is_empty() {
            self.end_record()?;
        }
        self.write()?;
        let start = self.next.layout.log_offset(self.next.generation);
        let persist = self.log.medium.persist(std::slice::from_ref(&(start..start + self.written)));
        persist.map_err(|error| self.log.fail(&error))?;
        Ok((self.next, self.written))
    }
}

/// Writes both copies of a superblock.
pub(crate) fn write_superblocks(medium: &dyn Medium, superblock: &Superblock) -> io::Result<()> {
    let block = superblock.encode();
    debug_assert_eq!(block.len(), BLOCK);
    for at in [0, BLOCK_BYTES] {
        medium.write(at, &block)?;
        medium.persist(std::slice::from_ref(&(at..at + BLOCK_BYTES)))?;
    }
    Ok(())
}

/// Returns an unpredictable number.
#[allow(clippy::cast_possible_truncation, reason = "half of it will do")]
pub(crate) fn random_u32() -> u32 {
    ferry_vfs::random_u64() as u32
}
