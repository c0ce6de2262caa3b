//! What carries FUSE requests and replies.

use ferry_engine::Carrier;

/// The bytes of a reply's header (FUSE protocol 7.45, `fuse_out_header`).
pub const HEADER_BYTES: usize = 16;

/// A FUSE request under way. If it is [`Served::Transfer`], [`crate::Server::transferred`] finishes the reply.
pub trait FuseCarrier: Carrier {
    /// Bytes of the whole message, header included, as they came.
    fn request_bytes(&self) -> usize;

    /// Identifies the request until it is answered. The low 32 bits are a small number, for a table.
    fn token(&self) -> u64;

    /// Whether a server before this one has taken the request already, and may have carried it out.
    fn is_resubmitted(&self) -> bool {
        false
    }

    /// How another thread answers: with the whole encoded reply, maybe before [`crate::Server::serve`] has come back
    /// with [`Served::Later`] or [`Served::Parked`], or after the client is gone.
    fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static;
}

/// The result of serving a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Served {
    /// Answered: so many bytes were written, header included; 0 if the carrier had no room, not even for an error.
    Reply(usize),
    /// It was of a kind that gets no reply.
    NoReply,
    /// A transfer was begun with the carrier; [`crate::Server::transferred`] finishes the reply.
    Transfer,
    /// The carrier's [`FuseCarrier::later`] will be called soon.
    Later,
    /// The carrier's [`FuseCarrier::later`] will be called when somebody else does something, maybe never.
    Parked,
}
