//! Records in the shared memory: allocated and freed by one server, read by the next.
//!
//! ```text
//! slot, 16 words:  state (epoch 32 | bytes 16 | kind 8 | 0) | next slot + 1 | count | bytes, 13 words
//! ```
//!
//! A long record continues in further slots. Its state is stored last and cleared first, so a reader finds it
//! completely or not at all, wherever the writer was killed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ferry_vfs::sync::lock;

/// Words of a slot.
pub(crate) const WORDS: usize = 16;
const STATE: usize = 0;
const NEXT: usize = 1;
const COUNT: usize = 2;
const BYTES: usize = 3;
/// Bytes of a record per slot.
const BYTES_EACH: usize = (WORDS - BYTES) * 8;
/// The maximum length of a record in bytes: more than an inode with the longest name.
pub(crate) const BYTES_MAX: usize = 8 * BYTES_EACH;
/// The type of slots that continue a record.
const CONTINUED: u8 = 255;

/// A stored record. After its epoch has ended the memory may be reused; the slot is then invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub(crate) index: u32,
    pub(crate) epoch: u32,
}

/// The free slots, known only to the writer.
#[derive(Debug, Default)]
struct Free {
    slots: Vec<u32>,
    /// Slots from this index were never used.
    fresh: u32,
    epoch: u32,
}

/// The writer's side of the slots.
#[derive(Debug, Default)]
pub(crate) struct Slots(Mutex<Free>);

/// A record that was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FoundRecord {
    pub(crate) slot: Slot,
    pub(crate) kind: u8,
    pub(crate) count: u64,
    pub(crate) bytes: Vec<u8>,
}

fn state(kind: u8, bytes: usize, epoch: u32) -> u64 {
    u64::from(epoch) << 32 | (bytes as u64) << 8 | u64::from(kind)
}

fn slot(memory: &[AtomicU64], index: u32) -> &[AtomicU64] {
    let start = index as usize * WORDS;
    memory.get(start..start + WORDS).unwrap_or_default()
}

impl Slots {
    fn free(&self) -> std::sync::MutexGuard<'_, Free> {
        lock(&self.0)
    }

    /// Returns the number of slots ever used.
    pub(crate) fn high_water(&self) -> u32 {
        self.free().fresh
    }

    /// Forgets everything.
    pub(crate) fn begin(&self, epoch: u32) {
        *self.free() = Free { epoch, ..Free::default() };
    }

    /// Takes the slots for a record of this length; `None` if there is no room, or the epoch has ended.
    fn take(&self, epoch: u32, bytes: usize, slots_max: usize) -> Option<Vec<u32>> {
        let needed = bytes.div_ceil(BYTES_EACH).max(1);
        let mut free = self.free();
        let room = free.slots.len() + (slots_max - (free.fresh as usize).min(slots_max));
        if free.epoch != epoch || bytes > BYTES_MAX || room < needed {
            return None;
        }
        let mut taken = Vec::with_capacity(needed);
        for _ in 0..needed {
            let index = free.slots.pop().unwrap_or_else(|| {
                free.fresh += 1;
                free.fresh - 1
            });
            taken.push(index);
        }
        Some(taken)
    }

    /// Writes a record without its state: [`Self::commit`] makes it valid.
    pub(crate) fn prepare(&self, memory: &[AtomicU64], epoch: u32, bytes: &[u8], count: u64) -> Option<Slot> {
        let taken = self.take(epoch, bytes.len(), memory.len() / WORDS)?;
        for (number, index) in taken.iter().enumerate() {
            let words = slot(memory, *index);
            let part = bytes.get(number * BYTES_EACH..).unwrap_or_default();
            let part = &part[..part.len().min(BYTES_EACH)];
            for (word, chunk) in words[BYTES..].iter().zip(part.chunks(8)) {
                let mut padded = [0; 8];
                padded[..chunk.len()].copy_from_slice(chunk);
                word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
            }
            let next = taken.get(number + 1).map_or(0, |next| u64::from(*next) + 1);
            words[NEXT].store(next, Ordering::Relaxed);
            words[COUNT].store(count, Ordering::Relaxed);
            if number > 0 {
                words[STATE].store(state(CONTINUED, 0, epoch), Ordering::Release);
            }
        }
        Some(Slot { index: taken[0], epoch })
    }

    /// Makes the record valid.
    pub(crate) fn commit(memory: &[AtomicU64], at: Slot, kind: u8, bytes: usize) {
        slot(memory, at.index)[STATE].store(state(kind, bytes, at.epoch), Ordering::Release);
    }

    /// Changes a record's count.
    #[inline]
    pub(crate) fn count(memory: &[AtomicU64], at: Slot, count: u64) {
        // After the end of its epoch a slot may belong to another record.
        let words = slot(memory, at.index);
        if words[STATE].load(Ordering::Relaxed) >> 32 == u64::from(at.epoch) {
            words[COUNT].store(count, Ordering::Release);
        }
    }

    /// Takes a record away.
    pub(crate) fn remove(&self, memory: &[AtomicU64], at: Slot) {
        let mut free = self.free();
        if free.epoch != at.epoch {
            return;
        }
        let mut next = Some(at.index);
        while let Some(index) = next {
            let words = slot(memory, index);
            words[STATE].store(0, Ordering::Release);
            next = u32::try_from(words[NEXT].load(Ordering::Relaxed)).ok().and_then(|next| next.checked_sub(1));
            free.slots.push(index);
        }
    }

    /// Reads the valid records of an epoch among the first `high_water` slots, and continues to write after them.
    pub(crate) fn load(&self, memory: &[AtomicU64], epoch: u32, high_water: u32) -> Vec<FoundRecord> {
        let slots_max = u32::try_from(memory.len() / WORDS).unwrap_or(u32::MAX);
        let high_water = high_water.min(slots_max);
        let mut used = vec![false; high_water as usize];
        let mut all = Vec::new();
        for index in 0..high_water {
            let state = slot(memory, index)[STATE].load(Ordering::Acquire);
            let (kind, length) = ((state & 0xff) as u8, (state >> 8 & 0xffff) as usize);
            if state >> 32 != u64::from(epoch) || kind == 0 || kind == CONTINUED || length > BYTES_MAX {
                continue;
            }
            if let Some((bytes, parts)) = read(memory, index, length, high_water) {
                parts.iter().for_each(|part| used[*part as usize] = true);
                let count = slot(memory, index)[COUNT].load(Ordering::Acquire);
                all.push(FoundRecord { slot: Slot { index, epoch }, kind, count, bytes });
            }
        }
        let unused = (0..high_water).filter(|index| !used[*index as usize]).collect::<Vec<_>>();
        for index in &unused {
            slot(memory, *index)[STATE].store(0, Ordering::Release);
        }
        *self.free() = Free { slots: unused, fresh: high_water, epoch };
        all
    }
}

/// Returns the bytes of a record, and its slots.
fn read(memory: &[AtomicU64], first: u32, length: usize, high_water: u32) -> Option<(Vec<u8>, Vec<u32>)> {
    let (mut bytes, mut parts, mut at) = (Vec::with_capacity(length + 8), Vec::new(), first);
    loop {
        let words = slot(memory, at);
        parts.push(at);
        for word in &words[BYTES..] {
            bytes.extend(word.load(Ordering::Relaxed).to_le_bytes());
        }
        if bytes.len() >= length {
            bytes.truncate(length);
            return Some((bytes, parts));
        }
        at = u32::try_from(words[NEXT].load(Ordering::Relaxed))
            .ok()?
            .checked_sub(1)
            .filter(|next| *next < high_water)?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLOTS: usize = 64;

    fn memory() -> Vec<AtomicU64> {
        (0..SLOTS * WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    fn put(slots: &Slots, memory: &[AtomicU64], bytes: &[u8], count: u64) -> Option<Slot> {
        let slot = slots.prepare(memory, 1, bytes, count)?;
        Slots::commit(memory, slot, 3, bytes.len());
        Some(slot)
    }

    proptest! {
        #[test]
        fn records_are_found_until_they_are_removed(steps in proptest::collection::vec((0..3u8, 0..400usize, any::<u8>()), 0..200)) {
            let (memory, mut slots) = (memory(), Slots::default());
            slots.begin(1);
            let mut model: Vec<(Slot, Vec<u8>, u64)> = Vec::new();
            for (step, length, byte) in steps {
                match (step, model.is_empty()) {
                    (0, _) | (_, true) => {
                        let bytes = vec![byte; length];
                        if let Some(slot) = put(&slots, &memory, &bytes, 1) {
                            model.push((slot, bytes, 1));
                        }
                    }
                    (1, false) => {
                        let (slot, ..) = model.swap_remove(length % model.len());
                        slots.remove(&memory, slot);
                    }
                    _ => {
                        let at = length % model.len();
                        model[at].2 = u64::from(byte);
                        Slots::count(&memory, model[at].0, u64::from(byte));
                    }
                }
                let high_water = slots.high_water();
                let after = Slots::default();
                let mut found: Vec<_> = after.load(&memory, 1, high_water).into_iter().map(|one| (one.slot, one.bytes, one.count)).collect();
                found.sort_by_key(|(slot, ..)| slot.index);
                model.sort_by_key(|(slot, ..)| slot.index);
                prop_assert_eq!(&found, &model);
                slots = after;
            }
        }

        #[test]
        fn any_memory_is_read_without_a_panic(words in proptest::collection::vec(any::<u64>(), 8 * WORDS), small in any::<u64>()) {
            let memory: Vec<AtomicU64> = words.iter().map(|word| AtomicU64::new(word & small)).collect();
            for found in Slots::default().load(&memory, 0, u32::MAX) {
                prop_assert!(found.bytes.len() <= BYTES_MAX);
            }
        }
    }

    #[test]
    fn slots_of_another_epoch_are_ignored() {
        let (memory, slots) = (memory(), Slots::default());
        slots.begin(1);
        let old = put(&slots, &memory, b"old", 1).expect("there is room");
        slots.begin(2);
        assert!(slots.prepare(&memory, 1, b"late", 1).is_none());
        let new = slots.prepare(&memory, 2, b"new", 1).expect("there is room");
        Slots::commit(&memory, new, 3, 3);
        slots.remove(&memory, old);
        Slots::count(&memory, old, 9);
        let found = Slots::default().load(&memory, 2, slots.high_water());
        assert_eq!((found.len(), found[0].count, &*found[0].bytes), (1, 1, &b"new"[..]));
    }

    #[test]
    fn a_full_table_returns_none() {
        let (memory, slots) = (memory(), Slots::default());
        slots.begin(1);
        let put: Vec<_> = (0..=SLOTS).map(|_| put(&slots, &memory, b"x", 1)).collect();
        assert!(put[..SLOTS].iter().all(Option::is_some) && put[SLOTS].is_none());
        assert!(slots.prepare(&memory, 1, &[0; BYTES_MAX + 1], 1).is_none());
    }
}
