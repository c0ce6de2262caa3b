//! Resolves names and numbers to inodes and descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

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
/// How an object is pinned without being opened.
pub(crate) const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// How often a lookup starts again when the host changes the name meanwhile.
const TRIES_MAX: usize = 8;
/// Directories that are opened one after the other to find an inode again, at most. No real tree is as deep; host
/// renames behind our back could make the remembered places a ring.
const DEPTH_MAX: usize = 65_536;

/// One statx with all that this crate uses.
pub(crate) fn statx(dir: BorrowedFd<'_>, name: &[u8]) -> Result<Statx> {
    let flags = if name.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID | MNT_ID_UNIQUE;
    rustix::fs::statx(dir, name, flags | AtFlags::NO_AUTOMOUNT, mask)
}

fn time(time: StatxTimestamp) -> Timespec {
    Timespec { sec: time.tv_sec, nsec: time.tv_nsec }
}

/// The time of birth, where the host knows it.
pub(crate) fn btime(st: &Statx) -> Option<Timespec> {
    (st.stx_mask & StatxFlags::BTIME.bits() != 0).then(|| time(st.stx_btime))
}

/// The time of the last change.
pub(crate) fn ctime(st: &Statx) -> Timespec {
    time(st.stx_ctime)
}

/// Whether an inode still has a name.
pub(crate) fn has_name(fd: BorrowedFd<'_>) -> bool {
    statx(fd, b"").is_ok_and(|st| st.stx_nlink > 0)
}

/// The file type.
pub(crate) fn kind(st: &Statx) -> FileType {
    FileType::from_raw_mode(st.stx_mode.into())
}

/// Whether something is mounted there.
pub(crate) fn is_mount_root(st: &Statx) -> bool {
    st.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
}

/// Where the host has the inode.
pub(crate) fn key(st: &Statx) -> Key {
    let dev = (u64::from(st.stx_dev_major) << 32) | u64::from(st.stx_dev_minor);
    let has_mount = st.stx_mask & (StatxFlags::MNT_ID | MNT_ID_UNIQUE).bits() != 0;
    Key { dev, ino: st.stx_ino, mount: if has_mount { st.stx_mnt_id } else { 0 } }
}

/// Where an inode that was reached by descriptor is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum At<'a> {
    /// In the directory, by this name.
    Name(&'a [u8]),
    /// Nowhere (`O_TMPFILE`): it must stay pinned to stay reachable.
    NoName,
    /// Somewhere.
    Elsewhere,
}

impl Dir {
    /// The attributes in `st`, which is of `inode`.
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
        // No number is given to two inodes, so there is only one generation.
        Entry { ino: inode.ino, generation: 0, attr: self.attr(inode, st) }
    }

    /// Runs a call that opens a descriptor, making room if there is none.
    pub(crate) fn retry_with_room<T>(&self, open: impl FnMut() -> Result<T>) -> Result<T> {
        self.cache.retry_with_room(&self.table, open)
    }

    /// Runs a call that opens a descriptor for a client to keep, making room if there is none.
    pub(crate) fn retry_with_room_to_keep(&self, open: impl FnMut() -> Result<OwnedFd>) -> Result<OwnedFd> {
        self.cache.retry_with_room_to_keep(&self.table, open)
    }

    /// Pins what a name in a directory means, without opening it.
    pub(crate) fn open_path(&self, dir: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd> {
        self.retry_with_room(|| rustix::fs::openat(dir, name, PATH_FLAGS, Mode::empty()))
    }

    /// Opens what a descriptor pins, of which the caller knows that it is a regular file or directory.
    pub(crate) fn reopen(&self, fd: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        self.retry_with_room(|| rustix::fs::openat(&self.proc_fds, DecInt::from_fd(fd), flags, Mode::empty()))
    }

    /// An inode and an `O_PATH` descriptor of it.
    pub(crate) fn path(&self, ino: Ino) -> Result<(Arc<Inode>, Arc<PathFd>)> {
        let inode = self.table.get(ino)?;
        let fd = self.path_fd(&inode)?;
        Ok((inode, fd))
    }

    /// An `O_PATH` descriptor of an inode: the one it holds, or a new one that it holds from now on.
    pub(crate) fn path_fd(&self, inode: &Arc<Inode>) -> Result<Arc<PathFd>> {
        Ok(self.reach(inode)?.0)
    }

    /// What the host says of an inode now.
    pub(crate) fn stat(&self, ino: Ino) -> Result<(Arc<Inode>, Statx)> {
        let inode = self.table.get(ino)?;
        let st = match self.reach(&inode)? {
            (_, Some(st)) => st,
            (fd, None) => statx(fd.as_fd(), b"")?,
        };
        Ok((inode, st))
    }

    /// A descriptor, as [`Self::path_fd`], and what the host said of the inode, if it had to be asked.
    fn reach(&self, inode: &Arc<Inode>) -> Result<(Arc<PathFd>, Option<Statx>)> {
        if let Some(fd) = inode.fd() {
            let seen = self.verify(inode, fd.as_fd())?;
            return Ok((fd, seen));
        }
        let (Some(handle), Some(mount)) = (&inode.found.handle, inode.found.mount.handles()) else {
            return Ok((self.path_fd_by_place(inode)?, None));
        };
        let fd = self.retry_with_room(|| sys::open_by_handle(mount, handle, PATH_FLAGS))?;
        let seen = self.verify(inode, fd.as_fd())?;
        Ok((self.cache.keep(&self.table, inode, self.cache.wrap(fd)), seen))
    }

    /// Finds an inode without a file handle again, by walking down from the nearest directory that is held.
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
                // It is not where it was, and nobody told us where it went.
                Errno::NOENT | Errno::NOTDIR => Errno::STALE,
                other => other,
            })?;
            self.check(&inode, next.as_fd())?;
            fd = self.cache.keep(&self.table, &inode, self.cache.wrap(next));
        }
        Ok(fd)
    }

    /// Makes sure, once, that a descriptor that was opened by the inode's handle is of the inode with its key: the
    /// handle was read by name, after the attributes, and the name may have changed in between. Answers what was seen, if it was looked at.
    fn verify(&self, inode: &Inode, fd: BorrowedFd<'_>) -> Result<Option<Statx>> {
        if inode.is_verified() {
            return Ok(None);
        }
        let seen = self.check(inode, fd)?;
        inode.set_verified();
        Ok(Some(seen))
    }

    /// Whether a descriptor is of this inode.
    pub(crate) fn check(&self, inode: &Inode, fd: BorrowedFd<'_>) -> Result<Statx> {
        let st = statx(fd, b"")?;
        let same = key(&st) == inode.found.key
            && kind(&st) == inode.found.kind
            && (inode.found.handle.is_some() || btime(&st) == inode.found.btime);
        if same { Ok(st) } else { Err(Errno::STALE) }
    }

    /// The mount that an inode below `dir` is on; `fd` is only opened when it is not the directory's own.
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

    /// Finds a name in a directory. The inode that it answers has one reference more.
    ///
    /// System calls: 1 for an inode that is held, 2 with file handles, 3 to meet a new inode without them.
    pub(crate) fn find(&self, dir: &Arc<Inode>, dir_fd: BorrowedFd<'_>, name: &[u8]) -> Result<(Arc<Inode>, Statx)> {
        for _ in 0..TRIES_MAX {
            let st = statx(dir_fd, name)?;
            match self.find_at(dir, dir_fd, name, st) {
                // The name means something else by now, or was away for a moment.
                Err(Errno::STALE | Errno::NOENT) => {}
                other => return other,
            }
        }
        Err(Errno::STALE)
    }

    fn find_at(&self, dir: &Arc<Inode>, dir_fd: BorrowedFd<'_>, name: &[u8], st: Statx) -> Result<(Arc<Inode>, Statx)> {
        if let Some(inode) = self.table.find_by_descriptor(&key(&st)) {
            inode.set_place(dir, name);
            return Ok((inode, st));
        }
        let mount = self.mount_of(dir, &st, || self.open_path(dir_fd, name))?;
        if mount.handles().is_some() {
            match sys::name_to_handle(dir_fd, name) {
                Ok(handle) => {
                    let inode = self.table.insert(self.found(dir, &st, mount, Some(handle), false)).0;
                    self.look_for_acl(&inode, (dir_fd, name), &st);
                    return Ok((inode, st));
                }
                // A file system that has handles for some of its inodes only.
                Err(Errno::OPNOTSUPP | Errno::OVERFLOW | Errno::INVAL) => {}
                Err(other) => return Err(other),
            }
        }
        if let Some(inode) = self.table.find_by_btime(&key(&st), kind(&st), btime(&st)) {
            inode.set_place(dir, name);
            return Ok((inode, st));
        }
        let fd = self.open_path(dir_fd, name)?;
        let now = statx(fd.as_fd(), b"")?;
        if key(&now).mount != mount.id {
            return Err(Errno::STALE);
        }
        let (inode, _) = self.table.insert(self.found(dir, &now, mount, None, true));
        inode.set_place(dir, name);
        self.cache.keep(&self.table, &inode, self.cache.wrap(fd));
        Ok((inode, now))
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

    /// The inode that is open as `file`. It has one reference more.
    pub(crate) fn find_open(&self, dir: &Arc<Inode>, at: At<'_>, file: BorrowedFd<'_>) -> Result<(Arc<Inode>, Statx)> {
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
            At::Elsewhere => {}
        }
        if let Some(fd) = fd {
            self.cache.keep(&self.table, &inode, self.cache.wrap(fd));
        }
        Ok((inode, st))
    }

    /// The inode that is about to lose this name, if a client knows it. It is pinned when this is its last name:
    /// afterwards neither name nor file handle would lead to it.
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
                tracing::debug!(ino = inode.ino.0, "an unlinked inode could not be pinned");
            }
        }
        Some(Pinned { inode, newly })
    }

    /// Without the check, which can wait until somebody wants the inode again.
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
    /// The name stayed after all, unless somebody else has removed it.
    pub(crate) fn undo(&self) {
        if self.newly && self.inode.fd().is_none_or(|fd| has_name(fd.as_fd())) {
            self.inode.set_pinned(false);
        }
    }
}
