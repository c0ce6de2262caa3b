//! Threads that hash what one thread reads, such as an archive. Items return in the order in which they were given.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::format::error::{IoContext, Result};

/// A pool of threads with their queues.
pub(crate) struct Hashers<T> {
    lanes: Vec<(Sender<T>, Receiver<T>)>,
    given: usize,
    taken: usize,
}

impl<T: Send + 'static> Hashers<T> {
    /// Starts this many threads, which end when the pool is dropped.
    pub(crate) fn begin(threads: usize, work: fn(&mut T)) -> Result<Self> {
        let lane = |_| {
            let (wanted, given) = channel::<T>();
            let (done, taken) = channel();
            let hash = move || {
                for mut item in given {
                    work(&mut item);
                    // The pool is gone after another failure.
                    if done.send(item).is_err() {
                        return;
                    }
                }
            };
            thread::Builder::new().name("image-hasher".into()).spawn(hash).map(|_| (wanted, taken))
        };
        let lanes: std::io::Result<_> = (0..threads.max(1)).map(lane).collect();
        Ok(Self { lanes: lanes.doing("begin", "a thread that hashes")?, given: 0, taken: 0 })
    }

    /// Returns the number of items that keeps all threads busy during reads.
    pub(crate) fn room(&self) -> usize {
        2 * self.lanes.len()
    }

    /// Returns the number of items that were given and not taken back.
    pub(crate) fn len(&self) -> usize {
        self.given - self.taken
    }

    pub(crate) fn give(&mut self, item: T) {
        let (wanted, _) = &self.lanes[self.given % self.lanes.len()];
        // A thread ends early only by a panic, which `take` reports.
        let _ = wanted.send(item);
        self.given += 1;
    }

    /// Waits for the oldest item; `None` if there is none.
    pub(crate) fn take(&mut self) -> Option<T> {
        if self.len() == 0 {
            return None;
        }
        let (_, taken) = &self.lanes[self.taken % self.lanes.len()];
        self.taken += 1;
        Some(taken.recv().expect("a hasher does not panic"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_the_jobs() {
        for threads in [1, 3] {
            let mut hashers = Hashers::begin(threads, |number: &mut usize| {
                thread::sleep(std::time::Duration::from_micros(*number as u64 * 7919 % 500));
                *number *= 2;
            })
            .expect("threads can be had");
            assert!(hashers.take().is_none());
            let mut back = Vec::new();
            for number in 0..50 {
                hashers.give(number);
                if hashers.len() > hashers.room() {
                    back.extend(hashers.take());
                }
            }
            while let Some(number) = hashers.take() {
                back.push(number);
            }
            assert!(back == (0..50).map(|number| 2 * number).collect::<Vec<_>>() && hashers.len() == 0);
        }
    }
}
