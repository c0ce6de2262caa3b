//! Threads for requests that may take long.
//!
//! A thread is started when all others are busy, and ends after being idle for a while. All pools of a connection
//! share a budget; beyond it, requests wait for each other.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use ferry_engine::IDLE_THREAD;
use ferry_vfs::sync::lock;

use crate::threads::Threads;

/// A job of a thread, which has its own handler.
pub(crate) type Job<H> = Box<dyn FnOnce(&mut H) + Send>;

/// A queued job. Jobs of the same order run one at a time, in the order in which they came.
struct Waiting<H> {
    order: Option<u64>,
    job: Job<H>,
}

struct State<H> {
    waiting: VecDeque<Waiting<H>>,
    /// The orders of the running jobs.
    orders: Vec<u64>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl<H> State<H> {
    /// Removes and returns the next job that may run.
    fn next(&mut self) -> Option<Waiting<H>> {
        let may = |waiting: &Waiting<H>| waiting.order.is_none_or(|order| !self.orders.contains(&order));
        let at = self.waiting.iter().position(may)?;
        let next = self.waiting.remove(at)?;
        self.orders.extend(next.order);
        Some(next)
    }
}

/// A pool of threads; see the module.
pub(crate) struct Pool<H> {
    state: Mutex<State<H>>,
    changed: Condvar,
    make: Box<dyn Fn() -> H + Send + Sync>,
    threads: Arc<Threads>,
    /// The number of further threads that may be started.
    budget: Arc<AtomicIsize>,
    name: String,
}

impl<H: 'static> Pool<H> {
    /// Creates a pool without threads. `make` creates the handler of each thread, on that thread.
    pub(crate) fn new(
        name: String,
        threads: Arc<Threads>,
        budget: Arc<AtomicIsize>,
        make: impl Fn() -> H + Send + Sync + 'static,
    ) -> Self {
        let (waiting, orders) = (VecDeque::new(), Vec::new());
        let state = Mutex::new(State { waiting, orders, threads: 0, idle: 0, closed: false });
        Self { state, changed: Condvar::new(), make: Box::new(make), threads, budget, name }
    }

    /// Runs a job on another thread. Returns the job if no thread can be started.
    pub(crate) fn run(self: &Arc<Self>, order: Option<u64>, job: Job<H>) -> Result<(), Job<H>> {
        let mut state = lock(&self.state);
        state.waiting.push_back(Waiting { order, job });
        if state.idle < state.waiting.len() && self.may_grow(state.threads) {
            let pool = Arc::clone(self);
            match self.threads.spawn(self.name.clone(), move || pool.work()) {
                Ok(()) => state.threads += 1,
                Err(error) => {
                    self.budget.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!("cannot start a thread for slow requests: {error}");
                    if state.threads == 0
                        && let Some(waiting) = state.waiting.pop_back()
                    {
                        return Err(waiting.job);
                    }
                }
            }
        }
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Takes one from the budget. The first thread needs no permit, so queued jobs always run.
    fn may_grow(&self, threads: usize) -> bool {
        let less = |left: isize| (left > 0).then(|| left - 1);
        let taken = self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        if !taken && threads == 0 {
            // The thread returns it when it ends.
            self.budget.fetch_sub(1, Ordering::Relaxed);
        }
        taken || threads == 0
    }

    /// Makes threads end when the queue is empty.
    pub(crate) fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }

    fn work(&self) {
        let mut handler = (self.make)();
        let mut state = lock(&self.state);
        loop {
            if let Some(Waiting { order, job }) = state.next() {
                drop(state);
                // A job sends its own reply. A panic must not end the thread, which is counted.
                let _ = catch_unwind(AssertUnwindSafe(|| job(&mut handler)));
                state = lock(&self.state);
                state.orders.retain(|running| Some(*running) != order);
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let (woken, waited) = self.changed.wait_timeout(state, IDLE_THREAD).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            // A job that waits for another one of its order is run by the thread of that one.
            if waited.timed_out() && state.waiting.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        self.budget.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn pool(budget: isize) -> (Arc<Pool<()>>, Arc<Threads>, Arc<AtomicIsize>) {
        let (threads, budget) = (Arc::new(Threads::default()), Arc::new(AtomicIsize::new(budget)));
        let pool = Pool::new("pool".into(), Arc::clone(&threads), Arc::clone(&budget), || ());
        (Arc::new(pool), threads, budget)
    }

    fn run(pool: &Arc<Pool<()>>, order: Option<u64>, job: impl FnOnce() + Send + 'static) {
        assert!(pool.run(order, Box::new(move |()| job())).is_ok(), "a thread can be started");
    }

    /// Waits until all senders are dropped.
    fn wait(blocked: &Mutex<Receiver<()>>) {
        let _ = lock(blocked).recv();
    }

    #[test]
    fn slow_jobs_delay_no_others_within_the_budget() {
        let (pool, threads, budget) = pool(3);
        let (tell, told) = channel();
        let (keep, blocked) = channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        for _ in 0..2 {
            let blocked = Arc::clone(&blocked);
            run(&pool, None, move || wait(&blocked));
        }
        for number in 0..5 {
            let tell = tell.clone();
            run(&pool, None, move || tell.send(number).unwrap());
            assert_eq!(told.recv_timeout(SOON), Ok(number), "by the third thread");
        }
        assert!(lock(&pool.state).threads <= 3);
        let (third, last) = (Arc::clone(&blocked), tell.clone());
        run(&pool, None, move || wait(&third));
        run(&pool, None, move || last.send(9).unwrap());
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "it waits");
        drop(keep);
        assert_eq!(told.recv_timeout(SOON), Ok(9), "and is done in the end");
        pool.close();
        threads.join();
        assert_eq!(budget.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn jobs_keep_their_order_and_delay_no_others() {
        let (pool, threads, _) = pool(8);
        let (tell, told) = channel();
        let (keep, blocked) = channel::<()>();
        run(&pool, Some(7), move || wait(&Mutex::new(blocked)));
        for number in 0..3 {
            let tell = tell.clone();
            run(&pool, Some(7), move || tell.send(number).unwrap());
        }
        let other = tell.clone();
        run(&pool, Some(8), move || other.send(100).unwrap());
        assert_eq!(told.recv_timeout(SOON), Ok(100));
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "the others wait for the first");
        drop(keep);
        let rest: Vec<_> = (0..3).map(|_| told.recv_timeout(SOON).unwrap()).collect();
        assert_eq!(rest, [0, 1, 2]);
        pool.close();
        threads.join();
    }
}
