//! Blocking transfers between files and the caller's own memory.

use std::io;
use std::sync::Arc;

use ferry_vfs::{Backing, Segment};

use crate::transfers::{Operation, Transfer};

/// Reads from `offset` into `bytes`; may block. Returns the number of bytes read.
///
/// # Errors
/// Those of `pread(2)`.
pub fn read_blocking(file: &Arc<Backing>, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
    let segment = Segment { address: bytes.as_mut_ptr(), bytes: bytes.len() };
    // SAFETY: `bytes` is borrowed exclusively until this returns.
    unsafe { Transfer::new(Operation::Read, Arc::clone(file), offset, [segment]).run() }
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
