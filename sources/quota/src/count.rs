//! Counts the usage of a tree: at the start, and again when others may have changed it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_vfs::sync::write;
use ferry_vfs::{Caller, DirItem, DirOutput, DirRange, Entry, Errno, FileSystem, FileType, Handle, Ino, Name, OFlags};

use crate::counter::CountError;
use crate::{Quota, storage};

/// Entries per call to the source.
const ENTRIES: usize = 512;
/// The minimum time between two counts, also of a small tree.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The maximum part of the time for counts that clients' requests cause.
const PAUSE_FACTOR: u32 = 20;
/// The maximum pause after a count that failed: a client that has no room waits for it. It doubles with each failure.
const FAILURE_PAUSE_MAX: Duration = Duration::from_secs(60);
/// How often a tree that grows is counted without a reason, and the part of the time for that.
const PERIOD_MIN: Duration = Duration::from_secs(60);
const PERIOD_FACTOR: u32 = 50;

/// What a tree holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) bytes: i64,
    pub(crate) files: i64,
}

impl Counted {
    fn add(&mut self, bytes: i64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.files += 1;
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        self.counter.end();
    }
}

/// A listing with entries.
#[derive(Default)]
struct Listing {
    entries: Vec<Entry>,
    /// Names whose entries the source could not find.
    others: Vec<Vec<u8>>,
    next: Option<u64>,
    items: usize,
}

impl DirOutput for Listing {
    fn fits(&self, _: &[u8]) -> bool {
        self.items < ENTRIES
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        self.items += 1;
        self.next = Some(item.next);
        match entry {
            Some(entry) => self.entries.push(*entry),
            None if matches!(item.name, b"." | b"..") => {}
            None => self.others.push(item.name.to_vec()),
        }
    }
}

fn warn(error: &CountError) {
    tracing::warn!(errno = %error.errno, "{error}");
}

impl Quota {
    /// Starts the thread that counts again: soon after a request did not fit or a client asked for the room, and from
    /// time to time while the tree grows.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn begin(self: &Arc<Self>) -> std::io::Result<()> {
        let (quota, counter) = (Arc::downgrade(self), Arc::clone(&self.counter));
        let count = move || {
            let (mut took, mut failure_pause, mut counted) = (Duration::ZERO, Duration::ZERO, None);
            let mut unreadable = None;
            while let Some(is_requested) = counter.wait(PERIOD_MIN.max(took * PERIOD_FACTOR)) {
                let Some(quota) = quota.upgrade() else { return };
                let balance = quota.bytes.balance();
                if is_requested || counted != Some(balance) {
                    let begun = Instant::now();
                    let outcome = quota.try_recount();
                    took = begun.elapsed();
                    let is_right = matches!(outcome, Ok(true));
                    counted = is_right.then(|| quota.bytes.balance());
                    failure_pause = match outcome {
                        Ok(_) => {
                            unreadable = None;
                            Duration::ZERO
                        }
                        Err(error) => {
                            // Once: it may stay so for weeks.
                            if unreadable.replace(error.inode) != Some(error.inode) {
                                warn(&error);
                            }
                            (failure_pause * 2).clamp(PAUSE_MIN, FAILURE_PAUSE_MAX)
                        }
                    };
                    if !is_right && is_requested {
                        counter.request();
                    }
                }
                drop(quota);
                if !counter.pause(PAUSE_MIN.max(took * PAUSE_FACTOR).max(failure_pause)) {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("quota".into()).spawn(count).map(drop)
    }

    /// Counts the tree again and corrects the accounts. Returns `false` if that was not possible, because requests
    /// removed or moved something meanwhile, or because a directory cannot be read.
    pub fn recount(&self) -> bool {
        self.try_recount().inspect_err(warn).unwrap_or(false)
    }

    fn try_recount(&self) -> Result<bool, CountError> {
        // Corrections of charged inodes also apply to their charges; otherwise the next request would find them
        // again.
        let cx = Caller::default();
        for held in self.charges.all() {
            self.settle(&cx, held, None);
        }
        let _counting = write(&self.counting);
        let Some(removals) = self.removals.quiet() else { return Ok(false) };
        let (bytes, files) = (self.bytes.balance(), self.files.balance());
        let mut is_settled = true;
        self.charges.for_each(|charge| is_settled &= charge.is_settled());
        if !is_settled {
            return Ok(false);
        }
        let mut counted = self.walk()?;
        // Those have no name, so the walk did not find them.
        self.charges.for_each(|charge| {
            if charge.is_orphan() {
                counted.add(charge.bytes());
            }
        });
        if self.removals.quiet() != Some(removals) {
            return Ok(false);
        }
        let corrected = (self.bytes.correct(bytes, counted.bytes), self.files.correct(files, counted.files));
        if corrected != (0, 0) {
            tracing::debug!(bytes = corrected.0, files = corrected.1, "others changed the tree of a quota");
        }
        Ok(true)
    }

    /// Counts all inodes that have a name, each once.
    pub(crate) fn walk(&self) -> Result<Counted, CountError> {
        let cx = Caller::default();
        let mut counted = Counted::default();
        counted
            .add(storage(&self.source.getattr(&cx, Ino::ROOT, None).map_err(|errno| CountError { inode: 0, errno })?));
        // Each of both holds a reference, so that the numbers stay valid.
        let (mut dirs, mut links) = (vec![Ino::ROOT], HashSet::new());
        let mut result = Ok(());
        while let Some(dir) = dirs.pop() {
            if result.is_ok() {
                result = self.walk_dir(&cx, dir, &mut counted, (&mut dirs, &mut links));
            }
            if dir != Ino::ROOT {
                self.forget(dir, 1);
            }
        }
        links.into_iter().for_each(|ino| self.forget(ino, 1));
        result.map(|()| counted)
    }

    fn walk_dir(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        counted: &mut Counted,
        below: (&mut Vec<Ino>, &mut HashSet<Ino>),
    ) -> Result<(), CountError> {
        let handle = match self.source.opendir(cx, ino, OFlags::RDONLY) {
            // It was removed meanwhile.
            Err(Errno::NOENT | Errno::STALE)
                if self.source.getattr(cx, ino, None).map_or(true, |attr| attr.nlink == 0) =>
            {
                return Ok(());
            }
            other => other.map_err(|errno| self.unreadable(cx, ino, errno))?,
        };
        let result = self.walk_entries(cx, (ino, handle), counted, below);
        self.source.releasedir(cx, ino, handle);
        result.map_err(|errno| self.unreadable(cx, ino, errno))
    }

    fn unreadable(&self, cx: &Caller<'_>, ino: Ino, errno: Errno) -> CountError {
        CountError { inode: self.source.getattr(cx, ino, None).map_or(0, |attr| attr.ino), errno }
    }

    fn walk_entries(
        &self,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        counted: &mut Counted,
        (dirs, links): (&mut Vec<Ino>, &mut HashSet<Ino>),
    ) -> Result<(), Errno> {
        let mut offset = 0;
        loop {
            let mut listing = Listing::default();
            let mut listed = self.source.readdir(cx, &DirRange { ino, handle, offset, plus: true }, &mut listing);
            for name in &listing.others {
                match Name::new(name).and_then(|name| self.source.lookup(cx, ino, name)) {
                    Ok(entry) => listing.entries.push(entry),
                    Err(Errno::NOENT | Errno::STALE) => {}
                    Err(errno) => listed = Err(errno),
                }
            }
            for Entry { ino, attr, .. } in listing.entries {
                let is_dir = attr.kind() == FileType::Directory;
                if is_dir || attr.nlink < 2 || links.insert(ino) {
                    counted.add(storage(&attr));
                    if is_dir {
                        dirs.push(ino);
                    }
                    if is_dir || attr.nlink > 1 {
                        continue;
                    }
                }
                self.forget(ino, 1);
            }
            match (listed, listing.next) {
                // The directory was removed meanwhile.
                (Err(Errno::NOENT | Errno::STALE), _) | (Ok(()), None) => return Ok(()),
                (Err(errno), _) => return Err(errno),
                (Ok(()), Some(next)) => offset = next,
            }
        }
    }
}
