//! Blocking transfers between files and the caller's own memory.

use std::cell::RefCell;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ferry_vfs::{Backing, Errno, Input, Result, Segment};

use crate::transfers::{Operation, Transfer};

/// The size of a write of [`write_input`] in bytes, in memory aligned for `O_DIRECT`.
const PIECE_BYTES: usize = 128 << 10;
const PIECE_ALIGN: usize = 4096;

thread_local! {
    /// The memory of this thread's writes.
    static PIECE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Reads from `offset` into `bytes`; may block, after a call of `before_wait`. Returns the number of bytes read.
///
/// # Errors
/// Those of `pread(2)`.
pub fn read_blocking(
    file: &Arc<Backing>,
    offset: u64,
    bytes: &mut [u8],
    before_wait: impl FnOnce(),
) -> io::Result<usize> {
    let segment = Segment { address: bytes.as_mut_ptr(), bytes: bytes.len() };
    let mut transfer = Transfer::new(Operation::Read, Arc::clone(file), offset, [segment]);
    // SAFETY: `bytes` is borrowed exclusively until this returns.
    unsafe { transfer.try_now() }.unwrap_or_else(|| {
        before_wait();
        // SAFETY: as above.
        unsafe { transfer.run() }
    })
}

/// Writes `bytes` at `offset`; may block. Returns the number of bytes written. See [`Operation::Write`].
///
/// # Errors
///
/// Those of `pwrite(2)`, if no byte was written.
pub fn write_blocking(file: &Arc<Backing>, offset: u64, bytes: &[u8], clear_privileges: bool) -> io::Result<usize> {
    let segment = Segment { address: bytes.as_ptr().cast_mut(), bytes: bytes.len() };
    let operation = Operation::Write { clear_privileges, waits: false };
    // SAFETY: `bytes` is borrowed until this returns, and only read.
    unsafe { Transfer::new(operation, Arc::clone(file), offset, [segment]).run() }
}

/// Makes a file durable; may block.
///
/// # Errors
/// Those of `fsync(2)`.
pub fn sync_blocking(file: &Arc<Backing>, data_only: bool) -> io::Result<()> {
    let nothing: [Segment; 0] = [];
    // SAFETY: no memory is involved.
    unsafe { Transfer::new(Operation::Fsync { data_only }, Arc::clone(file), 0, nothing).run() }.map(drop)
}

/// Writes `len` bytes of `input`, or as many as it has, at `offset`; may block. Returns the number of bytes written.
///
/// # Errors
///
/// Those of `pwrite(2)`, if no byte was written.
pub fn write_input(file: BorrowedFd<'_>, offset: u64, len: usize, input: &mut dyn Input) -> Result<usize> {
    PIECE.with_borrow_mut(|room| {
        room.resize(PIECE_BYTES + PIECE_ALIGN, 0);
        let begin = room.as_ptr().align_offset(PIECE_ALIGN).min(PIECE_ALIGN);
        let mut done = 0;
        while done < len {
            let piece = &mut room[begin..][..PIECE_BYTES.min(len - done)];
            let taken = input.take(piece);
            let mut written = 0;
            while written < taken {
                match rustix::io::pwrite(file, &piece[written..taken], offset + (done + written) as u64) {
                    Ok(count) if count > 0 => written += count,
                    Err(Errno::INTR) => {}
                    Err(errno) if done + written == 0 => return Err(errno),
                    // The written part is reported; the client retries the rest and gets the error then.
                    Ok(_) | Err(_) => return Ok(done + written),
                }
            }
            done += taken;
            if taken == 0 {
                break;
            }
        }
        Ok(done)
    })
}
