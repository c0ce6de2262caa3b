//! What a device implements to serve the chains of its queues.

use std::time::Duration;

use crate::chain::Chain;
use crate::io::Io;

/// What became of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Answer {
    /// Served; so many bytes were written to it.
    Done(u32),
    /// A transfer or a reply with the chain's token will come on its own.
    Later,
    /// A reply will come when somebody else does something, maybe never.
    Parked,
}

/// Where a chain may be served while requests are slow ([`crate::Device::spare_threads`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// By the owner of its queue, before those behind it: it does not wait.
    Here,
    /// Anywhere, at the same time as any others.
    Anywhere,
    /// Anywhere, but not before those of the same number that came earlier.
    InOrder(u64),
}

/// Serves chains on one thread.
pub trait QueueHandler: 'static {
    /// What other threads send to have a chain answered.
    type Message: Send + 'static;
    /// What is to be done when a transfer has ended.
    type PendingTransfer: Send + 'static;

    /// A chain was taken from its queue: called by the owner, in the queue's order, before anybody's [`Self::serve`].
    fn accept(&mut self, _token: u64, _chain: &Chain) {}
    /// Serves a chain.
    fn serve(&mut self, chain: &Chain, io: &mut Io<'_>) -> Answer;
    /// The chain's transfer ended: finishes its reply. Returns how many bytes were written in all.
    fn transferred(&mut self, token: u64, chain: &Chain, outcome: std::io::Result<usize>) -> u32;
    /// A chain that was served or moved, by whatever thread, goes back to the driver now: called by the owner of the queue, which
    /// gives chains back in the order of these calls and of those of [`Self::deliver`]. Returns how many written bytes count.
    fn complete(&mut self, _token: u64, written: u32) -> u32 {
        written
    }
    /// A reply came for the chain, in the order of sending. Returns how many bytes were written.
    fn deliver(&mut self, chain: &Chain, message: Self::Message) -> u32;
    /// [`Self::serve`], [`Self::transferred`] or [`Self::deliver`] panicked: answers as well as can be.
    fn failed(&mut self, chain: &Chain) -> u32;
    /// A batch was taken and will be flushed now, or the worker is about to sleep.
    fn batch_end(&mut self) {}
    /// Where a chain may be served while requests are slow.
    fn placement(&self, _chain: &Chain) -> Placement {
        Placement::Here
    }
    /// How long to wait before the next chain of this queue is taken; `None`: it may be taken now. It is asked again after
    /// that time, and a queue that is stopped meanwhile does not wait.
    fn delay(&self, _queue: usize) -> Option<Duration> {
        None
    }
    /// Takes out what is to be done when the transfer with this token has ended, for another handler.
    fn detach(&mut self, _token: u64) -> Option<Self::PendingTransfer> {
        None
    }
    /// Takes it in, before [`Self::transferred`].
    fn attach(&mut self, _token: u64, _moving: Self::PendingTransfer) {}
}
