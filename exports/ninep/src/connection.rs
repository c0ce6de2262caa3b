//! One client: messages in, replies out.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_wire::ninep::{Frame, HEADER_BYTES, MSIZE_MIN, Reply, Tag};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::carrier::Client;
use crate::clients::{Charge, ConnectionAccount, Resource};
use crate::hub::Hub;
use crate::outbox::{Out, Outbox, SendResult, Socket};
use crate::request_table::{self, Outlet, RejectedRequest, RequestTable, Ticket};
use crate::session::{self, Session};
use crate::stream::Stream;

/// The maximum number of concurrent requests of one connection: it leaves a quarter of the threads to others.
const RUNNING_MAX: usize = 72;
/// The maximum total of their messages and requested data in bytes: long messages are served with less concurrency.
const RUNNING_BYTES_MAX: usize = 32 << 20;
/// The minimum concurrency: one request that waits for a disk must not block all others.
const RUNNING_MIN: usize = 4;
/// The growth of a message buffer in bytes, so that an announced length alone does not take memory.
const GROWTH_BYTES: usize = 64 << 10;
/// Bytes of a message's length.
const SIZE_BYTES: usize = 4;

/// A partially received message.
#[derive(Debug, Default)]
struct Inbox {
    bytes: Vec<u8>,
    filled: usize,
    since: Option<Instant>,
}

/// The events to wait for.
#[derive(Debug, Default)]
struct PollInterest {
    /// A thread is taking a message.
    reading: bool,
    /// Requests in progress, and the bytes of their messages and replies.
    running: usize,
    running_bytes: usize,
    /// The client does not read its replies.
    blocked: bool,
    over: bool,
}

impl PollInterest {
    /// Returns whether another request may be served.
    fn has_room(&self) -> bool {
        self.running < RUNNING_MIN || self.running < RUNNING_MAX && self.running_bytes < RUNNING_BYTES_MAX
    }
}

/// The result of reading from the socket.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReceiveResult {
    /// A message of this length in bytes.
    Message(usize),
    /// No message as a whole.
    Nothing,
    /// No more messages, and the reason, if it is worth logging.
    End(Option<&'static str>),
}

/// See the module.
pub(crate) struct Connection {
    hub: Arc<Hub>,
    key: u64,
    stream: Stream,
    holder: Arc<ConnectionAccount>,
    /// Why it was closed for others.
    evicted: OnceLock<&'static str>,
    begun: Instant,
    attached: AtomicBool,
    /// Milliseconds from `begun` to the last message.
    last_heard_ms: AtomicU64,
    inbox: Mutex<Inbox>,
    interest: Mutex<PollInterest>,
    exchange: Mutex<Exchange>,
}

/// Requests in flight, and unsent replies.
#[derive(Default)]
struct Exchange {
    request_table: RequestTable,
    outbox: Outbox,
}

impl Connection {
    pub(crate) fn new(hub: Arc<Hub>, key: u64, stream: Stream, holder: Arc<ConnectionAccount>) -> Self {
        Self {
            hub,
            key,
            stream,
            holder,
            evicted: OnceLock::new(),
            begun: Instant::now(),
            attached: AtomicBool::new(false),
            last_heard_ms: AtomicU64::new(0),
            inbox: Mutex::default(),
            interest: Mutex::default(),
            exchange: Mutex::default(),
        }
    }

    fn socket(&self) -> Socket<'_> {
        Socket { holder: &self.holder, stream: &self.stream }
    }

    /// Fids, requests under way, and those of them that wait for a lock.
    pub(crate) fn usage(&self) -> (usize, usize, usize) {
        let request_table = &lock(&self.exchange).request_table;
        request_table.usage()
    }

    /// Registers the connection with the hub.
    pub(crate) fn watch(&self) -> std::io::Result<()> {
        let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ONESHOT;
        Ok(epoll::add(self.hub.epoll(), &self.stream, EventData::new_u64(self.key), flags)?)
    }

    /// Waits for the events of interest.
    fn arm(&self, interest: &PollInterest) {
        if interest.over {
            return;
        }
        let mut flags = EventFlags::ONESHOT;
        if !interest.reading && !interest.blocked && interest.has_room() {
            flags |= EventFlags::IN | EventFlags::RDHUP;
            if self.stream.unread() {
                // The socket cannot signal that, so an event is requested that occurs anyway once replies can be sent.
                flags |= EventFlags::OUT;
            }
        }
        if interest.blocked || self.stream.unsent() {
            flags |= EventFlags::OUT;
        }
        if let Err(error) = epoll::modify(self.hub.epoll(), &self.stream, EventData::new_u64(self.key), flags) {
            tracing::error!("a 9P connection is not watched any more: {error}");
        }
    }

    /// Handles an event on the socket. Returns whether the caller must take a message.
    pub(crate) fn happened(&self, flags: EventFlags) -> bool {
        let lost = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        let mut interest = lock(&self.interest);
        let may_read = !interest.reading && !interest.blocked && !interest.over && interest.has_room();
        let something = flags.intersects(EventFlags::IN | EventFlags::RDHUP) || self.stream.unread();
        let reads = may_read && (lost || something);
        interest.reading |= reads;
        let somebody_reads = interest.reading;
        drop(interest);
        if flags.intersects(EventFlags::OUT) {
            let outbox = &mut lock(&self.exchange).outbox;
            outbox.drain(&self.socket());
            self.note(outbox.state(), false);
        }
        if lost && !somebody_reads {
            self.end(None);
        } else if !reads {
            self.arm(&lock(&self.interest));
        }
        reads
    }

    /// Takes the next message, or as much of it as has arrived.
    pub(crate) fn receive(&self, message: &mut Vec<u8>) -> ReceiveResult {
        let mut inbox = lock(&self.inbox);
        let mut filled = std::mem::take(&mut inbox.filled);
        let since = inbox.since.take();
        if filled > 0 {
            *message = std::mem::take(&mut inbox.bytes);
            self.holder.release(Resource::Bytes, message.len());
        }
        let bytes_max = lock(&self.exchange).request_table.session().map_or(MSIZE_MIN, |session| session.msize);
        let mut wanted = if filled < SIZE_BYTES { SIZE_BYTES } else { size(message) };
        loop {
            if message.len() < wanted {
                message.resize(wanted.min(filled.max(SIZE_BYTES) * 2 + GROWTH_BYTES), 0);
            }
            let room = wanted.min(message.len());
            match self.stream.recv(&mut message[filled..room]) {
                Ok(0) if filled == 0 => return ReceiveResult::End(None),
                Ok(0) => return ReceiveResult::End(Some("it ended in the middle of a message")),
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if filled == 0 => return ReceiveResult::Nothing,
                Err(Errno::AGAIN) => return self.keep(&mut inbox, message, filled, since),
                Err(_) => return ReceiveResult::End(None),
            }
            if filled == SIZE_BYTES && wanted == SIZE_BYTES {
                wanted = size(message);
                if wanted < HEADER_BYTES || wanted > bytes_max as usize {
                    return ReceiveResult::End(Some("it sent a message of a length that was not agreed on"));
                }
            }
            if filled == wanted {
                let heard = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
                self.last_heard_ms.store(heard, Ordering::Relaxed);
                return ReceiveResult::Message(filled);
            }
        }
    }

    /// Stores a partial message until more arrives.
    fn keep(&self, inbox: &mut Inbox, message: &mut Vec<u8>, filled: usize, since: Option<Instant>) -> ReceiveResult {
        let bytes = if message.len() > 2 * filled + GROWTH_BYTES {
            message[..filled].to_vec()
        } else {
            std::mem::take(message)
        };
        if self.holder.take(Resource::Bytes, bytes.len()).is_err() {
            return ReceiveResult::End(Some("it does not finish its message, and others need the memory"));
        }
        *inbox = Inbox { bytes, filled, since: since.or_else(|| Some(Instant::now())) };
        ReceiveResult::Nothing
    }

    /// Allows other threads to take the next message.
    pub(crate) fn read_on(&self) {
        let mut interest = lock(&self.interest);
        interest.reading = false;
        self.arm(&interest);
    }

    /// As [`Self::read_on`], while the message is served; it and its reply have this many bytes.
    pub(crate) fn serve_on(&self, bytes: usize) {
        let mut interest = lock(&self.interest);
        interest.running += 1;
        interest.running_bytes += bytes;
        interest.reading = false;
        self.arm(&interest);
    }

    /// Called when a request is no longer served: it has a reply, or waits for a lock.
    pub(crate) fn served(&self, bytes: usize) {
        let mut interest = lock(&self.interest);
        let was_full = !interest.has_room();
        interest.running -= 1;
        interest.running_bytes -= bytes;
        if was_full && interest.has_room() {
            self.arm(&interest);
        }
    }

    /// Acts on the result of sending. It ends nothing itself: the sender may hold locks.
    fn note(&self, sent: SendResult, arms: bool) {
        if sent.broken.is_some() {
            // The thread that polls the socket sees its end.
            let _ = rustix::net::shutdown(&self.stream, Shutdown::Both);
        }
        let mut interest = lock(&self.interest);
        let blocked = sent.blocked && sent.broken.is_none();
        if interest.blocked != blocked {
            interest.blocked = blocked;
            if arms {
                self.arm(&interest);
            }
        }
    }

    /// Runs `act` on the request table, and handles the results.
    fn with_request_table<T>(&self, act: impl FnOnce(&mut RequestTable, &mut dyn Outlet) -> T) -> T {
        let mut exchange = lock(&self.exchange);
        let Exchange { request_table, outbox } = &mut *exchange;
        let outcome = act(request_table, &mut Out { socket: self.socket(), outbox });
        // Under the lock, so that the last sender reports the last result.
        self.note(outbox.state(), true);
        outcome
    }

    pub(crate) fn register(&self, tag: Tag) -> Result<(Ticket, Arc<Session>), RejectedRequest> {
        lock(&self.exchange).request_table.register(0, tag)
    }

    /// Replies to a request that is not in flight.
    pub(crate) fn reply(&self, tag: Tag, reply: &Reply<'_>) {
        self.with_request_table(|_, out| request_table::reply(out, 0, tag, reply));
    }

    pub(crate) fn flush(&self, tag: Tag, old: Tag) -> Result<(), RejectedRequest> {
        let flushed = self.with_request_table(|request_table, out| request_table.flush(out, 0, tag, old));
        self.hub.release_cancelled();
        flushed
    }

    /// Called before a request that was parked is served; returns false if it was cancelled.
    pub(crate) fn unpark(&self, ticket: &Ticket) -> bool {
        lock(&self.exchange).request_table.unpark(ticket)
    }

    /// Counts the bytes of a message that waits on the client's account.
    pub(crate) fn charge(&self, bytes: usize) -> Option<Charge> {
        self.holder.charge(Resource::Bytes, bytes).ok()
    }

    /// Begins a session, and ends the previous one.
    pub(crate) fn version(&self, tag: Tag, msize: u32, version: &[u8]) {
        let (session, answer) = session::agree_on(&self.hub.share, &self.holder, msize, version);
        let before = self.with_request_table(|request_table, out| {
            let before = request_table.begin(out, session);
            request_table::reply(out, 0, tag, &answer);
            before
        });
        self.hub.release_cancelled();
        self.end_session(before);
    }

    /// Returns a session's references to the source. It may block, so another thread must wait for events.
    fn end_session(&self, session: Option<Arc<Session>>) {
        if session.is_some() {
            self.hub.ensure_waiter();
        }
        drop(session);
    }

    /// Returns why the connection must end, if it is too slow.
    pub(crate) fn overdue(&self, now: Instant) -> Option<&'static str> {
        let limits = &self.hub.share.options.limits;
        let since = |begin: Instant| now.saturating_duration_since(begin);
        if !self.attached.load(Ordering::Relaxed) && since(self.begun) > limits.slow_timeout {
            let shakes_hands = self.stream.is_handshaking();
            return Some(if shakes_hands { "it does not finish the TLS handshake" } else { "it does not attach" });
        }
        let begun = match self.inbox.try_lock() {
            Ok(inbox) => inbox.since,
            Err(TryLockError::Poisoned(inbox)) => inbox.into_inner().since,
            // Somebody is reading.
            Err(TryLockError::WouldBlock) => None,
        };
        if begun.is_some_and(|begun| since(begun) > limits.slow_timeout) {
            return Some("it does not finish its message");
        }
        let exchange = lock(&self.exchange);
        if exchange.outbox.blocked_since().is_some_and(|begun| since(begun) > limits.slow_timeout) {
            return Some("it does not take its replies");
        }
        let silent = since(self.begun + Duration::from_millis(self.last_heard_ms.load(Ordering::Relaxed)));
        let idle =
            limits.idle_timeout.is_some_and(|timeout| exchange.request_table.requests() == 0 && silent > timeout);
        idle.then_some("it has been silent for long")
    }

    /// Closes the connection, because others need its resources, without a connection's lock.
    pub(crate) fn evict(&self) {
        let _ = self.evicted.set("its client holds more than any other, and others need the room");
        // The thread that polls the socket sees its end.
        let _ = rustix::net::shutdown(&self.stream, Shutdown::Both);
    }

    /// Ends the connection and releases its resources. A source must not call it.
    pub(crate) fn end(&self, reason: Option<&'static str>) {
        self.end_session(self.close(reason));
    }

    /// Ends the connection; returns its session, to be dropped where it may block.
    #[must_use]
    pub(crate) fn close(&self, reason: Option<&'static str>) -> Option<Arc<Session>> {
        let mut interest = lock(&self.interest);
        if std::mem::replace(&mut interest.over, true) {
            return None;
        }
        drop(interest);
        let _ = epoll::delete(self.hub.epoll(), &self.stream);
        self.hub.forget(self.key);
        let mut exchange = lock(&self.exchange);
        let Exchange { request_table, outbox } = &mut *exchange;
        let evicted = self.evicted.get().copied();
        let reason = evicted.or(reason).or(outbox.state().broken).filter(|reason| !reason.is_empty());
        outbox.give_up(&self.socket(), "");
        let session = request_table.begin(&mut Out { socket: self.socket(), outbox }, None);
        drop(exchange);
        self.hub.release_cancelled();
        let refused = self.stream.close();
        // Waits for the reading thread, which sees the end of the socket.
        let _ = rustix::net::shutdown(&self.stream, Shutdown::Both);
        let mut inbox = lock(&self.inbox);
        let kept = std::mem::take(&mut *inbox);
        if kept.filled > 0 {
            self.holder.release(Resource::Bytes, kept.bytes.len());
        }
        drop(inbox);
        self.holder.release(Resource::Connections, 1);
        if let Some(reason) = refused.as_deref().or(reason) {
            self.hub.share.ratelimited_log.warn(format_args!("a connection was ended: {reason}"));
        }
        session
    }
}

impl Client for Connection {
    fn attached(&self) {
        self.attached.store(true, Ordering::Relaxed);
    }

    fn may_park(&self) -> bool {
        lock(&self.exchange).request_table.may_park()
    }

    fn park(&self, ticket: &Ticket, gone: &Arc<AtomicBool>) {
        self.with_request_table(|request_table, out| request_table.park(out, ticket, gone));
    }

    fn finish(&self, ticket: &Ticket, reply: &[u8]) -> bool {
        self.with_request_table(|request_table, out| request_table.finish(out, ticket, reply))
    }
}

/// Returns the length in the first bytes of a message.
fn size(message: &[u8]) -> usize {
    let head = message.first_chunk().copied().unwrap_or_default();
    usize::try_from(Frame::bytes(head)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_served_with_less_concurrency() {
        for (bytes, most) in
            [(200, 72), (128 << 10, 72), (1 << 20, 32), (2 << 20, 16), (4 << 20, 8), (16 << 20, 4), (0, 72)]
        {
            let mut interest = PollInterest::default();
            while interest.has_room() {
                interest.running += 1;
                interest.running_bytes += bytes;
            }
            assert_eq!(interest.running, most, "{bytes}");
        }
    }
}
