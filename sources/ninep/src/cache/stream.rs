//! Detects sequential readers and sizes their read-ahead window.

/// The maximum number of tracked readers per file.
const STREAMS: usize = 8;

/// The initial window in bytes: Linux's default read-ahead.
const FIRST_BYTES: u64 = 128 << 10;

/// The maximum distance in bytes of a read from its expected offset within a stream: kernels read ahead with several
/// concurrent requests, which may arrive out of order.
const NEAR_BYTES: u64 = 1 << 20;

/// The readers of a file.
#[derive(Debug, Default)]
pub(super) struct Streams {
    list: [Stream; STREAMS],
    clock: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// The expected offset of its next read.
    next: u64,
    /// The end of its read-ahead.
    ahead: u64,
    /// The size of the window in bytes. 0: only one read was seen.
    window: u64,
    /// When it was used last.
    used: u64,
}

/// A stream, valid while the file's lock is held.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamId(usize);

/// The limits of read-ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadAheadLimit {
    /// The data of one message, in bytes.
    pub message_bytes: u64,
    /// The widest window, in bytes.
    pub window_bytes_max: u64,
}

impl Streams {
    /// Records a read, and returns its stream.
    pub fn note(&mut self, offset: u64, end: u64, limit: ReadAheadLimit) -> StreamId {
        self.clock += 1;
        let first = FIRST_BYTES.min(limit.window_bytes_max);
        let exact = self.list.iter().position(|stream| stream.used > 0 && stream.next == offset);
        let id = exact.or_else(|| self.list.iter().position(|stream| stream.is_near(offset)));
        if let Some(id) = id {
            let stream = &mut self.list[id];
            stream.used = self.clock;
            stream.next = stream.next.max(end);
            stream.window = stream.window.max(first);
            return StreamId(id);
        }
        let oldest = self.list.iter().enumerate().min_by_key(|(_, stream)| stream.used).map_or(0, |(id, _)| id);
        // Files are usually read from the start; other reads count as random until they continue.
        let window = if offset == 0 { first } else { 0 };
        self.list[oldest] = Stream { next: end, ahead: end, window, used: self.clock };
        StreamId(oldest)
    }

    /// Returns the range to read ahead for a stream that has read up to `end`, if any.
    pub fn wants(&mut self, id: StreamId, end: u64, limit: ReadAheadLimit) -> Option<(u64, u64)> {
        let stream = &mut self.list[id.0];
        stream.ahead = stream.ahead.max(end);
        if stream.window == 0 {
            return None;
        }
        let left = stream.ahead - end;
        if stream.window < limit.message_bytes {
            if left > stream.window / 2 {
                return None;
            }
            let target = end + stream.window;
            stream.window = (stream.window * 2).min(limit.window_bytes_max);
            return Some((stream.ahead, target.max(stream.ahead)));
        }
        // Whole messages from here on; the second keeps the link busy while the first is consumed.
        stream.window = stream.window.max(2 * limit.message_bytes).min(limit.window_bytes_max);
        let whole = stream.window.saturating_sub(left) / limit.message_bytes * limit.message_bytes;
        (whole > 0).then(|| (stream.ahead, stream.ahead + whole))
    }

    /// Returns whether it is a single read so far, as of a random reader.
    pub fn is_single(&self, id: StreamId) -> bool {
        self.list[id.0].window == 0
    }

    /// Records that the read-ahead reached this offset.
    pub fn reached(&mut self, id: StreamId, ahead: u64) {
        let stream = &mut self.list[id.0];
        stream.ahead = stream.ahead.max(ahead);
    }

    /// Records that read-ahead data from here on were evicted.
    pub fn fell_back(&mut self, id: StreamId, to: u64) {
        let stream = &mut self.list[id.0];
        stream.ahead = stream.ahead.min(to);
    }

    /// The reader waits for its read-ahead: the window is too small for the round trip.
    pub fn stalled(&mut self, id: StreamId, limit: ReadAheadLimit) {
        let stream = &mut self.list[id.0];
        stream.window = (stream.window * 2).min(limit.window_bytes_max);
    }
}

impl Stream {
    fn is_near(&self, offset: u64) -> bool {
        let near = self.window.min(NEAR_BYTES);
        near > 0 && offset.abs_diff(self.next) <= near
    }
}
