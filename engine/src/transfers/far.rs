//! Transfers that are left to the caller, and how a thread that may wait makes one.

use std::io;
use std::sync::Arc;

use ferry_vfs::{Backing, Segment};

use super::Operation;
use super::pending::Pending;
use crate::memory::move_now;
use crate::privileges::WithoutFsetid;

/// A transfer of a file that another process or machine serves ([`super::Transfers::leave_far`]).
#[derive(Debug)]
pub struct Far {
    /// The token that it was queued with.
    pub token: u64,
    pub(super) operation: Operation,
    pub(super) file: Arc<Backing>,
    pub(super) offset: u64,
    pub(super) segments: Vec<Segment>,
}

// SAFETY: the segments are addresses, whose memory is valid for whoever makes the transfer (`Transfers::queue`).
unsafe impl Send for Far {}

impl Far {
    /// Makes the transfer on this thread, however long it takes. Answers the number of bytes moved.
    ///
    /// # Errors
    /// Those of the transfer.
    ///
    /// # Safety
    /// As for [`super::Transfers::queue`], until this returns.
    pub unsafe fn make(self) -> io::Result<usize> {
        let Self { operation, file, offset, segments, .. } = self;
        // SAFETY: passed on to the caller.
        unsafe { move_waiting(operation, file, offset, segments) }
    }
}

/// Makes a transfer on this thread, however long it takes. Answers the number of bytes moved.
///
/// # Errors
/// Those of the transfer.
///
/// # Safety
/// The memory of the segments must be valid, and every other access to it volatile, until this returns.
pub unsafe fn move_waiting(
    operation: Operation,
    file: Arc<Backing>,
    offset: u64,
    segments: Vec<Segment>,
) -> io::Result<usize> {
    // SAFETY: passed on to the caller.
    if let Some(outcome) = unsafe { move_now(operation, &file, offset, &segments) } {
        return outcome;
    }
    let _without = match operation {
        Operation::Write { clear_privileges: true, .. } => Some(WithoutFsetid::enter()?),
        _ => None,
    };
    Pending::new(0, operation, file, offset, segments).wait_for_it()
}
