//! Where a file's bytes are: in a descriptor, and optionally in this process's memory.
//!
//! This module declares unsafe methods, because memory is passed as addresses. It contains no unsafe code.
#![allow(unsafe_code, reason = "methods that take addresses are declared here")]

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::Result;

/// A piece of memory that bytes are moved from or to, laid out as `struct iovec`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Segment {
    /// First byte.
    pub address: *mut u8,
    /// Length in bytes.
    pub bytes: usize,
}

/// What a source may offer along with a descriptor when the file's bytes are in memory that it has mapped: a way to move
/// them without a system call. It must agree with the descriptor at all times, for either may be used at any moment.
///
/// An engine asks here first, on the thread that serves the request; so an implementation must not wait for a disk. The
/// file must have neither suid, sgid nor capabilities that a write would have to clear.
pub trait Memory: Send + Sync + Debug {
    /// Reads the bytes from `offset` on into the segments; returns how many, fewer than asked at the end of the file.
    /// `None` if they are not in memory now: nothing was moved, and `file` is to be read.
    ///
    /// # Safety
    /// The segments must be valid for writes until this returns. Others may access them meanwhile, so no reference to
    /// their bytes may be made.
    unsafe fn read(&self, file: BorrowedFd<'_>, offset: u64, to: &[Segment]) -> Option<Result<usize>>;

    /// Writes the bytes of the segments from `offset` on; returns how many. `None` if that cannot be done in memory
    /// now: nothing was moved, and `file` is to be written.
    ///
    /// # Safety
    /// The segments must be valid for reads until this returns. Others may change them meanwhile, so no reference to
    /// their bytes may be made.
    unsafe fn write(&self, file: BorrowedFd<'_>, offset: u64, from: &[Segment]) -> Option<Result<usize>>;

    /// Called when bytes were written through the descriptor and not by [`Self::write`], so that the source can update
    /// what it shows of the file.
    fn written(&self) {}
}

/// An open descriptor that bytes live in, with room for what an engine learns about transfers through it
/// (such as "buffered writes to this file system cannot be tried without waiting").
#[derive(Debug)]
pub struct Backing {
    fd: Arc<OwnedFd>,
    memory: Option<Arc<dyn Memory>>,
    io_hints: AtomicU8,
    waits: bool,
    long_lived: bool,
}

impl Backing {
    /// Wraps a descriptor without any hints.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd: Arc::new(fd), memory: None, io_hints: AtomicU8::new(0), waits: false, long_lived: false }
    }

    /// Wraps a descriptor whose bytes may also be reached in memory, at the same offsets.
    pub fn with_memory(fd: OwnedFd, memory: Arc<dyn Memory>) -> Self {
        Self { memory: Some(memory), ..Self::new(fd) }
    }

    /// Wraps a descriptor each of whose transfers waits for a device (`O_DIRECT`): none is tried at once, so that many
    /// can be under way.
    pub fn waiting(fd: OwnedFd) -> Self {
        Self { waits: true, ..Self::new(fd) }
    }

    /// Says that the descriptor stays open for as long as its source is served, as a disk's does. An engine may then
    /// make itself ready for many transfers through it, and hold it.
    pub fn long_lived(self) -> Self {
        Self { long_lived: true, ..self }
    }

    /// The same descriptor without its [memory](Self::memory), for transfers from and to where only the kernel is to
    /// look.
    #[must_use]
    pub fn without_memory(&self) -> Self {
        Self { memory: None, io_hints: AtomicU8::new(self.io_hints()), fd: Arc::clone(&self.fd), ..*self }
    }

    /// Whether the descriptor stays open for as long as its source is served.
    pub fn is_long_lived(&self) -> bool {
        self.long_lived
    }

    /// Whether each transfer waits for a device.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// The memory that the bytes are in.
    pub fn memory(&self) -> Option<&dyn Memory> {
        self.memory.as_deref()
    }

    /// The bits set so far; they are the engine's, sources do not look at them.
    pub fn io_hints(&self) -> u8 {
        self.io_hints.load(Ordering::Relaxed)
    }

    /// Adds bits for the next transfer to see.
    pub fn add_io_hints(&self, bits: u8) {
        self.io_hints.fetch_or(bits, Ordering::Relaxed);
    }
}

impl AsFd for Backing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Where bytes live: the range of the read or write, in this descriptor.
#[derive(Clone, Debug)]
pub struct Extent {
    /// The open descriptor, kept alive by whoever transfers.
    pub file: Arc<Backing>,
    /// Offset in the descriptor; `len` of the request follows on.
    pub offset: u64,
}

/// A piece of a file that never changes ([`crate::Mappable::map_pieces`]).
#[derive(Clone, Debug)]
pub enum Piece {
    /// In a descriptor that is open for reading only, so many bytes, from a page on. If the file ends within the last page, zeros
    /// follow there.
    Extent(Extent, u64),
    /// What is in no such place.
    Bytes(Vec<u8>),
}
