//! One front end's guest: its session, its requests under way, and how they are answered by other threads.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};

use ferry_vfs::Errno;
use ferry_vhost::Port;
use ferry_wire::ninep::{Frame, HEADER_BYTES, MSIZE_MIN, Tag, kind};

use crate::carrier::Client;
use crate::clients::{Clients, ConnectionAccount, Resource};
use crate::hub::lock;
use crate::request_table::{Outlet, RejectedRequest, RequestTable, Ticket};
use crate::session::Session;
use crate::shrink::Trimmer;

/// A message whose head was read, and what is known of it then.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) head: [u8; HEADER_BYTES],
    /// The longest message that is agreed on, in bytes.
    pub(super) msize: u32,
    pub(super) registered: Result<(Ticket, Arc<Session>), RejectedRequest>,
}

/// A chain that the worker has taken.
#[derive(Debug, Default)]
struct Taken {
    /// Until it is served.
    arrival: Option<Arrival>,
    /// Until it goes back to the driver with its answer.
    ticket: Option<Ticket>,
}

#[derive(Debug, Default)]
struct Requests {
    request_table: RequestTable,
    /// By the low half of the chains' tokens.
    taken: Vec<Taken>,
}

impl Requests {
    fn taken(&mut self, token: u64) -> &mut Taken {
        let index = slot(token);
        if self.taken.len() <= index {
            self.taken.resize_with(index + 1, Taken::default);
        }
        &mut self.taken[index]
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Guest {
    holder: Arc<ConnectionAccount>,
    requests: Mutex<Requests>,
    port: OnceLock<Arc<Port<Vec<u8>>>>,
    trimmer: Arc<Trimmer>,
}

/// Tokens count slots in their low half.
pub(super) fn slot(token: u64) -> usize {
    usize::try_from(token & u64::from(u32::MAX)).unwrap_or(0)
}

/// The mailbox of the worker, who alone touches chains.
struct MailboxOutlet<'a>(Option<&'a Port<Vec<u8>>>);

impl Outlet for MailboxOutlet<'_> {
    fn send(&mut self, token: u64, reply: &[u8]) {
        if let Some(port) = self.0 {
            port.reply(token, reply.to_vec());
        }
    }

    /// The driver is to have its chain again. Linux takes one without a byte in it for what it is: no answer.
    fn discard(&mut self, token: u64) {
        self.send(token, &[]);
    }
}

impl Guest {
    pub(super) fn new(trimmer: Arc<Trimmer>) -> Self {
        // Nobody else's: a device has one guest.
        let holder = Clients::alone();
        Self { holder, requests: Mutex::default(), port: OnceLock::new(), trimmer }
    }

    /// On whose account the guest's sessions are.
    pub(super) fn holder(&self) -> &Arc<ConnectionAccount> {
        &self.holder
    }

    /// Has replies of other threads go this way, from now on.
    pub(super) fn answers_by(&self, port: Arc<Port<Vec<u8>>>) {
        // There is one worker, and so one port.
        let _ = self.port.set(port);
    }

    fn with_request_table<T>(&self, act: impl FnOnce(&mut RequestTable, &mut dyn Outlet) -> T) -> T {
        act(&mut lock(&self.requests).request_table, &mut MailboxOutlet(self.port.get().map(Arc::as_ref)))
    }

    /// Begins a session, and ends the one before it.
    pub(super) fn begin(&self, session: Option<Arc<Session>>) {
        let before = self.with_request_table(|request_table, out| request_table.begin(out, session));
        // Here, where no lock is held.
        drop(before);
        self.note_held();
    }

    /// How much the guest holds, in things of a few hundred bytes.
    pub(super) fn held(&self) -> usize {
        self.holder.holds(Resource::Entries)
    }

    /// Has memory given back if the guest holds much less than before.
    pub(super) fn note_held(&self) {
        self.trimmer.note(self.held());
    }

    /// Gives back what the guest held.
    pub(super) fn end_session(&self) {
        self.begin(None);
    }

    /// The worker has taken a chain, and read the head of the message in it, if there is one. From now on the request is under way, though
    /// it may be served later and by another thread: a flush that comes next is to find it.
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
        *requests.taken(token) = Taken { arrival, ticket };
    }

    /// What [`Self::accept`] found in the chain that is to be served now.
    pub(super) fn arrival(&self, token: u64) -> Option<Arrival> {
        lock(&self.requests).taken(token).arrival.take()
    }

    /// The worker is about to give a chain back to the driver; returns whether anybody still waits for the reply. Flushes that
    /// waited for it are answered by mail, and so behind it.
    pub(super) fn complete(&self, token: u64) -> bool {
        let mut requests = lock(&self.requests);
        let Some(ticket) = requests.taken(token).ticket.take() else { return true };
        requests.request_table.end(&mut MailboxOutlet(self.port.get().map(Arc::as_ref)), &ticket)
    }

    /// A flush, which is answered by mail: what it ends goes out before it.
    pub(super) fn flush(&self, token: u64, tag: Tag, old: Tag) -> Result<(), RejectedRequest> {
        self.with_request_table(|request_table, out| request_table.flush(out, token, tag, old))
    }

    /// Fids, and requests under way.
    pub(super) fn usage(&self) -> (usize, usize) {
        let request_table = &lock(&self.requests).request_table;
        (request_table.session().map_or(0, |session| session.fids()), request_table.requests())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Whoever waits for a lock is to be told that nobody wants it.
        self.end_session();
    }
}

impl Client for Guest {
    fn may_park(&self) -> bool {
        lock(&self.requests).request_table.may_park()
    }

    fn park(&self, ticket: &Ticket, gone: &Arc<AtomicBool>) {
        self.with_request_table(|request_table, out| request_table.park(out, ticket, gone));
    }

    fn finish(&self, ticket: &Ticket, reply: &[u8]) -> bool {
        self.with_request_table(|request_table, out| request_table.finish(out, ticket, reply))
    }
}
