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

/// The options of a share.
#[derive(Clone, Debug)]
pub struct ShareOptions {
    /// Its name in the log: the directory, or what the user named.
    pub name: String,
    /// Clients may change nothing.
    pub read_only: bool,
    /// What clients may cache.
    pub cache: Cache,
    /// How long clients may cache names; `None`: as the cache mode says.
    pub entry_timeout: Option<Duration>,
    /// How long clients may cache attributes; `None`: as the cache mode says.
    pub attr_timeout: Option<Duration>,
    /// How long clients may cache that a name does not exist; `None`: as the cache mode says.
    pub negative_timeout: Option<Duration>,
    /// The client's page cache may delay writes (`WRITEBACK_CACHE`). The source must have been configured for it.
    pub writeback: bool,
    /// Files whose data clients may not cache can be mapped shared; mapped data is cached until it is unmapped.
    pub mmap: bool,
    /// Listings include the attributes (READDIRPLUS), where clients may cache them.
    pub readdirplus: bool,
    /// Extended attributes and POSIX ACLs. Without them a client gets ENOSYS once and does not send these requests
    /// again.
    pub xattr: bool,
    /// POSIX ACLs; needs [`Self::xattr`].
    pub posix_acl: Acl,
    /// Whether new files get the labels of the client's security modules atomically; needs [`Self::xattr`].
    pub security_label: Acl,
    /// Clients may make idmapped mounts of it (Linux 6.12, `ALLOW_IDMAP`). Linux then sends the caller only with
    /// requests that create something; otherwise it is [`ferry_vfs::Caller::UNKNOWN`].
    pub allow_idmap: bool,
    /// Files opened with `O_DIRECT` bypass the client's page cache. Otherwise Linux serves an `O_DIRECT | O_SYNC`
    /// write by the cached path followed by an fsync, which is several times slower.
    pub direct_opens: bool,
    /// Each client's kernel keeps its own locks; they do not conflict with those of others. Then no FLUSH is needed
    /// to release them, and Linux (from 5.16 on, without [`Self::writeback`]) sends none for files opened for reading
    /// only.
    pub local_locks: bool,
    /// Only this share's one client accesses the source's files. Its kernel keeps the locks, and it sends no FLUSH at
    /// all.
    pub single_client: bool,
    /// Clients are notified of changes by others, as far as the source reports them. Clients that cannot drop all
    /// names at once then cache names for half a minute at most, unless a timeout is set.
    pub notifications: bool,
    /// Clients ignore notifications about names that do not exist (Linux 6.19 to 7.1): they may not cache that a name does not exist, unless
    /// a timeout is set.
    pub keeps_absent_names: bool,
    /// Clients' agents receive events, for programs that watch files. The source must publish events.
    pub events: bool,
    /// Charges requests; the carrier waits before it takes the next one. `None`: no limit can be set.
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
            notifications: false,
            keeps_absent_names: false,
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
    /// Writes with one of these flags wait for a device.
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

    /// Returns the source.
    pub fn source(&self) -> &Arc<dyn FileSystem> {
        &self.source
    }

    /// Returns the log for messages that a client can cause.
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

    /// Sets a timeout from the next reply on; `None`: as the cache mode says.
    pub fn set_timeout(&self, timeout: Timeout, time: Option<Duration>) {
        self.policy.set_timeout(timeout, time);
    }

    /// Returns the limiter, for carriers: they wait as long as it says before they take the next request.
    pub fn limiter(&self) -> Option<&Arc<RateLimiter>> {
        self.limiter.as_ref()
    }

    /// Returns the threads for long calls.
    pub fn blocking_pool(&self) -> &BlockingPool {
        &self.blocking_pool
    }
}
