//! What Ferry's vhost-user devices have in common.
//!
//! A device implements [`Device`] (what it offers) and [`QueueHandler`] (what it does with a descriptor chain);
//! [`Server`] does the rest: it listens on a socket, speaks the vhost-user protocol with one front end at a time,
//! maps the guest's memory, and runs one worker per virtqueue, which takes everything that waits, serves it, and
//! signals once per batch. Rings may be split or packed; what is in flight may be kept by the front end, so that a
//! server that takes over from one that was killed answers every request.
//!
//! Sources: "Virtual I/O Device (VIRTIO) Version 1.3", sections 2.7 (split virtqueues) and 2.8
//! (packed virtqueues); the vhost-user protocol document of QEMU.
//!
//! # What is trusted
//!
//! The guest is not: every descriptor is copied once and checked, a chain that makes no sense is dropped, a ring
//! that makes no sense stops until it is set up again. The front end (the VMM) is trusted with the memory that it
//! hands over, but not to send well-formed messages.

mod batch;
mod chain;
mod channel;
mod coalesce;
mod connection;
mod dirty;
#[cfg(fuzzing)]
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
pub use persistent_connection::{Commit, ConnectionStore, Records, StoredConnection};
pub use server::{Ended, FrontEnd, Server, ServerError};
pub use socket::{Socket, SocketError};
pub use window::{Part, Window, WindowError};
pub use worker::{Answer, Placement, Port, QueueHandler, WorkerOptions};

/// The most descriptors in a chain, and entries in a ring, that Ferry takes: what virtio-fs and virtio-blk in
/// Linux need for requests of 1 MiB in pages of 4 KiB.
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// A device, as the front end sees it.
pub trait Device: Send + Sync + 'static {
    /// Serves one worker's queues of one connection.
    type Handler: QueueHandler;
    /// What the queues of one connection share.
    type Session: Send + Sync + 'static;

    /// How many virtqueues there are.
    fn queue_count(&self) -> usize;
    /// What the flag `--queues` would have to be for `wanted` virtqueues. `None`: there cannot be so many.
    fn queues_flag(&self, _wanted: usize) -> Option<usize> {
        None
    }
    /// Device-specific virtio feature bits; the transport's are added.
    fn features(&self) -> u64 {
        0
    }
    /// The device's configuration space; `None` leaves it to the front end.
    fn config(&self) -> Option<Vec<u8>>;
    /// The driver writes to the configuration space. Returns whether it may, there.
    fn write_config(&self, _session: &Self::Session, _offset: u32, _bytes: &[u8]) -> bool {
        false
    }
    /// Whether the configuration space may change on its own, see [`Server::config_changed`].
    fn changes_config(&self) -> bool {
        false
    }
    /// The length of the device's shared memory region (of number 0) in bytes, a multiple of 4096; `None`: it has none.
    fn window_bytes(&self) -> Option<u64> {
        None
    }
    /// The front end has asked for the shared memory region: from now on files can be mapped there, by a thread of the
    /// device's own (see [`Window::map`]). A request whose answer depends on that is to be [`Answer::Parked`].
    fn window_opened(&self, _session: &Self::Session, _window: &std::sync::Arc<Window>) {}
    /// Whether the front end may keep account of what is in flight, so that whoever serves it next, after a crash of
    /// this process, serves that again. Every request must bear being served twice, and none be [`Answer::Parked`].
    fn tracks_in_flight(&self) -> bool {
        false
    }
    /// Whether the first front end is the only one: when it has gone, nobody else is served ([`Server::ended`]).
    fn serves_once(&self) -> bool {
        false
    }
    /// Whether a worker waits for more requests while the driver is busy: for those that are served cheaper together.
    fn gathers(&self) -> bool {
        false
    }
    /// Whether the guest's memory is to be registered with io_uring, and so pinned: a guest that gives memory back (a
    /// balloon, virtio-mem) would lose data.
    fn registers_memory(&self) -> bool {
        false
    }
    /// What the driver has set in the configuration space, for [`restore`](Self::restore). `None`: there is nothing.
    fn driver_state(&self, _session: &Self::Session) -> Option<u32> {
        None
    }
    /// A process that served this driver before has crashed: what its [`driver_state`](Self::driver_state) answered last, by way of the
    /// front end. Front ends do not write the configuration again.
    fn restore(&self, _session: &Self::Session, _kept: u32) {}
    /// The driver has chosen these virtio features. It may choose again.
    fn negotiated(&self, _session: &Self::Session, _features: u64) {}
    /// The driver has reset the device: what it wrote to the configuration space is void, unless
    /// [`driver_state`](Self::driver_state) has it afterwards.
    fn reset(&self, _session: &Self::Session) {}
    /// Memory of what is in flight that the device keeps itself ([`in_flight_memory`]), wherever a front end may or may not
    /// keep some. Chains may be [`Answer::Parked`], and are served again; those that were taken before say so
    /// ([`Chain::is_resubmitted`]).
    fn in_flight(&self) -> Option<std::fs::File> {
        None
    }
    /// What is to be the last thing to go when this process ends, after all of its transfers.
    fn last(&self) -> Option<std::sync::Arc<ferry_vfs::Backing>> {
        None
    }
    /// Where connections are stored, so that front ends do not notice when this process ends and another one goes on. What is
    /// in flight must be the device's own ([`in_flight`](Self::in_flight)), and the configuration must not change.
    fn connection_store(&self) -> Option<std::sync::Arc<dyn ConnectionStore>> {
        None
    }
    /// The front end is gone, and this server stays: what the driver held is void.
    fn gone(&self, _session: &Self::Session) {}
    /// Whether the device's state can be taken to another host: [`save`](Self::save) and [`load`](Self::load).
    fn migrates(&self) -> bool {
        false
    }
    /// The device's state, while all queues are stopped.
    ///
    /// # Errors
    /// Why there is none, in a sentence.
    fn save(&self, _session: &Self::Session) -> Result<Vec<u8>, String> {
        Err("the device has no state".into())
    }
    /// A queue is about to start: after a [`save`](Self::save), the driver stays here after all.
    fn resumed(&self, _session: &Self::Session) {}
    /// Goes on from a state that was saved elsewhere. The front end hands it over, and may have changed it.
    ///
    /// # Errors
    /// What is wrong with it, in a sentence.
    fn load(&self, _session: &Self::Session, _state: &[u8]) -> Result<(), String> {
        Err("the device has no state".into())
    }
    /// How many threads of a connection may serve requests that wait, beside the workers. Without any, a handler that is blocked
    /// holds up its worker's queues, and so does a transfer that is made in place. With some, another thread takes the queues
    /// over; and as long as requests are slow, those that may wait ([`QueueHandler::placement`]) are served by such threads.
    /// Past the number they wait for each other. Each thread has a handler of its own ([`Self::handler`]).
    fn spare_threads(&self) -> usize {
        0
    }
    /// How many workers serve the queues.
    fn worker_count(&self) -> usize;
    /// Which worker serves queue `index`.
    fn worker_of(&self, index: usize) -> usize;
    /// How worker `index` is to work.
    fn worker_options(&self, index: usize) -> WorkerOptions;
    /// Begins a connection.
    fn session(&self) -> Self::Session;
    /// Makes a handler of worker `index`, on the thread that will use it: one, or with [`Self::spare_threads`] several.
    fn handler(
        &self,
        session: &std::sync::Arc<Self::Session>,
        index: usize,
        port: std::sync::Arc<Port<<Self::Handler as QueueHandler>::Message>>,
    ) -> Self::Handler;
}
