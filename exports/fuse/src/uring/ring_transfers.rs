//! Transfers on the ring, while its worker serves other requests.
//!
//! While a transfer is in flight its entry's generation cannot end, so that the entry does not return to the kernel
//! during the transfer. One owner of the queue may begin it and the next one complete it, so all its state is stored
//! with the entry.
//!
//! A transfer that takes too long is cancelled. If the kernel cannot cancel it (a hanging disk), it is abandoned: its
//! caller gets an error, the entry gets other memory and returns to the kernel, and the transfer continues in the old
//! memory, which is kept with its file until it ends. The same applies to a transfer that a worker runs itself without
//! returning.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_engine::{Generation, NotEnded, Transfer};
use ferry_serve::{DetachedTransfer, HEADER_BYTES};
use ferry_vfs::Errno;
use ferry_vfs::sync::lock;
use ferry_wire::fuse::encode_error;

use super::carrier::RingCarrier;
use super::memory::{Mapping, Message};
use super::queue::{Block, Mail, Queue};
use super::worker::Worker;

/// Bits of an entry's index in the number of a transfer: more than there are entries.
const INDEX_BITS: u32 = 16;

/// How long a cancelled transfer has to end. Those that can be cancelled take microseconds.
const CANCEL_PATIENCE: Duration = Duration::from_millis(100);

/// A transfer under way.
pub(super) struct RunningTransfer {
    transfer: Transfer,
    unfinished: DetachedTransfer,
    generation: Generation,
    message: Message,
    /// Its number in the ring: the entry's index, and a number that the entry's next transfer will not have.
    number: usize,
    /// When it began.
    since: Instant,
    /// It took too long: the error for its caller, unless it still succeeds.
    abandoned: Option<AbandonedTransfer>,
}

#[derive(Clone, Copy, Debug)]
struct AbandonedTransfer {
    errno: Errno,
    since: Instant,
    /// The owner of the queue was asked to abandon it.
    is_left: bool,
}

/// The transfers of a queue that its ring is making.
#[derive(Default)]
pub(super) struct RingTransfers {
    count: AtomicUsize,
    submitted: AtomicUsize,
    /// Abandoned transfers, whose callers got an error, with the resources that they still use.
    abandoned: Mutex<HashMap<usize, (RunningTransfer, Mapping)>>,
}

impl RingTransfers {
    fn number(&self, index: usize) -> usize {
        debug_assert!(index >> INDEX_BITS == 0, "there are fewer entries");
        // The ring has uses of its own for the upper bits.
        let tag = self.submitted.fetch_add(1, Ordering::Relaxed) & (usize::MAX >> (INDEX_BITS + 8));
        tag << INDEX_BITS | index
    }

    fn index(number: usize) -> usize {
        number & ((1 << INDEX_BITS) - 1)
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }
}

/// What became of a transfer that a worker has tried to make.
pub(super) enum TransferOutcome {
    Made(io::Result<usize>),
    /// It would wait. This is where it would move data; the generation stays its own until it is left to the ring or dropped.
    Waits(*mut u8),
    /// The generation has ended.
    Over,
}

/// Makes a transfer on this thread, if it need not wait.
pub(super) fn try_transfer(carrier: &RingCarrier<'_>, transfer: &mut Transfer) -> TransferOutcome {
    let chunk = &carrier.block.chunk;
    if !carrier.generation_cell().begin_move(carrier.generation) {
        return TransferOutcome::Over;
    }
    let second = chunk.second(carrier.slot);
    // SAFETY: the transfer is described within the payload that began at `second` during the generation, and still does, for the
    // generation is this request's; while it moves, the entry is this request's, or else this memory is this transfer's alone.
    let outcome = unsafe { transfer.try_now() };
    carrier.counters.system_calls.add(transfer.calls());
    match outcome {
        Some(outcome) => {
            carrier.block.end_move(carrier.slot, carrier.generation, second);
            TransferOutcome::Made(outcome)
        }
        None => TransferOutcome::Waits(second),
    }
}

/// What is left to do for a request whose transfer would wait.
pub(super) struct BlockingTransfer {
    pub(super) transfer: Transfer,
    pub(super) unfinished: DetachedTransfer,
    pub(super) generation: Generation,
    pub(super) message: Message,
    /// As in [`TransferOutcome::Waits`].
    pub(super) second: *mut u8,
}

/// Leaves a request's transfer to the ring: begun by this worker, or, if the queue is not ours any more, by the next.
pub(super) fn submit_to_ring(worker: &Worker<'_>, index: usize, waits: BlockingTransfer, ours: bool) {
    let queue = worker.queue;
    let Some((block, slot)) = queue.entry(index) else { return };
    let BlockingTransfer { transfer, unfinished, generation, message, second } = waits;
    let state = &block.states[slot];
    let mut under_way = lock(&state.under_way);
    // A generation is revoked only under this lock, and only while no transfer is stored here.
    if !state.generation_cell.moves(generation) {
        return block.end_move(slot, generation, second);
    }
    let number = queue.active_transfers.number(index);
    *under_way = Some(RunningTransfer {
        transfer,
        unfinished,
        generation,
        message,
        number,
        since: Instant::now(),
        abandoned: None,
    });
    drop(under_way);
    queue.parked.fetch_add(1, Ordering::Relaxed);
    if ours {
        worker.begin_transfer(index);
        worker.add_entries();
    } else {
        queue.mail.post(Mail::Begin(index));
    }
}

/// These are for the monitor.
impl Queue {
    /// Asks about each transfer that the ring makes, and ends it by a verdict. Returns whether there are any.
    pub(super) fn abort_transfers(&self, verdict: &dyn Fn(u64, Instant) -> Option<Errno>) -> bool {
        if self.active_transfers.is_quiet() {
            return false;
        }
        let now = Instant::now();
        for (index, state) in self.states() {
            let mut under_way = lock(&state.under_way);
            let Some(under_way) = &mut *under_way else { continue };
            match &mut under_way.abandoned {
                None => {
                    let Some(errno) = verdict(state.unique.load(Ordering::Relaxed), under_way.since) else { continue };
                    under_way.abandoned = Some(AbandonedTransfer { errno, since: now, is_left: false });
                }
                Some(abandoned) if !abandoned.is_left && now.duration_since(abandoned.since) >= CANCEL_PATIENCE => {
                    abandoned.is_left = true;
                }
                Some(_) => continue,
            }
            self.mail.post(Mail::Cancel(index));
        }
        true
    }

    /// Replies to a request whose transfer blocks its worker.
    pub(super) fn revoke(&self, index: usize, generation: Generation, reply: &[u8]) -> Result<(), NotEnded> {
        let (block, slot) = self.entry(index).ok_or(NotEnded::Over)?;
        let state = &block.states[slot];
        let under_way = lock(&state.under_way);
        if under_way.is_some() {
            // It is the ring's by now.
            return Err(NotEnded::Held);
        }
        let (memory, answered) = block.leave(slot, generation, reply)?;
        drop(under_way);
        // The worker unmaps it when it is back.
        std::mem::forget(memory);
        if answered {
            self.mail.post(Mail::Commit(index));
        }
        Ok(())
    }
}

impl Block {
    /// Ends this thread's transfer, whether it ran or not.
    pub(super) fn end_move(&self, slot: usize, generation: Generation, second: *mut u8) {
        if !self.states[slot].generation_cell.end_move(generation) {
            // SAFETY: revoking a worker's transfer leaves it its memory, and the transfer has just ended.
            drop(unsafe { self.chunk.abandoned_memory(second) });
        }
    }

    /// Writes the reply to a request whose transfer goes on. Returns the memory that it keeps, and whether to commit.
    fn leave(&self, slot: usize, generation: Generation, reply: &[u8]) -> Result<(Mapping, bool), NotEnded> {
        let spare = self.chunk.spare().map_err(|error| {
            tracing::warn!("a request that takes too long cannot be aborted for lack of memory: {error}");
            NotEnded::Held
        })?;
        self.states[slot].generation_cell.revoke(generation)?;
        // SAFETY: the thread that ends the generation owns the entry until it is committed, except for the transfer;
        // both callers keep the returned memory until the transfer ends.
        let (memory, replaced) = unsafe { self.chunk.replace(slot, spare) };
        if let Err(error) = replaced {
            tracing::error!("an entry is lost and its caller blocks forever: cannot replace its buffer: {error}");
            return Ok((memory, false));
        }
        // SAFETY: as above.
        unsafe {
            self.chunk.copy_in(slot, 0, reply);
            self.chunk.set_reply_payload(slot, reply.len().saturating_sub(HEADER_BYTES));
        }
        Ok((memory, true))
    }
}

/// These are for the owner of the queue.
impl Worker<'_> {
    /// Queues the rest of an entry's transfer.
    pub(super) fn begin_transfer(&self, index: usize) {
        let queue = self.queue;
        let Some((block, slot)) = queue.entry(index) else { return };
        let (number, entry) = match &*lock(&block.states[slot].under_way) {
            None => return,
            Some(RunningTransfer { number, abandoned: Some(AbandonedTransfer { errno, .. }), .. }) => {
                (*number, Err(io::Error::from(*errno)))
            }
            Some(RunningTransfer { number, transfer, .. }) => (*number, transfer.entry(queue.ring.unprivileged)),
        };
        // Kernel threads inherit this thread's scheduling class.
        self.way.run_normally();
        // SAFETY: this thread owns the queue; transfer, file and memory are kept until it has completed.
        let begun = entry.and_then(|entry| self.push(|| unsafe { queue.ring.transfer(number, &entry) }));
        match begun {
            Ok(()) => _ = queue.active_transfers.count.fetch_add(1, Ordering::Relaxed),
            Err(error) => self.finish_transfer(index, Err(error)),
        }
    }

    /// The ring has ended a transfer, or a part of it.
    pub(super) fn transfer_completed(&self, number: usize, result: i32) {
        let queue = self.queue;
        queue.active_transfers.count.fetch_sub(1, Ordering::Relaxed);
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        let left = lock(&queue.active_transfers.abandoned).remove(&number);
        if let Some((under_way, memory)) = left {
            return self.finish_abandoned(under_way, memory, result);
        }
        let index = RingTransfers::index(number);
        let Some((block, slot)) = queue.entry(index) else { return };
        let outcome = match &mut *lock(&block.states[slot].under_way) {
            Some(RunningTransfer { abandoned: Some(abandoned), .. }) if result.is_err() => {
                Some(Err(io::Error::from(abandoned.errno)))
            }
            Some(RunningTransfer { transfer, .. }) => transfer.advance(result),
            None => return,
        };
        match outcome {
            Some(outcome) => self.finish_transfer(index, outcome),
            None => self.begin_transfer(index),
        }
    }

    /// Replies to the request whose transfer has ended.
    fn finish_transfer(&self, index: usize, outcome: io::Result<usize>) {
        let Self { queue, counters, .. } = self;
        let Some((block, slot)) = queue.entry(index) else { return };
        let state = &block.states[slot];
        let Some(RunningTransfer { transfer, unfinished, generation, message, .. }) = lock(&state.under_way).take()
        else {
            return;
        };
        if let (true, Ok(bytes)) = (transfer.is_read(), &outcome) {
            counters.read_bytes.add(*bytes as u64);
        }
        let ended = state.generation_cell.end_move(generation);
        debug_assert!(ended, "what is left is taken away under the lock");
        queue.parked.fetch_sub(1, Ordering::Relaxed);
        let mut carrier = RingCarrier { queue, block, slot, index, generation, message, counters, transfer: None };
        let bytes = unfinished.finish(&mut carrier, outcome);
        if state.generation_cell.end(generation) {
            // SAFETY: the thread that ends the generation owns the entry until it is committed.
            unsafe { block.chunk.set_reply_payload(slot, bytes.saturating_sub(HEADER_BYTES)) };
            self.commit(index);
        }
    }

    /// Called when an abandoned transfer ends. If it has changed a file after all, the change is published.
    fn finish_abandoned(&self, under_way: RunningTransfer, memory: Mapping, outcome: io::Result<usize>) {
        let Self { queue, counters, .. } = self;
        let RunningTransfer { unfinished, generation, message, number, .. } = under_way;
        drop(memory);
        let index = RingTransfers::index(number);
        let Some((block, slot)) = queue.entry(index) else { return };
        // Its generation has ended: nothing is written.
        let mut carrier = RingCarrier { queue, block, slot, index, generation, message, counters, transfer: None };
        let _ = unfinished.finish(&mut carrier, outcome);
    }

    /// Has an entry's transfer end sooner, or leaves it.
    pub(super) fn cancel_transfer(&self, index: usize) {
        let Some((block, slot)) = self.queue.entry(index) else { return };
        let mut state = lock(&block.states[slot].under_way);
        let number = match &*state {
            Some(RunningTransfer { abandoned: Some(AbandonedTransfer { is_left: true, .. }), .. }) => {
                return self.leave(index, (block, slot), &mut state);
            }
            Some(RunningTransfer { number, .. }) => *number,
            None => return,
        };
        drop(state);
        // SAFETY: this thread owns the queue.
        if let Err(error) = self.push(|| unsafe { self.queue.ring.cancel(number) }) {
            tracing::error!("a transfer that takes too long cannot be cancelled: {error}");
        }
    }

    /// Replies to a request whose transfer the kernel does not cancel, and keeps the resources that it still uses.
    fn leave(&self, index: usize, (block, slot): (&Block, usize), state: &mut Option<RunningTransfer>) {
        let queue = self.queue;
        let Some(RunningTransfer { generation, number, abandoned: Some(abandoned), .. }) = state else { return };
        let unique = block.states[slot].unique.load(Ordering::Relaxed);
        match block.leave(slot, *generation, &encode_error(unique, abandoned.errno)) {
            Ok((memory, answered)) => {
                let number = *number;
                if let Some(under_way) = state.take() {
                    lock(&queue.active_transfers.abandoned).insert(number, (under_way, memory));
                }
                if answered {
                    queue.parked.fetch_sub(1, Ordering::Relaxed);
                    self.commit(index);
                }
            }
            // The monitor will ask once more.
            Err(_) => abandoned.is_left = false,
        }
    }

    /// The connection has ended: waits until no transfer touches the memory any more.
    pub(super) fn drain(&self) {
        let queue = self.queue;
        for (index, _) in queue.states().filter(|(_, state)| lock(&state.under_way).is_some()) {
            self.cancel_transfer(index);
        }
        while !queue.active_transfers.is_quiet() {
            if let Err(error) = self.enter(true) {
                tracing::error!("the ring of CPU {} is broken, its memory stays: {error}", queue.cpu);
                std::mem::forget(Arc::clone(queue));
                return;
            }
            // SAFETY: this thread owns the queue.
            while let Some(completed) = unsafe { queue.ring.next() } {
                if let super::ring::Completed::Transfer(..) = completed {
                    queue.active_transfers.count.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use io_uring::{opcode, types};

    use super::*;
    use crate::connection::Connection;
    use crate::uring::worker::{Order, ParkedWorker};

    const SOON: Duration = Duration::from_secs(10);

    /// A queue with a worker that stands by, without a kernel that sends requests.
    fn queue() -> (Arc<Queue>, Arc<ParkedWorker>) {
        let queue = Arc::new(Queue::new(&Connection::without_kernel(), 0, 1).unwrap());
        let worker = queue.add_thread(0).unwrap();
        (queue, worker)
    }

    #[test]
    fn who_gets_a_queue_at_the_end_waits_for_its_transfers() {
        let (queue, worker) = queue();
        let end = Arc::clone(&queue.connection.end);
        let (from, to) = rustix::pipe::pipe().unwrap();
        let (block, slot) = queue.entry(0).unwrap();
        // The transfer of an owner that is now blocked in a handler.
        let read = opcode::Read::new(types::Fd(from.as_raw_fd()), block.chunk.second(slot), 1).build();
        // SAFETY: no thread owns the queue yet, and its memory stays until the end of this test.
        unsafe { queue.ring.transfer(queue.active_transfers.number(0), &read) }.unwrap();
        queue.ring.handle().enter(1, false).unwrap();
        queue.active_transfers.count.fetch_add(1, Ordering::Relaxed);
        end.mark_ended();
        worker.give(Order::Own(queue.watch.first_owner())).unwrap();
        assert_eq!(end.wait_for_threads(Duration::from_millis(100)), 1, "the memory is in use");
        rustix::io::write(&to, &[1]).unwrap();
        assert_eq!(end.wait_for_threads(SOON), 0);
        assert!(queue.active_transfers.is_quiet());
    }

    #[test]
    fn a_thread_that_becomes_a_spare_after_the_end_ends() {
        use ferry_engine::{MonitoredWorker, Replacement};
        let (queue, worker) = queue();
        let end = Arc::clone(&queue.connection.end);
        let mut ownership = queue.watch.first_owner();
        queue.watch.enter(&mut ownership);
        end.mark_ended();
        queue.look();
        assert_eq!(Arc::clone(&queue).replace_worker(queue.watch.look()), Replacement::NotNeeded);
        assert!(queue.watch.leave(&mut ownership), "the blocked thread keeps the queue, and waits for its transfers");
        queue.add_spare(&worker);
        assert_eq!(end.wait_for_threads(SOON), 0);
    }

    #[test]
    fn a_spare_that_has_ended_returns_its_order() {
        let (queue, worker) = queue();
        let end = Arc::clone(&queue.connection.end);
        end.mark_ended();
        worker.look();
        assert_eq!(end.wait_for_threads(SOON), 0);
        assert!(matches!(worker.give(Order::Own(queue.watch.first_owner())), Err(Order::Own(_))));
    }

    #[test]
    fn numbers_tell_transfers_of_one_entry_apart() {
        let transfers = RingTransfers::default();
        let numbers: Vec<usize> = (0..5).map(|_| transfers.number(40_000)).collect();
        assert!(numbers.iter().all(|number| RingTransfers::index(*number) == 40_000));
        assert!(numbers.windows(2).all(|pair| pair[0] != pair[1]));
        transfers.submitted.store(usize::MAX, Ordering::Relaxed);
        assert!(transfers.number(65_535) < 1 << (usize::BITS - 3), "above are the ring's own marks");
    }
}
