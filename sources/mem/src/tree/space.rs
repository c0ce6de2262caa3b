//! The space of the tree itself: inodes, names, targets of symbolic links and extended attributes.
//!
//! Linux's tmpfs limits it separately from file data: 1024 bytes per possible inode. An inode and each further name
//! take 1024, and an extended attribute takes its length. This module does the same, because the limit of the data does
//! not bound this memory.

use std::sync::atomic::{AtomicU64, Ordering};

use ferry_vfs::{Errno, Result};

use super::node::{Body, State};
use crate::store::Store;

/// The space of an inode with its first name, and of each further name, in bytes (tmpfs: `BOGO_INODE_SIZE`).
pub const INODE_BYTES: u64 = 1024;
/// Shorter targets of symbolic links are part of the inode (tmpfs: `SHORT_SYMLINK_LEN`).
const SHORT_TARGET_BYTES: usize = 128;
/// The space of an extended attribute besides name and value, in bytes.
const XATTR_BYTES: u64 = 64;

/// An amount of limited space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpaceAmount {
    pub(crate) inodes: u64,
    pub(crate) bytes: u64,
}

/// What is taken.
#[derive(Debug, Default)]
pub(crate) struct UsedSpace {
    inodes: AtomicU64,
    bytes: AtomicU64,
}

/// Space reserved for a new object; released unless it is kept.
#[derive(Debug)]
pub(crate) struct Reservation<'a> {
    taken: &'a UsedSpace,
    amount: SpaceAmount,
}

impl Reservation<'_> {
    pub(crate) fn keep(mut self) {
        self.amount = SpaceAmount::default();
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.taken.remove(self.amount);
    }
}

/// Adds to a count up to a limit. Returns an error if it does not fit; adding nothing always succeeds.
fn add_up_to(count: &AtomicU64, more: u64, max: u64) -> Result<()> {
    let sum = |count: u64| count.checked_add(more).filter(|sum| more == 0 || *sum <= max);
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).map(drop).map_err(|_| Errno::NOSPC)
}

impl UsedSpace {
    pub(crate) fn inodes(&self) -> u64 {
        self.inodes.load(Ordering::Relaxed)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn reserve(&self, amount: SpaceAmount, max: SpaceAmount) -> Result<Reservation<'_>> {
        add_up_to(&self.inodes, amount.inodes, max.inodes)?;
        let inodes = Reservation { taken: self, amount: SpaceAmount { bytes: 0, ..amount } };
        add_up_to(&self.bytes, amount.bytes, max.bytes)?;
        inodes.keep();
        Ok(Reservation { taken: self, amount })
    }

    /// Takes without a limit.
    pub(crate) fn add(&self, amount: SpaceAmount) {
        self.inodes.fetch_add(amount.inodes, Ordering::Relaxed);
        self.bytes.fetch_add(amount.bytes, Ordering::Relaxed);
    }

    /// Gives back what was taken.
    pub(crate) fn remove(&self, amount: SpaceAmount) {
        self.inodes.fetch_sub(amount.inodes, Ordering::Relaxed);
        self.bytes.fetch_sub(amount.bytes, Ordering::Relaxed);
    }
}

/// Returns the space of the target of a symbolic link.
pub(crate) fn target_bytes(target: &[u8]) -> u64 {
    if target.len() < SHORT_TARGET_BYTES { 0 } else { target.len() as u64 }
}

/// What an extended attribute takes.
pub(crate) fn xattr_bytes(name: &[u8], value: &[u8]) -> u64 {
    XATTR_BYTES + name.len() as u64 + value.len() as u64
}

/// Returns the space of so many extended attributes, whose names and values have so many bytes.
pub(crate) fn space_of_xattrs(count: usize, bytes: usize) -> u64 {
    XATTR_BYTES * count as u64 + bytes as u64
}

impl<S: Store> State<S> {
    /// Returns the space of the inode with all of its names.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let target = if let Body::Symlink(target) = &self.body { target_bytes(target) } else { 0 };
        let xattrs = self.xattrs.as_ref().map_or(0, |xattrs| xattrs.space());
        let further_names = if matches!(self.body, Body::Dir(_)) { 0 } else { u64::from(self.nlink.saturating_sub(1)) };
        INODE_BYTES * (1 + further_names) + target + xattrs
    }
}
