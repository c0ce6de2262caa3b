//! The shared state of all workers of one mount.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use ferry_serve::{Server, SessionSlot, Share};

use crate::device::Device;
use crate::interrupted::Interrupted;
use crate::stats::AllCounters;
use ferry_engine::MonitorHandle;
use ferry_vfs::sync::lock;

/// One connection to the kernel.
pub(crate) struct Connection {
    pub(crate) device: Arc<Device>,
    /// Where it is mounted.
    pub(crate) mountpoint: PathBuf,
    pub(crate) share: Arc<Share>,
    pub(crate) session: Arc<SessionSlot>,
    pub(crate) counters: AllCounters,
    pub(crate) interrupted: Arc<Interrupted>,
    pub(crate) monitor_handle: MonitorHandle,
    /// The payload size of a ring entry, in bytes.
    pub(crate) ring_payload_bytes: usize,
    /// All readers use the descriptor that another process has, too.
    pub(crate) outlives_server: bool,
    pub(crate) end: Arc<ConnectionEnd>,
}

impl Connection {
    pub(crate) fn server(&self) -> Server {
        Server::new(Arc::clone(&self.share), Arc::clone(&self.session))
    }
}

/// The end of the connection, and the number of threads that still serve it.
#[derive(Default)]
pub(crate) struct ConnectionEnd {
    ended: AtomicBool,
    threads: Mutex<usize>,
    changed: Condvar,
    told: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
}

/// A serving thread, counted until dropped: the thread's last action, so that its descriptors are closed before.
pub(crate) struct ServingThread(Arc<ConnectionEnd>);

impl ConnectionEnd {
    /// Marks the connection as ended, by the kernel or by the export.
    pub(crate) fn mark_ended(&self) {
        self.ended.store(true, Ordering::Release);
        // Under the lock, so that no waiter misses it between its check and its wait.
        let threads = lock(&self.threads);
        self.changed.notify_all();
        drop(threads);
        for tell in std::mem::take(&mut *lock(&self.told)) {
            tell();
        }
    }

    /// Calls `tell` when the connection ends, or now if it has.
    pub(crate) fn when_ended(&self, tell: impl Fn() + Send + Sync + 'static) {
        let mut told = lock(&self.told);
        if self.is_ended() {
            drop(told);
            tell();
        } else {
            told.push(Box::new(tell));
        }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Waits until the connection has ended.
    pub(crate) fn wait(&self) {
        drop(self.changed.wait_while(lock(&self.threads), |_| !self.is_ended()));
    }

    /// Waits for this long; returns whether the connection has ended.
    pub(crate) fn wait_for(&self, patience: Duration) -> bool {
        drop(self.changed.wait_timeout_while(lock(&self.threads), patience, |_| !self.is_ended()));
        self.is_ended()
    }

    /// Waits until no thread serves; returns how many still do after `patience`.
    pub(crate) fn wait_for_threads(&self, patience: Duration) -> usize {
        let waited = self.changed.wait_timeout_while(lock(&self.threads), patience, |threads| *threads > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl ServingThread {
    pub(crate) fn new(connection: &Arc<Connection>) -> Self {
        *lock(&connection.end.threads) += 1;
        Self(Arc::clone(&connection.end))
    }
}

impl Drop for ServingThread {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a thread of the mount has panicked: the mount ends, because requests would wait for ever");
            self.0.mark_ended();
        }
        *lock(&self.0.threads) -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use ferry_serve::ShareOptions;

    use super::*;

    struct Nothing;

    impl ferry_vfs::FileSystem for Nothing {}

    impl Connection {
        /// A connection without a kernel that sends requests.
        pub(crate) fn without_kernel() -> Arc<Self> {
            let device = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
            Arc::new(Self {
                device: Arc::new(Device::new(device)),
                mountpoint: "/".into(),
                share: Arc::new(Share::new(Arc::new(Nothing), &ShareOptions::default())),
                session: Arc::new(SessionSlot::new(|_, _| {})),
                counters: Default::default(),
                interrupted: Arc::default(),
                monitor_handle: Default::default(),
                ring_payload_bytes: 4096,
                outlives_server: false,
                end: Arc::default(),
            })
        }
    }

    #[test]
    fn a_panic_of_a_serving_thread_ends_the_connection() {
        let end = Arc::new(ConnectionEnd::default());
        for panics in [false, true] {
            *lock(&end.threads) += 1;
            let present = ServingThread(Arc::clone(&end));
            let thread = std::thread::spawn(move || {
                assert!(!panics, "this panic is part of the test");
                drop(present);
            });
            assert_eq!(thread.join().is_err(), panics);
            assert_eq!(end.is_ended(), panics);
        }
        assert_eq!(end.wait_for_threads(Duration::ZERO), 0);
    }
}
