//! Transfers between descriptors and the buffers of a chain.

use std::sync::Arc;

use ferry_engine::{Operation, Transfers};
use ferry_vfs::Backing;

use crate::chain::Chain;
use crate::worker::Answer;

/// What a handler may have moved on behalf of the chain that it serves. Each method's answer is what
/// [`crate::QueueHandler::serve`] is to answer.
#[derive(Debug)]
pub struct Io<'a> {
    pub(crate) transfers: &'a mut Transfers,
    pub(crate) chain: &'a Chain,
    pub(crate) token: u64,
}

impl Io<'_> {
    /// Identifies the chain until it is answered; its low 32 bits are a small number.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Reads from `file`, at `file_offset`, into the driver's buffers: up to `bytes` from `chain_offset` on.
    pub fn read(&mut self, file: Arc<Backing>, file_offset: u64, chain_offset: usize, bytes: usize) -> Answer {
        let segments = self.chain.writable(chain_offset, bytes);
        let file = self.by_kernel(file);
        // SAFETY: the segments lie in guest memory, which the worker keeps mapped until all transfers have ended;
        // what the guest does to its memory meanwhile is its own business, and nothing here holds references.
        unsafe { self.transfers.queue(self.token, Operation::Read, file, file_offset, segments) };
        Answer::Later
    }

    /// Writes to `file`, at `file_offset`, what the driver sent: up to `bytes` from `chain_offset` on.
    /// `clear_privileges` and `waits` are those of [`Operation::Write`].
    pub fn write(
        &mut self,
        file: Arc<Backing>,
        file_offset: u64,
        (chain_offset, bytes): (usize, usize),
        clear_privileges: bool,
        waits: bool,
    ) -> Answer {
        let segments = self.chain.readable(chain_offset, bytes);
        let file = self.by_kernel(file);
        let operation = Operation::Write { clear_privileges, waits };
        // SAFETY: as in `read`.
        unsafe { self.transfers.queue(self.token, operation, file, file_offset, segments) };
        Answer::Later
    }

    /// The file as it is to be used for this chain: nobody but the kernel may copy from or to fragile memory.
    fn by_kernel(&self, file: Arc<Backing>) -> Arc<Backing> {
        match self.chain.fragile && file.memory().is_some() {
            true => Arc::new(file.without_memory()),
            false => file,
        }
    }

    /// Makes `file` durable.
    pub fn fsync(&mut self, file: Arc<Backing>, data_only: bool) -> Answer {
        // SAFETY: no memory is involved.
        unsafe { self.transfers.queue(self.token, Operation::Fsync { data_only }, file, 0, []) };
        Answer::Later
    }
}
