//! The FUSE export: a source, mounted on this host.
//!
//! Requests travel by one of two paths. With FUSE-over-io_uring each CPU has a ring and a worker that is bound to it:
//! reply and next request are one system call, and data lie where they are. Otherwise threads read /dev/fuse. On either
//! path, files for which the source has a descriptor can be passed through: the kernel then reads and writes them on
//! its own. Which path was taken, and why not a better one, says [`Export::explain`].
//!
//! A handler that blocks holds up nobody else: another thread goes on in its place. One that blocks for too long, or
//! panics, costs its own caller an error.
//!
//! ```no_run
//! # fn source() -> std::sync::Arc<dyn ferry_vfs::FileSystem> { unimplemented!() }
//! use ferry_fuse::{Export, Options};
//!
//! let export = Export::mount("/mnt".as_ref(), source(), Options::default())?;
//! println!("{}", export.explain());
//! export.wait(); // until somebody unmounts it
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backings;
mod connection;
mod control;
mod deferred_replies;
mod devfuse;
mod device;
mod explain;
mod export;
mod handshake;
mod interrupted;
mod machine;
mod mountpoint;
mod notify;
mod options;
mod sched_idle;
mod stats;
mod transfer;
mod uring;

pub use control::AbortSwitch;
pub use explain::{Explanation, Verdict};
pub use export::{Error, Export};
pub use ferry_serve::Cache;
pub use mountpoint::{MountError, MountOptions, Mounted, Mountpoint};
pub use options::{Options, Path, PathError};
pub use stats::Stats;
