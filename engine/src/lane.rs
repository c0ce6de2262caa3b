//! Threads for calls that may take long and have no asynchronous form.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How many slow calls may run at once. They mostly wait for a disk, so more than there are CPUs.
const THREADS_MAX: usize = 8;

/// How long a thread without work stays, so that a burst does not start one for each call.
const IDLE: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A few threads, started when needed and gone when idle. Dropping the lane waits for what it still has to do.
#[derive(Default)]
pub struct Lane(Arc<Shared>);

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane").field("threads", &self.0.lock().threads).finish()
    }
}

impl Lane {
    /// Runs `job` soon, on another thread; on this one if no thread can be had at all.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.0.lock();
        state.jobs.push_back(Box::new(job));
        if state.idle < state.jobs.len() && state.threads < THREADS_MAX {
            let shared = Arc::clone(&self.0);
            let started = std::thread::Builder::new().name("ferry-lane".into()).spawn(move || work(&shared));
            match started {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads == 0 => {
                    let job = state.jobs.pop_back();
                    drop(state);
                    if let Some(job) = job {
                        job();
                    }
                    return;
                }
                Err(_) => {}
            }
        }
        drop(state);
        self.0.changed.notify_one();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        self.0.changed.notify_all();
        while state.threads > 0 {
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn work(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            // A job that panics must not take the thread's place in the count with it.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            state = shared.lock();
            continue;
        }
        if state.closed {
            break;
        }
        state.idle += 1;
        let (woken, waited) = shared.changed.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
        state = woken;
        state.idle -= 1;
        if waited.timed_out() && state.jobs.is_empty() {
            break;
        }
    }
    state.threads -= 1;
    drop(state);
    shared.changed.notify_all();
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn does_everything_before_it_is_gone() {
        let done = Arc::new(AtomicUsize::new(0));
        let lane = Lane::default();
        for index in 0..100 {
            let done = Arc::clone(&done);
            lane.run(move || {
                done.fetch_add(1, Ordering::Relaxed);
                assert_ne!(index, 50, "a panic of one job is nobody else's business");
            });
        }
        assert!(lane.0.lock().threads <= THREADS_MAX);
        drop(lane);
        assert_eq!(done.load(Ordering::Relaxed), 100);
    }
}
