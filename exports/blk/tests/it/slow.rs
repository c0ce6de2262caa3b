//! A disk that blocks its callers, so that data are copied; and memory that is removed.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferry_blk::{Export, Options};
use ferry_driver::memory::Buffer;
use ferry_driver::ring::{Descriptor, NEXT, WRITE};
use ferry_driver::{Config, Driver};
use ferry_vfs::{BlockRange, Data, Disk, DiskFeatures, Errno, Geometry, Input, Output, Result};
use ferry_vhost::Socket;

const WITHIN: Duration = Duration::from_secs(20);
const DISK_BYTES: u64 = 8 << 40;
/// The maximum size of a request to a disk: the copy budget.
const COPIED_BYTES_MAX: u64 = 256 << 20;
const STATUS_AT: usize = 16;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const READ: u32 = 0;
const SEND: u32 = 1;
const UNKNOWN: u32 = 77;
const MIB: u32 = 1 << 20;

/// A disk of one repeated byte, which records its requests.
#[derive(Default)]
struct DeferredTransfer {
    largest_bytes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl Disk for DeferredTransfer {
    fn geometry(&self) -> Geometry {
        Geometry {
            bytes: DISK_BYTES,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            optimal_io_bytes: 0,
            discard_bytes: 0,
        }
    }

    fn features(&self) -> DiskFeatures {
        DiskFeatures { slow: true, ..DiskFeatures::default() }
    }

    fn serial(&self) -> String {
        String::new()
    }

    fn read(&self, at: &BlockRange, out: &mut dyn Output) -> Result<Data> {
        let bytes = self.asked(at)?;
        self.read_bytes.fetch_add(at.bytes, Ordering::SeqCst);
        Ok(Data::Bytes(out.put(&vec![5; bytes])))
    }

    fn write(&self, at: &BlockRange, _: bool, input: &mut dyn Input) -> Result<Data> {
        let mut bytes = vec![0; self.asked(at)?];
        let count = input.take(&mut bytes);
        self.written_bytes.fetch_add(count as u64, Ordering::SeqCst);
        Ok(Data::Bytes(count))
    }

    fn write_zeroes(&self, _: u64, _: u64, _: bool, _: bool) -> Result<()> {
        Err(Errno::NOTSUP)
    }
}

impl DeferredTransfer {
    fn asked(&self, at: &BlockRange) -> Result<usize> {
        self.largest_bytes.fetch_max(at.bytes, Ordering::SeqCst);
        if at.bytes > COPIED_BYTES_MAX { Err(Errno::NOMEM) } else { Ok(usize::try_from(at.bytes).unwrap()) }
    }
}

struct Offered {
    disk: Arc<DeferredTransfer>,
    path: PathBuf,
    _directory: tempfile::TempDir,
    _export: Export,
    _socket: Socket,
}

fn offer() -> Offered {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let socket = Socket::bind(&path).unwrap();
    let disk = Arc::new(DeferredTransfer::default());
    let options = Options { queues: 1, ..Options::default() };
    let export = Export::start(socket.listener().unwrap(), disk.clone(), options).unwrap();
    Offered { disk, path, _directory: directory, _export: export, _socket: socket }
}

fn connect(disk: &Offered) -> Driver {
    let config = Config { first_queues: 0, queues: 1, indirect: false, memory_bytes: 16 << 20, ..Config::default() };
    Driver::connect(&disk.path, config).unwrap()
}

/// Sends a request whose data are the same memory `times` over. Returns the status, and the length in the used ring.
fn ask(driver: &mut Driver, kind: u32, (address, bytes): (u64, u32), times: usize) -> (u8, u32) {
    let queue = driver.queue(0);
    let parts = queue.memory().alloc(STATUS_AT + 1, 64).unwrap();
    parts.write(0, &[kind.to_le_bytes().as_slice(), &[0; 12], &[0xff]].concat());
    let direction = if kind == SEND { 0 } else { WRITE };
    let data = Descriptor { addr: address, len: bytes, flags: direction, next: 0 };
    let header = Descriptor { addr: parts.guest(), len: 16, flags: 0, next: 0 };
    let status = Descriptor { addr: parts.guest() + STATUS_AT as u64, len: 1, flags: WRITE, next: 0 };
    let chain: Vec<_> = [header].into_iter().chain((0..times).map(|_| data)).chain([status]).collect();
    // No other request is in flight, so the whole table is free.
    let last = u16::try_from(chain.len()).unwrap() - 1;
    for (index, descriptor) in (0u16..).zip(chain) {
        let flags = descriptor.flags | if index < last { NEXT } else { 0 };
        Descriptor { flags, next: index + 1, ..descriptor }.store(queue.ring().table(), index.into());
    }
    queue.ring_mut().push(0);
    queue.publish();
    let used = queue.wait_used(WITHIN).unwrap();
    (parts.part(STATUS_AT, 1).to_vec(1)[0], used.len)
}

fn room(driver: &mut Driver) -> Buffer {
    driver.queue(0).memory().alloc(MIB as usize, 4096).unwrap()
}

/// Returns the peak memory of this process, in bytes.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn copies_are_bounded_whatever_the_guest_requests() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let offered = offer();
    let mut driver = connect(&offered);
    let data = room(&mut driver);
    let memory = (data.guest(), MIB);
    let before = peak_bytes();
    assert_eq!(ask(&mut driver, READ, memory, 300), (OK, 300 * MIB + 1));
    assert_eq!(data.to_vec(MIB as usize), vec![5; MIB as usize]);
    assert_eq!(ask(&mut driver, SEND, memory, 400), (OK, 1));
    let (read, written) = (&offered.disk.read_bytes, &offered.disk.written_bytes);
    assert_eq!([read, written].map(|bytes| bytes.load(Ordering::SeqCst)), [300 << 20, 400 << 20]);
    assert!(peak_bytes() < before + (100 << 20), "{} bytes after {before}", peak_bytes());
    assert!(offered.disk.largest_bytes.load(Ordering::SeqCst) <= COPIED_BYTES_MAX);

    // 1 TiB: the guest's memory is a sparse file.
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(1 << 30).unwrap();
    driver.share_file(1 << 40, 1 << 30, file.as_fd()).unwrap();
    for kind in [READ, SEND] {
        assert_eq!(ask(&mut driver, kind, (1 << 40, 1 << 30), 1000).0, IO_ERROR, "type {kind}");
    }
    assert!(offered.disk.largest_bytes.load(Ordering::SeqCst) <= COPIED_BYTES_MAX);
    assert_eq!(ask(&mut driver, READ, memory, 1), (OK, MIB + 1), "others go on");
}

#[test]
fn removed_memory_fails_only_its_request() {
    gone(&std::env::temp_dir());
    // What is on tmpfs can be cut short as well.
    gone("/dev/shm".as_ref());
}

/// The memory is a file in this directory.
fn gone(directory: &Path) {
    let offered = offer();
    let mut driver = connect(&offered);
    let data = room(&mut driver);
    let file = tempfile::tempfile_in(directory).unwrap();
    file.set_len(MIB.into()).unwrap();
    driver.share_file(1 << 40, MIB.into(), file.as_fd()).unwrap();
    assert_eq!(ask(&mut driver, READ, (1 << 40, 8192), 1), (OK, 8193));
    file.set_len(0).unwrap();
    assert_eq!(ask(&mut driver, UNKNOWN, (1 << 40, 8192), 1).1, 0, "nothing was written where the driver sees it");
    assert_eq!(ask(&mut driver, READ, (1 << 40, 8192), 1), (IO_ERROR, 0));
    assert_eq!(ask(&mut driver, READ, (1 << 40, MIB), 300), (IO_ERROR, 0));
    assert_eq!(ask(&mut driver, SEND, (1 << 40, 8192), 1), (IO_ERROR, 1));
    assert_eq!(ask(&mut driver, SEND, (1 << 40, MIB), 300), (IO_ERROR, 1));
    assert_eq!(offered.disk.written_bytes.load(Ordering::SeqCst), 0, "what is not there is not written as zeros");
    assert_eq!(ask(&mut driver, READ, (data.guest(), MIB), 1), (OK, MIB + 1), "others go on");
}
