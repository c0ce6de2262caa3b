//! The guest's memory regions, mapped into this process.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::LazyLock;

use ferry_engine::{MemoryOwner, Segment};
use rustix::fs::{FsWord, MemfdFlags, OFlags, SealFlags, fcntl_get_seals, fstat, fstatfs, memfd_create};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{FileOffset, MmapRegion};

use crate::shared::Cells;
use crate::window::{self, FileId};

/// The most regions that QEMU uses; each is a mapping and a descriptor of this process.
pub(crate) const MEMORY_REGIONS_MAX: usize = 509;

/// Why memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error(
        "cannot map {bytes} bytes of guest memory at offset {offset} of the front end's file: {reason}; \
         share the guest's memory (QEMU: memory-backend-memfd with share=on)"
    )]
    Map { bytes: u64, offset: u64, reason: vm_memory::mmap::MmapRegionError },
    #[error("guest memory of {wanted} bytes lies in a file of {bytes} bytes: touching the rest would be fatal")]
    Short { wanted: u64, bytes: u64 },
    #[error("more than {MEMORY_REGIONS_MAX} regions of guest memory; give the guest its memory in fewer pieces")]
    TooMany,
    #[error("guest memory at {0:#x} overlaps another region")]
    Overlap(u64),
    #[error("guest memory of {bytes} bytes at {address:#x} is empty or passes the end of the address space")]
    Bounds { address: u64, bytes: u64 },
    #[error("there is no region of {bytes} bytes at {address:#x}")]
    Unknown { address: u64, bytes: u64 },
}

/// A mapped region.
#[derive(Debug)]
struct Region {
    guest_start: u64,
    user_start: u64,
    bytes: u64,
    map: MmapRegion,
    nature: Nature,
}

/// How a region's file may be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Nature {
    /// The guest's memory.
    Memory,
    /// A file that was added later and that another process can truncate: memory (a hot-plugged DIMM), or a file in
    /// the window of another process. The kernel copies from and to it; rings may lie in it.
    Added,
    /// A file in a window. It may be read-only, and another process may truncate it: access beyond its end is SIGBUS,
    /// except by the kernel. Rings must not lie in it.
    Window,
}

impl Nature {
    fn of(file: &File, id: Option<FileId>, was_added: bool) -> Self {
        let is_readable_only =
            rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags & OFlags::ACCMODE == OFlags::RDONLY);
        if is_readable_only || id.is_some_and(window::is_known) {
            return Self::Window;
        }
        if was_added && !is_stable(file) { Self::Added } else { Self::Memory }
    }
}

/// Whether only the front end can truncate a file: it is sealed (QEMU's), or a memfd, which has no name that others
/// could open. For other files in memory this is unknown: they can be shared like any file, and may have been
/// unlinked.
fn is_stable(file: &File) -> bool {
    /// The device of all memfds.
    static MEMFDS: LazyLock<Option<u64>> = LazyLock::new(|| {
        let one = memfd_create("ferry-device", MemfdFlags::CLOEXEC).ok()?;
        Some(fstat(one).ok()?.st_dev)
    });
    let is_sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    is_sealed || MEMFDS.is_some_and(|device| fstat(file).is_ok_and(|stat| stat.st_dev == device))
}

/// Whether a file lies in memory (tmpfs, which memfds are on too, or huge pages) and not on a disk.
fn is_in_memory(file: &File) -> bool {
    const TMPFS: FsWord = 0x0102_1994;
    const HUGETLBFS: FsWord = 0x9584_58f6;
    fstatfs(file).is_ok_and(|fs| [TMPFS, HUGETLBFS].contains(&fs.f_type))
}

/// An immutable set of regions; a change creates a new set.
#[derive(Debug, Default, Clone)]
pub(crate) struct Memory {
    /// Sorted by guest address, not overlapping.
    regions: Vec<std::sync::Arc<Region>>,
}

impl Memory {
    /// Returns this memory with another region; `was_added`: the guest runs already.
    pub(crate) fn with(
        &self,
        region: &VhostUserMemoryRegion,
        file: File,
        was_added: bool,
    ) -> Result<Self, MemoryError> {
        let (guest_start, user_start) = (region.guest_phys_addr, region.user_addr);
        let (bytes, offset) = (region.memory_size, region.mmap_offset);
        let wraps = [guest_start, user_start, offset].iter().any(|start| start.checked_add(bytes).is_none());
        if bytes == 0 || wraps {
            return Err(MemoryError::Bounds { address: guest_start, bytes });
        }
        let overlaps =
            self.regions.iter().any(|r| guest_start < r.guest_start + r.bytes && r.guest_start < guest_start + bytes);
        if overlaps {
            return Err(MemoryError::Overlap(guest_start));
        }
        if self.regions.len() >= MEMORY_REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        let was_added = was_added || self.is_apart(&file);
        let nature = Nature::of(&file, window::file_id(file.as_fd()).ok(), was_added);
        if nature != Nature::Window
            && let Ok(metadata) = file.metadata()
            && metadata.is_file()
            && metadata.len() < offset + bytes
        {
            return Err(MemoryError::Short { wanted: offset + bytes, bytes: metadata.len() });
        }
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let map = map(file, offset, size, nature).map_err(|reason| MemoryError::Map { bytes, offset, reason })?;
        let mut regions = self.regions.clone();
        regions.push(std::sync::Arc::new(Region { guest_start, user_start, bytes, map, nature }));
        regions.sort_by_key(|region| region.guest_start);
        Ok(Self { regions })
    }

    /// Whether a file is on a disk and the memory so far is not. It may be in the window of another process, which had it before
    /// this device had a guest. (A guest whose memory is on a disk has all of it there.)
    fn is_apart(&self, file: &File) -> bool {
        let mut files = self.regions.iter().filter(|region| region.nature == Nature::Memory);
        let is_file = || file.metadata().is_ok_and(|metadata| metadata.is_file());
        files.any(|region| region.map.file_offset().is_some_and(|at| is_in_memory(at.file())))
            && is_file()
            && !is_in_memory(file)
    }

    /// Returns this memory without the region at a guest address.
    pub(crate) fn without(&self, address: u64, bytes: u64) -> Result<Self, MemoryError> {
        let mut regions = self.regions.clone();
        let index = regions
            .iter()
            .position(|region| (region.guest_start, region.bytes) == (address, bytes))
            .ok_or(MemoryError::Unknown { address, bytes })?;
        regions.remove(index);
        Ok(Self { regions })
    }

    /// Whether the regions at this front-end address are the same mappings as in `before`. There may be several: only
    /// guest addresses do not overlap.
    pub(crate) fn has_same_mapping(&self, before: &Self, address: u64) -> bool {
        let of = |memory: &Self| -> Vec<*const Region> {
            let within = |region: &Region| address.checked_sub(region.user_start).is_some_and(|at| at < region.bytes);
            memory.regions.iter().filter(|region| within(region)).map(std::sync::Arc::as_ptr).collect()
        };
        let found = of(self);
        !found.is_empty() && found == of(before)
    }

    /// Returns the number of regions.
    pub(crate) fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Returns the mappings of all memory, except files in windows, with their owners.
    pub(crate) fn mapped(&self) -> impl Iterator<Item = (Segment, MemoryOwner)> {
        self.regions.iter().filter(|region| region.nature == Nature::Memory).map(|region| {
            let segment = Segment { address: region.map.as_ptr(), bytes: region.map.size() };
            (segment, std::sync::Arc::clone(region) as MemoryOwner)
        })
    }

    /// Adds the pieces of the guest-physical range `[address, address + bytes)` to `out`. Returns whether access may
    /// fault (see [`Chain::may_fault`](crate::Chain)); `None`: some of it is no memory.
    pub(crate) fn translate(&self, mut address: u64, mut bytes: u64, out: &mut Vec<Segment>) -> Option<bool> {
        let mut may_fault = false;
        while bytes > 0 {
            let after = self.regions.partition_point(|region| region.guest_start <= address);
            let region = after.checked_sub(1).and_then(|index| self.regions.get(index))?;
            let within = address - region.guest_start;
            if within >= region.bytes {
                return None;
            }
            may_fault |= region.nature != Nature::Memory;
            let piece = bytes.min(region.bytes - within);
            let (Ok(offset), Ok(length)) = (usize::try_from(within), usize::try_from(piece)) else { return None };
            let start = region.map.as_ptr().wrapping_add(offset);
            match out.last_mut() {
                // Pages of a long buffer are often adjacent: fewer pieces make shorter system calls.
                Some(last) if last.address.wrapping_add(last.bytes) == start => last.bytes += length,
                _ => out.push(Segment { address: start, bytes: length }),
            }
            bytes -= piece;
            let Some(next) = address.checked_add(piece) else { return (bytes == 0).then_some(may_fault) };
            address = next;
        }
        Some(may_fault)
    }

    /// Returns where the guest-physical range `[address, address + bytes)` is mapped, if it lies in one region that
    /// is no window.
    pub(crate) fn translate_whole(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let after = self.regions.partition_point(|region| region.guest_start <= address);
        let region = after.checked_sub(1).and_then(|index| self.regions.get(index))?;
        let within = address - region.guest_start;
        let fits = within <= region.bytes && bytes <= region.bytes - within && region.nature != Nature::Window;
        Some(region.map.as_ptr().wrapping_add(usize::try_from(within).ok().filter(|_| fits)?))
    }

    /// Translates a front-end address to a guest-physical one.
    pub(crate) fn guest_of_user(&self, address: u64) -> Option<u64> {
        let within = |region: &Region| address.checked_sub(region.user_start).filter(|within| *within < region.bytes);
        self.regions.iter().find_map(|region| Some(region.guest_start + within(region)?))
    }

    /// Returns the total length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).sum()
    }

    /// Visits each region: guest-physical address and length.
    pub(crate) fn each_region(&self, mut visit: impl FnMut(u64, u64)) {
        self.regions.iter().for_each(|region| visit(region.guest_start, region.bytes));
    }

    /// Translates a mapped piece to guest-physical addresses and lengths, as far as it is still guest memory.
    pub(crate) fn guest_parts(&self, piece: Segment, mut part: impl FnMut(u64, u64)) {
        let (mut address, mut left) = (piece.address.addr(), piece.bytes);
        while left > 0 {
            let within = |region: &Region| {
                let within = address.checked_sub(region.map.as_ptr().addr())?;
                (within < region.map.size()).then_some(within)
            };
            let Some((region, within)) = self.regions.iter().find_map(|region| Some((region, within(region)?))) else {
                return;
            };
            let bytes = left.min(region.map.size() - within);
            part(region.guest_start + within as u64, bytes as u64);
            address += bytes;
            left -= bytes;
        }
    }

    /// Returns the `bytes` bytes at a front-end address as cells, if they lie in one region and are aligned to
    /// `align` (a power of two). They must not outlive this memory.
    pub(crate) fn part(&self, address: u64, bytes: usize, align: u64) -> Option<Cells> {
        let start = self.translate_user(address, bytes as u64, align)?;
        // SAFETY: the translation is mapped for as long as this, which the ring keeps; the guest treats it as shared.
        Some(unsafe { Cells::new(start, bytes) })
    }

    fn translate_user(&self, address: u64, bytes: u64, align: u64) -> Option<*mut u8> {
        let region = self.regions.iter().find(|region| {
            region.nature != Nature::Window
                && address >= region.user_start
                && address - region.user_start <= region.bytes
                && bytes <= region.bytes - (address - region.user_start)
        })?;
        let offset = usize::try_from(address - region.user_start).ok()?;
        let pointer = region.map.as_ptr().wrapping_add(offset);
        (pointer.addr() as u64).is_multiple_of(align).then_some(pointer)
    }
}

fn map(file: File, offset: u64, size: usize, nature: Nature) -> Result<MmapRegion, vm_memory::mmap::MmapRegionError> {
    let can_write = nature != Nature::Window
        || rustix::fs::fcntl_getfl(&file).is_ok_and(|flags| flags & OFlags::ACCMODE == OFlags::RDWR);
    let protection = if can_write { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
    let flags = libc::MAP_NORESERVE | libc::MAP_SHARED;
    let region = MmapRegion::build(Some(FileOffset::new(file, offset)), size, protection, flags)?;
    // SAFETY: the range is the mapping that was just made, and the advice changes nothing but core dumps.
    let advised = unsafe { rustix::mm::madvise(region.as_ptr().cast(), size, rustix::mm::Advice::LinuxDontDump) };
    if let Err(error) = advised {
        tracing::debug!("a core dump will contain guest memory: {error}");
    }
    Ok(region)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn memfd(bytes: u64) -> File {
        let fd = rustix::fs::memfd_create("ferry-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(bytes).unwrap();
        file
    }

    pub(crate) fn region(guest_phys_addr: u64, memory_size: u64) -> VhostUserMemoryRegion {
        VhostUserMemoryRegion { guest_phys_addr, memory_size, user_addr: guest_phys_addr + 0x1000_0000, mmap_offset: 0 }
    }

    #[test]
    fn translates_across_neighbours_and_nothing_outside() {
        let memory = Memory::default()
            .with(&region(0x1000, 0x1000), memfd(0x1000), false)
            .and_then(|memory| memory.with(&region(0x2000, 0x2000), memfd(0x2000), false))
            .and_then(|memory| memory.with(&region(0x8000, 0x1000), memfd(0x1000), false))
            .unwrap();
        for (address, bytes, good) in [
            (0x1000u64, 0x1000u64, true),
            (0x1fff, 2, true),
            (0x1000, 0x3000, true),
            (0x1000, 0x3001, false),
            (0xfff, 1, false),
            (0x4000, 1, false),
            (0x8fff, 1, true),
            (0x8fff, 2, false),
            (u64::MAX, 1, false),
            (u64::MAX, u64::MAX, false),
            (0x1000, u64::MAX, false),
        ] {
            let mut out = Vec::new();
            assert_eq!(memory.translate(address, bytes, &mut out), good.then_some(false), "{address:#x}+{bytes:#x}");
            let total: usize = out.iter().map(|segment| segment.bytes).sum();
            assert!(!good || total as u64 == bytes);
        }
        for (address, bytes, good) in [
            (0x1000, 0x1000, true),
            (0x1000, 0x1001, false),
            (0x8ff0, 16, true),
            (0x8ff8, 16, false),
            (0xff8, 8, false),
        ] {
            assert_eq!(memory.translate_whole(address, bytes).is_some(), good, "{address:#x}+{bytes:#x}");
        }
        assert!(memory.translate_whole(u64::MAX, u64::MAX).is_none());
        assert!(memory.translate_user(0x1000_1000, 0x1000, 16).is_some());
        assert!(memory.translate_user(0x1000_1000, 0x1001, 16).is_none());
        assert!(memory.translate_user(0x1000_1008, 16, 16).is_none());
        assert!(memory.translate_user(u64::MAX, 1, 1).is_none());
        assert!(matches!(
            memory.with(&region(0x1800, 0x1000), memfd(0x1000), false),
            Err(MemoryError::Overlap(0x1800))
        ));
        assert!(matches!(memory.with(&region(0x10000, 0x2000), memfd(0x1000), false), Err(MemoryError::Short { .. })));
        assert!(memory.without(0x2000, 0x2000).unwrap().translate_user(0x1000_2000, 1, 1).is_none());
        assert!(memory.without(0x2000, 0x1000).is_err());
    }

    /// `ADD_MEM_REG` may contain any numbers.
    #[test]
    fn regions_that_are_empty_or_wrap_around_are_refused() {
        let memory = Memory::default().with(&region(0, 0x1000), memfd(0x1000), false).unwrap();
        let good = region(0x10000, 0x1000);
        let top = u64::MAX - 0xfff;
        for bad in [
            VhostUserMemoryRegion { memory_size: 0, ..good },
            VhostUserMemoryRegion { guest_phys_addr: top, memory_size: 0x2000, ..good },
            VhostUserMemoryRegion { user_addr: top, memory_size: 0x2000, ..good },
            VhostUserMemoryRegion { mmap_offset: top, memory_size: 0x2000, ..good },
        ] {
            assert!(matches!(memory.with(&bad, memfd(0x2000), false), Err(MemoryError::Bounds { .. })));
        }
    }

    /// A ring lies in one of the regions at its address; the others must not count for it.
    #[test]
    fn a_ring_stays_only_if_all_regions_at_its_address_do() {
        let at = |guest, bytes| VhostUserMemoryRegion { user_addr: 0x10000, ..region(guest, bytes) };
        let short = Memory::default().with(&at(0, 0x1000), memfd(0x1000), false).unwrap();
        let both = short.with(&at(0x10_0000, 0x10000), memfd(0x10000), true).unwrap();
        assert!(both.translate_user(0x10400, 0x8000, 4).is_some() && both.has_same_mapping(&both.clone(), 0x10400));
        let without_long = both.without(0x10_0000, 0x10000).unwrap();
        assert!(!without_long.has_same_mapping(&both, 0x10400) && !both.has_same_mapping(&short, 0x10400));
        assert!(!Memory::default().has_same_mapping(&Memory::default(), 0x10400));
        assert!(both.has_same_mapping(&without_long, 0x5000) == both.has_same_mapping(&both.clone(), 0x5000));
    }

    #[test]
    fn memory_that_can_be_truncated_may_fault_once_the_guest_runs() {
        let named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        named.as_file().set_len(0x1000).unwrap();
        let sealed = File::from(
            rustix::fs::memfd_create("ferry-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap(),
        );
        sealed.set_len(0x1000).unwrap();
        rustix::fs::fcntl_add_seals(&sealed, SealFlags::SHRINK).unwrap();
        for (what, file, may_fault) in [
            ("on tmpfs", named.reopen().unwrap(), true),
            ("on tmpfs, without a name", tempfile::tempfile_in("/dev/shm").unwrap(), true),
            ("on a disk", tempfile::tempfile_in("/var/tmp").unwrap(), true),
            ("a memfd", memfd(0x1000), false),
            ("sealed", sealed, false),
        ] {
            for was_added in [false, true] {
                let file = file.try_clone().unwrap();
                if file.metadata().unwrap().len() < 0x1000 {
                    file.set_len(0x1000).unwrap();
                }
                let memory = Memory::default().with(&region(0x1000, 0x1000), file, was_added).unwrap();
                let found = memory.translate(0x1000, 0x1000, &mut Vec::new());
                assert_eq!(found, Some(may_fault && was_added), "{what}, added: {was_added}");
                // A ring may lie in any of these regions: they may be the guest's memory.
                assert!(memory.translate_whole(0x1000, 0x1000).is_some());
            }
        }
    }

    /// The window of another device may have it already when this one gets its guest's memory.
    #[test]
    fn a_file_on_a_disk_beside_memory_that_is_not_may_fault() {
        let on_disk = || {
            let file = tempfile::tempfile_in("/var/tmp").unwrap();
            file.set_len(0x1000).unwrap();
            file
        };
        if is_in_memory(&on_disk()) {
            return;
        }
        for (first, second, may_fault) in
            [(memfd(0x1000), on_disk(), true), (memfd(0x1000), memfd(0x1000), false), (on_disk(), on_disk(), false)]
        {
            let memory = Memory::default().with(&region(0x1000, 0x1000), first, false).unwrap();
            let memory = memory.with(&region(0x2000, 0x1000), second, false).unwrap();
            assert_eq!(memory.translate(0x1000, 0x1000, &mut Vec::new()), Some(false));
            assert_eq!(memory.translate(0x2000, 0x1000, &mut Vec::new()), Some(may_fault));
        }
    }
}
