//! A file or a device, mapped.
//!
//! A file on an ordinary file system and a block device are mapped through the page cache, and made durable by
//! `msync` or `fdatasync`. Where the mapping can be made with `MAP_SYNC` (a file on a file system mounted with `-o dax`,
//! or a device of `/dev/dax*`) the memory is the medium, and durable means written back from the CPU's caches.
//!
//! Two things are beyond what a mapping can report as an error: somebody who cuts the file short while it is mapped, and
//! a disk that fails while a page is read. Both end the program with SIGBUS; the image is then as after a crash.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, FileType};
use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags};

use super::dax;
use super::medium::Medium;

/// Address ranges given to `msync` begin at pages.
const PAGE_BYTES: u64 = 4096;

/// A mapped image.
#[derive(Debug)]
pub(crate) struct Mapped {
    file: File,
    start: NonNull<u8>,
    bytes: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Through the page cache: descriptors see the same bytes.
    Cached,
    /// The memory is the medium.
    Dax,
}

// SAFETY: the mapping belongs to this value until it is dropped, and does not depend on the thread.
unsafe impl Send for Mapped {}
// SAFETY: as above; that a range is not edited while it is looked at is up to the file system above, which locks
// each inode, and blocks belong to one inode at a time.
unsafe impl Sync for Mapped {}

/// How a file is to be mapped.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MapOptions {
    /// Only for looking at.
    pub(crate) read_only: bool,
    /// Ask for huge pages.
    pub(crate) huge: bool,
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

/// Gives a new file its size, with all its blocks: a mapping has no way to say "disk full" later.
pub(crate) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        // Where blocks cannot be reserved, a full disk means SIGBUS; better than no image at all.
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(bytes),
        result => Ok(result?),
    }
}

impl Mapped {
    /// Maps all of a file or device.
    pub(crate) fn new(file: File, options: MapOptions) -> io::Result<Self> {
        let bytes = usize::try_from(size_of(&file)?).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let device = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) == FileType::CharacterDevice;
        let mut protection = ProtFlags::READ;
        if !options.read_only {
            protection |= ProtFlags::WRITE;
        }
        let map = |flags| {
            // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, flags, &file, 0) }
        };
        let sync = match dax::is_supported() {
            true => map(MapFlags::SHARED_VALIDATE | MapFlags::SYNC),
            false => Err(rustix::io::Errno::OPNOTSUPP),
        };
        let (start, kind) = match sync {
            Ok(start) => (start, Kind::Dax),
            // A DAX device has no page cache and no msync to fall back on.
            Err(error) if device => return Err(error.into()),
            Err(_) => (map(MapFlags::SHARED)?, Kind::Cached),
        };
        let start: NonNull<u8> = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        if options.huge {
            // SAFETY: the range is the mapping just made. Advice only: where huge pages are not to be had, small ones do.
            let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        }
        Ok(Self { file, start, bytes, kind })
    }

    /// Whether the memory is the medium.
    pub(crate) fn is_dax(&self) -> bool {
        self.kind == Kind::Dax
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

impl Medium for Mapped {
    fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    fn look(&self, offset: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        let start = self.at(offset, bytes)?;
        // SAFETY: the range is mapped and readable; nobody edits it meanwhile (see `Sync`). Another program that ignores
        // the lock on the image could, as with every mapping of a file.
        seen(unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes) });
        Ok(())
    }

    fn edit(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) -> io::Result<()> {
        let start = self.at(offset, bytes)?;
        // SAFETY: the range is mapped, and writable because a read-only image is never edited; nobody else looks at it
        // or edits it meanwhile (see `Sync`).
        fill(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) });
        Ok(())
    }

    fn persist(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        match (self.kind, ranges) {
            (_, []) => Ok(()),
            (Kind::Dax, _) => {
                for range in ranges {
                    let bytes = usize::try_from(range.end - range.start).map_err(|_| io::ErrorKind::InvalidInput)?;
                    self.look(range.start, bytes, &mut dax::write_back)?;
                }
                dax::fence();
                Ok(())
            }
            (Kind::Cached, [range]) => {
                let start = range.start / PAGE_BYTES * PAGE_BYTES;
                let bytes = usize::try_from(range.end - start).map_err(|_| io::ErrorKind::InvalidInput)?;
                let address = self.at(start, bytes)?;
                // SAFETY: the range lies within the mapping.
                Ok(unsafe { rustix::mm::msync(address.as_ptr().cast(), bytes, MsyncFlags::SYNC) }?)
            }
            // Each msync ends with the disk's own flush: one call for all of them is cheaper.
            (Kind::Cached, _) => Ok(rustix::fs::fdatasync(&self.file)?),
        }
    }

    fn descriptor(&self) -> Option<OwnedFd> {
        match self.kind {
            Kind::Cached => self.file.as_fd().try_clone_to_owned().ok(),
            Kind::Dax => None,
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no slice of it outlives a call.
        if let Err(error) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) } {
            tracing::error!("unmapping an image failed: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_seen_by_descriptors_and_ranges_are_checked() {
        let file = tempfile::tempfile().unwrap();
        reserve(&file, 8192).unwrap();
        let mapped = Mapped::new(file, MapOptions::default()).unwrap();
        mapped.write(4090, b"across a page").unwrap();
        mapped.persist(&[4090..4103]).unwrap();
        mapped.persist(&[0..1, 5000..6000]).unwrap();
        let mut seen = [0; 13];
        rustix::io::pread(mapped.descriptor().unwrap(), &mut seen, 4090).unwrap();
        assert_eq!(&seen, b"across a page");
        for (offset, bytes) in [(8192, 1), (8191, 2), (u64::MAX, 1), (0, usize::MAX)] {
            assert!(mapped.look(offset, bytes, &mut |_| unreachable!()).is_err(), "{offset} {bytes}");
        }
    }
}
