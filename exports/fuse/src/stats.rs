//! Statistics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ferry_vfs::sync::lock;

/// What was served so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stats {
    /// Requests.
    pub requests: u64,
    /// Bytes of file data that went to the kernel (READ).
    pub read_bytes: u64,
    /// Bytes of file data that came from the kernel (WRITE).
    pub written_bytes: u64,
    /// System calls that the workers made for them, without those inside the source.
    pub system_calls: u64,
    /// Notifications sent.
    pub notifications: u64,
    /// Bytes of requests and replies that went through /dev/fuse, with their headers.
    pub message_bytes: u64,
}

/// The counters of one worker, their only writer: no locked instruction, and a cache line of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counters {
    pub(crate) requests: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) system_calls: Counter,
    pub(crate) notifications: Counter,
    pub(crate) message_bytes: Counter,
}

/// A counter that one thread at a time increases and all threads read.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// All counters of an export, also of workers that have ended.
#[derive(Debug, Default)]
pub(crate) struct AllCounters(Mutex<Vec<Arc<Counters>>>);

impl AllCounters {
    /// Counters for one more worker, or those of one that has ended.
    pub(crate) fn lend(&self) -> Arc<Counters> {
        let mut all = lock(&self.0);
        // Only this reference is left after the end of a worker.
        if let Some(free) = all.iter().find(|counters| Arc::strong_count(counters) == 1) {
            return Arc::clone(free);
        }
        let counters = Arc::new(Counters::default());
        all.push(Arc::clone(&counters));
        counters
    }

    /// The sum of all.
    pub(crate) fn sum(&self) -> Stats {
        let all = lock(&self.0);
        all.iter().fold(Stats::default(), |sum, one| Stats {
            requests: sum.requests + one.requests.get(),
            read_bytes: sum.read_bytes + one.read_bytes.get(),
            written_bytes: sum.written_bytes + one.written_bytes.get(),
            system_calls: sum.system_calls + one.system_calls.get(),
            notifications: sum.notifications + one.notifications.get(),
            message_bytes: sum.message_bytes + one.message_bytes.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_outlive_their_worker_and_are_lent_again() {
        let all = AllCounters::default();
        let first = all.lend();
        first.requests.add(2);
        drop(first);
        let again = all.lend();
        again.requests.add(3);
        let second = all.lend();
        second.requests.add(10);
        assert_eq!(all.0.lock().unwrap().len(), 2);
        assert_eq!(all.sum(), Stats { requests: 15, ..Stats::default() });
    }
}
