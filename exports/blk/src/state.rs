//! The shared state of all workers of a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use ferry_engine::metrics::Metrics;
use ferry_engine::{BlockingPool, RatelimitedLog};
use ferry_vfs::{Disk, DiskFeatures, Geometry, SizeChange};
use ferry_wire::blk::{DeviceFeatures, Limits, SECTOR_BYTES};

/// The maximum total size in bytes of concurrent copies for calls that may block: two hundred of Linux's usual requests.
const COPIED_BYTES_MAX: usize = 256 << 20;

/// The budget for concurrent copies.
#[derive(Debug, Default)]
pub(crate) struct CopyBudget(Arc<AtomicUsize>);

/// A part of the budget, returned when dropped.
#[derive(Debug)]
pub(crate) struct CopyPermit(Arc<AtomicUsize>, usize);

impl CopyBudget {
    /// Takes this many bytes of the budget, if available.
    pub(crate) fn take(&self, bytes: usize) -> Option<CopyPermit> {
        let more = |taken: usize| taken.checked_add(bytes).filter(|taken| *taken <= COPIED_BYTES_MAX);
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok().then(|| CopyPermit(Arc::clone(&self.0), bytes))
    }
}

impl Drop for CopyPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// A disk, and the settings of its guest. A second front end waits until the first one has disconnected.
pub(crate) struct State {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) features: DiskFeatures,
    /// Its name in the log of requests.
    pub(crate) name: String,
    /// Runs calls that may block.
    pub(crate) blocking_pool: BlockingPool,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) ratelimited_log: Arc<RatelimitedLog>,
    /// The budget for copies between the guest and calls that may block.
    pub(crate) budget: CopyBudget,
    /// The write cache is offered.
    may_cache: bool,
    /// The last known size: querying the disk may block on a lock.
    bytes: AtomicU64,
    /// The cache is switched on in the configuration space.
    wants_cache: AtomicBool,
    /// The driver supports CONFIG_WCE.
    can_choose: AtomicBool,
    /// The driver supports FLUSH.
    can_flush: AtomicBool,
    /// The driver supports BLK_SIZE.
    knows_block_size: AtomicBool,
}

impl State {
    pub(crate) fn new(disk: Arc<dyn Disk>, may_cache: bool, name: String) -> Self {
        let (features, bytes) = (disk.features(), disk.geometry().bytes);
        Self {
            disk,
            features,
            name,
            blocking_pool: BlockingPool::default(),
            metrics: Arc::new(crate::metrics::metrics()),
            ratelimited_log: Arc::default(),
            budget: CopyBudget::default(),
            may_cache,
            bytes: bytes.into(),
            wants_cache: true.into(),
            can_choose: true.into(),
            can_flush: true.into(),
            knows_block_size: true.into(),
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    /// Returns the limits of requests. A driver that does not see the block size may use any sectors (section 5.2.5).
    pub(crate) fn request_limits(&self, logical_block_bytes: u32) -> Limits {
        let limits = self.limits(logical_block_bytes);
        match self.knows_block_size.load(Ordering::Relaxed) {
            true => limits,
            false => Limits { block_bytes: SECTOR_BYTES, ..limits },
        }
    }

    /// Returns the limits of the disk, for the configuration space.
    pub(crate) fn limits(&self, logical_block_bytes: u32) -> Limits {
        Limits {
            bytes: self.bytes.load(Ordering::Relaxed),
            block_bytes: u64::from(logical_block_bytes).max(SECTOR_BYTES),
            read_only: self.features.read_only,
            discard: self.features.discard,
        }
    }

    /// Updates the disk's size. Returns whether it has changed.
    pub(crate) fn refresh_geometry(&self) -> bool {
        if let Err(error) = self.disk.refresh_geometry() {
            self.ratelimited_log.warn(format_args!("the size of the disk cannot be found: {error}"));
        }
        let now = self.disk.geometry().bytes;
        let before = self.bytes.swap(now, Ordering::Relaxed);
        if before != now {
            tracing::info!(before, now, "the size of the disk has changed");
        }
        before != now
    }

    pub(crate) fn size_change(&self) -> SizeChange<'_> {
        self.disk.size_change()
    }

    pub(crate) fn may_cache(&self) -> bool {
        self.may_cache
    }

    /// Returns whether writes may complete before they are durable (section 5.2.6.2).
    pub(crate) fn is_writeback(&self) -> bool {
        let wants_cache = self.wants_cache() || !self.can_choose.load(Ordering::Relaxed);
        self.may_cache && wants_cache && self.can_flush.load(Ordering::Relaxed)
    }

    /// Returns whether the write cache is switched on in the configuration space. A front end may show this to the next
    /// driver, too, so it does not depend on the current driver's features.
    pub(crate) fn wants_cache(&self) -> bool {
        self.wants_cache.load(Ordering::Relaxed)
    }

    /// Sets the driver's choice of the write cache.
    pub(crate) fn set_writeback(&self, on: bool) {
        self.wants_cache.store(on, Ordering::Relaxed);
    }

    /// Applies the negotiated features: every write of a driver that cannot flush is durable. If it reads the cache's
    /// state, the cache is switched off (section 5.2.5.2).
    pub(crate) fn negotiated(&self, features: DeviceFeatures) {
        let has = |feature| features.contains(feature);
        self.can_choose.store(has(DeviceFeatures::CONFIG_WCE), Ordering::Relaxed);
        self.can_flush.store(has(DeviceFeatures::FLUSH), Ordering::Relaxed);
        self.knows_block_size.store(has(DeviceFeatures::BLK_SIZE), Ordering::Relaxed);
        if has(DeviceFeatures::CONFIG_WCE) && !has(DeviceFeatures::FLUSH) {
            self.set_writeback(false);
        }
    }

    /// Resets the state for another guest.
    pub(crate) fn begin(&self) {
        self.wants_cache.store(true, Ordering::Relaxed);
        self.reset();
    }

    /// Resets the negotiated features. A disabled cache stays disabled: QEMU shows the next driver the value from before the reset, and
    /// that driver would not flush.
    pub(crate) fn reset(&self) {
        self.can_choose.store(true, Ordering::Relaxed);
        self.can_flush.store(true, Ordering::Relaxed);
        self.knows_block_size.store(true, Ordering::Relaxed);
    }
}
