//! The clock, the number of the CPU and the heap, by the C library: rustix's forms end the program where the vDSO lacks a call,
//! as in User-mode Linux.

use std::sync::atomic::{AtomicI64, Ordering};

use ferry_vfs::Timespec;

const NS_PER_S: i64 = 1_000_000_000;

/// The kernel's coarse clock.
pub(crate) fn coarse_time() -> Timespec {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid timespec that outlives the call.
    let outcome = unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &raw mut now) };
    debug_assert_eq!(outcome, 0, "every Linux has this clock");
    Timespec { sec: now.tv_sec, nsec: u32::try_from(now.tv_nsec).unwrap_or_default() }
}

/// The latest time of a data file that anybody was shown.
static SHOWN_NS: AtomicI64 = AtomicI64::new(i64::MIN);

/// The kernel's coarse clock, but never before the time of a data file that somebody has seen: Linux since 6.13 stamps a file
/// that was looked at by its fine clock (`Documentation/filesystems/multigrain-ts.rst`), and keeps such a floor itself.
pub(crate) fn kernel_time() -> Timespec {
    let now = coarse_time();
    let shown = SHOWN_NS.load(Ordering::Relaxed);
    if shown > nanoseconds(now) && !is_ahead(nanoseconds(now), shown) { timespec(shown) } else { now }
}

/// Somebody is shown the time of a data file, of which the next change anywhere is not to seem older.
pub(crate) fn show(time: Timespec) {
    let time = nanoseconds(time);
    if time <= SHOWN_NS.load(Ordering::Relaxed) {
        return;
    }
    let now = nanoseconds(coarse_time());
    let moves = |shown: i64| (!is_ahead(now, time) && (shown < time || is_ahead(now, shown))).then_some(time);
    // Somebody else has shown a later one, or the file's time was set.
    let _ = SHOWN_NS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, moves);
}

/// How far the kernel's coarse clock may lag: a tick at 100 Hz.
const TICK_NS: i64 = 10_000_000;

/// Whether a time lies further ahead than a change that just happened can: somebody set it, or the clock.
pub(crate) fn is_ahead(now: i64, time: i64) -> bool {
    time.saturating_sub(now) >= TICK_NS
}

/// The time of a change now of what changed last at `last`, in nanoseconds. Where the clock stands still, or stood behind the
/// finer one that the kernel stamps data files with, it is the next nanosecond. What lies further ahead gives way.
pub(crate) fn later(now: i64, last: i64) -> i64 {
    if last < now || is_ahead(now, last) { now } else { last.saturating_add(1) }
}

/// Nanoseconds since the epoch; the last or first there are for times that have no such number.
pub(crate) fn nanoseconds(time: Timespec) -> i64 {
    time.sec.saturating_mul(NS_PER_S).saturating_add(time.nsec.into())
}

/// The time that is so many nanoseconds after the epoch.
pub(crate) fn timespec(ns: i64) -> Timespec {
    Timespec { sec: ns.div_euclid(NS_PER_S), nsec: u32::try_from(ns.rem_euclid(NS_PER_S)).unwrap_or_default() }
}

/// The CPU that this thread is on, or was a moment ago; 0 where that cannot be told.
pub(crate) fn cpu() -> usize {
    // SAFETY: the call has no preconditions.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or_default()
}

/// Gives memory that was freed back to the kernel: the C library keeps what lies between pieces that are in use.
pub(crate) fn release_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call has no preconditions, and moves nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_follow_each_other() {
        for (now, last, time) in [
            (100, 50, 100),
            (100, 100, 101),
            (100, 105, 106),
            (100, 100 + TICK_NS, 100),
            (100, i64::MAX, 100),
            (-5, i64::MIN, -5),
        ] {
            assert_eq!(later(now, last), time, "{now} after {last}");
        }
        for time in [Timespec { sec: -1, nsec: 999_999_999 }, Timespec { sec: 1 << 32, nsec: 1 }] {
            assert_eq!(timespec(nanoseconds(time)), time);
        }
        assert_eq!(nanoseconds(Timespec { sec: i64::MAX, nsec: 0 }), i64::MAX);
    }

    #[test]
    fn the_clock_goes_and_the_cpu_exists() {
        let (coarse, fine) = (coarse_time(), Timespec::now());
        assert!((fine.sec - coarse.sec).abs() <= 1, "{coarse:?} {fine:?}");
        assert!(coarse.nsec < 1_000_000_000);
        let cpus = std::fs::read_to_string("/sys/devices/system/cpu/possible").expect("Linux has it");
        let last = cpus.trim().rsplit(['-', ',']).next().expect("a number").parse::<usize>().expect("a number");
        assert!(cpu() <= last);
    }
}
