//! The source "remote 9P server": a 9P2000.L client that merges neighbouring pages into long messages and keeps several
//! of them under way.
//!
//! ```no_run
//! use std::sync::Arc;
//! use ferry_9p_client::{Client, Options, Tcp};
//!
//! let server = Tcp { host: "files.example".into(), port: 564 };
//! let source = Client::connect(Arc::new(server), Options::default())?;
//! // From here on it is a `ferry_vfs::FileSystem` as any other.
//! # Ok::<(), ferry_9p_client::Error>(())
//! ```
//!
//! # How it is put together
//!
//! * `transport`: how a server is reached; `connection`: one connection, requests out and replies in; `session`: the
//!   state that Tversion begins, users and fids; `link`: the access to the server, which outlives connections;
//! * `inode`: files, each with its fid and the place where it was found; `file`, `names`, `listing`, `xattr`, `locks`: the
//!   requests;
//! * [`cache`]: the bytes of files, read ahead and written behind;
//! * `events`: what others do, as servers of Ferry's tell.
//!
//! # When the connection is lost
//!
//! The client reconnects, however long that takes, and requests wait for [`Options::patience`]. Fids are found again by
//! the names that led to them; another file there is an error (`ESTALE`). Open files are reopened and locks set again.
//! Idempotent requests in flight are repeated. Others (creating, linking, renaming, removing) fail with `EIO`, because
//! their outcome is unknown. A write without a successful fsync may be lost with the server; the next fsync reports
//! that.
//!
//! # Trust
//!
//! The server is trusted with the files, but not with this process. Replies are decoded with every length checked, and an invalid one
//! ends the connection. The client's kernel checks permissions. The server sees one user ([`Options::uid`]), except for
//! new files, which are created as the caller.
#![forbid(unsafe_code)]

pub mod cache;
mod change_count;
mod client;
mod connection;
mod connector;
mod data;
mod event_batch;
mod events;
mod extra_connections;
mod file;
mod fs;
mod inode;
mod key;
mod link;
mod listing;
mod locks;
mod names;
mod open_fids;
mod options;
mod removals;
mod session;
#[cfg(feature = "tls")]
mod tls;
mod transport;
mod xattr;

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use client::Shared;
pub use connector::Connector;
use link::Link;
pub use options::{Cache, Error, Options};
#[cfg(feature = "tls")]
pub use tls::{Tls, TlsError};
pub use transport::{Stream, Tcp, Transport, Unix, Vsock};

/// The range of message sizes: from the protocol's longest short messages to this client's maximum.
const MSIZE: std::ops::RangeInclusive<u32> = ferry_wire::ninep::MSIZE_MIN..=64 << 20;
/// Tags are 16 bits, and some are for locks.
const DEPTH: std::ops::RangeInclusive<usize> = 1..=4096;
/// The maximum is that of Linux's NFS client.
const CONNECTIONS: std::ops::RangeInclusive<usize> = 1..=16;

/// The minimum holds the concurrent reads of one file.
const CACHE_BYTES: std::ops::RangeInclusive<usize> = 16 << 20..=usize::MAX >> 1;

/// Counters and resources of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Requests sent so far.
    pub messages: u64,
    /// The maximum number of concurrent requests.
    pub in_flight_max: usize,
    /// Connections, including those being re-established.
    pub connections: usize,
    /// Referenced files.
    pub inodes: usize,
    /// Open files and directories.
    pub handles: usize,
}

/// A 9P server's tree as a file system.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
    /// Receives events, if the server has some.
    listener: Option<JoinHandle<()>>,
}

impl Client {
    /// Connects to a server and attaches to its tree.
    ///
    /// # Errors
    /// [`Error`]: it cannot be reached, is no server of 9P2000.L, or does not let this user attach.
    pub fn connect(transport: Arc<dyn Transport>, options: Options) -> Result<Self, Error> {
        Self::connect_by(Connector::begin(|| ()).map_err(Error::Threads)?, transport, options)
    }

    /// Fetches the root's attributes, so that umount(8), which requests them first, does not wait for a server that is
    /// gone by then. It takes at most 2 s.
    ///
    /// # Errors
    /// The server's.
    pub fn refresh_root(&self) -> ferry_vfs::Result<()> {
        self.shared.refresh_root()
    }

    /// As [`Self::connect`], with an existing thread that makes all connections, now and after a loss.
    ///
    /// # Errors
    ///
    /// Those of [`Self::connect`].
    pub fn connect_by(connector: Connector, transport: Arc<dyn Transport>, options: Options) -> Result<Self, Error> {
        let bad = |what, value: u64, min: u64, max: u64| Err(Error::Option { what, value, min, max });
        if !MSIZE.contains(&options.msize) {
            return bad("msize", options.msize.into(), (*MSIZE.start()).into(), (*MSIZE.end()).into());
        }
        if !DEPTH.contains(&options.depth) {
            return bad("depth", options.depth as u64, *DEPTH.start() as u64, *DEPTH.end() as u64);
        }
        if !CONNECTIONS.contains(&options.connections) {
            let (min, max) = (*CONNECTIONS.start() as u64, *CONNECTIONS.end() as u64);
            return bad("connections", options.connections as u64, min, max);
        }
        if !CACHE_BYTES.contains(&options.cache_bytes) {
            let (min, max) = (*CACHE_BYTES.start() as u64, *CACHE_BYTES.end() as u64);
            return bad("cache_bytes", options.cache_bytes as u64, min, max);
        }
        let ((made, link), (known, shared)) = (mpsc::channel(), mpsc::channel());
        let work = move || {
            let outcome = Link::new(transport, options);
            // Dropped if the caller has gone.
            if made.send(outcome).is_ok()
                && let Ok(shared) = shared.recv()
            {
                client::keep(&shared);
            }
        };
        let keeper = connector.start(Box::new(work)).map_err(Error::Threads)?;
        let link = link.recv().map_err(|_| Error::Threads(connector::has_ended()))??;
        let shared = Shared::new(link)?;
        let mut client = Self { shared, keeper: Some(keeper), listener: None };
        // The keeper waits for it.
        drop(known.send(Arc::downgrade(&client.shared)));
        if client.shared.link.has_events {
            let shared = Arc::clone(&client.shared);
            let listener = std::thread::Builder::new().name("9p-events".into()).spawn(move || shared.receive_events());
            client.listener = Some(listener.map_err(Error::Threads)?);
        }
        Ok(client)
    }

    /// Returns the counters and resources.
    pub fn usage(&self) -> Usage {
        let Shared { link, inodes, files, dirs, .. } = &*self.shared;
        Usage {
            messages: link.counts.messages.load(Ordering::Relaxed),
            in_flight_max: link.counts.in_flight_max.load(Ordering::Relaxed),
            connections: link.current().connections(),
            inodes: inodes.len(),
            handles: files.len() + dirs.len(),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.link.end();
        // They are joined only so that they have ended. What the listener publishes may drop the last reference to this.
        let threads = self.keeper.take().into_iter().chain(self.listener.take());
        threads.filter(|thread| thread.thread().id() != std::thread::current().id()).for_each(|it| drop(it.join()));
    }
}
