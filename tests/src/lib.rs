//! What the whole-system tests share: a directory being served, guests that use it, and the process's own usage.
//!
//! The servers run in the test's own process, so that a test sees their resources ([`Dir::usage`], descriptors,
//! threads). Everything is released on drop, even when a test fails: guests are killed, servers stopped, directories
//! removed.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test that cannot go on ends")]

pub mod confined;
pub mod delays;
pub mod disks;
pub mod host_root;
pub mod inside;
pub mod mounts;
pub mod ninep;
pub mod recipes;
pub mod sandboxed;
pub mod suites;
pub mod survivor;
pub mod window;

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

pub use ferry_dir::{Dir, Usage};
pub use ferry_guest::{self as guest, Cache as GuestCache, Device, Guest, Input, Kind, Mount, Output, Running};
pub use ferry_virtiofs::{Cache, Export, Options};
use tempfile::TempDir;

/// Where the guest mounts the share.
pub const MOUNTPOINT: &str = "/mnt/share";

/// Longer than any step of a short test takes on a machine that is slower and busier than usual: it only ends what hangs.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// How long a server may take to give everything back, on a slow, busy machine.
pub const SETTLE: Duration = Duration::from_secs(60);

/// The maximum length of the end of a guest's console that is shown.
const CONSOLE_LINES_MAX: usize = 60;
/// The same in bytes.
const CONSOLE_BYTES_MAX: usize = 16 << 10;

/// All cache modes, with the names that tests say.
pub const CACHES: [(&str, Cache); 4] =
    [("none", Cache::None), ("auto", Cache::Auto), ("metadata", Cache::Metadata), ("always", Cache::Always)];

/// The cache mode of a name.
pub fn cache(name: &str) -> Cache {
    CACHES.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no cache mode {name}")).1
}

/// A name within the cache modes' table.
pub fn cache_name(cache: Cache) -> &'static str {
    CACHES.iter().find(|(_, known)| *known == cache).unwrap().0
}

/// The kind of the host's file system below a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The file system that the build goes to: a real disk.
    Disk,
    /// /dev/shm.
    Memory,
}

/// A directory that is removed at the end. Its path is short: sockets go there too.
pub fn directory(place: Place) -> TempDir {
    let base = match place {
        Place::Disk => PathBuf::from(std::env::var_os("TMPDIR").unwrap_or_else(|| "/var/tmp".into())),
        Place::Memory => "/dev/shm".into(),
    };
    tempfile::Builder::new().prefix("ferry-tests.").tempdir_in(&base).unwrap()
}

/// A directory and the server that shares it.
#[derive(Debug)]
pub struct Share {
    /// The source, to ask what it holds.
    pub dir: Arc<Dir>,
    /// The server's socket.
    pub socket: PathBuf,
    /// The shared directory.
    pub path: PathBuf,
    export: Option<Export>,
    _directory: TempDir,
}

impl Share {
    /// Shares a fresh directory on a disk.
    pub fn new(cache: Cache) -> Self {
        Self::with(Place::Disk, Options { cache, ..Options::default() })
    }

    /// Shares a fresh directory; the tag is `t` unless the options have another.
    pub fn with(place: Place, options: Options) -> Self {
        let directory = directory(place);
        let path = directory.path().join("shared");
        std::fs::create_dir(&path).unwrap();
        let dir_options = ferry_dir::Options { writeback: options.writeback, ..ferry_dir::Options::default() };
        Self::of(&path, directory, dir_options, options)
    }

    /// Shares a directory within a directory, which is removed afterwards.
    pub fn of(path: &Path, directory: TempDir, dir_options: ferry_dir::Options, options: Options) -> Self {
        log();
        let dir = Arc::new(Dir::open(path, dir_options).unwrap());
        let socket = directory.path().join("s");
        let tag = options.tag.clone().or_else(|| Some("t".parse().unwrap()));
        let source = Arc::clone(&dir) as Arc<dyn ferry_vfs::FileSystem>;
        let export = Export::listen(&socket, source, Options { tag, ..options }).unwrap();
        Self { dir, socket, path: path.into(), export: Some(export), _directory: directory }
    }

    /// A second server, with its own [`Dir`], on the same directory.
    pub fn again(&self, cache: Cache) -> (PathBuf, Export) {
        let socket = self.socket.with_extension("again");
        let dir = Arc::new(Dir::open(&self.path, ferry_dir::Options::default()).unwrap());
        let options = Options { tag: Some("t".parse().unwrap()), cache, ..Options::default() };
        let export = Export::listen(&socket, dir, options).unwrap();
        (socket, export)
    }

    /// Another socket on the same [`Dir`], for another guest.
    pub fn beside(&self, cache: Cache, number: u32) -> (PathBuf, Export) {
        self.beside_with(Options { cache, ..Options::default() }, number)
    }

    /// The same, with further options.
    pub fn beside_with(&self, options: Options, number: u32) -> (PathBuf, Export) {
        let socket = self.socket.with_extension(number.to_string());
        let options = Options { tag: Some("t".parse().unwrap()), ..options };
        let export = Export::listen(&socket, Arc::clone(&self.dir) as Arc<dyn ferry_vfs::FileSystem>, options).unwrap();
        (socket, export)
    }

    /// A User-mode Linux guest with the share as its working directory; its output is collected.
    pub fn guest<S: Into<OsString>>(&self, command: impl IntoIterator<Item = S>) -> Guest {
        guest_on(&self.socket, command)
    }

    /// How long the window of its guest is, and how much of it is mapped, in bytes.
    pub fn window(&self) -> (u64, u64) {
        let window = self.export.as_ref().map(Export::window).unwrap_or_default();
        (window.bytes(), window.mapped_bytes())
    }

    /// How many requests of some operations were served.
    pub fn requests(&self, operations: &[&str]) -> u64 {
        let snapshot = self.export.as_ref().map(|export| export.share().metrics().snapshot()).unwrap_or_default();
        let counted = snapshot.operations.iter().filter(|operation| operations.contains(&&*operation.name));
        counted.map(|operation| operation.requests() + operation.in_flight).sum()
    }

    /// Runs a shell script in a guest on the share.
    pub fn sh(&self, script: &str) -> GuestResult {
        run(self.guest(["sh", "-euc", script]), TIMEOUT)
    }

    /// Waits until no guest holds anything any more.
    ///
    /// # Panics
    /// When something is still held after [`SETTLE`].
    pub fn assert_released(&self) {
        let end = Instant::now() + SETTLE;
        loop {
            let usage = self.dir.usage();
            // The root is always known.
            if usage.inodes <= 1 && usage.handles == 0 {
                return;
            }
            assert!(Instant::now() < end, "still held although no guest is there: {usage:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends the server.
    pub fn stop(&mut self) {
        if let Some(export) = self.export.take() {
            export.stop();
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.stop();
    }
}

/// How long an emulated guest may boot beside others, on a machine with much to do.
pub const BOOT: Duration = Duration::from_secs(600);

/// A guest with the share at `socket` as its working directory.
pub fn guest_on<S: Into<OsString>>(socket: &Path, command: impl IntoIterator<Item = S>) -> Guest {
    let mut guest = Guest::new(GuestCache::from_env().unwrap(), command);
    guest.devices = vec![Device::fs(socket, "t")];
    guest.mounts = vec![Mount::virtiofs("t", MOUNTPOINT)];
    guest.cwd = MOUNTPOINT.into();
    guest.boot_timeout = BOOT;
    guest.stdin = Input::Null;
    guest.stdout = Output::Piped;
    guest.stderr = Output::Piped;
    guest
}

/// What a guest's command left.
#[derive(Debug, Clone)]
pub struct GuestResult {
    /// Its exit status.
    pub status: i32,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
    /// From the start of the guest to its end.
    pub took: Duration,
    /// The end of the guest's console, if the command failed.
    pub console: String,
}

impl GuestResult {
    /// The output of a command that must have succeeded.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.status, 0, "the command failed:\n{}\n{}\n{}", self.out, self.err, self.console);
        self.out
    }
}

/// Returns a program of `scripts/static`. `None`, reported as a skipped test, where it is not built.
pub fn static_program(arch: guest::Arch, name: &str) -> Option<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR");
    let target = target.map_or(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    let path = target.join("static").join(arch.name()).join(name);
    if !path.exists() {
        ferry_skip::skip!("no {}: make test-all builds it, by scripts/static", path.display());
        return None;
    }
    Some(path)
}

/// Runs a guest to its end.
#[track_caller]
pub fn run(guest: Guest, timeout: Duration) -> GuestResult {
    run_beside(guest, timeout, || ())
}

/// Runs a guest to its end, and what the host does meanwhile, which begins with it.
#[track_caller]
pub fn run_beside(guest: Guest, timeout: Duration, host: impl FnOnce() + Send) -> GuestResult {
    let _turn = Turn::of(&guest);
    let start = Instant::now();
    let running = guest.spawn().unwrap_or_else(|error| panic!("{error}"));
    std::thread::scope(|scope| {
        let host = scope.spawn(host);
        let ran = collect(running, timeout, start);
        host.join().unwrap();
        ran
    })
}

/// The turn of an emulated guest. Each computes all the time, for the CPUs that it emulates: if many run side by side, all pass
/// their time limits.
#[derive(Debug)]
pub struct Turn(());

/// The number of emulated guests that run now.
static EMULATED: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

impl Turn {
    /// The maximum number of emulated guests that run side by side.
    const SIDE_BY_SIDE_MAX: usize = 3;
    /// The maximum wait: the guests of others may hang.
    const WAIT_MAX: Duration = Duration::from_secs(1200);

    /// Waits for the turn of a guest. `None` for User-mode Linux, whose guests wait most of the time.
    pub fn of(guest: &Guest) -> Option<Self> {
        if guest.kind == Kind::Uml {
            return None;
        }
        let running = EMULATED.0.lock().unwrap_or_else(PoisonError::into_inner);
        let many = |running: &mut usize| *running >= Self::SIDE_BY_SIDE_MAX;
        let waited = EMULATED.1.wait_timeout_while(running, Self::WAIT_MAX, many);
        *waited.unwrap_or_else(PoisonError::into_inner).0 += 1;
        Some(Self(()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *EMULATED.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        EMULATED.1.notify_one();
    }
}

/// A guest's end and what it wrote.
#[track_caller]
pub fn collect(mut running: Running, timeout: Duration, start: Instant) -> GuestResult {
    let [out, err] = [running.stdout.take(), running.stderr.take()].map(|line| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut line) = line {
                let _ = line.read_to_end(&mut bytes);
            }
            String::from_utf8_lossy(&bytes).into_owned()
        })
    });
    let console = running.console().unwrap();
    let status = running.wait_timeout(timeout);
    let (out, err) = (out.join().unwrap(), err.join().unwrap());
    let console = if matches!(status, Ok(0)) { String::new() } else { console_tail(&console) };
    match status {
        Ok(status) => GuestResult { status, out, err, took: start.elapsed(), console },
        Err(error) => panic!("{error}\nthe command's output:\n{out}\n{err}"),
    }
}

/// The last lines of a guest's console, with a headline.
fn console_tail(console: &File) -> String {
    let mut bytes = vec![0; CONSOLE_BYTES_MAX];
    let start = console.metadata().unwrap().len().saturating_sub(CONSOLE_BYTES_MAX as u64);
    let read = console.read_at(&mut bytes, start).unwrap();
    let text = String::from_utf8_lossy(&bytes[..read]);
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let last = &lines[lines.len().saturating_sub(CONSOLE_LINES_MAX)..];
    format!("the end of the guest's console:\n{}", last.join("\n"))
}

/// The server's own log goes to the tests' output, at `RUST_LOG` or warnings only.
pub fn log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let filter = tracing_subscriber::EnvFilter::try_from_default_env()
            .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("error"));
        let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
    });
}

/// Copies a program by another process. If a thread of this process wrote it, a concurrent fork would hold it open for writing, and it
/// could not be executed (`ETXTBSY`).
pub fn copy_program(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").arg("--").args([from, to]).status().unwrap();
    assert!(status.success(), "{}", from.display());
}

/// One test at a time: those that count the process's descriptors and threads.
pub fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What this process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
    /// Resident memory.
    pub resident_kib: u64,
}

impl Process {
    /// As it is now.
    pub fn now() -> Self {
        let count = |path: &str| std::fs::read_dir(path).unwrap().count();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let resident_kib = resident.trim().trim_end_matches(" kB").parse().unwrap();
        Self { descriptors: count("/proc/self/fd"), threads: count("/proc/self/task"), resident_kib }
    }

    /// Waits until no more descriptors and threads are there than in `self`, and at most `more_kib` more memory.
    ///
    /// # Panics
    /// When that takes longer than [`SETTLE`].
    #[track_caller]
    pub fn assert_back(&self, more_kib: u64) {
        let end = Instant::now() + SETTLE;
        loop {
            let now = Self::now();
            if now.descriptors <= self.descriptors
                && now.threads <= self.threads
                && now.resident_kib <= self.resident_kib + more_kib
            {
                return;
            }
            if Instant::now() > end {
                panic!("not back at the baseline: {self:?} became {now:?}; open: {:#?}", open_files());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// What the process's descriptors are.
pub fn open_files() -> Vec<String> {
    let name = |entry: std::fs::DirEntry| std::fs::read_link(entry.path()).ok().map(|path| path.display().to_string());
    std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(name).collect()
}
