//! Files and memory registered with io_uring.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use ferry_vfs::{Backing, Segment};
use io_uring::{IoUring, Probe, opcode};

/// The maximum number of registered files, for more disks than a worker has. Further files are used by descriptor.
const FILES_MAX: usize = 64;

/// The kernel's maximum size of one registered buffer, in bytes.
const PIECE_BYTES_MAX: usize = 1 << 30;

/// The maximum number of buffers: 2 TiB in total at that size. Memory that needs more is not registered.
const PIECES_MAX: u16 = 2048;

/// Keeps the memory of a buffer mapped.
pub type MemoryOwner = Arc<dyn Any + Send + Sync>;

/// The [long-lived](Backing::is_long_lived) files of one ring, each registered at its first use.
#[derive(Default)]
pub(crate) struct Files {
    slots: Vec<Arc<Backing>>,
    state: Table,
}

#[derive(Default, PartialEq, Eq)]
enum Table {
    #[default]
    Missing,
    Made,
    Refused,
}

impl Files {
    /// Returns the index of a registered file. `None`: use its descriptor.
    #[inline]
    pub(crate) fn slot(&mut self, uring: &IoUring, file: &Arc<Backing>) -> Option<u32> {
        if !file.is_long_lived() || self.state == Table::Refused {
            return None;
        }
        let found = self.slots.iter().position(|slot| Arc::ptr_eq(slot, file));
        found.or_else(|| self.register(uring, file)).and_then(|index| u32::try_from(index).ok())
    }

    fn register(&mut self, uring: &IoUring, file: &Arc<Backing>) -> Option<usize> {
        let index = self.slots.len();
        if index == FILES_MAX {
            return None;
        }
        match self.try_register(uring, file, index) {
            Ok(()) => {
                self.slots.push(Arc::clone(file));
                Some(index)
            }
            Err(error) => {
                tracing::info!("io_uring does not register files ({error}): transfers use the descriptor");
                self.state = Table::Refused;
                None
            }
        }
    }

    fn try_register(&mut self, uring: &IoUring, file: &Arc<Backing>, index: usize) -> io::Result<()> {
        let number = |number: usize| u32::try_from(number).expect("a few files are counted");
        if self.state == Table::Missing {
            uring.submitter().register_files_sparse(number(FILES_MAX))?;
            self.state = Table::Made;
        }
        uring.submitter().register_files_update(number(index), &[file.as_fd().as_raw_fd()]).map(drop)
    }

    /// Unregisters all files before the ring is closed: the kernel cleans up a closed ring asynchronously.
    pub(crate) fn close(&mut self, uring: &IoUring) {
        if self.state == Table::Made {
            let _ = uring.submitter().unregister_files();
        }
    }
}

/// The memory registered with one ring.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Sorted by address, without overlap.
    pieces: Vec<Piece>,
    free: Vec<u16>,
    has_table: bool,
    vectored: bool,
}

struct Piece {
    start: usize,
    bytes: usize,
    slot: u16,
    owner: MemoryOwner,
}

impl Piece {
    fn is(&self, (segment, owner): &(Segment, MemoryOwner)) -> bool {
        // Two mappings may have had the same address, but not while an owner keeps the first.
        (self.start, self.bytes) == (segment.address.addr(), segment.bytes) && Arc::ptr_eq(&self.owner, owner)
    }
}

impl Buffers {
    /// Returns the index of the buffer that contains all these segments.
    #[inline]
    pub(crate) fn slot(&self, segments: &[Segment]) -> Option<u16> {
        let first = segments.first().filter(|_| !self.pieces.is_empty() && (self.vectored || segments.len() == 1))?;
        let after = self.pieces.partition_point(|piece| piece.start <= first.address.addr());
        let piece = &self.pieces[after.checked_sub(1)?];
        let fits = |segment: &Segment| {
            let at = segment.address.addr().wrapping_sub(piece.start);
            at <= piece.bytes && segment.bytes <= piece.bytes - at
        };
        segments.iter().all(fits).then_some(piece.slot)
    }

    /// Registers this memory and no other. On failure no memory is registered.
    ///
    /// # Safety
    ///
    /// Each owner keeps its memory mapped.
    pub(crate) unsafe fn set(
        &mut self,
        uring: &IoUring,
        regions: impl IntoIterator<Item = (Segment, MemoryOwner)>,
    ) -> io::Result<()> {
        let wanted: Vec<_> = regions.into_iter().flat_map(|(region, owner)| pieces(region, owner)).collect();
        // SAFETY: guaranteed by the caller.
        let outcome = unsafe { self.change(uring, wanted) };
        if outcome.is_err() {
            self.clear(uring);
        }
        outcome
    }

    /// # Safety
    /// As for [`Self::set`].
    unsafe fn change(&mut self, uring: &IoUring, wanted: Vec<(Segment, MemoryOwner)>) -> io::Result<()> {
        let all = std::mem::take(&mut self.pieces);
        let (kept, gone): (Vec<_>, Vec<_>) = all.into_iter().partition(|piece| wanted.iter().any(|one| piece.is(one)));
        self.pieces = kept;
        for piece in gone {
            self.forget(uring, &piece)?;
        }
        for one in wanted {
            if !self.pieces.iter().any(|piece| piece.is(&one)) {
                // SAFETY: guaranteed by the caller.
                unsafe { self.add(uring, one) }?;
            }
        }
        self.pieces.sort_unstable_by_key(|piece| piece.start);
        Ok(())
    }

    /// # Safety
    ///
    /// The owner keeps the memory mapped.
    unsafe fn add(&mut self, uring: &IoUring, (segment, owner): (Segment, MemoryOwner)) -> io::Result<()> {
        if !self.has_table {
            uring.submitter().register_buffers_sparse(PIECES_MAX.into())?;
            self.has_table = true;
            self.free = (0..PIECES_MAX).rev().collect();
            self.vectored = knows_vectored(uring);
        }
        let slot = *self.free.last().ok_or_else(|| io::Error::other("the memory needs too many buffers"))?;
        let iovec = libc::iovec { iov_base: segment.address.cast(), iov_len: segment.bytes };
        // SAFETY: the entry added below keeps the memory mapped as long as the kernel may use it.
        unsafe { uring.submitter().register_buffers_update(slot.into(), &[iovec], None) }?;
        self.free.pop();
        self.pieces.push(Piece { start: segment.address.addr(), bytes: segment.bytes, slot, owner });
        Ok(())
    }

    fn forget(&mut self, uring: &IoUring, piece: &Piece) -> io::Result<()> {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: no memory is named.
        unsafe { uring.submitter().register_buffers_update(piece.slot.into(), &[nothing], None) }?;
        self.free.push(piece.slot);
        Ok(())
    }

    /// Unregisters all memory.
    pub(crate) fn clear(&mut self, uring: &IoUring) {
        self.pieces.clear();
        if std::mem::take(&mut self.has_table) {
            let _ = uring.submitter().unregister_buffers();
        }
    }
}

fn pieces(region: Segment, owner: MemoryOwner) -> impl Iterator<Item = (Segment, MemoryOwner)> {
    (0..region.bytes).step_by(PIECE_BYTES_MAX).map(move |at| {
        let bytes = PIECE_BYTES_MAX.min(region.bytes - at);
        let piece = Segment { address: region.address.wrapping_add(at), bytes };
        (piece, Arc::clone(&owner))
    })
}

/// Returns whether vectored I/O can use registered memory (Linux 6.15).
fn knows_vectored(uring: &IoUring) -> bool {
    let mut probe = Probe::new();
    let codes = [opcode::ReadvFixed::CODE, opcode::WritevFixed::CODE];
    uring.submitter().register_probe(&mut probe).is_ok() && codes.iter().all(|code| probe.is_supported(*code))
}
