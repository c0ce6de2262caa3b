//! A thread pool for blocking calls that have no asynchronous form.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;

/// The maximum number of concurrent slow calls. They mostly wait for a disk, so it may exceed the number of CPUs.
const THREADS_MAX: usize = 8;

/// A call that takes longer than this no longer counts against [`THREADS_MAX`], because it may never end and must not
/// block other calls. The limit is longer than most calls to a working disk take.
const OVERDUE: Duration = if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(10) };

/// The maximum number of threads, including those of overdue calls. Beyond it, calls wait.
const THREADS_ALL_MAX: usize = 64;

/// How long an idle thread of blocking calls stays, so that a burst does not start a thread per call.
pub const IDLE_THREAD: Duration = Duration::from_secs(5);

/// How long dropping the pool waits for unfinished calls. A call that is blocked in its source may never end.
const PATIENCE: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

/// A thread of the pool.
struct Worker {
    id: ThreadId,
    /// When its current call began.
    busy: Option<Instant>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: Vec<Worker>,
    closed: bool,
}

impl State {
    /// Returns the times at which the counted calls become overdue.
    fn overdue(&self) -> impl Iterator<Item = Instant> {
        let now = Instant::now();
        self.threads.iter().filter_map(|thread| Some(thread.busy? + OVERDUE)).filter(move |overdue| *overdue > now)
    }

    /// Returns whether another call may begin.
    fn has_room(&self) -> bool {
        self.overdue().count() < THREADS_MAX
    }

    /// Returns whether another thread is useful. One thread beyond the limit waits for calls to become overdue.
    fn wants_thread(&self) -> bool {
        let threads = self.threads.len();
        let free = self.threads.iter().filter(|thread| thread.busy.is_none()).count();
        if free >= self.jobs.len() || threads >= THREADS_ALL_MAX {
            return false;
        }
        let now = Instant::now();
        let lost = self.threads.iter().filter(|thread| thread.busy.is_some_and(|busy| busy + OVERDUE <= now)).count();
        threads - lost <= THREADS_MAX
    }

    fn note(&mut self, busy: Option<Instant>) {
        let here = std::thread::current().id();
        if let Some(thread) = self.threads.iter_mut().find(|thread| thread.id == here) {
            thread.busy = busy;
        }
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Starts another thread if it is useful and the system allows it.
    fn reinforce(self: &Arc<Self>, state: &mut State) {
        if !state.wants_thread() {
            return;
        }
        let shared = Arc::clone(self);
        match std::thread::Builder::new().name("ferry-blocking".into()).spawn(move || work(&shared)) {
            Ok(thread) => state.threads.push(Worker { id: thread.thread().id(), busy: None }),
            Err(error) => tracing::debug!("cannot start a thread for slow calls: {error}"),
        }
    }
}

/// A few threads, started on demand and ended when idle. Dropping the pool waits a while for unfinished calls.
#[derive(Default)]
pub struct BlockingPool(Arc<Shared>);

impl std::fmt::Debug for BlockingPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockingPool").field("threads", &lock(&self.0.state).threads.len()).finish()
    }
}

impl BlockingPool {
    /// Runs `job` on another thread; on this one if no thread can be started.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.0.state);
        state.jobs.push_back(Box::new(job));
        self.0.reinforce(&mut state);
        if state.threads.is_empty() {
            let job = state.jobs.pop_back();
            drop(state);
            if let Some(job) = job {
                job();
            }
            return;
        }
        drop(state);
        self.0.changed.notify_one();
    }

    /// As [`Self::run`], for an optional job: it is dropped if as many wait as there are threads.
    pub fn run_if_short(&self, job: impl FnOnce() + Send + 'static) {
        if lock(&self.0.state).jobs.len() < THREADS_MAX {
            self.run(job);
        }
    }
}

impl BlockingPool {
    /// Waits until all calls are done; returns the number of calls unfinished after `patience`.
    fn close(&self, patience: Duration) -> usize {
        let until = Instant::now() + patience;
        let mut state = lock(&self.0.state);
        state.closed = true;
        self.0.changed.notify_all();
        // A call may own the object that contains the pool, so the pool does not wait for its own thread.
        let here = std::thread::current().id();
        loop {
            let others = || state.threads.iter().filter(|thread| thread.id != here);
            let left = until.saturating_duration_since(Instant::now());
            if others().next().is_none() {
                return 0;
            }
            if left.is_zero() {
                return others().filter(|thread| thread.busy.is_some()).count() + state.jobs.len();
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for BlockingPool {
    fn drop(&mut self) {
        let left = self.close(PATIENCE);
        if left > 0 {
            // Their threads only use data that the calls own.
            tracing::warn!(
                "{left} calls are still blocked in the source, or queued behind such calls; they are abandoned"
            );
        }
    }
}

fn work(shared: &Arc<Shared>) {
    let mut state = lock(&shared.state);
    loop {
        let has_room = state.has_room();
        if has_room && let Some(job) = state.jobs.pop_front() {
            state.note(Some(Instant::now()));
            // This call may never return, and no other call may follow: another thread must take the queued calls.
            shared.reinforce(&mut state);
            drop(state);
            // A panic in a job must not remove the thread from the count.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            state = lock(&shared.state);
            state.note(None);
            continue;
        }
        if state.closed && state.jobs.is_empty() {
            break;
        }
        let until = state.overdue().min().filter(|_| !has_room);
        let patience = until.map_or(IDLE_THREAD, |until| until.saturating_duration_since(Instant::now()));
        let (woken, waited) = shared.changed.wait_timeout(state, patience).unwrap_or_else(PoisonError::into_inner);
        state = woken;
        if waited.timed_out() && has_room && state.jobs.is_empty() {
            break;
        }
    }
    let here = std::thread::current().id();
    state.threads.retain(|thread| thread.id != here);
    drop(state);
    shared.changed.notify_all();
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn finishes_all_calls_before_it_is_dropped() {
        let done = Arc::new(AtomicUsize::new(0));
        let blocking_pool = BlockingPool::default();
        for index in 0..100 {
            let done = Arc::clone(&done);
            blocking_pool.run(move || {
                done.fetch_add(1, Ordering::Relaxed);
                assert_ne!(index, 50, "a panic of one job does not affect others");
            });
        }
        // One more thread may run, in case all others block.
        assert!(lock(&blocking_pool.0.state).threads.len() <= THREADS_MAX + 1);
        drop(blocking_pool);
        assert_eq!(done.load(Ordering::Relaxed), 100);
    }

    #[test]
    fn jobs_that_nobody_needs_do_not_pile_up() {
        let blocking_pool = BlockingPool::default();
        let (keep, blocked) = std::sync::mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        for _ in 0..1000 {
            let blocked = Arc::clone(&blocked);
            blocking_pool.run_if_short(move || {
                let _ = lock(&blocked).recv();
            });
        }
        assert!(lock(&blocking_pool.0.state).jobs.len() <= THREADS_MAX);
        drop(keep);
        assert_eq!(blocking_pool.close(PATIENCE), 0);
    }

    #[test]
    fn blocked_calls_do_not_block_its_drop() {
        let blocking_pool = BlockingPool::default();
        let (keep, blocked) = std::sync::mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        let (begins, begun) = std::sync::mpsc::channel();
        for _ in 0..THREADS_MAX + 1 {
            let (blocked, begins) = (Arc::clone(&blocked), begins.clone());
            blocking_pool.run(move || {
                let _ = begins.send(());
                let _ = lock(&blocked).recv();
            });
        }
        (0..THREADS_MAX).for_each(|_| begun.recv().expect("all threads are blocked"));
        let start = Instant::now();
        assert_eq!(blocking_pool.close(Duration::from_millis(50)), THREADS_MAX + 1);
        assert!(start.elapsed() < PATIENCE, "took {:?}", start.elapsed());
        drop(keep);
        assert_eq!(blocking_pool.close(PATIENCE), 0);
    }

    #[test]
    fn blocked_calls_do_not_block_later_calls() {
        let blocking_pool = BlockingPool::default();
        let (keep, blocked) = std::sync::mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        let (tell, told) = std::sync::mpsc::channel();
        for round in 0..3 {
            let begin = Instant::now();
            for _ in 0..THREADS_MAX {
                let blocked = Arc::clone(&blocked);
                blocking_pool.run(move || {
                    let _ = lock(&blocked).recv();
                });
            }
            let tell = tell.clone();
            blocking_pool.run(move || {
                let _ = tell.send(round);
            });
            assert_eq!(told.recv_timeout(PATIENCE), Ok(round));
            assert!(begin.elapsed() >= OVERDUE, "they count until they are overdue");
        }
        assert!(lock(&blocking_pool.0.state).threads.len() <= 3 * (THREADS_MAX + 1));
        drop(keep);
        assert_eq!(blocking_pool.close(PATIENCE), 0);
    }

    #[test]
    fn blocked_calls_do_not_block_calls_queued_with_them() {
        let blocking_pool = BlockingPool::default();
        let (keep, blocked) = std::sync::mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        let (tell, told) = std::sync::mpsc::channel();
        for _ in 0..2 * THREADS_MAX + 1 {
            let blocked = Arc::clone(&blocked);
            blocking_pool.run(move || {
                let _ = lock(&blocked).recv();
            });
        }
        blocking_pool.run(move || {
            let _ = tell.send(());
        });
        assert_eq!(told.recv_timeout(PATIENCE), Ok(()), "{blocking_pool:?}");
        assert!(lock(&blocking_pool.0.state).threads.len() <= 2 * THREADS_MAX + 2, "{blocking_pool:?}");
        drop(keep);
        assert_eq!(blocking_pool.close(PATIENCE), 0);
    }

    #[test]
    fn a_call_may_drop_the_pool() {
        let blocking_pool = Arc::new(BlockingPool::default());
        let held = Arc::clone(&blocking_pool);
        let (begin, begun) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        blocking_pool.run(move || {
            let _ = begun.recv();
            let start = Instant::now();
            drop(held);
            let _ = tell.send(start.elapsed());
        });
        drop(blocking_pool);
        drop(begin);
        let took = told.recv().expect("the pool does not wait for its own thread");
        assert!(took < PATIENCE, "took {took:?}");
    }
}
