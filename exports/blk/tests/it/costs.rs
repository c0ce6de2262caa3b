//! The costs of requests: system calls, signals and kicks.

use crate::common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{BLOCK, CopyPermit, OK, Offered, WITHIN, alone, apart, block, burst, connect, options, scattered};
use ferry_disk::Cache;
use ferry_driver::measure::{Counter, Counting};
use ferry_driver::{Config, Queue};
use ferry_wire::blk::DeviceFeatures;

const BLOCKS: u64 = 256;
const DEPTH: usize = 32;
const POLL: Duration = Duration::from_micros(100);
/// How long to repeat a measurement that other load disturbs.
const PATIENCE: Duration = Duration::from_secs(30);

/// Counts the system calls of the one worker while `load` runs. `None`: `perf` is missing or not permitted.
fn calls_of_worker(load: impl FnOnce()) -> Option<u64> {
    let counting = match Counting::start(std::process::id(), Counter::Perf) {
        Ok(counting) => counting,
        Err(error) => {
            ferry_skip::skip!("system calls cannot be counted: {error}");
            load();
            return None;
        }
    };
    load();
    let calls = counting.finish().unwrap();
    let of_worker = calls.by.iter().filter(|(thread, _)| thread.starts_with("blk-0"));
    Some(of_worker.map(|(_, count)| count).sum())
}

/// Reads `requests` blocks as libblkio does: it takes one reply, sends the next request, and requests a signal only
/// when no reply is left.
fn one_by_one(queue: &mut Queue, rooms: &[CopyPermit], requests: usize) {
    let mut numbers = scattered(BLOCKS);
    let mut wanted = vec![0; usize::from(queue.ring().size())];
    let room_of = |head: u32| rooms.iter().find(|room| u32::from(room.head) == head).unwrap();
    for room in rooms {
        wanted[usize::from(room.head)] = numbers.next().unwrap();
        room.read(wanted[usize::from(room.head)]);
        queue.ring_mut().push(room.head);
    }
    queue.publish();
    for answered in 0..requests {
        let used = queue.wait_used(WITHIN).unwrap();
        queue.ring_mut().want_call();
        let room = room_of(used.id);
        let number = &mut wanted[usize::from(room.head)];
        assert_eq!(room.status(), OK);
        assert!(room.data.to_vec(16) == block(*number)[..16], "block {number}");
        if answered + rooms.len() < requests {
            *number = numbers.next().unwrap();
            room.read(*number);
            queue.ring_mut().push(room.head);
            queue.publish();
        }
    }
}

#[test]
fn a_batch_costs_two_calls_and_one_signal() {
    if !ferry_alone::in_own_process() {
        return;
    }
    const ROUNDS: u64 = 300;
    let _alone = alone();
    for poll in [POLL, Duration::ZERO] {
        let disk = Offered::new(BLOCKS, Cache::Writeback, options(poll));
        let mut driver = connect(&disk, Config { queue_size: 128, ..Config::default() });
        let queue = driver.queue(0);
        let rooms: Vec<_> = (0..DEPTH).map(|_| CopyPermit::new(queue)).collect();
        let mut numbers = scattered(BLOCKS);
        let before = queue.counters();
        let calls = calls_of_worker(|| {
            for _ in 0..ROUNDS {
                rooms.iter().for_each(|room| room.read(numbers.next().unwrap()));
                // One signal at the first reply.
                queue.ring_mut().want_call();
                burst(queue, rooms.iter().map(|room| room.head));
                assert!(rooms.iter().all(|room| room.status() == OK));
            }
        });
        let counters = queue.counters();
        // The last one of a round may be signalled once more.
        let signals = counters.calls - before.calls;
        assert!(signals <= 2 * ROUNDS, "{signals} signals, poll {poll:?}");
        assert!(counters.kicks - before.kicks <= ROUNDS, "{counters:?}");
        if let Some(calls) = calls {
            let each = calls as f64 / (ROUNDS as f64 * DEPTH as f64);
            eprintln!("depth {DEPTH} in bursts, poll {poll:?}: {each:.4} calls, {signals} signals in {ROUNDS} rounds");
            assert!(each <= 0.1, "{each} system calls per request, poll {poll:?}");
        }
    }
}

/// Writes scattered blocks through the page cache of the directory's file system.
fn scattered_writes(directory: &Path) -> Option<f64> {
    const ROUNDS: usize = 300;
    let disk = Offered::within(directory, BLOCKS, Cache::Writeback, options(POLL));
    // Without it every write would have to be durable.
    let device_features = DeviceFeatures::FLUSH.0;
    let mut driver = connect(&disk, Config { queue_size: 128, device_features, ..Config::default() });
    let queue = driver.queue(0);
    let rooms: Vec<_> = (0..DEPTH).map(|_| CopyPermit::sent(queue)).collect();
    let mut written = vec![None; usize::try_from(BLOCKS).unwrap()];
    let calls = calls_of_worker(|| {
        for round in 0..ROUNDS {
            for (index, room) in rooms.iter().enumerate() {
                // No two writes of a batch to one block, because their order is undefined, or to adjacent ones.
                let number = (3 * round + 8 * index) as u64 % BLOCKS;
                let value = (round * DEPTH + index + 1_000_000) as u64;
                room.data.write(0, &block(value));
                room.write(number);
                written[usize::try_from(number).unwrap()] = Some(value);
            }
            queue.ring_mut().want_call();
            burst(queue, rooms.iter().map(|room| room.head));
            assert!(rooms.iter().all(|room| room.status() == OK));
        }
    });
    let file = std::fs::read(&disk.file).unwrap();
    for (number, found) in file.chunks(BLOCK).enumerate() {
        let value = written[number].unwrap_or(number as u64);
        assert!(found == block(value), "block {number} holds {:?}, not {value}", &found[..8]);
    }
    Some(calls? as f64 / (ROUNDS * DEPTH) as f64)
}

#[test]
fn scattered_writes_run_as_a_batch() {
    let _alone = alone();
    if !ferry_alone::in_own_process() {
        return;
    }
    for directory in [&std::env::temp_dir(), Path::new("/dev/shm")] {
        let Some(each) = scattered_writes(directory) else { continue };
        eprintln!("depth {DEPTH}, writes in bursts in {}: {each:.4} calls", directory.display());
        assert!(each <= 0.1, "{each} system calls per write in {}", directory.display());
    }
}

#[test]
fn a_driver_that_takes_replies_one_by_one_is_served_in_batches() {
    if !ferry_alone::in_own_process() {
        return;
    }
    const REQUESTS: usize = 40_000;
    let _alone = alone();
    let disk = apart(|| Offered::new(BLOCKS, Cache::Writeback, options(POLL)));
    let mut driver = connect(&disk, Config { queue_size: 128, ..Config::default() });
    let queue = driver.queue(0);
    let rooms: Vec<_> = (0..DEPTH).map(|_| CopyPermit::new(queue)).collect();
    // On a busy machine the driver waits for its CPU, and the worker does not always wait for the driver.
    let (begin, mut least) = (Instant::now(), f64::MAX);
    while begin.elapsed() < PATIENCE {
        let Some(calls) = calls_of_worker(|| one_by_one(queue, &rooms, REQUESTS)) else { return };
        let each = calls as f64 / REQUESTS as f64;
        eprintln!("depth {DEPTH} one by one: {each:.4} calls");
        least = least.min(each);
        if least <= 0.1 {
            return;
        }
    }
    panic!("{least} system calls per request");
}

#[test]
fn a_driver_without_notifications_gets_no_signals() {
    let _alone = alone();
    if !ferry_alone::in_own_process() {
        return;
    }
    for event_idx in [true, false] {
        let disk = Offered::new(BLOCKS, Cache::Writeback, options(POLL));
        let mut driver = connect(&disk, Config { queue_size: 128, event_idx, ..Config::default() });
        let queue = driver.queue(0);
        queue.ring_mut().suppress_calls();
        let before = queue.counters().calls;
        let mut done = 0;
        while done < 2000 {
            let header = [[0; 8], (done % BLOCKS * 8).to_le_bytes()].concat();
            while queue.in_flight() < 16 {
                queue.submit(&[&header], &[4096, 1]).unwrap();
            }
            while let Some(completion) = queue.poll().unwrap() {
                assert_eq!(completion.reply[4096], OK);
                done += 1;
            }
        }
        let signals = queue.counters().calls - before;
        assert_eq!(signals, 0, "event index {event_idx}");
    }
}
