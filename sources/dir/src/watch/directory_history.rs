//! What inotify's events say happened. What clients of this process did is left out; see [`OwnEvents`].

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

/// A name that was moved away. Its new place follows, if it is watched.
#[derive(Debug)]
struct Moved {
    mask: u32,
    cookie: u32,
    dirs: Vec<Ino>,
    name: NameBuf,
    targets: Vec<Ino>,
}

/// Turns events into what happened.
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

    /// A client's file is closed now.
    pub(super) fn closed(&self, ino: Ino) {
        self.own.closed(ino);
    }

    /// Whether half of a rename waits for the other.
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

    /// The name that was moved away last has not come to a watched place.
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
            // Of other directories the watch of the parent tells this, too.
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
        // Of a directory that was found through several mounts, one number is the client's.
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

    struct Tried {
        changes: Changes,
        history: DirectoryHistory,
        client: SessionId,
    }

    impl Tried {
        fn new() -> Self {
            let changes = Changes::default();
            let history = DirectoryHistory::new(&changes);
            Self { changes, history, client: SessionId::unique() }
        }

        /// What is told of events, each with a mask, a cookie and a name.
        fn told(&mut self, events: &[(u32, u32, &NameBuf)]) -> Vec<Event> {
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
        let (mut tried, a) = (Tried::new(), name(b"a"));
        let created = || Event::Created { dir: DIR, name: a.clone(), is_dir: false, ino: Some(FILE) };
        tried.changes.publish_event(tried.client, || Some(created()));
        assert_eq!(tried.told(&[(libc::IN_CREATE, 0, &a)]), []);
        assert_eq!(tried.told(&[(libc::IN_CREATE, 0, &a)]), [created()], "somebody else's");
        tried.changes.publish_event(SessionId::default(), || Some(created()));
        assert_eq!(tried.told(&[(libc::IN_CREATE, 0, &a)]).len(), 1, "what is passed on is not this process's");
        tried.changes.publish_event(tried.client, || Some(created()));
        tried.history.seen_until(Instant::now());
        assert_eq!(tried.told(&[(libc::IN_CREATE, 0, &a)]).len(), 1, "its event has been seen");
    }

    #[test]
    fn changes_of_files_by_clients_are_left_out() {
        let (mut tried, a) = (Tried::new(), name(b"a"));
        let modified = [(libc::IN_MODIFY, 0, &a), (libc::IN_MODIFY, 0, &a)];
        assert_eq!(tried.told(&modified[..1]), [Event::Modified(Place { ino: DIR, name: Some(a.clone()) })]);
        tried.changes.publish(tried.client, || Change::Data { ino: FILE, offset: 0, len: 1 });
        assert_eq!(tried.told(&modified), []);
        assert_eq!(tried.told(&[(libc::IN_ATTRIB, 0, &a)]).len(), 1, "that is something else");
        tried.changes.publish_event(tried.client, || Some(Event::Closed(Place { ino: FILE, name: None })));
        tried.history.seen_until(Instant::now());
        assert_eq!(tried.told(&[(libc::IN_CLOSE_WRITE, 0, &a)]), [], "it is closed after it was said");
        assert_eq!(tried.told(&modified[..1]).len(), 1);
    }

    #[test]
    fn a_directory_is_reported_once() {
        let (mut tried, sub) = (Tried::new(), name(b"sub"));
        let mut told = |dir, name, targets: &[Ino]| {
            let mut history = History::default();
            let mask = libc::IN_ATTRIB | libc::IN_ISDIR;
            tried.history.add(&DirectoryEvent { mask, cookie: 0, dirs: &[dir], name, targets }, &mut history);
            history.finish()
        };
        assert_eq!(told(DIR, Some(&sub), &[FILE]).len() + told(FILE, None, &[FILE]).len(), 1);
        assert_eq!(told(Ino::ROOT, None, &[Ino::ROOT]).len(), 1);
    }

    #[test]
    fn the_two_halves_of_a_rename_are_one_event() {
        let (mut tried, a, b) = (Tried::new(), name(b"a"), name(b"b"));
        let renamed =
            || Event::Renamed { from: (DIR, a.clone()), to: (DIR, b.clone()), is_dir: false, exchanged: false };
        let (from, to) = ((libc::IN_MOVED_FROM, 7, &a), (libc::IN_MOVED_TO, 7, &b));
        assert_eq!(tried.told(&[from, to]), [renamed()]);
        assert_eq!((tried.told(&[from]), tried.told(&[to])), (vec![], vec![renamed()]), "in two reads");
        tried.changes.publish_event(tried.client, || Some(renamed()));
        assert_eq!(tried.told(&[from, to]), []);
        let came = tried.told(&[to]);
        assert!(matches!(&came[..], [Event::Created { .. }]), "from elsewhere: {came:?}");
        let went = tried.told(&[from, (libc::IN_CREATE, 0, &b)]);
        assert!(matches!(&went[..], [Event::Removed { .. }, Event::Created { .. }]), "to elsewhere: {went:?}");
        assert_eq!(tried.told(&[from]), []);
        assert!(tried.history.is_waiting());
        let mut history = History::default();
        tried.history.flush(&mut history);
        assert!(matches!(&history.finish()[..], [Event::Removed { .. }]) && !tried.history.is_waiting());
    }
}
