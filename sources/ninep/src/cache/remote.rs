//! The interface between cache and connection.

use std::fmt;
use std::sync::Arc;

use ferry_vfs::{Errno, Result};

/// One file at the server. The calls begin something and never wait for its end (to wait for room to send is fine: the cache
/// calls with no lock held, and never from within [`Done::end`]).
pub trait Remote: Send + Sync + 'static {
    /// The most data that fits in one message, in bytes. It may shrink when a connection is restored, and is never zero. Does not
    /// wait, and calls nothing of the cache.
    fn message_bytes(&self) -> usize;

    /// Begins to read at an offset into the whole length of the buffer. Fewer bytes than that may come, and none means that the
    /// file ends here.
    fn read(&self, offset: u64, buffer: Vec<u8>, done: Done);

    /// Begins to write the whole buffer at an offset. Fewer bytes than that may be written. A write whose fate is unknown
    /// because the connection broke may be sent again: no other write of these bytes is under way.
    fn write(&self, offset: u64, buffer: Vec<u8>, done: Done);

    /// Begins to make durable what was written. Ends with an empty buffer.
    fn sync(&self, done: Done);
}

/// Who is told the end of a transfer.
pub trait Ended: Send + Sync {
    /// A transfer has ended: the number it was begun with, its buffer, and how many bytes were moved.
    fn ended(&self, number: u64, buffer: Vec<u8>, moved: Result<usize>);
}

impl<F: Fn(u64, Vec<u8>, Result<usize>) + Send + Sync> Ended for F {
    fn ended(&self, number: u64, buffer: Vec<u8>, moved: Result<usize>) {
        self(number, buffer, moved);
    }
}

/// To be [ended](Self::end) when a transfer has ended, by any thread, also before the call that began it returns. One that is
/// dropped instead ends the transfer with `EIO`, so that nobody waits for ever.
pub struct Done {
    to: Option<Arc<dyn Ended>>,
    number: u64,
}

impl Done {
    /// The end of the transfer `number` is told to `to`.
    pub fn new(to: Arc<dyn Ended>, number: u64) -> Self {
        Self { to: Some(to), number }
    }

    /// The transfer has ended: gives back its buffer and says how many bytes were moved.
    pub fn end(mut self, buffer: Vec<u8>, moved: Result<usize>) {
        if let Some(to) = self.to.take() {
            to.ended(self.number, buffer, moved);
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(to) = self.to.take() {
            to.ended(self.number, Vec::new(), Err(Errno::IO));
        }
    }
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Done").field("number", &self.number).finish_non_exhaustive()
    }
}
