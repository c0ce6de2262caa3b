//! The FUSE export: a source, mounted on this host.
//!
//! Requests have one of two transports. With FUSE-over-io_uring each CPU has a ring with a worker bound to it: a reply
//! and the next request take one system call, without a copy of the data. Otherwise threads read /dev/fuse. With both,
//! files with a descriptor can use passthrough: the kernel then reads and writes them directly. [`Export::explain`]
//! reports the chosen transport, and why a faster one is not used.
//!
//! A blocked handler delays no other request: another thread takes over. A handler that blocks for too long, or panics,
//! fails its own caller only. A panic elsewhere in a thread of the mount ends the mount.
//!
//! ```no_run
//! # fn source() -> std::sync::Arc<dyn ferry_vfs::FileSystem> { unimplemented!() }
//! use ferry_fuse::{Export, Options};
//!
//! let export = Export::mount("/mnt".as_ref(), source(), Options::default())?;
//! println!("{}", export.explain());
//! export.wait(); // until it is unmounted
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backings;
mod connection;
mod control;
mod deferred_replies;
mod delayed_requests;
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
mod resume;
mod sched_idle;
mod stats;
mod transfer;
mod uring;

pub use control::AbortSwitch;
pub use explain::{Explanation, Verdict, uring_verdict};
pub use export::{Error, Export};
pub use ferry_engine::RateLimiter;
pub use ferry_serve::Cache;
pub use mountpoint::{MountEntry, MountError, MountOptions, Mountpoint};
pub use options::{Options, Path, PathError};
pub use resume::Resumable;
pub use stats::Stats;
