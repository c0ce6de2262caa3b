//! A file system of delays, and the effect of its slow requests on others, over every protocol.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferry_vfs::{
    Attr, Caller, Data, Entry, Errno, FileSystem, FileType, Handle, Ino, Input, IoRange, Name, OFlags, Output, Result,
    SetAttr,
};
use tempfile::TempDir;

use crate::{Place, directory};

/// The length of each file, and of each transfer.
pub const BYTES: u32 = 4096;
/// Slow files; the most slow requests at once.
pub const SLOW_MAX: usize = 64;
/// The inode of the fast file; those of the slow ones follow.
const FAST: u64 = 2;
/// Readers of the file system of delays: one for each slow request, and some for the fast ones.
const READERS: usize = SLOW_MAX + 8;
/// What other work on this machine adds. Without another thread to go on it is the whole delay, 300 ms and more.
pub const FLOOR: Duration = Duration::from_millis(10);
/// Rounds, of which one has to be good: other work may have the CPUs for a while.
const ROUNDS: usize = 5;

/// What is slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SlowCall {
    /// Nothing is; for a request, a stat.
    Nothing,
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Looks at the attributes.
    Stat,
    /// Opens.
    Open,
}

/// All that can be slow.
pub const ALL: [SlowCall; 4] = [SlowCall::Read, SlowCall::Write, SlowCall::Stat, SlowCall::Open];

/// One fast file and some slow ones, whose requests of one kind take a while.
#[derive(Debug, Default)]
pub struct Delays {
    what: AtomicU8,
    delay_ms: AtomicU64,
}

impl Delays {
    fn set(&self, what: SlowCall, delay: Duration) {
        self.delay_ms.store(delay.as_millis().try_into().unwrap(), Ordering::SeqCst);
        self.what.store(what as u8, Ordering::SeqCst);
    }

    fn take(&self, ino: Ino, what: SlowCall) {
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
        self.take(ino, SlowCall::Stat);
        Ok(Self::attr(ino))
    }
    fn setattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>, _: &SetAttr) -> Result<Attr> {
        Ok(Self::attr(ino))
    }
    fn open(&self, _: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        self.take(ino, SlowCall::Open);
        Ok(Handle(0))
    }
    fn opendir(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(0))
    }
    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        self.take(at.ino, SlowCall::Read);
        Ok(at.read_from(&[7; BYTES as usize], out))
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> Result<Data> {
        self.take(at.ino, SlowCall::Write);
        Ok(Data::Bytes(at.len as usize))
    }
}

/// Where such a file system is mounted. Its fast file is `fast`, and the slow ones are `slow0`, `slow1` ...
#[derive(Debug)]
pub struct Mounted {
    /// The place.
    pub path: PathBuf,
    delays: Arc<Delays>,
    _mount: ferry_fuse::Export,
    _directory: TempDir,
}

impl Mounted {
    /// `None` where there is no FUSE.
    pub fn new() -> Option<Self> {
        if !std::path::Path::new("/dev/fuse").exists() {
            ferry_skip::skip!("there is no /dev/fuse");
            return None;
        }
        let directory = directory(Place::Memory);
        let path = directory.path().join("delays");
        fs::create_dir(&path).unwrap();
        let delays = Arc::new(Delays::default());
        let mount = ferry_fuse::Options {
            path: ferry_fuse::Path::Devfuse,
            cache: ferry_fuse::Cache::None,
            threads: READERS,
            passthrough: Some(false),
            ..ferry_fuse::Options::default()
        };
        let mount = ferry_fuse::Export::mount(&path, Arc::clone(&delays) as Arc<dyn FileSystem>, mount).unwrap();
        Some(Self { path, delays, _mount: mount, _directory: directory })
    }
}

/// A client of a share of such a file system, whose files are open. File 0 is the fast one, the slow ones follow.
pub trait Client {
    /// What tells requests apart.
    type Ticket: Copy + PartialEq;

    /// Gets ready for so many opens of each slow file.
    fn prepare(&mut self, _opens: usize) {}
    /// Sends a request.
    fn send(&mut self, what: SlowCall, file: usize) -> Self::Ticket;
    /// Waits for the next answer, which is none of an error.
    fn wait(&mut self) -> Self::Ticket;
}

/// The latencies of fast reads and stats, in order, while so many slow requests of a kind are under way all the time.
fn latencies<C: Client>(client: &mut C, what: SlowCall, count: usize, during: Duration) -> Vec<Duration> {
    let mut under_way: Vec<(C::Ticket, usize)> = (1..=count).map(|file| (client.send(what, file), file)).collect();
    let (mut latencies, end) = (Vec::new(), Instant::now() + during);
    let mut answered = HashSet::new();
    while Instant::now() < end {
        for fast in [SlowCall::Read, SlowCall::Stat] {
            let start = Instant::now();
            let ticket = client.send(fast, 0);
            loop {
                let done = client.wait();
                if done == ticket {
                    break;
                }
                let at = under_way.iter().position(|(ticket, _)| *ticket == done).unwrap();
                let (_, file) = under_way.swap_remove(at);
                answered.insert(file);
                under_way.push((client.send(what, file), file));
            }
            latencies.push(start.elapsed());
        }
    }
    while !under_way.is_empty() {
        let done = client.wait();
        let at = under_way.iter().position(|(ticket, _)| *ticket == done).unwrap();
        answered.insert(under_way.swap_remove(at).1);
    }
    assert_eq!(answered.len(), count, "each slow request ({what:?}) was answered");
    latencies.sort_unstable();
    latencies
}

/// The 99th percentile of fast requests beside slow ones is at most three times the undisturbed one.
#[track_caller]
pub fn assert_undisturbed<C: Client>(
    (mounted, client): (&Mounted, &mut C),
    what: SlowCall,
    count: usize,
    (delay, during): (Duration, Duration),
) {
    let p99 = |latencies: &[Duration]| latencies[latencies.len() * 99 / 100];
    let mut seen = Vec::new();
    for _ in 0..ROUNDS {
        mounted.delays.set(SlowCall::Nothing, delay);
        let undisturbed = p99(&latencies(client, SlowCall::Nothing, 0, during / 2));
        if what == SlowCall::Open {
            let opens = during.as_millis() / delay.as_millis() + 2;
            client.prepare(opens.try_into().unwrap());
        }
        mounted.delays.set(what, delay);
        let latencies = latencies(client, what, count, during);
        let disturbed = p99(&latencies);
        println!("{what:?} x {count}: p99 {disturbed:?} of {}, undisturbed {undisturbed:?}", latencies.len());
        if disturbed <= 3 * undisturbed + FLOOR {
            return;
        }
        seen.push((disturbed, undisturbed));
    }
    panic!("{count} slow requests ({what:?}, {delay:?}) make others wait: {seen:?}");
}
