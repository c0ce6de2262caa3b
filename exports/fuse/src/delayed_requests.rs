//! Requests that wait for a limit of rates ([`ferry_engine::RateLimiter`]), in the order of their arrival.
//!
//! They wait here and not in the kernel, so that FORGET and INTERRUPT, which come the same way, are not held up, and no
//! thread waits with each of them.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferry_engine::RateLimiter;
use ferry_vfs::Errno;
use ferry_vfs::sync::lock;

/// The requests of one reader of the kernel's queue, each with its message or the place of it.
#[derive(Debug)]
pub(crate) struct DelayedRequests<T> {
    waiting: Mutex<VecDeque<(u64, T)>>,
    /// How many there are, for a look without the lock.
    count: AtomicUsize,
}

impl<T> Default for DelayedRequests<T> {
    fn default() -> Self {
        Self { waiting: Mutex::default(), count: AtomicUsize::new(0) }
    }
}

impl<T> DelayedRequests<T> {
    /// Returns how many wait.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns whether the next request must wait: others do, or the limit is reached.
    pub(crate) fn must_wait(&self, limiter: &RateLimiter) -> bool {
        limiter.is_on() && (self.count() > 0 || limiter.wait().is_some())
    }

    /// Adds a request behind the others.
    pub(crate) fn push(&self, unique: u64, request: T) {
        let mut waiting = lock(&self.waiting);
        waiting.push_back((unique, request));
        self.count.store(waiting.len(), Ordering::Relaxed);
    }

    /// Removes the first request.
    pub(crate) fn pop(&self) -> Option<T> {
        let mut waiting = lock(&self.waiting);
        let first = waiting.pop_front();
        self.count.store(waiting.len(), Ordering::Relaxed);
        first.map(|(_, request)| request)
    }

    /// Removes the requests that the policy returns an error for, and returns them with it.
    pub(crate) fn end_by(&self, verdict: impl Fn(u64) -> Option<Errno>) -> Vec<(u64, T, Errno)> {
        let mut ended = Vec::new();
        let mut waiting = lock(&self.waiting);
        let mut index = 0;
        while let Some((unique, _)) = waiting.get(index) {
            match verdict(*unique) {
                Some(errno) => {
                    ended.extend(waiting.remove(index).map(|(unique, request)| (unique, request, errno)));
                }
                None => index += 1,
            }
        }
        self.count.store(waiting.len(), Ordering::Relaxed);
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_keep_their_order_and_can_be_ended() {
        let delayed = DelayedRequests::default();
        (1..=4).for_each(|unique| delayed.push(unique, unique * 10));
        assert_eq!((delayed.count(), delayed.pop()), (4, Some(10)));
        let ended = delayed.end_by(|unique| (unique == 3).then_some(Errno::INTR));
        assert_eq!(ended, [(3, 30, Errno::INTR)]);
        assert_eq!(delayed.end_by(|_| None), []);
        assert_eq!((delayed.pop(), delayed.pop(), delayed.pop(), delayed.count()), (Some(20), Some(40), None, 0));
    }
}
