//! The limits of a cache, and its counters.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::around::Link;

/// The bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// The default memory for pages in bytes: enough read-ahead for some dozens of readers.
const BYTES_MAX: usize = 256 << 20;

/// The default number of messages in flight per file: 16 of 1 MiB carry 1.6 GB/s over a link of 10 ms.
const DEPTH: usize = 16;

/// Short writes in flight besides those that fill messages, and their size as a fraction of a message. They take as
/// much memory as two messages, and reach 64 MiB/s over a link of 1 ms each way with single pages.
const SHORT_WRITES: usize = 32;
const SHORT_WRITE_PART: usize = 16;

/// How long data stay unwritten without another reason to write them.
const DIRTY_AGE: Duration = Duration::from_secs(1);

/// The limits of a cache.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Memory for pages, in bytes. Requests in progress may exceed it.
    pub bytes_max: usize,
    /// The maximum of unwritten data in bytes; further writes wait. Writing begins at half of it.
    pub dirty_bytes_max: usize,
    /// The maximum of data that are written but not durable, kept to be written again after a restart of the server, in
    /// bytes. At half of it the server is asked to sync. With 0 nothing is kept, and a restart is an error at the next
    /// fsync.
    pub unstable_bytes_max: usize,
    /// The maximum message in bytes; the connection's may be shorter.
    pub message_bytes_max: usize,
    /// Reads in flight per file. 1 disables read-ahead.
    pub depth: usize,
    /// The maximum read-around of a random read over a long link, in bytes. 0: none.
    pub around_bytes_max: usize,
    /// Writes in flight, of all files: the number of buffers.
    pub write_buffers: usize,
    /// Additional writes in flight of up to a sixteenth of a message, in separate buffers.
    pub short_writes: usize,
    /// How long data wait for more before they are written.
    pub dirty_age: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self::of(BYTES_MAX)
    }
}

impl Limits {
    /// Returns the limits for this many bytes: a quarter may be unwritten, another quarter written but not durable.
    #[must_use]
    pub fn of(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            dirty_bytes_max: bytes_max / 4,
            unstable_bytes_max: bytes_max / 4,
            message_bytes_max: 1 << 20,
            depth: DEPTH,
            around_bytes_max: 1 << 20,
            short_writes: SHORT_WRITES,
            write_buffers: thread::available_parallelism().map_or(1, Into::into),
            dirty_age: DIRTY_AGE,
        }
    }

    /// Returns the size of a short write in bytes; 0: none.
    pub(super) fn short_write_bytes(&self) -> usize {
        let bytes = self.message_bytes_max / SHORT_WRITE_PART;
        if self.short_writes > 0 && bytes >= PAGE_BYTES { bytes } else { 0 }
    }
}

/// The counters of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages that read.
    pub read_messages: u64,
    /// The bytes that they requested.
    pub read_bytes: u64,
    /// Messages that wrote.
    pub write_messages: u64,
    /// Bytes sent with them.
    pub write_bytes: u64,
    /// Requests to sync.
    pub syncs: u64,
    /// Reads that found all their bytes.
    pub hits: u64,
    /// Reads that waited for bytes.
    pub misses: u64,
    /// The maximum number of concurrent reads.
    pub reads_in_flight_max: u64,
    /// The maximum number of concurrent writes.
    pub writes_in_flight_max: u64,
}

/// Totals that every file adds to; they guard no other data.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// Pages in memory or being fetched.
    pub pages: AtomicUsize,
    /// Pages with unwritten data.
    pub unwritten: AtomicUsize,
    /// Pages with data that are written but not durable.
    pub unstable: AtomicUsize,
    pub read: Messages,
    pub write: Messages,
    pub link: Link,
    pub syncs: AtomicU64,
    pub hits: AtomicU64,
    pub misses: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct Messages {
    count: AtomicU64,
    bytes: AtomicU64,
    in_flight: AtomicU64,
    in_flight_max: AtomicU64,
}

impl Messages {
    pub fn begun(&self, bytes: usize) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let now = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.in_flight_max.fetch_max(now, Ordering::Relaxed);
    }

    pub fn ended(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Totals {
    pub fn counts(&self) -> Counts {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts {
            read_messages: get(&self.read.count),
            read_bytes: get(&self.read.bytes),
            write_messages: get(&self.write.count),
            write_bytes: get(&self.write.bytes),
            syncs: get(&self.syncs),
            hits: get(&self.hits),
            misses: get(&self.misses),
            reads_in_flight_max: get(&self.read.in_flight_max),
            writes_in_flight_max: get(&self.write.in_flight_max),
        }
    }
}
