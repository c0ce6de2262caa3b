//! The clock and the number of the CPU, by the C library: rustix's forms end the program where the vDSO lacks a call,
//! as in User-mode Linux.

use ferry_vfs::Timespec;

/// The kernel's coarse clock.
pub(crate) fn coarse_time() -> Timespec {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid timespec that outlives the call.
    let outcome = unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &raw mut now) };
    debug_assert_eq!(outcome, 0, "every Linux has this clock");
    Timespec { sec: now.tv_sec, nsec: u32::try_from(now.tv_nsec).unwrap_or_default() }
}

/// The CPU that this thread is on, or was a moment ago; 0 where that cannot be told.
pub(crate) fn cpu() -> usize {
    // SAFETY: the call has no preconditions.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

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
