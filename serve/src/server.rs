//! Decodes a message and serves the request.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ferry_engine::ReplyBuffer;
use ferry_engine::metrics::Recorder;
use ferry_engine::requests::LoggedRequest;
use ferry_state::{Init, Journal};
use ferry_vfs::{Caller, Errno, Ino};
use ferry_wire::events::REPLAY_GID;
use ferry_wire::fuse::{
    IN_HEADER_BYTES, InitError, InitFlags, InitOutcome, InitRequest, Negotiated, Opcode, Operation,
    REQUEST_HEAD_BYTES_MAX, Reply, Request, SecurityContexts, decode, negotiate, peek,
};

use crate::active_request::ActiveRequest;
use crate::carrier::{FuseCarrier, ServeOutcome};
use crate::mappings::MAPPING_FLAGS;
use crate::operations::{DetachedTransfer, PendingTransfer};
use crate::passthrough::Passthrough;
use crate::persistence::SessionRecord;
use crate::rate;
use crate::reply::{self, ReplyOutcome};
use crate::request_text::RequestText;
use crate::session::Session;
use crate::session::SessionSlot;
use crate::share::Share;

/// The most supplementary groups of a caller that are read; Linux sends one.
const GROUPS_MAX: usize = 32;

/// Serves the requests of one worker (a virtqueue, a ring, a thread that reads the device), one at a time.
pub struct Server {
    pub(crate) share: Arc<Share>,
    slot: Arc<SessionSlot>,
    /// The client's session, cached during a batch.
    session: Option<Arc<Session>>,
    /// The request being served has ended its session.
    session_ended: bool,
    /// The private copy of the request being served.
    head: Vec<u8>,
    /// The buffer of listings.
    pub(crate) scratch: Vec<u8>,
    /// Inodes that a listing refers to.
    pub(crate) referenced: Vec<Ino>,
    /// Pending transfers, by the low half of their token.
    pending_transfers: Vec<Option<PendingTransfer>>,
    pub(crate) recorder: Recorder,
    /// The request being served, until another thread or a transfer takes over its end.
    pub(crate) active: Option<ActiveRequest>,
    /// Records the start and the reply of requests that must not run twice.
    pub(crate) journal: Option<Journal>,
    /// A previous server may have executed the request being served.
    pub(crate) is_replay: bool,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("share", &self.share).field("session", &self.slot).finish_non_exhaustive()
    }
}

/// A request being served.
pub(crate) struct Context<'a> {
    pub(crate) caller: Caller<'a>,
    pub(crate) session: &'a Arc<Session>,
    pub(crate) ino: Ino,
    pub(crate) unique: u64,
    /// The security labels of a new inode.
    pub(crate) security: SecurityContexts<'a>,
}

impl Context<'_> {
    /// Whether the request comes from an agent that replays an event. It changes nothing, announced or not.
    pub(crate) fn is_of_agent(&self) -> bool {
        self.caller.uid == 0 && self.caller.gid == REPLAY_GID
    }

    /// Replies at once.
    pub(crate) fn done(&self, carrier: &mut impl ReplyBuffer, reply: &Reply<'_>) -> ServeOutcome {
        ServeOutcome::Reply(self.reply(carrier, reply).bytes())
    }

    /// Replies at once; returns whether the reply was delivered.
    pub(crate) fn reply(&self, carrier: &mut impl ReplyBuffer, reply: &Reply<'_>) -> ReplyOutcome {
        reply::write(carrier, self.unique, self.session.negotiated(), reply)
    }
}

impl Server {
    /// Creates a server of a client's session.
    pub fn new(share: Arc<Share>, slot: Arc<SessionSlot>) -> Self {
        share.clients.add(&slot);
        Self {
            recorder: Recorder::new(&share.metrics),
            share,
            slot,
            session: None,
            session_ended: false,
            head: vec![0; REQUEST_HEAD_BYTES_MAX],
            scratch: Vec::new(),
            referenced: Vec::new(),
            pending_transfers: Vec::new(),
            active: None,
            journal: None,
            is_replay: false,
        }
    }

    /// Begins the log entry and the metrics of a request.
    pub(crate) fn begin_request(&mut self, cx: &Context<'_>, operation: &Operation<'_>) {
        let text = RequestText(operation);
        let logged = LoggedRequest::begin(&self.share.name, cx.ino, Some(cx.caller.pid), &text);
        self.active = Some(ActiveRequest::begin(&mut self.recorder, operation, logged));
    }

    /// Records in the session store, if there is one, which requests begin and end, as worker number `worker`.
    #[must_use]
    pub fn with_journal(self, worker: usize) -> Self {
        let journal = self.slot.store.as_ref().map(|store| store.journal(worker));
        Self { journal, ..self }
    }

    /// Serves a request: copies it once and serves the copy. A panic of the source passes through: a worker that
    /// catches it calls [`Self::write_error`]; others use [`Self::serve_caught`].
    pub fn serve(&mut self, carrier: &mut impl FuseCarrier) -> ServeOutcome {
        let message_bytes = carrier.request_bytes();
        let mut header = [0; IN_HEADER_BYTES];
        if carrier.read_at(0, &mut header) < IN_HEADER_BYTES {
            self.share.metrics.invalid();
            self.share.ratelimited_log.warn(format_args!("a request of {message_bytes} bytes has no FUSE header"));
            return ServeOutcome::Reply(0);
        }
        let head_bytes = peek(&header).head_bytes(message_bytes);
        let mut head = std::mem::take(&mut self.head);
        if head_bytes > head.len() {
            head.resize(head_bytes, 0);
        }
        head[..IN_HEADER_BYTES].copy_from_slice(&header);
        let rest = &mut head[IN_HEADER_BYTES..head_bytes.max(IN_HEADER_BYTES)];
        let copied = IN_HEADER_BYTES + carrier.read_at(IN_HEADER_BYTES, rest);
        let served = self.serve_copy(carrier, &head[..head_bytes.min(copied)], message_bytes);
        if head_bytes > REQUEST_HEAD_BYTES_MAX {
            head.truncate(REQUEST_HEAD_BYTES_MAX);
            head.shrink_to_fit();
        }
        self.head = head;
        served
    }

    /// As [`Self::serve`], but a panic of the source becomes EIO for this request alone.
    pub fn serve_caught(&mut self, carrier: &mut impl FuseCarrier) -> ServeOutcome {
        catch_unwind(AssertUnwindSafe(|| self.serve(carrier))).unwrap_or_else(|_| self.write_error(carrier))
    }

    fn serve_copy(&mut self, carrier: &mut impl FuseCarrier, head: &[u8], message_bytes: usize) -> ServeOutcome {
        // Moved, not cloned: all queues share its reference count.
        let session = self.session.take().or_else(|| self.slot.current());
        self.session_ended = false;
        let served = self.serve_in(session.as_ref(), carrier, head, message_bytes);
        if !self.session_ended {
            self.session = session;
        }
        served
    }

    fn serve_in(
        &mut self,
        session: Option<&Arc<Session>>,
        carrier: &mut impl FuseCarrier,
        head: &[u8],
        message_bytes: usize,
    ) -> ServeOutcome {
        let agreed = session.map_or(&Negotiated::BEFORE_INIT, |session| session.negotiated());
        match (decode(head, message_bytes, agreed), session) {
            (Err(error), _) => {
                self.share.metrics.invalid();
                // Linux passes on names that are too long, so any program of the client could flood the log.
                if error.errno != Errno::NAMETOOLONG {
                    self.share.ratelimited_log.warn(format_args!("{error}"));
                }
                match error.reply_to() {
                    Some(unique) => ServeOutcome::Reply(reply::write_error(carrier, unique, error.errno)),
                    None => ServeOutcome::NoReply,
                }
            }
            (Ok(Request { operation: Operation::Init(init), unique, .. }), _) => {
                let timer = self.recorder.begin(Opcode::Init.as_raw() as usize);
                let outcome = self.init(carrier, unique, &init);
                self.recorder.end(timer, outcome.map(|_| 0));
                ServeOutcome::Reply(outcome.unwrap_or_else(|errno| reply::write_error(carrier, unique, errno)))
            }
            (Ok(request), Some(session)) => {
                let mut groups = [0; GROUPS_MAX];
                let groups = request.extensions.groups.copy_to(&mut groups);
                // Unless negotiated, labels would only set attributes of a share that has none.
                let agreed = session.negotiated().has(InitFlags::SECURITY_CTX);
                let security = if agreed { request.extensions.security } else { SecurityContexts::default() };
                let Request { unique, ino, uid, gid, pid, operation, .. } = request;
                if let Some(limiter) = self.share.limiter.as_deref().filter(|limiter| limiter.is_on()) {
                    rate::charge(limiter, &operation);
                }
                let caller = Caller { session: session.id(), uid, gid, pid, groups };
                self.serve_with_replay(&Context { caller, session, ino, unique, security }, &operation, carrier)
            }
            (Ok(request), None) => match request.operation.wants_reply() {
                true => ServeOutcome::Reply(reply::write_error(carrier, request.unique, Errno::NOTCONN)),
                false => ServeOutcome::NoReply,
            },
        }
    }

    /// Begins a session; releases what an earlier one held (the guest was reset).
    fn init(&mut self, buffer: &mut impl ReplyBuffer, unique: u64, init: &InitRequest) -> Result<usize, Errno> {
        let slot = Arc::clone(&self.slot);
        self.session_ended = true;
        let _beginning = slot.end_before_next();
        if let Some(mappings) = &self.slot.mappings {
            // The window executes requests in order, so later ones find it empty.
            mappings.clear(Box::new(|_| ()));
        }
        let mut wanted = self.share.policy.init_options();
        if let Some(adjust) = &self.slot.adjust {
            adjust(init, &mut wanted);
        }
        let backings = self.slot.backings.as_ref().filter(|_| self.share.source.features().backing);
        // Data in the client's write-back cache would bypass the backing file.
        let holds_back = (wanted.flags & init.flags).contains(InitFlags::WRITEBACK_CACHE);
        let backings = backings.filter(|_| !holds_back && wanted.flags.contains(InitFlags::PASSTHROUGH));
        if backings.is_none() {
            wanted.flags -= InitFlags::PASSTHROUGH;
        }
        if wanted.flags.contains(InitFlags::PASSTHROUGH) && init.flags.contains(InitFlags::PASSTHROUGH) {
            // The reply to OPEN names the backing file.
            wanted.flags -= InitFlags::NO_OPEN_SUPPORT;
        }
        let mappings = self.slot.mappings.as_ref().filter(|_| self.share.source.mappable().is_some());
        let mappings = mappings.filter(|mappings| mappings.is_open());
        if mappings.is_some() {
            wanted.flags |= MAPPING_FLAGS;
        }
        let missing = self.share.policy.required - (wanted.flags & init.flags);
        if missing != InitFlags::empty() {
            let who = if wanted.flags.contains(missing) { "the client's kernel" } else { "the source" };
            self.share.ratelimited_log.warn(format_args!("{who} lacks the required {missing:?}; INIT is refused"));
            return Err(InitError::ERRNO);
        }
        match negotiate(init, &wanted) {
            Ok(InitOutcome::Ready(negotiated, answer)) => {
                let name = &self.share.name;
                tracing::debug!("{name}: a client speaks FUSE 7.{}, agreed on {:?}", init.minor, negotiated.flags);
                let backings = backings.filter(|_| negotiated.has(InitFlags::PASSTHROUGH));
                let passthrough = backings.map(|backings| Passthrough::new(Arc::clone(backings)));
                let mappings = mappings.filter(|_| negotiated.has(InitFlags::MAP_ALIGNMENT)).cloned();
                let init_record = init_of(init, &negotiated);
                let record = self.slot.store.as_ref().map(|store| SessionRecord::begin(store, init_record));
                let source = Arc::clone(&self.share.source);
                let session = Session::new(source, negotiated, passthrough, mappings, (init_record, record));
                let session = if self.share.events { session.without_generations() } else { session };
                self.slot.set_session(Some(Arc::new(session)));
                Ok(reply::write(buffer, unique, &negotiated, &Reply::Init(answer)).bytes())
            }
            Ok(InitOutcome::Retry(answer)) => {
                Ok(reply::write(buffer, unique, &Negotiated::BEFORE_INIT, &Reply::Init(answer)).bytes())
            }
            Err(error) => {
                self.share.ratelimited_log.warn(format_args!("{error}; no mount"));
                Err(InitError::ERRNO)
            }
        }
    }

    pub(crate) fn end_session(&mut self) {
        self.session_ended = true;
        self.slot.end();
    }

    /// Stores a transfer until it ends.
    pub(crate) fn register_transfer(&mut self, token: u64, transfer: PendingTransfer) {
        let index = slot(token);
        if self.pending_transfers.len() <= index {
            self.pending_transfers.resize_with(index + 1, || None);
        }
        self.pending_transfers[index] = Some(transfer);
    }

    /// Finishes the reply of the request with this token after its transfer; returns the bytes of the reply.
    pub fn finish_transfer(&mut self, token: u64, buffer: &mut impl ReplyBuffer, outcome: io::Result<usize>) -> usize {
        match self.pending_transfers.get_mut(slot(token)).and_then(Option::take) {
            Some(transfer) => {
                let recorder = &mut self.recorder;
                transfer.finish(&self.share, buffer, outcome, |timer, outcome| recorder.end_transfer(timer, outcome))
            }
            None => 0,
        }
    }

    /// Removes the pending transfer with this token, for another thread or server that will finish it.
    /// [`Self::finish_transfer`] then ignores the token.
    pub fn detach(&mut self, token: u64) -> Option<DetachedTransfer> {
        let transfer = self.pending_transfers.get_mut(slot(token)).and_then(Option::take)?;
        Some(DetachedTransfer { share: Arc::clone(&self.share), transfer })
    }

    /// Adds a transfer that [`Self::detach`] of another server returned; call it before [`Self::finish_transfer`].
    pub fn attach(&mut self, token: u64, unfinished: DetachedTransfer) {
        self.register_transfer(token, unfinished.transfer);
    }

    /// Replies with EIO after [`Self::serve`] panicked.
    pub fn write_error(&mut self, carrier: &mut impl FuseCarrier) -> ServeOutcome {
        // The panic may have dropped the buffer.
        self.head.resize(REQUEST_HEAD_BYTES_MAX, 0);
        if let Some(active) = self.active.take() {
            let recorder = &mut self.recorder;
            active.end_transfer(Err(Errno::IO), |timer, outcome| recorder.end(timer, outcome));
        }
        let mut header = [0; IN_HEADER_BYTES];
        carrier.read_at(0, &mut header);
        let peeked = peek(&header);
        match peeked.wants_reply() {
            true => ServeOutcome::Reply(reply::write_error(carrier, peeked.unique, Errno::IO)),
            false => ServeOutcome::NoReply,
        }
    }

    /// Drops the cached session, so that an ended one releases what it held. Call it before the worker waits.
    pub fn end_batch(&mut self) {
        self.session = None;
        self.recorder.end_batch();
    }
}

pub(crate) fn init_of(init: &InitRequest, negotiated: &Negotiated) -> Init {
    Init {
        minor: negotiated.minor,
        max_readahead_bytes: init.max_readahead_bytes,
        offered: init.flags.bits(),
        agreed: negotiated.flags.bits(),
    }
}

/// The low half of a token is an index.
fn slot(token: u64) -> usize {
    usize::try_from(token & u64::from(u32::MAX)).unwrap_or(0)
}
