//! The ioctls of an agent in a guest, and which of its requests are replays.

use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Event, FileType, Handle, Ino, Place, Result};
use ferry_wire::events::{ANNOUNCE, INTERRUPT, MESSAGE_BYTES_MAX, WAIT};
use ferry_wire::fuse::{Operation, Reply};

use crate::active_request::DetachedRequest;
use crate::carrier::{FuseCarrier, ServeOutcome};
use crate::events::{Queue, RENEWAL, subscribe};
use crate::reply;
use crate::server::{Context, Server};
use crate::session::Session;

/// The longest wait of an agent without a lease ([`RENEWAL`] otherwise). A guest's kernel cannot interrupt the request, so a killed agent ends, and its mount
/// can be unmounted, only after this time.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// The most inodes for which events are sent after a client has dropped its caches.
const REFRESHED_MAX: usize = 4096;

/// Queues events for the inodes that the client still knows after a loss. Its kernel has dropped only what is not in
/// use; the rest may be stale for minutes.
fn refresh(session: &Session, queue: &Queue) {
    let inodes = session.inodes().into_iter().take(REFRESHED_MAX).chain([Ino::ROOT]);
    queue.refresh(inodes.map(|ino| {
        let place = Place { ino, name: None };
        let is_file = session.kind_of(ino) == Some(FileType::RegularFile);
        if is_file { Event::Modified(place) } else { Event::Attributes(place) }
    }));
}

impl Server {
    /// Serves an agent's request; returns `None` if it must be served as any other.
    pub(crate) fn agent_request(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        carrier: &mut impl FuseCarrier,
    ) -> Option<Result<ServeOutcome>> {
        match *operation {
            Operation::Ioctl { command: WAIT | ANNOUNCE | INTERRUPT, .. } if !self.share.events => {
                Some(Err(Errno::NOTTY))
            }
            // Other users could take the agent's events, or make the kernel raise false ones.
            Operation::Ioctl { command: WAIT | ANNOUNCE | INTERRUPT, .. } if !cx.is_of_agent() => {
                Some(Err(Errno::PERM))
            }
            Operation::Ioctl { command: WAIT, handle, out_bytes_max, .. } => {
                let fits = cx.ino == Ino::ROOT && out_bytes_max as usize >= MESSAGE_BYTES_MAX;
                Some(if fits { self.wait_for_events(cx, handle, carrier) } else { Err(Errno::INVAL) })
            }
            Operation::Ioctl { command: ANNOUNCE, input, .. } => Some(self.announce(cx, input, carrier)),
            Operation::Ioctl { command: INTERRUPT, .. } => {
                cx.session.events.interrupt_agent();
                Some(Ok(cx.done(carrier, &Reply::Ioctl { result: 0, data: &[] })))
            }
            _ if cx.is_of_agent() => self.replay(cx, operation, carrier),
            _ => None,
        }
    }

    fn wait_for_events(
        &mut self,
        cx: &Context<'_>,
        handle: Handle,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        let changes = self.share.source.changes().ok_or(Errno::NOTTY)?;
        let is_leased = self.share.policy.is_leased();
        let queue = cx.session.events.queue_or(is_leased, |queue| subscribe(changes, cx.session, queue));
        let interrupted = lock(&cx.session.events.replays).take_interrupted(cx.caller.pid);
        if let Some((number, event)) = interrupted {
            queue.put_back(number, event);
        }
        if queue.take_dropped(cx.caller.pid) && is_leased {
            refresh(cx.session, queue);
        }
        // From here on every change is queued.
        cx.session.events.lease.renew_by(handle);
        let (later, unique, negotiated) = (carrier.later(), cx.unique, *cx.session.negotiated());
        let request = DetachedRequest::new(self.active.take(), &self.share.metrics);
        let wait_max = if is_leased { RENEWAL } else { WAIT_MAX };
        queue.wait(cx.caller.pid, Instant::now() + wait_max, move |outcome: Result<Vec<u8>>| {
            let reply = match &outcome {
                Ok(data) => Ok(Reply::Ioctl { result: 0, data }),
                Err(errno) => Err(*errno),
            };
            later(reply::to_bytes(unique, &negotiated, reply));
            request.end(outcome.map(|data| data.len()));
        });
        self.share.event_timer.watch(queue);
        Ok(ServeOutcome::Parked)
    }
}
