//! The thread that owns a CPU's queue, and those that stand by.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;

use ferry_serve::{Carrier, HEADER_BYTES, Served, Server};
use ferry_vfs::Errno;
use ferry_wire::fuse::{Opcode, encode_error};

use super::carrier::RingCarrier;
use super::memory::Message;
use super::moving::{UnderWay, leave_to_ring};
use super::nudge::{NOTIFY_REPLY, nudge};
use super::queue::{Mail, Queue};
use super::ring::{Completed, Door, Full};
use crate::connection::Present;
use crate::giving_way::GivingWay;
use crate::machine::stay_on;
use crate::stats::Counters;
use crate::transfer::Transfer;
use crate::watch::Ownership;

/// What a thread that stands by is told.
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
pub(super) struct Seat {
    order: Mutex<Option<Order>>,
    thread: OnceLock<Thread>,
}

impl Seat {
    /// Tells the thread what to do.
    pub(super) fn give(&self, order: Order) {
        let mut waiting = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        // To look is no more than what every order begins with.
        if waiting.is_none() || !matches!(order, Order::Look) {
            *waiting = Some(order);
        }
        drop(waiting);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn wait(&self) -> Order {
        loop {
            if let Some(order) = self.order.lock().unwrap_or_else(PoisonError::into_inner).take() {
                return order;
            }
            std::thread::park();
        }
    }
}

/// Starts a thread that stands by for a queue.
///
/// # Errors
/// No thread can be had.
pub(super) fn start_worker(queue: &Arc<Queue>) -> io::Result<Arc<Seat>> {
    let seat = Arc::new(Seat::default());
    let present = Present::new(&queue.connection);
    let name = format!("fuse-cpu-{}", queue.cpu);
    let thread = std::thread::Builder::new().name(name).spawn({
        let (queue, seat) = (Arc::clone(queue), Arc::clone(&seat));
        move || {
            stay_on(queue.cpu);
            queue.ways.lock().unwrap_or_else(PoisonError::into_inner).push(GivingWay::here());
            Worker::new(&queue).stand_by(&seat);
            drop((seat, queue));
            drop(present);
        }
    })?;
    let _ = seat.thread.set(thread.thread().clone());
    Ok(seat)
}

/// Why a worker stopped serving.
enum Ended {
    /// Somebody else owns the queue now.
    Replaced,
    /// The connection has ended.
    Over,
}

/// A thread of a queue. What it does with the ring is for the owner of the queue alone.
pub(super) struct Worker<'a> {
    pub(super) queue: &'a Arc<Queue>,
    door: Door<'a>,
    server: Server,
    pub(super) counters: Arc<Counters>,
}

impl<'a> Worker<'a> {
    fn new(queue: &'a Arc<Queue>) -> Self {
        Self {
            queue,
            door: queue.ring.door(),
            server: queue.connection.server(),
            counters: queue.connection.counters.lend(),
        }
    }

    /// Waits for orders until all is over. The thread does not end before: entries that it has fetched are bound to
    /// it, and the kernel would take them away with it.
    fn stand_by(&mut self, seat: &Arc<Seat>) {
        loop {
            let order = seat.wait();
            if self.queue.is_over() {
                return;
            }
            let ended = match order {
                Order::Begin(ownership, told) => self.begin(ownership, &told),
                Order::Own(ownership) => self.own(ownership),
                Order::Look => continue,
            };
            self.server.batch_end();
            if let Ended::Over = ended {
                return;
            }
            self.queue.spares.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(seat));
            if self.queue.is_over() {
                return;
            }
        }
    }

    /// Registers the first entries. The kernel refuses them at once or not at all.
    fn begin(&mut self, mut ownership: Ownership, told: &Sender<(usize, io::Result<()>)>) -> Ended {
        let outcome = self.register(0..self.queue.depth).and_then(|()| self.watch_mail()).and_then(|()| self.submit());
        let mut early = Vec::new();
        let mut refused = Vec::new();
        // SAFETY: this thread owns the queue.
        while let Some(completed) = unsafe { self.queue.ring.next() } {
            match completed {
                Completed::Request(index) => early.push(index),
                Completed::Lost(_, errno) => refused.push(errno),
                Completed::Mail(_) | Completed::Transfer(..) => {}
            }
        }
        let outcome = match refused.first() {
            // With one entry the queue works, if not as well.
            Some(errno) if refused.len() == self.queue.depth => outcome.and(Err((*errno).into())),
            _ => outcome,
        };
        let failed = outcome.is_err();
        // Whoever asked has given up if it is not there any more.
        let _ = told.send((self.queue.cpu, outcome));
        if failed {
            return Ended::Over;
        }
        for index in early {
            if !self.serve(index, &mut ownership) {
                return Ended::Replaced;
            }
        }
        self.own(ownership)
    }

    /// Serves until the queue is somebody else's, or over.
    fn own(&mut self, mut ownership: Ownership) -> Ended {
        self.add_entries();
        loop {
            // SAFETY: this thread owns the queue.
            match unsafe { self.queue.ring.next() } {
                Some(Completed::Request(index)) => {
                    if !self.serve(index, &mut ownership) {
                        return Ended::Replaced;
                    }
                }
                Some(Completed::Transfer(index, result)) => self.transfer_completed(index, result),
                Some(Completed::Mail(more)) => self.read_mail(more),
                Some(Completed::Lost(index, errno)) => self.lost(index, errno),
                None => {
                    self.server.batch_end();
                    if self.queue.is_over() {
                        self.drain();
                        return Ended::Over;
                    }
                    if let Err(error) = self.enter(true) {
                        tracing::error!("the ring of CPU {} is broken, the mount ends: {error}", self.queue.cpu);
                        self.queue.connection.end.declare();
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

    fn submit(&self) -> io::Result<()> {
        self.enter(false)
    }

    /// An entry was taken away from us.
    fn lost(&self, index: usize, errno: Errno) {
        match errno {
            Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED | Errno::NODEV => {
                tracing::debug!("entry {index} of CPU {} ended with the connection", self.queue.cpu);
            }
            _ => tracing::error!("the kernel took entry {index} of CPU {} away: {errno}", self.queue.cpu),
        }
    }

    fn read_mail(&self, more: bool) {
        for mail in self.queue.mail.take() {
            match mail {
                Mail::Commit(index) => self.commit(index),
                Mail::Begin(index) => self.begin_transfer(index),
                Mail::Cancel(index) => self.cancel_transfer(index),
                Mail::Nudge => self.nudge(),
                Mail::Look => {}
            }
        }
        if !more && let Err(error) = self.watch_mail() {
            tracing::error!("replies that come later cannot be told of: {error}");
        }
    }

    fn watch_mail(&self) -> io::Result<()> {
        let mailbox = self.queue.mail.as_fd();
        // SAFETY: this thread owns the queue.
        self.push(|| unsafe { self.queue.ring.watch(mailbox) })
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

    /// Serves the request in an entry. Answers whether the queue is still ours.
    fn serve(&mut self, index: usize, ownership: &mut Ownership) -> bool {
        let Self { queue, server, counters, .. } = self;
        let Some((block, slot)) = queue.entry(index) else { return true };
        let state = &block.states[slot];
        let term = state.lease.term();
        // SAFETY: the kernel has just given the entry to us, and nobody else knows of this term yet.
        let (header, ring_entry) = unsafe { block.chunk.request(slot) };
        let message = Message::new(&header, &ring_entry, block.chunk.payload_bytes());
        state.unique.store(header.unique, Ordering::Relaxed);
        state.commit_id.store(ring_entry.commit_id, Ordering::Relaxed);
        if header.opcode == NOTIFY_REPLY {
            // Our own nudge; any answer does.
            if queue.write_reply(index, term, &encode_error(header.unique, Errno::NOSYS)).is_ok() {
                self.commit(index);
            }
            return true;
        }
        if header.opcode == Opcode::Read as u32 || header.opcode == Opcode::Write as u32 {
            queue.kept.store(header.nodeid, Ordering::Relaxed);
        }
        queue.place.store(index, Ordering::Relaxed);
        queue.watch.enter(ownership);
        queue.connection.bell.ring();
        counters.requests.add(1);
        let mut carrier = RingCarrier { queue, block, slot, index, term, message, counters, transfer: None };
        let outcome = match (server.serve_caught(&mut carrier), carrier.transfer.take()) {
            (Served::Transfer, Some(transfer)) => make(&mut carrier, server, transfer),
            (served, _) => Outcome::Served(served),
        };
        let ours = queue.watch.leave(ownership);
        if !ours {
            // The monitor counted it when it gave the queue to somebody else.
            queue.parked.fetch_sub(1, Ordering::Relaxed);
        }
        match outcome {
            Outcome::UnderWay(under_way) => leave_to_ring(self, index, state, under_way, ours),
            Outcome::Served(Served::Later | Served::Parked) => {
                queue.parked.fetch_add(1, Ordering::Relaxed);
                if ours {
                    self.add_entries();
                }
            }
            Outcome::Served(Served::Reply(bytes)) if bytes >= HEADER_BYTES => {
                if state.lease.end(term) {
                    // SAFETY: whoever ends the term has the entry for itself until it is committed.
                    unsafe { block.chunk.set_reply_payload(slot, bytes - HEADER_BYTES) };
                    self.send(index, ours);
                }
            }
            // Given up by the monitor; or a request that wants no reply, but an entry must be given back with one.
            Outcome::Served(_) => {
                let _ = queue.answer(index, term, &encode_error(header.unique, Errno::IO));
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
            indices.for_each(|_| self.nudge());
            Ok(())
        });
        if let Err(error) = more {
            tracing::warn!("CPU {} gets no more entries although many requests wait: {error}", queue.cpu);
        }
    }

    /// Has the kernel look for requests that wait for an entry.
    fn nudge(&self) {
        let Self { queue, .. } = self;
        let number = queue.nudges.fetch_add(1, Ordering::Relaxed) << u16::BITS | u64::from(queue.id);
        let file = queue.kept.load(Ordering::Relaxed);
        if let Err(error) = nudge(queue.connection.device.as_fd(), file, number) {
            tracing::debug!("requests of CPU {} may wait until another one ends: {error}", queue.cpu);
        }
    }
}

/// What a worker has done for a request.
enum Outcome {
    Served(Served),
    /// The rest is the ring's.
    UnderWay(UnderWay),
}

/// Makes a request's transfer, unless it would wait.
fn make(carrier: &mut RingCarrier<'_>, server: &mut Server, mut transfer: Transfer) -> Outcome {
    let Some(hold) = carrier.hold() else { return Outcome::Served(Served::Reply(0)) };
    let payload = carrier.block.chunk.payload(carrier.slot);
    // SAFETY: the transfer was made within the payload; the term is held, so the entry is this request's.
    let outcome = unsafe { transfer.try_now(payload) };
    carrier.counters.system_calls.add(transfer.calls());
    if let Some(outcome) = outcome {
        drop(hold);
        if let (true, Ok(bytes)) = (transfer.is_read(), &outcome) {
            carrier.counters.read_bytes.add(*bytes as u64);
        }
        return Outcome::Served(Served::Reply(server.transferred(carrier.token(), carrier, outcome)));
    }
    let Some(unfinished) = server.detach(carrier.token()) else { return Outcome::Served(Served::Reply(0)) };
    // Until the ring has made it.
    hold.keep();
    Outcome::UnderWay(UnderWay::new(transfer, unfinished, carrier.term, carrier.message))
}
