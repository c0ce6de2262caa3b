//! Prebuilt requests: what stays the same is written once; only `unique` and the offset change.

use crate::memory::{Buffer, PAGE_BYTES};
use crate::queue::descriptor;
use crate::ring::{Descriptor, WRITE};
use crate::{Error, Queue, Result};

/// Where a request's `unique` is (struct fuse_in_header).
const UNIQUE_AT: usize = 8;
/// Where the offset of a READ or WRITE is: behind the header and `fh`.
const OFFSET_AT: usize = 48;
/// Size of a request's header, which is a descriptor of its own, as Linux makes it.
const IN_HEADER_BYTES: usize = 40;
/// Size of a reply's header, which is a descriptor of its own too.
const OUT_HEADER_BYTES: usize = 16;

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
    /// Header and arguments.
    pub(super) request: Vec<u8>,
    /// Bytes of the reply's arguments.
    pub(super) reply_args: usize,
    /// The data.
    pub(super) data: Data,
}

/// What the server answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    len: u32,
    error: u32,
    unique: u64,
}

/// One request with its memory, used over and over.
#[derive(Debug)]
pub(super) struct Slot {
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
        let request = alloc(template.request.len(), 64)?;
        request.write(0, &template.request);
        let reply = alloc(OUT_HEADER_BYTES + template.reply_args, 64)?;
        let data = match template.data {
            Data::None => None,
            Data::In(bytes) | Data::Out(bytes) => Some(alloc(bytes, PAGE_BYTES)?),
        };
        let (chain, expected) = chain(template, &request, &reply, data.as_ref());
        let (chain, heads, table) = queue.place(chain)?;
        let head = heads[0];
        let expected_len = u32::try_from(expected).map_err(|_| Error::Memory(expected))?;
        Ok(Self { request, reply, data, _table: table, head, chain, expected_len, unique: 0, offset: 0, sent_ns: 0 })
    }

    /// Rewrites what differs from the request before.
    #[inline]
    pub(super) fn arm(&mut self, unique: u64, now_ns: u64) {
        (self.unique, self.sent_ns) = (unique, now_ns);
        self.request.store_u64(UNIQUE_AT, unique);
    }

    /// Aims a READ or WRITE at `offset`.
    #[inline]
    pub(super) fn aim(&mut self, offset: u64) {
        self.offset = offset;
        self.request.store_u64(OFFSET_AT, offset);
    }

    /// The reply's header if it is not the expected one.
    #[inline]
    pub(super) fn check(&self, used_len: u32) -> std::result::Result<(), Answer> {
        let (len, error, unique) = (self.reply.load_u32(0), self.reply.load_u32(4), self.reply.load_u64(8));
        if len == self.expected_len && used_len == len && error == 0 && unique == self.unique {
            return Ok(());
        }
        Err(Answer { len, error, unique })
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
        let Answer { len, error, unique } = answer;
        format!(
            "reply to the request at offset {}: error {}, length {len} (used: {used_len}, expected: {}), unique {unique} \
             (expected: {})",
            self.offset,
            error.cast_signed(),
            self.expected_len,
            self.unique
        )
    }
}

/// The chain as Linux makes it, and the reply's length in all.
fn chain(template: &Template, request: &Buffer, reply: &Buffer, data: Option<&Buffer>) -> (Vec<Descriptor>, usize) {
    let args = template.request.len() - IN_HEADER_BYTES;
    let mut chain = vec![descriptor(request.guest(), IN_HEADER_BYTES, 0)];
    if args > 0 {
        chain.push(descriptor(request.guest() + IN_HEADER_BYTES as u64, args, 0));
    }
    let data_at = data.map_or(0, |data| data.guest());
    if let Data::Out(bytes) = template.data {
        chain.push(descriptor(data_at, bytes, 0));
    }
    chain.push(descriptor(reply.guest(), OUT_HEADER_BYTES, WRITE));
    let mut expected = OUT_HEADER_BYTES + template.reply_args;
    if template.reply_args > 0 {
        chain.push(descriptor(reply.guest() + OUT_HEADER_BYTES as u64, template.reply_args, WRITE));
    }
    if let Data::In(bytes) = template.data {
        chain.push(descriptor(data_at, bytes, WRITE));
        expected += bytes;
    }
    (chain, expected)
}
