//! Schedules counts of a tree.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use ferry_vfs::Errno;
use ferry_vfs::sync::lock;

/// Why the tree could not be counted.
#[derive(Debug, thiserror::Error)]
#[error(
    "a quota needs to count the whole tree, and this server cannot read its directory with the inode number {inode}: find it with \
     find -inum {inode}, and allow this user to read it"
)]
pub struct CountError {
    /// The number of the directory, as `stat` shows it.
    pub inode: u64,
    #[source]
    pub(crate) errno: Errno,
}

/// Removals and moves, during which a count is invalid.
#[derive(Debug, Default)]
pub(crate) struct Removals {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Removals {
    /// Keep the result until the accounts show the change.
    pub(crate) fn begin(&self) -> Removal<'_> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        Removal(self)
    }

    /// Returns the number of requests, unless one is under way.
    pub(crate) fn quiet(&self) -> Option<u64> {
        let ended = self.ended.load(Ordering::SeqCst);
        (self.begun.load(Ordering::SeqCst) == ended).then_some(ended)
    }
}

/// One request; see [`Removals`].
#[derive(Debug)]
pub(crate) struct Removal<'a>(&'a Removals);

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// Tells the counting thread what to do.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_requested: bool,
    is_over: bool,
}

impl Counter {
    /// Requests a count.
    pub(crate) fn request(&self) {
        lock(&self.state).is_requested = true;
        self.changed.notify_one();
    }

    /// Waits until a count is requested, at most for a period. Returns whether it is; `None`: the quota is gone.
    pub(crate) fn wait(&self, period: Duration) -> Option<bool> {
        let is_idle = |state: &mut State| !state.is_requested && !state.is_over;
        let waited = self.changed.wait_timeout_while(lock(&self.state), period, is_idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_requested = std::mem::take(&mut state.is_requested);
        (!state.is_over).then_some(is_requested)
    }

    /// Waits for a time. Returns whether the quota still exists.
    pub(crate) fn pause(&self, time: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(lock(&self.state), time, |state| !state.is_over);
        !waited.unwrap_or_else(PoisonError::into_inner).0.is_over
    }

    /// The quota is gone.
    pub(crate) fn end(&self) {
        lock(&self.state).is_over = true;
        self.changed.notify_one();
    }
}
