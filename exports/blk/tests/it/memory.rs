//! Registered memory, and changes of it.

use crate::common;

use std::time::Duration;

use common::{BLOCK, CopyPermit, OK, Offered, WITHIN, alone, block, burst, connect};
use ferry_blk::Options;
use ferry_disk::Cache;
use ferry_driver::memory::PAGE_BYTES;
use ferry_driver::{Config, Driver};
use rustix::fs::{FallocateFlags, fallocate};

const BLOCKS: u64 = 64;
const REGION_BYTES: usize = 4 << 20;

fn options(pin_memory: bool) -> Options {
    Options { queues: 1, poll: Duration::from_micros(50).into(), pin_memory, ..Options::default() }
}

fn config() -> Config {
    Config { regions: 2, memory_bytes: 2 * REGION_BYTES, queue_size: 128, ..Config::default() }
}

/// How many bytes of this process's memory are pinned.
fn pinned_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// Removes all pages of the second region, as a balloon does.
fn inflate(driver: &Driver) {
    let region = &driver.memory().regions()[1];
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(region.file(), flags, 0, region.len() as u64).unwrap();
}

/// Rooms whose data lie in the second region.
fn rooms(driver: &mut Driver, count: usize) -> Vec<CopyPermit> {
    let memory = std::sync::Arc::clone(driver.memory());
    let start = memory.regions()[1].guest() + PAGE_BYTES as u64;
    let windows = (0..count as u64).map(|index| memory.window(start + index * 2 * BLOCK as u64, BLOCK).unwrap());
    windows.map(|data| CopyPermit::at(driver.queue(0), data)).collect()
}

#[track_caller]
fn all_read(driver: &mut Driver, rooms: &[CopyPermit], first: u64) {
    let numbers = || (first..).step_by(3).map(|number| number % BLOCKS);
    rooms.iter().zip(numbers()).for_each(|(room, number)| room.read(number));
    burst(driver.queue(0), rooms.iter().map(|room| room.head));
    for (room, number) in rooms.iter().zip(numbers()) {
        assert_eq!(room.status(), OK, "block {number}");
        assert!(room.data.to_vec(BLOCK) == block(number), "block {number} is not what was read");
    }
}

#[test]
fn memory_that_is_removed_and_added_is_registered_again() {
    let _alone = alone();
    if !ferry_alone::in_own_process() {
        return;
    }
    for cache in [Cache::None, Cache::Writeback] {
        let disk = Offered::new(BLOCKS, cache, options(true));
        let mut driver = connect(&disk, config());
        let rooms = rooms(&mut driver, 32);
        all_read(&mut driver, &rooms, 0);
        assert_eq!(pinned_bytes(), 2 * REGION_BYTES, "both regions are registered");
        for round in 0..5 {
            driver.share_region(1, false).unwrap();
            assert_eq!(pinned_bytes(), REGION_BYTES, "what is gone is let go of");
            let room = &rooms[0];
            room.read(0);
            let queue = driver.queue(0);
            queue.ring_mut().push(room.head);
            queue.publish();
            assert_eq!(queue.wait_used(WITHIN).unwrap().len, 0, "its memory is not there");
            // The same guest addresses, the same file, other pages.
            inflate(&driver);
            driver.share_region(1, true).unwrap();
            assert_eq!(pinned_bytes(), 2 * REGION_BYTES);
            all_read(&mut driver, &rooms, round);
        }
        drop(driver);
        drop(disk);
        assert_eq!(pinned_bytes(), 0);
    }
}

#[test]
fn memory_is_removed_while_in_use() {
    let _alone = alone();
    if !ferry_alone::in_own_process() {
        return;
    }
    for (cache, pin_memory) in [(Cache::None, true), (Cache::Writeback, true), (Cache::None, false)] {
        let disk = Offered::new(BLOCKS, cache, options(pin_memory));
        let mut driver = connect(&disk, config());
        let rooms = rooms(&mut driver, 32);
        for round in 0..40 {
            rooms.iter().for_each(|room| room.read(round % BLOCKS));
            let queue = driver.queue(0);
            rooms.iter().for_each(|room| queue.ring_mut().push(room.head));
            queue.publish();
            driver.share_region(1, false).unwrap();
            for _ in &rooms {
                let used = driver.queue(0).wait_used(WITHIN).unwrap();
                let room = rooms.iter().find(|room| u32::from(room.head) == used.id).unwrap();
                // Served before, or not at all.
                let read = room.status() == OK && room.data.to_vec(BLOCK) == block(round % BLOCKS);
                assert!(used.len == 0 || read, "{used:?}, status {}", room.status());
            }
            inflate(&driver);
            driver.share_region(1, true).unwrap();
        }
        all_read(&mut driver, &rooms, 7);
    }
}

#[test]
fn pages_of_a_balloon_are_missing_only_in_pinned_memory() {
    let _alone = alone();
    if !ferry_alone::in_own_process() {
        return;
    }
    for cache in [Cache::None, Cache::Writeback] {
        let disk = Offered::new(BLOCKS, cache, options(false));
        let mut driver = connect(&disk, config());
        let rooms = rooms(&mut driver, 32);
        all_read(&mut driver, &rooms, 0);
        assert_eq!(pinned_bytes(), 0);
        inflate(&driver);
        all_read(&mut driver, &rooms, 1);
    }
}
