//! The block device (VIRTIO 1.3, section 5.2).

use std::sync::Arc;

use ferry_vhost::{Device, Port, WorkerOptions};
use ferry_wire::blk::{Config, DeviceFeatures};

use crate::handler::Handler;
use crate::jobs::Reply;
use crate::options::{Options, QUEUES_MAX};
use crate::state::State;

/// The maximum number of data segments in a request: with header and status they fit into queues of 128 entries.
const SEGMENTS_MAX: u32 = 126;

/// A disk as a device.
pub(crate) struct Blk {
    state: Arc<State>,
    options: Options,
    /// The number of workers: one per queue, at most one per CPU.
    workers: usize,
}

impl Blk {
    pub(crate) fn new(state: Arc<State>, options: Options) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { state, workers: options.queues.min(cpus), options }
    }

    fn features_offered(&self) -> DeviceFeatures {
        let disk = self.state.features;
        let always = DeviceFeatures::SEG_MAX | DeviceFeatures::BLK_SIZE | DeviceFeatures::TOPOLOGY | DeviceFeatures::MQ;
        let cache = DeviceFeatures::FLUSH | DeviceFeatures::CONFIG_WCE;
        [
            (disk.read_only, DeviceFeatures::RO),
            (!disk.read_only && self.state.may_cache(), cache),
            (!disk.read_only && disk.discard, DeviceFeatures::DISCARD),
            (!disk.read_only, DeviceFeatures::WRITE_ZEROES),
        ]
        .into_iter()
        .filter(|(offered, _)| *offered)
        .fold(always, |all, (_, one)| all | one)
    }

    /// Returns the value that a driver writes to `writeback`. Some front ends write the whole word: the other bytes must
    /// be those of the configuration.
    fn written_writeback(&self, offset: u32, bytes: &[u8]) -> Option<bool> {
        let offset = usize::try_from(offset).ok()?;
        let at = Config::WRITEBACK_OFFSET.checked_sub(offset)?;
        let on = *bytes.get(at)?;
        let mut expected = self.config()?.get(offset..)?.get(..bytes.len())?.to_vec();
        expected[at] = on;
        (expected == bytes).then_some(on != 0)
    }
}

impl Device for Blk {
    type Handler = Handler;
    type Session = ();

    fn queue_count(&self) -> usize {
        self.options.queues
    }

    fn queues_flag(&self, wanted: usize) -> Option<usize> {
        Some(wanted).filter(|queues| *queues <= QUEUES_MAX)
    }

    fn features(&self) -> u64 {
        self.features_offered().0
    }

    fn config(&self) -> Option<Vec<u8>> {
        let geometry = self.state.geometry();
        let config = Config {
            limits: self.state.limits(geometry.logical_block_bytes),
            physical_block_bytes: geometry.physical_block_bytes,
            optimal_io_bytes: geometry.optimal_io_bytes,
            discard_bytes: geometry.discard_bytes,
            segments_max: SEGMENTS_MAX,
            queues: u16::try_from(self.options.queues).unwrap_or(1),
            writeback: self.state.may_cache() && self.state.wants_cache(),
        };
        Some(config.encode().into())
    }

    fn write_config(&self, (): &(), offset: u32, bytes: &[u8]) -> bool {
        let on = self.written_writeback(offset, bytes).filter(|_| self.state.may_cache());
        let Some(on) = on else { return false };
        self.state.set_writeback(on);
        true
    }

    fn driver_state(&self, (): &()) -> Option<u32> {
        Some(self.state.wants_cache().into())
    }

    fn restore(&self, (): &(), kept: u32) {
        self.state.set_writeback(kept != 0);
    }

    fn changes_config(&self) -> bool {
        true
    }

    fn tracks_in_flight(&self) -> bool {
        true
    }

    fn batches_requests(&self) -> bool {
        true
    }

    fn registers_memory(&self) -> bool {
        self.options.pin_memory
    }

    fn negotiated(&self, (): &(), features: u64) {
        self.state.negotiated(DeviceFeatures(features));
    }

    fn reset(&self, (): &()) {
        self.state.reset();
    }

    fn worker_count(&self) -> usize {
        self.workers
    }

    fn worker_of(&self, index: usize) -> usize {
        index % self.workers
    }

    fn worker_options(&self, index: usize) -> WorkerOptions {
        let Options { io, ref poll, begun, .. } = self.options;
        WorkerOptions { name: format!("blk-{index}"), io, poll: poll.clone(), begun }
    }

    fn session(&self) {
        self.state.begin();
    }

    fn handler(&self, _: &Arc<()>, _: usize, port: Arc<Port<Reply>>) -> Handler {
        Handler::new(Arc::clone(&self.state), port, self.options.limiter.clone())
    }
}
