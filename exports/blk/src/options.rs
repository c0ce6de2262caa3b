//! Options of an exported disk.

use std::sync::Arc;
use std::time::Duration;

use ferry_engine::{IoMode, PollLimit, RateLimiter};

/// The vhost-user messages that name a queue have 8 bits for it.
pub const QUEUES_MAX: usize = 256;

/// The number of CPUs of a large guest: by default QEMU requests one queue per CPU, and does not start with fewer.
const QUEUES_DEFAULT: usize = 64;

/// The default of [`Options::poll`]: a little more than the time between consecutive requests of a guest, and far less
/// than a time slice.
const POLL_DEFAULT: Duration = Duration::from_micros(100);

/// Options of an export.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name of the disk in the log of requests.
    pub name: String,
    /// The number of queues; the guest may use fewer. Each has a worker, up to the number of CPUs.
    pub queues: usize,
    /// The maximum time that a worker polls before it sleeps.
    pub poll: PollLimit,
    /// Writes may stay in a cache until the guest flushes. Otherwise each write completes when it is durable.
    pub writeback: bool,
    /// How data is moved.
    pub io: IoMode,
    /// Register the guest's memory with io_uring, so that transfers skip the page lookup. It is then allocated and
    /// **pinned**: not for guests that return memory (a balloon, free page reporting, virtio-mem).
    pub pin_memory: bool,
    /// Limits the rate of the guest's requests. FLUSH is not charged.
    pub limiter: Option<Arc<RateLimiter>>,
    /// Called by each worker before its first request, as [`ferry_vhost::WorkerOptions::begun`].
    pub begun: Option<fn()>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: String::new(),
            // Unused queues have neither a worker nor memory.
            queues: QUEUES_DEFAULT,
            poll: POLL_DEFAULT.into(),
            writeback: true,
            io: IoMode::Auto,
            pin_memory: false,
            limiter: None,
            begun: None,
        }
    }
}
