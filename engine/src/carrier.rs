//! The carrier of requests and replies, for every protocol.

use std::sync::Arc;

use ferry_vfs::{Backing, Extent, Input, Output};

use crate::transfers::Operation;

/// The memory of a reply: from offset 0 its header, then the payload, even if stored apart. One call may span both.
pub trait ReplyBuffer {
    /// Returns the maximum length of the reply in bytes, including the header.
    fn room(&self) -> usize;

    /// Copies bytes into the reply; returns how many fit. Returns 0 if the carrier has aborted the request (the client
    /// is gone, or got another reply). The caller then returns the reply's references to the source.
    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize;
}

/// A request in flight: its message, the memory of its reply, and its transfer.
pub trait Carrier: ReplyBuffer {
    /// Copies bytes of the message from `offset`; returns the number of bytes copied.
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize;

    /// Takes over the request's transfer. The handler calls it at most once, as its last action. The carrier completes
    /// the reply when the transfer ends.
    fn transfer(&mut self, request: TransferRequest);
}

/// A transfer that a handler leaves to its carrier.
#[derive(Debug)]
pub struct TransferRequest {
    /// What it does.
    pub operation: Operation,
    /// The file.
    pub file: Arc<Backing>,
    /// Its offset in the file, in bytes.
    pub file_offset: u64,
    /// Where its bytes begin: in the reply for a read, in the message for a write.
    pub at: usize,
    /// How many bytes.
    pub bytes: usize,
}

impl TransferRequest {
    /// Reads up to `bytes` of an extent into the reply at `at`.
    pub fn read(extent: Extent, at: usize, bytes: usize) -> Self {
        Self { operation: Operation::Read, file: extent.file, file_offset: extent.offset, at, bytes }
    }

    /// Writes `bytes` of the message from `at` to an extent. The last two parameters are those of [`Operation::Write`].
    pub fn write(extent: Extent, (at, bytes): (usize, usize), clear_privileges: bool, waits: bool) -> Self {
        let operation = Operation::Write { clear_privileges, waits };
        Self { operation, file: extent.file, file_offset: extent.offset, at, bytes }
    }

    /// Makes a file durable.
    pub fn fsync(file: Arc<Backing>, data_only: bool) -> Self {
        Self { operation: Operation::Fsync { data_only }, file, file_offset: 0, at: 0, bytes: 0 }
    }

    /// Whether it reads.
    pub fn is_read(&self) -> bool {
        self.operation == Operation::Read
    }
}

/// The part of a reply to which a source writes the data of a read.
#[derive(Debug)]
pub struct DataOutput<'a, C> {
    carrier: &'a mut C,
    head_bytes: usize,
    bytes_max: usize,
    done: usize,
}

impl<'a, C: ReplyBuffer> DataOutput<'a, C> {
    /// Creates an output of up to `bytes_max` bytes after the head of the reply.
    pub fn new(carrier: &'a mut C, head_bytes: usize, bytes_max: usize) -> Self {
        Self { carrier, head_bytes, bytes_max, done: 0 }
    }

    /// Returns the number of bytes written.
    pub fn done(&self) -> usize {
        self.done
    }
}

impl<C: ReplyBuffer> Output for DataOutput<'_, C> {
    fn put(&mut self, bytes: &[u8]) -> usize {
        let bytes = &bytes[..bytes.len().min(self.bytes_max - self.done)];
        let count = self.carrier.write_at(self.head_bytes + self.done, bytes);
        self.done += count;
        count
    }
}

/// The part of a message from which a source reads the data of a write.
#[derive(Debug)]
pub struct DataInput<'a, C> {
    carrier: &'a C,
    head_bytes: usize,
    bytes_max: usize,
    taken: usize,
}

impl<'a, C: Carrier> DataInput<'a, C> {
    /// Creates an input of the `bytes_max` bytes after the head of the message.
    pub fn new(carrier: &'a C, head_bytes: usize, bytes_max: usize) -> Self {
        Self { carrier, head_bytes, bytes_max, taken: 0 }
    }

    /// Returns the maximum number of bytes that the source can have written. A source that discards data need not read
    /// it; a source that has read some of it cannot have written more than that.
    pub fn written_max(&self) -> usize {
        if self.taken == 0 { self.bytes_max } else { self.taken }
    }
}

impl<C: Carrier> Input for DataInput<'_, C> {
    fn take(&mut self, bytes: &mut [u8]) -> usize {
        let most = bytes.len().min(self.bytes_max - self.taken);
        let count = self.carrier.read_at(self.head_bytes + self.taken, &mut bytes[..most]);
        self.taken += count;
        count
    }
}
