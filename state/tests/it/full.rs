//! A keeper without free descriptors when a server comes. Alone in its process, whose limit it changes.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ferry_state::{Commit, Directory, Geometry, KeeperConnection, SessionStore};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_keeper_without_descriptors_waits_until_there_are_some() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state/keeper");
    let state = Directory::open(&directory.path().join("state")).unwrap();
    let listener = ferry_state::listen(&state).unwrap();
    let keeper =
        std::thread::spawn(move || ferry_state::keep(&listener, &eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap());
    let server =
        || SessionStore::open(KeeperConnection::reach(&state).unwrap(), Geometry { workers: 1, entries: 8 }).unwrap();
    let first = server();
    let (client, ours) = UnixStream::pair().unwrap();
    first.keep_connection(ours.as_fd()).unwrap();
    // It has heard of that.
    first.commit(&Commit::default()).unwrap();
    drop((first, ours));

    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let usual = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..usual }).unwrap();
    let left: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    drop(left);
    setrlimit(Resource::Nofile, usual).unwrap();
    let (_, bytes) = recv(&socket, &mut [0u8; 64][..], RecvFlags::empty()).unwrap();
    assert!(bytes > 0, "it sends what it has");
    drop(socket);

    let second = server();
    assert!(second.take_connection().is_some(), "and it has it still");
    second.end_connection();
    drop((second, client));
    keeper.join().unwrap();
}
