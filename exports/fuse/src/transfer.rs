//! Reads, writes and fsyncs that a request leaves to its carrier.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use ferry_engine::{Operation, Segment, WithoutFsetid, learnt, move_now};
use ferry_vfs::Backing;
use io_uring::{opcode, squeue, types};

/// What is to be moved, and where it is in the payload of the message (writes) or of the reply (reads).
pub(crate) struct Transfer {
    pub(crate) operation: Operation,
    pub(crate) file: Arc<Backing>,
    pub(crate) file_offset: u64,
    /// Offset in the payload, and length.
    pub(crate) at: usize,
    pub(crate) bytes: usize,
    done: usize,
    calls: u64,
}

impl Transfer {
    pub(crate) fn new(operation: Operation, file: Arc<Backing>, file_offset: u64, (at, bytes): (usize, usize)) -> Self {
        Self { operation, file, file_offset, at, bytes, done: 0, calls: 0 }
    }

    pub(crate) fn is_read(&self) -> bool {
        self.operation == Operation::Read
    }

    /// Makes the transfer on this thread if that needs no waiting, or if waiting is the best that can be done: what
    /// io_uring cannot try either it would pass to a thread of its own, and that costs more than pages in memory do.
    /// `None` if it is to be left to a ring.
    ///
    /// # Safety
    /// `payload` begins a payload that holds the transfer's part, and nobody else accesses that until this returns.
    pub(crate) unsafe fn try_now(&mut self, payload: *mut u8) -> Option<io::Result<usize>> {
        // SAFETY: passed on to the caller.
        if let Some(outcome) = unsafe { self.in_memory(payload) } {
            return Some(outcome);
        }
        let learnt = learnt::place(&self.file);
        let flags = match self.operation {
            Operation::Fsync { .. } if learnt & learnt::IN_MEMORY != 0 => return Some(Ok(0)),
            _ if learnt & learnt::IN_MEMORY != 0 => 0,
            Operation::Fsync { .. } | Operation::Write { waits: true, .. } => return None,
            Operation::Read if learnt & learnt::READ_CANNOT_TRY != 0 => {
                // SAFETY: passed on to the caller.
                return unsafe { self.unless_far(payload, learnt) };
            }
            Operation::Write { .. } if learnt & learnt::WRITE_CANNOT_TRY != 0 => {
                // SAFETY: passed on to the caller.
                return unsafe { self.unless_far(payload, learnt) };
            }
            _ => libc::RWF_NOWAIT,
        };
        // SAFETY: passed on to the caller.
        match unsafe { self.run(payload, flags) } {
            Err(error) if flags != 0 && error.raw_os_error() == Some(libc::EAGAIN) => None,
            Err(error) if flags != 0 && error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.file.learn(if self.is_read() { learnt::READ_CANNOT_TRY } else { learnt::WRITE_CANNOT_TRY });
                // SAFETY: passed on to the caller.
                unsafe { self.unless_far(payload, learnt) }
            }
            outcome => Some(outcome),
        }
    }

    /// # Safety
    /// As for [`Self::try_now`].
    unsafe fn unless_far(&mut self, payload: *mut u8, learnt: u8) -> Option<io::Result<usize>> {
        // SAFETY: passed on to the caller.
        (learnt & learnt::FAR == 0).then(|| unsafe { self.run(payload, 0) })
    }

    /// Makes the transfer on this thread, however long it takes.
    ///
    /// # Safety
    /// As for [`Self::try_now`].
    pub(crate) unsafe fn wait(&mut self, payload: *mut u8) -> io::Result<usize> {
        // SAFETY: passed on to the caller.
        unsafe { self.in_memory(payload).unwrap_or_else(|| self.run(payload, 0)) }
    }

    /// Makes the whole transfer without a system call, where the source has the file's bytes in memory.
    ///
    /// # Safety
    /// As for [`Self::try_now`].
    unsafe fn in_memory(&self, payload: *mut u8) -> Option<io::Result<usize>> {
        let segment = Segment { address: payload.wrapping_add(self.at), bytes: self.bytes };
        // SAFETY: passed on to the caller.
        unsafe { move_now(self.operation, &self.file, self.file_offset, &[segment]) }
    }

    /// System calls that were made for it.
    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    /// # Safety
    /// As for [`Self::try_now`].
    unsafe fn run(&mut self, payload: *mut u8, flags: libc::c_int) -> io::Result<usize> {
        let _without = match self.operation {
            Operation::Write { clear_privileges: true, .. } => Some(WithoutFsetid::enter()?),
            _ => None,
        };
        loop {
            self.calls += 1;
            // SAFETY: passed on to the caller.
            let outcome = unsafe { self.call(payload, flags) };
            if let Err(error) = &outcome
                && error.raw_os_error() == Some(libc::EAGAIN)
                && flags != 0
            {
                return outcome;
            }
            if let Some(outcome) = self.advance(outcome) {
                return outcome;
            }
        }
    }

    /// Takes in one result. Answers the transfer's outcome, or `None` if there is more to do.
    pub(crate) fn advance(&mut self, outcome: io::Result<usize>) -> Option<io::Result<usize>> {
        match outcome {
            Ok(count) => {
                self.done += count.min(self.bytes - self.done);
                // A short read may be the end of the file or a failure in the middle, a short write a full disk or what could be
                // done without waiting: only the next one tells.
                (count == 0 || self.done >= self.bytes).then_some(Ok(self.done))
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => None,
                // What was moved before is told; the caller meets the error where it asks for the rest.
                _ if self.done > 0 && !self.is_read() => Some(Ok(self.done)),
                _ => Some(Err(error)),
            },
        }
    }

    fn fd(&self) -> RawFd {
        self.file.as_fd().as_raw_fd()
    }

    /// # Safety
    /// As for [`Self::try_now`].
    unsafe fn call(&self, payload: *mut u8, flags: libc::c_int) -> io::Result<usize> {
        let iov = libc::iovec { iov_base: payload.wrapping_add(self.at + self.done).cast(), iov_len: self.left() };
        let Ok(offset) = libc::off_t::try_from(self.offset()) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        let moved = match self.operation {
            // SAFETY: the descriptor is open, the memory the caller's.
            Operation::Read => unsafe { libc::preadv2(self.fd(), &raw const iov, 1, offset, flags) },
            // SAFETY: as above.
            Operation::Write { .. } => unsafe { libc::pwritev2(self.fd(), &raw const iov, 1, offset, flags) },
            // SAFETY: no memory is involved.
            Operation::Fsync { data_only: false } => unsafe { libc::fsync(self.fd()) as isize },
            // SAFETY: no memory is involved.
            Operation::Fsync { data_only: true } => unsafe { libc::fdatasync(self.fd()) as isize },
        };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }

    fn left(&self) -> usize {
        self.bytes - self.done
    }

    fn offset(&self) -> u64 {
        self.file_offset.saturating_add(self.done as u64)
    }

    /// The rest of the transfer as an entry of a ring. The memory behind `payload` and the file must stay until it has
    /// completed; `unprivileged` are credentials without `CAP_FSETID` that the ring knows.
    pub(crate) fn entry(&self, payload: *mut u8, unprivileged: Option<u16>) -> io::Result<squeue::Entry> {
        let fd = types::Fd(self.fd());
        let address = payload.wrapping_add(self.at + self.done);
        let bytes = u32::try_from(self.left()).unwrap_or(u32::MAX);
        let entry = match self.operation {
            Operation::Read => opcode::Read::new(fd, address, bytes).offset(self.offset()).build(),
            Operation::Write { .. } => opcode::Write::new(fd, address, bytes).offset(self.offset()).build(),
            Operation::Fsync { data_only } => {
                let flags = if data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
                opcode::Fsync::new(fd).flags(flags).build()
            }
        };
        match (self.operation, unprivileged) {
            (Operation::Write { clear_privileges: true, .. }, Some(personality)) => Ok(entry.personality(personality)),
            (Operation::Write { clear_privileges: true, .. }, None) => {
                Err(io::Error::other("no credentials registered that clear suid"))
            }
            _ => Ok(entry),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn transfer(operation: Operation, file: std::fs::File, bytes: usize) -> Transfer {
        Transfer::new(operation, Arc::new(Backing::new(file.into())), 0, (0, bytes))
    }

    #[test]
    fn files_in_memory_are_read_at_once_and_synced_by_nobody() {
        let mut file = std::fs::File::from(rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all(b"some bytes").unwrap();
        let mut buffer = [0_u8; 20];
        let mut read = transfer(Operation::Read, file.try_clone().unwrap(), 20);
        // SAFETY: the buffer is ours.
        let outcome = unsafe { read.try_now(buffer.as_mut_ptr()) };
        assert_eq!(outcome.expect("nothing waits").unwrap(), 10);
        assert_eq!(&buffer[..10], b"some bytes");
        assert_ne!(read.file.learnt() & learnt::IN_MEMORY, 0);
        for operation in
            [Operation::Fsync { data_only: true }, Operation::Write { clear_privileges: false, waits: true }]
        {
            let mut transfer = transfer(operation, file.try_clone().unwrap(), 5);
            // SAFETY: the buffer is ours.
            assert!(unsafe { transfer.try_now(buffer.as_mut_ptr()) }.expect("nothing waits").is_ok());
        }
    }

    #[test]
    fn what_waits_is_left_to_a_ring() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        let read = transfer(Operation::Read, file.try_clone().unwrap(), 0);
        let in_memory = learnt::place(&read.file) & learnt::IN_MEMORY != 0;
        for operation in
            [Operation::Fsync { data_only: true }, Operation::Write { clear_privileges: false, waits: true }]
        {
            let mut transfer = transfer(operation, file.try_clone().unwrap(), 5);
            // SAFETY: the buffer is ours.
            assert_eq!(unsafe { transfer.try_now([0; 5].as_mut_ptr()) }.is_none(), !in_memory);
        }
    }

    #[test]
    fn results_add_up() {
        let file = || tempfile::tempfile().unwrap();
        let error = |errno| Err(io::Error::from_raw_os_error(errno));
        let mut read = transfer(Operation::Read, file(), 10);
        assert!(read.advance(Ok(4)).is_none() && read.advance(error(libc::EINTR)).is_none());
        assert_eq!((read.left(), read.offset()), (6, 4));
        assert_eq!(read.advance(Ok(0)).unwrap().unwrap(), 4, "the file ended");
        assert!(read.advance(error(libc::EIO)).unwrap().is_err());
        let mut write = transfer(Operation::Write { clear_privileges: false, waits: false }, file(), 10);
        assert!(write.advance(Ok(4)).is_none() && write.advance(error(libc::EAGAIN)).is_none(), "there is more to do");
        assert_eq!((write.left(), write.offset()), (6, 4));
        assert_eq!(write.advance(error(libc::ENOSPC)).unwrap().unwrap(), 4);
    }
}
