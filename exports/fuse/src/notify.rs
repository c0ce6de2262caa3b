//! Notifies the kernel of changes by others.
//!
//! A listener of the source's changes takes notes; a thread of its own, the teller, tells the kernel. The kernel may make that
//! thread wait for a directory or a page that one of our own handlers is being asked about: nobody waits for the
//! thread, so that nothing can lock up, and changes may be published from inside handlers. If that handler is blocked, the
//! monitor sees it, and another teller goes on with what is not about the same inode.
//!
//! Attributes that a source has found changed, by nobody's session, are told at once by whoever publishes that: he may be
//! about to answer an open, and who opened is to see them. To forget attributes alone the kernel waits for nothing.
//! What is told later is told before a lock is answered that was granted after it ([`Listener::when_delivered`]), but for what
//! blocked handlers keep the kernel from.

mod message;
mod notify_queue;
mod pending;
mod prunes;

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use ferry_engine::{CallSnapshot, MonitoredWorker, Ownership, Replacement, Watch};
use ferry_vfs::{Change, DeliveryGuard, Errno, Ino, Listener, Name, SessionId, Subscription};
use ferry_wire::fuse::InitFlags;

use crate::connection::{Connection, ServingThread};
use crate::device::send;
use crate::stats::Counters;
use message::Message;
use notify_queue::Shared;
use pending::Job;

/// Hears of the changes of a source.
#[derive(Debug)]
struct ChangeListener {
    connection: Arc<Connection>,
    shared: Arc<Shared>,
    own: OnceLock<SessionId>,
}

impl Listener for ChangeListener {
    fn changed(&self, change: &Change, by: SessionId) {
        // The kernel has made what it asked for itself part of its caches. To tell it all the same is worse than
        // useless: its answer may wait for the very request.
        if self.own.get().is_none()
            && let Some(session) = self.connection.session.current()
        {
            let _ = self.own.set(session.id());
        }
        match change {
            Change::Attr { ino } if by == SessionId::default() => {
                Message::Attributes(*ino).with_bytes(|bytes| {
                    // A kernel that does not know the inode, or is gone, has nothing to forget.
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

/// Tells the kernel of changes, until dropped.
#[derive(Debug)]
pub(crate) struct Notifier {
    teller: Arc<NotifyThread>,
    subscription: Option<Subscription>,
}

impl Notifier {
    /// Starts telling; `None` if the source publishes nothing.
    ///
    /// # Errors
    /// No thread can be had.
    pub(crate) fn start(connection: &Arc<Connection>) -> io::Result<Option<Self>> {
        let Some(changes) = connection.share.source().changes().cloned() else { return Ok(None) };
        let shared = Arc::new(Shared::default());
        let watch = Watch::default();
        let owner = watch.first_owner();
        let teller = Arc::new(NotifyThread { connection: Arc::clone(connection), shared: Arc::clone(&shared), watch });
        teller.start(move |_| Some(owner))?;
        let post: Arc<dyn MonitoredWorker> = Arc::clone(&teller) as _;
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
        Ok(Some(Self { teller, subscription: Some(subscription) }))
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.subscription = None;
        // No thread is joined: the kernel may let it go only when a handler that is blocked answers.
        self.teller.shared.close();
    }
}

/// What the tellers of one mount have in common. All but one are stuck: they come back and end when the kernel lets them go.
#[derive(Debug)]
struct NotifyThread {
    connection: Arc<Connection>,
    shared: Arc<Shared>,
    /// Says whether the kernel keeps the one who is not known to be stuck.
    watch: Watch,
}

impl NotifyThread {
    /// Starts a thread, which tells if it is given the right to.
    fn start(self: &Arc<Self>, right: impl FnOnce(&Self) -> Option<Ownership> + Send + 'static) -> io::Result<()> {
        let (teller, present) = (Arc::clone(self), ServingThread::new(&self.connection));
        std::thread::Builder::new().name("fuse-notify".into()).spawn(move || {
            if let Some(mut owner) = right(&teller) {
                teller.tell_all(&mut owner);
            }
            drop(teller);
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

    /// Tells one thing; `None` if that took so long that another teller goes on.
    fn tell(&self, job: Job, owner: &mut Ownership, counters: &Counters) -> Option<()> {
        let mut say = |message: Message<'_>| {
            counters.notifications.add(1);
            self.send(&message, owner).map(|outcome| warn(&message, outcome))
        };
        match job {
            Job::All => {
                tracing::debug!("more changes than can be told one by one: the kernel is to forget everything");
                self.shared.more(pending::of_all(self.known()));
            }
            Job::Names => say(Message::Epoch)?,
            Job::Removed(dir, name, ino) => return self.removed(dir, name.as_name(), ino, owner, counters),
            Job::Entry(dir, name) => say(Message::Entry(dir, name.as_name()))?,
            Job::Unsure(dir, name) => say(Message::Expired(dir, name.as_name()))?,
            Job::Data(ino, span) => say(Message::Data(ino, span))?,
            Job::Attributes(ino) => say(Message::Attributes(ino))?,
            Job::Prune(ino) => {
                // Only of what nobody uses; and kernels before 6.18 do not know this.
                let _ = self.send(&Message::Prune(ino), owner)?;
            }
            Job::PruneAll => self.shared.more(self.known().into_iter().map(Job::Prune)),
        }
        Some(())
    }

    /// Tells that a name was removed, for which the kernel takes the locks of the directory and, while it has that, of what was
    /// removed. If a handler that is blocked has the second, nobody could use the directory any more; so that one is waited for
    /// first, by a notice which takes it and does nothing: what was removed has no such name in it.
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

    /// Sends one message; `None` if another teller has taken over meanwhile.
    fn send(&self, message: &Message<'_>, owner: &mut Ownership) -> Option<Result<(), Errno>> {
        self.watch.enter(owner);
        self.connection.monitor_handle.ring();
        let outcome = message.with_bytes(|bytes| send(self.connection.device.as_fd(), &[IoSlice::new(bytes)]));
        self.watch.leave(owner).then_some(outcome)
    }

    /// The inodes that the kernel knows.
    fn known(&self) -> Vec<Ino> {
        self.connection.session.current().map_or_else(Vec::new, |session| session.inodes())
    }
}

fn warn(message: &Message<'_>, outcome: Result<(), Errno>) {
    match outcome {
        // The kernel knows nothing of it, or there is no kernel to tell any more.
        Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN | Errno::NOTDIR) => {}
        Err(error) => tracing::warn!("the kernel was not told of a change, {message:?}: {error}"),
    }
}

/// The monitor sees when the kernel keeps a teller, as it sees handlers that are blocked.
impl MonitoredWorker for NotifyThread {
    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn replace_worker(self: Arc<Self>, seen: CallSnapshot) -> Replacement {
        if self.shared.is_full() {
            return Replacement::Nobody;
        }
        match self.start(move |teller| teller.shared.set_aside(|| teller.watch.take(seen))) {
            Ok(()) => Replacement::Found,
            Err(error) => {
                tracing::debug!("no thread can be had to tell the kernel of changes: {error}");
                Replacement::Nobody
            }
        }
    }

    fn apply_policy(&self, _: &dyn Fn(u64, std::time::Instant) -> Option<Errno>) -> bool {
        self.shared.let_go()
    }
}

/// With a write-back cache the kernel believes its own length and times of a file for as long as it knows it.
fn trusts_itself(connection: &Connection) -> bool {
    connection.session.current().is_some_and(|session| session.negotiated().has(InitFlags::WRITEBACK_CACHE))
}
