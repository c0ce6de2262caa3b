//! The store in which a front end's connection outlives the server.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// Recorded messages of a front end, with their descriptors. The next server replays them in the order of their keys.
pub type Records = BTreeMap<u64, (Vec<u8>, Vec<OwnedFd>)>;

/// A connection that the previous server left.
#[derive(Debug)]
pub struct InheritedConnection {
    /// The socket.
    pub socket: OwnedFd,
    /// The recorded messages of the front end.
    pub records: Records,
}

/// The outcome of a message.
#[derive(Debug, Default)]
pub struct Commit<'a> {
    /// The length of the message to take from the socket, in bytes.
    pub taken_bytes: usize,
    /// The key, bytes and descriptors of the record, which replaces a previous one with this key.
    pub record: Option<(u64, &'a [u8], &'a [OwnedFd])>,
    /// Keys of records that are void.
    pub drops: &'a [u64],
    /// The reply to the front end; empty: none.
    pub reply: &'a [u8],
    /// The descriptors of the reply.
    pub reply_files: &'a [OwnedFd],
}

/// Stores the connection to a front end outside of this process, for the next server.
pub trait ConnectionStore: Debug + Send + Sync {
    /// Returns the connection that the previous server left, once.
    fn take(&self) -> Option<InheritedConnection>;
    /// How long to wait for the front end of a guest that the previous server served. `None`: there was none.
    fn reconnect_timeout(&self) -> Option<Duration>;
    /// Stores a new connection.
    ///
    /// # Errors
    /// The store is lost.
    fn put(&self, socket: BorrowedFd<'_>) -> io::Result<()>;
    /// Takes a message of the connection, records it and replies to it, in one step. Called by one thread at a time.
    ///
    /// # Errors
    /// The store is lost or full.
    fn commit(&self, commit: &Commit<'_>) -> io::Result<()>;
    /// Forgets the connection and its records.
    fn end(&self);
}
