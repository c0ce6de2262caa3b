//! What others do, as a server of Ferry's tells: it is dropped from the cache and published.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use ferry_vfs::sync::lock;
use ferry_vfs::{Caller, Change, Event, Ino, Place, SessionId};
use ferry_wire::events::Kind;

use crate::client::Shared;
use crate::connection::RequestError;
use crate::inode::Inode;
use crate::session::Session;

/// The pause after a reply, in which the server merges what happens.
const PAUSE: Duration = Duration::from_millis(5);
/// How many requests fit into the time limit of a reply.
const REQUESTS: u32 = 3;

impl Shared {
    /// Receives events until the client ends. After a gap, all caches are dropped.
    pub(crate) fn receive_events(&self) {
        let mut last = None;
        while let Some(session) = self.link.session_after(last) {
            last = Some(session.serial);
            if session.has_events {
                self.receive_events_of(&session);
                if self.link.is_over() {
                    return;
                }
                self.forget_everything();
            }
            if !session.is_broken() {
                let address = self.link.address();
                tracing::warn!("the 9P server at {address} no longer sends events");
            }
        }
    }

    fn receive_events_of(&self, session: &Arc<Session>) {
        let (mut acknowledged, wait) = (0, self.link.options.timeout / REQUESTS);
        loop {
            let batch = match session.ask_events(acknowledged, wait) {
                Ok(batch) => batch,
                Err(RequestError::Errno(errno)) => return tracing::debug!(%errno, "no more events"),
                Err(RequestError::Lost { .. }) => return,
            };
            if batch.is_lossy {
                self.forget_everything();
            }
            let mut refreshed = HashSet::new();
            for (kind, path) in batch.stale {
                self.became_stale(session, kind, path, &mut refreshed);
            }
            for (number, event) in batch.events {
                self.happened(session, event, &mut refreshed);
                acknowledged = number;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Drops everything that the server has, too, and tells clients to do so.
    fn forget_everything(&self) {
        for inode in self.inodes.all().into_iter().chain(self.inodes.get(Ino::ROOT)) {
            inode.changed_by_others();
            inode.cached().into_iter().for_each(|file| file.forget());
        }
        let by = SessionId::default();
        self.changes.publish(by, || Change::All);
        self.changes.publish_event(by, || Some(Event::Lost));
    }

    fn dir_at(&self, path: Ino) -> Option<Arc<Inode>> {
        let dir = self.inodes.by_path(path.0).into_iter().find(|inode| inode.is_dir())?;
        dir.changed_by_others();
        Some(dir)
    }

    /// Publishes an event with the numbers of this client, after what it makes invalid. `refreshed`: files whose sizes were
    /// asked for after it.
    fn happened(&self, session: &Arc<Session>, event: Event, refreshed: &mut HashSet<Ino>) {
        let (changes, by) = (&self.changes, SessionId::default());
        let event = match event {
            Event::Created { dir, name, is_dir, .. } => {
                let Some(dir) = self.dir_at(dir).map(|dir| dir.ino) else { return };
                changes.publish(by, || Change::Unsure { dir, name: name.clone() });
                Event::Created { dir, name, is_dir, ino: None }
            }
            Event::Removed { dir, name, is_dir, ino } => {
                let Some(dir) = self.dir_at(dir).map(|dir| dir.ino) else { return };
                let ino = ino.and_then(|path| self.inodes.by_path(path.0).pop()).map(|inode| inode.ino);
                match ino {
                    Some(ino) => {
                        changes.publish(by, || Change::Removed { dir, name: name.clone(), ino });
                        changes.publish(by, || Change::Attr { ino });
                    }
                    None => changes.publish(by, || Change::Entry { dir, name: name.clone() }),
                }
                Event::Removed { dir, name, is_dir, ino }
            }
            Event::Renamed { from, to, is_dir, exchanged } => match (self.dir_at(from.0), self.dir_at(to.0)) {
                (Some(dir), Some(new_dir)) => {
                    let [from, to] = [(dir.ino, from.1), (new_dir.ino, to.1)];
                    for (dir, name) in [&from, &to] {
                        changes.publish(by, || Change::Entry { dir: *dir, name: name.clone() });
                    }
                    Event::Renamed { from, to, is_dir, exchanged }
                }
                // This client forgets one of them just now.
                (Some(_), None) => {
                    let (dir, name) = from;
                    return self.happened(session, Event::Removed { dir, name, is_dir, ino: None }, refreshed);
                }
                (None, _) => {
                    let (dir, name) = to;
                    return self.happened(session, Event::Created { dir, name, is_dir, ino: None }, refreshed);
                }
            },
            Event::Modified(place) => {
                return self.changed_at(place, Event::Modified, |inode| {
                    // Another client's: data kept for a restart of the server could undo what it wrote.
                    inode.cached().into_iter().for_each(|file| file.release_synced());
                    refreshed.remove(&inode.ino);
                    self.refresh(session, inode, refreshed);
                });
            }
            // Stores through shared mappings of the host are told of by this alone.
            Event::Closed(place) => {
                return self.changed_at(place, Event::Closed, |inode| {
                    self.refresh(session, inode, refreshed);
                });
            }
            Event::Attributes(place) => {
                return self.changed_at(place, Event::Attributes, |inode| {
                    let ino = inode.ino;
                    self.changes.publish(by, || Change::Attr { ino });
                });
            }
            _ => return,
        };
        changes.publish_event(by, || Some(event));
    }

    /// Something of a file is not valid any more.
    fn became_stale(&self, session: &Arc<Session>, kind: Kind, path: Ino, refreshed: &mut HashSet<Ino>) {
        for inode in self.inodes.by_path(path.0) {
            inode.changed_by_others();
            match kind {
                Kind::StaleData => self.refresh(session, &inode, refreshed),
                _ => self.changes.publish(SessionId::default(), || Change::Attr { ino: inode.ino }),
            }
        }
    }

    /// Publishes an event of a file. One by a name was preceded by what is not valid any more, unless the file is new.
    fn changed_at(&self, place: Place, event: fn(Place) -> Event, mut apply: impl FnMut(&Arc<Inode>)) {
        let by = SessionId::default();
        if place.name.is_some() {
            let Some(dir) = self.dir_at(place.ino) else { return };
            return self.changes.publish_event(by, || Some(event(Place { ino: dir.ino, ..place })));
        }
        for inode in self.inodes.by_path(place.ino.0) {
            inode.changed_by_others();
            apply(&inode);
            self.changes.publish_event(by, || Some(event(Place { ino: inode.ino, name: None })));
        }
    }

    /// Others have changed the data of a file, or this client has, where the server has that from inotify.
    fn refresh(&self, session: &Arc<Session>, inode: &Arc<Inode>, refreshed: &mut HashSet<Ino>) {
        if !refreshed.insert(inode.ino) {
            return;
        }
        if let Some(file) = inode.cached() {
            file.forget();
            // A file that has gone keeps its size.
            let _ = self.getattr_in(session, inode);
        }
        self.changes.publish(SessionId::default(), || Change::Data { ino: inode.ino, offset: 0, len: u64::MAX });
    }

    /// Publishes what a client of this process did, for the agents of others, if they are told events at all.
    pub(crate) fn publish_event(&self, cx: &Caller<'_>, event: impl FnOnce() -> Event) {
        if self.link.has_events {
            self.changes.publish_event(cx.session, || Some(event()));
        }
    }
}

impl Inode {
    /// What the server has said of it before is not valid any more.
    fn changed_by_others(&self) {
        self.change();
        *lock(&self.no_capabilities) = None;
    }
}
