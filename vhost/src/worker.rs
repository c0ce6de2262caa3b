//! A worker: the thread that serves one or more virtqueues.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use ferry_vfs::Backing;

use ferry_engine::{BLOCKED, BusyPoll, IoMode, Mailbox, Ownership, PoolTransfer, Transfers, TransfersError};

use crate::QUEUE_SIZE_MAX;
use crate::batch::{self, Batcher};
use crate::chain::Chain;
use crate::coalesce::Coalescer;
use crate::dirty::{Dirty, DirtyLog};
use crate::inflight::Region;
use crate::io::{Io, ServedChain, finish};
use crate::memory::Memory;
use crate::ring::{Begin, Popped, Ring, RingError, RingSetup};
use crate::slots::Slots;
use crate::takeover::{Returned, Takeover};
use ferry_engine::RatelimitedLog;

/// Chains taken before the first of them are answered: enough to share the calls among many, few enough that the
/// driver can go on with the first while the last are served.
const BATCH_MAX: usize = 64;

/// Kicks without anything to take, after which we say what that usually means.
const VAIN_KICKS: u32 = 8;

/// How a worker is to work.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The thread's name, at most 15 bytes of which show.
    pub name: String,
    /// How transfers are made.
    pub io: IoMode,
    /// The longest that a worker looks for work before it sleeps.
    pub poll: Duration,
    /// What the thread calls once all that it needs is there, before it takes the first request.
    pub begun: Option<fn()>,
}

/// Options of the queues of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueOptions {
    pub(crate) gathers: bool,
    pub(crate) registers_memory: bool,
}

/// What became of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Answer {
    /// Served; so many bytes were written to it.
    Done(u32),
    /// A transfer or a reply with the chain's token will come on its own.
    Later,
    /// A reply will come when somebody else does something, maybe never.
    Parked,
}

/// Where a chain may be served while requests are slow ([`crate::Device::spare_threads`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// By the owner of its queue, before those behind it: it does not wait.
    Here,
    /// Anywhere, at the same time as any others.
    Anywhere,
    /// Anywhere, but not before those of the same number that came earlier.
    InOrder(u64),
}

/// Serves chains on one thread.
pub trait QueueHandler: 'static {
    /// What other threads send to have a chain answered.
    type Message: Send + 'static;
    /// What is to be done when a transfer has ended.
    type PendingTransfer: Send + 'static;

    /// A chain was taken from its queue: called by the owner of the queue, in the order of the queue, before [`Self::serve`],
    /// which another thread's handler may be asked for.
    fn accept(&mut self, _token: u64, _chain: &Chain) {}
    /// Serves a chain.
    fn serve(&mut self, chain: &Chain, io: &mut Io<'_>) -> Answer;
    /// The chain's transfer ended: finishes its reply. Returns how many bytes were written in all.
    fn transferred(&mut self, token: u64, chain: &Chain, outcome: std::io::Result<usize>) -> u32;
    /// A chain that was served or moved, by whatever thread, goes back to the driver now: called by the owner of the queue, which
    /// gives chains back in the order of these calls and of those of [`Self::deliver`]. Returns how many of the bytes that were
    /// written count.
    fn complete(&mut self, _token: u64, written: u32) -> u32 {
        written
    }
    /// A reply came for the chain; replies come in the order in which they were sent. Returns how many bytes were
    /// written.
    fn deliver(&mut self, chain: &Chain, message: Self::Message) -> u32;
    /// [`Self::serve`], [`Self::transferred`] or [`Self::deliver`] panicked: answers as well as can be.
    fn failed(&mut self, chain: &Chain) -> u32;
    /// A batch was taken and will be flushed now, or the worker is about to sleep.
    fn batch_end(&mut self) {}
    /// Where a chain may be served while requests are slow.
    fn placement(&self, _chain: &Chain) -> Placement {
        Placement::Here
    }
    /// Takes out what is to be done when the transfer with this token has ended, for another handler.
    fn detach(&mut self, _token: u64) -> Option<Self::PendingTransfer> {
        None
    }
    /// Takes it in, before [`Self::transferred`].
    fn attach(&mut self, _token: u64, _moving: Self::PendingTransfer) {}
}

/// How other threads reach a worker.
#[derive(Debug)]
pub struct Port<M>(pub(crate) Mailbox<Command<M>>);

impl<M> Port<M> {
    /// Has the chain of this token answered. A token whose chain is gone is nobody's loss.
    pub fn reply(&self, token: u64, message: M) {
        self.0.post(Command::Reply(token, message));
    }
}

/// The reading end of a port: whoever waits for an answer learns of its end.
pub(crate) struct Reading<M>(pub(crate) Arc<Port<M>>);

impl<M> Drop for Reading<M> {
    fn drop(&mut self) {
        self.0.0.close();
    }
}

#[derive(Debug)]
pub(crate) enum Command<M> {
    Reply(u64, M),
    /// Another thread has handed something in.
    Returned,
    Control(Control),
}

/// What the connection asks of a worker.
#[derive(Debug)]
pub(crate) enum Control {
    Start(usize, Start, Sender<Result<(), RingError>>),
    /// Ends all that moves.
    Stop(usize, Sender<Stopped>),
    /// From now on, its chains lie here. The ring itself stays where it is.
    Memory(usize, Memory),
    /// From now on, the driver is signalled here.
    Call(usize, Option<Arc<OwnedFd>>),
    /// From now on, the front end is told of errors here.
    Error(usize, Option<Arc<OwnedFd>>),
    Quit,
}

/// What is left of a ring that was served.
#[derive(Clone, Debug)]
pub(crate) struct Stopped {
    /// The index to go on from.
    pub(crate) base: u32,
    /// Chains before it that are not answered yet, because they wait for somebody (for a lock).
    pub(crate) out: Vec<u16>,
}

/// A ring to serve.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) memory: Memory,
    pub(crate) setup: RingSetup,
    pub(crate) base: u32,
    /// It goes on where it stopped last, whatever number that is.
    pub(crate) resumes: bool,
    pub(crate) log: Option<Region>,
    /// Chains that were taken before the state was saved, here or on another host, and that nobody has answered.
    pub(crate) resubmitted: Vec<u16>,
    /// Where to note which pages are written to.
    pub(crate) dirty: Option<Arc<DirtyLog>>,
    pub(crate) kick: Arc<OwnedFd>,
    pub(crate) call: Option<Arc<OwnedFd>>,
    pub(crate) error: Option<Arc<OwnedFd>>,
}

/// A queue being served.
struct Running {
    queue: usize,
    ring: Ring,
    kick: Arc<OwnedFd>,
    watch: u64,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    /// Chains taken and not given back.
    out: usize,
    broken: bool,
    /// Whoever served the ring before us may have ended between showing its last batch and signalling it; or that went to
    /// the descriptor that was in the place of this one.
    owes_signal: bool,
    vain_kicks: u32,
    /// Where to note which pages are written to, and whether the ring was since that was noted last.
    dirty: Option<Dirty>,
    touched: bool,
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
    _reading: Reading<H::Message>,
    last: Option<Arc<Backing>>,
    /// The chain that is being served.
    serving: Option<(usize, Chain)>,
    batcher: Batcher,
    coalescer: Coalescer,
    habits: QueueOptions,
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
        Ok(Self { handler, transfers, busy_poll: BusyPoll::new(options.poll), takeover, owner })
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
        habits: QueueOptions,
        last: Option<Arc<Backing>>,
        ratelimited_log: Arc<RatelimitedLog>,
    ) -> Box<Self> {
        Box::new(Self {
            _reading: Reading(Arc::clone(&port)),
            port,
            last,
            serving: None,
            batcher: Batcher::new(options.poll.min(batch::BOUND_MAX)),
            coalescer: Coalescer::new(),
            habits,
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
    pub(crate) fn adopt(&mut self, context: &mut WorkerContext<H>) -> Result<(), TransfersError> {
        context.transfers.watch(&self.port.0).map_err(TransfersError::Setup)?;
        if let Some(last) = &self.last {
            context.transfers.hold(last);
        }
        for running in &mut self.running {
            running.watch = context.transfers.watch_shared(Arc::clone(&running.kick));
        }
        if let Some((queue, stub)) = self.serving.take()
            && let Some(running) = self.running.iter_mut().find(|running| running.queue == queue)
        {
            // It has the token that was to be the next one.
            self.slots.next_token();
            self.slots.put_away(queue, stub, running.ring.memory());
            running.out += 1;
        }
        Ok(())
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
            // Who gathers takes turns with the driver already.
            if is_done
                && !self.habits.gathers
                && let Some(rest) = self.coalescer.delay_after(took)
            {
                context.busy_poll.sleep_for(rest);
            } else if took == 0 && !self.quit && !self.poll(context) {
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
        if !self.habits.gathers || is_device_short || !context.busy_poll.is_free() {
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

    fn take_batch(mut self: Box<Self>, context: &mut WorkerContext<H>) -> Option<(Box<Self>, usize)> {
        let mut all = 0;
        for index in 0..self.running.len() {
            let took;
            (self, took) = self.take_from(context, index)?;
            all += took;
        }
        Some((self, all))
    }

    /// Serves what waits in one queue; returns how much. `None`: another thread has the queues.
    fn take_from(mut self: Box<Self>, context: &mut WorkerContext<H>, index: usize) -> Option<(Box<Self>, usize)> {
        for took in 0..BATCH_MAX {
            if !self.take_one(index) {
                return Some((self, took));
            }
            let token = self.slots.next_token();
            context.accept(token, &self.chain);
            let is_slow = context.takeover.as_ref().is_some_and(|takeover| takeover.slow.is_on());
            let placement = if is_slow { context.handler.placement(&self.chain) } else { Placement::Here };
            if placement != Placement::Here {
                self.send_chain_to_pool(context, index, token, placement);
                continue;
            }
            let chain = std::mem::take(&mut self.chain);
            // It stays mapped for as long as the handler may use it.
            let memory = Arc::clone(self.running[index].ring.memory());
            self.serving = Some((self.running[index].queue, chain.stub()));
            let (worker, served) = self.with_takeover(context, |handler, _| ServedChain::by(handler, &chain, token));
            let Some(worker) = worker else {
                context.hand_back(token, chain, &memory, served);
                return None;
            };
            self = worker;
            self.serving = None;
            self.served(context, index, token, chain, served);
        }
        Some((self, BATCH_MAX))
    }

    /// Takes the next chain of a queue. Returns whether there is one.
    fn take_one(&mut self, index: usize) -> bool {
        let running = &mut self.running[index];
        for _ in 0..BATCH_MAX {
            // In this order: a chain may lie in memory of which a letter tells that came before it. Those that the server before
            // has left do not.
            let is_there = !running.broken && running.ring.has_available();
            if !is_there || self.port.0.is_filled() && !running.ring.is_recovering() {
                return false;
            }
            let popped = match running.out < usize::from(QUEUE_SIZE_MAX) {
                true => running.ring.pop(&mut self.chain),
                // A driver cannot have more chains out than its ring has entries, unless it lies.
                false => Err(RingError::TooManyChains),
            };
            match popped {
                Ok(Popped::Chain) => {
                    running.vain_kicks = 0;
                    return true;
                }
                Ok(Popped::Empty) => return false,
                Ok(Popped::Dropped(error)) => {
                    running.touched = true;
                    self.ratelimited_log.warn(format_args!("{}: a request was dropped: {error}", self.name));
                }
                Err(error) => {
                    running.fail_queue(&self.name, &error, &self.ratelimited_log);
                    return false;
                }
            }
        }
        false
    }

    /// A chain of a queue was served here.
    fn served(
        &mut self,
        context: &mut WorkerContext<H>,
        index: usize,
        token: u64,
        chain: Chain,
        mut served: ServedChain,
    ) {
        let running = &mut self.running[index];
        if let Answer::Done(written) = served.answer {
            running.push(&chain, None, context.handler.complete(token, written));
            self.chain = chain;
            return;
        }
        // SAFETY: the slot keeps the memory until the transfer has ended.
        unsafe { served.queue(&mut context.transfers, &chain, token) };
        self.slots.put(running.queue, chain, running.ring.memory(), served.answer == Answer::Parked);
        running.out += 1;
        self.chain = self.spare.pop().unwrap_or_default();
    }

    /// Has the chain that was taken served by another thread.
    fn send_chain_to_pool(&mut self, context: &mut WorkerContext<H>, index: usize, token: u64, placement: Placement) {
        let Some(takeover) = context.takeover.clone() else { return };
        let running = &mut self.running[index];
        let spare = self.spare.pop().unwrap_or_default();
        let (chain, memory) = (std::mem::replace(&mut self.chain, spare), Arc::clone(running.ring.memory()));
        self.slots.put_away(running.queue, chain.stub(), &memory);
        running.out += 1;
        let order = match placement {
            Placement::InOrder(number) => Some(number),
            Placement::Here | Placement::Anywhere => None,
        };
        let pool = Arc::clone(&takeover.pool);
        let job = move |handler: &mut H| {
            let start = Instant::now();
            let served = ServedChain::by(handler, &chain, token);
            // SAFETY: `memory` is what the chain lies in.
            let answer = unsafe { served.finish(handler, &chain, token) };
            drop(memory);
            let _ = catch_unwind(AssertUnwindSafe(|| handler.batch_end()));
            if start.elapsed() >= BLOCKED {
                takeover.slow.begin();
            }
            takeover.give_back(Returned::Served { token, chain, answer });
        };
        if let Err(job) = pool.run(order, Box::new(job)) {
            job(&mut context.handler);
        }
    }

    /// Has a transfer made by another thread.
    fn send_to_pool(&mut self, context: &mut WorkerContext<H>, transfer: PoolTransfer) {
        let PoolTransfer { token, mut transfer } = transfer;
        let moving = context.handler.detach(token);
        let (Some(takeover), Some(memory)) = (context.takeover.clone(), self.slots.memory(token).cloned()) else {
            return;
        };
        let pool = Arc::clone(&takeover.pool);
        let job = move |_: &mut H| {
            // SAFETY: `memory` is what the chain lies in.
            let outcome = unsafe { transfer.run() };
            drop(memory);
            takeover.give_back(Returned::Transferred { token, outcome, moving });
        };
        if let Err(job) = pool.run(None, Box::new(job)) {
            job(&mut context.handler);
        }
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

    fn give_back(&mut self, queue: usize, chain: Chain, memory: &Memory, written: u32) {
        if let Some(running) = self.running.iter_mut().find(|running| running.queue == queue) {
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
        let Self { port, running, batcher, habits, .. } = self;
        let WorkerContext { transfers, busy_poll, .. } = context;
        let is_asked = || port.0.is_filled() || running.iter().any(Running::has_work);
        if busy_poll.will_poll() {
            transfers.submit();
        }
        let found = busy_poll.poll(|| is_asked() || transfers.has_events());
        if found && habits.gathers && transfers.in_flight() >= batch::DEVICE_BUSY_FROM && busy_poll.is_free() {
            batcher.wait_for_peers(is_asked);
        }
        found
    }

    fn sleep(&mut self, context: &mut WorkerContext<H>) -> Result<(), TransfersError> {
        // All of them, without stopping at the first that has work.
        let wanted = self.running.iter_mut().filter(|running| !running.broken);
        if wanted.map(|running| running.want_kicks(true)).fold(false, |one, other| one | other) {
            for running in &mut self.running {
                running.want_kicks(false);
            }
            return Ok(());
        }
        // The port's eventfd is watched, so a letter that came since the last look ends the sleep at once.
        let WorkerContext { transfers, busy_poll, .. } = context;
        busy_poll.sleep(|| transfers.sleep())?;
        let in_vain = !self.port.0.is_filled() && !transfers.has_done();
        let in_vain = in_vain && !self.running.iter().any(Running::has_work);
        for running in &mut self.running {
            running.want_kicks(false);
            if in_vain {
                running.note_vain_kick(&self.name, &self.ratelimited_log);
            }
        }
        Ok(())
    }

    fn read_commands(&mut self, context: &mut WorkerContext<H>) {
        // Replies first: stopping waits for those that it sees, and would not see any that lie behind it here.
        let (replies, controls): (Vec<_>, Vec<_>) =
            self.port.0.take().into_iter().partition(|letter| !matches!(letter, Command::Control(_)));
        for letter in replies.into_iter().chain(controls) {
            match letter {
                Command::Reply(token, message) => self.deliver(context, token, message),
                Command::Returned => self.take_returns(context),
                Command::Control(Control::Start(queue, start, reply)) => {
                    let _ = reply.send(self.start(context, queue, start));
                }
                Command::Control(Control::Stop(queue, reply)) => {
                    let _ = reply.send(self.stop(context, queue));
                }
                Command::Control(Control::Memory(queue, memory)) => {
                    if let Some(running) = self.running.iter_mut().find(|running| running.queue == queue) {
                        running.ring.set_memory(Arc::new(memory));
                    }
                }
                Command::Control(Control::Call(queue, call)) => {
                    if let Some(running) = self.running.iter_mut().find(|running| running.queue == queue) {
                        running.call = call;
                        running.owes_signal = true;
                    }
                }
                Command::Control(Control::Error(queue, error)) => {
                    if let Some(running) = self.running.iter_mut().find(|running| running.queue == queue) {
                        running.error = error;
                    }
                }
                Command::Control(Control::Quit) => self.quit = true,
            }
        }
    }

    fn deliver(&mut self, context: &mut WorkerContext<H>, token: u64, message: H::Message) {
        self.slots.add_reply(token, message);
        self.deliver_replies(context);
    }

    /// Answers chains by the replies that came.
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

    fn start(&mut self, context: &mut WorkerContext<H>, queue: usize, start: Start) -> Result<(), RingError> {
        self.stop(context, queue);
        let Start { memory, setup, base, resumes, log, resubmitted, dirty, kick, call, error } = start;
        let stopped_at = self.stopped.iter().find(|(stopped, _)| *stopped == queue).map(|(_, at)| *at);
        let begin = match resumes && stopped_at == Some(base) {
            true => Begin::Resume(base),
            false => Begin::after(stopped_at, base),
        };
        let owes_signal = log.is_some();
        if let (Some(log), Some(_), Begin::At(_)) = (&log, stopped_at, begin) {
            // All that this process took of the ring before is answered, or of a driver that has begun anew.
            log.forget();
        }
        if self.habits.registers_memory {
            self.register(context, &memory);
        }
        let dirty = dirty.map(|log| Dirty::new(log, &memory, &setup));
        let mut ring = Ring::new(Arc::new(memory), &setup, begin, log)?;
        if !resubmitted.is_empty() {
            // They were given up when the state was saved.
            self.slots.drop_parked(queue);
            if !ring.take_resubmitted(resubmitted) {
                tracing::warn!("queue {queue} has begun anew: what waited before its guest was to move is forgotten");
            }
        }
        ring.want_kicks(false);
        let watch = context.transfers.watch_shared(Arc::clone(&kick));
        if matches!(begin, Begin::At(_)) {
            self.slots.drop_parked(queue);
        }
        let out = self.slots.of_queue(queue).count();
        let (broken, vain_kicks, touched) = (false, 0, true);
        self.running.push(Running {
            queue,
            ring,
            kick,
            watch,
            call,
            error,
            out,
            broken,
            owes_signal,
            vain_kicks,
            dirty,
            touched,
        });
        for (token, message) in std::mem::take(&mut self.late) {
            self.deliver(context, token, message);
        }
        Ok(())
    }

    /// Registers this memory in place of what was registered before, of which nothing is in use any more.
    fn register(&self, context: &mut WorkerContext<H>, memory: &Memory) {
        // SAFETY: the keepers are the mappings.
        if let Err(error) = unsafe { context.transfers.register_memory(memory.mapped()) } {
            self.ratelimited_log.warn(format_args!(
                "{}: the guest's memory cannot be registered with io_uring ({error}): each transfer looks it up; \
                 raise the limit of locked memory (ulimit -l), or let the guest's memory be a memfd or huge pages",
                self.name
            ));
        }
    }

    fn stop(&mut self, context: &mut WorkerContext<H>, queue: usize) -> Stopped {
        let Some(index) = self.running.iter().position(|running| running.queue == queue) else {
            let base = self.stopped.iter().find(|(stopped, _)| *stopped == queue).map_or(0, |(_, at)| *at);
            return Stopped { base, out: self.slots.of_queue(queue).collect() };
        };
        // Whoever goes on where it stops does not know of those that the server before has left.
        while self.running[index].ring.is_recovering() && self.serve_resubmitted(context, index) {}
        self.drain(context);
        let running = self.running.swap_remove(index);
        if let Err(error) = context.transfers.unwatch(running.watch) {
            tracing::debug!("{}: a kick descriptor stays watched: {error}", self.name);
        }
        let at = running.ring.position();
        self.stopped.retain(|(stopped, _)| *stopped != queue);
        // Chains that were in flight before us and are not served again yet are found in the log once more.
        if !running.ring.is_recovering() {
            self.stopped.push((queue, at));
        }
        Stopped { base: at, out: self.slots.of_queue(queue).collect() }
    }

    /// Serves a chain that the server before has left, whatever that takes. Returns whether there was one.
    fn serve_resubmitted(&mut self, context: &mut WorkerContext<H>, index: usize) -> bool {
        if !self.take_one(index) {
            return false;
        }
        let (token, chain) = (self.slots.next_token(), std::mem::take(&mut self.chain));
        context.accept(token, &chain);
        let served = ServedChain::by(&mut context.handler, &chain, token);
        self.served(context, index, token, chain, served);
        true
    }

    /// Answers every chain whose answer comes on its own. Parked ones stay.
    fn drain(&mut self, context: &mut WorkerContext<H>) {
        let mut controls = Vec::new();
        loop {
            context.transfers.flush();
            self.finish_transfers(context);
            for letter in self.port.0.take() {
                match letter {
                    Command::Reply(token, message) => self.deliver(context, token, message),
                    Command::Returned => self.take_returns(context),
                    control @ Command::Control(_) => controls.push(control),
                }
            }
            self.publish();
            if self.slots.moving() == 0 && context.transfers.unfinished() == 0 {
                break;
            }
            if let Err(error) = context.transfers.sleep() {
                tracing::error!("{}: {error}", self.name);
                break;
            }
        }
        for control in controls {
            self.port.0.post(control);
        }
    }
}

impl Running {
    /// Gives a chain back, which lies in this memory, or in the ring's.
    fn push(&mut self, chain: &Chain, memory: Option<&Memory>, written: u32) {
        if let Some(dirty) = &self.dirty {
            dirty.chain(memory.unwrap_or_else(|| self.ring.memory()), chain);
        }
        self.ring.push(chain, written);
        self.touched = true;
    }

    fn want_kicks(&mut self, wanted: bool) -> bool {
        let has_work = self.ring.want_kicks(wanted);
        self.touched = true;
        self.note();
        has_work
    }

    /// Notes what was written to the ring.
    fn note(&mut self) {
        if let Some(dirty) = self.dirty.as_ref().filter(|_| self.touched) {
            dirty.ring();
            self.touched = false;
        }
    }

    fn has_work(&self) -> bool {
        !self.broken && self.ring.has_available()
    }

    fn fail_queue(&mut self, name: &str, error: &RingError, ratelimited_log: &RatelimitedLog) {
        ratelimited_log.error(format_args!("{name}: stopped until the guest sets the queue up again: {error}"));
        self.broken = true;
        if let Some(fd) = &self.error {
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    fn note_vain_kick(&mut self, name: &str, ratelimited_log: &RatelimitedLog) {
        self.vain_kicks += 1;
        if self.vain_kicks == VAIN_KICKS {
            ratelimited_log.warn(format_args!(
                "{name}: the guest kicks but its queue looks empty; if it hangs, its memory is not shared with us \
                 (QEMU: memory-backend-memfd,share=on; cloud-hypervisor: --memory shared=on)"
            ));
        }
    }
}
