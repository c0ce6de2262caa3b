//! Prebuilt requests: constant parts are written once; only the offset, and a FUSE request's `unique`, change.

use crate::memory::{Buffer, PAGE_BYTES};
use crate::queue::descriptor;
use crate::ring::{Descriptor, WRITE};
use crate::{Error, Queue, Result};

/// Where a FUSE request's `unique` is (struct fuse_in_header).
const UNIQUE_AT: usize = 8;
/// Where the offset of a READ or WRITE is: behind the header and `fh`.
const OFFSET_AT: usize = 48;
/// Size of a FUSE request's header, which is a descriptor of its own, as Linux makes it.
const IN_HEADER_BYTES: usize = 40;
/// Size of a FUSE reply's header, which is a descriptor of its own too.
const OUT_HEADER_BYTES: usize = 16;

/// Where a block request's sector is (VIRTIO 1.3, 5.2.6).
const SECTOR_AT: usize = 8;
/// The unit of sectors, whatever the disk's blocks are.
pub(super) const SECTOR_BYTES: u64 = 512;
/// What stands in a block request's status until the device has written one (QEMU and Linux do the same).
const NO_STATUS: u32 = 0xff;

/// The protocol of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestProtocol {
    /// FUSE: headers on both sides, matched by `unique`.
    Fuse,
    /// virtio-blk: a header with a sector, one status byte at the end.
    Block,
}

impl RequestProtocol {
    /// Bytes of the request's first descriptor.
    fn head_bytes(self, template: &Template) -> usize {
        match self {
            Self::Fuse => IN_HEADER_BYTES,
            Self::Block => template.request.len(),
        }
    }

    /// Bytes of a reply without arguments and data.
    fn reply_bytes(self) -> usize {
        match self {
            Self::Fuse => OUT_HEADER_BYTES,
            Self::Block => 1,
        }
    }
}

/// Whether a request carries data, and which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    /// Arguments only.
    None,
    /// A READ's.
    In(usize),
    /// A WRITE's.
    Out(usize),
}

/// What one kind of request looks like.
#[derive(Debug, Clone)]
pub(super) struct Template {
    /// The protocol.
    pub(super) form: RequestProtocol,
    /// Header and arguments.
    pub(super) request: Vec<u8>,
    /// Bytes of the reply's arguments.
    pub(super) reply_args: usize,
    /// The data.
    pub(super) data: Data,
}

/// What the server answered: of a disk, `error` is the status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    len: u32,
    error: u32,
    unique: u64,
}

/// One request with its memory, used over and over.
#[derive(Debug)]
pub(super) struct Slot {
    form: RequestProtocol,
    request: Buffer,
    reply: Buffer,
    data: Option<Buffer>,
    _table: Option<Buffer>,
    /// The number that it is published under.
    pub(super) head: u16,
    /// What is pushed into a packed ring, which keeps no descriptors.
    pub(super) chain: Vec<Descriptor>,
    expected_len: u32,
    unique: u64,
    /// The offset of the request in flight.
    pub(super) offset: u64,
    /// When it was sent, in nanoseconds of the run.
    pub(super) sent_ns: u64,
}

impl Slot {
    /// Builds the request and its chain.
    pub(super) fn new(queue: &mut Queue, template: &Template) -> Result<Self> {
        let memory = queue.memory().clone();
        let alloc = |bytes: usize, align| memory.alloc(bytes, align).ok_or(Error::Memory(bytes));
        let form = template.form;
        let request = alloc(template.request.len(), 64)?;
        request.write(0, &template.request);
        let reply = alloc(form.reply_bytes() + template.reply_args, 64)?;
        let data = match template.data {
            Data::None => None,
            Data::In(bytes) | Data::Out(bytes) => Some(alloc(bytes, PAGE_BYTES)?),
        };
        let (chain, expected) = chain(template, &request, &reply, data.as_ref());
        let (chain, heads, table) = queue.place(chain)?;
        let head = heads[0];
        let expected_len = u32::try_from(expected).map_err(|_| Error::Memory(expected))?;
        let (unique, offset, sent_ns) = (0, 0, 0);
        Ok(Self { form, request, reply, data, _table: table, head, chain, expected_len, unique, offset, sent_ns })
    }

    /// Rewrites what differs from the request before.
    #[inline]
    pub(super) fn arm(&mut self, unique: u64, now_ns: u64) {
        (self.unique, self.sent_ns) = (unique, now_ns);
        match self.form {
            RequestProtocol::Fuse => self.request.store_u64(UNIQUE_AT, unique),
            RequestProtocol::Block => self.reply.store_u32(0, NO_STATUS),
        }
    }

    /// Aims a READ or WRITE at `offset`.
    #[inline]
    pub(super) fn aim(&mut self, offset: u64) {
        self.offset = offset;
        match self.form {
            RequestProtocol::Fuse => self.request.store_u64(OFFSET_AT, offset),
            RequestProtocol::Block => self.request.store_u64(SECTOR_AT, offset / SECTOR_BYTES),
        }
    }

    /// What was answered, if it is not what is expected.
    #[inline]
    pub(super) fn check(&self, used_len: u32) -> std::result::Result<(), Answer> {
        let answer = match self.form {
            RequestProtocol::Fuse => {
                let (len, error) = (self.reply.load_u32(0), self.reply.load_u32(4));
                Answer { len, error, unique: self.reply.load_u64(8) }
            }
            // The buffer is larger than its one byte; whatever else it holds is ours.
            RequestProtocol::Block => {
                Answer { len: self.expected_len, error: self.reply.load_u32(0) & 0xff, unique: self.unique }
            }
        };
        let expected = Answer { len: self.expected_len, error: 0, unique: self.unique };
        if answer == expected && used_len == self.expected_len { Ok(()) } else { Err(answer) }
    }

    /// Copies the data out, for a comparison.
    pub(super) fn read_data(&self, bytes: &mut [u8]) {
        if let Some(data) = &self.data {
            data.read(0, bytes);
        }
    }

    /// Replaces the data.
    pub(super) fn write_data(&self, bytes: &[u8]) {
        if let Some(data) = &self.data {
            data.write(0, bytes);
        }
    }

    /// What a failed [`Slot::check`] means.
    pub(super) fn explain(&self, answer: Answer, used_len: u32) -> String {
        let (Answer { len, error, unique }, expected) = (answer, self.expected_len);
        match self.form {
            RequestProtocol::Fuse => format!(
                "reply to the request at offset {}: error {}, length {len} (used: {used_len}, expected: {expected}), \
                 unique {unique} (expected: {})",
                self.offset,
                error.cast_signed(),
                self.unique
            ),
            RequestProtocol::Block if error == NO_STATUS => {
                format!("the request at offset {} was given back without a status", self.offset)
            }
            RequestProtocol::Block => format!(
                "the request at offset {}: status {error}, used length {used_len} (expected: {expected})",
                self.offset
            ),
        }
    }
}

/// The chain as Linux makes it, and the reply's length in all.
fn chain(template: &Template, request: &Buffer, reply: &Buffer, data: Option<&Buffer>) -> (Vec<Descriptor>, usize) {
    let form = template.form;
    let head = form.head_bytes(template);
    let args = template.request.len() - head;
    let mut chain = vec![descriptor(request.guest(), head, 0)];
    if args > 0 {
        chain.push(descriptor(request.guest() + head as u64, args, 0));
    }
    let data_at = data.map_or(0, |data| data.guest());
    if let Data::Out(bytes) = template.data {
        chain.push(descriptor(data_at, bytes, 0));
    }
    let mut expected = form.reply_bytes() + template.reply_args;
    let mut replies = vec![descriptor(reply.guest(), form.reply_bytes(), WRITE)];
    if template.reply_args > 0 {
        replies.push(descriptor(reply.guest() + form.reply_bytes() as u64, template.reply_args, WRITE));
    }
    if let Data::In(bytes) = template.data {
        // FUSE's header comes first, a disk's status last.
        let at = if form == RequestProtocol::Fuse { replies.len() } else { 0 };
        replies.insert(at, descriptor(data_at, bytes, WRITE));
        expected += bytes;
    }
    chain.extend(replies);
    (chain, expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn a_disk_reads_header_data_status() {
        let memory = Memory::new(1 << 20, 1).unwrap();
        let buffer = |bytes| memory.alloc(bytes, 64).unwrap();
        let (request, reply, data) = (buffer(16), buffer(1), buffer(512));
        let shape = |way| {
            let template = Template { form: RequestProtocol::Block, request: vec![0; 16], reply_args: 0, data: way };
            let (chain, expected) = chain(&template, &request, &reply, Some(&data));
            let pieces: Vec<_> = chain.iter().map(|piece| (piece.addr, piece.len, piece.flags & WRITE != 0)).collect();
            (pieces, expected)
        };
        let (head, status) = ((request.guest(), 16, false), (reply.guest(), 1, true));
        assert_eq!(shape(Data::In(512)), (vec![head, (data.guest(), 512, true), status], 513));
        assert_eq!(shape(Data::Out(512)), (vec![head, (data.guest(), 512, false), status], 1));
    }
}
