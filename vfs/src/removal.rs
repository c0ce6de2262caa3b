//! The sticky bit, for names that a client has cached and that refer to another file by now.
//!
//! A client's kernel applies Linux's rule (`may_delete`) to the file that it has cached under a name, and then sends the
//! name. By then the name may refer to another user's file. So exports apply the rule again to the current file. They
//! know a caller's user id, but not its capabilities, and not always the user (`FUSE_ALLOW_IDMAP`). If the id does not
//! allow the removal, the client must look the name up again (`STALE`). It then applies the rule itself to the file that
//! it found.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::sync::lock;
use crate::{Caller, Errno, FileSystem, Ino, Name, NameBuf, RenameFlags, Result};

const S_ISVTX: u32 = 0o1000;
/// The maximum number of names that one client must look up again. With more, the oldest ones are forgotten, and checked
/// once more.
const NAMES_MAX: usize = 256;
/// The time limit for the new lookup. A client's kernel does it at once.
const RECHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// A name that a client must look up again.
#[derive(Debug)]
struct Recheck {
    dir: Ino,
    name: NameBuf,
    /// The inode that the client received for the name since.
    found: Option<Ino>,
    since: Instant,
}

/// The names that one client must look up again. See the module documentation.
#[derive(Debug, Default)]
pub struct Removals {
    rechecks: Mutex<VecDeque<Recheck>>,
    /// The number of `rechecks`, readable without the lock.
    count: AtomicUsize,
}

impl Removals {
    /// Checks whether a caller may remove a name from a directory (unlink, rmdir).
    ///
    /// # Errors
    /// `STALE`: the client must look the name up again. Those of [`FileSystem::getattr`] and [`FileSystem::lookup`]; a
    /// missing name is no error here, because the removal reports it.
    pub fn may_remove(&self, source: &dyn FileSystem, cx: &Caller<'_>, at: (Ino, Name<'_>)) -> Result<()> {
        let Some(found) = refused(source, cx, at)? else { return Ok(()) };
        let mut rechecks = self.lock();
        while rechecks.front().is_some_and(|oldest| oldest.since.elapsed() > RECHECK_TIMEOUT) {
            rechecks.pop_front();
        }
        let known = rechecks.iter().position(|recheck| recheck.is_of(at));
        let may = known.is_some_and(|index| rechecks[index].found == Some(found));
        if !may {
            if let Some(index) = known {
                rechecks.remove(index);
            }
            if rechecks.len() == NAMES_MAX {
                rechecks.pop_front();
            }
            rechecks.push_back(Recheck { dir: at.0, name: at.1.to_buf(), found: None, since: Instant::now() });
        }
        self.count.store(rechecks.len(), Ordering::Relaxed);
        if may { Ok(()) } else { Err(Errno::STALE) }
    }

    /// Checks whether a caller may rename. Both names are checked at once, because the client retries only once.
    ///
    /// # Errors
    /// As for [`Self::may_remove`].
    pub fn may_rename(
        &self,
        source: &dyn FileSystem,
        cx: &Caller<'_>,
        (from, to): ((Ino, Name<'_>), (Ino, Name<'_>)),
        flags: RenameFlags,
    ) -> Result<()> {
        let replaced = match flags.contains(RenameFlags::NOREPLACE) {
            true => Ok(()),
            false => self.may_remove(source, cx, to),
        };
        self.may_remove(source, cx, from).and(replaced)
    }

    /// Records the result of a lookup of a name (`None`: it does not exist, or was moved). Call it before the client
    /// receives the result.
    pub fn record_lookup(&self, (dir, name): (Ino, Name<'_>), found: Option<Ino>) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Some(recheck) = self.lock().iter_mut().find(|recheck| recheck.is_of((dir, name))) {
            recheck.found = found;
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Recheck>> {
        lock(&self.rechecks)
    }
}

impl Recheck {
    fn is_of(&self, (dir, name): (Ino, Name<'_>)) -> bool {
        self.dir == dir && self.name.as_name().as_bytes() == name.as_bytes()
    }
}

/// Returns the inode of a name that the sticky bit forbids this user to remove (Linux's `check_sticky`).
fn refused(source: &dyn FileSystem, cx: &Caller<'_>, (dir, name): (Ino, Name<'_>)) -> Result<Option<Ino>> {
    if cx.uid == 0 {
        return Ok(None);
    }
    let attr = source.getattr(cx, dir, None)?;
    if attr.mode & S_ISVTX == 0 || attr.uid == cx.uid {
        return Ok(None);
    }
    match source.lookup(cx, dir, name) {
        Ok(entry) => {
            source.forget(entry.ino, 1);
            Ok((entry.attr.uid != cx.uid).then_some(entry.ino))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::{Attr, Entry, FileType, Handle};

    const NOBODY: u32 = u32::MAX;

    /// A directory, and what is in it, by owner.
    struct Directory {
        mode: u32,
        uid: u32,
        files: Mutex<HashMap<&'static [u8], (Ino, u32)>>,
    }

    impl FileSystem for Directory {
        fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
            let attr = Attr::new(ino, FileType::Directory, self.mode);
            Ok(Attr { mode: attr.mode | self.mode, uid: self.uid, ..attr })
        }

        fn lookup(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
            let (ino, uid) = *self.files.lock().unwrap().get(name.as_bytes()).ok_or(Errno::NOENT)?;
            Ok(Entry::new(ino, Attr { uid, ..Attr::new(ino, FileType::RegularFile, 0o644) }))
        }
    }

    fn directory(mode: u32, uid: u32) -> Directory {
        let files = HashMap::from([(&b"roots"[..], (Ino(2), 0)), (b"own", (Ino(3), 7))]);
        Directory { mode, uid, files: Mutex::new(files) }
    }

    fn at(name: &'static [u8]) -> (Ino, Name<'static>) {
        (Ino::ROOT, Name::new(name).unwrap())
    }

    fn user(uid: u32) -> Caller<'static> {
        Caller { uid, ..Caller::default() }
    }

    #[test]
    fn the_sticky_bit_applies_to_the_current_file() {
        for (mode, dir_uid, uid, name, outcome) in [
            (0o777, 0, 7, &b"roots"[..], Ok(())),
            (0o1777, 0, 0, b"own", Ok(())),
            (0o1777, 0, 7, b"own", Ok(())),
            (0o1777, 0, 8, b"own", Err(Errno::STALE)),
            (0o1777, 0, 7, b"roots", Err(Errno::STALE)),
            (0o1777, 7, 7, b"roots", Ok(())),
            (0o1777, 0, 7, b"none", Ok(())),
            // The protocol does not name the caller.
            (0o777, 0, NOBODY, b"roots", Ok(())),
            (0o1777, 0, NOBODY, b"own", Err(Errno::STALE)),
        ] {
            let result = Removals::default().may_remove(&directory(mode, dir_uid), &user(uid), at(name));
            assert_eq!(result, outcome, "{mode:o} {dir_uid} {uid} {name:?}");
        }
    }

    #[test]
    fn after_another_lookup_a_client_may_remove_the_file_found() {
        let (source, removals) = (directory(0o1777, 0), Removals::default());
        let remove = || removals.may_remove(&source, &user(7), at(b"roots"));
        assert_eq!(remove(), Err(Errno::STALE));
        // There was no lookup.
        assert_eq!(remove(), Err(Errno::STALE));
        removals.record_lookup(at(b"roots"), Some(Ino(2)));
        assert_eq!(remove(), Ok(()));
        // Another file has the name.
        source.files.lock().unwrap().insert(b"roots", (Ino(9), 0));
        assert_eq!(remove(), Err(Errno::STALE));
        removals.record_lookup(at(b"roots"), Some(Ino(9)));
        assert_eq!(remove(), Ok(()));
        // A later lookup found nothing, or another file.
        for since in [None, Some(Ino(2))] {
            removals.record_lookup(at(b"roots"), since);
            assert_eq!(remove(), Err(Errno::STALE), "{since:?}");
            removals.record_lookup(at(b"roots"), Some(Ino(9)));
            assert_eq!(remove(), Ok(()));
        }
    }

    #[test]
    fn both_names_of_a_rename_are_checked_at_once() {
        let (source, removals) = (directory(0o1777, 0), Removals::default());
        let rename = |flags| removals.may_rename(&source, &user(8), (at(b"roots"), at(b"own")), flags);
        assert_eq!(rename(RenameFlags::empty()), Err(Errno::STALE));
        removals.record_lookup(at(b"own"), Some(Ino(3)));
        assert_eq!(rename(RenameFlags::empty()), Err(Errno::STALE));
        removals.record_lookup(at(b"roots"), Some(Ino(2)));
        assert_eq!(rename(RenameFlags::empty()), Ok(()));
        assert_eq!(rename(RenameFlags::EXCHANGE), Ok(()));
        // A target that is not replaced is not checked.
        let other = Removals::default();
        let keep = |uid, from| other.may_rename(&source, &user(uid), (at(from), at(b"roots")), RenameFlags::NOREPLACE);
        assert_eq!(keep(7, b"own"), Ok(()));
        assert_eq!(keep(8, b"own"), Err(Errno::STALE));
    }

    #[test]
    fn names_to_look_up_again_are_limited() {
        let (source, removals) = (directory(0o1777, 0), Removals::default());
        for dir in 0..NAMES_MAX as u64 + 9 {
            let (_, name) = at(b"roots");
            assert_eq!(removals.may_remove(&source, &user(7), (Ino(dir), name)), Err(Errno::STALE));
        }
        assert_eq!(removals.lock().len(), NAMES_MAX);
    }
}
