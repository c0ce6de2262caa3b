//! Writes replies.

use ferry_vfs::Errno;
use ferry_wire::fuse::{Negotiated, REPLY_HEAD_BYTES_MAX, Reply, SHORT_HEAD_BYTES_MAX, encode_error};

use crate::carrier::HEADER_BYTES;
use ferry_engine::ReplyBuffer;

/// Whether a reply was delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyOutcome {
    /// It was written.
    Whole(usize),
    /// The client gets an error of this many bytes instead, or nothing (0).
    Undelivered(usize),
}

impl ReplyOutcome {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Whole(bytes) | Self::Undelivered(bytes) => bytes,
        }
    }
}

/// Writes a reply; an error if the client left no room for it, or nothing.
pub(crate) fn write(
    buffer: &mut impl ReplyBuffer,
    unique: u64,
    session: &Negotiated,
    reply: &Reply<'_>,
) -> ReplyOutcome {
    // Clearing the longest head for each reply would take 20 ns.
    if reply.head_bytes_max() > SHORT_HEAD_BYTES_MAX {
        return write_head(buffer, unique, reply, reply.encode(unique, session, &mut [0; REPLY_HEAD_BYTES_MAX]));
    }
    write_head(buffer, unique, reply, reply.encode(unique, session, &mut [0; SHORT_HEAD_BYTES_MAX]))
}

/// Writes a reply with this head.
fn write_head(buffer: &mut impl ReplyBuffer, unique: u64, reply: &Reply<'_>, head: &[u8]) -> ReplyOutcome {
    let payload = reply.payload();
    let bytes = head.len() + payload.len();
    if buffer.room() < bytes {
        return ReplyOutcome::Undelivered(write_error(buffer, unique, Errno::IO));
    }
    let mut done = buffer.write_at(0, head);
    if done == head.len() && !payload.is_empty() {
        done += buffer.write_at(head.len(), payload);
    }
    if done == bytes { ReplyOutcome::Whole(bytes) } else { ReplyOutcome::Undelivered(0) }
}

/// Writes the header of a reply whose data is in place; returns the bytes of the whole reply.
pub(crate) fn write_data_head(buffer: &mut impl ReplyBuffer, unique: u64, data_bytes: usize) -> usize {
    match buffer.write_at(0, &Reply::encode_bytes_head(unique, data_bytes)) {
        HEADER_BYTES => HEADER_BYTES + data_bytes,
        _ => 0,
    }
}

/// Writes an error reply; returns its bytes.
pub(crate) fn write_error(buffer: &mut impl ReplyBuffer, unique: u64, errno: Errno) -> usize {
    let reply = encode_error(unique, errno);
    if buffer.room() >= HEADER_BYTES && buffer.write_at(0, &reply) == HEADER_BYTES { HEADER_BYTES } else { 0 }
}

/// Encodes a reply that the carrier writes later.
pub(crate) fn to_bytes(unique: u64, session: &Negotiated, outcome: Result<Reply<'_>, Errno>) -> Vec<u8> {
    match outcome {
        Ok(reply) => {
            let mut head = [0; REPLY_HEAD_BYTES_MAX];
            let mut bytes = reply.encode(unique, session, &mut head).to_vec();
            bytes.extend_from_slice(reply.payload());
            bytes
        }
        Err(errno) => encode_error(unique, errno).to_vec(),
    }
}

/// Converts a count for the wire.
pub(crate) fn count(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}
