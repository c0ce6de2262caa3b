//! The `blk` export: a [`Disk`] as a virtio-blk device for a virtual machine.
//!
//! The device is that of VIRTIO 1.3, section 5.2, over vhost-user. One worker serves each queue: it takes all requests
//! that wait, asks the disk where their bytes live, has those that are adjacent made as one transfer (sequential
//! requests of 512 bytes are), submits all transfers with one system call, and signals once.
//!
//! Offered: up to 16 queues, flush, a cache that the driver can turn off (`CONFIG_WCE`), read-only disks, block sizes
//! and topology, discard and write-zeroes of several ranges, serial numbers, changes of the size.
//! Not offered: secure erase, which files cannot keep the promise of, and zones, which only zoned devices have
//! (Linux's `BLKREPORTZONE` and its kin would have to be passed on request by request).
//!
//! ```no_run
//! # fn disk() -> std::sync::Arc<dyn ferry_vfs::Disk> { unimplemented!() }
//! let socket = ferry_vhost::Socket::bind("/run/disk.sock".as_ref())?;
//! let export = ferry_blk::Export::start(socket.listener()?, disk(), ferry_blk::Options::default())?;
//! // ... until it is time to end:
//! export.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod device;
mod handler;
mod slow;
mod state;
#[cfg(test)]
mod tests;
mod watch;

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

pub use ferry_engine::IoMode;
use ferry_vfs::{Disk, Errno};
use ferry_vhost::{Server, ServerError};

use crate::device::Blk;
use crate::state::State;
use crate::watch::Watch;

/// As many as a guest of ordinary size has CPUs; Linux makes one for each.
pub const QUEUES_MAX: usize = 16;

/// The longest that [`Options::poll`] is by default: a little more than it takes a guest to get on with the next
/// request of a series, and far less than a time slice.
const POLL_DEFAULT: Duration = Duration::from_micros(100);

/// How an export is to behave.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queues, each with a worker as long as there are CPUs; the guest may use fewer.
    pub queues: usize,
    /// The longest that a worker looks for work before it sleeps.
    pub poll: Duration,
    /// Writes may be held in a cache until the guest flushes. Otherwise each write ends when it is durable, and the
    /// guest cannot change that.
    pub writeback: bool,
    /// How data is moved.
    pub io: IoMode,
    /// Register the guest's memory with io_uring, so that transfers need not have it looked up each time. All of it is
    /// allocated then, and **pinned**: not for guests that give memory back (a balloon, free page reporting,
    /// virtio-mem), for what they get again would not be what is written to.
    pub pin_memory: bool,
    /// What each worker calls before its first request, as [`ferry_vhost::WorkerOptions::begun`].
    pub begun: Option<fn()>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            // QEMU asks for one per CPU of the guest. Those that it does not start have neither a worker nor memory.
            queues: QUEUES_MAX,
            poll: POLL_DEFAULT,
            writeback: true,
            io: IoMode::Auto,
            pin_memory: false,
            begun: None,
        }
    }
}

/// Why a disk cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// A thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// The number of queues.
    #[error("{0} queues; choose 1 to {QUEUES_MAX}")]
    Queues(usize),
}

/// A disk being offered on a socket.
pub struct Export {
    server: Arc<Server>,
    watch: Watch,
    disk: Arc<dyn Disk>,
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Export {
    /// Serves a disk on threads of its own, to one front end after another.
    ///
    /// # Errors
    /// [`Error`].
    pub fn start(listener: UnixListener, disk: Arc<dyn Disk>, options: Options) -> Result<Self, Error> {
        if !(1..=QUEUES_MAX).contains(&options.queues) {
            return Err(Error::Queues(options.queues));
        }
        let state = Arc::new(State::new(Arc::clone(&disk), options.writeback));
        let device = Blk::new(Arc::clone(&state), options);
        let server = Arc::new(Server::start(listener, device, "ferry-blk")?);
        let watch = Watch::start(state, Arc::clone(&server)).map_err(Error::Thread)?;
        Ok(Self { server, watch, disk })
    }

    /// Takes no more requests, ends those under way, and makes everything durable.
    pub fn stop(self) {
        let Self { server, watch, disk } = self;
        watch.stop();
        // The watch had the only other reference: the server stops here.
        drop(server);
        let durable = disk.flush().and_then(|file| file.map_or(Ok(()), rustix::fs::fdatasync));
        if let Err(error) = durable
            && error != Errno::ROFS
        {
            tracing::error!("what the guest wrote may not be on disk: {error}");
        }
    }
}
