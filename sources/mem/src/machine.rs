//! The clock, the current CPU and the heap, through the C library: rustix's functions abort the program if the vDSO
//! lacks a call, as in User-mode Linux.

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

/// The latest time of a data file that a client has seen.
static SHOWN_NS: AtomicI64 = AtomicI64::new(i64::MIN);

/// Returns the kernel's coarse clock, but at least the latest time of a data file that a client has seen. Since 6.13
/// Linux stamps a file whose time was queried from its fine clock (`Documentation/filesystems/multigrain-ts.rst`), and
/// keeps such a floor itself.
pub(crate) fn kernel_time() -> Timespec {
    let now = coarse_time();
    let shown = SHOWN_NS.load(Ordering::Relaxed);
    if shown > nanoseconds(now) && !is_ahead(nanoseconds(now), shown) { timespec(shown) } else { now }
}

/// Records the time of a data file that a client sees; later changes must not be older.
pub(crate) fn show(time: Timespec) {
    let time = nanoseconds(time);
    if time <= SHOWN_NS.load(Ordering::Relaxed) {
        return;
    }
    let now = nanoseconds(coarse_time());
    let moves = |shown: i64| (!is_ahead(now, time) && (shown < time || is_ahead(now, shown))).then_some(time);
    // Another thread has recorded a later one, or the file's time was set.
    let _ = SHOWN_NS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, moves);
}

/// The maximum lag of the kernel's coarse clock: a tick at 100 Hz.
const TICK_NS: i64 = 10_000_000;

/// Returns whether a time is further ahead than a change that just happened can be: it, or the clock, was set.
pub(crate) fn is_ahead(now: i64, time: i64) -> bool {
    time.saturating_sub(now) >= TICK_NS
}

/// Returns the time of a change now, after one at `last`, in nanoseconds. If the clock has not advanced, or lags behind
/// the finer clock of data files, it is the next nanosecond. A `last` further ahead is ignored.
pub(crate) fn later(now: i64, last: i64) -> i64 {
    if last < now || is_ahead(now, last) { now } else { last.saturating_add(1) }
}

/// Returns the nanoseconds since the epoch, clamped to the range of the type.
pub(crate) fn nanoseconds(time: Timespec) -> i64 {
    time.sec.saturating_mul(NS_PER_S).saturating_add(time.nsec.into())
}

/// Returns the time of these nanoseconds since the epoch.
pub(crate) fn timespec(ns: i64) -> Timespec {
    Timespec { sec: ns.div_euclid(NS_PER_S), nsec: u32::try_from(ns.rem_euclid(NS_PER_S)).unwrap_or_default() }
}

/// Returns the current CPU of this thread; 0 if unknown.
pub(crate) fn cpu() -> usize {
    // SAFETY: the call has no preconditions.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or_default()
}

/// Returns freed memory to the kernel: the C library keeps free memory between allocations in use.
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
