//! Messages to a worker from other threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// A queue of messages and the descriptor that wakes its reader.
#[derive(Debug)]
pub struct Mailbox<T> {
    items: Mutex<Vec<T>>,
    filled: AtomicBool,
    wake: OwnedFd,
}

impl<T> Mailbox<T> {
    /// An empty mailbox.
    ///
    /// # Errors
    /// Those of `eventfd(2)`: the process is out of descriptors or memory.
    pub fn new() -> rustix::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { items: Mutex::new(Vec::new()), filled: AtomicBool::new(false), wake })
    }

    /// Leaves a message and wakes the reader.
    pub fn post(&self, item: T) {
        self.items.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(item);
        self.filled.store(true, Ordering::Release);
        // It can only fail when the counter is full, and then the reader is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Whether there is something to take; costs one load.
    pub fn is_filled(&self) -> bool {
        self.filled.load(Ordering::Acquire)
    }

    /// Takes all messages, oldest first.
    pub fn take(&self) -> Vec<T> {
        self.filled.store(false, Ordering::Release);
        std::mem::take(&mut *self.items.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

impl<T> AsFd for Mailbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
