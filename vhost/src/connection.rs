//! The connection of one front end: its rings and memory, and the workers that serve them.

mod requests;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;

use ferry_engine::{Monitor, MonitorHandle};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Error, Result};

use crate::Device;
use crate::channel::Channel;
use crate::dirty::DirtyLog;
use crate::inflight::Area;
use crate::memory::{Memory, MemoryError};
use crate::migration::Transfer;
use crate::ring::{Begin, RingAddresses, RingError, RingSetup};
use crate::window::{AddedRegion, Window};
use crate::worker::{Command, Control, Port, QueueHandler, Start, StoppedQueue};
use crate::worker_threads::{self, WorkerShared};
use ferry_engine::RatelimitedLog;

/// Transport feature bits (VIRTIO 1.3, section 6; vhost-user, "Communication").
const F_INDIRECT_DESC: u64 = 1 << 28;
const F_EVENT_IDX: u64 = 1 << 29;
/// Logging of the pages that the device writes (`VHOST_F_LOG_ALL`).
const F_LOG_ALL: u64 = 1 << 26;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;
const F_RING_PACKED: u64 = 1 << 34;

type Message<D> = <<D as Device>::Handler as QueueHandler>::Message;

/// One ring, as described by the front end so far.
#[derive(Default)]
struct Queue {
    size: u32,
    addresses: RingAddresses,
    base: u32,
    /// It stopped at `base`, and SET_VRING_BASE has not been sent since.
    resumes: bool,
    /// Heads of the requests that were parked when it was stopped.
    out: Vec<u16>,
    /// Heads of the requests that were parked when the state was saved, here or on the source host, until the ring
    /// starts.
    resubmitted: Vec<u16>,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    enabled: bool,
    running: bool,
    /// It stopped because its ring's memory was unmapped, and resumes when that is mapped again.
    adrift: bool,
    /// It has run here, so its worker exists.
    was_started: bool,
}

pub(crate) struct Connection<D: Device> {
    device: Arc<D>,
    session: Arc<D::Session>,
    memory: Memory,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    /// The in-flight log.
    inflight: Option<Arc<Area>>,
    queues: Vec<Queue>,
    /// The workers' ports, each `None` until one of its queues starts.
    workers: Vec<Option<Arc<Port<Message<D>>>>>,
    common: WorkerShared,
    /// Detects blocked handlers, if other threads can take their queues over.
    monitor: Option<Monitor>,
    ratelimited_log: Arc<RatelimitedLog>,
    /// The shared memory region, if the device has one.
    window: Option<Arc<Window>>,
    /// The log of written pages, used while [`F_LOG_ALL`] is negotiated.
    dirty: Option<Arc<DirtyLog>>,
    /// A transfer of the device's state to or from another host.
    transfer: Option<Transfer>,
    /// Readable when the server stops.
    stop: Option<OwnedFd>,
    /// The back-end channel.
    channel: Arc<Channel>,
    /// Whether recorded messages of the previous server are being replayed.
    taking_over: TakeoverStage,
}

/// The stage of taking over a connection from the previous server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakeoverStage {
    /// The connection is new.
    New,
    /// Recorded messages are being replayed. `later`: the memory region was added to a running guest.
    Replaying { later: bool },
    /// The messages have been replayed.
    Done,
}

impl<D: Device> Connection<D> {
    pub(crate) fn new(device: Arc<D>, ratelimited_log: Arc<RatelimitedLog>) -> Self {
        let queues = (0..device.queue_count()).map(|_| Queue::default()).collect();
        let workers = (0..device.worker_count()).map(|_| None).collect();
        let session = Arc::new(device.session());
        let window = device.window_bytes().map(|bytes| Arc::new(Window::new(bytes)));
        let inflight = device.in_flight().map(|file| Area::open_own(file, device.queue_count()));
        let inflight = inflight.transpose().unwrap_or_else(|error| {
            tracing::error!("no in-flight log; requests in flight are lost if this server is killed: {error}");
            None
        });
        let monitor_handle = MonitorHandle::default();
        let common = WorkerShared::new(Arc::clone(&ratelimited_log), monitor_handle.clone(), device.spare_threads());
        let monitor = (device.spare_threads() > 0)
            .then(|| Monitor::start("vhost-monitor", monitor_handle, Box::new(|_, _, _| None)));
        let monitor = monitor.transpose().unwrap_or_else(|error| {
            tracing::error!("cannot start the monitor thread, so blocked requests delay their queue: {error}");
            None
        });
        Self {
            device,
            session,
            memory: Memory::default(),
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            inflight,
            queues,
            workers,
            common,
            monitor,
            ratelimited_log,
            window,
            dirty: None,
            transfer: None,
            stop: None,
            channel: Arc::default(),
            taking_over: TakeoverStage::New,
        }
    }

    /// Sets the descriptor that is readable when the server stops, and the server's back-end channel.
    pub(crate) fn set_server(&mut self, stop: Option<OwnedFd>, channel: Arc<Channel>) {
        (self.stop, self.channel) = (stop, channel);
    }

    /// Sets the stage of the takeover.
    pub(crate) fn taking_over(&mut self, taking_over: TakeoverStage) {
        self.taking_over = taking_over;
    }

    /// Logs a refused message.
    pub(crate) fn refuses(&self, error: &Error) {
        self.ratelimited_log.warn(format_args!("a message of the front end is refused: {error}"));
    }

    /// Returns the queues that do not run, and where they begin.
    pub(crate) fn stopped_queues(&self) -> Vec<(u8, u32)> {
        let stopped_queues = (0..=u8::MAX).zip(&self.queues).filter(|(_, queue)| !queue.running);
        stopped_queues.map(|(index, queue)| (index, queue.base)).collect()
    }

    /// Whether any queue runs.
    pub(crate) fn runs(&self) -> bool {
        self.queues.iter().any(|queue| queue.running)
    }

    fn offered(&self) -> u64 {
        let transport = F_VERSION_1 | F_INDIRECT_DESC | F_EVENT_IDX | F_RING_PACKED | F_PROTOCOL_FEATURES;
        let log = if self.device.migrates() { F_LOG_ALL } else { 0 };
        self.device.features() | transport | log
    }

    fn is_packed(&self) -> bool {
        self.features & F_RING_PACKED != 0
    }

    /// Without `REPLY_ACK`, which the crate adds itself.
    fn protocol_offered(&self) -> VhostUserProtocolFeatures {
        let mut features = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE;
        features.set(VhostUserProtocolFeatures::CONFIG, self.device.config().is_some());
        let has_window = self.window.is_some();
        features.set(VhostUserProtocolFeatures::BACKEND_SEND_FD, has_window);
        features.set(VhostUserProtocolFeatures::SHMEM, has_window);
        features.set(VhostUserProtocolFeatures::BACKEND_REQ, self.device.changes_config() || self.window.is_some());
        let for_migration = VhostUserProtocolFeatures::DEVICE_STATE | VhostUserProtocolFeatures::LOG_SHMFD;
        features.set(for_migration, self.device.migrates());
        features.set(VhostUserProtocolFeatures::INFLIGHT_SHMFD, self.device.tracks_in_flight());
        features
    }

    /// Whether the front end gets an acknowledgement of messages that ask for one.
    pub(crate) fn acknowledges(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// Sets the back-end channel of the window.
    pub(crate) fn attach(&self, socket: &OwnedFd) {
        let Some(window) = &self.window else { return };
        if matches!(self.taking_over, TakeoverStage::Replaying { .. }) {
            window.take_over();
        }
        match socket.try_clone() {
            Ok(socket) => window.attach(socket),
            Err(error) => tracing::error!("cannot use the back-end channel for the window: {error}"),
        }
    }

    /// Updates the window's number of memory regions.
    fn update_window_regions(&self, added: Option<AddedRegion>) {
        if let Some(window) = &self.window {
            window.memory_changed(self.memory.regions(), added);
        }
    }

    fn queue(&mut self, index: u32) -> Result<&mut Queue> {
        let at = usize::try_from(index).map_err(|_| Error::InvalidParam)?;
        if at >= self.queues.len() {
            self.too_few_queues(at.saturating_add(1));
        }
        self.queues.get_mut(at).ok_or(Error::InvalidParam)
    }

    /// Logs that the front end requests more queues than offered, and what to do.
    fn too_few_queues(&self, wanted: usize) {
        let offered = self.queues.len();
        let remedy =
            self.device.queues_flag(wanted).map(|queues| format!("start the server with --queues {queues}, or "));
        self.ratelimited_log.error(format_args!(
            "the VMM requests {wanted} queues but {offered} are offered: {}configure fewer in the VMM",
            remedy.unwrap_or_default()
        ));
    }

    /// Returns a worker, starting it on first use.
    fn worker(&mut self, index: usize) -> Result<Arc<Port<Message<D>>>> {
        if let Some(port) = &self.workers[index] {
            return Ok(Arc::clone(port));
        }
        let (sender, started) = channel();
        let port = worker_threads::start((&self.device, &self.session), index, &self.common, sender);
        let port = port.map_err(Error::ReqHandlerError)?;
        if let Err(error) = started.recv().map_err(|_| Error::BackendInternalError)? {
            tracing::error!("{error}");
            return Err(Error::BackendInternalError);
        }
        self.workers[index] = Some(Arc::clone(&port));
        Ok(port)
    }

    /// Sends a command to the worker of a queue, if it has started.
    fn post(&self, index: usize, control: Control) {
        if let Some(port) = &self.workers[self.device.worker_of(index)] {
            port.0.post(Command::Control(control));
        }
    }

    /// Starts the queue if its description is complete.
    fn start(&mut self, index: usize) -> Result<()> {
        let needs_enable = self.features & F_PROTOCOL_FEATURES != 0;
        let queue = &self.queues[index];
        let ready = (queue.enabled || !needs_enable) && queue.addresses != RingAddresses::default();
        let Some(kick) = queue.kick.as_ref().filter(|_| ready && !queue.running) else { return Ok(()) };
        let start = Start {
            memory: self.memory.clone(),
            setup: RingSetup {
                size: queue.size,
                addresses: queue.addresses,
                packed: self.is_packed(),
                event_index: self.features & F_EVENT_IDX != 0,
                indirect: self.features & F_INDIRECT_DESC != 0,
            },
            base: queue.base,
            resumes: queue.resumes,
            log: self.inflight.as_ref().and_then(|area| area.region(index)),
            resubmitted: queue.resubmitted.clone(),
            dirty: self.dirty.clone().filter(|_| self.features & F_LOG_ALL != 0),
            kick: Arc::clone(kick),
            call: queue.call.clone(),
            error: queue.error.clone(),
        };
        let port = self.worker(self.device.worker_of(index))?;
        self.device.resumed(&self.session);
        let (reply, outcome) = channel();
        port.0.post(Command::Control(Control::Start(index, start, reply)));
        self.queues[index].was_started = true;
        match outcome.recv() {
            Ok(Ok(())) => {
                if !self.runs() {
                    self.channel.device_started();
                }
                self.queues[index].running = true;
                self.queues[index].resubmitted.clear();
            }
            Ok(Err(reason)) => {
                self.ratelimited_log.error(format_args!("queue {index}: {reason}"));
                // A queue that is taken over had lost its memory under the previous server.
                let is_taken_over = matches!(self.taking_over, TakeoverStage::Replaying { .. });
                self.queues[index].adrift = is_taken_over || matches!(reason, RingError::Address { .. });
                if !is_taken_over {
                    return Err(Error::InvalidParam);
                }
            }
            Err(_) => {
                tracing::error!("queue {index}: its worker has ended");
                return Err(Error::BackendInternalError);
            }
        }
        Ok(())
    }

    /// Stops the queue if it runs, and records where.
    fn stop(&mut self, index: usize) {
        if !self.queues[index].running {
            return;
        }
        let (reply, stopped) = channel();
        self.post(index, Control::Stop(index, reply));
        let queue = &mut self.queues[index];
        queue.running = false;
        queue.adrift = false;
        match stopped.recv() {
            Ok(StoppedQueue { base, out }) => (queue.base, queue.out, queue.resumes) = (base, out, true),
            Err(_) => tracing::error!("queue {index}: its worker has ended; requests may be lost"),
        }
    }

    /// Handles a new base of a queue that the previous server had stopped and that has not run here: another base
    /// means that the driver restarted it, so its in-flight log is void.
    fn reset_if_restarted(&self, index: u32, base: u32) {
        let queue = self.queues.get(index as usize).filter(|queue| !queue.was_started);
        if self.taking_over == TakeoverStage::Done
            && queue.is_some_and(|queue| matches!(Begin::after(Some(queue.base), base, || false), Begin::At(_)))
            && let Some(region) = self.inflight.as_ref().and_then(|area| area.region(index as usize))
            && !region.is_migrated()
        {
            region.reset();
        }
    }

    /// Stops the queue, applies `change`, restarts it.
    fn restart(&mut self, index: u32, change: impl FnOnce(&mut Queue)) -> Result<()> {
        self.queue(index)?;
        let index = index as usize;
        self.stop(index);
        change(&mut self.queues[index]);
        self.start(index)
    }

    /// Stops all queues, applies `change`, restarts them.
    fn restart_all(&mut self, change: impl FnOnce(&mut Self)) -> Result<()> {
        let running: Vec<usize> = (0..self.queues.len()).filter(|index| self.queues[*index].running).collect();
        running.iter().for_each(|index| self.stop(*index));
        change(self);
        // The others restart even if one cannot.
        running.into_iter().map(|index| self.start(index)).fold(Ok(()), Result::and)
    }

    /// Changes the memory of all queues. A queue whose ring stays in place keeps running: it looks up its next chain
    /// in the new memory and keeps the old memory while requests use it. So a request that waits for the front end
    /// (for a file in another device's window) does not block this message. All other queues stop during the change;
    /// a queue whose ring loses its memory restarts when the memory is back.
    fn remap(&mut self, change: impl FnOnce(&Memory) -> std::result::Result<Memory, MemoryError>) -> Result<()> {
        let memory = change(&self.memory).map_err(|error| {
            tracing::error!("{error}");
            Error::ReqHandlerError(std::io::Error::other(error))
        })?;
        let stays = |queue: &Queue| {
            let RingAddresses { descriptors, available, used } = queue.addresses;
            queue.running
                && !self.device.registers_memory()
                && [descriptors, available, used]
                    .into_iter()
                    .all(|address| memory.has_same_mapping(&self.memory, address))
        };
        let restarts = |queue: &Queue| (queue.running || queue.adrift) && !stays(queue);
        let restarted: Vec<usize> = (0..self.queues.len()).filter(|index| restarts(&self.queues[*index])).collect();
        if let Some(window) = &self.window {
            window.memory_change_begins();
        }
        restarted.iter().for_each(|index| self.stop(*index));
        self.memory = memory;
        // Running queues stay. They read this command before any chain that the driver adds after the front end has
        // its reply.
        for (index, _) in self.queues.iter().enumerate().filter(|(_, queue)| queue.running) {
            self.post(index, Control::Memory(index, self.memory.clone()));
        }
        self.update_window_regions(None);
        let mut outcome = Ok(());
        for index in restarted {
            self.queues[index].adrift = false;
            let started = self.start(index);
            if !self.queues[index].adrift {
                outcome = outcome.and(started);
            }
        }
        // The other queues run even after an error.
        outcome.map_err(|error| Error::ReqHandlerError(std::io::Error::other(error)))
    }

    /// Stores the driver's settings for the next server.
    fn store_driver_state(&self) {
        if let (Some(area), Some(kept)) = (&self.inflight, self.device.driver_state(&self.session)) {
            area.store_driver_state(kept);
        }
    }

    /// Releases everything: the front end is gone for good.
    pub(crate) fn gone(&mut self) {
        for index in 0..self.queues.len() {
            self.stop(index);
        }
        // An in-flight log that the front end keeps may come back with it.
        if let Some(area) = self.inflight.as_ref().filter(|_| !self.device.tracks_in_flight()) {
            area.clear();
        }
        self.device.gone(&self.session);
    }

    fn reset(&mut self) {
        for index in 0..self.queues.len() {
            self.stop(index);
            let Queue { call, error, was_started, .. } = std::mem::take(&mut self.queues[index]);
            // A ring only starts again with a new kick descriptor and new addresses.
            self.queues[index] = Queue { call, error, was_started, ..Queue::default() };
        }
        if let Some(area) = &self.inflight {
            area.clear();
        }
        self.device.reset(&self.session);
        // Some settings survive a reset.
        self.store_driver_state();
    }
}

impl<D: Device> Drop for Connection<D> {
    fn drop(&mut self) {
        if let Some(window) = &self.window {
            window.end();
        }
        for port in self.workers.iter().flatten() {
            port.0.post(Command::Control(Control::Quit));
        }
        // The monitor starts threads, so it ends first.
        self.monitor = None;
        self.common.threads.join();
    }
}
