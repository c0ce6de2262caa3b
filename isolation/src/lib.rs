//! The sandbox of a server of files or disks: an attacker who exploits a bug in the server reaches nothing else.
//!
//! From outside in:
//!
//! 1. **Namespaces** ([`split`]): of mounts, processes and networks, and of users where that is the price. The server is
//!    process 1 of its own, and its root is an empty, read-only folder with the shared directories and its own
//!    `/proc/self/fd` in it. Outside stays a process that passes signals on and waits ([`Supervisor`]). Threads that connect to
//!    servers stay in the host's network; all others leave it ([`leave_network`]).
//! 2. **Capabilities** ([`Capabilities`]): those that carrying files needs, also in the bounding set.
//! 3. **Landlock** ([`restrict_landlock`]): files below the shared directories alone, no TCP but to some ports, no abstract sockets, no
//!    signals to others.
//! 4. **seccomp** ([`Filter`]): the system calls of each [`Role`], and no others.
//!
//! All of them are inherited by threads and can be put on by a thread for itself only: so they are for a process that has
//! one thread yet. Each is usable without the others.
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
pub use landlock::{LandlockRules, LandlockStatus, restrict_landlock};
pub use namespaces::{Side, begin_child, change_root, hide_directories, is_possible, leave_network, split};
pub use root::{Access, Root, View};
pub use supervisor::{Arrival, BlockedSignals, Child, End, Supervisor};
pub use syscalls::{Action, Filter, Role};

use rustix::io::Errno;

/// Why a part of the sandbox is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a step of making namespaces.
    #[error("{step}: {errno}")]
    Namespaces {
        /// What was tried, in words.
        step: String,
        /// What the kernel said.
        errno: Errno,
    },
    /// Somebody else has told why.
    #[error("{0}")]
    Told(String),
    /// Walls are for processes of one thread.
    #[error("this process has {0} threads already")]
    Threads(usize),
    /// A list of capabilities that is none.
    #[error("{0:?} is no list of capabilities: write +NAME to keep one and -NAME to drop one, as in +sys_admin:-mknod")]
    NoCapability(String),
    /// The kernel refused to change capabilities.
    #[error("capabilities cannot be dropped: {0}")]
    Capabilities(Errno),
    /// New privileges cannot be given up.
    #[error("no_new_privs cannot be set: {0}")]
    NoNewPrivileges(Errno),
    /// Landlock.
    #[error("Landlock: {0}")]
    Landlock(String),
    /// seccomp.
    #[error("seccomp: {0}")]
    Seccomp(String),
}

/// A result with this crate's errors.
pub type Result<T> = std::result::Result<T, Error>;

/// Gives up, for good, that programs with set-user-id or file capabilities give this thread more than it has.
///
/// # Errors
/// [`Error::NoNewPrivileges`]: Linux before 3.5.
pub fn no_new_privileges() -> Result<()> {
    rustix::thread::set_no_new_privs(true).map_err(Error::NoNewPrivileges)
}
