//! Options of an export.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use ferry_engine::{PollLimit, RateLimiter};

use crate::read_ahead::WINDOW_BYTES_MAX;
use crate::users::Users;

/// The range of [`Options::msize_max`] in bytes. Longer messages are not faster: the maximum takes 13 ms at 10 Gbit/s.
pub const MSIZE: RangeInclusive<u64> = ferry_wire::ninep::MSIZE_MIN as u64..=16 << 20;
/// The default maximum message size in bytes: four times Linux's maximum over sockets.
const MSIZE_DEFAULT: u32 = 4 << 20;

/// The default maximum time that a thread polls before it sleeps, as for virtio-fs.
const POLL_DEFAULT: Duration = Duration::from_micros(100);

/// Limits on the resources of clients.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The maximum number of connections. Beyond it, one of the client that has the most is closed.
    pub connections_max: usize,
    /// The maximum number of threads, and so of concurrent requests, which mostly wait for disks.
    pub threads_max: usize,
    /// The maximum total of unread replies, unfinished messages and values of extended attributes, in bytes. Beyond it
    /// a connection of the client that holds most is closed.
    pub buffered_bytes_max: usize,
    /// How long a client may take to attach, to complete a message, or to read the next bytes of a reply.
    pub slow_timeout: Duration,
    /// How long a client may be silent; `None`: forever, as an unused mount is.
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

/// Options of an export.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name in the log.
    pub name: String,
    /// Refuse all changes by clients.
    pub read_only: bool,
    /// Extended attributes and ACLs.
    pub xattr: bool,
    /// Clients check ACLs themselves (Linux mounted with `posixacl`), and get modes unchanged. Other clients get modes
    /// that grant no more than the ACL does; the protocol does not identify the kind of client.
    pub posix_acl: bool,
    /// The users that clients act as.
    pub users: Users,
    /// Other machines may connect to TCP sockets.
    pub remote: bool,
    /// The maximum message size that clients may request, in bytes: one of [`MSIZE`]. Each thread may hold one, and a
    /// reply of that length. Memory is allocated for received bytes, not for announced ones.
    pub msize_max: u32,
    /// How far the host reads ahead for sequential readers, in bytes; 0: not at all.
    pub read_ahead_bytes_max: u64,
    /// Ferry's own clients receive events, if the source publishes them. Clients whose permissions are checked
    /// ([`Users`]) do not: events might reveal names that they may not list.
    pub events: bool,
    /// The maximum time that a thread polls before it sleeps: for more of its connection, or for the guest.
    pub poll: PollLimit,
    /// Limits on the resources of clients.
    pub limits: Limits,
    /// Limits the rate of all clients' requests together. Requests that wait take no thread.
    pub limiter: Option<Arc<RateLimiter>>,
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
            events: false,
            poll: POLL_DEFAULT.into(),
            limits: Limits::default(),
            limiter: None,
        }
    }
}
