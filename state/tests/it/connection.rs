//! The keeper, with consecutive servers and a permanent front end.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use ferry_state::{Commit, Directory, FRONT_END_AWAITED, Geometry, Init, KeeperConnection, SessionStore};
use rustix::event::{EventfdFlags, eventfd};

/// A keeper in a thread.
struct Keeper {
    state: Directory,
    thread: JoinHandle<()>,
    /// Ends the keeper when it becomes readable.
    end: OwnedFd,
    _directory: tempfile::TempDir,
}

impl Keeper {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let state = Directory::open(&directory.path().join("state")).unwrap();
        let listener = ferry_state::listen(&state).unwrap();
        let end = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let its_end = end.try_clone().unwrap();
        let thread = std::thread::spawn(move || ferry_state::keep(&listener, &its_end).unwrap());
        Self { state, thread, end, _directory: directory }
    }

    /// A server that begins.
    fn server(&self) -> Arc<SessionStore> {
        let geometry = Geometry { workers: 1, entries: 8 };
        Arc::new(SessionStore::open(KeeperConnection::reach(&self.state).unwrap(), geometry).unwrap())
    }
}

fn read(socket: &mut UnixStream, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    socket.read_exact(&mut read).unwrap();
    read
}

#[test]
fn a_commit_takes_records_and_answers_a_message() {
    let keeper = Keeper::new();
    let first = keeper.server();
    assert!(first.take_connection().is_none());
    assert_eq!(first.restarts(), 0);
    let (mut front_end, ours) = UnixStream::pair().unwrap();
    first.keep_connection(ours.as_fd()).unwrap();
    front_end.write_all(b"onetwothree").unwrap();
    let file = [File::open("/dev/null").unwrap().into()];
    let step = Commit { taken_bytes: 3, reply: b"yes", record: Some((9, b"one", &file)), ..Commit::default() };
    first.commit(&step).unwrap();
    first.commit(&Commit { taken_bytes: 3, record: Some((5, b"two", &[])), ..Commit::default() }).unwrap();
    assert_eq!(read(&mut front_end, 3), b"yes");
    drop((ours, first));

    // The connection is open, the message is gone, and the records are in the order of their keys.
    let second = keeper.server();
    assert_eq!(second.restarts(), 1);
    let left = second.take_connection().unwrap();
    let recorded: Vec<_> = left.records.iter().map(|(key, (bytes, files))| (*key, &bytes[..], files.len())).collect();
    assert_eq!(recorded, [(5, &b"two"[..], 0), (9, &b"one"[..], 1)]);
    let mut ours = UnixStream::from(left.socket);
    second.commit(&Commit { drops: &[9, 77], record: Some((5, b"other", &[])), ..Commit::default() }).unwrap();
    assert_eq!(read(&mut ours, 5), b"three");
    drop((ours, second));
    let third = keeper.server();
    let records = third.take_connection().unwrap().records;
    assert_eq!(records.into_iter().map(|(key, (bytes, _))| (key, bytes)).collect::<Vec<_>>(), [(5, b"other".to_vec())]);

    // After the end nothing is left, and the keeper does not wait.
    third.end_connection();
    assert_eq!(front_end.read(&mut [0]).unwrap(), 0);
    assert!(third.commit(&Commit::default()).is_err());
    drop(third);
    keeper.thread.join().unwrap();
}

#[test]
fn the_keeper_stays_for_a_connection_or_a_client() {
    let keeper = Keeper::new();
    let first = keeper.server();
    let (front_end, ours) = UnixStream::pair().unwrap();
    first.keep_connection(ours.as_fd()).unwrap();
    drop((ours, first));
    let second = keeper.server();
    assert!(second.take_left().is_none());
    second.begin(Some(Init { minor: 45, ..Init::default() }));
    second.end_connection();
    drop(second);
    let third = keeper.server();
    assert!(third.take_connection().is_none() && third.take_left().is_some());
    third.begin(None);
    drop(third);
    keeper.thread.join().unwrap();
    drop(front_end);
}

/// Returns a server with a client and its connection.
fn with_client(keeper: &Keeper) -> (Arc<SessionStore>, UnixStream) {
    let server = keeper.server();
    let (front_end, ours) = UnixStream::pair().unwrap();
    server.keep_connection(ours.as_fd()).unwrap();
    server.begin(Some(Init { minor: 45, ..Init::default() }));
    assert!(server.outlives_server() && server.keeper() == Some(std::process::id()));
    (server, front_end)
}

#[test]
fn the_keeper_ends_soon_after_the_front_end_where_there_is_no_server() {
    let keeper = Keeper::new();
    let (server, front_end) = with_client(&keeper);
    drop(server);
    // Bytes of the front end are for the next server and must not make the keeper spin.
    (&front_end).write_all(b"for the next server").unwrap();
    std::thread::sleep(FRONT_END_AWAITED / 10);
    assert!(!keeper.thread.is_finished());
    drop(front_end);
    let begun = Instant::now();
    keeper.thread.join().unwrap();
    let took = begun.elapsed();
    assert!(took > FRONT_END_AWAITED / 2 && took < 2 * FRONT_END_AWAITED, "{took:?}");
}

#[test]
fn the_keeper_ends_on_request() {
    for has_server in [false, true] {
        let keeper = Keeper::new();
        let (server, mut front_end) = with_client(&keeper);
        let server = has_server.then_some(server);
        rustix::io::write(&keeper.end, &1u64.to_ne_bytes()).unwrap();
        keeper.thread.join().unwrap();
        // The connection goes with it.
        assert_eq!(front_end.read(&mut [0; 1]).unwrap(), 0);
        drop(server);
    }
}
