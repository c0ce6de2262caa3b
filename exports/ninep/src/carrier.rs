//! The carrier of requests and replies: a socket's messages, or a virtqueue's descriptor chains.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use ferry_engine::{BlockingPool, Carrier, ReplyBuffer};
use ferry_vfs::{Cancellation, Result};

use crate::read_ahead::ReadAhead;
use crate::request_table::{ReplyBytes, Ticket};
use crate::serve::PendingTransfer;

/// The destination of a 9P reply: memory for a short one; the final place for a long one, whose head is known last.
pub(crate) trait NinepReply: ReplyBuffer {
    /// Memory for a short reply.
    fn short(&mut self) -> &mut Vec<u8>;
}

/// A 9P request under way.
pub(crate) trait NinepCarrier: Carrier + NinepReply {
    /// Returns the outcome of the transfer, if the carrier has run it already.
    fn ended(&mut self) -> Option<Result<usize>>;

    /// Stores the rest of the request; the thread that completes the transfer calls [`PendingTransfer::end`].
    fn expect(&mut self, moving: PendingTransfer);

    /// Reads a range ahead, after the reply of this request or concurrently.
    fn read_ahead(&mut self, blocking_pool: &BlockingPool, ahead: ReadAhead);
}

/// The sender of a request, which other threads may reply to later.
pub(crate) trait Client: Send + Sync {
    /// The first message of the client's session was accepted.
    fn attached(&self) {}

    /// The number of owners that hold or wait for locks may have changed.
    fn lock_owners_changed(&self, _owners: &AtomicUsize) {}

    /// Returns whether another lock request may wait.
    fn may_park(&self) -> bool;

    /// Records that a request waits for a lock.
    fn park(&self, ticket: &Ticket, gone: &Arc<Cancellation>);

    /// Replies to a request if it is still in flight; returns whether it was.
    fn finish(&self, ticket: &Ticket, reply: ReplyBytes<'_>) -> bool;
}
