//! A small 9P client, and servers for it: by a socket, and in the program `by_device`, by chains.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part; a test that cannot go on ends")]

pub mod chains;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use chains::Chains;
use ferry_dir::Dir;
use ferry_ninep::{DeviceOptions, Export, Listener, Options, Usage};
use ferry_vfs::{Errno, FileSystem, LockKind, Name, OFlags};
use ferry_wire::ninep::*;
use tempfile::TempDir;

/// Longer than anything takes on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const MSIZE: u32 = 1 << 20;
/// The fid that [`Client::attached`] makes.
pub const ROOT: Fid = Fid(0);

/// Whether clients are drivers of devices.
pub fn is_by_device() -> bool {
    env!("CARGO_CRATE_NAME").ends_with("by_device")
}

/// A server on a unix socket, and the devices of the same source.
pub struct Server {
    pub export: Option<Export>,
    /// A device has one client at a time, so there is one for each.
    devices: Mutex<Vec<Export>>,
    source: Arc<dyn FileSystem>,
    options: Options,
    pub socket: PathBuf,
    pub directory: TempDir,
}

impl Server {
    pub fn of(source: Arc<dyn FileSystem>, options: Options) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let export = Export::start(vec![listener.into()], Arc::clone(&source), options.clone()).unwrap();
        Self { export: Some(export), devices: Mutex::default(), source, options, socket, directory }
    }

    /// The same source at another socket, with the same options.
    pub fn also_at(&self, listener: Listener, source: Arc<dyn FileSystem>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let export = Export::start(vec![listener], Arc::clone(&source), self.options.clone()).unwrap();
        let (devices, options, socket) = (Mutex::default(), self.options.clone(), PathBuf::new());
        Self { export: Some(export), devices, source, options, socket, directory }
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    pub fn connect(&self) -> Client<Link> {
        Client::new(match is_by_device() {
            true => Link::Chains(Box::new(Chains::connect(&self.device()))),
            false => Link::Socket(UnixStream::connect(&self.socket).unwrap()),
        })
    }

    /// Makes one more device; answers its socket.
    pub fn device(&self) -> PathBuf {
        let mut devices = self.devices.lock().unwrap();
        let path = self.directory.path().join(format!("d{}", devices.len()));
        let (listener, source) = (UnixListener::bind(&path).unwrap(), Arc::clone(&self.source));
        devices.push(Export::vhost_user(listener, source, DeviceOptions::of("tag"), self.options.clone()).unwrap());
        path
    }

    /// A client that has attached to the root as this user.
    pub fn attached(&self, uid: u32) -> Client<Link> {
        let mut client = self.connect();
        client.hello(MSIZE);
        client.attach(ROOT, uid).unwrap();
        client
    }

    pub fn usage(&self) -> Usage {
        let mut all = self.export.as_ref().unwrap().usage();
        for device in &*self.devices.lock().unwrap() {
            let usage = device.usage();
            all.connections += usage.connections;
            all.fids += usage.fids;
            all.requests += usage.requests;
            all.parked_locks += usage.parked_locks;
            all.threads += usage.threads;
        }
        all
    }

    /// The requests that could not be decoded.
    pub fn invalid(&self) -> u64 {
        let devices = self.devices.lock().unwrap();
        self.export.iter().chain(&*devices).map(|export| export.metrics().snapshot().invalid).sum()
    }

    /// The counters of one operation: requests, bytes and errors.
    pub fn counted(&self, operation: &str) -> (u64, u64, Vec<(i32, u64)>) {
        let devices = self.devices.lock().unwrap();
        let mut sum = (0, 0, Vec::new());
        for export in self.export.iter().chain(&*devices) {
            let snapshot = export.metrics().snapshot();
            for found in snapshot.operations.iter().filter(|found| found.name == operation) {
                sum.0 += found.requests();
                sum.1 += found.bytes;
                sum.2.extend_from_slice(&found.errors);
            }
        }
        sum
    }

    /// What was asked to be read ahead.
    pub fn read_ahead_bytes(&self) -> u64 {
        let devices = self.devices.lock().unwrap();
        self.export.iter().chain(&*devices).map(Export::read_ahead_bytes).sum()
    }

    /// Waits until the usage is as it should be.
    #[track_caller]
    pub fn settles(&self, is_right: impl Fn(&Usage) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_right(&self.usage()) {
            assert!(Instant::now() < end, "it stays so: {:?}", self.usage());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A server of a fresh directory.
pub struct DirServer {
    pub server: Server,
    pub dir: Arc<Dir>,
    pub path: PathBuf,
    _directory: TempDir,
}

impl DirServer {
    pub fn new(options: Options) -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = directory.path().join("shared");
        std::fs::create_dir(&path).unwrap();
        let dir = Arc::new(Dir::open(&path, ferry_dir::Options::default()).unwrap());
        let server = Server::of(Arc::clone(&dir) as Arc<dyn FileSystem>, options);
        Self { server, dir, path, _directory: directory }
    }

    /// Waits until the source holds nothing for clients any more.
    #[track_caller]
    pub fn assert_released(&self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let usage = self.dir.usage();
            if usage.inodes <= 1 && usage.handles == 0 {
                return;
            }
            assert!(Instant::now() < end, "still held: {usage:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl std::ops::Deref for DirServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

/// What a client's stream can do.
pub trait Stream: Read + Write {
    fn set_timeout(&mut self, timeout: Option<Duration>);
}

impl Stream for UnixStream {
    fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.set_read_timeout(timeout).unwrap();
    }
}

impl Stream for TcpStream {
    fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.set_read_timeout(timeout).unwrap();
    }
}

/// What a test's client is connected by.
pub enum Link {
    Socket(UnixStream),
    Chains(Box<Chains>),
}

impl Link {
    /// The socket that it is.
    pub fn socket(&self) -> &UnixStream {
        match self {
            Self::Socket(stream) => stream,
            Self::Chains(_) => panic!("a device has no socket"),
        }
    }
}

impl Read for Link {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Socket(stream) => stream.read(bytes),
            Self::Chains(chains) => chains.read(bytes),
        }
    }
}

impl Write for Link {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::Socket(stream) => stream.write(bytes),
            Self::Chains(chains) => chains.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Stream for Link {
    fn set_timeout(&mut self, timeout: Option<Duration>) {
        match self {
            Self::Socket(stream) => stream.set_read_timeout(timeout).unwrap(),
            Self::Chains(chains) => chains.set_timeout(timeout),
        }
    }
}

/// A client that has one request under way, or sends and receives apart.
pub struct Client<S> {
    pub stream: S,
    next_tag: u16,
}

/// A reply, out of its message.
pub type Answer = (Tag, Vec<u8>);

impl<S: Stream> Client<S> {
    pub fn new(mut stream: S) -> Self {
        stream.set_timeout(Some(PATIENCE));
        Self { stream, next_tag: 0 }
    }

    pub fn send(&mut self, tag: Tag, request: &Request<'_>) {
        let mut message = Vec::new();
        request.encode(tag, &mut message);
        self.stream.write_all(&message).unwrap();
    }

    pub fn receive(&mut self) -> Answer {
        self.try_receive().expect("a reply")
    }

    /// The next reply; `None` at the end of the connection.
    pub fn try_receive(&mut self) -> Option<Answer> {
        let mut message = vec![0; 4];
        self.stream.read_exact(&mut message).ok()?;
        let bytes = Frame::bytes(*message.first_chunk().unwrap()) as usize;
        message.resize(bytes, 0);
        self.stream.read_exact(&mut message[4..]).ok()?;
        Some((Frame::peek(&message).unwrap().tag, message))
    }

    /// Whether the server has nothing to say for a while.
    pub fn is_silent(&mut self, time: Duration) -> bool {
        self.stream.set_timeout(Some(time));
        let silent = matches!(self.stream.read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock);
        self.stream.set_timeout(Some(PATIENCE));
        silent
    }

    /// Whether the server ends the connection.
    pub fn is_ended(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// Asks, and answers the whole reply.
    #[track_caller]
    pub fn ask(&mut self, request: &Request<'_>) -> Vec<u8> {
        self.next_tag = (self.next_tag + 1) % 1000;
        let tag = Tag(self.next_tag);
        self.send(tag, request);
        let (answered, message) = self.receive();
        assert_eq!(answered, tag, "{request:?}");
        message
    }

    /// Asks, and hands the reply, which is none of an error, to `take`.
    #[track_caller]
    pub fn get<T>(&mut self, request: &Request<'_>, take: impl FnOnce(Reply<'_>) -> Option<T>) -> Result<T, Errno> {
        let message = self.ask(request);
        match Reply::decode(&message).unwrap().1 {
            Reply::Error(errno) => Err(errno),
            reply => Ok(take(reply).unwrap_or_else(|| panic!("{request:?} was answered {reply:?}"))),
        }
    }

    #[track_caller]
    pub fn ok(&mut self, request: &Request<'_>) -> Result<(), Errno> {
        self.get(request, |_| Some(()))
    }

    #[track_caller]
    pub fn hello(&mut self, msize: u32) -> u32 {
        self.hello_in(msize, VERSION)
    }

    /// Begins a session in this version.
    #[track_caller]
    pub fn hello_in(&mut self, msize: u32, version: &[u8]) -> u32 {
        self.send(Tag::NONE, &Request::Version { msize, version });
        let (tag, message) = self.receive();
        match Reply::decode(&message).unwrap() {
            (_, Reply::Version { msize, version: agreed }) if tag == Tag::NONE && agreed == version => msize,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    pub fn attach(&mut self, fid: Fid, uid: u32) -> Result<Qid, Errno> {
        let user = User { name: b"", uid: Some(uid) };
        let request = Request::Attach { fid, afid: Fid::NONE, user, tree: b"" };
        self.get(&request, |reply| if let Reply::Attach(qid) = reply { Some(qid) } else { None })
    }

    /// Walks; answers the qids.
    #[track_caller]
    pub fn walk(&mut self, fid: Fid, new_fid: Fid, path: &str) -> Result<Vec<Qid>, Errno> {
        let steps = path.split('/').filter(|part| !part.is_empty()).map(|part| match part {
            ".." => Step::Parent,
            name => Step::Child(Name::new(name.as_bytes()).unwrap()),
        });
        let mut buffer = Vec::new();
        let steps = Steps::write(&mut buffer, steps);
        self.get(&Request::Walk { fid, new_fid, steps }, |reply| match reply {
            Reply::Walk(qids) => Some(qids.as_slice().to_vec()),
            _ => None,
        })
    }

    #[track_caller]
    pub fn open(&mut self, fid: Fid, flags: OFlags) -> Result<(Qid, u32), Errno> {
        self.get(&Request::Open { fid, flags }, |reply| match reply {
            Reply::Open { qid, iounit } => Some((qid, iounit)),
            _ => None,
        })
    }

    /// Walks from the root and opens.
    #[track_caller]
    pub fn open_path(&mut self, new_fid: Fid, path: &str, flags: OFlags) -> Result<Qid, Errno> {
        self.walk(ROOT, new_fid, path)?;
        self.open(new_fid, flags).map(|(qid, _)| qid)
    }

    /// Makes a file in the root and opens it.
    #[track_caller]
    pub fn create(&mut self, fid: Fid, name: &str, flags: OFlags, mode: u32) -> Result<Qid, Errno> {
        self.walk(ROOT, fid, "")?;
        let name = Name::new(name.as_bytes()).unwrap();
        self.get(&Request::Create { fid, name, flags, mode, gid: 0 }, |reply| match reply {
            Reply::Create { qid, iounit: 0 } => Some(qid),
            _ => None,
        })
    }

    #[track_caller]
    pub fn read(&mut self, fid: Fid, offset: u64, bytes_max: u32) -> Result<Vec<u8>, Errno> {
        self.get(&Request::Read { fid, offset, bytes_max }, |reply| match reply {
            Reply::Read(data) => Some(data.to_vec()),
            _ => None,
        })
    }

    #[track_caller]
    pub fn write(&mut self, fid: Fid, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        self.get(&Request::Write { fid, offset, data }, |reply| match reply {
            Reply::Write { bytes } => Some(bytes),
            _ => None,
        })
    }

    #[track_caller]
    pub fn getattr(&mut self, fid: Fid) -> Result<Getattr, Errno> {
        self.get(&Request::Getattr { fid, mask: valid::BASIC }, |reply| match reply {
            Reply::Getattr(getattr) => Some(getattr),
            _ => None,
        })
    }

    /// Lists from an offset on: names, and where to go on after each.
    #[track_caller]
    pub fn readdir(&mut self, fid: Fid, offset: u64, bytes_max: u32) -> Result<Vec<(String, u64, Qid)>, Errno> {
        self.get(&Request::Readdir { fid, offset, bytes_max }, |reply| match reply {
            Reply::Readdir(data) => Some(
                DirEntries::new(data)
                    .map(|entry| (String::from_utf8_lossy(entry.name).into_owned(), entry.next, entry.qid))
                    .collect(),
            ),
            _ => None,
        })
    }

    #[track_caller]
    pub fn lock(&mut self, fid: Fid, kind: LockKind, pid: u32, wait: bool) -> Result<LockStatus, Errno> {
        let request = Request::Lock { fid, lock: lock_of(kind, pid), wait, reclaim: false };
        self.get(&request, |reply| if let Reply::Lock(status) = reply { Some(status) } else { None })
    }
}

/// A lock on bytes 10 to 19.
pub fn lock_of(kind: LockKind, pid: u32) -> LockRequest<'static> {
    LockRequest { kind, start: 10, end: 19, pid, client: b"test" }
}

/// A name that is one.
pub fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}
