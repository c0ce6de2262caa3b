//! A packed virtqueue (VIRTIO 1.3, section 2.8).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::descriptor::{DESCRIPTOR_BYTES, Extent, INDIRECT, NEXT, WRITE, add, copy_out, indirect_table};
use super::{Begin, ChainError, PopOutcome, RingError, RingSetup};
use crate::QUEUE_SIZE_MAX;
use crate::chain::Chain;
use crate::inflight::{PackedLog, Region};
use crate::memory::Memory;
use crate::packed::{AVAILABLE, Descriptor, Place, USED};
use crate::shared::Cells;

/// Offsets in a descriptor.
const LENGTH: usize = 8;
const ID: usize = 12;
const FLAGS: usize = 14;

/// An event suppression structure (2.8.10): the descriptor with its wrap counter, and the flags in the upper half.
const EVENT_BYTES: usize = 4;
pub(super) const EVENT_ENABLE: u32 = 0;
pub(super) const EVENT_DISABLE: u32 = 1;
pub(super) const EVENT_DESCRIPTOR: u32 = 2;

/// A completed chain.
#[derive(Debug)]
struct UsedChain {
    id: u16,
    descriptors: u16,
    entry: u16,
    written: u32,
}

/// A packed virtqueue of the guest.
#[derive(Debug)]
pub(crate) struct PackedRing {
    memory: Arc<Memory>,
    size: u16,
    descriptors: Cells,
    driver_event: Cells,
    device_event: Cells,
    event_index: bool,
    indirect: bool,
    /// The next descriptor to take.
    available: Place,
    /// The place of the next used descriptor.
    used: Place,
    /// The chain being taken.
    taken: Vec<Descriptor>,
    /// Completed chains that are not published yet.
    batch: Vec<UsedChain>,
    /// The in-flight log, for the next server.
    log: Option<PackedLog>,
    /// Chains that were in flight when the previous server ended, by their entry in the log and number of
    /// descriptors.
    resubmitted: VecDeque<(u16, u16)>,
}

impl PackedRing {
    pub(super) fn new(
        memory: Arc<Memory>,
        setup: &RingSetup,
        begin: Begin,
        region: Option<Region>,
    ) -> Result<Self, RingError> {
        let size = u16::try_from(setup.size).ok().filter(|size| (1..=QUEUE_SIZE_MAX).contains(size));
        let size = size.ok_or(RingError::Size(setup.size))?;
        let addresses = setup.addresses;
        let part = |part, address, bytes, align| {
            memory.part(address, bytes, align).ok_or(RingError::Address { part, address })
        };
        let ring_bytes = DESCRIPTOR_BYTES as usize * usize::from(size);
        let descriptors = part("descriptor ring", addresses.descriptors, ring_bytes, 16)?;
        let driver_event = part("driver's event structure", addresses.available, EVENT_BYTES, 4)?;
        let device_event = part("device's event structure", addresses.used, EVENT_BYTES, 4)?;
        let mut ring = Self {
            memory,
            size,
            descriptors,
            driver_event,
            device_event,
            event_index: setup.event_index,
            indirect: setup.indirect,
            available: Place::FRESH,
            used: Place::FRESH,
            taken: Vec::new(),
            batch: Vec::new(),
            log: None,
            resubmitted: VecDeque::new(),
        };
        ring.begin(begin)?;
        if let Some(region) = region {
            ring.recover(region, begin)?;
        }
        Ok(ring)
    }

    fn begin(&mut self, begin: Begin) -> Result<(), RingError> {
        let (Begin::At(base) | Begin::Resume(base)) = begin;
        let size = self.size;
        (self.available, self.used) = (Place::from_bits(base), Place::from_bits(base >> 16));
        if let Begin::At(base) = begin {
            // Some front ends (User-mode Linux) begin a ring at 0, although its wrap counters begin at 1. A ring that
            // has reached 0 in use has heads of the previous lap with the USED flag; a new one has none.
            if base == 0 && (0..size).all(|index| self.flags(index, Ordering::Acquire) & USED == 0) {
                self.available = Place::FRESH;
            }
            if base >> 16 == 0 {
                self.used = self.available;
            }
        }
        let possible = self.available.index < size && self.used.index < size;
        match possible && self.available.ahead_of(self.used, size).is_some() {
            true => Ok(()),
            false => Err(RingError::Base { base, size }),
        }
    }

    fn recover(&mut self, region: Region, begin: Begin) -> Result<(), RingError> {
        let (descriptors, size) = (self.descriptors, self.size);
        let still_available = |place: Place| {
            let at = DESCRIPTOR_BYTES as usize * usize::from(place.index) + FLAGS;
            (place.index < size).then(|| place.is_available(descriptors.load_u16(at, Ordering::Acquire)))
        };
        let may_be_other_guests =
            region.may_belong_to_other_guest() && matches!(begin, Begin::At(_)) && self.is_fresh();
        let (mut log, mut found) = PackedLog::open(region.clone(), self.size, self.used, still_available)?;
        // A log in which nothing was used is harmless: the ring has the same chains.
        if may_be_other_guests && found.as_ref().is_some_and(|found| found.used != Place::FRESH) {
            tracing::debug!("discarding the in-flight log of an earlier ring");
            region.reset();
            (log, found) = PackedLog::open(region, self.size, self.used, still_available)?;
        }
        self.log = Some(log);
        if let (Some(found), Begin::At(_)) = (found, begin) {
            // Every taken chain is either used or in flight.
            let base = u32::from(found.used.to_bits()) << 16;
            let fits = found.used.index < size && found.descriptors <= size;
            self.used = fits.then_some(found.used).ok_or(RingError::Base { base, size })?;
            self.available = found.used.after(found.descriptors, size);
            self.resubmitted = found.entries.into();
        }
        Ok(())
    }

    /// Whether no descriptor was ever used: the first ones are available in the first lap, and the others are still
    /// zero.
    fn is_fresh(&self) -> bool {
        let blank = |index| {
            let (address, rest) = copy_out(self.descriptors.start(), index);
            address == 0 && rest == [0; 8]
        };
        let first_lap = |index: &u16| self.flags(*index, Ordering::Acquire) & (AVAILABLE | USED) == AVAILABLE;
        let mut rest = (0..self.size).skip_while(first_lap).peekable();
        (self.available, self.used) == (Place::FRESH, Place::FRESH) && rest.peek().is_some() && rest.all(blank)
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(super) fn set_memory(&mut self, memory: Arc<Memory>) {
        self.memory = memory;
    }

    pub(super) fn position(&self) -> u32 {
        u32::from(self.used.to_bits()) << 16 | u32::from(self.available.to_bits())
    }

    #[inline]
    fn flags(&self, index: u16, order: Ordering) -> u16 {
        self.descriptors.load_u16(DESCRIPTOR_BYTES as usize * usize::from(index) + FLAGS, order)
    }

    pub(super) fn is_recovering(&self) -> bool {
        !self.resubmitted.is_empty()
    }

    #[inline]
    pub(super) fn has_available(&self) -> bool {
        // Acquire: orders the flags before the descriptor and those after it.
        self.available.is_available(self.flags(self.available.index, Ordering::Acquire)) || !self.resubmitted.is_empty()
    }

    #[inline]
    pub(super) fn used_event_if_behind(&self, least: u16, wholly: bool) -> Option<u16> {
        let event_flags = self.driver_event.load_u32(0, Ordering::Relaxed);
        if !self.event_index || event_flags >> 16 & 3 != EVENT_DESCRIPTOR || !self.resubmitted.is_empty() {
            return None;
        }
        let event = Place::from_bits(event_flags & 0xffff);
        let unseen = self.used.ahead_of(event, self.size).filter(|unseen| *unseen >= least)?;
        // As many descriptors are available if the last of them is.
        let last = self.available.after(unseen.checked_sub(1)?, self.size);
        (wholly || !last.is_available(self.flags(last.index, Ordering::Acquire))).then_some(event.to_bits())
    }

    pub(super) fn size(&self) -> u16 {
        self.size
    }

    #[inline]
    pub(super) fn pop(&mut self, chain: &mut Chain) -> Result<PopOutcome, RingError> {
        chain.clear();
        if let Some(entry) = self.resubmitted.pop_front() {
            let log = self.log.as_ref().expect("entries come from a log");
            log.read(entry, &mut self.taken)?;
            let popped = self.take(entry.0, chain);
            chain.resubmitted = true;
            return Ok(popped);
        }
        if !self.available.is_available(self.flags(self.available.index, Ordering::Acquire)) {
            return Ok(PopOutcome::Empty);
        }
        self.collect()?;
        let entry = match &mut self.log {
            Some(log) => log.take(&self.taken)?,
            None => 0,
        };
        Ok(self.take(entry, chain))
    }

    /// Copies the next chain's descriptors out of the ring.
    #[inline]
    fn collect(&mut self) -> Result<(), RingError> {
        self.taken.clear();
        let out = self.available.ahead_of(self.used, self.size).unwrap_or(self.size);
        let mut place = self.available;
        loop {
            // A driver with more in flight than the ring holds has overwritten descriptors.
            if self.taken.len() >= usize::from(self.size - out) {
                return Err(RingError::Overrun(self.size));
            }
            let (address, [a, b, c, d, id_low, id_high, flags_low, flags_high]) =
                copy_out(self.descriptors.start(), place.index);
            let flags = u16::from_le_bytes([flags_low, flags_high]);
            let (bytes, id) = (u32::from_le_bytes([a, b, c, d]), u16::from_le_bytes([id_low, id_high]));
            self.taken.push(Descriptor { address, bytes, id, flags });
            place = place.after(1, self.size);
            if flags & NEXT == 0 {
                break;
            }
        }
        self.available = place;
        Ok(())
    }

    /// Translates the chain that was collected.
    #[inline]
    fn take(&mut self, entry: u16, chain: &mut Chain) -> PopOutcome {
        // The last descriptor has the buffer's identifier (2.8.6).
        chain.id = self.taken.last().map_or(0, |last| last.id);
        chain.descriptors = u16::try_from(self.taken.len()).unwrap_or(u16::MAX);
        chain.entry = entry;
        match self.translate(chain) {
            Ok(()) => PopOutcome::Chain,
            Err(error) => {
                chain.clear();
                self.push(chain, 0);
                PopOutcome::Dropped(error)
            }
        }
    }

    fn translate(&self, chain: &mut Chain) -> Result<(), ChainError> {
        for descriptor in &self.taken {
            let &Descriptor { address, bytes, flags, .. } = descriptor;
            let extent = Extent { address, bytes };
            match flags & INDIRECT {
                0 => add(chain, &self.memory, extent, flags)?,
                _ if !self.indirect => return Err(ChainError::IndirectUnexpected),
                _ if self.taken.len() > 1 => return Err(ChainError::IndirectNested),
                _ => self.translate_table(chain, extent)?,
            }
        }
        Ok(())
    }

    /// An indirect table is a sequence of descriptors (2.8.7).
    fn translate_table(&self, chain: &mut Chain, extent: Extent) -> Result<(), ChainError> {
        let (table, entries) = indirect_table(&self.memory, extent)?;
        for index in 0..entries {
            let (address, [a, b, c, d, _, _, flags_low, flags_high]) = copy_out(table, index);
            let flags = u16::from_le_bytes([flags_low, flags_high]);
            if flags & INDIRECT != 0 {
                return Err(ChainError::IndirectNested);
            }
            add(chain, &self.memory, Extent { address, bytes: u32::from_le_bytes([a, b, c, d]) }, flags)?;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn push(&mut self, chain: &Chain, written: u32) {
        let &Chain { id, descriptors, entry, .. } = chain;
        self.batch.push(UsedChain { id, descriptors, entry, written });
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        if self.batch.is_empty() {
            return false;
        }
        let first = self.used;
        let mut place = first;
        let mut count: u32 = 0;
        for done in &self.batch {
            place = place.after(done.descriptors, self.size);
            count += u32::from(done.descriptors);
        }
        if let Some(log) = &mut self.log {
            log.begin_publish(self.batch.iter().map(|done| done.entry), place);
        }
        self.write_used(first);
        self.used = place;
        if let Some(log) = &mut self.log {
            log.end_publish(self.batch.iter().map(|done| done.entry), place);
        }
        self.batch.clear();
        // The descriptors must be visible before the driver's event structure is read, or both sides may wait for
        // each other.
        fence(Ordering::SeqCst);
        self.wants_signal(count)
    }

    /// Writes the batch. The first descriptor is written last, so the driver sees all of them or none.
    #[inline]
    fn write_used(&self, first: Place) {
        let mut place = first;
        let mut first_flags = 0;
        for (number, done) in self.batch.iter().enumerate() {
            let at = DESCRIPTOR_BYTES as usize * usize::from(place.index);
            let flags = place.used_flags() | if done.written > 0 { WRITE } else { 0 };
            self.descriptors.store_u32(at + LENGTH, done.written, Ordering::Relaxed);
            self.descriptors.store_u16(at + ID, done.id, Ordering::Relaxed);
            match number {
                0 => first_flags = flags,
                _ => self.descriptors.store_u16(at + FLAGS, flags, Ordering::Release),
            }
            place = place.after(done.descriptors, self.size);
        }
        let at = DESCRIPTOR_BYTES as usize * usize::from(first.index) + FLAGS;
        self.descriptors.store_u16(at, first_flags, Ordering::Release);
    }

    /// Whether the driver wants a signal for the last `count` descriptors (2.8.10, 2.8.22).
    #[inline]
    fn wants_signal(&self, count: u32) -> bool {
        let event_flags = self.driver_event.load_u32(0, Ordering::Relaxed);
        match event_flags >> 16 & 3 {
            EVENT_DISABLE => return false,
            EVENT_DESCRIPTOR if self.event_index => {}
            _ => return true,
        }
        let event = Place::from_bits(event_flags & 0xffff);
        // Both relative to the beginning of the used index's lap.
        let (new, size) = (i64::from(self.used.index), i64::from(self.size));
        let event = i64::from(event.index) - if event.wrap == self.used.wrap { 0 } else { size };
        (new - i64::from(count)..new).contains(&event)
    }

    #[inline]
    pub(super) fn want_kicks(&mut self, wanted: bool) -> bool {
        let event = match (wanted, self.event_index) {
            (false, _) => EVENT_DISABLE << 16,
            (true, false) => EVENT_ENABLE << 16,
            (true, true) => EVENT_DESCRIPTOR << 16 | u32::from(self.available.to_bits()),
        };
        self.device_event.store_u32(0, event, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        wanted && self.has_available()
    }
}
