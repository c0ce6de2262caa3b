//! Translates a source's changes and events for the queue of one client.

use std::sync::{Arc, Weak};

use ferry_vfs::{
    Caller, Change, Changes, DeliveryGuard, Event, FileSystem, FileType, Ino, Listener, NameBuf, Place, SessionId,
    Subscription,
};
use ferry_wire::events::Kind;

use super::queue::Queue;

/// A client that receives the changes that others make to the inodes that it knows.
pub trait EventClient: Send + Sync + 'static {
    /// Whether it replays events. An agent gets the events of a new file by name even if it knows the inode, because
    /// it has not created the name yet. Other clients also get invalidations.
    const IS_AGENT: bool;

    /// Returns the client's session, whose own changes are left out.
    fn session(&self) -> SessionId;

    /// Returns the source.
    fn source(&self) -> &dyn FileSystem;

    /// Returns the client's number of an inode, and whether it is a directory as far as that is known; `None` if the
    /// client does not know the inode.
    fn known(&self, ino: Ino) -> Option<(Ino, bool)>;
}

/// Fills a client's queue until the subscription is dropped.
pub fn subscribe<C: EventClient>(changes: &Changes, client: &Arc<C>, queue: &Arc<Queue>) -> Subscription {
    let has_events = client.source().features().events;
    changes.listen(EventListener { client: Arc::downgrade(client), queue: Arc::clone(queue), has_events })
}

/// Queues the events of the inodes that the client knows.
struct EventListener<C> {
    client: Weak<C>,
    queue: Arc<Queue>,
    /// The source publishes events, which have more detail than changes.
    has_events: bool,
}

impl<C: EventClient> Listener for EventListener<C> {
    /// Queues changes by other sessions, and those without a session if the source publishes no events.
    fn changed(&self, change: &Change, by: SessionId) {
        let Some(client) = self.client.upgrade().filter(|client| client.session() != by) else { return };
        let place = |ino: &Ino| Place { ino: *ino, name: None };
        let event = match change {
            _ if self.has_events && by == SessionId::default() => return self.stale(&*client, change),
            Change::Data { ino, .. } => Event::Modified(place(ino)),
            Change::Attr { ino } => Event::Attributes(place(ino)),
            _ if self.has_events => return,
            Change::Removed { dir, name, ino } => {
                let is_dir = client.known(*ino).is_some_and(|(_, is_dir)| is_dir);
                Event::Removed { dir: *dir, name: name.clone(), is_dir, ino: Some(*ino) }
            }
            Change::Entry { dir, name } | Change::Unsure { dir, name } if client.known(*dir).is_some() => {
                name_now(&*client, *dir, name)
            }
            Change::Entry { .. } | Change::Unsure { .. } => return,
            _ => Event::Lost,
        };
        self.happened(&event, by);
    }

    fn happened(&self, event: &Event, by: SessionId) {
        let Some(client) = self.client.upgrade().filter(|client| client.session() != by) else { return };
        let (by_name, by_number) = (|| self.queue.by_new_name(event), || known(&*client, event));
        let queued = if C::IS_AGENT { by_name().or_else(by_number) } else { by_number().or_else(by_name) };
        if let Some(event) = queued {
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

impl<C: EventClient> EventListener<C> {
    /// Queues an invalidation for a change without a session. The event of the same change may have only a name and
    /// no inode.
    fn stale(&self, client: &C, change: &Change) {
        let (kind, ino) = match change {
            Change::Data { ino, .. } => (Kind::StaleData, ino),
            Change::Attr { ino } => (Kind::StaleAttributes, ino),
            // Also sent when the source can no longer watch everything.
            Change::All if !C::IS_AGENT => return self.queue.push(Event::Lost),
            _ => return,
        };
        if let Some((number, _)) = client.known(*ino).filter(|_| !C::IS_AGENT) {
            self.queue.stale(kind, number);
        }
    }
}

/// Returns the event for a name whose inode has changed: created if the name exists, removed otherwise.
fn name_now(client: &impl EventClient, dir: Ino, name: &NameBuf) -> Event {
    let (source, caller) = (client.source(), Caller { session: client.session(), ..Caller::default() });
    match source.lookup(&caller, dir, name.as_name()) {
        Ok(entry) => {
            source.forget(entry.ino, 1);
            let is_dir = entry.attr.kind() == FileType::Directory;
            Event::Created { dir, name: name.clone(), is_dir, ino: Some(entry.ino) }
        }
        Err(_) => Event::Removed { dir, name: name.clone(), is_dir: false, ino: None },
    }
}

/// Returns the part of an event that concerns inodes that the client knows, with the client's numbers. The inode of a
/// new name keeps the source's number: the client does not know it.
fn known(client: &impl EventClient, event: &Event) -> Option<Event> {
    let number = |ino: Ino| client.known(ino).map(|(number, _)| number);
    let at = |place: &Place| Some(Place { ino: number(place.ino)?, name: place.name.clone() });
    Some(match event {
        Event::Created { dir, name, is_dir, ino } => {
            Event::Created { dir: number(*dir)?, name: name.clone(), is_dir: *is_dir, ino: *ino }
        }
        Event::Removed { dir, name, is_dir, ino } => {
            Event::Removed { dir: number(*dir)?, name: name.clone(), is_dir: *is_dir, ino: ino.and_then(number) }
        }
        Event::Modified(place) => Event::Modified(at(place)?),
        Event::Closed(place) => Event::Closed(at(place)?),
        Event::Attributes(place) => Event::Attributes(at(place)?),
        Event::Renamed { from, to, is_dir, exchanged } => {
            let (is_dir, exchanged) = (*is_dir, *exchanged);
            let [from, to] = [from, to].map(|(dir, name)| (number(*dir), name.clone()));
            match (from, to) {
                ((Some(dir), name), (Some(new_dir), new_name)) => {
                    Event::Renamed { from: (dir, name), to: (new_dir, new_name), is_dir, exchanged }
                }
                ((Some(dir), name), (None, _)) => Event::Removed { dir, name, is_dir, ino: None },
                ((None, _), (Some(dir), name)) => Event::Created { dir, name, is_dir, ino: None },
                ((None, _), (None, _)) => return None,
            }
        }
        Event::Lost => Event::Lost,
        // Clients know no other kinds.
        _ => return None,
    })
}
