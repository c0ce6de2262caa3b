//! How many messages the cache sends, how long, and how many at a time.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test, and its sizes are small")]

use crate::fake;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fake::{Fake, Manners};
use ferry_9p_client::cache::{Cache, CachedFile, Limits};
use ferry_vfs::Errno;

const MIB: usize = 1 << 20;

fn limits() -> Limits {
    // Time must not decide when something is written: machines of tests are slow.
    Limits { write_buffers: 4, dirty_age: Duration::from_secs(3600), ..Limits::default() }
}

/// A page per message and one message in flight: a client without coalescing.
fn page_at_a_time() -> Limits {
    Limits { message_bytes_max: 4096, depth: 1, write_buffers: 1, short_writes: 0, ..limits() }
}

fn file(limits: Limits, manners: Manners, size: usize) -> (Cache, Arc<Fake>, Arc<CachedFile>) {
    let cache = Cache::new(limits).unwrap();
    let bytes: Vec<u8> = expected()[..PERIOD as usize].iter().copied().cycle().take(size).collect();
    let fake = Fake::new(manners, bytes);
    let file = cache.file(fake.clone(), size as u64);
    (cache, fake, file)
}

/// The bytes of a file repeat with a period that no block divides.
const PERIOD: u64 = 65_521;

fn pattern(at: u64) -> u8 {
    let at = at % PERIOD;
    (at ^ (at >> 8)) as u8
}

fn expected() -> Vec<u8> {
    (0..PERIOD + MIB as u64).map(pattern).collect()
}

fn read_all(file: &Arc<CachedFile>, chunk: usize) {
    let mut at = 0;
    let mut out = Vec::with_capacity(chunk);
    let expected = expected();
    loop {
        out.clear();
        let count = file.read(at, chunk, &mut out).unwrap();
        assert_eq!(count, out.len());
        if count == 0 {
            break;
        }
        assert!(out == expected[(at % PERIOD) as usize..][..count], "wrong bytes at {at}");
        at += count as u64;
    }
    assert_eq!(at, file.size());
}

#[test]
fn a_sequential_reader_is_served_by_whole_messages() {
    for chunk in [4096, 128 << 10, MIB] {
        let (cache, _fake, file) = file(limits(), Manners::default(), 64 * MIB);
        read_all(&file, chunk);
        let counts = cache.counts();
        assert!(counts.read_messages <= 70, "chunk {chunk}: {counts:?}");
        assert_eq!(counts.read_bytes, 64 * MIB as u64, "nothing is read twice, or beyond the end");
    }
}

#[test]
fn sequential_readers_of_one_file_have_separate_windows() {
    let (cache, _fake, file) = file(limits(), Manners::default(), 64 * MIB);
    let part = 16 * MIB as u64;
    let mut out = Vec::new();
    for step in 0..part / 4096 {
        for reader in 0..4 {
            out.clear();
            assert_eq!(file.read(reader * part + step * 4096, 4096, &mut out), Ok(4096));
        }
    }
    let counts = cache.counts();
    assert!(counts.read_messages <= 64 + 4 * 6, "{counts:?}");
}

#[test]
fn a_random_read_requests_only_its_pages() {
    // How long this server takes is up to the machine.
    let near = Limits { around_bytes_max: 0, ..limits() };
    let (cache, fake, file) = file(near, Manners::default(), 64 * MIB);
    let mut out = Vec::new();
    for step in 1..500u64 {
        let at = (step * 7_919_993) % (64 * MIB as u64 - 4096) / 4096 * 4096;
        out.clear();
        assert_eq!(file.read(at, 4096, &mut out), Ok(4096));
        assert_eq!(out[5], pattern(at + 5));
    }
    let counts = cache.counts();
    assert!(counts.read_messages <= 499, "{counts:?}");
    assert!(fake.reads.lock().unwrap().iter().all(|read| read.1 == 4096));
}

#[test]
fn small_sequential_writes_leave_as_whole_messages() {
    let (cache, fake, file) = file(limits(), Manners::default(), 0);
    let told = file.error_cursor();
    let block: Vec<u8> = (0..4096).map(pattern).collect();
    for at in 0..(64 * MIB / 4096) as u64 {
        assert_eq!(file.write(at * 4096, 4096, &mut block.as_slice()), Ok(4096));
    }
    file.flush(&told).unwrap();
    let counts = cache.counts();
    assert!(counts.write_messages <= 70, "{counts:?}");
    assert_eq!(counts.write_bytes, 64 * MIB as u64);
    assert_eq!(counts.read_messages, 0, "writing whole pages reads nothing");
    let content = fake.content();
    assert_eq!(content.bytes.len(), 64 * MIB);
    assert!(content.bytes.chunks(4096).all(|chunk| chunk == block));
}

#[test]
fn writeback_begins_before_a_flush() {
    let (cache, _fake, file) = file(limits(), Manners::default(), 0);
    file.write(0, 2 * MIB, &mut vec![1; 2 * MIB].as_slice()).unwrap();
    wait_until(|| cache.counts().write_messages == 2);
    // Less than a message is written when it is old.
    let (cache, _fake, file) = file_aged();
    file.write(0, 10, &mut [1; 10].as_slice()).unwrap();
    wait_until(|| cache.counts().write_messages == 1);
}

fn file_aged() -> (Cache, Arc<Fake>, Arc<CachedFile>) {
    file(Limits { dirty_age: Duration::from_millis(20), ..limits() }, Manners::default(), 0)
}

fn wait_until(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(60), "waited for a minute");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_distant_server_has_many_messages_in_flight() {
    let far = Manners { delay: Duration::from_millis(1), ..Manners::default() };
    let (cache, _fake, file) = file(limits(), far, 64 * MIB);
    read_all(&file, 128 << 10);
    let told = file.error_cursor();
    assert!(cache.counts().reads_in_flight_max >= 4, "{:?}", cache.counts());
    for at in 0..16 {
        file.write(at * MIB as u64, MIB, &mut vec![1; MIB].as_slice()).unwrap();
    }
    file.flush(&told).unwrap();
    assert!(cache.counts().writes_in_flight_max >= 2, "{:?}", cache.counts());
}

#[test]
fn a_random_reader_over_a_long_link_finds_data_cached() {
    // One long wait at the beginning, and the link counts as slow: a machine that runs tests has such.
    let found: Vec<u64> = (0..3).map(|_| misses_of_a_far_random_reader()).collect();
    assert!(found.iter().any(|misses| *misses < 300), "{found:?}");
}

fn misses_of_a_far_random_reader() -> u64 {
    let far = Manners { delay: Duration::from_millis(10), ..Manners::default() };
    let (cache, fake, file) = file(limits(), far, 8 * MIB);
    let mut out = Vec::new();
    for step in 1..1000u64 {
        let at = (step * 7_919_993) % (8 * MIB as u64 - 4096) / 4096 * 4096;
        out.clear();
        assert_eq!(file.read(at, 4096, &mut out), Ok(4096));
        assert_eq!((out[0], out[4095]), (pattern(at), pattern(at + 4095)));
    }
    let counts = cache.counts();
    assert!(counts.read_bytes <= 8 * MIB as u64, "nothing is fetched twice: {counts:?}");
    // What is waited for goes first, by itself.
    assert!(fake.reads.lock().unwrap()[0].1 == 4096);
    counts.misses
}

#[test]
fn read_around_ends_when_it_is_not_used() {
    let far = Manners { delay: Duration::from_millis(2), ..Manners::default() };
    let (cache, _fake, file) = file(limits(), far, 256 * MIB);
    let mut out = Vec::new();
    // Each in a block of its own, and never twice.
    for step in 1..200u64 {
        out.clear();
        assert_eq!(file.read(step * MIB as u64 + 4096 * (step % 7), 4096, &mut out), Ok(4096));
    }
    let counts = cache.counts();
    assert!(counts.read_bytes <= (64 + 1) * MIB as u64, "{counts:?}");
}

#[test]
fn many_single_pages_are_written_at_a_time() {
    let far = Manners { delay: Duration::from_millis(20), ..Manners::default() };
    let (cache, fake, file) = file(limits(), far, 64 * MIB);
    let told = file.error_cursor();
    let pages: Vec<u64> = (0..400).map(|step| step * 7 % 401 * 37).collect();
    for page in &pages {
        file.write(page * 4096, 4096, &mut vec![*page as u8; 4096].as_slice()).unwrap();
    }
    file.flush(&told).unwrap();
    let counts = cache.counts();
    assert!((16..=32).contains(&counts.writes_in_flight_max), "{counts:?}");
    assert_eq!(counts.write_messages, 400);
    let content = fake.content();
    assert!(pages.iter().all(|page| content.bytes[*page as usize * 4096..][..4096] == vec![*page as u8; 4096]));
}

/// Unless something else is asked for, as many writes are under way as there are CPUs, and with more to write no more.
#[test]
fn there_is_a_write_buffer_for_each_cpu() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    let mut counts = vec![cpus];
    // The same on fewer.
    let all = rustix::thread::sched_getaffinity(None).unwrap();
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
    let mut one = rustix::thread::CpuSet::new();
    one.set(first);
    rustix::thread::sched_setaffinity(None, &one).unwrap();
    let on_one = Limits::default();
    rustix::thread::sched_setaffinity(None, &all).unwrap();
    counts.push(1);
    for (limits, expected) in [Limits::default(), on_one].into_iter().zip(counts) {
        let far = Manners { delay: Duration::from_millis(200), ..Manners::default() };
        let (cache, _fake, file) = file(Limits { dirty_age: Duration::from_secs(3600), ..limits }, far, 0);
        let told = file.error_cursor();
        for at in 0..2 * expected.min(16) + 1 {
            file.write((at * MIB) as u64, MIB, &mut vec![1; MIB].as_slice()).unwrap();
        }
        file.flush(&told).unwrap();
        assert_eq!(cache.counts().writes_in_flight_max, expected.min(33) as u64, "{cpus} CPUs");
    }
}

#[test]
fn page_at_a_time_falls_out_of_the_parameters() {
    let (cache, _fake, file) = file(page_at_a_time(), Manners::default(), MIB);
    read_all(&file, 128 << 10);
    let told = file.error_cursor();
    file.write(0, MIB, &mut vec![1; MIB].as_slice()).unwrap();
    file.flush(&told).unwrap();
    let counts = cache.counts();
    assert_eq!((counts.read_messages, counts.write_messages), (256, 256));
    assert_eq!((counts.reads_in_flight_max, counts.writes_in_flight_max), (1, 1));
}

#[test]
fn a_part_of_a_page_is_written_without_reading_it() {
    let (cache, fake, file) = file(limits(), Manners::default(), MIB);
    let told = file.error_cursor();
    file.write(5000, 100, &mut [7; 100].as_slice()).unwrap();
    file.write(5100, 50, &mut [8; 50].as_slice()).unwrap();
    file.flush(&told).unwrap();
    assert_eq!(*fake.writes.lock().unwrap(), [(5000, 150)]);
    assert_eq!(cache.counts().read_messages, 0);
    // The rest of the page is asked for when it is needed, and does not cover what was written.
    let mut out = Vec::new();
    assert_eq!(file.read(4096, 4096, &mut out), Ok(4096));
    assert_eq!((out[903], out[904], out[1004], out[1053], out[1054]), (pattern(4999), 7, 8, 8, pattern(5150)));
}

#[test]
fn each_handle_gets_a_write_error_once() {
    let (_cache, fake, file) = file(limits(), Manners::default(), 100);
    let (one, two) = (file.error_cursor(), file.error_cursor());
    fake.fail_writes.store(true, std::sync::atomic::Ordering::SeqCst);
    file.write(50, 4096, &mut [9; 4096].as_slice()).unwrap();
    assert_eq!(file.size(), 4146);
    // A child that closes its copy of the descriptor does not consume the error.
    assert_eq!(file.flush(&one), Err(Errno::NOSPC));
    assert_eq!(file.flush(&one), Err(Errno::NOSPC));
    for handle in [&one, &two] {
        assert_eq!(file.fsync(handle), Err(Errno::NOSPC));
        assert_eq!(file.fsync(handle), Ok(()));
        assert_eq!(file.flush(handle), Ok(()));
    }
    // What could not be written is gone: readers see what the server has.
    let mut out = Vec::new();
    assert_eq!((file.size(), file.read(0, 4096, &mut out)), (100, Ok(100)));
    assert_eq!(out[60], pattern(60));
    fake.fail_writes.store(false, std::sync::atomic::Ordering::SeqCst);
    fake.fail_syncs.store(true, std::sync::atomic::Ordering::SeqCst);
    file.write(0, 10, &mut [9; 10].as_slice()).unwrap();
    assert_eq!(file.flush(&one), Ok(()));
    assert_eq!(file.fsync(&one), Err(Errno::IO));
}

#[test]
fn a_failed_read_is_retried_by_the_next_reader() {
    let (_cache, fake, file) = file(limits(), Manners::default(), MIB);
    fake.fail_reads.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(file.read(0, 4096, &mut Vec::new()), Err(Errno::IO));
    fake.fail_reads.store(false, std::sync::atomic::Ordering::SeqCst);
    read_all(&file, 4096);
}

#[test]
fn a_silent_server_causes_an_error() {
    struct Silent;
    impl ferry_9p_client::cache::Remote for Silent {
        fn message_bytes(&self) -> usize {
            4096
        }
        fn read(&self, _: u64, _: Vec<u8>, _: ferry_9p_client::cache::Completion) {}
        fn write(&self, _: u64, _: Vec<u8>, _: ferry_9p_client::cache::Completion) {}
        fn sync(&self, _: ferry_9p_client::cache::Completion) {}
    }
    let cache = Cache::new(limits()).unwrap();
    let file = cache.file(Arc::new(Silent), 8192);
    let told = file.error_cursor();
    assert_eq!(file.read(0, 4096, &mut Vec::new()), Err(Errno::IO));
    file.write(0, 10, &mut [9; 10].as_slice()).unwrap();
    assert_eq!(file.fsync(&told), Err(Errno::IO));
}

#[test]
fn memory_is_bounded_and_a_hot_page_stays() {
    let small = Limits { bytes_max: 4 * MIB, dirty_bytes_max: MIB, unstable_bytes_max: MIB, ..limits() };
    let (cache, _fake, file) = file(small, Manners { message_bytes: 64 << 10, ..Manners::default() }, 32 * MIB);
    let mut out = Vec::new();
    for step in 0..(32 * MIB / 4096) as u64 {
        out.clear();
        assert_eq!(file.read(step * 4096, 4096, &mut out), Ok(4096));
        out.clear();
        assert_eq!(file.read(20 * MIB as u64, 4096, &mut out), Ok(4096));
        assert!(cache.bytes() <= 4 * MIB + (128 << 10), "{} at {step}", cache.bytes());
    }
    let told = file.error_cursor();
    for step in 0..8 * MIB as u64 / 4096 {
        file.write(step * 4096, 4096, &mut [1; 4096].as_slice()).unwrap();
        assert!(cache.bytes() <= 4 * MIB + (128 << 10), "{} at {step}", cache.bytes());
    }
    file.fsync(&told).unwrap();
    drop(file);
    wait_until(|| cache.bytes() == 0);
}

#[test]
#[ignore = "prints throughput over a link with a delay"]
fn throughput_over_a_link() {
    for delay_ms in [0, 1, 10] {
        for (name, limits) in [("coalesced", limits()), ("page at a time", page_at_a_time())] {
            let size = if delay_ms == 0 || name == "coalesced" { 64 * MIB } else { MIB };
            let link = Manners { delay: Duration::from_millis(delay_ms), ..Manners::default() };
            let (cache, _fake, file) = file(limits, link, size);
            let begun = Instant::now();
            read_all(&file, 128 << 10);
            let read = begun.elapsed();
            let told = file.error_cursor();
            let begun = Instant::now();
            let block = vec![1; 128 << 10];
            for at in (0..size).step_by(block.len()) {
                file.write(at as u64, block.len(), &mut block.as_slice()).unwrap();
            }
            file.flush(&told).unwrap();
            let rate = |time: Duration| size as f64 / 1e6 / time.as_secs_f64();
            let (read, write) = (rate(read), rate(begun.elapsed()));
            println!("{delay_ms} ms, {name}: read {read:.0} MB/s, write {write:.0} MB/s, {:?}", cache.counts());
        }
    }
}
