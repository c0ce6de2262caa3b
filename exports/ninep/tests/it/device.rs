//! What is the device's own: its configuration, chains that make no sense, guests that go and come.

use crate::common;

use std::fs;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use common::chains::{Chains, config};
use common::{Client, DirServer, PATIENCE, ROOT};
use ferry_driver::ring::{Descriptor, INDIRECT, NEXT, WRITE};
use ferry_driver::{Config, Driver};
use ferry_mem::Mem;
use ferry_ninep::{DeviceOptions, Error, Export, Options};
use ferry_vfs::{Errno, LockKind, OFlags};
use ferry_wire::ninep::*;

const FILE: Fid = Fid(1);

fn share() -> DirServer {
    let share = DirServer::new(Options::default());
    fs::write(share.path.join("f"), "text").unwrap();
    share
}

fn encoded(tag: u16, request: &Request<'_>) -> Vec<u8> {
    let mut message = Vec::new();
    request.encode(Tag(tag), &mut message);
    message
}

/// A chain of any pieces; answers what was written to it.
fn ask(driver: &mut Driver, out: &[&[u8]], room: &[usize]) -> Vec<u8> {
    let ticket = driver.queue(0).submit(out, room).unwrap();
    driver.queue(0).wait_for(ticket, PATIENCE).unwrap().reply
}

fn errno(reply: &[u8]) -> Option<Errno> {
    match Reply::decode(reply) {
        Ok((_, Reply::Error(errno))) => Some(errno),
        _ => None,
    }
}

fn attached(driver: &mut Driver) {
    let hello = encoded(u16::MAX, &Request::Version { msize: 65536, version: VERSION });
    assert!(matches!(Reply::decode(&ask(driver, &[&hello], &[100])), Ok((_, Reply::Version { msize: 65536, .. }))));
    let user = User { name: b"", uid: Some(0) };
    let attach = encoded(1, &Request::Attach { fid: ROOT, afid: Fid::NONE, user, tree: b"" });
    assert!(matches!(Reply::decode(&ask(driver, &[&attach], &[100])), Ok((_, Reply::Attach(_)))));
}

/// The device still serves.
#[track_caller]
fn is_well(driver: &mut Driver) {
    let getattr = encoded(2, &Request::Getattr { fid: ROOT, mask: valid::BASIC });
    assert!(matches!(Reply::decode(&ask(driver, &[&getattr], &[200])), Ok((Tag(2), Reply::Getattr(_)))));
}

#[test]
fn the_configuration_is_the_tag() {
    let directory = tempfile::tempdir().unwrap();
    let start = |name: &str, tag: &str| {
        let listener = UnixListener::bind(directory.path().join(name)).unwrap();
        let mem = Arc::new(Mem::new(&ferry_mem::Options::default()).unwrap());
        Export::vhost_user(listener, mem, DeviceOptions::of(tag), Options::default())
    };
    let _export = start("s", "my share").unwrap();
    let mut driver = Driver::connect(directory.path().join("s"), config()).unwrap();
    // Those who ask for more than there is get zeros.
    assert_eq!(driver.read_config(0, 12).unwrap(), b"\x08\0my share\0\0");
    assert_eq!(driver.read_config(2, 2).unwrap(), b"my");
    assert!(driver.write_config(2, b"x").is_err());
    for (name, wrong) in [("a", ""), ("b", "a\0b"), ("c", &*"x".repeat(256))] {
        assert!(matches!(start(name, wrong), Err(Error::Tag(tag)) if tag == wrong));
    }
}

/// Lengths that disagree, messages that are none, no room for the reply: an error or a chain that comes back empty.
#[test]
fn every_chain_is_returned() {
    let share = share();
    for packed in [false, true] {
        let path = share.device();
        let mut driver = Driver::connect(&path, Config { packed, ..config() }).unwrap();
        let walk = encoded(3, &Request::Walk { fid: ROOT, new_fid: FILE, steps: Steps::write(&mut Vec::new(), []) });
        assert_eq!(errno(&ask(&mut driver, &[&walk], &[100])), Some(Errno::PROTO), "before Tversion");
        attached(&mut driver);
        let sized = |bytes: u32| {
            let mut message = encoded(3, &Request::Clunk { fid: Fid(99) });
            message[..4].copy_from_slice(&bytes.to_le_bytes());
            message
        };
        for (message, wanted) in [
            (sized(11), Some(Errno::BADF)),
            (sized(0), Some(Errno::MSGSIZE)),
            (sized(6), Some(Errno::MSGSIZE)),
            (sized(7), Some(Errno::INVAL)),
            (sized(10), Some(Errno::INVAL)),
            (sized(12), Some(Errno::MSGSIZE)),
            (sized(65537), Some(Errno::MSGSIZE)),
            (sized(u32::MAX), Some(Errno::MSGSIZE)),
            (vec![7, 0, 0, 0, 255, 3, 0], Some(Errno::OPNOTSUPP)),
            (vec![7, 0, 0, 0, kind::TREAD, 3, 0], Some(Errno::INVAL)),
            (vec![7, 0, 0, 0, kind::TWRITE, 3, 0], Some(Errno::INVAL)),
            (vec![6, 0, 0, 0, 110, 0], None),
            (vec![1], None),
        ] {
            assert_eq!(errno(&ask(&mut driver, &[&message], &[100])), wanted, "{message:?}");
            // In pieces of one byte, too.
            let pieces: Vec<&[u8]> = message.chunks(1).collect();
            assert_eq!(errno(&ask(&mut driver, &pieces, &[3, 1, 7, 89])), wanted, "{message:?}");
            is_well(&mut driver);
        }
        // Bytes after the message are ignored.
        let getattr = encoded(2, &Request::Getattr { fid: ROOT, mask: valid::BASIC });
        assert!(errno(&ask(&mut driver, &[&getattr, &[1; 300]], &[200])).is_none());
        // No room: nothing is done. Little room: an error.
        for room in [&[][..], &[1], &[10], &[4, 6]] {
            assert_eq!(ask(&mut driver, &[&getattr], room), b"");
        }
        for room in [&[11][..], &[10, 1], &[159]] {
            assert_eq!(errno(&ask(&mut driver, &[&getattr], room)), Some(Errno::MSGSIZE), "{room:?}");
        }
        assert!(errno(&ask(&mut driver, &[&getattr], &[160])).is_none());
        is_well(&mut driver);
    }
}

/// Writes whose length is not that of their data change nothing; reads are as long as there is room.
#[test]
fn data_lengths_must_agree() {
    let share = share();
    let mut client = Client::new(Chains::connect(&share.device()));
    client.hello(65536);
    client.attach(ROOT, 0).unwrap();
    client.open_path(FILE, "f", OFlags::RDWR).unwrap();
    let driver = &mut client.stream.driver;
    for count in [0, 3, 5, 4000, u32::MAX] {
        let mut message = encoded(4, &Request::Write { fid: FILE, offset: 0, data: b"DATA" });
        message[19..23].copy_from_slice(&count.to_le_bytes());
        assert_eq!(errno(&ask(driver, &[&message], &[100])), Some(Errno::INVAL), "{count}");
    }
    let cut = encoded(4, &Request::Write { fid: FILE, offset: 0, data: b"DATA" });
    for end in 7..cut.len() {
        assert!(errno(&ask(driver, &[&cut[..end]], &[100])).is_some(), "cut to {end}");
    }
    let far = encoded(4, &Request::Write { fid: FILE, offset: u64::MAX - 2, data: b"DATA" });
    assert!(errno(&ask(driver, &[&far], &[100])).is_some());
    assert_eq!(fs::read(share.path.join("f")).unwrap(), b"text");
    let read = encoded(4, &Request::Read { fid: FILE, offset: 0, bytes_max: 4 });
    for (room, wanted) in [(11, &b""[..]), (13, b"te"), (15, b"text"), (100, b"text")] {
        let reply = ask(driver, &[&read], &[room]);
        assert_eq!(Reply::decode(&reply), Ok((Tag(4), Reply::Read(wanted))));
    }
    let write = encoded(4, &Request::Write { fid: FILE, offset: 2, data: b"DATA" });
    let pieces: Vec<&[u8]> = write.chunks(1).collect();
    assert_eq!(Reply::decode(&ask(driver, &pieces, &[11])), Ok((Tag(4), Reply::Write { bytes: 4 })));
    assert_eq!(fs::read(share.path.join("f")).unwrap(), b"teDATA");
}

/// Loops, descriptors that lead nowhere, and tables of no length: the chain is dropped, or the ring waits to be set up.
#[test]
fn chains_that_make_no_sense_do_no_harm() {
    let share = share();
    let path = share.device();
    let mut driver = Driver::connect(&path, config()).unwrap();
    attached(&mut driver);
    let good = encoded(2, &Request::Getattr { fid: ROOT, mask: valid::BASIC });
    let buffer = driver.memory().alloc(4096, 4096).unwrap();
    buffer.write(0, &good);
    let (len, address) = (u32::try_from(good.len()).unwrap(), buffer.guest());
    let readable = Descriptor { addr: address, len, flags: NEXT, next: 0 };
    let writable = Descriptor { addr: address + 1024, len: 200, flags: WRITE, next: 0 };
    for (name, first, second) in [
        ("itself", readable, None),
        ("a loop of two", readable, Some(Descriptor { flags: NEXT | WRITE, ..writable })),
        ("beyond the table", Descriptor { next: 1024, ..readable }, None),
        ("nowhere", Descriptor { addr: u64::MAX - 8, flags: 0, ..readable }, None),
        ("a table of no length", Descriptor { flags: INDIRECT, len: 0, ..readable }, None),
        ("the reply first", Descriptor { flags: NEXT | WRITE, ..readable }, Some(Descriptor { flags: 0, ..writable })),
        ("longer than memory", Descriptor { len: u32::MAX, flags: 0, ..readable }, None),
    ] {
        let queue = driver.queue(0);
        let heads = queue.take_descriptors(2).unwrap();
        let table = queue.ring().table();
        let next = if first.next == 0 { if second.is_some() { heads[1] } else { heads[0] } } else { first.next };
        Descriptor { next, ..first }.store(table, heads[0].into());
        if let Some(second) = second {
            Descriptor { next: heads[0], ..second }.store(table, heads[1].into());
        }
        queue.ring_mut().push(heads[0]);
        queue.publish();
        queue.kick();
        // In any case, a new guest is served.
        driver = driver.reconnect().unwrap();
        attached(&mut driver);
        is_well(&mut driver);
        println!("{name}");
    }
}

/// A reset, a new Tversion, and a connection that is lost each give everything back, also what waits for a lock.
#[test]
fn disconnected_guests_hold_nothing() {
    let share = share();
    for way in ["reset", "version", "gone"] {
        let path = share.device();
        let mut keeper = Client::new(Chains::connect(&share.device()));
        let mut client = Client::new(Chains::connect(&path));
        for client in [&mut keeper, &mut client] {
            client.hello(65536);
            client.attach(ROOT, 0).unwrap();
            client.open_path(FILE, "f", OFlags::RDWR).unwrap();
        }
        client.lock(FILE, LockKind::Write, 1, false).unwrap();
        let wait = Request::Lock { fid: FILE, lock: common::lock_of(LockKind::Write, 2), wait: true, reclaim: false };
        client.send(Tag(9), &wait);
        assert!(client.is_silent(Duration::from_millis(100)));
        assert_eq!(keeper.lock(FILE, LockKind::Write, 1, false), Ok(LockStatus::Blocked));
        let rest = match way {
            "reset" => {
                client.stream.driver.reboot().unwrap();
                assert_eq!(client.attach(Fid(7), 0), Err(Errno::PROTO));
                Some(client)
            }
            "version" => {
                client.hello(8192);
                Some(client)
            }
            _ => {
                drop(client);
                None
            }
        };
        let end = std::time::Instant::now() + PATIENCE;
        while keeper.lock(FILE, LockKind::Write, 1, false) == Ok(LockStatus::Blocked) {
            assert!(std::time::Instant::now() < end, "{way}: the lock is never free");
        }
        drop(keeper);
        share.settles(|usage| usage.fids == 0 && usage.requests == 0);
        share.assert_released();
        drop(rest);
        // The next guest.
        let mut next = Client::new(Chains::connect(&path));
        next.hello(65536);
        next.attach(ROOT, 0).unwrap();
    }
    share.settles(|usage| usage.connections == 0);
}
