//! Limits of rates, by clients of a socket.

use crate::common;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{Client, Link, PATIENCE, ROOT, Server};
use ferry_engine::{BURST_MIN, Rates, TokenBucket};
use ferry_mem::Mem;
use ferry_ninep::{Options, RateLimiter};
use ferry_vfs::OFlags;
use ferry_wire::ninep::*;

const FILE: Fid = Fid(1);
const BLOCK: u32 = 4096;
/// How long a limiter may be in advance beside its burst: a portion, and the precision of timers.
const ADVANCE: Duration = Duration::from_millis(10);

fn bucket(requests: u64, bytes: u64) -> Arc<TokenBucket> {
    TokenBucket::new(Some(Rates { requests: requests.try_into().ok(), bytes: bytes.try_into().ok(), burst: BURST_MIN }))
}

fn limited(bucket: &Arc<TokenBucket>) -> Server {
    let source = Arc::new(Mem::new(&ferry_mem::Options::default()).unwrap());
    Server::of(source, Options { limiter: Some(RateLimiter::new(bucket)), ..Options::default() })
}

/// A client that has a file of a block open.
fn client(server: &Server) -> Client<Link> {
    let mut client = server.attached(0);
    client.create(FILE, "f", OFlags::RDWR | OFlags::CREATE, 0o644).unwrap();
    client.write(FILE, 0, &[7; BLOCK as usize]).unwrap();
    client
}

fn send_read(client: &mut Client<Link>, tag: u16) {
    client.send(Tag(tag), &Request::Read { fid: FILE, offset: 0, bytes_max: BLOCK });
}

/// Reads for this time with so many requests at once; returns how many, and for how long.
fn read(client: &mut Client<Link>, depth: u16, time: Duration) -> (u64, Duration) {
    (0..depth).for_each(|tag| send_read(client, tag));
    let (begin, mut done) = (Instant::now(), 0);
    while begin.elapsed() < time {
        let (tag, message) = client.receive();
        assert!(matches!(Reply::decode(&message).unwrap().1, Reply::Read(data) if data.len() == BLOCK as usize));
        done += 1;
        send_read(client, tag.0);
    }
    (done, begin.elapsed())
}

/// Reads at this depth; asserts that there are no more than this many requests per second, and at least this part of them.
#[track_caller]
fn assert_rate(all: &Arc<TokenBucket>, per_second: f64, depth: u16, time: Duration, least: f64) {
    let rates = all.rates();
    all.set(None);
    let server = limited(all);
    let mut client = client(&server);
    all.set(rates);
    let (done, longest) = read(&mut client, depth, time);
    let most = per_second * (longest + BURST_MIN + ADVANCE).as_secs_f64() + f64::from(depth);
    assert!(done as f64 <= most, "{done} requests in {longest:?}, of {most}");
    let expected = per_second * longest.as_secs_f64();
    eprintln!("{done} requests in {longest:?}, {:.3} of the limit", done as f64 / expected);
    assert!(done as f64 >= expected * least, "{done} requests in {longest:?}, of {expected}");
}

#[test]
fn clients_share_the_limit() {
    let time = Duration::from_millis(800);
    assert_rate(&bucket(1000, 0), 1000.0, 16, time, 0.3);
    assert_rate(&bucket(0, 4 << 20), 1024.0, 1, time, 0.3);
}

#[test]
#[ignore = "long: make test-all"]
fn clients_get_their_limit_within_five_percent() {
    for depth in [1, 32] {
        assert_rate(&bucket(2000, 0), 2000.0, depth, Duration::from_secs(5), 0.95);
        assert_rate(&bucket(0, 8 << 20), 2048.0, depth, Duration::from_secs(5), 0.95);
    }
}

#[test]
fn exports_of_one_group_get_equal_parts() {
    let all = TokenBucket::new(None);
    let servers = [limited(&all), limited(&all)];
    let mut clients = servers.each_ref().map(client);
    all.set(bucket(1000, 0).rates());
    let done: Vec<_> = thread::scope(|scope| {
        let readers = clients
            .iter_mut()
            .zip([4, 48])
            .map(|(client, depth)| scope.spawn(move || read(client, depth, Duration::from_secs(2)).0));
        let readers: Vec<_> = readers.collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    let share = done[0] as f64 / done.iter().sum::<u64>() as f64;
    assert!((0.4..0.6).contains(&share), "{done:?}");
}

/// A client whose next request waits for an hour.
fn exhausted() -> (Server, Client<Link>, Arc<TokenBucket>) {
    let all = TokenBucket::new(None);
    let server = limited(&all);
    let mut client = client(&server);
    client.walk(ROOT, Fid(2), "").unwrap();
    all.set(bucket(0, 1).rates());
    assert_eq!(client.read(FILE, 0, BLOCK).unwrap().len(), BLOCK as usize);
    send_read(&mut client, 1);
    assert!(client.is_silent(Duration::from_millis(200)), "it waits");
    (server, client, all)
}

#[test]
fn flush_and_clunk_pass_requests_that_wait() {
    let (server, mut client, all) = exhausted();
    client.send(Tag(2), &Request::Clunk { fid: Fid(2) });
    assert_eq!(client.receive().0, Tag(2));
    // The flushed request gets no reply, and its tag is free.
    client.send(Tag(3), &Request::Flush { old: Tag(1) });
    assert_eq!(client.receive().0, Tag(3));
    server.settles(|usage| usage.requests == 0 && usage.buffered_bytes == 0);
    send_read(&mut client, 1);
    assert!(client.is_silent(Duration::from_millis(200)), "it waits again");
    assert!(server.usage().threads < 10, "{:?}", server.usage());
    all.set(None);
    assert_eq!(client.receive().0, Tag(1), "without a limit it is served");
}

#[test]
fn waiting_requests_end_with_their_connection_session_and_server() {
    let (server, client, all) = exhausted();
    let mut other = server.connect();
    other.hello(common::MSIZE);
    other.send(
        Tag(1),
        &Request::Attach { fid: ROOT, afid: Fid::NONE, user: User { name: b"", uid: Some(0) }, tree: b"" },
    );
    server.settles(|usage| usage.connections == 2 && usage.requests == 2);
    drop(client);
    server.settles(|usage| usage.connections == 1 && usage.requests == 1);
    other.hello(common::MSIZE);
    server.settles(|usage| usage.requests == 0 && usage.buffered_bytes == 0);
    drop((other, server, all));

    let (mut server, mut client, _all) = exhausted();
    let begin = Instant::now();
    server.export.take().unwrap().stop();
    assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
    assert!(client.is_ended());
}

#[test]
fn a_connection_has_a_bounded_number_of_waiting_requests() {
    let (server, mut client, all) = exhausted();
    // As many as fit into the socket while no thread receives.
    (2..250).for_each(|tag| send_read(&mut client, tag));
    std::thread::sleep(Duration::from_millis(200));
    let usage = server.usage();
    assert!((50..100).contains(&usage.requests) && usage.threads < 10, "{usage:?}");
    all.set(None);
    (1..250).for_each(|_| assert!(client.receive().0.0 >= 1));
}
