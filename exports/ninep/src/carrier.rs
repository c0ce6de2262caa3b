//! What carries requests and replies: a socket's messages, or a virtqueue's descriptor chains.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ferry_engine::Lane;
use ferry_vfs::{Backing, Extent, Result};

use crate::ahead::Ahead;
use crate::line::Ticket;
use crate::serve::Moving;

/// Where the reply of one request is written: a short one into memory, from which the carrier takes it; a long one, of
/// which the head is known last, into its place.
pub(crate) trait ReplyBuffer {
    /// Memory for a short reply.
    fn short(&mut self) -> &mut Vec<u8>;

    /// The longest reply that the client has room for, in bytes.
    fn room(&self) -> usize;

    /// Copies a part of a long reply into its place; answers how many bytes there was room for.
    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize;
}

/// One request under way, and transfers on its behalf. At most one of [`Self::read`], [`Self::write`] and [`Self::fsync`]
/// is called for a request, as the last thing.
///
/// They answer what was moved, or `None`: then [`Self::expect`] follows at once, and whoever sees the transfer end calls
/// [`Moving::end`].
pub(crate) trait Carrier: ReplyBuffer {
    /// Copies data of a Twrite out, from `offset` on; answers how many bytes there were.
    fn data_at(&self, offset: usize, bytes: &mut [u8]) -> usize;

    /// Reads up to `bytes` from an extent into a long reply, behind its head.
    fn read(&mut self, extent: Extent, bytes: usize) -> Option<Result<usize>>;

    /// Writes the first `bytes` of a Twrite's data to an extent. The last two are those of
    /// [`ferry_engine::Operation::Write`].
    fn write(&mut self, extent: Extent, bytes: usize, clear_privileges: bool, waits: bool) -> Option<Result<usize>>;

    /// Makes a file durable.
    fn fsync(&mut self, file: Arc<Backing>, data_only: bool) -> Option<Result<usize>>;

    /// Keeps what is to be done when the transfer has ended.
    fn expect(&mut self, moving: Moving);

    /// Sees to it that a range is read ahead, after the reply of this request or beside it.
    fn read_ahead(&mut self, lane: &Lane, ahead: Ahead);
}

/// Who sent a request, to whom it may be answered later and from another thread.
pub(crate) trait Client: Send + Sync {
    /// The first message of the client's session was accepted: it is no stranger any more.
    fn attached(&self) {}

    /// Whether one lock more may be waited for.
    fn may_park(&self) -> bool;

    /// A request waits for a lock.
    fn park(&self, ticket: &Ticket, gone: &Arc<AtomicBool>);

    /// Answers a request, if it is still under way; answers whether it was.
    fn finish(&self, ticket: &Ticket, reply: &[u8]) -> bool;
}
