//! A mapping of a data file.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use ferry_vfs::Segment;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

use super::pages::{PAGE_BYTES, WORD_PAGES};

/// The maximum total length of mappings in this process, in bytes: far below the 128 TiB of an address space, and the
/// sets of pages take at most 32 MiB.
const BYTES_MAX: u64 = 1 << 40;
/// The maximum number of mappings in this process: a quarter of the kernel's default limit (`vm.max_map_count`).
const COUNT_MAX: u64 = 16_000;

static BYTES: AtomicU64 = AtomicU64::new(0);
static COUNT: AtomicU64 = AtomicU64::new(0);

/// Adds to a shared total, unless that would exceed its maximum.
fn take(shared: &AtomicU64, more: u64, max: u64) -> bool {
    let taken = |now: u64| now.checked_add(more).filter(|sum| *sum <= max);
    shared.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).is_ok()
}

/// A shared mapping of a file from its start. It may be longer than the file.
#[derive(Debug)]
pub(super) struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and its bytes are only reached by copies from and to raw
// addresses, for which races with other threads and with the kernel are nothing new.
unsafe impl Send for Mapping {}
// SAFETY: as above; what changes the mapping itself takes it exclusively.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` of a file. `None` if the limits are exceeded, or the kernel refuses.
    pub(super) fn new(file: BorrowedFd<'_>, bytes: usize) -> Option<Self> {
        // SAFETY: the call has no preconditions.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        // mincore reports pages of the kernel's size.
        if u64::try_from(page_bytes) != Ok(PAGE_BYTES) || !take(&COUNT, 1, COUNT_MAX) {
            return None;
        }
        let mapped = take(&BYTES, bytes as u64, BYTES_MAX).then(|| {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: the kernel chooses a place where nothing is.
            let address = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0) };
            let address = address.ok().and_then(|address| NonNull::new(address.cast::<u8>()));
            if address.is_none() {
                BYTES.fetch_sub(bytes as u64, Ordering::Relaxed);
            }
            address
        });
        match mapped.flatten() {
            Some(address) => Some(Self { address, bytes }),
            None => {
                COUNT.fetch_sub(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// How long it is.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes the mapping longer; returns whether that succeeded.
    pub(super) fn grow(&mut self, bytes: usize) -> bool {
        let Some(more) = bytes.checked_sub(self.bytes) else { return true };
        if !take(&BYTES, more as u64, BYTES_MAX) {
            return false;
        }
        // SAFETY: the whole mapping is ours, and nobody has an address in it: copies borrow `self`.
        let moved =
            unsafe { rustix::mm::mremap(self.address.as_ptr().cast(), self.bytes, bytes, MremapFlags::MAYMOVE) };
        match moved.ok().and_then(|address| NonNull::new(address.cast::<u8>())) {
            Some(address) => {
                (self.address, self.bytes) = (address, bytes);
                true
            }
            None => {
                BYTES.fetch_sub(more as u64, Ordering::Relaxed);
                false
            }
        }
    }

    /// Returns which pages of a word are in memory; swapped-out pages are not reported.
    pub(super) fn present(&self, word: u64) -> u64 {
        let word_bytes = WORD_PAGES * PAGE_BYTES;
        let Some(start) = word.checked_mul(word_bytes).and_then(|start| usize::try_from(start).ok()) else { return 0 };
        let mut told = [0_u8; u64::BITS as usize];
        let bytes = self.bytes.saturating_sub(start).min(usize::try_from(word_bytes).unwrap_or(0));
        if bytes == 0 {
            return 0;
        }
        // SAFETY: the range lies in the mapping, which begins at a page, and `told` has a byte for each of its pages.
        let outcome = unsafe { libc::mincore(self.address.as_ptr().add(start).cast(), bytes, told.as_mut_ptr()) };
        if outcome != 0 {
            return 0;
        }
        told.iter().rev().fold(0, |bits, told| bits << 1 | u64::from(told & 1))
    }

    /// Copies the segments to `offset`.
    ///
    /// # Safety
    ///
    /// The segments are valid for reads. Until this returns, the bytes of the mapping are in allocated pages below the
    /// end of the file; otherwise the kernel would kill the program (SIGBUS).
    pub(super) unsafe fn copy_in(&self, offset: usize, from: &[Segment]) {
        let mut at = offset;
        for segment in from {
            assert!(self.bytes.checked_sub(at).is_some_and(|left| segment.bytes <= left), "the range was looked at");
            // SAFETY: the source is valid by contract, the target lies in the mapping (as was just asserted), whose pages
            // are there by contract. No memory of clients overlaps a mapping that nobody else has an address of.
            unsafe { ptr::copy_nonoverlapping(segment.address, self.address.as_ptr().add(at), segment.bytes) };
            at += segment.bytes;
        }
    }

    /// Copies from `offset` to the segments.
    ///
    /// # Safety
    /// The segments are valid for writes; the rest as for [`Self::copy_in`].
    pub(super) unsafe fn copy_out(&self, offset: usize, to: &[Segment]) {
        let mut at = offset;
        for segment in to {
            assert!(self.bytes.checked_sub(at).is_some_and(|left| segment.bytes <= left), "the range was looked at");
            // SAFETY: as in `copy_in`, the other way round.
            unsafe { ptr::copy_nonoverlapping(self.address.as_ptr().add(at), segment.address, segment.bytes) };
            at += segment.bytes;
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody has an address in it.
        if let Err(error) = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.bytes) } {
            tracing::warn!(%error, "a mapping stays");
            return;
        }
        BYTES.fetch_sub(self.bytes as u64, Ordering::Relaxed);
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}
