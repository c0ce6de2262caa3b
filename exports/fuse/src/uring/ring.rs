//! The io_uring of one CPU.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use ferry_engine::{Segment, WithoutFsetid};
use ferry_vfs::Errno;
use ferry_wire::fuse::abi::{self, UringCmdReq};
use io_uring::squeue::{Entry, Entry128};
use io_uring::{IoUring, Submitter, cqueue, opcode, types};
use zerocopy::IntoBytes;

/// `IORING_OP_URING_CMD`.
const OP_URING_CMD: u8 = 46;
/// `IOSQE_FIXED_FILE`.
const FIXED_FILE: u8 = 1;
/// The first of the files that a ring knows by number: /dev/fuse.
const DEVICE: i32 = 0;
/// `IORING_ENTER_GETEVENTS`.
const ENTER_GETEVENTS: u32 = 1;

/// The submission of a command (`struct io_uring_sqe` of 128 bytes, as far as FUSE uses it).
#[repr(C, align(8))]
#[derive(Clone, Copy, zerocopy::IntoBytes, zerocopy::Immutable)]
struct Command {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    cmd_op: u32,
    pad: u32,
    addr: u64,
    len: u32,
    cmd_flags: u32,
    user_data: u64,
    buf_index: u16,
    personality: u16,
    file_index: u32,
    cmd: UringCmdReq,
    rest: [u8; 56],
}

const _: () = assert!(size_of::<Command>() == size_of::<Entry128>());
const _: () = assert!(align_of::<Command>() >= align_of::<Entry128>());
const _: () = assert!(std::mem::offset_of!(Command, cmd) == 48);

/// Transfers of a thread that may wait at a time, each in a thread of the kernel's (of transfers that it can make without
/// one there may be more): those of a whole queue of requests, so that none waits for another's disk or server.
const WAITING_TRANSFERS_MAX: u32 = 64;

/// Marks completions of the mailbox's poll; the rest is the number of the watch.
const MAIL: u64 = 1 << 63;
/// Marks completions of cancellations, which are ignored.
const CANCEL: u64 = 1 << 61;
/// Marks completions of transfers; the rest is the entry's index, as it is for requests.
const TRANSFER: u64 = 1 << 62;

/// What a completion is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Completed {
    /// The kernel has put a request into the entry.
    Request(usize),
    /// The kernel has taken the entry away from us, for this reason.
    Lost(usize, Errno),
    /// The transfer for the entry's request has ended, with a count or a negative error.
    Transfer(usize, i32),
    /// A watched descriptor is readable: its watch, and whether the watch continues.
    Mail(u64, bool),
}

/// One io_uring. Whoever owns the queue pushes and takes, one thread at a time.
pub(super) struct Ring {
    uring: IoUring<Entry128, cqueue::Entry>,
    /// Credentials without `CAP_FSETID`, for writes that must clear suid and sgid.
    pub(super) unprivileged: Option<u16>,
}

impl Ring {
    /// Makes a ring for `entries` entries of a connection.
    ///
    /// Not for a single issuer, nor with deferred task work: another thread may go on with the ring.
    pub(super) fn new(entries: usize, entries_max: usize, device: BorrowedFd<'_>) -> io::Result<Self> {
        let submissions = u32::try_from(entries + 1).unwrap_or(u32::MAX);
        let completions = u32::try_from(2 * (entries_max + 1)).unwrap_or(u32::MAX);
        // One more, for the mailbox.
        let ring = IoUring::builder().setup_clamp().setup_cqsize(completions).build(submissions)?;
        ring.submitter().register_files(&[device.as_raw_fd()])?;
        // Otherwise there are no more than entries of the submission queue, and four times the CPUs at most.
        if let Err(error) = ring.submitter().register_iowq_max_workers(&mut [WAITING_TRANSFERS_MAX, 0]) {
            tracing::debug!("few transfers can wait at a time: {error}");
        }
        let unprivileged = {
            let _without = WithoutFsetid::enter()?;
            ring.submitter().register_personality().ok()
        };
        Ok(Self { uring: ring, unprivileged })
    }

    /// Enters the kernel for a thread, which saves the kernel looking the ring up for each call.
    pub(super) fn handle(&self) -> RingHandle<'_> {
        let mut submitter = self.uring.submitter();
        if let Err(error) = submitter.register_ring_fd() {
            tracing::debug!("a ring's descriptor is looked up at each call: {error}");
        }
        RingHandle(submitter)
    }

    /// Queues the registration of an entry.
    ///
    /// # Safety
    /// The caller owns the queue. The memory behind `vectors` stays until the connection has ended.
    pub(super) unsafe fn register(&self, queue: u16, index: u64, vectors: *const Segment) -> Result<(), Full> {
        let cmd = UringCmdReq { qid: queue, ..UringCmdReq::ZERO };
        // SAFETY: passed on.
        unsafe { self.push(command(abi::URING_REGISTER, index, vectors as u64, 2, cmd)) }
    }

    /// Queues the reply of an entry, with which the kernel may give it the next request.
    ///
    /// # Safety
    /// The caller owns the queue.
    pub(super) unsafe fn commit(&self, queue: u16, index: u64, commit_id: u64) -> Result<(), Full> {
        let cmd = UringCmdReq { qid: queue, commit_id, ..UringCmdReq::ZERO };
        // SAFETY: passed on.
        unsafe { self.push(command(abi::URING_COMMIT_AND_FETCH, index, 0, 0, cmd)) }
    }

    /// Has every write to an eventfd complete with [`MAIL`] and this number.
    ///
    /// # Safety
    /// The caller owns the queue.
    pub(super) unsafe fn watch(&self, number: u64, mailbox: BorrowedFd<'_>) -> Result<(), Full> {
        let events = u32::from(libc::POLLIN.unsigned_abs());
        let poll: Entry = opcode::PollAdd::new(types::Fd(mailbox.as_raw_fd()), events).multi(true).build();
        // SAFETY: passed on; the entry points to nothing.
        unsafe { self.push(poll.user_data(MAIL | number).into()) }
    }

    /// Ends a watch.
    ///
    /// # Safety
    /// The caller owns the queue.
    pub(super) unsafe fn unwatch(&self, number: u64) -> Result<(), Full> {
        let cancel: Entry = opcode::AsyncCancel::new(MAIL | number).build();
        // SAFETY: passed on; the entry points to nothing.
        unsafe { self.push(cancel.user_data(CANCEL).into()) }
    }

    /// # Safety
    /// The caller owns the queue, and whatever the entry points to stays until it is done.
    unsafe fn push(&self, entry: Entry128) -> Result<(), Full> {
        // SAFETY: passed on to the caller.
        unsafe { self.uring.submission_shared().push(&entry) }.map_err(|_| Full)
    }

    /// How many entries wait for the next call.
    ///
    /// # Safety
    /// The caller owns the queue.
    pub(super) unsafe fn unsubmitted(&self) -> u32 {
        // SAFETY: passed on to the caller.
        let queue = unsafe { self.uring.submission_shared() };
        u32::try_from(queue.len()).unwrap_or(u32::MAX)
    }

    /// Queues a transfer for an entry's request.
    ///
    /// # Safety
    /// The caller owns the queue. The file and the memory of the transfer stay until its completion was seen.
    pub(super) unsafe fn transfer(&self, index: usize, entry: &Entry) -> Result<(), Full> {
        // SAFETY: passed on.
        unsafe { self.push(entry.clone().user_data(TRANSFER | index as u64).into()) }
    }

    /// Queues the cancellation of an entry's transfer, which then completes sooner.
    ///
    /// # Safety
    /// The caller owns the queue.
    pub(super) unsafe fn cancel(&self, index: usize) -> Result<(), Full> {
        let cancel: Entry = opcode::AsyncCancel::new(TRANSFER | index as u64).build();
        // SAFETY: passed on; the entry points to nothing.
        unsafe { self.push(cancel.user_data(CANCEL).into()) }
    }

    /// The next completion.
    ///
    /// # Safety
    /// The caller owns the queue.
    pub(super) unsafe fn next(&self) -> Option<Completed> {
        loop {
            // SAFETY: passed on to the caller.
            let entry = unsafe { self.uring.completion_shared() }.next()?;
            let number = |data: u64| usize::try_from(data).unwrap_or(usize::MAX);
            return Some(match (entry.user_data(), entry.result()) {
                (data, _) if data & MAIL != 0 => Completed::Mail(data & !MAIL, cqueue::more(entry.flags())),
                (data, _) if data & CANCEL != 0 => continue,
                (data, result) if data & TRANSFER != 0 => Completed::Transfer(number(data & !TRANSFER), result),
                (data, 0..) => Completed::Request(number(data)),
                (data, error) => Completed::Lost(number(data), Errno::from_raw_os_error(-error)),
            });
        }
    }
}

/// The submission queue has no room; submit first.
#[derive(Debug)]
pub(super) struct Full;

/// The way into the kernel for one thread.
pub(super) struct RingHandle<'a>(Submitter<'a>);

impl RingHandle<'_> {
    /// Submits all entries and waits for a completion, for at most this time.
    pub(super) fn enter_at_most(&self, time: Duration) -> io::Result<()> {
        let time = types::Timespec::from(time);
        match self.0.submit_with_args(1, &types::SubmitArgs::new().timespec(&time)) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Submits so many entries and, with `wait`, waits for a completion.
    pub(super) fn enter(&self, submit: u32, wait: bool) -> io::Result<()> {
        // SAFETY: no argument goes along, and the entries are valid by the contract of `push`.
        match unsafe { self.0.enter::<()>(submit, u32::from(wait), ENTER_GETEVENTS, None) } {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(error),
            },
        }
    }
}

fn command(cmd_op: u32, index: u64, addr: u64, len: u32, cmd: UringCmdReq) -> Entry128 {
    let command = Command {
        opcode: OP_URING_CMD,
        flags: FIXED_FILE,
        ioprio: 0,
        fd: DEVICE,
        cmd_op,
        pad: 0,
        addr,
        len,
        cmd_flags: 0,
        user_data: index,
        buf_index: 0,
        personality: 0,
        file_index: 0,
        cmd,
        rest: [0; 56],
    };
    let mut entry = Entry128::from(opcode::Nop::new().build());
    // SAFETY: both are 128 plain bytes in the layout of the kernel's structure, which has no invalid values.
    unsafe {
        let bytes = command.as_bytes();
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), (&raw mut entry).cast::<u8>(), bytes.len());
    }
    entry
}
