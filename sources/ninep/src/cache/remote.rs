//! The interface between cache and connection.

use std::fmt;
use std::sync::Arc;

use ferry_vfs::{Errno, Result};

/// One file on the server. The calls begin an operation and do not wait for its end. They may wait for room to send:
/// the cache calls them without a lock, and never from [`Completion::end`].
pub trait Remote: Send + Sync + 'static {
    /// Returns the maximum data of one message in bytes, never zero. It may shrink after a reconnect. Does not wait,
    /// and does not call the cache.
    fn message_bytes(&self) -> usize;

    /// Begins to read at an offset into the whole buffer. Fewer bytes may be returned; none means the end of the file.
    fn read(&self, offset: u64, buffer: Vec<u8>, done: Completion);

    /// Begins to write the whole buffer at an offset. Fewer bytes may be written. After a lost connection a write of
    /// unknown outcome may be sent again, because no other write of these bytes is in flight.
    fn write(&self, offset: u64, buffer: Vec<u8>, done: Completion);

    /// Begins to sync earlier writes. Ends with an empty buffer.
    fn sync(&self, done: Completion);
}

/// Receives the end of a transfer.
pub trait OnCompletion: Send + Sync {
    /// Called at the end of a transfer, with its number, its buffer, and the number of bytes transferred.
    fn ended(&self, number: u64, buffer: Vec<u8>, moved: Result<usize>);
}

impl<F: Fn(u64, Vec<u8>, Result<usize>) + Send + Sync> OnCompletion for F {
    fn ended(&self, number: u64, buffer: Vec<u8>, moved: Result<usize>) {
        self(number, buffer, moved);
    }
}

/// Must be [ended](Self::end) when a transfer has ended, by any thread, even before the call that began it returns.
/// Dropping it ends the transfer with `EIO`, so that no caller waits forever.
pub struct Completion {
    to: Option<Arc<dyn OnCompletion>>,
    number: u64,
}

impl Completion {
    /// Creates the end of the transfer `number`, reported to `to`.
    pub fn new(to: Arc<dyn OnCompletion>, number: u64) -> Self {
        Self { to: Some(to), number }
    }

    /// Ends the transfer: returns its buffer and the number of bytes transferred.
    pub fn end(mut self, buffer: Vec<u8>, moved: Result<usize>) {
        if let Some(to) = self.to.take() {
            to.ended(self.number, buffer, moved);
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if let Some(to) = self.to.take() {
            to.ended(self.number, Vec::new(), Err(Errno::IO));
        }
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion").field("number", &self.number).finish_non_exhaustive()
    }
}
