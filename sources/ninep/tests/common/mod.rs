//! Servers, and short ways to call a client.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part; a test that cannot go on ends")]

pub mod fake;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use ferry_9p_client::{Client, Options, Unix};
use ferry_ninep::{Export, Usage, Users};
use ferry_vfs::*;
use tempfile::TempDir;

/// Longer than anything takes on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Root, of one client.
pub static CX: LazyLock<Caller<'static>> =
    LazyLock::new(|| Caller { session: SessionId::unique(), ..Caller::default() });

/// Our server on a unix socket.
pub struct Served {
    pub export: Mutex<Option<Export>>,
    pub socket: PathBuf,
    pub source: Arc<dyn FileSystem>,
    users: Users,
    /// Clients are told what others do.
    events: AtomicBool,
    _directory: TempDir,
}

impl Served {
    /// Of a memory file system.
    pub fn new() -> Self {
        Self::with(Users::Client)
    }

    pub fn with(users: Users) -> Self {
        Self::of(Arc::new(ferry_mem::Mem::new(&ferry_mem::Options::default()).unwrap()), users)
    }

    pub fn of(source: Arc<dyn FileSystem>, users: Users) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let (export, events) = (Mutex::default(), AtomicBool::new(false));
        let served = Self { export, socket, source, users, events, _directory: directory };
        served.start();
        served
    }

    /// Of a memory file system, with events.
    pub fn with_events() -> Self {
        let served = Self::new();
        served.restart(true);
        served
    }

    /// Stops it, and starts it with or without events.
    pub fn restart(&self, events: bool) {
        self.stop();
        self.events.store(events, Ordering::Relaxed);
        self.start();
    }

    /// Starts the server, again if it was stopped.
    pub fn start(&self) {
        let _ = std::fs::remove_file(&self.socket);
        let listener = UnixListener::bind(&self.socket).unwrap();
        let (users, events) = (self.users.clone(), self.events.load(Ordering::Relaxed));
        let options = ferry_ninep::Options { users, events, ..ferry_ninep::Options::default() };
        let export = Export::start(vec![listener.into()], Arc::clone(&self.source), options).unwrap();
        *self.export.lock().unwrap() = Some(export);
    }

    /// Stops the server: its clients are disconnected, and what it kept for them is gone.
    pub fn stop(&self) {
        let export = self.export.lock().unwrap().take();
        drop(export);
        let _ = std::fs::remove_file(&self.socket);
    }

    pub fn connect(&self, options: Options) -> Client {
        Client::connect(Arc::new(Unix(self.socket.clone())), options).unwrap()
    }

    /// Waits until the server holds what it should.
    #[track_caller]
    pub fn settles(&self, is_right: impl Fn(&Usage) -> bool) {
        let end = Instant::now() + PATIENCE;
        loop {
            let usage = self.export.lock().unwrap().as_ref().unwrap().usage();
            if is_right(&usage) {
                return;
            }
            assert!(Instant::now() < end, "it stays so: {usage:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

pub fn file(mode: u32) -> CreateArgs {
    CreateArgs { mode: FileType::RegularFile.as_raw_mode() | mode, umask: 0, rdev: 0 }
}

pub fn dir(mode: u32) -> CreateArgs {
    CreateArgs { mode: FileType::Directory.as_raw_mode() | mode, umask: 0, rdev: 0 }
}

pub fn flags(text: &str) -> OFlags {
    match text {
        "rw" => OFlags::RDWR,
        "w" => OFlags::WRONLY,
        _ => OFlags::RDONLY,
    }
}

pub fn range(ino: Ino, handle: Handle, offset: u64, len: u32) -> IoRange {
    IoRange { ino, handle, offset, len, flags: OFlags::RDWR, clear_privileges: false, owner: None }
}

pub fn read(client: &Client, ino: Ino, handle: Handle, offset: u64, len: u32) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let count = client.read(&CX, &range(ino, handle, offset, len), &mut out)?.bytes().unwrap();
    assert_eq!(count, out.len());
    Ok(out)
}

pub fn write(client: &Client, ino: Ino, handle: Handle, offset: u64, mut data: &[u8]) -> Result<usize> {
    let at = range(ino, handle, offset, u32::try_from(data.len()).unwrap());
    client.write(&CX, &at, &mut data).map(|data| data.bytes().unwrap())
}

/// A listing with room for so many names.
pub struct Few {
    room: usize,
    pub items: Vec<Listed>,
}

pub struct Listed {
    pub name: String,
    pub next: u64,
    pub entry: Option<Entry>,
}

impl Few {
    pub fn new(room: usize) -> Self {
        Self { room, items: Vec::new() }
    }
}

impl DirOutput for Few {
    fn fits(&self, _: &[u8]) -> bool {
        self.items.len() < self.room
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        let name = String::from_utf8_lossy(item.name).into_owned();
        self.items.push(Listed { name, next: item.next, entry: entry.copied() });
    }
}

/// A file system whose lookups take a while, and find nothing.
pub struct Slow(Duration);

impl Slow {
    pub fn source(time: Duration) -> Arc<dyn FileSystem> {
        Arc::new(Self(time))
    }
}

impl FileSystem for Slow {
    fn lookup(&self, _: &Caller<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        std::thread::sleep(self.0);
        Err(Errno::NOENT)
    }

    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(Attr::new(ino, FileType::Directory, 0o755))
    }
}
