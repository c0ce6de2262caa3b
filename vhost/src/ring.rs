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

/// The addresses of a ring in the front end's own address space, as `SET_VRING_ADDR` gives them. A packed ring has
/// the driver's event suppression structure in place of the available ring, the device's in that of the used ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// What a ring is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingSetup {
    pub(crate) size: u32,
    pub(crate) addresses: RingAddresses,
    pub(crate) packed: bool,
    pub(crate) event_index: bool,
    pub(crate) indirect: bool,
}

/// Where a ring begins. The numbers are those of `SET_VRING_BASE`: the index of a split ring; of a packed one the
/// available index with its wrap counter in bit 15, and above them the used ones, which some front ends leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// Where the front end says, unless a log of requests in flight knows better.
    At(u32),
    /// Where it stopped before under the same worker, which still has the chains that are out.
    Resume(u32),
}

impl Begin {
    /// Tells from what the front end says, and where the ring stopped under the same worker, how to go on.
    pub(crate) fn after(stopped_at: Option<u32>, base: u32) -> Self {
        let low = |at: u32| at & 0xffff;
        match stopped_at {
            Some(at) if at == base && base != 0 => Self::Resume(at),
            // A front end that keeps the lower half only. Both numbers are a fresh ring's, too: then it is one.
            Some(at) if base >> 16 == 0 && low(at) == base && base != 0 && base != 0x8000 => Self::Resume(at),
            _ => Self::At(base),
        }
    }
}

/// Why a ring cannot be used (any more).
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
    #[error("the driver has more than {0} descriptors out at once, more than its queue holds")]
    Overrun(u16),
    #[error("the driver has more than {QUEUE_SIZE_MAX} requests out at once, more than any queue holds")]
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

/// What [`Ring::pop`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Popped {
    /// Nothing waits.
    Empty,
    /// A chain.
    Chain,
    /// A chain that makes no sense; it was given back unserved.
    Dropped(ChainError),
}

/// A virtqueue of the guest's.
#[derive(Debug)]
pub(crate) enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

/// Calls the method of whichever ring it is.
macro_rules! either {
    ($ring:expr, $inner:ident => $call:expr) => {
        match $ring {
            Ring::Split($inner) => $call,
            Ring::Packed($inner) => $call,
        }
    };
}

impl Ring {
    /// Checks and translates the ring's parts. With a log, what was in flight under the server before comes first.
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

    /// Has chains taken once more that were taken before, maybe on another host: all between where the driver's memory
    /// says that chains are used and where the ring begins. Returns whether there are any.
    pub(crate) fn take_resubmitted(&mut self, heads: Vec<u16>) -> bool {
        match self {
            Self::Split(ring) => ring.take_resubmitted(heads),
            Self::Packed(_) => false,
        }
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        either!(self, ring => ring.memory())
    }

    /// Looks for chains in other memory from now on, in which the ring itself lies where it did ([`Memory::has_still`]).
    pub(crate) fn set_memory(&mut self, memory: Arc<Memory>) {
        either!(self, ring => ring.set_memory(memory));
    }

    /// Where to go on, as `GET_VRING_BASE` answers it.
    pub(crate) fn position(&self) -> u32 {
        either!(self, ring => ring.position())
    }

    /// Whether chains that were in flight before us still wait to be taken again.
    pub(crate) fn is_recovering(&self) -> bool {
        either!(self, ring => ring.is_recovering())
    }

    /// Whether there is something to take.
    #[inline]
    pub(crate) fn has_available(&self) -> bool {
        either!(self, ring => ring.has_available())
    }

    /// Where the driver is among what it was given back, as far as its event index tells (2.7.10, 2.8.22), if it has more
    /// of that left to look at than waits to be taken here (`wholly`: whatever waits here), and at least `least`.
    #[inline]
    pub(crate) fn lags_at(&self, least: u16, wholly: bool) -> Option<u16> {
        either!(self, ring => ring.lags_at(least, wholly))
    }

    /// Takes the next chain. `chain` is left empty unless there is one.
    #[inline]
    pub(crate) fn pop(&mut self, chain: &mut Chain) -> Result<Popped, RingError> {
        either!(self, ring => ring.pop(chain))
    }

    /// Gives a chain back, with the number of bytes written to it. The driver sees it after [`Self::publish`].
    #[inline]
    pub(crate) fn push(&mut self, chain: &Chain, written: u32) {
        either!(self, ring => ring.push(chain, written));
    }

    /// Shows the driver all chains given back. Returns whether it wants to be signalled.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        either!(self, ring => ring.publish())
    }

    /// Asks the driver to kick (or not) when something is available. Returns whether something is already.
    #[inline]
    pub(crate) fn want_kicks(&mut self, wanted: bool) -> bool {
        either!(self, ring => ring.want_kicks(wanted))
    }
}

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod lag_tests;
#[cfg(test)]
mod model;
#[cfg(test)]
mod packed_tests;
#[cfg(test)]
mod tests;
