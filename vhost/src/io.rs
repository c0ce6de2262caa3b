//! Transfers between descriptors and the buffers of a chain.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ferry_engine::{Operation, Segment, Transfers, move_waiting};
use ferry_vfs::Backing;

use crate::chain::Chain;
use crate::worker::{Answer, QueueHandler};

/// What a handler may have moved on behalf of the chain that it serves, once. Each method's answer is what
/// [`crate::QueueHandler::serve`] is to answer.
#[derive(Debug)]
pub struct Io<'a> {
    chain: &'a Chain,
    token: u64,
    wanted: Option<Wanted>,
}

/// A transfer that a handler wants, of a part of its chain.
#[derive(Debug)]
struct Wanted {
    operation: Operation,
    file: Arc<Backing>,
    file_offset: u64,
    /// Where it begins in what the operation moves: the driver's buffers, or what the driver sent.
    chain_offset: usize,
    bytes: usize,
}

impl Wanted {
    fn segments(&self, chain: &Chain) -> impl Iterator<Item = Segment> {
        let (readable, writable) = match self.operation {
            Operation::Read => (0, self.bytes),
            Operation::Write { .. } => (self.bytes, 0),
            Operation::Fsync { .. } => (0, 0),
        };
        chain.readable(self.chain_offset, readable).chain(chain.writable(self.chain_offset, writable))
    }
}

/// What a handler has answered, and the transfer that is still to be made.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) answer: Answer,
    wanted: Option<Wanted>,
}

impl Served {
    /// Has a handler serve a chain. One that panics has failed.
    pub(crate) fn by<H: QueueHandler>(handler: &mut H, chain: &Chain, token: u64) -> Self {
        let mut io = Io { chain, token, wanted: None };
        match catch_unwind(AssertUnwindSafe(|| handler.serve(chain, &mut io))) {
            Ok(answer) => Self { answer, wanted: io.wanted },
            Err(_) => Self { answer: Answer::Done(handler.failed(chain)), wanted: None },
        }
    }

    /// Queues the transfer, if there is one.
    ///
    /// # Safety
    /// The chain's memory stays mapped until the transfer has ended.
    pub(crate) unsafe fn queue(&mut self, transfers: &mut Transfers, chain: &Chain, token: u64) {
        if let Some(wanted) = self.wanted.take() {
            let segments = wanted.segments(chain);
            // SAFETY: by the caller's promise; what the guest does to its memory meanwhile is its own business, and nothing
            // here holds references.
            unsafe { transfers.queue(token, wanted.operation, Arc::clone(&wanted.file), wanted.file_offset, segments) };
        }
    }

    /// Makes the transfer, if there is one, on this thread, however long it takes. Answers what becomes of the chain.
    ///
    /// # Safety
    /// The chain's memory stays mapped until this returns.
    pub(crate) unsafe fn finish<H: QueueHandler>(self, handler: &mut H, chain: &Chain, token: u64) -> Answer {
        let Self { answer, wanted } = self;
        let Some(wanted) = wanted else { return answer };
        let segments = wanted.segments(chain).collect();
        // SAFETY: by the caller's promise.
        let outcome = unsafe { move_waiting(wanted.operation, wanted.file, wanted.file_offset, segments) };
        Answer::Done(finish(handler, chain, |handler| handler.transferred(token, chain, outcome)))
    }
}

/// Has a reply finished, or failed if that panics.
pub(crate) fn finish<H: QueueHandler>(handler: &mut H, chain: &Chain, finish: impl FnOnce(&mut H) -> u32) -> u32 {
    catch_unwind(AssertUnwindSafe(|| finish(handler))).unwrap_or_else(|_| handler.failed(chain))
}

impl Io<'_> {
    /// Identifies the chain until it is answered; its low 32 bits are a small number.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Reads from `file`, at `file_offset`, into the driver's buffers: up to `bytes` from `chain_offset` on.
    pub fn read(&mut self, file: Arc<Backing>, file_offset: u64, chain_offset: usize, bytes: usize) -> Answer {
        self.want(Operation::Read, file, file_offset, (chain_offset, bytes))
    }

    /// Writes to `file`, at `file_offset`, what the driver sent: up to `bytes` from `chain_offset` on.
    /// `clear_privileges` and `waits` are those of [`Operation::Write`].
    pub fn write(
        &mut self,
        file: Arc<Backing>,
        file_offset: u64,
        part: (usize, usize),
        clear_privileges: bool,
        waits: bool,
    ) -> Answer {
        self.want(Operation::Write { clear_privileges, waits }, file, file_offset, part)
    }

    /// Makes `file` durable.
    pub fn fsync(&mut self, file: Arc<Backing>, data_only: bool) -> Answer {
        self.want(Operation::Fsync { data_only }, file, 0, (0, 0))
    }

    fn want(
        &mut self,
        operation: Operation,
        file: Arc<Backing>,
        file_offset: u64,
        (chain_offset, bytes): (usize, usize),
    ) -> Answer {
        // Nobody but the kernel may copy from or to fragile memory.
        let file = match self.chain.fragile && file.memory().is_some() {
            true => Arc::new(file.without_memory()),
            false => file,
        };
        self.wanted = Some(Wanted { operation, file, file_offset, chain_offset, bytes });
        Answer::Later
    }
}
