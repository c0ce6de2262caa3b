//! Requests that block do not delay others: a share of a directory on a FUSE file system of delays, on one queue.

use std::collections::HashSet;
use std::fs;
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, ROOT, Ticket};
use ferry_tests::delays::{ALL, BYTES, Client, FLOOR, Mounted, SLOW_MAX, SlowCall, assert_undisturbed};
use ferry_tests::{Cache, Options, Place, Share, TIMEOUT, alone, directory};
use ferry_wire::fuse::abi::{GetattrIn, Opcode, OpenIn, ReadIn, WriteIn};
use zerocopy::IntoBytes;

const O_RDWR: u32 = 2;

/// A guest of a share of a file system of delays.
struct Guest {
    driver: Driver,
    /// Inode and handle.
    files: Vec<(u64, u64)>,
    _share: Share,
}

impl Guest {
    fn start(mounted: &Mounted) -> Self {
        let options = Options { queues: 1, cache: Cache::None, ..Options::default() };
        let share = Share::of(&mounted.path, directory(Place::Memory), ferry_dir::Options::default(), options);
        let config = Config { queues: 1, memory_bytes: 64 << 20, ..Config::default() };
        let mut driver = Driver::connect(&share.socket, config).unwrap();
        driver.init().unwrap();
        let mut open = |name: String| {
            let node = driver.lookup(ROOT, &name).unwrap().nodeid;
            (node, driver.open(node, O_RDWR).unwrap().fh)
        };
        let slow = (0..SLOW_MAX).map(|number| format!("slow{number}"));
        let files = std::iter::once("fast".into()).chain(slow).map(&mut open).collect();
        Self { driver, files, _share: share }
    }
}

impl Client for Guest {
    type Ticket = Ticket;

    fn send(&mut self, what: SlowCall, file: usize) -> Ticket {
        let (driver, (node, fh)) = (&mut self.driver, self.files[file]);
        let sent = match what {
            SlowCall::Read => {
                let args = ReadIn { fh, size: BYTES, ..ReadIn::ZERO };
                driver.send(Opcode::Read, node, &[args.as_bytes()], &[], BYTES as usize)
            }
            SlowCall::Write => {
                let args = WriteIn { fh, size: BYTES, ..WriteIn::ZERO };
                driver.send(Opcode::Write, node, &[args.as_bytes()], &[7; BYTES as usize], 8)
            }
            SlowCall::Open => {
                let args = OpenIn { flags: O_RDWR, ..OpenIn::ZERO };
                driver.send(Opcode::Open, node, &[args.as_bytes()], &[], 16)
            }
            SlowCall::Stat | SlowCall::Nothing => {
                driver.send(Opcode::Getattr, node, &[GetattrIn::ZERO.as_bytes()], &[], 104)
            }
        };
        sent.unwrap()
    }

    fn wait(&mut self) -> Ticket {
        let done = self.driver.queue(1).wait(TIMEOUT).unwrap();
        assert_eq!(done.reply[4..8], [0; 4], "no error");
        done.ticket
    }
}

#[test]
fn slow_requests_do_not_delay_their_queue() {
    let _alone = alone();
    let Some(mounted) = Mounted::new() else { return };
    let mut guest = Guest::start(&mounted);
    let times = (Duration::from_millis(300), Duration::from_millis(600));
    ALL.into_iter().for_each(|what| assert_undisturbed((&mounted, &mut guest), what, SLOW_MAX, times));
}

#[test]
#[ignore = "takes a minute"]
fn slow_requests_delay_no_others() {
    let _alone = alone();
    let Some(mounted) = Mounted::new() else { return };
    let mut guest = Guest::start(&mounted);
    let times = (Duration::from_secs(1), Duration::from_secs(4));
    for count in [1, 8, SLOW_MAX] {
        ALL.into_iter().for_each(|what| assert_undisturbed((&mounted, &mut guest), what, count, times));
    }
}

/// An ext4 of its own on a loop device that makes writers wait as soon as a little waits to be written.
struct ThrottledDisk {
    at: std::path::PathBuf,
    directory: Option<tempfile::TempDir>,
}

impl ThrottledDisk {
    /// `None` where that cannot be had.
    fn mount() -> Option<Self> {
        let directory = directory(Place::Disk);
        let (image, at) = (directory.path().join("image"), directory.path().join("ext4"));
        fs::create_dir(&at).unwrap();
        fs::File::create(&image).unwrap().set_len(1 << 30).unwrap();
        let run = |program: &str, args: &[&std::ffi::OsStr]| {
            std::process::Command::new(program)
                .args(args)
                .stdout(std::process::Stdio::null())
                .status()
                .is_ok_and(|status| status.success())
        };
        let made = run("mkfs.ext4", &["-q".as_ref(), image.as_os_str()]);
        if !made || !run("mount", &["-o".as_ref(), "loop".as_ref(), image.as_os_str(), at.as_os_str()]) {
            ferry_skip::skip!("no ext4 can be mounted here (root, mkfs.ext4, loop devices)");
            return None;
        }
        let mounted = Self { at, directory: Some(directory) };
        let device = rustix::fs::stat(&mounted.at).unwrap().st_dev;
        let bdi = format!("/sys/class/bdi/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let limits = fs::write(format!("{bdi}/strict_limit"), "1")
            .and_then(|()| fs::write(format!("{bdi}/max_bytes"), "2097152"));
        if let Err(error) = limits {
            ferry_skip::skip!("a device's dirty pages cannot be limited here (Linux 6.2): {error}");
            return None;
        }
        Some(mounted)
    }
}

impl Drop for ThrottledDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.at).status();
        drop(self.directory.take());
    }
}

#[test]
#[ignore = "mounts a file system of its own, and writes much"]
fn throttled_buffered_writes_delay_no_other_request() {
    const CHUNK: usize = 1 << 20;
    const CHUNKS: u64 = 256;
    let _alone = alone();
    let Some(throttled) = ThrottledDisk::mount() else { return };
    fs::write(throttled.at.join("fast"), [7; BYTES as usize]).unwrap();
    fs::write(throttled.at.join("big"), "").unwrap();
    let share = Share::of(
        &throttled.at,
        directory(Place::Memory),
        ferry_dir::Options::default(),
        Options { queues: 1, cache: Cache::None, ..Options::default() },
    );
    let mut driver =
        Driver::connect(&share.socket, Config { queues: 1, memory_bytes: 64 << 20, ..Config::default() }).unwrap();
    driver.init().unwrap();
    let [fast, big] = ["fast", "big"].map(|name| {
        let node = driver.lookup(ROOT, name).unwrap().nodeid;
        (node, driver.open(node, O_RDWR).unwrap().fh)
    });
    let data = vec![7; CHUNK];
    let mut measure = |depth: u64| {
        let (mut latencies, mut writes, mut next) = (Vec::new(), HashSet::new(), 0);
        let (mut longest, end) = (Duration::ZERO, Instant::now() + Duration::from_secs(4));
        while Instant::now() < end {
            while (writes.len() as u64) < depth {
                let offset = next % CHUNKS * CHUNK as u64;
                next += 1;
                let args = WriteIn { fh: big.1, offset, size: CHUNK.try_into().unwrap(), ..WriteIn::ZERO };
                writes.insert(driver.send(Opcode::Write, big.0, &[args.as_bytes()], &data, 8).unwrap());
            }
            let start = Instant::now();
            let args = ReadIn { fh: fast.1, size: BYTES, ..ReadIn::ZERO };
            let ticket = driver.send(Opcode::Read, fast.0, &[args.as_bytes()], &[], BYTES as usize).unwrap();
            loop {
                let done = driver.queue(1).wait(TIMEOUT).unwrap();
                assert_eq!(done.reply[4..8], [0; 4]);
                if done.ticket == ticket {
                    break;
                }
                assert!(writes.remove(&done.ticket));
            }
            latencies.push(start.elapsed());
            longest = longest.max(start.elapsed());
        }
        while !writes.is_empty() {
            assert!(writes.remove(&driver.queue(1).wait(TIMEOUT).unwrap().ticket));
        }
        latencies.sort_unstable();
        println!("{depth} writes under way: {} reads, {next} writes, longest read {longest:?}", latencies.len());
        latencies[latencies.len() * 99 / 100]
    };
    let (undisturbed, disturbed) = (measure(0), measure(8));
    println!("p99 of reads {disturbed:?}, undisturbed {undisturbed:?}");
    assert!(disturbed <= 3 * undisturbed + FLOOR, "{disturbed:?} beside {undisturbed:?}");
}
