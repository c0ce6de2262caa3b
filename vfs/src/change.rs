//! Notifies exports of changes in a source.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use crate::sync::{CacheAligned, read, write};
use crate::{Event, Ino, NameBuf, SessionId};

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
    /// A name was added or removed, or refers to another inode now; the directory's attributes changed too.
    Entry {
        /// The directory.
        dir: Ino,
        /// The name.
        name: NameBuf,
    },
    /// A name of an inode was removed. Unlike [`Change::Entry`], it notifies clients that watch the inode (inotify).
    Removed {
        /// The directory.
        dir: Ino,
        /// The name.
        name: NameBuf,
        /// The inode to which it referred.
        ino: Ino,
    },
    /// A name may refer to another inode than clients have cached: they must revalidate it before its next use. Unlike
    /// [`Change::Entry`], it does not disturb processes that use the inode, as a working directory for example.
    Unsure {
        /// The directory.
        dir: Ino,
        /// The name.
        name: NameBuf,
    },
    /// Changes were missed: anything may have changed.
    All,
}

/// A receiver of changes. No method may block.
pub trait Listener: Send + Sync {
    /// Receives a change and the session that made it, on the publisher's thread. No lock of the source is held.
    fn changed(&self, change: &Change, by: SessionId);

    /// Receives an event and the session that caused it, if [`Self::wants_events`], on the publisher's thread. No lock
    /// of the source is held.
    fn happened(&self, _: &Event, _: SessionId) {}

    /// Returns whether it receives events. It must not change.
    fn wants_events(&self) -> bool {
        false
    }

    /// Returns whether some changes have not been delivered to the listener's clients yet.
    fn is_behind(&self) -> bool;

    /// Takes a guard, and drops it as soon as every change so far has been delivered to its clients; at once if that is
    /// the case already.
    fn when_delivered(&self, guard: DeliveryGuard);
}

/// A guard that runs a function when its last clone is dropped, that is, when changes have been delivered to all
/// clients.
#[derive(Clone)]
pub struct DeliveryGuard {
    _last: Arc<OnDelivered>,
}

struct OnDelivered(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Drop for OnDelivered {
    fn drop(&mut self) {
        let then = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(then) = then {
            then();
        }
    }
}

impl DeliveryGuard {
    /// Calls `then` on the thread that drops the last clone.
    pub fn new(then: impl FnOnce() + Send + 'static) -> Self {
        Self { _last: Arc::new(OnDelivered(Mutex::new(Some(Box::new(then))))) }
    }
}

impl fmt::Debug for DeliveryGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeliveryGuard")
    }
}

/// A listener that is a function and has no clients of its own.
struct FnListener<F>(F);

impl<F: Fn(&Change, SessionId) + Send + Sync> Listener for FnListener<F> {
    fn changed(&self, change: &Change, by: SessionId) {
        (self.0)(change, by);
    }

    fn is_behind(&self) -> bool {
        false
    }

    fn when_delivered(&self, _: DeliveryGuard) {}
}

/// Shared, so that a change counts one more user of them and not one of each.
type Listeners = Arc<Vec<(usize, Arc<dyn Listener>)>>;

#[derive(Default)]
struct Shared {
    count: AtomicUsize,
    /// How many of the listeners receive events.
    event_count: AtomicUsize,
    next: AtomicUsize,
    /// Apart from the counts, which all CPUs can look at together.
    listeners: CacheAligned<RwLock<Listeners>>,
}

/// The changes of one source. Its exports publish changes and subscribe to them. Without subscribers a change costs one
/// atomic load.
///
/// A source also publishes changes that no client made. Publishing inside a handler cannot deadlock: listeners only
/// queue the change, and notify their clients from other threads.
#[derive(Clone, Default)]
pub struct Changes(Arc<Shared>);

impl Changes {
    /// Calls `listener` with every change published from now on and the session that made it, on the publisher's
    /// thread and with no lock of the source held, until the subscription is dropped. A listener must not wait.
    pub fn subscribe(&self, listener: impl Fn(&Change, SessionId) + Send + Sync + 'static) -> Subscription {
        self.listen(FnListener(listener))
    }

    /// Subscribes a listener that delivers changes to its clients.
    pub fn listen(&self, listener: impl Listener + 'static) -> Subscription {
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let mut listeners = write(&self.0.listeners);
        Arc::make_mut(&mut listeners).push((id, Arc::new(listener)));
        self.0.count(&listeners);
        Subscription { id, shared: Arc::downgrade(&self.0) }
    }

    /// Notifies all listeners; `change` is only called if there are any. `by` is the session whose request made the change
    /// ([`crate::Caller::session`]), which is not notified; `SessionId::default()` if no session made it.
    pub fn publish(&self, by: SessionId, change: impl FnOnce() -> Change) {
        if self.0.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let change = change();
        for (_, listener) in self.listeners().iter() {
            listener.changed(&change, by);
        }
    }

    /// Passes an event to the listeners that receive events; `event` is only called if there are any, and may find that
    /// nothing happened. `by` is as for [`Self::publish`].
    pub fn publish_event(&self, by: SessionId, event: impl FnOnce() -> Option<Event>) {
        if self.0.event_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let Some(event) = event() else { return };
        for (_, listener) in self.listeners().iter().filter(|(_, listener)| listener.wants_events()) {
            listener.happened(&event, by);
        }
    }

    /// Returns whether several listeners hear of changes: then what one client changes matters to others.
    pub fn has_several_listeners(&self) -> bool {
        self.0.count.load(Ordering::Acquire) > 1
    }

    /// Returns whether some published change has not been delivered yet to the clients of all listeners.
    pub fn is_behind(&self) -> bool {
        self.0.count.load(Ordering::Acquire) != 0 && self.listeners().iter().any(|(_, listener)| listener.is_behind())
    }

    /// Calls `then` when every change published so far has been delivered to the clients of all listeners; before this
    /// returns, if that is the case already. So a client that gets a lock sees all earlier writes, whatever it has
    /// cached.
    pub fn when_delivered(&self, then: impl FnOnce() + Send + 'static) {
        let guard = DeliveryGuard::new(then);
        for (_, listener) in self.listeners().iter() {
            listener.when_delivered(guard.clone());
        }
    }

    fn listeners(&self) -> Listeners {
        Arc::clone(&read(&self.0.listeners))
    }
}

impl Shared {
    /// Updates the counts, under the lock of the listeners.
    fn count(&self, listeners: &Listeners) {
        let wanting = listeners.iter().filter(|(_, listener)| listener.wants_events());
        self.event_count.store(wanting.count(), Ordering::Release);
        self.count.store(listeners.len(), Ordering::Release);
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes").field("listeners", &self.0.count).finish()
    }
}

/// Unsubscribes when dropped; see [`Changes::subscribe`].
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
            let mut listeners = write(&shared.listeners);
            Arc::make_mut(&mut listeners).retain(|(id, _)| *id != self.id);
            shared.count(&listeners);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn changes_reach_all_listeners_until_they_unsubscribe() {
        let changes = Changes::default();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let listen = |tag: u8| {
            let seen = Arc::clone(&seen);
            changes.subscribe(move |change, _| seen.lock().unwrap().push((tag, change.clone())))
        };
        changes.publish(SessionId::default(), || unreachable!("there is no listener yet"));
        let (first, second) = (listen(1), listen(2));
        let change = Change::Attr { ino: Ino(7) };
        changes.publish(SessionId::default(), || change.clone());
        drop(first);
        changes.publish(SessionId::default(), || change.clone());
        drop(second);
        changes.publish(SessionId::default(), || unreachable!("there is no listener any more"));
        assert_eq!(*seen.lock().unwrap(), [(1, change.clone()), (2, change.clone()), (2, change)]);
    }

    struct EventListener(Arc<Mutex<Vec<Event>>>);

    impl Listener for EventListener {
        fn changed(&self, _: &Change, _: SessionId) {}

        fn happened(&self, event: &Event, _: SessionId) {
            self.0.lock().unwrap().push(event.clone());
        }

        fn wants_events(&self) -> bool {
            true
        }

        fn is_behind(&self) -> bool {
            false
        }

        fn when_delivered(&self, _: DeliveryGuard) {}
    }

    #[test]
    fn events_reach_those_that_want_them() {
        let changes = Changes::default();
        let by = SessionId::default();
        let _plain = changes.subscribe(|_, _| {});
        changes.publish_event(by, || unreachable!("nobody wants events"));
        let seen = Arc::default();
        let listening = changes.listen(EventListener(Arc::clone(&seen)));
        changes.publish_event(by, || None);
        changes.publish_event(by, || Some(Event::Lost));
        assert_eq!(*seen.lock().unwrap(), [Event::Lost]);
        drop(listening);
        changes.publish_event(by, || unreachable!("nobody wants events any more"));
    }

    /// Keeps the guards of changes that it has not delivered yet.
    #[derive(Default)]
    struct Slow(Mutex<Vec<DeliveryGuard>>, AtomicBool);

    impl Listener for Arc<Slow> {
        fn changed(&self, _: &Change, _: SessionId) {
            self.1.store(true, Ordering::Relaxed);
        }

        fn is_behind(&self) -> bool {
            self.1.load(Ordering::Relaxed)
        }

        fn when_delivered(&self, guard: DeliveryGuard) {
            self.0.lock().unwrap().push(guard);
        }
    }

    #[test]
    fn a_call_after_delivery_waits_for_the_slowest_listener() {
        let changes = Changes::default();
        let done = Arc::new(AtomicUsize::new(0));
        let count = || {
            let done = Arc::clone(&done);
            changes.when_delivered(move || {
                let _ = done.fetch_add(1, Ordering::Relaxed);
            });
            changes.is_behind()
        };
        assert!(!count(), "no listener");
        let _quick = changes.subscribe(|_, _| {});
        assert!(!count(), "no listener has clients");
        assert_eq!(done.load(Ordering::Relaxed), 2);
        let slow = [Arc::<Slow>::default(), Arc::default()];
        let listening = slow.each_ref().map(|slow| changes.listen(Arc::clone(slow)));
        changes.publish(SessionId::default(), || Change::Attr { ino: Ino(7) });
        assert!(count(), "two listeners are behind");
        slow[0].0.lock().unwrap().clear();
        assert_eq!(done.load(Ordering::Relaxed), 2, "one is still behind");
        slow[1].0.lock().unwrap().clear();
        assert_eq!(done.load(Ordering::Relaxed), 3);
        drop(listening);
        assert!(!changes.is_behind());
    }
}
