mod crash;
mod lag;
mod model;
mod packed;

use proptest::prelude::*;

use vm_memory::VolatileSlice;

use super::descriptor::{INDIRECT, NEXT, WRITE};
use super::split::{NO_INTERRUPT, NO_NOTIFY};
use super::*;
use crate::memory::tests::{memfd, region};

const SIZE: u16 = 8;
const USER: u64 = 0x1000_0000;
const BASE: u64 = 0x10_0000;
const TABLE: u64 = BASE;
const AVAILABLE: u64 = BASE + 0x1000;
const USED: u64 = BASE + 0x2000;
const INDIRECT_TABLE: u64 = BASE + 0x3000;
const BUFFER: u64 = BASE + 0x8000;
const MEMORY_BYTES: u64 = 0x10000;

/// The driver's side, writing raw bytes.
struct Driver {
    memory: Arc<Memory>,
    available: u16,
}

impl Driver {
    fn new() -> (Self, Ring) {
        Self::with(true)
    }

    fn with(event_index: bool) -> (Self, Ring) {
        let memory = Memory::default().with(&region(BASE, MEMORY_BYTES), memfd(MEMORY_BYTES), false).unwrap();
        let memory = Arc::new(memory);
        let addresses = RingAddresses { descriptors: TABLE + USER, available: AVAILABLE + USER, used: USED + USER };
        let setup = RingSetup { size: u32::from(SIZE), addresses, packed: false, event_index, indirect: true };
        let ring = Ring::new(Arc::clone(&memory), &setup, Begin::At(0), None).unwrap();
        (Self { memory, available: 0 }, ring)
    }

    fn write_guest_memory(&self, address: u64, bytes: &[u8]) {
        let mut pieces = Vec::new();
        assert_eq!(self.memory.translate(address, bytes.len() as u64, &mut pieces), Some(false));
        // SAFETY: the translation is mapped for as long as `self.memory`.
        unsafe { VolatileSlice::new(pieces[0].address, bytes.len()) }.copy_from(bytes);
    }

    fn peek<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut pieces = Vec::new();
        assert_eq!(self.memory.translate(address, N as u64, &mut pieces), Some(false));
        let mut bytes = [0; N];
        // SAFETY: as in `write_guest_memory`.
        unsafe { VolatileSlice::new(pieces[0].address, N) }.copy_to(&mut bytes);
        bytes
    }

    fn describe(&self, table: u64, index: u16, (address, bytes, flags, next): (u64, u32, u16, u16)) {
        let mut raw = address.to_le_bytes().to_vec();
        raw.extend(bytes.to_le_bytes());
        raw.extend(flags.to_le_bytes());
        raw.extend(next.to_le_bytes());
        self.write_guest_memory(table + 16 * u64::from(index), &raw);
    }

    fn offer(&mut self, head: u16) {
        self.write_guest_memory(AVAILABLE + 4 + 2 * u64::from(self.available % SIZE), &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.write_guest_memory(AVAILABLE + 2, &self.available.to_le_bytes());
    }

    fn used(&self) -> u16 {
        u16::from_le_bytes(self.peek(USED + 2))
    }
}

#[test]
fn takes_a_chain_and_returns_it() {
    let (mut driver, mut ring) = Driver::new();
    let mut chain = Chain::default();
    assert_eq!(ring.pop(&mut chain).unwrap(), PopOutcome::Empty);
    driver.describe(TABLE, 3, (BUFFER, 10, NEXT, 5));
    driver.describe(TABLE, 5, (BUFFER + 100, 0, NEXT, 6));
    driver.describe(TABLE, 6, (BUFFER + 100, 1, NEXT | WRITE, 7));
    driver.describe(TABLE, 7, (BUFFER + 200, 20, WRITE, 0));
    driver.write_guest_memory(BUFFER, b"0123456789");
    driver.offer(3);
    assert!(ring.has_available());
    assert_eq!(ring.pop(&mut chain).unwrap(), PopOutcome::Chain);
    assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (10, 21));
    let mut bytes = [0; 10];
    chain.read_at(0, &mut bytes);
    assert_eq!(&bytes, b"0123456789");
    assert_eq!(chain.write_at(0, b"xyz"), 3);
    ring.push(&chain, 3);
    assert_eq!(driver.used(), 0, "nothing is shown before it is published");
    assert!(ring.publish());
    assert_eq!(driver.used(), 1);
    assert_eq!(driver.peek::<8>(USED + 4), [3, 0, 0, 0, 3, 0, 0, 0]);
    assert_eq!((driver.peek(BUFFER + 100), driver.peek(BUFFER + 200)), (*b"x", *b"yz"));
    assert!(!ring.publish(), "nothing new");
}

#[test]
fn an_indirect_table_holds_the_whole_chain() {
    let (mut driver, mut ring) = Driver::new();
    let mut chain = Chain::default();
    driver.describe(TABLE, 0, (INDIRECT_TABLE, 32, INDIRECT, 0));
    driver.describe(INDIRECT_TABLE, 0, (BUFFER, 40, NEXT, 1));
    driver.describe(INDIRECT_TABLE, 1, (BUFFER + 64, 16, WRITE, 0));
    driver.offer(0);
    assert_eq!(ring.pop(&mut chain).unwrap(), PopOutcome::Chain);
    assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (40, 16));
}

#[test]
fn a_chain_of_too_many_pieces_is_dropped() {
    const PIECE_BYTES: u64 = 0x1000;
    let (mut driver, mut ring) = Driver::new();
    let mut memory = Memory::clone(&driver.memory);
    for number in 0..8 {
        let part = region(2 * BASE + number * PIECE_BYTES, PIECE_BYTES);
        memory = memory.with(&part, memfd(PIECE_BYTES), false).unwrap();
    }
    let mut pieces = Vec::new();
    memory.translate(2 * BASE, 8 * PIECE_BYTES, &mut pieces).unwrap();
    assert!(pieces.len() > 4, "{pieces:?}");
    ring.set_memory(Arc::new(memory));
    let mut chain = Chain::default();
    for (entries, is_taken) in [(512, true), (1000, false), (512, true)] {
        driver.describe(TABLE, 0, (INDIRECT_TABLE, 16 * u32::from(entries), INDIRECT, 0));
        for entry in 0..entries {
            let next = if entry + 1 < entries { NEXT } else { 0 };
            driver.describe(INDIRECT_TABLE, entry, (2 * BASE, 0x8000, next, entry + 1));
        }
        driver.offer(0);
        let expected = match is_taken {
            true => PopOutcome::Chain,
            false => PopOutcome::Dropped(ChainError::TooScattered(4096)),
        };
        assert_eq!(ring.pop(&mut chain).unwrap(), expected, "{entries} entries of {} pieces", pieces.len());
    }
}

#[test]
fn drops_chains_that_make_no_sense_and_goes_on() {
    type Raw = (u64, u32, u16, u16);
    let too_long = ChainError::TooLong(usize::from(QUEUE_SIZE_MAX));
    let outside = |address, bytes| ChainError::Outside { address, bytes };
    let end = BASE + MEMORY_BYTES;
    let cases: Vec<(u16, Vec<Raw>, Vec<Raw>, ChainError)> = vec![
        (SIZE, vec![], vec![], ChainError::Index(SIZE)),
        (u16::MAX, vec![], vec![], ChainError::Index(u16::MAX)),
        (0, vec![(BUFFER, 1, NEXT, SIZE)], vec![], ChainError::Index(SIZE)),
        (0, vec![(BUFFER, 1, NEXT, 0)], vec![], too_long),
        (0, vec![(BUFFER, 1, NEXT, 1), (BUFFER, 1, NEXT, 0)], vec![], ChainError::TooLong(1024)),
        (0, vec![(end - 1, 2, 0, 0)], vec![], outside(end - 1, 2)),
        (0, vec![(u64::MAX, u32::MAX, 0, 0)], vec![], outside(u64::MAX, u32::MAX)),
        (0, vec![(BUFFER, 1, NEXT | WRITE, 1), (BUFFER, 1, 0, 0)], vec![], ChainError::Order),
        (0, vec![(INDIRECT_TABLE, 0, INDIRECT, 0)], vec![], ChainError::IndirectSize(0)),
        (0, vec![(INDIRECT_TABLE, 24, INDIRECT, 0)], vec![], ChainError::IndirectSize(24)),
        (0, vec![(INDIRECT_TABLE, 1 << 20, INDIRECT, 0)], vec![], ChainError::IndirectSize(1 << 20)),
        (0, vec![(end - 16, 32, INDIRECT, 0)], vec![], outside(end - 16, 32)),
        (0, vec![(INDIRECT_TABLE, 16, INDIRECT | NEXT, 1)], vec![], ChainError::IndirectNested),
        (
            0,
            vec![(INDIRECT_TABLE, 16, INDIRECT, 0)],
            vec![(INDIRECT_TABLE, 16, INDIRECT, 0)],
            ChainError::IndirectNested,
        ),
        (0, vec![(INDIRECT_TABLE, 16, INDIRECT, 0)], vec![(BUFFER, 1, NEXT, 1)], ChainError::Index(1)),
    ];
    let (mut driver, mut ring) = Driver::new();
    let mut chain = Chain::default();
    for (head, direct, indirect, expected) in cases {
        for (index, raw) in (0u16..).zip(direct) {
            driver.describe(TABLE, index, raw);
        }
        for (index, raw) in (0u16..).zip(indirect) {
            driver.describe(INDIRECT_TABLE, index, raw);
        }
        driver.offer(head);
        assert_eq!(ring.pop(&mut chain).unwrap(), PopOutcome::Dropped(expected));
        assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (0, 0));
        driver.describe(TABLE, 2, (BUFFER, 4, 0, 0));
        driver.offer(2);
        assert_eq!(ring.pop(&mut chain).unwrap(), PopOutcome::Chain, "the next good one works");
        ring.push(&chain, 0);
        ring.publish();
    }
}

#[test]
fn a_jumping_index_is_an_error() {
    let (driver, mut ring) = Driver::new();
    driver.write_guest_memory(AVAILABLE + 2, &(SIZE + 1).to_le_bytes());
    let popped = ring.pop(&mut Chain::default());
    assert!(matches!(popped, Err(RingError::Jump { from: 0, to: 9, size: SIZE })));
}

#[test]
fn rings_outside_memory_or_unaligned_are_refused() {
    let memory = Memory::default().with(&region(BASE, MEMORY_BYTES), memfd(MEMORY_BYTES), false).unwrap();
    let memory = Arc::new(memory);
    let good = RingAddresses { descriptors: TABLE + USER, available: AVAILABLE + USER, used: USED + USER };
    let make = |size, addresses| {
        let setup = RingSetup { size, addresses, packed: false, event_index: true, indirect: true };
        Ring::new(Arc::clone(&memory), &setup, Begin::At(0), None).map(|_| ())
    };
    assert!(make(8, good).is_ok());
    for size in [0, 3, 2048, 65536, u32::MAX] {
        assert!(matches!(make(size, good), Err(RingError::Size(refused)) if refused == size));
    }
    for bad in [0, 1, BASE + MEMORY_BYTES + USER - 16, u64::MAX - 8, TABLE + USER + 1] {
        assert!(make(1024, RingAddresses { descriptors: bad, ..good }).is_err());
        assert!(make(1024, RingAddresses { available: bad, ..good }).is_err());
        assert!(make(1024, RingAddresses { used: bad, ..good }).is_err());
    }
}

#[test]
fn signals_and_kicks_follow_the_event_indices() {
    let (mut driver, mut ring) = Driver::new();
    let mut chain = Chain::default();
    driver.describe(TABLE, 0, (BUFFER, 4, 0, 0));
    let mut serve = |driver: &mut Driver, ring: &mut Ring, count: u16| {
        for _ in 0..count {
            driver.offer(0);
            assert_eq!(ring.pop(&mut chain).unwrap(), PopOutcome::Chain);
            ring.push(&chain, 0);
        }
        ring.publish()
    };
    let used_event = AVAILABLE + 4 + 2 * u64::from(SIZE);
    driver.write_guest_memory(used_event, &0u16.to_le_bytes());
    assert!(serve(&mut driver, &mut ring, 2), "the driver waits for the first");
    assert!(!serve(&mut driver, &mut ring, 2), "it asked for nothing since");
    driver.write_guest_memory(used_event, &6u16.to_le_bytes());
    assert!(!serve(&mut driver, &mut ring, 2), "four to five are not six");
    assert!(serve(&mut driver, &mut ring, 2));
    assert!(!ring.want_kicks(true));
    assert_eq!(driver.peek(USED + 4 + 8 * u64::from(SIZE)), 8u16.to_le_bytes());
    driver.offer(0);
    assert!(ring.want_kicks(true), "what came before the wish gets no kick");

    let (mut driver, mut ring) = Driver::with(false);
    driver.describe(TABLE, 0, (BUFFER, 4, 0, 0));
    assert!(serve(&mut driver, &mut ring, 1));
    driver.write_guest_memory(AVAILABLE, &NO_INTERRUPT.to_le_bytes());
    assert!(!serve(&mut driver, &mut ring, 1));
    ring.want_kicks(false);
    assert_eq!(driver.peek(USED), NO_NOTIFY.to_le_bytes());
    ring.want_kicks(true);
    assert_eq!(driver.peek(USED), [0, 0]);
}

proptest! {
    /// Whatever stands in the table: no panic, an end, and only buffers inside memory.
    #[test]
    fn survives_any_table(
        table in prop::collection::vec(any::<[u8; 16]>(), usize::from(SIZE)),
        near in prop::collection::vec((0u64..MEMORY_BYTES + 64, 0u32..4096, 0u16..8, 0u16..SIZE + 1), usize::from(SIZE)),
        heads in prop::collection::vec(any::<u16>(), 1..8),
        raw in any::<bool>(),
    ) {
        let (mut driver, mut ring) = Driver::new();
        for (index, (bytes, (address, length, flags, next))) in (0u16..).zip(table.iter().zip(near)) {
            if raw {
                driver.write_guest_memory(TABLE + 16 * u64::from(index), bytes);
            } else {
                driver.describe(TABLE, index, (BASE + address, length, flags, next));
            }
        }
        let mut chain = Chain::default();
        for head in heads {
            driver.offer(if raw { head } else { head % SIZE });
            let popped = ring.pop(&mut chain).unwrap();
            prop_assert_ne!(popped, PopOutcome::Empty);
            let mut sink = vec![0; 1 << 16];
            chain.read_at(0, &mut sink);
        }
    }
}
