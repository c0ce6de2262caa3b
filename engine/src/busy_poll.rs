//! Adaptive busy polling before sleeping.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// The shortest nonzero polling time.
const STEP_MIN: Duration = Duration::from_micros(8);

/// How often to read the clock while polling; a reading costs about as much as twenty iterations.
const TURNS_PER_LOOK: u32 = 16;

/// After this many doubled polls that found nothing just before work came, its producer probably waits for this CPU.
const VAIN_MAX: u32 = 3;

/// The number of sleeps without polling after that. The polls in between cost less than 1 % of their time.
const REST: u32 = 256;

/// The number of workers of this process that are awake.
static AWAKE: AtomicUsize = AtomicUsize::new(0);

/// The number of CPUs of the machine, including those that this process may not use, because its clients run there. The
/// C library reads it from /sys. Without /sys it is the number of CPUs of this process.
static CPUS: LazyLock<usize> = LazyLock::new(|| {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1)
});

/// Reads the number of CPUs. A process calls it before it loses access to /sys.
pub fn count_cpus() {
    LazyLock::force(&CPUS);
}

/// Returns whether polling leaves a CPU for others. On a machine with one CPU polling delays the producer of the work.
/// With more awake workers than CPUs it delays other workers.
fn is_cpu_to_spare() -> bool {
    *CPUS > 1 && AWAKE.load(Ordering::Relaxed) <= *CPUS
}

/// The maximum time that workers poll before a sleep; zero disables polling. It may change while they run, and its clones are the
/// same limit.
#[derive(Clone, Debug)]
pub struct PollLimit(Arc<AtomicU64>);

impl PollLimit {
    /// Creates a limit.
    #[must_use]
    pub fn new(max: Duration) -> Self {
        let limit = Self(Arc::default());
        limit.set(max);
        limit
    }

    /// Changes it, from the next poll on.
    pub fn set(&self, max: Duration) {
        self.0.store(u64::try_from(max.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns it.
    #[must_use]
    pub fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

impl From<Duration> for PollLimit {
    fn from(max: Duration) -> Self {
        Self::new(max)
    }
}

/// Adaptive polling, as in KVM's halt polling. After a sleep shorter than the maximum the next poll is longer; after a
/// longer sleep it is shorter. Unlike KVM, it infers from failed polls that another task waits for the CPU.
#[derive(Debug)]
pub struct BusyPoll {
    now: Duration,
    max: PollLimit,
    vain: u32,
    rest: u32,
}

impl BusyPoll {
    /// Creates a poller that polls for at most `max` before a sleep.
    pub fn new(max: PollLimit) -> Self {
        AWAKE.fetch_add(1, Ordering::Relaxed);
        Self { now: max.get().min(STEP_MIN), max, vain: 0, rest: 0 }
    }

    /// Returns whether a short poll is free: polling is enabled, and there is a CPU for every awake worker.
    pub fn is_free(&self) -> bool {
        !self.max.get().is_zero() && is_cpu_to_spare()
    }

    /// Returns whether a poll would call `ready` more than once.
    pub fn will_poll(&self) -> bool {
        !self.time().is_zero() && is_cpu_to_spare()
    }

    /// Returns the current polling time.
    fn time(&self) -> Duration {
        self.now.min(self.max.get())
    }

    /// Calls `ready` repeatedly for the current polling time. Returns whether it returned true.
    pub fn poll(&mut self, mut ready: impl FnMut() -> bool) -> bool {
        if !self.will_poll() {
            return ready();
        }
        let (start, time) = (Instant::now(), self.time());
        loop {
            for _ in 0..TURNS_PER_LOOK {
                if ready() {
                    self.vain = 0;
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= time || !is_cpu_to_spare() {
                return false;
            }
        }
    }

    /// Sleeps by calling `sleep`, and adapts the polling time to its duration.
    pub fn sleep<T>(&mut self, sleep: impl FnOnce() -> T) -> T {
        if self.rest > 0 {
            self.rest -= 1;
            return asleep(sleep);
        }
        let spared = is_cpu_to_spare();
        let start = Instant::now();
        let outcome = asleep(sleep);
        // A poll that did not take place was not unsuccessful.
        if spared {
            self.learn(start.elapsed());
        }
        outcome
    }

    /// Sleeps for this time.
    pub fn sleep_for(&self, time: Duration) {
        asleep(|| std::thread::sleep(time));
    }

    fn learn(&mut self, slept: Duration) {
        let max = self.max.get();
        if slept > max {
            self.now /= 2;
            self.vain = 0;
        } else if self.vain == VAIN_MAX {
            self.now = Duration::ZERO;
            self.vain = 0;
            self.rest = REST;
        } else {
            self.vain += 1;
            self.now = (self.now * 2).max(STEP_MIN).min(max);
        }
    }
}

fn asleep<T>(sleep: impl FnOnce() -> T) -> T {
    AWAKE.fetch_sub(1, Ordering::Relaxed);
    let outcome = sleep();
    AWAKE.fetch_add(1, Ordering::Relaxed);
    outcome
}

impl Drop for BusyPoll {
    fn drop(&mut self) {
        AWAKE.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(100);

    #[test]
    fn short_sleeps_lengthen_polling_and_long_ones_end_it() {
        let mut busy_poll = BusyPoll::new(MAX.into());
        busy_poll.learn(MAX / 2);
        busy_poll.learn(MAX / 2);
        assert_eq!(busy_poll.now, STEP_MIN * 4);
        assert!(busy_poll.poll(|| true));
        for _ in 0..2 {
            busy_poll.learn(MAX / 2);
            assert!(busy_poll.poll(|| true));
        }
        assert_eq!(busy_poll.now, MAX);
        for _ in 0..20 {
            busy_poll.learn(MAX * 2);
        }
        assert!(busy_poll.now.is_zero());
        assert!(busy_poll.poll(|| true));
        assert!(!busy_poll.poll(|| false));
    }

    #[test]
    fn polling_pauses_after_unsuccessful_polls() {
        let mut busy_poll = BusyPoll::new(MAX.into());
        for _ in 0..VAIN_MAX {
            assert!(!busy_poll.poll(|| false));
            busy_poll.learn(STEP_MIN);
            assert!(!busy_poll.now.is_zero());
        }
        busy_poll.learn(STEP_MIN);
        assert_eq!((busy_poll.now, busy_poll.rest), (Duration::ZERO, REST));
        for _ in 0..REST {
            busy_poll.sleep(|| ());
        }
        assert_eq!((busy_poll.now, busy_poll.rest), (Duration::ZERO, 0));
        busy_poll.learn(STEP_MIN);
        assert_eq!(busy_poll.now, STEP_MIN, "and tries again");
    }

    #[test]
    fn no_polling_without_a_spare_cpu() {
        let mut spins: Vec<BusyPoll> = (0..=*CPUS).map(|_| BusyPoll::new(MAX.into())).collect();
        let mut asked = 0;
        assert!(!spins[0].poll(|| {
            asked += 1;
            false
        }));
        assert_eq!(asked, 1);
    }

    #[test]
    fn a_changed_limit_holds_from_the_next_poll_on() {
        let limit = PollLimit::new(MAX);
        let mut busy_poll = BusyPoll::new(limit.clone());
        assert_eq!((busy_poll.time(), busy_poll.max.get()), (STEP_MIN, MAX));
        limit.set(Duration::ZERO);
        assert!(busy_poll.time().is_zero() && !busy_poll.will_poll() && !busy_poll.is_free());
        busy_poll.learn(MAX);
        assert!(busy_poll.time().is_zero());
        limit.set(MAX);
        for _ in 0..VAIN_MAX {
            busy_poll.learn(STEP_MIN);
        }
        assert!(busy_poll.time() >= STEP_MIN, "it polls again: {busy_poll:?}");
        limit.set(Duration::MAX);
        assert_eq!(limit.get(), Duration::from_nanos(u64::MAX));
    }

    #[test]
    fn zero_never_polls() {
        let mut busy_poll = BusyPoll::new(Duration::ZERO.into());
        busy_poll.sleep(|| ());
        let mut asked = 0;
        assert!(!busy_poll.poll(|| {
            asked += 1;
            false
        }));
        assert_eq!(asked, 1);
    }
}
