//! The thread that commits periodically and keeps the first tier from filling up.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ferry_vfs::sync::lock;

use super::disk::Disk;

/// Stops its thread when dropped.
#[derive(Debug)]
pub(crate) struct CommitThread {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl CommitThread {
    /// Starts the thread.
    pub(crate) fn start(disk: Arc<Disk>, every: Duration) -> Self {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopped = Arc::clone(&stop);
        let run = move || {
            while !wait(&stopped, every) {
                // Blocks of files that are not loaded yet look free.
                if disk.log.is_mounting() {
                    continue;
                }
                if let Err(error) = disk.sync_log() {
                    // The log has reported the failure, and a retry does not help.
                    tracing::debug!("the regular commit failed: {error}");
                    continue;
                }
                disk.balance();
            }
        };
        let thread = std::thread::Builder::new().name("pmem-keeper".into()).spawn(run);
        let thread = thread.inspect_err(|error| {
            tracing::error!("cannot start the thread for regular commits ({error}): only fsync makes changes durable");
        });
        Self { stop, thread: thread.ok() }
    }
}

/// Waits for this time; returns `true` when the thread must stop.
fn wait((stop, changed): &(Mutex<bool>, Condvar), every: Duration) -> bool {
    let guard = lock(stop);
    let waited = changed.wait_timeout_while(guard, every, |stop| !*stop);
    *waited.unwrap_or_else(PoisonError::into_inner).0
}

impl Drop for CommitThread {
    fn drop(&mut self) {
        *lock(&self.stop.0) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for regular commits had panicked");
        }
    }
}
