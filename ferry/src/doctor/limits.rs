//! Checks of limits: descriptors, locked memory, huge pages.

use std::fs;

use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

use super::check::{Check, Export, can_mount, remedy_to_mount};
use crate::sandbox::may_lock_memory;

/// Descriptors that a server of directories has use for: a guest that builds software holds tens of thousands of inodes.
const DESCRIPTORS_WANTED: u64 = 65_536;

/// The files that say whether files in memory can have huge pages.
const SHMEM_HUGE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

pub fn checks() -> Vec<Check> {
    vec![descriptors(getrlimit(Resource::Nofile).maximum), locked_memory(), huge_pages()]
}

/// The check of the hard limit, to which servers raise their own.
fn descriptors(limit: Option<u64>) -> Check {
    let check = Check::new("descriptors", &[], &Export::ALL);
    match limit {
        None => check.found("no limit"),
        Some(limit) if limit >= DESCRIPTORS_WANTED => check.found(format!("at most {limit}")),
        Some(limit) => check.has_less(
            format!("at most {limit}"),
            format!("clients cannot have more than about {limit} files open at the same time"),
            "prlimit --pid $$ --nofile=1048576:1048576",
        ),
    }
}

fn locked_memory() -> Check {
    let check = Check::new("locked memory", &[], &[Export::Disk]);
    let has_capability =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    let limit = getrlimit(Resource::Memlock).maximum;
    match limit {
        _ if has_capability || may_lock_memory() => check.found("no limit for this user"),
        None => check.found("no limit"),
        Some(limit) => check.has_less(
            format!("at most {} KiB", limit >> 10),
            "ferry disk --pin-memory works for guests with less memory than that only",
            "prlimit --pid $$ --memlock=unlimited:unlimited",
        ),
    }
}

/// The chosen word of a file such as `always within_size [never] deny`.
fn chosen(words: &str) -> Option<&str> {
    words.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']')).filter(|word| !word.is_empty())
}

fn huge_pages() -> Check {
    let check = Check::new("huge pages", &[], &[Export::Virtiofs, Export::Mount]);
    let words = fs::read_to_string(SHMEM_HUGE).unwrap_or_default();
    match chosen(&words) {
        Some(_) if !can_mount() => check.lacks(
            "only in a private tmpfs, which this user may not mount",
            "mem --huge is refused",
            remedy_to_mount(),
        ),
        Some("deny") => check.lacks(
            "forbidden for files in memory (deny)",
            "mem --huge has small pages",
            format!("echo never > {SHMEM_HUGE}"),
        ),
        Some(word) => check.found(format!("mem --huge can have them ({word})")),
        None => check.lacks(
            "none for files in memory in this kernel",
            "mem --huge is refused",
            "# boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::State;

    #[test]
    fn the_limit_of_descriptors_is_judged() {
        for (limit, state) in [
            (None, State::Ok),
            (Some(1 << 20), State::Ok),
            (Some(DESCRIPTORS_WANTED), State::Ok),
            (Some(DESCRIPTORS_WANTED - 1), State::Degraded),
            (Some(0), State::Degraded),
        ] {
            assert_eq!(descriptors(limit).state(&Export::ALL), state, "{limit:?}");
        }
    }

    #[test]
    fn the_chosen_word_is_in_brackets() {
        assert_eq!(chosen("always within_size advise [never] deny force\n"), Some("never"));
        for bad in ["", "never", "[]", "[never", "never]", "[", "]["] {
            assert_eq!(chosen(bad), None, "{bad:?}");
        }
    }
}
