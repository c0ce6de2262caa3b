//! The log of requests in flight, in memory that outlives this process (vhost-user, "Inflight I/O tracking").
//!
//! The front end requests the memory once (`GET_INFLIGHT_FD`), keeps it, and passes it to each server
//! (`SET_INFLIGHT_FD`). A server first serves the requests that its predecessor took and did not complete. Each queue
//! has its own region, written by its worker alone, in an order that loses no request wherever the process ends.
//!
//! Another process wrote the contents: every index is checked before use.

mod packed;
mod split;

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::{FileOffset, MmapRegion};

use crate::QUEUE_SIZE_MAX;
use crate::shared::Cells;
pub(crate) use packed::PackedLog;
pub(crate) use split::SplitLog;

/// The layout's version; 0: the region was never used.
const VERSION: u16 = 1;
/// The version of a region that [`SplitLog::record_migrated`] wrote, until the queue starts. No other server sees it.
const MIGRATED: u16 = 0x8001;
/// Regions are aligned to cache lines, so that workers share none.
const ALIGNMENT: usize = 64;
/// Header and entry of the packed ring's layout, the larger one: a region has room for either.
const HEADER_BYTES_MAX: usize = 32;
const ENTRY_BYTES_MAX: usize = 32;

/// The length of the note behind the regions, with the driver's settings; see [`Area::store_driver_state`]. It is an
/// extension: other servers ignore it.
const NOTE_BYTES: usize = ALIGNMENT;
/// Marks the note as written.
const NOTED: u64 = 1 << 63;

/// Offsets in both layouts (`QueueRegionSplit`, `QueueRegionPacked`).
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogError {
    #[error(
        "in-flight memory for {queues} queues of {size} entries: at most {queues_max} of {QUEUE_SIZE_MAX} are supported"
    )]
    Geometry { queues: u16, size: u16, queues_max: usize },
    #[error(
        "the in-flight memory of {bytes} bytes at offset {offset} is too short or of another server: {wanted} bytes are needed"
    )]
    Short { bytes: u64, offset: u64, wanted: usize },
    #[error("cannot make in-flight memory: {0}")]
    Make(std::io::Error),
    #[error("cannot map in-flight memory: {0}")]
    Map(vm_memory::mmap::MmapRegionError),
    #[error("the in-flight memory has version {0}, not {VERSION}; the front end must ask for new memory")]
    Version(u16),
    #[error("the in-flight memory is for queues of {kept} entries, this queue has {queue}")]
    Size { kept: u16, queue: u16 },
    #[error("the in-flight memory is inconsistent ({0}); the queue does not start, because requests may be lost")]
    Nonsense(&'static str),
}

/// The memory of all queues.
#[derive(Debug)]
pub(crate) struct Area {
    map: MmapRegion,
    queues: u16,
    size: u16,
    /// The offset of the note, if there is room for one.
    note_at: Option<usize>,
    /// The device keeps it, not the front end: the next front end may be of another guest.
    is_own: bool,
}

impl Area {
    /// Creates memory for a device of up to `queues_max` queues; returns its description for the front end.
    pub(crate) fn make(request: &VhostUserInflight, queues_max: usize) -> Result<(VhostUserInflight, File), LogError> {
        let bytes = area_bytes(request, queues_max)? + NOTE_BYTES;
        let make = || {
            let fd = memfd_create("ferry-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&fd, bytes as u64)?;
            // Truncation would be fatal to every process that has it mapped.
            fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
            Ok(File::from(fd))
        };
        let file = make().map_err(|error: rustix::io::Errno| LogError::Make(error.into()))?;
        Ok((VhostUserInflight::new(bytes as u64, 0, request.num_queues, request.queue_size), file))
    }

    /// Maps memory that the front end kept.
    pub(crate) fn open(kept: &VhostUserInflight, file: File, queues_max: usize) -> Result<Arc<Self>, LogError> {
        let wanted = area_bytes(kept, queues_max)?;
        let (bytes, offset) = (kept.mmap_size, kept.mmap_offset);
        let there = file.metadata().map_or(0, |metadata| metadata.len());
        let end = offset.checked_add(bytes).filter(|end| *end <= there && bytes >= wanted as u64);
        if end.is_none() || !offset.is_multiple_of(4096) {
            return Err(LogError::Short { bytes, offset, wanted });
        }
        // Memory of another server may have no note.
        let note_at = (bytes >= (wanted + NOTE_BYTES) as u64).then_some(wanted);
        let mapped = wanted + note_at.map_or(0, |_| NOTE_BYTES);
        let map = MmapRegion::from_file(FileOffset::new(file, offset), mapped).map_err(LogError::Map)?;
        Ok(Arc::new(Self { map, queues: kept.num_queues, size: kept.queue_size, note_at, is_own: false }))
    }

    /// Maps memory that the device kept itself.
    pub(crate) fn open_own(file: File, queues: usize) -> Result<Arc<Self>, LogError> {
        let bytes = file.metadata().map_or(0, |metadata| metadata.len());
        let VhostUserInflight { num_queues, queue_size, .. } = own(queues);
        let mut area = Self::open(&VhostUserInflight::new(bytes, 0, num_queues, queue_size), file, queues)?;
        Arc::get_mut(&mut area).expect("it was made just now").is_own = true;
        Ok(area)
    }

    fn note(&self) -> Option<Cells> {
        let start = self.map.as_ptr().wrapping_add(self.note_at?);
        // SAFETY: the mapping holds this many bytes from there on, and `self` keeps it alive for longer than the
        // callers use these cells; all others that map the file treat it as shared memory.
        Some(unsafe { Cells::new(start, NOTE_BYTES) })
    }

    /// Stores the driver's settings for the next server: front ends do not send them again.
    pub(crate) fn store_driver_state(&self, set: u32) {
        if let Some(note) = self.note() {
            note.store_u64(0, NOTED | u64::from(set), Ordering::Release);
        }
    }

    /// Returns the driver's settings when the previous server ended.
    pub(crate) fn driver_state(&self) -> Option<u32> {
        let note = self.note()?.load_u64(0, Ordering::Acquire);
        u32::try_from(note & !NOTED).ok().filter(|_| note & NOTED != 0)
    }

    /// Returns the region of a queue, if there is one.
    pub(crate) fn region(self: &Arc<Self>, queue: usize) -> Option<Region> {
        let queue = u16::try_from(queue).ok().filter(|queue| *queue < self.queues)?;
        let bytes = region_bytes(self.size);
        let start = self.map.as_ptr().wrapping_add(bytes * usize::from(queue));
        // SAFETY: the mapping holds `queues` regions of this many bytes; the region keeps it alive, and all others
        // that map the file treat it as shared memory.
        let cells = unsafe { Cells::new(start, bytes) };
        Some(Region { cells, entries: self.size, area: Arc::clone(self) })
    }

    /// Clears the log: the device was reset, and its rings are gone.
    pub(crate) fn clear(self: &Arc<Self>) {
        for region in (0..usize::from(self.queues)).filter_map(|queue| self.region(queue)) {
            region.cells.store_u16(VERSION_AT, 0, Ordering::Release);
        }
    }
}

fn region_bytes(size: u16) -> usize {
    (HEADER_BYTES_MAX + ENTRY_BYTES_MAX * usize::from(size)).next_multiple_of(ALIGNMENT)
}

fn area_bytes(request: &VhostUserInflight, queues_max: usize) -> Result<usize, LogError> {
    let (queues, size) = (request.num_queues, request.queue_size);
    let good = (1..=queues_max).contains(&usize::from(queues)) && (1..=QUEUE_SIZE_MAX).contains(&size);
    match good {
        true => Ok(region_bytes(size) * usize::from(queues)),
        false => Err(LogError::Geometry { queues, size, queues_max }),
    }
}

/// Creates in-flight memory for a device of this many queues, for [`Device::in_flight`](crate::Device::in_flight).
///
/// # Errors
/// Those of `memfd_create(2)` and `ftruncate(2)`.
pub fn in_flight_memory(queues: usize) -> std::io::Result<File> {
    let created = Area::make(&own(queues), queues);
    created.map(|(_, file)| file).map_err(std::io::Error::other)
}

/// Returns the request for memory that the device keeps itself.
fn own(queues: usize) -> VhostUserInflight {
    VhostUserInflight::new(0, 0, u16::try_from(queues).unwrap_or(u16::MAX), QUEUE_SIZE_MAX)
}

/// The part of one queue.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    cells: Cells,
    entries: u16,
    area: Arc<Area>,
}

// SAFETY: the memory stays mapped for as long as `area` lives, on any thread; all accesses are atomic.
unsafe impl Send for Region {}

impl Region {
    /// Returns whether it holds a log already, which must be for a queue of this size.
    fn is_valid(&self, queue: u16) -> Result<bool, LogError> {
        if queue > self.entries {
            return Err(LogError::Size { kept: self.entries, queue });
        }
        match self.cells.load_u16(VERSION_AT, Ordering::Acquire) {
            0 | MIGRATED => Ok(false),
            VERSION => match self.cells.load_u16(ENTRIES_AT, Ordering::Relaxed) {
                entries if entries == self.entries => Ok(true),
                kept => Err(LogError::Size { kept, queue }),
            },
            version => Err(LogError::Version(version)),
        }
    }

    /// Whether the log may belong to another guest, whose ring is gone.
    pub(crate) fn may_belong_to_other_guest(&self) -> bool {
        self.area.is_own
    }

    /// Whether it holds the chains of a guest that has migrated here, and the queue has not started.
    pub(crate) fn is_migrated(&self) -> bool {
        self.cells.load_u16(VERSION_AT, Ordering::Acquire) == MIGRATED
    }

    /// Clears the log, which belongs to a ring that is gone.
    pub(crate) fn reset(&self) {
        self.cells.store_u16(VERSION_AT, 0, Ordering::Release);
    }

    /// Makes the log valid; its contents are complete.
    fn set_valid(&self) {
        self.set_version(VERSION);
    }

    fn set_version(&self, version: u16) {
        self.cells.store_u16(ENTRIES_AT, self.entries, Ordering::Release);
        self.cells.store_u16(VERSION_AT, version, Ordering::Release);
    }
}

#[cfg(test)]
pub(crate) mod tests;
