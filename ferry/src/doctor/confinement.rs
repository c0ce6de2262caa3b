//! Checks of what servers confine themselves with, and of io_uring.

use std::fs;

use ferry_engine::{IoMode, Transfers, TransfersError};
use ferry_isolation::{Capabilities, View};
use rustix::io::Errno;

use super::check::{Check, Export, can_mount, remedy_to_mount};

/// The oldest version of Landlock that has all rules of Ferry: it restricts files (2), TCP (4), ioctls (5) and signals (6).
const LANDLOCK_WHOLE: u32 = 6;

/// The checks. The first forks, so this process must have one thread.
pub fn checks() -> Vec<Check> {
    vec![namespaces(), landlock(), seccomp(), io_uring()]
}

/// Settings that forbid user namespaces: the file below /proc/sys, the value that forbids them, and the command.
const USERNS_SETTINGS: [(&str, &str, &str); 3] = [
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=65536"),
];

/// The first setting that forbids user namespaces, with the command that allows them.
fn userns_setting(read: impl Fn(&str) -> Option<String>) -> Option<(String, &'static str)> {
    let forbids = |(file, value, command): (&str, &str, &'static str)| {
        (read(file)?.trim() == value).then(|| (format!("{}={value}", file.replace('/', ".")), command))
    };
    USERNS_SETTINGS.into_iter().find_map(forbids)
}

fn namespaces() -> Check {
    let check = Check::new("namespaces", &[], Export::SERVERS);
    // As `sandbox.rs` decides.
    let needed = Capabilities::of_server(true);
    let acts_as_others = Capabilities::of_thread().is_ok_and(|had| needed.and(had) != Capabilities::NONE);
    match ferry_isolation::is_possible(&View::default()) {
        Ok(()) if acts_as_others && !can_mount() => check.has_less(
            "with a single user: for disks, and not for directories",
            "a server of directories sees all files of this host that its user may read",
            remedy_to_mount(),
        ),
        Ok(()) => check.found("a server can have its own"),
        Err(error) => {
            let read = |file: &str| fs::read_to_string(format!("/proc/sys/{file}")).ok();
            // Root needs CAP_SYS_ADMIN, not the namespaces of other users.
            let setting = userns_setting(read).filter(|_| !rustix::process::geteuid().is_root());
            let (found, remedy) = without_namespaces(&error, setting);
            check.lacks(found, "a server sees all files of this host that its user may read", remedy)
        }
    }
}

/// What is wrong, and the remedy. The child that tests namespaces reports errors as text.
fn without_namespaces(
    error: &ferry_isolation::Error,
    setting: Option<(String, &'static str)>,
) -> (String, &'static str) {
    let text = error.to_string();
    match setting {
        _ if text.contains(&Errno::NOSYS.to_string()) => {
            (text, "# boot Linux 5.12 or later, or allow mount_setattr in the seccomp profile of the container")
        }
        Some((setting, command)) => (format!("{text} ({setting})"), command),
        None => (text, "# run ferry outside of the container, or with CAP_SYS_ADMIN"),
    }
}

fn landlock() -> Check {
    let check = Check::new("landlock", &[], Export::SERVERS);
    let consequence = "one layer less keeps a server below the shared directories";
    match ferry_isolation::landlock_version() {
        Some(version) if version >= LANDLOCK_WHOLE => check.found(format!("version {version}")),
        Some(version) => check.has_less(
            format!("version {version}"),
            "the kernel enforces a part of the rules: files need version 2, TCP needs version 4, ioctls version 5, signals version 6",
            "# boot Linux 6.12 or later",
        ),
        None => check.lacks(
            "none in this kernel, or not enabled",
            consequence,
            "# boot a kernel with CONFIG_SECURITY_LANDLOCK=y, and landlock in its parameter lsm=",
        ),
    }
}

/// Whether the status of a process (proc_pid_status(5)) tells of seccomp.
fn has_seccomp(status: &str) -> bool {
    status.lines().any(|line| line.starts_with("Seccomp:"))
}

fn seccomp() -> Check {
    let check = Check::new("seccomp", &[], Export::SERVERS);
    match fs::read_to_string("/proc/self/status") {
        Ok(status) if has_seccomp(&status) => check.found("filters of system calls"),
        Ok(_) => check.lacks(
            "none in this kernel",
            "a server may use all system calls",
            "# boot a kernel with CONFIG_SECCOMP_FILTER=y",
        ),
        Err(error) => check.lacks(
            format!("/proc/self/status: {error}"),
            "it is not known whether system calls can be filtered",
            "mount -t proc proc /proc",
        ),
    }
}

fn io_uring() -> Check {
    let check = Check::new("io_uring", &[], Export::SERVERS);
    let error = match Transfers::new(IoMode::Uring, 1) {
        Ok(_) => return check.found("rings can be made"),
        Err(TransfersError::Setup(error) | TransfersError::Wait(error)) => error,
    };
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    let remedy = match Errno::from_io_error(&error) {
        Some(Errno::NOMEM) => "prlimit --pid $$ --memlock=67108864:67108864",
        Some(Errno::PERM) if !matches!(disabled.trim(), "" | "0") => "sysctl -w kernel.io_uring_disabled=0",
        Some(Errno::NOSYS) => "# boot a kernel with CONFIG_IO_URING=y",
        _ => "# allow io_uring_setup in the seccomp profile of the container or the service",
    };
    check.lacks(error.to_string(), "each transfer of data is a system call of its own", remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_that_forbids_namespaces_is_named() {
        let with = |file: &'static str, value: &'static str| {
            userns_setting(move |asked| (asked == file).then(|| value.to_owned())).map(|(found, _)| found)
        };
        let clone = "kernel/unprivileged_userns_clone";
        assert_eq!(with(clone, "0\n").as_deref(), Some("kernel.unprivileged_userns_clone=0"));
        assert_eq!(with("user/max_user_namespaces", "0\n").as_deref(), Some("user.max_user_namespaces=0"));
        let apparmor = "kernel/apparmor_restrict_unprivileged_userns";
        assert_eq!(with(apparmor, "1\n").as_deref(), Some("kernel.apparmor_restrict_unprivileged_userns=1"));
        for (file, value) in [(clone, "1"), (apparmor, "0"), (clone, ""), (clone, "00"), (clone, "-0"), (clone, "\0")] {
            assert_eq!(with(file, value), None, "{file} {value:?}");
        }
        assert_eq!(userns_setting(|_| None), None);
    }

    #[test]
    fn the_remedy_for_missing_namespaces_fits_the_error() {
        let setting = || Some(("kernel.a=0".to_owned(), "sysctl -w kernel.a=1"));
        for (errno, setting, words) in [
            (Errno::NOSYS, None, "Linux 5.12"),
            (Errno::NOSYS, setting(), "Linux 5.12"),
            (Errno::PERM, setting(), "sysctl -w kernel.a=1"),
            (Errno::PERM, None, "outside of the container"),
        ] {
            let step = "cannot make the new root read-only".to_owned();
            let (_, remedy) = without_namespaces(&ferry_isolation::Error::Namespaces { step, errno }, setting);
            assert!(remedy.contains(words), "{errno}: {remedy}");
        }
    }

    #[test]
    fn seccomp_is_read_from_the_status_of_a_process() {
        for (status, has) in [
            ("Name:\tferry\nSeccomp:\t0\nSeccomp_filters:\t0\n", true),
            ("Name:\tSeccomp:\n", false),
            ("Seccomp_filters:\t0\n", false),
            ("", false),
        ] {
            assert_eq!(has_seccomp(status), has, "{status:?}");
        }
    }
}
