//! The keeper, with servers that come and go, and a front end that stays.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use ferry_state::{Commit, Folder, Geometry, Init, Kept, Line};

/// A keeper in a thread.
struct Keeper {
    state: Folder,
    thread: JoinHandle<()>,
    _folder: tempfile::TempDir,
}

impl Keeper {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = Folder::open(&folder.path().join("state")).unwrap();
        let listener = ferry_state::listen(&state).unwrap();
        Self { state, thread: std::thread::spawn(move || ferry_state::keep(&listener).unwrap()), _folder: folder }
    }

    /// A server that begins.
    fn server(&self) -> Arc<Kept> {
        let geometry = Geometry { workers: 1, entries: 8 };
        Arc::new(Kept::open(Line::reach(&self.state).unwrap(), geometry).unwrap())
    }
}

fn read(socket: &mut UnixStream, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    socket.read_exact(&mut read).unwrap();
    read
}

#[test]
fn messages_are_taken_recorded_and_answered_by_one_step() {
    let keeper = Keeper::new();
    let first = keeper.server();
    assert!(first.take_connection().is_none());
    let (mut front_end, ours) = UnixStream::pair().unwrap();
    first.keep_connection(ours.as_fd()).unwrap();
    front_end.write_all(b"onetwothree").unwrap();
    let file = [File::open("/dev/null").unwrap().into()];
    let step = Commit { taken_bytes: 3, reply: b"yes", record: Some((9, b"one", &file)), ..Commit::default() };
    first.commit(&step).unwrap();
    first.commit(&Commit { taken_bytes: 3, record: Some((5, b"two", &[])), ..Commit::default() }).unwrap();
    assert_eq!(read(&mut front_end, 3), b"yes");
    drop((ours, first));

    // The connection is open, what was taken is gone, and what was recorded is in the order of its keys.
    let second = keeper.server();
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

    // Once it is over, nothing of it is left, and nobody is waited for.
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
