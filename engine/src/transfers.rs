//! Transfers between descriptors and memory.

pub mod io_hints;
mod pending;
mod route;
mod transfer;

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use ferry_vfs::{Backing, Segment};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use self::pending::Pending;
use self::route::Means;
pub use self::transfer::Transfer;
use self::transfer::TransferStep;
use crate::aio_batch::{AioBatch, CALLS_MAX};
use crate::privileges::Privileges;
use crate::registered::MemoryOwner;
use crate::ring::{Completion, PAUSE, Ring};

/// Whether transfers use io_uring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// io_uring if available, otherwise plain system calls.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Plain system calls, each of which blocks the worker.
    Sync,
}

/// Returns whether a worker of this process that chose [`IoMode::Auto`] has found no io_uring.
#[must_use]
pub fn lacks_io_uring() -> bool {
    SAID.is_completed()
}

/// Returns how many workers of this process chose [`IoMode::Auto`] and found no io_uring.
#[must_use]
pub fn ring_fallbacks() -> u64 {
    FALLBACKS.load(Ordering::Relaxed)
}

/// The operation of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Reads from the descriptor into memory, all of it unless the file ends.
    Read,
    /// Writes from memory to the descriptor.
    Write {
        /// The kernel must clear suid and sgid: write without `CAP_FSETID`.
        clear_privileges: bool,
        /// The write waits for a disk (`O_SYNC`, `O_DIRECT`): it must not block the worker.
        waits: bool,
    },
    /// Makes the file durable. Transfers no data.
    Fsync {
        /// `fdatasync`.
        data_only: bool,
    },
}

impl Operation {
    /// Returns whether the calling thread must drop `CAP_FSETID`.
    fn clears_privileges(self) -> bool {
        matches!(self, Self::Write { clear_privileges: true, .. })
    }
}

const _: () = assert!(size_of::<Segment>() == size_of::<libc::iovec>());

/// The usual remedy if io_uring is not available.
const ALLOW: &str = "allow it (sysctl kernel.io_uring_disabled=0, seccomp, memlock limit)";

/// With this many transfers in flight the device is busy while the worker waits for several of them to end.
const BUSY_FROM: usize = 8;

/// Every worker has the same result; only one logs it.
static SAID: Once = Once::new();
/// The number of workers with that result.
static FALLBACKS: AtomicU64 = AtomicU64::new(0);

/// A failure of the transfer engine, not of a transfer.
#[derive(Debug, thiserror::Error)]
pub enum TransfersError {
    /// No ring.
    #[error("io_uring is not available ({0}); {ALLOW}")]
    Setup(io::Error),
    /// The ring failed later on.
    #[error("waiting for transfers failed: {0}")]
    Wait(io::Error),
}

/// The transfers of one worker, created and used on one thread.
pub struct Transfers {
    ring: Option<Ring>,
    pending: Vec<Pending>,
    free: Vec<usize>,
    queued: Vec<usize>,
    /// The queued transfers that only copy.
    inline: Vec<usize>,
    aio_batch: Option<AioBatch>,
    aio_allowed: bool,
    in_flight: usize,
    done: VecDeque<(u64, io::Result<usize>)>,
    watched: Vec<(u64, Arc<OwnedFd>)>,
    /// The caller has a pool for transfers of remote files.
    has_pool: bool,
    for_pool: VecDeque<PoolTransfer>,
    /// Only the thread that created a ring may use it.
    _thread: PhantomData<*mut ()>,
}

/// A transfer that [`Transfers`] leaves to the pool of its caller.
#[derive(Debug)]
pub struct PoolTransfer {
    /// The token from [`Transfers::queue`].
    pub token: u64,
    /// The transfer; its memory is valid until it ends, as [`Transfers::queue`] requires.
    pub transfer: Transfer<Vec<Segment>>,
}

impl std::fmt::Debug for Transfers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfers").field("uring", &self.ring.is_some()).field("in_flight", &self.in_flight).finish()
    }
}

impl Transfers {
    /// Prepares for about `transfers_max` concurrent transfers on the calling thread.
    ///
    /// # Errors
    ///
    /// [`TransfersError::Setup`] if `mode` requires io_uring and it is not available.
    pub fn new(mode: IoMode, transfers_max: u32) -> Result<Self, TransfersError> {
        let ring = match (mode, mode != IoMode::Sync) {
            (_, false) => None,
            (mode, true) => match Ring::new(transfers_max) {
                Ok(ring) => Some(ring),
                Err(error) if mode == IoMode::Uring => return Err(TransfersError::Setup(error)),
                Err(error) => {
                    FALLBACKS.fetch_add(1, Ordering::Relaxed);
                    SAID.call_once(|| {
                        tracing::warn!(
                            "io_uring is not available ({error}): each transfer is a system call of its own; {ALLOW}"
                        );
                    });
                    None
                }
            },
        };
        Ok(Self {
            ring,
            pending: Vec::new(),
            free: Vec::new(),
            queued: Vec::new(),
            inline: Vec::new(),
            aio_batch: None,
            aio_allowed: true,
            in_flight: 0,
            done: VecDeque::new(),
            watched: Vec::new(),
            has_pool: false,
            for_pool: VecDeque::new(),
            _thread: PhantomData,
        })
    }

    /// Leaves transfers of remote files to the caller's pool; see [`Self::next_for_pool`]. io_uring has few threads for
    /// transfers that cannot be tried without waiting, and slow files would occupy all of them.
    pub fn leave_remote_to_pool(&mut self) {
        self.has_pool = true;
    }

    /// Returns the next transfer for the caller's pool. It counts as ended here.
    pub fn next_for_pool(&mut self) -> Option<PoolTransfer> {
        self.for_pool.pop_front()
    }

    /// Returns whether [`Self::flush`] has transfers to begin.
    pub fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Registers this memory and no other, so that transfers skip the page lookup, and **pins** all pages; has no
    /// effect without io_uring. The ring does not notice if another program then replaces pages.
    ///
    /// # Errors
    ///
    /// The memory cannot be registered: it belongs to files that cannot be pinned, or exceeds the limit of locked memory.
    ///
    /// # Safety
    ///
    /// Each owner keeps its memory mapped.
    pub unsafe fn register_memory(
        &mut self,
        regions: impl IntoIterator<Item = (Segment, MemoryOwner)>,
    ) -> io::Result<()> {
        self.submit();
        let Some(ring) = &mut self.ring else { return Ok(()) };
        // SAFETY: guaranteed by the caller.
        unsafe { ring.register_memory(regions) }
    }

    /// Returns the number of queued transfers without a result yet.
    pub fn unfinished(&self) -> usize {
        self.queued.len() + self.in_flight + self.done.len()
    }

    /// Queues a transfer between `file` at `offset` and the memory of `segments`. [`Self::next_done`] returns its
    /// result with the same `token`. It is merged with the previous one if its bytes are adjacent. If a merged transfer
    /// fails, its parts are repeated one by one, so that each has its own result.
    ///
    /// # Safety
    ///
    /// Until the token was returned, the memory must be valid for the transfer, and every other access to it volatile.
    pub unsafe fn queue(
        &mut self,
        token: u64,
        operation: Operation,
        file: Arc<Backing>,
        offset: u64,
        segments: impl IntoIterator<Item = Segment>,
    ) {
        if let Some(&last) = self.queued.last() {
            let last = &mut self.pending[last];
            if last.is_followed_by(operation, &file, offset) {
                last.append(token, segments);
                return;
            }
        }
        let slot = self.prepare(token, operation, file, offset, segments);
        self.queued.push(slot);
    }

    fn prepare(
        &mut self,
        token: u64,
        operation: Operation,
        file: Arc<Backing>,
        offset: u64,
        segments: impl IntoIterator<Item = Segment>,
    ) -> usize {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.pending.push(Pending::default());
            self.pending.len() - 1
        });
        self.pending[slot].set(token, operation, (file, offset), segments);
        slot
    }

    /// Starts all queued transfers and completes those that need not wait; [`Self::next_done`] returns the results. For
    /// a busy device, submission may be delayed until [`Self::submit`] or [`Self::sleep`], which saves a system call.
    pub fn flush(&mut self) -> &Self {
        let queued = std::mem::take(&mut self.queued);
        let mut privileges = Privileges::default();
        for &slot in &queued {
            let pending = &mut self.pending[slot];
            // Each part of a merged transfer has its own token.
            let pool = self.has_pool && !pending.is_merged();
            let means = Means { ring: self.ring.is_some(), pool, batch: queued.len() };
            // SAFETY: the contract of `queue` keeps the memory valid.
            match unsafe { pending.transfer().begin(means, &mut privileges) } {
                TransferStep::Ended(outcome) => _ = self.finish(slot, outcome),
                TransferStep::Ring => {
                    // Transfers that are submitted with it must not run without a capability.
                    privileges = Privileges::default();
                    self.issue(slot);
                }
                TransferStep::Pool => {
                    let token = pending.token;
                    self.for_pool.extend(pending.take().map(|transfer| PoolTransfer { token, transfer }));
                    self.free.push(slot);
                }
                TransferStep::Inline if !pending.transfer().operation().clears_privileges() => self.inline.push(slot),
                TransferStep::Inline => {
                    // SAFETY: as above.
                    let outcome = unsafe { pending.transfer().run_inline(&mut privileges) };
                    self.finish(slot, outcome);
                }
            }
        }
        drop(privileges);
        self.run_inline();
        self.queued = queued;
        self.queued.clear();
        self.reap();
        self
    }

    /// Submits the transfers that [`Self::flush`] delayed. Call it if the worker does not sleep next.
    pub fn submit(&mut self) {
        if let Some(ring) = &mut self.ring
            && ring.unsubmitted() > 0
        {
            // As in `reap`: what the kernel does not accept now is submitted the next time.
            let _ = ring.submit();
        }
    }

    /// Returns the next ended transfer, with the number of bytes transferred.
    pub fn next_done(&mut self) -> Option<(u64, io::Result<usize>)> {
        self.done.pop_front()
    }

    /// Returns whether [`Self::next_done`] has a result.
    pub fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Returns whether a flush would find something new; cheap enough for a polling loop.
    pub fn has_events(&mut self) -> bool {
        !self.done.is_empty() || self.in_flight > 0 && self.ring.as_mut().is_some_and(Ring::has_events)
    }

    /// Lets a write to the eventfd end [`Self::sleep`], until [`Self::unwatch`] with the returned number.
    pub fn watch(&mut self, fd: Arc<OwnedFd>) -> u64 {
        match &mut self.ring {
            Some(ring) => ring.watch(fd),
            None => {
                let id = self.watched.last().map_or(1, |(id, _)| id + 1);
                self.watched.push((id, fd));
                id
            }
        }
    }

    /// Keeps a [long-lived](Backing::is_long_lived) descriptor open until all transfers have ended, even if this
    /// process is killed: transfers outlive it for a moment.
    pub fn hold(&mut self, file: &Arc<Backing>) {
        if let Some(ring) = &mut self.ring {
            ring.hold(file);
        }
    }

    /// Ends a watch.
    ///
    /// # Errors
    ///
    /// Those of the ring.
    pub fn unwatch(&mut self, id: u64) -> io::Result<()> {
        match &mut self.ring {
            Some(ring) => ring.unwatch(id),
            None => {
                self.watched.retain(|(watched, _)| *watched != id);
                Ok(())
            }
        }
    }

    /// Returns the number of transfers in flight in the kernel.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Sleeps until a transfer ends or a watched descriptor becomes readable; may wake spuriously. With many transfers
    /// in flight it may sleep some tens of microseconds longer, so that more of them end.
    ///
    /// # Errors
    ///
    /// [`TransfersError::Wait`]: the ring is broken.
    pub fn sleep(&mut self) -> Result<(), TransfersError> {
        self.sleep_at_most(None)
    }

    /// As [`Self::sleep`], for at most this time.
    ///
    /// # Errors
    /// As [`Self::sleep`].
    pub fn sleep_at_most(&mut self, time: Option<Duration>) -> Result<(), TransfersError> {
        if self.has_done() {
            return Ok(());
        }
        match &mut self.ring {
            Some(ring) if let Some(time) = time => ring.wait_at_most(time).map_err(TransfersError::Wait)?,
            Some(ring) => ring
                .wait(if self.in_flight < BUSY_FROM { 1 } else { self.in_flight / 2 })
                .map_err(TransfersError::Wait)?,
            None => sleep_in_poll(&self.watched, time).map_err(TransfersError::Wait)?,
        }
        self.reap();
        Ok(())
    }

    /// Runs the transfers that only copy, many per system call.
    fn run_inline(&mut self) {
        let inline = std::mem::take(&mut self.inline);
        let mut privileges = Privileges::default();
        for some in inline.chunks(CALLS_MAX) {
            let mut aio_batch = if some.len() > 1 { self.take_aio_batch() } else { None };
            if let Some(aio_batch) = &mut aio_batch {
                aio_batch.clear();
                if some.iter().all(|&slot| self.pending[slot].add_to_batch(aio_batch)) {
                    // SAFETY: the contract of `queue` keeps the memory valid, and each transfer keeps its file open.
                    unsafe { aio_batch.submit_and_wait() };
                }
            }
            for (index, &slot) in some.iter().enumerate() {
                let pending = &mut self.pending[slot];
                let begun = aio_batch.as_ref().and_then(|aio_batch| pending.advance(aio_batch.outcome(index)?));
                // SAFETY: the contract of `queue` keeps the memory valid.
                let outcome = begun.unwrap_or_else(|| unsafe { pending.transfer().run_inline(&mut privileges) });
                self.finish(slot, outcome);
            }
            self.aio_batch = aio_batch.or(self.aio_batch.take());
        }
        self.inline = inline;
        self.inline.clear();
    }

    /// Returns the batch. `None`: the system has no AIO.
    fn take_aio_batch(&mut self) -> Option<AioBatch> {
        if self.aio_batch.is_none() && self.aio_allowed {
            match AioBatch::new() {
                Ok(aio_batch) => self.aio_batch = Some(aio_batch),
                Err(error) => {
                    tracing::info!("io_submit is not available ({error}): each inline transfer takes a system call");
                    self.aio_allowed = false;
                }
            }
        }
        self.aio_batch.take()
    }

    fn issue(&mut self, slot: usize) {
        let Some(ring) = &mut self.ring else { return };
        // SAFETY: until the slot is finished, the caller of `queue` keeps the memory, and the transfer keeps the
        // descriptor and the list of segments. The list is on the heap, so adding slots does not move it.
        let issued = unsafe { ring.issue(slot, self.pending[slot].transfer()) };
        self.in_flight += 1;
        if let Err(error) = issued {
            self.in_flight -= 1;
            self.finish(slot, Err(error));
        }
    }

    /// Submits issued transfers and takes completions.
    fn reap(&mut self) {
        loop {
            let Some(ring) = &mut self.ring else { return };
            // Completions that only need a call justify one.
            let has_enough = self.in_flight.saturating_sub(ring.unsubmitted()) >= BUSY_FROM && !ring.has_events();
            if !has_enough && let Err(error) = ring.submit() {
                // The completion queue must be drained first (EBUSY), or memory is short: the entries stay queued.
                tracing::debug!("io_uring accepted no entry: {error}");
            }
            let mut again = false;
            while let Some(completion) = self.ring.as_mut().and_then(Ring::next) {
                let Completion::Transfer(slot, outcome) = completion else { continue };
                self.in_flight -= 1;
                match self.pending[slot].advance(outcome) {
                    Some(outcome) => again |= self.finish(slot, outcome),
                    None => {
                        again = true;
                        self.issue(slot);
                    }
                }
            }
            if !again {
                return;
            }
        }
    }

    /// Records a transfer's result. Returns whether it issued parts of it instead, which must be submitted.
    fn finish(&mut self, slot: usize, outcome: io::Result<usize>) -> bool {
        let pending = &mut self.pending[slot];
        if pending.is_merged() {
            self.finish_merged(slot, outcome.unwrap_or(0));
        } else {
            self.done.push_back((pending.token, outcome));
            pending.clear();
        }
        self.free.push(slot);
        self.ring.as_ref().is_some_and(|ring| ring.unsubmitted() > 0)
    }

    /// Ends the parts that `done` bytes cover, and repeats the others one by one.
    fn finish_merged(&mut self, slot: usize, done: usize) {
        let parts = self.pending[slot].take_parts();
        let Some(whole) = self.pending[slot].take() else { return };
        let (mut end, mut first) = (0, 0);
        for part in &parts {
            let start = end;
            end += part.bytes;
            let own = first..first + part.segments;
            first = own.end;
            if end <= done {
                self.done.push_back((part.token, Ok(part.bytes)));
                continue;
            }
            let own = whole.segments()[own].iter().copied();
            let (file, at) = (Arc::clone(whole.file()), whole.offset() + start as u64);
            let single = self.prepare(part.token, whole.operation(), file, at, own);
            if self.ring.is_some() {
                self.issue(single);
            } else {
                // SAFETY: the contract of `queue` keeps the memory valid.
                let outcome = unsafe { self.pending[single].transfer().run() };
                self.finish(single, outcome);
            }
        }
        self.pending[slot].put_parts(parts);
        self.pending[slot].recycle(whole);
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // The kernel may still write into memory that the caller is about to unmap.
        self.flush();
        while self.in_flight > 0 {
            self.done.clear();
            if let Err(error) = self.sleep() {
                tracing::error!("{error}; {} transfers are abandoned", self.in_flight);
                return;
            }
        }
    }
}

fn sleep_in_poll(watched: &[(u64, Arc<OwnedFd>)], time: Option<Duration>) -> io::Result<()> {
    let time = time.and_then(|time| time.try_into().ok());
    let mut fds: Vec<PollFd<'_>> = watched.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)).collect();
    match poll(&mut fds, time.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(Errno::AGAIN | Errno::NOMEM) => std::thread::sleep(PAUSE),
        Err(error) => return Err(error.into()),
    }
    for (fd, (_, watched)) in fds.iter().zip(watched) {
        if fd.revents().contains(PollFlags::IN) {
            let _ = rustix::io::read(watched, &mut [0u8; 8]);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
