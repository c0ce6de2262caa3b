//! Resolves names and numbers to inodes and descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferry_vfs::{Attr, Entry, Errno, FileType, Ino, OFlags, Result, Timespec};
use rustix::fs::{AtFlags, Mode, Statx, StatxAttributes, StatxFlags, StatxTimestamp};
use rustix::path::DecInt;

use crate::Dir;
use crate::attrs::is_sgid_mark;
use crate::mount::Mount;
use crate::sys;
use crate::table::{FoundInode, Inode, Key, PathFd};

/// `STATX_MNT_ID_UNIQUE` (Linux 6.8): unlike the plain id, never given to another mount.
const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
/// The flags that pin an object without opening it.
pub(crate) const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// The number of attempts of a lookup when the host changes the name meanwhile.
const TRIES_MAX: usize = 8;
/// The maximum number of directories that are opened to find an inode again. No real tree is as deep, but host renames
/// could turn the recorded locations into a cycle.
const DEPTH_MAX: usize = 65_536;

/// One statx with all fields that this crate uses.
pub(crate) fn statx(dir: BorrowedFd<'_>, name: &[u8]) -> Result<Statx> {
    let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID | MNT_ID_UNIQUE;
    rustix::fs::statx(dir, name, flags | AtFlags::NO_AUTOMOUNT, mask)
}

fn time(time: StatxTimestamp) -> Timespec {
    Timespec { sec: time.tv_sec, nsec: time.tv_nsec }
}

/// Returns the birth time, if the host has it.
pub(crate) fn btime(st: &Statx) -> Option<Timespec> {
    (st.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| time(st.stx_btime))
}

/// Returns the change time.
pub(crate) fn ctime(st: &Statx) -> Timespec {
    time(st.stx_ctime)
}

/// Returns whether an inode still has a name.
pub(crate) fn has_name(fd: BorrowedFd<'_>) -> bool {
    statx(fd, b"").is_ok_and(|st| st.stx_nlink > 0)
}

pub(crate) fn kind(st: &Statx) -> FileType {
    FileType::from_raw_mode(st.stx_mode.into())
}

/// Whether something is mounted there.
pub(crate) fn is_mount_root(st: &Statx) -> bool {
    st.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
}

/// Returns the host's identification of the inode.
pub(crate) fn key(st: &Statx) -> Key {
    let dev = (u64::from(st.stx_dev_major) << 32) | u64::from(st.stx_dev_minor);
    let has_mount = st.stx_mask & (StatxFlags::MNT_ID | MNT_ID_UNIQUE).bits() != 0;
    Key { dev, ino: st.stx_ino, mount: if has_mount { st.stx_mnt_id } else { 0 } }
}

/// How long after a client came too late to an inode others are held that are found.
const STALE_IS_RECENT: Duration = Duration::from_secs(1);

/// When a client last came too late to an inode that nothing holds: the host has removed it since it was found.
#[derive(Debug)]
pub(crate) struct LastStale {
    begin: Instant,
    /// Milliseconds since then; 0: not lately.
    last: AtomicU64,
}

impl LastStale {
    pub(crate) fn never() -> Self {
        Self { begin: Instant::now(), last: AtomicU64::new(0) }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)
    }

    fn set_now(&self) {
        self.last.store(self.now(), Ordering::Relaxed);
    }

    fn is_recent(&self) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        if last == 0 {
            return false;
        }
        let is_recent = Duration::from_millis(self.now().saturating_sub(last)) < STALE_IS_RECENT;
        if !is_recent {
            self.last.store(0, Ordering::Relaxed);
        }
        is_recent
    }
}

/// The location of an inode that was reached by descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum At<'a> {
    /// In the directory, with this name.
    Name(&'a [u8]),
    /// Unnamed (`O_TMPFILE`): it is only reachable while pinned.
    NoName,
    /// Somewhere.
    Elsewhere,
}

impl Dir {
    /// Returns the attributes in `st`, the status of `inode`.
    pub(crate) fn attr(&self, inode: &Inode, st: &Statx) -> Attr {
        let (major, minor) = (st.stx_rdev_major, st.stx_rdev_minor);
        inode.set_sgid_mark(is_sgid_mark(st.stx_mode.into()));
        Attr {
            ino: st.stx_ino,
            size: st.stx_size,
            blocks: st.stx_blocks,
            atime: time(st.stx_atime),
            mtime: time(st.stx_mtime),
            ctime: ctime(st),
            btime: btime(st),
            mode: st.stx_mode.into(),
            nlink: st.stx_nlink,
            uid: st.stx_uid,
            gid: st.stx_gid,
            rdev: (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12),
            blksize: st.stx_blksize,
            submount: self.options.submounts && inode.found.mount_root && inode.is_dir(),
        }
    }

    pub(crate) fn entry(&self, inode: &Inode, st: &Statx) -> Entry {
        // No number is reused, also by the next process, so the generation is constant.
        Entry { ino: inode.ino, generation: 0, attr: self.attr(inode, st) }
    }

    /// Runs a call that opens a descriptor; evicts others if necessary.
    pub(crate) fn retry_with_room<T>(&self, open: impl FnMut() -> Result<T>) -> Result<T> {
        self.cache.retry_with_room(&self.table, open)
    }

    /// Runs a call that opens a descriptor for a client to keep; evicts others if necessary.
    pub(crate) fn retry_with_room_to_keep(&self, open: impl FnMut() -> Result<OwnedFd>) -> Result<OwnedFd> {
        self.cache.retry_with_room_to_keep(&self.table, open)
    }

    /// Pins the inode of a name in a directory without opening it.
    pub(crate) fn open_path(&self, dir: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd> {
        self.retry_with_room(|| rustix::fs::openat(dir, name, PATH_FLAGS, Mode::empty()))
    }

    /// Opens the inode of a descriptor; the caller knows that it is a regular file or directory.
    pub(crate) fn reopen(&self, fd: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        self.retry_with_room(|| rustix::fs::openat(&self.proc_fds, DecInt::from_fd(fd), flags, Mode::empty()))
    }

    /// Returns an inode and its `O_PATH` descriptor.
    pub(crate) fn path(&self, ino: Ino) -> Result<(Arc<Inode>, Arc<PathFd>)> {
        let inode = self.table.get(ino)?;
        let fd = self.path_fd(&inode)?;
        Ok((inode, fd))
    }

    /// Returns an `O_PATH` descriptor of an inode: the cached one, or a new one that is cached from now on.
    pub(crate) fn path_fd(&self, inode: &Arc<Inode>) -> Result<Arc<PathFd>> {
        Ok(self.reach(inode)?.0)
    }

    /// Calls `then` with an inode and its current status on the host. The status has 256 bytes, which a return would copy.
    pub(crate) fn with_stat<T>(&self, ino: Ino, then: impl FnOnce(&Inode, &Statx) -> T) -> Result<T> {
        let inode = self.table.get(ino)?;
        Ok(match self.reach(&inode)? {
            (_, Some(st)) => then(&inode, &st),
            (fd, None) => then(&inode, &statx(fd.as_fd(), b"")?),
        })
    }

    /// Returns a descriptor, as [`Self::path_fd`], and the host's status of the inode if it was queried.
    fn reach(&self, inode: &Arc<Inode>) -> Result<(Arc<PathFd>, Option<Box<Statx>>)> {
        if let Some(fd) = inode.fd() {
            let seen = self.verify(inode, fd.as_fd())?;
            return Ok((fd, seen));
        }
        let (Some(handle), Some(mount)) = (&inode.found.handle, inode.found.mount.handles()) else {
            return Ok((self.path_fd_by_place(inode)?, None));
        };
        let fd = self.retry_with_room(|| sys::open_by_handle(mount, handle, PATH_FLAGS));
        let fd = fd.inspect_err(|errno| {
            if *errno == Errno::STALE {
                self.last_stale.set_now();
            }
        })?;
        let seen = self.verify(inode, fd.as_fd())?;
        Ok((self.cache.keep(&self.table, inode, self.cache.wrap(fd)), seen))
    }

    /// Finds an inode without a file handle again, by descending from the nearest directory with a descriptor.
    fn path_fd_by_place(&self, inode: &Arc<Inode>) -> Result<Arc<PathFd>> {
        let mut names = Vec::new();
        let mut at = Arc::clone(inode);
        let mut fd = loop {
            if let Some(fd) = at.fd() {
                break fd;
            }
            let (dir, name) = at.place().ok_or(Errno::STALE)?;
            names.push((std::mem::replace(&mut at, dir), name));
            if names.len() > DEPTH_MAX {
                return Err(Errno::STALE);
            }
        };
        for (inode, name) in names.into_iter().rev() {
            let next = self.open_path(fd.as_fd(), &name).map_err(|error| match error {
                // It is not at its recorded location, and its new one is unknown.
                Errno::NOENT | Errno::NOTDIR => Errno::STALE,
                other => other,
            })?;
            self.check(&inode, next.as_fd())?;
            fd = self.cache.keep(&self.table, &inode, self.cache.wrap(next));
        }
        Ok(fd)
    }

    /// Verifies once that a descriptor opened by the inode's handle belongs to the inode's key. The handle was read by
    /// name after the attributes, and the name may have changed in between. Returns the status if it was queried.
    fn verify(&self, inode: &Inode, fd: BorrowedFd<'_>) -> Result<Option<Box<Statx>>> {
        if inode.is_verified() {
            return Ok(None);
        }
        let seen = self.check(inode, fd)?;
        inode.set_verified();
        Ok(Some(Box::new(seen)))
    }

    /// Returns an error unless the descriptor belongs to this inode.
    pub(crate) fn check(&self, inode: &Inode, fd: BorrowedFd<'_>) -> Result<Statx> {
        let st = statx(fd, b"")?;
        let same = key(&st) == inode.found.key
            && kind(&st) == inode.found.kind
            && (inode.found.handle.is_some() || btime(&st) == inode.found.btime);
        if same { Ok(st) } else { Err(Errno::STALE) }
    }

    /// Returns the mount of an inode below `dir`; opens `fd` only if it differs from the directory's.
    fn mount_of(&self, dir: &Inode, st: &Statx, fd: impl FnOnce() -> Result<OwnedFd>) -> Result<Arc<Mount>> {
        let id = key(st).mount;
        if id == dir.found.mount.id {
            return Ok(Arc::clone(&dir.found.mount));
        }
        if let Some(mount) = self.mounts.known(id) {
            return Ok(mount);
        }
        let fd = fd()?;
        let now = statx(fd.as_fd(), b"")?;
        if key(&now).mount != id {
            return Err(Errno::STALE);
        }
        Ok(self.mounts.get(id, kind(&now), fd.as_fd(), self.proc_fds.as_fd()))
    }

    /// Finds a name in a directory. The returned inode has a new reference.
    ///
    /// System calls: 1 for an inode with a descriptor, 2 with file handles, 3 for a new inode without them.
    pub(crate) fn find(&self, dir: &Arc<Inode>, dir_fd: BorrowedFd<'_>, name: &[u8]) -> Result<(Arc<Inode>, Statx)> {
        self.watch_directory(dir);
        for _ in 0..TRIES_MAX {
            let heard = self.table.heard();
            let mut st = statx(dir_fd, name)?;
            let found = self.find_at(dir, (dir_fd, name), &mut st);
            match found.and_then(|inode| self.watch_found(dir, (dir_fd, name), inode, &mut st, heard)) {
                // The name now refers to another inode, or was missing for a moment.
                Err(Errno::STALE | Errno::NOENT) => {}
                other => return other.map(|inode| (inode, st)),
            }
        }
        Err(Errno::STALE)
    }

    /// Makes sure that changes of a found inode are noticed, if the host is watched; then its attributes are as new. `heard`: [`Table::heard`](crate::table::Table::heard) of before they were read.
    fn watch_found(
        &self,
        dir: &Arc<Inode>,
        (dir_fd, name): (BorrowedFd<'_>, &[u8]),
        inode: Arc<Inode>,
        st: &mut Statx,
        heard: u64,
    ) -> Result<Arc<Inode>> {
        if !self.is_newly_watched(dir, name, &inode) && self.table.heard() == heard {
            return Ok(inode);
        }
        let now = statx(dir_fd, name).and_then(|now| if key(&now) == key(st) { Ok(now) } else { Err(Errno::STALE) });
        *st = now.inspect_err(|_| self.table.forget(inode.ino, 1))?;
        Ok(inode)
    }

    /// Notes that a client knows an inode, but no name of it, where directories are watched.
    pub(crate) fn note_unnamed(&self) {
        if let Some(directories) = self.table.directories() {
            directories.note_unnamed();
        }
    }

    /// Returns whether changes of an inode may have been missed until now.
    fn is_newly_watched(&self, dir: &Arc<Inode>, name: &[u8], inode: &Arc<Inode>) -> bool {
        let Some(directories) = self.table.directories() else { return false };
        let is_new_name = directories.name(dir, name, inode);
        let is_new_directory = inode.is_dir() && self.watch_directory(inode);
        is_new_name || is_new_directory
    }

    /// Returns the inode of a name whose status was `st`, which it updates.
    fn find_at(&self, dir: &Arc<Inode>, (dir_fd, name): (BorrowedFd<'_>, &[u8]), st: &mut Statx) -> Result<Arc<Inode>> {
        if let Some(inode) = self.table.find_by_descriptor(&key(st)) {
            inode.set_place(dir, name);
            return Ok(inode);
        }
        let mount = self.mount_of(dir, st, || self.open_path(dir_fd, name))?;
        if mount.handles().is_some() {
            match sys::name_to_handle(dir_fd, name) {
                Ok(handle) => {
                    let inode = self.table.insert(self.found(dir, st, mount, Some(handle), false)).0;
                    self.look_for_acl(&inode, (dir_fd, name), st);
                    self.hold_found(&inode).inspect_err(|_| self.table.forget(inode.ino, 1))?;
                    return Ok(inode);
                }
                // A file system that has handles for some of its inodes only.
                Err(Errno::OPNOTSUPP | Errno::OVERFLOW | Errno::INVAL) => {}
                Err(other) => return Err(other),
            }
        }
        if let Some(inode) = self.table.find_by_btime(&key(st), kind(st), btime(st)) {
            inode.set_place(dir, name);
            return Ok(inode);
        }
        let fd = self.open_path(dir_fd, name)?;
        *st = statx(fd.as_fd(), b"")?;
        if key(st).mount != mount.id {
            return Err(Errno::STALE);
        }
        let (inode, _) = self.table.insert(self.found(dir, st, mount, None, true));
        inode.set_place(dir, name);
        self.cache.keep(&self.table, &inode, self.cache.wrap(fd));
        Ok(inode)
    }

    /// Opens an inode that was found, if a client came too late to another one just now: programs on the host replace files
    /// faster than clients open what they have found, and a client's kernel tries once more only. Nobody comes too late to
    /// an inode with a descriptor.
    ///
    /// It is opened by its handle: the name may refer to another inode by now, even to one with the same number.
    fn hold_found(&self, inode: &Arc<Inode>) -> Result<()> {
        if !self.last_stale.is_recent() || inode.is_held() {
            return Ok(());
        }
        match self.reach(inode) {
            Err(Errno::STALE) => Err(Errno::STALE),
            _ => Ok(()),
        }
    }

    fn found(
        &self,
        dir: &Inode,
        st: &Statx,
        mount: Arc<Mount>,
        handle: Option<sys::HostHandle>,
        verified: bool,
    ) -> FoundInode {
        let mount_root = is_mount_root(st) || mount.id != dir.found.mount.id;
        FoundInode { key: key(st), kind: kind(st), btime: btime(st), mount, handle, mount_root, verified }
    }

    /// Returns the inode that is open as `file`, with a new reference.
    pub(crate) fn find_open(&self, dir: &Arc<Inode>, at: At<'_>, file: BorrowedFd<'_>) -> Result<(Arc<Inode>, Statx)> {
        let heard = self.table.heard();
        let st = statx(file, b"")?;
        let path = || self.reopen(file, OFlags::PATH);
        let mount = self.mount_of(dir, &st, path)?;
        let handle = match mount.handles() {
            Some(_) => sys::name_to_handle(file, b"").ok(),
            None => None,
        };
        let fd = if handle.is_none() || matches!(at, At::NoName) { Some(path()?) } else { None };
        let (inode, _) = self.table.insert(self.found(dir, &st, mount, handle, true));
        self.look_for_acl_of(&inode, file, &st);
        match at {
            At::Name(name) => inode.set_place(dir, name),
            At::NoName => inode.set_pinned(true),
            At::Elsewhere => self.note_unnamed(),
        }
        if let Some(fd) = fd {
            self.cache.keep(&self.table, &inode, self.cache.wrap(fd));
        }
        let is_newly_watched = matches!(at, At::Name(name) if self.is_newly_watched(dir, name, &inode));
        if is_newly_watched || self.table.heard() != heard {
            let now = statx(file, b"").inspect_err(|_| self.table.forget(inode.ino, 1))?;
            return Ok((inode, now));
        }
        Ok((inode, st))
    }

    /// Returns the inode that is about to lose this name, if a client references it. It is pinned if this is its last
    /// name, because neither name nor file handle leads to it afterwards.
    pub(crate) fn pin(&self, dir_fd: BorrowedFd<'_>, name: &[u8]) -> Option<Pinned> {
        let st = statx(dir_fd, name).ok()?;
        let inode = self.table.at(&key(&st))?;
        let last = st.stx_nlink <= 1 || inode.is_dir();
        let newly = last && !inode.is_pinned();
        if newly {
            let hold = || match inode.found.handle {
                Some(_) => self.hold_by_handle(&inode),
                None => self.hold_named(&inode, dir_fd, name),
            };
            if !inode.pin() && hold().is_err() {
                inode.set_pinned(false);
                tracing::debug!(ino = inode.ino.0, "cannot pin an unlinked inode");
            }
        }
        Some(Pinned { inode, newly })
    }

    /// Without the check, which can wait until the inode is used again.
    fn hold_by_handle(&self, inode: &Inode) -> Result<()> {
        let (Some(handle), Some(mount)) = (&inode.found.handle, inode.found.mount.handles()) else {
            return Err(Errno::STALE);
        };
        let fd = self.retry_with_room(|| sys::open_by_handle(mount, handle, PATH_FLAGS))?;
        self.cache.keep(&self.table, inode, self.cache.wrap(fd));
        Ok(())
    }

    fn hold_named(&self, inode: &Inode, dir_fd: BorrowedFd<'_>, name: &[u8]) -> Result<()> {
        let fd = self.open_path(dir_fd, name)?;
        self.check(inode, fd.as_fd())?;
        self.cache.keep(&self.table, inode, self.cache.wrap(fd));
        Ok(())
    }
}

/// An inode that is about to lose a name.
pub(crate) struct Pinned {
    pub(crate) inode: Arc<Inode>,
    newly: bool,
}

impl Pinned {
    /// Unpins the inode if it still has a name.
    pub(crate) fn undo(&self) {
        if self.newly && self.inode.fd().is_none_or(|fd| has_name(fd.as_fd())) {
            self.inode.set_pinned(false);
        }
    }
}
