//! Real Linux guests, for `ferry try`, the tests and the benchmarks.
//!
//! A [`Guest`] runs one command in a Linux 7.2 guest and hands back its output and exit status. Its root is
//! the host's own root with a layer of memory above it, so every program of the host is there and nothing
//! that the command writes stays, except in the shares that are mounted with [`Guest::mounts`].
//!
//! Two kinds exist. [`Kind::Uml`] is User-mode Linux, a kernel that runs as a process: it boots in about a
//! second, needs no KVM and has one CPU. [`Kind::Qemu`] is QEMU with a stock Debian kernel, for what User-mode
//! Linux lacks (several CPUs, DAX, 9P over virtio); it uses KVM where a guest really boots with it.
//!
//! Both come from Debian's archive into a [`Cache`] outside the checkout, on first use.
//!
//! A guest is not a security boundary: User-mode Linux reads the host's files as the user that started it.
//!
//! ```no_run
//! use ferry_guest::{Cache, Device, Guest, Mount};
//!
//! # fn main() -> Result<(), ferry_guest::Error> {
//! let mut guest = Guest::new(Cache::from_env()?, ["sh", "-c", "echo hello; exit 7"]);
//! guest.devices = vec![Device::fs("/run/ferry.sock", "work")];
//! guest.mounts = vec![Mount::virtiofs("work", "/mnt/work")];
//! guest.cwd = "/mnt/work".into();
//! let status = guest.spawn()?.wait()?;
//! assert_eq!(status, 7);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod cache;
mod cpio;
mod machine;
mod running;
mod script;
mod stdio;
mod tap;

pub use cache::{Cache, Qemu, Uml};
pub use cpio::archive;
pub use running::Running;
pub use tap::Tap;

use std::ffi::OsString;
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

/// Why a guest could not be fetched, started or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Neither `FERRY_CACHE`, `XDG_CACHE_HOME` nor `HOME` is set.
    #[error("no place for the guest cache: set FERRY_CACHE or HOME")]
    NoCache,
    /// The fetch script failed; it has reported why on standard error.
    #[error("the files of the guest ({set}) could not be fetched: what went wrong stands above")]
    Fetch {
        /// The requested set.
        set: String,
    },
    /// The set of peers has no such program.
    #[error("no peer program '{0}' in the cache: known are virtiofsd and fio")]
    NoPeer(String),
    /// Something on the host failed while the guest was prepared.
    #[error("cannot {action}")]
    Host {
        /// What was tried.
        action: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The caller's request cannot be passed to a guest.
    #[error("{0}")]
    Invalid(String),
    /// The guest started but failed.
    #[error("the guest {message}; the end of its kernel's log:\n{log}")]
    Guest {
        /// The guest's message, or that it ended without one.
        message: String,
        /// The last lines of its console.
        log: String,
    },
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds the name of an action on the host to its error.
pub(crate) trait Context<T> {
    fn context(self, action: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, action: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Host { action: action(), source: source.into() })
    }
}

/// What carries the guest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Kind {
    /// User-mode Linux.
    #[default]
    Uml,
    /// QEMU with a stock Debian kernel.
    Qemu {
        /// The number of virtual CPUs.
        cpus: u16,
        /// The tag of a share of the host's `/` to use as the (read-only) lower layer of the guest's root.
        /// Without one the guest has busybox and nothing else.
        root: Option<String>,
    },
}

/// The architecture of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// x86-64, which Debian calls amd64.
    X86_64,
    /// AArch64, which Debian calls arm64.
    Aarch64,
}

impl Arch {
    /// The architecture of this machine.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") { Self::Aarch64 } else { Self::X86_64 };

    /// Returns its name in Linux, QEMU and Rust.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }
}

/// A vhost-user device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The back end's listening socket.
    pub socket: PathBuf,
    /// The type of the device.
    pub kind: DeviceKind,
}

/// The sorts of vhost-user devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceKind {
    /// virtio-fs.
    Fs {
        /// The tag. User-mode Linux takes the one that the back end has in its config space.
        tag: String,
        /// The request queues that QEMU offers. User-mode Linux takes the back end's number.
        queues: u16,
        /// With a window for DAX (QEMU only; its generic vhost-user device).
        dax: bool,
    },
    /// virtio-blk.
    Block,
    /// virtio-9p (QEMU only, from 11.1 on; its generic vhost-user device).
    NineP {
        /// The tag, which the back end has in its config space: QEMU is told its length.
        tag: String,
    },
}

impl Device {
    /// A virtio-fs device with one request queue and no window.
    pub fn fs(socket: impl Into<PathBuf>, tag: impl Into<String>) -> Self {
        Self { socket: socket.into(), kind: DeviceKind::Fs { tag: tag.into(), queues: 1, dax: false } }
    }

    /// A virtio-blk device.
    pub fn block(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), kind: DeviceKind::Block }
    }

    /// A virtio-9p device.
    pub fn ninep(socket: impl Into<PathBuf>, tag: impl Into<String>) -> Self {
        Self { socket: socket.into(), kind: DeviceKind::NineP { tag: tag.into() } }
    }
}

/// A file system that the guest mounts before the command runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The type, as `mount -t` takes it.
    pub fstype: String,
    /// The tag or device.
    pub source: String,
    /// Where; it is created when it does not exist.
    pub mountpoint: PathBuf,
    /// As `mount -o` takes them; may be empty.
    pub options: String,
}

impl Mount {
    /// A virtio-fs share without options.
    pub fn virtiofs(tag: impl Into<String>, mountpoint: impl Into<PathBuf>) -> Self {
        Self { fstype: "virtiofs".into(), source: tag.into(), mountpoint: mountpoint.into(), options: String::new() }
    }
}

/// The source of the command's standard input.
///
/// User-mode Linux reads its lines byte by byte: one or two MB/s. A command that reads a lot should open the file
/// itself; the guest sees the host's files under their own names.
#[derive(Debug, Default)]
pub enum Input {
    /// This process's own. When that and this process's standard output are terminals and the output
    /// is inherited too, the command gets a terminal of its own, with job control.
    #[default]
    Inherit,
    /// Nothing.
    Null,
    /// What is written to [`Running::stdin`].
    Piped,
    /// A file or a pipe.
    File(File),
}

/// The destination of the command's standard output or error.
#[derive(Debug, Default)]
pub enum Output {
    /// To this process's own.
    #[default]
    Inherit,
    /// Nowhere.
    Null,
    /// To [`Running::stdout`] or [`Running::stderr`], which must be read.
    Piped,
    /// To a file or a pipe.
    File(File),
}

/// A guest to start, and the command it is for.
#[derive(Debug)]
pub struct Guest {
    /// Where the guest's parts are.
    pub cache: Cache,
    /// What carries it.
    pub kind: Kind,
    /// Its architecture; this machine's at first. QEMU emulates AArch64 on other machines, too.
    pub arch: Arch,
    /// Its memory; 512 MiB at first.
    pub memory_mib: u32,
    /// The host's CPU for User-mode Linux; `None`: guests alternate. It has one CPU and switches between a process for
    /// the kernel and one per program at every system call, which costs seven times as much between two CPUs of the
    /// host.
    pub host_cpu: Option<usize>,
    /// Its vhost-user devices. Their back ends must be listening.
    pub devices: Vec<Device>,
    /// What it mounts, in this order.
    pub mounts: Vec<Mount>,
    /// The program and its arguments; an interactive shell if empty.
    pub command: Vec<OsString>,
    /// Programs, by full paths, and their arguments, which run beside the command and end before shares are unmounted.
    /// They have no input, and write to the console.
    pub services: Vec<Vec<OsString>>,
    /// The working directory; `/` by default.
    pub cwd: PathBuf,
    /// The environment; PATH, HOME and TERM have default values.
    pub env: Vec<(OsString, OsString)>,
    /// Standard input.
    pub stdin: Input,
    /// Standard output.
    pub stdout: Output,
    /// Standard error.
    pub stderr: Output,
    /// The maximum time until the command starts; by default four minutes, which a guest without KVM may take on a busy machine.
    pub boot_timeout: Duration,
    /// Further words for the kernel's command line.
    pub kernel_args: Vec<String>,
    /// Further arguments for QEMU.
    pub qemu_args: Vec<OsString>,
}

impl Guest {
    /// A User-mode Linux guest for `command`, without devices.
    pub fn new<S: Into<OsString>>(cache: Cache, command: impl IntoIterator<Item = S>) -> Self {
        Self {
            cache,
            kind: Kind::default(),
            arch: Arch::HOST,
            memory_mib: 512,
            host_cpu: None,
            devices: Vec::new(),
            mounts: Vec::new(),
            command: command.into_iter().map(Into::into).collect(),
            services: Vec::new(),
            cwd: "/".into(),
            env: Vec::new(),
            stdin: Input::default(),
            stdout: Output::default(),
            stderr: Output::default(),
            boot_timeout: Duration::from_secs(240),
            kernel_args: Vec::new(),
            qemu_args: Vec::new(),
        }
    }

    /// Starts the guest, and returns when its shares are mounted and the command is about to run.
    ///
    /// Fetches the guest's parts first when the cache lacks them.
    pub fn spawn(self) -> Result<Running> {
        Running::start(self)
    }
}
