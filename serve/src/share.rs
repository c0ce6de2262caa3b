//! State that all clients of one export share.

use std::sync::Arc;
use std::time::Duration;

use ferry_engine::metrics::Metrics;
use ferry_engine::{BlockingPool, RateLimiter, RatelimitedLog};
use ferry_vfs::{FileSystem, OFlags};

use crate::active_request;
use crate::events::Timer;
use crate::operations::DURABLE_FLAGS;
use crate::policy::{Acl, Cache, Policy, Timeout};
use crate::usage::{Clients, Usage};

/// How a share is to behave.
#[derive(Clone, Debug)]
pub struct ShareOptions {
    /// What the log calls it: the directory, or whatever the user named.
    pub name: String,
    /// Let clients change nothing, whatever the source would let them.
    pub read_only: bool,
    /// What clients may keep.
    pub cache: Cache,
    /// How long clients may keep names; `None`: as the cache mode says.
    pub entry_timeout: Option<Duration>,
    /// How long clients may keep attributes; `None`: as the cache mode says.
    pub attr_timeout: Option<Duration>,
    /// How long clients may remember that a name does not exist; `None`: as the cache mode says.
    pub negative_timeout: Option<Duration>,
    /// Let the client's page cache hold written data back. The source must have been told.
    pub writeback: bool,
    /// Files whose data clients may not keep can be mapped all the same; what is mapped is kept until it is unmapped.
    pub mmap: bool,
    /// Listings bring the attributes along, where clients may keep them.
    pub readdirplus: bool,
    /// Extended attributes and POSIX ACLs. Without them a client asks once and never again.
    pub xattr: bool,
    /// POSIX ACLs, if [`Self::xattr`] are there.
    pub posix_acl: Acl,
    /// Whether what clients make gets the labels of their security modules at once, if [`Self::xattr`] are there.
    pub security_label: Acl,
    /// Clients may make idmapped mounts of it (Linux 6.12, `ALLOW_IDMAP`). Linux then names the caller only where something is
    /// made: root and others are [`ferry_vfs::Caller::UNKNOWN`] otherwise.
    pub allow_idmap: bool,
    /// Files opened with `O_DIRECT` leave the client's page cache out altogether. Without, Linux sends an
    /// `O_DIRECT | O_SYNC` write down the cached path and an fsync behind it: 30 instead of 200 thousand a second.
    pub direct_opens: bool,
    /// Locks are each client's own, which its kernel keeps: others do not meet them. Then no FLUSH is needed to give them back, and Linux
    /// (from 5.16 on, and not with [`Self::writeback`]) sends none for files that were opened for reading only.
    pub local_locks: bool,
    /// Nobody but this share's one client reaches the source's files. Its kernel keeps the locks then, which would meet no others, and is
    /// asked for no FLUSH, whatever files were opened for.
    pub single_client: bool,
    /// Clients are told of what others change, as far as the source says so. Those that cannot be told that any name may
    /// have changed then keep names for half a minute at most, unless it is chosen how long.
    pub told: bool,
    /// Agents of clients are told what others do, for programs that watch files. The source must publish events.
    pub events: bool,
    /// Charges requests; the carrier waits before it takes the next one. `None`: there is never a limit.
    pub limiter: Option<Arc<RateLimiter>>,
}

impl Default for ShareOptions {
    fn default() -> Self {
        Self {
            name: String::new(),
            read_only: false,
            cache: Cache::Auto,
            entry_timeout: None,
            attr_timeout: None,
            negative_timeout: None,
            writeback: false,
            mmap: true,
            readdirplus: true,
            xattr: true,
            posix_acl: Acl::Auto,
            security_label: Acl::Never,
            allow_idmap: false,
            direct_opens: false,
            local_locks: false,
            single_client: false,
            told: false,
            events: false,
            limiter: None,
        }
    }
}

/// A source as one export serves it, shared by all servers of all clients.
pub struct Share {
    pub(crate) name: String,
    pub(crate) source: Arc<dyn FileSystem>,
    pub(crate) policy: Policy,
    pub(crate) read_only: bool,
    pub(crate) xattr: bool,
    /// Writes with one of these wait for a device.
    pub(crate) waiting_flags: OFlags,
    pub(crate) ratelimited_log: RatelimitedLog,
    pub(crate) blocking_pool: BlockingPool,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) clients: Clients,
    pub(crate) limiter: Option<Arc<RateLimiter>>,
    pub(crate) events: bool,
    pub(crate) event_timer: Timer,
}

impl std::fmt::Debug for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Share").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Share {
    /// Offers a source.
    pub fn new(source: Arc<dyn FileSystem>, options: &ShareOptions) -> Self {
        let features = source.features();
        Self {
            name: options.name.clone(),
            policy: Policy::new(options, features, source.changes().is_some()),
            read_only: features.read_only || options.read_only,
            xattr: options.xattr,
            waiting_flags: if features.direct { DURABLE_FLAGS | OFlags::DIRECT } else { DURABLE_FLAGS },
            source,
            ratelimited_log: RatelimitedLog::default(),
            blocking_pool: BlockingPool::default(),
            metrics: Arc::new(active_request::metrics()),
            clients: Clients::default(),
            limiter: options.limiter.clone(),
            events: options.events,
            event_timer: Timer::default(),
        }
    }

    /// The source.
    pub fn source(&self) -> &Arc<dyn FileSystem> {
        &self.source
    }

    /// The log for messages that a client can cause.
    pub fn ratelimited_log(&self) -> &RatelimitedLog {
        &self.ratelimited_log
    }

    /// Returns the counters of its requests.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Returns what its clients hold now.
    pub fn usage(&self) -> Usage {
        self.clients.usage()
    }

    /// Changes how long clients may keep what they are told, from the next reply on; `None`: as the cache mode says.
    pub fn set_timeout(&self, timeout: Timeout, time: Option<Duration>) {
        self.policy.set_timeout(timeout, time);
    }

    /// The limiter, for carriers: they wait as long as it says before they take the next request.
    pub fn limiter(&self) -> Option<&Arc<RateLimiter>> {
        self.limiter.as_ref()
    }

    /// Threads for what may take long.
    pub fn blocking_pool(&self) -> &BlockingPool {
        &self.blocking_pool
    }
}
