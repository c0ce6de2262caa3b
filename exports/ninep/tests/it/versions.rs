//! `qid.version` of the memory sources: whatever changed has another one, however soon after the last change.

use crate::common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use common::{Client, Link, PATIENCE, ROOT, Server, name};
use ferry_mem::{Mem, pmem};
use ferry_ninep::Options;
use ferry_vfs::{FileSystem, OFlags, SetAttr, XattrFlags};
use ferry_wire::ninep::*;

const SIZE_BYTES: u64 = 64 << 20;

fn serve(source: Arc<dyn FileSystem>) -> Server {
    Server::of(source, Options::default())
}

fn mem(memfds: bool) -> Server {
    let options = ferry_mem::Options { size_bytes: Some(SIZE_BYTES), memfds, ..Default::default() };
    serve(Arc::new(Mem::new(&options).unwrap()))
}

/// The directory holds the image.
fn pmem() -> (Server, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let options = pmem::Options { size_bytes: Some(SIZE_BYTES), ..Default::default() };
    (serve(Arc::new(pmem::open(&directory.path().join("image"), &options).unwrap())), directory)
}

fn version(client: &mut Client<Link>, fid: Fid) -> u32 {
    client.getattr(fid).unwrap().qid.version
}

/// Makes a change many times, and expects as many versions.
#[track_caller]
fn differ(client: &mut Client<Link>, fid: Fid, what: &str, mut change: impl FnMut(&mut Client<Link>, u8)) {
    let mut last = version(client, fid);
    for round in 0..200 {
        change(client, round);
        let now = version(client, fid);
        assert_ne!(now, last, "{what}, {round}");
        last = now;
    }
}

fn changes_follow_each_other(server: &Server) {
    let mut client = server.attached(0);
    client.create(Fid(1), "f", OFlags::RDWR, 0o600).unwrap();
    client.write(Fid(1), 0, &[1; 5000]).unwrap();
    differ(&mut client, Fid(1), "write", |client, round| assert_eq!(client.write(Fid(1), 7, &[round]), Ok(1)));
    differ(&mut client, Fid(1), "mode", |client, round| {
        let set = SetAttr { mode: Some(0o600 + u32::from(round % 2)), ..SetAttr::default() };
        client.ok(&Request::Setattr { fid: Fid(1), set, ctime: false }).unwrap();
    });
    differ(&mut client, Fid(1), "truncation to the same length", |client, _| {
        let set = SetAttr { size: Some(5000), ..SetAttr::default() };
        client.ok(&Request::Setattr { fid: Fid(1), set, ctime: false }).unwrap();
    });
    client.walk(ROOT, Fid(2), "").unwrap();
    differ(&mut client, ROOT, "a name that comes and goes", |client, _| {
        client.ok(&Request::Symlink { dir: ROOT, name: name("l"), target: b"f", gid: 0 }).unwrap();
        client.ok(&Request::Unlinkat { dir: ROOT, name: name("l"), is_dir: false }).unwrap();
    });
    differ(&mut client, ROOT, "a name that moves", |client, round| {
        let names = [name("f"), name("g")];
        let (from, to) = (names[usize::from(round % 2)], names[usize::from(1 - round % 2)]);
        client.ok(&Request::Renameat { dir: ROOT, name: from, new_dir: Fid(2), new_name: to }).unwrap();
    });
    differ(&mut client, Fid(1), "an attribute", |client, round| {
        client.walk(Fid(2), Fid(3), "f").unwrap();
        let flags = XattrFlags::empty();
        client.ok(&Request::Xattrcreate { fid: Fid(3), name: b"user.x", bytes: 1, flags }).unwrap();
        client.write(Fid(3), 0, &[round]).unwrap();
        client.ok(&Request::Clunk { fid: Fid(3) }).unwrap();
    });
    // Closed and opened again, the times are those that were shown.
    let before = version(&mut client, Fid(1));
    client.ok(&Request::Clunk { fid: Fid(1) }).unwrap();
    client.open_path(Fid(1), "f", OFlags::RDWR).unwrap();
    assert_eq!(version(&mut client, Fid(1)), before);
    client.write(Fid(1), 0, &[1]).unwrap();
    assert_ne!(version(&mut client, Fid(1)), before);
}

#[test]
fn of_memory() {
    changes_follow_each_other(&mem(false));
}

#[test]
fn of_memfds() {
    changes_follow_each_other(&mem(true));
}

#[test]
fn of_persistent_memory() {
    changes_follow_each_other(&pmem().0);
}

/// Who keeps what was read under a version finds it changed when the bytes have: none that was shown before they were there is
/// the version afterwards.
fn versions_tell_bytes_apart(server: &Server) {
    const BYTES: usize = 512 << 10;
    const ROUNDS: u8 = 200;
    let mut writer = server.attached(0);
    writer.create(Fid(1), "f", OFlags::RDWR, 0o600).unwrap();
    writer.write(Fid(1), 0, &[0; BYTES]).unwrap();
    let mut reader = server.attached(0);
    reader.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    let (done, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    // At rest, so that the reader sees some versions however slow it is.
    let rest = || {
        let (before, end) = (reads.load(Ordering::Acquire), Instant::now() + PATIENCE);
        while reads.load(Ordering::Acquire) < before + 2 {
            assert!(Instant::now() < end, "the reader does not read");
            std::thread::yield_now();
        }
    };
    let (seen, after) = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            // What was seen first under each version.
            let mut seen: HashMap<u32, u8> = HashMap::new();
            while !done.load(Ordering::Acquire) {
                let before = version(&mut reader, Fid(1));
                let byte = reader.read(Fid(1), BYTES as u64 - 1, 1).unwrap()[0];
                if version(&mut reader, Fid(1)) == before {
                    seen.entry(before).or_insert(byte);
                }
                reads.fetch_add(1, Ordering::Release);
            }
            seen
        });
        let after = (1..=ROUNDS).map(|round| {
            if round % 50 == 1 {
                rest();
            }
            writer.write(Fid(1), 0, &[round; BYTES]).unwrap();
            (round, version(&mut writer, Fid(1)))
        });
        let after: Vec<(u8, u32)> = after.collect();
        done.store(true, Ordering::Release);
        (reading.join().unwrap(), after)
    });
    for (round, version) in &after {
        if let Some(byte) = seen.get(version) {
            assert!(byte >= round, "the version after write {round} was seen with the bytes of write {byte}");
        }
    }
    assert!(seen.len() >= 4, "the reader saw {} versions", seen.len());
}

#[test]
fn of_bytes_in_memory() {
    versions_tell_bytes_apart(&mem(false));
}

#[test]
fn of_bytes_in_persistent_memory() {
    versions_tell_bytes_apart(&pmem().0);
}
