//! Messages as long as the descriptors of a device's queue can carry, whatever else is agreed on.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;

use std::time::Duration;

use common::chains::config;
use common::{DirServer, ROOT};
use ferry_driver::{Config, Driver};
use ferry_ninep::Options;
use ferry_vfs::OFlags;
use ferry_wire::ninep::*;

/// Each is as long as a piece of memory that Linux puts into a descriptor.
const PIECE: usize = 32 << 10;
const LONGEST: u32 = 16 << 20;

fn ask(driver: &mut Driver, request: &Request<'_>, room: &[usize]) -> Vec<u8> {
    let mut message = Vec::new();
    request.encode(Tag(1), &mut message);
    let (head, data) = message.split_at(message.len().min(WRITE_HEAD_BYTES));
    let pieces: Vec<&[u8]> = std::iter::once(head).chain(data.chunks(PIECE)).collect();
    let queue = driver.queue(0);
    queue.submit(&pieces, room).unwrap();
    queue.publish();
    queue.kick();
    queue.wait(Duration::from_secs(20)).unwrap().reply
}

fn errno(reply: &[u8]) -> Option<ferry_vfs::Errno> {
    match Reply::decode(reply).unwrap().1 {
        Reply::Error(errno) => Some(errno),
        _ => None,
    }
}

#[test]
fn a_message_may_take_most_of_the_queue() {
    let share = DirServer::new(Options { msize_max: LONGEST, ..Options::default() });
    let config = Config { memory_bytes: 128 << 20, ..config() };
    let mut driver = Driver::connect(share.device(), config).unwrap();
    let short = [11, 200];
    let reply = ask(&mut driver, &Request::Version { msize: u32::MAX, version: VERSION }, &short);
    assert!(matches!(Reply::decode(&reply), Ok((_, Reply::Version { msize: LONGEST, .. }))), "{reply:?}");
    let user = User { name: b"", uid: Some(0) };
    let attach = Request::Attach { fid: ROOT, afid: Fid::NONE, user, tree: b"" };
    assert_eq!(errno(&ask(&mut driver, &attach, &short)), None);
    let create = Request::Create { fid: ROOT, name: common::name("f"), flags: OFlags::RDWR, mode: 0o600, gid: 0 };
    assert_eq!(errno(&ask(&mut driver, &create, &short)), None);
    // Nearly all of 1024 descriptors.
    let bytes = LONGEST as usize - WRITE_HEAD_BYTES;
    let data: Vec<u8> = (0..bytes as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let reply = ask(&mut driver, &Request::Write { fid: ROOT, offset: 0, data: &data }, &short);
    let written = match Reply::decode(&reply).unwrap().1 {
        Reply::Write { bytes } => bytes as usize,
        other => panic!("{other:?}"),
    };
    assert_eq!(written, bytes);
    assert!(std::fs::read(share.path.join("f")).unwrap() == data);
    // The reply is as long as the chain has room for.
    for pieces in [1, 100, 500] {
        let room: Vec<usize> = std::iter::once(READ_HEAD_BYTES).chain(vec![PIECE; pieces]).collect();
        let reply = ask(&mut driver, &Request::Read { fid: ROOT, offset: 7, bytes_max: u32::MAX }, &room);
        assert!(reply[READ_HEAD_BYTES..] == data[7..7 + pieces * PIECE], "{pieces} pieces: {} bytes", reply.len());
    }
}
