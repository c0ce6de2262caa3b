//! The server is stopped and started again.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::{CX, PATIENCE, Served, name, read, write};
use ferry_9p_client::{Cache, Client, Options};
use ferry_vfs::*;

fn patient(cache: Cache) -> Options {
    Options { patience: PATIENCE, cache, ..Options::default() }
}

/// Makes `d/f` and opens it.
fn file(client: &Client) -> (Entry, Handle) {
    let dir = client.mkdir(&CX, Ino::ROOT, name("d"), &common::dir(0o755)).unwrap();
    client.create(&CX, dir.ino, name("f"), &common::file(0o600), OFlags::RDWR).unwrap()
}

#[test]
fn files_are_found_and_opened_again() {
    let served = Served::new();
    let client = served.connect(patient(Cache::None));
    let (entry, handle) = file(&client);
    write(&client, entry.ino, handle, 0, b"before").unwrap();
    let list = client.opendir(&CX, Ino::ROOT, OFlags::RDONLY).unwrap();
    client.rename(&CX, (entry.ino, name("x")), (Ino::ROOT, name("y")), RenameFlags::empty()).unwrap_err();
    served.stop();
    let (told, waits) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            told.send(read(&client, entry.ino, handle, 0, 99)).unwrap();
        });
        assert!(waits.recv_timeout(Duration::from_millis(200)).is_err(), "there is no server");
        served.start();
        assert_eq!(waits.recv_timeout(PATIENCE).unwrap().unwrap(), b"before");
    });
    write(&client, entry.ino, handle, 6, b" and after").unwrap();
    assert_eq!(read(&client, entry.ino, handle, 0, 99).unwrap(), b"before and after");
    let mut out = common::Few::new(9);
    client.readdir(&CX, &DirRange { ino: Ino::ROOT, handle: list, offset: 0, plus: false }, &mut out).unwrap();
    assert!(out.items.iter().any(|item| item.name == "d"));
}

#[test]
fn a_moved_file_is_found_where_it_is_and_a_removed_one_is_stale() {
    let served = Served::new();
    let client = served.connect(patient(Cache::None));
    let (entry, handle) = file(&client);
    write(&client, entry.ino, handle, 0, b"moved").unwrap();
    let dir = client.lookup(&CX, Ino::ROOT, name("d")).unwrap();
    client.rename(&CX, (dir.ino, name("f")), (Ino::ROOT, name("g")), RenameFlags::empty()).unwrap();
    client.rename(&CX, (Ino::ROOT, name("d")), (Ino::ROOT, name("e")), RenameFlags::empty()).unwrap();
    let (gone, gone_handle) = client.create(&CX, dir.ino, name("gone"), &common::file(0o600), OFlags::RDWR).unwrap();
    client.unlink(&CX, dir.ino, name("gone")).unwrap();
    served.stop();
    served.start();
    assert_eq!(read(&client, entry.ino, handle, 0, 99).unwrap(), b"moved");
    assert!(client.getattr(&CX, dir.ino, None).is_ok());
    let error = read(&client, gone.ino, gone_handle, 0, 9).unwrap_err();
    assert!(matches!(error, Errno::NOENT | Errno::STALE), "{error}");
}

#[test]
fn a_server_that_stays_away_is_an_error_in_time() {
    let served = Served::new();
    let patience = Duration::from_millis(300);
    let client = served.connect(Options { patience, ..Options::default() });
    let begun = Instant::now();
    served.stop();
    assert_eq!(client.lookup(&CX, Ino::ROOT, name("a")).unwrap_err(), Errno::IO);
    assert!(begun.elapsed() >= patience && begun.elapsed() < PATIENCE);
}

#[test]
fn requests_wait_once_for_a_missing_server() {
    let served = Served::new();
    let patience = Duration::from_secs(1);
    let client = served.connect(Options { patience, ..patient(Cache::None) });
    let (entry, handle) = file(&client);
    served.stop();
    assert_eq!(client.lookup(&CX, Ino::ROOT, name("a")).unwrap_err(), Errno::IO);
    let begun = Instant::now();
    for _ in 0..20 {
        assert_eq!(client.lookup(&CX, Ino::ROOT, name("a")).unwrap_err(), Errno::IO);
        assert_eq!(read(&client, entry.ino, handle, 0, 9).unwrap_err(), Errno::IO);
    }
    assert!(begun.elapsed() < patience, "{:?}", begun.elapsed());
    served.start();
    let back = || client.lookup(&CX, Ino::ROOT, name("d")).is_ok();
    while !back() {
        assert!(begun.elapsed() < PATIENCE, "it does not come back");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// umount(8) looks at the mount point first.
#[test]
fn root_attributes_return_quickly_while_the_server_is_gone() {
    let served = Served::new();
    let client = served.connect(patient(Cache::Auto));
    let root = client.getattr(&CX, Ino::ROOT, None).unwrap();
    let totals = client.statfs(&CX, Ino::ROOT).unwrap();
    served.stop();
    let begun = Instant::now();
    assert_eq!(client.getattr(&CX, Ino::ROOT, None), Ok(root));
    assert_eq!(client.statfs(&CX, Ino::ROOT), Ok(totals));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    served.start();
    assert!(client.lookup(&CX, Ino::ROOT, name("gone")).is_err());
    client.mkdir(&CX, Ino::ROOT, name("d"), &common::dir(0o755)).unwrap();
    assert_eq!(client.getattr(&CX, Ino::ROOT, None).unwrap().nlink, root.nlink + 1, "the server is asked");
}

/// The source's file on the server.
fn at_server(served: &Served) -> (Ino, Handle) {
    let source = &served.source;
    let dir = source.lookup(&CX, Ino::ROOT, name("d")).unwrap();
    let file = source.lookup(&CX, dir.ino, name("f")).unwrap();
    (file.ino, source.open(&CX, file.ino, OFlags::RDWR).unwrap())
}

#[test]
fn data_that_a_server_lost_are_written_again_or_reported() {
    for cache in [Cache::None, Cache::Auto] {
        let served = Served::new();
        let client = served.connect(patient(cache));
        let (entry, handle) = file(&client);
        write(&client, entry.ino, handle, 0, b"durable").unwrap();
        client.fsync(&CX, entry.ino, handle, false).unwrap();
        write(&client, entry.ino, handle, 7, b", not yet").unwrap();
        client.flush(&CX, entry.ino, handle, 0).unwrap();
        served.stop();
        // As if it had crashed.
        let (ino, own) = at_server(&served);
        served.source.setattr(&CX, ino, None, &SetAttr { size: Some(7), ..SetAttr::default() }).unwrap();
        served.start();
        let synced = client.fsync(&CX, entry.ino, handle, false);
        let mut content = Vec::new();
        let _ = served.source.read(&CX, &common::range(ino, own, 0, 99), &mut content).unwrap();
        match cache {
            Cache::None => assert_eq!(synced.unwrap_err(), Errno::IO),
            _ => {
                synced.unwrap();
                assert_eq!(served.source.getattr(&CX, ino, None).unwrap().size, 16, "what was acknowledged is there");
            }
        }
        assert!(client.fsync(&CX, entry.ino, handle, false).is_ok(), "it is told once");
    }
}

fn lock(kind: LockKind, owner: u64) -> Lock {
    let owner = LockOwner { session: CX.session, id: owner };
    Lock { kind, owner, start: 10, end: 19, pid: 42, flock: false }
}

/// A lock at the server ends with the fid that it was set through, and openers share their fids.
#[test]
fn a_lock_does_not_end_with_another_open_of_its_file() {
    let served = Served::new();
    let client = served.connect(patient(Cache::None));
    let (entry, made) = file(&client);
    client.release(&CX, entry.ino, made);
    // By a fid each; locks go by that for writing.
    let reads = client.open(&CX, entry.ino, OFlags::RDONLY).unwrap();
    let writes = client.open(&CX, entry.ino, OFlags::RDWR).unwrap();
    let taken = client.set_lock(&CX, entry.ino, reads, &lock(LockKind::Read, 2), None);
    assert_eq!(taken, Ok(LockOutcome::Done));
    client.release(&CX, entry.ino, writes);
    let (ino, own) = at_server(&served);
    let theirs = Lock { owner: LockOwner { session: SessionId::unique(), id: 1 }, ..lock(LockKind::Write, 1) };
    // A clunk is sent behind other requests.
    client.getattr(&CX, Ino::ROOT, None).unwrap();
    assert_eq!(served.source.set_lock(&CX, ino, own, &theirs, None).unwrap_err(), Errno::AGAIN);
    client.release(&CX, entry.ino, reads);
    let begun = Instant::now();
    while served.source.set_lock(&CX, ino, own, &theirs, None).is_err() {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn locks_end_with_their_owners_while_the_server_is_away() {
    let served = Served::new();
    let client = served.connect(Options { patience: Duration::from_millis(300), ..patient(Cache::None) });
    let (entry, handle) = file(&client);
    let other = client.open(&CX, entry.ino, OFlags::RDWR).unwrap();
    let taken = client.set_lock(&CX, entry.ino, handle, &lock(LockKind::Write, 1), None);
    assert_eq!(taken, Ok(LockOutcome::Done));
    served.stop();
    let _ = client.flush(&CX, entry.ino, handle, 1);
    client.release(&CX, entry.ino, handle);
    served.start();
    let begun = Instant::now();
    while client.lookup(&CX, Ino::ROOT, name("d")).is_err() {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(10));
    }
    let (ino, own) = at_server(&served);
    let theirs = Lock { owner: LockOwner { session: SessionId::unique(), id: 1 }, ..lock(LockKind::Read, 1) };
    assert_eq!(served.source.set_lock(&CX, ino, own, &theirs, None), Ok(LockOutcome::Done));
    client.release(&CX, entry.ino, other);
}

#[test]
fn a_file_that_has_lost_its_newest_name_is_found_by_another_one() {
    let served = Served::new();
    let client = served.connect(patient(Cache::None));
    let (entry, handle) = file(&client);
    write(&client, entry.ino, handle, 0, b"kept").unwrap();
    client.link(&CX, entry.ino, Ino::ROOT, name("backup")).unwrap();
    client.unlink(&CX, Ino::ROOT, name("backup")).unwrap();
    served.stop();
    served.start();
    assert_eq!(read(&client, entry.ino, handle, 0, 99).unwrap(), b"kept");
}

#[test]
fn locks_are_taken_again() {
    let served = Served::new();
    let client = served.connect(patient(Cache::None));
    let (entry, handle) = file(&client);
    let take = |client: &Client, handle, kind, owner| client.set_lock(&CX, entry.ino, handle, &lock(kind, owner), None);
    assert_eq!(take(&client, handle, LockKind::Write, 1), Ok(LockOutcome::Done));
    served.stop();
    served.start();
    client.getattr(&CX, Ino::ROOT, None).unwrap();
    let (ino, own) = at_server(&served);
    let theirs = Lock { owner: LockOwner { session: SessionId::unique(), id: 1 }, ..lock(LockKind::Read, 1) };
    assert_eq!(served.source.set_lock(&CX, ino, own, &theirs, None).unwrap_err(), Errno::AGAIN);
    // And once more, after another client was faster.
    served.stop();
    assert_eq!(served.source.set_lock(&CX, ino, own, &theirs, None), Ok(LockOutcome::Done));
    served.start();
    client.getattr(&CX, Ino::ROOT, None).unwrap();
    assert_eq!(read(&client, entry.ino, handle, 0, 9).unwrap_err(), Errno::IO);
    client.release(&CX, entry.ino, handle);
    let handle = client.open(&CX, entry.ino, OFlags::RDWR).unwrap();
    assert_eq!(read(&client, entry.ino, handle, 0, 9).unwrap(), b"");
}
