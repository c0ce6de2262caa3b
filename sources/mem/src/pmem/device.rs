//! The second tier: a file read and written by system calls.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use super::mapped::size_of;
use super::medium::Medium;

/// A file or block device that is not mapped.
#[derive(Debug)]
pub(crate) struct Device {
    file: File,
    bytes: u64,
}

impl Device {
    /// Takes a file as it is.
    pub(crate) fn new(file: File) -> io::Result<Self> {
        let bytes = size_of(&file)?;
        Ok(Self { file, bytes })
    }

    fn check(&self, offset: u64, bytes: usize) -> io::Result<()> {
        match offset.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

impl Medium for Device {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn look(&self, offset: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        self.check(offset, bytes)?;
        let mut buffer = vec![0; bytes];
        self.file.read_exact_at(&mut buffer, offset)?;
        seen(&buffer);
        Ok(())
    }

    fn edit(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) -> io::Result<()> {
        self.check(offset, bytes)?;
        let mut buffer = vec![0; bytes];
        self.file.read_exact_at(&mut buffer, offset)?;
        fill(&mut buffer);
        self.file.write_all_at(&buffer, offset)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.check(offset, bytes.len())?;
        self.file.write_all_at(bytes, offset)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        if ranges.is_empty() { Ok(()) } else { self.file.sync_data() }
    }

    fn descriptor(&self) -> Option<OwnedFd> {
        self.file.as_fd().try_clone_to_owned().ok()
    }
}
