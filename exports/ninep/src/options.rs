//! Options of an export.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::read_ahead::WINDOW_BYTES_MAX;
use crate::users::Users;

/// What [`Options::msize_max`] may be, in bytes. Longer messages gain nothing: at 10 Gbit/s such a one is under way for 13 ms.
pub const MSIZE: RangeInclusive<u64> = ferry_wire::ninep::MSIZE_MIN as u64..=16 << 20;
/// The longest message unless the owner says otherwise: four of Linux's longest over sockets.
const MSIZE_DEFAULT: u32 = 4 << 20;

/// What clients may take up.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at the same time. Further ones are closed as soon as they come, unless another client has more: then one of
    /// that client's is.
    pub connections_max: usize,
    /// Threads, and so the most requests that are served at the same time. They mostly wait for disks.
    pub threads_max: usize,
    /// The most that is held for clients who do not take their replies or do not finish their messages, and for values of
    /// extended attributes, all connections together, in bytes. Past it a connection of the client that holds most is closed.
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
            threads_max: 96,
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
    /// Clients check ACLs on their own (Linux's, mounted with `posixacl`), and are shown modes as they are. Others are
    /// shown modes that give nobody more than an ACL does; the protocol does not tell which a client is.
    pub posix_acl: bool,
    /// As whom clients act.
    pub users: Users,
    /// TCP sockets may be reached from other machines.
    pub remote: bool,
    /// The longest message that clients may ask for, in bytes: one of [`MSIZE`]. Each thread may hold one, and a reply of that
    /// length; memory is taken for what has come, not for what was announced.
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
            posix_acl: false,
            users: Users::default(),
            remote: false,
            msize_max: MSIZE_DEFAULT,
            read_ahead_bytes_max: WINDOW_BYTES_MAX,
            limits: Limits::default(),
        }
    }
}
