//! What all workers of a device share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use ferry_engine::{BlockingPool, RatelimitedLog};
use ferry_vfs::{Disk, DiskFeatures, Geometry};
use ferry_wire::blk::{DeviceFeatures, Limits, SECTOR_BYTES};

/// How much is copied at once for calls that may wait: enough to have two hundred of the requests that Linux makes under way, and no more,
/// however many queues the guest fills with large ones.
const COPIED_BYTES_MAX: usize = 256 << 20;

/// Counts what is copied.
#[derive(Debug, Default)]
pub(crate) struct CopyBudget(Arc<AtomicUsize>);

/// A part of it, given back when this is dropped.
#[derive(Debug)]
pub(crate) struct CopyPermit(Arc<AtomicUsize>, usize);

impl CopyBudget {
    /// Takes room for so many bytes, if there is some.
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

/// A disk, and what the one guest that has it made of it. A second front end waits until the first is gone.
pub(crate) struct State {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) features: DiskFeatures,
    /// Where calls are made that may wait.
    pub(crate) blocking_pool: BlockingPool,
    pub(crate) ratelimited_log: Arc<RatelimitedLog>,
    /// For what is copied between the guest and calls that may wait.
    pub(crate) budget: CopyBudget,
    /// The cache is offered at all.
    may_cache: bool,
    /// The size as last seen: asking the disk may mean waiting for a lock.
    bytes: AtomicU64,
    /// The driver wants the cache.
    wants_cache: AtomicBool,
    /// The driver knows how to flush it.
    can_flush: AtomicBool,
}

impl State {
    pub(crate) fn new(disk: Arc<dyn Disk>, may_cache: bool) -> Self {
        let (features, bytes) = (disk.features(), disk.geometry().bytes);
        Self {
            disk,
            features,
            blocking_pool: BlockingPool::default(),
            ratelimited_log: Arc::default(),
            budget: CopyBudget::default(),
            may_cache,
            bytes: bytes.into(),
            wants_cache: true.into(),
            can_flush: true.into(),
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    pub(crate) fn limits(&self, logical_block_bytes: u32) -> Limits {
        Limits {
            bytes: self.bytes.load(Ordering::Relaxed),
            block_bytes: u64::from(logical_block_bytes).max(SECTOR_BYTES),
            read_only: self.features.read_only,
            discard: self.features.discard,
        }
    }

    /// Takes over the disk's size. Returns whether it is another one.
    pub(crate) fn refresh_geometry(&self) -> bool {
        if let Err(error) = self.disk.refresh_geometry() {
            self.ratelimited_log.warn(format_args!("the size of the disk cannot be found: {error}"));
        }
        let now = self.disk.geometry().bytes;
        let before = self.bytes.swap(now, Ordering::Relaxed);
        if before != now {
            tracing::info!(before, now, "the disk has another size");
        }
        before != now
    }

    pub(crate) fn may_cache(&self) -> bool {
        self.may_cache
    }

    /// Whether writes may end before they are durable (5.2.6.2).
    pub(crate) fn is_writeback(&self) -> bool {
        self.may_cache && self.wants_cache() && self.can_flush.load(Ordering::Relaxed)
    }

    /// Whether the driver wants the cache, should there be one.
    pub(crate) fn wants_cache(&self) -> bool {
        self.wants_cache.load(Ordering::Relaxed)
    }

    /// The driver turns the cache on or off.
    pub(crate) fn set_writeback(&self, on: bool) {
        self.wants_cache.store(on, Ordering::Relaxed);
    }

    /// The driver has chosen features: one that cannot flush must have every write durable, unless it can at least turn
    /// the cache on and off.
    pub(crate) fn negotiated(&self, features: DeviceFeatures) {
        let can_flush = features.contains(DeviceFeatures::FLUSH) || features.contains(DeviceFeatures::CONFIG_WCE);
        self.can_flush.store(can_flush, Ordering::Relaxed);
    }

    /// Another guest, or the same one again.
    pub(crate) fn reset(&self) {
        self.wants_cache.store(true, Ordering::Relaxed);
        self.can_flush.store(true, Ordering::Relaxed);
    }
}
