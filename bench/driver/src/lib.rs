//! The guest's side of virtio-fs as a host program.

mod error;
mod frontend;
pub mod load;
pub mod memory;
mod queue;
pub mod ring;
mod driver;
mod fuse_tmp;

pub use driver::{Config, Driver};
pub use error::{Error, Result};
pub use frontend::RingAddresses;
pub use queue::{Completion, Counters, Queue, Ticket};
