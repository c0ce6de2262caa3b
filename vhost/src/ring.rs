//! The device's side of a virtqueue, split or packed.

mod descriptor;
mod packed;
mod split;

use std::sync::Arc;

use crate::QUEUE_SIZE_MAX;
use crate::chain::Chain;
use crate::inflight::{LogError, Region};
use crate::memory::Memory;
pub(crate) use packed::PackedRing;
pub(crate) use split::SplitRing;

/// The addresses of a ring in the front end's address space, as in `SET_VRING_ADDR`. For a packed ring, `available`
/// is the driver's event suppression structure and `used` the device's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// The parameters of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingSetup {
    pub(crate) size: u32,
    pub(crate) addresses: RingAddresses,
    pub(crate) packed: bool,
    pub(crate) event_index: bool,
    pub(crate) indirect: bool,
}

/// Where a ring begins. The numbers are those of `SET_VRING_BASE`: the index of a split ring; for a packed ring the
/// available index with its wrap counter in bit 15, and above them the used index and its wrap counter, which some
/// front ends omit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// At the front end's base, unless there is an in-flight log.
    At(u32),
    /// Where it stopped under the same worker, which still has the chains in flight.
    Resume(u32),
}

impl Begin {
    /// Decides by the front end's base, and by where the ring stopped under the same worker. `is_used`: whether the
    /// ring in memory is known not to be new.
    pub(crate) fn after(stopped_at: Option<u32>, base: u32, is_used: impl FnOnce() -> bool) -> Self {
        let low = |at: u32| at & 0xffff;
        match stopped_at {
            Some(0) if base == 0 && is_used() => Self::Resume(0),
            Some(at) if at == base && base != 0 => Self::Resume(at),
            // A front end that keeps only the lower half. 0 and 0x8000 may also be a new ring, and are taken for one.
            Some(at) if base >> 16 == 0 && low(at) == base && base != 0 && base != 0x8000 => Self::Resume(at),
            _ => Self::At(base),
        }
    }
}

/// Why a ring cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RingError {
    #[error("a queue of {0} entries: it must have up to {QUEUE_SIZE_MAX}, a power of two unless it is a packed ring")]
    Size(u32),
    #[error(
        "the {part} at {address:#x} is not in memory that the VMM shares with us: share the guest's memory \
         (QEMU: -object memory-backend-memfd,id=mem,size=SIZE,share=on -numa node,memdev=mem; \
         libvirt: <access mode='shared'/> in <memoryBacking>; cloud-hypervisor: --memory shared=on)"
    )]
    Address { part: &'static str, address: u64 },
    #[error("a packed ring of {size} entries cannot begin at {base:#x}")]
    Base { base: u32, size: u16 },
    #[error("the driver's index jumped from {from} to {to} in a queue of {size}")]
    Jump { from: u16, to: u16, size: u16 },
    #[error("the driver has more than {0} descriptors in flight, more than its queue has")]
    Overrun(u16),
    #[error("the driver has more than {QUEUE_SIZE_MAX} requests in flight, more than any queue has")]
    TooManyChains,
    #[error(transparent)]
    Log(#[from] LogError),
}

/// Why a chain was dropped.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ChainError {
    #[error("descriptor {0} is outside the table")]
    Index(u16),
    #[error("the chain is longer than {0} descriptors, or a loop")]
    TooLong(usize),
    #[error("the chain's buffers lie in more than {0} pieces of memory")]
    TooScattered(usize),
    #[error("{bytes} bytes at {address:#x} are not guest memory")]
    Outside { address: u64, bytes: u32 },
    #[error("a readable descriptor follows a writable one")]
    Order,
    #[error("an indirect table of {0} bytes")]
    IndirectSize(u32),
    #[error("an indirect descriptor within an indirect table, or beside others")]
    IndirectNested,
    #[error("an indirect descriptor, though the feature was not negotiated")]
    IndirectUnexpected,
}

/// The result of [`Ring::pop`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PopOutcome {
    /// No chain is available.
    Empty,
    /// A chain.
    Chain,
    /// An invalid chain; it was returned unserved.
    Dropped(ChainError),
}

/// A virtqueue of the guest.
#[derive(Debug)]
pub(crate) enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

/// Calls a method of either ring.
macro_rules! either {
    ($ring:expr, $inner:ident => $call:expr) => {
        match $ring {
            Ring::Split($inner) => $call,
            Ring::Packed($inner) => $call,
        }
    };
}

impl Ring {
    /// Checks and translates the ring's parts. With a log, the chains in flight under the previous server come first.
    pub(crate) fn new(
        memory: Arc<Memory>,
        setup: &RingSetup,
        begin: Begin,
        log: Option<Region>,
    ) -> Result<Self, RingError> {
        Ok(match setup.packed {
            false => Self::Split(SplitRing::new(memory, setup, begin, log)?),
            true => Self::Packed(PackedRing::new(memory, setup, begin, log)?),
        })
    }

    /// Takes chains again that were taken before, maybe on another host: all between the used index in the driver's
    /// memory and the base of the ring. Returns false, and takes none, if `heads` does not match the ring (always for
    /// packed rings).
    pub(crate) fn take_resubmitted(&mut self, heads: Vec<u16>) -> bool {
        match self {
            Self::Split(ring) => ring.take_resubmitted(heads),
            Self::Packed(_) => false,
        }
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        either!(self, ring => ring.memory())
    }

    /// Uses other memory for chains from now on, in which the ring itself has the same mapping
    /// ([`Memory::has_same_mapping`]).
    pub(crate) fn set_memory(&mut self, memory: Arc<Memory>) {
        either!(self, ring => ring.set_memory(memory));
    }

    /// Returns the base for `GET_VRING_BASE`.
    pub(crate) fn position(&self) -> u32 {
        either!(self, ring => ring.position())
    }

    /// Whether chains that were in flight under the previous server still have to be taken.
    pub(crate) fn is_recovering(&self) -> bool {
        either!(self, ring => ring.is_recovering())
    }

    /// Whether a chain is available.
    #[inline]
    pub(crate) fn has_available(&self) -> bool {
        either!(self, ring => ring.has_available())
    }

    /// Returns the driver's position in the used ring, as far as its event index shows it (2.7.7, 2.8.10), if it has
    /// at least `least` completions to process, and more than chains are available here (`wholly`: any number). `None`
    /// also while chains are recovered, and without event indexes.
    #[inline]
    pub(crate) fn used_event_if_behind(&self, least: u16, wholly: bool) -> Option<u16> {
        either!(self, ring => ring.used_event_if_behind(least, wholly))
    }

    /// Returns the number of descriptors.
    pub(crate) fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// Takes the next chain. `chain` is empty if there is none.
    #[inline]
    pub(crate) fn pop(&mut self, chain: &mut Chain) -> Result<PopOutcome, RingError> {
        either!(self, ring => ring.pop(chain))
    }

    /// Adds a chain to the used ring, with the number of bytes written to it. The driver sees it after
    /// [`Self::publish`].
    #[inline]
    pub(crate) fn push(&mut self, chain: &Chain, written: u32) {
        either!(self, ring => ring.push(chain, written));
    }

    /// Publishes all added chains. Returns whether to signal the driver.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        either!(self, ring => ring.publish())
    }

    /// Enables or disables kicks. Returns whether a chain is already available.
    #[inline]
    pub(crate) fn want_kicks(&mut self, wanted: bool) -> bool {
        either!(self, ring => ring.want_kicks(wanted))
    }
}

#[cfg(test)]
mod tests;
