//! POSIX locks: taken, waited for, given up, handed on, and what Tflush does to them.

use crate::common;

use std::fs;
use std::time::Duration;

use common::{Client, DirServer, Link, lock_of, name};
use ferry_ninep::Options;
use ferry_vfs::{Errno, LockKind, OFlags};
use ferry_wire::ninep::*;

const FILE: Fid = Fid(1);
const MOMENT: Duration = Duration::from_millis(300);

fn share() -> DirServer {
    let share = DirServer::new(Options::default());
    fs::write(share.path.join("f"), "text").unwrap();
    share
}

fn client(share: &DirServer) -> Client<Link> {
    let mut client = share.attached(0);
    client.open_path(FILE, "f", OFlags::RDWR).unwrap();
    client
}

fn wait_for(client: &mut Client<Link>, tag: u16, pid: u32) {
    let lock = lock_of(LockKind::Write, pid);
    client.send(Tag(tag), &Request::Lock { fid: FILE, lock, wait: true, reclaim: false });
}

fn reply(message: &[u8]) -> Reply<'_> {
    Reply::decode(message).unwrap().1
}

#[test]
fn locks_are_real_and_are_seen() {
    let share = share();
    let (mut one, mut other) = (client(&share), client(&share));
    assert_eq!(one.lock(FILE, LockKind::Write, 7, false), Ok(LockStatus::Success));
    assert_eq!(other.lock(FILE, LockKind::Read, 7, false), Ok(LockStatus::Blocked), "another client's 7 is another");
    assert_eq!(one.lock(FILE, LockKind::Read, 8, false), Ok(LockStatus::Blocked), "another process of one client");
    assert_eq!(one.lock(FILE, LockKind::Read, 7, false), Ok(LockStatus::Success), "its own");
    let who = |client: &mut Client<_>, kind, pid| {
        client.get(&Request::Getlock { fid: FILE, lock: lock_of(kind, pid) }, |reply| match reply {
            Reply::Getlock(lock) => Some((lock.kind, lock.start, lock.end, lock.pid, lock.client.to_vec())),
            _ => None,
        })
    };
    assert_eq!(who(&mut one, LockKind::Write, 8), Ok((LockKind::Read, 10, 19, 7, b"test".to_vec())));
    assert_eq!(who(&mut other, LockKind::Write, 8).unwrap().0, LockKind::Read);
    assert_eq!(who(&mut other, LockKind::Read, 8), Ok((LockKind::Unlock, 10, 19, 8, b"test".to_vec())));
    // Linux's client always sends this type.
    assert_eq!(who(&mut one, LockKind::Unlock, 8).unwrap().0, LockKind::Read);
    assert_eq!(who(&mut one, LockKind::Unlock, 7).unwrap().0, LockKind::Unlock, "its own");
    assert_eq!(one.lock(FILE, LockKind::Unlock, 7, false), Ok(LockStatus::Success));
    assert_eq!(who(&mut one, LockKind::Unlock, 8).unwrap().0, LockKind::Unlock);
    assert_eq!(other.lock(FILE, LockKind::Write, 7, false), Ok(LockStatus::Success));
    assert_eq!(one.lock(Fid(0), LockKind::Write, 7, false), Err(Errno::BADF));
}

#[test]
fn a_lock_is_waited_for_and_other_requests_go_on() {
    let share = share();
    let (mut one, mut other) = (client(&share), client(&share));
    one.lock(FILE, LockKind::Write, 1, false).unwrap();
    wait_for(&mut other, 2000, 1);
    assert!(other.is_silent(MOMENT));
    assert_eq!(other.read(FILE, 0, 4).unwrap(), b"text");
    share.settles(|usage| usage.requests == 1);
    one.lock(FILE, LockKind::Unlock, 1, false).unwrap();
    let (tag, message) = other.receive();
    assert_eq!((tag, reply(&message)), (Tag(2000), Reply::Lock(LockStatus::Success)));
    assert_eq!(one.lock(FILE, LockKind::Write, 1, false), Ok(LockStatus::Blocked));
}

#[test]
fn a_flush_cancels_a_wait() {
    let share = share();
    let (mut one, mut other) = (client(&share), client(&share));
    one.lock(FILE, LockKind::Write, 1, false).unwrap();
    wait_for(&mut other, 2000, 1);
    assert!(other.is_silent(MOMENT));
    other.send(Tag(2001), &Request::Flush { old: Tag(2000) });
    let (tag, message) = other.receive();
    assert_eq!((tag, reply(&message)), (Tag(2001), Reply::Flush));
    share.settles(|usage| usage.requests == 0);
    // Nobody gets the lock by that, and the tag is free again.
    one.lock(FILE, LockKind::Unlock, 1, false).unwrap();
    assert!(other.is_silent(MOMENT));
    assert_eq!(one.lock(FILE, LockKind::Write, 2, false), Ok(LockStatus::Success));
    wait_for(&mut other, 2000, 1);
    one.lock(FILE, LockKind::Unlock, 2, false).unwrap();
    let (tag, message) = other.receive();
    assert_eq!((tag, reply(&message)), (Tag(2000), Reply::Lock(LockStatus::Success)));
}

/// A flush of nothing, of a flush, of itself.
#[test]
fn every_flush_gets_a_reply() {
    let share = share();
    let mut client = client(&share);
    for old in [77, 5, 65535] {
        client.send(Tag(5), &Request::Flush { old: Tag(old) });
        let (tag, message) = client.receive();
        assert_eq!((tag, reply(&message)), (Tag(5), Reply::Flush));
    }
    // A flush right behind its request: both are answered, in this order, or the flush alone.
    for round in 0..200 {
        client.send(Tag(1), &Request::Getattr { fid: FILE, mask: valid::BASIC });
        client.send(Tag(2), &Request::Flush { old: Tag(1) });
        let (mut tag, message) = client.receive();
        if tag == Tag(1) {
            assert!(matches!(reply(&message), Reply::Getattr(_)), "{round}");
            tag = client.receive().0;
        }
        assert_eq!(tag, Tag(2), "{round}");
    }
    assert!(client.is_silent(MOMENT));
}

#[test]
fn a_disconnect_releases_locks_and_waits() {
    let share = share();
    let mut keeper = client(&share);
    // A connection that ends, a session that ends, a fid that ends.
    for way in ["connection", "session", "fid"] {
        let (mut one, mut other) = (client(&share), client(&share));
        one.lock(FILE, LockKind::Write, 1, false).unwrap();
        wait_for(&mut other, 9, 1);
        assert!(other.is_silent(MOMENT));
        let mut kept = None;
        match way {
            "connection" => drop(one),
            "session" => {
                one.hello(8192);
                kept = Some(one);
            }
            _ => {
                one.ok(&Request::Clunk { fid: FILE }).unwrap();
                kept = Some(one);
            }
        }
        let (_, message) = other.receive();
        assert_eq!(reply(&message), Reply::Lock(LockStatus::Success), "{way}");
        assert_eq!(keeper.lock(FILE, LockKind::Write, 3, false), Ok(LockStatus::Blocked));
        // Now one that waits goes.
        let mut waiting = client(&share);
        wait_for(&mut waiting, 9, 2);
        assert!(waiting.is_silent(MOMENT));
        match way {
            "connection" => drop(waiting),
            "session" => {
                waiting.hello(8192);
                assert!(waiting.is_silent(MOMENT), "nothing of the session before is answered");
            }
            _ => {
                waiting.send(Tag(10), &Request::Clunk { fid: FILE });
                let mut answers = [waiting.receive(), waiting.receive()];
                answers.sort();
                assert_eq!(reply(&answers[0].1), Reply::Error(Errno::INTR));
                assert_eq!(reply(&answers[1].1), Reply::Clunk);
            }
        }
        drop(other);
        let end = std::time::Instant::now() + common::PATIENCE;
        while keeper.lock(FILE, LockKind::Write, 3, false) == Ok(LockStatus::Blocked) {
            assert!(std::time::Instant::now() < end, "{way}: the lock is never free");
        }
        keeper.lock(FILE, LockKind::Unlock, 3, false).unwrap();
        drop(kept);
    }
    drop(keeper);
    share.settles(|usage| usage.connections == 0);
    share.assert_released();
}

#[test]
fn waiting_locks_use_no_threads() {
    let share = share();
    let (mut one, mut other) = (client(&share), client(&share));
    one.lock(FILE, LockKind::Write, 1, false).unwrap();
    for number in 0..300 {
        wait_for(&mut other, 1000 + number, 100 + u32::from(number));
    }
    share.settles(|usage| usage.requests == 300 && usage.parked_locks == 300);
    assert_eq!(other.read(FILE, 0, 4).unwrap(), b"text");
    let most = ferry_ninep::Limits::default().threads_max;
    assert!(share.usage().threads <= most && most < 100, "{:?}", share.usage());
    one.lock(FILE, LockKind::Unlock, 1, false).unwrap();
    // Each gets it when the one before gives it up.
    let (mut granted, mut given_up) = (0, 0);
    while given_up < 300 {
        let (Tag(tag), message) = other.receive();
        assert_eq!(reply(&message), Reply::Lock(LockStatus::Success));
        if tag < 1000 {
            // In no order with the grants: another thread answers.
            given_up += 1;
            continue;
        }
        granted += 1;
        if granted == 1 {
            assert!(other.is_silent(MOMENT), "one at a time");
        }
        let lock = lock_of(LockKind::Unlock, u32::from(tag) - 900);
        other.send(Tag(tag - 1000), &Request::Lock { fid: FILE, lock, wait: false, reclaim: false });
    }
    assert_eq!(granted, 300);
    share.settles(|usage| usage.parked_locks == 0);
}

/// A client may name as many processes as it likes.
#[test]
fn processes_without_locks_take_no_descriptors() {
    let share = share();
    let (mut one, mut other) = (client(&share), client(&share));
    let descriptors = || {
        let path = share.path.join("f").canonicalize().unwrap();
        let all = fs::read_dir("/proc/self/fd").unwrap();
        all.filter(|entry| fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to == path)).count()
    };
    let before = descriptors();
    for pid in 0..200 {
        assert_eq!(one.lock(FILE, LockKind::Write, pid, false), Ok(LockStatus::Success));
        assert_eq!(other.lock(FILE, LockKind::Write, pid, false), Ok(LockStatus::Blocked));
        assert_eq!(one.lock(FILE, LockKind::Unlock, pid, false), Ok(LockStatus::Success));
    }
    assert_eq!(descriptors(), before + 1, "of who unlocked last");
    // The wait that was given up last may be there until the next is tried.
    one.lock(FILE, LockKind::Write, 1, false).unwrap();
    for pid in 0..200 {
        wait_for(&mut other, 2000, pid);
        share.settles(|usage| usage.requests == 1);
        other.send(Tag(2001), &Request::Flush { old: Tag(2000) });
        while other.receive().0 != Tag(2001) {}
    }
    let end = std::time::Instant::now() + common::PATIENCE;
    while descriptors() > before + 2 {
        assert!(std::time::Instant::now() < end, "{} descriptors", descriptors());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn locks_of_host_processes_conflict() {
    let share = share();
    let mut client = client(&share);
    let file = fs::OpenOptions::new().read(true).write(true).open(share.path.join("f")).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    // A lock of this very process, taken by fcntl; the server's are the descriptor's own, and so not the same.
    assert_eq!(client.lock(FILE, LockKind::Write, 1, false), Ok(LockStatus::Blocked));
    client.ok(&Request::Unlinkat { dir: common::ROOT, name: name("f"), is_dir: false }).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
    assert_eq!(client.lock(FILE, LockKind::Write, 1, false), Ok(LockStatus::Success));
}
