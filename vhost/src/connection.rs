//! One front end: what it sets up, and the workers that serve it.

mod requests;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;

use ferry_engine::{Monitor, MonitorHandle};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Error, Result};

use crate::Device;
use crate::dirty::DirtyLog;
use crate::inflight::Area;
use crate::memory::{Memory, MemoryError};
use crate::migration::Transfer;
use crate::ring::{Begin, RingAddresses, RingError, RingSetup};
use crate::window::{AddedRegion, Window};
use crate::worker::{Command, Control, Port, QueueHandler, Start, Stopped};
use crate::worker_threads::{self, WorkerShared};
use ferry_engine::RatelimitedLog;

/// Transport feature bits (VIRTIO 1.3, section 6; vhost-user, "Communication").
const F_INDIRECT_DESC: u64 = 1 << 28;
const F_EVENT_IDX: u64 = 1 << 29;
/// The front end may want to know which pages are written to.
const F_LOG_ALL: u64 = 1 << 26;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;
const F_RING_PACKED: u64 = 1 << 34;

type Message<D> = <<D as Device>::Handler as QueueHandler>::Message;

/// One ring, as far as the front end has described it.
#[derive(Default)]
struct Queue {
    size: u32,
    addresses: RingAddresses,
    base: u32,
    /// It stopped there, and nobody has said otherwise since.
    resumes: bool,
    /// Requests that were waiting when it was stopped.
    out: Vec<u16>,
    /// Those that were waiting when the state was saved, here or on the host that the guest comes from, until it starts.
    resubmitted: Vec<u16>,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    enabled: bool,
    running: bool,
    /// It stopped because its ring's memory was unmapped, and resumes when that is mapped again.
    adrift: bool,
    /// It ran here, so its worker is there.
    was_started: bool,
}

pub(crate) struct Connection<D: Device> {
    device: Arc<D>,
    session: Arc<D::Session>,
    memory: Memory,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    /// What is in flight, in memory that the front end keeps.
    inflight: Option<Arc<Area>>,
    queues: Vec<Queue>,
    /// The workers' ports, each absent until one of its queues starts.
    workers: Vec<Option<Arc<Port<Message<D>>>>>,
    common: WorkerShared,
    /// Finds handlers that are blocked, where other threads can go on.
    monitor: Option<Monitor>,
    ratelimited_log: Arc<RatelimitedLog>,
    /// The shared memory region, if the device has one.
    window: Option<Arc<Window>>,
    /// Where to note which pages are written to, as long as [`F_LOG_ALL`] is wanted.
    dirty: Option<Arc<DirtyLog>>,
    /// The device's state on its way to another host, or from there.
    transfer: Option<Transfer>,
    /// Where it is in being taken over from the server before.
    taking_over: Inherited,
}

/// Where a connection is in being taken over from the server before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inherited {
    /// It is a new one.
    No,
    /// Recorded messages are being replayed. `later`: memory from now on belongs to a guest that has run.
    Now { later: bool },
    /// That is over.
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
            taking_over: Inherited::No,
        }
    }

    /// Says whether what comes was said to the server before.
    pub(crate) fn taking_over(&mut self, taking_over: Inherited) {
        self.taking_over = taking_over;
    }

    /// Says that a message is refused.
    pub(crate) fn refuses(&self, error: &Error) {
        self.ratelimited_log.warn(format_args!("a message of the front end is refused: {error}"));
    }

    /// Where queues that do not run are to begin.
    pub(crate) fn resting(&self) -> Vec<(u8, u32)> {
        let resting = (0..=u8::MAX).zip(&self.queues).filter(|(_, queue)| !queue.running);
        resting.map(|(index, queue)| (index, queue.base)).collect()
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

    /// What the crate adds on its own is not in it: `REPLY_ACK`.
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

    /// Whether the front end is told when a message was done, if it asks for that.
    pub(crate) fn acknowledges(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// The front end can be asked for mappings, and told of changes, here.
    pub(crate) fn attach(&self, socket: &OwnedFd) {
        let Some(window) = &self.window else { return };
        if matches!(self.taking_over, Inherited::Now { .. }) {
            window.take_over();
        }
        match socket.try_clone() {
            Ok(socket) => window.attach(socket),
            Err(error) => tracing::error!("the window cannot be served: {error}"),
        }
    }

    /// Tells the window of the regions that there are.
    fn tell(&self, added: Option<AddedRegion>) {
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

    /// Says that the front end wants more queues than there are, and what to do.
    fn too_few_queues(&self, wanted: usize) {
        let offered = self.queues.len();
        let remedy =
            self.device.queues_flag(wanted).map(|queues| format!("start the server with --queues {queues}, or "));
        self.ratelimited_log.error(format_args!(
            "the VMM wants {wanted} queues, and {offered} are offered: {}have the VMM ask for fewer",
            remedy.unwrap_or_default()
        ));
    }

    /// A worker, started on first use.
    fn worker(&mut self, index: usize) -> Result<Arc<Port<Message<D>>>> {
        if let Some(port) = &self.workers[index] {
            return Ok(Arc::clone(port));
        }
        let (told, started) = channel();
        let port = worker_threads::start((&self.device, &self.session), index, &self.common, told);
        let port = port.map_err(Error::ReqHandlerError)?;
        if let Err(error) = started.recv().map_err(|_| Error::BackendInternalError)? {
            tracing::error!("{error}");
            return Err(Error::BackendInternalError);
        }
        self.workers[index] = Some(Arc::clone(&port));
        Ok(port)
    }

    /// Tells the worker of a queue, if it has started.
    fn post(&self, index: usize, control: Control) {
        if let Some(port) = &self.workers[self.device.worker_of(index)] {
            port.0.post(Command::Control(control));
        }
    }

    /// Starts the queue if the front end has described it wholly.
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
                self.queues[index].running = true;
                self.queues[index].resubmitted.clear();
            }
            Ok(Err(reason)) => {
                self.ratelimited_log.error(format_args!("queue {index}: {reason}"));
                // One that is taken over had lost its memory under the server before.
                let is_taken_over = matches!(self.taking_over, Inherited::Now { .. });
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

    /// Stops the queue, if it runs, and notes where.
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
            Ok(Stopped { base, out }) => (queue.base, queue.out, queue.resumes) = (base, out, true),
            Err(_) => tracing::error!("queue {index}: its worker has ended; requests may be lost"),
        }
    }

    /// A queue that the server before had stopped, and that has not run here, is to begin at `base`: if that is
    /// somewhere else, the driver has begun again, and what was in flight is void.
    fn reset_if_restarted(&self, index: u32, base: u32) {
        let queue = self.queues.get(index as usize).filter(|queue| !queue.was_started);
        if self.taking_over == Inherited::Done
            && queue.is_some_and(|queue| matches!(Begin::after(Some(queue.base), base), Begin::At(_)))
            && let Some(region) = self.inflight.as_ref().and_then(|area| area.region(index as usize))
        {
            region.forget();
        }
    }

    /// Changes something under a queue's feet.
    fn restart(&mut self, index: u32, change: impl FnOnce(&mut Queue)) -> Result<()> {
        self.queue(index)?;
        let index = index as usize;
        self.stop(index);
        change(&mut self.queues[index]);
        self.start(index)
    }

    /// Changes something under all queues' feet.
    fn restart_all(&mut self, change: impl FnOnce(&mut Self)) -> Result<()> {
        let running: Vec<usize> = (0..self.queues.len()).filter(|index| self.queues[*index].running).collect();
        running.iter().for_each(|index| self.stop(*index));
        change(self);
        // One that cannot go on is no reason for the others not to.
        running.into_iter().map(|index| self.start(index)).fold(Ok(()), Result::and)
    }

    /// Changes the memory under all queues' feet. A queue whose ring stays where it is goes on: it looks for its next chain in the new
    /// memory, and keeps the old one for as long as something is under way there. So whoever has a request that waits for the front
    /// end (a file that it has in another device's window) does not keep it from telling us. All else stops meanwhile; a queue that
    /// loses the memory of its own ring goes on when it is back.
    fn remap(&mut self, change: impl FnOnce(&Memory) -> std::result::Result<Memory, MemoryError>) -> Result<()> {
        let memory = change(&self.memory).map_err(|error| {
            tracing::error!("{error}");
            Error::ReqHandlerError(std::io::Error::other(error))
        })?;
        let stays = |queue: &Queue| {
            let RingAddresses { descriptors, available, used } = queue.addresses;
            queue.running
                && !self.device.registers_memory()
                && [descriptors, available, used].into_iter().all(|address| memory.has_still(&self.memory, address))
        };
        let goes_on = |queue: &Queue| (queue.running || queue.adrift) && !stays(queue);
        let go_on: Vec<usize> = (0..self.queues.len()).filter(|index| goes_on(&self.queues[*index])).collect();
        if let Some(window) = &self.window {
            window.memory_change_begins();
        }
        go_on.iter().for_each(|index| self.stop(*index));
        self.memory = memory;
        // What still runs stays. It reads this before any chain that the driver makes available once the front end has its answer.
        for (index, _) in self.queues.iter().enumerate().filter(|(_, queue)| queue.running) {
            self.post(index, Control::Memory(index, self.memory.clone()));
        }
        self.tell(None);
        let mut outcome = Ok(());
        for index in go_on {
            self.queues[index].adrift = false;
            let started = self.start(index);
            if !self.queues[index].adrift {
                outcome = outcome.and(started);
            }
        }
        // The others go on.
        outcome.map_err(|error| Error::ReqHandlerError(std::io::Error::other(error)))
    }

    /// Notes for our successor what the driver has set.
    fn keep(&self) {
        if let (Some(area), Some(kept)) = (&self.inflight, self.device.driver_state(&self.session)) {
            area.keep(kept);
        }
    }

    /// The front end is gone for good.
    pub(crate) fn gone(&mut self) {
        for index in 0..self.queues.len() {
            self.stop(index);
        }
        // What a front end keeps is its own, and may come back with it.
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
        // What the device keeps beyond a reset.
        self.keep();
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
        // It starts no more threads.
        self.monitor = None;
        self.common.threads.join();
    }
}
