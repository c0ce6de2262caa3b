//! Limits of requests and of time, with connections that no thread serves.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use ferry_vfs::FileSystem;
use ferry_wire::ninep::{Fid, Request, VERSION};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::clients::Clients;
use crate::share::Share;
use crate::{Limits, Options};

const UNFINISHED: &str = "it does not finish its message";
const UNREAD: &str = "it does not take its replies";

/// A source without calls.
struct Nothing;

impl FileSystem for Nothing {}

/// A connection of a client that has attached, and the client's end.
struct Attached {
    hub: Arc<Hub>,
    connection: Connection,
    _client: OwnedFd,
}

impl Attached {
    fn new() -> Self {
        let share = Share::new(Arc::new(Nothing), Options::default());
        let hub = Hub::start(Vec::new(), Arc::new(share)).unwrap();
        let (server, client) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        let connection = Connection::new(Arc::clone(&hub), 0, Stream::plain(server), Clients::alone());
        connection.attached();
        Self { hub, connection, _client: client }
    }

    /// Fills the socket, as replies do that the client does not read.
    fn fill(&self) {
        while self.connection.stream.send(&[IoSlice::new(&[0; 4096])]).is_ok() {}
        assert!(!self.connection.is_writable());
    }

    /// Keeps received bytes, from now on.
    fn keep(&self, bytes: &[u8]) -> Instant {
        let now = Instant::now();
        *lock(&self.connection.inbox) =
            Inbox { bytes: bytes.to_vec(), end: bytes.len(), since: Some(now), ..Inbox::default() };
        now
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

fn message() -> Vec<u8> {
    let mut message = Vec::new();
    Request::Clunk { fid: Fid(1) }.encode(Tag(2), &mut message);
    message
}

#[test]
fn long_messages_are_served_with_less_concurrency() {
    for (bytes, most) in
        [(200, 72), (128 << 10, 72), (1 << 20, 32), (2 << 20, 16), (4 << 20, 8), (16 << 20, 4), (0, 72)]
    {
        let mut interest = PollInterest::default();
        while interest.has_room() {
            interest.running += 1;
            interest.running_bytes += bytes;
        }
        assert_eq!(interest.running, most, "{bytes}");
    }
}

/// Requests wait for a disk, or threads; or replies are queued, and the client reads them slowly.
#[test]
fn a_client_is_not_ended_for_a_delay_of_the_server() {
    type Delay = fn(&mut PollInterest, bool);
    let limit = Limits::default().slow_timeout;
    let (attached, whole) = (Attached::new(), message());
    attached.fill();
    let delays: [(&str, Delay); 3] = [
        ("running", |interest, is_so| interest.running = if is_so { RUNNING_MAX } else { 0 }),
        ("waiting", |interest, is_so| interest.waiting = is_so),
        ("blocked", |interest, is_so| interest.blocked = is_so),
    ];
    for (what, delay) in delays {
        for (bytes, reason) in [(&whole[..5], UNFINISHED), (&whole[..], UNREAD)] {
            let connection = &attached.connection;
            let mut now = attached.keep(bytes);
            delay(&mut lock(&connection.interest), true);
            for seconds in 0..100 {
                now += Duration::from_secs(1);
                assert_eq!(connection.overdue(now), None, "{what} for {seconds} s: {reason}");
            }
            delay(&mut lock(&connection.interest), false);
            assert_eq!(connection.overdue(now + limit), None, "{what}: {reason}");
            assert_eq!(connection.overdue(now + limit + Duration::from_secs(1)), Some(reason), "{what}");
        }
    }
}

#[test]
fn a_client_with_a_parked_request_must_read_its_replies() {
    let attached = Attached::new();
    let connection = &attached.connection;
    assert!(connection.version(Tag::NONE, MSIZE_MIN, VERSION).is_none());
    let (ticket, _session) = connection.register(Tag(1)).unwrap();
    connection.park(&ticket, &Arc::default());
    assert_eq!(connection.usage(), (0, 1, 1));
    attached.fill();
    let limit = Limits::default().slow_timeout;
    let begun = attached.keep(&message());
    assert_eq!(connection.overdue(begun + limit), None);
    assert_eq!(connection.overdue(begun + limit + Duration::from_secs(1)), Some(UNREAD));
}
