//! A request from /dev/fuse, as a carrier for the server.

use std::cell::Cell;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferry_engine::{Carrier, Generation, ReplyBuffer, Transfer, TransferRequest};
use ferry_serve::{FuseCarrier, HEADER_BYTES};
use ferry_vfs::Errno;
use ferry_wire::fuse::{BATCH_FORGET_BYTES_MAX, IN_HEADER_BYTES, Opcode, WRITE_BYTES_MAX, WRITE_HEAD_BYTES, peek};

use super::Reader;
use crate::deferred_replies::may_be_abandoned;
use crate::device::send;
use crate::stats::Counters;
use crate::transfer::in_payload;

/// The alignment for files opened with `O_DIRECT`; a page is enough everywhere.
const PAGE_BYTES: usize = 4096;

/// The size of the buffers for the data of a WRITE and of a reply. The buffer for requests has room for
/// [`WRITE_HEAD_BYTES`] more, so the kernel sends no longer BATCH_FORGET than the server takes.
pub(super) const PAYLOAD_BYTES: usize = WRITE_BYTES_MAX as usize;
const _: () =
    assert!(PAYLOAD_BYTES.is_multiple_of(PAGE_BYTES) && WRITE_HEAD_BYTES + PAYLOAD_BYTES <= BATCH_FORGET_BYTES_MAX);

/// Requests that no client waits for. Linux sends RELEASE when the last descriptor is closed, and continues.
const UNAWAITED: [Opcode; 5] =
    [Opcode::Forget, Opcode::BatchForget, Opcode::Release, Opcode::Releasedir, Opcode::Interrupt];

/// The memory of one reader: a request and its reply. Untouched pages take no memory.
pub(super) struct Memory {
    bytes: Vec<u8>,
    /// Where a WRITE's data begins.
    data: usize,
    /// The offset of a reply's data.
    reply: usize,
    received: usize,
    header: [u8; HEADER_BYTES],
}

impl Memory {
    pub(super) fn new() -> Self {
        let bytes = vec![0; 3 * PAGE_BYTES + 2 * PAYLOAD_BYTES];
        let data = bytes.as_ptr().align_offset(PAGE_BYTES) + PAGE_BYTES;
        let reply = data + PAYLOAD_BYTES;
        Self { bytes, data, reply, received: 0, header: [0; HEADER_BYTES] }
    }

    /// Returns the buffer for a request, aligned for the data of a WRITE.
    pub(super) fn request_room(&mut self) -> &mut [u8] {
        &mut self.bytes[self.data - WRITE_HEAD_BYTES..self.reply]
    }

    /// Takes in a request that was received before; returns its length.
    pub(super) fn load(&mut self, request: &[u8]) -> usize {
        self.request_room()[..request.len()].copy_from_slice(request);
        request.len()
    }

    pub(super) fn received(&mut self, bytes: usize) {
        self.received = bytes;
    }

    pub(super) fn request(&self) -> &[u8] {
        let start = self.data - WRITE_HEAD_BYTES;
        &self.bytes[start..start + self.received]
    }

    /// The request's number.
    pub(super) fn unique(&self) -> u64 {
        self.request().first_chunk::<IN_HEADER_BYTES>().map_or(0, |header| peek(header).unique)
    }

    /// Returns whether the request may be aborted while another thread serves it.
    fn may_be_abandoned(&self) -> bool {
        self.request().first_chunk::<IN_HEADER_BYTES>().is_some_and(|header| may_be_abandoned(peek(header).opcode))
    }

    /// Returns the thread that waits for the request, 0 if it is not visible in this namespace; `None` if none waits.
    pub(super) fn client(&self) -> Option<u32> {
        let header = peek(self.request().first_chunk::<IN_HEADER_BYTES>()?);
        (!UNAWAITED.iter().any(|opcode| opcode.as_raw() == header.opcode)).then_some(header.pid)
    }

    /// Sends the reply of this length, including its header, from its place.
    pub(super) fn send(&self, channel: BorrowedFd<'_>, bytes: usize) {
        let payload = bytes.saturating_sub(HEADER_BYTES).min(PAYLOAD_BYTES);
        let parts = [IoSlice::new(&self.header), IoSlice::new(&self.bytes[self.reply..self.reply + payload])];
        let parts = if payload == 0 { &parts[..1] } else { &parts[..] };
        self.check_sent(channel, bytes, send(channel, parts));
    }

    /// Checks the result of sending a reply of this length.
    pub(super) fn check_sent(&self, channel: BorrowedFd<'_>, bytes: usize, sent: Result<(), Errno>) {
        match sent {
            // The caller has been killed, or the mount has ended.
            Ok(()) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(error) => {
                tracing::error!("the kernel refuses a reply of {bytes} bytes: {error}");
                if let Some(header) = self.request().first_chunk::<IN_HEADER_BYTES>() {
                    let reply = ferry_wire::fuse::encode_error(peek(header).unique, Errno::IO);
                    let _ = send(channel, &[IoSlice::new(&reply)]);
                }
            }
        }
    }
}

/// One request.
pub(super) struct DeviceCarrier<'a> {
    reader: &'a Reader,
    reply_channel: &'a Arc<OwnedFd>,
    generation: Generation,
    memory: &'a mut Memory,
    counters: &'a Counters,
    /// The transfer of the request.
    pub(super) transfer: Option<Transfer>,
    /// It is monitored until its reply.
    pub(super) is_monitored: Cell<bool>,
}

impl<'a> DeviceCarrier<'a> {
    pub(super) fn new(
        reader: &'a Reader,
        reply_channel: &'a Arc<OwnedFd>,
        (generation, memory, counters): (Generation, &'a mut Memory, &'a Counters),
    ) -> Self {
        Self { reader, reply_channel, generation, memory, counters, transfer: None, is_monitored: Cell::new(false) }
    }
}

impl ReplyBuffer for DeviceCarrier<'_> {
    fn room(&self) -> usize {
        HEADER_BYTES + PAYLOAD_BYTES
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        if !self.reader.generation_cell.runs(self.generation) {
            return 0;
        }
        let in_header = HEADER_BYTES.saturating_sub(offset).min(bytes.len());
        let (header, payload) = bytes.split_at(in_header);
        if in_header > 0 {
            self.memory.header[offset..offset + in_header].copy_from_slice(header);
        }
        let start = (offset + in_header).saturating_sub(HEADER_BYTES).min(PAYLOAD_BYTES);
        let count = payload.len().min(PAYLOAD_BYTES - start);
        let start = self.memory.reply + start;
        self.memory.bytes[start..start + count].copy_from_slice(&payload[..count]);
        in_header + count
    }
}

impl Carrier for DeviceCarrier<'_> {
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let Some(from) = self.memory.request().get(offset..) else { return 0 };
        let count = from.len().min(bytes.len());
        bytes[..count].copy_from_slice(&from[..count]);
        count
    }

    fn transfer(&mut self, request: TransferRequest) {
        let memory = &mut *self.memory;
        let (start, payload_bytes) = match request.is_read() {
            true => (memory.reply, PAYLOAD_BYTES),
            false => (memory.data, memory.received.saturating_sub(WRITE_HEAD_BYTES)),
        };
        if !request.is_read() {
            self.counters.written_bytes.add(request.bytes as u64);
        }
        self.transfer = Some(in_payload(request, memory.bytes[start..].as_mut_ptr(), payload_bytes));
    }
}

impl FuseCarrier for DeviceCarrier<'_> {
    fn request_bytes(&self) -> usize {
        self.memory.received
    }

    fn token(&self) -> u64 {
        // A reader serves one request at a time.
        0
    }

    fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static {
        let (channel, unique) = (Arc::clone(self.reply_channel), self.memory.unique());
        let later = Arc::clone(&self.reader.readers.deferred);
        if self.memory.may_be_abandoned() {
            // Before a reply is possible.
            later.begin(unique, Arc::clone(&channel));
            self.is_monitored.set(true);
        }
        move |reply| {
            if later.end(unique) {
                tracing::debug!("the reply to request {unique} is too late: its caller got an error");
                return;
            }
            // If the caller got an error or is gone, the kernel no longer knows the request.
            if let Err(error) = send(channel.as_fd(), &[IoSlice::new(&reply)]) {
                tracing::debug!("cannot send the reply to request {unique}, whose caller may be gone: {error}");
            }
        }
    }
}
