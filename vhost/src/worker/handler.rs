//! The interface by which a device serves the chains of its queues.

use std::time::Duration;

use crate::chain::Chain;
use crate::io::Io;

/// The state of a chain after [`QueueHandler::serve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ChainState {
    /// Served, with this many bytes written to it.
    Done(u32),
    /// A transfer or a reply with the chain's token will complete it.
    Later,
    /// A reply will come after an external event, or never.
    Parked,
}

/// Where a chain may be served while requests are slow ([`crate::Device::spare_threads`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// By the owner of its queue, before later chains: it does not block.
    Here,
    /// On any thread, concurrently with any other.
    Anywhere,
    /// On any thread, but after earlier ones of the same number.
    InOrder(u64),
}

/// Serves chains on one thread.
pub trait QueueHandler: 'static {
    /// A reply that another thread sends for a chain.
    type Message: Send + 'static;
    /// The state that finishes a request after its transfer.
    type PendingTransfer: Send + 'static;

    /// Called for each chain that is taken from its queue, by the owner, in the queue's order, before
    /// [`Self::serve`].
    fn accept(&mut self, _token: u64, _chain: &Chain) {}
    /// Serves a chain.
    fn serve(&mut self, chain: &Chain, io: &mut Io<'_>) -> ChainState;
    /// Finishes the reply after the chain's transfer; returns the number of written bytes.
    fn finish_transfer(&mut self, token: u64, chain: &Chain, outcome: std::io::Result<usize>) -> u32;
    /// Called by the owner of the queue before a chain that any thread served goes to the used ring, in the order of
    /// that ring (together with [`Self::deliver`]). Returns the number of written bytes to report.
    fn complete(&mut self, _token: u64, written: u32) -> u32 {
        written
    }
    /// Writes a reply to its chain, in the order of sending; returns the number of written bytes.
    fn deliver(&mut self, chain: &Chain, message: Self::Message) -> u32;
    /// Writes an error reply after [`Self::serve`], [`Self::finish_transfer`] or [`Self::deliver`] panicked.
    fn write_error(&mut self, chain: &Chain) -> u32;
    /// Called after each batch, before the worker sleeps, and after each chain that another thread served.
    fn end_batch(&mut self) {}
    /// Returns where a chain may be served while requests are slow.
    fn placement(&self, _chain: &Chain) -> Placement {
        Placement::Here
    }
    /// Returns how long to wait before the next chain of this queue is taken; `None`: it may be taken now. Called
    /// again after that time. A queue that is stopped does not wait.
    fn delay(&self, _queue: usize) -> Option<Duration> {
        None
    }
    /// Removes the state of the transfer with this token, for another handler.
    fn detach(&mut self, _token: u64) -> Option<Self::PendingTransfer> {
        None
    }
    /// Adds the state of a transfer, before [`Self::finish_transfer`].
    fn attach(&mut self, _token: u64, _pending: Self::PendingTransfer) {}
}
