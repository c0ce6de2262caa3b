//! What this process does for its clients. inotify does not say who made a change, and clients are told of their own by
//! their own kernels.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{Change, Changes, DeliveryGuard, Event, Ino, Listener, NameBuf, SessionId, Subscription};

/// Maximum delay between a client's operation and its inotify event.
const MATCH_MAX: Duration = Duration::from_millis(200);
/// Maximum delay between the end of a client's file and the close itself.
const CLOSE_MAX: Duration = Duration::from_millis(50);
/// The most names and inodes. Beyond that, clients receive some of their own changes.
const ENTRIES_MAX: usize = 1 << 16;

/// How long the watcher waits for operations under way. What a slower one does may be told as that of others.
const OPERATION_MAX: Duration = Duration::from_millis(100);
/// The pause between two looks at them.
const OPERATION_INTERVAL: Duration = Duration::from_micros(200);

/// The operations of clients that are under way. What they do is recorded before they end.
#[derive(Debug, Default)]
pub(super) struct Operations {
    /// Its last bit says which of the counts new operations belong to.
    epoch: AtomicUsize,
    active: [AtomicUsize; 2],
}

/// An operation, until dropped.
#[derive(Debug)]
pub(crate) struct OperationGuard<'a>(&'a AtomicUsize);

impl Drop for OperationGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Operations {
    pub(super) fn begin(&self) -> OperationGuard<'_> {
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst) % 2;
            self.active[epoch].fetch_add(1, Ordering::SeqCst);
            let guard = OperationGuard(&self.active[epoch]);
            // Otherwise the watcher may have looked already.
            if self.epoch.load(Ordering::SeqCst) % 2 == epoch {
                return guard;
            }
        }
    }

    /// Waits until the operations that are under way have ended. New ones may begin.
    pub(super) fn wait(&self) {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst) % 2;
        let begin = Instant::now();
        while self.active[epoch].load(Ordering::SeqCst) != 0 && begin.elapsed() < OPERATION_MAX {
            std::thread::sleep(OPERATION_INTERVAL);
        }
    }
}

/// What happens to a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameKind {
    Created,
    Removed,
    MovedFrom,
    MovedTo,
}

/// What happens to an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum InodeKind {
    Data,
    Attributes,
    Closed,
}

/// What clients have done to a name.
#[derive(Debug)]
struct NameRecord {
    /// Each of these causes one event.
    expected: Vec<NameKind>,
    last: Instant,
}

#[derive(Debug, Default)]
struct State {
    names: HashMap<(Ino, NameBuf), NameRecord>,
    inodes: HashMap<(Ino, InodeKind), Instant>,
}

impl State {
    fn add_name(&mut self, (dir, name): (Ino, NameBuf), kind: NameKind) {
        if self.names.len() >= ENTRIES_MAX {
            self.names.clear();
        }
        let now = Instant::now();
        let record = self.names.entry((dir, name)).or_insert(NameRecord { expected: Vec::new(), last: now });
        if now.duration_since(record.last) > MATCH_MAX {
            record.expected.clear();
        }
        record.last = now;
        record.expected.push(kind);
    }

    fn add_inode(&mut self, ino: Ino, kind: InodeKind) {
        if self.inodes.len() >= ENTRIES_MAX {
            self.inodes.clear();
        }
        self.inodes.insert((ino, kind), Instant::now());
    }
}

/// What clients have done a moment ago.
#[derive(Debug, Default)]
pub(super) struct OwnEvents(Mutex<State>);

impl OwnEvents {
    /// Records what clients do from now on, until the subscription is dropped.
    pub(super) fn listen(changes: &Changes) -> (Arc<Self>, Subscription) {
        let own = Arc::<Self>::default();
        let subscription = changes.listen(Recorder(Arc::clone(&own)));
        (own, subscription)
    }

    /// A client's file is closed now. Until then there may have been no time to say so (`CLOSE_MAX`).
    pub(super) fn closed(&self, ino: Ino) {
        lock(&self.0).add_inode(ino, InodeKind::Closed);
    }

    /// Whether an event of a name is a client's. Each of a client's operations has one.
    pub(super) fn take(&self, dir: Ino, name: &NameBuf, kind: NameKind) -> bool {
        let state = &mut *lock(&self.0);
        let Some(record) = state.names.get_mut(&(dir, name.clone())) else { return false };
        let at = record.expected.iter().position(|expected| *expected == kind);
        match at.filter(|_| record.last.elapsed() <= MATCH_MAX) {
            Some(at) => {
                record.expected.remove(at);
                true
            }
            None => false,
        }
    }

    /// Whether clients have just made, removed or moved a name.
    pub(super) fn has_name(&self, dir: Ino, name: &NameBuf) -> bool {
        let state = lock(&self.0);
        state.names.get(&(dir, name.clone())).is_some_and(|record| record.last.elapsed() <= MATCH_MAX)
    }

    /// Whether clients have just done something to an inode. Its events are merged, so they are not counted.
    pub(super) fn has_inode(&self, ino: Ino, kind: InodeKind) -> bool {
        lock(&self.0).inodes.get(&(ino, kind)).is_some_and(|last| last.elapsed() <= MATCH_MAX)
    }

    /// All events up to this time have been seen.
    pub(super) fn seen_until(&self, time: Instant) {
        let state = &mut *lock(&self.0);
        state.names.retain(|_, record| record.last >= time);
        state.inodes.retain(|(_, kind), last| {
            *last + if *kind == InodeKind::Closed { CLOSE_MAX } else { Duration::ZERO } >= time
        });
    }
}

/// Records what clients do.
struct Recorder(Arc<OwnEvents>);

impl Listener for Recorder {
    fn changed(&self, change: &Change, by: SessionId) {
        // Those without a session are of others, and this process passes them on.
        if by == SessionId::default() {
            return;
        }
        let (ino, kind) = match change {
            Change::Data { ino, .. } => (*ino, InodeKind::Data),
            Change::Attr { ino } => (*ino, InodeKind::Attributes),
            _ => return,
        };
        lock(&self.0.0).add_inode(ino, kind);
    }

    fn happened(&self, event: &Event, by: SessionId) {
        if by == SessionId::default() {
            return;
        }
        let state = &mut *lock(&self.0.0);
        match event {
            Event::Created { dir, name, .. } => state.add_name((*dir, name.clone()), NameKind::Created),
            Event::Removed { dir, name, .. } => state.add_name((*dir, name.clone()), NameKind::Removed),
            Event::Renamed { from, to, exchanged, .. } => {
                state.add_name(from.clone(), NameKind::MovedFrom);
                state.add_name(to.clone(), NameKind::MovedTo);
                if *exchanged {
                    state.add_name(to.clone(), NameKind::MovedFrom);
                    state.add_name(from.clone(), NameKind::MovedTo);
                }
            }
            Event::Closed(place) if place.name.is_none() => state.add_inode(place.ino, InodeKind::Closed),
            _ => {}
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_operations_under_way_are_waited_for() {
        let operations = Operations::default();
        let wait = || {
            let begin = Instant::now();
            operations.wait();
            begin.elapsed()
        };
        assert!(wait() < OPERATION_MAX);
        let first = operations.begin();
        assert!(wait() >= OPERATION_MAX, "it does not end");
        drop(first);
        std::thread::scope(|scope| {
            let guard = operations.begin();
            scope.spawn(|| {
                std::thread::sleep(OPERATION_MAX / 4);
                drop(guard);
            });
            let waited = wait();
            assert!((OPERATION_MAX / 4..OPERATION_MAX).contains(&waited), "{waited:?}");
        });
        assert!(wait() < OPERATION_MAX && operations.active.iter().all(|count| count.load(Ordering::SeqCst) == 0));
    }
}
