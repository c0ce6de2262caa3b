//! The threads of one worker: the owner of its queues, the threads that take over from it, and its pool.

use std::sync::atomic::AtomicIsize;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferry_engine::{
    CallSnapshot, Mailbox, MonitorHandle, MonitoredWorker, Ownership, RatelimitedLog, TransfersError, Watch,
};

use crate::Device;
use crate::pool::Pool;
use crate::takeover::{SlowRequests, Takeover};
use crate::threads::Threads;
use crate::worker::{ExitReason, Port, QueueHandler, QueueOptions, Worker, WorkerContext, WorkerOptions};

/// The port of a device's workers.
pub(crate) type DevicePort<D> = Arc<Port<<<D as Device>::Handler as QueueHandler>::Message>>;

/// How often a thread that cannot be set up for a takeover retries.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The maximum number of threads that have taken over a worker's queues: all but one of them are blocked.
const TAKEOVERS_MAX: usize = 64;

/// The state that the workers of one connection share.
pub(crate) struct WorkerShared {
    pub(crate) threads: Arc<Threads>,
    pub(crate) ratelimited_log: Arc<RatelimitedLog>,
    monitor_handle: MonitorHandle,
    slow: Arc<SlowRequests>,
    /// The number of further pool threads that may be started.
    budget: Arc<AtomicIsize>,
}

impl WorkerShared {
    pub(crate) fn new(
        ratelimited_log: Arc<RatelimitedLog>,
        monitor_handle: MonitorHandle,
        spare_threads: usize,
    ) -> Self {
        let budget = Arc::new(AtomicIsize::new(isize::try_from(spare_threads).unwrap_or(isize::MAX)));
        Self { threads: Arc::default(), ratelimited_log, monitor_handle, slow: Arc::new(SlowRequests::new()), budget }
    }
}

/// The start parameters of a worker's threads.
struct WorkerThreads<D: Device> {
    device: Arc<D>,
    session: Arc<D::Session>,
    index: usize,
    port: DevicePort<D>,
}

impl<D: Device> WorkerThreads<D> {
    fn handler(&self) -> D::Handler {
        self.device.handler(&self.session, self.index, Arc::clone(&self.port))
    }

    fn options(&self) -> WorkerOptions {
        self.device.worker_options(self.index)
    }

    /// Prepares the calling thread.
    fn context(
        &self,
        takeover: Option<Arc<Takeover<D::Handler>>>,
        owner: Ownership,
    ) -> Result<WorkerContext<D::Handler>, TransfersError> {
        let options = self.options();
        let context = WorkerContext::new(self.handler(), &options, takeover, owner)?;
        if let Some(begun) = options.begun {
            begun();
        }
        Ok(context)
    }

    /// Creates the place for takeovers, if the device has spare threads.
    fn takeover(self: &Arc<Self>, common: &WorkerShared) -> Option<Arc<Takeover<D::Handler>>> {
        if self.device.spare_threads() == 0 {
            return None;
        }
        let (worker_threads, name) = (Arc::clone(self), self.options().name);
        let (threads, budget) = (Arc::clone(&common.threads), Arc::clone(&common.budget));
        let pool = Arc::new(Pool::new(name, threads, budget, move || worker_threads.handler()));
        let takeover = Arc::new_cyclic(|takeover: &Weak<Takeover<D::Handler>>| {
            let (takeover, worker_threads, threads) =
                (Weak::clone(takeover), Arc::clone(self), Arc::clone(&common.threads));
            // Those that run, each with its permit.
            let running = Arc::new(());
            let start = move |seen| {
                let (takeover, worker_threads, permit) =
                    (takeover.clone(), Arc::clone(&worker_threads), Arc::clone(&running));
                if Arc::strong_count(&running) > TAKEOVERS_MAX + 1 {
                    return Err(std::io::Error::other(format!("{TAKEOVERS_MAX} threads are blocked already")));
                }
                threads.spawn(worker_threads.options().name, move || {
                    if let Some(takeover) = takeover.upgrade() {
                        worker_threads.take_over(takeover, seen);
                    }
                    drop(permit);
                })
            };
            Takeover::new(Arc::clone(&self.port), common.monitor_handle.clone(), Arc::clone(&common.slow), pool, start)
        });
        common.monitor_handle.add(Arc::downgrade(&(Arc::clone(&takeover) as Arc<dyn MonitoredWorker>)));
        Some(takeover)
    }

    /// Takes over from a thread that is blocked in this call, if it still is.
    fn take_over(&self, takeover: Arc<Takeover<D::Handler>>, seen: CallSnapshot) {
        let mut is_logged = false;
        let mut context = loop {
            match self.context(Some(Arc::clone(&takeover)), Watch::default().first_owner()) {
                Ok(context) => break context,
                Err(error) if !is_logged => tracing::error!("{error}"),
                Err(_) => {}
            }
            is_logged = true;
            // Descriptors or memory may be available again before the call ends.
            std::thread::sleep(RETRY_INTERVAL);
            if takeover.watch.look() != seen {
                return;
            }
        };
        takeover.slow.sent_elsewhere();
        let Some(owner) = takeover.watch.take(seen) else {
            takeover.slow.served_elsewhere(None);
            return;
        };
        context.own(owner);
        // SAFETY: this thread owns the queues since it took them from the watch.
        if let Some(worker) = unsafe { takeover.take() } {
            tracing::debug!("{}: a request is blocked, another thread takes over", self.options().name);
            serve(worker, context, Some(&takeover));
        }
    }
}

/// Serves until the end, or until another thread takes over.
fn serve<H: QueueHandler>(
    mut worker: Box<Worker<H>>,
    mut context: WorkerContext<H>,
    takeover: Option<&Arc<Takeover<H>>>,
) {
    worker.adopt(&mut context);
    match worker.run(&mut context) {
        Ok(ExitReason::Replaced) => return context.leave(),
        Ok(ExitReason::Quit) => {}
        Err(error) => tracing::error!("{error}"),
    }
    if let Some(takeover) = takeover {
        takeover.pool.close();
    }
}

/// Starts worker `index` of a device; the result of its setup is sent to `outcome`.
pub(crate) fn start<D: Device>(
    (device, session): (&Arc<D>, &Arc<D::Session>),
    index: usize,
    common: &WorkerShared,
    outcome: Sender<Result<(), TransfersError>>,
) -> std::io::Result<DevicePort<D>> {
    let port = Arc::new(Port(Mailbox::new()?));
    let worker_threads = Arc::new(WorkerThreads {
        device: Arc::clone(device),
        session: Arc::clone(session),
        index,
        port: Arc::clone(&port),
    });
    let takeover = worker_threads.takeover(common);
    let ratelimited_log = Arc::clone(&common.ratelimited_log);
    common.threads.spawn(worker_threads.options().name, move || {
        let owner =
            takeover.as_ref().map_or_else(|| Watch::default().first_owner(), |takeover| takeover.watch.first_owner());
        let queue_options = QueueOptions {
            batches: worker_threads.device.batches_requests(),
            registers_memory: worker_threads.device.registers_memory(),
        };
        let worker = Worker::new(
            Arc::clone(&worker_threads.port),
            worker_threads.options(),
            queue_options,
            worker_threads.device.last(),
            ratelimited_log,
        );
        match worker_threads.context(takeover.clone(), owner) {
            Ok(context) => {
                drop(worker_threads);
                let _ = outcome.send(Ok(()));
                serve(worker, context, takeover.as_ref());
            }
            Err(error) => drop(outcome.send(Err(error))),
        }
    })?;
    Ok(port)
}
