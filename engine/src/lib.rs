//! Building blocks for the workers of all exports.
//!
//! * [`Carrier`], [`TransferRequest`]: how a request of any protocol leaves a read, write or fsync to whatever carries it.
//! * [`Transfer`]: one of those. A single function of file, operation and batch decides whether it is copied inline, tried
//!   without waiting, or left to a ring or to a pool.
//! * [`Transfers`]: those of a worker with an io_uring, with the one place where the worker sleeps.
//! * [`copy_mapped`]: the same without any system call, where a source has its files' bytes mapped.
//! * [`BusyPoll`]: how long to look for work before sleeping, learnt from how long the last sleeps took.
//! * [`BlockingPool`]: a few threads for the calls that may take long and have no asynchronous form.
//! * [`Watch`], [`Monitor`]: what is served in one place goes on by another thread when a handler is blocked there.
//! * [`Mailbox`]: how those threads, and the control plane, reach a worker.
//! * [`RatelimitedLog`]: log lines that a client can cause, a few at a time.
//! * [`requests`]: a log of requests and what became of them.
//!
//! A worker's round is: take all requests that wait, queue their transfers, [`Transfers::flush`], answer what
//! [`Transfers::next_done`] gives, signal once, spin for a while, sleep.
//!
//! ```
//! use ferry_engine::{IoMode, Operation, Transfers};
//! use ferry_vfs::Backing;
//! use std::sync::Arc;
//!
//! let file = std::fs::File::open("/proc/self/exe")?;
//! let mut magic = [0u8; 4];
//! let segment = ferry_engine::Segment { address: magic.as_mut_ptr(), bytes: magic.len() };
//! let mut transfers = Transfers::new(IoMode::Auto, 64)?;
//! // SAFETY: `magic` outlives the transfer, which is waited for below.
//! unsafe { transfers.queue(7, Operation::Read, Arc::new(Backing::new(file.into())), 0, [segment]) };
//! while !transfers.flush().has_done() {
//!     transfers.sleep()?;
//! }
//! assert_eq!(transfers.next_done().map(|(token, outcome)| (token, outcome.unwrap())), Some((7, 4)));
//! assert_eq!(&magic, b"\x7fELF");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod aio_batch;
mod barrier;
mod blocking;
mod blocking_pool;
mod busy_poll;
mod carrier;
mod generation;
mod heap;
mod mailbox;
mod memory;
mod privileges;
mod registered;
pub mod requests;
mod ring;
mod sync_on_stop;
mod transfers;
mod watch;
mod worker_monitor;

pub use blocking::{read_blocking, sync_blocking, write_blocking};
pub use blocking_pool::{BlockingPool, IDLE_THREAD};
pub use busy_poll::{BusyPoll, count_cpus};
pub use carrier::{Carrier, DataInput, DataOutput, ReplyBuffer, TransferRequest};
pub use ferry_vfs::RatelimitedLog;
pub use ferry_vfs::Segment;
pub use generation::{Generation, GenerationCell, Hold, NotEnded};
pub use heap::trim_heap;
pub use mailbox::Mailbox;
pub use memory::copy_mapped;
pub use privileges::WithoutFsetid;
pub use registered::MemoryOwner;
pub use sync_on_stop::sync_on_stop;
pub use transfers::{IoMode, Operation, PoolTransfer, Transfer, Transfers, TransfersError, io_hints};
pub use watch::{CallSnapshot, Ownership, Watch};
pub use worker_monitor::{AbortPolicy, BLOCKED, CurrentRequest, Monitor, MonitorHandle, MonitoredWorker, Replacement};
