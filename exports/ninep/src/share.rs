//! The share, independently of the transport.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;

use ferry_engine::metrics::Metrics;
use ferry_engine::{BlockingPool, RatelimitedLog};
use ferry_serve::events::Timer;
use ferry_vfs::{Caller, Errno, FileSystem, Ino};

use crate::{Error, Options};

/// See the module.
pub(crate) struct Share {
    pub(crate) source: Arc<dyn FileSystem>,
    pub(crate) options: Options,
    pub(crate) read_only: bool,
    /// Its requests wait for another server.
    pub(crate) waits: bool,
    pub(crate) ratelimited_log: RatelimitedLog,
    /// Threads for work that must not be done by the caller.
    pub(crate) blocking_pool: BlockingPool,
    pub(crate) metrics: Arc<Metrics>,
    /// The bytes of read-ahead requests.
    pub(crate) read_ahead_bytes: AtomicU64,
    /// Ends waits for events.
    pub(crate) event_timer: Timer,
}

impl std::fmt::Debug for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Share").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Share {
    pub(crate) fn new(source: Arc<dyn FileSystem>, options: Options) -> Self {
        Self {
            read_only: options.read_only || source.features().read_only,
            waits: source.features().waits,
            source,
            options,
            ratelimited_log: RatelimitedLog::default(),
            blocking_pool: BlockingPool::default(),
            metrics: Arc::new(crate::serve::metrics()),
            read_ahead_bytes: AtomicU64::new(0),
            event_timer: Timer::default(),
        }
    }

    /// Checks whether permissions can be enforced as required: makes one call to the source per user.
    pub(crate) fn can_check_users(&self) -> Result<(), Error> {
        // On a separate thread: one that acts as another user loses its parent-death signal (PR_SET_PDEATHSIG).
        thread::scope(|scope| {
            let checked = thread::Builder::new().spawn_scoped(scope, || self.check_users());
            let checked = checked.map_err(|reason| Error::System { what: "start a thread", reason })?;
            checked.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn check_users(&self) -> Result<(), Error> {
        self.options.users.bound().try_for_each(|user| {
            let groups = self.options.users.groups(user);
            let caller = Caller { uid: user.uid, gid: user.gid, groups, ..Caller::default() };
            match self.source.access(&caller, Ino::ROOT, 0) {
                Ok(()) => Ok(()),
                Err(Errno::NOSYS) => Err(Error::Unchecked(user.uid)),
                Err(reason) => Err(Error::Users { uid: user.uid, gid: user.gid, reason }),
            }
        })
    }

    /// Syncs everything after the last client.
    pub(crate) fn sync(&self) {
        if !self.read_only {
            ferry_engine::sync_on_stop(&*self.source);
        }
    }
}
