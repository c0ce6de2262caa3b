//! A batch of transfers in one system call (Linux AIO).
//!
//! Some transfers only copy but cannot be tried without waiting: buffered writes to ext4, all of tmpfs. io_uring passes
//! each of those to a kernel thread. `io_submit`, its predecessor, carries them out one after another before it
//! returns. The events are then in shared memory, from which this module reads them as libaio does.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use ferry_vfs::Segment;

/// The maximum number of calls in one batch: as many requests as a worker takes from a queue at once.
pub(crate) const CALLS_MAX: usize = 64;

/// `IOCB_CMD_PREADV` and `IOCB_CMD_PWRITEV` (`linux/aio_abi.h`), which `libc` lacks.
const READ_VECTOR: u16 = 7;
const WRITE_VECTOR: u16 = 8;

/// `AIO_RING_MAGIC`: the memory at a context's address has the layout of [`Header`].
const MAGIC: u32 = 0xa10a_10a1;

/// `struct aio_ring`, which libaio, fio and QEMU read, too. The events follow it.
#[repr(C)]
struct Header {
    id: u32,
    entries: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
    bytes: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// `struct iocb`, which `libc` lacks for musl.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Call {
    data: u64,
    /// `aio_key` and `aio_rw_flags`, whose order depends on the byte order: both are zero.
    key_and_flags: [u32; 2],
    opcode: u16,
    priority: i16,
    descriptor: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_descriptor: u32,
}

const _: () = {
    assert!(size_of::<Header>() == 32 && offset_of!(Header, magic) == 16 && offset_of!(Header, bytes) == 28);
    assert!(size_of::<Event>() == 32 && offset_of!(Event, result) == 16);
    assert!(size_of::<Call>() == 64 && offset_of!(Call, opcode) == 16 && offset_of!(Call, descriptor) == 20);
    assert!(offset_of!(Call, buffer) == 24 && offset_of!(Call, bytes) == 32 && offset_of!(Call, offset) == 40);
    assert!(offset_of!(Call, event_descriptor) == 60);
};

/// A Linux AIO context with its queued calls.
pub(crate) struct AioBatch {
    context: libc::c_ulong,
    calls: Vec<Call>,
    outcomes: Vec<Option<i64>>,
}

impl AioBatch {
    pub(crate) fn new() -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's number into the variable.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, CALLS_MAX, &raw mut context) };
        if made != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { context, calls: Vec::with_capacity(CALLS_MAX), outcomes: Vec::with_capacity(CALLS_MAX) })
    }

    /// Removes all calls and their outcomes.
    pub(crate) fn clear(&mut self) {
        self.calls.clear();
        self.outcomes.clear();
    }

    /// Adds a transfer; at most [`CALLS_MAX`] fit.
    pub(crate) fn add(&mut self, is_read: bool, fd: BorrowedFd<'_>, offset: i64, segments: &[Segment]) {
        self.calls.push(Call {
            data: self.calls.len() as u64,
            opcode: if is_read { READ_VECTOR } else { WRITE_VECTOR },
            descriptor: fd.as_raw_fd().unsigned_abs(),
            buffer: segments.as_ptr().addr() as u64,
            bytes: segments.len() as u64,
            offset,
            ..Call::default()
        });
    }

    /// Carries out the added calls and returns when all of them have ended.
    ///
    /// # Safety
    ///
    /// The descriptors are open, and the memory is valid; other code accesses it only by volatile access.
    pub(crate) unsafe fn submit_and_wait(&mut self) {
        let mut list = [std::ptr::null_mut::<Call>(); CALLS_MAX];
        let count = self.calls.len().min(CALLS_MAX);
        for (pointer, call) in list.iter_mut().zip(&mut self.calls) {
            *pointer = &raw mut *call;
        }
        self.outcomes.resize(self.calls.len(), None);
        // SAFETY: the list holds `count` pointers to live calls; the caller guarantees the memory that they point to.
        let taken = unsafe { libc::syscall(libc::SYS_io_submit, self.context, count, list.as_mut_ptr()) };
        // The kernel stops at the first call that it rejects: that call and later ones have no outcome.
        let Some(mut left) = usize::try_from(taken).ok() else { return };
        left -= self.take_shared(left);
        while left > 0 {
            let mut events = [Event::default(); CALLS_MAX];
            // SAFETY: there is room for `left` events, which are at most `CALLS_MAX`; no time-out.
            let got = unsafe {
                let nothing = std::ptr::null::<libc::timespec>();
                libc::syscall(libc::SYS_io_getevents, self.context, left, left, events.as_mut_ptr(), nothing)
            };
            match usize::try_from(got) {
                Ok(got) => {
                    events[..got].iter().for_each(|event| self.note(*event));
                    left -= got;
                }
                // Only a signal interrupts the wait, and calls in flight use the callers' memory.
                Err(_) => debug_assert_eq!(io::Error::last_os_error().kind(), io::ErrorKind::Interrupted),
            }
        }
    }

    /// Returns the outcome of a call, by its position in the batch. `None`: the kernel did not begin it.
    pub(crate) fn outcome(&self, index: usize) -> Option<io::Result<usize>> {
        let result = (*self.outcomes.get(index)?)?;
        let code = || i32::try_from(-result).unwrap_or(libc::EIO);
        Some(usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(code())))
    }

    fn note(&mut self, event: Event) {
        let index = usize::try_from(event.data).ok();
        if let Some(outcome) = index.and_then(|index| self.outcomes.get_mut(index)) {
            *outcome = Some(event.result);
        }
    }

    /// Takes up to `count` events from the memory shared with the kernel. Returns their number.
    fn take_shared(&mut self, count: usize) -> usize {
        let Ok(address) = usize::try_from(self.context) else { return 0 };
        let ring = std::ptr::with_exposed_provenance::<Header>(address);
        // SAFETY: a context's number is the address of its ring, which stays mapped until `io_destroy`. Besides this
        // thread only the kernel accesses it, and writes only `tail`.
        let header = unsafe { &*ring };
        if header.magic != MAGIC || header.incompatible != 0 || header.bytes as usize != size_of::<Header>() {
            return 0;
        }
        let (entries, tail) = (header.entries, header.tail.load(Ordering::Acquire));
        let mut head = header.head.load(Ordering::Relaxed);
        let mut taken = 0;
        while head != tail && taken < count && head < entries {
            // SAFETY: `header.nr` events follow the header; the kernel has written those before `tail` and does not
            // reuse them until `head` has passed them.
            let event = unsafe { ring.add(1).cast::<Event>().add(head as usize).read_volatile() };
            self.note(event);
            head = (head + 1) % entries;
            taken += 1;
        }
        header.head.store(head, Ordering::Release);
        taken
    }
}

impl Drop for AioBatch {
    fn drop(&mut self) {
        // SAFETY: this value owns the context, no call is in flight, and it is not used afterwards.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn each_call_has_its_own_outcome() {
        for parent in [std::path::Path::new("/dev/shm"), &std::env::temp_dir()] {
            let file = tempfile::tempfile_in(parent).unwrap();
            let directory = std::fs::File::open(parent).unwrap();
            let mut bytes: Vec<[u8; 512]> = (0..64u8).map(|n| [n; 512]).collect();
            let pieces: Vec<Segment> =
                bytes.iter_mut().map(|piece| Segment { address: piece.as_mut_ptr(), bytes: 512 }).collect();
            let mut aio_batch = AioBatch::new().unwrap();
            // More rounds than the kernel's ring has entries.
            for lap in 0..100 {
                aio_batch.clear();
                for (index, piece) in pieces.iter().enumerate() {
                    let at = 512 * i64::try_from((index + lap) % 64).unwrap();
                    aio_batch.add(false, file.as_fd(), at, std::slice::from_ref(piece));
                }
                // SAFETY: `bytes` and `file` live on.
                unsafe { aio_batch.submit_and_wait() };
                assert!((0..64).all(|index| matches!(aio_batch.outcome(index), Some(Ok(512)))), "lap {lap}");
            }
            aio_batch.clear();
            aio_batch.add(true, file.as_fd(), 512 * (63 + 35), &pieces[..1]);
            aio_batch.add(true, directory.as_fd(), 0, &pieces[..1]);
            aio_batch.add(true, file.as_fd(), 0, &pieces[..1]);
            // SAFETY: as above.
            unsafe { aio_batch.submit_and_wait() };
            let outcomes: Vec<_> = (0..3).map(|index| aio_batch.outcome(index).map(Result::ok)).collect();
            assert_eq!(
                outcomes,
                [Some(Some(0)), None, None],
                "the end of the file, a rejected call, and all later calls"
            );
        }
    }
}
