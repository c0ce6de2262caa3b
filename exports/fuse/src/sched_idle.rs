//! Lets serving threads run at SCHED_IDLE, so that clients run first.
//!
//! A client that waits for its reply sleeps on the CPU where the reply is made. Woken there, it finds that CPU busy, and
//! the scheduler sends it to another one, which has to be woken from its idleness: several microseconds, and the next
//! request comes from the wrong CPU. A thread of the class `SCHED_IDLE` does not count as busy (sched(7)): the client
//! goes on at once where it was, and the thread takes the next request when the client waits again, without having
//! slept. That is the synchronous hand-off on one CPU that ZUFS put into the kernel.
//!
//! Such a thread also yields to all other processes, and a file system must not starve. So the monitor measures how long threads wait
//! for their CPU, and gives those that wait long, or rest, the normal class for a while. Threads inherit the class, and the kernel
//! starts threads for a ring's transfers that wait: a worker takes the normal class before it submits one, and keeps it while there
//! are any.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use rustix::thread::{Pid, gettid};

use crate::machine::place_of;

/// Scheduled less often than this between two looks, and giving way does not matter.
const TURNS_MIN: u64 = 8;

/// A thread that waits longer than this for each of its turns, on average, has others on its CPU than a client or two
/// that wait for it: these only need the time between a reply and their next request.
const WAIT_MAX: Duration = Duration::from_micros(15);

/// How long a thread that had to wait runs at normal priority, and the maximum after repeated waits, until it has run
/// at idle priority for as long without a wait.
const COMPETES_MIN: Duration = Duration::from_millis(100);
const COMPETES_MAX: Duration = Duration::from_mins(1);
const UNDISTURBED: Duration = Duration::from_secs(1);

/// One thread that serves.
#[derive(Debug)]
pub(crate) struct SchedIdle {
    thread: Pid,
    state: Mutex<State>,
    /// Whether it gives way, for itself.
    gives_way: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// `/proc/self/task/N/schedstat`; none where a thread could not be made to compete again.
    turns: Option<File>,
    seen: Turns,
    /// Since when it gives way, if it does.
    gives_way: Option<Instant>,
    /// The earliest return to idle priority after a wait.
    again: Option<Instant>,
    /// How long it competes when it has to wait the next time.
    competes: Duration,
}

/// What the kernel counts of a thread (sched-stats): nanoseconds of running and of waiting for the CPU, and turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Turns {
    ran_ns: u64,
    waited_ns: u64,
    count: u64,
}

/// What is to be done about a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SchedAction {
    /// It has had its turns.
    Serves,
    /// A few.
    Little,
    /// None, because no other thread needs the CPU.
    Rests,
    /// None, or it waits long for each.
    Starves,
}

impl SchedIdle {
    /// Of the calling thread, which competes for now.
    pub(crate) fn here() -> Self {
        let thread = gettid();
        let turns = is_possible().then(|| File::open(format!("/proc/self/task/{thread}/schedstat")).ok()).flatten();
        let state = State { turns, seen: Turns::default(), gives_way: None, again: None, competes: COMPETES_MIN };
        Self { thread, state: Mutex::new(state), gives_way: AtomicBool::new(false) }
    }

    /// The monitor looks. Whether the thread is to give way at all, if it may; and whether anything was served: a machine with many
    /// CPUs has many threads that have nothing to do.
    pub(crate) fn look(&self, wanted: bool, served: bool) {
        let mut state = lock(&self.state);
        if state.gives_way.is_none() && !served {
            return;
        }
        let Some(now) = state.turns.as_ref().and_then(read_turns) else { return };
        let before = std::mem::replace(&mut state.seen, now);
        let looked = Instant::now();
        let Some(since) = state.gives_way else {
            let serves = judge(before, now, || true) == SchedAction::Serves;
            if serves && wanted && state.again.is_none_or(|again| again <= looked) {
                self.set(&mut state, true);
            }
            return;
        };
        match judge(before, now, || self.is_asleep()) {
            SchedAction::Serves | SchedAction::Little if wanted => {}
            SchedAction::Serves | SchedAction::Little | SchedAction::Rests => self.set(&mut state, false),
            SchedAction::Starves => {
                if looked.duration_since(since) >= UNDISTURBED {
                    state.competes = COMPETES_MIN;
                }
                tracing::debug!("thread {} waits for its CPU: it competes for {:?}", self.thread, state.competes);
                state.again = Some(looked + state.competes);
                state.competes = (2 * state.competes).min(COMPETES_MAX);
                self.set(&mut state, false);
            }
        }
    }

    /// The calling thread, whose way this is, competes from now on, for a while.
    pub(crate) fn run_normally(&self) {
        if self.gives_way.load(Ordering::Relaxed) {
            // Before the lock is taken: the monitor would wait for it as long as this thread does for its CPU.
            let _ = set_policy(0, libc::SCHED_OTHER);
        }
        let mut state = lock(&self.state);
        if state.turns.is_some() {
            state.again = state.again.max(Some(Instant::now() + COMPETES_MIN));
            self.set(&mut state, false);
        }
    }

    fn is_asleep(&self) -> bool {
        let stat = fs::read(format!("/proc/self/task/{}/stat", self.thread)).unwrap_or_default();
        place_of(&stat).is_none_or(|place| place.asleep)
    }

    fn set(&self, state: &mut State, gives_way: bool) {
        if state.turns.is_none() || state.gives_way.is_some() == gives_way {
            return;
        }
        let policy = if gives_way { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
        match set_policy(self.thread.as_raw_nonzero().get(), policy) {
            Ok(()) => {
                state.gives_way = gives_way.then(Instant::now);
                self.gives_way.store(gives_way, Ordering::Relaxed);
            }
            Err(error) => {
                tracing::debug!("the scheduling of thread {} stays as it is: {error}", self.thread);
                state.turns = None;
            }
        }
    }
}

/// Who is ready for a whole look without a turn starves.
fn judge(before: Turns, now: Turns, is_asleep: impl FnOnce() -> bool) -> SchedAction {
    let turns = now.count.saturating_sub(before.count);
    let waited = Duration::from_nanos(now.waited_ns.saturating_sub(before.waited_ns));
    if turns == 0 {
        let starves = now.ran_ns == before.ran_ns && !is_asleep();
        return if starves { SchedAction::Starves } else { SchedAction::Rests };
    }
    if waited.as_nanos() / u128::from(turns) > WAIT_MAX.as_nanos() {
        SchedAction::Starves
    } else if turns >= TURNS_MIN {
        SchedAction::Serves
    } else {
        SchedAction::Little
    }
}

fn read_turns(file: &File) -> Option<Turns> {
    let mut text = [0; 128];
    // A thread that has ended has no turns any more, and its number may be another one's.
    let bytes = file.read_at(&mut text, 0).ok()?;
    parse_turns(std::str::from_utf8(&text[..bytes]).ok()?)
}

fn parse_turns(text: &str) -> Option<Turns> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    let mut next = || numbers.next()?.ok();
    Some(Turns { ran_ns: next()?, waited_ns: next()?, count: next()? })
}

/// Whether a thread of ours may go to `SCHED_IDLE` and come back, which needs `CAP_SYS_NICE` or `RLIMIT_NICE`, and
/// whether threads are of the usual class. Tried once, with a thread that sleeps meanwhile: so it cannot starve.
fn is_possible() -> bool {
    static POSSIBLE: OnceLock<bool> = OnceLock::new();
    *POSSIBLE.get_or_init(|| {
        let (tell, told) = channel();
        let (done, ended) = channel::<()>();
        let probe = std::thread::Builder::new().name("fuse-probe".into()).spawn(move || {
            let _ = tell.send(gettid().as_raw_nonzero().get());
            let _ = ended.recv();
        });
        let possible = probe.is_ok() && told.recv().is_ok_and(can_come_back);
        drop(done);
        probe.is_ok_and(|thread| thread.join().is_ok()) && possible
    })
}

fn can_come_back(thread: libc::pid_t) -> bool {
    // musl's functions for scheduling policies only fail.
    // SAFETY: takes and touches no memory.
    let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, thread) };
    policy == libc::c_long::from(libc::SCHED_OTHER)
        && set_policy(thread, libc::SCHED_IDLE).is_ok()
        && set_policy(thread, libc::SCHED_OTHER).is_ok()
}

/// For thread 0, the calling one.
fn set_policy(thread: libc::pid_t, policy: libc::c_int) -> std::io::Result<()> {
    // `struct sched_param` of the kernel.
    let priority: libc::c_int = 0;
    // SAFETY: `priority` outlives the call, which only reads it.
    match unsafe { libc::syscall(libc::SYS_sched_setscheduler, thread, policy, &raw const priority) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::stay_on;

    #[test]
    fn starving_threads_are_distinguished_from_serving_and_sleeping_ones() {
        let before = Turns { ran_ns: 1_000, waited_ns: 1_000, count: 10 };
        let judge = |ran_ns, waited_ns, count, asleep| judge(before, Turns { ran_ns, waited_ns, count }, || asleep);
        assert_eq!(judge(1_000, 1_000, 10, true), SchedAction::Rests, "it sleeps");
        assert_eq!(judge(1_000, 1_000, 10, false), SchedAction::Starves, "it is ready and never has its turn");
        assert_eq!(judge(9_000, 1_000, 10, false), SchedAction::Rests, "it runs in one go");
        assert_eq!(judge(9_000, 151_000, 20, true), SchedAction::Serves, "15 microseconds each");
        assert_eq!(judge(9_000, 151_010, 20, true), SchedAction::Starves, "and more");
        assert_eq!(judge(9_000, 1_100, 12, true), SchedAction::Little, "not worth it");
    }

    #[test]
    fn the_kernels_counters_are_parsed() {
        assert_eq!(parse_turns("12 34 56\n"), Some(Turns { ran_ns: 12, waited_ns: 34, count: 56 }));
        assert_eq!(parse_turns("12 34"), None);
        assert_eq!(parse_turns("12 x 56"), None);
        let file = File::open("/proc/thread-self/schedstat").unwrap();
        assert!(read_turns(&file).unwrap().count > 0);
    }

    fn policy() -> i32 {
        // SAFETY: takes and touches no memory.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn a_busy_thread_yields_until_it_is_idle() {
        if !is_possible() {
            assert_eq!(policy(), libc::SCHED_OTHER, "what cannot be undone is not tried");
            return;
        }
        let way = SchedIdle::here();
        way.look(true, true);
        let nap = || (0..TURNS_MIN).for_each(|_| std::thread::sleep(Duration::from_micros(10)));
        let until = Instant::now() + Duration::from_secs(10);
        while policy() != libc::SCHED_IDLE {
            assert!(Instant::now() < until, "it has its turns, and gives no way");
            nap();
            way.look(true, true);
        }
        nap();
        way.look(false, true);
        assert_eq!(policy(), libc::SCHED_OTHER);
    }

    #[test]
    fn a_thread_that_would_starve_competes() {
        if !is_possible() {
            return ferry_skip::skip!("needs a limit of nice values that lets a thread leave SCHED_IDLE");
        }
        let cpu = place_of(&fs::read("/proc/thread-self/stat").unwrap()).unwrap().cpu;
        let over = AtomicBool::new(false);
        let (told, way) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                stay_on(cpu);
                told.send(SchedIdle::here()).unwrap();
                while !over.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
            let way = way.recv().unwrap();
            let watch = |wanted: fn(&State) -> bool| {
                let until = Instant::now() + Duration::from_secs(10);
                while !wanted(&lock(&way.state)) && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(5));
                    way.look(true, true);
                }
                wanted(&lock(&way.state))
            };
            let alone = watch(|state| state.gives_way.is_some());
            let hog = scope.spawn(|| {
                stay_on(cpu);
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            // It may also be found at rest, which says nothing of when it gives way again.
            let crowded = watch(|state| state.again.is_some());
            let early = (0..20).any(|_| {
                way.look(true, true);
                let state = lock(&way.state);
                state.gives_way.is_some_and(|since| state.again.is_some_and(|again| since < again))
            });
            over.store(true, Ordering::Relaxed);
            hog.join().unwrap();
            assert!(alone, "it has its CPU for itself");
            assert!(crowded, "another thread has its CPU");
            assert!(!early, "not for a while");
        });
    }
}
