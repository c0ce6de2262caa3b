//! Transfers that the ring makes while its worker goes on with other requests.
//!
//! A transfer keeps its entry's term held from its beginning to its completion, so that nobody gives the entry back
//! to the kernel while data are moved into or out of it. It may be begun by one owner of the queue and completed by the
//! next, so all that it needs lies with the entry.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Instant;

use ferry_serve::{HEADER_BYTES, Unfinished};
use ferry_vfs::Errno;

use super::carrier::RingCarrier;
use super::memory::Message;
use super::queue::{Mail, State};
use super::worker::Worker;
use crate::lease::Term;
use crate::transfer::Transfer;

/// A transfer under way.
pub(super) struct UnderWay {
    transfer: Transfer,
    unfinished: Unfinished,
    term: Term,
    message: Message,
    /// Since when.
    pub(super) since: Instant,
    /// It took too long: what its caller is told, unless it succeeds all the same.
    pub(super) given_up: Option<Errno>,
}

impl std::fmt::Debug for UnderWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UnderWay").field("since", &self.since).field("given_up", &self.given_up).finish_non_exhaustive()
    }
}

impl UnderWay {
    pub(super) fn new(transfer: Transfer, unfinished: Unfinished, term: Term, message: Message) -> Self {
        Self { transfer, unfinished, term, message, since: Instant::now(), given_up: None }
    }
}

fn lock(state: &State) -> MutexGuard<'_, Option<UnderWay>> {
    state.under_way.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Leaves a request's transfer to the ring: begun by this worker, or, if the queue is not ours any more, by the next.
pub(super) fn leave_to_ring(worker: &Worker<'_>, index: usize, state: &State, under_way: UnderWay, ours: bool) {
    *lock(state) = Some(under_way);
    worker.queue.parked.fetch_add(1, Ordering::Relaxed);
    if ours {
        worker.begin_transfer(index);
        worker.add_entries();
    } else {
        worker.queue.mail.post(Mail::Begin(index));
    }
}

/// These are for the owner of the queue.
impl Worker<'_> {
    /// Queues what is left of an entry's transfer.
    pub(super) fn begin_transfer(&self, index: usize) {
        let queue = self.queue;
        let Some((block, slot)) = queue.entry(index) else { return };
        let entry = match &*lock(&block.states[slot]) {
            None => return,
            Some(UnderWay { given_up: Some(errno), .. }) => Err(io::Error::from(*errno)),
            Some(UnderWay { transfer, .. }) => transfer.entry(block.chunk.payload(slot), queue.ring.unprivileged),
        };
        // SAFETY: this thread owns the queue; the transfer lies with its entry until it has completed, and so does the
        // file; the queue keeps the memory.
        let begun = entry.and_then(|entry| self.push(|| unsafe { queue.ring.transfer(index, &entry) }));
        match begun {
            Ok(()) => _ = queue.moving.fetch_add(1, Ordering::Relaxed),
            Err(error) => self.finish_transfer(index, Err(error)),
        }
    }

    /// The ring has ended an entry's transfer, or a part of it.
    pub(super) fn transfer_completed(&self, index: usize, result: i32) {
        let queue = self.queue;
        queue.moving.fetch_sub(1, Ordering::Relaxed);
        let Some((block, slot)) = queue.entry(index) else { return };
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        let outcome = match &mut *lock(&block.states[slot]) {
            None => return,
            Some(UnderWay { given_up: Some(errno), .. }) if result.is_err() => Some(Err(io::Error::from(*errno))),
            Some(UnderWay { transfer, .. }) => transfer.advance(result),
        };
        match outcome {
            Some(outcome) => self.finish_transfer(index, outcome),
            None => self.begin_transfer(index),
        }
    }

    /// Answers the request whose transfer has ended.
    fn finish_transfer(&self, index: usize, outcome: io::Result<usize>) {
        let Self { queue, counters, .. } = self;
        let Some((block, slot)) = queue.entry(index) else { return };
        let state = &block.states[slot];
        let Some(UnderWay { transfer, unfinished, term, message, .. }) = lock(state).take() else { return };
        if let (true, Ok(bytes)) = (transfer.is_read(), &outcome) {
            counters.read_bytes.add(*bytes as u64);
        }
        state.lease.release();
        queue.parked.fetch_sub(1, Ordering::Relaxed);
        let mut carrier = RingCarrier { queue, block, slot, index, term, message, counters, transfer: None };
        let bytes = unfinished.finish(&mut carrier, outcome);
        if state.lease.end(term) {
            // SAFETY: whoever ends the term has the entry for itself until it is committed.
            unsafe { block.chunk.set_reply_payload(slot, bytes.saturating_sub(HEADER_BYTES)) };
            self.commit(index);
        }
    }

    /// Has an entry's transfer end sooner.
    pub(super) fn cancel_transfer(&self, index: usize) {
        // SAFETY: this thread owns the queue.
        if let Err(error) = self.push(|| unsafe { self.queue.ring.cancel(index) }) {
            tracing::error!("a transfer that takes too long cannot be cancelled: {error}");
        }
    }

    /// The connection has ended: waits until no transfer touches the memory any more.
    pub(super) fn drain(&self) {
        let queue = self.queue;
        for (index, _) in queue.states().filter(|(_, state)| lock(state).is_some()) {
            self.cancel_transfer(index);
        }
        while queue.moving.load(Ordering::Relaxed) > 0 {
            if let Err(error) = self.enter(true) {
                tracing::error!("the ring of CPU {} is broken, its memory stays: {error}", queue.cpu);
                std::mem::forget(Arc::clone(queue));
                return;
            }
            // SAFETY: this thread owns the queue.
            while let Some(completed) = unsafe { queue.ring.next() } {
                if let super::ring::Completed::Transfer(..) = completed {
                    queue.moving.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }
}
