//! A packed virtqueue (virtio 1.3, section 2.8).

use std::sync::atomic::{Ordering, fence};

use super::{DESCRIPTOR_BYTES, Descriptor, NEXT, Used};
use crate::memory::{Buffer, Window};

/// Descriptor flags that say whose turn it is (2.8.1).
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Where a descriptor's fields lie.
const LENGTH: usize = 8;
const ID: usize = 12;
const FLAGS: usize = 14;
/// An event suppression structure (2.8.10): a place, and above it flags.
pub(super) const EVENT_BYTES: usize = 4;
const EVENT_ENABLE: u32 = 0;
const EVENT_DISABLE: u32 = 1;
const EVENT_DESCRIPTOR: u32 = 2;
const WRAP: u16 = 0x8000;

/// A place in the ring, and the wrap counter there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    index: u16,
    wrap: bool,
}

impl Place {
    #[inline]
    fn after(self, descriptors: u16, size: u16) -> Self {
        let index = self.index + descriptors;
        if index < size { Self { index, ..self } } else { Self { index: index - size, wrap: !self.wrap } }
    }

    fn to_bits(self) -> u16 {
        self.index | if self.wrap { WRAP } else { 0 }
    }

    fn from_bits(bits: u16) -> Self {
        Self { index: bits & !WRAP, wrap: bits & WRAP != 0 }
    }

    fn flags_at(self) -> usize {
        usize::from(self.index) * DESCRIPTOR_BYTES + FLAGS
    }
}

/// A packed virtqueue in guest memory, seen by its driver.
#[derive(Debug)]
pub struct PackedRing {
    size: u16,
    event_idx: bool,
    ring: Buffer,
    driver_event: Buffer,
    device_event: Buffer,
    next: Place,
    next_used: Place,
    /// The first descriptor pushed since the last [`PackedRing::publish`], and its flags: written last, so that the
    /// device sees all of them or none.
    held_back: Option<(Place, u16)>,
    /// Descriptors pushed since then.
    pushed: u16,
    /// Descriptors by identifier.
    lengths: Vec<u16>,
}

impl PackedRing {
    /// A ring of `size` entries in zeroed buffers: the descriptors, and the driver's and the device's event structures.
    pub fn new(size: u16, event_idx: bool, ring: Buffer, [driver_event, device_event]: [Buffer; 2]) -> Self {
        let fresh = Place { index: 0, wrap: true };
        Self {
            size,
            event_idx,
            ring,
            driver_event,
            device_event,
            next: fresh,
            next_used: fresh,
            held_back: None,
            pushed: 0,
            lengths: vec![0; usize::from(size)],
        }
    }

    /// The number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The descriptors, the driver's event structure, the device's.
    pub fn parts(&self) -> [&Window; 3] {
        [&self.ring, &self.driver_event, &self.device_event]
    }

    /// Writes a chain under the identifier `id`, one less than the size at most. The device sees it after
    /// [`PackedRing::publish`].
    #[inline]
    pub fn push(&mut self, id: u16, chain: &[Descriptor]) {
        let last = chain.len().saturating_sub(1);
        for (position, descriptor) in chain.iter().enumerate() {
            let place = self.next;
            let turn = if place.wrap { AVAILABLE } else { USED };
            let more = if position < last { NEXT } else { 0 };
            let flags = descriptor.flags & !NEXT | more | turn;
            let at = usize::from(place.index) * DESCRIPTOR_BYTES;
            self.ring.store_u64(at, descriptor.addr);
            self.ring.store_u32(at + LENGTH, descriptor.len);
            self.ring.store_u16(at + ID, id, Ordering::Relaxed);
            match self.held_back {
                None => self.held_back = Some((place, flags)),
                Some(_) => self.ring.store_u16(at + FLAGS, flags, Ordering::Release),
            }
            self.next = place.after(1, self.size);
        }
        let descriptors = u16::try_from(chain.len()).unwrap_or(self.size);
        self.lengths[usize::from(id)] = descriptors;
        self.pushed += descriptors;
    }

    /// Publishes pushed descriptors; returns whether the device wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        let Some((place, flags)) = self.held_back.take() else { return false };
        // Release: the device that sees the flags sees the descriptors and the request bytes.
        self.ring.store_u16(place.flags_at(), flags, Ordering::Release);
        let pushed = i32::from(std::mem::take(&mut self.pushed));
        // The store above must be visible before the load below, or both sides could go to sleep.
        fence(Ordering::SeqCst);
        let wish = self.device_event.load_u32(0);
        match wish >> 16 & 3 {
            EVENT_DISABLE => false,
            EVENT_DESCRIPTOR if self.event_idx => {
                let event = Place::from_bits(u16::try_from(wish & 0xffff).unwrap_or(0));
                let lap = if event.wrap == self.next.wrap { 0 } else { i32::from(self.size) };
                let (event, new) = (i32::from(event.index) - lap, i32::from(self.next.index));
                (new - pushed..new).contains(&event)
            }
            _ => true,
        }
    }

    fn is_used(&self, place: Place) -> bool {
        // Acquire: a thread that sees the flags sees the rest of the descriptor and what the device wrote.
        let flags = self.ring.load_u16(place.flags_at(), Ordering::Acquire);
        flags & (AVAILABLE | USED) == if place.wrap { AVAILABLE | USED } else { 0 }
    }

    /// Whether a used buffer waits.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.is_used(self.next_used)
    }

    /// The number of used buffers that the device reports.
    #[inline]
    pub fn waiting_used(&self) -> u16 {
        let (mut place, mut count) = (self.next_used, 0);
        while count < self.size && self.is_used(place) {
            let id = self.ring.load_u16(usize::from(place.index) * DESCRIPTOR_BYTES + ID, Ordering::Relaxed);
            place = place.after(self.length(id), self.size);
            count += 1;
        }
        count
    }

    /// The next used buffer, if there is one.
    #[inline]
    pub fn pop(&mut self) -> Option<Used> {
        self.has_used().then(|| self.pop_ready())
    }

    /// The next used buffer; the caller knows that there is one.
    #[inline]
    pub fn pop_ready(&mut self) -> Used {
        let at = usize::from(self.next_used.index) * DESCRIPTOR_BYTES;
        let id = self.ring.load_u16(at + ID, Ordering::Relaxed);
        self.next_used = self.next_used.after(self.length(id), self.size);
        Used { id: id.into(), len: self.ring.load_u32(at + LENGTH) }
    }

    /// The descriptors of a buffer; one for an unknown identifier, so that the scan advances.
    fn length(&self, id: u16) -> u16 {
        self.lengths.get(usize::from(id)).copied().unwrap_or(1).clamp(1, self.size)
    }

    /// Asks the device for a call at the next used buffer. True when one has come in the meantime: do not sleep.
    pub fn want_call(&mut self) -> bool {
        let wish = match self.event_idx {
            true => EVENT_DESCRIPTOR << 16 | u32::from(self.next_used.to_bits()),
            false => EVENT_ENABLE << 16,
        };
        self.driver_event.store_u32(0, wish);
        fence(Ordering::SeqCst);
        self.has_used()
    }

    /// Asks the device for no calls.
    pub fn suppress_calls(&mut self) {
        self.driver_event.store_u32(0, EVENT_DISABLE << 16);
    }

    /// Restarts at the device's index, and withdraws the descriptors that it has not taken.
    pub fn restart(&mut self, base: u16) {
        let end = self.next;
        self.next = Place::from_bits(base);
        let mut place = self.next;
        while place != end {
            // As if it had been used the lap before.
            let flags = if place.wrap { 0 } else { AVAILABLE | USED };
            self.ring.store_u16(place.flags_at(), flags, Ordering::Release);
            place = place.after(1, self.size);
            if place == self.next {
                break;
            }
        }
        (self.held_back, self.pushed) = (None, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    fn ring(size: u16, event_idx: bool) -> PackedRing {
        let memory = Memory::new(1 << 20, 1).unwrap();
        let alloc = |bytes| memory.alloc(bytes, 4096).unwrap();
        let events = [alloc(EVENT_BYTES), alloc(EVENT_BYTES)];
        PackedRing::new(size, event_idx, alloc(usize::from(size) * DESCRIPTOR_BYTES), events)
    }

    /// What a device would do: use `id` at `place`.
    fn complete(ring: &PackedRing, place: Place, used: Used) {
        let at = usize::from(place.index) * DESCRIPTOR_BYTES;
        ring.ring.store_u32(at + LENGTH, used.len);
        ring.ring.store_u16(at + ID, u16::try_from(used.id).unwrap(), Ordering::Relaxed);
        let flags = if place.wrap { AVAILABLE | USED } else { 0 };
        ring.ring.store_u16(at + FLAGS, flags, Ordering::Release);
    }

    #[test]
    fn chains_go_round() {
        let mut ring = ring(5, false);
        let mut place = Place { index: 0, wrap: true };
        for n in 0..1000_u16 {
            let (id, descriptors) = (n % 5, n % 4 + 1);
            let chain = vec![Descriptor { addr: 1, len: n.into(), flags: 0, next: 0 }; usize::from(descriptors)];
            ring.push(id, &chain);
            let flags = || ring.ring.load_u16(place.flags_at(), Ordering::Acquire);
            assert_ne!(flags() & AVAILABLE != 0, place.wrap, "not before it is published");
            assert!(ring.publish());
            let flags = ring.ring.load_u16(place.flags_at(), Ordering::Acquire);
            assert_eq!((flags & AVAILABLE != 0, flags & USED != 0), (place.wrap, !place.wrap));
            assert_eq!(flags & NEXT != 0, descriptors > 1);
            assert_eq!((ring.pop(), ring.waiting_used()), (None, 0));
            let used = Used { id: id.into(), len: n.into() };
            complete(&ring, place, used);
            assert_eq!(ring.waiting_used(), 1);
            assert_eq!(ring.pop(), Some(used));
            place = place.after(descriptors, 5);
        }
    }

    #[test]
    fn kicks_follow_the_device() {
        let one = [Descriptor::default()];
        let mut ring = ring(8, true);
        for (wish, wanted) in [
            (EVENT_DISABLE << 16, false),
            (EVENT_ENABLE << 16, true),
            (EVENT_DESCRIPTOR << 16 | 0x8002, true),
            (EVENT_DESCRIPTOR << 16 | 0x8004, false),
            (EVENT_DESCRIPTOR << 16 | 0x8004, true),
            (EVENT_DESCRIPTOR << 16, false),
        ] {
            ring.device_event.store_u32(0, wish);
            ring.push(0, &one);
            assert_eq!(ring.publish(), wanted, "{wish:#x}");
        }
        assert!(!ring.publish(), "nothing new");
    }

    #[test]
    fn untaken_descriptors_are_withdrawn() {
        let one = [Descriptor::default()];
        let mut ring = ring(4, true);
        (0..3).for_each(|id| ring.push(id, &one));
        ring.publish();
        ring.restart(0x8001);
        let flags = |index| ring.ring.load_u16(Place { index, wrap: true }.flags_at(), Ordering::Relaxed);
        assert_eq!([flags(0), flags(1), flags(2)], [AVAILABLE, 0, 0]);
        assert_eq!(ring.next, Place { index: 1, wrap: true });
    }
}
