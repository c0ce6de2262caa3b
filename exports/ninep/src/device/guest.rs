//! One front end's guest: its session, its requests under way, and how they are answered by other threads.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};

use ferry_vhost::Port;
use ferry_wire::ninep::Tag;

use crate::carrier::Client;
use crate::clients::{Clients, Holder};
use crate::hub::lock;
use crate::line::{Line, Outlet, Refused, Ticket};
use crate::session::Session;

/// See the module.
#[derive(Debug)]
pub(crate) struct Guest {
    holder: Arc<Holder>,
    line: Mutex<Line>,
    port: OnceLock<Arc<Port<Vec<u8>>>>,
}

/// The mailbox of the worker, who alone touches chains.
struct ByMail<'a>(Option<&'a Port<Vec<u8>>>);

impl Outlet for ByMail<'_> {
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
    pub(super) fn new() -> Self {
        // Nobody else's: a device has one guest.
        let holder = Clients::alone();
        Self { holder, line: Mutex::default(), port: OnceLock::new() }
    }

    /// On whose account the guest's sessions are.
    pub(super) fn holder(&self) -> &Arc<Holder> {
        &self.holder
    }

    /// Has replies of other threads go this way, from now on.
    pub(super) fn answers_by(&self, port: Arc<Port<Vec<u8>>>) {
        // There is one worker, and so one port.
        let _ = self.port.set(port);
    }

    fn with_line<T>(&self, act: impl FnOnce(&mut Line, &mut dyn Outlet) -> T) -> T {
        act(&mut lock(&self.line), &mut ByMail(self.port.get().map(Arc::as_ref)))
    }

    /// Begins a session, and ends the one before it.
    pub(super) fn begin(&self, session: Option<Arc<Session>>) {
        let before = self.with_line(|line, out| line.begin(out, session));
        // Here, where no lock is held.
        drop(before);
    }

    /// Gives back what the guest held.
    pub(super) fn end_session(&self) {
        self.begin(None);
    }

    /// The longest message that is agreed on, in bytes.
    pub(super) fn msize(&self) -> Option<u32> {
        lock(&self.line).session().map(|session| session.msize)
    }

    pub(super) fn register(&self, token: u64, tag: Tag) -> Result<(Ticket, Arc<Session>), Refused> {
        lock(&self.line).register(token, tag)
    }

    /// A flush, which is answered by mail: what it ends goes out before it.
    pub(super) fn flush(&self, token: u64, tag: Tag, old: Tag) -> Result<(), Refused> {
        self.with_line(|line, out| line.flush(out, token, tag, old))
    }

    /// The worker is about to give a request's chain back; answers whether anybody still waits for the reply.
    pub(super) fn end(&self, ticket: &Ticket) -> bool {
        self.with_line(|line, out| line.end(out, ticket))
    }

    /// Fids, and requests under way.
    pub(super) fn usage(&self) -> (usize, usize) {
        let line = lock(&self.line);
        (line.session().map_or(0, |session| session.fids()), line.requests())
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
        lock(&self.line).may_park()
    }

    fn park(&self, ticket: &Ticket, gone: &Arc<AtomicBool>) {
        self.with_line(|line, out| line.park(out, ticket, gone));
    }

    fn finish(&self, ticket: &Ticket, reply: &[u8]) -> bool {
        self.with_line(|line, out| line.finish(out, ticket, reply))
    }
}
