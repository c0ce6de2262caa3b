//! Clients that do not keep to the protocol, and clients that take up what is others'.

use crate::common;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::{Client, DirServer, MSIZE, ROOT, Server};
use ferry_ninep::{Error, Export, Limits, Options};
use ferry_vfs::*;
use ferry_wire::ninep::{Fid, READ_HEAD_BYTES, Reply, Request, Tag, VERSION, kind};
use rustix::process::Uid;
use socket2::{Domain, Socket, Type};

const SHORT: Duration = Duration::from_millis(700);

fn impatient() -> Options {
    Options { limits: Limits { slow_timeout: SHORT, ..Limits::default() }, ..Options::default() }
}

/// Messages that no reply can be found for end the connection; others are answered with an error.
#[test]
fn frames_of_invalid_lengths_end_the_connection() {
    let share = DirServer::new(Options::default());
    for bytes in [0_u32, 1, 6, MSIZE + 1, u32::MAX] {
        let mut client = share.attached(0);
        client.stream.write_all(&[&bytes.to_le_bytes()[..], &[kind::TCLUNK, 1, 0]].concat()).unwrap();
        assert!(client.is_ended(), "{bytes}");
    }
    // Before anything was agreed on, no message is longer than the shortest that can be.
    let mut client = share.connect();
    client.stream.write_all(&5000_u32.to_le_bytes()).unwrap();
    assert!(client.is_ended());
    share.settles(|usage| usage.connections == 0);
    share.assert_released();
}

#[test]
fn invalid_requests_are_errors() {
    let share = DirServer::new(Options::default());
    let mut client = share.attached(0);
    for kind in 0..=u8::MAX {
        if matches!(kind, kind::TVERSION) {
            continue;
        }
        for body in [&b""[..], b"\xff", &[0xff; 40]] {
            let bytes = u32::try_from(7 + body.len()).unwrap();
            let message = [&bytes.to_le_bytes()[..], &[kind, 9, 0], body].concat();
            client.stream.write_all(&message).unwrap();
            let (tag, answer) = client.receive();
            assert!(matches!(Reply::decode(&answer), Ok((Tag(9), Reply::Error(_)))), "type {kind}: {answer:?}");
            assert_eq!(tag, Tag(9));
        }
    }
    let invalid = share.invalid();
    assert_eq!(invalid, 3 * 255);
    assert!(client.getattr(ROOT).is_ok(), "the connection is still good");
    assert_eq!(share.invalid(), invalid);
    client.send(Tag::NONE, &Request::Clunk { fid: ROOT });
    let (_, answer) = client.receive();
    assert_eq!(Reply::decode(&answer).unwrap().1, Reply::Error(Errno::INVAL), "that tag is for Tversion alone");
}

/// One name more than a walk may have, all of them there: an error, no fid, and the connection is still good.
#[test]
fn a_walk_of_seventeen_names_is_refused() {
    let share = DirServer::new(Options::default());
    fs::create_dir_all(share.path.join(["d"; 17].join("/"))).unwrap();
    let mut client = share.attached(0);
    let mut walk = |names: u16| {
        let steps = b"\x01\0d".repeat(names.into());
        let body = [&ROOT.0.to_le_bytes()[..], &1_u32.to_le_bytes(), &names.to_le_bytes(), &steps].concat();
        let bytes = u32::try_from(7 + body.len()).unwrap();
        client.stream.write_all(&[&bytes.to_le_bytes()[..], &[kind::TWALK, 9, 0], &body].concat()).unwrap();
        let (_, answer) = client.receive();
        match Reply::decode(&answer).unwrap() {
            (Tag(9), Reply::Walk(qids)) => Ok(qids.as_slice().len()),
            (Tag(9), Reply::Error(errno)) => Err(errno),
            other => panic!("{names} names: {other:?}"),
        }
    };
    assert_eq!(walk(17), Err(Errno::INVAL));
    // Had the first walk made fid 1, it would be in use now.
    assert_eq!(walk(16), Ok(16));
    assert!(client.getattr(Fid(1)).is_ok());
}

/// Mixed up, cut and random messages: the server goes on, and holds nothing afterwards.
#[test]
fn random_bytes_do_no_harm() {
    let share = DirServer::new(Options::default());
    fs::write(share.path.join("f"), "text").unwrap();
    let mut state = 0x1234_5678_9abc_def0_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..60 {
        let mut client = share.attached(0);
        client.open_path(Fid(1), "f", OFlags::RDWR).unwrap();
        let mut bytes = Vec::new();
        for _ in 0..20 {
            let before = bytes.len();
            Request::Read { fid: Fid(1), offset: 0, bytes_max: 100 }.encode(Tag(3), &mut bytes);
            for _ in 0..random() % 4 {
                let at = before + 4 + usize::try_from(random() % 19).unwrap();
                bytes[at] = random().to_le_bytes()[0];
            }
        }
        // The server may have ended the connection by then: for a tag that was in use.
        let _ = client.stream.write_all(&bytes);
        let _ = client.stream.socket().shutdown(std::net::Shutdown::Write);
        let _ = client.stream.read_to_end(&mut Vec::new());
    }
    share.settles(|usage| usage.connections == 0 && usage.buffered_bytes == 0);
    share.assert_released();
    assert!(share.attached(0).getattr(ROOT).is_ok());
}

#[test]
fn clients_that_stall_are_disconnected() {
    let share = DirServer::new(impatient());
    let begin = Instant::now();
    // Says nothing; agrees, and does not attach; begins a message.
    let mut silent = share.connect();
    let mut shy = share.connect();
    shy.hello(8192);
    let mut slow = share.attached(0);
    slow.stream.write_all(&[50, 0, 0, 0, kind::TCLUNK]).unwrap();
    let mut quiet = share.attached(0);
    assert!(silent.is_ended() && shy.is_ended() && slow.is_ended());
    assert!(begin.elapsed() >= SHORT && begin.elapsed() < common::PATIENCE);
    share.settles(|usage| usage.connections == 1 && usage.buffered_bytes == 0);
    assert!(quiet.getattr(ROOT).is_ok(), "who has attached may be silent");
}

#[test]
fn silent_clients_are_disconnected_with_a_timeout() {
    let limits = Limits { idle_timeout: Some(SHORT), ..Limits::default() };
    let share = DirServer::new(Options { limits, ..Options::default() });
    let mut client = share.attached(0);
    assert!(client.is_ended());
}

/// Requests in between count, whether they come one by one or while others are served.
#[test]
fn clients_that_ask_now_and_then_stay_connected() {
    let limits = Limits { idle_timeout: Some(2 * SHORT), ..Limits::default() };
    let share = DirServer::new(Options { limits, ..Options::default() });
    let mut client = share.attached(0);
    let begin = Instant::now();
    while begin.elapsed() < 6 * SHORT {
        assert!(client.getattr(ROOT).is_ok(), "after {:?}", begin.elapsed());
        std::thread::sleep(SHORT / 10);
    }
}

/// A connection that is closed for want of memory, in the middle of a message: what its client has sent behind that is
/// data, and some of it looks like messages.
#[test]
fn data_of_a_closed_connection_is_not_served() {
    /// Divides the pieces in which a socket gives away what it has.
    const UNIT: usize = 64;
    let limits = Limits { buffered_bytes_max: 4096, ..Limits::default() };
    let share = DirServer::new(Options { limits, ..Options::default() });
    let mut client = share.attached(0);
    client.create(Fid(1), "f", OFlags::RDWR, 0o600).unwrap();
    let mut bytes = Vec::new();
    Request::Fsync { fid: Fid(1), data_only: false }.encode(Tag(1), &mut bytes);
    let mut head = Vec::new();
    Request::Write { fid: Fid(1), offset: 0, data: &[] }.encode(Tag(2), &mut head);
    let before = bytes.len() + head.len();
    let mut data = vec![0; before.next_multiple_of(UNIT) - before];
    let mut mkdir = Vec::new();
    let request = |name| Request::Mkdir { dir: ROOT, name: common::name(name), mode: 0o700, gid: 0 };
    request("x").encode(Tag(3), &mut mkdir);
    let (name, bare) = ("made-of-data-".repeat(UNIT), mkdir.len() - 1);
    mkdir.clear();
    request(&name[..UNIT - bare]).encode(Tag(3), &mut mkdir);
    assert_eq!(mkdir.len(), UNIT);
    data.extend(mkdir.repeat(((MSIZE as usize).min(120 << 10) - UNIT) / UNIT - 1));
    Request::Write { fid: Fid(1), offset: 0, data: &data }.encode(Tag(2), &mut bytes);
    // The server may have closed it already.
    let _ = client.stream.write_all(&bytes);
    assert!(client.is_ended());
    share.settles(|usage| usage.connections == 0 && usage.buffered_bytes == 0);
    let names: Vec<_> = fs::read_dir(&share.path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["f"]);
}

/// A client that sends byte by byte is served, too.
#[test]
fn a_message_may_come_in_any_pieces() {
    let share = DirServer::new(Options::default());
    let mut client = share.attached(0);
    client.create(Fid(1), "f", OFlags::RDWR, 0o600).unwrap();
    let data: Vec<u8> = (0..200_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    let mut bytes = Vec::new();
    Request::Getattr { fid: ROOT, mask: 0 }.encode(Tag(1), &mut bytes);
    let head = bytes.len();
    Request::Write { fid: Fid(1), offset: 0, data: &data }.encode(Tag(2), &mut bytes);
    for byte in &bytes[..head + 30] {
        client.stream.write_all(&[*byte]).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(client.receive().0, Tag(1));
    share.settles(|usage| usage.buffered_bytes > 0 && usage.buffered_bytes < 200_000);
    for piece in bytes[head + 30..].chunks(70_001) {
        client.stream.write_all(piece).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(client.receive().0, Tag(2));
    assert_eq!(fs::read(share.path.join("f")).unwrap(), data);
    share.settles(|usage| usage.buffered_bytes == 0);
}

/// A client that sends and never reads is bounded, and does not affect others.
#[test]
fn unread_replies_are_bounded() {
    const BOUND: usize = 8 << 20;
    let limits = Limits { buffered_bytes_max: BOUND, slow_timeout: Duration::from_secs(3), ..Limits::default() };
    let share = DirServer::new(Options { limits, ..Options::default() });
    fs::write(share.path.join("f"), vec![7; MSIZE as usize]).unwrap();
    let mut deaf: Vec<_> = (0..4)
        .map(|_| {
            let mut client = share.attached(0);
            client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
            client.stream.socket().set_write_timeout(Some(Duration::from_millis(100))).unwrap();
            client
        })
        .collect();
    let mut other = share.attached(0);
    other.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    for round in 0..200_u16 {
        for client in &mut deaf {
            let mut message = Vec::new();
            Request::Read { fid: Fid(1), offset: 0, bytes_max: MSIZE }.encode(Tag(round), &mut message);
            // Once it is full, or ended.
            let _ = client.stream.write(&message);
        }
        let usage = share.usage();
        assert!(usage.buffered_bytes <= BOUND, "{usage:?}");
    }
    assert_eq!(other.read(Fid(1), 0, 100).unwrap(), [7; 100]);
    // Those who do not listen have to go; the one that does has lost nothing.
    share.settles(|usage| usage.connections == 1 && usage.buffered_bytes == 0);
    assert_eq!(other.read(Fid(1), 0, MSIZE).unwrap().len(), MSIZE as usize - READ_HEAD_BYTES);
}

/// Its replies fill no buffer, but the socket has no room for those of its next requests.
#[test]
fn a_client_that_reads_no_short_replies_has_to_go() {
    let limits = Limits { slow_timeout: Duration::from_secs(1), ..Limits::default() };
    let share = DirServer::new(Options { limits, ..Options::default() });
    fs::write(share.path.join("f"), vec![7; 4096]).unwrap();
    let mut deaf = share.attached(0);
    deaf.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    let mut messages = Vec::new();
    for tag in 0..1000_u16 {
        let mut message = Vec::new();
        Request::Read { fid: Fid(1), offset: 0, bytes_max: 1000 }.encode(Tag(tag), &mut message);
        messages.extend(message);
    }
    deaf.stream.write_all(&messages).unwrap();
    share.settles(|usage| usage.connections == 0 && usage.buffered_bytes == 0);
}

/// A client that listens late gets every reply, whole.
#[test]
fn replies_wait_for_a_client_that_is_late() {
    let share = DirServer::new(Options::default());
    let data: Vec<u8> = (0..1_000_000_u32).map(|n| (n / 3).to_le_bytes()[0]).collect();
    fs::write(share.path.join("f"), &data).unwrap();
    let mut client = share.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    for tag in 0..20 {
        client.send(Tag(tag), &Request::Read { fid: Fid(1), offset: u64::from(tag), bytes_max: MSIZE });
    }
    share.settles(|usage| usage.buffered_bytes > 0);
    let mut seen = [false; 20];
    for _ in 0..20 {
        let (Tag(tag), message) = client.receive();
        assert!(message[READ_HEAD_BYTES..] == data[usize::from(tag)..], "{tag}");
        assert!(!std::mem::replace(&mut seen[usize::from(tag)], true));
    }
    share.settles(|usage| usage.buffered_bytes == 0 && usage.requests == 0);
}

#[test]
fn tags_and_fids_in_use_are_refused() {
    let share = DirServer::new(Options::default());
    fs::write(share.path.join("f"), "").unwrap();
    let mut holder = share.attached(0);
    holder.open_path(Fid(1), "f", OFlags::RDWR).unwrap();
    holder.lock(Fid(1), LockKind::Write, 1, false).unwrap();
    let mut client = share.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDWR).unwrap();
    let lock = common::lock_of(LockKind::Write, 1);
    client.send(Tag(40), &Request::Lock { fid: Fid(1), lock, wait: true, reclaim: false });
    share.settles(|usage| usage.requests == 1);
    assert_eq!(client.attach(ROOT, 0), Err(Errno::BADF));
    client.send(Tag(40), &Request::Getattr { fid: ROOT, mask: 0 });
    assert!(client.is_ended());
    share.settles(|usage| usage.connections == 1);
}

#[test]
fn there_is_a_limit_of_connections() {
    let limits = Limits { connections_max: 3, ..Limits::default() };
    let share = DirServer::new(Options { limits, ..Options::default() });
    let clients: Vec<_> = (0..3).map(|_| share.attached(0)).collect();
    assert!(share.connect().is_ended());
    drop(clients);
    share.settles(|usage| usage.connections == 0);
    assert!(share.attached(0).getattr(ROOT).is_ok());
}

/// A client at an address of this machine.
fn from(address: &str, server: SocketAddr) -> Client<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    // Some kernels let it grow until all that is asked for fits, and nothing is left to the server.
    socket.set_recv_buffer_size(64 << 10).unwrap();
    socket.bind(&SocketAddr::new(address.parse().unwrap(), 0).into()).unwrap();
    socket.connect(&server.into()).unwrap();
    Client::new(socket.into())
}

/// A client of this machine that is another user's.
fn of_user(uid: u32, path: PathBuf) -> Client<UnixStream> {
    let connect = move || {
        rustix::thread::set_thread_res_uid(None, Some(Uid::from_raw(uid)), None).unwrap();
        UnixStream::connect(path).unwrap()
    };
    Client::new(std::thread::spawn(connect).join().unwrap())
}

/// More than a TCP socket has room for: a request is served when a third of the room is free.
const LONG: u32 = 4 << 20;

/// Asks for much, and takes nothing. The first of the requests is for fewer bytes.
fn ask<S: common::Stream>(client: &mut Client<S>, msize: u32, (fewer, requests): (u32, u16)) {
    client.hello(msize);
    client.attach(ROOT, 0).unwrap();
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    let mut messages = Vec::new();
    for tag in 0..requests {
        let bytes_max = if tag == 0 { msize - fewer } else { msize };
        Request::Read { fid: Fid(1), offset: 0, bytes_max }.encode(Tag(tag), &mut messages);
    }
    client.stream.write_all(&messages).unwrap();
}

/// One client holds all that is there for unsent replies, by many connections. Another one, which is late, gets every reply.
fn one_client_takes_nothing_from_another<S: common::Stream>(
    server: &Server,
    deaf: impl Fn() -> Client<S>,
    (other, requests): (impl Fn() -> Client<S>, u16),
) {
    let bound = server.options().limits.buffered_bytes_max;
    // How much of its last reply each leaves to the server depends on the room in the kernel, which is the same for many:
    // so each begins at another place.
    let mut holders = Vec::new();
    let begin = Instant::now();
    while server.usage().buffered_bytes <= bound / 4 * 3 {
        if holders.len() < DEAF_MAX {
            let mut client = deaf();
            let place = u32::try_from(holders.len()).unwrap().wrapping_mul(2_654_435_761);
            ask(&mut client, LONG, (place % LONG, 20));
            holders.push(client);
        }
        // A machine with much to do serves them later.
        assert!(begin.elapsed() < common::PATIENCE, "{:?}", server.usage());
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut late: Vec<_> = (0..2).map(|_| other()).collect();
    for client in &mut late {
        ask(client, MSIZE, (0, requests));
    }
    // They hold more than was free, and there is not more than there may be.
    std::thread::sleep(SHORT);
    let usage = server.usage();
    assert!(usage.buffered_bytes <= bound + LONG as usize, "{usage:?}");
    for client in &mut late {
        for _ in 0..requests {
            assert_eq!(client.receive().1.len(), MSIZE as usize);
        }
        assert!(client.getattr(ROOT).is_ok());
    }
    drop((holders, late));
    server.settles(|usage| usage.connections == 0 && usage.buffered_bytes == 0);
}

/// Enough connections to hold what there is, with a part of a reply each.
const DEAF_MAX: usize = 200;

fn with_little_room() -> DirServer {
    let limits = Limits { buffered_bytes_max: 24 << 20, ..Limits::default() };
    let share = DirServer::new(Options { limits, ..Options::default() });
    fs::write(share.path.join("f"), vec![7; LONG as usize]).unwrap();
    share
}

#[test]
fn one_address_takes_nothing_from_another() {
    let share = with_little_room();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let source = Arc::clone(&share.dir) as Arc<dyn FileSystem>;
    let server = share.server.also_at(listener.into(), source);
    one_client_takes_nothing_from_another(&server, || from("127.0.0.1", address), (|| from("127.0.0.2", address), 8));
}

#[test]
fn one_user_takes_nothing_from_another() {
    if !rustix::process::geteuid().is_root() {
        return ferry_skip::skip!("needs root, to be another user");
    }
    let share = with_little_room();
    let everybody = |path: &std::path::Path| fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    everybody(share.directory.path());
    everybody(&share.socket);
    let socket = || share.socket.clone();
    one_client_takes_nothing_from_another(&share.server, || of_user(1000, socket()), (|| of_user(1001, socket()), 4));
}

/// Connections of one client leave room for those of another.
#[test]
fn connections_of_one_client_leave_room_for_others() {
    let limits = Limits { connections_max: 8, ..Limits::default() };
    let share = DirServer::new(Options { limits, ..Options::default() });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let _server = share.server.also_at(listener.into(), Arc::clone(&share.dir) as Arc<dyn FileSystem>);
    let attached = |mut client: Client<TcpStream>| {
        client.hello(MSIZE);
        client.attach(ROOT, 0).unwrap();
        client
    };
    let mut greedy: Vec<_> = (0..8).map(|_| attached(from("127.0.0.1", address))).collect();
    assert!(from("127.0.0.1", address).is_ended());
    let mut others: Vec<_> = (0..3).map(|_| attached(from("127.0.0.2", address))).collect();
    assert!(others.iter_mut().all(|client| client.getattr(ROOT).is_ok()));
    let kept = greedy.split_off(5);
    assert!(greedy.iter_mut().all(|client| client.getattr(ROOT).is_ok()));
    assert!(kept.into_iter().all(|mut client| client.is_ended()));
}

/// Silent connections take no thread.
#[test]
fn idle_connections_are_cheap() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let limits = Limits { connections_max: 4096, ..Limits::default() };
    let share = DirServer::new(Options { limits, ..Options::default() });
    // Two descriptors each, in this process.
    let room = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
    let count = usize::try_from(room.saturating_sub(200) / 2).unwrap().min(2000);
    let clients: Vec<_> = (0..count).map(|_| share.attached(0)).collect();
    assert_eq!(share.usage().connections, count);
    assert!(share.usage().threads < 30, "{:?}", share.usage());
    let mut last = share.attached(0);
    assert!(last.getattr(ROOT).is_ok());
    drop(clients);
    share.settles(|usage| usage.connections == 1);
}

/// A source whose reads wait until they are let go, and that panics where it is told to.
pub(crate) struct Slow {
    gate: Barrier,
    pub(crate) reading: AtomicUsize,
    panics: AtomicBool,
}

impl FileSystem for Slow {
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        assert!(!self.panics.load(Ordering::Relaxed), "as the test wants it");
        let kind = if ino == Ino::ROOT { FileType::Directory } else { FileType::RegularFile };
        Ok(Attr::new(ino, kind, 0o777))
    }

    fn lookup(&self, _: &Caller<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        Ok(Entry::new(Ino(2), Attr::new(Ino(2), FileType::RegularFile, 0o666)))
    }

    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(0))
    }

    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        if at.offset > 0 {
            // More than there is.
            return Ok(Data::Bytes(out.put(b"lie") + 1));
        }
        self.reading.fetch_add(1, Ordering::Relaxed);
        self.gate.wait();
        Ok(Data::Bytes(out.put(b"slow")))
    }
}

pub(crate) fn slow(together: usize) -> (Arc<Slow>, Server) {
    let gate = Barrier::new(together);
    let source = Arc::new(Slow { gate, reading: AtomicUsize::new(0), panics: AtomicBool::new(false) });
    let server = Server::of(Arc::clone(&source) as Arc<dyn FileSystem>, Options::default());
    (source, server)
}

/// A source that does not take files back until it is let go.
#[derive(Default)]
struct Keeping {
    let_go: Mutex<bool>,
    changed: Condvar,
    releasing: AtomicUsize,
}

impl Keeping {
    fn let_go(&self) {
        *self.let_go.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl FileSystem for Keeping {
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        let kind = if ino == Ino::ROOT { FileType::Directory } else { FileType::RegularFile };
        Ok(Attr::new(ino, kind, 0o777))
    }

    fn lookup(&self, _: &Caller<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        Ok(Entry::new(Ino(2), Attr::new(Ino(2), FileType::RegularFile, 0o666)))
    }

    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(0))
    }

    fn release(&self, _: &Caller<'_>, _: Ino, _: Handle) {
        self.releasing.fetch_add(1, Ordering::Relaxed);
        let let_go = self.let_go.lock().unwrap();
        // Not for good, so that a test that fails ends.
        drop(self.changed.wait_timeout_while(let_go, 2 * common::PATIENCE, |let_go| !*let_go).unwrap());
    }
}

fn keeping(options: Options) -> (Arc<Keeping>, Server) {
    let source = Arc::new(Keeping::default());
    let server = Server::of(Arc::clone(&source) as Arc<dyn FileSystem>, options);
    (source, server)
}

fn with_a_file(server: &Server) -> Client<common::Link> {
    let mut client = server.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    client
}

/// More sessions than there are threads end at the same time, by either way, and none comes to its end.
#[test]
fn sessions_that_end_slowly_delay_no_others() {
    for by_version in [false, true] {
        let (source, server) = keeping(Options::default());
        let mut clients: Vec<_> = (0..24).map(|_| with_a_file(&server)).collect();
        match by_version {
            true => clients.iter_mut().for_each(|client| assert_eq!(client.hello(8192), 8192)),
            false => clients.clear(),
        }
        let end = Instant::now() + common::PATIENCE;
        while source.releasing.load(Ordering::Relaxed) < 24 {
            assert!(Instant::now() < end, "only {} end", source.releasing.load(Ordering::Relaxed));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(server.attached(0).getattr(ROOT).is_ok());
        source.let_go();
    }
}

/// The clock has other clients to look after.
#[test]
fn a_session_that_ends_slowly_does_not_stop_the_clock() {
    let (source, server) = keeping(impatient());
    let stalls = |mut client: Client<common::Link>| {
        client.stream.write_all(&[50, 0, 0, 0, kind::TCLUNK]).unwrap();
        client
    };
    let mut first = stalls(with_a_file(&server));
    assert!(first.is_ended());
    let mut second = stalls(server.attached(0));
    assert!(second.is_ended());
    assert_eq!(source.releasing.load(Ordering::Relaxed), 1);
    source.let_go();
}

/// Eight reads that wait for each other end only if all are served at the same time.
#[test]
fn requests_of_one_connection_are_served_concurrently() {
    let (source, server) = slow(8);
    let mut client = server.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    for tag in 0..7 {
        client.send(Tag(tag), &Request::Read { fid: Fid(1), offset: 0, bytes_max: 10 });
    }
    while source.reading.load(Ordering::Relaxed) < 7 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // A flush of one that has begun waits for its end, and comes behind its answer.
    client.send(Tag(100), &Request::Flush { old: Tag(3) });
    client.send(Tag(101), &Request::Flush { old: Tag(100) });
    assert!(client.is_silent(Duration::from_millis(200)));
    client.send(Tag(7), &Request::Read { fid: Fid(1), offset: 0, bytes_max: 10 });
    let order: Vec<u16> = (0..10).map(|_| client.receive().0.0).collect();
    let place = |tag| order.iter().position(|at| *at == tag).unwrap();
    assert!(place(3) < place(100) && place(100) < place(101), "{order:?}");
}

/// Tversion in the middle: what was under way is not answered any more.
#[test]
fn a_new_session_drops_earlier_requests() {
    let (source, server) = slow(3);
    let mut client = server.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    for tag in [1, 2] {
        client.send(Tag(tag), &Request::Read { fid: Fid(1), offset: 0, bytes_max: 10 });
    }
    while source.reading.load(Ordering::Relaxed) < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    client.send(Tag::NONE, &Request::Version { msize: 8192, version: VERSION });
    assert_eq!(client.receive().0, Tag::NONE);
    client.attach(ROOT, 0).unwrap();
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    client.send(Tag(1), &Request::Read { fid: Fid(1), offset: 0, bytes_max: 10 });
    let (tag, message) = client.receive();
    assert_eq!((tag, Reply::decode(&message).unwrap().1), (Tag(1), Reply::Read(b"slow")));
    assert!(client.is_silent(Duration::from_millis(200)), "one answer, not three");
}

#[test]
fn a_source_that_panics_or_lies_fails_one_request() {
    let (source, server) = slow(1);
    let mut client = server.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    assert_eq!(client.read(Fid(1), 5, 10), Err(Errno::IO));
    source.panics.store(true, Ordering::Relaxed);
    assert_eq!(client.getattr(ROOT), Err(Errno::IO));
    source.panics.store(false, Ordering::Relaxed);
    assert!(client.getattr(ROOT).is_ok());
    assert_eq!(client.read(Fid(1), 0, 10).unwrap(), b"slow");
}

#[test]
fn tcp_serves_other_machines_only_with_a_flag() {
    let share = DirServer::new(Options::default());
    let source = || Arc::clone(&share.dir) as Arc<dyn FileSystem>;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let export = Export::start(vec![listener.into()], source(), Options::default()).unwrap();
    let mut client = Client::new(TcpStream::connect(address).unwrap());
    assert_eq!(client.hello(64 << 10), 64 << 10);
    client.attach(ROOT, 0).unwrap();
    client.create(Fid(1), "f", OFlags::RDWR, 0o600).unwrap();
    client.write(Fid(1), 0, b"by tcp").unwrap();
    assert_eq!(fs::read(share.path.join("f")).unwrap(), b"by tcp");
    export.stop();
    assert!(client.is_ended());
    let anywhere = || TcpListener::bind("0.0.0.0:0").unwrap();
    let refused = Export::start(vec![anywhere().into()], source(), Options::default());
    assert!(matches!(refused, Err(Error::Remote(_))), "{refused:?}");
    Export::start(vec![anywhere().into()], source(), Options { remote: true, ..Options::default() }).unwrap().stop();
}

/// What was asked is answered, and then everything is given back.
#[test]
fn stopping_ends_everything() {
    let mut share = DirServer::new(Options::default());
    fs::write(share.path.join("f"), "text").unwrap();
    let mut client = share.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDWR).unwrap();
    let mut half = UnixStream::connect(&share.socket).unwrap();
    half.write_all(&[20, 0]).unwrap();
    let export = share.server.export.take().unwrap();
    export.stop();
    assert!(client.is_ended());
    share.assert_released();
}
