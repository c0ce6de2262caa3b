//! What is in flight, in memory that outlives this process (vhost-user, "Inflight I/O tracking").
//!
//! The front end asks for the memory once (`GET_INFLIGHT_FD`), keeps it, and hands it to whichever server it talks
//! to (`SET_INFLIGHT_FD`). A server that finds requests in it which its predecessor took but never answered serves
//! them before anything new. Each queue has a region of its own in it, written by the queue's worker alone, and in an
//! order that leaves no request unaccounted for wherever the process ends.
//!
//! The memory's contents come from another process: every index in it is checked before it is used.

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

/// The layout's version; zero means that a region was never used.
const VERSION: u16 = 1;
/// Regions begin at cache lines, lest workers disturb each other.
const ALIGNMENT: usize = 64;
/// Header and entry of the larger layout, the packed ring's: a region has room for either.
const HEADER_BYTES_MAX: usize = 32;
const ENTRY_BYTES_MAX: usize = 32;

/// After the regions, with room of its own: what the driver has set, see [`Area::keep`]. The specification knows no such
/// thing; to other servers it is memory that nobody asks about.
const NOTE_BYTES: usize = ALIGNMENT;
/// Marks a note as written.
const NOTED: u64 = 1 << 63;

/// Where both layouts keep these (`QueueRegionSplit`, `QueueRegionPacked`).
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogError {
    #[error(
        "{queues} queues of {size} entries: in-flight memory is made for up to {queues_max} of up to {QUEUE_SIZE_MAX}"
    )]
    Geometry { queues: u16, size: u16, queues_max: usize },
    #[error(
        "the in-flight memory of {bytes} bytes at offset {offset} is too short or not ours: {wanted} bytes are needed"
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
    #[error("the in-flight memory makes no sense ({0}): requests may be lost, so that the queue does not start")]
    Nonsense(&'static str),
}

/// The memory of all queues.
#[derive(Debug)]
pub(crate) struct Area {
    map: MmapRegion,
    queues: u16,
    size: u16,
    /// Where the note is, if there is room for one.
    note_at: Option<usize>,
    /// The device keeps it, not the front end: whoever comes next may be another guest.
    is_own: bool,
}

impl Area {
    /// Makes memory for a device of up to `queues_max` queues, and tells the front end what it is.
    pub(crate) fn make(asked: &VhostUserInflight, queues_max: usize) -> Result<(VhostUserInflight, File), LogError> {
        let bytes = area_bytes(asked, queues_max)? + NOTE_BYTES;
        let make = || {
            let fd = memfd_create("ferry-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&fd, bytes as u64)?;
            // Nobody can make it shorter, which would be fatal to whoever has it mapped.
            fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
            Ok(File::from(fd))
        };
        let file = make().map_err(|error: rustix::io::Errno| LogError::Make(error.into()))?;
        Ok((VhostUserInflight::new(bytes as u64, 0, asked.num_queues, asked.queue_size), file))
    }

    /// Maps memory that the front end has kept.
    pub(crate) fn open(kept: &VhostUserInflight, file: File, queues_max: usize) -> Result<Arc<Self>, LogError> {
        let wanted = area_bytes(kept, queues_max)?;
        let (bytes, offset) = (kept.mmap_size, kept.mmap_offset);
        let there = file.metadata().map_or(0, |metadata| metadata.len());
        let end = offset.checked_add(bytes).filter(|end| *end <= there && bytes >= wanted as u64);
        if end.is_none() || !offset.is_multiple_of(4096) {
            return Err(LogError::Short { bytes, offset, wanted });
        }
        // Another server may have made it.
        let note_at = (bytes >= (wanted + NOTE_BYTES) as u64).then_some(wanted);
        let mapped = wanted + note_at.map_or(0, |_| NOTE_BYTES);
        let map = MmapRegion::from_file(FileOffset::new(file, offset), mapped).map_err(LogError::Map)?;
        Ok(Arc::new(Self { map, queues: kept.num_queues, size: kept.queue_size, note_at, is_own: false }))
    }

    /// Maps memory that the device has kept itself.
    pub(crate) fn open_own(file: File, queues: usize) -> Result<Arc<Self>, LogError> {
        let bytes = file.metadata().map_or(0, |metadata| metadata.len());
        let VhostUserInflight { num_queues, queue_size, .. } = own(queues);
        let mut area = Self::open(&VhostUserInflight::new(bytes, 0, num_queues, queue_size), file, queues)?;
        Arc::get_mut(&mut area).expect("it was made just now").is_own = true;
        Ok(area)
    }

    fn note(&self) -> Option<Cells> {
        let start = self.map.as_ptr().wrapping_add(self.note_at?);
        // SAFETY: the mapping holds so many bytes from there on, and `self` keeps it alive for longer than the callers use
        // these cells; all others who have the file mapped know it as shared memory.
        Some(unsafe { Cells::new(start, NOTE_BYTES) })
    }

    /// Keeps what the driver has set for whoever serves it next: front ends do not say it again.
    pub(crate) fn keep(&self, set: u32) {
        if let Some(note) = self.note() {
            note.store_u64(0, NOTED | u64::from(set), Ordering::Release);
        }
    }

    /// What the driver had set when its server before us ended.
    pub(crate) fn driver_state(&self) -> Option<u32> {
        let note = self.note()?.load_u64(0, Ordering::Acquire);
        u32::try_from(note & !NOTED).ok().filter(|_| note & NOTED != 0)
    }

    /// The region of a queue, if there is one.
    pub(crate) fn region(self: &Arc<Self>, queue: usize) -> Option<Region> {
        let queue = u16::try_from(queue).ok().filter(|queue| *queue < self.queues)?;
        let bytes = region_bytes(self.size);
        let start = self.map.as_ptr().wrapping_add(bytes * usize::from(queue));
        // SAFETY: the mapping holds `queues` regions of this many bytes; the region keeps it alive, and all others
        // who have the file mapped know it as shared memory.
        let cells = unsafe { Cells::new(start, bytes) };
        Some(Region { cells, entries: self.size, area: Arc::clone(self) })
    }

    /// Forgets what was in flight: the device was reset, and its rings are gone.
    pub(crate) fn clear(self: &Arc<Self>) {
        for region in (0..usize::from(self.queues)).filter_map(|queue| self.region(queue)) {
            region.cells.store_u16(VERSION_AT, 0, Ordering::Release);
        }
    }
}

fn region_bytes(size: u16) -> usize {
    (HEADER_BYTES_MAX + ENTRY_BYTES_MAX * usize::from(size)).next_multiple_of(ALIGNMENT)
}

fn area_bytes(asked: &VhostUserInflight, queues_max: usize) -> Result<usize, LogError> {
    let (queues, size) = (asked.num_queues, asked.queue_size);
    let good = (1..=queues_max).contains(&usize::from(queues)) && (1..=QUEUE_SIZE_MAX).contains(&size);
    match good {
        true => Ok(region_bytes(size) * usize::from(queues)),
        false => Err(LogError::Geometry { queues, size, queues_max }),
    }
}

/// Memory for what is in flight of a device of so many queues, for [`Device::in_flight`](crate::Device::in_flight).
///
/// # Errors
/// There is none left.
pub fn in_flight_memory(queues: usize) -> std::io::Result<File> {
    let made = Area::make(&own(queues), queues);
    made.map(|(_, file)| file).map_err(std::io::Error::other)
}

/// What a device asks of itself.
fn own(queues: usize) -> VhostUserInflight {
    VhostUserInflight::new(0, 0, u16::try_from(queues).unwrap_or(u16::MAX), QUEUE_SIZE_MAX)
}

/// One queue's part of the memory.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    cells: Cells,
    entries: u16,
    area: Arc<Area>,
}

// SAFETY: the memory stays mapped, wherever it is used from, for as long as `area` lives; all accesses are atomic.
unsafe impl Send for Region {}

impl Region {
    /// Whether a queue's log is in it already. It must be one for this queue.
    fn is_begun(&self, queue: u16) -> Result<bool, LogError> {
        if queue > self.entries {
            return Err(LogError::Size { kept: self.entries, queue });
        }
        match self.cells.load_u16(VERSION_AT, Ordering::Acquire) {
            0 => Ok(false),
            VERSION => match self.cells.load_u16(ENTRIES_AT, Ordering::Relaxed) {
                entries if entries == self.entries => Ok(true),
                kept => Err(LogError::Size { kept, queue }),
            },
            version => Err(LogError::Version(version)),
        }
    }

    /// Whether it may be that of another guest, whose ring is gone.
    pub(crate) fn may_belong_to_other_guest(&self) -> bool {
        self.area.is_own
    }

    /// Forgets what is in it: it is that of a ring that is gone.
    pub(crate) fn forget(&self) {
        self.cells.store_u16(VERSION_AT, 0, Ordering::Release);
    }

    /// The rest is filled in: from now on it counts.
    fn begun(&self) {
        self.cells.store_u16(ENTRIES_AT, self.entries, Ordering::Release);
        self.cells.store_u16(VERSION_AT, VERSION, Ordering::Release);
    }
}

#[cfg(test)]
pub(crate) mod tests;
