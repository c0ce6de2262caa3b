//! The queue of one CPU: its ring, its entries, and its owner.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::time::Instant;

use ferry_engine::{
    CallSnapshot, CurrentRequest, Generation, GenerationCell, Mailbox, MonitoredWorker, NotEnded, Replacement, Watch,
};
use ferry_vfs::Errno;
use ferry_vfs::sync::lock;
use ferry_wire::fuse::encode_error;

use super::memory::Chunk;
use super::ring::Ring;
use super::ring_transfers::{RingTransfers, RunningTransfer};
use super::worker::{Order, ParkedWorker, start_worker};
use crate::connection::Connection;
use crate::deferred_replies::DeferredReplies;
use crate::delayed_requests::DelayedRequests;
use crate::sched_idle::SchedIdle;

/// A request that waits for a lock, or whose handler is blocked, keeps its entry, and without a free entry nothing of that
/// CPU goes on: so more are registered when few are left, up to so many times the depth. Then they wait.
const BLOCKS_MAX: usize = 256;
/// The memory of entries that are added for requests of one CPU that wait for a limit, in bytes.
const DELAYED_BYTES_MAX: usize = 32 << 20;

/// Threads of one queue: one that works, the others blocked in handlers or spare.
const THREADS_MAX: usize = 32;

/// The maximum including threads with aborted requests. Each may keep its entries, so there are chunks for all.
const THREADS_ALL_MAX: usize = 240;
const _: () = assert!(THREADS_ALL_MAX < BLOCKS_MAX);

/// What one entry's request has beside the memory.
#[derive(Default)]
pub(super) struct State {
    pub(super) generation_cell: GenerationCell,
    pub(super) unique: AtomicU64,
    pub(super) commit_id: AtomicU64,
    /// The transfer that is made for the request while its worker goes on.
    pub(super) under_way: Mutex<Option<RunningTransfer>>,
}

/// Entries that were registered together.
pub(super) struct Block {
    pub(super) chunk: Chunk,
    pub(super) states: Box<[State]>,
}

/// What others send to the owner.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mail {
    /// An entry's reply is written: commit it.
    Commit(usize),
    /// An entry's transfer is to be begun.
    Begin(usize),
    /// An entry's transfer takes too long.
    Cancel(usize),
    /// Have the kernel look for requests that wait for an entry.
    Kick,
    /// Look whether it is over.
    Look,
}

/// Handlers that are blocked.
#[derive(Debug, Default)]
struct Calls {
    /// Those whose threads are blocked while others have the queue.
    away: Vec<BlockedCall>,
    /// The request of the owner's own call was aborted, because no thread was available to take over the queue.
    aborted: Option<CallSnapshot>,
}

#[derive(Debug)]
struct BlockedCall {
    call: CallSnapshot,
    is_aborted: bool,
}

pub(super) struct Queue {
    pub(super) connection: Arc<Connection>,
    pub(super) cpu: usize,
    pub(super) id: u16,
    pub(super) ring: Ring,
    pub(super) depth: usize,
    payload_bytes: usize,
    blocks: Box<[OnceLock<Block>]>,
    /// Entries that were registered.
    registered: AtomicUsize,
    /// The regular file that was read or written last: one that the kernel knows.
    pub(super) kept: AtomicU64,
    /// How often the kernel was kicked.
    pub(super) kicks: AtomicU64,
    /// Threads that retry a failed kick.
    pub(super) kickers: AtomicUsize,
    /// Transfers that the ring is making.
    pub(super) active_transfers: RingTransfers,
    /// Requests with a later reply, and those with a blocked handler.
    pub(super) parked: AtomicIsize,
    calls: Mutex<Calls>,
    /// Requests that other threads will reply to, and their entries.
    pub(super) deferred: DeferredReplies<(usize, Generation)>,
    /// Entries of requests that wait for a limit.
    pub(super) delayed: DelayedRequests<usize>,
    pub(super) watch: Watch,
    /// The entry that is being served.
    pub(super) place: AtomicUsize,
    pub(super) mail: Mailbox<Mail>,
    /// The number of the owner's watch of the mailbox.
    pub(super) mail_watch: AtomicU64,
    pub(super) closed: AtomicBool,
    threads: AtomicUsize,
    pub(super) spares: Mutex<Vec<Arc<ParkedWorker>>>,
    /// All threads, as the scheduler sees them.
    pub(super) ways: Mutex<Vec<Arc<SchedIdle>>>,
    full: Once,
}

impl Queue {
    /// Prepares all that a queue needs, so that nothing but the registration can fail later.
    pub(super) fn new(connection: &Arc<Connection>, cpu: usize, depth: usize) -> io::Result<Self> {
        let id = u16::try_from(cpu).map_err(|_| io::Error::from(Errno::RANGE))?;
        let ring = Ring::new(depth, depth * BLOCKS_MAX, std::os::fd::AsFd::as_fd(&*connection.device))?;
        let blocks = (0..BLOCKS_MAX).map(|_| OnceLock::new()).collect();
        let queue = Self {
            connection: Arc::clone(connection),
            cpu,
            id,
            ring,
            depth,
            payload_bytes: connection.ring_payload_bytes,
            blocks,
            registered: AtomicUsize::new(0),
            kept: AtomicU64::new(0),
            kicks: AtomicU64::new(0),
            kickers: AtomicUsize::new(0),
            active_transfers: RingTransfers::default(),
            parked: AtomicIsize::new(0),
            calls: Mutex::default(),
            deferred: DeferredReplies::default(),
            delayed: DelayedRequests::default(),
            watch: Watch::default(),
            place: AtomicUsize::new(0),
            mail: Mailbox::new()?,
            mail_watch: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            threads: AtomicUsize::new(0),
            spares: Mutex::default(),
            ways: Mutex::default(),
            full: Once::new(),
        };
        queue.add_block()?;
        Ok(queue)
    }

    /// Allocates memory for `depth` more entries; returns their indexes, none if there are enough.
    pub(super) fn add_block(&self) -> io::Result<std::ops::Range<usize>> {
        let first = self.registered.load(Ordering::Relaxed);
        let Some(cell) = self.blocks.get(first / self.depth) else { return Ok(first..first) };
        let chunk = Chunk::new(self.depth, self.payload_bytes)?;
        let states = (0..chunk.entries()).map(|_| State::default()).collect();
        // The owner alone adds blocks.
        let _ = cell.set(Block { chunk, states });
        self.registered.store(first + self.depth, Ordering::Release);
        Ok(first..first + self.depth)
    }

    /// Whether so many requests wait that few entries are left for others. A blocked thread keeps those that it was given.
    pub(super) fn is_short(&self) -> bool {
        let parked = usize::try_from(self.parked.load(Ordering::Relaxed)).unwrap_or(0);
        let parked = parked.saturating_sub(self.deferred.aborted());
        let kept = lock(&self.calls).away.len() * self.depth;
        // A FLUSH passes those that wait for a limit, if there is an entry for it.
        let delayed = self.delayed.count().min(DELAYED_BYTES_MAX / self.payload_bytes.max(1));
        parked + kept + delayed + self.depth / 2 >= self.registered.load(Ordering::Relaxed)
    }

    /// Whether one more request may wait for an external event: no more than half of all entries may.
    pub(super) fn may_park(&self) -> bool {
        usize::try_from(self.parked.load(Ordering::Relaxed)).unwrap_or(0) < BLOCKS_MAX * self.depth / 2
    }

    /// An entry's block and its place in it.
    pub(super) fn entry(&self, index: usize) -> Option<(&Block, usize)> {
        let block = self.blocks.get(index / self.depth)?.get()?;
        Some((block, index % self.depth))
    }

    /// All entries.
    pub(super) fn states(&self) -> impl Iterator<Item = (usize, &State)> {
        self.blocks.iter().map_while(OnceLock::get).flat_map(|block| &block.states).enumerate()
    }

    /// Writes a whole reply into an entry of a current generation, and commits it, unless there is one.
    pub(super) fn answer(&self, index: usize, generation: Generation, reply: &[u8]) -> Result<(), NotEnded> {
        self.write_reply(index, generation, reply)?;
        self.mail.post(Mail::Commit(index));
        Ok(())
    }

    /// As [`Self::answer`], for a caller that commits the entry.
    pub(super) fn write_reply(&self, index: usize, generation: Generation, reply: &[u8]) -> Result<(), NotEnded> {
        let (block, slot) = self.entry(index).ok_or(NotEnded::Over)?;
        block.states[slot].generation_cell.try_end(generation)?;
        // SAFETY: the thread that ends the generation owns the entry until it is committed.
        unsafe {
            block.chunk.copy_in(slot, 0, reply);
            block.chunk.set_reply_payload(slot, reply.len().saturating_sub(ferry_serve::HEADER_BYTES));
        }
        Ok(())
    }

    /// Has every thread of the queue end.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.look();
    }

    /// Has every thread of the queue look whether it is over.
    pub(super) fn look(&self) {
        self.mail.post(Mail::Look);
        for parked_worker in &*lock(&self.spares) {
            parked_worker.look();
        }
    }

    /// Adds a thread that stands by.
    pub(super) fn add_spare(&self, parked_worker: &Arc<ParkedWorker>) {
        lock(&self.spares).push(Arc::clone(parked_worker));
        if self.is_over() {
            // Perhaps since before it was added.
            parked_worker.look();
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.closed.load(Ordering::Acquire) || self.connection.end.is_ended()
    }

    /// A thread that was blocked is back.
    pub(super) fn come_back(&self, call: CallSnapshot) {
        self.parked.fetch_sub(1, Ordering::Relaxed);
        lock(&self.calls).away.retain(|away| away.call != call);
    }

    /// Starts another thread for the queue, which waits for a command, besides `lost` threads with aborted requests.
    pub(super) fn add_thread(self: &Arc<Self>, lost: usize) -> io::Result<Arc<ParkedWorker>> {
        let threads = self.threads.load(Ordering::Relaxed);
        if threads >= THREADS_MAX + lost || threads >= THREADS_ALL_MAX {
            self.full.call_once(|| {
                tracing::warn!(
                    "{threads} handlers of CPU {} are blocked in the source, {lost} of them aborted: its other requests wait",
                    self.cpu
                );
            });
            return Err(Errno::AGAIN.into());
        }
        let parked_worker = start_worker(self)?;
        self.threads.fetch_add(1, Ordering::Relaxed);
        Ok(parked_worker)
    }
}

impl MonitoredWorker for Queue {
    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn serving(&self) -> CurrentRequest {
        let place = self.place.load(Ordering::Relaxed);
        let (unique, generation) =
            self.entry(place).map_or((0, GenerationCell::default().current()), |(block, slot)| {
                let state = &block.states[slot];
                (state.unique.load(Ordering::Relaxed), state.generation_cell.current())
            });
        CurrentRequest { unique, place, generation, call: self.watch.look() }
    }

    fn replace_worker(self: Arc<Self>, seen: CallSnapshot) -> Replacement {
        if self.is_over() {
            return Replacement::NotNeeded;
        }
        // Until the call is among those that are away: its thread may come back at once.
        let mut calls = lock(&self.calls);
        let is_aborted = calls.aborted == Some(seen);
        let lost = calls.away.iter().filter(|away| away.is_aborted).count() + usize::from(is_aborted);
        let spare = lock(&self.spares).pop();
        let Some(parked_worker) = spare.or_else(|| self.add_thread(lost).ok()) else { return Replacement::Nobody };
        match self.watch.take(seen) {
            Some(ownership) => {
                self.parked.fetch_add(1, Ordering::Relaxed);
                calls.away.push(BlockedCall { call: seen, is_aborted });
                if let Err(order) = parked_worker.give(Order::Own(ownership)) {
                    // It has ended with the connection. Another one waits for the queue's transfers.
                    match self.add_thread(lost) {
                        Ok(last) => _ = last.give(order),
                        Err(error) => tracing::error!("the transfers of CPU {} are not waited for: {error}", self.cpu),
                    }
                }
                Replacement::Found
            }
            None => {
                self.add_spare(&parked_worker);
                Replacement::NotNeeded
            }
        }
    }

    fn runs(&self, serving: &CurrentRequest) -> bool {
        self.entry(serving.place)
            .is_some_and(|(block, slot)| block.states[slot].generation_cell.runs(serving.generation))
    }

    fn abort(&self, serving: &CurrentRequest, errno: Errno) -> Result<(), NotEnded> {
        let reply = encode_error(serving.unique, errno);
        // Until the call is marked: its thread may come back at once.
        let mut calls = lock(&self.calls);
        match self.answer(serving.place, serving.generation, &reply) {
            // Perhaps by a transfer that its thread does not come back from.
            Err(NotEnded::Held) => self.revoke(serving.place, serving.generation, &reply)?,
            outcome => outcome?,
        }
        match calls.away.iter_mut().find(|away| away.call == serving.call) {
            Some(away) => away.is_aborted = true,
            None if self.watch.look() == serving.call => calls.aborted = Some(serving.call),
            // The handler has returned, but another thread had to reply.
            None => {}
        }
        Ok(())
    }

    fn poll_blocked(&self) {
        // A worker with unread mail needs no further message.
        if !self.mail.is_filled() {
            self.mail.post(Mail::Kick);
        }
    }

    fn apply_policy(&self, verdict: &dyn Fn(u64, Instant) -> Option<Errno>) -> bool {
        let later = self.deferred.apply_policy(|unique, &(index, generation), since| {
            let runs =
                self.entry(index).is_some_and(|(block, slot)| block.states[slot].generation_cell.runs(generation));
            if !runs {
                return Some(false);
            }
            let errno = verdict(unique, since)?;
            match self.answer(index, generation, &encode_error(unique, errno)) {
                Err(NotEnded::Held) => None,
                outcome => Some(outcome.is_ok()),
            }
        });
        // The limit may make them wait for any time, so only an interrupt ends them.
        for (unique, index, errno) in self.delayed.end_by(|unique| verdict(unique, Instant::now())) {
            if let Some((block, slot)) = self.entry(index) {
                let generation = block.states[slot].generation_cell.current();
                let _ = self.answer(index, generation, &encode_error(unique, errno));
            }
        }
        self.abort_transfers(verdict) | later | (self.delayed.count() > 0)
    }

    fn tick(self: Arc<Self>, served: bool) {
        let wanted = self.active_transfers.is_quiet();
        lock(&self.ways).iter().for_each(|way| way.look(wanted, served));
    }
}
