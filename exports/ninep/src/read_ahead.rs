//! Read-ahead for clients that read sequentially.
//!
//! Linux's client has one message in flight per reader. The host's kernel only sees the reads that arrive, and reads
//! 128 KiB ahead by default, less than one message. So the disk would be idle while a message is in flight. Therefore
//! the server requests the next range from the disk after each reply, so that it is in the page cache when the client
//! requests it.

use std::ops::Range;
use std::sync::Arc;

use ferry_vfs::Backing;
use rustix::fs::Advice;

/// The maximum read-ahead in bytes: four of Linux's longest messages, which take a disk of 400 MB/s 10 ms.
pub(crate) const WINDOW_BYTES_MAX: u64 = 4 << 20;
/// The maximum of one request to the kernel in bytes: it cuts longer ones to the device's limit.
const STEP_BYTES: u64 = 128 << 10;
/// Reads within this many lengths of the expected offset count as sequential: threads serve them out of order.
const DISORDER_MAX: u64 = 16;

/// The reads of an open file.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// The expected offset of a sequential read.
    next: u64,
    /// Bytes read since the last jump.
    run_bytes: u64,
    /// The end of the requested read-ahead.
    asked: u64,
}

impl Reader {
    /// Records a read; returns the range to read ahead now, never longer than the client's sequential reads.
    pub(crate) fn note(&mut self, offset: u64, bytes: u64, window_max: u64) -> Option<Range<u64>> {
        let end = offset.saturating_add(bytes);
        if offset.abs_diff(self.next) > bytes.saturating_mul(DISORDER_MAX) {
            *self = Self { next: end, run_bytes: bytes, asked: end };
            return None;
        }
        let is_first = self.run_bytes == 0;
        self.next = self.next.max(end);
        self.run_bytes = self.run_bytes.saturating_add(bytes);
        let window = self.run_bytes.min(window_max);
        let from = self.asked.max(self.next);
        // Half a window at a time: not a call for each small read.
        if is_first || from - self.next > window / 2 {
            return None;
        }
        let to = self.next.saturating_add(window);
        self.asked = to;
        (from < to).then_some(from..to)
    }
}

/// A range to read ahead.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    pub(crate) file: Arc<Backing>,
    pub(crate) range: Range<u64>,
}

impl ReadAhead {
    /// Requests the read-ahead. It begins to read, and only waits for the file system to locate the data.
    pub(crate) fn ask(&self) {
        let Range { mut start, end } = self.range;
        while let Some(bytes) = end.checked_sub(start).and_then(|left| std::num::NonZeroU64::new(left.min(STEP_BYTES)))
        {
            // Only a hint: a later read returns the error.
            if rustix::fs::fadvise(&*self.file, start, Some(bytes), Advice::WillNeed).is_err() {
                return;
            }
            start += bytes.get();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn read_ahead_grows_and_requests_nothing_twice() {
        let mut reader = Reader::default();
        let mut asked = Vec::new();
        for number in 0..10 {
            asked.extend(reader.note(number * MIB, MIB, WINDOW_BYTES_MAX));
        }
        assert_eq!(asked[..3], [2 * MIB..4 * MIB, 4 * MIB..6 * MIB, 6 * MIB..8 * MIB]);
        assert!(asked.windows(2).all(|pair| pair[0].end == pair[1].start), "{asked:?}");
        let last = asked.last().unwrap().end;
        assert!(((10 + 2) * MIB..=(10 + 4) * MIB).contains(&last), "{asked:?}");
    }

    #[test]
    fn small_reads_cost_few_calls() {
        let mut reader = Reader::default();
        let calls = (0..4096_u64).filter(|number| reader.note(number * 4096, 4096, WINDOW_BYTES_MAX).is_some()).count();
        assert!(calls < 40, "{calls}");
    }

    #[test]
    fn jumps_ask_for_nothing() {
        let mut reader = Reader::default();
        for number in 0..1000_u64 {
            let offset = number * 7919 % 1000 * MIB;
            assert_eq!(reader.note(offset, 4096, WINDOW_BYTES_MAX), None, "{number}");
        }
        assert_eq!(reader.note(u64::MAX - 4096, 4096, WINDOW_BYTES_MAX), None);
        assert_eq!(reader.note(u64::MAX, u64::MAX, WINDOW_BYTES_MAX), None, "there is nothing behind the last byte");
    }

    #[test]
    fn read_ahead_is_at_most_as_long_as_the_reads() {
        let mut reader = Reader::default();
        let (mut read, mut asked) = (0, 0);
        for number in 0..100_u64 {
            read += 4096;
            asked += reader.note(number % 8 * 4096, 4096, WINDOW_BYTES_MAX).map_or(0, |range| range.end - range.start);
            assert!(asked <= 2 * read, "{asked} bytes ahead of the first read, {read} read");
        }
        assert_eq!(Reader::default().note(0, MIB, 0), None);
    }

    #[test]
    fn some_disorder_is_in_order() {
        let mut reader = Reader::default();
        let asked: u64 = [1, 0, 3, 2, 5, 4, 7, 6]
            .iter()
            .filter_map(|number| reader.note(number * MIB, MIB, WINDOW_BYTES_MAX))
            .map(|range| range.end - range.start)
            .sum();
        assert!(asked >= 2 * MIB, "{asked}");
    }
}
