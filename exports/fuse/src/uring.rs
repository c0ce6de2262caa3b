//! Requests by io_uring (Linux 6.14 and later): a ring and a worker for each CPU.
//!
//! A request of a task on CPU n comes through the ring of CPU n, whose worker is bound there and runs at once: the
//! hand-over costs a context switch and no wake-up of another CPU. Replies and the fetching of the next requests are
//! one call. Payloads lie in memory that is shared with the kernel for good.
//!
//! The kernel requires a queue for every possible CPU before it uses any, and once it has offered rings, requests wait
//! for them. So everything that can fail is done before the offer is accepted ([`Rings::prepare`]). If the registration
//! of entries still fails, the kernel withdraws the offer.

mod carrier;
mod kick;
mod memory;
mod queue;
mod ring;
mod ring_transfers;
mod worker;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;

use crate::connection::Connection;
use crate::machine::{NoUring, possible_cpus};
use ferry_engine::MonitoredWorker;
use queue::Queue;
use worker::{Order, ParkedWorker};

/// The rings of one connection.
pub(crate) struct Rings {
    queues: Vec<(Arc<Queue>, Arc<ParkedWorker>)>,
}

impl Rings {
    /// Makes rings, memory and threads for all CPUs.
    ///
    /// # Errors
    /// [`NoUring::Setup`]; nothing is left behind.
    pub(crate) fn prepare(connection: &Arc<Connection>, depth: usize) -> Result<Self, NoUring> {
        let mut rings = Self { queues: Vec::new() };
        for cpu in 0..possible_cpus() {
            let made = Queue::new(connection, cpu, depth).map(Arc::new);
            let made = made.and_then(|queue| queue.add_thread(0).map(|parked_worker| (queue, parked_worker)));
            match made {
                Ok(made) => rings.queues.push(made),
                Err(error) => {
                    rings.close();
                    return Err(NoUring::Setup { cpu, reason: describe(&error) });
                }
            }
        }
        Ok(rings)
    }

    /// Registers all entries after the reply to INIT, and serves.
    ///
    /// # Errors
    ///
    /// [`NoUring::Refused`]: the kernel uses /dev/fuse again.
    pub(crate) fn begin(&self) -> Result<(), NoUring> {
        let (told, outcomes) = channel();
        for (queue, parked_worker) in &self.queues {
            // If the thread has ended, no outcome comes.
            let _ = parked_worker.give(Order::Begin(queue.watch.first_owner(), told.clone()));
        }
        drop(told);
        for _ in &self.queues {
            let refused = match outcomes.recv() {
                Ok((_, Ok(()))) => continue,
                Ok((cpu, Err(error))) => NoUring::Refused { cpu, reason: describe(&error) },
                Err(_) => NoUring::Refused { cpu: 0, reason: "a worker ended early".into() },
            };
            self.close();
            return Err(refused);
        }
        for (queue, _) in &self.queues {
            let post: Arc<dyn MonitoredWorker> = queue.clone();
            queue.connection.monitor_handle.add(Arc::downgrade(&post));
            let queue = Arc::clone(queue);
            queue.connection.end.when_ended({
                let queue = Arc::downgrade(&queue);
                move || {
                    if let Some(queue) = queue.upgrade() {
                        queue.look();
                    }
                }
            });
        }
        Ok(())
    }

    /// CPUs that have a ring.
    pub(crate) fn count(&self) -> usize {
        self.queues.len()
    }

    /// Has all threads end.
    pub(crate) fn close(&self) {
        for (queue, parked_worker) in &self.queues {
            queue.close();
            parked_worker.look();
        }
    }
}

/// What an error of setting a ring up usually means.
fn describe(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => "no file descriptor is left; raise the limit (ulimit -n)".into(),
        Some(libc::ENOMEM) => "out of memory; use less of it with a smaller ring depth, or raise the limits of memory \
                               (ulimit -v, ulimit -l, the cgroup's)"
            .into(),
        Some(libc::EAGAIN) => "no thread can be had; raise the limit (ulimit -u, the cgroup's pids.max)".into(),
        Some(libc::EPERM | libc::EACCES) => "io_uring is forbidden (seccomp, or kernel.io_uring_disabled)".into(),
        Some(libc::ENOSYS) => "this kernel has no io_uring".into(),
        _ => error.to_string(),
    }
}
