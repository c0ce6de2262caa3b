//! Message buffers.

use std::sync::{Condvar, Mutex};

use ferry_vfs::sync::{self, lock};

use super::limits::Limits;

/// The maximum number of free read buffers to keep.
const READ_BUFFERS_KEPT: usize = 16;

/// The size of a write buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Size {
    /// A message.
    Whole,
    /// A fraction of one: for single pages, many of which can be in flight.
    Short,
}

/// The buffers of a cache.
#[derive(Debug)]
pub(super) struct Buffers {
    whole: Pool,
    short: Pool,
    read: Mutex<Vec<Vec<u8>>>,
}

/// Free write buffers. There are as many as writes may be in flight, each reserved at the start; the kernel gives it pages at its first use.
#[derive(Debug)]
struct Pool {
    free: Mutex<Vec<Vec<u8>>>,
    freed: Condvar,
    /// What one holds.
    bytes: usize,
}

impl Buffers {
    pub fn new(limits: &Limits) -> Self {
        Self {
            whole: Pool::new(limits.write_buffers.max(1), limits.message_bytes_max),
            short: Pool::new(limits.short_writes, limits.short_write_bytes()),
            read: Mutex::default(),
        }
    }

    /// Returns the buffer size for a write of this length.
    pub fn size(&self, bytes: usize) -> Size {
        if bytes <= self.short.bytes { Size::Short } else { Size::Whole }
    }

    /// Returns an empty write buffer; waits for one.
    pub fn for_write(&self, size: Size) -> Vec<u8> {
        self.pool(size).take()
    }

    /// Returns a write buffer to the pool, or replaces one that a connection lost.
    pub fn back_from_write(&self, buffer: Vec<u8>, size: Size) {
        self.pool(size).give(buffer);
    }

    fn pool(&self, size: Size) -> &Pool {
        match size {
            Size::Whole => &self.whole,
            Size::Short => &self.short,
        }
    }

    /// Returns a read buffer of this length.
    pub fn for_read(&self, bytes: usize) -> Vec<u8> {
        let mut buffer = lock(&self.read).pop().unwrap_or_default();
        buffer.resize(bytes, 0);
        buffer
    }

    /// Takes back a buffer of a read.
    pub fn back_from_read(&self, buffer: Vec<u8>) {
        let mut free = lock(&self.read);
        if free.len() < READ_BUFFERS_KEPT && buffer.capacity() <= self.whole.bytes {
            free.push(buffer);
        }
    }
}

impl Pool {
    fn new(count: usize, bytes: usize) -> Self {
        let free = (0..count).map(|_| Vec::with_capacity(bytes)).collect();
        Self { free: Mutex::new(free), freed: Condvar::new(), bytes }
    }

    fn take(&self) -> Vec<u8> {
        let mut free = lock(&self.free);
        loop {
            if let Some(mut buffer) = free.pop() {
                buffer.clear();
                return buffer;
            }
            free = sync::wait(&self.freed, free);
        }
    }

    fn give(&self, mut buffer: Vec<u8>) {
        if buffer.capacity() < self.bytes {
            buffer = Vec::with_capacity(self.bytes);
        }
        lock(&self.free).push(buffer);
        self.freed.notify_one();
    }
}
