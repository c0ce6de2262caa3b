//! Requests that are sent together: served one after the other, answered together, and never for the price of waiting.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;
use crate::hostile::slow;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Client, DirServer, Link, ROOT};
use ferry_ninep::Options;
use ferry_vfs::OFlags;
use ferry_wire::ninep::*;

const GETATTR: Request<'static> = Request::Getattr { fid: ROOT, mask: valid::BASIC };

fn encoded<'a>(requests: impl IntoIterator<Item = (u16, Request<'a>)>) -> Vec<u8> {
    let mut bytes = Vec::new();
    requests.into_iter().for_each(|(tag, request)| request.encode(Tag(tag), &mut bytes));
    bytes
}

fn tags(client: &mut Client<Link>, count: usize) -> BTreeSet<u16> {
    (0..count).map(|_| client.receive().0.0).collect()
}

#[test]
fn they_are_answered_together() {
    let share = DirServer::new(Options::default());
    let mut client = share.attached(0);
    let together = encoded((0..16).map(|tag| (tag, GETATTR)));
    client.stream.write_all(&encoded([(0, GETATTR)])).unwrap();
    let mut replies = vec![0; 64 << 10];
    let one = client.stream.read(&mut replies).unwrap();
    // A machine that is busy delays one thread or the other now and then.
    let is_together = (0..50).any(|_| {
        client.stream.write_all(&together).unwrap();
        let first = client.stream.read(&mut replies).unwrap();
        client.stream.read_exact(&mut replies[first..16 * one]).unwrap();
        first == 16 * one
    });
    assert!(is_together, "a reply has {one} bytes");
}

/// What comes before a request that waits is answered, and what comes behind it is served.
#[test]
fn one_that_waits_delays_no_other() {
    let (source, server) = slow(3);
    let mut client = server.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    let read = Request::Read { fid: Fid(1), offset: 0, bytes_max: 10 };
    client.stream.write_all(&encoded([(1, GETATTR), (2, read), (3, GETATTR), (4, read), (5, GETATTR)])).unwrap();
    assert_eq!(tags(&mut client, 3), [1, 3, 5].into());
    assert_eq!(source.reading.load(Ordering::Relaxed), 2);
    assert!(client.is_silent(Duration::from_millis(100)));
    client.send(Tag(6), &read);
    assert_eq!(tags(&mut client, 3), [2, 4, 6].into());
}

#[test]
fn a_client_that_sends_no_more_gets_all_its_replies() {
    let share = DirServer::new(Options::default());
    // On a machine that is busy several threads serve it, and one may see the end before another has replied.
    let is_whole = (0..50).any(|_| {
        let mut client = share.attached(0);
        // More than one turn.
        client.stream.write_all(&encoded((0..1000).map(|tag| (tag, GETATTR)))).unwrap();
        client.stream.socket().shutdown(Shutdown::Write).unwrap();
        (0..1000).all(|_| client.try_receive().is_some()) && client.is_ended()
    });
    assert!(is_whole);
}

/// Long and short messages, which come in pieces of any length.
#[test]
fn messages_are_cut_anywhere() {
    const COUNT: usize = 300;
    let share = DirServer::new(Options::default());
    let mut random = 1_u64;
    let mut below = |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % bound
    };
    for round in 0..5 {
        let mut client = share.connect();
        client.hello(1 << 20);
        client.attach(ROOT, 0).unwrap();
        client.create(Fid(1), &format!("f{round}"), OFlags::RDWR, 0o600).unwrap();
        let data: Vec<u8> = (0..200_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let (mut bytes, mut expected) = (Vec::new(), Vec::new());
        for tag in 0..COUNT as u16 {
            let length = [below(20), below(5_000), below(200_000)][below(3) as usize] as usize;
            let request = match below(3) {
                0 => GETATTR,
                _ => Request::Write { fid: Fid(1), offset: expected.len() as u64, data: &data[..length] },
            };
            if matches!(request, Request::Write { .. }) {
                expected.extend_from_slice(&data[..length]);
            }
            request.encode(Tag(tag), &mut bytes);
        }
        let mut writer = client.stream.socket().try_clone().unwrap();
        let pieces: Vec<usize> =
            (0..bytes.len()).map(|_| [1, below(50), below(100_000)][below(3) as usize] as usize + 1).collect();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut rest = &bytes[..];
                for piece in pieces {
                    let (now, later) = rest.split_at(piece.min(rest.len()));
                    writer.write_all(now).unwrap();
                    rest = later;
                    if rest.is_empty() {
                        break;
                    }
                }
            });
            assert_eq!(tags(&mut client, COUNT).len(), COUNT);
        });
        assert!(std::fs::read(share.path.join(format!("f{round}"))).unwrap() == expected, "round {round}");
        share.server.settles(|usage| usage.buffered_bytes == 0);
    }
}

/// What a reader will ask for next is asked of the host behind each of its reads, also of those that came together.
#[test]
fn pieces_of_a_file_are_read_ahead() {
    const PIECE: u32 = 64 << 10;
    let share = DirServer::new(Options::default());
    std::fs::write(share.path.join("f"), vec![7; 64 * PIECE as usize]).unwrap();
    let mut client = share.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    let read = |tag: u16| Request::Read { fid: Fid(1), offset: u64::from(tag) * u64::from(PIECE), bytes_max: PIECE };
    client.stream.write_all(&encoded((0..32).map(|tag| (tag, read(tag))))).unwrap();
    for _ in 0..32 {
        let (_, message) = client.receive();
        assert!(matches!(Reply::decode(&message).unwrap().1, Reply::Read(data) if data.len() == PIECE as usize));
    }
    assert!(share.server.read_ahead_bytes() > 0);
}
