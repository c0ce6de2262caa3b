//! The thread that makes a client's connections.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

/// What it does, once.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The thread that makes all connections of a client, looks after them, and begins the threads that read replies. It is begun first: so it
/// can have a right that the others do without, or be held to less than they are.
#[derive(Debug)]
pub struct Connector {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

impl Connector {
    /// Begins it. It calls `prepare`, and waits for a client ([`Client::connect_by`](crate::Client::connect_by)); if there is none,
    /// it ends when this is dropped.
    ///
    /// # Errors
    /// There can be no more threads.
    pub fn begin(prepare: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let (jobs, next): (_, Receiver<Job>) = mpsc::channel();
        let work = move || {
            prepare();
            if let Ok(job) = next.recv() {
                job();
            }
        };
        let thread = thread::Builder::new().name("9p-keeper".into()).spawn(work)?;
        Ok(Self { jobs, thread })
    }

    /// Has it do this, and no more.
    pub(crate) fn start(self, job: Job) -> io::Result<JoinHandle<()>> {
        self.jobs.send(job).map_err(|_| has_ended())?;
        Ok(self.thread)
    }
}

/// The thread is not there any more.
pub(crate) fn has_ended() -> io::Error {
    io::Error::other("the thread that connects has ended")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn it_prepares_and_ends_with_or_without_a_job() {
        let count = Arc::new(AtomicU32::new(0));
        let adds = |number| {
            let count = Arc::clone(&count);
            move || {
                count.fetch_add(number, Ordering::Relaxed);
            }
        };
        let busy = Connector::begin(adds(1)).unwrap();
        busy.start(Box::new(adds(10))).unwrap().join().unwrap();
        let Connector { jobs, thread } = Connector::begin(adds(100)).unwrap();
        drop(jobs);
        thread.join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 111);
    }
}
