//! Tags and flushes, with a server that is a socket.

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use ferry_vfs::LockKind;
use ferry_wire::ninep::{Frame, LockRequest, LockStatus, valid};

use super::*;

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// More requests than free tags rest.
const ROUNDS: usize = 300;

struct Server(UnixStream);

impl Server {
    /// Returns a connection with one request in flight at a time, and its server.
    fn new() -> (Arc<Connection>, Self) {
        let (client, server) = UnixStream::pair().unwrap();
        let (reader, writer) = (client.try_clone().unwrap(), client.try_clone().unwrap());
        let hang_up = Box::new(move || _ = client.shutdown(Shutdown::Both));
        let stream = Stream { reader: Box::new(reader), writer: Box::new(writer), hang_up };
        let connection = Connection::start(stream, &Options { depth: 1, ..Options::default() }, Arc::default());
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        (connection.unwrap(), Self(server))
    }

    /// Returns the tag of the next request, and the tag that it flushes.
    fn receive(&mut self) -> (Tag, Option<Tag>) {
        let mut message = vec![0; 4];
        self.0.read_exact(&mut message).unwrap();
        message.resize(Frame::bytes(*message.first_chunk().unwrap()) as usize, 0);
        self.0.read_exact(&mut message[4..]).unwrap();
        match Request::decode(&message).unwrap() {
            (tag, Request::Flush { old }) => (tag, Some(old)),
            (tag, _) => (tag, None),
        }
    }

    fn reply(&mut self, tag: Tag, reply: &Reply<'_>) {
        let mut message = Vec::new();
        reply.encode(tag, &mut message);
        self.0.write_all(&message).unwrap();
    }
}

/// Sends a lock request; returns it, and how it ends.
fn park(connection: &Connection) -> (ParkedRequest, mpsc::Receiver<RequestEnd>) {
    let (told, end) = mpsc::channel();
    let lock = LockRequest { kind: LockKind::Write, start: 0, end: 9, pid: 1, client: b"" };
    let request = Outgoing::new(&Request::Lock { fid: Fid(1), lock, wait: true, reclaim: false });
    let parked = connection.park(request, Wake::call(move |end| _ = told.send(end))).unwrap();
    (parked.unwrap(), end)
}

fn is_flushed(end: &mpsc::Receiver<RequestEnd>) -> bool {
    match end.recv_timeout(PATIENCE).unwrap() {
        RequestEnd::Message(message) => message.is_flushed,
        RequestEnd::Lost { .. } => panic!("it is lost"),
    }
}

/// Sends lock requests that are granted, one after the other; returns their tags.
fn tags_of_others(connection: &Connection, server: &mut Server) -> Vec<Tag> {
    let one = |_| {
        let (_, end) = park(connection);
        let (tag, _) = server.receive();
        server.reply(tag, &Reply::Lock(LockStatus::Success));
        assert!(!is_flushed(&end));
        tag
    };
    (0..ROUNDS).map(one).collect()
}

/// The request ends while its Tflush waits for a slot.
#[test]
fn a_tag_with_a_queued_flush_is_not_reused() {
    let (connection, mut server) = Server::new();
    let getattr = || Outgoing::new(&Request::Getattr { fid: Fid(1), mask: valid::BASIC });
    let (parked, end) = park(&connection);
    let (tag, _) = server.receive();
    let ticket = connection.send_one(getattr());
    let (slow, _) = server.receive();
    connection.give_up(parked);
    server.reply(tag, &Reply::Lock(LockStatus::Success));
    assert!(!is_flushed(&end), "it was granted");
    assert!(!tags_of_others(&connection, &mut server).contains(&tag));
    server.reply(slow, &Reply::Error(Errno::IO));
    assert!(ticket.wait(&connection).is_ok());
    let (flush, old) = server.receive();
    assert_eq!(old, Some(tag));
    server.reply(flush, &Reply::Flush);
    let reuses = |_: &usize| {
        let (_, end) = park(&connection);
        let (other, _) = server.receive();
        if other != tag {
            server.reply(other, &Reply::Lock(LockStatus::Success));
            assert!(!is_flushed(&end));
        }
        other == tag
    };
    assert!((0..ROUNDS).find(reuses).is_some(), "it is used again");
    // The tag is another request's now.
    connection.give_up(parked);
    drop(connection.send_one_later(getattr()));
    assert_eq!(server.receive().1, None);
    connection.fail("the test ends");
}

#[test]
fn a_flushed_request_ends_and_its_tag_is_reused() {
    let (connection, mut server) = Server::new();
    let (parked, end) = park(&connection);
    let (tag, _) = server.receive();
    connection.give_up(parked);
    let (flush, old) = server.receive();
    assert_eq!(old, Some(tag));
    server.reply(flush, &Reply::Flush);
    assert!(is_flushed(&end));
    assert!(tags_of_others(&connection, &mut server).contains(&tag));
    connection.fail("the test ends");
}
