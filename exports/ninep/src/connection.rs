//! The connection of one client: receives messages and sends replies.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use ferry_vfs::Cancellation;
use ferry_vfs::sync::lock;
use ferry_wire::ninep::{HEADER_BYTES, MSIZE_MIN, Reply, Tag};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::carrier::Client;
use crate::clients::{Charge, ConnectionAccount, LimitReached, Resource};
use crate::hub::Hub;
use crate::inbox::{Inbox, RECEIVED_BYTES};
use crate::keepalive::Keepalive;
use crate::outbox::{Collected, Out, Outbox, SendResult, Socket};
use crate::pace::Pace;
use crate::request_table::{self, Outlet, RejectedRequest, ReplyBytes, RequestTable, Ticket};
use crate::session::{self, Session};
use crate::stream::Stream;

/// The maximum number of concurrent requests of one connection: it leaves a quarter of the threads to others.
const RUNNING_MAX: usize = 72;
/// The maximum total of their messages and requested data in bytes: long messages are served with less concurrency.
const RUNNING_BYTES_MAX: usize = 32 << 20;
/// The minimum concurrency: one request that waits for a disk must not block all others.
const RUNNING_MIN: usize = 4;

/// The events to wait for.
#[derive(Debug, Default)]
struct PollInterest {
    /// A thread is taking a message.
    reading: bool,
    /// Requests in progress, and the bytes of their messages and replies.
    running: usize,
    running_bytes: usize,
    /// It has something to read, and waits until fewer threads serve its client.
    waiting: bool,
    /// The client does not read its replies.
    blocked: bool,
    over: bool,
}

impl PollInterest {
    /// Returns whether another request may be served.
    fn has_room(&self) -> bool {
        self.running < RUNNING_MIN || self.running < RUNNING_MAX && self.running_bytes < RUNNING_BYTES_MAX
    }

    /// Returns whether the server may delay what the client has sent; unread replies have their own time limit.
    fn may_delay(&self) -> bool {
        self.waiting || self.blocked || self.running > 0
    }
}

/// The buffers that a thread lends to the connection that it serves.
#[derive(Debug, Default)]
pub(crate) struct TurnMemory {
    pub(crate) received: Vec<u8>,
    pub(crate) replies: Collected,
}

/// The result of reading from the socket.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReceiveResult {
    /// A message of this length in bytes.
    Message(usize),
    /// No complete message.
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
    /// Why the connection must end: no message is taken any more, and the thread that sees the end of the socket
    /// closes it.
    shut_for: OnceLock<&'static str>,
    begun: Instant,
    attached: AtomicBool,
    /// Milliseconds from `begun` to the last message.
    last_heard_ms: AtomicU64,
    inbox: Mutex<Inbox>,
    /// The inbox has a whole message, which epoll does not report.
    has_message: AtomicBool,
    pace: Pace,
    keepalive: Keepalive,
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
            shut_for: OnceLock::new(),
            begun: Instant::now(),
            attached: AtomicBool::new(false),
            last_heard_ms: AtomicU64::new(0),
            inbox: Mutex::default(),
            has_message: AtomicBool::new(false),
            pace: Pace::default(),
            keepalive: Keepalive::default(),
            interest: Mutex::default(),
            exchange: Mutex::default(),
        }
    }

    fn socket(&self) -> Socket<'_> {
        Socket { holder: &self.holder, stream: &self.stream }
    }

    /// Returns the numbers of fids, requests in flight, and those of them that wait for a lock.
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
            if self.has_more() {
                // The socket cannot signal that, so an event is requested that occurs anyway once replies can be sent.
                flags |= EventFlags::OUT;
            }
        }
        if interest.blocked || self.stream.unsent() {
            flags |= EventFlags::OUT;
        }
        if let Err(error) = epoll::modify(self.hub.epoll(), &self.stream, EventData::new_u64(self.key), flags) {
            tracing::error!("cannot watch a 9P connection any longer: {error}");
        }
    }

    /// Watches the connection again, which waited for a thread; returns whether an event for a thread will come.
    pub(crate) fn resume(&self) -> bool {
        let mut interest = lock(&self.interest);
        interest.waiting = false;
        self.arm(&interest);
        !interest.over && (interest.reading || !interest.blocked && interest.has_room())
    }

    /// Called after the turn of the thread that [`Self::happened`] told to take a message.
    pub(crate) fn end_thread(&self) {
        self.hub.resume_waiting(&self.holder, self.holder.end_thread());
    }

    /// Handles an event on the socket. Returns whether the caller must take a message, and then call
    /// [`Self::end_thread`].
    pub(crate) fn happened(&self, flags: EventFlags) -> bool {
        let lost = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        let mut interest = lock(&self.interest);
        let may_read = !interest.reading && !interest.blocked && !interest.over && interest.has_room();
        let something = flags.intersects(EventFlags::IN | EventFlags::RDHUP) || self.has_more();
        let is_wanted = may_read && (lost || something);
        let reads = is_wanted && self.holder.begin_thread(self.key, self.hub.client_threads_max());
        interest.reading |= reads;
        interest.waiting = is_wanted && !reads;
        let (somebody_reads, waits) = (interest.reading, interest.waiting);
        drop(interest);
        if flags.intersects(EventFlags::OUT) {
            let outbox = &mut lock(&self.exchange).outbox;
            outbox.drain(&self.socket());
            self.note(outbox.state(), false);
        }
        if waits {
            // The end of another thread's turn resumes it.
        } else if lost && !somebody_reads {
            self.end(None);
        } else if !reads {
            self.arm(&lock(&self.interest));
            // It may have been resumed in place of another one.
            self.hub.resume_waiting(&self.holder, self.holder.next_waiting());
        }
        reads
    }

    /// Whether there is data to read that epoll does not report.
    fn has_more(&self) -> bool {
        self.stream.unread() || self.has_message.load(Ordering::Acquire)
    }

    /// Begins a turn: the calling thread reads, lends its memory, and collects replies.
    pub(crate) fn begin_turn(&self, memory: &mut TurnMemory) {
        let mut inbox = lock(&self.inbox);
        if inbox.end == 0 && !memory.received.is_empty() {
            inbox.bytes = std::mem::take(&mut memory.received);
        }
        self.holder.release(Resource::Bytes, std::mem::take(&mut inbox.charged_bytes));
        drop(inbox);
        lock(&self.exchange).outbox.cork(std::mem::take(&mut memory.replies));
    }

    /// Ends the turn: sends the replies, takes the memory back, and lets other threads read.
    pub(crate) fn end_turn(&self, memory: &mut TurnMemory) {
        let mut exchange = lock(&self.exchange);
        memory.replies = exchange.outbox.uncork(&self.socket());
        self.note(exchange.outbox.state(), false);
        drop(exchange);
        memory.received = self.keep(&mut lock(&self.inbox));
        self.read_on();
    }

    /// Ends the turn of a thread that is blocked, or is about to be, while it serves a request.
    pub(crate) fn hand_over(&self, memory: &mut TurnMemory) {
        self.end_turn(memory);
        self.hub.ensure_waiter();
    }

    /// Stores received data until a thread serves it; returns memory that is not needed for that.
    fn keep(&self, inbox: &mut Inbox) -> Vec<u8> {
        let length = inbox.end - inbox.start;
        // The closing thread releases later data.
        if length == 0 || lock(&self.interest).over {
            return std::mem::take(inbox).bytes;
        }
        let mut rest = Vec::new();
        if inbox.bytes.len() > 2 * length + RECEIVED_BYTES || inbox.bytes.len() <= RECEIVED_BYTES {
            let kept = inbox.bytes[inbox.start..inbox.end].to_vec();
            rest = std::mem::replace(&mut inbox.bytes, kept);
            (inbox.start, inbox.end) = (0, length);
        }
        inbox.since = inbox.since.or_else(|| Some(Instant::now()));
        match self.holder.take(Resource::Bytes, inbox.bytes.len()) {
            Ok(()) => inbox.charged_bytes = inbox.bytes.len(),
            Err(LimitReached) => {
                *inbox = Inbox::default();
                self.has_message.store(false, Ordering::Release);
                self.shut("it does not finish its message, and others need the memory");
            }
        }
        rest
    }

    /// Takes the next message. Reads from the socket if this `is_first` message of a turn.
    pub(crate) fn receive(&self, message: &mut Vec<u8>, is_first: bool) -> ReceiveResult {
        let mut inbox = lock(&self.inbox);
        // What was received before may have been dropped, and the socket's next bytes may be the middle of a message.
        if self.shut_for.get().is_some() {
            return ReceiveResult::End(None);
        }
        let (mut may_read, mut has_read) = (is_first, false);
        loop {
            if let Some(bytes) = inbox.next() {
                let mut exchange = lock(&self.exchange);
                let bytes_max = exchange.request_table.session().map_or(MSIZE_MIN, |session| session.msize);
                if bytes < HEADER_BYTES || bytes > bytes_max as usize {
                    return ReceiveResult::End(Some("it sent a message of a length that was not agreed on"));
                }
                if bytes <= inbox.end - inbox.start {
                    if has_read {
                        exchange.outbox.expect((inbox.end - inbox.start) / bytes);
                    }
                    drop(exchange);
                    inbox.take(bytes, message);
                    inbox.since = None;
                    self.has_message.store(inbox.has_message(), Ordering::Release);
                    if is_first {
                        let heard = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
                        self.last_heard_ms.store(heard, Ordering::Relaxed);
                    }
                    return ReceiveResult::Message(bytes);
                }
            }
            if !may_read {
                return ReceiveResult::Nothing;
            }
            let room = inbox.make_room();
            let Inbox { bytes, end, .. } = &mut *inbox;
            match self.stream.recv(&mut bytes[*end..room]) {
                Ok(0) if *end == 0 => return ReceiveResult::End(None),
                Ok(0) => return ReceiveResult::End(Some("it ended in the middle of a message")),
                Ok(count) => {
                    *end += count;
                    has_read = true;
                    // Less than there was room for: that was all, or an event comes for the rest.
                    may_read = *end == room || self.stream.unread();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return ReceiveResult::Nothing,
                Err(_) => return ReceiveResult::End(None),
            }
        }
    }

    /// Allows other threads to take the next message.
    fn read_on(&self) {
        let mut interest = lock(&self.interest);
        interest.reading = false;
        self.arm(&interest);
    }

    /// A message is served; it and its reply have this many bytes. Returns whether another one may be meanwhile.
    pub(crate) fn serving(&self, bytes: usize) -> bool {
        let mut interest = lock(&self.interest);
        interest.running += 1;
        interest.running_bytes += bytes;
        interest.has_room()
    }

    /// Called when a request is no longer served: it has a reply, or waits for a lock. Returns whether the connection
    /// may have another one served.
    pub(crate) fn served(&self, bytes: usize) -> bool {
        let mut interest = lock(&self.interest);
        let was_full = !interest.has_room();
        interest.running -= 1;
        interest.running_bytes -= bytes;
        if was_full && interest.has_room() && !interest.reading {
            self.arm(&interest);
        }
        !interest.blocked && !interest.over && interest.has_room()
    }

    pub(crate) fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Sends the replies so far; returns whether the client takes them.
    pub(crate) fn send_replies(&self) -> bool {
        let mut exchange = lock(&self.exchange);
        exchange.outbox.send_collected(&self.socket());
        let state = exchange.outbox.state();
        self.note(state, false);
        state == SendResult::default()
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
            if blocked {
                // The sender may be no thread of the hub.
                self.hub.wind();
            }
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
        let has_cancelled = request_table.take_cancelled();
        drop(exchange);
        if has_cancelled {
            self.release_cancelled();
        }
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
        self.with_request_table(|request_table, out| request_table.flush(out, 0, tag, old))
    }

    /// Drops the requests that wait for a limit and were cancelled.
    fn release_cancelled(&self) {
        if let Some(delayed) = &self.hub.delayed {
            delayed.release_cancelled(self.holder.peer());
        }
    }

    /// Called before a request that was parked is served; returns false if it was cancelled.
    pub(crate) fn unpark(&self, ticket: &Ticket) -> bool {
        lock(&self.exchange).request_table.unpark(ticket)
    }

    /// Counts the bytes of a message that waits on the client's account.
    pub(crate) fn charge(&self, bytes: usize) -> Option<Charge> {
        self.holder.charge(Resource::Bytes, bytes).ok()
    }

    /// Begins a session. Returns the previous one, to be dropped where it may block.
    #[must_use]
    pub(crate) fn version(&self, tag: Tag, msize: u32, version: &[u8]) -> Option<Arc<Session>> {
        let (session, answer) = session::agree_on(&self.hub.share, &self.holder, msize, version);
        self.with_request_table(|request_table, out| {
            let before = request_table.begin(out, session);
            request_table::reply(out, 0, tag, &answer);
            before
        })
    }

    /// Returns a session's references to the source. It may block, so another thread must wait for events.
    fn end_session(&self, session: Option<Arc<Session>>) {
        if session.is_some() {
            self.hub.ensure_waiter();
        }
        drop(session);
    }

    /// Returns whether the client must do something in time, as far as no thread serves it.
    pub(crate) fn has_deadline(&self) -> bool {
        let may_be_silent_too_long = self.hub.share.options.limits.idle_timeout.is_some();
        may_be_silent_too_long
            || !self.attached.load(Ordering::Relaxed)
            || lock(&self.inbox).since.is_some()
            || lock(&self.exchange).outbox.blocked_since().is_some()
    }

    /// Returns why the connection must end, if it is too slow.
    pub(crate) fn overdue(&self, now: Instant) -> Option<&'static str> {
        let limits = &self.hub.share.options.limits;
        let since = |begin: Instant| now.saturating_duration_since(begin);
        let (is_waiting, is_delayed) = {
            let interest = lock(&self.interest);
            (interest.waiting, interest.may_delay())
        };
        // What it sends is not read, or a Tattach waits for a limit of rates.
        let waits = || is_waiting || lock(&self.exchange).request_table.requests() > 0;
        if !self.attached.load(Ordering::Relaxed) && since(self.begun) > limits.slow_timeout && !waits() {
            let shakes_hands = self.stream.is_handshaking();
            return Some(if shakes_hands { "it does not finish the TLS handshake" } else { "it does not attach" });
        }
        let kept = self.kept_since(now, is_delayed).filter(|(begun, _)| since(*begun) > limits.slow_timeout);
        if let Some((_, false)) = kept {
            return Some("it does not finish its message");
        }
        let exchange = lock(&self.exchange);
        // The next message is served once the socket has room again ([`Self::arm`]).
        if kept.is_some() && !self.is_writable() {
            return Some("it does not take its replies");
        }
        if exchange.outbox.blocked_since().is_some_and(|begun| since(begun) > limits.slow_timeout) {
            return Some("it does not take its replies");
        }
        let silent = since(self.begun + Duration::from_millis(self.last_heard_ms.load(Ordering::Relaxed)));
        let idle =
            limits.idle_timeout.is_some_and(|timeout| exchange.request_table.requests() == 0 && silent > timeout);
        idle.then_some("it has been silent for long")
    }

    /// Returns since when the inbox has data, and whether that is a whole message. The time does not count while the server
    /// delays it.
    fn kept_since(&self, now: Instant, is_delayed: bool) -> Option<(Instant, bool)> {
        let mut inbox = match self.inbox.try_lock() {
            Ok(inbox) => inbox,
            Err(TryLockError::Poisoned(inbox)) => inbox.into_inner(),
            // A thread is reading.
            Err(TryLockError::WouldBlock) => return None,
        };
        if is_delayed {
            inbox.since = inbox.since.map(|_| now);
        }
        inbox.since.map(|begun| (begun, inbox.has_message()))
    }

    fn is_writable(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::OUT)];
        !matches!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }

    /// Closes the connection, because others need its resources, without a connection's lock.
    pub(crate) fn evict(&self) {
        self.shut("its client holds more than any other, and others need the room");
    }

    /// Makes the thread that polls the socket end the connection, for this reason.
    fn shut(&self, reason: &'static str) {
        let _ = self.shut_for.set(reason);
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
        let shut_for = self.shut_for.get().copied();
        let _ = self.shut_for.set("");
        let _ = epoll::delete(self.hub.epoll(), &self.stream);
        self.hub.forget(self.key);
        self.holder.stop_waiting(self.key);
        // It may have been resumed in place of another one.
        self.hub.resume_waiting(&self.holder, self.holder.next_waiting());
        let mut exchange = lock(&self.exchange);
        let Exchange { request_table, outbox } = &mut *exchange;
        let reason = shut_for.or(reason).or(outbox.state().broken).filter(|reason| !reason.is_empty());
        outbox.give_up(&self.socket(), "");
        let session = request_table.begin(&mut Out { socket: self.socket(), outbox }, None);
        drop(exchange);
        self.release_cancelled();
        let refused = self.stream.close();
        // Waits for the reading thread, which sees the end of the socket.
        let _ = rustix::net::shutdown(&self.stream, Shutdown::Both);
        let mut inbox = lock(&self.inbox);
        self.holder.release(Resource::Bytes, std::mem::take(&mut *inbox).charged_bytes);
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

    fn lock_owners_changed(&self, owners: &AtomicUsize) {
        self.keepalive.update(&self.stream, owners);
    }

    fn may_park(&self) -> bool {
        lock(&self.exchange).request_table.may_park()
    }

    fn park(&self, ticket: &Ticket, gone: &Arc<Cancellation>) {
        self.with_request_table(|request_table, out| request_table.park(out, ticket, gone));
    }

    fn finish(&self, ticket: &Ticket, reply: ReplyBytes<'_>) -> bool {
        self.with_request_table(|request_table, out| request_table.finish(out, ticket, reply))
    }
}
