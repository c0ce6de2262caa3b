//! The server ends before any one of its stores to shared memory, and another takes over.

use super::model::{Guest, pop, serve};
use crate::inflight::tests::{area, own_area};
use crate::ring::*;
use crate::shared::crash;

/// What the device did, as far as it got.
#[derive(Default)]
struct Device {
    /// In the order in which they were taken, and whether the driver may have seen the answer.
    taken: Vec<u64>,
    held: Vec<(u64, Chain)>,
}

impl Device {
    fn take(&mut self, ring: &mut Ring, count: usize) {
        for _ in 0..count {
            let Some(chain) = pop(ring) else { return };
            let number = serve(&chain);
            self.taken.push(number);
            self.held.push((number, chain));
        }
    }

    /// Gives back every chain whose place is even, then the others, in one batch: out of order.
    fn give_back(&mut self, ring: &mut Ring, keep: usize) {
        let rest = self.held.split_off(keep.min(self.held.len()));
        let (even, odd): (Vec<_>, Vec<_>) = rest.into_iter().enumerate().partition(|(place, _)| place % 2 == 0);
        for (_, (_, chain)) in even.into_iter().chain(odd) {
            ring.push(&chain, 8);
        }
        ring.publish();
    }
}

/// A life of a ring: several laps, chains of many lengths, batches of one and of a whole lap.
fn live(guest: &mut Guest, device: &mut Device, log: Region, begin: Begin) {
    let size = u16::try_from(guest.setup.size).unwrap();
    let mut ring = guest.ring(begin, Some(log)).unwrap();
    for round in 0..3u16 {
        while guest.submit(2, true).is_some() {}
        device.take(&mut ring, usize::from(size));
        device.give_back(&mut ring, 0);
        guest.poll();
        for descriptors in [2, 3, 2 + round] {
            guest.submit(descriptors, false);
        }
        device.take(&mut ring, 2);
        device.give_back(&mut ring, 1);
        guest.submit(2, true);
        device.take(&mut ring, 3);
        device.give_back(&mut ring, 1);
        guest.poll();
        guest.submit(2 + round, false);
        device.take(&mut ring, usize::from(size));
        device.give_back(&mut ring, 2);
    }
    device.take(&mut ring, usize::from(size));
    device.give_back(&mut ring, 0);
    guest.poll();
}

/// Serves all chains by a server that stays. Returns the numbers in the order in which they came.
fn finish(guest: &mut Guest, log: Region) -> Vec<u64> {
    let mut ring = guest.ring(Begin::At(guest.base()), Some(log)).unwrap();
    let mut device = Device::default();
    loop {
        device.take(&mut ring, usize::MAX);
        device.give_back(&mut ring, 0);
        guest.poll();
        if !ring.has_available() {
            return device.taken;
        }
    }
}

fn check(guest: &Guest, all: usize) {
    assert_eq!(guest.in_flight(), 0, "no request is lost");
    let mut completed = guest.completed.clone();
    completed.sort_unstable();
    // The driver itself panics when something is answered that is not in flight.
    assert_eq!(completed, (0..all as u64).collect::<Vec<_>>(), "no request is doubled");
}

/// Crashes at one store, lets the driver go on meanwhile, and takes over. Returns whether there was a crash.
fn crash_at(stores: usize, size: u16, packed: bool, meanwhile: bool) -> bool {
    let mut guest = Guest::new(size, packed, true);
    let mut device = Device::default();
    let area = area(1, size);
    let log = area.region(0).unwrap();
    let begin = Begin::At(guest.base());
    let lived = crash::after(stores, || live(&mut guest, &mut device, log.clone(), begin));
    let answered_before = guest.completed.len();
    if meanwhile {
        guest.poll();
        while guest.submit(2, true).is_some() {}
        guest.submit(3, false);
    }
    let seen: Vec<u64> = guest.completed.clone();
    let resubmitted = finish(&mut guest, log);
    // Those that were taken and not seen to be answered come first, in the order in which they were taken. One that
    // the device had only begun to take is as if it had not been.
    let mut order = resubmitted.clone();
    order.sort_by_key(|number| device.taken.iter().position(|taken| taken == number).unwrap_or(usize::MAX));
    assert_eq!(resubmitted, order, "after {stores} stores");
    if meanwhile {
        assert!(resubmitted.iter().all(|number| !seen.contains(number)), "what was answered is not served again");
    }
    assert!(answered_before <= seen.len());
    check(&guest, guest.completed.len());
    lived.is_none()
}

#[test]
fn no_request_is_lost_or_doubled_wherever_the_server_ends() {
    for (size, packed) in [(4, false), (8, false), (4, true), (5, true), (8, true), (13, true)] {
        for meanwhile in [false, true] {
            let mut stores = 0;
            while crash_at(stores, size, packed, meanwhile) {
                stores += 1;
            }
            assert!(stores > 100, "the test has seen only {stores} stores");
        }
    }
}

#[test]
fn a_crash_during_the_recovery_changes_nothing() {
    for (size, packed) in [(4, false), (4, true), (5, true)] {
        for first in (0..).step_by(2) {
            let mut crashed = false;
            for second in 0.. {
                let mut guest = Guest::new(size, packed, true);
                let mut device = Device::default();
                let log = area(1, size).region(0).unwrap();
                let begin = Begin::At(guest.base());
                crashed = crash::after(first, || live(&mut guest, &mut device, log.clone(), begin)).is_none();
                guest.poll();
                while guest.submit(2, true).is_some() {}
                let recovered = crash::after(second, || finish(&mut guest, log.clone()));
                guest.poll();
                while guest.submit(2, true).is_some() {}
                finish(&mut guest, log);
                check(&guest, guest.completed.len());
                if recovered.is_some() {
                    break;
                }
            }
            if !crashed {
                break;
            }
        }
    }
}

#[test]
fn a_clean_stop_leaves_nothing_in_flight() {
    for packed in [false, true] {
        let mut guest = Guest::new(8, packed, true);
        let mut device = Device::default();
        let log = area(2, 16).region(1).unwrap();
        let begin = Begin::At(guest.base());
        live(&mut guest, &mut device, log.clone(), begin);
        let mut ring = guest.ring(Begin::At(guest.base()), Some(log.clone())).unwrap();
        assert!(!ring.is_recovering());
        assert!(pop(&mut ring).is_none());
        guest.submit(2, false);
        let chain = pop(&mut ring).unwrap();
        serve(&chain);
        // A ring that stops and goes on under the same worker still has what it took.
        let at = ring.position();
        let mut ring = guest.ring(Begin::Resume(at), Some(log)).unwrap();
        assert!(!ring.is_recovering() && !ring.has_available());
        ring.push(&chain, 8);
        ring.publish();
        guest.poll();
        assert_eq!(guest.in_flight(), 0);
    }
}

#[test]
fn requests_of_another_guest_are_not_served() {
    for packed in [false, true] {
        for (is_own, first) in [(true, 0), (true, 3), (true, 6), (false, 0)] {
            let log = if is_own { own_area() } else { area(1, 8) }.region(0).unwrap();
            let mut guest = Guest::new(8, packed, true);
            let mut device = Device::default();
            let begin = Begin::At(guest.base());
            live(&mut guest, &mut device, log.clone(), begin);
            // Its server is killed, and so is it, with some in flight.
            let mut ring = guest.ring(Begin::At(guest.base()), Some(log.clone())).unwrap();
            guest.submit(2, false).unwrap();
            pop(&mut ring).unwrap();
            drop(ring);
            if is_own {
                guest = Guest::new(8, packed, true);
            }
            for _ in 0..first {
                guest.submit(2, true);
            }
            let begin = if is_own { Guest::new(8, packed, true).base() } else { guest.base() };
            let mut ring = guest.ring(Begin::At(begin), Some(log)).unwrap();
            let mut device = Device::default();
            guest.submit(2, true);
            device.take(&mut ring, usize::MAX);
            device.give_back(&mut ring, 0);
            guest.poll();
            assert_eq!(guest.in_flight(), 0, "packed: {packed}, own: {is_own}, {first} requests at first");
        }
    }
}
