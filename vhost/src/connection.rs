//! One front end: what it sets up, and the workers that serve it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use ferry_engine::Mailbox;
use vhost::vhost_user::GpuBackend;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, Result, VhostUserBackendReqHandlerMut};

use crate::memory::{Memory, MemoryError};
use crate::ring::RingAddresses;
use crate::worker::{Control, Letter, Port, QueueHandler, Start, Worker};
use crate::{Device, QUEUE_SIZE_MAX};
use ferry_engine::Complaints;

/// Transport feature bits (VIRTIO 1.3, section 6; vhost-user, "Communication").
const F_INDIRECT_DESC: u64 = 1 << 28;
const F_EVENT_IDX: u64 = 1 << 29;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;

/// What QEMU asks for at most; each region is a mapping and a descriptor of ours.
const MEMORY_REGIONS_MAX: u64 = 509;

type Message<D> = <<D as Device>::Handler as QueueHandler>::Message;

/// One ring, as far as the front end has described it.
struct Queue<M> {
    size: u32,
    addresses: RingAddresses,
    base: u16,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
    enabled: bool,
    running: bool,
    /// Whoever serves it, from its first start on.
    worker: Option<Arc<Port<M>>>,
}

/// A worker's port and thread; absent until one of its queues starts.
type Thread<M> = Option<(Arc<Port<M>>, JoinHandle<()>)>;

impl<M> Default for Queue<M> {
    fn default() -> Self {
        Self {
            size: 0,
            addresses: RingAddresses::default(),
            base: 0,
            kick: None,
            call: None,
            error: None,
            enabled: false,
            running: false,
            worker: None,
        }
    }
}

pub(crate) struct Connection<D: Device> {
    device: Arc<D>,
    session: Arc<D::Session>,
    memory: Memory,
    features: u64,
    queues: Vec<Queue<Message<D>>>,
    workers: Vec<Thread<Message<D>>>,
    complaints: Arc<Complaints>,
}

impl<D: Device> Connection<D> {
    pub(crate) fn new(device: Arc<D>) -> Self {
        let queues = (0..device.queue_count()).map(|_| Queue::default()).collect();
        let workers = (0..device.worker_count()).map(|_| None).collect();
        let session = Arc::new(device.session());
        Self { device, session, memory: Memory::default(), features: 0, queues, workers, complaints: Arc::default() }
    }

    fn offered(&self) -> u64 {
        self.device.features() | F_VERSION_1 | F_INDIRECT_DESC | F_EVENT_IDX | F_PROTOCOL_FEATURES
    }

    fn queue(&mut self, index: u32) -> Result<&mut Queue<Message<D>>> {
        usize::try_from(index).ok().and_then(|index| self.queues.get_mut(index)).ok_or(Error::InvalidParam)
    }

    /// A worker, started on first use.
    fn worker(&mut self, index: usize) -> Result<Arc<Port<Message<D>>>> {
        if let Some((port, _)) = &self.workers[index] {
            return Ok(Arc::clone(port));
        }
        let port = Arc::new(Port(Mailbox::new().map_err(|error| Error::ReqHandlerError(error.into()))?));
        let (device, session, complaints) =
            (Arc::clone(&self.device), Arc::clone(&self.session), Arc::clone(&self.complaints));
        let (ready, started) = channel();
        let mine = Arc::clone(&port);
        let thread = std::thread::Builder::new().name(device.worker_options(index).name).spawn(move || {
            let handler = device.handler(&session, index, Arc::clone(&mine));
            drop(session);
            match Worker::new(handler, mine, device.worker_options(index), complaints) {
                Ok(worker) => {
                    let _ = ready.send(Ok(()));
                    if let Err(error) = worker.run() {
                        tracing::error!("{error}");
                    }
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        });
        let thread = thread.map_err(Error::ReqHandlerError)?;
        let outcome = started.recv().map_err(|_| Error::BackendInternalError)?;
        if let Err(error) = outcome {
            tracing::error!("{error}");
            let _ = thread.join();
            return Err(Error::BackendInternalError);
        }
        self.workers[index] = Some((Arc::clone(&port), thread));
        Ok(port)
    }

    /// Starts the queue if the front end has described it wholly.
    fn start(&mut self, index: usize) -> Result<()> {
        let needs_enable = self.features & F_PROTOCOL_FEATURES != 0;
        let queue = &self.queues[index];
        let ready = (queue.enabled || !needs_enable) && queue.addresses != RingAddresses::default();
        let Some(kick) = queue.kick.as_ref().filter(|_| ready && !queue.running) else { return Ok(()) };
        let clone = |fd: &OwnedFd| fd.try_clone().map_err(Error::ReqHandlerError);
        let start = Start {
            memory: self.memory.clone(),
            size: queue.size,
            addresses: queue.addresses,
            base: queue.base,
            event_index: self.features & F_EVENT_IDX != 0,
            indirect: self.features & F_INDIRECT_DESC != 0,
            kick: clone(kick)?,
            call: queue.call.as_ref().map(clone).transpose()?,
            error: queue.error.as_ref().map(clone).transpose()?,
        };
        let port = self.worker(self.device.worker_of(index))?;
        let (reply, outcome) = channel();
        port.0.post(Letter::Control(Control::Start(index, start, reply)));
        self.queues[index].worker = Some(port);
        match outcome.recv() {
            Ok(Ok(())) => self.queues[index].running = true,
            Ok(Err(reason)) => {
                tracing::error!("{reason}");
                return Err(Error::InvalidParam);
            }
            Err(_) => return Err(Error::BackendInternalError),
        }
        Ok(())
    }

    /// Stops the queue, if it runs, and notes where.
    fn stop(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        let Some(port) = queue.worker.as_ref().filter(|_| queue.running) else { return };
        let (reply, base) = channel();
        port.0.post(Letter::Control(Control::Stop(index, reply)));
        queue.running = false;
        if let Ok(base) = base.recv() {
            queue.base = base;
        }
    }

    /// Changes something under a queue's feet.
    fn restart(&mut self, index: u32, change: impl FnOnce(&mut Queue<Message<D>>)) -> Result<()> {
        self.queue(index)?;
        let index = index as usize;
        self.stop(index);
        change(&mut self.queues[index]);
        self.start(index)
    }

    /// Changes the memory under all queues' feet.
    fn remap(&mut self, change: impl FnOnce(&Memory) -> std::result::Result<Memory, MemoryError>) -> Result<()> {
        let memory = change(&self.memory).map_err(|error| {
            tracing::error!("{error}");
            Error::ReqHandlerError(std::io::Error::other(error))
        })?;
        let ran: Vec<usize> = (0..self.queues.len()).filter(|index| self.queues[*index].running).collect();
        ran.iter().for_each(|index| self.stop(*index));
        self.memory = memory;
        ran.into_iter().try_for_each(|index| self.start(index))
    }

    fn reset(&mut self) {
        for index in 0..self.queues.len() {
            self.stop(index);
            self.queues[index].base = 0;
            self.queues[index].enabled = false;
        }
    }
}

impl<D: Device> Drop for Connection<D> {
    fn drop(&mut self) {
        for (port, _) in self.workers.iter().flatten() {
            port.0.post(Letter::Control(Control::Quit));
        }
        for (_, thread) in self.workers.iter_mut().filter_map(Option::take) {
            if thread.join().is_err() {
                tracing::error!("a worker panicked; its queues were not served any more");
            }
        }
    }
}

impl<D: Device> VhostUserBackendReqHandlerMut for Connection<D> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.offered();
        if unknown != 0 {
            tracing::error!("the front end wants features that were not offered: {unknown:#x}");
            return Err(Error::InvalidParam);
        }
        self.features = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        self.remap(|_| {
            let pairs = regions.iter().zip(files);
            pairs.into_iter().try_fold(Memory::default(), |memory, (region, file)| memory.with(region, file))
        })?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        if !num.is_power_of_two() || num > u32::from(QUEUE_SIZE_MAX) {
            tracing::error!(
                "queue {index} of {num} entries: it must be a power of two up to {QUEUE_SIZE_MAX} (queue-size=1024)"
            );
            return Err(Error::InvalidParam);
        }
        self.queue(index)?.size = num;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _: u64,
    ) -> Result<()> {
        self.restart(index, |queue| queue.addresses = RingAddresses { descriptors, available, used })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.restart(index, |queue| queue.base = base)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.queue(index)?;
        self.stop(index as usize);
        let queue = self.queue(index)?;
        // The ring only starts again with a new kick descriptor (vhost-user, "Ring states").
        queue.kick = None;
        Ok(VhostUserVringState::new(index, u32::from(queue.base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        if fd.is_none() {
            tracing::error!("the front end has no kick descriptor for queue {index}: rings without are not served");
        }
        self.restart(u32::from(index), |queue| queue.kick = fd.map(OwnedFd::from))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let queue = self.queue(u32::from(index))?;
        queue.call = fd.map(OwnedFd::from);
        if let Some(port) = &queue.worker {
            let call = queue.call.as_ref().map(OwnedFd::try_clone).transpose().map_err(Error::ReqHandlerError)?;
            port.0.post(Letter::Control(Control::Call(usize::from(index), call)));
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.queue(u32::from(index))?.error = fd.map(OwnedFd::from);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let mut features = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE;
        if self.device.config().is_some() {
            features |= VhostUserProtocolFeatures::CONFIG;
        }
        Ok(features)
    }

    fn set_protocol_features(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.queues.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.queue(index)?.enabled = enable;
        let index = index as usize;
        if enable {
            self.start(index)
        } else {
            self.stop(index);
            Ok(())
        }
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let config = self.device.config().ok_or(Error::InvalidOperation("this device has no configuration"))?;
        let bytes = config.into_iter().skip(offset as usize).chain(std::iter::repeat(0));
        Ok(bytes.take(size as usize).collect())
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("the configuration is read-only"))
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("not a GPU"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("no shared objects"))
    }

    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        Err(Error::InvalidOperation("in-flight descriptors are not offered"))
    }

    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Result<()> {
        Err(Error::InvalidOperation("in-flight descriptors are not offered"))
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MEMORY_REGIONS_MAX)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        self.remap(|memory| memory.with(region, file))?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.remap(|memory| memory.without(region.guest_phys_addr, region.memory_size))
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("migration is not offered"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("migration is not offered"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("shared memory is not offered"))
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(Error::InvalidOperation("migration is not offered"))
    }
}
