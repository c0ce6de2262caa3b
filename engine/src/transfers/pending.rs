//! The slots of transfers in flight, and merging of adjacent transfers.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use ferry_vfs::{Backing, Segment};

use super::Operation;
use super::io_hints::REMOTE;
use super::transfer::Transfer;
use crate::aio_batch::AioBatch;
use crate::ring::SEGMENTS_MAX;

/// Adjacent transfers are merged up to this size in bytes, about the size of one disk command.
const MERGED_BYTES_MAX: usize = 1 << 20;
/// And up to about this many segments, far below the limit of a call.
const MERGED_SEGMENTS_MAX: usize = SEGMENTS_MAX / 4;

/// A slot: free, or with a transfer. Its lists keep their memory for the next transfer.
#[derive(Default)]
pub(super) struct Pending {
    pub(super) token: u64,
    transfer: Option<Transfer<Vec<Segment>>>,
    /// The parts of a merged transfer, in the order of their bytes; empty if there is just one.
    merged: Vec<MergedPart>,
    free_segments: Vec<Segment>,
}

/// A part of a merged transfer.
#[derive(Clone, Copy)]
pub(super) struct MergedPart {
    pub(super) token: u64,
    pub(super) bytes: usize,
    pub(super) segments: usize,
}

impl Pending {
    pub(super) fn set(
        &mut self,
        token: u64,
        operation: Operation,
        (file, offset): (Arc<Backing>, u64),
        segments: impl IntoIterator<Item = Segment>,
    ) {
        let mut own = std::mem::take(&mut self.free_segments);
        own.extend(segments);
        self.token = token;
        self.transfer = Some(Transfer::new(operation, file, offset, own));
    }

    /// The slot's transfer.
    pub(super) fn transfer(&mut self) -> &mut Transfer<Vec<Segment>> {
        self.transfer.as_mut().expect("a slot has its transfer until it is finished")
    }

    /// Takes the transfer out.
    pub(super) fn take(&mut self) -> Option<Transfer<Vec<Segment>>> {
        self.transfer.take()
    }

    /// Ends a transfer that is not merged.
    pub(super) fn clear(&mut self) {
        if let Some(transfer) = self.transfer.take() {
            self.recycle(transfer);
        }
    }

    /// Keeps the memory of a transfer's list for reuse.
    pub(super) fn recycle(&mut self, transfer: Transfer<Vec<Segment>>) {
        self.free_segments = transfer.into_segments();
        self.free_segments.clear();
    }

    pub(super) fn is_merged(&self) -> bool {
        !self.merged.is_empty()
    }

    /// Takes the parts of a merged transfer.
    pub(super) fn take_parts(&mut self) -> Vec<MergedPart> {
        std::mem::take(&mut self.merged)
    }

    /// Keeps the memory of that list for reuse.
    pub(super) fn put_parts(&mut self, mut parts: Vec<MergedPart>) {
        parts.clear();
        self.merged = parts;
    }

    /// Returns whether a transfer at `offset` can be merged with this one. Files in memory need no system call, so
    /// merging gains nothing, and their failures must not be retried on the descriptor.
    pub(super) fn is_followed_by(&self, operation: Operation, file: &Arc<Backing>, offset: u64) -> bool {
        let Some(own) = &self.transfer else { return false };
        own.operation() == operation
            && !matches!(operation, Operation::Fsync { .. })
            && own.offset().checked_add(own.bytes() as u64) == Some(offset)
            && own.bytes() < MERGED_BYTES_MAX
            && own.segments().len() < MERGED_SEGMENTS_MAX
            && Arc::ptr_eq(own.file(), file)
            && file.memory().is_none()
            // A part that is repeated would be appended twice.
            && !file.appends()
            // Each transfer of a remote file takes its own thread.
            && file.io_hints() & REMOTE == 0
    }

    /// Merges an adjacent transfer into this one.
    pub(super) fn append(&mut self, token: u64, segments: impl IntoIterator<Item = Segment>) {
        let (own_token, is_merged) = (self.token, self.is_merged());
        let transfer = self.transfer();
        let first = MergedPart { token: own_token, bytes: transfer.bytes(), segments: transfer.segments().len() };
        let (bytes, segments) = transfer.merge(segments);
        if !is_merged {
            self.merged.push(first);
        }
        self.merged.push(MergedPart { token, bytes, segments });
    }

    /// Adds the rest of the transfer to a batch. Returns whether it could be added.
    pub(super) fn add_to_batch(&mut self, aio_batch: &mut AioBatch) -> bool {
        let transfer = self.transfer();
        match i64::try_from(transfer.offset_left()) {
            Ok(offset) => {
                aio_batch.add(transfer.is_read(), transfer.file().as_fd(), offset, transfer.left());
                true
            }
            Err(_) => false,
        }
    }

    pub(super) fn advance(&mut self, result: io::Result<usize>) -> Option<io::Result<usize>> {
        self.transfer().advance(result)
    }
}
