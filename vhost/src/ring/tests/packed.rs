use proptest::prelude::*;

use super::model::{
    AVAILABLE_PART, BASE, BUFFERS, DESCRIPTORS, Guest, MEMORY_BYTES, TABLES, USED_PART, USER, Wish, pop, serve,
};
use crate::packed::{AVAILABLE, Place, USED};
use crate::ring::descriptor::{INDIRECT, NEXT, WRITE};
use crate::ring::packed::{EVENT_DESCRIPTOR, EVENT_DISABLE, EVENT_ENABLE};
use crate::ring::*;

const SIZE: u16 = 6;
const FRESH: Begin = Begin::At(0x8000);

fn ring(event_index: bool) -> (Guest, Ring) {
    let guest = Guest::new(SIZE, true, event_index);
    let ring = guest.ring(FRESH, None).unwrap();
    (guest, ring)
}

#[test]
fn takes_chains_and_returns_them_out_of_order() {
    let (mut guest, mut ring) = ring(true);
    assert!(pop(&mut ring).is_none() && !ring.has_available());
    guest.submit(3, false).unwrap();
    guest.submit(2, true).unwrap();
    assert!(ring.has_available());
    let first = pop(&mut ring).unwrap();
    assert_eq!((first.readable_bytes(), first.writable_bytes()), (9, 8));
    let second = pop(&mut ring).unwrap();
    assert_eq!(ring.position(), 0x8000_8004, "four descriptors are taken, none used");
    for chain in [&second, &first] {
        serve(chain);
        ring.push(chain, 8);
        guest.poll();
    }
    assert!(guest.completed.is_empty(), "nothing is shown before it is published");
    ring.publish();
    guest.poll();
    assert_eq!(guest.completed, [1, 0]);
    assert_eq!(ring.position(), 0x8004_8004);
    assert!(!ring.publish(), "nothing new");
}

#[test]
fn drops_chains_that_make_no_sense_and_goes_on() {
    type Raw = (u64, u32, u16);
    let outside = |address, bytes| ChainError::Outside { address, bytes };
    let end = BASE + MEMORY_BYTES;
    let cases: Vec<(Vec<Raw>, Vec<Raw>, ChainError)> = vec![
        (vec![(end - 1, 2, 0)], vec![], outside(end - 1, 2)),
        (vec![(u64::MAX, u32::MAX, WRITE)], vec![], outside(u64::MAX, u32::MAX)),
        (vec![(BUFFERS, 1, WRITE), (BUFFERS, 1, 0)], vec![], ChainError::Order),
        (vec![(TABLES, 0, INDIRECT)], vec![], ChainError::IndirectSize(0)),
        (vec![(TABLES, 24, INDIRECT)], vec![], ChainError::IndirectSize(24)),
        (vec![(TABLES, 1 << 20, INDIRECT)], vec![], ChainError::IndirectSize(1 << 20)),
        (vec![(end - 16, 32, INDIRECT)], vec![], outside(end - 16, 32)),
        (vec![(TABLES, 16, INDIRECT), (BUFFERS, 1, 0)], vec![], ChainError::IndirectNested),
        (vec![(BUFFERS, 1, 0), (TABLES, 16, INDIRECT)], vec![], ChainError::IndirectNested),
        (vec![(TABLES, 16, INDIRECT)], vec![(TABLES, 16, INDIRECT)], ChainError::IndirectNested),
        (vec![(TABLES, 32, INDIRECT)], vec![(BUFFERS, 1, WRITE), (BUFFERS, 1, 0)], ChainError::Order),
    ];
    let (guest, mut ring) = ring(true);
    let mut chain = Chain::default();
    let mut at = Place::FRESH;
    for (direct, indirect, expected) in cases {
        for (index, (address, bytes, flags)) in (0u16..).zip(indirect) {
            guest.describe(TABLES, index, (address, bytes), [0, flags]);
        }
        for good in [false, true] {
            let descriptors = if good { vec![(BUFFERS, 4, 0)] } else { direct.clone() };
            let first = at;
            for (position, (address, bytes, flags)) in descriptors.iter().enumerate() {
                let more = if position + 1 < descriptors.len() { NEXT } else { 0 };
                let turn = if at.wrap { AVAILABLE } else { USED };
                guest.describe(DESCRIPTORS, at.index, (*address, *bytes), [7, flags | more | turn]);
                at = at.after(1, SIZE);
            }
            let popped = ring.pop(&mut chain).unwrap();
            assert_eq!(popped, if good { PopOutcome::Chain } else { PopOutcome::Dropped(expected_again(&expected)) });
            if good {
                ring.push(&chain, 0);
            }
            ring.publish();
            let used = DESCRIPTORS + 16 * u64::from(first.index);
            let turn = if first.wrap { AVAILABLE | USED } else { 0 };
            assert_eq!(guest.peek::<8>(used + 8)[..6], [0, 0, 0, 0, 7, 0], "given back");
            assert_eq!(guest.peek::<2>(used + 14), turn.to_le_bytes());
        }
    }
}

/// Errors are not made to be copied.
fn expected_again(error: &ChainError) -> ChainError {
    match *error {
        ChainError::Outside { address, bytes } => ChainError::Outside { address, bytes },
        ChainError::Order => ChainError::Order,
        ChainError::IndirectSize(bytes) => ChainError::IndirectSize(bytes),
        ChainError::IndirectNested => ChainError::IndirectNested,
        ref other => panic!("{other} is not among the cases"),
    }
}

#[test]
fn indirect_descriptors_need_the_feature() {
    let mut guest = Guest::new(SIZE, true, true);
    guest.setup.indirect = false;
    let mut ring = guest.ring(FRESH, None).unwrap();
    guest.submit(2, true);
    assert_eq!(ring.pop(&mut Chain::default()).unwrap(), PopOutcome::Dropped(ChainError::IndirectUnexpected));
}

#[test]
fn more_descriptors_than_the_ring_has_are_an_error() {
    let (guest, mut ring) = ring(true);
    for index in 0..SIZE {
        guest.describe(DESCRIPTORS, index, (BUFFERS, 1), [0, NEXT | AVAILABLE]);
    }
    let mut chain = Chain::default();
    assert!(matches!(ring.pop(&mut chain), Err(RingError::Overrun(SIZE))), "a chain without an end");

    let (mut guest, mut ring) = self::ring(true);
    while guest.submit(2, false).is_some() {}
    while pop(&mut ring).is_some() {}
    guest.describe(DESCRIPTORS, 0, (BUFFERS, 1), [0, USED]);
    assert!(matches!(ring.pop(&mut chain), Err(RingError::Overrun(SIZE))), "a lap ahead of the answers");
}

#[test]
fn rings_outside_memory_or_that_cannot_be_are_refused() {
    let guest = Guest::new(SIZE, true, true);
    let memory = &guest.memory;
    let make = |size, addresses, begin| {
        Ring::new(Arc::clone(memory), &RingSetup { size, addresses, ..guest.setup }, begin, None).map(|_| ())
    };
    let good = guest.setup.addresses;
    for size in [1, 2, 3, 1000, 1024] {
        assert!(make(size, good, FRESH).is_ok());
    }
    for size in [0, 1025, 65536, u32::MAX] {
        assert!(matches!(make(size, good, FRESH), Err(RingError::Size(refused)) if refused == size));
    }
    for bad in [0, BASE + MEMORY_BYTES + USER - 2, u64::MAX - 8, DESCRIPTORS + USER + 1] {
        assert!(make(1024, RingAddresses { descriptors: bad, ..good }, FRESH).is_err());
        assert!(make(1024, RingAddresses { available: bad, ..good }, FRESH).is_err());
        assert!(make(1024, RingAddresses { used: bad, ..good }, FRESH).is_err());
    }
    // Behind the end; used ahead of available; more than a lap between them.
    for base in [0x8006, 0x8006_8000, 0x8001_8000, 0x8000_0001] {
        assert!(matches!(make(6, good, Begin::At(base)), Err(RingError::Base { .. })), "{base:#x}");
    }
}

#[test]
fn begins_at_the_base_in_each_encoding() {
    let cases: [(u32, u16, u32); 6] = [
        // What is said, the flags of the first descriptor, where it begins.
        (0x8000_8000, 0, 0x8000_8000),
        (0x8000, 0, 0x8000_8000),
        (0, 0, 0x8000_8000),
        (0, AVAILABLE, 0x8000_8000),
        (0, USED, 0),
        (0x8002_8003, 0, 0x8002_8003),
    ];
    for (base, flags, begins) in cases {
        let guest = Guest::new(SIZE, true, true);
        guest.describe(DESCRIPTORS, 0, (0, 0), [0, flags]);
        assert_eq!(guest.ring(Begin::At(base), None).unwrap().position(), begins, "{base:#x}");
    }
    // The tail of the last chain of a lap lies first.
    let guest = Guest::new(SIZE, true, true);
    guest.describe(DESCRIPTORS, 0, (0, 0), [0, AVAILABLE]);
    guest.describe(DESCRIPTORS, SIZE - 1, (0, 0), [0, AVAILABLE | USED]);
    assert_eq!(guest.ring(Begin::At(0), None).unwrap().position(), 0, "it is not fresh");
    for (stopped_at, base, expected) in [
        (None, 5, Begin::At(5)),
        (Some(5), 5, Begin::Resume(5)),
        (Some(5), 6, Begin::At(6)),
        (Some(0), 0, Begin::At(0)),
        (Some(0x8001_8003), 0x8003, Begin::Resume(0x8001_8003)),
        (Some(0x8001_8003), 0x8003_8003, Begin::At(0x8003_8003)),
        (Some(0x0005_8000), 0x8000, Begin::At(0x8000)),
        (Some(0x0005_8000), 0x0005_8000, Begin::Resume(0x0005_8000)),
    ] {
        assert_eq!(Begin::after(stopped_at, base, || false), expected, "{stopped_at:x?} {base:#x}");
    }
    assert_eq!(Begin::after(Some(0), 0, || true), Begin::Resume(0));
    assert_eq!(Begin::after(Some(5), 0, || true), Begin::At(0));
}

#[test]
fn signals_and_kicks_follow_the_event_structures() {
    for event_index in [true, false] {
        let (mut guest, mut ring) = ring(event_index);
        for (wish, wanted) in [
            (Wish::Always, true),
            (Wish::Never, false),
            (Wish::Past(0), true),
            (Wish::Past(1), true),
            // Without the feature, the flag means nothing that we know: better one signal too many.
            (Wish::Past(2), !event_index),
            (Wish::Past(5), !event_index),
        ] {
            // Over the end of the ring and back.
            for _ in 0..SIZE {
                guest.wish(wish);
                guest.submit(2, false).unwrap();
                let chain = pop(&mut ring).unwrap();
                serve(&chain);
                ring.push(&chain, 8);
                assert_eq!(ring.publish(), wanted, "{wish:?}");
                guest.poll();
            }
        }
        let device_event = |guest: &Guest| u32::from_le_bytes(guest.peek(USED_PART));
        ring.want_kicks(false);
        assert_eq!(device_event(&guest), EVENT_DISABLE << 16);
        assert!(!ring.want_kicks(true));
        let place = ring.position() & 0xffff;
        assert_eq!(device_event(&guest), if event_index { EVENT_DESCRIPTOR << 16 | place } else { EVENT_ENABLE << 16 });
        guest.submit(2, false);
        assert!(ring.want_kicks(true), "what came before the wish gets no kick");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Submit(u16, bool),
    Take(usize),
    /// Which of those that are held, if there are so many.
    GiveBack(usize),
    Publish(u16),
    Poll,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (2u16..6, any::<bool>()).prop_map(|(descriptors, indirect)| Step::Submit(descriptors, indirect)),
        2 => (1usize..5).prop_map(Step::Take),
        3 => (0usize..8).prop_map(Step::GiveBack),
        1 => (0u16..4).prop_map(Step::Publish),
        1 => Just(Step::Poll),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    /// Requests of any shape, taken and given back in any order and in any batches: each is answered once, what was
    /// taken is what was sent, and the driver is signalled when it said so.
    #[test]
    fn every_request_is_answered_once(
        steps in steps(),
        packed in any::<bool>(),
        event_index in any::<bool>(),
        size in prop_oneof![Just(4u16), Just(8), Just(16)],
        odd in 0u16..3,
    ) {
        let size = if packed { size - odd } else { size };
        let mut guest = Guest::new(size, packed, event_index);
        let mut ring = guest.ring(Begin::At(guest.base()), None).unwrap();
        let mut held: Vec<Chain> = Vec::new();
        let (mut sent, mut next) = (0u64, 0u64);
        for step in steps {
            match step {
                Step::Submit(descriptors, indirect) => sent += u64::from(guest.submit(descriptors, indirect).is_some()),
                Step::Take(count) => {
                    for chain in (0..count).map_while(|_| pop(&mut ring)) {
                        prop_assert_eq!(serve(&chain), next, "in the order in which they were sent");
                        next += 1;
                        held.push(chain);
                    }
                }
                Step::GiveBack(which) if which < held.len() => ring.push(&held.swap_remove(which), 8),
                Step::GiveBack(_) => {}
                Step::Publish(_) if !packed && !event_index => drop(ring.publish()),
                Step::Publish(past) => {
                    guest.poll();
                    guest.wish(Wish::Past(past));
                    let before = ring.position() >> 16;
                    let completed = guest.completed.len();
                    let signalled = ring.publish();
                    guest.poll();
                    let shown = guest.completed.len() - completed;
                    if !packed {
                        prop_assert_eq!(signalled, shown > usize::from(past));
                    } else if past == 0 || shown == 0 {
                        prop_assert_eq!(signalled, before != ring.position() >> 16 || shown > 0);
                    }
                }
                Step::Poll => guest.poll(),
            }
        }
        loop {
            held.extend(std::iter::from_fn(|| pop(&mut ring)).inspect(|chain| { serve(chain); }));
            held.drain(..).for_each(|chain| ring.push(&chain, 8));
            ring.publish();
            guest.poll();
            if !ring.has_available() {
                break;
            }
        }
        guest.completed.sort_unstable();
        prop_assert_eq!(&guest.completed, &(0..sent).collect::<Vec<_>>());
        prop_assert_eq!(guest.in_flight(), 0);
    }

    /// Whatever stands in the ring: no panic, an end, and only buffers inside memory.
    #[test]
    fn survives_any_ring(
        contents in prop::collection::vec(any::<[u8; 16]>(), usize::from(SIZE)),
        near in prop::collection::vec((0u64..MEMORY_BYTES + 64, 0u32..4096, 0u16..8, any::<bool>()), usize::from(SIZE)),
        raw in any::<bool>(),
        wish in any::<[u8; 4]>(),
    ) {
        let (guest, mut ring) = ring(true);
        guest.write_guest_memory(AVAILABLE_PART, &wish);
        for (index, (bytes, (address, length, flags, turn))) in (0u16..).zip(contents.iter().zip(near)) {
            if raw {
                guest.write_guest_memory(DESCRIPTORS + 16 * u64::from(index), bytes);
            } else {
                let flags = flags | if turn { AVAILABLE } else { USED };
                guest.describe(DESCRIPTORS, index, (BASE + address, length), [index, flags]);
            }
        }
        let mut chain = Chain::default();
        for _ in 0..3 * SIZE {
            match ring.pop(&mut chain) {
                Ok(PopOutcome::Chain) => {
                    let mut sink = vec![0; 1 << 16];
                    chain.read_at(0, &mut sink);
                    ring.push(&chain, 1);
                }
                Ok(PopOutcome::Dropped(_)) => {}
                Ok(PopOutcome::Empty) | Err(_) => break,
            }
            ring.publish();
        }
    }
}
