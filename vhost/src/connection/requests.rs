//! Serves the front end's messages: SET_MEM_TABLE by `set_mem_table`, and so on (vhost-user specification, "Front-end
//! message types").

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use vhost::vhost_user::GpuBackend;
use vhost::vhost_user::message::{
    VHOST_USER_CONFIG_OFFSET, VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags,
    VhostUserInflight, VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, Result, VhostUserBackendReqHandlerMut};

use super::{Connection, F_LOG_ALL, Queue, TakeoverStage};
use crate::dirty::DirtyLog;
use crate::inflight::{Area, SplitLog};
use crate::memory::{MEMORY_REGIONS_MAX, Memory};
use crate::migration::{SILENCE_MAX, Transfer};
use crate::ring::RingAddresses;
use crate::window::{self, AddedRegion};
use crate::worker::Control;
use crate::{Device, QUEUE_SIZE_MAX, waiting};

/// Wraps a descriptor that is shared with a worker.
fn shared(fd: File) -> Arc<OwnedFd> {
    Arc::new(fd.into())
}

/// Returns the offset in the configuration space. cloud-hypervisor up to version 50 and Dragonball count from the
/// registers before it (virtio-mmio).
fn config_offset(offset: u32) -> u32 {
    offset.checked_sub(VHOST_USER_CONFIG_OFFSET).unwrap_or(offset)
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
            tracing::error!("the front end set features that were not offered: {unknown:#x}");
            return Err(Error::InvalidParam);
        }
        let changes = (self.features ^ features) & F_LOG_ALL != 0;
        self.features = features;
        self.device.negotiated(&self.session, features & !F_LOG_ALL);
        self.store_driver_state();
        if changes { self.restart_all(|_| ()) } else { Ok(()) }
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        self.remap(|_| {
            let pairs = regions.iter().zip(files);
            pairs.into_iter().try_fold(Memory::default(), |memory, (region, file)| memory.with(region, file, false))
        })?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let good = (1..=u32::from(QUEUE_SIZE_MAX)).contains(&num) && (self.is_packed() || num.is_power_of_two());
        if !good {
            tracing::error!(
                "queue {index} has {num} entries; up to {QUEUE_SIZE_MAX} are possible, a power of two unless the ring is packed: \
                 set the queue size in the VMM (QEMU: queue-size=1024, crosvm: max-queue-size=1024)"
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
        // Only the base of a packed ring has more than 16 bits.
        if !self.is_packed() && base > u32::from(u16::MAX) {
            return Err(Error::InvalidParam);
        }
        self.reset_if_restarted(index, base);
        self.restart(index, |queue| (queue.base, queue.resumes) = (base, false))
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.queue(index)?;
        self.stop(index as usize);
        let queue = self.queue(index)?;
        // The ring only starts again with a new kick descriptor (vhost-user, "Ring states").
        queue.kick = None;
        Ok(VhostUserVringState::new(index, queue.base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        if fd.is_none() {
            tracing::error!("queue {index} has no kick descriptor; such rings are not served");
        }
        self.restart(u32::from(index), |queue| queue.kick = fd.map(shared))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let call = fd.map(shared);
        self.queue(u32::from(index))?.call.clone_from(&call);
        let index = usize::from(index);
        self.post(index, Control::Call(index, call));
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let error = fd.map(shared);
        self.queue(u32::from(index))?.error.clone_from(&error);
        let index = usize::from(index);
        self.post(index, Control::Error(index, error));
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(self.protocol_offered())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.protocol_offered() | VhostUserProtocolFeatures::REPLY_ACK;
        let unknown = features & !offered.bits();
        if unknown != 0 {
            tracing::error!("the front end set protocol features that were not offered: {unknown:#x}");
            return Err(Error::InvalidParam);
        }
        self.protocol = VhostUserProtocolFeatures::from_bits_truncate(features);
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
        // Before it is read, so that a change meanwhile is reported.
        self.channel.config_requested();
        let config = self.device.config().ok_or(Error::InvalidOperation("this device has no configuration"))?;
        let bytes = config.into_iter().skip(config_offset(offset) as usize).chain(std::iter::repeat(0));
        Ok(bytes.take(size as usize).collect())
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        match self.device.write_config(&self.session, config_offset(offset), bytes) {
            true => {
                self.store_driver_state();
                Ok(())
            }
            false => Err(Error::InvalidOperation("this part of the configuration is read-only")),
        }
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("not a GPU"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("no shared objects"))
    }

    fn get_inflight_fd(&mut self, request: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let wanted = usize::from(request.num_queues);
        if wanted > self.queues.len() {
            self.too_few_queues(wanted);
            return Err(Error::InvalidParam);
        }
        Area::make(request, self.queues.len()).map_err(|error| {
            // The message has no error reply, so the connection ends.
            tracing::error!("{error}");
            Error::InvalidParam
        })
    }

    fn set_inflight_fd(&mut self, kept: &VhostUserInflight, file: File) -> Result<()> {
        let area = Area::open(kept, file, self.queues.len()).map_err(|error| {
            tracing::error!("{error}");
            Error::InvalidParam
        })?;
        self.restart_all(|connection| {
            if let Some(kept) = area.driver_state() {
                connection.device.restore(&connection.session, kept);
            }
            connection.inflight = Some(area);
            connection.store_driver_state();
        })
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MEMORY_REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        let added = self.window.as_ref().and_then(|_| window::file_id(&file).ok()).map(|id| AddedRegion {
            file: id,
            file_offset: region.mmap_offset,
            bytes: region.memory_size,
        });
        let was_added = match self.taking_over {
            TakeoverStage::Replaying { later } => later,
            TakeoverStage::New | TakeoverStage::Done => self.runs(),
        };
        self.remap(|memory| memory.with(region, file, was_added))?;
        self.update_window_regions(added);
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.remap(|memory| memory.without(region.guest_phys_addr, region.memory_size))
    }

    fn set_device_state_fd(
        &mut self,
        direction: VhostTransferStateDirection,
        phase: VhostTransferStatePhase,
        file: File,
    ) -> Result<Option<File>> {
        if !self.device.migrates() {
            return Err(Error::InvalidOperation("migration is not offered"));
        }
        if !matches!(phase, VhostTransferStatePhase::STOPPED) {
            return Err(Error::InvalidOperation("the state is transferred while the device is stopped"));
        }
        if self.runs() {
            return Err(Error::InvalidOperation("stop all queues before the state is transferred"));
        }
        // Each transfer has a thread and may hold a state in memory.
        if self.transfer.as_ref().is_some_and(Transfer::is_running) {
            let refused = Error::InvalidOperation("the state is being transferred already, and its pipe is still open");
            self.refuses(&refused);
            return Err(refused);
        }
        let begun = match direction {
            VhostTransferStateDirection::SAVE => self.save().map(|state| Transfer::save(state, file)),
            VhostTransferStateDirection::LOAD => Ok(Transfer::load(file)),
        };
        let begun = begun.and_then(|begun| begun.map_err(|error| format!("no thread: {error}")));
        self.transfer = Some(begun.map_err(|reason| {
            tracing::error!("cannot transfer the state of the device: {reason}");
            Error::ReqHandlerError(std::io::Error::other(reason))
        })?);
        Ok(None)
    }

    fn check_device_state(&mut self) -> Result<()> {
        let transfer = self.transfer.take().ok_or(Error::InvalidOperation("no state was transferred"))?;
        let ended = transfer.end(self.stop.as_ref().map(AsFd::as_fd), SILENCE_MAX);
        let loaded = ended.and_then(|state| state.map_or(Ok(()), |state| self.load(&state)));
        loaded.map_err(|reason| {
            tracing::error!("the state of the device was not transferred: {reason}");
            Error::ReqHandlerError(std::io::Error::other(reason))
        })
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        let Some(window) = &self.window else {
            return Err(Error::InvalidOperation("shared memory is not offered"));
        };
        // Mappings need acknowledgements. BACKEND_SEND_FD is not required: SHMEM_MAP always carries a descriptor, and
        // crosvm takes it without that feature.
        let needs = VhostUserProtocolFeatures::BACKEND_REQ | VhostUserProtocolFeatures::REPLY_ACK;
        if !self.protocol.contains(needs) {
            tracing::warn!("no window: the front end would not acknowledge mappings");
            return Ok(VhostUserShMemConfig::default());
        }
        if self.device.window_bytes().is_none() {
            return Ok(VhostUserShMemConfig::default());
        }
        self.device.window_opened(&self.session, window);
        Ok(VhostUserShMemConfig::new(1, &[window.bytes()]))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        if !self.device.migrates() {
            return Err(Error::InvalidOperation("migration is not offered"));
        }
        let log = DirtyLog::open(file, log.mmap_offset, log.mmap_size).map_err(|error| {
            tracing::error!("{error}");
            Error::InvalidParam
        })?;
        // Only success has a reply: on an error the connection must end.
        let restarted = self.restart_all(|connection| connection.dirty = Some(Arc::new(log)));
        restarted.map_err(|error| {
            tracing::error!("cannot restart a queue with the log of written pages: {error}");
            Error::InvalidParam
        })
    }
}

impl<D: Device> Connection<D> {
    /// Returns the device's state and its parked requests, which are taken again where the queues start.
    fn save(&mut self) -> std::result::Result<Vec<u8>, String> {
        let waits =
            |queue: &Queue| if queue.resubmitted.is_empty() { queue.out.clone() } else { queue.resubmitted.clone() };
        let queues = (0..=u16::MAX).zip(&self.queues);
        let waiting: Vec<_> =
            queues.flat_map(|(index, queue)| waits(queue).into_iter().map(move |head| (index, head))).collect();
        if self.is_packed() && !waiting.is_empty() {
            // Used descriptors may have overwritten theirs.
            let count = waiting.len();
            return Err(format!(
                "{count} requests of the guest wait for locks in packed rings; migrate the guest when none do"
            ));
        }
        let state = waiting::before(self.device.save(&self.session)?, &waiting);
        self.queues.iter_mut().for_each(|queue| queue.resubmitted = waits(queue));
        Ok(state)
    }

    fn load(&mut self, state: &[u8]) -> std::result::Result<(), String> {
        let (waiting, state) = waiting::split(state, self.queues.len())?;
        self.device.load(&self.session, state)?;
        for (index, resubmitted) in waiting.into_iter().enumerate() {
            // If this server is killed before the queue starts, the next one finds them in the log.
            if let Some(region) = self.inflight.as_ref().and_then(|area| area.region(index))
                && region.may_belong_to_other_guest()
                && !resubmitted.is_empty()
            {
                SplitLog::record_migrated(region, &resubmitted);
            }
            self.queues[index].resubmitted = resubmitted;
        }
        Ok(())
    }
}
