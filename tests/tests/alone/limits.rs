//! Limits of rates on virtio-fs, driven from the host as by a guest's kernel.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, ROOT, Ticket};
use ferry_engine::{BURST_MIN, RateLimiter, Rates, TokenBucket};
use ferry_tests::{Options, Place, Share, TIMEOUT, alone};
use ferry_wire::fuse::abi::{Opcode, ReadIn};
use zerocopy::IntoBytes;

const BLOCK: u32 = 4096;
/// How long a limiter may be in advance beside its burst: a portion, and the precision of timers.
const ADVANCE: Duration = Duration::from_millis(10);

fn rates(requests: u64, bytes: u64) -> Option<Rates> {
    Some(Rates { requests: requests.try_into().ok(), bytes: bytes.try_into().ok(), burst: BURST_MIN })
}

fn limited(bucket: &Arc<TokenBucket>) -> Share {
    let limiter = Some(RateLimiter::new(bucket));
    let share = Share::with(Place::Memory, Options { limiter, ..Options::default() });
    fs::write(share.path.join("f"), vec![7; BLOCK as usize]).unwrap();
    share
}

/// A guest that has a file open: its node and handle.
fn guest(share: &Share) -> (Driver, u64, u64) {
    let mut driver = Driver::connect(&share.socket, Config { queues: 1, ..Config::default() }).unwrap();
    driver.init().unwrap();
    let node = driver.lookup(ROOT, "f").unwrap().nodeid;
    let fh = driver.open(node, 0).unwrap().fh;
    (driver, node, fh)
}

fn send_read(driver: &mut Driver, node: u64, fh: u64) -> Ticket {
    let args = ReadIn { fh, offset: 0, size: BLOCK, ..ReadIn::ZERO };
    driver.send(Opcode::Read, node, &[args.as_bytes()], &[], BLOCK as usize).unwrap()
}

/// Reads at this depth for this time; returns how often, and for how long.
fn read((mut driver, node, fh): (Driver, u64, u64), depth: usize, time: Duration) -> (u64, Duration) {
    let mut sent: std::collections::VecDeque<_> = (0..depth).map(|_| send_read(&mut driver, node, fh)).collect();
    let (begin, mut done) = (Instant::now(), 0);
    while begin.elapsed() < time {
        let ticket = sent.pop_front().unwrap();
        assert_eq!(driver.receive(ticket).unwrap().len(), BLOCK as usize);
        done += 1;
        sent.push_back(send_read(&mut driver, node, fh));
    }
    (done, begin.elapsed())
}

/// Reads by guests of one group at once; asserts that they get no more requests per second than this, and at least this part of
/// them. Returns what each got.
#[track_caller]
fn assert_rate(limit: Option<Rates>, per_second: f64, depths: &[usize], time: Duration, least: f64) -> Vec<u64> {
    let all = TokenBucket::new(None);
    let shares: Vec<_> = depths.iter().map(|_| limited(&all)).collect();
    let guests: Vec<_> = shares.iter().map(guest).collect();
    all.set(limit);
    let read: Vec<_> = thread::scope(|scope| {
        let readers =
            guests.into_iter().zip(depths).map(|(guest, depth)| scope.spawn(move || read(guest, *depth, time)));
        let readers: Vec<_> = readers.collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    let done: u64 = read.iter().map(|(done, _)| done).sum();
    let longest = read.iter().map(|(_, time)| *time).max().unwrap_or_default();
    let in_advance = (BURST_MIN + ADVANCE * u32::try_from(depths.len()).unwrap()).as_secs_f64();
    let most = per_second * (longest.as_secs_f64() + in_advance) + depths.iter().sum::<usize>() as f64;
    assert!(done as f64 <= most, "{done} requests in {longest:?}, of {most}");
    let expected = per_second * longest.as_secs_f64();
    eprintln!("{done} requests in {longest:?}, {:.3} of the limit", done as f64 / expected);
    assert!(done as f64 >= expected * least, "{done} requests in {longest:?}, of {expected}");
    read.into_iter().map(|(done, _)| done).collect()
}

#[test]
fn guests_of_one_group_get_the_limit_in_equal_parts() {
    let _alone = alone();
    assert_rate(rates(0, 4 << 20), 1024.0, &[16], Duration::from_millis(800), 0.3);
    // The guest with more requests at once gets no more.
    let got = assert_rate(rates(1000, 0), 1000.0, &[2, 32], Duration::from_secs(2), 0.3);
    let part = got[0] as f64 / got.iter().sum::<u64>() as f64;
    assert!((0.4..0.6).contains(&part), "{got:?}");
}

#[test]
#[ignore = "long: make test-all"]
fn guests_get_their_limit_within_five_percent() {
    let _alone = alone();
    let time = Duration::from_secs(5);
    for depths in [&[1][..], &[32], &[4, 32]] {
        assert_rate(rates(2000, 0), 2000.0, depths, time, 0.95);
        assert_rate(rates(0, 8 << 20), 2048.0, depths, time, 0.95);
    }
}

#[test]
fn forget_passes_requests_that_wait_and_queues_stop() {
    let _alone = alone();
    let all = TokenBucket::new(None);
    let mut share = limited(&all);
    fs::write(share.path.join("g"), "g").unwrap();
    let (mut driver, node, fh) = guest(&share);
    let other = driver.lookup(ROOT, "g").unwrap().nodeid;
    let before = share.dir.usage().inodes;
    all.set(rates(0, 1));
    let first = send_read(&mut driver, node, fh);
    assert_eq!(driver.receive(first).unwrap().len(), BLOCK as usize);
    // It waits for an hour.
    send_read(&mut driver, node, fh);
    driver.forget(other, 1).unwrap();
    let end = Instant::now() + TIMEOUT;
    while share.dir.usage().inodes >= before {
        assert!(Instant::now() < end, "FORGET waits");
        thread::sleep(Duration::from_millis(5));
    }
    let begin = Instant::now();
    driver.stop(1).unwrap();
    share.stop();
    assert!(begin.elapsed() < TIMEOUT / 2, "{:?}", begin.elapsed());
}
