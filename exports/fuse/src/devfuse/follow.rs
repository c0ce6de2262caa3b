//! Where a mount's only reader runs: on the CPU of the client, if that waits for each of its requests.
//!
//! To hand a request to a thread on the same CPU costs a context switch; on another CPU, which has gone idle meanwhile,
//! waking that one up costs several times as much, and so does the way back. Left to itself the scheduler keeps the two
//! apart. Where a client goes on while its requests are served (read-ahead, large writes), two CPUs are worth more.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::machine::{place_of, stay_on};
use crate::stats::Stats;

/// Fewer requests than this between two looks of the monitor, and where the reader runs does not matter.
const REQUESTS_MIN: u64 = 8;

/// Requests that move more than this each take longer than a wake-up, and are often not waited for one by one.
const BYTES_MAX: u64 = 32 * 1024;

/// The reader looks where its client is once for so many requests: looking costs as much as a fifth of a request.
const STEPS: u32 = 8;

/// Whether the readers of one connection follow their client.
#[derive(Debug, Default)]
pub(super) struct Follow {
    wanted: AtomicBool,
    /// What had been served at the last look.
    seen: Mutex<Stats>,
}

impl Follow {
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
}

/// One reader, which follows.
#[derive(Debug, Default)]
pub(super) struct Follower {
    steps: u32,
    /// The client, and where the kernel tells of it.
    client: Option<(u32, File)>,
    /// The CPU that this thread is bound to, and where it may run otherwise.
    bound: Option<(usize, CpuSet)>,
}

impl Follower {
    /// A request of a thread has come. Client 0 cannot be seen from here.
    pub(super) fn step(&mut self, follow: &Follow, client: u32) {
        if !follow.is_wanted() {
            self.let_go();
        } else if self.steps > 0 {
            self.steps -= 1;
        } else {
            self.steps = STEPS;
            match self.find(client) {
                Some(cpu) => self.bind(cpu),
                None => self.let_go(),
            }
        }
    }

    /// The CPU of a client.
    fn find(&mut self, client: u32) -> Option<usize> {
        if self.client.as_ref().is_none_or(|(known, _)| *known != client) {
            self.client = File::open(format!("/proc/{client}/task/{client}/stat")).ok().map(|stat| (client, stat));
        }
        let mut stat = [0; 512];
        let read = self.client.as_ref()?.1.read_at(&mut stat, 0);
        match read {
            Ok(bytes) => Some(place_of(&stat[..bytes])?.cpu),
            // It has ended. Another one may get its number.
            Err(_) => {
                self.client = None;
                None
            }
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
        self.client = None;
        if let Some((cpu, allowed)) = self.bound.take()
            && let Err(error) = sched_setaffinity(None, &allowed)
        {
            tracing::debug!("a reader of /dev/fuse stays on CPU {cpu}: {error}");
        }
    }
}
