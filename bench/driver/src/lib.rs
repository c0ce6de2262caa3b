//! The guest's side of virtio-fs as a host program.

mod driver;
mod error;
mod frontend;
pub mod hostile;
pub mod load;
pub mod measure;
pub mod memory;
mod ops;
mod queue;
pub mod ring;
pub mod session;

pub use driver::{Config, Driver};
pub use error::{Error, Result};
pub use frontend::{RingAddresses, RingParameters};
pub use ops::{DirEntry, INIT_FLAGS, TRANSFER_BYTES_MAX};
pub use queue::{Completion, Counters, Queue, Ticket};
pub use session::{Caller, ROOT};
