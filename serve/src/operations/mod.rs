//! The FUSE operations, one file per family. Methods of `Server` have the names of the opcodes that they serve.

mod agent;
mod attr;
mod data;
mod dax;
mod file;
mod filesystem;
mod locks;
mod lookup;
mod names;
mod open;
mod readdir;
mod replay;
mod xattr;

pub use data::DetachedTransfer;
pub(crate) use data::{DURABLE_FLAGS, PendingTransfer};
