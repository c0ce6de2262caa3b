//! A server whose limit of open files is below the number that the keeper holds. Alone in its process, whose limit it
//! changes.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ferry_state::{Commit, Directory, Geometry, KeeperConnection, KeeperError, SessionStore};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const RECORDS: u64 = 60;

#[test]
fn descriptors_that_one_server_cannot_hold_are_kept_for_the_next() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let state = Directory::open(&directory.path().join("state")).unwrap();
    let listener = ferry_state::listen(&state).unwrap();
    let keeper =
        std::thread::spawn(move || ferry_state::keep(&listener, &eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap());
    let server =
        || SessionStore::open(KeeperConnection::reach(&state).unwrap(), Geometry { workers: 1, entries: 8 }).unwrap();
    let first = server();
    let (front_end, ours) = UnixStream::pair().unwrap();
    first.keep_connection(ours.as_fd()).unwrap();
    let file: [OwnedFd; 1] = [File::open("/dev/null").unwrap().into()];
    for key in 1..=RECORDS {
        first.commit(&Commit { record: Some((key, b"with a file", &file)), ..Commit::default() }).unwrap();
    }
    drop((first, ours));

    let usual = getrlimit(Resource::Nofile);
    // Descriptors below the limit, which applies to their numbers.
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(open + RECORDS / 4), ..usual }).unwrap();
    let refused = KeeperConnection::reach(&state);
    setrlimit(Resource::Nofile, usual).unwrap();
    assert!(matches!(refused, Err(KeeperError::NoRoom)), "{refused:?}");

    let second = server();
    assert_eq!(second.take_connection().unwrap().records.len() as u64, RECORDS);
    second.end_connection();
    drop((second, front_end));
    keeper.join().unwrap();
}
