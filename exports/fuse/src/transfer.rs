//! Reads, writes and fsyncs that a request leaves to its carrier.

use std::io;
use std::sync::Arc;

use ferry_engine::{Operation, Segment, Transfers};
use ferry_vfs::Backing;

/// What is to be moved, and where it is in the message or the reply.
pub(crate) struct Transfer {
    pub(crate) operation: Operation,
    pub(crate) file: Arc<Backing>,
    pub(crate) file_offset: u64,
    /// Offset in the message (writes) or the reply (reads), its header included.
    pub(crate) at: usize,
    pub(crate) bytes: usize,
}

impl Transfer {
    /// Makes the transfer on this thread, between the file and `memory`.
    ///
    /// # Safety
    /// The memory must be valid, and not accessed by anybody else, until this returns.
    pub(crate) unsafe fn run(self, transfers: &mut Transfers, memory: Option<Segment>) -> io::Result<usize> {
        // SAFETY: passed on to the caller; without a ring, a flush comes back when the transfer has ended.
        unsafe { transfers.queue(0, self.operation, self.file, self.file_offset, memory) };
        transfers.flush();
        transfers.next_done().map_or_else(|| Err(io::Error::other("a transfer without outcome")), |(_, outcome)| outcome)
    }

    /// The most threads would ask for without io_uring.
    pub(crate) fn is_read(&self) -> bool {
        self.operation == Operation::Read
    }
}
