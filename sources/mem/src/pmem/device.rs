//! A file or block device, accessed by system calls: most images, and all second tiers.
//!
//! It is not mapped, because a page that cannot be read, or is beyond the end of a truncated file, would kill the
//! program with SIGBUS. A system call returns an error.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;

use super::mapped::{Flusher, size_of};
use super::medium::Medium;

/// The maximum length of a thread's reusable buffer in bytes; longer ones are allocated per call.
const SCRATCH_BYTES_MAX: usize = 1 << 20;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Device {
    file: File,
    bytes: u64,
    /// Files can shrink; devices cannot, and have no size in their metadata.
    is_file: bool,
    /// Syncs a range without the rest of the file.
    flusher: Option<Flusher>,
}

/// Allocates all blocks of a new file, so that "disk full" is reported now and not by a later write.
pub(crate) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(bytes),
        result => Ok(result?),
    }
}

/// Calls `work` with a buffer of undefined contents.
fn with_scratch<T>(bytes: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    thread_local!(static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) });
    SCRATCH.with(|scratch| match scratch.try_borrow_mut() {
        Ok(mut scratch) if bytes <= SCRATCH_BYTES_MAX => {
            if scratch.len() < bytes {
                scratch.resize(bytes, 0);
            }
            work(&mut scratch[..bytes])
        }
        _ => work(&mut vec![0; bytes]),
    })
}

impl Device {
    /// Creates a medium on a file of the current size.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let bytes = size_of(&file)?;
        let is_file = file.metadata()?.is_file();
        let flusher = Flusher::new(&file, bytes).ok();
        Ok(Self { file, bytes, is_file, flusher })
    }

    fn check(&self, offset: u64, bytes: usize) -> io::Result<()> {
        match offset.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Refuses to write to a truncated file: it would grow again, with holes in place of its data.
    fn check_whole(&self) -> io::Result<()> {
        if self.is_file && size_of(&self.file)? < self.bytes {
            return Err(io::Error::other("the image was truncated while in use; restore it from a copy"));
        }
        Ok(())
    }
}

impl Medium for Device {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn look(&self, offset: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        self.check(offset, bytes)?;
        with_scratch(bytes, |buffer| {
            self.file.read_exact_at(buffer, offset)?;
            seen(buffer);
            Ok(())
        })
    }

    fn edit(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8]) -> usize) -> io::Result<usize> {
        self.check(offset, bytes)?;
        with_scratch(bytes, |buffer| {
            let filled = fill(buffer).min(bytes);
            self.write(offset, &buffer[..filled])?;
            Ok(filled)
        })
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.check(offset, bytes.len())?;
        self.file.read_exact_at(bytes, offset)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.check(offset, bytes.len())?;
        self.check_whole()?;
        self.file.write_all_at(bytes, offset)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        match (ranges, &self.flusher) {
            ([], _) => return Ok(()),
            ([range], Some(flusher)) => flusher.flush(range)?,
            // Each sync of a range ends with a flush of the disk, so one call for all of them is cheaper.
            _ => self.file.sync_data()?,
        }
        self.check_whole()
    }

    fn descriptor(&self) -> Option<OwnedFd> {
        self.file.as_fd().try_clone_to_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(bytes: u64) -> (File, Device) {
        let file = tempfile::tempfile().unwrap();
        reserve(&file, bytes).unwrap();
        (file.try_clone().unwrap(), Device::new(file).unwrap())
    }

    #[test]
    fn writes_are_seen_by_descriptors_and_ranges_are_checked() {
        let (_, device) = device(8192);
        device.write(4090, b"across a page").unwrap();
        let filled = device.edit(4094, 9, &mut |to| {
            to[..2].copy_from_slice(b"SS");
            2
        });
        assert_eq!(filled.unwrap(), 2);
        device.persist(std::slice::from_ref(&(4090..4103))).unwrap();
        device.persist(&[0..1, 5000..6000]).unwrap();
        let mut seen = [0; 13];
        rustix::io::pread(device.descriptor().unwrap(), &mut seen, 4090).unwrap();
        assert_eq!(&seen, b"acroSS a page");
        for (offset, bytes) in [(8192, 1), (8191, 2), (u64::MAX, 1), (0, usize::MAX)] {
            assert!(device.look(offset, bytes, &mut |_| unreachable!()).is_err(), "{offset} {bytes}");
        }
    }

    #[test]
    fn a_truncated_file_is_an_error_and_stays_truncated() {
        let (file, device) = device(1 << 20);
        file.set_len(4096).unwrap();
        assert!(device.look(0, 4096, &mut |_| {}).is_ok());
        assert!(device.look(8192, 4096, &mut |_| unreachable!()).is_err());
        assert!(device.write(8192, b"more").is_err());
        assert!(device.persist(std::slice::from_ref(&(0..4096))).is_err(), "what is durable is not all there");
        assert_eq!(file.metadata().unwrap().len(), 4096);
    }
}
