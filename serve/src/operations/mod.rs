//! The FUSE operations, one file for each family. A method of `Server` serves the opcode of its name.

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
