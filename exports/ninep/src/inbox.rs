//! The received bytes of a client that no thread has served yet.

use std::time::Instant;

use ferry_wire::ninep::Frame;

/// Bytes per receive call. Memory for longer messages grows with the received bytes: an announced length must not
/// allocate any.
pub(crate) const RECEIVED_BYTES: usize = 64 << 10;

/// Received bytes that are not served yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    pub(crate) bytes: Vec<u8>,
    /// The beginning of the next message, and the end of the received bytes.
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Bytes on the client's account: the memory that is kept while no thread serves the connection.
    pub(crate) charged_bytes: usize,
    /// The time since which it has data, no message was taken, and the server did not delay that.
    pub(crate) since: Option<Instant>,
}

impl Inbox {
    /// The length of the next message, in bytes, if that is known.
    pub(crate) fn next(&self) -> Option<usize> {
        let head = self.bytes.get(self.start..self.end)?.first_chunk().copied()?;
        Some(usize::try_from(Frame::bytes(head)).unwrap_or(usize::MAX))
    }

    pub(crate) fn has_message(&self) -> bool {
        self.next().is_some_and(|bytes| bytes <= self.end - self.start)
    }

    /// Makes room for the next message, or for many short ones; returns where it ends.
    pub(crate) fn make_room(&mut self) -> usize {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let wanted = self.next().unwrap_or_default();
        let room = if wanted > RECEIVED_BYTES { wanted.min(self.end * 2 + RECEIVED_BYTES) } else { RECEIVED_BYTES };
        if self.bytes.len() < room {
            self.bytes.resize(room, 0);
        }
        room
    }

    /// Moves the next message, of this length, into a thread's memory.
    pub(crate) fn take(&mut self, bytes: usize, message: &mut Vec<u8>) {
        if bytes > RECEIVED_BYTES && self.start == 0 && self.end == bytes {
            std::mem::swap(&mut self.bytes, message);
        } else {
            message.clear();
            message.extend_from_slice(&self.bytes[self.start..self.start + bytes]);
        }
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }
}
