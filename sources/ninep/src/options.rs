//! Options and errors of the client.

use std::io;
use std::time::Duration;

use ferry_vfs::Errno;

use crate::cache::Limits;

/// The maximum message size that is offered in bytes: that of Linux's client over sockets.
const MSIZE: u32 = 1 << 20;
/// Requests under way at a time: at 1 MiB each they fill a link of 10 Gbit/s with 50 ms of delay.
const DEPTH: usize = 64;
/// The default number of connections. One saturates a link, unless the network limits each connection.
const CONNECTIONS: usize = 1;
/// Longer than a busy server, or a disk below it, takes at worst.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Long enough for a server to be started again, and short of the 120 s after which mounts give a request up
/// themselves.
const PATIENCE: Duration = Duration::from_secs(60);

/// What this client caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Nothing: each read and write is a request.
    None,
    /// Data until a file is opened again and has changed (close-to-open).
    #[default]
    Auto,
    /// Data until eviction: for trees that no other client changes.
    Always,
}

/// How to use a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The tree to attach to; empty: the server's only one.
    pub tree: Vec<u8>,
    /// The user id that attaches: all requests use it, except those that create files, which use the caller's. Default:
    /// the user of this process.
    pub uid: u32,
    /// The user's name, for servers that want one. Default: empty, as Linux's client sends it.
    pub user: Vec<u8>,
    /// Longest message to offer, in bytes; the server may want shorter ones. Default: 1 MiB.
    pub msize: u32,
    /// Requests under way at a time, by each connection. Default: 64.
    pub depth: usize,
    /// Connections, 1 to 16. With more than one, data of files of which more than 4 MiB are moved take turns on all; fewer
    /// are made where the server takes no more. They end together. Default: 1.
    pub connections: usize,
    /// How long the server may be silent while a reply is due, before a reconnect. Default: 30 s.
    pub timeout: Duration,
    /// How long requests wait for a lost server before they fail with `EIO`, from the loss of the connection: later
    /// ones fail at once until the server is back. Default: 60 s.
    pub patience: Duration,
    /// What is kept. Default: [`Cache::Auto`].
    pub cache: Cache,
    /// Memory for cached file data, in bytes, at least 16 MiB. A quarter of it may be unwritten, and another quarter
    /// written but not durable. Default: 256 MiB.
    pub cache_bytes: usize,
    /// Nothing is to be changed. Default: no.
    pub read_only: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            tree: Vec::new(),
            uid: rustix::process::geteuid().as_raw(),
            user: Vec::new(),
            msize: MSIZE,
            depth: DEPTH,
            connections: CONNECTIONS,
            timeout: TIMEOUT,
            patience: PATIENCE,
            cache: Cache::Auto,
            cache_bytes: Limits::default().bytes_max,
            read_only: false,
        }
    }
}

/// Why a server cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server cannot be reached.
    #[error("cannot reach the 9P server at {address}: {reason}: is the server running?")]
    Unreachable {
        /// Where.
        address: String,
        /// Why.
        reason: io::Error,
    },
    /// It ended the connection, was silent, or spoke no 9P.
    #[error("the 9P server at {address} does not answer as one: {reason}")]
    NoAnswer {
        /// Where.
        address: String,
        /// What it did.
        reason: String,
    },
    /// It speaks other protocols only.
    #[error("the server at {address} speaks {spoken:?} and not 9P2000.L, the only 9P with Linux's files")]
    Version {
        /// Where.
        address: String,
        /// The version in its reply.
        spoken: String,
    },
    /// Its maximum message size is too small.
    #[error("the 9P server at {address} wants messages of {msize} bytes; at least 4096 are needed")]
    Msize {
        /// Where.
        address: String,
        /// Its message size.
        msize: u32,
    },
    /// It refuses this user, or every user, access to this tree.
    #[error("the 9P server at {address} refuses user {uid} the tree \"{tree}\": {errno}")]
    Refused {
        /// Where.
        address: String,
        /// Who.
        uid: u32,
        /// The option.
        tree: String,
        /// Why.
        errno: Errno,
    },
    /// An option is out of range.
    #[error("{what} must be {min} to {max}, not {value}")]
    Option {
        /// Which.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// No thread can be started.
    #[error("no thread can be started for the connection to a 9P server")]
    Threads(#[source] io::Error),
}
