//! Counts the messages of 9P connections.

use std::collections::HashSet;
use std::time::{Duration, Instant};

/// The types of messages that carry a file's bytes, requests (9P2000, read(5)); each reply has the next number.
const TREAD: u8 = 116;
const RREAD: u8 = TREAD + 1;
const TWRITE: u8 = 118;
/// Size, type and tag.
const HEADER_BYTES: usize = 7;
/// What stands before the bytes of a file: the header and a count; the header, fid, offset and count.
const RREAD_HEADER_BYTES: usize = 11;
const TWRITE_HEADER_BYTES: usize = 23;

/// Who sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Requests.
    Client,
    /// Replies.
    Server,
}

/// A message's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    kind: u8,
    tag: u16,
    size: usize,
}

impl Frame {
    /// The bytes of a file in it.
    fn data_bytes(self) -> usize {
        match self.kind {
            RREAD => self.size.saturating_sub(RREAD_HEADER_BYTES),
            TWRITE => self.size.saturating_sub(TWRITE_HEADER_BYTES),
            _ => 0,
        }
    }
}

/// Finds where messages begin in a stream.
#[derive(Debug, Default)]
pub struct Frames {
    header: Vec<u8>,
    /// Bytes until the next one begins.
    rest: usize,
}

impl Frames {
    /// Takes the next bytes, and tells of each message that begins in them.
    pub fn feed(&mut self, mut bytes: &[u8], mut tell: impl FnMut(Frame)) {
        while !bytes.is_empty() {
            if self.rest > 0 {
                let skipped = self.rest.min(bytes.len());
                self.rest -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            let taken = (HEADER_BYTES - self.header.len()).min(bytes.len());
            self.header.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if let [a, b, c, d, kind, e, f] = self.header[..] {
                let size = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX);
                self.rest = size.saturating_sub(HEADER_BYTES);
                self.header.clear();
                tell(Frame { kind, tag: u16::from_le_bytes([e, f]), size });
            }
        }
    }
}

/// What was sent.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Messages {
    /// Requests.
    pub requests: u64,
    /// Those that carry a file's bytes: Tread and Twrite.
    pub data_requests: u64,
    /// The bytes in those, or in their replies.
    pub data_bytes: u64,
    /// The most that were under way at once.
    pub in_flight_most: usize,
    /// How many were on average, while any was.
    pub in_flight_mean: f64,
}

/// Counts, as messages go by.
#[derive(Debug, Default)]
pub struct Tally {
    messages: Messages,
    open: HashSet<(u64, u16)>,
    since: Option<Instant>,
    busy: Duration,
    /// The sum of times and of how many requests were under way then, in seconds.
    weight: f64,
}

impl Tally {
    /// A message of a connection.
    pub fn note(&mut self, side: Side, connection: u64, frame: Frame) {
        self.pass_time();
        self.messages.data_bytes += frame.data_bytes() as u64;
        let key = (connection, frame.tag);
        if side == Side::Server {
            self.open.remove(&key);
            return;
        }
        self.open.insert(key);
        self.messages.requests += 1;
        self.messages.data_requests += u64::from(matches!(frame.kind, TREAD | TWRITE));
        self.messages.in_flight_most = self.messages.in_flight_most.max(self.open.len());
    }

    /// A connection has ended: what was under way on it is answered no more.
    pub fn end(&mut self, connection: u64) {
        self.pass_time();
        self.open.retain(|(of, _)| *of != connection);
    }

    fn pass_time(&mut self) {
        let now = Instant::now();
        if let Some(since) = self.since.filter(|_| !self.open.is_empty()) {
            let time = now - since;
            self.busy += time;
            #[allow(clippy::cast_precision_loss)] // Tags are few.
            let open = self.open.len() as f64;
            self.weight += time.as_secs_f64() * open;
        }
        self.since = Some(now);
    }

    /// What was counted since the last time.
    pub fn take(&mut self) -> Messages {
        let open = std::mem::take(&mut self.open);
        let counted = std::mem::replace(self, Self { open, ..Self::default() });
        let busy = counted.busy.as_secs_f64();
        let in_flight_mean = if busy > 0.0 { counted.weight / busy } else { 0.0 };
        Messages { in_flight_mean, ..counted.messages }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_messages_however_they_are_cut() {
        let stream = [9, 0, 0, 0, 108, 1, 0, 2, 0, 7, 0, 0, 0, 109, 1, 0, 8, 0, 0, 0, TREAD, 5, 1, 0];
        for length in 1..=stream.len() {
            let (mut frames, mut found) = (Frames::default(), Vec::new());
            stream.chunks(length).for_each(|bytes| frames.feed(bytes, |frame| found.push((frame.kind, frame.tag))));
            assert_eq!(found, [(108, 1), (109, 1), (TREAD, 0x105)], "{length} bytes at once");
        }
    }

    #[test]
    fn messages_in_flight_are_counted() {
        let mut tally = Tally::default();
        let frame = |kind, tag| Frame { kind, tag, size: 1000 };
        tally.note(Side::Client, 0, frame(TREAD, 1));
        tally.note(Side::Client, 1, frame(TWRITE, 1));
        tally.note(Side::Client, 0, frame(120, 2));
        tally.note(Side::Server, 1, frame(TWRITE + 1, 1));
        std::thread::sleep(Duration::from_millis(20));
        tally.note(Side::Server, 0, frame(TREAD + 1, 1));
        tally.note(Side::Server, 0, frame(121, 2));
        let counted = tally.take();
        assert_eq!((counted.requests, counted.data_requests, counted.in_flight_most), (3, 2, 3));
        assert_eq!(counted.data_bytes, (1000 - 23) + (1000 - 11));
        assert!((1.5..=3.0).contains(&counted.in_flight_mean), "{counted:?}");
        assert_eq!(tally.take(), Messages::default());
    }

    #[test]
    fn unanswered_messages_do_not_carry_over_to_the_next_connection() {
        let mut tally = Tally::default();
        let frame = |tag| Frame { kind: TREAD, tag, size: 23 };
        tally.note(Side::Client, 0, frame(1));
        tally.end(0);
        tally.note(Side::Client, 1, frame(1));
        assert_eq!(tally.take().in_flight_most, 1);
    }
}
