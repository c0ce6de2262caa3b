//! Locks: between owners, sessions and processes of the host.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::*;
use ferry_dir::Options;
use ferry_vfs::*;
use rustix::fs::FlockOperation;

const END: u64 = i64::MAX as u64;
const SOON: Duration = Duration::from_secs(5);
const NOT_YET: Duration = Duration::from_millis(150);

struct Fixture {
    share: Share,
    ino: Ino,
    handle: Handle,
}

fn lock(kind: LockKind, id: u64, start: u64, end: u64) -> Lock {
    let owner = LockOwner { session: SessionId::default(), id };
    Lock { kind, owner, start, end, pid: 100 + u32::try_from(id).unwrap(), flock: false }
}

fn waiter() -> (Waiter, Receiver<Result<()>>) {
    let (sender, receiver) = channel();
    (Waiter::new(move |outcome| sender.send(outcome).unwrap_or(())), receiver)
}

impl Fixture {
    fn new() -> Self {
        let share = Share::new(Options::default());
        let (entry, handle) = share.create(Ino::ROOT, "f", OFlags::RDWR).unwrap();
        Self { ino: entry.ino, handle, share }
    }

    fn open(&self) -> Handle {
        self.share.dir.open(&self.share.cx, self.ino, OFlags::RDWR).unwrap()
    }

    fn set(&self, lock: &Lock) -> Result<LockOutcome> {
        self.share.dir.set_lock(&self.share.cx, self.ino, self.handle, lock, None)
    }

    fn wait(&self, lock: &Lock) -> (Result<LockOutcome>, Receiver<Result<()>>) {
        self.wait_on(self.handle, lock)
    }

    fn wait_on(&self, handle: Handle, lock: &Lock) -> (Result<LockOutcome>, Receiver<Result<()>>) {
        let (waiter, receiver) = waiter();
        (self.share.dir.set_lock(&self.share.cx, self.ino, handle, lock, Some(waiter)), receiver)
    }

    fn flush(&self, owner: u64) {
        self.share.dir.flush(&self.share.cx, self.ino, self.handle, owner).unwrap();
    }

    fn get(&self, lock: &Lock) -> Option<Lock> {
        self.share.dir.get_lock(&self.share.cx, self.ino, self.handle, lock).unwrap()
    }
}

/// A process of the host that holds a POSIX lock on a file.
struct Holder(Child, std::io::Lines<BufReader<std::process::ChildStdout>>);

impl Holder {
    fn new(share: &Share, write: bool) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "locks::host_process", "--ignored", "--nocapture"])
            .env("LOCK_PATH", share.path("f"))
            .env("LOCK_WRITE", if write { "1" } else { "0" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.by_ref().map_while(std::result::Result::ok).any(|line| line.contains("locked")));
        Self(child, lines)
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        self.1.by_ref().for_each(drop);
        self.0.wait().unwrap();
    }
}

#[test]
#[ignore = "only run as the process that holds a lock"]
fn host_process() {
    let Some(path) = std::env::var_os("LOCK_PATH") else { return };
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let write = std::env::var("LOCK_WRITE").unwrap() == "1";
    let operation =
        if write { FlockOperation::NonBlockingLockExclusive } else { FlockOperation::NonBlockingLockShared };
    rustix::fs::fcntl_lock(&file, operation).unwrap();
    println!("locked");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().lines().next();
}

/// Whether a process of the host could lock the file now. (Of this process: flock and OFD see no difference.)
fn host_can_flock(share: &Share, operation: FlockOperation) -> bool {
    let file = std::fs::File::options().read(true).write(true).open(share.path("f")).unwrap();
    rustix::fs::flock(file.as_fd(), operation).is_ok()
}

#[test]
fn owners_exclude_each_other_and_the_host_sees_it() {
    let f = Fixture::new();
    let (write, read, unlock) = (LockKind::Write, LockKind::Read, LockKind::Unlock);
    assert_eq!(f.set(&lock(write, 1, 0, 9)), Ok(LockOutcome::Done));
    assert_eq!(f.set(&lock(write, 2, 5, 20)), Err(Errno::AGAIN));
    assert_eq!(f.set(&lock(write, 2, 10, END)), Ok(LockOutcome::Done));
    // Who it is, what and where.
    let found = f.get(&lock(read, 2, 0, 100)).unwrap();
    assert_eq!((found.kind, found.start, found.end, found.pid, found.owner.id), (write, 0, 9, 101, 1));
    assert_eq!(f.get(&lock(write, 1, 0, 9)), None);
    let found = f.get(&lock(write, 1, 0, END)).unwrap();
    assert_eq!((found.start, found.end, found.pid), (10, END, 102));
    // A process of the host is refused.
    let file = std::fs::File::options().read(true).write(true).open(f.share.path("f")).unwrap();
    let host = || rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive);
    assert_eq!(host(), Err(Errno::AGAIN));
    // Part by part unlocked, then by flush.
    assert_eq!(f.set(&lock(unlock, 1, 0, 4)), Ok(LockOutcome::Done));
    assert_eq!(f.set(&lock(write, 2, 0, 5)), Err(Errno::AGAIN));
    assert_eq!(f.set(&lock(write, 2, 0, 4)), Ok(LockOutcome::Done));
    f.flush(1);
    assert_eq!(f.set(&lock(write, 2, 0, END)), Ok(LockOutcome::Done));
    f.flush(2);
    assert_eq!(host(), Ok(()));
    rustix::fs::fcntl_lock(&file, FlockOperation::Unlock).unwrap();
    // Shared, up and down.
    assert_eq!(f.set(&lock(read, 1, 0, END)), Ok(LockOutcome::Done));
    assert_eq!(f.set(&lock(read, 2, 0, END)), Ok(LockOutcome::Done));
    assert_eq!(f.set(&lock(write, 2, 0, END)), Err(Errno::AGAIN));
    f.flush(1);
    assert_eq!(f.set(&lock(write, 2, 0, END)), Ok(LockOutcome::Done));
    assert_eq!(f.set(&lock(read, 2, 0, END)), Ok(LockOutcome::Done));
    assert_eq!(f.set(&lock(read, 1, 0, END)), Ok(LockOutcome::Done));
}

#[test]
fn sessions_are_different_owners() {
    let f = Fixture::new();
    let other = Caller { session: SessionId::unique(), ..f.share.cx };
    let handle = f.share.dir.open(&other, f.ino, OFlags::RDWR).unwrap();
    assert_eq!(f.set(&lock(LockKind::Write, 1, 0, END)), Ok(LockOutcome::Done));
    let theirs = f.share.dir.set_lock(&other, f.ino, handle, &lock(LockKind::Write, 1, 0, END), None);
    assert_eq!(theirs, Err(Errno::AGAIN));
    // Their flush of the same number is not ours.
    f.share.dir.flush(&other, f.ino, handle, 1).unwrap();
    let theirs = f.share.dir.set_lock(&other, f.ino, handle, &lock(LockKind::Write, 1, 0, END), None);
    assert_eq!(theirs, Err(Errno::AGAIN));
    let found = f.share.dir.get_lock(&other, f.ino, handle, &lock(LockKind::Read, 1, 5, 6)).unwrap().unwrap();
    assert_eq!(found.owner.session, f.share.cx.session);
    // The end of our handle is the end of our locks, flushed or not.
    f.share.dir.release(&f.share.cx, f.ino, f.handle);
    let theirs = f.share.dir.set_lock(&other, f.ino, handle, &lock(LockKind::Write, 1, 0, END), None);
    assert_eq!(theirs, Ok(LockOutcome::Done));
}

#[test]
fn waiting_requests_are_served_in_order() {
    let f = Fixture::new();
    assert_eq!(f.set(&lock(LockKind::Write, 1, 0, END)), Ok(LockOutcome::Done));
    let (parked, first) = f.wait(&lock(LockKind::Write, 2, 0, END));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    let (parked, second) = f.wait(&lock(LockKind::Read, 3, 0, END));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    let (parked, third) = f.wait(&lock(LockKind::Read, 4, 0, END));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    assert!(first.recv_timeout(NOT_YET).is_err());
    assert_eq!(f.set(&lock(LockKind::Unlock, 1, 0, END)), Ok(LockOutcome::Done));
    // Woken before the unlock returned.
    assert_eq!(first.try_recv(), Ok(Ok(())));
    assert!(second.try_recv().is_err());
    // Downgraded: readers go on.
    assert_eq!(f.set(&lock(LockKind::Read, 2, 0, END)), Ok(LockOutcome::Done));
    assert_eq!(second.try_recv(), Ok(Ok(())));
    assert_eq!(third.try_recv(), Ok(Ok(())));
    // Granted at once, the waiter is not called.
    let (done, receiver) = f.wait(&lock(LockKind::Read, 5, 0, END));
    assert_eq!(done, Ok(LockOutcome::Done));
    assert!(receiver.try_recv().is_err());
}

#[test]
fn a_deadlock_is_refused() {
    let f = Fixture::new();
    let (other, other_handle) = f.share.create(Ino::ROOT, "g", OFlags::RDWR).unwrap();
    let set_other = |lock: &Lock, wait| f.share.dir.set_lock(&f.share.cx, other.ino, other_handle, lock, wait);
    assert_eq!(f.set(&lock(LockKind::Write, 1, 0, 0)), Ok(LockOutcome::Done));
    assert_eq!(set_other(&lock(LockKind::Write, 2, 0, 0), None), Ok(LockOutcome::Done));
    assert_eq!(f.set(&lock(LockKind::Write, 3, 5, 5)), Ok(LockOutcome::Done));
    // 1 waits for 2, 2 for 3; 3 for 1 would close the ring.
    let (first, first_waiter) = waiter();
    assert_eq!(set_other(&lock(LockKind::Write, 1, 0, 0), Some(first)), Ok(LockOutcome::Waiting));
    let (parked, second_waiter) = f.wait(&lock(LockKind::Read, 2, 5, 5));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    let (refused, third_waiter) = f.wait(&lock(LockKind::Write, 3, 0, 9));
    assert_eq!(refused, Err(Errno::DEADLK));
    assert!(third_waiter.try_recv().is_err());
    // Nobody lost anything by it.
    f.flush(3);
    assert_eq!(second_waiter.try_recv(), Ok(Ok(())));
    f.share.dir.flush(&f.share.cx, other.ino, other_handle, 2).unwrap();
    assert_eq!(first_waiter.try_recv(), Ok(Ok(())));
}

#[test]
fn a_lock_of_a_host_process_is_respected_and_waited_for() {
    let f = Fixture::new();
    let holder = Holder::new(&f.share, true);
    assert_eq!(f.set(&lock(LockKind::Read, 1, 0, END)), Err(Errno::AGAIN));
    let found = f.get(&lock(LockKind::Read, 1, 3, 4)).unwrap();
    assert_eq!((found.kind, found.start, found.end, found.pid), (LockKind::Write, 0, END, 0));
    let (parked, receiver) = f.wait(&lock(LockKind::Write, 1, 0, END));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    assert!(receiver.recv_timeout(NOT_YET).is_err());
    holder.end();
    assert_eq!(receiver.recv_timeout(SOON), Ok(Ok(())));
    assert_eq!(f.set(&lock(LockKind::Write, 2, 0, END)), Err(Errno::AGAIN));
}

#[test]
fn a_waiter_ends_with_its_handle() {
    let f = Fixture::new();
    assert_eq!(f.set(&lock(LockKind::Write, 1, 0, END)), Ok(LockOutcome::Done));
    let second = f.open();
    let (parked, receiver) = f.wait_on(second, &lock(LockKind::Write, 2, 0, END));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    // Its owner's flush is not its end.
    f.share.dir.flush(&f.share.cx, f.ino, second, 2).unwrap();
    assert!(receiver.try_recv().is_err());
    f.share.dir.release(&f.share.cx, f.ino, second);
    assert_eq!(receiver.try_recv(), Ok(Err(Errno::INTR)));
    f.flush(1);
    // Nothing is left of it.
    assert_eq!(f.set(&lock(LockKind::Write, 3, 0, END)), Ok(LockOutcome::Done));
    // A share that goes takes its waiters with it.
    let (parked, receiver) = f.wait(&lock(LockKind::Write, 4, 0, END));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    drop(f);
    assert_eq!(receiver.recv_timeout(SOON), Ok(Err(Errno::INTR)));
}

#[test]
fn flock_belongs_to_the_handle() {
    let f = Fixture::new();
    let second = f.open();
    let flock = |kind| Lock { flock: true, ..lock(kind, 1, 0, END) };
    let set = |handle, kind| f.share.dir.set_lock(&f.share.cx, f.ino, handle, &flock(kind), None);
    assert_eq!(set(f.handle, LockKind::Write), Ok(LockOutcome::Done));
    assert_eq!(set(second, LockKind::Read), Err(Errno::AGAIN));
    assert!(!host_can_flock(&f.share, FlockOperation::NonBlockingLockShared));
    let (parked, receiver) = f.wait_on(second, &flock(LockKind::Write));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    // POSIX locks do not meet flock locks.
    assert_eq!(f.set(&lock(LockKind::Write, 1, 0, END)), Ok(LockOutcome::Done));
    f.flush(1);
    assert!(receiver.try_recv().is_err());
    f.share.dir.release(&f.share.cx, f.ino, f.handle);
    assert_eq!(receiver.try_recv(), Ok(Ok(())));
    assert!(!host_can_flock(&f.share, FlockOperation::NonBlockingLockShared));
    assert_eq!(set(second, LockKind::Read), Ok(LockOutcome::Done));
    assert!(host_can_flock(&f.share, FlockOperation::NonBlockingLockShared));
    assert_eq!(set(second, LockKind::Unlock), Ok(LockOutcome::Done));
    assert!(host_can_flock(&f.share, FlockOperation::NonBlockingLockExclusive));
    // Held by the host, waited for.
    let file = std::fs::File::open(f.share.path("f")).unwrap();
    rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
    let (parked, receiver) = f.wait_on(second, &flock(LockKind::Write));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    assert!(receiver.recv_timeout(NOT_YET).is_err());
    drop(file);
    assert_eq!(receiver.recv_timeout(SOON), Ok(Ok(())));
}

/// Descriptors of the file that this process has.
fn descriptors(share: &Share) -> usize {
    let path = share.path("f").canonicalize().unwrap();
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|entry| std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to == path)).count()
}

/// However many owners have come and gone by one handle.
#[test]
fn an_owner_takes_a_descriptor_only_while_it_has_locks_or_waits() {
    let f = Fixture::new();
    let (write, unlock) = (LockKind::Write, LockKind::Unlock);
    let before = descriptors(&f.share);
    assert_eq!(f.set(&lock(write, 1, 0, 9)), Ok(LockOutcome::Done));
    for id in 2..200 {
        assert_eq!(f.set(&lock(write, id, 10, 19)), Ok(LockOutcome::Done));
        assert_eq!(f.set(&lock(unlock, id, 0, END)), Ok(LockOutcome::Done));
        assert_eq!(f.set(&lock(write, id, 0, 9)), Err(Errno::AGAIN));
    }
    assert_eq!(descriptors(&f.share), before + 1);
    assert_eq!(f.set(&lock(unlock, 1, 0, END)), Ok(LockOutcome::Done));
    assert_eq!(descriptors(&f.share), before + 1, "who unlocked last may lock again soon");
    // What the host does not give.
    let holder = Holder::new(&f.share, true);
    for id in 1..200 {
        assert_eq!(f.set(&lock(write, id, 0, 9)), Err(Errno::AGAIN));
    }
    assert_eq!(descriptors(&f.share), before);
    // Who waits keeps it, and has its lock by it.
    let (parked, receiver) = f.wait(&lock(write, 2, 0, 9));
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    assert_eq!(f.set(&lock(write, 2, 20, 29)), Err(Errno::AGAIN));
    assert_eq!(descriptors(&f.share), before + 1);
    holder.end();
    assert_eq!(receiver.recv_timeout(SOON), Ok(Ok(())));
    let file = std::fs::File::options().read(true).write(true).open(f.share.path("f")).unwrap();
    let host = || rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive);
    assert_eq!(host(), Err(Errno::AGAIN));
    f.flush(2);
    assert_eq!(host(), Ok(()));
    drop(file);
    assert_eq!(descriptors(&f.share), before);
}

#[test]
fn invalid_locks_are_refused() {
    let f = Fixture::new();
    assert_eq!(f.set(&lock(LockKind::Write, 1, 10, 9)), Err(Errno::INVAL));
    assert_eq!(f.set(&lock(LockKind::Write, 1, u64::MAX, u64::MAX)), Err(Errno::INVAL));
    assert_eq!(f.set(&lock(LockKind::Write, 1, 0, u64::MAX)), Ok(LockOutcome::Done));
    assert_eq!(f.set(&lock(LockKind::Write, 2, END, END)), Err(Errno::AGAIN));
    f.flush(1);
    assert_eq!(f.set(&lock(LockKind::Unlock, 9, 0, END)), Ok(LockOutcome::Done));
    let read_only = f.share.dir.open(&f.share.cx, f.ino, OFlags::RDONLY).unwrap();
    let set = |kind| f.share.dir.set_lock(&f.share.cx, f.ino, read_only, &lock(kind, 1, 0, 1), None);
    assert_eq!(set(LockKind::Write), Err(Errno::BADF));
    assert_eq!(set(LockKind::Read), Ok(LockOutcome::Done));
    let (waiter, receiver) = waiter();
    let bad = f.share.dir.set_lock(&f.share.cx, f.ino, Handle(77), &lock(LockKind::Read, 1, 0, 1), Some(waiter));
    assert_eq!(bad, Err(Errno::BADF));
    assert!(receiver.try_recv().is_err(), "a refused request does not call its waiter");
}

/// Many threads take turns; no wake-up is lost and no two hold the lock.
#[test]
fn locks_exclude_under_load() {
    let f = Fixture::new();
    let inside = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for id in 1..=6 {
            let (f, inside) = (&f, &inside);
            scope.spawn(move || {
                for _ in 0..300 {
                    let (outcome, receiver) = f.wait(&lock(LockKind::Write, id, 0, END));
                    if outcome.unwrap() == LockOutcome::Waiting {
                        receiver.recv_timeout(SOON).unwrap().unwrap();
                    }
                    assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                    inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    assert_eq!(f.set(&lock(LockKind::Unlock, id, 0, END)), Ok(LockOutcome::Done));
                }
            });
        }
    });
}
