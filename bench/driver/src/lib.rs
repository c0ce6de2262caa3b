//! A driver of virtio-fs and virtio-blk as a host program, for tests and measurements. It connects to a vhost-user server in place
//! of a VMM, drives virtqueues in shared memory, and sends FUSE or disk requests.
//!
//! * [`Driver`]: a connection. [`Driver::connect`] negotiates, shares memory and starts the queues; methods such as
//!   [`Driver::lookup`], [`Driver::read`] or [`Driver::setlk`] are one request each.
//! * [`Driver::send`] and [`Driver::receive`], [`Driver::call`]: any request, with a later reply, or typed by
//!   `ferry-wire`.
//! * [`mod@fuse`]: the client's side of the FUSE codec, for tests that have no device, too.
//! * [`Queue`]: raw buffers, several requests in flight, [`Queue::poll`] and [`Queue::wait`].
//! * [`ring`] and [`memory`]: bare descriptors and ring entries, to publish invalid ones, too.
//! * [`load`]: load at full speed on a file or a disk, and its cost to the server.
//! * [`walk`]: a whole share by READDIRPLUS.
//! * [`hostile`]: malformed input, case by case, each followed by a good request.
//!
//! ```no_run
//! use ferry_driver::{Config, Driver, ROOT};
//!
//! let mut driver = Driver::connect("/run/share.sock", Config { queues: 4, ..Config::default() })?;
//! driver.init()?;
//! let (entry, open) = driver.create(ROOT, "hello", 0o102, 0o100_644)?;
//! driver.write(entry.nodeid, open.fh, 0, b"Hello from no guest at all")?;
//!
//! driver.select(4); // The requests above went through queue 1; 0 is the high-priority queue.
//! assert_eq!(driver.read(entry.nodeid, open.fh, 6, 4)?, b"from");
//! assert_eq!(driver.lookup(ROOT, "nothing").unwrap_err().errno(), Some(2));
//! # Ok::<(), ferry_driver::Error>(())
//! ```

mod driver;
mod error;
mod frontend;
pub mod fuse;
pub mod hostile;
pub mod load;
pub mod measure;
pub mod memory;
mod ops;
mod queue;
pub mod ring;
pub mod session;
pub mod walk;
mod watchdog;

pub use driver::{Config, Driver};
pub use error::{Error, Result};
pub use frontend::{RingAddresses, RingParameters};
pub use ops::{INIT_FLAGS, ListEntry, TRANSFER_BYTES_MAX};
pub use queue::{Completion, Counters, Queue, Ticket};
pub use session::{Caller, ROOT, TypedReply};
