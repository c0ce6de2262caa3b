//! Starts and joins the threads of one connection.

use std::io;
use std::sync::Mutex;
use std::thread::{Builder, JoinHandle};

use ferry_vfs::sync::lock;

/// All threads that serve one connection, so that they can be joined.
#[derive(Debug, Default)]
pub(crate) struct Threads(Mutex<Vec<JoinHandle<()>>>);

impl Threads {
    /// Starts a thread.
    pub(crate) fn spawn(&self, name: String, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut threads = lock(&self.0);
        threads.extract_if(.., |thread| thread.is_finished()).for_each(join);
        // Under the lock: a joiner of this thread must also find the threads that it has started.
        threads.push(Builder::new().name(name).spawn(body)?);
        Ok(())
    }

    /// Waits for all threads, and for those that they start.
    pub(crate) fn join(&self) {
        loop {
            let Some(thread) = lock(&self.0).pop() else { return };
            join(thread);
        }
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a worker panicked; its queues were no longer served");
    }
}
