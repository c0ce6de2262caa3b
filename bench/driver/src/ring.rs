//! The driver's side of a virtqueue, split or packed.
//!
//! [`Ring`] is the bare mechanism: descriptors, the available and the used entries, and notifications. It neither owns
//! buffers nor checks what it publishes, so that a test can publish invalid entries.

mod packed;
mod split;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::frontend::RingAddresses;
use crate::memory::{Memory, PAGE_BYTES, Window};
use crate::{Config, Error, Result};
pub use packed::PackedRing;
pub use split::SplitRing;

/// The buffer continues in the descriptor `next` (VIRTQ_DESC_F_NEXT).
pub const NEXT: u16 = 1;
/// The device writes the buffer (VIRTQ_DESC_F_WRITE).
pub const WRITE: u16 = 2;
/// The buffer is a table of descriptors (VIRTQ_DESC_F_INDIRECT).
pub const INDIRECT: u16 = 4;

/// The size of a descriptor in memory.
pub const DESCRIPTOR_BYTES: usize = 16;

/// One entry of a split ring's descriptor table, or of an indirect one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Descriptor {
    /// Guest-physical address of the buffer.
    pub addr: u64,
    /// Its length.
    pub len: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`].
    pub flags: u16,
    /// The next descriptor, with [`NEXT`].
    pub next: u16,
}

impl Descriptor {
    /// Writes it as entry `index` of a table.
    #[inline]
    pub fn store(self, table: &Window, index: usize) {
        self.store_halves(table, index, [self.flags, self.next]);
    }

    /// Writes it as entry `index` of an indirect table of a packed ring, where entries simply follow one another.
    pub fn store_packed(self, table: &Window, index: usize) {
        self.store_halves(table, index, [0, self.flags & !NEXT]);
    }

    #[inline]
    fn store_halves(self, table: &Window, index: usize, [first, second]: [u16; 2]) {
        let at = index * DESCRIPTOR_BYTES;
        table.store_u64(at, self.addr);
        table.store_u32(at + 8, self.len);
        table.store_u16(at + 12, first, Ordering::Relaxed);
        table.store_u16(at + 14, second, Ordering::Relaxed);
    }
}

/// One used buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// The head of the chain that the device is done with; in a packed ring, the buffer's identifier.
    pub id: u32,
    /// How many bytes it wrote.
    pub len: u32,
}

/// A virtqueue in guest memory, seen by its driver.
#[derive(Debug)]
pub enum Ring {
    /// A split one.
    Split(SplitRing),
    /// A packed one.
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
    pub(crate) fn new(config: &Config, memory: &Arc<Memory>) -> Result<Self> {
        let alloc = |bytes| {
            let buffer = memory.alloc(bytes, PAGE_BYTES).ok_or(Error::Memory(bytes))?;
            // It may be that of a ring before this one.
            buffer.write(0, &vec![0; buffer.len()]);
            Ok::<_, Error>(buffer)
        };
        let (size, event_idx) = (config.queue_size, config.event_idx);
        let table = alloc(SplitRing::table_bytes(size))?;
        if config.packed {
            let events = [alloc(packed::EVENT_BYTES)?, alloc(packed::EVENT_BYTES)?];
            return Ok(Self::Packed(PackedRing::new(size, event_idx, table, events)));
        }
        let (avail, used) = (alloc(SplitRing::avail_bytes(size))?, alloc(SplitRing::used_bytes(size))?);
        Ok(Self::Split(SplitRing::new(size, event_idx, table, avail, used)))
    }

    /// The number of entries.
    pub fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// Where its three parts lie.
    pub fn addresses(&self) -> RingAddresses {
        let [table, avail, used] = match self {
            Self::Split(ring) => [ring.table(), ring.avail(), ring.used()],
            Self::Packed(ring) => ring.parts(),
        };
        RingAddresses { table: table.host(), avail: avail.host(), used: used.host() }
    }

    /// What SET_VRING_BASE says of a ring that was never used.
    pub fn fresh_base(&self) -> u16 {
        match self {
            Self::Split(_) => 0,
            // The wrap counter begins at 1.
            Self::Packed(_) => 0x8000,
        }
    }

    /// What SET_VRING_BASE says after a server was lost, as QEMU has it: the used index where the ring tells it; the
    /// server finds all else in the in-flight memory.
    pub fn base_after_loss(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.used().load_u16(2, Ordering::Acquire),
            Self::Packed(_) => self.fresh_base(),
        }
    }

    /// Makes a chain available under `id`: in a split ring the number of its first descriptor, which is in the table
    /// already. The device sees it after [`Ring::publish`].
    #[inline]
    pub fn push(&mut self, id: u16, chain: &[Descriptor]) {
        match self {
            Self::Split(ring) => ring.push(id),
            Self::Packed(ring) => ring.push(id, chain),
        }
    }

    /// Shows the device what was pushed; says whether it wants a kick for it.
    #[inline]
    pub fn publish(&mut self) -> bool {
        either!(self, ring => ring.publish())
    }

    /// Whether a used buffer waits.
    #[inline]
    pub fn has_used(&self) -> bool {
        either!(self, ring => ring.has_used())
    }

    /// How many used buffers wait, by the device's word.
    #[inline]
    pub fn waiting_used(&self) -> u16 {
        either!(self, ring => ring.waiting_used())
    }

    /// The next used buffer, if there is one.
    #[inline]
    pub fn pop(&mut self) -> Option<Used> {
        either!(self, ring => ring.pop())
    }

    /// The next used buffer, of which [`Ring::waiting_used`] has said that it is there.
    #[inline]
    pub fn pop_ready(&mut self) -> Used {
        either!(self, ring => ring.pop_ready())
    }

    /// Asks the device for a call at the next used buffer. True when one has come in the meantime: do not sleep.
    pub fn want_call(&mut self) -> bool {
        either!(self, ring => ring.want_call())
    }

    /// Asks the device for no calls.
    pub fn suppress_calls(&mut self) {
        either!(self, ring => ring.suppress_calls());
    }

    /// Keeps calls suppressed over any number of completions; to be called now and then while polling.
    #[inline]
    pub fn keep_suppressed(&mut self) {
        if let Self::Split(ring) = self {
            ring.keep_suppressed();
        }
    }

    /// Starts over where the device stopped, as after GET_VRING_BASE and SET_VRING_BASE: what it has not taken is
    /// available no more.
    pub fn restart(&mut self, base: u16) {
        either!(self, ring => ring.restart(base));
    }
}

/// Whether an index that went from `old` to `new` passed `event` (`vring_need_event` of the specification).
#[inline]
fn event_passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
