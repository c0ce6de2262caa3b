//! Transfers without a system call, for files that a source has mapped.

use std::io;
use std::os::fd::AsFd;

use ferry_vfs::{Backing, Segment};

use crate::transfers::Operation;

/// Moves bytes at once where the file's [memory](ferry_vfs::Memory) can; `None` if nothing was moved and the descriptor
/// is to be used. Never waits for a disk. Such files have no suid or sgid that a write had to clear.
///
/// # Safety
/// The memory of the segments must be valid, and every other access to it volatile, until this returns.
pub unsafe fn copy_mapped(
    operation: Operation,
    file: &Backing,
    offset: u64,
    segments: &[Segment],
) -> Option<io::Result<usize>> {
    let memory = file.memory()?;
    let moved = match operation {
        // SAFETY: passed on to the caller.
        Operation::Read => unsafe { memory.read(file.as_fd(), offset, segments) },
        // SAFETY: passed on to the caller.
        Operation::Write { .. } => unsafe { memory.write(file.as_fd(), offset, segments) },
        Operation::Fsync { .. } => None,
    };
    moved.map(|outcome| outcome.map_err(io::Error::from))
}
