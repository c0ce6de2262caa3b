//! One connection to a server: sends requests, and passes each reply to its caller.
//!
//! Callers send their requests themselves, under a lock that is held only for that, and sleep until the connection's
//! reader wakes them with the reply. What nobody sleeps for (the cache's transfers, clunks, locks) goes through a queue that
//! the connection's sender empties: the reader must never send, or it and the server could wait for each other to
//! read. A server that breaks the protocol in any way loses the connection.

mod pending;
mod threads;

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferry_vfs::Errno;
use ferry_wire::ninep::{Fid, Reply, Request, Tag, WRITE_HEAD_BYTES, encode_transfer_head, kind};

pub(crate) use pending::{Answer, Message, Wake};
use pending::{Pending, Table};

use crate::options::Options;
use crate::transport::Stream;

/// Locks that are waited for at a time. They do not count among the requests under way, for they may take for ever.
const PARKED_MAX: usize = 4096;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestError {
    /// The server says so, or this client.
    Errno(Errno),
    /// The connection was lost.
    Lost {
        /// Asking again does no harm: it was not sent, or comes to the same when done twice.
        harmless: bool,
    },
}

impl From<Errno> for RequestError {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

pub(crate) type Outcome<T> = Result<T, RequestError>;

/// Whether a request may be sent again when nobody knows what became of it.
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

/// A request as bytes. The data of a Twrite stay where they are.
#[derive(Debug)]
pub(crate) struct Outgoing {
    kind: u8,
    head: Head,
    /// The buffer to read into, or to write from.
    buffer: Option<Vec<u8>>,
}

/// What comes before the data. Those of reads and writes take no memory: the cache writes out when it is short.
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

    /// Reads into a buffer as long as what is asked for.
    pub(crate) fn read(fid: Fid, offset: u64, buffer: Vec<u8>) -> Self {
        Self::transfer(kind::TREAD, fid, offset, buffer)
    }

    /// Writes a buffer.
    pub(crate) fn write(fid: Fid, offset: u64, buffer: Vec<u8>) -> Self {
        Self::transfer(kind::TWRITE, fid, offset, buffer)
    }

    fn transfer(kind: u8, fid: Fid, offset: u64, buffer: Vec<u8>) -> Self {
        let bytes = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
        Self { kind, head: Head::Transfer(encode_transfer_head(kind, fid, offset, bytes)), buffer: Some(buffer) }
    }

    fn set_tag(&mut self, tag: u16) {
        // Tversion has a tag of its own (version(5)).
        let tag = if self.kind == kind::TVERSION { Tag::NONE.0 } else { tag };
        self.head.bytes_mut()[5..7].copy_from_slice(&tag.to_le_bytes());
    }

    fn data(&self) -> &[u8] {
        match &self.buffer {
            Some(buffer) if self.kind == kind::TWRITE => buffer,
            _ => &[],
        }
    }
}

/// What a connection has done so far.
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
    /// Somebody can send, or the line is broken.
    room: Condvar,
    /// There is something in the queue, or the line is broken.
    work: Condvar,
    writer: Mutex<Box<dyn Write + Send>>,
    hang_up: Box<dyn Fn() + Send + Sync>,
    fids: Mutex<Fids>,
    /// Those that end with this one.
    bound: Mutex<Vec<Weak<Connection>>>,
}

/// How many time limits an answer may take while others come: a window of long messages for each of many readers, over a
/// slow link.
const OTHERS_FIRST: u32 = 20;

/// When the server was heard last.
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

    /// For how long nothing has come since then.
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
    free: Vec<u32>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").field("msize", &self.msize).finish_non_exhaustive()
    }
}

/// A reply that somebody waits for.
#[derive(Debug)]
pub(crate) struct Ticket {
    slot: Arc<(Mutex<Option<Answer>>, Condvar)>,
    harmless: bool,
}

impl Ticket {
    fn new(request_kind: u8) -> (Self, Wake) {
        let slot: Arc<(Mutex<Option<Answer>>, Condvar)> = Arc::default();
        let other = Arc::clone(&slot);
        let wake = Wake::call(move |answer| {
            *lock(&other.0) = Some(answer);
            other.1.notify_one();
        });
        (Self { slot, harmless: is_harmless(request_kind) }, wake)
    }

    /// Waits for the reply. When the server says nothing at all for too long, the connection is given up.
    pub(crate) fn wait(self, connection: &Connection) -> Outcome<Message> {
        let begun = Instant::now();
        let waits = |slot: &mut Option<Answer>| slot.is_none();
        let mut slot = lock(&self.slot.0);
        while slot.is_none() {
            let left = connection.patience(begun);
            if !left.is_zero() {
                slot = self.slot.1.wait_timeout_while(slot, left, waits).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            drop(slot);
            connection.is_late();
            // Its end wakes all who wait: at once, or when the write that is under way has failed.
            slot = lock(&self.slot.0);
            slot = self.slot.1.wait_while(slot, |slot| slot.is_none()).unwrap_or_else(PoisonError::into_inner);
        }
        let answer = slot.take();
        drop(slot);
        answer.map_or(Err(RequestError::Errno(Errno::IO)), |answer| self.outcome(answer))
    }

    /// Waits for the reply for this long only. Without one by then, nobody waits for it any more.
    pub(crate) fn wait_for(self, time: Duration) -> Option<Outcome<Message>> {
        let slot = lock(&self.slot.0);
        let waited = self.slot.1.wait_timeout_while(slot, time, |slot| slot.is_none());
        let answer = waited.unwrap_or_else(PoisonError::into_inner).0.take();
        answer.map(|answer| self.outcome(answer))
    }

    fn outcome(&self, answer: Answer) -> Outcome<Message> {
        match answer {
            Answer::Message(message) => Ok(message),
            Answer::Lost { sent, .. } => Err(RequestError::Lost { harmless: !sent || self.harmless }),
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
            bound: Mutex::default(),
        });
        threads::start(&connection, stream.reader)?;
        Ok(connection)
    }

    /// Has two lines end together, now if one has ended already.
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

    /// Sends requests one after the other, without waiting in between.
    pub(crate) fn send(&self, requests: Vec<Outgoing>) -> Vec<Ticket> {
        requests.into_iter().map(|request| self.send_one(request)).collect()
    }

    /// Sends a request; waits for a place among those under way if need be.
    pub(crate) fn send_one(&self, request: Outgoing) -> Ticket {
        let (ticket, wake) = Ticket::new(request.kind);
        self.send_waking(request, wake);
        ticket
    }

    /// The same, and has `wake` called with the answer, by any thread; it must not wait. Not for such calls themselves.
    pub(crate) fn send_waking(&self, mut request: Outgoing, wake: Wake) {
        let mut state = lock(&self.state);
        while state.broken.is_none() && state.table.in_flight() >= self.depth {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.broken.is_some() {
            drop(state);
            return wake.wake(Answer::Lost { sent: false, buffer: request.buffer.take() });
        }
        let tag = self.register(&mut state, &mut request, wake, true);
        drop(state);
        self.write(tag, request);
    }

    /// Has a request sent that nobody sleeps for; `wake` is called by the reader and must not wait.
    pub(crate) fn send_later(&self, request: Outgoing, wake: Wake) {
        let mut state = lock(&self.state);
        if state.broken.is_some() {
            drop(state);
            return wake.wake(Answer::Lost { sent: false, buffer: request.buffer });
        }
        state.queue.push_back((request, wake));
        drop(state);
        self.work.notify_one();
    }

    /// The same for whoever waits for the reply, but not for a place among the requests under way.
    pub(crate) fn send_one_later(&self, request: Outgoing) -> Ticket {
        let (ticket, wake) = Ticket::new(request.kind);
        self.send_later(request, wake);
        ticket
    }

    /// Sends a request that may take for ever; answers its tag for [`Self::give_up`].
    pub(crate) fn park(&self, mut request: Outgoing, wake: Wake) -> Result<Tag, Errno> {
        let mut state = lock(&self.state);
        if state.broken.is_some() {
            drop(state);
            wake.wake(Answer::Lost { sent: false, buffer: None });
            return Ok(Tag::NONE);
        }
        if state.table.parked() >= PARKED_MAX {
            return Err(Errno::NOLCK);
        }
        let tag = self.register(&mut state, &mut request, wake, false);
        drop(state);
        self.write(tag, request);
        Ok(Tag(tag))
    }

    /// Tells the server that the answer to a parked request is not wanted any more. If it comes all the same, before the
    /// server has heard of this, its waker is called as ever.
    pub(crate) fn give_up(self: &Arc<Self>, tag: Tag) {
        let connection = Arc::clone(self);
        self.send_later(
            Outgoing::new(&Request::Flush { old: tag }),
            Wake::call(move |answer| {
                if let Answer::Message(_) = answer {
                    connection.flushed(tag);
                }
            }),
        );
    }

    /// The server has forgotten a request (flush(5)): its tag is free again.
    fn flushed(&self, tag: Tag) {
        let pending = lock(&self.state).table.remove(tag.0);
        if let Some(pending) = pending {
            pending.wake.wake(Answer::Message(Message::flushed()));
        }
    }

    fn register(&self, state: &mut State, request: &mut Outgoing, wake: Wake, counted: bool) -> u16 {
        let buffer = if request.kind == kind::TREAD { request.buffer.take() } else { None };
        let tag = state.table.insert(Pending::new(request.kind, buffer, wake, counted));
        request.set_tag(tag);
        self.counts.messages.fetch_add(1, Ordering::Relaxed);
        self.counts.in_flight_max.fetch_max(state.table.in_flight(), Ordering::Relaxed);
        tag
    }

    /// Writes a request that is registered.
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
        if let Err(error) = outcome {
            self.fail(&format!("a request cannot be sent: {error}"));
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

    /// Ends the connection; whoever waits for a reply is told.
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
            pending.wake.wake(Answer::Lost { sent: true, buffer: pending.buffer });
        }
        for (request, wake) in queue {
            wake.wake(Answer::Lost { sent: false, buffer: request.buffer });
        }
        let bound = std::mem::take(&mut *lock(&self.bound));
        bound.iter().filter_map(Weak::upgrade).for_each(|connection| connection.fail(reason));
    }

    /// How long the server may take yet for what it has had since then: it may not be silent for the time limit, nor answer
    /// everything else for [`OTHERS_FIRST`] times as long. Over a slow link one answer may take longer than the time limit.
    fn patience(&self, since: Instant) -> Duration {
        let silent = self.timeout.saturating_sub(self.heard.silence(since));
        silent.min((self.timeout * OTHERS_FIRST).saturating_sub(since.elapsed()))
    }

    /// Ends the connection if the server owes an answer for too long.
    pub(crate) fn check(&self) {
        let oldest = lock(&self.state).table.oldest();
        if oldest.is_some_and(|since| self.patience(since).is_zero()) {
            self.is_late();
        }
    }

    fn is_late(&self) {
        self.fail(&format!("it has not answered a request for {} s", self.timeout.as_secs_f32()));
    }

    /// Asks, and passes the reply to `take`.
    pub(crate) fn ask<T>(&self, request: &Request<'_>, take: impl FnOnce(Reply<'_>) -> Option<T>) -> Outcome<T> {
        let message = self.send_one(Outgoing::new(request)).wait(self)?;
        self.take(&message, take)
    }

    /// Asks for what is only done.
    pub(crate) fn tell(&self, request: &Request<'_>) -> Outcome<()> {
        self.ask(request, |_| Some(()))
    }

    /// What a reply says. One that is not understood is the end of the connection.
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

    /// A number for a fid that the server does not know yet.
    pub(crate) fn new_fid(&self) -> Fid {
        let mut fids = lock(&self.fids);
        Fid(fids.free.pop().unwrap_or_else(|| {
            fids.next = fids.next.wrapping_add(1) % u32::MAX;
            fids.next
        }))
    }

    /// The server does not know this fid any more, or never did.
    pub(crate) fn free_fid(&self, fid: Fid) {
        lock(&self.fids).free.push(fid.0);
    }

    /// Ends a fid some time.
    pub(crate) fn clunk_later(self: &Arc<Self>, fid: Fid) {
        let connection = Arc::clone(self);
        let free = Wake::call(move |answer| {
            // Whatever it answers, the server has forgotten the fid (clunk(5)).
            if let Answer::Message(_) = answer {
                connection.free_fid(fid);
            }
        });
        self.send_later(Outgoing::new(&Request::Clunk { fid }), free);
    }
}
