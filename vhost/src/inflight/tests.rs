use proptest::prelude::*;

use super::*;
use crate::packed::Place;

/// Memory for the tests of rings.
pub(crate) fn area(queues: u16, size: u16) -> Arc<Area> {
    let (kept, file) = Area::make(&VhostUserInflight::new(0, 0, queues, size), usize::from(queues)).unwrap();
    Area::open(&kept, file, usize::from(queues)).unwrap()
}

/// The same of a device that keeps it itself, with queues of 1024.
pub(crate) fn own_area() -> Arc<Area> {
    Area::open_own(in_flight_memory(1).unwrap(), 1).unwrap()
}

#[test]
fn memory_is_as_large_as_it_must_be_and_not_trusted() {
    let (kept, file) = Area::make(&VhostUserInflight::new(0, 0, 3, 128), 4).unwrap();
    assert_eq!((kept.num_queues, kept.queue_size, kept.mmap_offset), (3, 128, 0));
    assert_eq!(file.metadata().unwrap().len(), kept.mmap_size);
    assert!(ftruncate(&file, 0).is_err(), "nobody can pull it away");
    let open = |change: fn(&mut VhostUserInflight)| {
        let mut kept = kept;
        change(&mut kept);
        Area::open(&kept, file.try_clone().unwrap(), 4)
    };
    assert!(open(|_| {}).unwrap().region(2).is_some());
    assert!(open(|_| {}).unwrap().region(3).is_none());
    assert!(matches!(open(|kept| kept.num_queues = 4), Err(LogError::Short { .. })));
    assert!(matches!(open(|kept| kept.queue_size = 1024), Err(LogError::Short { .. })));
    assert!(matches!(open(|kept| kept.mmap_size += 1), Err(LogError::Short { .. })));
    assert!(matches!(open(|kept| kept.mmap_offset = 4096), Err(LogError::Short { .. })));
    assert!(matches!(open(|kept| kept.mmap_offset = u64::MAX), Err(LogError::Short { .. })));
    for (queues, size) in [(0, 1), (5, 1), (1, 0), (1, 1025)] {
        let asked = VhostUserInflight::new(0, 0, queues, size);
        assert!(matches!(Area::make(&asked, 4), Err(LogError::Geometry { .. })));
    }
}

#[test]
fn driver_settings_are_kept_if_there_is_room() {
    let (kept, file) = Area::make(&VhostUserInflight::new(0, 0, 2, 64), 2).unwrap();
    let open = |bytes| {
        let mut kept = kept;
        kept.mmap_size = bytes;
        Area::open(&kept, file.try_clone().unwrap(), 2).unwrap()
    };
    let area = open(kept.mmap_size);
    assert_eq!(area.driver_state(), None);
    for set in [0, 7, u32::MAX] {
        area.store_driver_state(set);
        assert_eq!(open(kept.mmap_size).driver_state(), Some(set));
    }
    // Memory that another server made has no room for it, and the last region is not touched.
    let other = open(kept.mmap_size - NOTE_BYTES as u64);
    other.store_driver_state(5);
    assert_eq!((other.driver_state(), area.driver_state()), (None, Some(u32::MAX)));
    area.clear();
    assert_eq!(area.driver_state(), Some(u32::MAX), "the device says anew what is left of it after a reset");
    area.note().unwrap().store_u64(0, u64::MAX, Ordering::Relaxed);
    assert_eq!(area.driver_state(), None, "what we never write");
}

#[test]
fn the_layout_is_that_of_the_specification() {
    let bytes = |region: &Region, at: usize| region.cells.load_u8(at, Ordering::Relaxed);
    let region = area(1, 4).region(0).unwrap();
    let (mut split, None) = SplitLog::open(region.clone(), 4, (7, 0)).unwrap() else { panic!("it is new") };
    split.take(2);
    split.take(1);
    split.add_used(2);
    // version, desc_num, last_batch_head, used_idx
    assert_eq!([8, 10, 12, 14].map(|at| bytes(&region, at)), [1, 4, 2, 7]);
    // desc[1] and desc[2]: inflight, counter
    assert_eq!([32, 40, 48, 56].map(|at| bytes(&region, at)), [1, 1, 1, 0]);
    split.end_publish(8);
    assert_eq!([14, 32, 48].map(|at| bytes(&region, at)), [8, 1, 0]);

    let region = area(1, 4).region(0).unwrap();
    let used = Place { index: 3, wrap: true };
    let (mut packed, None) = PackedLog::open(region.clone(), 4, used, |_| Some(true)).unwrap() else { panic!("new") };
    let descriptor = crate::packed::Descriptor { address: 0x77, bytes: 5, id: 9, flags: 6 };
    assert_eq!(packed.take(&[descriptor, descriptor]).unwrap(), 0);
    // version, desc_num, free_head, old_free_head, used_idx, old_used_idx, the wrap counters
    assert_eq!([8, 10, 12, 14, 16, 18, 20, 21].map(|at| bytes(&region, at)), [1, 4, 2, 2, 3, 3, 1, 1]);
    // desc[0]: inflight, next, last, num, counter, id, flags, len, addr
    assert_eq!([32, 34, 36, 38, 40, 48, 50, 52, 56].map(|at| bytes(&region, at)), [1, 1, 1, 2, 0, 9, 6, 5, 0x77]);
    packed.begin_publish([0].into_iter(), Place { index: 1, wrap: false });
    assert_eq!([12, 14, 16, 18, 20, 21].map(|at| bytes(&region, at)), [0, 2, 1, 3, 0, 1]);
    packed.end_publish([0].into_iter(), Place { index: 1, wrap: false });
    assert_eq!([12, 14, 16, 18, 20, 21, 32].map(|at| bytes(&region, at)), [0, 0, 1, 1, 0, 0, 0]);
}

#[test]
fn memory_of_another_ring_or_version_is_not_taken_for_this_ones() {
    let area = area(1, 8);
    let region = area.region(0).unwrap();
    let open = |used_index| SplitLog::open(region.clone(), 8, (used_index, 0)).map(|(_, found)| found);
    assert_eq!(open(100).unwrap(), None);
    SplitLog::open(region.clone(), 8, (100, 0)).unwrap().0.take(3);
    assert_eq!(open(100).unwrap(), Some(vec![3]));
    assert_eq!(open(0).unwrap(), None, "a ring that begins anew");
    assert_eq!(open(0).unwrap(), Some(vec![]), "and nothing of the old one is left");
    assert!(matches!(SplitLog::open(region.clone(), 16, (0, 0)), Err(LogError::Size { kept: 8, queue: 16 })));
    region.cells.store_u16(VERSION_AT, 2, Ordering::Relaxed);
    assert!(matches!(open(0), Err(LogError::Version(2))));
    area.clear();
    assert_eq!(open(0).unwrap(), None);
    region.cells.store_u16(ENTRIES_AT, 4, Ordering::Relaxed);
    assert!(matches!(open(0), Err(LogError::Size { kept: 4, .. })));
}

#[test]
fn the_requests_of_a_migrated_guest_are_found_once_its_ring_is_known() {
    let region = area(1, 8).region(0).unwrap();
    let open = |used_index, taken| SplitLog::open(region.clone(), 8, (used_index, taken)).unwrap().1;
    SplitLog::open(region.clone(), 8, (5, 0)).unwrap().0.take(1);
    for _ in 0..2 {
        SplitLog::record_migrated(region.clone(), &[6, 2]);
        assert!(region.is_migrated());
    }
    assert_eq!(open(40_000, 2), Some(vec![6, 2]));
    assert!(!region.is_migrated());
    assert_eq!(open(40_000, 0), Some(vec![6, 2]), "an ordinary log from now on");
    SplitLog::record_migrated(region.clone(), &[6, 2]);
    assert_eq!(open(40_000, 0), Some(vec![6, 2]), "the front end has lost a server since");
    // The guest was reset meanwhile.
    SplitLog::record_migrated(region.clone(), &[6, 2]);
    assert_eq!(open(0, 0), None);
    assert_eq!(open(0, 0), Some(vec![]));
    // A packed ring takes no such requests.
    SplitLog::record_migrated(region.clone(), &[6, 2]);
    assert!(PackedLog::open(region, 8, Place::FRESH, |_| Some(true)).unwrap().1.is_none());
}

#[test]
fn the_length_of_a_chain_is_read_once() {
    let region = area(1, 4).region(0).unwrap();
    let open = || PackedLog::open(region.clone(), 4, Place::FRESH, |_| Some(true)).unwrap();
    let descriptor = crate::packed::Descriptor::default();
    open().0.take(&[descriptor, descriptor]).unwrap();
    let (log, Some(found)) = open() else { panic!("it is not new") };
    // A longer one, and one that never ends.
    region.cells.store_u16(32 + 6, u16::MAX, Ordering::Relaxed);
    region.cells.store_u16(64 + 2, 0, Ordering::Relaxed);
    let mut out = Vec::new();
    log.read(found.entries[0], &mut out).unwrap();
    assert_eq!((found.descriptors, out.len()), (2, 2));
}

proptest! {
    /// Whatever the front end writes into it: no panic, an end, and nothing outside.
    #[test]
    fn survives_any_contents(
        bytes in prop::collection::vec(any::<u8>(), 32 + 32 * 8),
        sound in any::<bool>(),
        small in any::<bool>(),
        available in any::<Option<bool>>(),
    ) {
        let region = area(1, 8).region(0).unwrap();
        for (at, byte) in bytes.into_iter().enumerate() {
            region.cells.store_u8(at, if small { byte % 9 } else { byte }, Ordering::Relaxed);
        }
        if sound {
            region.cells.store_u16(VERSION_AT, 1, Ordering::Relaxed);
            region.cells.store_u16(ENTRIES_AT, 8, Ordering::Relaxed);
        }
        if let Ok((mut log, found)) = SplitLog::open(region.clone(), 8, (3, 0)) {
            for head in found.unwrap_or_default() {
                prop_assert!(head < 8);
                log.add_used(head);
            }
            log.end_publish(4);
        }
        if let Ok((mut log, found)) = PackedLog::open(region, 8, Place::FRESH, |_| available) {
            let mut out = Vec::new();
            for entry in found.map(|found| found.entries).unwrap_or_default() {
                if log.read(entry, &mut out).is_ok() {
                    log.begin_publish([entry.0].into_iter(), Place::FRESH);
                    log.end_publish([entry.0].into_iter(), Place::FRESH);
                }
            }
            while log.take(&[crate::packed::Descriptor::default()]).is_ok_and(|entry| entry != 7) {}
        }
    }
}
