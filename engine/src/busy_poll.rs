//! Adaptive busy polling before sleeping.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The first step up from not polling at all.
const STEP_MIN: Duration = Duration::from_micros(8);

/// How often to look at the clock while spinning; a look costs about as much as twenty turns.
const TURNS_PER_LOOK: u32 = 16;

/// So many polls in a row, each twice as long as the one before, that ended in nothing although work came shortly
/// after, mean that whoever makes the work is waiting for our CPU.
const VAIN_MAX: u32 = 3;

/// For so many sleeps polling is given up then. The few polls in between cost less than 1 % of the time of as many
/// wake-ups.
const REST: u32 = 256;

/// Workers of this process that are not asleep.
static AWAKE: AtomicUsize = AtomicUsize::new(0);

/// CPUs of the machine, whichever of them this process may use: the others are where its clients run. The C library reads a
/// file of /sys; where that is not to be had, it says how many this process may use.
static CPUS: LazyLock<usize> = LazyLock::new(|| {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1)
});

/// Looks how many CPUs the machine has. A process that is about to give up its view of /sys calls it before.
pub fn count_cpus() {
    LazyLock::force(&CPUS);
}

/// A worker that polls takes a CPU from whoever makes the work on a machine with only one, and from other workers
/// where more are awake than there are CPUs.
fn is_cpu_to_spare() -> bool {
    *CPUS > 1 && AWAKE.load(Ordering::Relaxed) <= *CPUS
}

/// Adaptive polling, as KVM does for halted CPUs: a sleep that was shorter than the bound could have been spared
/// by polling, so poll longer next time; a sleep that was longer makes polling a waste, so poll less. KVM can see
/// whether another task waits for the CPU; we conclude it from polls in vain.
#[derive(Debug)]
pub struct BusyPoll {
    now: Duration,
    max: Duration,
    vain: u32,
    rest: u32,
}

impl BusyPoll {
    /// Never polls longer than `max` before a sleep; zero never polls.
    pub fn new(max: Duration) -> Self {
        AWAKE.fetch_add(1, Ordering::Relaxed);
        Self { now: max.min(STEP_MIN), max, vain: 0, rest: 0 }
    }

    /// Whether a turn or two of the CPU can be had for nothing: polling is allowed, and there are CPUs for all who are awake.
    pub fn is_free(&self) -> bool {
        !self.max.is_zero() && is_cpu_to_spare()
    }

    /// Whether a poll would look more than once.
    pub fn will_poll(&self) -> bool {
        !self.now.is_zero() && is_cpu_to_spare()
    }

    /// Asks `ready` again and again for as long as polling has paid lately. Returns whether it said yes.
    pub fn poll(&mut self, mut ready: impl FnMut() -> bool) -> bool {
        if !self.will_poll() {
            return ready();
        }
        let start = Instant::now();
        loop {
            for _ in 0..TURNS_PER_LOOK {
                if ready() {
                    self.vain = 0;
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.now || !is_cpu_to_spare() {
                return false;
            }
        }
    }

    /// Sleeps by calling `sleep`, and learns from how long it took.
    pub fn sleep<T>(&mut self, sleep: impl FnOnce() -> T) -> T {
        if self.rest > 0 {
            self.rest -= 1;
            return asleep(sleep);
        }
        let spared = is_cpu_to_spare();
        let start = Instant::now();
        let outcome = asleep(sleep);
        // Polling that was not tried was not in vain either.
        if spared {
            self.learn(start.elapsed());
        }
        outcome
    }

    /// Leaves the CPU to others for so long.
    pub fn sleep_for(&self, time: Duration) {
        asleep(|| std::thread::sleep(time));
    }

    fn learn(&mut self, slept: Duration) {
        if slept > self.max {
            self.now /= 2;
            self.vain = 0;
        } else if self.vain == VAIN_MAX {
            self.now = Duration::ZERO;
            self.vain = 0;
            self.rest = REST;
        } else {
            self.vain += 1;
            self.now = (self.now * 2).max(STEP_MIN).min(self.max);
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
    fn polls_longer_after_short_sleeps_and_not_at_all_after_long_ones() {
        let mut busy_poll = BusyPoll::new(MAX);
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
    fn rests_when_longer_polls_find_nothing_either() {
        let mut busy_poll = BusyPoll::new(MAX);
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
    fn nobody_polls_without_a_cpu_to_spare() {
        let mut spins: Vec<BusyPoll> = (0..=*CPUS).map(|_| BusyPoll::new(MAX)).collect();
        let mut asked = 0;
        assert!(!spins[0].poll(|| {
            asked += 1;
            false
        }));
        assert_eq!(asked, 1);
    }

    #[test]
    fn zero_never_polls() {
        let mut busy_poll = BusyPoll::new(Duration::ZERO);
        busy_poll.sleep(|| ());
        let mut asked = 0;
        assert!(!busy_poll.poll(|| {
            asked += 1;
            false
        }));
        assert_eq!(asked, 1);
    }
}
