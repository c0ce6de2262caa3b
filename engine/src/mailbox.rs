//! A mailbox through which other threads send messages to a worker.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, eventfd};

use ferry_vfs::sync::lock;

/// A queue of messages and the descriptor that wakes its reader.
#[derive(Debug)]
pub struct Mailbox<T> {
    /// `None` once the reader has closed it.
    items: Mutex<Option<Vec<T>>>,
    filled: AtomicBool,
    wake: Arc<OwnedFd>,
}

impl<T> Mailbox<T> {
    /// An empty mailbox.
    ///
    /// # Errors
    /// Those of `eventfd(2)`: the process is out of descriptors or memory.
    pub fn new() -> rustix::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { items: Mutex::new(Some(Vec::new())), filled: AtomicBool::new(false), wake: Arc::new(wake) })
    }

    /// Posts a message and wakes the reader. Once the mailbox is closed, the message is dropped.
    pub fn post(&self, item: T) {
        match &mut *lock(&self.items) {
            Some(items) => items.push(item),
            None => return,
        }
        self.filled.store(true, Ordering::Release);
        // It fails only when the counter is full, and then the reader is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Returns the eventfd that wakes the reader.
    pub fn wake(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.wake)
    }

    /// Returns whether there is a message; costs one load.
    pub fn is_filled(&self) -> bool {
        self.filled.load(Ordering::Acquire)
    }

    /// Takes all messages, oldest first.
    pub fn take(&self) -> Vec<T> {
        self.filled.store(false, Ordering::Release);
        lock(&self.items).as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Closes the mailbox: drops its messages and all later ones.
    pub fn close(&self) {
        // Dropping a message may post another one, so the lock must not be held.
        let left = lock(&self.items).take();
        drop(left);
    }
}

impl<T> AsFd for Mailbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_sender_that_waits_for_a_reply_sees_the_close() {
        let mailbox = Mailbox::new().unwrap();
        let ((before, first), (after, second)) = (channel::<()>(), channel::<()>());
        mailbox.post(before);
        mailbox.close();
        mailbox.post(after);
        assert!(first.recv().is_err() && second.recv().is_err());
        assert!(mailbox.take().is_empty());
    }
}
