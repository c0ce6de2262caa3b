//! What carries requests and replies: a socket's messages, or a virtqueue's descriptor chains.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ferry_engine::{BlockingPool, Carrier, ReplyBuffer};
use ferry_vfs::Result;

use crate::read_ahead::ReadAhead;
use crate::request_table::Ticket;
use crate::serve::PendingTransfer;

/// Where the reply of a 9P request is written: a short one into memory, from which the carrier takes it; a long one, of
/// which the head is known last, into its place.
pub(crate) trait NinepReply: ReplyBuffer {
    /// Memory for a short reply.
    fn short(&mut self) -> &mut Vec<u8>;
}

/// A 9P request under way.
pub(crate) trait NinepCarrier: Carrier + NinepReply {
    /// The outcome of the transfer, if the carrier has made it at once.
    fn ended(&mut self) -> Option<Result<usize>>;

    /// Keeps what is to be done when the transfer has ended; the thread that sees it end calls [`PendingTransfer::end`].
    fn expect(&mut self, moving: PendingTransfer);

    /// Has a range read ahead, after the reply of this request or beside it.
    fn read_ahead(&mut self, blocking_pool: &BlockingPool, ahead: ReadAhead);
}

/// Who sent a request, to whom it may be answered later and from another thread.
pub(crate) trait Client: Send + Sync {
    /// The first message of the client's session was accepted: it is no stranger any more.
    fn attached(&self) {}

    /// Whether one lock more may be waited for.
    fn may_park(&self) -> bool;

    /// A request waits for a lock.
    fn park(&self, ticket: &Ticket, gone: &Arc<AtomicBool>);

    /// Answers a request, if it is still under way; returns whether it was.
    fn finish(&self, ticket: &Ticket, reply: &[u8]) -> bool;
}
