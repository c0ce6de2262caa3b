//! A worker: the thread that serves one or more virtqueues.

mod commands;
mod control;
mod handler;
mod running;
mod serve;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use ferry_engine::{BusyPoll, IoMode, Ownership, PollLimit, PoolTransfer, RatelimitedLog, Transfers, TransfersError};
use ferry_vfs::Backing;

use crate::QUEUE_SIZE_MAX;
use crate::batch::{self, Batcher};
use crate::chain::Chain;
use crate::coalesce::Coalescer;
use crate::io::{ServedChain, finish};
use crate::memory::Memory;
use crate::slots::Slots;
use crate::takeover::{Completion, Takeover};

pub use commands::Port;
use commands::PortReceiver;
pub(crate) use commands::{Command, Control, Start, StoppedQueue};
pub use handler::{ChainState, Placement, QueueHandler};
use running::Running;

/// The options of a worker.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The thread's name; 15 bytes are visible.
    pub name: String,
    /// How transfers are made.
    pub io: IoMode,
    /// How long a worker polls before it sleeps.
    pub poll: PollLimit,
    /// Called by the thread after its setup, before it takes the first request.
    pub begun: Option<fn()>,
}

/// Options of the queues of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueOptions {
    pub(crate) batches: bool,
    pub(crate) registers_memory: bool,
}

/// The state of a serving thread, which it keeps when another one takes the queues over.
pub(crate) struct WorkerContext<H: QueueHandler> {
    handler: H,
    transfers: Transfers,
    busy_poll: BusyPoll,
    /// Where the queues are left while the handler runs; `None`: they stay with the thread.
    takeover: Option<Arc<Takeover<H>>>,
    owner: Ownership,
}

/// Why a thread stopped serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExitReason {
    /// On [`Control::Quit`].
    Quit,
    /// Another thread has the queues.
    Replaced,
}

/// The queues of a worker and their chains.
pub(crate) struct Worker<H: QueueHandler> {
    port: Arc<Port<H::Message>>,
    /// Dropped with the last owner.
    _receiver: PortReceiver<H::Message>,
    last: Option<Arc<Backing>>,
    /// The chain that is being served.
    serving: Option<(usize, Chain)>,
    batcher: Batcher,
    coalescer: Coalescer,
    queue_options: QueueOptions,
    running: Vec<Running>,
    /// Where queues stopped; a queue that starts there again still has its chains.
    stopped: Vec<(usize, u32)>,
    slots: Slots<H::Message>,
    /// Replies that came while their queue was stopped.
    late: Vec<(u64, H::Message)>,
    chain: Chain,
    spare: Vec<Chain>,
    /// The number of parked chains, also of those that other threads have.
    parked: Arc<AtomicUsize>,
    name: String,
    ratelimited_log: Arc<RatelimitedLog>,
    quit: bool,
}

impl<H: QueueHandler> WorkerContext<H> {
    /// Prepares the calling thread to serve.
    pub(crate) fn new(
        handler: H,
        options: &WorkerOptions,
        takeover: Option<Arc<Takeover<H>>>,
        owner: Ownership,
    ) -> Result<Self, TransfersError> {
        let mut transfers = Transfers::new(options.io, u32::from(QUEUE_SIZE_MAX))?;
        if takeover.is_some() {
            transfers.leave_remote_to_pool();
        }
        Ok(Self { handler, transfers, busy_poll: BusyPoll::new(options.poll.clone()), takeover, owner })
    }

    /// Makes this thread the owner of the queues.
    pub(crate) fn own(&mut self, owner: Ownership) {
        self.owner = owner;
    }

    fn accept(&mut self, token: u64, chain: &Chain) {
        let handler = &mut self.handler;
        let _ = catch_unwind(AssertUnwindSafe(|| handler.accept(token, chain)));
    }

    fn end_batch(&mut self) {
        let handler = &mut self.handler;
        let _ = catch_unwind(AssertUnwindSafe(|| handler.end_batch()));
    }

    /// Hands over the completion of the chain that was being served, which lies in this memory: another thread has
    /// the queues.
    fn hand_back(&mut self, token: u64, chain: Chain, _memory: &Arc<Memory>, served: ServedChain) {
        let Some(takeover) = self.takeover.clone() else { return };
        // SAFETY: the memory is kept until this returns.
        let state = unsafe { served.finish(&mut self.handler, &chain, token) };
        takeover.complete(Completion::Served { token, chain, state });
    }

    /// Finishes the transfers that were begun here: another thread has the queues.
    pub(crate) fn leave(mut self) {
        let Some(takeover) = self.takeover.clone() else { return };
        loop {
            self.transfers.flush();
            while let Some((token, outcome)) = self.transfers.next_done() {
                let pending = self.handler.detach(token);
                takeover.complete(Completion::Transferred { token, outcome, pending });
            }
            while let Some(PoolTransfer { token, mut transfer }) = self.transfers.next_for_pool() {
                let pending = self.handler.detach(token);
                // SAFETY: the owner keeps the memory until the completion is handed over.
                let outcome = unsafe { transfer.run() };
                takeover.complete(Completion::Transferred { token, outcome, pending });
            }
            if self.transfers.unfinished() == 0 {
                break;
            }
            if let Err(error) = self.transfers.sleep() {
                tracing::error!("abandoning transfers: {error}");
                break;
            }
        }
        self.end_batch();
    }
}

impl<H: QueueHandler> Worker<H> {
    pub(crate) fn new(
        port: Arc<Port<H::Message>>,
        options: WorkerOptions,
        queue_options: QueueOptions,
        last: Option<Arc<Backing>>,
        ratelimited_log: Arc<RatelimitedLog>,
    ) -> Box<Self> {
        Box::new(Self {
            _receiver: PortReceiver(Arc::clone(&port)),
            port,
            last,
            serving: None,
            batcher: Batcher::new(options.poll, batch::BOUND_MAX),
            coalescer: Coalescer::new(),
            queue_options,
            running: Vec::new(),
            stopped: Vec::new(),
            slots: Slots::default(),
            late: Vec::new(),
            chain: Chain::default(),
            spare: Vec::new(),
            parked: Arc::default(),
            name: options.name,
            ratelimited_log,
            quit: false,
        })
    }

    /// Registers the queues with the calling thread. The chain in which the previous owner is blocked stays with that
    /// thread.
    pub(crate) fn adopt(&mut self, context: &mut WorkerContext<H>) {
        context.transfers.watch(self.port.0.wake());
        if let Some(last) = &self.last {
            context.transfers.hold(last);
        }
        for running in &mut self.running {
            running.watch = context.transfers.watch(Arc::clone(&running.kick));
        }
        if let Some((queue, stub)) = self.serving.take()
            && let Some(running) = self.running.iter_mut().find(|running| running.queue == queue)
        {
            // That chain has the next token.
            self.slots.next_token();
            self.slots.put_away(queue, stub, running.ring.memory());
            running.out += 1;
        }
    }

    /// Serves until [`Control::Quit`], or until another thread has the queues.
    pub(crate) fn run(mut self: Box<Self>, context: &mut WorkerContext<H>) -> Result<ExitReason, TransfersError> {
        // For exact pauses: the default slack adds 50 us.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        while !self.quit {
            if self.port.0.is_filled() {
                self.read_commands(context);
            }
            self.wait_for_batch(context);
            let took;
            (self, took) = match self.take_batch(context) {
                Some(served) => served,
                None => return Ok(ExitReason::Replaced),
            };
            context.end_batch();
            self = match self.flush(context) {
                Some(worker) => worker,
                None => return Ok(ExitReason::Replaced),
            };
            self.finish_transfers(context);
            self.publish();
            let is_done = self.slots.active() == 0 && !self.quit && !self.port.0.is_filled();
            // A batching worker alternates with the driver already.
            if is_done
                && !self.queue_options.batches
                && let Some(pause) = self.coalescer.delay_after(took)
            {
                context.busy_poll.sleep_for(pause);
            } else if took == 0 && !self.quit && (self.delay_left().is_some() || !self.poll(context)) {
                self.sleep(context)?;
            }
        }
        self.drain(context);
        Ok(ExitReason::Quit)
    }

    /// Makes a call that may block, with the queues left for another thread. Returns no queues if another thread has
    /// taken them.
    fn with_takeover<T>(
        self: Box<Self>,
        context: &mut WorkerContext<H>,
        call: impl FnOnce(&mut H, &mut Transfers) -> T,
    ) -> (Option<Box<Self>>, T) {
        let WorkerContext { handler, transfers, takeover, owner, .. } = context;
        let Some(takeover) = takeover else { return (Some(self), call(handler, transfers)) };
        takeover.put(self);
        takeover.watch.enter(owner);
        takeover.monitor_handle.ring();
        let outcome = call(handler, transfers);
        if takeover.watch.leave(owner) {
            // SAFETY: this thread owns the queues.
            return (unsafe { takeover.take() }, outcome);
        }
        takeover.slow.served_elsewhere(None);
        (None, outcome)
    }

    /// Starts the transfers. Some are inline copies, which take long on a file system that throttles writers.
    fn flush(self: Box<Self>, context: &mut WorkerContext<H>) -> Option<Box<Self>> {
        if !context.transfers.has_queued() {
            context.transfers.flush();
            return Some(self);
        }
        let flush = |_: &mut H, transfers: &mut Transfers| {
            transfers.flush();
        };
        self.with_takeover(context, flush).0
    }

    /// Waits for more requests while the driver has completions to process, and the device is idle or busy enough.
    fn wait_for_batch(&mut self, context: &mut WorkerContext<H>) {
        let active = self.slots.active();
        let is_device_short = active > 0 && active < batch::DEVICE_BUSY_FROM;
        if !self.queue_options.batches || is_device_short || !context.busy_poll.is_free() {
            return;
        }
        let Self { batcher, running, port, .. } = self;
        let transfers = &mut context.transfers;
        batcher.wait(|| {
            let mut all = None;
            for running in running.iter().filter(|running| running.has_work()) {
                let at = u32::from(running.ring.used_event_if_behind(batch::COMPLETIONS_MIN, active > 0)?);
                all = Some(all.unwrap_or(0u32).wrapping_add(at));
            }
            let waits = all.filter(|_| !port.0.is_filled() && !transfers.has_events());
            if waits.is_some() {
                transfers.submit();
            }
            waits
        });
    }

    /// Processes the completions of other threads.
    fn take_completions(&mut self, context: &mut WorkerContext<H>) {
        let Some(takeover) = context.takeover.clone() else { return };
        for completion in takeover.completions() {
            match completion {
                Completion::Served { token, chain, state: ChainState::Done(written) } => {
                    if let Some((queue, _, memory)) = self.slots.take(token) {
                        self.push_used(queue, chain, &memory, context.handler.complete(token, written));
                    }
                }
                Completion::Served { token, chain, state } => {
                    self.slots.fill(token, chain, state == ChainState::Parked)
                }
                Completion::Transferred { token, outcome, pending } => {
                    if let Some(pending) = pending {
                        context.handler.attach(token, pending);
                    }
                    self.finish_transfer(context, token, outcome);
                }
            }
        }
        self.deliver_replies(context);
    }

    fn finish_transfers(&mut self, context: &mut WorkerContext<H>) {
        while let Some((token, outcome)) = context.transfers.next_done() {
            self.finish_transfer(context, token, outcome);
        }
        while let Some(transfer) = context.transfers.next_for_pool() {
            self.send_to_pool(context, transfer);
        }
    }

    fn finish_transfer(&mut self, context: &mut WorkerContext<H>, token: u64, outcome: std::io::Result<usize>) {
        let Some((queue, chain, memory)) = self.slots.take(token) else { return };
        let written = finish(&mut context.handler, &chain, |handler| handler.finish_transfer(token, &chain, outcome));
        self.push_used(queue, chain, &memory, context.handler.complete(token, written));
    }

    fn running_mut(&mut self, queue: usize) -> Option<&mut Running> {
        self.running.iter_mut().find(|running| running.queue == queue)
    }

    fn push_used(&mut self, queue: usize, chain: Chain, memory: &Memory, written: u32) {
        if let Some(running) = self.running_mut(queue) {
            running.push(&chain, Some(memory), written);
            running.out -= 1;
        }
        self.spare.push(chain);
    }

    fn publish(&mut self) {
        for running in &mut self.running {
            let wanted = running.ring.publish();
            running.mark_ring();
            if (wanted || running.owes_signal)
                && let Some(call) = &running.call
            {
                running.owes_signal = false;
                // A full eventfd is signalled already.
                let _ = rustix::io::write(call, &1u64.to_ne_bytes());
            }
        }
    }

    fn poll(&mut self, context: &mut WorkerContext<H>) -> bool {
        let Self { port, running, batcher, queue_options, .. } = self;
        let WorkerContext { transfers, busy_poll, .. } = context;
        let has_work = || port.0.is_filled() || running.iter().any(Running::has_work);
        if busy_poll.will_poll() {
            transfers.submit();
        }
        let found = busy_poll.poll(|| has_work() || transfers.has_events());
        if found && queue_options.batches && transfers.in_flight() >= batch::DEVICE_BUSY_FROM && busy_poll.is_free() {
            batcher.wait_for_peers(has_work);
        }
        found
    }

    /// Returns the longest sleep, if queues are delayed.
    fn delay_left(&self) -> Option<Duration> {
        self.running.iter().filter_map(Running::delay_left).min()
    }

    fn sleep(&mut self, context: &mut WorkerContext<H>) -> Result<(), TransfersError> {
        let delay = self.delay_left();
        // Without short-circuiting: kicks are enabled for all queues.
        let wanted = self.running.iter_mut().filter(|running| !running.broken && running.delay_left().is_none());
        if wanted.map(|running| running.want_kicks(true)).fold(false, |one, other| one | other) {
            for running in &mut self.running {
                running.want_kicks(false);
            }
            return Ok(());
        }
        // The port's eventfd is watched, so a command that arrived since the last check ends the sleep at once.
        let WorkerContext { transfers, busy_poll, .. } = context;
        busy_poll.sleep(|| transfers.sleep_at_most(delay))?;
        let is_spurious = delay.is_none() && !self.port.0.is_filled() && !transfers.has_done();
        let is_spurious = is_spurious && !self.running.iter().any(Running::has_work);
        for running in &mut self.running {
            running.want_kicks(false);
            if is_spurious {
                running.count_spurious_kick(&self.name, &self.ratelimited_log);
            }
        }
        Ok(())
    }

    fn deliver(&mut self, context: &mut WorkerContext<H>, token: u64, message: H::Message) {
        self.slots.add_reply(token, message);
        self.deliver_replies(context);
    }

    /// Completes chains by the received replies.
    fn deliver_replies(&mut self, context: &mut WorkerContext<H>) {
        while let Some((token, message)) = self.slots.next_reply() {
            let Some(queue) = self.slots.queue(token) else { continue };
            if !self.running.iter().any(|running| running.queue == queue) {
                self.late.push((token, message));
            } else if let Some((queue, chain, memory)) = self.slots.take(token) {
                let written = finish(&mut context.handler, &chain, |handler| handler.deliver(&chain, message));
                self.push_used(queue, chain, &memory, written);
            }
        }
    }
}
