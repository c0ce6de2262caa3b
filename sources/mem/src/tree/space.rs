//! What the tree itself takes: inodes, names, targets of symbolic links and extended attributes.
//!
//! Linux's tmpfs counts them apart from files' data: it has 1024 bytes for each inode that there may be, of which an inode and each
//! name after its first take 1024, and an extended attribute what it is long. It is the same here, so that the memory for all this, which the
//! limit of the data says nothing about, has a limit, too.

use std::sync::atomic::{AtomicU64, Ordering};

use ferry_vfs::{Errno, Result};

use super::node::{Body, State};
use crate::store::Store;

/// What an inode with its first name takes, and what each further name takes (tmpfs: `BOGO_INODE_SIZE`).
pub const INODE_BYTES: u64 = 1024;
/// Targets of symbolic links of fewer bytes are part of the inode (tmpfs: `SHORT_SYMLINK_LEN`).
const SHORT_TARGET_BYTES: usize = 128;
/// What an extended attribute takes beside name and value.
const XATTR_BYTES: u64 = 64;

/// So much of what is limited.
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

/// What was taken for something before it is made; given back unless it is kept.
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

/// Adds to a count that is not to pass a limit. What does not fit is refused, what adds nothing never.
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

/// What the target of a symbolic link takes.
pub(crate) fn target_bytes(target: &[u8]) -> u64 {
    if target.len() < SHORT_TARGET_BYTES { 0 } else { target.len() as u64 }
}

/// What an extended attribute takes.
pub(crate) fn xattr_bytes(name: &[u8], value: &[u8]) -> u64 {
    XATTR_BYTES + name.len() as u64 + value.len() as u64
}

impl<S: Store> State<S> {
    /// What the inode takes, with all of its names.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let target = if let Body::Symlink(target) = &self.body { target_bytes(target) } else { 0 };
        let xattrs = self.xattrs.iter().flat_map(|xattrs| xattrs.iter()).map(|(name, value)| xattr_bytes(name, value));
        let further_names = if matches!(self.body, Body::Dir(_)) { 0 } else { u64::from(self.nlink.saturating_sub(1)) };
        INODE_BYTES * (1 + further_names) + target + xattrs.sum::<u64>()
    }
}
