//! How an export is to behave.

use std::time::Duration;

use crate::ahead::WINDOW_BYTES_MAX;
use crate::users::Users;

/// The longest message that is agreed on: what Linux sends over sockets at most.
pub(crate) const MSIZE_MAX: u32 = 1 << 20;

/// What clients may take up.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at the same time; others are closed as soon as they come.
    pub connections_max: usize,
    /// Threads, and so the most requests that are served at the same time. They mostly wait for disks.
    pub threads_max: usize,
    /// The most that is held for clients who do not take their replies or do not finish their messages, all connections
    /// together, in bytes. Past it such connections are closed.
    pub buffered_bytes_max: usize,
    /// How long a client may take to attach, to send the rest of a message, or to take the next bytes of a reply.
    pub slow_timeout: Duration,
    /// How long a client may send nothing at all; `None`: for ever, as a mount that nobody uses does.
    pub idle_timeout: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 1024,
            threads_max: 64,
            buffered_bytes_max: 256 << 20,
            slow_timeout: Duration::from_secs(30),
            idle_timeout: None,
        }
    }
}

/// What is offered, to whom, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the log calls it.
    pub name: String,
    /// Let clients change nothing, whatever the source would let them.
    pub read_only: bool,
    /// Extended attributes and ACLs.
    pub xattr: bool,
    /// As whom clients act.
    pub users: Users,
    /// TCP sockets may be reached from other machines.
    pub remote: bool,
    /// The longest message, in bytes: 4096 to 1 MiB.
    pub msize_max: u32,
    /// How far the host is asked to read ahead of clients that read one piece after the other, in bytes; 0: not at all.
    pub read_ahead_bytes_max: u64,
    /// What clients may take up.
    pub limits: Limits,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: String::new(),
            read_only: false,
            xattr: true,
            users: Users::default(),
            remote: false,
            msize_max: MSIZE_MAX,
            read_ahead_bytes_max: WINDOW_BYTES_MAX,
            limits: Limits::default(),
        }
    }
}
