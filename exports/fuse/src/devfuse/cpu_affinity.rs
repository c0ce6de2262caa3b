//! CPU affinity of a mount's only reader: it runs on the client's CPU if the client waits for each request.
//!
//! To hand a request to a thread on the same CPU costs a context switch; on another CPU, which has gone idle meanwhile,
//! waking that one up costs several times as much, and so does the way back. Left to itself the scheduler keeps the two
//! apart. Where a client goes on while its requests are served (read-ahead, large writes), two CPUs are worth more.
//!
//! The reader never looks itself. The kernel lets nobody read the `stat` of a process that is just starting a program, and
//! such a process closes files, of which it waits for the FLUSH: a reader that looked then would wait for its client, and that for
//! it, for ever. So a thread looks that nobody waits for.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::machine::{place_of, stay_on};
use crate::stats::Stats;

/// Fewer requests than this between two looks of the monitor, and where the reader runs does not matter.
const REQUESTS_MIN: u64 = 8;

/// Requests that move more than this each take longer than a wake-up, and are often not waited for one by one.
const BYTES_MAX: u64 = 32 * 1024;

/// How often the scout looks. Clients move rarely, and each look costs as much as a fifth of a request.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A scout whom nobody asked for so many looks sleeps until it is asked.
const LOOKS_UNASKED_MAX: u32 = 50;

/// Whether the readers of one connection follow their client.
#[derive(Debug, Default)]
pub(super) struct CpuAffinity {
    wanted: AtomicBool,
    /// What had been served at the last look.
    seen: Mutex<Stats>,
    sight: Arc<CpuSample>,
    /// Started when it is needed; none where no thread can be had.
    scout: OnceLock<Option<Thread>>,
}

/// What the reader asks of the scout, and what that has seen.
#[derive(Debug, Default)]
struct CpuSample {
    /// The client to look at, or 0.
    asked: AtomicU32,
    /// A client, and above it its CPU, plus one.
    found: AtomicU64,
    asleep: AtomicBool,
    ended: AtomicBool,
}

impl Drop for CpuAffinity {
    fn drop(&mut self) {
        self.sight.ended.store(true, Ordering::SeqCst);
        if let Some(Some(scout)) = self.scout.get() {
            scout.unpark();
        }
    }
}

impl CpuAffinity {
    /// The monitor looks. More than one reader run wherever there is room.
    pub(super) fn look(&self, alone: bool, served: Stats) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let requests = served.requests - seen.requests;
        let bytes = served.message_bytes - seen.message_bytes;
        *seen = served;
        let wanted = alone && requests >= REQUESTS_MIN && bytes / requests <= BYTES_MAX;
        self.wanted.store(wanted, Ordering::Relaxed);
    }

    /// Whether the reader is alone, and its clients wait for it.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// There is another reader.
    pub(super) fn stop(&self) {
        self.wanted.store(false, Ordering::Relaxed);
    }

    /// The CPU on which a client was seen; has it looked at.
    fn place_of(&self, client: u32) -> Option<usize> {
        let scout = self.scout.get_or_init(|| CpuSample::watch(Arc::clone(&self.sight))).as_ref()?;
        self.sight.asked.store(client, Ordering::SeqCst);
        if self.sight.asleep.swap(false, Ordering::SeqCst) {
            scout.unpark();
        }
        let found = self.sight.found.load(Ordering::Relaxed).to_le_bytes();
        let [a, b, c, d, cpu @ ..] = found;
        let cpu = usize::try_from(u32::from_le_bytes(cpu)).ok()?.checked_sub(1)?;
        (u32::from_le_bytes([a, b, c, d]) == client).then_some(cpu)
    }
}

impl CpuSample {
    /// Starts the scout. It ends on its own, and may be stuck for as long as a client starts a program: it is never
    /// joined.
    fn watch(sight: Arc<Self>) -> Option<Thread> {
        let scout = thread::Builder::new().name("fuse-scout".into()).spawn(move || sight.run());
        scout.map(|scout| scout.thread().clone()).ok()
    }

    fn run(&self) {
        // The client, and where the kernel tells of it.
        let mut known: Option<(u32, File)> = None;
        let mut unasked = 0;
        while !self.ended.load(Ordering::SeqCst) {
            match self.asked.swap(0, Ordering::SeqCst) {
                0 if unasked < LOOKS_UNASKED_MAX => unasked += 1,
                0 => {
                    known = None;
                    self.asleep.store(true, Ordering::SeqCst);
                    if self.asked.load(Ordering::SeqCst) == 0 && !self.ended.load(Ordering::SeqCst) {
                        thread::park();
                    }
                    unasked = 0;
                    continue;
                }
                client => {
                    unasked = 0;
                    let cpu = look_at(&mut known, client).and_then(|cpu| u32::try_from(cpu + 1).ok()).unwrap_or(0);
                    self.found.store(u64::from(cpu) << 32 | u64::from(client), Ordering::Relaxed);
                }
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

/// The CPU of a client.
fn look_at(known: &mut Option<(u32, File)>, client: u32) -> Option<usize> {
    if known.as_ref().is_none_or(|(known, _)| *known != client) {
        *known = File::open(format!("/proc/{client}/task/{client}/stat")).ok().map(|stat| (client, stat));
    }
    let mut stat = [0; 512];
    match known.as_ref()?.1.read_at(&mut stat, 0) {
        Ok(bytes) => Some(place_of(&stat[..bytes])?.cpu),
        // It has ended. Another one may get its number.
        Err(_) => {
            *known = None;
            None
        }
    }
}

/// One reader, which follows.
#[derive(Debug, Default)]
pub(super) struct AffinityThread {
    /// The CPU that this thread is bound to, and where it may run otherwise.
    bound: Option<(usize, CpuSet)>,
}

impl AffinityThread {
    /// A request of a thread has come. Client 0 cannot be seen from here.
    pub(super) fn step(&mut self, cpu_affinity: &CpuAffinity, client: u32) {
        match cpu_affinity.is_wanted().then(|| cpu_affinity.place_of(client)).flatten() {
            Some(cpu) => self.bind(cpu),
            None => self.let_go(),
        }
    }

    fn bind(&mut self, cpu: usize) {
        if self.bound.is_some_and(|(bound, _)| bound == cpu) {
            return;
        }
        let Some(allowed) = self.bound.map(|(_, allowed)| allowed).or_else(|| sched_getaffinity(None).ok()) else {
            return;
        };
        if cpu < CpuSet::MAX_CPU && allowed.is_set(cpu) {
            stay_on(cpu);
            self.bound = Some((cpu, allowed));
        } else {
            self.let_go();
        }
    }

    fn let_go(&mut self) {
        if let Some((cpu, allowed)) = self.bound.take()
            && let Err(error) = sched_setaffinity(None, &allowed)
        {
            tracing::debug!("a reader of /dev/fuse stays on CPU {cpu}: {error}");
        }
    }
}
