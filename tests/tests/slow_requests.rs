//! Requests that wait hold up no others: a share of a directory on a FUSE file system of delays, on one queue.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::HashSet;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, ROOT, Ticket};
use ferry_tests::{Cache, Options, Place, Share, TIMEOUT, alone, folder};
use ferry_vfs::{
    Attr, Caller, Data, Entry, Errno, FileSystem, FileType, Handle, Ino, Input, IoRange, Name, OFlags, Output, Result,
    SetAttr,
};
use ferry_wire::fuse::abi::{GetattrIn, Opcode, OpenIn, ReadIn, WriteIn};
use zerocopy::IntoBytes;

const O_RDWR: u32 = 2;
const BYTES: u32 = 4096;
/// Slow files; the most slow requests at once.
const SLOW_MAX: usize = 64;
/// The inode of the fast file; those of the slow ones follow.
const FAST: u64 = 2;
/// Readers of the file system of delays: one for each slow request, and some for the fast ones.
const READERS: usize = SLOW_MAX + 8;
/// What other work on this machine adds. Without another thread to go on it is the whole delay, 300 ms and more.
const FLOOR: Duration = Duration::from_millis(10);
/// Rounds, of which one has to be good: other work may have the CPUs for a while.
const ROUNDS: usize = 5;

/// What is slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum What {
    Nothing,
    Read,
    Write,
    Stat,
    Open,
}

const ALL: [What; 4] = [What::Read, What::Write, What::Stat, What::Open];

/// One fast file and some slow ones, whose requests of one kind take a while.
#[derive(Default)]
struct Delays {
    what: AtomicU8,
    delay_ms: AtomicU64,
}

impl Delays {
    fn set(&self, what: What, delay: Duration) {
        self.delay_ms.store(delay.as_millis().try_into().unwrap(), Ordering::SeqCst);
        self.what.store(what as u8, Ordering::SeqCst);
    }

    fn take(&self, ino: Ino, what: What) {
        if ino.0 > FAST && self.what.load(Ordering::SeqCst) == what as u8 {
            std::thread::sleep(Duration::from_millis(self.delay_ms.load(Ordering::SeqCst)));
        }
    }

    fn attr(ino: Ino) -> Attr {
        match ino {
            Ino::ROOT => Attr::new(ino, FileType::Directory, 0o755),
            _ => Attr { size: BYTES.into(), ..Attr::new(ino, FileType::RegularFile, 0o666) },
        }
    }
}

impl FileSystem for Delays {
    fn lookup(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        let name = std::str::from_utf8(name.as_bytes()).map_err(|_| Errno::NOENT)?;
        let ino = match name.strip_prefix("slow") {
            Some(number) => FAST + 1 + number.parse::<u64>().map_err(|_| Errno::NOENT)?,
            None if name == "fast" => FAST,
            None => return Err(Errno::NOENT),
        };
        Ok(Entry::new(Ino(ino), Self::attr(Ino(ino))))
    }
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        self.take(ino, What::Stat);
        Ok(Self::attr(ino))
    }
    fn setattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>, _: &SetAttr) -> Result<Attr> {
        Ok(Self::attr(ino))
    }
    fn open(&self, _: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        self.take(ino, What::Open);
        Ok(Handle(0))
    }
    fn opendir(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(0))
    }
    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        self.take(at.ino, What::Read);
        Ok(at.read_from(&[7; BYTES as usize], out))
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> Result<Data> {
        self.take(at.ino, What::Write);
        Ok(Data::Bytes(at.len as usize))
    }
}

/// A guest of a share of such a file system.
struct Guest {
    delays: Arc<Delays>,
    driver: Driver,
    /// Inode and handle.
    fast: (u64, u64),
    slow: Vec<(u64, u64)>,
    _share: Share,
    _mount: ferry_fuse::Export,
}

impl Guest {
    /// `None` where there is no FUSE.
    fn start(options: Options) -> Option<Self> {
        if !std::path::Path::new("/dev/fuse").exists() {
            ferry_skip::skip!("there is no /dev/fuse");
            return None;
        }
        let folder = folder(Place::Memory);
        let at = folder.path().join("delays");
        fs::create_dir(&at).unwrap();
        let delays = Arc::new(Delays::default());
        let mount = ferry_fuse::Options {
            path: ferry_fuse::Path::Devfuse,
            cache: ferry_fuse::Cache::None,
            threads: READERS,
            passthrough: Some(false),
            ..ferry_fuse::Options::default()
        };
        let mount = ferry_fuse::Export::mount(&at, Arc::clone(&delays) as Arc<dyn FileSystem>, mount).unwrap();
        let share =
            Share::of(&at, folder, ferry_dir::Options::default(), Options { queues: 1, cache: Cache::None, ..options });
        let config = Config { queues: 1, memory_bytes: 64 << 20, ..Config::default() };
        let mut driver = Driver::connect(&share.socket, config).unwrap();
        driver.init().unwrap();
        let mut open = |name: String| {
            let node = driver.lookup(ROOT, &name).unwrap().nodeid;
            (node, driver.open(node, O_RDWR).unwrap().fh)
        };
        let fast = open("fast".into());
        let slow = (0..SLOW_MAX).map(|number| open(format!("slow{number}"))).collect();
        Some(Self { delays, driver, fast, slow, _share: share, _mount: mount })
    }

    fn send(&mut self, what: What, (node, fh): (u64, u64)) -> Ticket {
        let driver = &mut self.driver;
        let sent = match what {
            What::Read => {
                let args = ReadIn { fh, size: BYTES, ..ReadIn::ZERO };
                driver.send(Opcode::Read, node, &[args.as_bytes()], &[], BYTES as usize)
            }
            What::Write => {
                let args = WriteIn { fh, size: BYTES, ..WriteIn::ZERO };
                driver.send(Opcode::Write, node, &[args.as_bytes()], &[7; BYTES as usize], 8)
            }
            What::Open => {
                let args = OpenIn { flags: O_RDWR, ..OpenIn::ZERO };
                driver.send(Opcode::Open, node, &[args.as_bytes()], &[], 16)
            }
            What::Stat | What::Nothing => driver.send(Opcode::Getattr, node, &[GetattrIn::ZERO.as_bytes()], &[], 104),
        };
        sent.unwrap()
    }

    /// The latencies of fast reads and stats, in order, while so many slow requests of a kind are under way all the time.
    fn latencies(&mut self, what: What, count: usize, during: Duration) -> Vec<Duration> {
        let slow: Vec<_> = self.slow[..count].to_vec();
        let mut under_way: Vec<(Ticket, (u64, u64))> =
            slow.iter().map(|file| (self.send(what, *file), *file)).collect();
        let (mut latencies, end) = (Vec::new(), Instant::now() + during);
        let mut answered = HashSet::new();
        while Instant::now() < end {
            for fast in [What::Read, What::Stat] {
                let start = Instant::now();
                let ticket = self.send(fast, self.fast);
                loop {
                    let done = self.driver.queue(1).wait(TIMEOUT).unwrap();
                    assert_eq!(done.reply[4..8], [0; 4], "{fast:?} beside {what:?}");
                    if done.ticket == ticket {
                        break;
                    }
                    let at = under_way.iter().position(|(ticket, _)| *ticket == done.ticket).unwrap();
                    let (_, file) = under_way.swap_remove(at);
                    answered.insert(file);
                    under_way.push((self.send(what, file), file));
                }
                latencies.push(start.elapsed());
            }
        }
        while !under_way.is_empty() {
            let done = self.driver.queue(1).wait(TIMEOUT).unwrap();
            assert_eq!(done.reply[4..8], [0; 4], "{what:?}");
            let at = under_way.iter().position(|(ticket, _)| *ticket == done.ticket).unwrap();
            answered.insert(under_way.swap_remove(at).1);
        }
        assert_eq!(answered.len(), count, "each slow request was answered");
        latencies.sort_unstable();
        latencies
    }

    /// The 99th percentile of fast requests beside slow ones is at most three times the undisturbed one.
    #[track_caller]
    fn assert_undisturbed(&mut self, what: What, count: usize, delay: Duration, during: Duration) {
        let p99 = |latencies: &[Duration]| latencies[latencies.len() * 99 / 100];
        let mut seen = Vec::new();
        for _ in 0..ROUNDS {
            self.delays.set(What::Nothing, delay);
            let undisturbed = p99(&self.latencies(What::Nothing, 0, during / 2));
            self.delays.set(what, delay);
            let latencies = self.latencies(what, count, during);
            let disturbed = p99(&latencies);
            println!("{what:?} x {count}: p99 {disturbed:?} of {}, undisturbed {undisturbed:?}", latencies.len());
            if disturbed <= 3 * undisturbed + FLOOR {
                return;
            }
            seen.push((disturbed, undisturbed));
        }
        panic!("{count} slow requests ({what:?}, {delay:?}) make others wait: {seen:?}");
    }
}

#[test]
fn slow_requests_hold_up_no_others_of_their_queue() {
    let _alone = alone();
    let Some(mut guest) = Guest::start(Options::default()) else { return };
    for what in ALL {
        guest.assert_undisturbed(what, SLOW_MAX, Duration::from_millis(300), Duration::from_millis(600));
    }
}

#[test]
#[ignore = "takes a minute"]
fn any_number_of_slow_requests_holds_up_no_others() {
    let _alone = alone();
    let Some(mut guest) = Guest::start(Options::default()) else { return };
    for count in [1, 8, SLOW_MAX] {
        for what in ALL {
            guest.assert_undisturbed(what, count, Duration::from_secs(1), Duration::from_secs(4));
        }
    }
}

/// An ext4 of its own on a loop device that makes writers wait as soon as a little waits to be written.
struct Throttled {
    at: std::path::PathBuf,
    folder: Option<tempfile::TempDir>,
}

impl Throttled {
    /// `None` where that cannot be had.
    fn mount() -> Option<Self> {
        let folder = folder(Place::Disk);
        let (image, at) = (folder.path().join("image"), folder.path().join("ext4"));
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
        let mounted = Self { at, folder: Some(folder) };
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

impl Drop for Throttled {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.at).status();
        drop(self.folder.take());
    }
}

#[test]
#[ignore = "mounts a file system of its own, and writes much"]
fn buffered_writes_that_wait_for_the_disk_hold_up_no_others() {
    const CHUNK: usize = 1 << 20;
    const CHUNKS: u64 = 256;
    let _alone = alone();
    let Some(throttled) = Throttled::mount() else { return };
    fs::write(throttled.at.join("fast"), [7; BYTES as usize]).unwrap();
    fs::write(throttled.at.join("big"), "").unwrap();
    let share = Share::of(
        &throttled.at,
        folder(Place::Memory),
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
