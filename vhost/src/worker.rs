//! A worker: the thread that serves one or more virtqueues.

mod commands;
mod control;
mod handler;
mod running;
mod serve;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
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
use crate::takeover::{Returned, Takeover};

pub use commands::Port;
use commands::PortReceiver;
pub(crate) use commands::{Command, Control, Start, Stopped};
pub use handler::{Answer, Placement, QueueHandler};
use running::Running;

/// How a worker is to work.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The thread's name, at most 15 bytes of which show.
    pub name: String,
    /// How transfers are made.
    pub io: IoMode,
    /// The longest that a worker looks for work before it sleeps.
    pub poll: PollLimit,
    /// What the thread calls once all that it needs is there, before it takes the first request.
    pub begun: Option<fn()>,
}

/// Options of the queues of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueOptions {
    pub(crate) gathers: bool,
    pub(crate) registers_memory: bool,
}

/// What a thread serves with, and keeps when another one takes the queues over.
pub(crate) struct WorkerContext<H: QueueHandler> {
    handler: H,
    transfers: Transfers,
    busy_poll: BusyPoll,
    /// Where the queues lie while the handler runs; `None`: they stay with their thread.
    takeover: Option<Arc<Takeover<H>>>,
    owner: Ownership,
}

/// Why a thread stopped serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It was told to.
    Quit,
    /// Another thread has the queues.
    Replaced,
}

/// The queues of a worker, and what is under way in them.
pub(crate) struct Worker<H: QueueHandler> {
    port: Arc<Port<H::Message>>,
    /// Ends with the last owner.
    _receiver: PortReceiver<H::Message>,
    last: Option<Arc<Backing>>,
    /// The chain that is being served.
    serving: Option<(usize, Chain)>,
    batcher: Batcher,
    coalescer: Coalescer,
    queue_options: QueueOptions,
    running: Vec<Running>,
    /// Where queues stopped; starting there again means that their chains are still out.
    stopped: Vec<(usize, u32)>,
    slots: Slots<H::Message>,
    /// Replies that came while their queue was stopped.
    late: Vec<(u64, H::Message)>,
    chain: Chain,
    spare: Vec<Chain>,
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

    /// From now on the queues are this thread's.
    pub(crate) fn own(&mut self, owner: Ownership) {
        self.owner = owner;
    }

    fn accept(&mut self, token: u64, chain: &Chain) {
        let handler = &mut self.handler;
        let _ = catch_unwind(AssertUnwindSafe(|| handler.accept(token, chain)));
    }

    fn batch_end(&mut self) {
        let handler = &mut self.handler;
        let _ = catch_unwind(AssertUnwindSafe(|| handler.batch_end()));
    }

    /// Another thread has the queues: hands in what becomes of the chain that was being served, which lies in this memory.
    fn hand_back(&mut self, token: u64, chain: Chain, _memory: &Arc<Memory>, served: ServedChain) {
        let Some(takeover) = self.takeover.clone() else { return };
        // SAFETY: the memory is kept until this returns.
        let answer = unsafe { served.finish(&mut self.handler, &chain, token) };
        takeover.give_back(Returned::Served { token, chain, answer });
    }

    /// Another thread has the queues: ends the transfers that were begun here.
    pub(crate) fn leave(mut self) {
        let Some(takeover) = self.takeover.clone() else { return };
        loop {
            self.transfers.flush();
            while let Some((token, outcome)) = self.transfers.next_done() {
                let moving = self.handler.detach(token);
                takeover.give_back(Returned::Transferred { token, outcome, moving });
            }
            while let Some(PoolTransfer { token, mut transfer }) = self.transfers.next_for_pool() {
                let moving = self.handler.detach(token);
                // SAFETY: the owner keeps the memory until the end is handed in.
                let outcome = unsafe { transfer.run() };
                takeover.give_back(Returned::Transferred { token, outcome, moving });
            }
            if self.transfers.unfinished() == 0 {
                break;
            }
            if let Err(error) = self.transfers.sleep() {
                tracing::error!("transfers are left behind: {error}");
                break;
            }
        }
        self.batch_end();
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
            name: options.name,
            ratelimited_log,
            quit: false,
        })
    }

    /// Has the calling thread hear of what comes. The chain that the owner before is blocked with stays with it.
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
            // It has the token that was to be the next one.
            self.slots.next_token();
            self.slots.put_away(queue, stub, running.ring.memory());
            running.out += 1;
        }
    }

    /// Serves until told to quit, or until another thread has the queues.
    pub(crate) fn run(mut self: Box<Self>, context: &mut WorkerContext<H>) -> Result<Ended, TransfersError> {
        // Rests are to end when they should. Without that they are 50 us longer.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        while !self.quit {
            if self.port.0.is_filled() {
                self.read_commands(context);
            }
            self.batcher(context);
            let took;
            (self, took) = match self.take_batch(context) {
                Some(served) => served,
                None => return Ok(Ended::Replaced),
            };
            context.batch_end();
            self = match self.flush(context) {
                Some(worker) => worker,
                None => return Ok(Ended::Replaced),
            };
            self.finish_transfers(context);
            self.publish();
            let is_done = self.slots.moving() == 0 && !self.quit && !self.port.0.is_filled();
            // A batching worker already takes turns with the driver.
            if is_done
                && !self.queue_options.gathers
                && let Some(rest) = self.coalescer.delay_after(took)
            {
                context.busy_poll.sleep_for(rest);
            } else if took == 0 && !self.quit && (self.delay_left().is_some() || !self.poll(context)) {
                self.sleep(context)?;
            }
        }
        self.drain(context);
        Ok(Ended::Quit)
    }

    /// Calls what may wait, with the queues where another thread finds them meanwhile. Without them: one has.
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
        let worker = if takeover.watch.leave(owner) { takeover.take() } else { None };
        (worker, outcome)
    }

    /// Begins the transfers, some of which only copy: to a file system that makes writers wait, that takes long.
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

    /// Waits for more requests while the driver has enough to do, and the device too if it has anything.
    fn batcher(&mut self, context: &mut WorkerContext<H>) {
        let moving = self.slots.moving();
        let is_device_short = moving > 0 && moving < batch::DEVICE_BUSY_FROM;
        if !self.queue_options.gathers || is_device_short || !context.busy_poll.is_free() {
            return;
        }
        let Self { batcher, running, port, .. } = self;
        let transfers = &mut context.transfers;
        batcher.wait(|| {
            let mut all = None;
            for running in running.iter().filter(|running| running.has_work()) {
                let at = u32::from(running.ring.lags_at(batch::ANSWERS_MIN, moving > 0)?);
                all = Some(all.unwrap_or(0u32).wrapping_add(at));
            }
            let waits = all.filter(|_| !port.0.is_filled() && !transfers.has_events());
            if waits.is_some() {
                transfers.submit();
            }
            waits
        });
    }

    /// Takes in what other threads have served and moved.
    fn take_returns(&mut self, context: &mut WorkerContext<H>) {
        let Some(takeover) = context.takeover.clone() else { return };
        for back in takeover.returns() {
            match back {
                Returned::Served { token, chain, answer: Answer::Done(written) } => {
                    if let Some((queue, _, memory)) = self.slots.take(token) {
                        self.give_back(queue, chain, &memory, context.handler.complete(token, written));
                    }
                }
                Returned::Served { token, chain, answer } => self.slots.fill(token, chain, answer == Answer::Parked),
                Returned::Transferred { token, outcome, moving } => {
                    if let Some(moving) = moving {
                        context.handler.attach(token, moving);
                    }
                    self.transferred(context, token, outcome);
                }
            }
        }
        self.deliver_replies(context);
    }

    fn finish_transfers(&mut self, context: &mut WorkerContext<H>) {
        while let Some((token, outcome)) = context.transfers.next_done() {
            self.transferred(context, token, outcome);
        }
        while let Some(transfer) = context.transfers.next_for_pool() {
            self.send_to_pool(context, transfer);
        }
    }

    fn transferred(&mut self, context: &mut WorkerContext<H>, token: u64, outcome: std::io::Result<usize>) {
        let Some((queue, chain, memory)) = self.slots.take(token) else { return };
        let written = finish(&mut context.handler, &chain, |handler| handler.transferred(token, &chain, outcome));
        self.give_back(queue, chain, &memory, context.handler.complete(token, written));
    }

    fn running_mut(&mut self, queue: usize) -> Option<&mut Running> {
        self.running.iter_mut().find(|running| running.queue == queue)
    }

    fn give_back(&mut self, queue: usize, chain: Chain, memory: &Memory, written: u32) {
        if let Some(running) = self.running_mut(queue) {
            running.push(&chain, Some(memory), written);
            running.out -= 1;
        }
        self.spare.push(chain);
    }

    fn publish(&mut self) {
        for running in &mut self.running {
            let wanted = running.ring.publish();
            running.note();
            if (wanted || running.owes_signal)
                && let Some(call) = &running.call
            {
                running.owes_signal = false;
                // An eventfd is only full when the driver has not looked for ages, and then it is signalled already.
                let _ = rustix::io::write(call, &1u64.to_ne_bytes());
            }
        }
    }

    fn poll(&mut self, context: &mut WorkerContext<H>) -> bool {
        let Self { port, running, batcher, queue_options, .. } = self;
        let WorkerContext { transfers, busy_poll, .. } = context;
        let is_asked = || port.0.is_filled() || running.iter().any(Running::has_work);
        if busy_poll.will_poll() {
            transfers.submit();
        }
        let found = busy_poll.poll(|| is_asked() || transfers.has_events());
        if found && queue_options.gathers && transfers.in_flight() >= batch::DEVICE_BUSY_FROM && busy_poll.is_free() {
            batcher.wait_for_peers(is_asked);
        }
        found
    }

    /// Returns how long to sleep at most, if queues are delayed.
    fn delay_left(&self) -> Option<Duration> {
        self.running.iter().filter_map(Running::delay_left).min()
    }

    fn sleep(&mut self, context: &mut WorkerContext<H>) -> Result<(), TransfersError> {
        let delay = self.delay_left();
        // All of them, without stopping at the first that has work.
        let wanted = self.running.iter_mut().filter(|running| !running.broken && running.delay_left().is_none());
        if wanted.map(|running| running.want_kicks(true)).fold(false, |one, other| one | other) {
            for running in &mut self.running {
                running.want_kicks(false);
            }
            return Ok(());
        }
        // The port's eventfd is watched, so a letter that came since the last look ends the sleep at once.
        let WorkerContext { transfers, busy_poll, .. } = context;
        busy_poll.sleep(|| transfers.sleep_at_most(delay))?;
        let in_vain = delay.is_none() && !self.port.0.is_filled() && !transfers.has_done();
        let in_vain = in_vain && !self.running.iter().any(Running::has_work);
        for running in &mut self.running {
            running.want_kicks(false);
            if in_vain {
                running.note_vain_kick(&self.name, &self.ratelimited_log);
            }
        }
        Ok(())
    }

    fn deliver(&mut self, context: &mut WorkerContext<H>, token: u64, message: H::Message) {
        self.slots.add_reply(token, message);
        self.deliver_replies(context);
    }

    /// Completes chains by the replies that came.
    fn deliver_replies(&mut self, context: &mut WorkerContext<H>) {
        while let Some((token, message)) = self.slots.next_reply() {
            let Some(queue) = self.slots.queue(token) else { continue };
            if !self.running.iter().any(|running| running.queue == queue) {
                self.late.push((token, message));
            } else if let Some((queue, chain, memory)) = self.slots.take(token) {
                let written = finish(&mut context.handler, &chain, |handler| handler.deliver(&chain, message));
                self.give_back(queue, chain, &memory, written);
            }
        }
    }
}
