//! Telling the kernel of changes that others made.
//!
//! A listener of the source's changes takes notes; a thread of its own tells the kernel. The kernel may make that
//! thread wait for a directory or a page that one of our own handlers is being asked about: nobody waits for the
//! thread, so that nothing can lock up, and changes may be published from inside handlers.
//!
//! Attributes that a source has found changed, by nobody's session, are told at once by whoever publishes that: he may be
//! about to answer an open, and who opened is to see them. To forget attributes alone the kernel waits for nothing.
//! What is told later is told before a lock is answered that was granted after it ([`Listener::when_told`]).

mod message;

use std::collections::{HashMap, HashSet};
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferry_vfs::{Change, Errno, Ino, Listener, NameBuf, SessionId, Subscription, Told};
use ferry_wire::fuse::InitFlags;

use crate::connection::{Connection, Present};
use crate::device::send;
use crate::stats::Counters;
use message::Message;

/// The most notes kept. Past it the kernel is told that anything may have changed.
const NOTES_MAX: usize = 1 << 16;

/// When the kernel is told once more to give up what it has written itself: it may have been using the inode for a moment.
const PRUNE_AGAIN: Duration = Duration::from_secs(1);

/// Bytes of a file, the end exclusive.
type Span = (u64, u64);

/// All of a file.
const WHOLE: Span = (0, u64::MAX);

/// What the kernel is to be told. Equal changes fall together; the order does not matter, for all are about what it
/// is to forget.
#[derive(Debug, Default)]
struct Notes {
    attributes: HashSet<Ino>,
    data: HashMap<Ino, Span>,
    entries: HashSet<(Ino, NameBuf)>,
    removed: HashMap<(Ino, NameBuf), Ino>,
    unsure: HashSet<(Ino, NameBuf)>,
    /// There were too many: anything may have changed.
    overflow: bool,
    /// To be dropped once all that is told.
    told: Vec<Told>,
}

impl Notes {
    fn len(&self) -> usize {
        self.attributes.len() + self.data.len() + self.entries.len() + self.removed.len() + self.unsure.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0 && !self.overflow && self.told.is_empty()
    }

    fn add(&mut self, change: &Change) {
        if self.overflow {
            return;
        }
        match change {
            Change::Attr { ino } => {
                self.attributes.insert(*ino);
            }
            Change::Data { ino, offset, len } => self.add_data(*ino, (*offset, offset.saturating_add(*len))),
            Change::Entry { dir, name } => {
                self.entries.insert((*dir, name.clone()));
                self.add_data(*dir, WHOLE);
            }
            Change::Removed { dir, name, ino } => {
                self.removed.insert((*dir, name.clone()), *ino);
                self.attributes.insert(*ino);
                self.add_data(*dir, WHOLE);
            }
            Change::Unsure { dir, name } => {
                self.unsure.insert((*dir, name.clone()));
                self.add_data(*dir, WHOLE);
            }
            // As is one of a kind that we do not know.
            _ => self.overflow = true,
        }
        if self.len() > NOTES_MAX {
            *self = Self { overflow: true, told: std::mem::take(&mut self.told), ..Self::default() };
        }
    }

    fn add_data(&mut self, ino: Ino, (start, end): Span) {
        let span = self.data.entry(ino).or_insert((start, end));
        *span = (span.0.min(start), span.1.max(end));
    }
}

/// What the listener and the thread share.
#[derive(Debug, Default)]
struct Desk {
    notes: Notes,
    /// The thread is telling the kernel what it took.
    is_telling: bool,
    closed: bool,
}

impl Desk {
    /// Whether something is noted, or being told.
    fn is_behind(&self) -> bool {
        !self.closed && (self.is_telling || !self.notes.is_empty())
    }
}

#[derive(Debug, Default)]
struct Shared {
    desk: Mutex<Desk>,
    noted: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, change: &Change) {
        self.change(self.lock(), |notes| notes.add(change));
    }

    fn when_told(&self, told: Told) {
        let desk = self.lock();
        if desk.is_behind() {
            self.change(desk, |notes| notes.told.push(told));
        }
    }

    fn change(&self, mut desk: MutexGuard<'_, Desk>, change: impl FnOnce(&mut Notes)) {
        let first = desk.notes.is_empty();
        change(&mut desk.notes);
        drop(desk);
        if first {
            self.noted.notify_one();
        }
    }

    /// The notes that came since the last time; waits for some, or until a point in time. `None` when there will be no
    /// more.
    fn take(&self, until: Option<Instant>) -> Option<Notes> {
        let mut desk = self.lock();
        desk.is_telling = false;
        while desk.notes.is_empty() && !desk.closed {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            desk = match left {
                Some(Duration::ZERO) => break,
                Some(left) => self.noted.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.noted.wait(desk).unwrap_or_else(PoisonError::into_inner),
            };
        }
        desk.is_telling = !desk.closed;
        (!desk.closed).then(|| std::mem::take(&mut desk.notes))
    }

    fn close(&self) {
        let mut desk = self.lock();
        desk.closed = true;
        let left = std::mem::take(&mut desk.notes);
        drop(desk);
        // There is no kernel any more that could know of anything.
        drop(left);
        self.noted.notify_all();
    }
}

/// Hears of the changes of a source.
#[derive(Debug)]
struct Ear {
    connection: Arc<Connection>,
    shared: Arc<Shared>,
    own: OnceLock<SessionId>,
}

impl Listener for Ear {
    fn changed(&self, change: &Change, by: SessionId) {
        // The kernel has made what it asked for itself part of its caches. To tell it all the same is worse than
        // useless: its answer may wait for the very request.
        if self.own.get().is_none()
            && let Some(mount) = self.connection.session.mount()
        {
            let _ = self.own.set(mount.id());
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
        self.shared.lock().is_behind()
    }

    fn when_told(&self, told: Told) {
        self.shared.when_told(told);
    }
}

/// Tells the kernel of changes, until dropped.
#[derive(Debug)]
pub(crate) struct Notifier {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
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
        let thread = std::thread::Builder::new().name("fuse-notify".into()).spawn({
            let (connection, shared) = (Arc::clone(connection), Arc::clone(&shared));
            let present = Present::new(&connection);
            move || {
                tell_all(&connection, &shared);
                drop((connection, shared));
                drop(present);
            }
        })?;
        let subscription = changes.listen(Ear {
            connection: Arc::clone(connection),
            shared: Arc::clone(&shared),
            own: OnceLock::new(),
        });
        let weak = Arc::downgrade(&shared);
        connection.end.when_declared(move || {
            if let Some(shared) = weak.upgrade() {
                shared.close();
            }
        });
        Ok(Some(Self { shared, thread: Some(thread), subscription: Some(subscription) }))
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.subscription = None;
        self.shared.close();
        // Not joined: the kernel may let it go only when a handler that is blocked answers.
        self.thread = None;
    }
}

fn tell_all(connection: &Arc<Connection>, shared: &Shared) {
    let counters = connection.counters.lend();
    let mut prunes = Prunes::default();
    while let Some(notes) = shared.take(prunes.next) {
        if trusts_itself(connection) {
            prunes.add(&notes);
        }
        tell(connection, notes, &counters);
        // After the telling: of what is pruned, the kernel asks anew.
        let known = || connection.session.mount().map_or_else(Vec::new, |mount| mount.inodes());
        for ino in prunes.due(Instant::now(), known) {
            let message = Message::Prune(ino);
            // Only of what nobody uses; and kernels before 6.18 do not know this.
            let _ = message.with_bytes(|bytes| send(connection.device.as_fd(), &[IoSlice::new(bytes)]));
        }
        if connection.end.is_declared() {
            return;
        }
    }
}

/// With a write-back cache the kernel believes its own length and times of a file for as long as it knows it.
fn trusts_itself(connection: &Connection) -> bool {
    connection.session.mount().is_some_and(|mount| mount.negotiated().has(InitFlags::WRITEBACK_CACHE))
}

/// What a kernel that believes itself is to give up altogether: at once, and again one to two seconds later.
#[derive(Debug, Default)]
struct Prunes {
    new: HashSet<Ino>,
    /// What was given out since the last time that something was given out again, and what before that.
    again: [HashSet<Ino>; 2],
    all: bool,
    /// When something is to be given out again.
    next: Option<Instant>,
}

impl Prunes {
    fn add(&mut self, notes: &Notes) {
        self.all |= notes.overflow;
        self.new.extend(notes.data.keys().chain(&notes.attributes));
    }

    /// Those whose time has come. `known`: all that the kernel knows, for when there are too many.
    fn due(&mut self, now: Instant, known: impl FnOnce() -> Vec<Ino>) -> HashSet<Ino> {
        let mut due = HashSet::new();
        let [young, old] = &mut self.again;
        if self.next.is_some_and(|next| next <= now) {
            due = std::mem::replace(old, std::mem::take(young));
            self.next = None;
        }
        young.extend(&self.new);
        due.extend(self.new.drain());
        if std::mem::take(&mut self.all) || young.len() > NOTES_MAX {
            due.extend(known());
            young.clear();
        }
        if self.next.is_none() && !(young.is_empty() && old.is_empty()) {
            self.next = Some(now + PRUNE_AGAIN);
        }
        due
    }
}

fn tell(connection: &Connection, notes: Notes, counters: &Counters) {
    let say = |message: &Message<'_>| {
        counters.notifications.add(1);
        message.with_bytes(|bytes| send(connection.device.as_fd(), &[IoSlice::new(bytes)]))
    };
    let sure = |message: &Message<'_>| match say(message) {
        // The kernel knows nothing of it, or there is no kernel to tell any more.
        Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN | Errno::NOTDIR) => {}
        Err(error) => tracing::warn!("the kernel was not told of a change, {message:?}: {error}"),
    };
    if notes.overflow {
        tracing::debug!("more changes than can be told one by one: the kernel is to forget everything");
        let inodes = connection.session.mount().map_or_else(Vec::new, |mount| mount.inodes());
        sure(&Message::Epoch);
        for ino in inodes.into_iter().chain([Ino::ROOT]) {
            sure(&Message::Data(ino, WHOLE));
        }
        return;
    }
    for ((dir, name), ino) in &notes.removed {
        if !matches!(say(&Message::Deleted(*dir, name.as_name(), *ino)), Ok(()) | Err(Errno::NOENT)) {
            sure(&Message::Entry(*dir, name.as_name()));
        }
    }
    for (dir, name) in &notes.entries {
        sure(&Message::Entry(*dir, name.as_name()));
    }
    for (dir, name) in &notes.unsure {
        sure(&Message::Expired(*dir, name.as_name()));
    }
    for (ino, span) in &notes.data {
        sure(&Message::Data(*ino, *span));
    }
    for ino in notes.attributes.iter().filter(|ino| !notes.data.contains_key(ino)) {
        sure(&Message::Attributes(*ino));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use ferry_vfs::Name;

    use super::*;

    #[test]
    fn equal_changes_fall_together_and_too_many_become_one() {
        let name = Name::new(b"x").unwrap().to_buf();
        let mut notes = Notes::default();
        for _ in 0..3 {
            notes.add(&Change::Attr { ino: Ino(2) });
            notes.add(&Change::Data { ino: Ino(3), offset: 4096, len: 10 });
            notes.add(&Change::Data { ino: Ino(3), offset: 10, len: u64::MAX });
            notes.add(&Change::Entry { dir: Ino(1), name: name.clone() });
            notes.add(&Change::Removed { dir: Ino(1), name: name.clone(), ino: Ino(9) });
            notes.add(&Change::Unsure { dir: Ino(1), name: name.clone() });
        }
        assert_eq!(notes.data, HashMap::from([(Ino(3), (10, u64::MAX)), (Ino(1), WHOLE)]));
        assert_eq!(notes.attributes, HashSet::from([Ino(2), Ino(9)]));
        assert_eq!((notes.entries.len(), notes.removed.len(), notes.unsure.len()), (1, 1, 1));
        let mut all = Notes::default();
        all.add(&Change::All);
        assert!(all.overflow && !all.is_empty());
        for ino in 0..2 * NOTES_MAX as u64 {
            notes.add(&Change::Attr { ino: Ino(ino) });
        }
        assert!(notes.overflow && (notes.len(), notes.is_empty()) == (0, false));
    }
    #[test]
    fn what_is_pruned_is_pruned_again() {
        let mut prunes = Prunes::default();
        let noted = |ino| {
            let mut notes = Notes::default();
            notes.add(&Change::Attr { ino: Ino(ino) });
            notes
        };
        let (begin, none) = (Instant::now(), || -> Vec<Ino> { unreachable!("there are few") });
        let all = |inos: &[u64]| inos.iter().copied().map(Ino).collect::<HashSet<_>>();
        assert_eq!((prunes.due(begin, none), prunes.next), (all(&[]), None));
        prunes.add(&noted(2));
        assert_eq!((prunes.due(begin, none), prunes.next), (all(&[2]), Some(begin + PRUNE_AGAIN)));
        prunes.add(&noted(3));
        assert_eq!(prunes.due(begin, none), all(&[3]));
        let [first, second, third] = [1, 2, 3].map(|times| begin + PRUNE_AGAIN * times);
        assert_eq!(prunes.due(first, none), all(&[]), "not sooner than a second after the last");
        assert_eq!(prunes.due(second, none), all(&[2, 3]));
        assert_eq!((prunes.due(third, none), prunes.next), (all(&[]), None));
        prunes.add(&Notes { overflow: true, ..Notes::default() });
        assert_eq!(prunes.due(third, || vec![Ino(7)]), all(&[7]));
    }

    #[test]
    fn who_waits_for_the_telling_goes_on_when_it_is_done() {
        let shared = Arc::new(Shared::default());
        let done = Arc::new(AtomicUsize::new(0));
        let wait = || {
            let done = Arc::clone(&done);
            shared.when_told(Told::new(move || {
                let _ = done.fetch_add(1, Ordering::Relaxed);
            }));
        };
        let change = |ino| shared.note(&Change::Attr { ino: Ino(ino) });
        assert!(!shared.lock().is_behind());
        change(2);
        wait();
        assert!(shared.lock().is_behind());
        let first = shared.take(None).unwrap();
        assert_eq!(first.attributes, HashSet::from([Ino(2)]));
        // Of what is being told now somebody may know no more than of what is noted.
        assert!(shared.lock().is_behind());
        wait();
        assert_eq!(done.load(Ordering::Relaxed), 0);
        drop(first);
        assert_eq!(done.load(Ordering::Relaxed), 1);
        drop(shared.take(None).unwrap());
        assert_eq!(done.load(Ordering::Relaxed), 2);
        change(3);
        wait();
        shared.close();
        assert_eq!(done.load(Ordering::Relaxed), 3, "nobody is left to be told");
        wait();
        assert_eq!(done.load(Ordering::Relaxed), 4);
        assert!(shared.take(None).is_none() && !shared.lock().is_behind());
    }
}
