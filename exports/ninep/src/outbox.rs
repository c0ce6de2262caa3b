//! Outgoing replies of a socket: sent at once, or queued while the client does not read.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Instant;

use ferry_vfs::Errno;

use crate::clients::{ConnectionAccount, Resource};
use crate::request_table::{Outlet, ReplyBytes};
use crate::stream::Stream;

/// Longer replies are collected without a copy, which would cost more than a send.
const SHORT_BYTES_MAX: usize = 16 << 10;
/// The maximum total of collected short replies, in bytes.
const SHORTS_BYTES_MAX: usize = 64 << 10;
/// The maximum of a collected long reply, in bytes.
const LONG_BYTES_MAX: usize = 72 << 10;
/// The maximum number of collected long replies.
const LONGS_MAX: usize = 8;
/// The pieces of a send: long replies, the short ones, and a last one that is not collected.
const PIECES_MAX: usize = LONGS_MAX + 2;

/// The result of sending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SendResult {
    /// Some bytes are left: the socket must be watched for room.
    pub(crate) blocked: bool,
    /// The connection is unusable, and why.
    pub(crate) broken: Option<&'static str>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    /// Queued replies, and how much of the first was sent.
    queue: VecDeque<Vec<u8>>,
    sent_of_first: usize,
    queued_bytes: usize,
    /// Replies are collected until [`Self::uncork`].
    corked: bool,
    collected: Collected,
    /// The number of long replies that are sent together.
    longs_max: usize,
    /// The time since which nothing could be sent.
    blocked_since: Option<Instant>,
    broken: Option<&'static str>,
}

/// Replies that are sent together, in memory that a thread lends.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    /// Long ones, which are sent first, and their lengths.
    long: Vec<(Vec<u8>, usize)>,
    /// The short ones, concatenated.
    short: Vec<u8>,
    /// Free memory of sent long ones.
    spare: Vec<Vec<u8>>,
}

impl Collected {
    /// Releases memory that exceeds the limits of collection.
    pub(crate) fn shrink(&mut self) {
        self.spare.retain(|memory| memory.capacity() <= 2 * LONG_BYTES_MAX);
    }

    fn clear(&mut self) {
        self.spare.extend(self.long.drain(..).map(|(memory, _)| memory));
        self.short.clear();
    }
}

impl Outbox {
    pub(crate) fn blocked_since(&self) -> Option<Instant> {
        self.blocked_since
    }

    pub(crate) fn state(&self) -> SendResult {
        SendResult { blocked: self.blocked_since.is_some(), broken: self.broken }
    }

    /// Sets the number of received requests: the client gets half of the replies while the other half is made.
    pub(crate) fn expect(&mut self, requests: usize) {
        self.longs_max = (requests / 2).clamp(1, LONGS_MAX);
    }

    /// Begins to collect replies, in this memory.
    pub(crate) fn cork(&mut self, memory: Collected) {
        self.corked = true;
        self.collected = memory;
    }

    /// Sends the collected replies; returns their memory.
    pub(crate) fn uncork(&mut self, to: &Socket<'_>) -> Collected {
        self.corked = false;
        self.send_collected(to);
        std::mem::take(&mut self.collected)
    }

    /// Sends the collected replies.
    pub(crate) fn send_collected(&mut self, to: &Socket<'_>) {
        self.send_with_collected(to, &[]);
    }

    /// Sends the collected replies, then another one.
    fn send_with_collected(&mut self, to: &Socket<'_>, reply: &[u8]) {
        let mut collected = std::mem::take(&mut self.collected);
        let long = collected.long.iter().map(|(memory, bytes)| memory.get(..*bytes).unwrap_or_default());
        let mut pieces = [&[][..]; PIECES_MAX];
        let mut count = 0;
        for piece in long.chain([&*collected.short, reply]).filter(|piece| !piece.is_empty()) {
            pieces[count] = piece;
            count += 1;
        }
        if count > 0 {
            self.send_now(to, &pieces[..count]);
        }
        collected.clear();
        self.collected = collected;
    }

    /// Sends a reply, or collects it.
    pub(crate) fn send(&mut self, to: &Socket<'_>, reply: ReplyBytes<'_>) {
        let bytes = reply.as_slice().len();
        // Unsent bytes are queued without a copy.
        if !self.corked || !self.queue.is_empty() || self.broken.is_some() {
            return self.send_with_collected(to, reply.as_slice());
        }
        let Collected { long, short, spare } = &mut self.collected;
        match reply {
            ReplyBytes::Exchanged(memory, _) if (SHORT_BYTES_MAX + 1..=LONG_BYTES_MAX).contains(&bytes) => {
                long.push((std::mem::replace(memory, spare.pop().unwrap_or_default()), bytes));
                if long.len() >= self.longs_max {
                    self.send_collected(to);
                }
            }
            _ if bytes <= SHORT_BYTES_MAX && short.len() + bytes <= SHORTS_BYTES_MAX => {
                short.extend_from_slice(reply.as_slice());
            }
            _ => self.send_with_collected(to, reply.as_slice()),
        }
    }

    /// Sends as much of the pieces as possible; queues the rest.
    fn send_now(&mut self, to: &Socket<'_>, pieces: &[&[u8]]) {
        if self.broken.is_some() {
            return;
        }
        let sent = if self.queue.is_empty() { self.push(to, pieces) } else { 0 };
        if self.broken.is_some() {
            return;
        }
        let mut slices = [IoSlice::new(&[]); PIECES_MAX];
        let rest: Vec<&[u8]> = behind(&mut slices, pieces, sent).iter().map(|piece| &**piece).collect();
        let rest = rest.concat();
        if rest.is_empty() {
            if to.stream.unsent() {
                self.blocked_since.get_or_insert_with(Instant::now);
            }
            return;
        }
        if to.holder.take(Resource::Bytes, rest.len()).is_err() {
            self.give_up(to, "it does not take its replies, and others need the memory");
            return;
        }
        self.queued_bytes += rest.len();
        self.queue.push_back(rest);
        self.blocked_since.get_or_insert_with(Instant::now);
    }

    /// Sends pieces; returns the number of bytes that the socket took.
    fn push(&mut self, to: &Socket<'_>, pieces: &[&[u8]]) -> usize {
        let mut done = 0;
        loop {
            let mut slices = [IoSlice::new(&[]); PIECES_MAX];
            let left = behind(&mut slices, pieces, done);
            if left.is_empty() {
                return done;
            }
            match to.stream.send(left) {
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return done,
                Err(_) => {
                    self.give_up(to, "");
                    return done;
                }
            }
        }
    }

    /// Sends queued replies after the socket has room again.
    pub(crate) fn drain(&mut self, to: &Socket<'_>) {
        match to.stream.flush() {
            Ok(true) => self.blocked_since = self.blocked_since.map(|_| Instant::now()),
            Ok(false) => {}
            Err(_) => self.give_up(to, ""),
        }
        while self.broken.is_none()
            && let Some(first) = self.queue.pop_front()
        {
            let count = self.push(to, &[&first[self.sent_of_first..]]);
            if count > 0 {
                self.blocked_since = Some(Instant::now());
            }
            self.sent_of_first += count;
            if self.sent_of_first < first.len() {
                self.queue.push_front(first);
                return;
            }
            // A reply in memory counts until it is sent completely.
            let bytes = first.len();
            self.sent_of_first = 0;
            self.queued_bytes = self.queued_bytes.saturating_sub(bytes);
            to.holder.release(Resource::Bytes, bytes);
        }
        if self.broken.is_none() && !to.stream.unsent() {
            self.blocked_since = None;
        }
    }

    /// Drops all replies from now on.
    pub(crate) fn give_up(&mut self, to: &Socket<'_>, reason: &'static str) {
        self.broken.get_or_insert(reason);
        self.queue = VecDeque::new();
        self.collected.clear();
        self.sent_of_first = 0;
        to.holder.release(Resource::Bytes, std::mem::take(&mut self.queued_bytes));
        self.blocked_since = None;
    }
}

/// Returns the pieces without their first bytes.
fn behind<'a, 'p>(
    slices: &'a mut [IoSlice<'p>; PIECES_MAX],
    pieces: &[&'p [u8]],
    mut bytes: usize,
) -> &'a [IoSlice<'p>] {
    let mut count = 0;
    for piece in pieces {
        let (skipped, piece) = piece.split_at(bytes.min(piece.len()));
        bytes -= skipped.len();
        if !piece.is_empty() {
            slices[count] = IoSlice::new(piece);
            count += 1;
        }
    }
    &slices[..count]
}

/// A connection's socket, and the connection's resources.
#[derive(Clone, Copy)]
pub(crate) struct Socket<'a> {
    pub(crate) holder: &'a ConnectionAccount,
    pub(crate) stream: &'a Stream,
}

/// A socket and its queued replies.
pub(crate) struct Out<'a> {
    pub(crate) socket: Socket<'a>,
    pub(crate) outbox: &'a mut Outbox,
}

impl Outlet for Out<'_> {
    fn send(&mut self, _: u64, reply: ReplyBytes<'_>) {
        self.outbox.send(&self.socket, reply);
    }

    /// A missing reply needs no resources.
    fn discard(&mut self, _: u64) {}
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

    use super::*;
    use crate::clients::Clients;

    const LONG: usize = SHORT_BYTES_MAX + 1;

    /// Sends a long reply of equal bytes; returns the memory that was exchanged for its own.
    fn send_long(outbox: &mut Outbox, to: &Socket<'_>, byte: u8, bytes: usize) -> Vec<u8> {
        let mut memory = vec![byte; bytes + 10];
        outbox.send(to, ReplyBytes::Exchanged(&mut memory, bytes));
        memory
    }

    /// Returns the first byte of each reply in a record, by the lengths of long and short ones.
    fn record(fd: &std::os::fd::OwnedFd) -> Option<String> {
        let mut bytes = vec![0; 1 << 20];
        let count = recv(fd, &mut bytes[..], RecvFlags::DONTWAIT).ok()?.0;
        let mut text = String::new();
        let mut rest = &bytes[..count];
        while let Some(first) = rest.first() {
            let length = if first.is_ascii_uppercase() { LONG } else { 3 };
            let reply;
            (reply, rest) = rest.split_at(length);
            assert!(reply.iter().all(|byte| byte == first));
            text.push(char::from(*first));
        }
        Some(text)
    }

    /// Each message to a socket of records is a record.
    #[test]
    fn replies_are_sent_together_and_long_ones_are_not_copied() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
        let (stream, holder) = (Stream::plain(ours), Clients::alone());
        let to = Socket { holder: &holder, stream: &stream };
        let mut outbox = Outbox::default();
        let short = |outbox: &mut Outbox, byte: u8| outbox.send(&to, ReplyBytes::Borrowed(&[byte; 3]));

        // Without a turn, each reply is sent separately.
        short(&mut outbox, b'a');
        assert_eq!(send_long(&mut outbox, &to, b'A', LONG), [b'A'; LONG + 10]);
        assert_eq!([record(&theirs), record(&theirs), record(&theirs)], [Some("a".into()), Some("A".into()), None]);

        outbox.cork(Collected::default());
        outbox.expect(4);
        short(&mut outbox, b'a');
        assert_eq!(send_long(&mut outbox, &to, b'A', LONG), []);
        short(&mut outbox, b'b');
        assert_eq!(record(&theirs), None);
        // Half of the requests have replies.
        assert_eq!(send_long(&mut outbox, &to, b'B', LONG), []);
        assert_eq!([record(&theirs), record(&theirs)], [Some("ABab".into()), None]);
        // Memory of sent replies is reused.
        assert_ne!(send_long(&mut outbox, &to, b'C', LONG), []);
        short(&mut outbox, b'c');
        send_long(&mut outbox, &to, b'D', LONG);
        assert_eq!(record(&theirs), Some("CDc".into()));
        short(&mut outbox, b'd');
        let memory = outbox.uncork(&to);
        assert_eq!([record(&theirs), record(&theirs)], [Some("d".into()), None]);
        assert!(memory.long.is_empty() && memory.short.is_empty() && memory.spare.len() == 2);

        // However many there are.
        outbox.cork(memory);
        outbox.expect(1000);
        (0..LONGS_MAX).for_each(|_| drop(send_long(&mut outbox, &to, b'E', LONG)));
        assert_eq!(record(&theirs), Some("E".repeat(LONGS_MAX)));
        let mut memory = outbox.uncork(&to);
        assert_eq!(memory.spare.len(), LONGS_MAX);
        memory.spare[0].reserve(3 * LONG_BYTES_MAX);
        memory.shrink();
        assert_eq!(memory.spare.len(), LONGS_MAX - 1);
    }

    #[test]
    fn unread_replies_are_queued_in_order() {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
        let (stream, holder) = (Stream::plain(ours), Clients::alone());
        let to = Socket { holder: &holder, stream: &stream };
        let mut outbox = Outbox::default();
        let mut expected = Vec::new();
        for round in 0..5 {
            outbox.cork(Collected::default());
            outbox.expect(8);
            for byte in (b'A'..b'E').map(|byte| byte + round) {
                send_long(&mut outbox, &to, byte, LONG);
                expected.extend([byte; LONG]);
            }
            outbox.uncork(&to);
        }
        assert!(outbox.state().blocked);
        let (mut received, mut bytes) = (Vec::new(), vec![0; 10_000]);
        while received.len() < expected.len() {
            if let Ok((count, _)) = recv(&theirs, &mut bytes[..], RecvFlags::DONTWAIT) {
                received.extend_from_slice(&bytes[..count]);
            }
            outbox.drain(&to);
        }
        assert!(received == expected && outbox.state() == SendResult::default() && outbox.queued_bytes == 0);
    }
}
