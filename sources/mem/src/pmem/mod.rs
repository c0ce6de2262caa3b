//! `pmem`: the memory file system, persistent, in a file, a block device or persistent memory (DAX).
//!
//! The tree is in memory as for [`crate::Mem`]. Every change is a record in a log with checksums. File data are in 4
//! KiB blocks of the image, read and written in place. [`mod@format`] has the byte diagram of the image.
//!
//! # What survives a crash
//!
//! * After `fsync` of a file: its bytes, size and attributes, and all names created before. After `fsync` of a
//!   directory or `syncfs`: all names and attributes (`syncfs`: all bytes, too). After a write with `O_SYNC` or
//!   `O_DSYNC`: that write.
//! * Everything else as of some moment in the last [`COMMIT_INTERVAL`], each operation as a whole: a rename has
//!   happened or not. Overwritten bytes are old or new, in units of 8. Punching a hole is several operations.
//! * Never the bytes of another file: new blocks are durable before the record that makes them reachable, and freed
//!   blocks are reused only after the record that freed them is durable.
//!
//! # Placement
//!
//! Blocks come from a part of the image that depends on the writer's CPU, so writers do not contend. The medium
//! determines the NUMA node of a block: pages of a page cache come from the node of the CPU that first writes them, and
//! each persistent memory device belongs to one node.

mod alloc;
mod audit;
mod codec;
mod commit_thread;
#[allow(unsafe_code, reason = "cache lines are written back by instructions that Rust has no safe form for")]
mod dax;
mod device;
mod disk;
mod error;
mod extents;
mod file;
pub mod format;
mod fsck;
mod grace;
mod heat;
mod load;
mod log;
#[allow(unsafe_code, reason = "a mapping is memory from the kernel")]
mod mapped;
mod medium;
mod open;
mod store;
#[allow(unsafe_code, reason = "transfers work on memory by address")]
mod tier;

pub use self::codec::CodecError;
pub use self::error::{DamageError, OpenError};
pub use self::fsck::{Finding, Report, Severity, fsck, fsck_medium};
pub use self::medium::Medium;
pub use self::open::{COMMIT_INTERVAL, CreatedFile, Media, OpenedImage, Options, open, open_files, open_media};
pub use self::store::{PFile, PStore};
use crate::tree::Tree;

/// A mounted image. Dropping it makes everything durable.
pub type PMem = Tree<PStore>;
