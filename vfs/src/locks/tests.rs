//! The table, with a host that locks the same files.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, channel};

use super::*;
use crate::Cancellation;
use crate::locks::inode::InodeLocks;

/// A host outside the table: the locks that it holds, and the requests that it received.
#[derive(Debug, Default)]
struct Host {
    holds: AtomicBool,
    /// It holds a read lock, with which only write locks conflict.
    reads: AtomicBool,
    requests: Mutex<Vec<(LockKind, bool)>>,
}

impl Host {
    fn request(&self, kind: LockKind, flock: bool) -> Result<()> {
        lock(&self.requests).push((kind, flock));
        let (holds, reads) = (self.holds.load(Ordering::Relaxed), self.reads.load(Ordering::Relaxed));
        let refused = kind == LockKind::Write && reads || kind != LockKind::Unlock && holds;
        if refused { Err(Errno::AGAIN) } else { Ok(()) }
    }

    fn take_requests(&self) -> Vec<(LockKind, bool)> {
        std::mem::take(&mut lock(&self.requests))
    }
}

#[derive(Debug)]
struct File {
    host: Arc<Host>,
    flags: OFlags,
    is_dir: bool,
}

impl Lockable for File {
    type Owner = Arc<Host>;

    fn flags(&self) -> OFlags {
        self.flags
    }

    fn is_dir(&self) -> bool {
        self.is_dir
    }

    fn set_posix(owner: &Arc<Host>, lock: &Lock) -> Result<()> {
        owner.request(lock.kind, false)
    }

    fn set_flock(&self, kind: LockKind) -> Result<()> {
        self.host.request(kind, true)
    }

    fn get_posix(&self, owner: Option<&Arc<Host>>, lock: &Lock) -> Result<Option<Lock>> {
        assert!(owner.is_none_or(|owner| Arc::ptr_eq(owner, &self.host)));
        let found = Lock { kind: LockKind::Write, pid: 0, ..*lock };
        Ok(self.host.holds.load(Ordering::Relaxed).then_some(found))
    }
}

#[derive(Default)]
struct Fixture {
    locks: Locks<File>,
    handles: Handles<File>,
    host: Arc<Host>,
    cx: Caller<'static>,
}

const INO: Ino = Ino(7);

fn posix(kind: LockKind, id: u64) -> Lock {
    let owner = LockOwner { session: SessionId::default(), id };
    Lock { kind, owner, start: 0, end: 9, pid: 1, flock: false }
}

fn flock(kind: LockKind) -> Lock {
    Lock { flock: true, ..posix(kind, 1) }
}

impl Fixture {
    fn open(&self, flags: OFlags, is_dir: bool) -> Handle {
        self.handles.insert(self.cx.session, INO, File { host: Arc::clone(&self.host), flags, is_dir }).unwrap()
    }

    fn set(&self, handle: Handle, lock: &Lock) -> Result<LockOutcome> {
        self.locks.set(&self.handles, &self.cx, (INO, handle), lock, None, |file| Ok(Arc::clone(&file.host)))
    }

    fn wait(&self, handle: Handle, lock: &Lock) -> Receiver<Result<()>> {
        let (sender, receiver) = channel();
        let waiter = Some(Waiter::new(move |outcome| sender.send(outcome).unwrap_or(())));
        let own = |file: &Arc<File>| Ok(Arc::clone(&file.host));
        let outcome = self.locks.set(&self.handles, &self.cx, (INO, handle), lock, waiter, own);
        assert_eq!(outcome, Ok(LockOutcome::Waiting));
        receiver
    }

    /// Returns the number of holders of locks.
    fn owners(&self) -> usize {
        let counts = self.locks.shard(INO).inodes.get(&INO).map_or((0, 0), InodeLocks::counts);
        let counted = self.locks.registry().of(self.cx.session);
        assert_eq!((counted.owners, counted.ranges), counts);
        counts.0
    }

    fn release(&self, handle: Handle) {
        let open = self.handles.remove(self.cx.session, INO, handle).unwrap();
        self.locks.drop_handle(INO, handle, &open);
    }

    #[track_caller]
    fn assert_nothing_left(&self) {
        assert_eq!(self.locks.inodes.load(Ordering::Relaxed), 0);
        assert!(self.locks.registry().is_empty());
        assert!(self.locks.shards.iter().all(|shard| lock(shard).inodes.is_empty() && lock(shard).waiting.is_empty()));
    }
}

#[test]
fn locks_of_the_host_conflict_and_are_waited_for() {
    let f = Fixture::default();
    let handle = f.open(OFlags::RDWR, false);
    for request in [posix(LockKind::Write, 1), flock(LockKind::Write)] {
        f.host.holds.store(true, Ordering::Relaxed);
        assert_eq!(f.set(handle, &request), Err(Errno::AGAIN));
        let waiting = f.wait(handle, &request);
        assert!(f.locks.retry());
        assert!(waiting.try_recv().is_err());
        f.host.holds.store(false, Ordering::Relaxed);
        assert!(!f.locks.retry());
        assert_eq!(waiting.try_recv(), Ok(Ok(())));
    }
    let get = |lock: &Lock| f.locks.get(&f.handles, &f.cx, (INO, handle), lock).unwrap();
    assert_eq!(get(&posix(LockKind::Read, 2)).map(|found| (found.owner.id, found.pid)), Some((1, 1)));
    assert_eq!(get(&posix(LockKind::Read, 1)), None);
    assert_eq!(get(&posix(LockKind::Unlock, 1)).map(|found| (found.owner.id, found.kind)), Some((1, LockKind::Write)));
    assert_eq!(get(&posix(LockKind::Unlock, 2)), None);
    f.host.holds.store(true, Ordering::Relaxed);
    assert_eq!(get(&posix(LockKind::Read, 1)).map(|found| found.pid), Some(0));
    f.release(handle);
    f.assert_nothing_left();
}

#[test]
fn the_host_receives_requests_without_conflicts_here_and_all_unlocks() {
    let f = Fixture::default();
    let (one, other) = (f.open(OFlags::RDWR, false), f.open(OFlags::RDWR, false));
    let (read, write, unlock) = (LockKind::Read, LockKind::Write, LockKind::Unlock);
    assert_eq!(f.set(one, &posix(write, 1)), Ok(LockOutcome::Done));
    assert_eq!(f.set(one, &posix(read, 2)), Err(Errno::AGAIN));
    f.locks.drop_owner(INO, f.cx.session, 1);
    f.locks.drop_owner(INO, f.cx.session, 2);
    assert_eq!(f.host.take_requests(), [(write, false), (unlock, false)]);
    // Another kind of flock that is not to be had: the old one is gone, and who waited for that goes on.
    assert_eq!(f.set(one, &flock(read)), Ok(LockOutcome::Done));
    assert_eq!(f.set(one, &flock(read)), Ok(LockOutcome::Done));
    assert_eq!(f.set(other, &flock(read)), Ok(LockOutcome::Done));
    let third = f.open(OFlags::RDWR, false);
    let waiting = f.wait(third, &flock(write));
    assert_eq!(f.host.take_requests(), [(read, true), (read, true)]);
    assert_eq!(f.set(one, &flock(write)), Err(Errno::AGAIN));
    f.release(other);
    assert_eq!(waiting.try_recv(), Ok(Ok(())));
    assert_eq!(f.host.take_requests(), [(unlock, true), (unlock, true), (write, true)]);
    f.release(one);
    assert!(f.host.take_requests().is_empty());
    f.release(third);
    assert_eq!(f.host.take_requests(), [(unlock, true)]);
    f.assert_nothing_left();
}

/// As on Linux: a failed conversion loses the lock, and that lets the waiter go on.
#[test]
fn a_failed_conversion_of_a_flock_grants_a_waiter_of_another_handle() {
    let f = Fixture::default();
    let (one, other) = (f.open(OFlags::RDWR, false), f.open(OFlags::RDWR, false));
    assert_eq!(f.set(one, &flock(LockKind::Read)), Ok(LockOutcome::Done));
    let upgrade = f.wait(other, &flock(LockKind::Write));
    // By another thread, while the first waits.
    assert_eq!(f.set(other, &flock(LockKind::Read)), Ok(LockOutcome::Done));
    assert!(upgrade.try_recv().is_err());
    assert_eq!(f.set(one, &flock(LockKind::Write)), Err(Errno::AGAIN));
    assert_eq!(upgrade.try_recv(), Ok(Ok(())));
    assert_eq!(f.set(one, &flock(LockKind::Read)), Err(Errno::AGAIN));
    f.release(other);
    assert_eq!(f.set(one, &flock(LockKind::Write)), Ok(LockOutcome::Done));
    f.release(one);
    f.assert_nothing_left();
}

#[test]
fn a_handle_released_during_a_request_leaves_no_lock() {
    let f = Fixture::default();
    let handle = f.open(OFlags::RDWR, false);
    let locked = f.locks.set(&f.handles, &f.cx, (INO, handle), &posix(LockKind::Write, 1), None, |file| {
        f.handles.remove(f.cx.session, INO, handle).unwrap();
        Ok(Arc::clone(&file.host))
    });
    assert_eq!(locked, Ok(LockOutcome::Done));
    assert_eq!(f.host.take_requests(), [(LockKind::Write, false), (LockKind::Unlock, false)]);
    f.assert_nothing_left();
    let late = f.open(OFlags::RDWR, false);
    assert_eq!(f.set(late, &posix(LockKind::Write, 1)), Ok(LockOutcome::Done));
    f.release(late);
    assert_eq!(f.set(late, &posix(LockKind::Write, 1)), Err(Errno::BADF));
    f.assert_nothing_left();
}

#[test]
fn a_lock_needs_a_file_opened_with_matching_access() {
    let f = Fixture::default();
    let (read, write, unlock) = (LockKind::Read, LockKind::Write, LockKind::Unlock);
    for (flags, is_dir, allowed) in [
        (OFlags::RDONLY, false, [true, false, true]),
        (OFlags::WRONLY, false, [false, true, true]),
        (OFlags::RDWR, false, [true, true, true]),
        (OFlags::RDONLY, true, [false, false, false]),
    ] {
        let handle = f.open(flags, is_dir);
        for (kind, allowed) in [read, write, unlock].into_iter().zip(allowed) {
            let outcome = if allowed { Ok(LockOutcome::Done) } else { Err(Errno::BADF) };
            assert_eq!(f.set(handle, &posix(kind, 1)), outcome, "{flags:?} {kind:?}");
            assert_eq!(f.set(handle, &flock(kind)), Ok(LockOutcome::Done));
        }
        let get = |request: &Lock| f.locks.get(&f.handles, &f.cx, (INO, handle), request);
        let outcome = if is_dir { Err(Errno::INVAL) } else { Ok(None) };
        assert_eq!(get(&posix(read, 1)), outcome);
        assert_eq!(get(&flock(read)), Err(Errno::INVAL));
        f.release(handle);
    }
    f.assert_nothing_left();
}

#[test]
fn an_owner_without_locks_is_removed() {
    let f = Fixture::default();
    let (one, other) = (f.open(OFlags::RDWR, false), f.open(OFlags::RDWR, false));
    let (write, unlock) = (LockKind::Write, LockKind::Unlock);
    for id in 1..100 {
        assert_eq!(f.set(one, &posix(write, id)), Ok(LockOutcome::Done));
        // The one before is spared until another one unlocks something.
        assert_eq!(f.owners(), if id == 1 { 1 } else { 2 });
        // A part, and then the rest of it.
        assert_eq!(f.set(one, &Lock { end: 4, ..posix(unlock, id) }), Ok(LockOutcome::Done));
        assert_eq!(f.owners(), 1);
        assert_eq!(f.set(one, &Lock { start: 5, ..posix(unlock, id) }), Ok(LockOutcome::Done));
        assert_eq!(f.owners(), 1);
    }
    f.locks.drop_owner(INO, f.cx.session, 99);
    f.assert_nothing_left();
    // Refused: by another owner, by the host.
    assert_eq!(f.set(one, &posix(write, 1)), Ok(LockOutcome::Done));
    assert_eq!(f.set(one, &posix(write, 2)), Err(Errno::AGAIN));
    assert_eq!(f.owners(), 1);
    f.host.holds.store(true, Ordering::Relaxed);
    assert_eq!(f.set(one, &Lock { start: 20, end: 29, ..posix(write, 2) }), Err(Errno::AGAIN));
    assert_eq!(f.owners(), 1);
    f.host.holds.store(false, Ordering::Relaxed);
    // One that waits is kept, whatever else it asks for, until its wait has ended.
    let waiting = f.wait(other, &posix(write, 2));
    assert_eq!(f.set(one, &posix(write, 2)), Err(Errno::AGAIN));
    assert_eq!(f.set(one, &posix(unlock, 2)), Ok(LockOutcome::Done));
    f.locks.drop_owner(INO, f.cx.session, 2);
    assert_eq!(f.owners(), 2);
    f.release(other);
    assert_eq!(waiting.try_recv(), Ok(Err(Errno::INTR)));
    assert_eq!(f.owners(), 1);
    let waiting = f.wait(one, &posix(write, 2));
    assert_eq!(f.set(one, &posix(unlock, 1)), Ok(LockOutcome::Done));
    assert_eq!((waiting.try_recv(), f.owners()), (Ok(Ok(())), 2), "who unlocked is spared");
    f.release(one);
    f.assert_nothing_left();
}

#[test]
fn an_owner_that_cancelled_its_wait_is_removed_and_may_wait_again() {
    let f = Fixture::default();
    let handle = f.open(OFlags::RDWR, false);
    assert_eq!(f.set(handle, &posix(LockKind::Write, 1)), Ok(LockOutcome::Done));
    let give_up = |id| {
        let gone = Arc::<Cancellation>::default();
        let waiter = Waiter::new(|_| panic!("nobody waits")).until(Arc::clone(&gone));
        let own = |file: &Arc<File>| Ok(Arc::clone(&file.host));
        let lock = posix(LockKind::Write, id);
        let parked = f.locks.set(&f.handles, &f.cx, (INO, handle), &lock, Some(waiter), own);
        assert_eq!(parked, Ok(LockOutcome::Waiting));
        gone.cancel();
    };
    give_up(2);
    assert!(!f.locks.retry());
    assert_eq!(f.owners(), 1);
    // The old wait ends only when the new one begins: what both need stays.
    give_up(2);
    let waiting = f.wait(handle, &posix(LockKind::Write, 2));
    assert_eq!(f.set(handle, &posix(LockKind::Unlock, 1)), Ok(LockOutcome::Done));
    assert_eq!(waiting.try_recv(), Ok(Ok(())));
    assert_eq!(f.owners(), 2, "who unlocked is spared");
    f.release(handle);
    f.assert_nothing_left();
}

#[test]
fn the_limit_of_owners_applies_per_client() {
    let f = Fixture::default();
    let own = |file: &Arc<File>| Ok(Arc::clone(&file.host));
    let open = |session, ino| {
        let file = File { host: Arc::clone(&f.host), flags: OFlags::RDWR, is_dir: false };
        (ino, f.handles.insert(session, ino, file).unwrap())
    };
    // Across many inodes, so that each has few.
    let files: Vec<_> = (1..=1024).map(|ino| open(f.cx.session, Ino(ino))).collect();
    let set = |at, id, kind| {
        let request = Lock { start: id, end: id, ..posix(kind, id) };
        f.locks.set(&f.handles, &f.cx, at, &request, None, own)
    };
    for index in 0..OWNERS.client_max {
        assert_eq!(set(files[index % files.len()], index as u64, LockKind::Write), Ok(LockOutcome::Done));
    }
    let one_more = OWNERS.client_max as u64;
    assert_eq!(set(files[0], one_more, LockKind::Write), Err(Errno::NOLCK));
    let stranger = Caller { session: SessionId::unique(), ..f.cx };
    let theirs = open(stranger.session, Ino(1));
    let request = Lock { start: one_more, end: one_more, ..posix(LockKind::Write, 1) };
    assert_eq!(f.locks.set(&f.handles, &stranger, theirs, &request, None, own), Ok(LockOutcome::Done));
    // The first of them is spared until the second one unlocks, too.
    for id in [0, files.len() as u64] {
        assert_eq!(set(files[0], id, LockKind::Unlock), Ok(LockOutcome::Done));
    }
    assert_eq!(set(files[1], one_more, LockKind::Write), Ok(LockOutcome::Done));
    // Those that have locks may have more of them.
    assert_eq!(set(files[1], 1, LockKind::Read), Ok(LockOutcome::Done));
    for (ino, handle) in files {
        let open = f.handles.remove(f.cx.session, ino, handle).unwrap();
        f.locks.drop_handle(ino, handle, &open);
    }
    let open = f.handles.remove(stranger.session, theirs.0, theirs.1).unwrap();
    f.locks.drop_handle(theirs.0, theirs.1, &open);
    f.assert_nothing_left();
}

#[test]
fn the_limit_of_ranges_applies_to_all_files_of_a_client() {
    let f = Fixture::default();
    let file = f.open(OFlags::RDWR, false);
    let owners = (RANGES.client_max / RANGES_MAX) as u64;
    let one = |id, start| Lock { start, end: start, ..posix(LockKind::Read, id) };
    for id in 1..=owners {
        for number in 0..RANGES_MAX as u64 {
            assert_eq!(f.set(file, &one(id, 2 * number)), Ok(LockOutcome::Done), "{id} {number}");
        }
    }
    assert_eq!(f.set(file, &one(owners + 1, 0)), Err(Errno::NOLCK));
    assert_eq!(f.set(file, &Lock { kind: LockKind::Unlock, ..one(1, 100) }), Ok(LockOutcome::Done));
    assert_eq!(f.set(file, &one(owners + 1, 0)), Ok(LockOutcome::Done));
    assert_eq!(f.set(file, &one(owners + 1, 2)), Err(Errno::NOLCK));
    f.locks.drop_owner(INO, f.cx.session, 2);
    assert_eq!(f.set(file, &one(owners + 1, 2)), Ok(LockOutcome::Done));
    f.release(file);
    f.assert_nothing_left();
}

#[test]
fn no_client_exhausts_the_locks_by_many_sessions() {
    let bound = registry::Bound { client_max: 60, all_max: 100 };
    let mut registry = Registry::default();
    let mut most = |session: SessionId| {
        let mut count = 0;
        while registry.add(session, bound, |counts| &mut counts.ranges).is_ok() {
            count += 1;
        }
        count
    };
    let sessions: Vec<SessionId> = (0..5).map(|_| SessionId::unique()).collect();
    assert_eq!(most(sessions[0]), 50);
    assert_eq!((most(sessions[0].same_client()), most(sessions[0].same_client())), (0, 0));
    assert_eq!(sessions[1..].iter().map(|session| most(*session)).collect::<Vec<_>>(), [25, 13, 6, 3]);
}

#[test]
fn the_waiting_requests_of_an_owner_are_limited() {
    let f = Fixture::default();
    let handle = f.open(OFlags::RDWR, false);
    assert_eq!(f.set(handle, &posix(LockKind::Write, 1)), Ok(LockOutcome::Done));
    let waiting: Vec<_> = (0..OWNER_WAITERS_MAX).map(|_| f.wait(handle, &posix(LockKind::Write, 2))).collect();
    let waiter = Some(Waiter::new(|_| panic!("it was refused")));
    let own = |file: &Arc<File>| Ok(Arc::clone(&file.host));
    let refused = f.locks.set(&f.handles, &f.cx, (INO, handle), &posix(LockKind::Write, 2), waiter, own);
    assert_eq!(refused, Err(Errno::NOLCK));
    f.release(handle);
    assert!(waiting.iter().all(|waiting| waiting.try_recv() == Ok(Err(Errno::INTR))));
    f.assert_nothing_left();
}

/// Requests that host processes block are retried in turn: one for each range and kind.
#[test]
fn the_host_receives_one_retry_for_all_requests_of_a_range_and_kind() {
    let f = Fixture::default();
    let handle = f.open(OFlags::RDWR, false);
    f.host.holds.store(true, Ordering::Relaxed);
    let waiting: Vec<_> = (1..=100).map(|id| f.wait(handle, &posix(LockKind::Read, id))).collect();
    f.host.take_requests();
    assert!(f.locks.retry());
    assert_eq!(f.host.take_requests(), [(LockKind::Read, false)]);
    f.host.holds.store(false, Ordering::Relaxed);
    assert!(!f.locks.retry());
    assert!(waiting.iter().all(|waiting| waiting.try_recv() == Ok(Ok(()))));
    f.release(handle);
    f.assert_nothing_left();
}

#[test]
fn the_limit_of_waiting_requests_applies_per_client() {
    let f = Fixture::default();
    let handle = f.open(OFlags::RDWR, false);
    assert_eq!(f.set(handle, &posix(LockKind::Write, 0)), Ok(LockOutcome::Done));
    let mut waiting: Vec<_> =
        (1..=WAITERS.client_max as u64).map(|id| f.wait(handle, &posix(LockKind::Write, id))).collect();
    let own = |file: &Arc<File>| Ok(Arc::clone(&file.host));
    let waiter = || Some(Waiter::new(|_| ()));
    for request in [posix(LockKind::Write, u64::MAX), flock(LockKind::Write)] {
        let other = f.open(OFlags::RDWR, false);
        assert_eq!(f.set(other, &flock(LockKind::Write)), Ok(LockOutcome::Done));
        let refused = f.locks.set(&f.handles, &f.cx, (INO, handle), &request, waiter(), own);
        assert_eq!(refused, Err(Errno::NOLCK), "{request:?}");
        f.release(other);
    }
    let stranger = Caller { session: SessionId::unique(), ..f.cx };
    let file = File { host: Arc::clone(&f.host), flags: OFlags::RDWR, is_dir: false };
    let theirs = f.handles.insert(stranger.session, INO, file).unwrap();
    let request = posix(LockKind::Write, 1);
    let parked = f.locks.set(&f.handles, &stranger, (INO, theirs), &request, waiter(), own);
    assert_eq!(parked, Ok(LockOutcome::Waiting));
    // Whoever comes first goes on, and makes room for one more.
    assert_eq!(f.set(handle, &posix(LockKind::Unlock, 0)), Ok(LockOutcome::Done));
    assert_eq!(waiting.remove(0).try_recv(), Ok(Ok(())));
    waiting.push(f.wait(handle, &posix(LockKind::Write, u64::MAX)));
    f.release(handle);
    assert!(waiting.iter().all(|waiting| waiting.try_recv() == Ok(Err(Errno::INTR))));
    let open = f.handles.remove(stranger.session, INO, theirs).unwrap();
    f.locks.drop_handle(INO, theirs, &open);
    f.assert_nothing_left();
}

#[test]
fn a_writer_that_waits_for_the_host_blocks_no_reader() {
    let f = Fixture::default();
    let handles = [(); 4].map(|()| f.open(OFlags::RDWR, false));
    assert_eq!(f.set(handles[0], &flock(LockKind::Write)), Ok(LockOutcome::Done));
    let writers = [1, 2].map(|number| f.wait(handles[number], &flock(LockKind::Write)));
    let reader = f.wait(handles[3], &flock(LockKind::Read));
    f.host.reads.store(true, Ordering::Relaxed);
    assert_eq!(f.set(handles[0], &flock(LockKind::Unlock)), Ok(LockOutcome::Done));
    assert_eq!(reader.try_recv(), Ok(Ok(())));
    assert!(f.locks.retry() && writers.iter().all(|writer| writer.try_recv().is_err()));
    f.host.reads.store(false, Ordering::Relaxed);
    assert!(f.locks.retry(), "the reader is in the way");
    f.release(handles[3]);
    assert_eq!(writers[0].try_recv(), Ok(Ok(())));
    f.release(handles[1]);
    assert_eq!(writers[1].try_recv(), Ok(Ok(())));
    f.release(handles[2]);
    f.release(handles[0]);
    f.assert_nothing_left();
}

#[test]
fn a_request_that_the_table_refuses_one_owner_is_tried_for_another() {
    let f = Fixture::default();
    let handles = [(); 2].map(|()| f.open(OFlags::RDWR, false));
    f.host.reads.store(true, Ordering::Relaxed);
    let first = f.wait(handles[0], &posix(LockKind::Write, 1));
    let upgrade = f.wait(handles[1], &posix(LockKind::Write, 2));
    assert_eq!(f.set(handles[1], &posix(LockKind::Read, 2)), Ok(LockOutcome::Done));
    f.host.reads.store(false, Ordering::Relaxed);
    assert!(f.locks.retry());
    assert_eq!((first.try_recv().is_err(), upgrade.try_recv()), (true, Ok(Ok(()))));
    f.release(handles[1]);
    assert_eq!(first.try_recv(), Ok(Ok(())));
    f.release(handles[0]);
    f.assert_nothing_left();
}

/// Returns the number of nodes visited to release all locks of an owner.
fn steps_to_unlock(f: &Fixture, handle: Handle, id: u64) -> usize {
    let all = Lock { start: 0, end: END, ..posix(LockKind::Unlock, id) };
    tree::steps::of(|| assert_eq!(f.set(handle, &all), Ok(LockOutcome::Done)))
}

/// Thousands of requests wait for one lock, and each also for another one. When the common lock is released, none of them is
/// visited, whether it was there before them or not.
#[test]
fn an_unlock_visits_few_requests_that_wait_for_other_locks() {
    const FEW: usize = 2_000;
    let record = |kind, id: u64, owner| Lock { start: 10 * id, end: 10 * id + 9, ..posix(kind, owner) };
    let over = |id| Lock { start: 0, end: END, ..posix(LockKind::Read, id) };
    let mut spent = Vec::new();
    for count in [1_000_u64, 10_000] {
        // Trees of random shapes differ by a factor of three now and then.
        tree::steps::same_shapes();
        let f = Fixture::default();
        let handle = f.open(OFlags::RDWR, false);
        let [all, other] = [10 * count, 10 * count + 1];
        assert_eq!(f.set(handle, &over(all)), Ok(LockOutcome::Done));
        for id in 0..count {
            assert_eq!(f.set(handle, &record(LockKind::Read, id, id)), Ok(LockOutcome::Done));
        }
        let waiting: Vec<_> = (0..count).map(|id| f.wait(handle, &record(LockKind::Write, id, count + id))).collect();
        let mut steps = vec![steps_to_unlock(&f, handle, all)];
        for _ in 0..10 {
            assert_eq!(f.set(handle, &over(all)), Ok(LockOutcome::Done));
            steps.push(steps_to_unlock(&f, handle, all));
        }
        // Now only locks of all are in the way, first one, then the other.
        assert_eq!(f.set(handle, &over(all)), Ok(LockOutcome::Done));
        for id in 0..count {
            assert_eq!(f.set(handle, &record(LockKind::Unlock, id, id)), Ok(LockOutcome::Done));
        }
        for (next, last) in [(other, all), (all, other), (other, all)] {
            assert_eq!(f.set(handle, &over(next)), Ok(LockOutcome::Done));
            steps.push(steps_to_unlock(&f, handle, last));
        }
        assert!(waiting.iter().all(|waiting| waiting.try_recv().is_err()), "one goes on too early");
        assert!(steps.iter().all(|steps| *steps < FEW), "{count}: {steps:?}");
        spent.push(steps.into_iter().max().unwrap_or(0));
        steps_to_unlock(&f, handle, other);
        assert!(waiting.iter().all(|waiting| waiting.try_recv() == Ok(Ok(()))), "one does not go on");
        f.release(handle);
        f.assert_nothing_left();
    }
    assert!(spent[1] < 3 * spent[0], "ten times as many: {spent:?}");
}

/// Later locks conflict with one request each: the first unlock assigns each request to its own lock, and no later one does.
#[test]
fn requests_are_reassigned_to_other_locks_once() {
    const COUNT: u64 = 4_000;
    let f = Fixture::default();
    let handle = f.open(OFlags::RDWR, false);
    let record = |kind, id: u64, owner| Lock { start: 10 * id, end: 10 * id + 9, ..posix(kind, owner) };
    let over = Lock { start: 0, end: END, ..posix(LockKind::Read, u64::MAX) };
    assert_eq!(f.set(handle, &over), Ok(LockOutcome::Done));
    let waiting: Vec<_> = (0..COUNT).map(|id| f.wait(handle, &record(LockKind::Write, id, COUNT + id))).collect();
    for id in 0..COUNT {
        assert_eq!(f.set(handle, &record(LockKind::Read, id, id)), Ok(LockOutcome::Done));
    }
    let first = steps_to_unlock(&f, handle, u64::MAX);
    assert_eq!(f.set(handle, &over), Ok(LockOutcome::Done));
    let second = steps_to_unlock(&f, handle, u64::MAX);
    assert!(first > usize::try_from(COUNT).unwrap() && second < 200, "{first} {second}");
    for id in 0..COUNT {
        assert_eq!(f.set(handle, &record(LockKind::Unlock, id, id)), Ok(LockOutcome::Done));
    }
    assert!(waiting.iter().all(|waiting| waiting.try_recv() == Ok(Ok(()))));
    f.release(handle);
    f.assert_nothing_left();
}

/// An owner's lock does not conflict with its own requests, also if it conflicts with all others around them.
#[test]
fn a_request_within_its_owners_lock_is_granted_when_the_other_lock_is_released() {
    let f = Fixture::default();
    let handle = f.open(OFlags::RDWR, false);
    let over = |kind, id| Lock { start: 0, end: END, ..posix(kind, id) };
    assert_eq!(f.set(handle, &over(LockKind::Read, 1)), Ok(LockOutcome::Done));
    assert_eq!(f.set(handle, &over(LockKind::Read, 2)), Ok(LockOutcome::Done));
    let others: Vec<_> = (10..30).map(|id| f.wait(handle, &posix(LockKind::Write, id))).collect();
    let own: Vec<_> = (0..3).map(|_| f.wait(handle, &posix(LockKind::Write, 1))).collect();
    let more: Vec<_> = (30..50).map(|id| f.wait(handle, &posix(LockKind::Write, id))).collect();
    assert_eq!(f.set(handle, &over(LockKind::Unlock, 2)), Ok(LockOutcome::Done));
    assert!(own.iter().all(|own| own.try_recv() == Ok(Ok(()))));
    assert!(others.iter().chain(&more).all(|other| other.try_recv().is_err()));
    assert_eq!(f.set(handle, &over(LockKind::Unlock, 1)), Ok(LockOutcome::Done));
    assert_eq!(others[0].try_recv(), Ok(Ok(())));
    assert!(others[1..].iter().chain(&more).all(|other| other.try_recv().is_err()));
    f.release(handle);
    f.assert_nothing_left();
}
