//! Changes of the tree: names and inodes.

use std::sync::MutexGuard;

use ferry_vfs::sync::lock;
use ferry_vfs::{Caller, CreateArgs, Entry, FileType, Handle, Ino, Name, OFlags, RenameFlags, Result};

use crate::{BLOCK, Quota};

impl Quota {
    /// Runs `make` with `bytes` and one directory block reserved.
    fn make<T>(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        bytes: u64,
        make: impl FnOnce() -> Result<T>,
        entry: impl FnOnce(&T) -> (&Entry, bool),
    ) -> Result<T> {
        let file = self.reserve_file()?;
        let room = self.reserve_bytes(bytes)?;
        let dir_room = self.reserve_bytes(BLOCK)?;
        let held_dir = self.hold(cx, dir)?;
        // Nothing removes the new name before its inode is counted.
        let _names = self.lock_names(dir);
        let birth = self.charges.birth();
        let made = make();
        if let Ok(made) = &made {
            file.settle(1);
            let (entry, is_open) = entry(made);
            if let Some(held) = self.charges.born(&birth, entry.ino) {
                if is_open {
                    held.charge().add_open();
                }
                if entry.attr.nlink == 0 {
                    held.charge().set_orphan(true);
                }
                self.measure(cx, &held, None, Some(room));
                drop(birth);
                self.put_back(held);
            }
        }
        self.settle(cx, held_dir, Some(dir_room));
        made
    }

    pub(crate) fn mknod(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.make(cx, dir, 0, || self.source.mknod(cx, dir, name, new), |entry| (entry, false))
    }

    pub(crate) fn mkdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.make(cx, dir, BLOCK, || self.source.mkdir(cx, dir, name, new), |entry| (entry, false))
    }

    pub(crate) fn symlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        let bytes = target.len() as u64;
        self.make(cx, dir, bytes, || self.source.symlink(cx, dir, name, target), |entry| (entry, false))
    }

    pub(crate) fn create(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        self.make(cx, dir, 0, || self.source.create(cx, dir, name, new, flags), |made| (&made.0, true))
    }

    pub(crate) fn tmpfile(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        // No walk finds it, so a count must not see it before it is known as an orphan.
        let _removal = self.removals.begin();
        self.make(cx, dir, 0, || self.source.tmpfile(cx, dir, new, flags), |made| (&made.0, true))
    }

    /// A name needs no inode, but its directory may grow.
    pub(crate) fn link(&self, cx: &Caller<'_>, ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let room = self.reserve_bytes(BLOCK)?;
        let held_dir = self.hold(cx, dir)?;
        let held = match self.hold(cx, ino) {
            Ok(held) => held,
            Err(errno) => {
                self.put_back(held_dir);
                return Err(errno);
            }
        };
        let _names = self.lock_names(dir);
        let linked = {
            let _removal = self.removals.begin();
            let linked = self.source.link(cx, ino, dir, name);
            if linked.is_ok() {
                held.charge().set_orphan(false);
            }
            linked
        };
        self.put_back(held);
        self.settle(cx, held_dir, Some(room));
        linked
    }

    pub(crate) fn unlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        let _names = self.lock_names(dir);
        self.remove(cx, dir, name, || self.source.unlink(cx, dir, name))
    }

    pub(crate) fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        let _names = self.lock_names(dir);
        self.remove(cx, dir, name, || self.source.rmdir(cx, dir, name))
    }

    pub(crate) fn rename(
        &self,
        cx: &Caller<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let _names = self.lock_both(from.0, to.0);
        let rename = || self.source.rename(cx, from, to, flags);
        if flags.contains(RenameFlags::EXCHANGE) {
            let _removal = self.removals.begin();
            return rename();
        }
        // A name that replaces another one takes its place.
        let replaced = self.source.lookup(cx, to.0, to.1).inspect(|entry| self.source.forget(entry.ino, 1));
        let room = self.reserve_bytes(if replaced.is_ok() { 0 } else { BLOCK })?;
        let source = self.source.lookup(cx, from.0, from.1).inspect(|entry| self.source.forget(entry.ino, 1));
        // rename(2) between two names of one inode does nothing.
        let is_same = matches!((&source, &replaced), (Ok(one), Ok(other)) if one.ino == other.ino);
        let makes_whiteout = flags.contains(RenameFlags::WHITEOUT) && !is_same;
        let whiteout = makes_whiteout.then(|| self.reserve_file()).transpose()?;
        let held_from = self.hold(cx, from.0)?;
        let held_to = match self.hold(cx, to.0) {
            Ok(held) => held,
            Err(errno) => {
                self.put_back(held_from);
                return Err(errno);
            }
        };
        let _removal = self.removals.begin();
        let renamed = match flags.contains(RenameFlags::NOREPLACE) {
            true => rename(),
            false => self.remove_counted(cx, to.0, to.1, rename),
        };
        if let Some(whiteout) = whiteout.filter(|_| renamed.is_ok()) {
            whiteout.settle(1);
        }
        self.settle(cx, held_to, Some(room));
        self.settle(cx, held_from, None);
        renamed
    }

    /// Locks the names in two directories, in an order that all requests agree on.
    fn lock_both(&self, one: Ino, other: Ino) -> (MutexGuard<'_, ()>, Option<MutexGuard<'_, ()>>) {
        let (one, other) = (self.dir_lock(one), self.dir_lock(other));
        let first = lock(&self.dirs[one.min(other)]);
        (first, (one != other).then(|| lock(&self.dirs[one.max(other)])))
    }

    /// Removes a name by `remove`. The caller has locked the names of the directory.
    fn remove(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, remove: impl FnOnce() -> Result<()>) -> Result<()> {
        let held_dir = self.hold(cx, dir)?;
        let _removal = self.removals.begin();
        let removed = self.remove_counted(cx, dir, name, remove);
        self.settle(cx, held_dir, None);
        removed
    }

    /// Runs `remove`, and records the loss of a name by its inode.
    fn remove_counted(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        remove: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Ok(entry) = self.source.lookup(cx, dir, name) else { return remove() };
        let ino = entry.ino;
        let held = self.hold(cx, ino).inspect_err(|_| self.source.forget(ino, 1))?;
        let removed = remove();
        // If the inode cannot be read, it has lost the only name that it had before.
        let had_one = entry.attr.nlink <= 1 || entry.attr.kind() == FileType::Directory;
        let has_none = || self.source.getattr(cx, ino, None).map_or(had_one, |attr| attr.nlink == 0);
        if removed.is_ok() && has_none() {
            held.charge().set_orphan(true);
        }
        self.source.forget(ino, 1);
        self.put_back(held);
        removed
    }
}
