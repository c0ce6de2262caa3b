//! Detects sequential readers and sizes their read-ahead window.

/// The readers of one file that are told apart.
const STREAMS: usize = 8;

/// The first window, in bytes: what Linux reads ahead by default.
const FIRST_BYTES: u64 = 128 << 10;

/// How far from where it is expected a read may be and still belong to a stream, in bytes: kernels read ahead themselves,
/// with several requests at a time that may overtake each other.
const NEAR_BYTES: u64 = 1 << 20;

/// The readers of a file.
#[derive(Debug, Default)]
pub(super) struct Streams {
    list: [Stream; STREAMS],
    clock: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// Where its next read is expected.
    next: u64,
    /// How far it was read ahead.
    ahead: u64,
    /// How far to be ahead, in bytes. 0: only one read was seen.
    window: u64,
    /// When it was used last.
    used: u64,
}

/// A stream, as long as the lock of the file is held.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamId(usize);

/// How far a stream may be ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadAheadLimit {
    /// What one message carries, in bytes.
    pub message_bytes: u64,
    /// The widest window, in bytes.
    pub window_bytes_max: u64,
}

impl Streams {
    /// Notes a read, and finds its stream.
    pub fn note(&mut self, offset: u64, end: u64, reach: ReadAheadLimit) -> StreamId {
        self.clock += 1;
        let first = FIRST_BYTES.min(reach.window_bytes_max);
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
        // A file is mostly read from its beginning to its end; anything else is random until it is seen to go on.
        let window = if offset == 0 { first } else { 0 };
        self.list[oldest] = Stream { next: end, ahead: end, window, used: self.clock };
        StreamId(oldest)
    }

    /// The range to read ahead now for a stream that has read up to `end`, if any.
    pub fn wants(&mut self, id: StreamId, end: u64, reach: ReadAheadLimit) -> Option<(u64, u64)> {
        let stream = &mut self.list[id.0];
        stream.ahead = stream.ahead.max(end);
        if stream.window == 0 {
            return None;
        }
        let left = stream.ahead - end;
        if stream.window < reach.message_bytes {
            if left > stream.window / 2 {
                return None;
            }
            let target = end + stream.window;
            stream.window = (stream.window * 2).min(reach.window_bytes_max);
            return Some((stream.ahead, target.max(stream.ahead)));
        }
        // Messages are whole ones from here on; the second is for the link to be busy while the first is used up.
        stream.window = stream.window.max(2 * reach.message_bytes).min(reach.window_bytes_max);
        let whole = stream.window.saturating_sub(left) / reach.message_bytes * reach.message_bytes;
        (whole > 0).then(|| (stream.ahead, stream.ahead + whole))
    }

    /// Whether it is not known to be one: a single read, as of who reads at random.
    pub fn is_single(&self, id: StreamId) -> bool {
        self.list[id.0].window == 0
    }

    /// It was read ahead up to here.
    pub fn reached(&mut self, id: StreamId, ahead: u64) {
        let stream = &mut self.list[id.0];
        stream.ahead = stream.ahead.max(ahead);
    }

    /// What was read ahead is gone from here on.
    pub fn fell_back(&mut self, id: StreamId, to: u64) {
        let stream = &mut self.list[id.0];
        stream.ahead = stream.ahead.min(to);
    }

    /// The reader waits for what was asked for ahead of it: the window is too small for the round trip.
    pub fn stalled(&mut self, id: StreamId, reach: ReadAheadLimit) {
        let stream = &mut self.list[id.0];
        stream.window = (stream.window * 2).min(reach.window_bytes_max);
    }
}

impl Stream {
    fn is_near(&self, offset: u64) -> bool {
        let near = self.window.min(NEAR_BYTES);
        near > 0 && offset.abs_diff(self.next) <= near
    }
}
