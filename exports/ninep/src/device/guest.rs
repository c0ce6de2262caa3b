//! The guest of one front end: its session, its requests in flight, and replies from other threads.

use std::sync::{Arc, Mutex, OnceLock};

use ferry_vfs::sync::lock;
use ferry_vfs::{Cancellation, Errno};
use ferry_vhost::Port;
use ferry_wire::ninep::{Frame, HEADER_BYTES, MSIZE_MIN, Tag, kind};

use crate::carrier::Client;
use crate::clients::{Clients, ConnectionAccount, Resource};
use crate::request_table::{Outlet, RejectedRequest, ReplyBytes, RequestTable, Ticket};
use crate::session::Session;
use crate::shrink::Trimmer;

/// A message whose head was read.
pub(super) struct Arrival {
    pub(super) head: [u8; HEADER_BYTES],
    /// The negotiated message size, in bytes.
    pub(super) msize: u32,
    pub(super) registered: Result<(Ticket, Arc<Session>), RejectedRequest>,
}

/// A chain that the worker has taken.
#[derive(Default)]
struct TakenChain {
    /// Until it is served.
    arrival: Option<Arrival>,
    /// Until the chain returns to the driver with its reply.
    ticket: Option<Ticket>,
}

#[derive(Default)]
struct Requests {
    request_table: RequestTable,
    /// By the low half of the chains' tokens.
    taken: Vec<TakenChain>,
}

impl Requests {
    fn taken(&mut self, token: u64) -> &mut TakenChain {
        let index = slot(token);
        if self.taken.len() <= index {
            self.taken.resize_with(index + 1, TakenChain::default);
        }
        &mut self.taken[index]
    }
}

/// See the module.
pub(crate) struct Guest {
    holder: Arc<ConnectionAccount>,
    requests: Mutex<Requests>,
    port: OnceLock<Arc<Port<Vec<u8>>>>,
    trimmer: Arc<Trimmer>,
}

/// Returns the slot in the low half of a token.
pub(super) fn slot(token: u64) -> usize {
    usize::try_from(token & u64::from(u32::MAX)).unwrap_or(0)
}

/// The mailbox of the worker: only the worker accesses chains.
struct MailboxOutlet<'a>(Option<&'a Port<Vec<u8>>>);

impl Outlet for MailboxOutlet<'_> {
    fn send(&mut self, token: u64, reply: ReplyBytes<'_>) {
        if let Some(port) = self.0 {
            port.reply(token, reply.as_slice().to_vec());
        }
    }

    /// Returns the chain to the driver. Linux treats an empty one as no reply.
    fn discard(&mut self, token: u64) {
        self.send(token, ReplyBytes::Borrowed(&[]));
    }
}

impl Guest {
    pub(super) fn new(trimmer: Arc<Trimmer>) -> Self {
        // Limited, because the guest's fids are this host's memory.
        let holder = Clients::alone();
        Self { holder, requests: Mutex::default(), port: OnceLock::new(), trimmer }
    }

    /// Returns the account of the guest's sessions.
    pub(super) fn holder(&self) -> &Arc<ConnectionAccount> {
        &self.holder
    }

    /// Sets the port for replies of other threads.
    pub(super) fn answers_by(&self, port: Arc<Port<Vec<u8>>>) {
        // There is one worker, and so one port.
        let _ = self.port.set(port);
    }

    fn with_request_table<T>(&self, act: impl FnOnce(&mut RequestTable, &mut dyn Outlet) -> T) -> T {
        act(&mut lock(&self.requests).request_table, &mut MailboxOutlet(self.port.get().map(Arc::as_ref)))
    }

    /// Begins a session, and ends the previous one.
    pub(super) fn begin(&self, session: Option<Arc<Session>>) {
        let before = self.with_request_table(|request_table, out| request_table.begin(out, session));
        // Here, without a lock.
        drop(before);
        self.note_held();
    }

    /// Returns the number of objects that the guest holds, of a few hundred bytes each.
    pub(super) fn held(&self) -> usize {
        self.holder.holds(Resource::Entries)
    }

    /// Releases memory if the guest holds much less than before.
    pub(super) fn note_held(&self) {
        self.trimmer.note(self.held());
    }

    /// Releases the guest's session.
    pub(super) fn end_session(&self) {
        self.begin(None);
    }

    /// Records a chain that the worker has taken, and the head of its message if there is one. From now on the request
    /// is in flight, even if another thread serves it later, so that a flush finds it.
    pub(super) fn accept(&self, token: u64, head: Option<[u8; HEADER_BYTES]>) {
        let mut requests = lock(&self.requests);
        let arrival = head.map(|head| {
            let frame = Frame::peek(&head);
            let request_table = &mut requests.request_table;
            let registered = match frame {
                Some(Frame { kind: kind::TVERSION | kind::TFLUSH, .. }) | None => {
                    Err(RejectedRequest::Error(Errno::INVAL))
                }
                Some(Frame { tag, .. }) => request_table.register(token, tag),
            };
            Arrival { head, msize: request_table.session().map_or(MSIZE_MIN, |session| session.msize), registered }
        });
        let ticket =
            arrival.as_ref().and_then(|arrival| arrival.registered.as_ref().ok()).map(|(ticket, _)| ticket.clone());
        *requests.taken(token) = TakenChain { arrival, ticket };
    }

    /// Returns the result of [`Self::accept`] for the chain to serve.
    pub(super) fn arrival(&self, token: u64) -> Option<Arrival> {
        lock(&self.requests).taken(token).arrival.take()
    }

    /// Called before a chain returns to the driver; returns whether its reply is still expected. Flushes that waited
    /// for it are replied to through the mailbox, and so afterwards.
    pub(super) fn complete(&self, token: u64) -> bool {
        let mut requests = lock(&self.requests);
        let Some(ticket) = requests.taken(token).ticket.take() else { return true };
        requests.request_table.end(&mut MailboxOutlet(self.port.get().map(Arc::as_ref)), &ticket)
    }

    /// Handles a flush. Its reply goes through the mailbox, after the request that it ends.
    pub(super) fn flush(&self, token: u64, tag: Tag, old: Tag) -> Result<(), RejectedRequest> {
        self.with_request_table(|request_table, out| request_table.flush(out, token, tag, old))
    }

    /// Returns the numbers of fids, requests in flight, and those of them that wait for a lock.
    pub(super) fn usage(&self) -> (usize, usize, usize) {
        let request_table = &lock(&self.requests).request_table;
        request_table.usage()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Lock requests that wait must learn that the session has ended.
        self.end_session();
    }
}

impl Client for Guest {
    fn may_park(&self) -> bool {
        lock(&self.requests).request_table.may_park()
    }

    fn park(&self, ticket: &Ticket, gone: &Arc<Cancellation>) {
        self.with_request_table(|request_table, out| request_table.park(out, ticket, gone));
    }

    fn finish(&self, ticket: &Ticket, reply: ReplyBytes<'_>) -> bool {
        self.with_request_table(|request_table, out| request_table.finish(out, ticket, reply))
    }
}
