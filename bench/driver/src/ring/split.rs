//! A split virtqueue (virtio 1.3, section 2.7).

use std::sync::atomic::{Ordering, fence};

use super::{DESCRIPTOR_BYTES, Used, event_passed};
use crate::memory::{Buffer, Window};

const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;
/// How many completions may pass before a suppressed used event is moved on; well below half of 2^16.
const SUPPRESS_REFRESH: u16 = 0x2000;

/// A split virtqueue in guest memory, seen by its driver.
#[derive(Debug)]
pub struct SplitRing {
    size: u16,
    event_idx: bool,
    table: Buffer,
    avail: Buffer,
    used: Buffer,
    /// What the available index will be after the next [`SplitRing::publish`].
    next_avail: u16,
    /// The available index at the last [`SplitRing::publish`].
    published: u16,
    /// The first used entry not yet seen.
    next_used: u16,
    /// `next_used` when notifications were last suppressed.
    suppressed_at: u16,
}

impl SplitRing {
    /// A ring of `size` (a power of two) entries in three zeroed buffers of [`SplitRing::table_bytes`],
    /// [`SplitRing::avail_bytes`] and [`SplitRing::used_bytes`].
    pub fn new(size: u16, event_idx: bool, table: Buffer, avail: Buffer, used: Buffer) -> Self {
        assert!(size.is_power_of_two(), "a split ring's size is a power of two");
        Self { size, event_idx, table, avail, used, next_avail: 0, published: 0, next_used: 0, suppressed_at: 0 }
    }

    /// Size of the descriptor table.
    pub fn table_bytes(size: u16) -> usize {
        usize::from(size) * DESCRIPTOR_BYTES
    }

    /// Size of the available ring, with its event field.
    pub fn avail_bytes(size: u16) -> usize {
        6 + 2 * usize::from(size)
    }

    /// Size of the used ring, with its event field.
    pub fn used_bytes(size: u16) -> usize {
        6 + 8 * usize::from(size)
    }

    /// The number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The descriptor table.
    pub fn table(&self) -> &Window {
        &self.table
    }

    /// The available ring: flags, index, entries, used event.
    pub fn avail(&self) -> &Window {
        &self.avail
    }

    /// The used ring: flags, index, entries, available event.
    pub fn used(&self) -> &Window {
        &self.used
    }

    /// The index of the first used entry not yet seen.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// The available index that the next [`SplitRing::publish`] shows.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Puts `head` into the available ring. The device sees it after [`SplitRing::publish`].
    #[inline]
    pub fn push(&mut self, head: u16) {
        let slot = usize::from(self.next_avail & (self.size - 1));
        self.avail.store_u16(4 + 2 * slot, head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Moves the index on by `entries` without writing entries (the next [`SplitRing::publish`] shows it).
    pub fn jump(&mut self, entries: u16) {
        self.next_avail = self.next_avail.wrapping_add(entries);
    }

    /// Shows the device what was pushed; says whether it wants a kick for it.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.next_avail);
        // Release: the device that sees the index sees descriptors, entries and request bytes.
        self.avail.store_u16(2, self.next_avail, Ordering::Release);
        // The store above must be visible before the load below, or both sides could go to sleep (2.7.13.4.1).
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.used.load_u16(4 + 8 * usize::from(self.size), Ordering::Relaxed);
            event_passed(event, self.next_avail, old)
        } else {
            self.used.load_u16(0, Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    /// Whether a used entry waits.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.used.load_u16(2, Ordering::Acquire) != self.next_used
    }

    /// How many used entries wait, by the device's word.
    #[inline]
    pub fn waiting_used(&self) -> u16 {
        self.used.load_u16(2, Ordering::Acquire).wrapping_sub(self.next_used)
    }

    /// The next used entry, if there is one.
    #[inline]
    pub fn pop(&mut self) -> Option<Used> {
        // Acquire: a thread that sees the index sees the entry and what the device wrote.
        if !self.has_used() {
            return None;
        }
        Some(self.pop_ready())
    }

    /// The next used entry, of which [`SplitRing::waiting_used`] has said that it is there.
    #[inline]
    pub fn pop_ready(&mut self) -> Used {
        let slot = usize::from(self.next_used & (self.size - 1));
        self.next_used = self.next_used.wrapping_add(1);
        Used { id: self.used.load_u32(4 + 8 * slot), len: self.used.load_u32(8 + 8 * slot) }
    }

    /// Asks the device for a call at the next used entry. True when one has come in the meantime: do not sleep.
    pub fn want_call(&mut self) -> bool {
        if self.event_idx {
            self.avail.store_u16(self.used_event_at(), self.next_used, Ordering::Relaxed);
        } else {
            self.avail.store_u16(0, 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.has_used()
    }

    /// Asks the device for no calls.
    pub fn suppress_calls(&mut self) {
        self.suppressed_at = self.next_used;
        if self.event_idx {
            // An event that lies behind: it is not passed again until the index has gone all the way round.
            self.avail.store_u16(self.used_event_at(), self.next_used.wrapping_sub(1), Ordering::Relaxed);
        } else {
            self.avail.store_u16(0, NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    /// Keeps calls suppressed over any number of completions; to be called now and then while polling.
    #[inline]
    pub fn keep_suppressed(&mut self) {
        if self.event_idx && self.next_used.wrapping_sub(self.suppressed_at) >= SUPPRESS_REFRESH {
            self.suppress_calls();
        }
    }

    /// Starts over at available and used index `base`, as after GET_VRING_BASE and SET_VRING_BASE.
    pub fn restart(&mut self, base: u16) {
        (self.next_avail, self.published) = (base, base);
        self.next_used = self.used.load_u16(2, Ordering::Acquire);
        self.avail.store_u16(2, base, Ordering::Release);
    }

    fn used_event_at(&self) -> usize {
        4 + 2 * usize::from(self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    fn ring(size: u16, event_idx: bool) -> SplitRing {
        let memory = Memory::new(1 << 20, 1).unwrap();
        let alloc = |bytes| memory.alloc(bytes, 4096).unwrap();
        SplitRing::new(
            size,
            event_idx,
            alloc(SplitRing::table_bytes(size)),
            alloc(SplitRing::avail_bytes(size)),
            alloc(SplitRing::used_bytes(size)),
        )
    }

    /// What a device would do: complete the entry at `index`.
    fn complete(ring: &SplitRing, index: u16, used: Used) {
        let slot = usize::from(index & (ring.size() - 1));
        ring.used().store_u32(4 + 8 * slot, used.id);
        ring.used().store_u32(8 + 8 * slot, used.len);
        ring.used().store_u16(2, index.wrapping_add(1), Ordering::Release);
    }

    #[test]
    fn entries_go_round_past_the_index_wrap() {
        let mut ring = ring(8, false);
        for n in 0..70_000_u32 {
            let index = u16::try_from(n % 65536).unwrap();
            ring.push(index % 8);
            assert!(ring.publish());
            assert_eq!(ring.avail().load_u16(2, Ordering::Acquire), index.wrapping_add(1));
            assert_eq!(ring.pop(), None);
            complete(&ring, index, Used { id: n % 8, len: n });
            assert_eq!(ring.pop(), Some(Used { id: n % 8, len: n }));
        }
    }

    #[test]
    fn kicks_follow_the_device() {
        let mut plain = ring(8, false);
        plain.used().store_u16(0, NO_NOTIFY, Ordering::Relaxed);
        plain.push(0);
        assert!(!plain.publish());

        let mut event = ring(8, true);
        event.used().store_u16(4 + 8 * 8, 1, Ordering::Relaxed); // The device wants to hear of entry 1.
        event.push(0);
        assert!(!event.publish());
        event.push(1);
        assert!(event.publish());
        event.push(2);
        assert!(!event.publish());
    }

    #[test]
    fn a_suppressed_event_is_never_passed() {
        let mut ring = ring(8, true);
        ring.suppress_calls();
        for n in 0..200_000_u32 {
            let index = u16::try_from(n % 65536).unwrap();
            complete(&ring, index, Used { id: 0, len: 0 });
            let event = ring.avail().load_u16(4 + 2 * 8, Ordering::Relaxed);
            assert!(!event_passed(event, index.wrapping_add(1), index));
            ring.pop();
            ring.keep_suppressed();
        }
        assert!(!ring.want_call());
        assert_eq!(ring.avail().load_u16(4 + 2 * 8, Ordering::Relaxed), ring.next_used());
    }
}
