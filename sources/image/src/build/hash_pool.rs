//! Threads that hash what one thread reads, such as an archive. What was given first comes back first.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::format::error::{IoContext, Result};

/// Threads, and what they have.
pub(crate) struct Hashers<T> {
    lanes: Vec<(Sender<T>, Receiver<T>)>,
    given: usize,
    taken: usize,
}

impl<T: Send + 'static> Hashers<T> {
    /// Begins so many threads, which end with this.
    pub(crate) fn begin(threads: usize, work: fn(&mut T)) -> Result<Self> {
        let lane = |_| {
            let (wanted, given) = channel::<T>();
            let (done, taken) = channel();
            let hash = move || {
                for mut item in given {
                    work(&mut item);
                    // Nobody listens any more once something else has failed.
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

    /// How many it can have so that all threads are busy while more is read.
    pub(crate) fn room(&self) -> usize {
        2 * self.lanes.len()
    }

    /// How many were given and not taken back.
    pub(crate) fn len(&self) -> usize {
        self.given - self.taken
    }

    pub(crate) fn give(&mut self, item: T) {
        let (wanted, _) = &self.lanes[self.given % self.lanes.len()];
        // A thread ends before us only by a panic, which the next one to take finds out.
        let _ = wanted.send(item);
        self.given += 1;
    }

    /// Waits for the one that was given first; `None` if there is none.
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
    fn what_was_given_first_comes_back_first() {
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
