//! An exported disk, and a driver that places requests freely.

#![allow(dead_code, reason = "not every test needs all of it")]

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferry_blk::{Export, Options};
use ferry_disk::Cache;
use ferry_driver::memory::{Buffer, PAGE_BYTES, Window};
use ferry_driver::ring::{Descriptor, NEXT, WRITE};
use ferry_driver::{Config, Driver, Queue};
use ferry_vhost::Socket;

pub const WITHIN: Duration = Duration::from_secs(20);
pub const BLOCK: usize = 4096;
/// Status bytes (VIRTIO 1.3, 5.2.6).
pub const OK: u8 = 0;
const UNTOUCHED: u8 = 0xff;
const STATUS_AT: usize = 16;

/// Serializes the tests, because they count events of the whole process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A disk whose block `n` is filled with the number `n + 1`.
pub struct Offered {
    pub file: PathBuf,
    pub socket: PathBuf,
    export: Option<Export>,
    _socket: Socket,
    _directory: tempfile::TempDir,
}

impl Offered {
    pub fn new(blocks: u64, cache: Cache, options: Options) -> Self {
        Self::within(&std::env::temp_dir(), blocks, cache, options)
    }

    /// As [`Offered::new`], with the file in a directory within `parent`.
    pub fn within(parent: &Path, blocks: u64, cache: Cache, options: Options) -> Self {
        let directory = tempfile::tempdir_in(parent).unwrap();
        let (file, socket) = (directory.path().join("disk"), directory.path().join("s"));
        let bytes: Vec<u8> = (0..blocks).flat_map(block).collect();
        std::fs::write(&file, bytes).unwrap();
        let disk = ferry_disk::Options { cache: Some(cache), ..ferry_disk::Options::default() };
        let disk = ferry_disk::open(&file, &disk).unwrap();
        let bound = Socket::bind(&socket).unwrap();
        let export = Export::start(bound.listener().unwrap(), disk, options).unwrap();
        Self { file, socket, export: Some(export), _socket: bound, _directory: directory }
    }
}

impl Offered {
    /// The counters of its requests.
    pub fn metrics(&self) -> std::sync::Arc<ferry_engine::metrics::Metrics> {
        self.export.as_ref().unwrap().metrics()
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        if let Some(export) = self.export.take() {
            export.stop();
        }
    }
}

/// What a block holds at first.
pub fn block(number: u64) -> Vec<u8> {
    (number + 1).to_le_bytes().repeat(BLOCK / 8)
}

/// Connects as a driver of one queue, without indirect tables.
pub fn connect(disk: &Offered, config: Config) -> Driver {
    Driver::connect(&disk.socket, Config { first_queues: 0, queues: 1, indirect: false, ..config }).unwrap()
}

/// The memory of one request: header, status, and a block of data anywhere.
pub struct CopyPermit {
    pub head: u16,
    parts: Buffer,
    pub data: Window,
    _data: Option<Buffer>,
}

impl CopyPermit {
    /// Room with its data beside everything else.
    pub fn new(queue: &mut Queue) -> Self {
        let data = queue.memory().alloc(BLOCK, PAGE_BYTES).unwrap();
        let window = data.part(0, BLOCK);
        Self { _data: Some(data), ..Self::at(queue, window) }
    }

    /// Room whose data the device is to read.
    pub fn sent(queue: &mut Queue) -> Self {
        let data = queue.memory().alloc(BLOCK, PAGE_BYTES).unwrap();
        let window = data.part(0, BLOCK);
        Self { _data: Some(data), ..Self::with(queue, window, 0) }
    }

    /// Room with its data there.
    pub fn at(queue: &mut Queue, data: Window) -> Self {
        Self::with(queue, data, WRITE)
    }

    fn with(queue: &mut Queue, data: Window, direction: u16) -> Self {
        let parts = queue.memory().alloc(STATUS_AT + 1, 64).unwrap();
        let taken = queue.take_descriptors(3).unwrap();
        let length = |bytes: usize| u32::try_from(bytes).unwrap();
        let [header, body, status] = taken[..] else { panic!("three were asked for") };
        let table = queue.ring().table();
        Descriptor { addr: parts.guest(), len: 16, flags: NEXT, next: body }.store(table, header.into());
        let write = Descriptor { addr: data.guest(), len: length(data.len()), flags: NEXT | direction, next: status };
        write.store(table, body.into());
        let end = Descriptor { addr: parts.guest() + STATUS_AT as u64, len: 1, flags: WRITE, next: 0 };
        end.store(table, status.into());
        Self { head: header, parts, data, _data: None }
    }

    /// Makes it a read of a block.
    pub fn read(&self, number: u64) {
        self.ask(0, number);
    }

    /// Makes it a write of a block.
    pub fn write(&self, number: u64) {
        self.ask(1, number);
    }

    fn ask(&self, request: u32, number: u64) {
        let sector = number * (BLOCK as u64 / 512);
        self.parts.write(0, &[request.to_le_bytes(), [0; 4]].concat());
        self.parts.write(8, &sector.to_le_bytes());
        self.parts.write(STATUS_AT, &[UNTOUCHED]);
    }

    pub fn status(&self) -> u8 {
        self.parts.part(STATUS_AT, 1).to_vec(1)[0]
    }
}

/// Submits requests at once, and waits for as many replies.
pub fn burst(queue: &mut Queue, heads: impl IntoIterator<Item = u16>) {
    let mut count = 0;
    for head in heads {
        queue.ring_mut().push(head);
        count += 1;
    }
    queue.publish();
    for _ in 0..count {
        queue.wait_used(WITHIN).unwrap();
    }
}

/// Returns a fixed pseudorandom sequence.
pub fn scattered(below: u64) -> impl Iterator<Item = u64> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    })
}

/// Runs `make` on one CPU and continues on another, so that counts do not depend on the scheduler. On a machine with a
/// single CPU both share it.
pub fn apart<T>(make: impl FnOnce() -> T) -> T {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let allowed = sched_getaffinity(None).unwrap();
    let mut each = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).map(|cpu| {
        let mut one = CpuSet::new();
        one.set(cpu);
        one
    });
    match (each.next(), each.next()) {
        (Some(first), Some(second)) => {
            sched_setaffinity(None, &second).unwrap();
            let made = make();
            sched_setaffinity(None, &first).unwrap();
            made
        }
        _ => make(),
    }
}

/// Returns the options that tests vary.
pub fn options(poll: Duration) -> Options {
    Options { queues: 1, poll: poll.into(), ..Options::default() }
}
