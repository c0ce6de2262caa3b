//! How long to look for work before sleeping.

use std::time::{Duration, Instant};

/// The first step up from not polling at all.
const STEP_MIN: Duration = Duration::from_micros(8);

/// How often to look at the clock while spinning; a look costs about as much as twenty turns.
const TURNS_PER_LOOK: u32 = 16;

/// Adaptive polling, as KVM does for halted CPUs: a sleep that was shorter than the bound could have been spared
/// by polling, so poll longer next time; a sleep that was longer makes polling a waste, so poll less.
#[derive(Debug)]
pub struct Spin {
    now: Duration,
    max: Duration,
}

impl Spin {
    /// Never polls longer than `max` before a sleep; zero never polls.
    pub fn new(max: Duration) -> Self {
        Self { now: max.min(STEP_MIN), max }
    }

    /// Asks `ready` again and again for as long as polling has paid lately. Answers whether it said yes.
    pub fn poll(&mut self, mut ready: impl FnMut() -> bool) -> bool {
        if self.now.is_zero() {
            return ready();
        }
        let start = Instant::now();
        loop {
            for _ in 0..TURNS_PER_LOOK {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.now {
                return false;
            }
        }
    }

    /// Sleeps by calling `sleep`, and learns from how long it took.
    pub fn sleep<T>(&mut self, sleep: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = sleep();
        let slept = start.elapsed();
        self.now =
            if slept <= self.max { (self.now * 2).clamp(STEP_MIN.min(self.max), self.max) } else { self.now / 2 };
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_longer_after_short_sleeps_and_not_at_all_after_long_ones() {
        let max = Duration::from_millis(2);
        let mut spin = Spin::new(max);
        for _ in 0..16 {
            spin.sleep(|| ());
        }
        assert_eq!(spin.now, max);
        for _ in 0..32 {
            spin.sleep(|| std::thread::sleep(max * 2));
        }
        assert!(spin.now.is_zero());
        assert!(spin.poll(|| true));
        assert!(!spin.poll(|| false));
    }

    #[test]
    fn zero_never_polls() {
        let mut spin = Spin::new(Duration::ZERO);
        spin.sleep(|| ());
        let mut asked = 0;
        assert!(!spin.poll(|| {
            asked += 1;
            false
        }));
        assert_eq!(asked, 1);
    }
}
