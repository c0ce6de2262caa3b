//! Building blocks for the workers of all exports.
//!
//! * [`Carrier`], [`TransferRequest`]: how a request of any protocol leaves a read, write or fsync to its carrier.
//! * [`Transfer`]: one such transfer. One function of file, operation and batch decides its route: inline copy, an
//!   attempt without waiting, a ring, or a pool.
//! * [`Transfers`]: the transfers of a worker with an io_uring, and the one place where the worker sleeps.
//! * [`copy_mapped`]: a transfer without a system call, for files that a source has mapped.
//! * [`BusyPoll`]: how long to poll before sleeping, adapted to the length of recent sleeps.
//! * [`BlockingPool`]: a few threads for slow calls that have no asynchronous form.
//! * [`Watch`], [`Monitor`]: replace the worker of a queue while a handler is blocked.
//! * [`Mailbox`]: how other threads and the control plane reach a worker.
//! * [`Windows`]: which files are mapped in DAX windows, and how truncation waits for them.
//! * [`TokenBucket`], [`RateLimiter`]: limits of requests and bytes per second.
//! * [`RatelimitedLog`]: a rate limit for log lines that a client can cause.
//! * [`requests`]: a log of requests and their outcomes.
//! * [`metrics`]: counters and latencies of requests.
//! * [`trace`]: requests one by one, for a while.
//!
//! A worker's round: take all waiting requests, queue their transfers, [`Transfers::flush`], reply to the results of
//! [`Transfers::next_done`], signal once, poll for a while, sleep.
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
pub mod metrics;
mod privileges;
mod rate_limit;
mod registered;
pub mod requests;
mod ring;
mod sync_on_stop;
pub mod trace;
mod transfers;
mod watch;
mod windows;
mod worker_monitor;

pub use blocking::{read_blocking, sync_blocking, write_blocking, write_input};
pub use blocking_pool::{BlockingPool, IDLE_THREAD};
pub use busy_poll::{BusyPoll, PollLimit, count_cpus};
pub use carrier::{Carrier, DataInput, DataOutput, ReplyBuffer, TransferRequest};
pub use ferry_vfs::RatelimitedLog;
pub use ferry_vfs::Segment;
pub use generation::{Generation, GenerationCell, Hold, NotEnded};
pub use heap::{release_startup_memory, return_large_buffers, trim_heap};
pub use mailbox::Mailbox;
pub use memory::copy_mapped;
pub use privileges::WithoutFsetid;
pub use rate_limit::{BURST_MAX, BURST_MIN, BYTES_MAX, REQUESTS_MAX, RateLimiter, Rates, TokenBucket};
pub use registered::MemoryOwner;
pub use sync_on_stop::sync_on_stop;
pub use transfers::{
    IoMode, Operation, PoolTransfer, Transfer, Transfers, TransfersError, io_hints, lacks_io_uring, ring_fallbacks,
};
pub use watch::{CallSnapshot, Ownership, Watch};
pub use windows::{Claim, CompletionSignal, FileId, Member, Shortening, Window, Windows};
pub use worker_monitor::{AbortPolicy, BLOCKED, CurrentRequest, Monitor, MonitorHandle, MonitoredWorker, Replacement};
