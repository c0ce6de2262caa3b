//! Transfers without a system call, for files that a source has mapped.

use std::io;
use std::os::fd::AsFd;

use ferry_vfs::{Backing, Segment};

use crate::transfers::Operation;

/// Copies bytes directly if the file has [memory](ferry_vfs::Memory). Returns `None` if it copied nothing and the
/// caller must use the descriptor. Never waits for a disk. Such files have no suid or sgid that a write must clear.
///
/// # Safety
///
/// Until this returns, the memory of the segments must be valid, and every other access to it volatile.
pub unsafe fn copy_mapped(
    operation: Operation,
    file: &Backing,
    offset: u64,
    segments: &[Segment],
) -> Option<io::Result<usize>> {
    let memory = file.memory()?;
    let moved = match operation {
        // SAFETY: guaranteed by the caller.
        Operation::Read => unsafe { memory.read(file.as_fd(), offset, segments) },
        // SAFETY: guaranteed by the caller.
        Operation::Write { .. } => unsafe { memory.write(file.as_fd(), offset, segments) },
        Operation::Fsync { .. } => None,
    };
    moved.map(|outcome| outcome.map_err(io::Error::from))
}
