//! Disks with a driver that splits descriptors freely and sends invalid requests.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use ferry_disk::{Cache, Options};
use ferry_driver::{Config, Driver};
use ferry_tests::Place;
use ferry_tests::disks::{DiskServer, Process};
use ferry_tests::mounts::{RunningProgram, ferry};

const BYTES: u64 = 4 << 20;
const SECTORS: u64 = BYTES / 512;
const WITHIN: Duration = Duration::from_secs(20);

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

/// FLUSH, CONFIG_WCE, DISCARD and WRITE_ZEROES.
const FEATURES: u64 = 1 << 9 | 1 << 11 | 1 << 13 | 1 << 14;

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

fn config(packed: bool, indirect: bool) -> Config {
    Config { first_queues: 0, packed, indirect, device_features: FEATURES, ..Config::default() }
}

/// Sends one request in these pieces; returns the data and the status.
#[track_caller]
fn ask(driver: &mut Driver, out: &[&[u8]], reply: &[usize]) -> (Vec<u8>, u8) {
    let queue = driver.queue(0);
    let ticket = queue.submit(out, reply).unwrap();
    let mut reply = queue.wait_for(ticket, WITHIN).unwrap().reply;
    let status = reply.pop().expect("a status");
    (reply, status)
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..=250u8).cycle().take(bytes).map(|byte| byte ^ seed).collect()
}

#[test]
fn descriptors_may_be_cut_anywhere() {
    for (packed, indirect, cache) in [
        (false, true, Cache::None),
        (false, false, Cache::Writeback),
        (true, true, Cache::Writeback),
        (true, false, Cache::None),
    ] {
        let disk = DiskServer::new(Place::Disk, BYTES, &Options { cache: Some(cache), ..Options::default() });
        let mut driver = Driver::connect(&disk.socket, config(packed, indirect)).unwrap();
        let data = pattern(4096, 7);
        let cuts: [&[usize]; 5] = [&[16, 4112], &[4112], &[1, 2, 3, 17, 600, 4112], &[8, 4112], &[16, 17, 4111, 4112]];
        for (index, cut) in cuts.iter().enumerate() {
            let sector = 8 * index as u64;
            let whole = [header(WRITE, sector), data.clone()].concat();
            let mut from = 0;
            let pieces: Vec<&[u8]> = cut.iter().map(|to| &whole[std::mem::replace(&mut from, *to)..*to]).collect();
            assert_eq!(ask(&mut driver, &pieces, &[1]), (vec![], OK), "{cut:?}, packed {packed}, indirect {indirect}");
        }
        for (index, reply) in [&[4096, 1][..], &[4097], &[1, 511, 3584, 1], &[4095, 2], &[100, 3997]].iter().enumerate()
        {
            let (data_read, status) = ask(&mut driver, &[&header(READ, 8 * index as u64)], reply);
            assert!(status == OK && data_read == data, "{reply:?}, packed {packed}, indirect {indirect}");
        }
        assert_eq!(ask(&mut driver, &[&header(FLUSH, 0)], &[1]), (vec![], OK));
        let mut name = b"disk".to_vec();
        name.resize(20, 0);
        assert_eq!(ask(&mut driver, &[&header(ID, 0)], &[20, 1]), (name, OK));
    }
}

#[test]
fn requests_that_make_no_sense_are_refused_and_change_nothing() {
    let disk = DiskServer::new(Place::Disk, BYTES, &Options::default());
    let mut driver = Driver::connect(&disk.socket, config(false, true)).unwrap();
    let sector = vec![5; 512];
    let many: Vec<u8> = (0..33).flat_map(|_| range(0, 1, 0)).collect();
    let two = |first: Vec<u8>, second: Vec<u8>| [first, second].concat();
    for (kind, at, data, reply, status) in [
        (READ, SECTORS, vec![], 513, IO_ERROR),
        (READ, SECTORS - 1, vec![], 1025, IO_ERROR),
        (READ, u64::MAX, vec![], 513, IO_ERROR),
        (READ, u64::MAX / 512, vec![], 1025, IO_ERROR),
        (READ, 0, vec![], 1, IO_ERROR),
        (READ, 0, vec![], 512, IO_ERROR),
        (WRITE, SECTORS, sector.clone(), 1, IO_ERROR),
        (WRITE, 0, vec![5; 511], 1, IO_ERROR),
        (WRITE, 0, vec![], 1, IO_ERROR),
        (DISCARD, 0, vec![], 1, IO_ERROR),
        (DISCARD, 0, range(0, 1, 0)[..15].to_vec(), 1, IO_ERROR),
        (DISCARD, 0, many.clone(), 1, IO_ERROR),
        (DISCARD, 0, range(SECTORS, 1, 0), 1, IO_ERROR),
        (DISCARD, 0, range(u64::MAX, 8, 0), 1, IO_ERROR),
        (DISCARD, 0, range(0, 1, 1), 1, UNSUPPORTED),
        (WRITE_ZEROES, 0, two(range(0, 8, 0), range(SECTORS - 1, 2, 0)), 1, IO_ERROR),
        (WRITE_ZEROES, 0, range(0, 8, 4), 1, UNSUPPORTED),
        (WRITE_ZEROES, 0, range(0, u32::MAX, 0), 1, IO_ERROR),
        (14, 0, range(0, 8, 0), 1, UNSUPPORTED),
        (u32::MAX, 0, sector.clone(), 513, UNSUPPORTED),
    ] {
        let before = ask(&mut driver, &[&[header(WRITE, 0), sector.clone()].concat()], &[1]).1;
        let (_, got) = ask(&mut driver, &[&header(kind, at), &data].map(|piece| &piece[..]), &[reply]);
        assert_eq!((before, got), (OK, status), "type {kind} at {at}, {} bytes, {reply} bytes of room", data.len());
        assert_eq!(ask(&mut driver, &[&header(READ, 0)], &[512, 1]), (sector.clone(), OK));
    }
    // A header that is cut off, and no room for a status: the first is answered, the second given back.
    assert_eq!(ask(&mut driver, &[&header(READ, 0)[..15]], &[513]).1, IO_ERROR);
    let queue = driver.queue(0);
    let ticket = queue.submit(&[&header(READ, 0)], &[]).unwrap();
    assert_eq!(queue.wait_for(ticket, WITHIN).unwrap().used_len, 0);
    assert_eq!(ask(&mut driver, &[&header(READ, 0)], &[512, 1]), (sector, OK));
    assert_eq!(std::fs::metadata(&disk.file).unwrap().len(), BYTES);
}

#[test]
fn ranges_are_carried_out_in_order() {
    for cache in [Cache::None, Cache::Writethrough] {
        let disk = DiskServer::new(Place::Disk, BYTES, &Options { cache: Some(cache), ..Options::default() });
        let features = if cache == Cache::Writethrough { 1 << 13 | 1 << 14 } else { FEATURES };
        let config = Config { device_features: features, ..config(false, true) };
        let mut driver = Driver::connect(&disk.socket, config).unwrap();
        let data = pattern(1 << 20, 1);
        assert_eq!(ask(&mut driver, &[&header(WRITE, 0), &data], &[1]).1, OK);
        let before = disk.allocated();
        let ranges = [range(0, 512, 0), range(256, 512, 0), range(0, 0, 0)].concat();
        assert_eq!(ask(&mut driver, &[&header(DISCARD, 0), &ranges], &[1]).1, OK);
        assert!(disk.allocated() + (384 << 10) <= before, "overlapping ranges are discarded all the same");
        let ranges = [range(1024, 3, 0), range(1030, 8, 1)].concat();
        assert_eq!(ask(&mut driver, &[&header(WRITE_ZEROES, 0), &ranges], &[1]).1, OK);
        let (bytes, status) = ask(&mut driver, &[&header(READ, 0)], &[1 << 20, 1]);
        assert_eq!(status, OK);
        for (at, byte) in bytes.iter().enumerate() {
            let sector = at / 512;
            let zero = sector < 768 || (1024..1027).contains(&sector) || (1030..1038).contains(&sector);
            assert_eq!(*byte, if zero { 0 } else { data[at] }, "sector {sector}");
        }
    }
}

#[test]
fn many_requests_at_once_each_find_their_own_bytes() {
    for (cache, packed) in [(Cache::None, false), (Cache::Writeback, true), (Cache::Writeback, false)] {
        let disk = DiskServer::new(Place::Disk, BYTES, &Options { cache: Some(cache), ..Options::default() });
        let mut driver = Driver::connect(&disk.socket, config(packed, true)).unwrap();
        let queue = driver.queue(0);
        // Adjacent sectors, which become one transfer, with a gap now and then and one past the end among them.
        let sectors: Vec<u64> = (0..200).map(|n| n + n / 40 * 8).chain([SECTORS]).collect();
        let mut tickets = Vec::new();
        for sector in &sectors {
            let data = pattern(512, sector.to_le_bytes()[0]);
            tickets.push(queue.submit(&[&header(WRITE, *sector), &data], &[1]).unwrap());
        }
        for (ticket, sector) in tickets.into_iter().zip(&sectors) {
            let status = queue.wait_for(ticket, WITHIN).unwrap().reply;
            assert_eq!(status, [if *sector < SECTORS { OK } else { IO_ERROR }], "a write of sector {sector}");
        }
        let reads: Vec<_> =
            sectors.iter().map(|sector| queue.submit(&[&header(READ, *sector)], &[512, 1]).unwrap()).collect();
        for (ticket, sector) in reads.into_iter().zip(&sectors).filter(|(_, sector)| **sector < SECTORS) {
            let reply = queue.wait_for(ticket, WITHIN).unwrap().reply;
            assert!(
                reply[512] == OK && reply[..512] == pattern(512, sector.to_le_bytes()[0]),
                "a read of sector {sector}"
            );
        }
    }
}

#[test]
fn reads_that_fail_on_the_host_fail_in_the_guest() {
    let disk = DiskServer::new(Place::Disk, BYTES, &Options { cache: Some(Cache::Writeback), ..Options::default() });
    let mut driver = Driver::connect(&disk.socket, config(false, true)).unwrap();
    assert_eq!(ask(&mut driver, &[&header(WRITE, 0), &vec![3; 8192]], &[1]).1, OK);
    let file = std::fs::File::options().write(true).open(&disk.file).unwrap();
    file.set_len(4096).unwrap();
    // Three adjacent reads in one batch: what is there is read, what is gone fails, each by itself.
    let queue = driver.queue(0);
    let reads = [0, 4, 8].map(|sector| queue.submit(&[&header(READ, sector)], &[2048, 1]).unwrap());
    let outcomes = reads.map(|ticket| queue.wait_for(ticket, WITHIN).unwrap().reply.pop());
    assert_eq!(outcomes, [Some(OK), Some(OK), Some(IO_ERROR)]);
    file.set_len(BYTES).unwrap();
    file.write_all_at(&[9; 512], 4096).unwrap();
    assert_eq!(ask(&mut driver, &[&header(READ, 8)], &[512, 1]), (vec![9; 512], OK));
}

/// Changes a setting of a disk.
#[track_caller]
fn set(socket: &Path, setting: &str) {
    let output = ferry(["set"]).arg(socket).arg(setting).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn requests_of_a_running_disk_are_logged_and_limited() {
    let server = Process::new(Place::Memory, BYTES, &[]);
    let mut driver = Driver::connect(&server.socket, config(false, true)).unwrap();
    let mut read = |sector| assert_eq!(ask(&mut driver, &[&header(READ, sector)], &[4096, 1]).1, OK);
    let follower = RunningProgram::new(ferry(["log"]).arg(&server.socket).args(["requests", "--follow"]));
    let wait = |what: &str| {
        let end = Instant::now() + WITHIN;
        loop {
            let (out, err) = follower.said();
            if out.contains(what) || err.contains(what) {
                break;
            }
            assert!(Instant::now() < end, "{what}: {out:?}, {err:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait("following the log");
    read(8);
    wait("Read 4096 bytes from byte 4096");
    drop(follower);
    // The first is served before it is paid; each of the others waits for a second.
    set(&server.socket, "limit=iops=1");
    let begin = Instant::now();
    (0..3).for_each(&mut read);
    assert!(begin.elapsed() >= Duration::from_millis(1500), "{:?}", begin.elapsed());
    set(&server.socket, "limit=none");
    let begin = Instant::now();
    (0..100).for_each(&mut read);
    assert!(begin.elapsed() < WITHIN, "{:?}", begin.elapsed());
}
