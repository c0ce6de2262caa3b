//! Requests of all connections that wait for a limit of rates ([`ferry_engine::RateLimiter`]): clients in turn, each
//! client's in the order of their arrival.
//!
//! A request that waits takes no thread: one thread of the export waits for the limit, and hands requests over to the
//! others by an event. Until then a request is parked in its connection's table, so that Tflush cancels it at once.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use ferry_engine::RateLimiter;
use ferry_vfs::Cancellation;
use ferry_vfs::sync::{lock, wait};
use rustix::event::{EventfdFlags, eventfd};

use crate::peer::Peer;
use crate::shrink::shrink;

/// A request that waits.
pub(crate) struct DelayedRequest<T> {
    pub(crate) request: T,
    /// Set when the request is cancelled.
    pub(crate) gone: Arc<Cancellation>,
    /// The bytes that it is charged.
    pub(crate) cost_bytes: u64,
}

struct State<T> {
    /// The requests of each client.
    waiting: HashMap<Peer, VecDeque<DelayedRequest<T>>>,
    /// Those clients, in the order of their turns.
    turns: VecDeque<Peer>,
    /// Requests that may be served, or are cancelled.
    ready: VecDeque<T>,
    has_thread: bool,
    ended: bool,
}

impl<T> State<T> {
    fn push(&mut self, client: Peer, request: DelayedRequest<T>) {
        let waiting = self.waiting.entry(client).or_default();
        if waiting.is_empty() {
            self.turns.push_back(client);
        }
        waiting.push_back(request);
    }

    /// Takes the first request of the client whose turn it is.
    fn pop(&mut self) -> Option<DelayedRequest<T>> {
        let client = self.turns.pop_front()?;
        let waiting = self.waiting.get_mut(&client)?;
        let request = waiting.pop_front();
        if waiting.is_empty() {
            self.waiting.remove(&client);
            shrink(&mut self.waiting);
        } else {
            self.turns.push_back(client);
        }
        request
    }

    /// Takes the cancelled requests of a client.
    fn take_cancelled(&mut self, client: Peer) -> VecDeque<DelayedRequest<T>> {
        let Some(waiting) = self.waiting.remove(&client) else { return VecDeque::new() };
        let (gone, left) = waiting.into_iter().partition::<VecDeque<_>, _>(|request| request.gone.is_cancelled());
        if left.is_empty() {
            self.turns.retain(|other| *other != client);
        } else {
            self.waiting.insert(client, left);
        }
        gone
    }
}

/// See the module.
pub(crate) struct DelayedRequests<T> {
    limiter: Arc<RateLimiter>,
    state: Mutex<State<T>>,
    changed: Condvar,
    /// The number of waiting requests, readable without the lock.
    count: AtomicUsize,
    /// Counts the requests that are ready.
    wake_fd: OwnedFd,
}

impl<T> AsFd for DelayedRequests<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake_fd.as_fd()
    }
}

impl<T: Send + 'static> DelayedRequests<T> {
    pub(crate) fn new(limiter: &Arc<RateLimiter>) -> io::Result<Arc<Self>> {
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE)?;
        let state = State {
            waiting: HashMap::new(),
            turns: VecDeque::new(),
            ready: VecDeque::new(),
            has_thread: false,
            ended: false,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Ok(Arc::new(Self { limiter: Arc::clone(limiter), state, changed, count: AtomicUsize::new(0), wake_fd }))
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

    /// Adds a request behind the others of its client. Without a thread to wait with, it is ready at once.
    pub(crate) fn push(self: &Arc<Self>, client: Peer, request: DelayedRequest<T>) {
        let mut state = lock(&self.state);
        if !state.has_thread && !state.ended {
            let delayed = Arc::clone(self);
            let thread = std::thread::Builder::new().name("9p-limit".into()).spawn(move || delayed.release());
            let thread = thread.inspect_err(|error| tracing::warn!("9P requests do not wait for their limit: {error}"));
            state.has_thread = thread.is_ok();
        }
        if state.has_thread {
            state.push(client, request);
            self.count.fetch_add(1, Ordering::Relaxed);
            self.changed.notify_all();
        } else {
            self.limiter.charge(request.cost_bytes);
            self.make_ready(&mut state, request);
        }
    }

    fn make_ready(&self, state: &mut MutexGuard<'_, State<T>>, request: DelayedRequest<T>) {
        state.ready.push_back(request.request);
        // The counter has room for more than there are requests.
        let _ = rustix::io::write(&self.wake_fd, &1_u64.to_ne_bytes());
    }

    /// Makes requests ready when their time has come, until the end.
    fn release(&self) {
        let mut state = lock(&self.state);
        while !state.ended {
            if state.turns.is_empty() {
                state = wait(&self.changed, state);
            } else if let Some(time) = self.limiter.wait() {
                state = self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0;
            } else if let Some(request) = state.pop() {
                self.count.fetch_sub(1, Ordering::Relaxed);
                self.limiter.charge(request.cost_bytes);
                self.make_ready(&mut state, request);
            }
        }
    }

    /// Makes a client's cancelled requests ready, for a worker that drops them.
    pub(crate) fn release_cancelled(&self, client: Peer) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut state = lock(&self.state);
        let gone = state.take_cancelled(client);
        self.count.fetch_sub(gone.len(), Ordering::Relaxed);
        gone.into_iter().for_each(|request| self.make_ready(&mut state, request));
    }

    /// Takes a ready request, after an event. `None`: another thread has taken it.
    pub(crate) fn take(&self) -> Option<T> {
        rustix::io::read(&self.wake_fd, &mut [0; 8]).ok()?;
        lock(&self.state).ready.pop_front()
    }

    /// Ends the thread, and returns the requests that are left.
    pub(crate) fn end(&self) -> Vec<T> {
        let mut state = lock(&self.state);
        state.ended = true;
        let mut left: Vec<_> = state.ready.drain(..).collect();
        left.extend(std::iter::from_fn(|| state.pop()).map(|waiting| waiting.request));
        self.count.store(0, Ordering::Relaxed);
        self.changed.notify_all();
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_alternate_and_only_cancelled_requests_leave_the_queue() {
        let limiter = RateLimiter::new(&ferry_engine::TokenBucket::new(None));
        let delayed = DelayedRequests::new(&limiter).unwrap();
        let [one, other] = [Peer::User(1), Peer::User(2)];
        let gone: [_; 4] = std::array::from_fn(|_| Arc::<Cancellation>::default());
        let mut state = lock(&delayed.state);
        let order = [(one, "a"), (one, "b"), (one, "c"), (other, "x")];
        for ((client, request), gone) in order.into_iter().zip(&gone) {
            state.push(client, DelayedRequest { request, gone: Arc::clone(gone), cost_bytes: 0 });
        }
        gone[1].cancel();
        gone[3].cancel();
        let cancelled: Vec<_> = state.take_cancelled(one).into_iter().map(|request| request.request).collect();
        assert_eq!(cancelled, ["b"]);
        let left: Vec<_> = std::iter::from_fn(|| state.pop()).map(|request| request.request).collect();
        assert_eq!(left, ["a", "x", "c"]);
        state.push(other, DelayedRequest { request: "y", gone: Arc::clone(&gone[3]), cost_bytes: 0 });
        assert_eq!(state.take_cancelled(other).len(), 1);
        assert!(state.pop().is_none() && state.turns.is_empty() && state.waiting.is_empty());
    }
}
