//! What carries requests and replies.

use std::sync::Arc;

use ferry_vfs::Backing;

/// The bytes of a reply's header (FUSE protocol 7.45, `fuse_out_header`).
pub const HEADER_BYTES: usize = 16;

/// Where a reply is written. Offset 0 is its header; all that follows comes right behind it, wherever the carrier
/// keeps the two. One call may span both.
pub trait ReplyBuffer {
    /// Room for the whole reply, the header included.
    fn room(&self) -> usize;

    /// Copies bytes in; answers how many there was room for. A carrier that has given up on the request meanwhile
    /// (its client is gone, or was told something else) answers 0, and what the reply would have handed out is given
    /// back to the source.
    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize;
}

/// One request under way: its bytes, the room for its reply, and transfers on its behalf.
///
/// At most one of [`Self::read`], [`Self::write`] and [`Self::fsync`] is called for a request, as the last thing, and
/// the request is then [`Served::Transfer`]. When that transfer has ended, [`crate::Server::transferred`] finishes
/// the reply.
pub trait Carrier: ReplyBuffer {
    /// Bytes of the whole message, header included, as they came.
    fn request_bytes(&self) -> usize;

    /// Copies bytes of the message out, from `offset` on; answers how many there were.
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize;

    /// Identifies the request until it is answered. The low 32 bits are a small number: the server keeps a table
    /// by it.
    fn token(&self) -> u64;

    /// Whether a server before this one has taken the request already, and may have carried it out.
    fn is_again(&self) -> bool {
        false
    }

    /// How another thread answers: with the whole encoded reply, header first. It may do so before
    /// [`crate::Server::serve`] has come back with [`Served::Later`] or [`Served::Parked`], and after the client is
    /// gone.
    fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static;

    /// Begins reading from `file` at `file_offset` into the reply, up to `bytes` from `reply_offset` on.
    fn read(&mut self, file: Arc<Backing>, file_offset: u64, reply_offset: usize, bytes: usize);

    /// Begins writing a part of the message, given as offset and length, to `file` at `file_offset`.
    /// `clear_privileges` and `waits` are those of [`ferry_engine::Operation::Write`].
    fn write(
        &mut self,
        file: Arc<Backing>,
        file_offset: u64,
        request: (usize, usize),
        clear_privileges: bool,
        waits: bool,
    );

    /// Begins making `file` durable.
    fn fsync(&mut self, file: Arc<Backing>, data_only: bool);
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Served {
    /// Answered: so many bytes were written, header included; 0 if the carrier had no room, not even for an error.
    Reply(usize),
    /// It was of a kind that gets no reply.
    NoReply,
    /// A transfer was begun with the carrier; [`crate::Server::transferred`] finishes the reply.
    Transfer,
    /// The carrier's [`Carrier::later`] will be called soon.
    Later,
    /// The carrier's [`Carrier::later`] will be called when somebody else does something, maybe never.
    Parked,
}
