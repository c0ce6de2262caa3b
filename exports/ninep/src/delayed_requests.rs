//! Requests of all connections that wait for a limit of rates ([`ferry_engine::RateLimiter`]), in the order of their arrival.
//!
//! A request that waits takes no thread: one thread of the export waits for the limit, and hands requests over to the
//! others by an event. Until then a request is parked in its connection's table, so that Tflush cancels it at once.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ferry_engine::RateLimiter;
use ferry_vfs::sync::{lock, wait};
use rustix::event::{EventfdFlags, eventfd};

/// A request that waits.
pub(crate) struct DelayedRequest<T> {
    pub(crate) request: T,
    /// Set when the request is cancelled.
    pub(crate) gone: Arc<AtomicBool>,
    /// The bytes that it is charged.
    pub(crate) cost_bytes: u64,
}

struct State<T> {
    waiting: VecDeque<DelayedRequest<T>>,
    /// They need not wait any longer, or are cancelled.
    ready: VecDeque<T>,
    has_thread: bool,
    ended: bool,
}

/// See the module.
pub(crate) struct DelayedRequests<T> {
    limiter: Arc<RateLimiter>,
    state: Mutex<State<T>>,
    changed: Condvar,
    /// How many wait, for a look without the lock.
    count: AtomicUsize,
    /// Counts the requests that are ready.
    bell: OwnedFd,
}

impl<T> AsFd for DelayedRequests<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl<T: Send + 'static> DelayedRequests<T> {
    pub(crate) fn new(limiter: &Arc<RateLimiter>) -> io::Result<Arc<Self>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE)?;
        let state = State { waiting: VecDeque::new(), ready: VecDeque::new(), has_thread: false, ended: false };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Ok(Arc::new(Self { limiter: Arc::clone(limiter), state, changed, count: AtomicUsize::new(0), bell }))
    }

    /// Returns whether the next request must wait. If not, it is charged.
    pub(crate) fn must_wait(&self, cost_bytes: u64) -> bool {
        if !self.limiter.is_on() {
            return self.count.load(Ordering::Relaxed) > 0;
        }
        let waits = self.count.load(Ordering::Relaxed) > 0 || self.limiter.wait().is_some();
        if !waits {
            self.limiter.charge(cost_bytes);
        }
        waits
    }

    /// Adds a request behind the others. Without a thread to wait with, it is ready at once.
    pub(crate) fn push(self: &Arc<Self>, request: DelayedRequest<T>) {
        let mut state = lock(&self.state);
        if !state.has_thread && !state.ended {
            let delayed = Arc::clone(self);
            let thread = std::thread::Builder::new().name("9p-limit".into()).spawn(move || delayed.release());
            let thread = thread.inspect_err(|error| tracing::warn!("9P requests do not wait for their limit: {error}"));
            state.has_thread = thread.is_ok();
        }
        if state.has_thread {
            state.waiting.push_back(request);
            self.note_count(&state);
            self.changed.notify_all();
        } else {
            self.limiter.charge(request.cost_bytes);
            self.make_ready(&mut state, request);
        }
    }

    fn note_count(&self, state: &State<T>) {
        self.count.store(state.waiting.len(), Ordering::Relaxed);
    }

    fn make_ready(&self, state: &mut MutexGuard<'_, State<T>>, request: DelayedRequest<T>) {
        state.ready.push_back(request.request);
        self.note_count(state);
        // The counter has room for more than there are requests.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Makes requests ready when their time has come, until the end.
    fn release(&self) {
        let mut state = lock(&self.state);
        while !state.ended {
            if state.waiting.is_empty() {
                state = wait(&self.changed, state);
            } else if let Some(time) = self.limiter.wait() {
                state = self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0;
            } else if let Some(request) = state.waiting.pop_front() {
                self.limiter.charge(request.cost_bytes);
                self.make_ready(&mut state, request);
            }
        }
    }

    /// Makes the cancelled requests ready, for a worker that drops them.
    pub(crate) fn release_cancelled(&self) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut state = lock(&self.state);
        let (gone, waiting) = std::mem::take(&mut state.waiting)
            .into_iter()
            .partition::<VecDeque<_>, _>(|request| request.gone.load(Ordering::Acquire));
        state.waiting = waiting;
        gone.into_iter().for_each(|request| self.make_ready(&mut state, request));
        self.note_count(&state);
    }

    /// Takes a ready request, after an event. `None`: another thread has taken it.
    pub(crate) fn take(&self) -> Option<T> {
        rustix::io::read(&self.bell, &mut [0; 8]).ok()?;
        lock(&self.state).ready.pop_front()
    }

    /// Ends the thread, and returns the requests that are left.
    pub(crate) fn end(&self) -> Vec<T> {
        let mut state = lock(&self.state);
        state.ended = true;
        let State { waiting, ready, .. } = &mut *state;
        let left = waiting.drain(..).map(|waiting| waiting.request).chain(ready.drain(..)).collect();
        self.note_count(&state);
        self.changed.notify_all();
        left
    }
}
