//! The log of a packed ring (`QueueRegionPacked`).
//!
//! Used descriptors overwrite available ones, so the log keeps copies: chains of entries from a free list. New values
//! stand beside the old ones, and the first used descriptor in the ring decides which are valid.

use std::sync::atomic::Ordering;

use super::{LogError, Region};
use crate::packed::{Descriptor, Place};

/// Offsets in the header. The used indices and wrap counters are written as one number: otherwise a crash could leave
/// the index of one lap with the counter of another.
const FREE_HEAD_AT: usize = 12;
const OLD_FREE_HEAD_AT: usize = 14;
const USED_AT: usize = 16;
/// The offset and length of the entries, and offsets in an entry (`DescStatePacked`).
const ENTRIES_BEGIN: usize = 32;
const ENTRY_BYTES: usize = 32;
const IN_FLIGHT: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const COUNT: usize = 6;
const COUNTER: usize = 8;
const ID: usize = 16;
const FLAGS: usize = 18;
const LENGTH: usize = 20;
const ADDRESS: usize = 24;

/// As for split rings: another process sees a prefix of the stores.
const IN_ORDER: Ordering = Ordering::Release;

/// Keeps copies of the chains in flight.
#[derive(Debug)]
pub(crate) struct PackedLog {
    region: Region,
    counter: u64,
    /// The first free entry, a private copy of the number in memory.
    free: u16,
    used: Place,
}

/// The contents of a log.
#[derive(Debug)]
pub(crate) struct LogContents {
    /// The place of the next used descriptor.
    pub(crate) used: Place,
    /// The chains in flight in the order in which they were taken, each with its number of descriptors.
    pub(crate) entries: Vec<(u16, u16)>,
    /// The number of their descriptors.
    pub(crate) descriptors: u16,
}

impl PackedLog {
    /// Opens the log of a queue. `used` is where a new log begins. `still_available` returns whether the descriptor
    /// at a place of the ring is available in that lap; `None` if there is no such place.
    pub(crate) fn open(
        region: Region,
        size: u16,
        used: Place,
        still_available: impl Fn(Place) -> Option<bool>,
    ) -> Result<(Self, Option<LogContents>), LogError> {
        let is_valid = region.is_valid(size)?;
        let mut log = Self { region, counter: 0, free: 0, used };
        if !is_valid {
            log.begin();
            return Ok((log, None));
        }
        log.finish_last_batch(still_available)?;
        let free = log.sweep()?;
        let found = log.find(size, free)?;
        Ok((log, Some(found)))
    }

    fn begin(&mut self) {
        for entry in 0..self.region.entries {
            self.set_in_flight(entry, false);
            // The last one leads past the end.
            self.store(entry_at(entry) + NEXT, entry + 1);
        }
        self.store(FREE_HEAD_AT, 0);
        self.store(OLD_FREE_HEAD_AT, 0);
        self.store_used(self.used, self.used);
        self.region.set_valid();
    }

    /// Completes the last batch if the driver has seen it, otherwise undoes it.
    fn finish_last_batch(&mut self, still_available: impl Fn(Place) -> Option<bool>) -> Result<(), LogError> {
        let (used, old) = self.load_used();
        let available = still_available(old).ok_or(LogError::Nonsense("the used index is outside the ring"))?;
        if used != old && !available {
            let free = self.load(FREE_HEAD_AT);
            self.store(OLD_FREE_HEAD_AT, free);
            self.store_used(used, used);
            self.used = used;
        } else {
            self.store_used(old, old);
            self.used = old;
        }
        self.free = self.load(OLD_FREE_HEAD_AT);
        self.store(FREE_HEAD_AT, self.free);
        Ok(())
    }

    /// Marks the entries of the free list as not in flight; returns their number.
    fn sweep(&mut self) -> Result<u16, LogError> {
        let (mut entry, mut count) = (self.free, 0);
        while entry < self.region.entries {
            if count == self.region.entries {
                return Err(LogError::Nonsense("the free entries are a loop"));
            }
            self.set_in_flight(entry, false);
            entry = self.load(entry_at(entry) + NEXT);
            count += 1;
        }
        Ok(count)
    }

    fn find(&mut self, size: u16, free: u16) -> Result<LogContents, LogError> {
        let mut found: Vec<(u64, u16, u16)> = Vec::new();
        let mut descriptors: u32 = 0;
        for entry in 0..self.region.entries {
            if self.region.cells.load_u8(entry_at(entry) + IN_FLIGHT, Ordering::Relaxed) == 1 {
                let count = self.load(entry_at(entry) + COUNT);
                found.push((self.region.cells.load_u64(entry_at(entry) + COUNTER, Ordering::Relaxed), entry, count));
                descriptors += u32::from(count);
            }
        }
        if descriptors + u32::from(free) != u32::from(self.region.entries) {
            return Err(LogError::Nonsense("some entries are neither free nor in flight"));
        }
        let descriptors = u16::try_from(descriptors).ok().filter(|descriptors| *descriptors <= size);
        let descriptors = descriptors.ok_or(LogError::Nonsense("more descriptors are in flight than the queue has"))?;
        found.sort_unstable();
        self.counter = found.last().map_or(0, |(counter, ..)| counter.wrapping_add(1));
        let entries = found.into_iter().map(|(_, entry, count)| (entry, count)).collect();
        Ok(LogContents { used: self.used, entries, descriptors })
    }

    /// Records a chain that the device has taken. Returns its entry.
    #[inline]
    pub(crate) fn take(&mut self, descriptors: &[Descriptor]) -> Result<u16, LogError> {
        let head = self.free;
        let mut last = head;
        for (number, descriptor) in descriptors.iter().enumerate() {
            let entry = self.free;
            if entry >= self.region.entries {
                return Err(LogError::Nonsense("no entry is free"));
            }
            if number == 0 {
                self.store(entry_at(head) + COUNT, u16::try_from(descriptors.len()).unwrap_or(0));
                self.region.cells.store_u64(entry_at(head) + COUNTER, self.counter, IN_ORDER);
                self.counter = self.counter.wrapping_add(1);
                self.set_in_flight(head, true);
            }
            self.write(entry, descriptor);
            (last, self.free) = (entry, self.load(entry_at(entry) + NEXT));
        }
        self.store(entry_at(head) + LAST, last);
        self.store(FREE_HEAD_AT, self.free);
        // Before this store the entries are on the old free list, and the chain is not recorded.
        self.store(OLD_FREE_HEAD_AT, self.free);
        Ok(head)
    }

    fn write(&mut self, entry: u16, descriptor: &Descriptor) {
        let at = entry_at(entry);
        self.store(at + ID, descriptor.id);
        self.store(at + FLAGS, descriptor.flags);
        self.region.cells.store_u32(at + LENGTH, descriptor.bytes, IN_ORDER);
        self.region.cells.store_u64(at + ADDRESS, descriptor.address, IN_ORDER);
    }

    /// Reads a chain of `count` descriptors that is in flight.
    pub(crate) fn read(&self, (head, count): (u16, u16), out: &mut Vec<Descriptor>) -> Result<(), LogError> {
        out.clear();
        let mut entry = head;
        for _ in 0..count {
            if entry >= self.region.entries {
                return Err(LogError::Nonsense("a chain leads nowhere"));
            }
            let at = entry_at(entry);
            out.push(Descriptor {
                address: self.region.cells.load_u64(at + ADDRESS, Ordering::Relaxed),
                bytes: self.region.cells.load_u32(at + LENGTH, Ordering::Relaxed),
                id: self.load(at + ID),
                flags: self.load(at + FLAGS),
            });
            entry = self.load(at + NEXT);
        }
        match out.is_empty() {
            false => Ok(()),
            true => Err(LogError::Nonsense("a chain has no descriptors")),
        }
    }

    /// Records a batch that is about to be published, after which the used index will be `used`.
    #[inline]
    pub(crate) fn begin_publish(&mut self, batch: impl Iterator<Item = u16>, used: Place) {
        for head in batch {
            // A wrong entry, which only the front end can cause, must not lead outside.
            let last = self.load(entry_at(head) + LAST).min(self.region.entries - 1);
            self.store(entry_at(last) + NEXT, self.free);
            self.free = head;
            self.store(FREE_HEAD_AT, head);
        }
        self.store_used(used, self.used);
    }

    /// Records that the batch was published.
    #[inline]
    pub(crate) fn end_publish(&mut self, batch: impl Iterator<Item = u16>, used: Place) {
        for head in batch {
            self.set_in_flight(head, false);
        }
        self.store(OLD_FREE_HEAD_AT, self.free);
        self.store_used(used, used);
        self.used = used;
    }

    fn set_in_flight(&mut self, entry: u16, value: bool) {
        self.region.cells.store_u8(entry_at(entry) + IN_FLIGHT, u8::from(value), IN_ORDER);
    }

    /// `used_idx`, `old_used_idx`, `used_wrap_counter` and `old_used_wrap_counter`, with two bytes of padding.
    fn store_used(&mut self, used: Place, old: Place) {
        let indices = u64::from(used.index) | u64::from(old.index) << 16;
        let wraps = u64::from(used.wrap) | u64::from(old.wrap) << 8;
        self.region.cells.store_u64(USED_AT, indices | wraps << 32, IN_ORDER);
    }

    fn load_used(&self) -> (Place, Place) {
        let [a, b, c, d, used_wrap, old_wrap, _, _] =
            self.region.cells.load_u64(USED_AT, Ordering::Relaxed).to_le_bytes();
        let place = |index, wrap: u8| Place { index: u16::from_le_bytes(index), wrap: wrap != 0 };
        (place([a, b], used_wrap), place([c, d], old_wrap))
    }

    fn load(&self, offset: usize) -> u16 {
        self.region.cells.load_u16(offset, Ordering::Relaxed)
    }

    fn store(&mut self, offset: usize, value: u16) {
        self.region.cells.store_u16(offset, value, IN_ORDER);
    }
}

fn entry_at(entry: u16) -> usize {
    ENTRIES_BEGIN + ENTRY_BYTES * usize::from(entry)
}
