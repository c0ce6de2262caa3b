//! POSIX locks: between clients, waited for, given up, given back.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::fake::{Act, Fake, reply};
use common::{CX, PATIENCE, Served, name, read, write};
use ferry_9p_client::{Cache, Client, Options};
use ferry_vfs::*;
use ferry_wire::ninep::{LockRequest, LockStatus, Reply, Request, Tag};

struct Opened {
    client: Client,
    ino: Ino,
    handle: Handle,
}

fn opened(served: &Served) -> Opened {
    let client = served.connect(Options::default());
    let ino = client.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    Opened { client, ino, handle }
}

fn served() -> Served {
    let served = Served::new();
    let client = served.connect(Options::default());
    client.create(&CX, Ino::ROOT, name("f"), &common::file(0o600), OFlags::RDWR).unwrap();
    served
}

fn lock(kind: LockKind, owner: u64) -> Lock {
    Lock { kind, owner: LockOwner { session: CX.session, id: owner }, start: 10, end: 19, pid: 42, flock: false }
}

impl Opened {
    fn set(&self, kind: LockKind, owner: u64) -> Result<LockOutcome> {
        self.client.set_lock(&CX, self.ino, self.handle, &lock(kind, owner), None)
    }

    /// Waits for a lock; what comes of it is sent.
    fn wait(&self, kind: LockKind, owner: u64) -> (mpsc::Receiver<Result<()>>, Arc<Cancellation>) {
        let (told, outcome) = mpsc::channel();
        let gone = Arc::<Cancellation>::default();
        let waiter = Waiter::new(move |outcome| {
            let _ = told.send(outcome);
        })
        .until(Arc::clone(&gone));
        let waits = self.client.set_lock(&CX, self.ino, self.handle, &lock(kind, owner), Some(waiter));
        assert_eq!(waits, Ok(LockOutcome::Waiting));
        (outcome, gone)
    }
}

#[test]
fn owners_exclude_each_other_and_get_errors() {
    let served = served();
    let (one, two) = (opened(&served), opened(&served));
    assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
    assert_eq!(one.set(LockKind::Write, 2).unwrap_err(), Errno::AGAIN, "another owner of the same client");
    assert_eq!(two.set(LockKind::Read, 1).unwrap_err(), Errno::AGAIN, "another client");
    let found = two.client.get_lock(&CX, two.ino, two.handle, &lock(LockKind::Read, 1)).unwrap().unwrap();
    assert_eq!((found.kind, found.start, found.end), (LockKind::Write, 10, 19));
    assert_eq!(one.set(LockKind::Unlock, 1), Ok(LockOutcome::Done));
    assert_eq!(two.client.get_lock(&CX, two.ino, two.handle, &lock(LockKind::Read, 1)), Ok(None));
    assert_eq!(two.set(LockKind::Write, 1), Ok(LockOutcome::Done));
    // Closing gives up the locks of who closes.
    two.client.flush(&CX, two.ino, two.handle, 1).unwrap();
    assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
    one.client.release(&CX, one.ino, one.handle);
    assert_eq!(two.set(LockKind::Write, 3), Ok(LockOutcome::Done));
}

#[test]
fn waiting_ends_with_the_lock_or_its_cancellation() {
    let served = served();
    let (one, two) = (opened(&served), opened(&served));
    assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
    let (outcome, _) = two.wait(LockKind::Write, 1);
    let (other, gone) = two.wait(LockKind::Write, 2);
    assert!(outcome.recv_timeout(Duration::from_millis(100)).is_err());
    // The second is interrupted: who was to be told is let go, and the server forgets the request.
    gone.cancel();
    assert_eq!(other.recv_timeout(PATIENCE).unwrap(), Err(Errno::INTR));
    // More requests than may be under way still work.
    assert!(two.client.getattr(&CX, two.ino, None).is_ok());
    assert_eq!(one.set(LockKind::Unlock, 1), Ok(LockOutcome::Done));
    assert_eq!(outcome.recv_timeout(PATIENCE).unwrap(), Ok(()));
    assert_eq!(one.set(LockKind::Write, 1).unwrap_err(), Errno::AGAIN);
    assert_eq!(two.set(LockKind::Unlock, 1), Ok(LockOutcome::Done));
    // Nobody got the lock that was given up.
    let end = Instant::now() + PATIENCE;
    while one.set(LockKind::Write, 1).is_err() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Its request at the server may be granted while it is being given up.
#[test]
fn a_repeated_wait_gets_the_lock_and_keeps_it() {
    let served = served();
    let (one, two) = (opened(&served), opened(&served));
    for _ in 0..20 {
        assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
        let (first, gone) = two.wait(LockKind::Write, 1);
        assert!(gone.cancel());
        let (second, _) = two.wait(LockKind::Write, 1);
        assert_eq!(first.recv_timeout(PATIENCE).unwrap(), Err(Errno::INTR));
        assert_eq!(one.set(LockKind::Unlock, 1), Ok(LockOutcome::Done));
        assert_eq!(second.recv_timeout(PATIENCE).unwrap(), Ok(()));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(one.set(LockKind::Write, 1).unwrap_err(), Errno::AGAIN);
        assert_eq!(two.set(LockKind::Unlock, 1), Ok(LockOutcome::Done));
    }
}

/// The server grants what a signal interrupted while it is asked to forget that, and the call has been made again.
#[test]
fn a_repeated_call_takes_over_the_request_of_the_interrupted_one() {
    let (again, is_again) = mpsc::channel::<()>();
    let (flushing, is_flushing) = mpsc::channel::<()>();
    let (is_again, waits, unlocks) =
        (Mutex::new(is_again), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (waiting, unlocked) = (Arc::clone(&waits), Arc::clone(&unlocks));
    let fake = Fake::new(move |tag, request| match request {
        Request::Lock { lock, .. } if lock.kind == LockKind::Unlock => {
            unlocked.fetch_add(1, Ordering::SeqCst);
            Some(reply(tag, &Reply::Lock(LockStatus::Success)))
        }
        Request::Lock { wait: false, .. } => Some(reply(tag, &Reply::Lock(LockStatus::Blocked))),
        Request::Lock { wait: true, .. } => {
            waiting.fetch_add(1, Ordering::SeqCst);
            Some(Act::Silence)
        }
        Request::Flush { old } => {
            flushing.send(()).unwrap();
            is_again.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            let mut replies = Vec::new();
            Reply::Lock(LockStatus::Success).encode(*old, &mut replies);
            Reply::Flush.encode(tag, &mut replies);
            Some(Act::Send(replies))
        }
        _ => None,
    });
    let client = fake.connect(Options::default()).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    let one = Opened { client, ino, handle };
    let (first, gone) = one.wait(LockKind::Write, 1);
    assert!(gone.cancel());
    is_flushing.recv_timeout(PATIENCE).unwrap();
    let (second, _) = one.wait(LockKind::Write, 1);
    assert_eq!(first.recv_timeout(PATIENCE).unwrap(), Err(Errno::INTR));
    again.send(()).unwrap();
    assert_eq!(second.recv_timeout(PATIENCE).unwrap(), Ok(()));
    assert_eq!(one.set(LockKind::Unlock, 1), Ok(LockOutcome::Done));
    assert_eq!((waits.load(Ordering::SeqCst), unlocks.load(Ordering::SeqCst)), (1, 1));
}

#[test]
fn closing_a_file_ends_its_waits() {
    let served = served();
    let (one, two) = (opened(&served), opened(&served));
    assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
    let (outcome, _) = two.wait(LockKind::Write, 1);
    two.client.release(&CX, two.ino, two.handle);
    assert_eq!(outcome.recv_timeout(PATIENCE).unwrap(), Err(Errno::INTR));
}

#[test]
fn waiting_continues_after_a_restart_of_the_server() {
    let served = served();
    let (one, two) = (opened(&served), opened(&served));
    assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
    let (outcome, _) = two.wait(LockKind::Write, 1);
    served.stop();
    served.start();
    // It has its lock again before others can wait for it, or it was slower than the one who waits: then that one has it.
    let again = one.client.getattr(&CX, one.ino, None);
    assert!(again.is_ok());
    let _ = one.set(LockKind::Unlock, 1);
    assert_eq!(outcome.recv_timeout(PATIENCE).unwrap(), Ok(()));
}

/// Only a program that asks for it makes the server's disk work.
#[test]
fn locking_and_unlocking_writes_and_does_not_sync() {
    let (syncs, writes): (Arc<AtomicUsize>, Arc<AtomicUsize>) = Default::default();
    let (counted, written) = (Arc::clone(&syncs), Arc::clone(&writes));
    let fake = Fake::new(move |tag, request| match request {
        Request::Lock { .. } => Some(reply(tag, &Reply::Lock(LockStatus::Success))),
        Request::Fsync { .. } => {
            counted.fetch_add(1, Ordering::SeqCst);
            None
        }
        Request::Write { .. } => {
            written.fetch_add(1, Ordering::SeqCst);
            None
        }
        _ => None,
    });
    let client = fake.connect(Options::default()).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    let one = Opened { client, ino, handle };
    for round in 0..10 {
        let before = one.client.usage().messages;
        write(&one.client, ino, handle, 0, b"before the lock").unwrap();
        assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
        write(&one.client, ino, handle, 0, b"under the lock").unwrap();
        assert_eq!(one.set(LockKind::Unlock, 1), Ok(LockOutcome::Done));
        assert_eq!(writes.load(Ordering::SeqCst), 2 * (round + 1), "others see it");
        assert_eq!(one.client.usage().messages - before, 4, "two locks, two writes");
    }
    assert_eq!(syncs.load(Ordering::SeqCst), 0);
    one.client.fsync(&CX, ino, handle, false).unwrap();
    assert_eq!(syncs.load(Ordering::SeqCst), 1);
}

/// What is kept for a restart of the server must not be written again over what others wrote under a lock since.
#[test]
fn data_written_under_a_lock_are_not_written_again_after_it() {
    let served = served();
    let (one, two) = (opened(&served), opened(&served));
    for (client, text) in [(&one, b"by the one"), (&two, b"by the two")] {
        assert_eq!(client.set(LockKind::Write, 1), Ok(LockOutcome::Done));
        write(&client.client, client.ino, client.handle, 0, text).unwrap();
        assert_eq!(client.set(LockKind::Unlock, 1), Ok(LockOutcome::Done));
    }
    two.client.fsync(&CX, two.ino, two.handle, false).unwrap();
    served.stop();
    served.start();
    // Whoever did not make his durable is told that nobody knows. Both have the new connection then.
    assert_eq!(one.client.fsync(&CX, one.ino, one.handle, false).unwrap_err(), Errno::IO);
    assert!(two.client.fsync(&CX, two.ino, two.handle, false).is_ok());
    assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
    assert_eq!(read(&one.client, one.ino, one.handle, 0, 99).unwrap(), b"by the two");
    let three = opened(&served);
    assert_eq!(read(&three.client, three.ino, three.handle, 0, 99).unwrap(), b"by the two");
}

/// A server that grants all there is must not have this client take memory without end.
#[test]
fn an_owner_has_a_bounded_number_of_locks_and_others_have_theirs() {
    const RANGES_MAX: u64 = 65_536;
    let fake = Fake::new(move |tag, request| match request {
        Request::Lock { .. } => Some(reply(tag, &Reply::Lock(LockStatus::Success))),
        _ => None,
    });
    let client = fake.connect(Options::default()).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    let set = |kind, owner, number: u64| {
        let lock = Lock { start: 2 * number, end: 2 * number, ..lock(kind, owner) };
        client.set_lock(&CX, ino, handle, &lock, None)
    };
    for number in 0..RANGES_MAX {
        assert_eq!(set(LockKind::Read, 1, number), Ok(LockOutcome::Done), "{number}");
    }
    assert_eq!(set(LockKind::Read, 1, RANGES_MAX).unwrap_err(), Errno::NOLCK);
    assert_eq!(set(LockKind::Read, 2, RANGES_MAX), Ok(LockOutcome::Done));
    assert_eq!(set(LockKind::Unlock, 1, 0), Ok(LockOutcome::Done));
    assert_eq!(set(LockKind::Read, 1, RANGES_MAX), Ok(LockOutcome::Done));
}

/// An open file of such a server.
fn opened_at(fake: &Fake, options: Options) -> Opened {
    let client = fake.connect(options).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    Opened { client, ino, handle }
}

/// Whether the name of the owner is no host's: ganesha refuses that.
fn has_own_name(lock: &LockRequest<'_>) -> bool {
    lock.client.starts_with(b"ferry-")
}

#[test]
fn two_processes_may_take_the_first_locks_at_once() {
    let (sent, is_sent) = mpsc::channel::<()>();
    let refused = Mutex::<Vec<Tag>>::default();
    let fake = Fake::new(move |tag, request| {
        let mut refused = refused.lock().unwrap();
        match *request {
            // The first is refused when both are there.
            Request::Lock { lock, .. } if has_own_name(&lock) => {
                refused.push(tag);
                sent.send(()).unwrap();
                let answer = |first| reply(first, &Reply::Error(Errno::INVAL));
                Some(if refused.len() == 2 { answer(refused[0]) } else { Act::Silence })
            }
            Request::Lock { .. } => Some(reply(tag, &Reply::Lock(LockStatus::Success))),
            // The second is refused when the first is granted.
            Request::Statfs { .. } => {
                let mut replies = Vec::new();
                Reply::Error(Errno::INVAL).encode(refused[1], &mut replies);
                Reply::Error(Errno::OPNOTSUPP).encode(tag, &mut replies);
                Some(Act::Send(replies))
            }
            _ => None,
        }
    });
    let one = opened_at(&fake, Options::default());
    std::thread::scope(|scope| {
        let first = scope.spawn(|| one.set(LockKind::Read, 1));
        is_sent.recv_timeout(PATIENCE).unwrap();
        let second = scope.spawn(|| one.set(LockKind::Read, 2));
        assert_eq!(first.join().unwrap(), Ok(LockOutcome::Done));
        assert_eq!(one.client.statfs(&CX, Ino::ROOT).unwrap_err(), Errno::OPNOTSUPP);
        assert_eq!(second.join().unwrap(), Ok(LockOutcome::Done));
    });
}

#[test]
fn a_wait_has_the_name_that_the_server_takes_after_a_reconnect() {
    let is_lost = AtomicBool::new(false);
    let fake = Fake::new(move |tag, request| match *request {
        // The connection ends by this, the first time.
        Request::Statfs { .. } if !is_lost.swap(true, Ordering::SeqCst) => Some(Act::HangUp),
        Request::Lock { lock, .. } if has_own_name(&lock) => Some(reply(tag, &Reply::Error(Errno::INVAL))),
        Request::Lock { wait: false, .. } => Some(reply(tag, &Reply::Lock(LockStatus::Blocked))),
        Request::Lock { .. } if is_lost.load(Ordering::SeqCst) => Some(reply(tag, &Reply::Lock(LockStatus::Success))),
        Request::Lock { .. } => Some(Act::Silence),
        _ => None,
    });
    let one = opened_at(&fake, Options { patience: PATIENCE, cache: Cache::None, ..Options::default() });
    let (outcome, _) = one.wait(LockKind::Write, 1);
    let _ = one.client.statfs(&CX, Ino::ROOT).unwrap_err();
    assert_eq!(outcome.recv_timeout(PATIENCE).unwrap(), Ok(()));
}

/// Another reason for the same error does not change the names.
#[test]
fn an_invalid_lock_has_no_effect_on_later_ones() {
    const INVALID: u64 = 999;
    let names = Arc::<Mutex<Vec<bool>>>::default();
    let noted = Arc::clone(&names);
    let fake = Fake::new(move |tag, request| match *request {
        Request::Lock { lock, .. } if lock.end == INVALID => Some(reply(tag, &Reply::Error(Errno::INVAL))),
        Request::Lock { lock, .. } => {
            noted.lock().unwrap().push(has_own_name(&lock));
            Some(reply(tag, &Reply::Lock(LockStatus::Success)))
        }
        _ => None,
    });
    let one = opened_at(&fake, Options::default());
    let invalid = Lock { end: INVALID, ..lock(LockKind::Write, 1) };
    assert_eq!(one.client.set_lock(&CX, one.ino, one.handle, &invalid, None).unwrap_err(), Errno::INVAL);
    assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
    assert_eq!(*names.lock().unwrap(), [true]);
}

/// ganesha replies with whatever lock it is asked for.
#[test]
fn a_reply_that_repeats_the_request_is_no_conflict() {
    let fake = Fake::new(move |tag, request| match *request {
        Request::Lock { lock, .. } if has_own_name(&lock) => Some(reply(tag, &Reply::Error(Errno::INVAL))),
        Request::Lock { .. } => Some(reply(tag, &Reply::Lock(LockStatus::Success))),
        Request::Getlock { lock, .. } => Some(reply(tag, &Reply::Getlock(lock))),
        _ => None,
    });
    let one = opened_at(&fake, Options::default());
    assert_eq!(one.set(LockKind::Read, 1), Ok(LockOutcome::Done));
    for kind in [LockKind::Read, LockKind::Write] {
        assert_eq!(one.client.get_lock(&CX, one.ino, one.handle, &lock(kind, 2)), Ok(None), "{kind:?}");
    }
}

/// Linux sends this for `F_OFD_GETLK` of an `F_UNLCK`.
#[test]
fn a_test_of_an_unlock_finds_the_owners_first_lock() {
    let served = served();
    let one = opened(&served);
    let further = Lock { start: 30, end: 39, ..lock(LockKind::Read, 1) };
    assert_eq!(one.set(LockKind::Write, 1), Ok(LockOutcome::Done));
    assert_eq!(one.client.set_lock(&CX, one.ino, one.handle, &further, None), Ok(LockOutcome::Done));
    let first = lock(LockKind::Write, 1);
    for (owner, range, expected) in [
        (1, (0, 99), Some(first)),
        (1, (19, 30), Some(first)),
        (1, (20, 30), Some(further)),
        (1, (20, 29), None),
        (2, (0, 99), None),
    ] {
        let asked = Lock { start: range.0, end: range.1, ..lock(LockKind::Unlock, owner) };
        let found = one.client.get_lock(&CX, one.ino, one.handle, &asked);
        assert_eq!(found, Ok(expected), "{owner} {range:?}");
    }
}

/// diod and QEMU refuse flags of locks that they do not know.
#[test]
fn locks_are_taken_again_where_the_server_knows_no_reclaim() {
    let (is_lost, locked) = (AtomicBool::new(false), Arc::<AtomicUsize>::default());
    let counted = Arc::clone(&locked);
    let fake = Fake::new(move |tag, request| match request {
        // The connection ends by this, the first time.
        Request::Statfs { .. } if !is_lost.swap(true, Ordering::SeqCst) => Some(Act::HangUp),
        Request::Lock { reclaim: true, .. } => Some(reply(tag, &Reply::Error(Errno::INVAL))),
        Request::Lock { .. } => {
            counted.fetch_add(1, Ordering::SeqCst);
            Some(reply(tag, &Reply::Lock(LockStatus::Success)))
        }
        Request::Read { .. } => Some(reply(tag, &Reply::Read(b"text"))),
        _ => None,
    });
    let options = Options { patience: PATIENCE, cache: Cache::None, ..Options::default() };
    let client = fake.connect(options).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    let one = Opened { client, ino, handle };
    assert_eq!(
        (one.set(LockKind::Write, 1), one.set(LockKind::Write, 2)),
        (Ok(LockOutcome::Done), Ok(LockOutcome::Done))
    );
    let _ = one.client.statfs(&CX, Ino::ROOT).unwrap_err();
    assert_eq!(read(&one.client, ino, handle, 0, 4).as_deref(), Ok(&b"text"[..]));
    assert_eq!(locked.load(Ordering::SeqCst), 4);
}
