//! Several connections to one server.

#![allow(clippy::cast_possible_truncation, reason = "sizes of a test are small")]

use crate::common;

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;
use ferry_9p_client::{Cache, Client, Error, Options, Stream, Transport};
use ferry_vfs::*;

const MIB: u64 = 1 << 20;
const FILE_BYTES: u64 = 24 * MIB;
/// A read or write of these tests.
const PIECE_BYTES: u32 = 1 << 20;
const CONNECTIONS: usize = 3;

/// One connection, as it is seen from outside.
struct Seen {
    stream: UnixStream,
    sent: Arc<AtomicU64>,
    received: Arc<AtomicU64>,
}

/// A way to a server on which bytes are counted, connections can be cut, and no more than so many are there at a time.
#[derive(Clone)]
struct Watched {
    socket: PathBuf,
    seen: Arc<Mutex<Vec<Seen>>>,
    most: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Watched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Watched")
    }
}

struct Counted(UnixStream, Arc<AtomicU64>);

impl Read for Counted {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes).inspect(|count| _ = self.1.fetch_add(*count as u64, Ordering::SeqCst))
    }
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).inspect(|count| _ = self.1.fetch_add(*count as u64, Ordering::SeqCst))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Transport for Watched {
    fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        let mut seen = self.seen.lock().unwrap();
        if seen.len() >= self.most.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_write_timeout(Some(timeout))?;
        let (sent, received) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let (reader, writer) = (stream.try_clone()?, stream.try_clone()?);
        let other = stream.try_clone()?;
        seen.push(Seen { stream, sent: Arc::clone(&sent), received: Arc::clone(&received) });
        Ok(Stream {
            reader: Box::new(Counted(reader, received)),
            writer: Box::new(Counted(writer, sent)),
            hang_up: Box::new(move || drop(other.shutdown(Shutdown::Both))),
        })
    }

    fn address(&self) -> String {
        "watched".into()
    }
}

impl Watched {
    fn new(served: &Served) -> Self {
        let most = Arc::new(AtomicUsize::new(usize::MAX));
        Self { socket: served.socket.clone(), seen: Arc::default(), most }
    }

    fn client(&self, options: Options) -> Client {
        let options = Options { connections: CONNECTIONS, msize: 128 << 10, ..options };
        Client::connect(Arc::new(self.clone()), options).unwrap()
    }

    /// What each connection has carried to and from the server, in the order in which they were made.
    fn carried(&self) -> Vec<(u64, u64)> {
        let seen = self.seen.lock().unwrap();
        seen.iter().map(|one| (one.sent.load(Ordering::SeqCst), one.received.load(Ordering::SeqCst))).collect()
    }

    /// Cuts a connection.
    fn cut(&self, index: usize) {
        self.seen.lock().unwrap()[index].stream.shutdown(Shutdown::Both).unwrap();
    }
}

/// Byte `offset` of the file, in its `version`.
fn byte(offset: u64, version: u8) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).to_le_bytes()[0] ^ version
}

fn data(offset: u64, version: u8) -> Vec<u8> {
    (offset..offset + u64::from(PIECE_BYTES)).map(|at| byte(at, version)).collect()
}

fn pieces() -> impl Iterator<Item = u64> {
    (0..FILE_BYTES).step_by(PIECE_BYTES as usize)
}

fn write_all(client: &Client, ino: Ino, handle: Handle, version: u8) {
    for at in pieces() {
        assert_eq!(write(client, ino, handle, at, &data(at, version)), Ok(PIECE_BYTES as usize), "at {at}");
    }
}

fn read_all(client: &Client, ino: Ino, handle: Handle, version: u8) {
    for at in pieces() {
        let found = read(client, ino, handle, at, PIECE_BYTES).unwrap();
        assert!(found == data(at, version), "other bytes at {at}");
    }
}

fn create(client: &Client, text: &str) -> (Ino, Handle) {
    let (entry, handle) = client.create(&CX, Ino::ROOT, name(text), &file(0o644), flags("rw")).unwrap();
    (entry.ino, handle)
}

/// What the server has, past all caches of the client.
#[track_caller]
fn assert_at_server(served: &Served, text: &str, version: u8) {
    let plain = served.connect(Options { cache: Cache::None, ..Options::default() });
    let entry = plain.lookup(&CX, Ino::ROOT, name(text)).unwrap();
    assert_eq!(entry.attr.size, FILE_BYTES);
    let handle = plain.open(&CX, entry.ino, flags("r")).unwrap();
    read_all(&plain, entry.ino, handle, version);
    plain.release(&CX, entry.ino, handle);
}

#[test]
fn data_takes_turns_on_all_connections() {
    for cache in [Cache::None, Cache::Auto] {
        let served = Served::new();
        let way = Watched::new(&served);
        let client = way.client(Options { cache, ..Options::default() });
        assert_eq!((client.usage().connections, way.carried().len()), (CONNECTIONS, CONNECTIONS));
        served.settles(|usage| usage.connections == CONNECTIONS);
        let (ino, handle) = create(&client, "file");
        write_all(&client, ino, handle, 1);
        client.fsync(&CX, ino, handle, false).unwrap();
        // It continues until the fids exist, which is asynchronous.
        let end = Instant::now() + PATIENCE;
        while way.carried().iter().any(|(sent, _)| *sent < 2 * MIB) {
            assert!(Instant::now() < end, "{cache:?}: some connections write nothing: {:?}", way.carried());
            write_all(&client, ino, handle, 1);
            client.fsync(&CX, ino, handle, false).unwrap();
        }
        let before = way.carried();
        let end = Instant::now() + PATIENCE;
        loop {
            // Cached data is dropped, and read again.
            touch_elsewhere(&served, "file");
            let again = client.open(&CX, ino, flags("r")).unwrap();
            read_all(&client, ino, again, 1);
            client.release(&CX, ino, again);
            if way.carried().iter().zip(&before).all(|(now, before)| now.1 - before.1 >= 2 * MIB) {
                break;
            }
            assert!(Instant::now() < end, "{cache:?}: some connections read nothing: {:?}", way.carried());
        }
        client.release(&CX, ino, handle);
        assert_at_server(&served, "file", 1);
        drop(client);
        served.settles(|usage| usage.connections == 0);
    }
}

/// Changes a file's times by another client.
fn touch_elsewhere(served: &Served, text: &str) {
    let plain = served.connect(Options::default());
    let entry = plain.lookup(&CX, Ino::ROOT, name(text)).unwrap();
    let set = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
    plain.setattr(&CX, entry.ino, None, &set).unwrap();
}

#[test]
fn small_files_take_one_connection() {
    let served = Served::new();
    let way = Watched::new(&served);
    let client = way.client(Options::default());
    let before = way.carried();
    for number in 0..50 {
        let (ino, handle) = create(&client, &format!("f{number}"));
        write(&client, ino, handle, 0, b"small").unwrap();
        client.fsync(&CX, ino, handle, false).unwrap();
        client.release(&CX, ino, handle);
    }
    assert_eq!(way.carried()[1..], before[1..]);
}

/// Whichever connection dies, all are made again, and nothing that was written is lost.
#[test]
fn one_connection_dies() {
    for (cache, dies) in [(Cache::Auto, 0), (Cache::Auto, 1), (Cache::Auto, 2), (Cache::None, 1)] {
        let served = Served::new();
        let way = Watched::new(&served);
        let client = way.client(Options { cache, ..Options::default() });
        let (ino, handle) = create(&client, "file");
        for version in 1..=4 {
            let made = way.carried().len();
            let sent = || -> u64 { way.carried().iter().map(|(sent, _)| sent).sum() };
            let before = sent();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // In the midst of it: some of it has gone over this connection or another one.
                    let end = Instant::now() + PATIENCE;
                    while sent() < before + 6 * MIB {
                        assert!(Instant::now() < end, "nothing is written");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    way.cut(made - CONNECTIONS + dies);
                });
                write_all(&client, ino, handle, version);
                // What is written past the cache with another connection behind it is told to be lost, or is durable now.
                let synced = client.fsync(&CX, ino, handle, false);
                assert!(synced.is_ok() || cache == Cache::None, "{synced:?}");
            });
            // The cut may have come behind all of that.
            let end = Instant::now() + PATIENCE;
            while way.carried().len() < made + CONNECTIONS {
                assert!(Instant::now() < end, "{cache:?}: connection {dies} died, and not all are new");
                std::thread::sleep(Duration::from_millis(5));
            }
            read_all(&client, ino, handle, version);
            assert_at_server(&served, "file", version);
            served.settles(|usage| usage.connections == CONNECTIONS);
            assert_eq!(way.carried().len(), made + CONNECTIONS, "{cache:?}: connection {dies} died once");
        }
        client.release(&CX, ino, handle);
    }
}

/// A file whose name is gone cannot be opened once more, and one that was made read-only neither.
#[test]
fn files_that_cannot_be_opened_twice_stay_on_one() {
    let served = Served::new();
    let way = Watched::new(&served);
    let client = way.client(Options::default());
    let (ino, handle) = create(&client, "file");
    client.unlink(&CX, Ino::ROOT, name("file")).unwrap();
    write_all(&client, ino, handle, 3);
    client.fsync(&CX, ino, handle, false).unwrap();
    read_all(&client, ino, handle, 3);
    let carried = way.carried();
    assert!(carried[0].0 > FILE_BYTES && carried[1..].iter().all(|(sent, _)| *sent < MIB), "{carried:?}");
    client.release(&CX, ino, handle);

    // Another file of that name is not taken for it.
    let (ino, handle) = create(&client, "file");
    client.rename(&CX, (Ino::ROOT, name("file")), (Ino::ROOT, name("moved")), RenameFlags::empty()).unwrap();
    let (other, other_handle) = create(&client, "file");
    write_all(&client, ino, handle, 4);
    client.fsync(&CX, ino, handle, false).unwrap();
    assert_at_server(&served, "moved", 4);
    assert_eq!(client.getattr(&CX, other, None).unwrap().size, 0);
    client.release(&CX, other, other_handle);
    client.release(&CX, ino, handle);
}

#[test]
fn a_server_with_a_limit_gets_fewer() {
    let served = Served::new();
    let way = Watched::new(&served);
    way.most.store(2, Ordering::SeqCst);
    let client = way.client(Options::default());
    assert_eq!(client.usage().connections, 2);
    let (ino, handle) = create(&client, "file");
    write_all(&client, ino, handle, 5);
    client.fsync(&CX, ino, handle, false).unwrap();
    assert_at_server(&served, "file", 5);
    client.release(&CX, ino, handle);
}

#[test]
fn numbers_of_connections_that_make_no_sense_are_refused() {
    let served = Served::new();
    for connections in [0, 17, usize::MAX] {
        let options = Options { connections, ..Options::default() };
        let error = Client::connect(Arc::new(Watched::new(&served)), options).unwrap_err();
        assert!(matches!(error, Error::Option { what: "connections", min: 1, max: 16, .. }), "{error}");
    }
    let options = Options { connections: 16, ..Options::default() };
    let client = Client::connect(Arc::new(Watched::new(&served)), options).unwrap();
    served.settles(|usage| usage.connections == 16);
    drop(client);
    served.settles(|usage| usage.connections == 0);
}
