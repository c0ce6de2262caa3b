//! Limits of rates, by the driver of a guest.

use crate::common;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{BLOCK, CopyPermit, OK, Offered, alone, connect, options, scattered};
use ferry_blk::{Options, RateLimiter};
use ferry_disk::Cache;
use ferry_driver::Config;
use ferry_engine::{BURST_MIN, Rates, TokenBucket};

const BLOCKS: u64 = 256;
/// How long a limiter may be in advance beside its burst: a portion, and the precision of timers.
const ADVANCE: Duration = Duration::from_millis(10);

fn bucket(requests: u64, bytes: u64) -> Arc<TokenBucket> {
    TokenBucket::new(Some(Rates { requests: requests.try_into().ok(), bytes: bytes.try_into().ok(), burst: BURST_MIN }))
}

fn limited(bucket: &Arc<TokenBucket>) -> Offered {
    let limiter = Some(RateLimiter::new(bucket));
    Offered::new(BLOCKS, Cache::Writeback, Options { limiter, ..options(Duration::ZERO) })
}

/// Reads blocks at this depth for this time; returns how many, and for how long.
fn read(disk: &Offered, depth: usize, time: Duration) -> (u64, Duration) {
    let mut driver = connect(disk, Config { queue_size: 128, ..Config::default() });
    let queue = driver.queue(0);
    let rooms: Vec<_> = (0..depth).map(|_| CopyPermit::new(queue)).collect();
    let mut numbers = scattered(BLOCKS);
    let (begin, mut done) = (Instant::now(), 0);
    for room in &rooms {
        room.read(numbers.next().unwrap());
        queue.ring_mut().push(room.head);
    }
    queue.publish();
    while begin.elapsed() < time {
        queue.ring_mut().want_call();
        let used = queue.wait_used(common::WITHIN).unwrap();
        let room = rooms.iter().find(|room| u32::from(room.head) == used.id).unwrap();
        assert_eq!(room.status(), OK);
        done += 1;
        room.read(numbers.next().unwrap());
        queue.ring_mut().push(room.head);
        queue.publish();
    }
    (done, begin.elapsed())
}

/// Reads from disks of one bucket at once; asserts that they get no more than this many requests per second, and at least this part
/// of them. Returns what each got.
#[track_caller]
fn assert_rate(all: &Arc<TokenBucket>, per_second: f64, depths: &[usize], time: Duration, least: f64) -> Vec<u64> {
    let disks: Vec<_> = depths.iter().map(|_| limited(all)).collect();
    let read: Vec<_> = thread::scope(|scope| {
        let readers = disks.iter().zip(depths).map(|(disk, depth)| scope.spawn(move || read(disk, *depth, time)));
        let readers: Vec<_> = readers.collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    let (done, longest) = (read.iter().map(|(done, _)| done).sum::<u64>(), read.iter().map(|(_, time)| *time).max());
    let longest = longest.unwrap_or_default();
    let in_advance = (BURST_MIN + ADVANCE * u32::try_from(depths.len()).unwrap()).as_secs_f64();
    let most = per_second * (longest.as_secs_f64() + in_advance) + depths.iter().sum::<usize>() as f64;
    assert!(done as f64 <= most, "{done} requests in {longest:?}, of {most}");
    let expected = per_second * longest.as_secs_f64();
    eprintln!("{done} requests in {longest:?}, {:.3} of the limit", done as f64 / expected);
    assert!(done as f64 >= expected * least, "{done} requests in {longest:?}, of {expected}");
    read.into_iter().map(|(done, _)| done).collect()
}

#[test]
fn a_disk_runs_at_its_limit() {
    let _alone = alone();
    let second = Duration::from_secs(1);
    assert_rate(&bucket(2000, 0), 2000.0, &[16], second, 0.3);
    assert_rate(&bucket(0, 4 << 20), 1024.0, &[16], second, 0.3);
}

#[test]
#[ignore = "long: make test-all"]
fn a_disk_gets_its_limit_within_five_percent() {
    let _alone = alone();
    let time = Duration::from_secs(5);
    for depth in [1, 32] {
        assert_rate(&bucket(2000, 0), 2000.0, &[depth], time, 0.95);
        let got = assert_rate(&bucket(0, 8 << 20), 2048.0, &[depth], time, 0.95)[0];
        assert!(got * BLOCK as u64 <= (8 << 20) * 5 * 105 / 100, "{got} blocks");
    }
}

#[test]
fn disks_of_one_group_get_equal_parts() {
    let _alone = alone();
    // The disk with more requests at once gets no more.
    let got = assert_rate(&bucket(1000, 0), 1000.0, &[2, 32], Duration::from_secs(2), 0.3);
    let share = got[0] as f64 / got.iter().sum::<u64>() as f64;
    assert!((0.4..0.6).contains(&share), "{got:?}");
}

#[test]
fn a_queue_and_a_disk_stop_while_requests_wait() {
    let _alone = alone();
    let disk = limited(&bucket(1, 0));
    let mut driver = connect(&disk, Config { queue_size: 128, ..Config::default() });
    let queue = driver.queue(0);
    let rooms: Vec<_> = (0..16).map(|_| CopyPermit::new(queue)).collect();
    for room in &rooms {
        room.read(0);
        queue.ring_mut().push(room.head);
    }
    queue.publish();
    queue.wait_used(common::WITHIN).unwrap();
    let begin = Instant::now();
    let base = driver.stop(0).unwrap();
    assert!((1..16).contains(&base), "{base} requests were taken");
    drop(disk);
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[test]
fn zeros_that_a_guest_writes_count() {
    let _alone = alone();
    // A disk of one second.
    let bytes = BLOCKS * BLOCK as u64;
    let disk = limited(&bucket(0, bytes));
    let mut driver = connect(&disk, Config { device_features: 1 << 14, ..Config::default() });
    let begin = Instant::now();
    for _ in 0..3 {
        let header = [&13_u32.to_le_bytes()[..], &[0; 12]].concat();
        let sectors = u32::try_from(bytes / 512).unwrap();
        let range = [&[0; 8][..], &sectors.to_le_bytes(), &[0; 4]].concat();
        let ticket = driver.queue(0).submit(&[&header, &range], &[1]).unwrap();
        assert_eq!(driver.queue(0).wait_for(ticket, common::WITHIN).unwrap().reply, [OK]);
    }
    assert!(begin.elapsed() > Duration::from_millis(1500), "{:?}", begin.elapsed());
}
