//! The bounds of a cache, and what it has done.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::around::Link;

/// The bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Memory for pages: enough to read ahead of some dozens of readers, and little beside what a host has.
const BYTES_MAX: usize = 256 << 20;

/// Messages under way per file: 16 of 1 MiB carry 1.6 GB/s over a link of 10 ms.
const DEPTH: usize = 16;

/// Short writes under way, beside those that fill messages, and the part of a message that one carries: as much memory as two
/// messages, and 64 MiB/s over a link of 1 ms each way where all are single pages.
const SHORT_WRITES: usize = 32;
const SHORT_WRITE_PART: usize = 16;

/// How long data stays in memory before it is written though nothing else asks for it.
const DIRTY_AGE: Duration = Duration::from_secs(1);

/// How much a cache may hold and have under way.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Memory for pages, in bytes. Requests that are being served may be added to it.
    pub bytes_max: usize,
    /// What may wait to be written, in bytes: whoever writes more waits. Writing begins at half of it.
    pub dirty_bytes_max: usize,
    /// What is written, not durable yet and kept to be written again after the server restarts, in bytes. At half of it the
    /// server is asked to make it durable. 0 keeps nothing: a restart then is an error at the next fsync.
    pub unstable_bytes_max: usize,
    /// The longest message, in bytes; that of the connection may be shorter.
    pub message_bytes_max: usize,
    /// Reads under way per file. With 1 nothing is read ahead.
    pub depth: usize,
    /// The most that is fetched around a random read over a long link, in bytes. 0: nothing.
    pub around_bytes_max: usize,
    /// Writes under way, of all files: the buffers that are allocated once.
    pub write_buffers: usize,
    /// Writes of up to a sixteenth of a message under way beside these, in buffers of their own.
    pub short_writes: usize,
    /// How long data waits for more before it is written.
    pub dirty_age: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self::of(BYTES_MAX)
    }
}

impl Limits {
    /// Those of a cache of so many bytes: a quarter of them may wait to be written, another be written and not durable yet.
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

    /// The same memory, with a page per message and one message under way: what a client does that does not coalesce.
    #[must_use]
    pub fn page_at_a_time(self) -> Self {
        Self { message_bytes_max: PAGE_BYTES, depth: 1, write_buffers: 1, short_writes: 0, ..self }
    }

    /// What a short write carries, in bytes; 0: there are none.
    pub(super) fn short_write_bytes(&self) -> usize {
        let bytes = self.message_bytes_max / SHORT_WRITE_PART;
        if self.short_writes > 0 && bytes >= PAGE_BYTES { bytes } else { 0 }
    }
}

/// What a cache has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages that read.
    pub read_messages: u64,
    /// Bytes asked for by them.
    pub read_bytes: u64,
    /// Messages that wrote.
    pub write_messages: u64,
    /// Bytes sent with them.
    pub write_bytes: u64,
    /// Times that the server was asked to make data durable.
    pub syncs: u64,
    /// Reads that found all their bytes.
    pub hits: u64,
    /// Reads that had to wait for bytes.
    pub misses: u64,
    /// The most reads that were under way at a time.
    pub reads_in_flight_max: u64,
    /// The most writes that were under way at a time.
    pub writes_in_flight_max: u64,
}

/// The totals of a cache that every file adds to; none of them guards anything but itself.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// Pages in memory or being fetched.
    pub pages: AtomicUsize,
    /// Pages of which something waits to be written or is being written.
    pub unwritten: AtomicUsize,
    /// Pages of which something is written and not durable.
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
