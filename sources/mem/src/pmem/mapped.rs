//! Persistent memory, mapped: a file on a file system mounted with `-o dax`, or a device of `/dev/dax*`.
//!
//! The memory is the medium, and durable means written back from the CPU's caches. There is no page cache, so system
//! calls would not be cheaper. A mapping cannot report two errors: truncation of the file while it is mapped, and a
//! failing memory cell. Both kill the program with SIGBUS; the image is then as after a crash.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use rustix::fs::FileType;
use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags};

use super::dax;
use super::medium::Medium;

/// The alignment of `msync` addresses, in bytes.
const PAGE_BYTES: u64 = 4096;

/// All of a file, mapped and shared.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: this value owns the mapping, which is valid on every thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; the file system above locks each inode, and a block belongs to one inode, so no range is read while
// it is edited.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &File, bytes: u64, protection: ProtFlags, flags: MapFlags) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, bytes })
    }

    fn at(&self, offset: u64, bytes: usize) -> io::Result<NonNull<u8>> {
        let offset = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        match offset.checked_add(bytes) {
            // SAFETY: the offset lies within the mapping, which is one allocation.
            Some(end) if end <= self.bytes => Ok(unsafe { self.start.add(offset) }),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no slice of it outlives a call.
        if let Err(error) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) } {
            tracing::error!("unmapping an image failed: {error}");
        }
    }
}

/// Syncs ranges of a file, and no others: only the system call `msync` does that. The mapping is never accessed, so it
/// needs no memory and cannot fault.
#[derive(Debug)]
pub(crate) struct Flusher(Mapping);

impl Flusher {
    /// Creates a flusher for a file of this length.
    pub(crate) fn new(file: &File, bytes: u64) -> io::Result<Self> {
        Mapping::new(file, bytes, ProtFlags::empty(), MapFlags::SHARED).map(Self)
    }

    /// Makes a range durable.
    pub(crate) fn flush(&self, range: &Range<u64>) -> io::Result<()> {
        let start = range.start / PAGE_BYTES * PAGE_BYTES;
        let bytes = usize::try_from(range.end - start).map_err(|_| io::ErrorKind::InvalidInput)?;
        let address = self.0.at(start, bytes)?;
        // SAFETY: the range lies within the mapping; it changes no memory.
        Ok(unsafe { rustix::mm::msync(address.as_ptr().cast(), bytes, MsyncFlags::SYNC) }?)
    }
}

/// A mapped image.
#[derive(Debug)]
pub(crate) struct MappedMemory {
    mapping: Mapping,
    /// Keeps the lock on the image.
    _file: File,
}

/// How a file is mapped.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MapOptions {
    /// Only for looking at.
    pub(crate) read_only: bool,
    /// Ask for huge pages.
    pub(crate) huge: bool,
}

impl MappedMemory {
    /// Maps all of a file or device; `None` if it is not persistent memory.
    pub(crate) fn new(file: &File, options: MapOptions) -> io::Result<Option<Self>> {
        let device = FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode) == FileType::CharacterDevice;
        match dax::is_supported() {
            true => match Self::with(file, options, MapFlags::SHARED_VALIDATE | MapFlags::SYNC) {
                Ok(mapped) => Ok(Some(mapped)),
                // A DAX device cannot be accessed by read and write.
                Err(error) if device => Err(error),
                Err(_) => Ok(None),
            },
            false if device => Err(io::ErrorKind::Unsupported.into()),
            false => Ok(None),
        }
    }

    fn with(file: &File, options: MapOptions, flags: MapFlags) -> io::Result<Self> {
        let mut protection = ProtFlags::READ;
        if !options.read_only {
            protection |= ProtFlags::WRITE;
        }
        let mapping = Mapping::new(file, size_of(file)?, protection, flags)?;
        if options.huge {
            let (start, bytes) = (mapping.start.as_ptr().cast(), mapping.bytes);
            // SAFETY: the range is the mapping just made. Advice only: where huge pages are not to be had, small ones do.
            let _ = unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxHugepage) };
        }
        Ok(Self { mapping, _file: file.try_clone()? })
    }
}

impl Medium for MappedMemory {
    fn bytes(&self) -> u64 {
        self.mapping.bytes as u64
    }

    fn look(&self, offset: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        let start = self.mapping.at(offset, bytes)?;
        // SAFETY: the range is mapped and readable; nobody edits it meanwhile (see `Sync`). Another program that ignores
        // the lock on the image could, as with every mapping of a file.
        seen(unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes) });
        Ok(())
    }

    fn edit(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8]) -> usize) -> io::Result<usize> {
        let start = self.mapping.at(offset, bytes)?;
        // SAFETY: the range is mapped, and writable because a read-only image is never edited; nobody else looks at it
        // or edits it meanwhile (see `Sync`).
        Ok(fill(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) }))
    }

    fn persist(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        for range in ranges {
            let bytes = usize::try_from(range.end - range.start).map_err(|_| io::ErrorKind::InvalidInput)?;
            self.look(range.start, bytes, &mut dax::write_back)?;
        }
        dax::fence();
        Ok(())
    }
}

/// The size of a file, block device or DAX device.
pub(crate) fn size_of(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => u64::try_from(stat.st_size).map_err(io::Error::other),
        FileType::BlockDevice => Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?),
        FileType::CharacterDevice => {
            let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
            let text = std::fs::read_to_string(format!("/sys/dev/char/{major}:{minor}/size"))?;
            text.trim().parse().map_err(io::Error::other)
        }
        _ => Err(io::Error::from(io::ErrorKind::InvalidInput)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmem::device::reserve;

    /// Maps an ordinary file as if it were persistent memory.
    fn mapped(bytes: u64) -> MappedMemory {
        let file = tempfile::tempfile().unwrap();
        reserve(&file, bytes).unwrap();
        MappedMemory::with(&file, MapOptions::default(), MapFlags::SHARED).unwrap()
    }

    #[test]
    fn writes_are_seen_and_ranges_are_checked() {
        let mapped = mapped(8192);
        mapped.write(4090, b"across a page").unwrap();
        mapped.persist(&[0..1, 4090..4103]).unwrap();
        let mut seen = [0; 13];
        mapped.read(4090, &mut seen).unwrap();
        assert_eq!(&seen, b"across a page");
        for (offset, bytes) in [(8192, 1), (8191, 2), (u64::MAX, 1), (0, usize::MAX)] {
            assert!(mapped.look(offset, bytes, &mut |_| unreachable!()).is_err(), "{offset} {bytes}");
        }
    }
}
