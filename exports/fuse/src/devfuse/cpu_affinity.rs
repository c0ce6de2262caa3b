//! CPU affinity of a mount's only reader: it runs on the client's CPU if the client waits for each request.
//!
//! Passing a request to a thread on the same CPU costs a context switch. Waking another, idle CPU costs several times
//! as much, and so does the way back. By default the scheduler keeps client and reader apart. A client that continues
//! while its requests are served (read-ahead, large writes) benefits from two CPUs.
//!
//! The reader never looks itself. The kernel blocks reads of the `stat` of a process that executes exec, and such a
//! process closes files and waits for the FLUSH. A reader that looked then would deadlock with its client. So a
//! separate thread looks, for which no other thread waits.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, Thread};
use std::time::Duration;

use ferry_vfs::sync::lock;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::machine::{place_of, stay_on};
use crate::stats::Stats;

/// With fewer requests between two checks of the monitor, the reader's CPU does not matter.
const REQUESTS_MIN: u64 = 8;

/// Requests with more bytes take longer than a wake-up, and clients often do not wait for each.
const BYTES_MAX: u64 = 32 * 1024;

/// The interval of looks. Clients move rarely, and each look costs as much as a fifth of a request.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// After this many unused looks the scout sleeps until the next request for a look.
const LOOKS_UNASKED_MAX: u32 = 50;

/// Whether the readers of one connection follow their client.
#[derive(Debug, Default)]
pub(super) struct CpuAffinity {
    wanted: AtomicBool,
    /// The counters at the last check.
    seen: Mutex<Stats>,
    sight: Arc<CpuSample>,
    /// Started on demand; `None` if no thread could be started.
    scout: OnceLock<Option<Thread>>,
}

/// The reader's request to the scout, and the scout's result.
#[derive(Debug, Default)]
struct CpuSample {
    /// The client to look at, or 0.
    asked: AtomicU32,
    /// A client, and in the upper half its CPU plus one.
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
    /// Called at each check of the monitor. Several readers run on any CPU.
    pub(super) fn look(&self, alone: bool, served: Stats) {
        let mut seen = lock(&self.seen);
        let requests = served.requests - seen.requests;
        let bytes = served.message_bytes - seen.message_bytes;
        *seen = served;
        let wanted = alone && requests >= REQUESTS_MIN && bytes / requests <= BYTES_MAX;
        self.wanted.store(wanted, Ordering::Relaxed);
    }

    /// Returns whether the reader is alone, and its clients wait for it.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Called when there is another reader.
    pub(super) fn stop(&self) {
        self.wanted.store(false, Ordering::Relaxed);
    }

    /// Returns the last known CPU of a client, and requests a new look.
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
    /// Starts the scout. It ends automatically and is never joined, because it may block while a client executes exec.
    fn watch(sight: Arc<Self>) -> Option<Thread> {
        let scout = thread::Builder::new().name("fuse-scout".into()).spawn(move || sight.run());
        scout.map(|scout| scout.thread().clone()).ok()
    }

    fn run(&self) {
        // The client, and its open `stat` file.
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
        // It has ended. Another thread may get its id.
        Err(_) => {
            *known = None;
            None
        }
    }
}

/// One reader, which follows.
#[derive(Debug, Default)]
pub(super) struct AffinityThread {
    /// The CPU of this thread, and the CPUs that it may use otherwise.
    bound: Option<(usize, CpuSet)>,
}

impl AffinityThread {
    /// Follows the client of a request. Client 0 is not visible in this namespace.
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
