//! Converts inotify's events to changes. Operations of this process's clients are left out; see [`OwnEvents`].

use std::sync::Arc;
use std::time::Instant;

use ferry_vfs::{Changes, Ino, NameBuf, Subscription};

use super::history::{History, Known};
use super::own::{InodeKind, NameKind, OwnEvents};

/// One event of inotify, with the inodes that clients know.
#[derive(Debug)]
pub(super) struct DirectoryEvent<'a> {
    pub(super) mask: u32,
    pub(super) cookie: u32,
    pub(super) dirs: &'a [Ino],
    /// `None`: the directory itself.
    pub(super) name: Option<&'a NameBuf>,
    pub(super) targets: &'a [Ino],
}

/// A name that was moved away. Its new name follows, if that directory is watched.
#[derive(Debug)]
struct Moved {
    mask: u32,
    cookie: u32,
    dirs: Vec<Ino>,
    name: NameBuf,
    targets: Vec<Ino>,
}

/// Converts events to changes.
#[derive(Debug)]
pub(super) struct DirectoryHistory {
    own: Arc<OwnEvents>,
    _subscription: Subscription,
    moved: Option<Moved>,
}

impl DirectoryHistory {
    pub(super) fn new(changes: &Changes) -> Self {
        let (own, subscription) = OwnEvents::listen(changes);
        Self { own, _subscription: subscription, moved: None }
    }

    /// Records that a client closed a file.
    pub(super) fn closed(&self, ino: Ino) {
        self.own.closed(ino);
    }

    /// Whether half of a rename is pending.
    pub(super) fn is_waiting(&self) -> bool {
        self.moved.is_some()
    }

    /// All events up to this time were added.
    pub(super) fn seen_until(&self, time: Instant) {
        self.own.seen_until(time);
    }

    /// Events were lost.
    pub(super) fn lose(&mut self, history: &mut History) {
        self.moved = None;
        history.lost();
    }

    /// The pending name was moved to an unwatched directory.
    pub(super) fn flush(&mut self, history: &mut History) {
        let Some(moved) = self.moved.take() else { return };
        if !self.is_own(&moved.dirs, &moved.name, NameKind::MovedFrom) {
            let entry = Some((moved.dirs, &moved.name));
            history.add(&known(moved.mask, entry, None, &moved.targets));
        }
    }

    pub(super) fn add(&mut self, event: &DirectoryEvent<'_>, history: &mut History) {
        let has = |kind: u32| event.mask & kind != 0;
        let DirectoryEvent { mask, cookie, dirs, targets, .. } = *event;
        let is_other_half = has(libc::IN_MOVED_TO) && self.moved.as_ref().is_some_and(|moved| moved.cookie == cookie);
        if !is_other_half {
            self.flush(history);
        }
        let Some(name) = event.name else {
            // For other directories the watch of the parent reports this, too.
            if targets.contains(&Ino::ROOT) && !self.are_own(targets, mask) {
                history.add(&Known {
                    mask: mask.into(),
                    entry: None,
                    new_entry: None,
                    targets: targets.to_vec(),
                    target: None,
                });
            }
            return;
        };
        if has(libc::IN_MOVED_FROM) {
            let (dirs, name, targets) = (dirs.to_vec(), name.clone(), targets.to_vec());
            self.moved = Some(Moved { mask, cookie, dirs, name, targets });
        } else if has(libc::IN_MOVED_TO) {
            let is_own = self.is_own(dirs, name, NameKind::MovedTo);
            let to = Some((dirs.to_vec(), name));
            match self.moved.take() {
                Some(moved) => {
                    let was_own = self.is_own(&moved.dirs, &moved.name, NameKind::MovedFrom);
                    if !(is_own && was_own) {
                        history.add(&known(mask, Some((moved.dirs, &moved.name)), to, &moved.targets));
                    }
                }
                None if !is_own => history.add(&known(mask, None, to, targets)),
                None => {}
            }
        } else {
            let is_own = match (has(libc::IN_CREATE), has(libc::IN_DELETE)) {
                (true, _) => self.is_own(dirs, name, NameKind::Created),
                (_, true) => self.is_own(dirs, name, NameKind::Removed),
                _ => self.are_own(targets, mask) || dirs.iter().any(|dir| self.own.has_name(*dir, name)),
            };
            if !is_own {
                let entry = Some((dirs.to_vec(), name));
                let targets = targets.to_vec();
                history.add(&Known { mask: mask.into(), entry, new_entry: None, targets, target: None });
            }
        }
    }

    fn is_own(&self, dirs: &[Ino], name: &NameBuf, kind: NameKind) -> bool {
        // A directory that was found through several mounts has several numbers; one is the client's.
        dirs.iter().any(|dir| self.own.take(*dir, name, kind))
    }

    /// Whether clients have just changed the inodes of an event.
    fn are_own(&self, targets: &[Ino], mask: u32) -> bool {
        let kinds = [
            (libc::IN_MODIFY, InodeKind::Data),
            (libc::IN_ATTRIB, InodeKind::Attributes),
            (libc::IN_CLOSE_WRITE, InodeKind::Closed),
        ];
        let kind = kinds.into_iter().find(|(flag, _)| mask & flag != 0);
        kind.is_some_and(|(_, kind)| targets.iter().any(|ino| self.own.has_inode(*ino, kind)))
    }
}

/// A rename; one half is missing where no client knows the directory.
fn known<'a>(
    mask: u32,
    entry: Option<(Vec<Ino>, &'a NameBuf)>,
    new_entry: Option<(Vec<Ino>, &'a NameBuf)>,
    targets: &[Ino],
) -> Known<'a> {
    let mask = libc::FAN_RENAME | u64::from(mask) & libc::FAN_ONDIR;
    Known { mask, entry, new_entry, targets: targets.to_vec(), target: targets.first().map(|ino| ino.0) }
}

const _: () = assert!(libc::IN_ISDIR as u64 == libc::FAN_ONDIR);

#[cfg(test)]
mod tests {
    use ferry_vfs::{Change, Event, Name, Place, SessionId};

    use super::*;

    const DIR: Ino = Ino(2);
    const FILE: Ino = Ino(9);

    fn name(bytes: &[u8]) -> NameBuf {
        Name::new(bytes).unwrap().to_buf()
    }

    struct Harness {
        changes: Changes,
        history: DirectoryHistory,
        client: SessionId,
    }

    impl Harness {
        fn new() -> Self {
            let changes = Changes::default();
            let history = DirectoryHistory::new(&changes);
            Self { changes, history, client: SessionId::unique() }
        }

        /// Returns the events for inotify events, each with a mask, a cookie and a name.
        fn events(&mut self, events: &[(u32, u32, &NameBuf)]) -> Vec<Event> {
            let mut history = History::default();
            for (mask, cookie, name) in events {
                let event =
                    DirectoryEvent { mask: *mask, cookie: *cookie, dirs: &[DIR], name: Some(name), targets: &[FILE] };
                self.history.add(&event, &mut history);
            }
            history.finish()
        }
    }

    #[test]
    fn an_event_of_a_clients_operation_is_skipped_once() {
        let (mut harness, a) = (Harness::new(), name(b"a"));
        let created = || Event::Created { dir: DIR, name: a.clone(), is_dir: false, ino: Some(FILE) };
        harness.changes.publish_event(harness.client, || Some(created()));
        assert_eq!(harness.events(&[(libc::IN_CREATE, 0, &a)]), []);
        assert_eq!(harness.events(&[(libc::IN_CREATE, 0, &a)]), [created()], "an event of another process");
        harness.changes.publish_event(SessionId::default(), || Some(created()));
        assert_eq!(harness.events(&[(libc::IN_CREATE, 0, &a)]).len(), 1, "an event of another process is reported");
        harness.changes.publish_event(harness.client, || Some(created()));
        harness.history.seen_until(Instant::now());
        assert_eq!(harness.events(&[(libc::IN_CREATE, 0, &a)]).len(), 1, "its event was consumed");
    }

    #[test]
    fn changes_of_files_by_clients_are_left_out() {
        let (mut harness, a) = (Harness::new(), name(b"a"));
        let modified = [(libc::IN_MODIFY, 0, &a), (libc::IN_MODIFY, 0, &a)];
        assert_eq!(harness.events(&modified[..1]), [Event::Modified(Place { ino: DIR, name: Some(a.clone()) })]);
        harness.changes.publish(harness.client, || Change::Data { ino: FILE, offset: 0, len: 1 });
        assert_eq!(harness.events(&modified), []);
        assert_eq!(harness.events(&[(libc::IN_ATTRIB, 0, &a)]).len(), 1, "another kind of change is reported");
        harness.changes.publish_event(harness.client, || Some(Event::Closed(Place { ino: FILE, name: None })));
        harness.history.seen_until(Instant::now());
        assert_eq!(harness.events(&[(libc::IN_CLOSE_WRITE, 0, &a)]), [], "the close was recorded before");
        assert_eq!(harness.events(&modified[..1]).len(), 1);
    }

    #[test]
    fn a_directory_is_reported_once() {
        let (mut harness, sub) = (Harness::new(), name(b"sub"));
        let mut told = |dir, name, targets: &[Ino]| {
            let mut history = History::default();
            let mask = libc::IN_ATTRIB | libc::IN_ISDIR;
            harness.history.add(&DirectoryEvent { mask, cookie: 0, dirs: &[dir], name, targets }, &mut history);
            history.finish()
        };
        assert_eq!(told(DIR, Some(&sub), &[FILE]).len() + told(FILE, None, &[FILE]).len(), 1);
        assert_eq!(told(Ino::ROOT, None, &[Ino::ROOT]).len(), 1);
    }

    #[test]
    fn the_two_halves_of_a_rename_are_one_event() {
        let (mut harness, a, b) = (Harness::new(), name(b"a"), name(b"b"));
        let renamed =
            || Event::Renamed { from: (DIR, a.clone()), to: (DIR, b.clone()), is_dir: false, exchanged: false };
        let (from, to) = ((libc::IN_MOVED_FROM, 7, &a), (libc::IN_MOVED_TO, 7, &b));
        assert_eq!(harness.events(&[from, to]), [renamed()]);
        assert_eq!((harness.events(&[from]), harness.events(&[to])), (vec![], vec![renamed()]), "in two reads");
        harness.changes.publish_event(harness.client, || Some(renamed()));
        assert_eq!(harness.events(&[from, to]), []);
        let came = harness.events(&[to]);
        assert!(matches!(&came[..], [Event::Created { .. }]), "from elsewhere: {came:?}");
        let went = harness.events(&[from, (libc::IN_CREATE, 0, &b)]);
        assert!(matches!(&went[..], [Event::Removed { .. }, Event::Created { .. }]), "to elsewhere: {went:?}");
        assert_eq!(harness.events(&[from]), []);
        assert!(harness.history.is_waiting());
        let mut history = History::default();
        harness.history.flush(&mut history);
        assert!(matches!(&history.finish()[..], [Event::Removed { .. }]) && !harness.history.is_waiting());
    }
}
