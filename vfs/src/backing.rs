//! The location of a file's bytes: a descriptor, and optionally memory of this process.
//!
//! This module declares unsafe methods, because memory is passed as addresses. It contains no unsafe code.
#![allow(unsafe_code, reason = "methods that take addresses are declared here")]

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::Result;

/// A piece of memory for a transfer, with the layout of `struct iovec`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Segment {
    /// First byte.
    pub address: *mut u8,
    /// Length in bytes.
    pub bytes: usize,
}

/// Moves bytes without a system call, for a source that has mapped the file's bytes into its memory. It must agree with
/// the descriptor at all times, because an export may use either at any time.
///
/// An export calls it first, on the thread that serves the request, so an implementation must not wait for a disk. The
/// file must not have suid, sgid or capabilities that a write would have to clear.
pub trait Memory: Send + Sync + Debug {
    /// Reads bytes from `offset` into the segments. Returns their number, which is less than requested at the end of the
    /// file, or the error of the read. `None` if they are not in memory now: nothing was moved, and the caller must read `file`.
    ///
    /// # Safety
    /// The segments must be valid for writes until this returns. Other threads may access them meanwhile, so no reference
    /// to their bytes may be created.
    unsafe fn read(&self, file: BorrowedFd<'_>, offset: u64, to: &[Segment]) -> Option<Result<usize>>;

    /// Writes the bytes of the segments at `offset`. Returns their number, or the error of the write. `None` if that is not possible in memory now:
    /// nothing was moved, and the caller must write to `file`.
    ///
    /// # Safety
    /// The segments must be valid for reads until this returns. Other threads may change them meanwhile, so no reference
    /// to their bytes may be created.
    unsafe fn write(&self, file: BorrowedFd<'_>, offset: u64, from: &[Segment]) -> Option<Result<usize>>;

    /// Called after bytes were written through the descriptor and not by [`Self::write`], so that the source can update
    /// the file's attributes.
    fn written(&self) {}
}

/// An open descriptor of a file's bytes, with hints that an engine stores about transfers through it (such as "buffered
/// writes to this file system may block").
#[derive(Debug)]
pub struct Backing {
    fd: Arc<OwnedFd>,
    memory: Option<Arc<dyn Memory>>,
    io_hints: AtomicU8,
    waits: bool,
    appends: bool,
    long_lived: bool,
}

impl Backing {
    /// Wraps a descriptor without any hints.
    pub fn new(fd: OwnedFd) -> Self {
        Self {
            fd: Arc::new(fd),
            memory: None,
            io_hints: AtomicU8::new(0),
            waits: false,
            appends: false,
            long_lived: false,
        }
    }

    /// Wraps a descriptor whose bytes are also in memory, at the same offsets.
    pub fn with_memory(fd: OwnedFd, memory: Arc<dyn Memory>) -> Self {
        Self { memory: Some(memory), ..Self::new(fd) }
    }

    /// Wraps a descriptor whose transfers all wait for a device (`O_DIRECT`): none is tried inline, so that many can run
    /// concurrently.
    pub fn waiting(fd: OwnedFd) -> Self {
        Self { waits: true, ..Self::new(fd) }
    }

    /// Wraps a descriptor that is open with `O_APPEND`: writes through it are made one by one, in their order.
    pub fn appending(fd: OwnedFd) -> Self {
        Self { appends: true, ..Self::new(fd) }
    }

    /// Marks the descriptor as open for as long as its source is served, as that of a disk. An engine may then register it
    /// for many transfers.
    pub fn long_lived(self) -> Self {
        Self { long_lived: true, ..self }
    }

    /// Returns the same descriptor without its [memory](Self::memory), for transfers to memory that only the kernel may
    /// access.
    #[must_use]
    pub fn without_memory(&self) -> Self {
        Self { memory: None, io_hints: AtomicU8::new(self.io_hints()), fd: Arc::clone(&self.fd), ..*self }
    }

    /// Returns whether the descriptor stays open for as long as its source is served.
    pub fn is_long_lived(&self) -> bool {
        self.long_lived
    }

    /// Returns whether all transfers wait for a device.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Returns whether writes are appended.
    pub fn appends(&self) -> bool {
        self.appends
    }

    /// Returns the memory that holds the bytes.
    pub fn memory(&self) -> Option<&dyn Memory> {
        self.memory.as_deref()
    }

    /// Returns the hints set so far. Only the engine uses them.
    pub fn io_hints(&self) -> u8 {
        self.io_hints.load(Ordering::Relaxed)
    }

    /// Adds hints for the next transfers: bits that only the engine defines.
    pub fn add_io_hints(&self, bits: u8) {
        self.io_hints.fetch_or(bits, Ordering::Relaxed);
    }
}

impl AsFd for Backing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The location of the range of a read or write in a descriptor.
#[derive(Clone, Debug)]
pub struct Extent {
    /// The open descriptor, kept alive by the transfer.
    pub file: Arc<Backing>,
    /// Offset in the descriptor, in bytes; the length is that of the request.
    pub offset: u64,
}

/// A piece of a file that never changes ([`crate::Mappable::map_pieces`]).
#[derive(Clone, Debug)]
pub enum Piece {
    /// A location in a read-only descriptor, at the start of a page, and a length in bytes. If the file ends within the
    /// last page, zeros follow there.
    Extent(Extent, u64),
    /// The bytes themselves.
    Bytes(Vec<u8>),
}
