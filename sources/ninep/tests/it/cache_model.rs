//! The cache against a model: whatever the server delays, reorders, shortens and loses in a restart, a file is a byte vector.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a test, and its sizes are small")]

use crate::fake;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use fake::{Fake, Manners};
use ferry_9p_client::cache::{Cache, CachedFile, Completion, Limits, Remote};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Read(u64, usize),
    Sequential(usize),
    Write(u64, usize, u8),
    Append(usize, u8),
    Truncate(u64),
    Invalidate(u64, u64),
    Attributes,
    Flush,
    Fsync,
    Restart,
}

const SIZE: u64 = 100_000;

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..SIZE, 1..20_000usize).prop_map(|(at, len)| Op::Read(at, len)),
        1 => (1..9000usize).prop_map(Op::Sequential),
        4 => (0..SIZE, 1..12_000usize, any::<u8>()).prop_map(|(at, len, byte)| Op::Write(at, len, byte)),
        4 => (0..SIZE, 1..500usize, any::<u8>()).prop_map(|(at, len, byte)| Op::Write(at, len, byte)),
        2 => (1..5000usize, any::<u8>()).prop_map(|(len, byte)| Op::Append(len, byte)),
        1 => (0..SIZE).prop_map(Op::Truncate),
        1 => (0..SIZE, 0..SIZE).prop_map(|(from, len)| Op::Invalidate(from, from + len)),
        1 => Just(Op::Attributes),
        1 => Just(Op::Flush),
        1 => Just(Op::Fsync),
        1 => Just(Op::Restart),
    ]
}

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| seed.wrapping_add((at * 31) as u8)).collect()
}

struct Run {
    cache: Cache,
    fake: Arc<Fake>,
    file: Arc<CachedFile>,
    model: Vec<u8>,
}

impl Run {
    fn new(manners: Manners, depth: usize, write_buffers: usize) -> Self {
        let dirty_age = Duration::from_millis(1);
        let limits = Limits {
            bytes_max: 64 << 10,
            dirty_bytes_max: 32 << 10,
            unstable_bytes_max: 32 << 10,
            message_bytes_max: 1 << 20,
            depth,
            around_bytes_max: 1 << 20,
            write_buffers,
            short_writes: 2 * (write_buffers - 1),
            dirty_age,
        };
        let model = bytes(3, 30_000);
        let cache = Cache::new(limits).unwrap();
        let fake = Fake::new(manners, model.clone());
        let file = cache.file(fake.clone(), model.len() as u64);
        Self { cache, fake, file, model }
    }

    fn put(&mut self, at: usize, data: &[u8]) {
        if self.model.len() < at + data.len() {
            self.model.resize(at + data.len(), 0);
        }
        self.model[at..at + data.len()].copy_from_slice(data);
    }

    fn check(&self, at: u64, len: usize) {
        let mut out = Vec::new();
        let count = self.file.read(at, len, &mut out).unwrap();
        let from = (at as usize).min(self.model.len());
        let expected = &self.model[from..(from + len).min(self.model.len())];
        assert_eq!(count, expected.len(), "count of a read of {len} at {at}");
        if let Some(wrong) = (0..count).find(|&i| out[i] != expected[i]) {
            panic!("read of {len} at {at}: byte {} is {}, not {}", from + wrong, out[wrong], expected[wrong]);
        }
    }

    fn step(&mut self, op: &Op) {
        let told = self.file.error_cursor();
        match *op {
            Op::Read(at, len) => self.check(at, len),
            Op::Sequential(len) => (0..self.model.len()).step_by(len).for_each(|at| self.check(at as u64, len)),
            Op::Write(at, len, seed) => {
                let data = bytes(seed, len);
                assert_eq!(self.file.write(at, len, &mut data.as_slice()), Ok(len));
                self.put(at as usize, &data);
            }
            Op::Append(len, seed) => {
                let data = bytes(seed, len);
                let at = self.model.len();
                assert_eq!(self.file.append(len, &mut data.as_slice()), Ok((at as u64, len)));
                self.put(at, &data);
            }
            Op::Truncate(size) => {
                let at_server = || {
                    self.fake.truncate(size);
                    Ok(())
                };
                self.file.truncate(size, at_server).unwrap();
                self.model.resize(size as usize, 0);
            }
            Op::Invalidate(from, to) => self.file.invalidate(from..to),
            Op::Attributes => {
                let mark = self.file.size_mark();
                let size = self.fake.content().bytes.len() as u64;
                self.file.set_size(mark, size);
            }
            Op::Flush => {
                self.file.flush(&told).unwrap();
                assert!(self.fake.content().bytes == self.model, "flushed");
            }
            Op::Fsync => {
                self.file.fsync(&told).unwrap();
                assert!(self.fake.content().durable == self.model, "made durable");
            }
            Op::Restart => {
                self.fake.pause(true);
                self.fake.restart();
                self.cache.rewrite();
                self.fake.pause(false);
            }
        }
        assert_eq!(self.file.size(), self.model.len() as u64, "size after {op:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, max_shrink_iters: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_cached_file_is_a_byte_vector(
        ops in prop::collection::vec(op(), 1..60),
        message_bytes in prop_oneof![Just(1000usize), Just(4096), Just(5000), Just(20_000), Just(1 << 20)],
        jitter_us in prop_oneof![Just(0u64), Just(100), Just(1000)],
        shortens: bool,
        depth in 1..5usize,
        write_buffers in 1..4usize,
        seed: u64,
    ) {
        let jitter = Duration::from_micros(jitter_us);
        let mut run = Run::new(Manners { message_bytes, jitter, shortens, seed, ..Manners::default() }, depth, write_buffers);
        for op in &ops {
            run.step(op);
        }
        run.step(&Op::Fsync);
        run.step(&Op::Invalidate(0, u64::MAX));
        run.step(&Op::Sequential(4096));
        prop_assert_eq!(run.fake.overlaps.load(Ordering::SeqCst), 0);
    }
}

/// Records of threads that share pages.
const RECORD: usize = 100;

fn record(owner: usize, index: usize, round: usize) -> Vec<u8> {
    bytes((owner * 57 + index * 3 + round * 11) as u8, RECORD)
}

#[test]
fn threads_that_write_read_truncate_and_sync_see_their_own_bytes() {
    const THREADS: usize = 4;
    const RECORDS: usize = 300;
    const BASE: u64 = (THREADS * RECORDS * RECORD) as u64;
    let jitter = Duration::from_micros(300);
    let run = Run::new(Manners { message_bytes: 20_000, jitter, shortens: true, ..Manners::default() }, 4, 2);
    let Run { cache, fake, file, .. } = &run;
    file.truncate(BASE, || {
        fake.truncate(BASE);
        Ok(())
    })
    .unwrap();
    let stopped = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|owner| {
                scope.spawn(move || {
                    for round in 0..6 {
                        for index in 0..RECORDS {
                            let at = ((index * THREADS + owner) * RECORD) as u64;
                            let data = record(owner, index, round);
                            assert_eq!(file.write(at, RECORD, &mut data.as_slice()), Ok(RECORD));
                            let back = (index * 7) % (index + 1);
                            let mut out = Vec::new();
                            let at = ((back * THREADS + owner) * RECORD) as u64;
                            assert_eq!(file.read(at, RECORD, &mut out), Ok(RECORD));
                            assert_eq!(out, record(owner, back, round), "thread {owner}, record {back}, round {round}");
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let mut turn = 0;
            while !stopped.load(Ordering::SeqCst) {
                turn += 1;
                let size = BASE + turn * 1777 % 30_000;
                let at_server = || {
                    fake.truncate(size);
                    Ok(())
                };
                file.truncate(size, at_server).unwrap();
                file.write(BASE + 40_000, 10, &mut [1; 10].as_slice()).unwrap();
                let mut out = Vec::new();
                file.read(size, 4096, &mut out).unwrap();
                assert!(out.iter().all(|&byte| byte == 0), "zeros where it was truncated");
                thread::sleep(Duration::from_millis(1));
            }
        });
        scope.spawn(|| {
            let told = file.error_cursor();
            while !stopped.load(Ordering::SeqCst) {
                file.fsync(&told).unwrap();
                file.invalidate(0..BASE);
                fake.pause(true);
                fake.restart();
                cache.rewrite();
                fake.pause(false);
                thread::sleep(Duration::from_millis(1));
            }
        });
        let results: Vec<_> = writers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        stopped.store(true, Ordering::SeqCst);
        assert!(results.iter().all(Result::is_ok));
    });
    file.fsync(&file.error_cursor()).unwrap();
    let content = fake.content();
    for owner in 0..THREADS {
        for index in 0..RECORDS {
            let at = (index * THREADS + owner) * RECORD;
            assert!(content.durable[at..at + RECORD] == record(owner, index, 5), "thread {owner}, record {index}");
        }
    }
    assert_eq!(fake.overlaps.load(Ordering::SeqCst), 0);
}

#[test]
fn unkept_data_are_an_error_at_the_next_fsync_after_a_restart() {
    for keeps in [true, false] {
        let unstable_bytes_max = if keeps { 1 << 20 } else { 0 };
        let cache = Cache::new(Limits { unstable_bytes_max, ..Limits::default() }).unwrap();
        let fake = Fake::new(Manners::default(), Vec::new());
        let file = cache.file(fake.clone(), 0);
        let told = file.error_cursor();
        file.write(0, 10, &mut [1; 10].as_slice()).unwrap();
        file.flush(&told).unwrap();
        let restart = || {
            fake.pause(true);
            fake.restart();
            cache.rewrite();
            fake.pause(false);
        };
        restart();
        assert_eq!(file.fsync(&told).is_ok(), keeps);
        assert_eq!(fake.content().durable.len(), if keeps { 10 } else { 0 });
        // What is durable is not lost, and no error.
        file.write(0, 10, &mut [2; 10].as_slice()).unwrap();
        file.fsync(&told).unwrap();
        restart();
        assert_eq!(file.fsync(&told), Ok(()));
        assert_eq!(fake.content().durable, [2; 10]);
        // What was closed is not kept, but said.
        file.write(0, 10, &mut [3; 10].as_slice()).unwrap();
        file.flush(&told).unwrap();
        file.release_synced();
        restart();
        assert!(file.fsync(&told).is_err());
    }
}

/// Keeps what it is asked for.
#[derive(Default)]
struct Slow {
    writes: Mutex<Vec<(Vec<u8>, Completion)>>,
}

impl Remote for Slow {
    fn message_bytes(&self) -> usize {
        4096
    }
    fn read(&self, _: u64, buffer: Vec<u8>, done: Completion) {
        done.end(buffer, Ok(0));
    }
    fn write(&self, _: u64, buffer: Vec<u8>, done: Completion) {
        self.writes.lock().unwrap().push((buffer, done));
    }
    fn sync(&self, done: Completion) {
        done.end(Vec::new(), Ok(0));
    }
}

#[test]
fn a_late_acknowledged_write_is_repeated_after_a_restart() {
    let cache = Cache::new(Limits { dirty_age: Duration::from_secs(3600), ..Limits::default() }).unwrap();
    let slow = Arc::new(Slow::default());
    let file = cache.file(slow.clone(), 0);
    let told = file.error_cursor();
    file.write(0, 10, &mut [1; 10].as_slice()).unwrap();
    thread::scope(|scope| {
        let synced = scope.spawn(|| file.fsync(&told));
        let next = || loop {
            if let Some(write) = slow.writes.lock().unwrap().pop() {
                return write;
            }
            assert!(!synced.is_finished(), "made durable without being written again");
            thread::sleep(Duration::from_millis(1));
        };
        let (buffer, done) = next();
        cache.rewrite();
        done.end(buffer, Ok(10));
        let (buffer, done) = next();
        assert_eq!(buffer, [1; 10]);
        done.end(buffer, Ok(10));
        synced.join().unwrap().unwrap();
    });
}

#[test]
fn stale_attributes_do_not_shrink_a_written_file() {
    let cache = Cache::new(Limits { dirty_age: Duration::from_secs(3600), ..Limits::default() }).unwrap();
    let fake = Fake::new(Manners::default(), vec![1; 100]);
    let file = cache.file(fake.clone(), 100);
    let told = file.error_cursor();
    let mark = file.size_mark();
    file.write(100, 100, &mut [2; 100].as_slice()).unwrap();
    assert!(!file.set_size(mark, 100), "what is not written counts");
    assert_eq!(file.size(), 200);
    file.flush(&told).unwrap();
    assert!(!file.set_size(mark, 100), "what was written since counts");
    assert_eq!(file.size(), 200);
    // Somebody else has truncated it since.
    fake.truncate(50);
    assert!(file.set_size(file.size_mark(), 50));
    assert_eq!((file.size(), file.read(0, 4096, &mut Vec::new())), (50, Ok(50)));
}

/// Two replies about a file that another client changes in between; the first one comes last.
#[test]
fn older_attributes_do_not_undo_newer_ones() {
    let cache = Cache::new(Limits::default()).unwrap();
    let fake = Fake::new(Manners::default(), vec![1; 200]);
    let file = cache.file(fake, 100);
    let [older, newer] = [file.size_mark(), file.size_mark()];
    assert!(file.set_size(newer, 200));
    assert!(!file.set_size(older, 100));
    assert_eq!((file.size(), file.read(100, 4096, &mut Vec::new())), (200, Ok(100)));
    assert!(file.set_size(file.size_mark(), 150));
}

#[test]
fn files_share_a_bounded_memory_and_keep_their_bytes() {
    const FILES: usize = 12;
    const BYTES: usize = 40_000;
    let bytes_max = 128 << 10;
    let limits = Limits {
        bytes_max,
        dirty_bytes_max: 32 << 10,
        unstable_bytes_max: 32 << 10,
        dirty_age: Duration::from_millis(1),
        write_buffers: 2,
        ..Limits::default()
    };
    let cache = Cache::new(limits).unwrap();
    let manners = Manners { message_bytes: 10_000, jitter: Duration::from_micros(200), ..Manners::default() };
    let fakes: Vec<_> = (0..FILES).map(|_| Fake::new(manners, vec![0; BYTES])).collect();
    let files: Vec<_> = fakes.iter().map(|fake| cache.file(fake.clone(), BYTES as u64)).collect();
    thread::scope(|scope| {
        for owner in 0..4 {
            let (files, cache) = (&files, &cache);
            scope.spawn(move || {
                // Each thread has its part of every file, and writes what its step says.
                let mut written = [0u8; FILES];
                for step in 1..400usize {
                    let at = (step * 7 + owner) % FILES;
                    let offset = (owner * BYTES / 4) as u64;
                    let mut out = Vec::new();
                    files[at].read(offset, BYTES / 4, &mut out).unwrap();
                    assert!(out == vec![written[at]; BYTES / 4], "thread {owner}, file {at}, step {step}");
                    written[at] = step as u8;
                    files[at].write(offset, BYTES / 4, &mut vec![step as u8; BYTES / 4].as_slice()).unwrap();
                    // What four threads read, read ahead and write at the time may be added to the bound.
                    assert!(
                        cache.bytes() <= bytes_max + 4 * (BYTES / 4 + bytes_max / 8 + 4 * 4096),
                        "{} bytes",
                        cache.bytes()
                    );
                }
            });
        }
    });
    cache.sync_all().unwrap();
    for (file, fake) in files.iter().zip(&fakes) {
        let mut out = Vec::new();
        file.read(0, BYTES, &mut out).unwrap();
        assert!(fake.content().durable == out, "made durable");
        assert_eq!(fake.overlaps.load(Ordering::SeqCst), 0);
    }
}
