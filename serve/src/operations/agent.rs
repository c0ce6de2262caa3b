//! The ioctls of an agent in a guest, and which of its requests are replays.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{Change, DeliveryGuard, Errno, Event, FileType, Handle, Ino, Listener, Place, Result, SessionId};
use ferry_wire::events::{ANNOUNCE, INTERRUPT, MESSAGE_BYTES_MAX, WAIT};
use ferry_wire::fuse::{Operation, Reply};

use crate::active_request::DetachedRequest;
use crate::carrier::{FuseCarrier, Served};
use crate::events::{Queue, RENEWAL};
use crate::reply;
use crate::server::{Context, Server};
use crate::session::Session;

/// How long an agent waits at most. A guest's kernel cannot interrupt the request, so an agent that is killed ends only
/// then, and a mount can only be unmounted then.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// The most inodes that a client is told of after it has dropped its caches.
const REFRESHED_MAX: usize = 4096;

/// Queues what happens to what the client knows.
struct EventListener {
    session: Weak<Session>,
    queue: Arc<Queue>,
    /// The source publishes events, which say more than changes.
    has_events: bool,
}

impl Listener for EventListener {
    /// Changes by other sessions, and those that no session made if the source has no events for them.
    fn changed(&self, change: &Change, by: SessionId) {
        let Some(session) = self.session.upgrade().filter(|session| session.id() != by) else { return };
        let place = |ino: &Ino| Place { ino: *ino, name: None };
        let event = match change {
            _ if self.has_events && by == SessionId::default() => return,
            Change::Data { ino, .. } => Event::Modified(place(ino)),
            Change::Attr { ino } => Event::Attributes(place(ino)),
            _ if self.has_events => return,
            Change::Removed { dir, name, ino } => {
                let is_dir = session.kind_of(*ino) == Some(FileType::Directory);
                Event::Removed { dir: *dir, name: name.clone(), is_dir, ino: Some(*ino) }
            }
            Change::Entry { dir, name } | Change::Unsure { dir, name } if session.knows(*dir) => {
                session.name_now(*dir, name)
            }
            Change::Entry { .. } | Change::Unsure { .. } => return,
            _ => Event::Lost,
        };
        self.happened(&event, by);
    }

    fn happened(&self, event: &Event, by: SessionId) {
        if let Some(session) = self.session.upgrade()
            && session.id() != by
            && let Some(event) = self.queue.by_new_name(event).or_else(|| known(&session, event))
        {
            self.queue.push(event);
        }
    }

    fn wants_events(&self) -> bool {
        true
    }

    fn is_behind(&self) -> bool {
        false
    }

    fn when_delivered(&self, _: DeliveryGuard) {}
}

/// Returns the part of an event that concerns what the client knows.
fn known(session: &Session, event: &Event) -> Option<Event> {
    let is_known = match event {
        Event::Created { dir, .. } | Event::Removed { dir, .. } => session.knows(*dir),
        Event::Modified(place) | Event::Closed(place) | Event::Attributes(place) => session.knows(place.ino),
        Event::Renamed { from, to, is_dir, .. } => {
            let is_dir = *is_dir;
            return match (session.knows(from.0), session.knows(to.0)) {
                (true, true) => Some(event.clone()),
                (true, false) => Some(Event::Removed { dir: from.0, name: from.1.clone(), is_dir, ino: None }),
                (false, true) => Some(Event::Created { dir: to.0, name: to.1.clone(), is_dir, ino: None }),
                (false, false) => None,
            };
        }
        Event::Lost => true,
        // Sources that know of more kinds have no agents that do.
        _ => false,
    };
    is_known.then(|| event.clone())
}

/// Events were lost, and the client's kernel has dropped what is not in use: the rest may be old, and would be for minutes.
fn refresh(session: &Session, queue: &Queue) {
    for ino in session.inodes().into_iter().take(REFRESHED_MAX).chain([Ino::ROOT]) {
        let place = Place { ino, name: None };
        let is_file = session.kind_of(ino) == Some(FileType::RegularFile);
        queue.push(if is_file { Event::Modified(place) } else { Event::Attributes(place) });
    }
}

impl Server {
    /// Serves an agent's request; `None` if it is to be served as any other.
    pub(crate) fn agent_request(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        carrier: &mut impl FuseCarrier,
    ) -> Option<Result<Served>> {
        match *operation {
            Operation::Ioctl { command: WAIT | ANNOUNCE | INTERRUPT, .. } if !self.share.events => {
                Some(Err(Errno::NOTTY))
            }
            // Others could take the agent's events, or have the kernel see what did not happen.
            Operation::Ioctl { command: WAIT | ANNOUNCE | INTERRUPT, .. } if !cx.is_of_agent() => {
                Some(Err(Errno::PERM))
            }
            Operation::Ioctl { command: WAIT, handle, out_bytes_max, .. } => {
                let fits = cx.ino == Ino::ROOT && out_bytes_max as usize >= MESSAGE_BYTES_MAX;
                Some(if fits { self.wait_for_events(cx, handle, carrier) } else { Err(Errno::INVAL) })
            }
            Operation::Ioctl { command: ANNOUNCE, input, .. } => Some(self.announce(cx, input, carrier)),
            Operation::Ioctl { command: INTERRUPT, .. } => {
                cx.session.events.give_up();
                Some(Ok(cx.done(carrier, &Reply::Ioctl { result: 0, data: &[] })))
            }
            _ if cx.is_of_agent() => self.replay(cx, operation, carrier),
            _ => None,
        }
    }

    fn wait_for_events(&mut self, cx: &Context<'_>, handle: Handle, carrier: &mut impl FuseCarrier) -> Result<Served> {
        let changes = self.share.source.changes().ok_or(Errno::NOTTY)?;
        let is_leased = self.share.policy.is_leased();
        let has_events = self.share.source.features().events;
        let queue = cx.session.events.queue_or(is_leased, |queue| {
            changes.listen(EventListener { session: Arc::downgrade(cx.session), queue: Arc::clone(queue), has_events })
        });
        let interrupted = lock(&cx.session.events.replays).take_interrupted(cx.caller.pid);
        if let Some((number, event)) = interrupted {
            queue.put_back(number, event);
        }
        if queue.take_dropped() && is_leased {
            refresh(cx.session, queue);
        }
        // From here on every change is told.
        cx.session.events.lease.renew_by(handle);
        let (later, unique, negotiated) = (carrier.later(), cx.unique, *cx.session.negotiated());
        let request = DetachedRequest::new(self.active.take(), &self.share.metrics);
        let wait_max = if is_leased { RENEWAL } else { WAIT_MAX };
        queue.wait(Instant::now() + wait_max, move |outcome: Result<Vec<u8>>| {
            let reply = match &outcome {
                Ok(data) => Ok(Reply::Ioctl { result: 0, data }),
                Err(errno) => Err(*errno),
            };
            later(reply::to_bytes(unique, &negotiated, reply));
            request.end(outcome.map(|data| data.len()));
        });
        self.share.event_timer.watch(queue);
        Ok(Served::Parked)
    }
}
