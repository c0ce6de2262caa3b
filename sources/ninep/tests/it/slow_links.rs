//! Links that carry little, and servers that are too busy to take a connection.
use crate::common;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use common::{CX, PATIENCE, Served, name, read, write};
use ferry_9p_client::{Cache, Client, Error, Options, Unix};
use ferry_vfs::*;
use socket2::{Domain, SockAddr, Socket, Type};
use tempfile::TempDir;

/// 800 KiB/s: a message of 1 MiB takes longer than the server may be silent.
const PIECE_BYTES: usize = 16 << 10;
const PAUSE: Duration = Duration::from_millis(20);
const TIMEOUT: Duration = Duration::from_secs(1);

/// A way to a server that carries so much each way and no more.
struct Narrow {
    socket: PathBuf,
    connections: Arc<AtomicUsize>,
    _directory: TempDir,
}

impl Narrow {
    fn to(server: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let (server, connections) = (server.to_owned(), Arc::<AtomicUsize>::default());
        let counted = Arc::clone(&connections);
        // It ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming() {
                counted.fetch_add(1, Ordering::SeqCst);
                let (client, server) = (client.unwrap(), UnixStream::connect(&server).unwrap());
                let other = (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || carry(client, server));
                std::thread::spawn(move || carry(other.0, other.1));
            }
        });
        Self { socket, connections, _directory: directory }
    }
}

fn carry(mut from: UnixStream, mut to: UnixStream) {
    let mut piece = vec![0; PIECE_BYTES];
    while let Ok(count @ 1..) = from.read(&mut piece) {
        if to.write_all(&piece[..count]).is_err() {
            break;
        }
        if count > 1000 {
            std::thread::sleep(PAUSE);
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[test]
fn a_server_that_keeps_sending_keeps_its_connection() {
    let served = Served::new();
    let data: Vec<u8> = (0..3_u32 << 20).map(|n| n.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let plain = served.connect(Options { cache: Cache::None, ..Options::default() });
    let (made, handle) = plain.create(&CX, Ino::ROOT, name("f"), &common::file(0o600), OFlags::RDWR).unwrap();
    write(&plain, made.ino, handle, 0, &data).unwrap();
    let narrow = Narrow::to(&served.socket);
    let options = Options { cache: Cache::None, timeout: TIMEOUT, patience: PATIENCE, ..Options::default() };
    let client = Client::connect(Arc::new(Unix(narrow.socket.clone())), options).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    let begun = Instant::now();
    assert!(read(&client, ino, handle, 0, 3 << 20).unwrap() == data);
    assert!(begun.elapsed() > TIMEOUT, "the link is too fast for this test");
    assert_eq!(narrow.connections.load(Ordering::SeqCst), 1, "the connection was given up while data came");
    // And the other way, in which the server has nothing to answer before it has everything.
    let begun = Instant::now();
    assert_eq!(write(&client, ino, handle, 0, &data).unwrap(), data.len());
    assert!(begun.elapsed() > TIMEOUT, "the link is too fast for this test");
    assert_eq!(narrow.connections.load(Ordering::SeqCst), 1, "the connection was given up while data went");
}

#[test]
fn a_server_that_accepts_no_connection_times_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let address = SockAddr::unix(&path).unwrap();
    let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    listener.bind(&address).unwrap();
    listener.listen(0).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    let (told, waits) = mpsc::channel();
    std::thread::spawn(move || {
        let options = Options { timeout: Duration::from_millis(300), ..Options::default() };
        told.send(Client::connect(Arc::new(Unix(path)), options).map(drop))
    });
    let error = waits.recv_timeout(PATIENCE).expect("it is waited for without end").unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("it takes no connections"), "{error}");
}
