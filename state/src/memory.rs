//! Memory that survives its writer: a sealed memfd, mapped as atomic integers.
#![allow(unsafe_code, reason = "a shared mapping; each block says why it is sound")]

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Memory that processes share, as a slice of 64-bit numbers that others may change at any time. It lives as long as one of them has
/// it mapped, or its file open.
#[derive(Debug)]
pub struct Memory {
    start: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping is valid on every thread and is only accessed as atomics.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Creates a file of this many words, all zero. It cannot shrink: that would kill processes that have it mapped.
    ///
    /// # Errors
    ///
    /// Memory or descriptors are short.
    pub fn file(words: usize) -> io::Result<File> {
        let fd = memfd_create("ferry-state", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, (words * size_of::<u64>()) as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(File::from(fd))
    }

    /// Maps a file of [`Self::file`] with exactly this many words.
    ///
    /// # Errors
    ///
    /// It is not such a file, or memory is short.
    pub fn map(file: &File, words: usize) -> io::Result<Self> {
        let bytes = words * size_of::<u64>();
        let is_sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !is_sealed || words == 0 || file.metadata()?.len() != bytes as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: the kernel chooses the address, so no other mapping is replaced; the descriptor is open.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file.as_fd(),
                0,
            )
        }?;
        let start = NonNull::new(start.cast::<AtomicU64>()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { start, words })
    }
}

impl Deref for Memory {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: this many words are mapped until `drop`, the file cannot shrink, a mapping is page-aligned, every bit
        // pattern is valid, and all processes access it by atomics.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was mapped by `map`, this is its only owner, and no slice outlives it.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.words * size_of::<u64>()) } {
            tracing::debug!("cannot unmap memory: {error}");
        }
    }
}
