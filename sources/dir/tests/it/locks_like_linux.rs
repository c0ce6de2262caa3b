//! Compares the lock table with the kernel's: the same requests to both, on a file of the host.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use common::*;
use ferry_vfs::*;

/// The number of threads and owners.
const OWNERS: u64 = 3;
/// So few that they meet.
const BYTES: u64 = 8;
/// A request that the kernel has not answered by then waits.
const MOMENT: Duration = Duration::from_millis(40);
/// One that is to be answered is by then.
const SOON: Duration = Duration::from_secs(10);

/// A table with one file, that each owner has open.
struct Table {
    locks: Locks<OFlags>,
    handles: Handles<OFlags>,
    cx: Caller<'static>,
    handle: Handle,
}

const INO: Ino = Ino(2);

impl Table {
    fn new() -> Self {
        let (handles, cx) = (Handles::default(), Caller::default());
        let handle = handles.insert(cx.session, INO, OFlags::RDWR).unwrap();
        Self { locks: Locks::default(), handles, cx, handle }
    }

    fn set(&self, lock: &Lock, waiter: Option<Waiter>) -> Result<LockOutcome> {
        self.locks.set(&self.handles, &self.cx, (INO, self.handle), lock, waiter, |_| Ok(()))
    }

    /// The first and last byte and the kind of a lock in the way.
    fn test(&self, lock: &Lock) -> Option<(u64, u64, LockKind)> {
        let found = self.locks.get(&self.handles, &self.cx, (INO, self.handle), lock).unwrap();
        found.map(|found| (found.start, found.end, found.kind))
    }
}

fn lock(kind: LockKind, id: u64, start: u64, end: u64) -> Lock {
    Lock { kind, owner: LockOwner { session: SessionId::default(), id }, start, end, pid: 1, flock: false }
}

/// Asks the kernel. Open-file-description locks have their descriptor as their owner, POSIX locks the table of descriptors of
/// their thread.
fn ask(file: RawFd, command: libc::c_int, lock: &Lock) -> Result<Option<(u64, u64, LockKind)>> {
    let kind = match lock.kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
        LockKind::Unlock => libc::F_UNLCK,
    };
    let mut flock = libc::flock {
        l_type: i16::try_from(kind).unwrap(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap(),
        l_start: lock.start.cast_signed(),
        l_len: (lock.end - lock.start + 1).cast_signed(),
        l_pid: 0,
    };
    // SAFETY: the lock is valid and outlives the call, which changes nothing else in this process.
    match unsafe { libc::fcntl(file, command, &raw mut flock) } {
        0 if i32::from(flock.l_type) == libc::F_UNLCK => Ok(None),
        0 => {
            let kind = if i32::from(flock.l_type) == libc::F_RDLCK { LockKind::Read } else { LockKind::Write };
            let start = flock.l_start.cast_unsigned();
            Ok(Some((start, start + flock.l_len.cast_unsigned() - 1, kind)))
        }
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap()),
    }
}

fn kind(number: u64) -> LockKind {
    [LockKind::Read, LockKind::Write, LockKind::Unlock][usize::try_from(number % 3).unwrap()]
}

/// Numbers that look random (xorshift).
fn random(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed >> 16
}

/// Ranges are split, joined, upgraded, downgraded and refused alike.
#[test]
fn locks_are_granted_and_found_as_by_the_kernel() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let share = Share::new(ferry_dir::Options::default());
    let mut seed = 42;
    for round in 0..20 {
        // A file for each: threads of the other test have copies of the descriptors, and with them the locks.
        let path = share.tmp.path().join(round.to_string());
        File::create(&path).unwrap();
        let open = |_| File::options().read(true).write(true).open(&path).unwrap();
        let (files, table): (Vec<File>, Table) = ((0..OWNERS).map(open).collect(), Table::new());
        for step in 0..100 {
            let (owner, one, other) =
                (random(&mut seed) % OWNERS, random(&mut seed) % BYTES, random(&mut seed) % BYTES);
            let request = lock(kind(random(&mut seed)), owner, one.min(other), one.max(other));
            let there = ask(files[usize::try_from(owner).unwrap()].as_raw_fd(), libc::F_OFD_SETLK, &request).map(drop);
            assert_eq!(table.set(&request, None).map(|_| ()), there, "{round} {step}: {request:?}");
            for (asker, byte) in (0..OWNERS).flat_map(|asker| (0..BYTES).map(move |byte| (asker, byte))) {
                // One byte is in one lock of others at the most, but for read locks.
                for kind in [LockKind::Read, LockKind::Write] {
                    let request = lock(kind, asker, byte, byte);
                    let file = files[usize::try_from(asker).unwrap()].as_raw_fd();
                    let (here, there) = (table.test(&request), ask(file, libc::F_OFD_GETLK, &request).unwrap());
                    let only_write =
                        |found: Option<(u64, u64, LockKind)>| found.filter(|found| found.2 == LockKind::Write);
                    assert_eq!(here.map(|found| found.2), there.map(|found| found.2), "{round} {step}: {request:?}");
                    assert_eq!(only_write(here), only_write(there), "{round} {step}: {request:?}");
                }
            }
        }
    }
}

/// A thread with descriptors of its own, and so an owner of POSIX locks.
struct Owner {
    requests: Sender<Lock>,
    outcomes: Receiver<Result<()>>,
}

impl Owner {
    fn new(path: &std::path::Path) -> Self {
        let (requests, asked) = channel::<Lock>();
        let (answer, outcomes) = channel();
        let path = path.to_owned();
        std::thread::spawn(move || {
            // SAFETY: this thread uses no descriptor that it had before, and none that another opens later.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            let file = File::options().read(true).write(true).open(path).unwrap();
            while let Ok(request) = asked.recv() {
                let outcome = ask(file.as_raw_fd(), libc::F_SETLKW, &request).map(drop);
                if answer.send(outcome).is_err() {
                    return;
                }
            }
        });
        Self { requests, outcomes }
    }
}

/// Each owner has one thread, so it asks for nothing while it waits.
fn alike(path: &std::path::Path, steps: impl Iterator<Item = Lock>) -> usize {
    let owners: Vec<Owner> = (0..OWNERS).map(|_| Owner::new(path)).collect();
    let (table, mut waiting) = (Table::new(), std::collections::BTreeMap::new());
    let mut deadlocks = 0;
    for request in steps {
        let id = request.owner.id;
        if waiting.contains_key(&id) {
            continue;
        }
        let (sender, granted) = channel();
        let here = table.set(&request, Some(Waiter::new(move |outcome| sender.send(outcome).unwrap_or(()))));
        let owner = &owners[usize::try_from(id).unwrap()];
        owner.requests.send(request).unwrap();
        if here == Ok(LockOutcome::Waiting) {
            assert_eq!(owner.outcomes.recv_timeout(MOMENT), Err(RecvTimeoutError::Timeout), "{request:?}");
            waiting.insert(id, granted);
        } else {
            assert_eq!(owner.outcomes.recv_timeout(SOON).unwrap(), here.map(|_| ()), "{request:?}");
            deadlocks += usize::from(here == Err(Errno::DEADLK));
        }
        // Whoever goes on here goes on there. Of several it is the one who came first, here; no two wait for one byte.
        waiting.retain(|id, granted| match granted.try_recv() {
            Ok(outcome) => {
                assert_eq!(owners[usize::try_from(*id).unwrap()].outcomes.recv_timeout(SOON).unwrap(), outcome);
                false
            }
            Err(_) => true,
        });
    }
    deadlocks
}

#[test]
fn waits_are_refused_as_by_the_kernel() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let share = Share::new(ferry_dir::Options::default());
    let path = share.tmp.path().join("file");
    File::create(&path).unwrap();
    let write = |id, byte| lock(LockKind::Write, id, byte, byte);
    let ring = [write(0, 0), write(1, 1), write(2, 2), write(0, 1), write(1, 2), write(2, 0)];
    assert_eq!(alike(&path, ring.into_iter()), 1);
    let read = |id| lock(LockKind::Read, id, 0, 9);
    let upgrades = [read(0), read(1), lock(LockKind::Write, 0, 0, 9), lock(LockKind::Write, 1, 0, 9)];
    assert_eq!(alike(&path, upgrades.into_iter()), 1);
    // An unlock lets the other go on, and then there is no ring.
    let chain = [write(0, 0), write(1, 1), write(0, 1), lock(LockKind::Unlock, 1, 1, 1), write(1, 0)];
    assert_eq!(alike(&path, chain.into_iter()), 0);
}
