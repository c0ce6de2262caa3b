//! How far a driver is, by its own word.

use super::model::{AVAILABLE_PART, Guest, Wish, pop, serve};
use crate::ring::*;

#[test]
fn a_driver_lags_while_more_waits_for_it_than_for_us() {
    for packed in [false, true] {
        let begin = Begin::At(if packed { 0x8000 } else { 0 });
        let mut guest = Guest::new(8, packed, true);
        let mut ring = guest.ring(begin, None).unwrap();
        guest.wish(Wish::Past(0));
        assert_eq!(ring.used_event_if_behind(1, false), None, "a ring that was never used, packed {packed}");
        // Three times, over the end of the ring.
        for _ in 0..3 {
            for _ in 0..6 {
                guest.submit(2, true).unwrap();
            }
            assert_eq!(ring.used_event_if_behind(1, false), None, "it has had no answer yet");
            while let Some(chain) = pop(&mut ring) {
                serve(&chain);
                ring.push(&chain, 8);
            }
            ring.publish();
            let mut places = Vec::new();
            for (seen, waiting, lags) in
                [(0, 0, true), (1, 0, true), (1, 1, true), (3, 2, true), (4, 2, false), (5, 2, false), (6, 2, false)]
            {
                let offered = places.len();
                places.extend((offered..waiting).map(|_| guest.submit(2, true).unwrap()));
                guest.wish(Wish::Past(seen));
                assert_eq!(ring.used_event_if_behind(1, true).is_some(), seen < 6, "packed {packed}: {seen} of 6 seen");
                assert_eq!(
                    ring.used_event_if_behind(1, false).is_some(),
                    lags,
                    "packed {packed}: {seen} of 6 seen, {waiting} wait"
                );
            }
            guest.wish(Wish::Past(3));
            assert!(
                ring.used_event_if_behind(3, true).is_some() && ring.used_event_if_behind(4, true).is_none(),
                "three are left"
            );
            guest.wish(Wish::Past(2));
            let two = ring.used_event_if_behind(1, false);
            guest.wish(Wish::Past(3));
            assert_ne!(ring.used_event_if_behind(1, false), two, "it moves");
            guest.poll();
            while let Some(chain) = pop(&mut ring) {
                serve(&chain);
                ring.push(&chain, 8);
            }
            ring.publish();
            guest.poll();
            guest.wish(Wish::Past(0));
        }
        let mut guest = Guest::new(8, packed, false);
        let mut ring = guest.ring(begin, None).unwrap();
        guest.submit(2, true).unwrap();
        serve(&pop(&mut ring).unwrap());
        assert_eq!(ring.used_event_if_behind(1, false), None, "without event indices nobody knows");
    }
}

#[test]
fn any_place_that_a_driver_claims_is_survived() {
    let mut guest = Guest::new(6, true, true);
    let mut ring = guest.ring(Begin::At(0x8000), None).unwrap();
    guest.submit(2, true).unwrap();
    let chain = pop(&mut ring).unwrap();
    ring.push(&chain, 8);
    ring.publish();
    for place in 0..=u16::MAX {
        let wish = u32::from(place) | 2 << 16;
        guest.write_guest_memory(AVAILABLE_PART, &wish.to_le_bytes());
        let _ = (ring.used_event_if_behind(1, false), ring.used_event_if_behind(1, true));
    }
}
