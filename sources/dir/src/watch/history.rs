//! Converts fanotify's events to events for clients, in order.
//!
//! The kernel merges unread events of one name and inode. Their parts are reported in the usual order of programs: create, change,
//! write, close, remove.

use std::time::{Duration, Instant};

use ferry_vfs::{Event, Ino, NameBuf, Place};

/// How long the watcher waits before it compares events with what clients did. Data that they write are recorded after
/// they were written, and the other half of a rename comes meanwhile, too.
pub(super) const DELAY: Duration = Duration::from_millis(2);

/// A name in directories that clients know: one for each mount through which they found it.
pub(super) type Names<'a> = (Vec<Ino>, &'a NameBuf);

/// Makes an event of a place.
type MakeEvent = fn(Place) -> Event;

/// One event of the kernel, with the inodes that clients know.
#[derive(Debug)]
pub(super) struct Known<'a> {
    pub(super) mask: u64,
    pub(super) entry: Option<Names<'a>>,
    /// The new place, of a rename.
    pub(super) new_entry: Option<Names<'a>>,
    pub(super) targets: Vec<Ino>,
    /// The handle of what was moved: the other half of an exchange has another.
    pub(super) target: Option<u64>,
}

/// Turns events into what happened.
#[derive(Debug, Default)]
pub(crate) struct History {
    out: Vec<Event>,
    /// The handle of what the last rename moved, if that is the last event.
    moved: Option<u64>,
    /// Since when the last event waits.
    since: Option<Instant>,
}

impl History {
    /// Returns what happened.
    pub(super) fn finish(self) -> Vec<Event> {
        self.out
    }

    /// Returns what happened, but for what the next event may be a part of: reads end anywhere. The kernel tells both
    /// parts at once, so a read that began later has the second one if there is any.
    pub(super) fn take(&mut self, read_begin: Instant) -> Vec<Event> {
        let kept_since = self.since.take().filter(|_| self.out.len() == 1);
        let since = kept_since.unwrap_or(read_begin);
        if !self.is_waiting() || read_begin.saturating_duration_since(since) >= DELAY {
            return std::mem::take(&mut self.out);
        }
        self.since = Some(since);
        let next = self.out.pop();
        std::mem::replace(&mut self.out, next.into_iter().collect())
    }

    /// Whether the last event may be half of a removal or an exchange.
    pub(super) fn is_waiting(&self) -> bool {
        match self.out.last() {
            Some(Event::Attributes(Place { name: None, .. })) => true,
            Some(Event::Renamed { exchanged: false, .. }) => self.moved.is_some(),
            _ => false,
        }
    }

    /// Events were lost.
    pub(super) fn lost(&mut self) {
        self.out.push(Event::Lost);
    }

    pub(super) fn add(&mut self, event: &Known<'_>) {
        let has = |kinds: u64| event.mask & kinds != 0;
        let is_dir = has(libc::FAN_ONDIR);
        if has(libc::FAN_RENAME) {
            return self.rename(event, is_dir);
        }
        let before = self.out.len();
        if let Some((dirs, name)) = &event.entry
            && has(libc::FAN_CREATE)
        {
            let ino = event.targets.first().copied();
            self.out.extend(dirs.iter().map(|dir| Event::Created { dir: *dir, name: (*name).clone(), is_dir, ino }));
        }
        let places = || -> Vec<Place> {
            match &event.entry {
                Some((dirs, name)) if !dirs.is_empty() => {
                    dirs.iter().map(|dir| Place { ino: *dir, name: Some((*name).clone()) }).collect()
                }
                _ => event.targets.iter().map(|ino| Place { ino: *ino, name: None }).collect(),
            }
        };
        let kinds: [(u64, MakeEvent); 3] = [
            (libc::FAN_ATTRIB, Event::Attributes),
            (libc::FAN_MODIFY, Event::Modified),
            (libc::FAN_CLOSE_WRITE, Event::Closed),
        ];
        for (_, kind) in kinds.iter().filter(|(mask, _)| has(*mask)) {
            self.out.extend(places().into_iter().map(kind));
        }
        if let Some((dirs, name)) = &event.entry
            && has(libc::FAN_DELETE)
        {
            let ino = event.targets.first().copied();
            // The kernel tells of the number of names before it tells of the name. A client's does so, too.
            if let (Some(Event::Attributes(Place { ino: last, name: None })), Some(ino)) = (self.out.last(), ino)
                && *last == ino
            {
                self.out.pop();
            }
            let removed = |dir: &Ino| Event::Removed { dir: *dir, name: (*name).clone(), is_dir, ino };
            self.out.extend(dirs.iter().map(removed));
        }
        if self.out.len() != before {
            self.moved = None;
        }
    }

    /// A rename of which clients know one directory only is a new or a removed name for them. So it is where they know a
    /// directory through several mounts, for nothing says which of the old and the new place belong together.
    fn rename(&mut self, event: &Known<'_>, is_dir: bool) {
        let places = |names: &Option<Names<'_>>| -> Vec<(Ino, NameBuf)> {
            let names = names.as_ref().map(|(dirs, name)| dirs.iter().map(|dir| (*dir, (*name).clone())).collect());
            names.unwrap_or_default()
        };
        let (from, to) = (places(&event.entry), places(&event.new_entry));
        if from.is_empty() && to.is_empty() {
            // Elsewhere in the file system: it is not between the two halves of anything here.
            return;
        }
        let moved = std::mem::replace(&mut self.moved, event.target);
        match (&from[..], &to[..]) {
            ([from], [to]) => {
                // The kernel reports an exchange as two renames, one right after the other.
                if let Some(Event::Renamed { from: other, to: others, exchanged, .. }) = self.out.last_mut()
                    && (from, to) == (&*others, &*other)
                    && !*exchanged
                    && moved.is_some()
                    && moved != event.target
                {
                    *exchanged = true;
                    self.moved = None;
                    return;
                }
                self.out.push(Event::Renamed { from: from.clone(), to: to.clone(), is_dir, exchanged: false });
            }
            _ => {
                let ino = event.targets.first().copied();
                self.out.extend(from.into_iter().map(|(dir, name)| Event::Removed { dir, name, is_dir, ino }));
                self.out.extend(to.into_iter().map(|(dir, name)| Event::Created { dir, name, is_dir, ino }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::Name;

    use super::*;

    fn name(bytes: &[u8]) -> NameBuf {
        Name::new(bytes).unwrap().to_buf()
    }

    fn known<'a>(
        mask: u64,
        entry: Option<(u64, &'a NameBuf)>,
        new: Option<(u64, &'a NameBuf)>,
        moved: u64,
    ) -> Known<'a> {
        let names = |names: Option<(u64, &'a NameBuf)>| {
            names.map(|(dir, name)| (if dir == 0 { vec![] } else { vec![Ino(dir)] }, name))
        };
        Known { mask, entry: names(entry), new_entry: names(new), targets: vec![Ino(9)], target: Some(moved) }
    }

    #[test]
    fn merged_events_are_in_the_usual_order() {
        let file = name(b"file");
        let all = libc::FAN_DELETE | libc::FAN_CLOSE_WRITE | libc::FAN_MODIFY | libc::FAN_ATTRIB | libc::FAN_CREATE;
        let mut history = History::default();
        history.add(&known(all, Some((2, &file)), None, 9));
        let place = || Place { ino: Ino(2), name: Some(file.clone()) };
        let (dir, is_dir) = (Ino(2), false);
        let expected = [
            Event::Created { dir, name: file.clone(), is_dir, ino: Some(Ino(9)) },
            Event::Attributes(place()),
            Event::Modified(place()),
            Event::Closed(place()),
            Event::Removed { dir, name: file.clone(), is_dir, ino: Some(Ino(9)) },
        ];
        assert_eq!(history.finish(), expected);
    }

    #[test]
    fn the_number_of_names_is_part_of_a_removal() {
        let file = name(b"file");
        let mut history = History::default();
        history.add(&known(libc::FAN_ATTRIB, None, None, 9));
        history.add(&known(libc::FAN_DELETE, Some((2, &file)), None, 9));
        assert!(matches!(&history.finish()[..], [Event::Removed { ino: Some(Ino(9)), .. }]));
    }

    #[test]
    fn a_removal_and_an_exchange_may_come_in_two_reads() {
        let (a, b) = (name(b"a"), name(b"b"));
        let halves = [
            [known(libc::FAN_ATTRIB, None, None, 9), known(libc::FAN_DELETE, Some((2, &a)), None, 9)],
            [
                known(libc::FAN_RENAME, Some((2, &a)), Some((3, &b)), 7),
                known(libc::FAN_RENAME, Some((3, &b)), Some((2, &a)), 8),
            ],
        ];
        for halves in halves {
            let mut history = History::default();
            history.add(&known(libc::FAN_CREATE, Some((2, &b)), None, 5));
            history.add(&halves[0]);
            let now = Instant::now();
            assert!(matches!(&history.take(now)[..], [Event::Created { .. }]) && history.is_waiting());
            history.add(&halves[1]);
            let told = history.take(now);
            assert!(matches!(&told[..], [Event::Removed { .. } | Event::Renamed { exchanged: true, .. }]), "{told:?}");
            assert!(!history.is_waiting() && history.take(now).is_empty());
            // What comes next may be something else.
            history.add(&halves[0]);
            assert!(history.take(now).is_empty());
            history.add(&known(libc::FAN_CREATE, Some((2, &a)), None, 5));
            assert_eq!(history.take(now).len(), 2);
        }
    }

    #[test]
    fn half_an_exchange_is_reported_soon_despite_other_events() {
        let (a, b) = (name(b"a"), name(b"b"));
        let mut history = History::default();
        let begin = Instant::now();
        history.add(&known(libc::FAN_RENAME, Some((2, &a)), Some((3, &b)), 7));
        assert!(history.take(begin).is_empty());
        let elsewhere = |history: &mut History| history.add(&known(libc::FAN_MODIFY, Some((0, &a)), None, 0));
        let unknown = Known { targets: Vec::new(), ..known(libc::FAN_MODIFY, Some((0, &a)), None, 5) };
        history.add(&unknown);
        assert!(history.take(begin + DELAY / 2).is_empty());
        history.add(&unknown);
        assert_eq!(history.take(begin + DELAY).len(), 1);
        // The time of the next one is its own.
        history.add(&known(libc::FAN_RENAME, Some((2, &b)), Some((3, &a)), 7));
        assert!(history.take(begin + DELAY * 2).is_empty());
        elsewhere(&mut history);
        assert_eq!(history.take(begin + DELAY * 2).len(), 2);
    }

    #[test]
    fn renames_are_reported_for_each_path_of_a_directory() {
        let (a, b) = (name(b"a"), name(b"b"));
        let mut history = History::default();
        history.add(&Known {
            mask: libc::FAN_RENAME,
            entry: Some((vec![Ino(2), Ino(12)], &a)),
            new_entry: Some((vec![Ino(3)], &b)),
            targets: vec![Ino(9)],
            target: Some(7),
        });
        let gone = |dir| Event::Removed { dir: Ino(dir), name: a.clone(), is_dir: false, ino: Some(Ino(9)) };
        let new = Event::Created { dir: Ino(3), name: b.clone(), is_dir: false, ino: Some(Ino(9)) };
        assert_eq!(history.finish(), [gone(2), gone(12), new]);
    }

    #[test]
    fn events_without_a_known_directory_name_the_inode() {
        let file = name(b"file");
        let mut history = History::default();
        history.add(&known(libc::FAN_MODIFY, Some((0, &file)), None, 9));
        history.add(&known(libc::FAN_CREATE, Some((0, &file)), None, 9));
        assert_eq!(history.finish(), [Event::Modified(Place { ino: Ino(9), name: None })]);
    }

    #[test]
    fn two_renames_that_swap_two_inodes_are_an_exchange() {
        let (a, b) = (name(b"a"), name(b"b"));
        let rename = |from, to, moved| known(libc::FAN_RENAME, Some((2, from)), Some((3, to)), moved);
        let back = |moved| known(libc::FAN_RENAME, Some((3, &b)), Some((2, &a)), moved);
        let count = |events: &[Known<'_>]| {
            let mut history = History::default();
            events.iter().for_each(|event| history.add(event));
            history.finish()
        };
        let exchanged = count(&[rename(&a, &b, 7), back(8)]);
        assert!(matches!(&exchanged[..], [Event::Renamed { exchanged: true, .. }]), "{exchanged:?}");
        assert_eq!(count(&[rename(&a, &b, 7), back(7)]).len(), 2, "there and back");
        let between = known(libc::FAN_CREATE, Some((2, &a)), None, 8);
        assert_eq!(count(&[rename(&a, &b, 7), between, back(8)]).len(), 3, "something happened in between");
        let elsewhere = || known(libc::FAN_RENAME, Some((0, &a)), Some((0, &b)), 5);
        assert_eq!(count(&[rename(&a, &b, 7), elsewhere(), back(7)]).len(), 2, "there and back, beside another");
        assert_eq!(count(&[rename(&a, &b, 7), elsewhere(), back(8)]).len(), 1, "an exchange beside another rename");
    }

    #[test]
    fn a_rename_from_or_to_elsewhere_is_a_new_or_a_removed_name() {
        let (a, b) = (name(b"a"), name(b"b"));
        let mut history = History::default();
        history.add(&known(libc::FAN_RENAME, Some((0, &a)), Some((3, &b)), 7));
        history.add(&known(libc::FAN_RENAME | libc::FAN_ONDIR, Some((2, &a)), Some((0, &b)), 7));
        let expected = [
            Event::Created { dir: Ino(3), name: b.clone(), is_dir: false, ino: Some(Ino(9)) },
            Event::Removed { dir: Ino(2), name: a.clone(), is_dir: true, ino: Some(Ino(9)) },
        ];
        assert_eq!(history.finish(), expected);
    }
}
