//! The device's side of a split virtqueue (VIRTIO 1.3, section 2.7).

use std::rc::Rc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use vm_memory::VolatileSlice;

use crate::QUEUE_SIZE_MAX;
use crate::chain::Chain;
use crate::memory::Memory;

const DESCRIPTOR_BYTES: u32 = 16;
/// Descriptor flags (2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Avail ring flag (2.7.6): the driver wants no interrupts.
const NO_INTERRUPT: u16 = 1;
/// Used ring flag (2.7.8): the device wants no kicks.
const NO_NOTIFY: u16 = 1;

/// The addresses of a ring in the front end's own address space, as `SET_VRING_ADDR` gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// Why a ring cannot be used (any more).
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum RingError {
    #[error("a queue of {0} entries: it must be a power of two up to {QUEUE_SIZE_MAX}")]
    Size(u32),
    #[error(
        "the {part} ring at {address:#x} is not in memory that the VMM shares with us: share the guest's memory \
         (QEMU: -object memory-backend-memfd,id=mem,size=SIZE,share=on -numa node,memdev=mem; \
         libvirt: <access mode='shared'/> in <memoryBacking>; cloud-hypervisor: --memory shared=on)"
    )]
    Address { part: &'static str, address: u64 },
    #[error("the driver's index jumped from {from} to {to} in a queue of {size}")]
    Jump { from: u16, to: u16, size: u16 },
    #[error("the driver has more than {QUEUE_SIZE_MAX} requests out at once, more than any queue holds")]
    TooManyChains,
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
    #[error("an indirect descriptor within an indirect table, or with a successor")]
    IndirectNested,
    #[error("an indirect descriptor, though the feature was not negotiated")]
    IndirectUnexpected,
}

/// What [`SplitRing::pop`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Popped {
    /// Nothing waits.
    Empty,
    /// A chain.
    Chain,
    /// A chain that makes no sense; it was given back unserved.
    Dropped(ChainError),
}

/// A split virtqueue of the guest's.
#[derive(Debug)]
pub(crate) struct SplitRing {
    memory: Rc<Memory>,
    size: u16,
    descriptors: *mut u8,
    available: *mut u8,
    used: *mut u8,
    event_index: bool,
    indirect: bool,
    /// The next available entry to take.
    next_available: u16,
    /// The driver's index as last read.
    seen_available: u16,
    /// The next used entry to write.
    next_used: u16,
    /// The used index that the driver was last told of, and asked about for signalling.
    published_used: u16,
    signalled_used: u16,
}

impl SplitRing {
    /// Checks and translates the ring's parts. Continues at index `base`.
    pub(crate) fn new(
        memory: Rc<Memory>,
        size: u32,
        addresses: RingAddresses,
        base: u16,
        event_index: bool,
        indirect: bool,
    ) -> Result<Self, RingError> {
        let size = u16::try_from(size)
            .ok()
            .filter(|size| size.is_power_of_two() && *size <= QUEUE_SIZE_MAX)
            .ok_or(RingError::Size(size))?;
        let entries = u64::from(size);
        let part = |part, address, bytes, align| {
            memory.translate_user(address, bytes, align).ok_or(RingError::Address { part, address })
        };
        let descriptors = part("descriptor", addresses.descriptors, 16 * entries, 16)?;
        let available = part("available", addresses.available, 6 + 2 * entries, 2)?;
        let used = part("used", addresses.used, 6 + 8 * entries, 4)?;
        let mut ring = Self {
            memory: Rc::clone(&memory),
            size,
            descriptors,
            available,
            used,
            event_index,
            indirect,
            next_available: base,
            seen_available: base,
            next_used: 0,
            published_used: 0,
            signalled_used: 0,
        };
        // A ring that goes on (after a pause, a reconnect) goes on where its used index stands.
        let used_index = ring.half(ring.used, 2).load(Ordering::Acquire);
        ring.next_used = used_index;
        ring.published_used = used_index;
        ring.signalled_used = used_index;
        Ok(ring)
    }

    /// A 16-bit field of the ring that both sides use.
    fn half(&self, part: *mut u8, offset: usize) -> &AtomicU16 {
        // SAFETY: `new` checked that the part lies in guest memory and is aligned; all offsets used here lie in
        // the part and are even; `self.memory` keeps it mapped; the guest's accesses are atomic as well.
        unsafe { AtomicU16::from_ptr(part.wrapping_add(offset).cast()) }
    }

    pub(crate) fn memory(&self) -> &Rc<Memory> {
        &self.memory
    }

    pub(crate) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Whether the driver has made something available.
    pub(crate) fn has_available(&self) -> bool {
        self.next_available != self.seen_available
            || self.half(self.available, 2).load(Ordering::Acquire) != self.next_available
    }

    /// Takes the next chain. `chain` is left empty unless there is one.
    pub(crate) fn pop(&mut self, chain: &mut Chain) -> Result<Popped, RingError> {
        chain.clear();
        if self.next_available == self.seen_available {
            self.seen_available = self.half(self.available, 2).load(Ordering::Acquire);
            let (from, to, size) = (self.next_available, self.seen_available, self.size);
            if to.wrapping_sub(from) > size {
                self.seen_available = from;
                return Err(RingError::Jump { from, to, size });
            }
            if to == from {
                return Ok(Popped::Empty);
            }
        }
        let index = usize::from(self.next_available % self.size);
        chain.head = self.half(self.available, 4 + 2 * index).load(Ordering::Relaxed);
        self.next_available = self.next_available.wrapping_add(1);
        match self.walk(chain) {
            Ok(()) => Ok(Popped::Chain),
            Err(error) => {
                chain.clear();
                if chain.head < self.size {
                    self.push(chain.head, 0);
                }
                Ok(Popped::Dropped(error))
            }
        }
    }

    fn walk(&self, chain: &mut Chain) -> Result<(), ChainError> {
        let mut table = Table { start: self.descriptors, entries: self.size, is_indirect: false };
        let mut next = Some(chain.head);
        // The specification allows as many descriptors as the queue has entries; Linux, too, needs no more.
        let mut left = usize::from(QUEUE_SIZE_MAX);
        while let Some(index) = next {
            if index >= table.entries {
                return Err(ChainError::Index(index));
            }
            left = left.checked_sub(1).ok_or(ChainError::TooLong(usize::from(QUEUE_SIZE_MAX)))?;
            let descriptor = table.read(index);
            if descriptor.flags & INDIRECT != 0 {
                let indirect = self.indirect_table(&table, &descriptor)?;
                (table, next) = (indirect, Some(0));
                continue;
            }
            let out = match descriptor.flags & WRITE {
                0 if !chain.writable.is_empty() => return Err(ChainError::Order),
                0 => &mut chain.readable,
                _ => &mut chain.writable,
            };
            let (address, bytes) = (descriptor.address, descriptor.bytes);
            if !self.memory.translate(address, u64::from(bytes), out) {
                return Err(ChainError::Outside { address, bytes });
            }
            next = (descriptor.flags & NEXT != 0).then_some(descriptor.next);
        }
        Ok(())
    }

    /// The table that an indirect descriptor leads to (2.7.5.3).
    fn indirect_table(&self, table: &Table, descriptor: &Descriptor) -> Result<Table, ChainError> {
        if !self.indirect {
            return Err(ChainError::IndirectUnexpected);
        }
        if table.is_indirect || descriptor.flags & NEXT != 0 {
            return Err(ChainError::IndirectNested);
        }
        let (address, bytes) = (descriptor.address, descriptor.bytes);
        let entries = bytes / DESCRIPTOR_BYTES;
        let entries = u16::try_from(entries).ok().filter(|entries| (1..=QUEUE_SIZE_MAX).contains(entries));
        let (Some(entries), true) = (entries, bytes.is_multiple_of(DESCRIPTOR_BYTES)) else {
            return Err(ChainError::IndirectSize(bytes));
        };
        let mut pieces = Vec::new();
        if !self.memory.translate(address, u64::from(bytes), &mut pieces) || pieces.len() != 1 {
            return Err(ChainError::Outside { address, bytes });
        }
        Ok(Table { start: pieces[0].address, entries, is_indirect: true })
    }

    /// Gives a chain back, with the number of bytes written to it. The driver sees it after [`Self::publish`].
    pub(crate) fn push(&mut self, head: u16, written: u32) {
        let index = usize::from(self.next_used % self.size);
        let target = self.used.wrapping_add(4 + 8 * index).cast::<[u32; 2]>();
        let halves = [u32::from(head), written].map(u32::to_le);
        // SAFETY: `new` checked that the used ring, of which this is an element, lies in guest memory, aligned to 4.
        unsafe { target.write_volatile(halves) };
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Shows the driver all chains given back. Answers whether it wants to be signalled (2.7.7).
    pub(crate) fn publish(&mut self) -> bool {
        if self.next_used == self.published_used {
            return false;
        }
        self.half(self.used, 2).store(self.next_used, Ordering::Release);
        self.published_used = self.next_used;
        // The index must be visible before the driver's wish is read, or both sides may wait for each other.
        fence(Ordering::SeqCst);
        if !self.event_index {
            return self.half(self.available, 0).load(Ordering::Relaxed) & NO_INTERRUPT == 0;
        }
        let (new, old) = (self.next_used, self.signalled_used);
        let event = self.half(self.available, 4 + 2 * usize::from(self.size)).load(Ordering::Relaxed);
        self.signalled_used = new;
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// Asks the driver to kick (or not) when it makes something available. Answers whether something is already,
    /// in which case no kick may come for it.
    pub(crate) fn want_kicks(&mut self, wanted: bool) -> bool {
        if self.event_index {
            // Without the wish, the event index stays where it is, behind: no kick for half a lap of the indices.
            if wanted {
                let offset = 4 + 8 * usize::from(self.size);
                self.half(self.used, offset).store(self.next_available, Ordering::Relaxed);
            }
        } else {
            self.half(self.used, 0).store(if wanted { 0 } else { NO_NOTIFY }, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        wanted && self.has_available()
    }
}

/// One descriptor, copied out of guest memory.
struct Descriptor {
    address: u64,
    bytes: u32,
    flags: u16,
    next: u16,
}

/// A descriptor table: the ring's own, or an indirect one.
struct Table {
    start: *mut u8,
    entries: u16,
    is_indirect: bool,
}

impl Table {
    fn read(&self, index: u16) -> Descriptor {
        debug_assert!(index < self.entries);
        let mut bytes = [0u8; DESCRIPTOR_BYTES as usize];
        let start = self.start.wrapping_add(bytes.len() * usize::from(index));
        // SAFETY: the table lies in guest memory that the ring keeps mapped, and `index` within the table.
        unsafe { VolatileSlice::new(start, bytes.len()) }.copy_to(&mut bytes);
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        Descriptor {
            address: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            bytes: u32::from_le_bytes([i, j, k, l]),
            flags: u16::from_le_bytes([m, n]),
            next: u16::from_le_bytes([o, p]),
        }
    }
}

#[cfg(test)]
mod tests;
