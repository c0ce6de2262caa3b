//! The ioctls of an agent in a guest, and which of its requests are replays.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ferry_vfs::{Change, DeliveryGuard, Errno, Event, Ino, Listener, Place, Result, SessionId};
use ferry_wire::events::{ANNOUNCE, INTERRUPT, MESSAGE_BYTES_MAX, WAIT};
use ferry_wire::fuse::{Operation, Reply};

use crate::active_request::DetachedRequest;
use crate::carrier::{FuseCarrier, Served};
use crate::events::Queue;
use crate::reply;
use crate::server::{Context, Server};
use crate::session::Session;

/// How long an agent waits at most. A guest's kernel cannot interrupt the request, so an agent that is killed ends only
/// then, and a mount can only be unmounted then.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Queues what happens to what the client knows.
struct EventListener {
    session: Weak<Session>,
    queue: Arc<Queue>,
}

impl Listener for EventListener {
    /// Changes by other sessions. What other processes of the host change comes as events.
    fn changed(&self, change: &Change, by: SessionId) {
        let place = |ino: &Ino| Place { ino: *ino, name: None };
        let event = match change {
            _ if by == SessionId::default() => return,
            Change::Data { ino, .. } => Event::Modified(place(ino)),
            Change::Attr { ino } => Event::Attributes(place(ino)),
            _ => return,
        };
        self.happened(&event, by);
    }

    fn happened(&self, event: &Event, by: SessionId) {
        if let Some(session) = self.session.upgrade()
            && session.id() != by
            && let Some(event) = known(&session, event)
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
                (false, true) => Some(Event::Created { dir: to.0, name: to.1.clone(), is_dir }),
                (false, false) => None,
            };
        }
        Event::Lost => true,
        // Sources that know of more kinds have no agents that do.
        _ => false,
    };
    is_known.then(|| event.clone())
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
            Operation::Ioctl { command: WAIT, out_bytes_max, .. } => {
                let fits = cx.ino == Ino::ROOT && out_bytes_max as usize >= MESSAGE_BYTES_MAX;
                Some(if fits { self.wait_for_events(cx, carrier) } else { Err(Errno::INVAL) })
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

    fn wait_for_events(&mut self, cx: &Context<'_>, carrier: &mut impl FuseCarrier) -> Result<Served> {
        let changes = self.share.source.changes().ok_or(Errno::NOTTY)?;
        let queue = cx.session.events.queue_or(|queue| {
            changes.listen(EventListener { session: Arc::downgrade(cx.session), queue: Arc::clone(queue) })
        });
        let (later, unique, negotiated) = (carrier.later(), cx.unique, *cx.session.negotiated());
        let request = DetachedRequest::new(self.active.take(), &self.share.metrics);
        queue.wait(Instant::now() + WAIT_MAX, move |outcome: Result<Vec<u8>>| {
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
