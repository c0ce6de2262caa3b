//! Replies on their way out of a socket: sent at once, or kept as long as the client does not take them.

use std::collections::VecDeque;
use std::time::Instant;

use ferry_vfs::Errno;

use crate::clients::{ConnectionAccount, Resource};
use crate::request_table::Outlet;
use crate::stream::Stream;

/// Longer replies are not collected: to copy them costs more than to send them.
const COLLECTED_REPLY_BYTES_MAX: usize = 16 << 10;
/// Nor are more bytes together.
const COLLECTED_BYTES_MAX: usize = 64 << 10;

/// What sending left to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SendResult {
    /// Something could not be sent: the socket is to be watched for room.
    pub(crate) blocked: bool,
    /// The connection is of no use any more, and why.
    pub(crate) broken: Option<&'static str>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    /// Replies that the client does not take yet, and how much of the first it has.
    queue: VecDeque<Vec<u8>>,
    sent_of_first: usize,
    queued_bytes: usize,
    /// Replies are collected until [`Self::uncork`].
    corked: bool,
    collected: Vec<u8>,
    /// Since when nothing could be sent.
    blocked_since: Option<Instant>,
    broken: Option<&'static str>,
}

impl Outbox {
    pub(crate) fn blocked_since(&self) -> Option<Instant> {
        self.blocked_since
    }

    pub(crate) fn state(&self) -> SendResult {
        SendResult { blocked: self.blocked_since.is_some(), broken: self.broken }
    }

    /// Collects replies from now on, in this empty memory.
    pub(crate) fn cork(&mut self, memory: Vec<u8>) {
        self.corked = true;
        self.collected = memory;
    }

    /// Sends what was collected; returns its memory.
    pub(crate) fn uncork(&mut self, to: &Socket<'_>) -> Vec<u8> {
        self.corked = false;
        self.send_collected(to);
        std::mem::take(&mut self.collected)
    }

    /// Sends what was collected.
    pub(crate) fn send_collected(&mut self, to: &Socket<'_>) {
        self.send_with_collected(to, &[]);
    }

    /// Sends what was collected, and a reply behind it.
    fn send_with_collected(&mut self, to: &Socket<'_>, reply: &[u8]) {
        let mut collected = std::mem::take(&mut self.collected);
        if !collected.is_empty() || !reply.is_empty() {
            self.send_now(to, [&collected, reply]);
        }
        collected.clear();
        self.collected = collected;
    }

    /// Sends a reply, or collects it.
    pub(crate) fn send(&mut self, to: &Socket<'_>, reply: &[u8]) {
        let is_long =
            reply.len() > COLLECTED_REPLY_BYTES_MAX || self.collected.len() + reply.len() > COLLECTED_BYTES_MAX;
        // What the client does not take is queued as it is.
        if !self.corked || is_long || !self.queue.is_empty() {
            self.send_with_collected(to, reply);
        } else if self.broken.is_none() {
            self.collected.extend_from_slice(reply);
        }
    }

    /// Sends two pieces, or as much as the client takes now; keeps the rest.
    fn send_now(&mut self, to: &Socket<'_>, [first, second]: [&[u8]; 2]) {
        if self.broken.is_some() {
            return;
        }
        let sent = if self.queue.is_empty() { self.push(to, [first, second]) } else { 0 };
        if self.broken.is_some() {
            return;
        }
        let rest = [first.get(sent..).unwrap_or_default(), &second[sent.saturating_sub(first.len())..]].concat();
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

    /// Hands two pieces to the socket; returns how many bytes it took.
    fn push(&mut self, to: &Socket<'_>, [first, second]: [&[u8]; 2]) -> usize {
        let mut done = 0;
        while done < first.len() + second.len() {
            let left = [first.get(done..).unwrap_or_default(), &second[done.saturating_sub(first.len())..]];
            match to.stream.send(left) {
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    self.give_up(to, "");
                    break;
                }
            }
        }
        done
    }

    /// The socket has room again.
    pub(crate) fn drain(&mut self, to: &Socket<'_>) {
        match to.stream.flush() {
            Ok(true) => self.blocked_since = self.blocked_since.map(|_| Instant::now()),
            Ok(false) => {}
            Err(_) => self.give_up(to, ""),
        }
        while self.broken.is_none()
            && let Some(first) = self.queue.pop_front()
        {
            let count = self.push(to, [&first[self.sent_of_first..], &[]]);
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

    /// Sends nothing any more.
    pub(crate) fn give_up(&mut self, to: &Socket<'_>, reason: &'static str) {
        self.broken.get_or_insert(reason);
        self.queue = VecDeque::new();
        self.collected.clear();
        self.sent_of_first = 0;
        to.holder.release(Resource::Bytes, std::mem::take(&mut self.queued_bytes));
        self.blocked_since = None;
    }
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
    fn send(&mut self, _: u64, reply: &[u8]) {
        self.outbox.send(&self.socket, reply);
    }

    /// A reply that does not come takes nothing up.
    fn discard(&mut self, _: u64) {}
}
