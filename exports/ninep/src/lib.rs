//! The 9P export: a source, served over 9P2000.L to whoever connects to a unix or TCP socket.
//!
//! ```no_run
//! use std::net::TcpListener;
//! use std::sync::Arc;
//!
//! # fn source() -> Arc<dyn ferry_vfs::FileSystem> { unimplemented!() }
//! let listener = TcpListener::bind("127.0.0.1:5640")?;
//! let export = ferry_ninep::Export::start(vec![listener.into()], source(), ferry_ninep::Options::default())?;
//! // mount -t 9p -o trans=tcp,port=5640,version=9p2000.L,msize=1048576 127.0.0.1 /mnt
//! export.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it is put together
//!
//! A hub has an epoll descriptor that all its threads wait at. Whoever gets a connection's event takes one
//! message from it, lets the others have the connection again, serves the message and sends the reply: one wake-up for
//! a request, requests of one connection side by side, and no thread for a connection that is silent. Threads are
//! started while all are busy, up to a limit, and end when there is nothing to do.
//!
//! * `connection` and `line`: messages in, replies out, which requests are under way, what a flush does to them;
//! * `session`: what Tversion begins: fids and what they hold;
//! * `serve`: each request, as calls of the source.
//!
//! # Whom it trusts
//!
//! Nobody, with the server: whatever comes is decoded once, with every length checked; what a client can make us hold is
//! limited, and a client that begins and does not go on is disconnected ([`Limits`]). But 9P has no authentication: whoever
//! can connect is believed to be who it says, unless [`Users`] says otherwise. So unix sockets are to be for their user
//! alone, and TCP beyond this machine has to be asked for ([`Options::remote`]).
#![forbid(unsafe_code)]

mod checks;
mod connection;
mod hub;
mod line;
mod options;
mod serve;
mod session;
mod users;
mod worker;

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use ferry_vfs::{Caller, Errno, FileSystem, Ino};

use crate::hub::Hub;
pub use crate::hub::Usage;
pub use crate::options::{Limits, Options};
pub use crate::users::Users;

/// Where clients come from.
#[derive(Debug)]
pub enum Listener {
    /// A listening unix socket.
    Unix(UnixListener),
    /// A listening TCP socket.
    Tcp(TcpListener),
}

impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Self {
        Self::Unix(listener)
    }
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

/// Why a source cannot be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A TCP socket that other machines reach.
    #[error(
        "{0} can be reached from other machines, and 9P believes whoever connects; listen on 127.0.0.1, or say that this is meant"
    )]
    Remote(std::net::SocketAddr),
    /// No threads, or none that could serve a second request of a connection.
    #[error("{0} threads cannot serve; choose 2 or more")]
    Threads(usize),
    /// The message size.
    #[error("messages of {0} bytes; choose {min} to {max}", min = ferry_wire::ninep::MSIZE_MIN, max = options::MSIZE_MAX)]
    Msize(u32),
    /// A descriptor or thread is missing.
    #[error("the 9P server cannot be started ({what})")]
    System {
        /// The step that failed.
        what: &'static str,
        /// Why.
        #[source]
        reason: std::io::Error,
    },
}

/// A source being served.
#[derive(Debug)]
pub struct Export {
    hub: Arc<Hub>,
}

impl Export {
    /// Serves a source on sockets, by threads of its own.
    ///
    /// # Errors
    /// [`Error`]: the options make no sense, or the system lacks something.
    pub fn start(listeners: Vec<Listener>, source: Arc<dyn FileSystem>, options: Options) -> Result<Self, Error> {
        if options.limits.threads_max < 2 {
            return Err(Error::Threads(options.limits.threads_max));
        }
        if !(ferry_wire::ninep::MSIZE_MIN..=options::MSIZE_MAX).contains(&options.msize_max) {
            return Err(Error::Msize(options.msize_max));
        }
        for listener in &listeners {
            if let Listener::Tcp(listener) = listener
                && let Ok(address) = listener.local_addr()
                && !address.ip().is_loopback()
                && !options.remote
            {
                return Err(Error::Remote(address));
            }
        }
        Ok(Self { hub: Hub::start(listeners, source, options)? })
    }

    /// What clients hold at the moment, to be watched and tested.
    pub fn usage(&self) -> Usage {
        self.hub.usage()
    }

    /// Takes no more requests, lets those under way end, disconnects everybody and makes everything durable.
    pub fn stop(self) {
        // By the drop.
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.hub.stop();
        let source = &self.hub.source;
        if !self.hub.read_only {
            match source.syncfs(&Caller::default(), Ino::ROOT) {
                Ok(()) | Err(Errno::NOSYS) => {}
                Err(error) => tracing::error!("what 9P clients wrote may not be on disk: {error}"),
            }
        }
    }
}
