//! The thread that owns a CPU's queue, and the parked threads that can take over.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Thread;

use ferry_engine::{Ownership, RateLimiter, Transfer};
use ferry_serve::{FuseCarrier, HEADER_BYTES, ServeOutcome, Server, is_limited};
use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Ino};
use ferry_wire::fuse::{Opcode, encode_error};

use super::carrier::RingCarrier;
use super::kick::{NOTIFY_REPLY, kick, kick_by_stat};
use super::memory::Message;
use super::queue::{Mail, Queue};
use super::ring::{Completed, Full, RingHandle};
use super::ring_transfers::{BlockingTransfer, TransferOutcome, submit_to_ring, try_transfer};
use crate::connection::ServingThread;
use crate::deferred_replies::may_be_abandoned;
use crate::machine::stay_on;
use crate::sched_idle::SchedIdle;
use crate::stats::Counters;

/// A command for a standby thread.
#[derive(Debug)]
pub(super) enum Order {
    /// Register the entries, say how that went, and serve.
    Begin(Ownership, Sender<(usize, io::Result<()>)>),
    /// Serve.
    Own(Ownership),
    /// Look whether it is over.
    Look,
}

/// Where a thread waits for its order.
#[derive(Debug, Default)]
pub(super) struct ParkedWorker {
    slot: Mutex<OrderSlot>,
    thread: OnceLock<Thread>,
}

#[derive(Debug, Default)]
enum OrderSlot {
    #[default]
    Empty,
    Waits(Order),
    /// The thread takes no further order.
    Ended,
}

impl ParkedWorker {
    /// Sends the thread a command; returns it if the thread has ended.
    pub(super) fn give(&self, order: Order) -> Result<(), Order> {
        let mut slot = lock(&self.slot);
        match (&*slot, &order) {
            (OrderSlot::Ended, _) => return Err(order),
            // Looking at the queue is the start of every command.
            (OrderSlot::Waits(_), Order::Look) => {}
            _ => *slot = OrderSlot::Waits(order),
        }
        drop(slot);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
        Ok(())
    }

    /// Has the thread look whether it is over.
    pub(super) fn look(&self) {
        // It may have seen that itself.
        let _ = self.give(Order::Look);
    }

    fn wait(&self) -> Order {
        loop {
            if let OrderSlot::Waits(order) = std::mem::take(&mut *lock(&self.slot)) {
                return order;
            }
            std::thread::park();
        }
    }

    /// Ends the orders, unless one waits; returns whether they have ended.
    fn end(&self) -> bool {
        let mut slot = lock(&self.slot);
        if matches!(*slot, OrderSlot::Empty) {
            *slot = OrderSlot::Ended;
        }
        matches!(*slot, OrderSlot::Ended)
    }
}

/// Starts a thread that stands by for a queue.
pub(super) fn start_worker(queue: &Arc<Queue>) -> io::Result<Arc<ParkedWorker>> {
    let parked_worker = Arc::new(ParkedWorker::default());
    let present = ServingThread::new(&queue.connection);
    let name = format!("fuse-cpu-{}", queue.cpu);
    let thread = std::thread::Builder::new().name(name).spawn({
        let (queue, parked_worker) = (Arc::clone(queue), Arc::clone(&parked_worker));
        move || {
            stay_on(queue.cpu);
            Worker::new(&queue).stand_by(&parked_worker);
            drop((parked_worker, queue));
            drop(present);
        }
    })?;
    let _ = parked_worker.thread.set(thread.thread().clone());
    Ok(parked_worker)
}

/// Why a worker stopped serving.
enum ExitReason {
    /// Somebody else owns the queue now.
    Replaced,
    /// The connection has ended.
    Over,
}

/// A thread of a queue. What it does with the ring is for the owner of the queue alone.
pub(super) struct Worker<'a> {
    pub(super) queue: &'a Arc<Queue>,
    door: RingHandle<'a>,
    server: Server,
    pub(super) counters: Arc<Counters>,
    pub(super) way: Arc<SchedIdle>,
}

impl<'a> Worker<'a> {
    fn new(queue: &'a Arc<Queue>) -> Self {
        let way = Arc::new(SchedIdle::here());
        lock(&queue.ways).push(Arc::clone(&way));
        Self {
            queue,
            door: queue.ring.handle(),
            server: queue.connection.server(),
            counters: queue.connection.counters.lend(),
            way,
        }
    }

    /// Waits for orders until all is over: the kernel would take entries that the thread has fetched away with it.
    fn stand_by(&mut self, parked_worker: &Arc<ParkedWorker>) {
        loop {
            let order = parked_worker.wait();
            let ended = match order {
                // The kernel may still make transfers of the blocked owner, and nobody else waits for them.
                Order::Own(_) if self.queue.is_over() => return self.drain(),
                _ if self.queue.is_over() && parked_worker.end() => return,
                _ if self.queue.is_over() => continue,
                Order::Begin(ownership, told) => self.begin(ownership, &told),
                Order::Own(ownership) => {
                    self.take_over();
                    self.own(ownership)
                }
                Order::Look => continue,
            };
            self.server.end_batch();
            if let ExitReason::Over = ended {
                return;
            }
            self.queue.add_spare(parked_worker);
        }
    }

    /// Registers the first entries. The kernel refuses them at once or not at all.
    fn begin(&mut self, mut ownership: Ownership, told: &Sender<(usize, io::Result<()>)>) -> ExitReason {
        let outcome = self.register(0..self.queue.depth).and_then(|()| self.watch_mail()).and_then(|()| self.submit());
        let mut early = Vec::new();
        let mut refused = Vec::new();
        // SAFETY: this thread owns the queue.
        while let Some(completed) = unsafe { self.queue.ring.next() } {
            match completed {
                Completed::Request(index) => early.push(index),
                Completed::Lost(_, errno) => refused.push(errno),
                Completed::Mail(..) | Completed::Transfer(..) => {}
            }
        }
        let outcome = match refused.first() {
            // With one entry the queue works, if not as well.
            Some(errno) if refused.len() == self.queue.depth => outcome.and(Err((*errno).into())),
            _ => outcome,
        };
        let failed = outcome.is_err();
        // If it is gone, its caller has aborted it.
        let _ = told.send((self.queue.cpu, outcome));
        if failed {
            return ExitReason::Over;
        }
        for index in early {
            if !self.delay(index) && !self.serve(index, &mut ownership) {
                return ExitReason::Replaced;
            }
        }
        self.own(ownership)
    }

    /// Serves until the queue has another owner, or the end.
    fn own(&mut self, mut ownership: Ownership) -> ExitReason {
        self.add_entries();
        loop {
            if let Some(index) = self.next_delayed()
                && !self.serve(index, &mut ownership)
            {
                return ExitReason::Replaced;
            }
            // SAFETY: this thread owns the queue.
            match unsafe { self.queue.ring.next() } {
                Some(Completed::Request(index)) => {
                    if !self.delay(index) && !self.serve(index, &mut ownership) {
                        return ExitReason::Replaced;
                    }
                }
                Some(Completed::Transfer(index, result)) => self.transfer_completed(index, result),
                Some(Completed::Mail(watch, more)) => self.read_mail(watch, more),
                Some(Completed::Lost(index, errno)) => self.entry_lost(index, errno),
                None => {
                    self.server.end_batch();
                    if self.queue.is_over() {
                        self.drain();
                        return ExitReason::Over;
                    }
                    if let Err(error) = self.sleep() {
                        tracing::error!("the ring of CPU {} is broken, the mount ends: {error}", self.queue.cpu);
                        self.queue.connection.end.mark_ended();
                    }
                }
            }
        }
    }

    pub(super) fn enter(&self, wait: bool) -> io::Result<()> {
        self.counters.system_calls.add(1);
        // SAFETY: this thread owns the queue.
        let unsubmitted = unsafe { self.queue.ring.unsubmitted() };
        self.door.enter(unsubmitted, wait)
    }

    /// Waits for a completion, or for the limit that requests wait for.
    fn sleep(&self) -> io::Result<()> {
        match self.limiter().filter(|_| self.queue.delayed.count() > 0) {
            Some(limiter) => {
                self.counters.system_calls.add(1);
                self.door.enter_at_most(limiter.wait().unwrap_or_default())
            }
            None => self.enter(true),
        }
    }

    fn limiter(&self) -> Option<&RateLimiter> {
        self.queue.connection.share.limiter().map(|limiter| &**limiter)
    }

    /// Puts the request of an entry behind others that wait for a limit, if it must wait. Returns whether it does.
    fn delay(&self, index: usize) -> bool {
        if !self.limiter().is_some_and(|limiter| self.queue.delayed.must_wait(limiter)) {
            return false;
        }
        let Some((block, slot)) = self.queue.entry(index) else { return false };
        // SAFETY: the kernel has just passed the entry to this thread.
        let (header, ring_entry) = unsafe { block.chunk.request(slot) };
        // Our own look at the root has the kernel fetch what waits.
        let is_kick = self.queue.kickers.load(Ordering::Acquire) > 0
            && header.nodeid == Ino::ROOT.0
            && [Opcode::Getattr.as_raw(), Opcode::Statx.as_raw()].contains(&header.opcode);
        if header.opcode == NOTIFY_REPLY || is_kick || !is_limited(header.opcode) {
            return false;
        }
        // For the reply, if it is interrupted.
        block.states[slot].commit_id.store(ring_entry.commit_id, Ordering::Relaxed);
        self.queue.delayed.push(header.unique, index);
        self.add_entries();
        self.queue.connection.monitor_handle.ring();
        true
    }

    /// Returns the entry of the next request that need not wait any longer.
    fn next_delayed(&self) -> Option<usize> {
        if self.queue.delayed.count() == 0 || self.limiter()?.wait().is_some() {
            return None;
        }
        self.queue.delayed.pop()
    }

    fn submit(&self) -> io::Result<()> {
        self.enter(false)
    }

    /// An entry was taken away from us.
    fn entry_lost(&self, index: usize, errno: Errno) {
        match errno {
            Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED | Errno::NODEV => {
                tracing::debug!("entry {index} of CPU {} ended with the connection", self.queue.cpu);
            }
            _ => tracing::error!("the kernel took entry {index} of CPU {} away: {errno}", self.queue.cpu),
        }
    }

    fn read_mail(&self, watch: u64, more: bool) {
        for mail in self.queue.mail.take() {
            match mail {
                Mail::Commit(index) => self.commit(index),
                Mail::Begin(index) => self.begin_transfer(index),
                Mail::Cancel(index) => self.cancel_transfer(index),
                Mail::Kick => {
                    if self.kick(1) == 0 && self.queue.kickers.load(Ordering::Acquire) == 0 {
                        kick_by_stat(self.queue, 1);
                    }
                }
                Mail::Look => {}
            }
        }
        let is_current = watch == self.queue.mail_watch.load(Ordering::Relaxed);
        if is_current
            && !more
            && let Err(error) = self.watch_mail()
        {
            tracing::error!("cannot watch for later replies: {error}");
        }
    }

    fn watch_mail(&self) -> io::Result<()> {
        let mailbox = self.queue.mail.as_fd();
        let number = self.queue.mail_watch.load(Ordering::Relaxed);
        // SAFETY: this thread owns the queue.
        self.push(|| unsafe { self.queue.ring.watch(number, mailbox) })
    }

    /// Goes on in the place of a thread that is blocked. What the kernel has to do for an entry, or for the mailbox, it
    /// does in the thread that submitted it: at once where that sleeps lightly, but where it waits for a disk or another
    /// server, only when it comes back. So nothing that is to go on may stay with it.
    fn take_over(&self) {
        let Self { queue, .. } = self;
        let former = queue.mail_watch.fetch_add(1, Ordering::Relaxed);
        // SAFETY: this thread owns the queue.
        let watched = self.push(|| unsafe { queue.ring.unwatch(former) }).and_then(|()| self.watch_mail());
        if let Err(error) = watched.and_then(|()| self.submit()) {
            tracing::error!("cannot watch for later replies of CPU {}: {error}", queue.cpu);
        }
        // Each goes to an entry that waits for a request, which becomes ours with the reply, or stays with the other.
        self.kick(queue.depth);
    }

    /// Pushes one entry, making room if there is none.
    pub(super) fn push(&self, push: impl Fn() -> Result<(), Full>) -> io::Result<()> {
        while push().is_err() {
            self.submit()?;
        }
        Ok(())
    }

    fn register(&self, indices: std::ops::Range<usize>) -> io::Result<()> {
        for index in indices {
            let Some((block, slot)) = self.queue.entry(index) else { continue };
            let vectors = block.chunk.vectors(slot);
            // SAFETY: this thread owns the queue, which keeps the memory for as long as there is a connection.
            self.push(|| unsafe { self.queue.ring.register(self.queue.id, index as u64, vectors) })?;
        }
        Ok(())
    }

    pub(super) fn commit(&self, index: usize) {
        let Some((block, slot)) = self.queue.entry(index) else { return };
        let commit_id = block.states[slot].commit_id.load(Ordering::Relaxed);
        // SAFETY: this thread owns the queue.
        let pushed = self.push(|| unsafe { self.queue.ring.commit(self.queue.id, index as u64, commit_id) });
        if let Err(error) = pushed {
            tracing::error!("a reply of CPU {} cannot be sent: {error}", self.queue.cpu);
        }
    }

    /// Serves the request in an entry. Returns whether the queue is still ours.
    fn serve(&mut self, index: usize, ownership: &mut Ownership) -> bool {
        let Self { queue, server, counters, .. } = self;
        let Some((block, slot)) = queue.entry(index) else { return true };
        let state = &block.states[slot];
        let generation = state.generation_cell.current();
        // SAFETY: the kernel has just passed the entry to this thread, and no other thread knows this generation yet.
        let (header, ring_entry) = unsafe { block.chunk.request(slot) };
        let message = Message::new(&header, &ring_entry, block.chunk.payload_bytes());
        state.unique.store(header.unique, Ordering::Relaxed);
        state.commit_id.store(ring_entry.commit_id, Ordering::Relaxed);
        if header.opcode == NOTIFY_REPLY {
            // The own kick; any reply is fine.
            if queue.write_reply(index, generation, &encode_error(header.unique, Errno::NOSYS)).is_ok() {
                self.commit(index);
            }
            return true;
        }
        if header.opcode == Opcode::Read as u32 || header.opcode == Opcode::Write as u32 {
            queue.kept.store(header.nodeid, Ordering::Relaxed);
        }
        queue.place.store(index, Ordering::Relaxed);
        queue.watch.enter(ownership);
        let call = ownership.call();
        queue.connection.monitor_handle.ring();
        counters.requests.add(1);
        let mut carrier = RingCarrier { queue, block, slot, index, generation, message, counters, transfer: None };
        let outcome = match (server.serve_caught(&mut carrier), carrier.transfer.take()) {
            (ServeOutcome::Transfer, Some(transfer)) => make_transfer(&mut carrier, server, transfer),
            (served, _) => Outcome::Served(served),
        };
        let ours = queue.watch.leave(ownership);
        if !ours {
            // The monitor counted it when it gave the queue to another thread.
            queue.come_back(call);
        }
        match outcome {
            Outcome::Waits(waits) => submit_to_ring(self, index, waits, ours),
            Outcome::Served(later @ (ServeOutcome::Later | ServeOutcome::Parked)) => {
                queue.parked.fetch_add(1, Ordering::Relaxed);
                if later == ServeOutcome::Later && may_be_abandoned(header.opcode) {
                    queue.deferred.begin(header.unique, (index, generation));
                    if !state.generation_cell.runs(generation) {
                        // Its reply was sent before that.
                        queue.deferred.end(header.unique);
                    }
                }
                if ours {
                    self.add_entries();
                }
            }
            Outcome::Served(ServeOutcome::Reply(bytes)) if bytes >= HEADER_BYTES => {
                if state.generation_cell.end(generation) {
                    // SAFETY: the thread that ends the generation owns the entry until it is committed.
                    unsafe { block.chunk.set_reply_payload(slot, bytes - HEADER_BYTES) };
                    self.send(index, ours);
                }
            }
            // Aborted by the monitor; or a request without a reply, whose entry must still return with one.
            Outcome::Served(_) => {
                let _ = queue.answer(index, generation, &encode_error(header.unique, Errno::IO));
            }
        }
        ours
    }

    /// A reply is written.
    fn send(&self, index: usize, ours: bool) {
        if ours {
            self.commit(index);
        } else {
            self.queue.mail.post(Mail::Commit(index));
        }
    }

    /// Registers more entries if few are left.
    pub(super) fn add_entries(&self) {
        if !self.queue.is_short() {
            return;
        }
        let Self { queue, .. } = self;
        let more = queue.add_block().and_then(|indices| {
            self.register(indices.clone())?;
            self.submit()?;
            let (times, kicked) = (indices.len(), self.kick(indices.len()));
            if kicked < times {
                kick_by_stat(self.queue, times - kicked);
            }
            Ok(())
        });
        if let Err(error) = more {
            tracing::warn!("CPU {} gets no more entries although many requests wait: {error}", queue.cpu);
        }
    }

    /// Has the kernel look so many times for requests that wait for an entry; returns how often that was possible.
    fn kick(&self, times: usize) -> usize {
        let Self { queue, .. } = self;
        // The kernel sends the message to the queue of this CPU. It unbinds threads of a CPU that goes offline.
        stay_on(queue.cpu);
        let file = queue.kept.load(Ordering::Relaxed);
        let one = |_: &usize| {
            let number = queue.kicks.fetch_add(1, Ordering::Relaxed) << u16::BITS | u64::from(queue.id);
            kick(queue.connection.device.as_fd(), file, number).is_ok()
        };
        (0..times).take_while(one).count()
    }
}

/// What a worker has done for a request.
enum Outcome {
    Served(ServeOutcome),
    /// The rest is the ring's.
    Waits(BlockingTransfer),
}

/// Makes a request's transfer, unless it would wait.
fn make_transfer(carrier: &mut RingCarrier<'_>, server: &mut Server, mut transfer: Transfer) -> Outcome {
    match try_transfer(carrier, &mut transfer) {
        TransferOutcome::Made(outcome) => {
            if let (true, Ok(bytes)) = (transfer.is_read(), &outcome) {
                carrier.counters.read_bytes.add(*bytes as u64);
            }
            Outcome::Served(ServeOutcome::Reply(server.finish_transfer(carrier.token(), carrier, outcome)))
        }
        TransferOutcome::Waits(second) => match server.detach(carrier.token()) {
            Some(unfinished) => {
                let (generation, message) = (carrier.generation, carrier.message);
                Outcome::Waits(BlockingTransfer { transfer, unfinished, generation, message, second })
            }
            None => {
                carrier.block.end_move(carrier.slot, carrier.generation, second);
                Outcome::Served(ServeOutcome::Reply(0))
            }
        },
        TransferOutcome::Over => Outcome::Served(ServeOutcome::Reply(0)),
    }
}
