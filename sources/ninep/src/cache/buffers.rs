//! The buffers of messages.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Buffers kept for reads that are not under way; more are freed.
const READ_BUFFERS_KEPT: usize = 16;

/// The buffers of a cache.
#[derive(Debug)]
pub(super) struct Buffers {
    /// Free buffers for writes. As many are allocated at first as may be under way, each when it is used first.
    write: Mutex<Vec<Vec<u8>>>,
    freed: Condvar,
    read: Mutex<Vec<Vec<u8>>>,
    bytes: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Buffers {
    pub fn new(count: usize, bytes: usize) -> Self {
        let write = (0..count.max(1)).map(|_| Vec::with_capacity(bytes)).collect();
        Self { write: Mutex::new(write), freed: Condvar::new(), read: Mutex::default(), bytes }
    }

    /// An empty buffer for a write; waits for one.
    pub fn for_write(&self) -> Vec<u8> {
        let mut free = lock(&self.write);
        loop {
            if let Some(mut buffer) = free.pop() {
                buffer.clear();
                return buffer;
            }
            free = self.freed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes back a buffer of a write, or, where a connection lost it, makes another.
    pub fn back_from_write(&self, mut buffer: Vec<u8>) {
        if buffer.capacity() < self.bytes {
            buffer = Vec::with_capacity(self.bytes);
        }
        lock(&self.write).push(buffer);
        self.freed.notify_one();
    }

    /// A buffer of this length for a read.
    pub fn for_read(&self, bytes: usize) -> Vec<u8> {
        let mut buffer = lock(&self.read).pop().unwrap_or_default();
        buffer.resize(bytes, 0);
        buffer
    }

    /// Takes back a buffer of a read.
    pub fn back_from_read(&self, buffer: Vec<u8>) {
        let mut free = lock(&self.read);
        if free.len() < READ_BUFFERS_KEPT && buffer.capacity() <= self.bytes {
            free.push(buffer);
        }
    }
}
