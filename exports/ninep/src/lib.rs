//! The 9P export: serves a source over 9P2000.L on unix, TCP and vsock sockets, or as a vhost-user device to a virtual
//! machine.
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
//! # Structure
//!
//! For sockets, a hub has an epoll descriptor that all its threads wait at. The thread that gets a connection's event
//! receives the available messages, serves one after the other, and sends the replies together. Before a request
//! blocks, the connection is handed over to the other threads: slow requests run concurrently, and a silent
//! connection has no thread. Threads are started while all are busy, up to a limit, and end when idle.
//!
//! * `clients`: the resources of each client, and which connection is closed at the limit;
//! * `request_table`: the requests in flight, and the effect of a flush on them;
//! * `session`: the state from a Tversion on: fids and what they hold;
//! * `serve`: each request as calls of the source; `carrier` is its interface to the transports:
//! * `connection`, `outbox` and `message`: messages of sockets, replies on their way out; `stream`: their bytes,
//!   plain or inside TLS (feature `tls`);
//! * `device`: descriptor chains.
//!
//! # Trust
//!
//! No client is trusted with the server: messages are decoded once, with every length checked. The resources of a
//! client are limited, and a client that stalls is disconnected ([`Limits`]). But 9P has no authentication: the
//! server believes the user ids that a client sends, unless [`Users`] restricts them. So a unix socket must be
//! private to its user, and TCP for other machines must be enabled ([`Options::remote`]), unless TLS requires client
//! certificates. A vsock socket is reachable by all virtual machines of this host, unless its address names one.
#![forbid(unsafe_code)]

mod append_tracking;
mod carrier;
mod clients;
mod connection;
mod delayed_requests;
mod device;
mod hub;
mod inbox;
mod keepalive;
mod message;
mod options;
mod outbox;
mod own_renames;
mod pace;
mod peer;
mod qids;
mod rate;
mod read_ahead;
mod request_table;
mod serve;
mod session;
mod share;
mod shrink;
mod stream;
#[cfg(feature = "tls")]
mod tls;
mod users;
mod worker;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_engine::metrics::Metrics;
use ferry_vfs::{Errno, FileSystem};
use ferry_vhost::ServerError;

pub use ferry_engine::RateLimiter;

pub use crate::device::DeviceOptions;
use crate::hub::Hub;
pub use crate::hub::Usage;
pub use crate::options::{Limits, MSIZE, Options};
use crate::share::Share;
use crate::stream::Stream;
#[cfg(feature = "tls")]
pub use crate::tls::{Tls, TlsError};
pub use crate::users::{Identity, Users};

/// Where clients come from.
#[derive(Debug)]
pub enum Listener {
    /// A listening unix socket.
    Unix(UnixListener),
    /// A listening TCP socket.
    Tcp(TcpListener),
    /// A listening TCP socket with TLS.
    #[cfg(feature = "tls")]
    Tls(TcpListener, Tls),
    /// A listening vsock socket.
    Vsock(OwnedFd),
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

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
            #[cfg(feature = "tls")]
            Self::Tls(listener, _) => listener.as_fd(),
            Self::Vsock(listener) => listener.as_fd(),
        }
    }
}

impl Listener {
    /// Returns the address, if it admits any client of the network.
    fn allows_any_client(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            #[cfg(feature = "tls")]
            Self::Tls(listener, tls) if !tls.checks_clients => listener.local_addr().ok(),
            _ => None,
        }
    }

    /// Whether clients connect by TCP.
    pub(crate) fn is_tcp(&self) -> bool {
        !matches!(self, Self::Unix(_) | Self::Vsock(_))
    }

    /// Returns the byte stream of a new client; `None` if TLS cannot be set up.
    pub(crate) fn stream(&self, fd: OwnedFd) -> Option<Stream> {
        match self {
            #[cfg(feature = "tls")]
            Self::Tls(_, tls) => Stream::sealed(fd, tls),
            _ => Some(Stream::plain(fd)),
        }
    }
}

/// Why a source cannot be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A TCP socket that other machines can connect to.
    #[error(
        "{0} can be reached from other machines, and 9P does not authenticate clients; listen on 127.0.0.1, or say that this is meant"
    )]
    Remote(SocketAddr),
    /// Too few threads: a second request of a connection would not be served.
    #[error("{0} threads cannot serve; choose 2 or more")]
    Threads(usize),
    /// The message size.
    #[error("messages of {0} bytes; choose {min} to {max}", min = MSIZE.start(), max = MSIZE.end())]
    Msize(u32),
    /// The tag of a device.
    #[error("the tag {0:?} has {len} bytes; a 9P tag has 1 to 255, none of them NUL", len = .0.len())]
    Tag(String),
    /// Permissions of users must be checked, but the source checks none.
    #[error("this source checks no permissions, so its clients cannot be restricted to those of user {0}")]
    Unchecked(u32),
    /// Permissions of users must be checked, but the server cannot act as them.
    #[error(
        "this server cannot act as user {uid} with group {gid} ({reason}): it takes root, or CAP_SETUID and CAP_SETGID; a server of \
         that very user needs neither, but must have no further groups and no capabilities"
    )]
    Users {
        /// The user.
        uid: u32,
        /// Its group.
        gid: u32,
        /// The error of the source.
        reason: Errno,
    },
    /// The device's server.
    #[error(transparent)]
    Device(#[from] ServerError),
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
    share: Arc<Share>,
    /// `None` after the stop.
    way: Option<Transport>,
}

/// How clients reach it.
#[derive(Debug)]
enum Transport {
    Sockets(Arc<Hub>),
    Device(device::ServedDevice),
}

/// Returns the shared state of clients, if the options are valid and possible.
fn share(source: Arc<dyn FileSystem>, options: Options) -> Result<Arc<Share>, Error> {
    if !MSIZE.contains(&options.msize_max.into()) {
        return Err(Error::Msize(options.msize_max));
    }
    let share = Share::new(source, options);
    share.can_check_users()?;
    Ok(Arc::new(share))
}

impl Export {
    /// Serves a source on sockets, on separate threads.
    ///
    /// # Errors
    ///
    /// [`Error`]: the options are invalid, or the system lacks resources.
    pub fn start(listeners: Vec<Listener>, source: Arc<dyn FileSystem>, options: Options) -> Result<Self, Error> {
        if options.limits.threads_max < 2 {
            return Err(Error::Threads(options.limits.threads_max));
        }
        for listener in &listeners {
            if let Some(address) = listener.allows_any_client()
                && !address.ip().is_loopback()
                && !options.remote
            {
                return Err(Error::Remote(address));
            }
        }
        let share = share(source, options)?;
        let hub = Hub::start(listeners, Arc::clone(&share))?;
        Ok(Self { share, way: Some(Transport::Sockets(hub)) })
    }

    /// Serves a source as a virtio-9p device over vhost-user, to one virtual machine monitor after another.
    /// [`Options::limits`] and [`Options::remote`] do not apply: the queue size bounds a guest's requests.
    ///
    /// # Errors
    ///
    /// [`Error`]: the options are invalid, or the system lacks resources.
    pub fn vhost_user(
        listener: UnixListener,
        source: Arc<dyn FileSystem>,
        device: DeviceOptions,
        options: Options,
    ) -> Result<Self, Error> {
        let share = share(source, options)?;
        let served = device::ServedDevice::start(listener, &share, device)?;
        Ok(Self { share, way: Some(Transport::Device(served)) })
    }

    /// Returns the current resources of clients, for monitoring and tests.
    pub fn usage(&self) -> Usage {
        match &self.way {
            Some(Transport::Sockets(hub)) => hub.usage(),
            Some(Transport::Device(device)) => device.usage(),
            None => Usage::default(),
        }
    }

    /// Returns a function that returns [`Self::usage`]: nothing once the export has ended.
    pub fn usage_reader(&self) -> Box<dyn Fn() -> Usage + Send + Sync> {
        match &self.way {
            Some(Transport::Sockets(hub)) => {
                let hub = Arc::downgrade(hub);
                Box::new(move || hub.upgrade().map_or_else(Usage::default, |hub| hub.usage()))
            }
            Some(Transport::Device(device)) => device.usage_reader(),
            None => Box::new(Usage::default),
        }
    }

    /// Returns the counters of its requests.
    pub fn metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.share.metrics)
    }

    /// Returns the number of bytes of read-ahead requests so far.
    pub fn read_ahead_bytes(&self) -> u64 {
        self.share.read_ahead_bytes.load(Ordering::Relaxed)
    }

    /// Stops accepting requests, completes those in flight, disconnects all clients and syncs everything.
    pub fn stop(self) {
        // The drop does it.
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        match self.way.take() {
            Some(Transport::Sockets(hub)) => hub.stop(),
            Some(Transport::Device(device)) => device.stop(),
            None => {}
        }
        self.share.sync();
    }
}
