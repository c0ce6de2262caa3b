//! A driver to test rings with: it records its requests and checks every completion.

use std::collections::HashMap;

use vm_memory::VolatileSlice;

use crate::memory::tests::{memfd, region};
use crate::packed::{AVAILABLE, Place, USED};
use crate::ring::descriptor::{INDIRECT, NEXT, WRITE};
use crate::ring::packed::{EVENT_DESCRIPTOR, EVENT_DISABLE, EVENT_ENABLE};
use crate::ring::split::NO_INTERRUPT;
use crate::ring::*;

pub(super) const USER: u64 = 0x1000_0000;
pub(super) const BASE: u64 = 0x10_0000;
pub(super) const DESCRIPTORS: u64 = BASE;
pub(super) const AVAILABLE_PART: u64 = BASE + 0x8000;
pub(super) const USED_PART: u64 = BASE + 0xa000;
pub(super) const BUFFERS: u64 = BASE + 0x1_0000;
pub(super) const TABLES: u64 = BASE + 0x2_0000;
pub(super) const MEMORY_BYTES: u64 = 0x4_0000;
/// Bytes per request: its number, padding, and the answer.
const BUFFER_BYTES: u64 = 64;
const ANSWER_AT: u64 = 32;
const TABLE_BYTES: u64 = 128;
/// What the answer differs from the question by.
const MASK: u64 = 0x5555_aaaa_0f0f_3c3c;

/// When the driver wants to be told.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wish {
    Always,
    Never,
    /// After so many more used entries, in a packed ring descriptors.
    Past(u16),
}

struct Flight {
    number: u64,
    descriptors: Vec<u16>,
}

pub(super) struct Guest {
    pub(super) memory: Arc<Memory>,
    pub(super) setup: RingSetup,
    /// By head, or buffer identifier.
    flights: HashMap<u16, Flight>,
    free: Vec<u16>,
    free_ids: Vec<u16>,
    available: u16,
    used: u16,
    next: Place,
    next_used: Place,
    numbers: u64,
    pub(super) completed: Vec<u64>,
}

impl Guest {
    pub(super) fn new(size: u16, packed: bool, event_index: bool) -> Self {
        let memory = Memory::default().with(&region(BASE, MEMORY_BYTES), memfd(MEMORY_BYTES), false).unwrap();
        let addresses =
            RingAddresses { descriptors: DESCRIPTORS + USER, available: AVAILABLE_PART + USER, used: USED_PART + USER };
        let setup = RingSetup { size: u32::from(size), addresses, packed, event_index, indirect: true };
        Self {
            memory: Arc::new(memory),
            setup,
            flights: HashMap::new(),
            free: (0..size).collect(),
            free_ids: (0..size).collect(),
            available: 0,
            used: 0,
            next: Place::FRESH,
            next_used: Place::FRESH,
            numbers: 0,
            completed: Vec::new(),
        }
    }

    pub(super) fn ring(&self, begin: Begin, log: Option<Region>) -> Result<Ring, RingError> {
        Ring::new(Arc::clone(&self.memory), &self.setup, begin, log)
    }

    pub(super) fn write_guest_memory(&self, address: u64, bytes: &[u8]) {
        let start = self.memory.translate_whole(address, bytes.len() as u64).unwrap();
        // SAFETY: the translation is mapped for as long as `self.memory`.
        unsafe { VolatileSlice::new(start, bytes.len()) }.copy_from(bytes);
    }

    pub(super) fn peek<const N: usize>(&self, address: u64) -> [u8; N] {
        let start = self.memory.translate_whole(address, N as u64).unwrap();
        let mut bytes = [0; N];
        // SAFETY: as in `write_guest_memory`.
        unsafe { VolatileSlice::new(start, N) }.copy_to(&mut bytes);
        bytes
    }

    fn half(&self, address: u64) -> u16 {
        u16::from_le_bytes(self.peek(address))
    }

    /// Writes a descriptor; `last` are a split ring's flags and next, a packed one's identifier and flags.
    pub(super) fn describe(&self, table: u64, index: u16, (address, bytes): (u64, u32), last: [u16; 2]) {
        let mut raw = address.to_le_bytes().to_vec();
        raw.extend(bytes.to_le_bytes());
        raw.extend(last.iter().flat_map(|half| half.to_le_bytes()));
        self.write_guest_memory(table + 16 * u64::from(index), &raw);
    }

    pub(super) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Sends a request of so many descriptors (at least two). Returns its number, unless the ring is full.
    pub(super) fn submit(&mut self, descriptors: u16, indirect: bool) -> Option<u64> {
        let taken = if indirect { 1 } else { usize::from(descriptors) };
        let rest = self.free.len().checked_sub(taken)?;
        let taken = self.free.split_off(rest);
        let id = if self.setup.packed { self.free_ids.pop()? } else { taken[0] };
        let number = self.numbers;
        self.numbers += 1;
        let buffer = BUFFERS + BUFFER_BYTES * u64::from(id);
        self.write_guest_memory(buffer, &number.to_le_bytes());
        self.write_guest_memory(buffer + ANSWER_AT, &[0; 8]);
        let mut chain = vec![(buffer, 8, 0)];
        chain.extend((2..descriptors).map(|pad| (buffer + 8 + u64::from(pad), 1, 0)));
        chain.push((buffer + ANSWER_AT, 8, WRITE));
        if indirect {
            let table = TABLES + TABLE_BYTES * u64::from(id);
            for (index, (address, bytes, flags)) in (0u16..).zip(&chain) {
                let next = if index + 1 < descriptors { NEXT } else { 0 };
                let last = if self.setup.packed { [0, *flags] } else { [flags | next, index + 1] };
                self.describe(table, index, (*address, *bytes), last);
            }
            chain = vec![(table, u32::from(descriptors) * 16, INDIRECT)];
        }
        match self.setup.packed {
            false => self.offer_split(&chain, &taken),
            true => self.offer_packed(&chain, id),
        }
        self.flights.insert(id, Flight { number, descriptors: taken });
        Some(number)
    }

    fn size(&self) -> u16 {
        u16::try_from(self.setup.size).unwrap()
    }

    fn offer_split(&mut self, chain: &[(u64, u32, u16)], places: &[u16]) {
        for (position, (address, bytes, flags)) in chain.iter().enumerate() {
            let next = places.get(position + 1);
            let last = [flags | if next.is_some() { NEXT } else { 0 }, next.copied().unwrap_or(0)];
            self.describe(DESCRIPTORS, places[position], (*address, *bytes), last);
        }
        let entry = AVAILABLE_PART + 4 + 2 * u64::from(self.available % self.size());
        self.write_guest_memory(entry, &places[0].to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.write_guest_memory(AVAILABLE_PART + 2, &self.available.to_le_bytes());
    }

    fn offer_packed(&mut self, chain: &[(u64, u32, u16)], id: u16) {
        let first = self.next;
        let mut first_flags = 0;
        for (position, (address, bytes, flags)) in chain.iter().enumerate() {
            let more = if position + 1 < chain.len() { NEXT } else { 0 };
            let flags = flags | more | if self.next.wrap { AVAILABLE } else { USED };
            let at = DESCRIPTORS + 16 * u64::from(self.next.index);
            self.write_guest_memory(at, &address.to_le_bytes());
            self.write_guest_memory(at + 8, &bytes.to_le_bytes());
            self.write_guest_memory(at + 12, &id.to_le_bytes());
            match position {
                0 => first_flags = flags,
                _ => self.write_guest_memory(at + 14, &flags.to_le_bytes()),
            }
            self.next = self.next.after(1, self.size());
        }
        self.write_guest_memory(DESCRIPTORS + 16 * u64::from(first.index) + 14, &first_flags.to_le_bytes());
    }

    /// Takes all answers, and checks them.
    pub(super) fn poll(&mut self) {
        while let Some((id, bytes)) = self.next_used() {
            let Flight { number, descriptors } = self.flights.remove(&id).expect("answered once");
            let buffer = BUFFERS + BUFFER_BYTES * u64::from(id);
            assert_eq!(bytes, 8);
            assert_eq!(u64::from_le_bytes(self.peek(buffer + ANSWER_AT)), number ^ MASK);
            if self.setup.packed {
                let taken = u16::try_from(descriptors.len()).unwrap();
                self.next_used = self.next_used.after(taken, self.size());
                self.free_ids.push(id);
            }
            self.free.extend(descriptors);
            self.completed.push(number);
        }
    }

    fn next_used(&mut self) -> Option<(u16, u32)> {
        if !self.setup.packed {
            if self.half(USED_PART + 2) == self.used {
                return None;
            }
            let entry = USED_PART + 4 + 8 * u64::from(self.used % self.size());
            self.used = self.used.wrapping_add(1);
            return Some((self.half(entry), u32::from_le_bytes(self.peek(entry + 4))));
        }
        let at = DESCRIPTORS + 16 * u64::from(self.next_used.index);
        let flags = self.half(at + 14);
        let both = if self.next_used.wrap { AVAILABLE | USED } else { 0 };
        (flags & (AVAILABLE | USED) == both).then(|| (self.half(at + 12), u32::from_le_bytes(self.peek(at + 8))))
    }

    pub(super) fn wish(&self, wish: Wish) {
        if self.setup.packed {
            let (place, flags) = match wish {
                Wish::Always => (0, EVENT_ENABLE),
                Wish::Never => (0, EVENT_DISABLE),
                Wish::Past(count) => (self.next_used.after(count, self.size()).to_bits(), EVENT_DESCRIPTOR),
            };
            return self.write_guest_memory(AVAILABLE_PART, &(u32::from(place) | flags << 16).to_le_bytes());
        }
        let event = AVAILABLE_PART + 4 + 2 * u64::from(self.size());
        match (wish, self.setup.event_index) {
            (Wish::Past(count), true) => self.write_guest_memory(event, &self.used.wrapping_add(count).to_le_bytes()),
            (Wish::Never, true) => self.write_guest_memory(event, &self.used.wrapping_sub(1).to_le_bytes()),
            (Wish::Always, true) => self.write_guest_memory(event, &self.used.to_le_bytes()),
            (Wish::Never, false) => self.write_guest_memory(AVAILABLE_PART, &NO_INTERRUPT.to_le_bytes()),
            (_, false) => self.write_guest_memory(AVAILABLE_PART, &[0, 0]),
        }
    }

    /// What a front end says when it connects again, as QEMU does: the used index, if it can read it.
    pub(super) fn base(&self) -> u32 {
        match self.setup.packed {
            false => u32::from(self.half(USED_PART + 2)),
            true => 0x8000_8000,
        }
    }
}

/// What the device does with a request. Returns its number.
pub(super) fn serve(chain: &Chain) -> u64 {
    let mut bytes = [0; 8];
    chain.read_at(0, &mut bytes);
    let number = u64::from_le_bytes(bytes);
    assert_eq!(chain.write_at(0, &(number ^ MASK).to_le_bytes()), 8);
    number
}

/// Takes a chain that must be good, if there is one.
pub(super) fn pop(ring: &mut Ring) -> Option<Chain> {
    let mut chain = Chain::default();
    match ring.pop(&mut chain).unwrap() {
        PopOutcome::Chain => Some(chain),
        PopOutcome::Empty => None,
        PopOutcome::Dropped(error) => panic!("{error}"),
    }
}
