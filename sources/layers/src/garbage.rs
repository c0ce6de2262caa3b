//! The state of the removal of unused data (`remove_unused.rs`).

use std::sync::atomic::AtomicBool;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// The state of the removal.
#[derive(Debug, Default)]
pub(crate) struct Garbage {
    /// Write-locked by a removal, and only without waiting: lookups that run for long must not block others.
    pub(crate) removing: RwLock<()>,
    pub(crate) is_scheduled: AtomicBool,
    /// Unused layers may still be open.
    pub(crate) has_leftovers: AtomicBool,
}

impl Garbage {
    /// Prevents a removal: of files that no entry names yet, and of a layer between its lookup and its first reference.
    pub(crate) fn prevent(&self) -> RwLockReadGuard<'_, ()> {
        self.removing.read().unwrap_or_else(PoisonError::into_inner)
    }
}
