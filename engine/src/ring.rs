//! The io_uring instance of one worker.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ferry_vfs::{Backing, Segment};
use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, opcode, types};

use crate::privileges::WithoutFsetid;
use crate::registered::{Buffers, Files, MemoryOwner};
use crate::transfers::Transfer;

/// Submission queue entries; more transfers are submitted in several calls.
const SUBMISSION_ENTRIES: u32 = 256;

/// The maximum number of segments per system call (`UIO_MAXIOV`).
pub(crate) const SEGMENTS_MAX: usize = 1024;

/// How long a sleep waits for several completions before it accepts fewer.
const SEVERAL_US: u32 = 50;

/// The maximum sleep: the kernel accepts a minimum time only with a maximum.
const SLEEP_MAX: types::Timespec = types::Timespec::new().sec(10);

/// The delay before a retry when the kernel is short of memory.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

/// Marks completions of watched descriptors; the low bits are the watch's number.
const WATCH: u64 = 1 << 63;
/// Marks completions of cancellations, which are ignored.
const IGNORED: u64 = 1 << 62;

/// `IORING_ENTER_GETEVENTS`, `IORING_ENTER_EXT_ARG`.
const ENTER_GETEVENTS: u32 = 1;
const ENTER_EXT_ARG: u32 = 8;

/// `struct io_uring_getevents_arg`, since Linux 6.12.
#[repr(C)]
struct WaitArgument {
    signals: u64,
    signals_bytes: u32,
    several_us: u32,
    longest: u64,
}

const _: () = assert!(size_of::<WaitArgument>() == 24);

/// An io_uring with polls of descriptors that end a sleep.
pub(crate) struct Ring {
    uring: IoUring,
    /// Credentials without `CAP_FSETID`, for writes that must clear suid and sgid.
    unprivileged: Option<u16>,
    watches: Vec<Watch>,
    watches_made: u32,
    unsubmitted: usize,
    files: Files,
    buffers: Buffers,
}

struct Watch {
    fd: Arc<OwnedFd>,
    id: u64,
    armed: bool,
}

/// A completion.
pub(crate) enum Completion {
    /// The transfer in this slot ended, with a count or an error.
    Transfer(usize, io::Result<usize>),
    /// A watched descriptor became readable.
    Stir,
}

impl Ring {
    /// Keeps a file open in the kernel as long as this ring has operations in flight.
    pub(crate) fn hold(&mut self, file: &Arc<Backing>) {
        if self.files.slot(&self.uring, file).is_none() {
            tracing::debug!("io_uring cannot keep a file open");
        }
    }

    /// Creates a ring for the calling thread, which must be its only user.
    pub(crate) fn new(transfers_max: u32) -> io::Result<Self> {
        // Twice the number of transfers: a cancelled watch and its successor may complete together with all of them.
        let completions = transfers_max.max(SUBMISSION_ENTRIES).saturating_mul(2);
        let modern = IoUring::builder()
            .setup_cqsize(completions)
            .setup_clamp()
            .setup_submit_all()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(SUBMISSION_ENTRIES);
        // Linux before 6.1 does not support deferred task work.
        let uring = match modern {
            Ok(uring) => uring,
            Err(_) => IoUring::builder().setup_cqsize(completions).setup_clamp().build(SUBMISSION_ENTRIES)?,
        };
        // Multishot polls ([`Self::arm`]) are as old as this (Linux 5.13); without them a worker never sleeps.
        if !uring.params().is_feature_resource_tagging() {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let unprivileged = {
            let _without = WithoutFsetid::enter()?;
            uring.submitter().register_personality().ok()
        };
        Ok(Self {
            uring,
            unprivileged,
            watches: Vec::new(),
            watches_made: 0,
            unsubmitted: 0,
            files: Files::default(),
            buffers: Buffers::default(),
        })
    }

    /// Queues the rest of a transfer.
    ///
    /// # Safety
    ///
    /// Until the completion with this `slot` was seen, the memory of the segments is valid and other code accesses it
    /// only by volatile access. The transfer and its file live until then.
    pub(crate) unsafe fn issue(&mut self, slot: usize, transfer: &Transfer<Vec<Segment>>) -> io::Result<()> {
        let file = transfer.file();
        let registered = self.files.slot(&self.uring, file).and_then(|index| i32::try_from(index).ok());
        // A registered file uses the same field for its index.
        let fd = types::Fd(registered.unwrap_or_else(|| file.as_fd().as_raw_fd()));
        let entry = transfer.entry_for(fd, self.buffers.slot(transfer.left()), self.unprivileged)?;
        let entry = if registered.is_some() { entry.flags(Flags::FIXED_FILE) } else { entry };
        // SAFETY: the caller keeps memory, file, and the list of segments, which the kernel copies at submission.
        unsafe { self.push(&entry.user_data(slot as u64)) }
    }

    /// Registers this memory and no other, so that transfers skip the page lookup. On failure none is registered.
    ///
    /// # Safety
    ///
    /// Each owner keeps its memory mapped.
    pub(crate) unsafe fn register_memory(
        &mut self,
        regions: impl IntoIterator<Item = (Segment, MemoryOwner)>,
    ) -> io::Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.buffers.set(&self.uring, regions) }
    }

    /// # Safety
    ///
    /// As for [`io_uring::squeue::SubmissionQueue::push`]: the data that `entry` points to stays valid until it completes.
    unsafe fn push(&mut self, entry: &Entry) -> io::Result<()> {
        // SAFETY: guaranteed by the caller.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            self.submit()?;
        }
        self.unsubmitted += 1;
        Ok(())
    }

    /// Returns the number of operations to submit.
    pub(crate) fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// Submits all queued operations. The kernel carries out at once what does not wait.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        // Pending task work (completions of earlier operations) needs the call, too.
        if self.unsubmitted == 0 && !self.uring.submission().taskrun() {
            return Ok(());
        }
        loop {
            match self.uring.submit() {
                Ok(count) => self.unsubmitted = self.unsubmitted.saturating_sub(count),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
            if self.uring.submission().is_empty() {
                self.unsubmitted = 0;
                return Ok(());
            }
        }
    }

    /// Sleeps until there are `wanted` completions; after [`SEVERAL_US`], until there is at least one. Returns early if
    /// the kernel is short of memory or its completion queue is full; the rest is submitted at the next call.
    pub(crate) fn wait(&mut self, wanted: usize) -> io::Result<()> {
        match self.arm().and_then(|()| self.wait_once(wanted)) {
            Err(error) if is_passing(&error) => {
                std::thread::sleep(PAUSE);
                Ok(())
            }
            other => other,
        }
    }

    /// Sleeps until there is a completion, for at most this time. As [`Self::wait`] otherwise.
    pub(crate) fn wait_at_most(&mut self, time: Duration) -> io::Result<()> {
        if !self.uring.params().is_feature_ext_arg() {
            // Linux before 5.11.
            self.arm()?;
            self.submit()?;
            std::thread::sleep(time.min(PAUSE));
            return Ok(());
        }
        match self.arm().and_then(|()| {
            let outcome = self.wait_for(1, 0, &time.into());
            self.waited(outcome)
        }) {
            Err(error) if is_passing(&error) => {
                std::thread::sleep(PAUSE);
                Ok(())
            }
            other => other,
        }
    }

    fn wait_once(&mut self, wanted: usize) -> io::Result<()> {
        let outcome = match u32::try_from(wanted) {
            Ok(wanted @ 2..) if self.uring.params().is_feature_min_timeout() => {
                self.wait_for(wanted, SEVERAL_US, &SLEEP_MAX)
            }
            _ => self.uring.submit_and_wait(1),
        };
        self.waited(outcome)
    }

    fn waited(&mut self, outcome: io::Result<usize>) -> io::Result<()> {
        match outcome.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) => {
                self.unsubmitted = self.uring.submission().len();
                Ok(())
            }
            Err((Some(libc::EINTR | libc::ETIME), _)) => Ok(()),
            Err((_, error)) => Err(error),
        }
    }

    fn wait_for(&mut self, wanted: u32, several_us: u32, longest: &types::Timespec) -> io::Result<usize> {
        let pending = u32::try_from(self.uring.submission().len()).unwrap_or(u32::MAX);
        let argument = WaitArgument {
            signals: 0,
            signals_bytes: 0,
            several_us,
            longest: std::ptr::from_ref(longest).addr() as u64,
        };
        // SAFETY: the argument has the layout that the flag requires, and the data that it points to outlives the call.
        unsafe { self.uring.submitter().enter(pending, wanted, ENTER_GETEVENTS | ENTER_EXT_ARG, Some(&argument)) }
    }

    /// Returns whether there are completions, or task work that would produce some.
    pub(crate) fn has_events(&mut self) -> bool {
        !self.uring.completion().is_empty() || self.uring.submission().taskrun()
    }

    /// Returns the next completion.
    pub(crate) fn next(&mut self) -> Option<Completion> {
        loop {
            let entry = self.uring.completion().next()?;
            let data = entry.user_data();
            if data & WATCH != 0 {
                if !io_uring::cqueue::more(entry.flags())
                    && let Some(watch) = self.watches.iter_mut().find(|watch| watch.id == data)
                {
                    watch.armed = false;
                }
                return Some(Completion::Stir);
            }
            if data & IGNORED == 0 {
                let count = entry.result();
                let outcome = usize::try_from(count).map_err(|_| io::Error::from_raw_os_error(-count));
                return Some(Completion::Transfer(usize::try_from(data).unwrap_or(usize::MAX), outcome));
            }
        }
    }

    /// Lets a write to this descriptor (an eventfd) end a sleep.
    pub(crate) fn watch(&mut self, fd: Arc<OwnedFd>) -> u64 {
        self.watches_made += 1;
        let id = WATCH | u64::from(self.watches_made);
        self.watches.push(Watch { fd, id, armed: false });
        id
    }

    /// Ends a watch.
    pub(crate) fn unwatch(&mut self, id: u64) -> io::Result<()> {
        let Some(index) = self.watches.iter().position(|watch| watch.id == id) else { return Ok(()) };
        let watch = self.watches.swap_remove(index);
        if watch.armed {
            // SAFETY: the entry contains no pointers.
            unsafe { self.push(&opcode::PollRemove::new(id).build().user_data(IGNORED)) }?;
            self.submit()?;
        }
        Ok(())
    }

    fn arm(&mut self) -> io::Result<()> {
        for index in 0..self.watches.len() {
            let watch = &self.watches[index];
            if watch.armed {
                continue;
            }
            // A multishot poll reports every write once, so the eventfd's counter need not be read.
            let events = u32::from(libc::POLLIN.unsigned_abs());
            let poll = opcode::PollAdd::new(types::Fd(watch.fd.as_raw_fd()), events).multi(true);
            let entry = poll.build().user_data(watch.id);
            // SAFETY: the entry contains no pointers; after submission the kernel holds the file.
            unsafe { self.push(&entry) }?;
            self.watches[index].armed = true;
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel unregisters some time after the ring is closed; until then files and memory stay in use.
        self.files.close(&self.uring);
        self.buffers.clear(&self.uring);
    }
}

/// Returns whether a call that failed with this error may succeed later.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}
