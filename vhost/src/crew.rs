//! The threads of one worker: the one that owns its queues, those that take over from it, and those of its pool.

use std::sync::atomic::AtomicIsize;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};

use ferry_engine::{
    CallSnapshot, Mailbox, MonitorHandle, MonitoredWorker, Ownership, RatelimitedLog, TransfersError, Watch,
};

use crate::Device;
use crate::desk::{Desk, Slow};
use crate::pool::Pool;
use crate::threads::Threads;
use crate::worker::{Ended, Habits, Hands, Port, QueueHandler, Worker, WorkerOptions};

/// The port of a device's workers.
pub(crate) type PortOf<D> = Arc<Port<<<D as Device>::Handler as QueueHandler>::Message>>;

/// What the workers of one connection share.
pub(crate) struct Common {
    pub(crate) threads: Arc<Threads>,
    pub(crate) ratelimited_log: Arc<RatelimitedLog>,
    monitor_handle: MonitorHandle,
    slow: Arc<Slow>,
    /// Threads of pools that there may be beside those that there are.
    budget: Arc<AtomicIsize>,
}

impl Common {
    pub(crate) fn new(
        ratelimited_log: Arc<RatelimitedLog>,
        monitor_handle: MonitorHandle,
        spare_threads: usize,
    ) -> Self {
        let budget = Arc::new(AtomicIsize::new(isize::try_from(spare_threads).unwrap_or(isize::MAX)));
        Self { threads: Arc::default(), ratelimited_log, monitor_handle, slow: Arc::new(Slow::new()), budget }
    }
}

/// What each thread of a worker begins with.
struct Crew<D: Device> {
    device: Arc<D>,
    session: Arc<D::Session>,
    index: usize,
    port: PortOf<D>,
}

impl<D: Device> Crew<D> {
    fn handler(&self) -> D::Handler {
        self.device.handler(&self.session, self.index, Arc::clone(&self.port))
    }

    fn options(&self) -> WorkerOptions {
        self.device.worker_options(self.index)
    }

    /// Prepares the calling thread.
    fn hands(
        &self,
        desk: Option<Arc<Desk<D::Handler>>>,
        owner: Ownership,
    ) -> Result<Hands<D::Handler>, TransfersError> {
        let options = self.options();
        let hands = Hands::new(self.handler(), &options, desk, owner)?;
        if let Some(begun) = options.begun {
            begun();
        }
        Ok(hands)
    }

    /// Where other threads take over, if the device has any.
    fn desk(self: &Arc<Self>, common: &Common) -> Option<Arc<Desk<D::Handler>>> {
        if self.device.spare_threads() == 0 {
            return None;
        }
        let (crew, name) = (Arc::clone(self), self.options().name);
        let (threads, budget) = (Arc::clone(&common.threads), Arc::clone(&common.budget));
        let pool = Arc::new(Pool::new(name, threads, budget, move || crew.handler()));
        let desk = Arc::new_cyclic(|desk: &Weak<Desk<D::Handler>>| {
            let (desk, crew, threads) = (Weak::clone(desk), Arc::clone(self), Arc::clone(&common.threads));
            let start = move |seen| {
                let (desk, crew) = (desk.clone(), Arc::clone(&crew));
                threads.spawn(crew.options().name, move || {
                    if let Some(desk) = desk.upgrade() {
                        crew.take_over(desk, seen);
                    }
                })
            };
            Desk::new(Arc::clone(&self.port), common.monitor_handle.clone(), Arc::clone(&common.slow), pool, start)
        });
        common.monitor_handle.add(Arc::downgrade(&(Arc::clone(&desk) as Arc<dyn MonitoredWorker>)));
        Some(desk)
    }

    /// Goes on in the place of a thread that is blocked in this call, if it still is.
    fn take_over(&self, desk: Arc<Desk<D::Handler>>, seen: CallSnapshot) {
        let mut hands = match self.hands(Some(Arc::clone(&desk)), Watch::default().first_owner()) {
            Ok(hands) => hands,
            Err(error) => return tracing::error!("{error}"),
        };
        let Some(owner) = desk.watch.take(seen) else { return };
        hands.own(owner);
        if let Some(worker) = desk.take() {
            tracing::debug!("{}: a request waits, another thread goes on", self.options().name);
            serve(worker, hands, Some(&desk));
        }
    }
}

/// Serves until the end, or until another thread goes on.
fn serve<H: QueueHandler>(mut worker: Box<Worker<H>>, mut hands: Hands<H>, desk: Option<&Arc<Desk<H>>>) {
    match worker.adopt(&mut hands).and_then(|()| worker.run(&mut hands)) {
        Ok(Ended::Replaced) => return hands.leave(),
        Ok(Ended::Quit) => {}
        Err(error) => tracing::error!("{error}"),
    }
    if let Some(desk) = desk {
        desk.pool.close();
    }
}

/// Starts worker `index` of a device; `told` is told whether it serves.
///
/// # Errors
/// No descriptors, or no thread.
pub(crate) fn start<D: Device>(
    (device, session): (&Arc<D>, &Arc<D::Session>),
    index: usize,
    common: &Common,
    told: Sender<Result<(), TransfersError>>,
) -> std::io::Result<PortOf<D>> {
    let port = Arc::new(Port(Mailbox::new()?));
    let crew =
        Arc::new(Crew { device: Arc::clone(device), session: Arc::clone(session), index, port: Arc::clone(&port) });
    let desk = crew.desk(common);
    let ratelimited_log = Arc::clone(&common.ratelimited_log);
    common.threads.spawn(crew.options().name, move || {
        let owner = desk.as_ref().map_or_else(|| Watch::default().first_owner(), |desk| desk.watch.first_owner());
        let habits = Habits { gathers: crew.device.gathers(), registers_memory: crew.device.registers_memory() };
        let worker = Worker::new(Arc::clone(&crew.port), crew.options(), habits, crew.device.last(), ratelimited_log);
        match crew.hands(desk.clone(), owner) {
            Ok(hands) => {
                drop(crew);
                let _ = told.send(Ok(()));
                serve(worker, hands, desk.as_ref());
            }
            Err(error) => drop(told.send(Err(error))),
        }
    })?;
    Ok(port)
}
