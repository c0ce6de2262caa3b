//! A split virtqueue (VIRTIO 1.3, section 2.7).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::descriptor::{DESCRIPTOR_BYTES, Extent, INDIRECT, NEXT, add, copy_out, indirect_table};
use super::{Begin, ChainError, PopOutcome, RingError, RingSetup};
use crate::QUEUE_SIZE_MAX;
use crate::chain::Chain;
use crate::inflight::{Region, SplitLog};
use crate::memory::Memory;
use crate::shared::Cells;

/// Avail ring flag (2.7.6): the driver wants no interrupts.
pub(super) const NO_INTERRUPT: u16 = 1;
/// Used ring flag (2.7.8): the device wants no kicks.
pub(super) const NO_NOTIFY: u16 = 1;
/// Offsets in the available and the used ring.
const FLAGS: usize = 0;
const INDEX: usize = 2;
const ENTRIES: usize = 4;

/// A split virtqueue of the guest.
#[derive(Debug)]
pub(crate) struct SplitRing {
    memory: Arc<Memory>,
    size: u16,
    descriptors: *mut u8,
    available: Cells,
    used: Cells,
    event_index: bool,
    indirect: bool,
    /// The next available entry to take.
    next_available: u16,
    /// The driver's index as last read.
    seen_available: u16,
    /// The next used entry to write.
    next_used: u16,
    /// The used index that was last published.
    published_used: u16,
    /// The in-flight log, for the next server.
    log: Option<SplitLog>,
    /// Chains that were in flight when the previous server ended.
    resubmitted: VecDeque<u16>,
}

// SAFETY: the table of descriptors lies in `memory`, which is kept mapped, on any thread.
unsafe impl Send for SplitRing {}

impl RingSetup {
    /// Whether it is a split ring with used entries. Its driver begins with index 0, which returns after each lap of the
    /// indices.
    pub(crate) fn is_used(&self, memory: &Memory) -> bool {
        let used = || Some(memory.part(self.addresses.used, ENTRIES, 4)?.load_u16(INDEX, Ordering::Acquire));
        !self.packed && used().is_some_and(|index| index != 0)
    }
}

impl SplitRing {
    pub(super) fn new(
        memory: Arc<Memory>,
        setup: &RingSetup,
        begin: Begin,
        region: Option<Region>,
    ) -> Result<Self, RingError> {
        let size = u16::try_from(setup.size)
            .ok()
            .filter(|size| size.is_power_of_two() && *size <= QUEUE_SIZE_MAX)
            .ok_or(RingError::Size(setup.size))?;
        let entries = usize::from(size);
        let addresses = setup.addresses;
        let part = |part, address, bytes, align| memory.part(address, bytes, align).ok_or((part, address));
        let outside = |(part, address)| RingError::Address { part, address };
        let descriptors = part("descriptor table", addresses.descriptors, DESCRIPTOR_BYTES as usize * entries, 16);
        let available = part("available ring", addresses.available, 6 + 2 * entries, 2).map_err(outside)?;
        let used = part("used ring", addresses.used, 6 + 8 * entries, 4).map_err(outside)?;
        // A ring that resumes (after a pause or a reconnect) continues at its used index.
        let used_index = used.load_u16(INDEX, Ordering::Acquire);
        let (Begin::At(base) | Begin::Resume(base)) = begin;
        let mut ring = Self {
            descriptors: descriptors.map_err(outside)?.start(),
            memory,
            size,
            available,
            used,
            event_index: setup.event_index,
            indirect: setup.indirect,
            // The upper half of a base has no meaning here.
            next_available: u16::try_from(base & 0xffff).unwrap_or(0),
            seen_available: 0,
            next_used: used_index,
            published_used: used_index,
            log: None,
            resubmitted: VecDeque::new(),
        };
        if let Some(region) = region {
            let taken = ring.next_available.wrapping_sub(used_index);
            let (log, heads) = SplitLog::open(region, size, (used_index, taken))?;
            ring.log = Some(log);
            if let (Some(heads), Begin::At(_)) = (heads, begin) {
                // Every taken chain is either used or in flight.
                ring.next_available = used_index.wrapping_add(u16::try_from(heads.len()).unwrap_or(0));
                ring.resubmitted = heads.into();
            }
        }
        ring.seen_available = ring.next_available;
        Ok(ring)
    }

    pub(super) fn take_resubmitted(&mut self, heads: Vec<u16>) -> bool {
        if self.resubmitted == heads {
            // The log had them.
            return true;
        }
        let taken = self.next_available.wrapping_sub(self.next_used);
        if usize::from(taken) != heads.len() || heads.iter().any(|head| *head >= self.size) || self.is_recovering() {
            return false;
        }
        if let Some(log) = &mut self.log {
            heads.iter().for_each(|head| log.take(*head));
        }
        self.resubmitted = heads.into();
        true
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(super) fn set_memory(&mut self, memory: Arc<Memory>) {
        self.memory = memory;
    }

    pub(super) fn position(&self) -> u32 {
        u32::from(self.next_available)
    }

    pub(super) fn is_recovering(&self) -> bool {
        !self.resubmitted.is_empty()
    }

    #[inline]
    pub(super) fn has_available(&self) -> bool {
        self.next_available != self.seen_available
            || self.available.load_u16(INDEX, Ordering::Acquire) != self.next_available
            || !self.resubmitted.is_empty()
    }

    #[inline]
    pub(super) fn used_event_if_behind(&self, least: u16, wholly: bool) -> Option<u16> {
        let event = self.available.load_u16(self.used_event_at(), Ordering::Relaxed);
        let unseen = self.published_used.wrapping_sub(event);
        let waiting = self.available.load_u16(INDEX, Ordering::Acquire).wrapping_sub(self.next_available);
        // A driver without signals does not update the index; it may be further behind than the ring is long.
        let is_known = self.event_index && unseen <= self.size && unseen >= least && self.resubmitted.is_empty();
        (is_known && (waiting < unseen || wholly && unseen > 0)).then_some(event)
    }

    fn used_event_at(&self) -> usize {
        ENTRIES + 2 * usize::from(self.size)
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    #[inline]
    pub(super) fn pop(&mut self, chain: &mut Chain) -> Result<PopOutcome, RingError> {
        chain.clear();
        if let Some(head) = self.resubmitted.pop_front() {
            let popped = self.take(head, chain);
            chain.resubmitted = true;
            return Ok(popped);
        }
        if self.next_available == self.seen_available {
            self.seen_available = self.available.load_u16(INDEX, Ordering::Acquire);
            let (from, to, size) = (self.next_available, self.seen_available, self.size);
            if to.wrapping_sub(from) > size {
                self.seen_available = from;
                return Err(RingError::Jump { from, to, size });
            }
            if to == from {
                return Ok(PopOutcome::Empty);
            }
        }
        let index = usize::from(self.next_available % self.size);
        let head = self.available.load_u16(ENTRIES + 2 * index, Ordering::Relaxed);
        self.next_available = self.next_available.wrapping_add(1);
        if let Some(log) = self.log.as_mut().filter(|_| head < self.size) {
            log.take(head);
        }
        Ok(self.take(head, chain))
    }

    #[inline]
    fn take(&mut self, head: u16, chain: &mut Chain) -> PopOutcome {
        chain.id = head;
        match self.walk(chain) {
            Ok(()) => PopOutcome::Chain,
            Err(error) => {
                chain.clear();
                if head < self.size {
                    self.push(chain, 0);
                }
                PopOutcome::Dropped(error)
            }
        }
    }

    fn walk(&self, chain: &mut Chain) -> Result<(), ChainError> {
        let (mut table, mut entries, mut is_indirect) = (self.descriptors, self.size, false);
        let mut next = Some(chain.id);
        // The specification allows as many descriptors as the queue has entries; Linux needs no more.
        let mut left = usize::from(QUEUE_SIZE_MAX);
        while let Some(index) = next {
            if index >= entries {
                return Err(ChainError::Index(index));
            }
            left = left.checked_sub(1).ok_or(ChainError::TooLong(usize::from(QUEUE_SIZE_MAX)))?;
            let (address, [a, b, c, d, flags_low, flags_high, next_low, next_high]) = copy_out(table, index);
            let extent = Extent { address, bytes: u32::from_le_bytes([a, b, c, d]) };
            let flags = u16::from_le_bytes([flags_low, flags_high]);
            if flags & INDIRECT != 0 {
                match (self.indirect, is_indirect || flags & NEXT != 0) {
                    (false, _) => return Err(ChainError::IndirectUnexpected),
                    (true, true) => return Err(ChainError::IndirectNested),
                    (true, false) => {}
                }
                (table, entries) = indirect_table(&self.memory, extent)?;
                (is_indirect, next) = (true, Some(0));
                continue;
            }
            add(chain, &self.memory, extent, flags)?;
            next = (flags & NEXT != 0).then_some(u16::from_le_bytes([next_low, next_high]));
        }
        Ok(())
    }

    #[inline]
    pub(super) fn push(&mut self, chain: &Chain, written: u32) {
        let at = ENTRIES + 8 * usize::from(self.next_used % self.size);
        self.used.store_u32(at, u32::from(chain.id), Ordering::Relaxed);
        self.used.store_u32(at + 4, written, Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(log) = &mut self.log {
            log.add_used(chain.id);
        }
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        if self.next_used == self.published_used {
            return false;
        }
        let (new, old) = (self.next_used, self.published_used);
        self.used.store_u16(INDEX, new, Ordering::Release);
        self.published_used = new;
        if let Some(log) = &mut self.log {
            log.end_publish(new);
        }
        // The index must be visible before the driver's flags are read, or both sides may wait for each other
        // (2.7.7).
        fence(Ordering::SeqCst);
        if !self.event_index {
            return self.available.load_u16(FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0;
        }
        let event = self.available.load_u16(self.used_event_at(), Ordering::Relaxed);
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    #[inline]
    pub(super) fn want_kicks(&mut self, wanted: bool) -> bool {
        if self.event_index {
            // Otherwise the event index stays behind: no kick for half a lap of the indices.
            if wanted {
                let offset = ENTRIES + 8 * usize::from(self.size);
                self.used.store_u16(offset, self.next_available, Ordering::Relaxed);
            }
        } else {
            self.used.store_u16(FLAGS, if wanted { 0 } else { NO_NOTIFY }, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        wanted && self.has_available()
    }
}
