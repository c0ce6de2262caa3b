//! The common part of Ferry's vhost-user devices.
//!
//! A device implements [`Device`] (what it offers) and [`QueueHandler`] (what it does with a descriptor chain).
//! [`Server`] does the rest: it listens on a socket, speaks the vhost-user protocol with one front end at a time,
//! maps the guest's memory, and runs one worker per virtqueue, which takes all waiting chains, serves them, and
//! signals once per batch. Rings may be split or packed. The front end may keep the in-flight log, so that the next
//! server completes the requests of one that was killed.
//!
//! Sources: "Virtual I/O Device (VIRTIO) Version 1.3", sections 2.7 (split virtqueues) and 2.8
//! (packed virtqueues); the vhost-user protocol document of QEMU.
//!
//! # What is trusted
//!
//! The guest is not: every descriptor is copied once and checked, an invalid chain is dropped, an invalid ring stops
//! until it is set up again. The front end (the VMM) is trusted with its memory, but not to send well-formed
//! messages.

mod batch;
mod chain;
mod channel;
mod coalesce;
mod connection;
mod dirty;
#[cfg(fuzzing)]
#[path = "tests/fuzzing.rs"]
pub mod fuzzing;
mod inflight;
mod io;
mod may_fault;
mod memory;
mod migration;
mod packed;
mod persistent_connection;
mod pool;
mod ring;
mod server;
mod shared;
mod slots;
mod socket;
mod takeover;
mod threads;
mod waiting;
mod window;
mod worker;
mod worker_threads;

pub use chain::Chain;
pub use ferry_engine::RatelimitedLog;
pub use inflight::in_flight_memory;
pub use io::Io;
pub use persistent_connection::{Commit, ConnectionStore, InheritedConnection, Records};
pub use server::{EndSignal, FrontEnd, Server, ServerError};
pub use socket::{Socket, SocketError};
pub use window::{Part, Window, WindowError};
pub use worker::{ChainState, Placement, Port, QueueHandler, WorkerOptions};

/// The most descriptors in a chain, and entries in a ring: what virtio-fs and virtio-blk in Linux need for requests
/// of 1 MiB in pages of 4 KiB.
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// A device, as the front end sees it.
pub trait Device: Send + Sync + 'static {
    /// Serves one worker's queues of one connection.
    type Handler: QueueHandler;
    /// The state that the queues of one connection share.
    type Session: Send + Sync + 'static;

    /// Returns the number of virtqueues.
    fn queue_count(&self) -> usize;
    /// Returns the value of `--queues` that gives `wanted` virtqueues. `None`: that many are not possible.
    fn queues_flag(&self, _wanted: usize) -> Option<usize> {
        None
    }
    /// Returns the device's virtio feature bits; those of the transport are added.
    fn features(&self) -> u64 {
        0
    }
    /// Returns the device's configuration space; `None`: the front end provides it.
    fn config(&self) -> Option<Vec<u8>>;
    /// Writes to the configuration space for the driver; returns whether that part is writable.
    fn write_config(&self, _session: &Self::Session, _offset: u32, _bytes: &[u8]) -> bool {
        false
    }
    /// Whether the configuration space may change without the driver; see [`Server::config_changed`].
    fn changes_config(&self) -> bool {
        false
    }
    /// Returns the length of the device's shared memory region 0 in bytes, a multiple of 4096; `None`: it has none.
    fn window_bytes(&self) -> Option<u64> {
        None
    }
    /// Called when the front end has requested the shared memory region: from now on a thread of the device may map
    /// files there (see [`Window::map`]). A request that depends on a mapping must be [`ChainState::Parked`].
    fn window_opened(&self, _session: &Self::Session, _window: &std::sync::Arc<Window>) {}
    /// Whether the front end may keep the in-flight log, so that the next server repeats these requests after a
    /// crash. Every request must be idempotent, and none [`ChainState::Parked`].
    fn tracks_in_flight(&self) -> bool {
        false
    }
    /// Whether only the first front end is served: when it has gone, the server ends ([`Server::ended`]).
    fn serves_once(&self) -> bool {
        false
    }
    /// Whether a worker waits for more requests while the driver is busy, because larger batches are cheaper.
    fn batches_requests(&self) -> bool {
        false
    }
    /// Whether to register the guest's memory with io_uring, which pins it: a guest that returns memory (by a balloon
    /// or virtio-mem) would lose data.
    fn registers_memory(&self) -> bool {
        false
    }
    /// Returns the driver's settings in the configuration space, for [`restore`](Self::restore). `None`: there are
    /// none.
    fn driver_state(&self, _session: &Self::Session) -> Option<u32> {
        None
    }
    /// Restores the last [`driver_state`](Self::driver_state) of a server that crashed: front ends do not write the
    /// configuration again.
    fn restore(&self, _session: &Self::Session, _kept: u32) {}
    /// Called when the driver has chosen these virtio features, which may happen again.
    fn negotiated(&self, _session: &Self::Session, _features: u64) {}
    /// Called when the driver has reset the device: its settings are void, unless
    /// [`driver_state`](Self::driver_state) returns them afterwards.
    fn reset(&self, _session: &Self::Session) {}
    /// Returns in-flight memory that the device keeps itself ([`in_flight_memory`]), independently of the front end.
    /// Chains may be [`ChainState::Parked`], and are served again, marked by [`Chain::is_resubmitted`].
    fn in_flight(&self) -> Option<std::fs::File> {
        None
    }
    /// Returns a file that the kernel must release last when this process ends, after all transfers.
    fn last(&self) -> Option<std::sync::Arc<ferry_vfs::Backing>> {
        None
    }
    /// Returns where connections are stored, so that front ends do not notice a change of servers. The device must
    /// keep the in-flight log itself ([`in_flight`](Self::in_flight)), and the configuration must not change.
    fn connection_store(&self) -> Option<std::sync::Arc<dyn ConnectionStore>> {
        None
    }
    /// Called when the front end is gone and this server stays: releases what the driver held.
    fn gone(&self, _session: &Self::Session) {}
    /// Whether the device's state can be migrated: [`save`](Self::save) and [`load`](Self::load).
    fn migrates(&self) -> bool {
        false
    }
    /// Returns the device's state, while all queues are stopped.
    ///
    /// # Errors
    /// Why there is none, as a sentence.
    fn save(&self, _session: &Self::Session) -> Result<Vec<u8>, String> {
        Err("the device has no state".into())
    }
    /// Called before a queue starts. After a [`save`](Self::save) it means that the migration was cancelled.
    fn resumed(&self, _session: &Self::Session) {}
    /// Restores a state that was saved elsewhere. The front end passes it on and may have changed it.
    ///
    /// # Errors
    /// What is wrong with it, as a sentence.
    fn load(&self, _session: &Self::Session, _state: &[u8]) -> Result<(), String> {
        Err("the device has no state".into())
    }
    /// Returns how many threads of a connection may serve slow requests, beside the workers. With none, a blocked
    /// handler or transfer delays its worker's queues. Otherwise another thread takes these queues over, and while
    /// requests are slow, those that [`QueueHandler::placement`] allows run on such threads. Beyond the number they
    /// wait for each other. Each thread has its own handler ([`Self::handler`]).
    fn spare_threads(&self) -> usize {
        0
    }
    /// Returns the number of workers.
    fn worker_count(&self) -> usize;
    /// Returns the worker of queue `index`.
    fn worker_of(&self, index: usize) -> usize;
    /// Returns the options of worker `index`.
    fn worker_options(&self, index: usize) -> WorkerOptions;
    /// Creates the state of a new connection.
    fn session(&self) -> Self::Session;
    /// Creates a handler of worker `index` on the thread that will use it: one, or with [`Self::spare_threads`]
    /// several.
    fn handler(
        &self,
        session: &std::sync::Arc<Self::Session>,
        index: usize,
        port: std::sync::Arc<Port<<Self::Handler as QueueHandler>::Message>>,
    ) -> Self::Handler;
}
