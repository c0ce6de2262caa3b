//! The sandbox of a server of files or disks: an exploited server can reach nothing but what it serves.
//!
//! From outside in:
//!
//! 1. **Namespaces** ([`split`]): of mounts, processes and networks, and of users if the process is unprivileged. The
//!    server is process 1 of its namespace. Its root is an empty, read-only directory with the shared directories and
//!    its own `/proc/self/fd`. A process outside forwards signals and waits for it ([`Supervisor`]). Threads that
//!    connect to servers stay in the host's network; all others leave it ([`leave_network`]).
//! 2. **Capabilities** ([`Capabilities`]): only those for serving files, also in the bounding set.
//! 3. **Landlock** ([`restrict_landlock`]): only files below the shared directories, no TCP except to given ports, no
//!    abstract sockets, no signals to other processes.
//! 4. **seccomp** ([`Filter`]): only the system calls of each [`Role`].
//!
//! Each layer applies to the calling thread, and threads inherit it. So a process enters the sandbox while it has one
//! thread. Each layer works without the others.
//!
//! ```
//! use ferry_isolation::{Action, Capabilities, Filter, Role};
//!
//! let kept = Capabilities::of_server(false).modified("+sys_admin:-mknod")?;
//! assert!(kept.to_string().contains("SYS_ADMIN") && !kept.to_string().contains("MKNOD"));
//! // kept.limit(Capabilities::NONE)?;
//! let filter = Filter::of(Role::Server, Action::Kill)?;
//! // filter.apply()?;
//! # Ok::<(), ferry_isolation::Error>(())
//! ```

mod capabilities;
mod landlock;
mod namespaces;
mod root;
mod supervisor;
mod syscalls;

pub use capabilities::Capabilities;
pub use landlock::{LandlockRules, LandlockStatus, landlock_version, restrict_landlock};
pub use namespaces::{
    Split, begin_child, change_root, expect_children, hide_directories, is_possible, leave_network, split,
};
pub use root::{Access, Root, View};
pub use supervisor::{BlockedSignals, Child, End, ReceivedSignal, Supervisor};
pub use syscalls::{Action, Filter, Role};

use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;

/// Why a layer of the sandbox is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a step of creating namespaces.
    #[error("{step}: {errno}")]
    Namespaces {
        /// The step, in words.
        step: String,
        /// The error of the kernel.
        errno: Errno,
    },
    /// A system call failed, in this process or in a child that tested namespaces.
    #[error("{0}")]
    System(String),
    /// Only a process with one thread can enter the sandbox.
    #[error("this process has {0} threads already")]
    Threads(usize),
    /// An invalid list of capabilities.
    #[error(
        "{0:?} is not a list of capabilities: write +NAME to keep one and -NAME to drop one, as in +sys_admin:-mknod"
    )]
    CapabilityList(String),
    /// The kernel refused to change capabilities.
    #[error("capabilities cannot be dropped: {0}")]
    Capabilities(Errno),
    /// The kernel refused to set no_new_privs.
    #[error("no_new_privs cannot be set: {0}")]
    NoNewPrivileges(Errno),
    /// The kernel refused the Landlock ruleset.
    #[error("Landlock: {0}")]
    Landlock(String),
    /// The seccomp filter is invalid, or the kernel refused it.
    #[error("seccomp: {0}")]
    Seccomp(String),
}

/// A result with this crate's errors.
pub type Result<T> = std::result::Result<T, Error>;

/// The first descriptor after the standard streams.
const FIRST_INHERITED: libc::c_uint = 3;

/// Lets a command inherit only its standard streams and the descriptors `kept`. Before Linux 5.11 it inherits all of
/// this process.
pub fn inherit_only(command: &mut Command, kept: Vec<RawFd>) -> &mut Command {
    let close = move || {
        // SAFETY: the call changes flags of this process's own descriptors.
        unsafe { libc::syscall(libc::SYS_close_range, FIRST_INHERITED, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        for number in &kept {
            // SAFETY: the call changes a flag; it fails for a number that is not open.
            unsafe { libc::fcntl(*number, libc::F_SETFD, 0) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec, the function only makes system calls and reads its own memory.
    unsafe { command.pre_exec(close) }
}

/// Sets no_new_privs permanently: executing set-user-id programs or programs with file capabilities adds no privileges.
///
/// # Errors
///
/// [`Error::NoNewPrivileges`]: Linux before 3.5.
pub fn no_new_privileges() -> Result<()> {
    rustix::thread::set_no_new_privs(true).map_err(Error::NoNewPrivileges)
}
