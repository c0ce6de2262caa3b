//! What changed in a source, for every export that wants to tell its clients.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock, Weak};

use crate::{Ino, NameBuf, SessionId};

/// One change of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// The attributes of an inode.
    Attr {
        /// The inode.
        ino: Ino,
    },
    /// Bytes of a file, and with them its attributes.
    Data {
        /// The inode.
        ino: Ino,
        /// First byte.
        offset: u64,
        /// Length in bytes; `u64::MAX` for "to the end".
        len: u64,
    },
    /// A name came, went, or now means another inode; the directory's attributes changed too.
    Entry {
        /// The directory.
        dir: Ino,
        /// The name.
        name: NameBuf,
    },
    /// A name of an inode was removed. Says more than [`Change::Entry`]: clients that watch the inode
    /// (inotify) learn of it.
    Removed {
        /// The directory.
        dir: Ino,
        /// The name.
        name: NameBuf,
        /// The inode that it meant.
        ino: Ino,
    },
}

type Listener = dyn Fn(&Change, SessionId) + Send + Sync;
type Listeners = Vec<(usize, Arc<Listener>)>;

#[derive(Default)]
struct Shared {
    count: AtomicUsize,
    next: AtomicUsize,
    listeners: RwLock<Listeners>,
}

/// The changes of one source: its exports publish, and listen. Costs one load per change while nobody listens.
///
/// This is also how an author tells clients what changed behind their backs. Publishing from inside a handler
/// cannot deadlock: listeners only take notes, and tell their clients from threads of their own.
#[derive(Clone, Default)]
pub struct Changes(Arc<Shared>);

impl Changes {
    /// Calls `listener` with every change published from now on and the session that made it, on the publisher's
    /// thread and with no lock of the source held, until the subscription is dropped. A listener must not wait.
    pub fn subscribe(&self, listener: impl Fn(&Change, SessionId) + Send + Sync + 'static) -> Subscription {
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let mut listeners = self.0.listeners.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        listeners.push((id, Arc::new(listener)));
        self.0.count.store(listeners.len(), Ordering::Release);
        Subscription { id, shared: Arc::downgrade(&self.0) }
    }

    /// Tells all who listen; `change` is only called when somebody does. `by` is the session whose request made the
    /// change ([`crate::Caller::session`]), which needs no telling; `SessionId::default()` if it was nobody's.
    pub fn publish(&self, by: SessionId, change: impl FnOnce() -> Change) {
        if self.0.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let listeners = self.0.listeners.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let change = change();
        for (_, listener) in listeners {
            listener(&change, by);
        }
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes").field("listeners", &self.0.count).finish()
    }
}

/// Ends when dropped; see [`Changes::subscribe`].
#[must_use]
pub struct Subscription {
    id: usize,
    shared: Weak<Shared>,
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").field("id", &self.id).finish()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            let mut listeners = shared.listeners.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            listeners.retain(|(id, _)| *id != self.id);
            shared.count.store(listeners.len(), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn tells_all_listeners_until_they_leave() {
        let changes = Changes::default();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let listen = |tag: u8| {
            let seen = Arc::clone(&seen);
            changes.subscribe(move |change, _| seen.lock().unwrap().push((tag, change.clone())))
        };
        changes.publish(SessionId::default(), || unreachable!("nobody listens yet"));
        let (first, second) = (listen(1), listen(2));
        let change = Change::Attr { ino: Ino(7) };
        changes.publish(SessionId::default(), || change.clone());
        drop(first);
        changes.publish(SessionId::default(), || change.clone());
        drop(second);
        changes.publish(SessionId::default(), || unreachable!("nobody listens any more"));
        assert_eq!(*seen.lock().unwrap(), [(1, change.clone()), (2, change.clone()), (2, change)]);
    }
}
