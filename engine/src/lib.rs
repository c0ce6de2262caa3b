//! What every worker of every export is made of.
//!
//! * [`Carrier`], [`TransferRequest`]: how a request of any protocol leaves a read, write or fsync to whatever carries it.
//! * [`Transfer`]: one of those. A single function of file, operation and batch decides whether it is copied inline, tried
//!   without waiting, or left to a ring or to a pool.
//! * [`Transfers`]: those of a worker with an io_uring, with the one place where the worker sleeps.
//! * [`move_now`]: the same without any system call, where a source has its files' bytes mapped.
//! * [`Spin`]: how long to look for work before sleeping, learnt from how long the last sleeps took.
//! * [`Lane`]: a few threads for the calls that may take long and have no asynchronous form.
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

mod at_once;
mod barrier;
mod blocking;
mod carrier;
mod heap;
mod lane;
mod last_sync;
mod lease;
mod mailbox;
mod memory;
mod monitor;
mod privileges;
mod registered;
pub mod requests;
mod ring;
mod spin;
mod transfers;
mod watch;

pub use blocking::{read_blocking, sync_blocking, write_blocking};
pub use carrier::{Carrier, DataInput, DataOutput, ReplyBuffer, TransferRequest};
pub use ferry_vfs::RatelimitedLog;
pub use ferry_vfs::Segment;
pub use heap::trim_heap;
pub use lane::{IDLE_THREAD, Lane};
pub use last_sync::sync_at_the_end;
pub use lease::{Hold, Lease, NotEnded, Term};
pub use mailbox::Mailbox;
pub use memory::move_now;
pub use monitor::{BLOCKED, Bell, Monitor, Post, Relief, Serving, Verdict};
pub use privileges::WithoutFsetid;
pub use registered::Keeper;
pub use spin::{Spin, count_cpus};
pub use transfers::{IoMode, Operation, PoolTransfer, Transfer, Transfers, TransfersError, io_hints};
pub use watch::{Ownership, Seen, Watch};
