//! The requests of a client in flight. One lock covers them and the outgoing replies, so that a tag is free exactly
//! when its reply is sent, and the reply to a flush follows the flushed request's.

use std::collections::HashMap;
use std::sync::Arc;

use ferry_vfs::{Cancellation, Errno};
use ferry_wire::ninep::{Reply, Tag};

use crate::clients::{Charge, Resource};
use crate::session::Session;

/// The maximum number of waiting lock requests of one connection. Further ones get "blocked", and Linux retries half a
/// minute later.
const PARKED_MAX: usize = 4096;
/// The maximum number of waiting flushes of one connection; a client needs at most one per request.
const FLUSHES_MAX: usize = 4096;

/// A reply as a message.
#[derive(Debug)]
pub(crate) enum ReplyBytes<'a> {
    /// In memory that the caller keeps.
    Borrowed(&'a [u8]),
    /// The first bytes of memory that the sender may exchange for another buffer.
    Exchanged(&'a mut Vec<u8>, usize),
}

impl ReplyBytes<'_> {
    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Borrowed(reply) => reply,
            Self::Exchanged(memory, bytes) => memory.get(..*bytes).unwrap_or_default(),
        }
    }
}

/// The destination of replies. The reply to a flush comes after that of the flushed request.
pub(crate) trait Outlet {
    /// Sends the reply of the request with this token.
    fn send(&mut self, token: u64, reply: ReplyBytes<'_>);

    /// The request with this token gets no reply.
    fn discard(&mut self, token: u64);
}

/// A request in flight.
#[derive(Debug)]
struct ActiveRequest {
    /// The carrier's token.
    token: u64,
    /// Distinguishes it from other requests with the same tag.
    number: u64,
    /// Flushes that wait for it.
    flushes: Vec<Tag>,
    /// It waits for a lock; set when the request is cancelled.
    gone: Option<Arc<Cancellation>>,
    /// It is a flush itself.
    is_flush: bool,
    /// A waiting request is charged to its client's account.
    charge: Option<Charge>,
}

/// A request that may be served.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) tag: Tag,
    pub(crate) number: u64,
}

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RejectedRequest {
    /// The client gets an error.
    Error(Errno),
    /// No reply would reach the sender.
    TagInUse,
}

/// See the module.
#[derive(Default)]
pub(crate) struct RequestTable {
    requests: HashMap<Tag, ActiveRequest>,
    next_number: u64,
    parked: usize,
    flushes: usize,
    session: Option<Arc<Session>>,
    /// Requests that wait were cancelled.
    has_cancelled: bool,
}

impl RequestTable {
    pub(crate) fn session(&self) -> Option<&Arc<Session>> {
        self.session.as_ref()
    }

    pub(crate) fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Returns the numbers of fids, requests in flight, and those of them that wait for a lock.
    pub(crate) fn usage(&self) -> (usize, usize, usize) {
        let session = self.session.as_ref();
        let for_events = session.is_some_and(|session| session.waits_for_events());
        let for_locks = self.parked.saturating_sub(for_events.into());
        (session.map_or(0, |session| session.fids()), self.requests(), for_locks)
    }

    /// Registers a request.
    pub(crate) fn register(&mut self, token: u64, tag: Tag) -> Result<(Ticket, Arc<Session>), RejectedRequest> {
        if self.requests.contains_key(&tag) {
            return Err(RejectedRequest::TagInUse);
        }
        if tag == Tag::NONE {
            return Err(RejectedRequest::Error(Errno::INVAL));
        }
        // There is no session yet.
        let session = Arc::clone(self.session.as_ref().ok_or(RejectedRequest::Error(Errno::PROTO))?);
        Ok((self.insert(token, tag, false), session))
    }

    fn insert(&mut self, token: u64, tag: Tag, is_flush: bool) -> Ticket {
        let number = self.next_number;
        self.next_number += 1;
        self.requests
            .insert(tag, ActiveRequest { token, number, flushes: Vec::new(), gone: None, is_flush, charge: None });
        Ticket { tag, number }
    }

    /// Begins a session, or none, and drops requests in flight. Returns the last one, to be dropped without a lock.
    pub(crate) fn begin(&mut self, out: &mut dyn Outlet, session: Option<Arc<Session>>) -> Option<Arc<Session>> {
        for (_, asked) in self.requests.drain() {
            if let Some(gone) = &asked.gone {
                gone.cancel();
                self.has_cancelled = true;
            }
            // The others are still being served, and end without a reply.
            if asked.gone.is_some() || asked.is_flush {
                out.discard(asked.token);
            }
        }
        (self.parked, self.flushes) = (0, 0);
        std::mem::replace(&mut self.session, session)
    }

    /// Whether requests that wait were cancelled since the last call.
    pub(crate) fn take_cancelled(&mut self) -> bool {
        std::mem::take(&mut self.has_cancelled)
    }

    /// Returns whether another lock request may wait.
    pub(crate) fn may_park(&self) -> bool {
        self.parked < PARKED_MAX && self.has_room()
    }

    /// Returns whether the client may have another waiting request, with all its connections.
    fn has_room(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.holder.has_room(Resource::Entries))
    }

    fn charge(&self) -> Option<Charge> {
        self.session.as_ref().and_then(|session| session.holder.charge(Resource::Entries, 1).ok())
    }

    /// Records that a request waits for a lock, unless it has a reply or was flushed meanwhile.
    pub(crate) fn park(&mut self, out: &mut dyn Outlet, ticket: &Ticket, gone: &Arc<Cancellation>) {
        let charge = self.charge();
        let Some(asked) = self.requests.get_mut(&ticket.tag).filter(|asked| asked.number == ticket.number) else {
            return;
        };
        // A lock that is being granted has its reply before that to the flush.
        if !asked.flushes.is_empty() && gone.cancel() {
            out.discard(asked.token);
            self.close(out, ticket.tag);
            return;
        }
        (asked.gone, asked.charge) = (Some(Arc::clone(gone)), charge);
        self.parked += 1;
    }

    /// Records that a request does not wait any more and is served; returns false if it was cancelled.
    pub(crate) fn unpark(&mut self, ticket: &Ticket) -> bool {
        let asked = self.requests.get_mut(&ticket.tag).filter(|asked| asked.number == ticket.number);
        let is_there = asked.map(|asked| (asked.gone, asked.charge) = (None, None)).is_some();
        self.parked -= usize::from(is_there);
        is_there
    }

    /// Flushes `old`: cancels a request that waits for a lock, without a reply; others' replies come first (flush(5)).
    pub(crate) fn flush(
        &mut self,
        out: &mut dyn Outlet,
        token: u64,
        tag: Tag,
        old: Tag,
    ) -> Result<(), RejectedRequest> {
        if self.requests.contains_key(&tag) {
            return Err(RejectedRequest::TagInUse);
        }
        let is_full = self.flushes >= FLUSHES_MAX || !self.has_room();
        match self.requests.get_mut(&old) {
            None => reply(out, token, tag, &Reply::Flush),
            Some(asked) if asked.gone.is_none() && is_full => {
                return Err(RejectedRequest::Error(Errno::NOBUFS));
            }
            Some(asked) => {
                asked.flushes.push(tag);
                let (gone, waiting) = (asked.gone.clone(), asked.token);
                self.flushes += 1;
                self.insert(token, tag, true);
                let charge = self.charge();
                if let Some(flush) = self.requests.get_mut(&tag) {
                    flush.charge = charge;
                }
                // A lock that is being granted has its reply first, as others do.
                if gone.is_some_and(|gone| gone.cancel()) {
                    self.has_cancelled = true;
                    out.discard(waiting);
                    self.close(out, old);
                }
            }
        }
        Ok(())
    }

    /// Sends the reply of a request in flight; returns whether it was in flight.
    pub(crate) fn finish(&mut self, out: &mut dyn Outlet, ticket: &Ticket, reply: ReplyBytes<'_>) -> bool {
        let Some(asked) = self.requests.get(&ticket.tag).filter(|asked| asked.number == ticket.number) else {
            return false;
        };
        out.send(asked.token, reply);
        self.close(out, ticket.tag);
        true
    }

    /// Records that the reply of a request is sent separately, if it is in flight; returns whether it was.
    pub(crate) fn end(&mut self, out: &mut dyn Outlet, ticket: &Ticket) -> bool {
        let current = self.requests.get(&ticket.tag).is_some_and(|asked| asked.number == ticket.number);
        if current {
            self.close(out, ticket.tag);
        }
        current
    }

    /// Removes a request, and replies to the flushes that waited for it, and to those that waited for them.
    fn close(&mut self, out: &mut dyn Outlet, tag: Tag) {
        let mut ended = vec![tag];
        while let Some(tag) = ended.pop() {
            let Some(asked) = self.requests.remove(&tag) else { continue };
            self.parked -= usize::from(asked.gone.is_some());
            self.flushes -= usize::from(asked.is_flush);
            for flush in asked.flushes.into_iter().rev() {
                ended.push(flush);
            }
            if asked.is_flush {
                reply(out, asked.token, tag, &Reply::Flush);
            }
        }
    }
}

/// Sends a short reply.
pub(crate) fn reply(out: &mut dyn Outlet, token: u64, tag: Tag, reply: &Reply<'_>) {
    let mut message = Vec::new();
    reply.encode(tag, &mut message);
    out.send(token, ReplyBytes::Borrowed(&message));
}
