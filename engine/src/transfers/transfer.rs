//! A single transfer: choosing its route, running it, and recording results.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use ferry_vfs::{Backing, Segment};
use io_uring::{opcode, squeue, types};

use super::Operation;
use super::io_hints::{self, READ_TRIES, REMOTE};
use super::route::{Means, Route, route, route_untried};
use crate::memory::copy_mapped;
use crate::privileges::Privileges;
use crate::ring::SEGMENTS_MAX;

/// Signals interrupt a call now and then. A file system whose server answers EINTR each time must not hold a thread.
const INTERRUPTIONS_MAX: u8 = 100;

/// The outcome of beginning a transfer.
pub(crate) enum TransferStep {
    /// It has ended.
    Ended(io::Result<usize>),
    /// It only copies: the caller runs it now.
    Inline,
    /// The caller leaves it to its ring.
    Ring,
    /// The caller leaves it to its pool.
    Pool,
}

/// A transfer between a file and memory. Exports with one segment per request need no list of segments.
#[derive(Debug)]
pub struct Transfer<S = [Segment; 1]> {
    operation: Operation,
    file: Arc<Backing>,
    offset: u64,
    segments: S,
    /// Segments wholly done.
    first: usize,
    done: usize,
    wanted: usize,
    calls: u64,
    /// How often it was interrupted in a row.
    interruptions: u8,
    /// It stands for several, which are run one by one if the first attempt does not move all bytes.
    is_merged: bool,
}

// SAFETY: segments are addresses; the caller of `Transfer::run` guarantees the memory.
unsafe impl Send for Transfer<[Segment; 1]> {}
// SAFETY: as above.
unsafe impl Send for Transfer<Vec<Segment>> {}

impl<S: AsRef<[Segment]> + AsMut<[Segment]>> Transfer<S> {
    /// Describes a transfer between `file` at `offset` and the memory of `segments`.
    pub fn new(operation: Operation, file: Arc<Backing>, offset: u64, segments: S) -> Self {
        let wanted = segments.as_ref().iter().map(|segment| segment.bytes).sum();
        Self {
            operation,
            file,
            offset,
            segments,
            first: 0,
            done: 0,
            wanted,
            calls: 0,
            interruptions: 0,
            is_merged: false,
        }
    }

    /// What it does.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// Whether it reads.
    pub fn is_read(&self) -> bool {
        self.operation == Operation::Read
    }

    /// The file.
    pub fn file(&self) -> &Arc<Backing> {
        &self.file
    }

    /// Returns its offset in the file, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns its total length in bytes.
    pub fn bytes(&self) -> usize {
        self.wanted
    }

    /// Returns the number of system calls on the caller's threads.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Runs the transfer on this thread; may block.
    ///
    /// # Errors
    ///
    /// Those of the transfer.
    ///
    /// # Safety
    ///
    /// Until this returns, the memory of the segments is valid, and every other access to it volatile.
    pub unsafe fn run(&mut self) -> io::Result<usize> {
        let mut privileges = Privileges::default();
        // SAFETY: guaranteed by the caller.
        match unsafe { self.begin(Means::default(), &mut privileges) } {
            TransferStep::Ended(outcome) => outcome,
            // SAFETY: guaranteed by the caller.
            TransferStep::Inline | TransferStep::Ring | TransferStep::Pool => unsafe {
                self.run_inline(&mut privileges)
            },
        }
    }

    /// Runs the transfer on this thread unless it has to wait. `None`: the caller leaves it to its ring.
    ///
    /// # Safety
    /// As for [`Self::run`].
    pub unsafe fn try_now(&mut self) -> Option<io::Result<usize>> {
        let mut privileges = Privileges::default();
        // SAFETY: guaranteed by the caller.
        match unsafe { self.begin(Means { ring: true, pool: false, batch: 1 }, &mut privileges) } {
            TransferStep::Ended(outcome) => Some(outcome),
            // SAFETY: guaranteed by the caller.
            TransferStep::Inline => Some(unsafe { self.run_inline(&mut privileges) }),
            TransferStep::Ring | TransferStep::Pool => None,
        }
    }

    /// Chooses the route of the transfer, and runs it if this thread is the route.
    ///
    /// # Safety
    /// As for [`Self::run`].
    pub(crate) unsafe fn begin(&mut self, means: Means, privileges: &mut Privileges) -> TransferStep {
        // SAFETY: guaranteed by the caller.
        if let Some(outcome) = unsafe { copy_mapped(self.operation, &self.file, self.offset, self.segments.as_ref()) } {
            return TransferStep::Ended(outcome);
        }
        let route = match route(&self.file, self.operation, means) {
            // SAFETY: guaranteed by the caller.
            Route::Try => match unsafe { self.try_without_waiting(means, privileges) } {
                Ok(outcome) => return TransferStep::Ended(outcome),
                Err(route) => route,
            },
            route => route,
        };
        match route {
            Route::Nothing => TransferStep::Ended(Ok(0)),
            Route::Inline => TransferStep::Inline,
            Route::Ring | Route::Try => TransferStep::Ring,
            Route::Pool => TransferStep::Pool,
            // SAFETY: guaranteed by the caller.
            Route::Blocking => TransferStep::Ended(unsafe { self.run_inline(privileges) }),
        }
    }

    /// Returns the result, or the route to take because the transfer has to wait or cannot be tried.
    ///
    /// # Safety
    /// As for [`Self::run`].
    unsafe fn try_without_waiting(
        &mut self,
        means: Means,
        privileges: &mut Privileges,
    ) -> Result<io::Result<usize>, Route> {
        if let Err(error) = privileges.set_for(self.operation) {
            return Ok(Err(error));
        }
        let (tries, _) = self.operation.hints();
        loop {
            // SAFETY: guaranteed by the caller.
            let outcome = unsafe { self.call(libc::RWF_NOWAIT) };
            match outcome.as_ref().map_err(io::Error::raw_os_error) {
                Err(Some(libc::EAGAIN)) => {
                    if self.is_read() {
                        self.file.add_io_hints(READ_TRIES);
                    }
                    return Err(Route::Ring);
                }
                Err(Some(libc::EOPNOTSUPP)) => return Err(route_untried(&self.file, self.operation, means)),
                Ok(_) if self.file.io_hints() & tries == 0 => self.file.add_io_hints(tries),
                _ => {}
            }
            if let Some(outcome) = self.advance(outcome) {
                return Ok(outcome);
            }
        }
    }

    /// Runs the rest of the transfer by plain calls.
    ///
    /// # Safety
    /// As for [`Self::run`].
    pub(crate) unsafe fn run_inline(&mut self, privileges: &mut Privileges) -> io::Result<usize> {
        privileges.set_for(self.operation)?;
        loop {
            // SAFETY: guaranteed by the caller.
            let outcome = unsafe { self.call(0) };
            if let Some(outcome) = self.record(outcome, false) {
                return outcome;
            }
        }
    }

    /// Records a result of a ring. Returns the transfer's outcome, or `None` if bytes are left.
    pub fn advance(&mut self, result: io::Result<usize>) -> Option<io::Result<usize>> {
        // A ring returns EAGAIN while a disk has no free tag (Linux 5.10 to 6.1).
        let is_busy = result.as_ref().err().and_then(io::Error::raw_os_error) == Some(libc::EAGAIN);
        let may_retry = is_busy && io_hints::with_place(&self.file) & REMOTE == 0;
        self.record(result, may_retry)
    }

    /// As [`Self::advance`]. `may_retry`: EAGAIN is temporary, not the answer of a remote server, which may never end.
    fn record(&mut self, result: io::Result<usize>, may_retry: bool) -> Option<io::Result<usize>> {
        let outcome = match result {
            Ok(count) => {
                self.done += count;
                self.interruptions = 0;
                // A short read may mean end of file or a failure in between, a short write a full disk or a partial
                // attempt without waiting. Only the next call shows which.
                if count > 0 && self.done < self.wanted && !self.is_merged {
                    self.skip(count);
                    return None;
                }
                Ok(self.done)
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) if may_retry => return None,
                Some(libc::EINTR) if self.interruptions < INTERRUPTIONS_MAX => {
                    self.interruptions += 1;
                    return None;
                }
                // The client gets the error when it requests the rest.
                _ if self.done > 0 && !self.is_read() && !self.is_merged => Ok(self.done),
                _ => Err(error),
            },
        };
        if let (Operation::Write { .. }, Some(memory), Ok(1..)) = (self.operation, self.file.memory(), &outcome) {
            memory.written();
        }
        Some(outcome)
    }

    fn skip(&mut self, mut count: usize) {
        while let Some(segment) = self.segments.as_mut().get_mut(self.first) {
            if count < segment.bytes {
                segment.address = segment.address.wrapping_add(count);
                segment.bytes -= count;
                break;
            }
            count -= segment.bytes;
            self.first += 1;
        }
    }

    /// # Safety
    /// As for [`Self::run`].
    unsafe fn call(&mut self, flags: libc::c_int) -> io::Result<usize> {
        self.calls += 1;
        let (segments, fd) = (self.left(), self.file.as_fd().as_raw_fd());
        let count = libc::c_int::try_from(segments.len()).unwrap_or(0);
        let iov = segments.as_ptr().cast::<libc::iovec>();
        let Ok(offset) = libc::off_t::try_from(self.offset_left()) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        let moved = match self.operation {
            // SAFETY: `self.file` keeps the descriptor, the caller the memory; `Segment` has the layout of `iovec`.
            Operation::Read => unsafe { libc::preadv2(fd, iov, count, offset, flags) },
            // Not by the C library: musl's functions write at the offset in a file that is open with O_APPEND, too, from 1.2.6 on.
            // SAFETY: as above. The upper half of the offset is unused where a register has 64 bits.
            Operation::Write { .. } => unsafe {
                let (count, flags) = (libc::c_long::from(count), libc::c_long::from(flags));
                let written = libc::syscall(libc::SYS_pwritev2, fd, iov, count, offset, 0 as libc::c_long, flags);
                isize::try_from(written).unwrap_or(-1)
            },
            // SAFETY: no memory is involved.
            Operation::Fsync { data_only: false } => unsafe { libc::fsync(fd) as isize },
            // SAFETY: no memory is involved.
            Operation::Fsync { data_only: true } => unsafe { libc::fdatasync(fd) as isize },
        };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }

    /// Returns the remaining segments.
    pub(crate) fn left(&self) -> &[Segment] {
        let left = self.segments.as_ref().get(self.first..).unwrap_or_default();
        &left[..left.len().min(SEGMENTS_MAX)]
    }

    /// Returns the file offset of the remaining bytes.
    pub(crate) fn offset_left(&self) -> u64 {
        self.offset.saturating_add(self.done as u64)
    }

    /// Returns the rest of the transfer as a submission entry, with the file's descriptor. `unprivileged`: the ring's
    /// credentials without `CAP_FSETID`.
    ///
    /// # Errors
    ///
    /// The transfer needs such credentials and there are none.
    pub fn entry(&self, unprivileged: Option<u16>) -> io::Result<squeue::Entry> {
        self.entry_for(types::Fd(self.file.as_fd().as_raw_fd()), None, unprivileged)
    }

    /// As [`Self::entry`], with the file named by `fd`. `buffer`: the registered buffer that contains all segments.
    pub(crate) fn entry_for(
        &self,
        fd: types::Fd,
        buffer: Option<u16>,
        unprivileged: Option<u16>,
    ) -> io::Result<squeue::Entry> {
        let entry = entry(self.operation, fd, self.offset_left(), self.left(), buffer);
        match (self.operation, unprivileged) {
            (Operation::Write { clear_privileges: true, .. }, Some(personality)) => Ok(entry.personality(personality)),
            (Operation::Write { clear_privileges: true, .. }, None) => {
                Err(io::Error::other("no credentials registered that clear suid"))
            }
            _ => Ok(entry),
        }
    }
}

impl Transfer<Vec<Segment>> {
    /// Merges another transfer, whose bytes follow. Returns its bytes and segments.
    pub(super) fn merge(&mut self, segments: impl IntoIterator<Item = Segment>) -> (usize, usize) {
        let before = self.segments.len();
        self.segments.extend(segments);
        let own = &self.segments[before..];
        let (bytes, count) = (own.iter().map(|segment| segment.bytes).sum(), own.len());
        self.wanted += bytes;
        self.is_merged = true;
        (bytes, count)
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the list of segments for reuse.
    pub(super) fn into_segments(self) -> Vec<Segment> {
        self.segments
    }
}

/// Returns the submission entry of an operation.
fn entry(operation: Operation, fd: types::Fd, offset: u64, segments: &[Segment], buffer: Option<u16>) -> squeue::Entry {
    let count = u32::try_from(segments.len()).unwrap_or(0);
    let single = |segment: &Segment| u32::try_from(segment.bytes).ok().map(|bytes| (segment.address, bytes));
    let vector = segments.as_ptr().cast();
    let single = segments.first().filter(|_| count == 1).and_then(single);
    match (operation, single, buffer) {
        (Operation::Read, Some((address, bytes)), Some(buffer)) => {
            opcode::ReadFixed::new(fd, address, bytes, buffer).offset(offset).build()
        }
        (Operation::Read, Some((address, bytes)), None) => opcode::Read::new(fd, address, bytes).offset(offset).build(),
        (Operation::Read, None, Some(buffer)) => {
            opcode::ReadvFixed::new(fd, vector, count, buffer).offset(offset).build()
        }
        (Operation::Read, None, None) => opcode::Readv::new(fd, vector, count).offset(offset).build(),
        (Operation::Write { .. }, Some((address, bytes)), Some(buffer)) => {
            opcode::WriteFixed::new(fd, address, bytes, buffer).offset(offset).build()
        }
        (Operation::Write { .. }, Some((address, bytes)), None) => {
            opcode::Write::new(fd, address, bytes).offset(offset).build()
        }
        (Operation::Write { .. }, None, Some(buffer)) => {
            opcode::WritevFixed::new(fd, vector, count, buffer).offset(offset).build()
        }
        (Operation::Write { .. }, None, None) => opcode::Writev::new(fd, vector, count).offset(offset).build(),
        (Operation::Fsync { data_only }, ..) => {
            let flags = if data_only { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
            opcode::Fsync::new(fd).flags(flags).build()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::io_hints::IN_MEMORY;
    use super::*;

    const DURABLE_WRITE: Operation = Operation::Write { clear_privileges: false, waits: true };

    fn transfer(operation: Operation, file: std::fs::File, bytes: &mut [u8]) -> Transfer {
        let segment = Segment { address: bytes.as_mut_ptr(), bytes: bytes.len() };
        Transfer::new(operation, Arc::new(Backing::new(file.into())), 0, [segment])
    }

    #[test]
    fn files_in_memory_are_read_inline_and_never_synced() {
        let mut file = std::fs::File::from(rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all(b"some bytes").unwrap();
        let mut buffer = [0_u8; 20];
        let mut read = transfer(Operation::Read, file.try_clone().unwrap(), &mut buffer);
        // SAFETY: the buffer is ours.
        let outcome = unsafe { read.try_now() };
        assert_eq!(outcome.expect("nothing waits").unwrap(), 10);
        assert_eq!(&buffer[..10], b"some bytes");
        for operation in [Operation::Fsync { data_only: true }, DURABLE_WRITE] {
            let mut transfer = transfer(operation, file.try_clone().unwrap(), &mut buffer[..5]);
            // SAFETY: the buffer is ours.
            assert!(unsafe { transfer.try_now() }.expect("nothing waits").is_ok());
            assert_ne!(transfer.file().io_hints() & IN_MEMORY, 0);
            assert_eq!(transfer.calls(), u64::from(operation == DURABLE_WRITE));
        }
    }

    #[test]
    fn a_transfer_that_waits_is_left_to_a_ring() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        let probe = Backing::new(file.try_clone().unwrap().into());
        let in_memory = io_hints::with_place(&probe) & IN_MEMORY != 0;
        for operation in [Operation::Fsync { data_only: true }, DURABLE_WRITE] {
            let mut bytes = [0; 5];
            let mut transfer = transfer(operation, file.try_clone().unwrap(), &mut bytes);
            // SAFETY: the buffer is ours.
            assert_eq!(unsafe { transfer.try_now() }.is_none(), !in_memory);
            // SAFETY: the buffer is ours.
            assert!(unsafe { transfer.run() }.is_ok(), "a thread that may wait makes it");
        }
    }

    #[test]
    fn a_cached_read_costs_one_call() {
        let mut file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.write_all(&[7; 4096]).unwrap();
        let mut buffer = [0; 4096];
        let mut read = transfer(Operation::Read, file, &mut buffer);
        // SAFETY: the buffer is ours.
        assert_eq!(unsafe { read.try_now() }.expect("it is in the page cache").unwrap(), 4096);
        let cannot_try = read.file().io_hints() & io_hints::READ_CANNOT_TRY != 0;
        assert_eq!(read.calls(), 1 + u64::from(cannot_try));
        assert_eq!(buffer, [7; 4096]);
    }

    #[test]
    fn results_add_up() {
        let file = || tempfile::tempfile().unwrap();
        let error = |errno| Err(io::Error::from_raw_os_error(errno));
        let left = |transfer: &Transfer| (transfer.left()[0].bytes, transfer.offset_left());
        let mut buffer = [0; 10];
        let mut read = transfer(Operation::Read, file(), &mut buffer);
        assert!(read.advance(Ok(4)).is_none() && read.advance(error(libc::EINTR)).is_none());
        assert_eq!(left(&read), (6, 4));
        assert_eq!(read.advance(Ok(0)).unwrap().unwrap(), 4, "the file ended");
        assert!(read.advance(error(libc::EIO)).unwrap().is_err());
        let mut write = transfer(Operation::Write { clear_privileges: false, waits: false }, file(), &mut buffer);
        assert!(write.advance(Ok(4)).is_none() && write.advance(error(libc::EAGAIN)).is_none(), "there is more to do");
        assert_eq!(left(&write), (6, 4));
        assert_eq!(write.advance(error(libc::ENOSPC)).unwrap().unwrap(), 4);
    }

    /// A server may answer so for ever: NFS while the file is locked, or any FUSE file system.
    #[test]
    fn a_remote_file_that_is_always_busy_is_an_error() {
        let error = |errno| Err(io::Error::from_raw_os_error(errno));
        let mut buffer = [0; 10];
        let mut read = transfer(Operation::Read, tempfile::tempfile().unwrap(), &mut buffer);
        assert_eq!(read.record(error(libc::EAGAIN), false).unwrap().unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        read.file().add_io_hints(REMOTE | io_hints::PROBED);
        assert_eq!(read.advance(error(libc::EAGAIN)).unwrap().unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        for _ in 0..2 {
            assert!((0..INTERRUPTIONS_MAX).all(|_| read.advance(error(libc::EINTR)).is_none()));
            assert!(read.advance(Ok(1)).is_none(), "it was not interrupted");
        }
        assert!((0..INTERRUPTIONS_MAX).all(|_| read.advance(error(libc::EINTR)).is_none()));
        assert_eq!(read.advance(error(libc::EINTR)).unwrap().unwrap_err().raw_os_error(), Some(libc::EINTR));
    }
}
