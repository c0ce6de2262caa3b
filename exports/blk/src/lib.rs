//! The `blk` export: a [`Disk`] as a virtio-blk device for a virtual machine.
//!
//! The device is that of VIRTIO 1.3, section 5.2, over vhost-user. One worker serves each queue. It takes all waiting
//! requests, asks the disk for the location of their bytes, and merges adjacent transfers (such as sequential requests
//! of 512 bytes). It submits all transfers with one system call, and signals once.
//!
//! Offered: up to 16 queues, flush, a write cache that the driver can switch off (`CONFIG_WCE`), read-only disks, block
//! sizes and topology, discard and write-zeroes of several ranges, serial numbers, changes of the size. Not offered:
//! secure erase, which files cannot guarantee, and zones, which would need pass-through of `BLKREPORTZONE` and related
//! ioctls.
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
mod jobs;
mod metrics;
mod options;
mod request_text;
mod state;
#[cfg(test)]
mod tests;
mod watch;

use std::os::unix::net::UnixListener;
use std::sync::Arc;

use ferry_engine::metrics::Metrics;
pub use ferry_engine::{IoMode, PollLimit, RateLimiter};
use ferry_vfs::{Disk, Errno};
use ferry_vhost::{FrontEnd, Server, ServerError};

use crate::device::Blk;
pub use crate::options::{Options, QUEUES_MAX};
use crate::state::State;
use crate::watch::Watch;

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

/// A disk that is exported on a socket.
pub struct Export {
    server: Arc<Server>,
    metrics: Arc<Metrics>,
    watch: Watch,
    disk: Arc<dyn Disk>,
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("server", &self.server).finish_non_exhaustive()
    }
}

impl Export {
    /// Serves a disk on separate threads, to one front end after another.
    ///
    /// # Errors
    /// [`Error`].
    pub fn start(listener: UnixListener, disk: Arc<dyn Disk>, options: Options) -> Result<Self, Error> {
        if !(1..=QUEUES_MAX).contains(&options.queues) {
            return Err(Error::Queues(options.queues));
        }
        let state = Arc::new(State::new(Arc::clone(&disk), options.writeback, options.name.clone()));
        let metrics = Arc::clone(&state.metrics);
        let device = Blk::new(Arc::clone(&state), options);
        let server = Arc::new(Server::start(listener, device, "ferry-blk")?);
        let watch = Watch::start(state, Arc::clone(&server)).map_err(Error::Thread)?;
        Ok(Self { server, metrics, watch, disk })
    }

    /// Returns a value that tells whether a front end is connected.
    pub fn front_end(&self) -> FrontEnd {
        self.server.front_end()
    }

    /// Returns the counters of its requests.
    pub fn metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.metrics)
    }

    /// Stops accepting requests, completes those in flight, and makes everything durable.
    pub fn stop(self) {
        let Self { server, watch, disk, metrics: _ } = self;
        watch.stop();
        // The watch held the only other reference: the server stops here.
        drop(server);
        let durable = disk.flush().and_then(|file| file.map_or(Ok(()), rustix::fs::fdatasync));
        if let Err(error) = durable
            && error != Errno::ROFS
        {
            tracing::error!("cannot sync the disk, so writes of the guest may be lost: {error}");
        }
    }
}
