//! One connection to a server: sends requests, and passes each reply to its caller.
//!
//! Callers send their requests under a lock that is only held for that, and sleep until the connection's reader wakes
//! them with the reply. Requests without a sleeping caller (the cache's transfers, clunks, locks) go through a queue to
//! the connection's sender thread. The reader must never send, otherwise it and the server could each wait for the
//! other to read. A server that violates the protocol loses the connection.

mod pending;
#[cfg(test)]
mod tests;
mod threads;

use std::collections::{BTreeSet, VecDeque};
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferry_vfs::Errno;
use ferry_vfs::sync::{self, lock};
use ferry_wire::ninep::{Fid, Reply, Request, Tag, WRITE_HEAD_BYTES, encode_transfer_head, kind};

pub(crate) use pending::{Message, RequestEnd, Wake};
use pending::{Pending, Table};

use crate::options::Options;
use crate::transport::Stream;

/// The maximum number of waiting lock requests. They do not count as requests in flight, because they may never end.
const PARKED_MAX: usize = 4096;
/// How long to wait for the ends of fids.
const CLUNKS: Duration = Duration::from_secs(1);

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestError {
    /// An error of the server, or of this client.
    Errno(Errno),
    /// The connection was lost.
    Lost {
        /// A retry is safe: the request was not sent, or is idempotent.
        harmless: bool,
    },
}

impl From<Errno> for RequestError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

pub(crate) type Outcome<T> = Result<T, RequestError>;

/// Returns whether a request of unknown outcome may be sent again.
fn is_harmless(request_kind: u8) -> bool {
    !matches!(
        request_kind,
        kind::TLCREATE
            | kind::TSYMLINK
            | kind::TMKNOD
            | kind::TRENAME
            | kind::TLINK
            | kind::TMKDIR
            | kind::TRENAMEAT
            | kind::TUNLINKAT
            | kind::TREMOVE
    )
}

/// Returns whether servers that have a limit of fids use this error for it.
pub(crate) fn is_shortage(errno: Errno) -> bool {
    matches!(errno, Errno::RANGE | Errno::MFILE | Errno::NFILE | Errno::NOBUFS)
}

/// An encoded request. The data of a Twrite stay in place.
#[derive(Debug)]
pub(crate) struct Outgoing {
    kind: u8,
    head: Head,
    /// The buffer to read into, or to write from.
    buffer: Option<Vec<u8>>,
}

/// The bytes before the data. Reads and writes allocate none, because the cache must write when memory is short.
#[derive(Debug)]
enum Head {
    Transfer([u8; WRITE_HEAD_BYTES]),
    Other(Vec<u8>),
}

impl Head {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Transfer(bytes) => bytes,
            Self::Other(bytes) => bytes,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Transfer(bytes) => bytes,
            Self::Other(bytes) => bytes,
        }
    }
}

impl Outgoing {
    pub(crate) fn new(request: &Request<'_>) -> Self {
        let mut head = Vec::with_capacity(64);
        request.encode(Tag(0), &mut head);
        Self { kind: request.kind(), head: Head::Other(head), buffer: None }
    }

    /// Creates a read into a buffer of the requested length.
    pub(crate) fn read(fid: Fid, offset: u64, buffer: Vec<u8>) -> Self {
        Self::transfer(kind::TREAD, fid, offset, buffer)
    }

    pub(crate) fn write(fid: Fid, offset: u64, buffer: Vec<u8>) -> Self {
        Self::transfer(kind::TWRITE, fid, offset, buffer)
    }

    fn transfer(kind: u8, fid: Fid, offset: u64, buffer: Vec<u8>) -> Self {
        let bytes = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
        Self { kind, head: Head::Transfer(encode_transfer_head(kind, fid, offset, bytes)), buffer: Some(buffer) }
    }

    fn data(&self) -> &[u8] {
        match &self.buffer {
            Some(buffer) if self.kind == kind::TWRITE => buffer,
            _ => &[],
        }
    }
}

/// Identifies a request of [`Connection::park`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ParkedRequest {
    tag: u16,
    /// Tags are reused.
    number: u64,
}

/// The counters of a connection.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) messages: AtomicU64,
    pub(crate) in_flight_max: AtomicUsize,
}

/// See the module.
pub(crate) struct Connection {
    pub(crate) msize: AtomicU32,
    pub(crate) counts: Arc<Counts>,
    depth: usize,
    timeout: Duration,
    heard: LastReceived,
    state: Mutex<State>,
    /// Signals room to send, or the end.
    room: Condvar,
    /// Signals queued requests, or the end.
    work: Condvar,
    writer: Mutex<Box<dyn Write + Send>>,
    hang_up: Box<dyn Fn() + Send + Sync>,
    fids: Mutex<Fids>,
    /// Signals that no Tclunk is under way.
    clunked: Condvar,
    /// A request that makes a fid has failed because the server had no room for it.
    is_short_of_fids: AtomicBool,
    /// The connections that end with this one.
    bound: Mutex<Vec<Weak<Connection>>>,
}

/// How many time limits a reply may take while others arrive: many readers may share a slow link.
const OTHERS_FIRST: u32 = 20;

/// The time of the last data from the server.
#[derive(Debug)]
struct LastReceived {
    begun: Instant,
    /// Milliseconds from then on.
    last_ms: AtomicU64,
}

impl Default for LastReceived {
    fn default() -> Self {
        Self { begun: Instant::now(), last_ms: AtomicU64::new(0) }
    }
}

impl LastReceived {
    /// Some bytes have come.
    fn note(&self) {
        let now_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(now_ms, Ordering::Relaxed);
    }

    /// Returns how long nothing has arrived since then.
    fn silence(&self, since: Instant) -> Duration {
        let last = self.begun + Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        last.max(since).elapsed()
    }
}

#[derive(Default)]
struct State {
    table: Table,
    queue: VecDeque<(Outgoing, Wake)>,
    broken: Option<Disconnected>,
}

/// A connection that is lost.
struct Disconnected {
    why: String,
    since: Instant,
}

#[derive(Debug, Default)]
struct Fids {
    next: u32,
    free: BTreeSet<u32>,
    /// The number of Tclunks under way.
    clunks: usize,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("msize", &self.msize).finish_non_exhaustive()
    }
}

/// A reply that a caller waits for.
#[derive(Debug)]
pub(crate) struct Ticket {
    slot: Arc<(Mutex<Option<RequestEnd>>, Condvar)>,
    harmless: bool,
}

impl Ticket {
    fn new(request_kind: u8) -> (Self, Wake) {
        let slot: Arc<(Mutex<Option<RequestEnd>>, Condvar)> = Arc::default();
        let other = Arc::clone(&slot);
        let wake = Wake::call(move |answer| {
            *lock(&other.0) = Some(answer);
            other.1.notify_one();
        });
        (Self { slot, harmless: is_harmless(request_kind) }, wake)
    }

    /// Waits for the reply. If the server is silent for too long, the connection ends.
    pub(crate) fn wait(self, connection: &Connection) -> Outcome<Message> {
        let begun = Instant::now();
        let waits = |slot: &mut Option<RequestEnd>| slot.is_none();
        let mut slot = lock(&self.slot.0);
        while slot.is_none() {
            let left = connection.patience(begun);
            if !left.is_zero() {
                slot = self.slot.1.wait_timeout_while(slot, left, waits).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            drop(slot);
            connection.is_late();
            // The end wakes all waiters: at once, or when the write in progress has failed.
            slot = lock(&self.slot.0);
            slot = self.slot.1.wait_while(slot, |slot| slot.is_none()).unwrap_or_else(PoisonError::into_inner);
        }
        let answer = slot.take();
        drop(slot);
        answer.map_or(Err(RequestError::Errno(Errno::IO)), |answer| self.outcome(answer))
    }

    /// Waits for the reply for this time only. Afterwards the reply is ignored.
    pub(crate) fn wait_for(self, time: Duration) -> Option<Outcome<Message>> {
        let slot = lock(&self.slot.0);
        let waited = self.slot.1.wait_timeout_while(slot, time, |slot| slot.is_none());
        let answer = waited.unwrap_or_else(PoisonError::into_inner).0.take();
        answer.map(|answer| self.outcome(answer))
    }

    fn outcome(&self, answer: RequestEnd) -> Outcome<Message> {
        match answer {
            RequestEnd::Message(message) => Ok(message),
            RequestEnd::Lost { sent, .. } => Err(RequestError::Lost { harmless: !sent || self.harmless }),
        }
    }
}

impl Connection {
    /// Starts a line's threads.
    pub(crate) fn start(stream: Stream, options: &Options, counts: Arc<Counts>) -> io::Result<Arc<Self>> {
        let connection = Arc::new(Self {
            msize: AtomicU32::new(options.msize),
            counts,
            depth: options.depth,
            timeout: options.timeout,
            heard: LastReceived::default(),
            state: Mutex::new(State { table: Table::new(options.depth), ..State::default() }),
            room: Condvar::new(),
            work: Condvar::new(),
            writer: Mutex::new(stream.writer),
            hang_up: stream.hang_up,
            fids: Mutex::default(),
            clunked: Condvar::new(),
            is_short_of_fids: AtomicBool::new(false),
            bound: Mutex::default(),
        });
        threads::start(&connection, stream.reader)?;
        Ok(connection)
    }

    /// Makes two connections end together, at once if one has ended already.
    pub(crate) fn bind(one: &Arc<Self>, other: &Arc<Self>) {
        for (connection, bound) in [(one, other), (other, one)] {
            lock(&connection.bound).push(Arc::downgrade(bound));
        }
        for (connection, bound) in [(one, other), (other, one)] {
            if let Some(why) = connection.why_broken() {
                bound.fail(&why);
            }
        }
    }

    /// Sends requests without waiting in between.
    pub(crate) fn send(&self, requests: Vec<Outgoing>) -> Vec<Ticket> {
        requests.into_iter().map(|request| self.send_one(request)).collect()
    }

    /// Sends a request; waits for a free slot if necessary.
    pub(crate) fn send_one(&self, request: Outgoing) -> Ticket {
        let (ticket, wake) = Ticket::new(request.kind);
        self.send_waking(request, wake);
        ticket
    }

    /// As [`Self::send_one`]; any thread calls `wake` with the reply, which must neither wait nor call this function.
    pub(crate) fn send_waking(&self, mut request: Outgoing, wake: Wake) {
        let mut state = lock(&self.state);
        while state.broken.is_none() && state.table.in_flight() >= self.depth {
            state = sync::wait(&self.room, state);
        }
        if state.broken.is_some() {
            drop(state);
            return wake.wake(RequestEnd::Lost { sent: false, buffer: request.buffer.take() });
        }
        let (tag, _) = self.register(&mut state, &mut request, wake, true);
        drop(state);
        self.write(tag, request);
    }

    /// Queues a request without a waiting caller; the reader calls `wake`, which must not wait.
    pub(crate) fn send_later(&self, request: Outgoing, wake: Wake) {
        let mut state = lock(&self.state);
        if state.broken.is_some() {
            drop(state);
            return wake.wake(RequestEnd::Lost { sent: false, buffer: request.buffer });
        }
        state.queue.push_back((request, wake));
        drop(state);
        self.work.notify_one();
    }

    /// As [`Self::send_later`], for a caller that waits for the reply but not for a free slot.
    pub(crate) fn send_one_later(&self, request: Outgoing) -> Ticket {
        let (ticket, wake) = Ticket::new(request.kind);
        self.send_later(request, wake);
        ticket
    }

    /// As [`Self::send_one`], for a request that the server keeps for a while: it takes no slot.
    pub(crate) fn send_one_parked(&self, mut request: Outgoing) -> Ticket {
        let (ticket, wake) = Ticket::new(request.kind);
        let mut state = lock(&self.state);
        if state.broken.is_some() {
            drop(state);
            wake.wake(RequestEnd::Lost { sent: false, buffer: None });
            return ticket;
        }
        let (tag, _) = self.register(&mut state, &mut request, wake, false);
        drop(state);
        self.write(tag, request);
        ticket
    }

    /// Sends a request that may never end; returns it for [`Self::give_up`], or `None` if the connection is lost.
    pub(crate) fn park(&self, mut request: Outgoing, wake: Wake) -> Result<Option<ParkedRequest>, Errno> {
        let mut state = lock(&self.state);
        if state.broken.is_some() {
            drop(state);
            wake.wake(RequestEnd::Lost { sent: false, buffer: None });
            return Ok(None);
        }
        if state.table.parked() >= PARKED_MAX {
            return Err(Errno::NOLCK);
        }
        let (tag, number) = self.register(&mut state, &mut request, wake, false);
        drop(state);
        self.write(tag, request);
        Ok(Some(ParkedRequest { tag, number }))
    }

    /// Cancels a parked request, unless it has ended. If the reply still arrives before the server has processed this,
    /// its waker is called.
    pub(crate) fn give_up(self: &Arc<Self>, request: ParkedRequest) {
        let (connection, tag) = (Arc::clone(self), request.tag);
        // The Tflush may wait for a slot, and the tag must be the same request's until then.
        if !lock(&self.state).table.begin_flush(tag, request.number) {
            return;
        }
        self.send_later(
            Outgoing::new(&Request::Flush { old: Tag(tag) }),
            Wake::call(move |answer| {
                if let RequestEnd::Message(_) = answer {
                    connection.flushed(tag);
                }
            }),
        );
    }

    /// The server has cancelled a request (flush(5)): its tag is free.
    fn flushed(&self, tag: u16) {
        let pending = lock(&self.state).table.end_flush(tag);
        if let Some(pending) = pending {
            pending.wake.wake(RequestEnd::Message(Message::flushed()));
        }
    }

    fn register(&self, state: &mut State, request: &mut Outgoing, wake: Wake, counted: bool) -> (u16, u64) {
        let buffer = if request.kind == kind::TREAD { request.buffer.take() } else { None };
        let (tag, number) = state.table.insert(Pending::new(request.kind, buffer, wake, counted));
        // Tversion has its own tag (version(5)).
        let tag_sent = if request.kind == kind::TVERSION { Tag::NONE.0 } else { tag };
        request.head.bytes_mut()[5..7].copy_from_slice(&tag_sent.to_le_bytes());
        self.counts.messages.fetch_add(1, Ordering::Relaxed);
        self.counts.in_flight_max.fetch_max(state.table.in_flight(), Ordering::Relaxed);
        (tag, number)
    }

    /// Writes a registered request.
    fn write(&self, tag: u16, request: Outgoing) {
        let outcome = {
            let mut writer = lock(&self.writer);
            writer
                .write_all(request.head.bytes())
                .and_then(|()| writer.write_all(request.data()))
                .and_then(|()| writer.flush())
        };
        let mut state = lock(&self.state);
        let answered = state.table.sent(tag, request.buffer);
        drop(state);
        if let Some((wake, answer)) = answered {
            self.room.notify_one();
            self.work.notify_one();
            wake.wake(answer);
        }
        match outcome {
            Ok(()) => {}
            // What the server has said before it went tells more, such as the alert of TLS: the reader takes it, and ends.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                (self.hang_up)()
            }
            Err(error) => self.fail(&format!("a request cannot be sent: {error}")),
        }
    }

    /// Whether the connection is lost.
    pub(crate) fn is_broken(&self) -> bool {
        lock(&self.state).broken.is_some()
    }

    /// Why the connection is lost.
    pub(crate) fn why_broken(&self) -> Option<String> {
        lock(&self.state).broken.as_ref().map(|broken| broken.why.clone())
    }

    /// When the connection was lost.
    pub(crate) fn broken_since(&self) -> Option<Instant> {
        lock(&self.state).broken.as_ref().map(|broken| broken.since)
    }

    /// Ends the connection, and wakes all waiters.
    pub(crate) fn fail(&self, reason: &str) {
        let mut state = lock(&self.state);
        if state.broken.is_some() {
            return;
        }
        state.broken = Some(Disconnected { why: reason.to_owned(), since: Instant::now() });
        let (pending, queue) = (state.table.fail_all(), std::mem::take(&mut state.queue));
        drop(state);
        (self.hang_up)();
        self.room.notify_all();
        self.work.notify_all();
        for pending in pending {
            pending.wake.wake(RequestEnd::Lost { sent: true, buffer: pending.buffer });
        }
        for (request, wake) in queue {
            wake.wake(RequestEnd::Lost { sent: false, buffer: request.buffer });
        }
        let bound = std::mem::take(&mut *lock(&self.bound));
        bound.iter().filter_map(Weak::upgrade).for_each(|connection| connection.fail(reason));
    }

    /// Returns how much longer the server may take for a request: it may not be silent for the time limit, nor reply to
    /// others only for [`OTHERS_FIRST`] times as long. Over a slow link one reply may take longer than the time limit.
    fn patience(&self, since: Instant) -> Duration {
        let silent = self.timeout.saturating_sub(self.heard.silence(since));
        silent.min((self.timeout * OTHERS_FIRST).saturating_sub(since.elapsed()))
    }

    /// Ends the connection if a reply is overdue.
    pub(crate) fn check(&self) {
        let oldest = lock(&self.state).table.oldest();
        if oldest.is_some_and(|since| self.patience(since).is_zero()) {
            self.is_late();
        }
    }

    fn is_late(&self) {
        self.fail(&format!("it has not replied to a request for {} s", self.timeout.as_secs_f32()));
    }

    /// Sends a request, and passes the reply to `take`.
    pub(crate) fn ask<T>(&self, request: &Request<'_>, take: impl FnOnce(Reply<'_>) -> Option<T>) -> Outcome<T> {
        let message = self.send_one(Outgoing::new(request)).wait(self)?;
        let opens_or_syncs = matches!(request.kind(), kind::TLOPEN | kind::TLCREATE | kind::TFSYNC);
        self.take(&message, take).map_err(|fail| match fail {
            // FUSE would open and sync no file any more.
            RequestError::Errno(Errno::NOSYS) if opens_or_syncs => Errno::OPNOTSUPP.into(),
            _ => fail,
        })
    }

    /// Sends a request whose reply has no content.
    pub(crate) fn tell(&self, request: &Request<'_>) -> Outcome<()> {
        self.ask(request, |_| Some(()))
    }

    /// Decodes a reply. An invalid one ends the connection.
    pub(crate) fn take<T>(&self, message: &Message, take: impl FnOnce(Reply<'_>) -> Option<T>) -> Outcome<T> {
        let flaw = match Reply::decode(&message.bytes) {
            Ok((_, Reply::Error(errno))) => return Err(RequestError::Errno(errno)),
            Ok((_, reply)) => match take(reply) {
                Some(taken) => return Ok(taken),
                None => "a reply says what cannot be".to_owned(),
            },
            Err(flaw) => flaw.to_string(),
        };
        self.fail(&flaw);
        Err(RequestError::Errno(Errno::IO))
    }

    /// Returns the lowest unused fid: to some servers it is an index of a table.
    pub(crate) fn new_fid(&self) -> Fid {
        let mut fids = lock(&self.fids);
        Fid(fids.free.pop_first().unwrap_or_else(|| {
            fids.next = fids.next.wrapping_add(1) % u32::MAX;
            fids.next
        }))
    }

    /// Frees a fid that the server does not know.
    pub(crate) fn free_fid(&self, fid: Fid) {
        lock(&self.fids).free.insert(fid.0);
    }

    /// Records the outcome of a request that makes a fid.
    pub(crate) fn note_walk<T>(&self, walked: &Outcome<T>) {
        if matches!(walked, Err(RequestError::Errno(errno)) if is_shortage(*errno)) {
            self.is_short_of_fids.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether this error is the server's lack of fids.
    pub(crate) fn is_short_of_fids(&self, errno: Errno) -> bool {
        is_shortage(errno) && self.is_short_of_fids.load(Ordering::Relaxed)
    }

    /// Waits until the server has replied to all Tclunks, for a while.
    pub(crate) fn wait_for_clunks(&self) {
        let fids = lock(&self.fids);
        drop(self.clunked.wait_timeout_while(fids, CLUNKS, |fids| fids.clunks > 0));
    }

    /// Ends a fid some time.
    pub(crate) fn clunk_later(self: &Arc<Self>, fid: Fid) {
        let connection = Arc::clone(self);
        lock(&self.fids).clunks += 1;
        let free = Wake::call(move |answer| {
            let mut fids = lock(&connection.fids);
            // Whatever its reply, the server has released the fid (clunk(5)).
            if let RequestEnd::Message(_) = answer {
                fids.free.insert(fid.0);
            }
            fids.clunks -= 1;
            if fids.clunks == 0 {
                connection.clunked.notify_all();
            }
        });
        self.send_later(Outgoing::new(&Request::Clunk { fid }), free);
    }
}
