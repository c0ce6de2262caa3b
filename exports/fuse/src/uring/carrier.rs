//! A request in an entry of a ring, as the server sees it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_engine::{Hold, Lease, NotEnded, Operation, Term};
use ferry_serve::{Carrier, HEADER_BYTES, ReplyBuffer};
use ferry_vfs::Backing;
use ferry_wire::fuse::WRITE_HEAD_BYTES;

use super::memory::Message;
use super::queue::{Block, Queue};
use crate::stats::Counters;
use crate::transfer::Transfer;

/// One request.
pub(super) struct RingCarrier<'a> {
    pub(super) queue: &'a Arc<Queue>,
    pub(super) block: &'a Block,
    pub(super) slot: usize,
    pub(super) index: usize,
    pub(super) term: Term,
    pub(super) message: Message,
    pub(super) counters: &'a Counters,
    /// What is to be done for the request.
    pub(super) transfer: Option<Transfer>,
}

impl<'a> RingCarrier<'a> {
    pub(super) fn lease(&self) -> &'a Lease {
        &self.block.states[self.slot].lease
    }

    /// The entry's memory, for as long as the term runs.
    fn hold(&self) -> Option<Hold<'a>> {
        self.lease().hold(self.term)
    }
}

impl ReplyBuffer for RingCarrier<'_> {
    fn room(&self) -> usize {
        HEADER_BYTES + self.block.chunk.payload_bytes()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        let Some(_hold) = self.hold() else { return 0 };
        // SAFETY: the term is held, so the entry is this request's.
        unsafe { self.block.chunk.copy_in(self.slot, offset, bytes) }
    }
}

impl Carrier for RingCarrier<'_> {
    fn request_bytes(&self) -> usize {
        self.message.bytes()
    }

    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let Some(_hold) = self.hold() else { return 0 };
        // SAFETY: the term is held, so the entry is this request's.
        unsafe { self.block.chunk.copy_out(self.slot, &self.message, offset, bytes) }
    }

    fn token(&self) -> u64 {
        // A worker serves one request at a time.
        0
    }

    fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static {
        let (queue, index, term) = (Arc::clone(self.queue), self.index, self.term);
        let unique = self.block.states[self.slot].unique.load(Ordering::Relaxed);
        move |reply| {
            while queue.answer(index, term, &reply) == Err(NotEnded::Held) {
                std::thread::yield_now();
            }
            queue.later.end(unique);
            queue.parked.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn read(&mut self, file: Arc<Backing>, file_offset: u64, reply_offset: usize, bytes: usize) {
        let at = reply_offset.saturating_sub(HEADER_BYTES).min(self.block.chunk.payload_bytes());
        let bytes = bytes.min(self.block.chunk.payload_bytes() - at);
        self.transfer = Some(Transfer::new(Operation::Read, file, file_offset, (at, bytes)));
    }

    fn write(
        &mut self,
        file: Arc<Backing>,
        file_offset: u64,
        (at, bytes): (usize, usize),
        clear_privileges: bool,
        waits: bool,
    ) {
        self.counters.written_bytes.add(bytes as u64);
        let operation = Operation::Write { clear_privileges, waits };
        let at = at.saturating_sub(WRITE_HEAD_BYTES).min(self.message.payload_bytes);
        let bytes = bytes.min(self.message.payload_bytes - at);
        self.transfer = Some(Transfer::new(operation, file, file_offset, (at, bytes)));
    }

    fn fsync(&mut self, file: Arc<Backing>, data_only: bool) {
        let operation = Operation::Fsync { data_only };
        self.transfer = Some(Transfer::new(operation, file, 0, (0, 0)));
    }
}
