//! A descriptor chain, translated to memory of this process.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferry_engine::Segment;
use vm_memory::VolatileSlice;

use crate::may_fault;

/// The buffers of one request: first the readable ones, then the writable ones. The guest may change the bytes at any
/// time, so they are only copied or passed to the kernel.
#[derive(Debug, Default)]
pub struct Chain {
    /// Its identifier: the number of the first descriptor, in a packed ring the buffer's identifier.
    pub(crate) id: u16,
    /// The number of its descriptors in a packed ring.
    pub(crate) descriptors: u16,
    /// Its entry in a packed ring's log.
    pub(crate) entry: u16,
    pub(crate) readable: Vec<Segment>,
    pub(crate) writable: Vec<Segment>,
    /// Some of it may vanish or be read-only. It is copied by the kernel, so a fault is an error, not SIGBUS.
    pub(crate) may_fault: bool,
    /// It was in flight when a previous server ended.
    pub(crate) resubmitted: bool,
    /// The number of its worker's parked chains, and how many there may be.
    pub(crate) parked: Option<Arc<AtomicUsize>>,
    pub(crate) parked_max: usize,
    /// It is counted among them.
    pub(crate) permit: RefCell<Option<ParkPermit>>,
}

/// One of the parked chains of a worker, until it is dropped.
#[derive(Debug)]
pub(crate) struct ParkPermit(Arc<AtomicUsize>);

impl Drop for ParkPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: the segments are addresses. Any thread that uses them keeps the memory that they lie in mapped.
unsafe impl Send for Chain {}

impl Chain {
    /// Returns its identifiers without buffers, a stand-in while another thread has the chain.
    pub(crate) fn stub(&self) -> Self {
        let Self { id, descriptors, entry, .. } = *self;
        Self { id, descriptors, entry, ..Self::default() }
    }

    /// Whether a previous server took this request already, and may have executed it.
    pub fn is_resubmitted(&self) -> bool {
        self.resubmitted
    }

    /// Whether it may be [parked](crate::ChainState::Parked): enough of its queue is left for what it then waits for.
    /// Reserves its place, which is free again when [`crate::QueueHandler::serve`] returns without parking it.
    pub fn may_park(&self) -> bool {
        self.park(self.parked_max)
    }

    /// Takes a place among the parked chains if fewer than `parked_max` are taken. Returns whether it has one.
    fn park(&self, parked_max: usize) -> bool {
        let mut permit = self.permit.borrow_mut();
        let more = |parked: usize| (parked < parked_max).then(|| parked + 1);
        if let (None, Some(parked)) = (&*permit, &self.parked)
            && parked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
        {
            *permit = Some(ParkPermit(Arc::clone(parked)));
        }
        permit.is_some()
    }

    /// Sets whether it has a place among the parked chains.
    pub(crate) fn set_parked(&self, parked: bool) {
        if parked {
            self.park(usize::MAX);
        } else {
            drop(self.permit.take());
        }
    }

    /// Returns the number of readable bytes.
    pub fn readable_bytes(&self) -> usize {
        total(&self.readable)
    }

    /// Returns the number of writable bytes.
    pub fn writable_bytes(&self) -> usize {
        total(&self.writable)
    }

    /// Copies readable bytes from `offset` on; returns how many.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        if self.may_fault {
            return may_fault::read(pieces(&self.readable, offset, bytes.len()), bytes);
        }
        let mut done = 0;
        for segment in pieces(&self.readable, offset, bytes.len()) {
            // SAFETY: segments lie in guest memory that the worker keeps mapped for as long as it has the chain.
            let slice = unsafe { VolatileSlice::new(segment.address, segment.bytes) };
            done += slice.copy_to(&mut bytes[done..done + segment.bytes]);
        }
        done
    }

    /// Copies bytes to the writable buffers from `offset` on; returns how many.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> usize {
        if self.may_fault {
            return may_fault::write(pieces(&self.writable, offset, bytes.len()), bytes);
        }
        let mut done = 0;
        for segment in pieces(&self.writable, offset, bytes.len()) {
            // SAFETY: as in `read_at`.
            let slice = unsafe { VolatileSlice::new(segment.address, segment.bytes) };
            slice.copy_from(&bytes[done..done + segment.bytes]);
            done += segment.bytes;
        }
        done
    }

    /// Returns the pieces of up to `bytes` readable bytes from `offset` on.
    pub fn readable(&self, offset: usize, bytes: usize) -> impl Iterator<Item = Segment> {
        pieces(&self.readable, offset, bytes)
    }

    /// Returns the pieces of up to `bytes` writable bytes from `offset` on.
    pub fn writable(&self, offset: usize, bytes: usize) -> impl Iterator<Item = Segment> {
        pieces(&self.writable, offset, bytes)
    }

    pub(crate) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        self.may_fault = false;
        self.resubmitted = false;
    }
}

fn total(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| segment.bytes).sum()
}

fn pieces(segments: &[Segment], mut skip: usize, mut left: usize) -> impl Iterator<Item = Segment> {
    segments.iter().filter_map(move |segment| {
        let skipped = skip.min(segment.bytes);
        skip -= skipped;
        let bytes = left.min(segment.bytes - skipped);
        left -= bytes;
        (bytes > 0).then(|| Segment { address: segment.address.wrapping_add(skipped), bytes })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_across_segments_of_any_size() {
        let mut memory = *b"abcdefghij";
        let base = memory.as_mut_ptr();
        let cut = |start: usize, bytes| Segment { address: base.wrapping_add(start), bytes };
        let chain = Chain {
            readable: vec![cut(0, 1), cut(1, 2), cut(3, 4)],
            writable: vec![cut(7, 1), cut(8, 2)],
            ..Chain::default()
        };
        assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (7, 3));
        let mut out = [0u8; 5];
        assert_eq!(chain.read_at(1, &mut out), 5);
        assert_eq!(&out, b"bcdef");
        assert_eq!(chain.read_at(6, &mut out), 1);
        assert_eq!(chain.read_at(7, &mut out), 0);
        assert_eq!(chain.write_at(1, b"XYZ"), 2);
        assert_eq!(&memory, b"abcdefghXY");
    }
}
