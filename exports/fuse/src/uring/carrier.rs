//! A request in an entry of a ring, as the server sees it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_engine::{Carrier, Generation, GenerationCell, Hold, NotEnded, ReplyBuffer, Transfer, TransferRequest};
use ferry_serve::{FuseCarrier, HEADER_BYTES};

use super::memory::Message;
use super::queue::{Block, Queue};
use crate::stats::Counters;
use crate::transfer::in_payload;

/// One request.
pub(super) struct RingCarrier<'a> {
    pub(super) queue: &'a Arc<Queue>,
    pub(super) block: &'a Block,
    pub(super) slot: usize,
    pub(super) index: usize,
    pub(super) generation: Generation,
    pub(super) message: Message,
    pub(super) counters: &'a Counters,
    /// What is to be done for the request.
    pub(super) transfer: Option<Transfer>,
}

impl<'a> RingCarrier<'a> {
    pub(super) fn generation_cell(&self) -> &'a GenerationCell {
        &self.block.states[self.slot].generation_cell
    }

    /// The entry's memory, for as long as the generation runs.
    fn hold(&self) -> Option<Hold<'a>> {
        self.generation_cell().hold(self.generation)
    }
}

impl ReplyBuffer for RingCarrier<'_> {
    fn room(&self) -> usize {
        HEADER_BYTES + self.block.chunk.payload_bytes()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        let Some(_hold) = self.hold() else { return 0 };
        // SAFETY: the generation is held, so the entry is this request's.
        unsafe { self.block.chunk.copy_in(self.slot, offset, bytes) }
    }
}

impl Carrier for RingCarrier<'_> {
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let Some(_hold) = self.hold() else { return 0 };
        // SAFETY: the generation is held, so the entry is this request's.
        unsafe { self.block.chunk.copy_out(self.slot, &self.message, offset, bytes) }
    }

    fn transfer(&mut self, request: TransferRequest) {
        let chunk = &self.block.chunk;
        let payload_bytes = if request.is_read() { chunk.payload_bytes() } else { self.message.payload_bytes };
        if !request.is_read() {
            self.counters.written_bytes.add(request.bytes as u64);
        }
        // If the generation is not this request's any more, the entry may get other memory; then nothing is moved.
        self.transfer = Some(in_payload(request, chunk.second(self.slot), payload_bytes));
    }
}

impl FuseCarrier for RingCarrier<'_> {
    fn request_bytes(&self) -> usize {
        self.message.bytes()
    }

    fn token(&self) -> u64 {
        // A worker serves one request at a time.
        0
    }

    fn may_park(&self) -> bool {
        self.queue.may_park()
    }

    fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static {
        let (queue, index, generation) = (Arc::clone(self.queue), self.index, self.generation);
        let unique = self.block.states[self.slot].unique.load(Ordering::Relaxed);
        move |reply| {
            while queue.answer(index, generation, &reply) == Err(NotEnded::Held) {
                std::thread::yield_now();
            }
            queue.deferred.end(unique);
            queue.parked.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
