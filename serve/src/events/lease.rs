//! The lease during which an agent keeps its kernel's caches valid.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferry_vfs::Handle;

/// How long an agent counts as alive after a request.
const LEASE: Duration = Duration::from_secs(2);
/// The longest wait of an agent where caches are leased: half a lease, so that a busy guest renews it in time.
pub(crate) const RENEWAL: Duration = Duration::from_secs(1);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Valid for [`LEASE`] after each request of an agent; not valid initially.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    /// In nanoseconds since [`START`]; 0: no agent.
    until: AtomicU64,
    /// The agent's handle of the root directory, which its kernel closes when the agent ends.
    handle: AtomicU64,
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Lease {
    /// Renews the lease at a request of the agent.
    pub(crate) fn renew(&self) {
        self.renew_at(START.elapsed());
    }

    fn renew_at(&self, now: Duration) {
        self.until.store(nanoseconds(now + LEASE), Ordering::Relaxed);
    }

    /// Renews the lease at a request for events by this handle.
    pub(crate) fn renew_by(&self, handle: Handle) {
        self.handle.store(handle.0, Ordering::Relaxed);
        self.renew();
    }

    /// Ends the lease if the client has closed the agent's handle.
    pub(crate) fn closed(&self, handle: Handle) {
        if self.until.load(Ordering::Relaxed) != 0 && self.handle.load(Ordering::Relaxed) == handle.0 {
            self.until.store(0, Ordering::Relaxed);
        }
    }

    /// Whether an agent keeps the client's caches valid.
    pub(crate) fn is_valid(&self) -> bool {
        // Without an agent the clock need not be read.
        self.until.load(Ordering::Relaxed) != 0 && self.is_valid_at(START.elapsed())
    }

    fn is_valid_at(&self, now: Duration) -> bool {
        nanoseconds(now) < self.until.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest may be stopped for any time.
    #[test]
    fn a_lease_ends_after_any_jump_of_time() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |below: u64| {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let lease = Lease::default();
        let (mut now, mut until, mut agent) = (Duration::ZERO, Duration::ZERO, 0);
        for _ in 0..100_000 {
            // Nothing, about a lease, or up to an hour.
            let longest = [1, 2 * nanoseconds(LEASE), 3_600_000_000_000][usize::try_from(random(3)).unwrap()];
            now += Duration::from_nanos(random(longest));
            match random(4) {
                0 => {
                    lease.renew_at(now);
                    until = now + LEASE;
                }
                1 => {
                    agent = random(3);
                    lease.handle.store(agent, Ordering::Relaxed);
                }
                2 => {
                    let handle = random(3);
                    lease.closed(Handle(handle));
                    if handle == agent {
                        until = Duration::ZERO;
                    }
                }
                _ => {}
            }
            assert_eq!(lease.is_valid_at(now), now < until, "at {now:?}, until {until:?}");
            assert!(!lease.is_valid_at(now + LEASE));
        }
    }
}
