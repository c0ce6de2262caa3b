//! The table of locks with very many of them: neither time nor memory runs away. One test, for it measures its process.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferry_vfs::{
    Caller, Handle, Handles, Ino, Lock, LockKind, LockOutcome, LockOwner, Locks, OFlags, Result, SessionId, Waiter,
};
use rustix::time::{ClockId, clock_gettime};

const INO: Ino = Ino(7);
const LOCKS: u64 = 100_000;
const WAITERS: u64 = 10_000;
/// Requests of these owners wait. The first half of them has locks elsewhere, and so might close a ring.
const WAITING: std::ops::Range<u64> = LOCKS - WAITERS / 2..LOCKS + WAITERS / 2;
/// Far behind what is waited for.
const ELSEWHERE: u64 = 1 << 40;
/// The maximum CPU time of one operation. Looking at everything takes several times as long.
const SLOWEST: Duration = Duration::from_millis(500);
/// What the locks and requests may take.
const MEMORY_MIB: u64 = 128;

/// Clients that have one file open: one may not have as many owners.
struct Table {
    locks: Locks<OFlags>,
    handles: Handles<OFlags>,
    clients: Vec<(Caller<'static>, Handle)>,
    woken: Arc<AtomicU64>,
}

impl Table {
    fn new() -> Self {
        let handles = Handles::default();
        let client = |_| {
            let session = SessionId::unique();
            (Caller { session, ..Caller::default() }, handles.insert(session, INO, OFlags::RDWR).unwrap())
        };
        let clients = (0..8).map(client).collect();
        Self { locks: Locks::default(), clients, handles, woken: Arc::default() }
    }

    fn set(&self, kind: LockKind, id: u64, (start, end): (u64, u64), waits: bool) -> Result<LockOutcome> {
        let (cx, handle) = &self.clients[usize::try_from(id).unwrap() % self.clients.len()];
        let owner = LockOwner { session: cx.session, id };
        let lock = Lock { kind, owner, start, end, pid: 1, flock: false };
        let waiter = waits.then(|| {
            let woken = Arc::clone(&self.woken);
            Waiter::new(move |outcome| {
                woken.fetch_add(u64::from(outcome.is_ok()), Ordering::Relaxed);
            })
        });
        self.locks.set(&self.handles, cx, (INO, *handle), &lock, waiter, |_| Ok(()))
    }

    fn unlock(&self, id: u64) {
        assert_eq!(self.set(LockKind::Unlock, id, (0, u64::MAX), false), Ok(LockOutcome::Done));
    }

    fn close(&self) {
        for (cx, handle) in &self.clients {
            let open = self.handles.remove(cx.session, INO, *handle).unwrap();
            self.locks.drop_handle(INO, *handle, &open);
        }
    }
}

/// Memory of this process.
fn resident_mib() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    (pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096) >> 20
}

/// The CPU time of this thread, which other load of the machine does not change.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

fn each(what: &str, ids: impl Iterator<Item = u64>, mut run: impl FnMut(u64)) {
    for id in ids {
        let begin = cpu_time();
        run(id);
        let took = cpu_time() - begin;
        assert!(took < SLOWEST, "{what}: {id} took {took:?}");
    }
}

/// What a reader locks, and what a writer waits for.
type Places = (fn(u64) -> (u64, u64), fn(u64) -> (u64, u64));

#[test]
fn a_hundred_thousand_locks_and_ten_thousand_waiters_take_little_time_and_memory() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let before = resident_mib();
    let cases: [(&str, Places); 3] = [
        ("all want the same range", (|_| (0, 9), |_| (0, 9))),
        ("all locks are in the way of ranges that differ", (|_| (0, 9), |id| (0, id))),
        ("few locks are in the way of each", (|id| (id, id), |id| (id % WAITERS, id % WAITERS + 3))),
    ];
    for (name, (held, wanted)) in cases {
        let table = Table::new();
        each(name, 0..LOCKS, |id| {
            let place = if WAITING.contains(&id) { (ELSEWHERE + id, ELSEWHERE + id) } else { held(id) };
            assert_eq!(table.set(LockKind::Read, id, place, false), Ok(LockOutcome::Done));
        });
        each(name, WAITING, |id| {
            assert_eq!(table.set(LockKind::Write, id, wanted(id), true), Ok(LockOutcome::Waiting));
        });
        let used = resident_mib().saturating_sub(before);
        assert!(used < MEMORY_MIB, "{name}: {used} MiB");
        assert_eq!(table.woken.load(Ordering::Relaxed), 0);
        each(name, 0..WAITING.start, |id| table.unlock(id));
        // Whoever has it gives it up, and the next one gets it.
        for _ in 0..10 {
            if table.woken.load(Ordering::Relaxed) < WAITERS {
                each(name, WAITING, |id| table.unlock(id));
            }
        }
        assert_eq!(table.woken.load(Ordering::Relaxed), WAITERS, "{name}");
        table.close();
        assert!(!table.locks.retry());
    }
    // The worst: one lock over records, each of which another owner has locked, too, and somebody waits for. Each of these is looked at.
    let table = Table::new();
    let (all, over) = ((0, 10 * WAITERS), LOCKS);
    for id in 0..WAITERS {
        let record = (10 * id, 10 * id + 9);
        assert_eq!(table.set(LockKind::Read, id, record, false), Ok(LockOutcome::Done));
        assert_eq!(table.set(LockKind::Write, WAITERS + id, record, true), Ok(LockOutcome::Waiting));
    }
    each("one lock over records", 0..5, |_| {
        assert_eq!(table.set(LockKind::Read, over, all, false), Ok(LockOutcome::Done));
        table.unlock(over);
    });
    each("one lock over records", 0..WAITERS, |id| table.unlock(id));
    assert_eq!(table.woken.load(Ordering::Relaxed), WAITERS);
    table.close();
}
