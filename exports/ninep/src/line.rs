//! The requests of a connection that are under way, and the replies on their way out. One lock is around both, so that
//! a tag is free at the very moment when its reply goes out, and a flush is answered behind what it flushed.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ferry_vfs::Errno;
use ferry_wire::ninep::{Reply, Tag};
use rustix::net::{SendFlags, send};

use crate::hub::Hub;
use crate::session::Session;

/// Locks that one connection may wait for. Further ones are answered "blocked", and Linux asks again, half a minute
/// later.
const PARKED_MAX: usize = 4096;
/// Flushes that wait for the end of what they flush, on one connection; a client has no use for more than one for each
/// of its requests.
const FLUSHES_MAX: usize = 4096;

/// A request under way.
#[derive(Debug)]
struct Asked {
    /// Tells it apart from others that have its tag earlier or later.
    number: u64,
    /// Flushes that are to be answered behind it.
    flushes: Vec<Tag>,
    /// It waits for a lock; to be set when nobody wants that any more.
    gone: Option<Arc<AtomicBool>>,
    /// It is a flush itself.
    is_flush: bool,
}

/// A request that may be served.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) tag: Tag,
    pub(crate) number: u64,
}

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The client is to be told so.
    Error(Errno),
    /// No answer would reach the one who asked.
    TagInUse,
}

/// What sending left to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// Something could not be sent: the socket is to be watched for room.
    pub(crate) blocked: bool,
    /// The connection is of no use any more, and why.
    pub(crate) broken: Option<&'static str>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Line {
    requests: HashMap<Tag, Asked>,
    next_number: u64,
    parked: usize,
    flushes: usize,
    session: Option<Arc<Session>>,
    /// Replies that the client does not take yet, and how much of the first it has.
    queue: VecDeque<Vec<u8>>,
    sent_of_first: usize,
    queued_bytes: usize,
    /// Since when nothing could be sent.
    blocked_since: Option<Instant>,
    broken: Option<&'static str>,
}

impl Line {
    pub(crate) fn session(&self) -> Option<&Arc<Session>> {
        self.session.as_ref()
    }

    pub(crate) fn requests(&self) -> usize {
        self.requests.len()
    }

    pub(crate) fn blocked_since(&self) -> Option<Instant> {
        self.blocked_since
    }

    pub(crate) fn state(&self) -> Sent {
        Sent { blocked: self.blocked_since.is_some(), broken: self.broken }
    }

    /// A request comes in.
    pub(crate) fn register(&mut self, tag: Tag) -> Result<(Ticket, Arc<Session>), Refused> {
        if self.requests.contains_key(&tag) {
            return Err(Refused::TagInUse);
        }
        if tag == Tag::NONE {
            return Err(Refused::Error(Errno::INVAL));
        }
        // Nothing was agreed on.
        let session = Arc::clone(self.session.as_ref().ok_or(Refused::Error(Errno::PROTO))?);
        Ok((self.insert(tag, false), session))
    }

    fn insert(&mut self, tag: Tag, is_flush: bool) -> Ticket {
        let number = self.next_number;
        self.next_number += 1;
        self.requests.insert(tag, Asked { number, flushes: Vec::new(), gone: None, is_flush });
        Ticket { tag, number }
    }

    /// Begins a session, or none. What was under way is not answered any more; the session before is handed out, to be
    /// dropped when no lock is held.
    pub(crate) fn begin(&mut self, session: Option<Arc<Session>>) -> Option<Arc<Session>> {
        for (_, asked) in self.requests.drain() {
            if let Some(gone) = asked.gone {
                gone.store(true, Ordering::Release);
            }
        }
        (self.parked, self.flushes) = (0, 0);
        std::mem::replace(&mut self.session, session)
    }

    /// Whether one lock more may be waited for.
    pub(crate) fn may_park(&self) -> bool {
        self.parked < PARKED_MAX
    }

    /// A request waits for a lock, unless it was answered or flushed meanwhile.
    pub(crate) fn park(&mut self, out: &mut Out<'_>, ticket: &Ticket, gone: &Arc<AtomicBool>) {
        let Some(asked) = self.requests.get_mut(&ticket.tag).filter(|asked| asked.number == ticket.number) else {
            return;
        };
        if !asked.flushes.is_empty() {
            gone.store(true, Ordering::Release);
            self.close(out, ticket.tag);
            return;
        }
        asked.gone = Some(Arc::clone(gone));
        self.parked += 1;
    }

    /// The client wants no answer to `old` any more. One that waits for a lock is given up and never answered; others
    /// have begun, so they are answered, and the flush behind them (flush(5)).
    pub(crate) fn flush(&mut self, out: &mut Out<'_>, tag: Tag, old: Tag) -> Result<(), Refused> {
        if self.requests.contains_key(&tag) {
            return Err(Refused::TagInUse);
        }
        let flushes = self.flushes;
        match self.requests.get_mut(&old) {
            None => self.reply(out, tag, &Reply::Flush),
            Some(asked) if asked.gone.is_none() && flushes >= FLUSHES_MAX => {
                return Err(Refused::Error(Errno::NOBUFS));
            }
            Some(asked) => {
                asked.flushes.push(tag);
                let gone = asked.gone.clone();
                self.flushes += 1;
                self.insert(tag, true);
                if let Some(gone) = gone {
                    gone.store(true, Ordering::Release);
                    self.close(out, old);
                }
            }
        }
        Ok(())
    }

    /// Sends the answer of a request that is still under way; answers whether it was.
    pub(crate) fn finish(&mut self, out: &mut Out<'_>, ticket: &Ticket, reply: &[u8]) -> bool {
        let current = self.requests.get(&ticket.tag).is_some_and(|asked| asked.number == ticket.number);
        if current {
            self.send(out, reply);
            self.close(out, ticket.tag);
        }
        current
    }

    /// Forgets a request, and answers the flushes that waited for its end, and those that waited for theirs.
    fn close(&mut self, out: &mut Out<'_>, tag: Tag) {
        let mut ended = vec![tag];
        while let Some(tag) = ended.pop() {
            let Some(asked) = self.requests.remove(&tag) else { continue };
            self.parked -= usize::from(asked.gone.is_some());
            self.flushes -= usize::from(asked.is_flush);
            for flush in asked.flushes.into_iter().rev() {
                ended.push(flush);
            }
            if asked.is_flush {
                self.reply(out, tag, &Reply::Flush);
            }
        }
    }

    /// Sends a short reply.
    pub(crate) fn reply(&mut self, out: &mut Out<'_>, tag: Tag, reply: &Reply<'_>) {
        let mut message = Vec::new();
        reply.encode(tag, &mut message);
        self.send(out, &message);
    }

    /// Sends a reply, or as much as the client takes now; keeps the rest.
    fn send(&mut self, out: &mut Out<'_>, reply: &[u8]) {
        if self.broken.is_some() {
            return;
        }
        let sent = if self.queue.is_empty() { self.push(out, reply) } else { 0 };
        let rest = reply.get(sent..).unwrap_or_default();
        if rest.is_empty() || self.broken.is_some() {
            return;
        }
        if !out.hub.hold(rest.len()) {
            self.give_up(out, "it does not take its replies, and others need the memory");
            return;
        }
        self.queued_bytes += rest.len();
        self.queue.push_back(rest.to_vec());
        self.blocked_since.get_or_insert_with(Instant::now);
    }

    /// Hands bytes to the socket; answers how many it took.
    fn push(&mut self, out: &mut Out<'_>, bytes: &[u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            match send(out.stream, &bytes[done..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    self.give_up(out, "");
                    break;
                }
            }
        }
        done
    }

    /// The socket has room again.
    pub(crate) fn drain(&mut self, out: &mut Out<'_>) {
        while self.broken.is_none()
            && let Some(first) = self.queue.pop_front()
        {
            let count = self.push(out, &first[self.sent_of_first..]);
            if count > 0 {
                self.blocked_since = Some(Instant::now());
            }
            self.sent_of_first += count;
            if self.sent_of_first < first.len() {
                self.queue.push_front(first);
                return;
            }
            // What is in memory counts until it is gone as a whole.
            let bytes = first.len();
            self.sent_of_first = 0;
            self.queued_bytes = self.queued_bytes.saturating_sub(bytes);
            out.hub.let_go(bytes);
        }
        if self.broken.is_none() {
            self.blocked_since = None;
        }
    }

    /// Sends nothing any more.
    pub(crate) fn give_up(&mut self, out: &mut Out<'_>, reason: &'static str) {
        self.broken.get_or_insert(reason);
        self.queue = VecDeque::new();
        self.sent_of_first = 0;
        out.hub.let_go(std::mem::take(&mut self.queued_bytes));
        self.blocked_since = None;
    }
}

/// Where replies go.
pub(crate) struct Out<'a> {
    pub(crate) hub: &'a Hub,
    pub(crate) stream: BorrowedFd<'a>,
}
