//! What carries requests and replies, for every protocol.

use std::sync::Arc;

use ferry_vfs::{Backing, Extent, Input, Output};

use crate::transfers::Operation;

/// Where a reply is written. Offset 0 is its header; all that follows comes right behind it, wherever the carrier
/// keeps the two. One call may span both.
pub trait ReplyBuffer {
    /// The longest reply that there is room for, in bytes, the header included.
    fn room(&self) -> usize;

    /// Copies bytes in; returns how many there was room for. A carrier that has given up on the request meanwhile
    /// (its client is gone, or was told something else) returns 0, and what the reply would have handed out is given
    /// back to the source.
    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize;
}

/// One request under way: its bytes, the room for its reply, and the transfer on its behalf.
pub trait Carrier: ReplyBuffer {
    /// Copies bytes of the message out, from `offset` on; returns how many there were.
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize;

    /// Takes the transfer that the request is about. It is called at most once for a request, as the last thing; the reply is
    /// finished when the transfer has ended.
    fn transfer(&mut self, request: TransferRequest);
}

/// A transfer that a request leaves to its carrier.
#[derive(Debug)]
pub struct TransferRequest {
    /// What it does.
    pub operation: Operation,
    /// The file.
    pub file: Arc<Backing>,
    /// Where it begins in the file.
    pub file_offset: u64,
    /// Where its bytes begin: in the reply if it reads, in the message if it writes.
    pub at: usize,
    /// How many bytes.
    pub bytes: usize,
}

impl TransferRequest {
    /// Reads up to `bytes` of an extent into the reply, from `at` on.
    pub fn read(extent: Extent, at: usize, bytes: usize) -> Self {
        Self { operation: Operation::Read, file: extent.file, file_offset: extent.offset, at, bytes }
    }

    /// Writes `bytes` of the message, from `at` on, to an extent. The last two are those of [`Operation::Write`].
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

/// The part of a reply where a source puts the data of a read.
#[derive(Debug)]
pub struct DataOutput<'a, C> {
    carrier: &'a mut C,
    head_bytes: usize,
    bytes_max: usize,
    done: usize,
}

impl<'a, C: ReplyBuffer> DataOutput<'a, C> {
    /// Room for up to `bytes_max` bytes behind the head of the reply.
    pub fn new(carrier: &'a mut C, head_bytes: usize, bytes_max: usize) -> Self {
        Self { carrier, head_bytes, bytes_max, done: 0 }
    }

    /// How many bytes were put there.
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

/// The part of a message where a source takes the data of a write from.
#[derive(Debug)]
pub struct DataInput<'a, C> {
    carrier: &'a C,
    head_bytes: usize,
    bytes_max: usize,
    taken: usize,
}

impl<'a, C: Carrier> DataInput<'a, C> {
    /// The `bytes_max` bytes behind the head of the message.
    pub fn new(carrier: &'a C, head_bytes: usize, bytes_max: usize) -> Self {
        Self { carrier, head_bytes, bytes_max, taken: 0 }
    }

    /// The most that a source can have written of what it took. A source that throws data away need not look at it; one that
    /// has looked at some cannot have written more.
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
