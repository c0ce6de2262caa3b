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

/// Submission entries; more transfers than these are submitted in several goes.
const SUBMISSION_ENTRIES: u32 = 256;

/// The most segments that one system call takes (`UIO_MAXIOV`).
pub(crate) const SEGMENTS_MAX: usize = 1024;

/// How long a sleep that hopes for several completions goes on without them. What is under way then takes longer than that.
const SEVERAL_US: u32 = 50;

/// After so long such a sleep ends whatever happens: the kernel's shortest time works only beside a longest.
const SLEEP_MAX: types::Timespec = types::Timespec::new().sec(10);

/// How long to wait before the kernel is asked again for what it has no memory for now.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

/// Marks completions of watched descriptors; the low bits say which one.
const WATCH: u64 = 1 << 63;
/// Marks completions of cancellations, which nobody waits for.
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

/// One io_uring, with polls of descriptors that end a sleep.
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

/// What a completion is about.
pub(crate) enum Completion {
    /// The transfer in this slot ended, with a count or an error.
    Transfer(usize, io::Result<usize>),
    /// A watched descriptor stirred.
    Stir,
}

impl Ring {
    /// Has the kernel hold a file for as long as it has anything of this ring.
    pub(crate) fn hold(&mut self, file: &Arc<Backing>) {
        if self.files.slot(&self.uring, file).is_none() {
            tracing::debug!("a file is not held by io_uring");
        }
    }

    /// Makes a ring for the calling thread, which must be the only one to use it.
    pub(crate) fn new(transfers_max: u32) -> io::Result<Self> {
        // Twice the transfers: a cancelled watch and its successor may complete together with all of them.
        let completions = transfers_max.max(SUBMISSION_ENTRIES).saturating_mul(2);
        let modern = IoUring::builder()
            .setup_cqsize(completions)
            .setup_clamp()
            .setup_submit_all()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .build(SUBMISSION_ENTRIES);
        // Linux before 6.1 does not know deferred task work.
        let uring = match modern {
            Ok(uring) => uring,
            Err(_) => IoUring::builder().setup_cqsize(completions).setup_clamp().build(SUBMISSION_ENTRIES)?,
        };
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

    /// Queues what is left of a transfer.
    ///
    /// # Safety
    /// The memory of its segments is valid, and only reached by volatile access from elsewhere, until the completion with
    /// this `slot` was seen; the transfer stays until then, with its file.
    pub(crate) unsafe fn issue(&mut self, slot: usize, transfer: &Transfer<Vec<Segment>>) -> io::Result<()> {
        let file = transfer.file();
        let registered = self.files.slot(&self.uring, file).and_then(|index| i32::try_from(index).ok());
        // The kernel looks up a registered file by the same field.
        let fd = types::Fd(registered.unwrap_or_else(|| file.as_fd().as_raw_fd()));
        let entry = transfer.entry_for(fd, self.buffers.slot(transfer.left()), self.unprivileged)?;
        let entry = if registered.is_some() { entry.flags(Flags::FIXED_FILE) } else { entry };
        // SAFETY: the caller keeps memory, file, and the list of segments, which the kernel copies at submission.
        unsafe { self.push(&entry.user_data(slot as u64)) }
    }

    /// Has the kernel know this memory and no other, so that transfers within it need not have it looked up. On
    /// failure it knows none, and transfers are made all the same.
    ///
    /// # Safety
    /// Each keeper keeps its memory mapped.
    pub(crate) unsafe fn register_memory(
        &mut self,
        regions: impl IntoIterator<Item = (Segment, MemoryOwner)>,
    ) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.buffers.set(&self.uring, regions) }
    }

    /// # Safety
    /// As for [`io_uring::squeue::SubmissionQueue::push`]: whatever `entry` points to stays valid until it is done.
    unsafe fn push(&mut self, entry: &Entry) -> io::Result<()> {
        // SAFETY: passed on to the caller.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            self.submit()?;
        }
        self.unsubmitted += 1;
        Ok(())
    }

    /// How many operations wait to be submitted.
    pub(crate) fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// Hands all queued operations to the kernel, which carries out at once what it can without waiting.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        // Task work that waits (completions of earlier operations) needs the call too.
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

    /// Sleeps until there are `wanted` completions; after [`SEVERAL_US`], until there is at least one. What the kernel has no
    /// memory for now, and what waits for completions to be taken, is for the next time: then it comes back early.
    pub(crate) fn wait(&mut self, wanted: usize) -> io::Result<()> {
        match self.arm().and_then(|()| self.wait_once(wanted)) {
            Err(error) if is_passing(&error) => {
                std::thread::sleep(PAUSE);
                Ok(())
            }
            other => other,
        }
    }

    fn wait_once(&mut self, wanted: usize) -> io::Result<()> {
        let outcome = match u32::try_from(wanted) {
            Ok(wanted @ 2..) if self.uring.params().is_feature_min_timeout() => self.wait_for(wanted),
            _ => self.uring.submit_and_wait(1),
        };
        match outcome.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) => {
                self.unsubmitted = self.uring.submission().len();
                Ok(())
            }
            Err((Some(libc::EINTR | libc::ETIME), _)) => Ok(()),
            Err((_, error)) => Err(error),
        }
    }

    fn wait_for(&mut self, wanted: u32) -> io::Result<usize> {
        let pending = u32::try_from(self.uring.submission().len()).unwrap_or(u32::MAX);
        let longest = SLEEP_MAX;
        let argument = WaitArgument {
            signals: 0,
            signals_bytes: 0,
            several_us: SEVERAL_US,
            longest: (&raw const longest).addr() as u64,
        };
        // SAFETY: the argument is laid out as the flag says, and what it points to lives until the call is over.
        unsafe { self.uring.submitter().enter(pending, wanted, ENTER_GETEVENTS | ENTER_EXT_ARG, Some(&argument)) }
    }

    /// Whether completions wait, or task work that would make some.
    pub(crate) fn has_events(&mut self) -> bool {
        !self.uring.completion().is_empty() || self.uring.submission().taskrun()
    }

    /// The next completion.
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

    /// From now on, a write to this descriptor (an eventfd) ends a sleep.
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
            // SAFETY: the entry points to nothing.
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
            // A multishot poll tells of every write once, so the eventfd's counter need never be read.
            let events = u32::from(libc::POLLIN.unsigned_abs());
            let poll = opcode::PollAdd::new(types::Fd(watch.fd.as_raw_fd()), events).multi(true);
            let entry = poll.build().user_data(watch.id);
            // SAFETY: the entry points to nothing; the kernel holds the file itself once it is submitted.
            unsafe { self.push(&entry) }?;
            self.watches[index].armed = true;
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // By itself the kernel would do this some time after the ring is closed: until then files stay open, and memory
        // stays in use.
        self.files.close(&self.uring);
        self.buffers.clear(&self.uring);
    }
}

/// Whether a call that failed so may succeed later.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}
