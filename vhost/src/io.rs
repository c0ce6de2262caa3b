//! Transfers between descriptors and the buffers of a chain.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ferry_engine::{Operation, Segment, Transfer, TransferRequest, Transfers};

use crate::chain::Chain;
use crate::worker::{ChainState, QueueHandler};

/// Lets a handler start one transfer for the chain that it serves.
#[derive(Debug)]
pub struct Io<'a> {
    chain: &'a Chain,
    token: u64,
    request: Option<TransferRequest>,
}

/// Returns the part of a chain that a transfer uses.
fn segments(operation: Operation, (at, bytes): (usize, usize), chain: &Chain) -> impl Iterator<Item = Segment> {
    let (readable, writable) = match operation {
        Operation::Read => (0, bytes),
        Operation::Write { .. } => (bytes, 0),
        Operation::Fsync { .. } => (0, 0),
    };
    chain.readable(at, readable).chain(chain.writable(at, writable))
}

/// The state of a chain after its handler, and the transfer that is still to be made.
#[derive(Debug)]
pub(crate) struct ServedChain {
    pub(crate) state: ChainState,
    request: Option<TransferRequest>,
}

impl ServedChain {
    /// Serves a chain by a handler. A panic is a failure of this chain.
    pub(crate) fn by<H: QueueHandler>(handler: &mut H, chain: &Chain, token: u64) -> Self {
        let mut io = Io { chain, token, request: None };
        let served = match catch_unwind(AssertUnwindSafe(|| handler.serve(chain, &mut io))) {
            Ok(state) => Self { state, request: io.request },
            Err(_) => Self { state: ChainState::Done(handler.write_error(chain)), request: None },
        };
        chain.set_parked(served.state == ChainState::Parked);
        served
    }

    /// Queues the transfer, if there is one.
    ///
    /// # Safety
    /// The chain's memory stays mapped until the transfer has ended.
    pub(crate) unsafe fn queue(&mut self, transfers: &mut Transfers, chain: &Chain, token: u64) {
        if let Some(TransferRequest { operation, file, file_offset, at, bytes }) = self.request.take() {
            let segments = segments(operation, (at, bytes), chain);
            // SAFETY: by the caller's promise; the guest may change its memory at any time, and nothing
            // here holds references.
            unsafe { transfers.queue(token, operation, file, file_offset, segments) };
        }
    }

    /// Runs the transfer, if there is one, on this thread, however long it takes. Returns the final state of the chain.
    ///
    /// # Safety
    /// The chain's memory stays mapped until this returns.
    pub(crate) unsafe fn finish<H: QueueHandler>(self, handler: &mut H, chain: &Chain, token: u64) -> ChainState {
        let Self { state, request } = self;
        let Some(TransferRequest { operation, file, file_offset, at, bytes }) = request else { return state };
        let segments: Vec<Segment> = segments(operation, (at, bytes), chain).collect();
        // SAFETY: by the caller's promise.
        let outcome = unsafe { Transfer::new(operation, file, file_offset, segments).run() };
        ChainState::Done(finish(handler, chain, |handler| handler.finish_transfer(token, chain, outcome)))
    }
}

/// Finishes a reply; a panic fails the chain.
pub(crate) fn finish<H: QueueHandler>(handler: &mut H, chain: &Chain, finish: impl FnOnce(&mut H) -> u32) -> u32 {
    catch_unwind(AssertUnwindSafe(|| finish(handler))).unwrap_or_else(|_| handler.write_error(chain))
}

impl Io<'_> {
    /// Identifies the chain until its reply; the low 32 bits are a small number.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Starts a transfer between a file and the chain: a read fills the writable buffers, a write takes the readable
    /// bytes. Returns what [`crate::QueueHandler::serve`] must return.
    pub fn transfer(&mut self, request: TransferRequest) -> ChainState {
        // Only the kernel may copy from or to memory that may fault.
        let file = match self.chain.may_fault && request.file.memory().is_some() {
            true => Arc::new(request.file.without_memory()),
            false => request.file,
        };
        self.request = Some(TransferRequest { file, ..request });
        ChainState::Later
    }
}
