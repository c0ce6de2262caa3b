//! Errors between the driver and a server.

use std::io;
use std::time::Duration;

/// An error of the driver.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket could not be connected to.
    #[error("cannot connect to {path}: {reason}")]
    Connect {
        /// The socket's path.
        path: String,
        /// Why not.
        reason: io::Error,
    },
    /// A vhost-user message failed.
    #[error("vhost-user: {what} failed: {reason}")]
    Vhost {
        /// The message.
        what: &'static str,
        /// Why.
        reason: vhost::Error,
    },
    /// The server does not offer what the configuration needs.
    #[error("the server does not offer {0}")]
    NotOffered(&'static str),
    /// The server has fewer queues than asked for.
    #[error("{asked} queues asked for (the high-priority one included), the server has {offered}")]
    Queues {
        /// How many the configuration asks for.
        asked: usize,
        /// How many there are.
        offered: u64,
    },
    /// The guest's memory is used up.
    #[error("no {0} bytes of guest memory are free")]
    Memory(usize),
    /// No descriptor is free.
    #[error("the ring of {0} entries is full")]
    RingFull(u16),
    /// Nothing came in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The server closed the connection.
    #[error("the server has closed the connection")]
    Disconnected,
    /// The device used a chain that was not available.
    #[error("the server used descriptor {0}, which heads no chain in flight")]
    BadUsed(u32),
    /// A reply that is not one to the request.
    #[error("malformed reply: {0}")]
    BadReply(String),
    /// A load that does not go with what it is to work on.
    #[error("no load is possible with {0}")]
    Unfit(String),
    /// An error reply.
    #[error("the server answers errno {0}")]
    Errno(i32),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Error {
    /// The errno of an error reply.
    pub fn errno(&self) -> Option<i32> {
        if let Self::Errno(errno) = self { Some(*errno) } else { None }
    }
}

/// A result of the driver.
pub type Result<T> = std::result::Result<T, Error>;
