//! Notifies the kernel of changes by others.
//!
//! A listener queues the source's changes, and a separate thread notifies the kernel. The kernel may block that thread
//! on a directory or page that a handler of this server is serving. No thread waits for it, so there is no deadlock,
//! and handlers may publish changes. If that handler is blocked, the monitor starts another thread for the remaining
//! notifications about other inodes.
//!
//! Attributes that a source has found changed, by no session, are sent by the publishing thread at once: it may be
//! about to reply to an open whose caller must see them. Dropping attributes never blocks in the kernel. Queued
//! notifications are sent before the reply to a lock that was granted later ([`Listener::when_delivered`]), except
//! those that blocked handlers delay.

mod message;
mod notify_queue;
mod pending;
mod prunes;

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use ferry_engine::{CallSnapshot, MonitoredWorker, Ownership, Replacement, Watch};
use ferry_serve::EPOCH_MINOR;
use ferry_vfs::{Change, DeliveryGuard, Errno, Ino, Listener, Name, SessionId, Subscription};
use ferry_wire::fuse::InitFlags;

use crate::connection::{Connection, ServingThread};
use crate::device::send;
use crate::stats::Counters;
use message::Message;
use notify_queue::Shared;
use pending::Job;

/// Queues the changes of a source.
struct ChangeListener {
    connection: Arc<Connection>,
    shared: Arc<Shared>,
    own: OnceLock<SessionId>,
}

impl Listener for ChangeListener {
    fn changed(&self, change: &Change, by: SessionId) {
        // The kernel knows of its own changes, and a notification might deadlock: it may wait for this request.
        if self.own.get().is_none()
            && let Some(session) = self.connection.session.current()
        {
            let _ = self.own.set(session.id());
        }
        match change {
            Change::Attr { ino } if by == SessionId::default() => {
                Message::Attributes(*ino).with_bytes(|bytes| {
                    // A kernel that does not know the inode has nothing to drop.
                    let _ = send(self.connection.device.as_fd(), &[IoSlice::new(bytes)]);
                });
                if trusts_itself(&self.connection) {
                    self.shared.note(change);
                }
            }
            _ if self.own.get() == Some(&by) => {}
            _ => self.shared.note(change),
        }
    }

    fn is_behind(&self) -> bool {
        self.shared.is_behind()
    }

    fn when_delivered(&self, told: DeliveryGuard) {
        self.shared.when_delivered(told);
    }
}

/// Notifies the kernel of changes, until dropped.
pub(crate) struct Notifier {
    notify_thread: Arc<NotifyThread>,
    subscription: Option<Subscription>,
}

impl Notifier {
    /// Starts the thread; returns `None` if the source publishes nothing.
    pub(crate) fn start(connection: &Arc<Connection>) -> io::Result<Option<Self>> {
        let Some(changes) = connection.share.source().changes().cloned() else { return Ok(None) };
        let shared = Arc::new(Shared::default());
        let watch = Watch::default();
        let owner = watch.first_owner();
        let notify_thread =
            Arc::new(NotifyThread { connection: Arc::clone(connection), shared: Arc::clone(&shared), watch });
        notify_thread.start(move |_| Some(owner))?;
        let post: Arc<dyn MonitoredWorker> = Arc::clone(&notify_thread) as _;
        connection.monitor_handle.add(Arc::downgrade(&post));
        let subscription = changes.listen(ChangeListener {
            connection: Arc::clone(connection),
            shared: Arc::clone(&shared),
            own: OnceLock::new(),
        });
        let weak = Arc::downgrade(&shared);
        connection.end.when_ended(move || {
            if let Some(shared) = weak.upgrade() {
                shared.close();
            }
        });
        Ok(Some(Self { notify_thread, subscription: Some(subscription) }))
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.subscription = None;
        // No thread is joined: the kernel may release it only after a blocked handler.
        self.notify_thread.shared.close();
    }
}

/// The shared state of a mount's notification threads. All but one are stuck in the kernel.
struct NotifyThread {
    connection: Arc<Connection>,
    shared: Arc<Shared>,
    /// Shows whether the kernel blocks the thread that is not known to be stuck.
    watch: Watch,
}

impl NotifyThread {
    /// Starts a thread, which sends notifications if it gets the right to.
    fn start(self: &Arc<Self>, right: impl FnOnce(&Self) -> Option<Ownership> + Send + 'static) -> io::Result<()> {
        let (notify_thread, present) = (Arc::clone(self), ServingThread::new(&self.connection));
        std::thread::Builder::new().name("fuse-notify".into()).spawn(move || {
            if let Some(mut owner) = right(&notify_thread) {
                notify_thread.tell_all(&mut owner);
            }
            drop(notify_thread);
            drop(present);
        })?;
        Ok(())
    }

    fn tell_all(&self, owner: &mut Ownership) {
        let counters = self.connection.counters.lend();
        while let Some((number, job)) = self.shared.next(trusts_itself(&self.connection)) {
            if self.tell(job, owner, &counters).is_none() {
                return self.shared.come_back(number);
            }
            if self.connection.end.is_ended() {
                return;
            }
        }
    }

    /// Sends one job; `None` if it took so long that another thread has taken over.
    fn tell(&self, job: Job, owner: &mut Ownership, counters: &Counters) -> Option<()> {
        let mut say = |message: Message<'_>| {
            counters.notifications.add(1);
            self.send(&message, owner).map(|outcome| warn(&message, outcome))
        };
        match job {
            Job::All => {
                tracing::debug!("too many changes to send one by one: the kernel drops all cached data");
                // First: what becomes known from now on is looked up after the change.
                let told = if self.has_epoch() { say(Message::Epoch) } else { Some(()) };
                self.shared.more(pending::of_all(self.known()));
                told?;
            }
            Job::Removed(dir, name, ino) => return self.removed(dir, name.as_name(), ino, owner, counters),
            Job::Entry(dir, name) => say(Message::Entry(dir, name.as_name()))?,
            Job::Unsure(dir, name) => say(Message::Expired(dir, name.as_name()))?,
            Job::Data(ino, span) => say(Message::Data(ino, span))?,
            Job::Attributes(ino) => say(Message::Attributes(ino))?,
            Job::Prune(ino) => {
                // Only unused inodes; kernels before 6.18 do not support this.
                let _ = self.send(&Message::Prune(ino), owner)?;
            }
            Job::PruneAll => self.shared.more(self.known().into_iter().map(Job::Prune)),
        }
        Some(())
    }

    /// Notifies that a name was removed, for which the kernel locks the directory and then the removed inode. If a
    /// blocked handler has the second lock, the directory would be blocked for all. So an expiry notification without
    /// effect is sent first, which waits for the inode's lock only.
    fn removed(&self, dir: Ino, name: Name<'_>, ino: Ino, owner: &mut Ownership, counters: &Counters) -> Option<()> {
        let _ = self.send(&Message::Entry(ino, name), owner)?;
        self.shared.goes_on(dir);
        counters.notifications.add(1);
        let outcome = self.send(&Message::Deleted(dir, name, ino), owner)?;
        if !matches!(outcome, Ok(()) | Err(Errno::NOENT)) {
            counters.notifications.add(1);
            let message = Message::Entry(dir, name);
            warn(&message, self.send(&message, owner)?);
        }
        Some(())
    }

    /// Sends one message; `None` if another thread has taken over meanwhile.
    fn send(&self, message: &Message<'_>, owner: &mut Ownership) -> Option<Result<(), Errno>> {
        self.watch.enter(owner);
        self.connection.monitor_handle.ring();
        let outcome = message.with_bytes(|bytes| send(self.connection.device.as_fd(), &[IoSlice::new(bytes)]));
        self.watch.leave(owner).then_some(outcome)
    }

    /// Whether the kernel can drop all names at once.
    fn has_epoch(&self) -> bool {
        self.connection.session.current().is_some_and(|session| session.negotiated().minor >= EPOCH_MINOR)
    }

    /// Returns the inodes that the kernel knows.
    fn known(&self) -> Vec<Ino> {
        self.connection.session.current().map_or_else(Vec::new, |session| session.inodes())
    }
}

fn warn(message: &Message<'_>, outcome: Result<(), Errno>) {
    match outcome {
        // The kernel does not know the inode, or the connection has ended.
        Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN | Errno::NOTDIR) => {}
        Err(error) => tracing::warn!("cannot notify the kernel of a change, {message:?}: {error}"),
    }
}

/// The monitor detects a blocked notification thread as it detects blocked handlers.
impl MonitoredWorker for NotifyThread {
    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn replace_worker(self: Arc<Self>, seen: CallSnapshot) -> Replacement {
        if self.shared.is_full() {
            return Replacement::Nobody;
        }
        match self.start(move |notify_thread| notify_thread.shared.set_aside(|| notify_thread.watch.take(seen))) {
            Ok(()) => Replacement::Found,
            Err(error) => {
                tracing::debug!("cannot start a thread to notify the kernel of changes: {error}");
                Replacement::Nobody
            }
        }
    }

    fn apply_policy(&self, _: &dyn Fn(u64, std::time::Instant) -> Option<Errno>) -> bool {
        self.shared.let_go()
    }
}

/// Returns whether the kernel uses its own length and times of a file while it knows it (write-back cache).
fn trusts_itself(connection: &Connection) -> bool {
    connection.session.current().is_some_and(|session| session.negotiated().has(InitFlags::WRITEBACK_CACHE))
}
