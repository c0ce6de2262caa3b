//! Tevents: sends Ferry's own clients the changes that others make.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_vfs::{Cancellation, Errno, Result};
use ferry_wire::ninep::{Fid, Reply};

use super::{Context, ReplyPlace};
use crate::request_table::ReplyBytes;

/// The longest wait of a request: a client that is silent for longer than its own time limit counts as gone.
const WAIT_MAX: Duration = Duration::from_secs(30);

impl Context<'_> {
    /// Replies after an event or a timeout. No thread waits for it.
    pub(super) fn events(&self, fid: Fid, acknowledged: u64, wait_ms: u32) -> Result<ReplyPlace> {
        let file = self.session.get(fid)?;
        let changes = self.share.source.changes().filter(|_| self.session.has_events).ok_or(Errno::OPNOTSUPP)?;
        if file.user.is_bound() {
            return Err(Errno::ACCESS);
        }
        if !self.client.may_park() {
            return Err(Errno::NOBUFS);
        }
        let queue = self.session.events(changes);
        queue.acknowledge(acknowledged);
        // The session owns the queue, and the client the session; the reply must keep neither alive.
        let (client, told, ticket) = (Arc::downgrade(&self.client), Arc::downgrade(queue), self.ticket.clone());
        let until = Instant::now() + WAIT_MAX.min(Duration::from_millis(wait_ms.into()));
        queue.wait(0, until, move |outcome| {
            let mut reply = Vec::new();
            match &outcome {
                Ok(message) => Reply::Events(message),
                Err(errno) => Reply::Error(*errno),
            }
            .encode(ticket.tag, &mut reply);
            if !client.upgrade().is_some_and(|client| client.finish(&ticket, ReplyBytes::Borrowed(&reply)))
                && let (Ok(_), Some(queue)) = (outcome, told.upgrade())
            {
                // It was flushed.
                queue.lose();
            }
        });
        self.client.park(self.ticket, &Arc::<Cancellation>::default());
        self.share.event_timer.watch(queue);
        Ok(ReplyPlace::Parked)
    }
}
