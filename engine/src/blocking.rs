//! Transfers of threads that may wait, between files and memory of their own.

use std::io;
use std::sync::Arc;

use ferry_vfs::{Backing, Segment};

use crate::transfers::{Operation, Transfer};

/// Reads from `offset` on into `bytes`, however long that takes. Returns how many bytes there were.
///
/// # Errors
/// Those of `pread(2)`.
pub fn read_blocking(file: &Arc<Backing>, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
    let segment = Segment { address: bytes.as_mut_ptr(), bytes: bytes.len() };
    // SAFETY: `bytes` is borrowed, and nobody else reaches it, until this returns.
    unsafe { Transfer::new(Operation::Read, Arc::clone(file), offset, [segment]).run() }
}

/// Writes `bytes` from `offset` on, however long that takes. Returns how many were written. `clear_privileges` is that of
/// [`Operation::Write`].
///
/// # Errors
/// Those of `pwrite(2)`, if nothing was written.
pub fn write_blocking(file: &Arc<Backing>, offset: u64, bytes: &[u8], clear_privileges: bool) -> io::Result<usize> {
    let segment = Segment { address: bytes.as_ptr().cast_mut(), bytes: bytes.len() };
    let operation = Operation::Write { clear_privileges, waits: false };
    // SAFETY: `bytes` is borrowed until this returns, and only read.
    unsafe { Transfer::new(operation, Arc::clone(file), offset, [segment]).run() }
}

/// Makes a file durable, however long that takes.
///
/// # Errors
/// Those of `fsync(2)`.
pub fn sync_blocking(file: &Arc<Backing>, data_only: bool) -> io::Result<()> {
    let nothing: [Segment; 0] = [];
    // SAFETY: no memory is involved.
    unsafe { Transfer::new(Operation::Fsync { data_only }, Arc::clone(file), 0, nothing).run() }.map(drop)
}
