//! The log of the guest's pages that the device has written, for a front end that migrates the guest (vhost-user,
//! "Migration"; `VHOST_F_LOG_ALL`).
//!
//! The log has a bit per page of 4096 bytes, in memory that both sides map. A bit is set after its page was written:
//! the front end clears the bit, then copies the page.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

use vm_memory::{FileOffset, MmapRegion};

use crate::chain::Chain;
use crate::memory::Memory;
use crate::ring::RingSetup;

/// Bytes per bit.
const PAGE_BYTES: u64 = 4096;
/// The log of 1 PiB, more than any guest has.
const LOG_BYTES_MAX: u64 = 1 << 35;

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DirtyError {
    #[error("invalid log of written pages: {0} bytes")]
    Size(u64),
    #[error("a log of written pages needs {wanted} bytes, its file has {bytes}: touching the rest would be fatal")]
    Short { wanted: u64, bytes: u64 },
    #[error("the log of written pages: {0}")]
    File(std::io::Error),
    #[error("cannot map the log of written pages: {0}")]
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

    /// Marks these guest-physical bytes as written. Addresses beyond the log are not the front end's memory.
    pub(crate) fn mark(&self, address: u64, bytes: u64) {
        let Some(last) = bytes.checked_sub(1).map(|rest| address.saturating_add(rest)) else { return };
        let (first, last) = (address / PAGE_BYTES, last / PAGE_BYTES);
        for byte_of in first / 8..=last / 8 {
            let at = usize::try_from(byte_of).unwrap_or(usize::MAX);
            if at >= self.0.size() {
                return;
            }
            // SAFETY: `at` is within the mapping, which lives as long as this; this process and, by the protocol, the
            // front end change its bytes by atomic operations only.
            let byte = unsafe { AtomicU8::from_ptr(self.0.as_ptr().add(at)) };
            let from = first.saturating_sub(byte_of * 8);
            let to = (last - byte_of * 8).min(7);
            let bits = u8::MAX << from & u8::MAX >> (7 - to);
            // Rings are marked again and again, so set bits are only read.
            if byte.load(Ordering::Relaxed) & bits != bits {
                byte.fetch_or(bits, Ordering::Release);
            }
        }
    }
}

/// The log of one queue.
#[derive(Debug)]
pub(crate) struct Dirty {
    log: Arc<DirtyLog>,
    /// The parts of the ring that the device writes: guest-physical address, length.
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

    /// Marks a chain's writable buffers, perhaps more than was reported: a transfer may have failed half-way.
    pub(crate) fn chain(&self, memory: &Memory, chain: &Chain) {
        // The fence orders the data before the bit.
        fence(Ordering::SeqCst);
        if chain.writable_bytes() as u64 >= memory.bytes() {
            // It names the same memory many times.
            return memory.each_region(|address, bytes| self.log.mark(address, bytes));
        }
        for segment in &chain.writable {
            memory.guest_parts(*segment, |address, bytes| self.log.mark(address, bytes));
        }
    }

    /// Marks the ring's pages.
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
