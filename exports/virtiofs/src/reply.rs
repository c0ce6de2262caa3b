//! Writing replies into chains.

use ferry_vfs::{Errno, Input, Output};
use ferry_vhost::Chain;
use ferry_wire::fuse::{Negotiated, REPLY_HEAD_BYTES_MAX, Reply, encode_error};

/// A reply's header (FUSE protocol 7.45, `fuse_out_header`).
pub(crate) const HEADER_BYTES: usize = 16;

/// Writes a reply; answers the bytes written. A driver that left no room for it gets an error, or nothing.
pub(crate) fn write(chain: &Chain, unique: u64, session: &Negotiated, reply: &Reply<'_>) -> u32 {
    let mut head = [0; REPLY_HEAD_BYTES_MAX];
    let head = reply.encode(unique, session, &mut head);
    let payload = reply.payload();
    if chain.writable_bytes() < head.len() + payload.len() {
        return write_error(chain, unique, Errno::IO);
    }
    chain.write_at(0, head);
    chain.write_at(head.len(), payload);
    written(head.len() + payload.len())
}

/// Writes an error reply.
pub(crate) fn write_error(chain: &Chain, unique: u64, errno: Errno) -> u32 {
    let reply = encode_error(unique, errno);
    match chain.writable_bytes() {
        HEADER_BYTES.. => written(chain.write_at(0, &reply)),
        _ => 0,
    }
}

/// A reply to be written later, by the worker.
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

pub(crate) fn written(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// The part of a chain where the data of a READ goes.
pub(crate) struct ChainOutput<'a> {
    pub(crate) chain: &'a Chain,
    pub(crate) done: usize,
    pub(crate) bytes_max: usize,
}

impl Output for ChainOutput<'_> {
    fn put(&mut self, bytes: &[u8]) -> usize {
        let bytes = &bytes[..bytes.len().min(self.bytes_max - self.done)];
        let count = self.chain.write_at(HEADER_BYTES + self.done, bytes);
        self.done += count;
        count
    }
}

/// The part of a chain where the data of a WRITE is.
pub(crate) struct ChainInput<'a> {
    pub(crate) chain: &'a Chain,
    pub(crate) offset: usize,
    pub(crate) left: usize,
}

impl Input for ChainInput<'_> {
    fn take(&mut self, bytes: &mut [u8]) -> usize {
        let most = bytes.len().min(self.left);
        let count = self.chain.read_at(self.offset, &mut bytes[..most]);
        self.offset += count;
        self.left -= count;
        count
    }
}
