//! What this machine allows: FUSE-over-io_uring, CPUs, capabilities.

use std::fs;

use rustix::thread::{CapabilitySet, CpuSet, capabilities, sched_getaffinity, sched_setaffinity};

/// The fuse module's parameter that enables io_uring.
const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";
/// The system-wide setting that disables io_uring.
const IO_URING_DISABLED: &str = "/proc/sys/kernel/io_uring_disabled";
/// The possible CPUs: the kernel requires a queue for each.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// The CPUs that can run threads now.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// All CPUs have smaller numbers: the limit of Linux (`NR_CPUS`).
const CPUS_MAX: usize = 8192;

/// Why FUSE-over-io_uring is not available, with a remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoUring {
    #[error("this kernel has no FUSE-over-io_uring; Linux 6.14 and later have")]
    Kernel,
    #[error(
        "the fuse module does not allow it; turn it on with `echo Y > /sys/module/fuse/parameters/enable_uring`, and for \
         every boot with the line `options fuse enable_uring=1` in /etc/modprobe.d/ferry.conf"
    )]
    Parameter,
    #[error("io_uring is disabled; allow it with `sysctl kernel.io_uring_disabled=0`")]
    Sysctl,
    #[error("it was not requested")]
    Unwanted,
    #[error("the source waits for others, and the requests of a CPU's ring would wait for each other")]
    Waits,
    #[error("this machine's CPUs are numbered with gaps, and requests of CPU {cpu} would get no ring of their own")]
    Sparse { cpu: usize },
    #[error("this process may not use CPU {cpu} (its cpuset), so requests of that CPU's ring could hang")]
    Cpuset { cpu: usize },
    #[error("the kernel did not offer it when the mount began")]
    NotOffered,
    #[error("a ring of CPU {cpu} cannot be made: {reason}")]
    Setup { cpu: usize, reason: String },
    #[error("the kernel refused a ring of CPU {cpu}: {reason}")]
    Refused { cpu: usize, reason: String },
}

impl NoUring {
    /// Returns the command that allows it, if one does.
    pub(crate) fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Parameter => Some("echo Y > /sys/module/fuse/parameters/enable_uring"),
            Self::Sysctl => Some("sysctl -w kernel.io_uring_disabled=0"),
            _ => None,
        }
    }

    /// Returns whether another machine, or a changed setting, would support it.
    pub(crate) fn is_of_this_machine(&self) -> bool {
        !matches!(self, Self::Unwanted | Self::Waits)
    }
}

/// Checks before the mount whether rings may be available.
pub(crate) fn uring_allowed() -> Result<(), NoUring> {
    match fs::read_to_string(ENABLE_URING).as_deref().map(str::trim) {
        Ok("Y" | "1") => {}
        Ok(_) => return Err(NoUring::Parameter),
        // Without sysfs, only INIT shows it. A kernel without the parameter does not offer rings.
        Err(error)
            if error.kind() == std::io::ErrorKind::NotFound && fs::exists("/sys/module/fuse").unwrap_or(false) =>
        {
            return Err(NoUring::Kernel);
        }
        Err(_) => {}
    }
    match fs::read_to_string(IO_URING_DISABLED).as_deref().map(str::trim) {
        Ok("2") => return Err(NoUring::Sysctl),
        Ok("1") if !has_capability(CapabilitySet::SYS_ADMIN) => return Err(NoUring::Sysctl),
        _ => {}
    }
    // The kernel chooses the queue by the number of the CPU, and has none beyond their count.
    let beyond = |cpus: Vec<usize>| cpus.iter().copied().find(|cpu| *cpu >= cpus.len());
    if let Some(cpu) = read_cpus(POSSIBLE).and_then(beyond) {
        return Err(NoUring::Sparse { cpu });
    }
    // A worker on another CPU kicks the queue of that one instead of its own.
    read_cpus(ONLINE).and_then(first_unusable).map_or(Ok(()), |cpu| Err(NoUring::Cpuset { cpu }))
}

/// Returns the number of queues that the kernel requires: one per possible CPU, online or not.
pub(crate) fn possible_cpus() -> usize {
    let online = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    read_cpus(POSSIBLE).map_or(online, |cpus| cpus.len())
}

fn read_cpus(path: &str) -> Option<Vec<usize>> {
    fs::read_to_string(path).ok().and_then(|list| parse_cpus(&list))
}

/// Returns the members of a list like `0-3,5`, of at least one.
fn parse_cpus(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if first > last || last >= CPUS_MAX {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Returns one of these CPUs to which no thread of this process can be bound.
fn first_unusable(cpus: Vec<usize>) -> Option<usize> {
    let mut all = CpuSet::new();
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| all.set(*cpu));
    // On a thread of its own, whose binding ends with it. The kernel leaves out what the cpuset does not have.
    let ask = move || {
        let _ = sched_setaffinity(None, &all);
        sched_getaffinity(None)
    };
    let usable = std::thread::Builder::new().name("fuse-cpus".into()).spawn(ask).ok()?.join().ok()?.ok()?;
    cpus.into_iter().find(|cpu| *cpu >= CpuSet::MAX_CPU || !usable.is_set(*cpu))
}

/// Returns whether this thread has an effective capability.
pub(crate) fn has_capability(capability: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

/// Binds the calling thread to a CPU, if it is online and allowed.
pub(crate) fn stay_on(cpu: usize) {
    let mut set = CpuSet::new();
    if cpu < CpuSet::MAX_CPU {
        set.set(cpu);
        if let Err(error) = sched_setaffinity(None, &set) {
            tracing::debug!("the worker of CPU {cpu} is not bound to it: {error}");
        }
    }
}

/// Returns the size of this machine's pages, in bytes.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: it has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Whether this kernel keeps a name as absent when it is told that the name has changed: Linux 6.19 to 7.1
/// (`fuse_reverse_inval_entry` ignores negative dentries).
pub(crate) fn keeps_absent_names() -> bool {
    release_keeps_absent_names(&rustix::system::uname().release().to_string_lossy())
}

fn release_keeps_absent_names(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => ((6, 19)..(7, 2)).contains(&(major, minor)),
        _ => false,
    }
}

/// The CPU and state of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) asleep: bool,
    pub(crate) cpu: usize,
}

/// Parses the `stat` of a thread (proc_pid_stat(5)).
pub(crate) fn place_of(stat: &[u8]) -> Option<Place> {
    // The second field is the name, which may contain anything, in parentheses.
    let rest = stat.get(stat.iter().rposition(|byte| *byte == b')')? + 1..)?;
    let mut fields = rest.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
    let state = fields.next()?;
    let cpu = fields.nth(39 - 4)?;
    Some(Place { asleep: state != b"R", cpu: std::str::from_utf8(cpu).ok()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_keep_absent_names_are_known() {
        let keeps = ["6.19.0", "6.20", "7.0.3-1-amd64", "7.1-rc7"];
        let drops = ["5.10.0-9", "6.1.0-18-amd64", "6.18.44", "7.2.0-rc1", "7.10", "8.0", "", "x.y"];
        assert!(keeps.iter().all(|release| release_keeps_absent_names(release)));
        assert!(!drops.iter().any(|release| release_keeps_absent_names(release)));
    }

    #[test]
    fn names_of_threads_do_not_confuse() {
        let stat = b"7 (a) R 1 (b) S 1 7 7 0 -1 4194368 98 0 0 0 1 2 0 0 20 0 9 0 6 7 8 18446744073709551615 1 1 1 1 1 0 0 0 4 0 0 0 -1 3 0 0 0 0 0 1 2 3 4 5 6 7 0\n";
        assert_eq!(place_of(stat), Some(Place { asleep: true, cpu: 3 }));
        for cut in 0..stat.len() - 60 {
            assert_eq!(place_of(&stat[..cut]), None, "{cut}");
        }
        let here = place_of(&fs::read("/proc/thread-self/stat").unwrap()).unwrap();
        assert!(!here.asleep && here.cpu < possible_cpus(), "{here:?}");
    }

    #[test]
    fn lists_of_cpus() {
        for (list, count) in [("0\n", 1), ("0-1\n", 2), ("0-3,8-11", 8), ("0,5", 2)] {
            assert_eq!(parse_cpus(list).map(|cpus| cpus.len()), Some(count), "{list:?}");
        }
        for bad in ["", "x", "0-", "0-99999999", "-", "3-1"] {
            assert_eq!(parse_cpus(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_cpu_that_no_thread_can_run_on_is_found() {
        let online = read_cpus(ONLINE).unwrap();
        let unusable = first_unusable(online.clone());
        // A mask of this thread alone does not bind others.
        let mut one = CpuSet::new();
        one.set(online[0]);
        let before = sched_getaffinity(None).unwrap();
        if sched_setaffinity(None, &one).is_ok() {
            assert_eq!(first_unusable(online.clone()), unusable);
            sched_setaffinity(None, &before).unwrap();
        }
        if unusable.is_none() {
            let missing = CpuSet::MAX_CPU - 1;
            assert_eq!(first_unusable([online, vec![missing]].concat()), Some(missing), "no such CPU is online");
        }
    }
}
