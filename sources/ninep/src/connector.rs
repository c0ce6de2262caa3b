//! The thread that opens a client's connections.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

/// The thread's only task.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The thread that opens and monitors all connections of a client, and starts their reader threads. It starts first, so
/// it may have privileges that the others lack, or fewer.
#[derive(Debug)]
pub struct Connector {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

impl Connector {
    /// Starts the thread. It calls `prepare`, and waits for a client
    /// ([`Client::connect_by`](crate::Client::connect_by)); without one, it ends when this is dropped.
    ///
    /// # Errors
    ///
    /// Those of starting a thread.
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

    /// Passes the task to the thread.
    pub(crate) fn start(self, job: Job) -> io::Result<JoinHandle<()>> {
        self.jobs.send(job).map_err(|_| has_ended())?;
        Ok(self.thread)
    }
}

/// Returns the error for a thread that has ended.
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
