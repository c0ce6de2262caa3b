//! Which of the guest's pages the device has written to, for a front end that takes the guest to another host meanwhile
//! (vhost-user, "Migration"; `VHOST_F_LOG_ALL`).
//!
//! The log is a bit for each page of 4096 bytes, in memory that both sides map. A bit is set after what it stands for was written:
//! the front end clears it, and then copies the page.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

use vm_memory::{FileOffset, MmapRegion};

use crate::chain::Chain;
use crate::memory::Memory;
use crate::ring::RingSetup;

/// A bit stands for so much.
const PAGE_BYTES: u64 = 4096;
/// Room for the pages of 1 PiB: no guest has more.
const LOG_BYTES_MAX: u64 = 1 << 35;

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DirtyError {
    #[error("a log of {0} bytes for the pages that are written to")]
    Size(u64),
    #[error(
        "a log of {wanted} bytes for the pages that are written to, in a file of {bytes} bytes: touching the rest would be fatal"
    )]
    Short { wanted: u64, bytes: u64 },
    #[error("the log for the pages that are written to: {0}")]
    File(std::io::Error),
    #[error("the log for the pages that are written to cannot be mapped: {0}")]
    Map(vm_memory::mmap::MmapRegionError),
}

/// The front end's log.
#[derive(Debug)]
pub(crate) struct DirtyLog(MmapRegion);

impl DirtyLog {
    /// Maps `bytes` bytes of a file from `offset` on.
    pub(crate) fn open(file: File, offset: u64, bytes: u64) -> Result<Self, DirtyError> {
        let size = usize::try_from(bytes).ok().filter(|_| (1..=LOG_BYTES_MAX).contains(&bytes));
        let size = size.ok_or(DirtyError::Size(bytes))?;
        let has = file.metadata().map_err(DirtyError::File)?.len();
        let wanted = offset.checked_add(bytes).ok_or(DirtyError::Size(bytes))?;
        if has < wanted {
            return Err(DirtyError::Short { wanted, bytes: has });
        }
        MmapRegion::from_file(FileOffset::new(file, offset), size).map(Self).map_err(DirtyError::Map)
    }

    /// Notes that these guest-physical bytes were written to. What the log has no room for is not the front end's memory.
    pub(crate) fn mark(&self, address: u64, bytes: u64) {
        let Some(last) = bytes.checked_sub(1).map(|rest| address.saturating_add(rest)) else { return };
        let (first, last) = (address / PAGE_BYTES, last / PAGE_BYTES);
        for byte_of in first / 8..=last / 8 {
            let at = usize::try_from(byte_of).unwrap_or(usize::MAX);
            if at >= self.0.size() {
                return;
            }
            // SAFETY: `at` is within the mapping, which lives as long as this; all here and, by the protocol, the front end
            // change its bytes by atomic operations only.
            let byte = unsafe { AtomicU8::from_ptr(self.0.as_ptr().add(at)) };
            let from = first.saturating_sub(byte_of * 8);
            let to = (last - byte_of * 8).min(7);
            let bits = u8::MAX << from & u8::MAX >> (7 - to);
            // Bits that are set already are left alone: rings are marked again and again.
            if byte.load(Ordering::Relaxed) & bits != bits {
                byte.fetch_or(bits, Ordering::Release);
            }
        }
    }
}

/// One queue's part in the log.
#[derive(Debug)]
pub(crate) struct Dirty {
    log: Arc<DirtyLog>,
    /// What the device writes of the ring itself: guest-physical address, length.
    ring: Vec<(u64, u64)>,
}

impl Dirty {
    pub(crate) fn new(log: Arc<DirtyLog>, memory: &Memory, setup: &RingSetup) -> Self {
        let (size, addresses) = (u64::from(setup.size), setup.addresses);
        let parts = match setup.packed {
            // Flags, index, elements of eight bytes, and the event index.
            false => vec![(addresses.used, 6 + 8 * size)],
            // Descriptors of 16 bytes, and the event suppression structure.
            true => vec![(addresses.descriptors, 16 * size), (addresses.used, 4)],
        };
        let ring = parts.into_iter().filter_map(|(user, bytes)| Some((memory.guest_of_user(user)?, bytes))).collect();
        Self { log, ring }
    }

    /// A chain's buffers were written to, perhaps more than is told: a transfer may have failed half-way.
    pub(crate) fn chain(&self, memory: &Memory, chain: &Chain) {
        // What was written is seen by whoever clears a bit that is found set here, and copies its page.
        fence(Ordering::SeqCst);
        if chain.writable_bytes() as u64 >= memory.bytes() {
            // It says the same memory many times over.
            return memory.each_region(|address, bytes| self.log.mark(address, bytes));
        }
        for segment in &chain.writable {
            memory.guest_parts(*segment, |address, bytes| self.log.mark(address, bytes));
        }
    }

    /// So was the ring.
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        self.ring.iter().for_each(|(address, bytes)| self.log.mark(*address, *bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::memfd;

    #[test]
    fn each_page_has_its_bit() {
        let file = memfd(8192);
        let log = DirtyLog::open(file.try_clone().expect("a descriptor"), 4096, 4).expect("it fits");
        log.mark(0, 1);
        log.mark(PAGE_BYTES * 9 - 1, 2);
        log.mark(PAGE_BYTES * 31, u64::MAX);
        log.mark(PAGE_BYTES * 32, 1);
        log.mark(u64::MAX, 1);
        log.mark(PAGE_BYTES * 5, 0);
        let mut bytes = [0; 5];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 4096).expect("it is long enough");
        assert_eq!(bytes, [0b1, 0b11, 0, 0x80, 0]);
    }

    #[test]
    fn a_log_that_is_not_there_is_refused() {
        for (offset, bytes) in [(0, 8193), (4096, 4097), (u64::MAX, 1), (0, 0), (0, LOG_BYTES_MAX + 1)] {
            assert!(DirtyLog::open(memfd(8192), offset, bytes).is_err(), "{offset} {bytes}");
        }
    }
}
