//! The transport of FUSE requests and replies, as [`crate::Server`] sees it.

use ferry_engine::Carrier;

/// The bytes of a reply's header (FUSE protocol 7.45, `fuse_out_header`).
pub const HEADER_BYTES: usize = 16;

/// A FUSE request that is being served. After [`ServeOutcome::Transfer`], [`crate::Server::finish_transfer`] finishes the
/// reply.
pub trait FuseCarrier: Carrier {
    /// Returns the bytes of the whole message, header included.
    fn request_bytes(&self) -> usize;

    /// Identifies the request until its reply. The low 32 bits are a small number that indexes a table.
    fn token(&self) -> u64;

    /// Whether a previous server took this request already, and may have executed it.
    fn is_resubmitted(&self) -> bool {
        false
    }

    /// Whether the request may wait for an external event, such as a lock. Otherwise those that wait would leave no room for the
    /// ones that they wait for.
    fn may_park(&self) -> bool {
        true
    }

    /// Returns a function that sends the whole encoded reply from another thread. It may run before
    /// [`crate::Server::serve`] returns [`ServeOutcome::Later`] or [`ServeOutcome::Parked`], or after the client is
    /// gone.
    fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static;
}

/// The result of serving a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ServeOutcome {
    /// The reply was written: its bytes, header included; 0 if the carrier had no room, not even for an error.
    Reply(usize),
    /// The request has no reply.
    NoReply,
    /// The carrier runs a transfer; [`crate::Server::finish_transfer`] finishes the reply.
    Transfer,
    /// The function of [`FuseCarrier::later`] will be called soon.
    Later,
    /// The function of [`FuseCarrier::later`] will be called after an external event, or never.
    Parked,
}
