//! How long an agent vouches for what its client's kernel has cached.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferry_vfs::Handle;

/// How long after a request of an agent it still counts as there.
const LEASE: Duration = Duration::from_secs(2);
/// How long an agent waits at most where caches are leased: half a lease, so that a busy guest renews it in time.
pub(crate) const RENEWAL: Duration = Duration::from_secs(1);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Valid for a while after each request of an agent; at first it is not.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    /// In nanoseconds since the start.
    until: AtomicU64,
    /// The agent's root directory, which its kernel closes when the agent ends.
    handle: AtomicU64,
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Lease {
    /// The agent has asked for something.
    pub(crate) fn renew(&self) {
        self.until.store(nanoseconds(START.elapsed() + LEASE), Ordering::Relaxed);
    }

    /// The agent has asked for events, by this handle.
    pub(crate) fn renew_by(&self, handle: Handle) {
        self.handle.store(handle.0, Ordering::Relaxed);
        self.renew();
    }

    /// The client closes a directory: its agent has ended if it is the agent's.
    pub(crate) fn closed(&self, handle: Handle) {
        if self.until.load(Ordering::Relaxed) != 0 && self.handle.load(Ordering::Relaxed) == handle.0 {
            self.until.store(0, Ordering::Relaxed);
        }
    }

    /// Whether an agent tells the client's kernel what changes.
    pub(crate) fn is_valid(&self) -> bool {
        match self.until.load(Ordering::Relaxed) {
            0 => false,
            until => nanoseconds(START.elapsed()) < until,
        }
    }
}
