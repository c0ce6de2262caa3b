//! One transfer: trying it at once, taking in its results, and joining it with those that follow on.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use ferry_vfs::{Backing, Segment};

use super::Operation;
use super::far::Far;
use super::learnt::{self, FAR, PLACE_KNOWN, READ_CANNOT_TRY, READ_TRIES, WRITE_CANNOT_TRY, WRITE_TRIES};
use crate::at_once::AtOnce;
use crate::memory::move_now;
use crate::ring::SEGMENTS_MAX;

/// From how many transfers on a ring's one call for all is cheaper than a call for each.
pub(super) const RING_BATCH_MIN: usize = 3;

/// Adjacent transfers are made as one up to this size, which is about what disks take in one command.
const MERGED_BYTES_MAX: usize = 1 << 20;
/// And up to about so many pieces of memory, far below what one call takes.
const MERGED_SEGMENTS_MAX: usize = SEGMENTS_MAX / 4;

/// What becomes of a transfer that was to begin.
pub(super) enum Begun {
    /// It is over.
    Ended(io::Result<usize>),
    /// It cannot be tried without waiting, but all it does is copy: it is to be made at once.
    Copies,
    /// It may wait: for the ring.
    Waits,
    /// It may wait, for somebody else: for the caller, where that wants such.
    Far,
}

/// A transfer, or several adjacent ones that are made as one.
pub(super) struct Pending {
    pub(super) token: u64,
    pub(super) operation: Operation,
    pub(super) file: Option<Arc<Backing>>,
    pub(super) offset: u64,
    pub(super) segments: Vec<Segment>,
    /// Segments wholly done.
    pub(super) first: usize,
    pub(super) done: usize,
    pub(super) wanted: usize,
    /// All transfers that are made as this one, in the order of their bytes; empty if it is just one.
    pub(super) merged: Vec<Part>,
}

/// One of several adjacent transfers that are made as one.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) token: u64,
    pub(super) bytes: usize,
    pub(super) segments: usize,
}

impl Pending {
    pub(super) fn new(
        token: u64,
        operation: Operation,
        file: Arc<Backing>,
        offset: u64,
        segments: Vec<Segment>,
    ) -> Self {
        let wanted = segments.iter().map(|segment| segment.bytes).sum();
        Self { token, operation, file: Some(file), offset, segments, first: 0, done: 0, wanted, merged: Vec::new() }
    }

    /// Takes the transfer out, for the caller to make.
    pub(super) fn take_far(&mut self) -> Option<Far> {
        let segments = std::mem::take(&mut self.segments);
        Some(Far {
            token: self.token,
            operation: self.operation,
            file: self.file.take()?,
            offset: self.offset,
            segments,
        })
    }

    /// Whether the file is known to be served by somebody else.
    fn is_far(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.learnt() & FAR != 0)
    }

    /// Whether a transfer at `offset` can be made together with this one. What lies in memory is moved without a system
    /// call, so there is nothing to save; and its failures are not to be tried again on the descriptor.
    pub(super) fn is_followed_by(&self, operation: Operation, file: &Arc<Backing>, offset: u64) -> bool {
        self.operation == operation
            && !matches!(operation, Operation::Fsync { .. })
            && self.offset.checked_add(self.wanted as u64) == Some(offset)
            && self.wanted < MERGED_BYTES_MAX
            && self.segments.len() < MERGED_SEGMENTS_MAX
            && self.file.as_ref().is_some_and(|own| Arc::ptr_eq(own, file) && own.memory().is_none())
            // Each is left to a thread of its own.
            && !self.is_far()
    }

    /// Makes a transfer that follows on a part of this one.
    pub(super) fn append(&mut self, token: u64, segments: impl IntoIterator<Item = Segment>) {
        if self.merged.is_empty() {
            self.merged.push(Part { token: self.token, bytes: self.wanted, segments: self.segments.len() });
        }
        let before = self.segments.len();
        self.segments.extend(segments);
        let own = &self.segments[before..];
        let bytes = own.iter().map(|segment| segment.bytes).sum();
        self.merged.push(Part { token, bytes, segments: own.len() });
        self.wanted += bytes;
    }

    pub(super) fn fd(&self) -> RawFd {
        self.file.as_ref().map_or(-1, |file| file.as_fd().as_raw_fd())
    }

    /// Makes the transfer in memory, if it can be.
    pub(super) fn move_now(&self) -> Option<io::Result<usize>> {
        let file = self.file.as_deref()?;
        // SAFETY: the memory is valid by the contract of `queue`.
        unsafe { move_now(self.operation, file, self.offset, &self.segments) }
    }

    /// Ends the transfer here and now if that needs no waiting, or if there is no other way.
    pub(super) fn begin(&mut self, has_ring: bool, batch: usize, leaves_far: bool) -> Begun {
        if leaves_far {
            self.look_at_place(has_ring);
        }
        let far = self.is_far();
        if far && leaves_far && self.merged.is_empty() {
            return Begun::Far;
        }
        let learnt = self.file.as_ref().map_or(0, |file| file.learnt());
        // What lies in memory has nothing to wait for, whatever the flags say.
        let in_memory = self.file.as_ref().is_some_and(|file| file.memory().is_some());
        let (tries, cannot_try) = match self.operation {
            Operation::Read => (READ_TRIES, READ_CANNOT_TRY),
            _ => (WRITE_TRIES, WRITE_CANNOT_TRY),
        };
        match self.operation {
            _ if !has_ring || in_memory => return Begun::Ended(self.wait_for_it()),
            _ if far => return Begun::Waits,
            _ if self.file.as_ref().is_some_and(|file| file.waits()) => return Begun::Waits,
            Operation::Fsync { .. } | Operation::Write { waits: true, .. } => return Begun::Waits,
            _ if learnt & cannot_try != 0 => return Begun::Copies,
            _ if learnt & tries != 0 && batch >= RING_BATCH_MIN => return Begun::Waits,
            _ => {}
        }
        let is_read = self.operation == Operation::Read;
        loop {
            let outcome = self.call(libc::RWF_NOWAIT);
            match &outcome {
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => {
                        if is_read {
                            self.learn(READ_TRIES);
                        }
                        return Begun::Waits;
                    }
                    Some(libc::EOPNOTSUPP) => return self.cannot_be_tried(cannot_try, leaves_far),
                    _ => {}
                },
                Ok(_) if learnt & tries == 0 => self.learn(tries),
                Ok(_) => {}
            }
            if let Some(outcome) = self.advance(outcome) {
                return Begun::Ended(outcome);
            }
        }
    }

    /// Looks where the file lies before a transfer that is not tried, and so learns nothing of it.
    fn look_at_place(&self, has_ring: bool) {
        let is_tried = match self.operation {
            Operation::Read | Operation::Write { waits: false, .. } => has_ring,
            _ => false,
        };
        if let Some(file) = self.file.as_deref()
            && file.learnt() & PLACE_KNOWN == 0
            && file.memory().is_none()
            && (!is_tried || file.waits())
        {
            learnt::place(file);
        }
    }

    /// The kernel cannot try such a transfer of this file without waiting. To copy is all that it takes, unless somebody else
    /// has the bytes.
    fn cannot_be_tried(&self, cannot_try: u8, leaves_far: bool) -> Begun {
        let place = self.file.as_deref().map_or(0, learnt::place);
        match place & FAR != 0 {
            true if leaves_far && self.merged.is_empty() => Begun::Far,
            true => Begun::Waits,
            false => {
                self.learn(cannot_try);
                Begun::Copies
            }
        }
    }

    fn learn(&self, bits: u8) {
        if let Some(file) = &self.file {
            file.learn(bits);
        }
    }

    /// Adds what is to be done to those that are made at once. Answers whether it could be added.
    pub(super) fn add_to(&self, at_once: &mut AtOnce) -> bool {
        let segments = &self.segments[self.first..];
        let segments = &segments[..segments.len().min(SEGMENTS_MAX)];
        match (&self.file, i64::try_from(self.offset + self.done as u64)) {
            (Some(file), Ok(offset)) => {
                at_once.add(self.operation == Operation::Read, file.as_fd(), offset, segments);
                true
            }
            _ => false,
        }
    }

    pub(super) fn wait_for_it(&mut self) -> io::Result<usize> {
        loop {
            let outcome = self.call(0);
            if let Some(outcome) = self.advance(outcome) {
                return outcome;
            }
        }
    }

    /// Takes in one result. Answers the transfer's outcome, or `None` if there is more to do.
    pub(super) fn advance(&mut self, outcome: io::Result<usize>) -> Option<io::Result<usize>> {
        let count = match outcome {
            Ok(count) => count,
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => return None,
                _ if !self.merged.is_empty() => return Some(Err(error)),
                // What was moved before the error is told; the client meets the error where it asks for the rest.
                _ if self.done > 0 && self.operation != Operation::Read => return Some(Ok(self.done)),
                _ => return Some(Err(error)),
            },
        };
        self.done += count;
        if !self.merged.is_empty() {
            return Some(Ok(self.done));
        }
        // A short read may be the end of the file or a failure in the middle, a short write a full disk or what could be
        // done without waiting: only the next one tells.
        if count == 0 || self.done >= self.wanted {
            return Some(Ok(self.done));
        }
        let mut count = count;
        while let Some(segment) = self.segments.get_mut(self.first) {
            if count < segment.bytes {
                segment.address = segment.address.wrapping_add(count);
                segment.bytes -= count;
                break;
            }
            count -= segment.bytes;
            self.first += 1;
        }
        None
    }

    fn call(&self, flags: libc::c_int) -> io::Result<usize> {
        let segments = &self.segments[self.first..];
        let count = libc::c_int::try_from(segments.len().min(SEGMENTS_MAX)).unwrap_or(0);
        let iov = segments.as_ptr().cast();
        let Ok(offset) = libc::off_t::try_from(self.offset + self.done as u64) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        let moved = match self.operation {
            // SAFETY: the descriptor is open (`self.file`), the memory valid by the contract of `queue`, and
            // `Segment` is laid out as `iovec`.
            Operation::Read => unsafe { libc::preadv2(self.fd(), iov, count, offset, flags) },
            // SAFETY: as above.
            Operation::Write { .. } => unsafe { libc::pwritev2(self.fd(), iov, count, offset, flags) },
            // SAFETY: no memory is involved.
            Operation::Fsync { data_only: false } => unsafe { libc::fsync(self.fd()) as isize },
            // SAFETY: no memory is involved.
            Operation::Fsync { data_only: true } => unsafe { libc::fdatasync(self.fd()) as isize },
        };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }
}
