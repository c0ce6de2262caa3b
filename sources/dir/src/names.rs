//! Creates, removes and renames directory entries.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferry_vfs::{
    Caller, Change, CreateArgs, Entry, Errno, Event, FileType, Handle, Ino, Name, OFlags, RenameFlags, Result,
    SessionId,
};
use rustix::fs::{AtFlags, Mode, makedev};
use rustix::path::DecInt;

use crate::Dir;
use crate::creds::mode_under_umask;
use crate::resolve::{self, At, has_name, key, statx};
use crate::sys;
use crate::table::{Inode, PathFd};
use crate::watch::{Directories, OperationGuard};

/// The maximum depth of a directory; see [`Dir::lookup_parent`].
const DEPTH_MAX: usize = 65_536;

impl Dir {
    /// Publishes that a name changed.
    pub(crate) fn entry_changed(&self, by: SessionId, dir: &Inode, name: Name<'_>) {
        self.changes.publish(by, || Change::Entry { dir: dir.ino, name: name.to_buf() });
    }

    fn created(&self, by: SessionId, dir: &Inode, name: Name<'_>, made: Option<(Ino, bool)>) {
        let (ino, is_dir) = (made.map(|(ino, _)| ino), made.is_some_and(|(_, is_dir)| is_dir));
        self.changes.publish_event(by, || Some(Event::Created { dir: dir.ino, name: name.to_buf(), is_dir, ino }));
    }

    /// Publishes that attributes changed.
    pub(crate) fn attr_changed(&self, by: SessionId, inode: &Inode) {
        self.changes.publish(by, || Change::Attr { ino: inode.ino });
    }

    /// Begins an operation that changes something; it ends when the guard is dropped, after its changes were published.
    /// Returns an error if the share is read-only.
    pub(crate) fn writable(&self) -> Result<Option<OperationGuard<'_>>> {
        if self.options.read_only {
            return Err(Errno::ROFS);
        }
        Ok(self.table.directories().and_then(Directories::begin_operation))
    }

    pub(crate) fn lookup(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let (dir, fd) = self.path(dir)?;
        let (inode, st) = self.find(&dir, fd.as_fd(), name.as_bytes())?;
        Ok(self.entry(&inode, &st))
    }

    /// Returns the inode with a number, even without a reference of the client; for file handles of trusted clients
    /// ([`ferry_vfs::ByNumber::Host`]).
    pub(crate) fn lookup_self(&self, _: &Caller<'_>, ino: Ino) -> Result<Entry> {
        let (inode, fd) = match self.table.find_numbered(ino) {
            Some(inode) => (inode, None),
            None => {
                let (inode, fd) = self.find_forgotten(ino)?;
                (inode, Some(fd))
            }
        };
        let st = match &fd {
            Some(fd) => statx(fd.as_fd(), b""),
            None => self.with_stat(ino, |_, st| *st),
        };
        match st {
            Ok(st) if inode.ino == ino && st.stx_nlink > 0 => Ok(self.entry(&inode, &st)),
            _ => {
                self.table.forget(inode.ino, 1);
                Err(Errno::STALE)
            }
        }
    }

    /// Returns the inode whose handle is encoded in a number, with a new reference.
    fn find_forgotten(&self, ino: Ino) -> Result<(Arc<Inode>, Arc<PathFd>)> {
        let mount = &self.root.found.mount;
        let (handle, real) = self.table.handle_of(ino).zip(mount.handles()).ok_or(Errno::STALE)?;
        let fd = self.retry_with_room(|| sys::open_by_handle(real, &handle, resolve::PATH_FLAGS))?;
        let st = statx(fd.as_fd(), b"")?;
        let (inode, _) = self.table.insert(Self::found_by(&st, Arc::clone(mount), fd.as_fd()));
        self.note_unnamed();
        let fd = self.cache.keep(&self.table, &inode, self.cache.wrap(fd));
        Ok((inode, fd))
    }

    /// Returns the parent of a directory within the share. It checks all ancestors up to the share's root, because the
    /// host may have moved the directory out of the share.
    pub(crate) fn lookup_parent(&self, _: &Caller<'_>, dir: Ino) -> Result<Entry> {
        let (dir, fd) = self.path(dir)?;
        if !dir.is_dir() {
            return Err(Errno::NOTDIR);
        }
        if dir.ino == Ino::ROOT {
            let st = statx(fd.as_fd(), b"")?;
            return Ok(self.entry(&dir, &st));
        }
        let root = self.root.found.key;
        let parent = self.open_path(fd.as_fd(), b"..")?;
        let mut last = statx(parent.as_fd(), b"")?;
        if key(&last) == root {
            return Ok(self.entry(&self.root, &last));
        }
        let mut above: Option<OwnedFd> = None;
        for _ in 0..DEPTH_MAX {
            let next = self.open_path(above.as_ref().map_or(parent.as_fd(), AsFd::as_fd), b"..")?;
            let st = statx(next.as_fd(), b"")?;
            if key(&st) == root {
                // Looked up from the parent, so that a new inode's mount and location are right.
                let dir_fd = self.reopen(parent.as_fd(), OFlags::RDONLY | OFlags::DIRECTORY)?;
                let (inode, st) = self.find_open(&self.root, At::Elsewhere, dir_fd.as_fd())?;
                return Ok(self.entry(&inode, &st));
            }
            if key(&st) == key(&last) {
                break;
            }
            last = st;
            above = Some(next);
        }
        Err(Errno::STALE)
    }

    /// Runs `make` as the caller, with the mode to which the kernel applies the caller's umask.
    fn as_caller<T>(&self, cx: &Caller<'_>, new: &CreateArgs, make: impl FnOnce(Mode) -> Result<T>) -> Result<T> {
        let mode = mode_under_umask(new.mode, new.umask);
        let _guard = self.creds.enter(cx)?;
        make(mode)
    }

    /// Creates a name with `make`, and looks it up.
    fn make(
        &self,
        by: SessionId,
        (dir, name): (Ino, Name<'_>),
        make: impl FnOnce(BorrowedFd<'_>) -> Result<()>,
    ) -> Result<Entry> {
        let _operation = self.writable()?;
        let (dir, fd) = self.path(dir)?;
        make(fd.as_fd())?;
        let found = self.find(&dir, fd.as_fd(), name.as_bytes());
        self.entry_changed(by, &dir, name);
        self.created(by, &dir, name, found.as_ref().ok().map(|(inode, _)| (inode.ino, inode.is_dir())));
        let (inode, st) = found?;
        Ok(self.entry(&inode, &st))
    }

    pub(crate) fn mknod(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        let kind = match FileType::from_raw_mode(new.mode) {
            // `mknod` with a mode without a type creates a regular file.
            FileType::Unknown if new.mode & 0o170_000 == 0 => FileType::RegularFile,
            FileType::Directory | FileType::Symlink | FileType::Unknown => return Err(Errno::INVAL),
            kind => kind,
        };
        let device = makedev((new.rdev & 0xf_ff00) >> 8, (new.rdev & 0xff) | ((new.rdev >> 12) & 0xf_ff00));
        self.make(cx.session, (dir, name), |fd| {
            self.as_caller(cx, new, |mode| rustix::fs::mknodat(fd, name.as_bytes(), kind, mode, device))
        })
    }

    pub(crate) fn mkdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.make(cx.session, (dir, name), |fd| {
            self.as_caller(cx, new, |mode| rustix::fs::mkdirat(fd, name.as_bytes(), mode))
        })
    }

    pub(crate) fn symlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.make(cx.session, (dir, name), |fd| {
            let _guard = self.creds.enter(cx)?;
            rustix::fs::symlinkat(target, fd, name.as_bytes())
        })
    }

    pub(crate) fn link(&self, cx: &Caller<'_>, ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let (inode, fd) = self.path(ino)?;
        if inode.is_dir() {
            return Err(Errno::PERM);
        }
        let entry = self.make(cx.session, (dir, name), |dir_fd| {
            // The magic link leads to the inode itself, also for a symbolic link and an unnamed file; AT_EMPTY_PATH
            // would require CAP_DAC_READ_SEARCH.
            let from = DecInt::from_fd(fd.as_fd());
            rustix::fs::linkat(&self.proc_fds, from, dir_fd, name.as_bytes(), AtFlags::SYMLINK_FOLLOW)
        })?;
        if inode.is_pinned() && has_name(fd.as_fd()) {
            inode.set_pinned(false);
        }
        self.attr_changed(cx.session, &inode);
        Ok(entry)
    }

    pub(crate) fn unlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, dir, name, AtFlags::empty())
    }

    pub(crate) fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, dir, name, AtFlags::REMOVEDIR)
    }

    fn remove(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, flags: AtFlags) -> Result<()> {
        let _operation = self.writable()?;
        let (dir, fd) = self.path(dir)?;
        let pinned = self.pin(fd.as_fd(), name.as_bytes());
        let result = rustix::fs::unlinkat(fd.as_fd(), name.as_bytes(), flags);
        match (&result, &pinned) {
            (Ok(()), Some(pinned)) => {
                self.attr_changed(cx.session, &pinned.inode);
                let (dir, ino) = (dir.ino, pinned.inode.ino);
                self.changes.publish(cx.session, || Change::Removed { dir, name: name.to_buf(), ino });
            }
            // No client knows the inode, or clients only know another one that had the name before.
            (Ok(()), None) => self.entry_changed(cx.session, &dir, name),
            (Err(_), Some(pinned)) => pinned.undo(),
            (Err(_), None) => {}
        }
        if result.is_ok() {
            let (dir, is_dir) = (dir.ino, flags.contains(AtFlags::REMOVEDIR));
            let ino = pinned.as_ref().map(|pinned| pinned.inode.ino);
            let event = || Event::Removed { dir, name: name.to_buf(), is_dir, ino };
            self.changes.publish_event(cx.session, || Some(event()));
        }
        result
    }

    pub(crate) fn rename(
        &self,
        cx: &Caller<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let _operation = self.writable()?;
        let (from_dir, from_fd) = self.path(from.0)?;
        let (to_dir, to_fd) = self.path(to.0)?;
        let replaces = !flags.intersects(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE);
        let victim = if replaces { self.pin(to_fd.as_fd(), to.1.as_bytes()) } else { None };
        let (old, new) = (from.1.as_bytes(), to.1.as_bytes());
        let result = rustix::fs::renameat_with(from_fd.as_fd(), old, to_fd.as_fd(), new, flags);
        match (&result, &victim) {
            // The two names are links of one inode: nothing happened.
            (Ok(()), Some(victim)) => self.attr_changed(cx.session, &victim.inode),
            (Err(_), Some(victim)) => victim.undo(),
            (_, None) => {}
        }
        result?;
        self.moved(cx.session, &to_dir, &to_fd, new);
        if flags.contains(RenameFlags::EXCHANGE) {
            self.moved(cx.session, &from_dir, &from_fd, old);
        }
        self.entry_changed(cx.session, &from_dir, from.1);
        self.entry_changed(cx.session, &to_dir, to.1);
        self.changes.publish_event(cx.session, || {
            let is_dir = statx(to_fd.as_fd(), new)
                .is_ok_and(|st| FileType::from_raw_mode(st.stx_mode.into()) == FileType::Directory);
            let (from, to) = ((from_dir.ino, from.1.to_buf()), (to_dir.ino, to.1.to_buf()));
            Some(Event::Renamed { from, to, is_dir, exchanged: flags.contains(RenameFlags::EXCHANGE) })
        });
        Ok(())
    }

    /// Records the new location of an inode without a file handle, and publishes its new time of change.
    fn moved(&self, by: SessionId, dir: &Arc<Inode>, fd: &PathFd, name: &[u8]) {
        let has_others = self.changes.has_several_listeners();
        if dir.found.mount.handles().is_some() && !has_others {
            return;
        }
        if let Some(inode) = statx(fd.as_fd(), name).ok().and_then(|st| self.table.at(&key(&st))) {
            inode.set_place(dir, name);
            if has_others {
                self.attr_changed(by, &inode);
            }
        }
    }

    pub(crate) fn create(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        let _operation = self.writable()?;
        let (dir, fd) = self.path(dir)?;
        let host = self.host_flags(flags)? - OFlags::TRUNC;
        self.watch_directory(&dir);
        // An existing file is never opened here: the caller's kernel decides whether it may be.
        let exclusive = host | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = self.as_caller(cx, new, |mode| {
            self.retry_with_room_to_keep(|| rustix::fs::openat(fd.as_fd(), name.as_bytes(), exclusive, mode))
        })?;
        let found = self.find_open(&dir, At::Name(name.as_bytes()), file.as_fd());
        let made = found.and_then(|(inode, st)| self.add_open(cx, inode, &st, file, host));
        // The name is there in any case; the caller is told, too, if it gets an error.
        let by = if made.is_ok() { cx.session } else { SessionId::default() };
        self.entry_changed(by, &dir, name);
        self.created(by, &dir, name, made.as_ref().ok().map(|(entry, _)| (entry.ino, false)));
        made
    }

    /// Adds the handle of a created file; releases the reference if that fails.
    fn add_open(
        &self,
        cx: &Caller<'_>,
        inode: Arc<Inode>,
        st: &rustix::fs::Statx,
        file: OwnedFd,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        let entry = self.entry(&inode, st);
        match self.add_handle(cx, inode, file, flags) {
            Ok(handle) => Ok((entry, handle)),
            Err(error) => {
                self.table.forget(entry.ino, 1);
                Err(error)
            }
        }
    }

    pub(crate) fn tmpfile(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        let _operation = self.writable()?;
        let (dir, fd) = self.path(dir)?;
        let mut host = self.host_flags(flags)? - OFlags::TRUNC;
        if host & OFlags::ACCMODE == OFlags::RDONLY {
            return Err(Errno::INVAL);
        }
        host |= flags & OFlags::EXCL;
        let file = self.as_caller(cx, new, |mode| {
            self.retry_with_room_to_keep(|| {
                rustix::fs::openat(fd.as_fd(), ".", host | OFlags::TMPFILE | OFlags::CLOEXEC, mode)
            })
        })?;
        let (inode, st) = self.find_open(&dir, At::NoName, file.as_fd())?;
        self.add_open(cx, inode, &st, file, host)
    }
}
