//! Attributes of inodes and statistics of file systems.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferry_engine::{Shortening, Windows};
use ferry_vfs::{
    Attr, Caller, Change, Errno, FileType, Handle, Ino, Lockable, OFlags, Result, SessionId, SetAttr, SetTime, Statfs,
    without_privileges,
};
use rustix::fs::{Access, AtFlags, Gid, Mode, Statx, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid};
use rustix::path::DecInt;

use crate::Dir;
use crate::creds::{Creds, WithoutFsetid};
use crate::io::Open;
use crate::resolve::statx;
use crate::table::Inode;

const S_ISGID: u32 = 0o2000;
const S_IXGRP: u32 = 0o010;

/// Returns whether a mode has sgid without group execution, the mark of mandatory locking, which is no privilege.
pub(crate) fn is_sgid_mark(mode: u32) -> bool {
    mode & (S_ISGID | S_IXGRP) == S_ISGID
}

impl Dir {
    pub(crate) fn getattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        if let Some(handle) = handle {
            let open = self.handles.get(cx.session, ino, handle)?;
            return Ok(self.attr(&open.inode, &statx(open.file.as_fd(), b"")?));
        }
        self.with_stat(ino, |inode, st| self.attr(inode, st))
    }

    /// Changes size, owner, mode and times, in an order in which no step undoes an earlier one.
    pub(crate) fn setattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        let _operation = self.writable()?;
        let open = handle.map(|handle| self.handles.get(cx.session, ino, handle)).transpose()?;
        // An open handle of a directory or file serves as well as an O_PATH descriptor.
        let path;
        let (inode, fd): (&Arc<Inode>, BorrowedFd<'_>) = match &open {
            Some(open) => (&open.inode, open.file.as_fd()),
            None => {
                path = self.path(ino)?;
                (&path.0, path.1.as_fd())
            }
        };
        let outcome = self.set_attributes(cx, inode, (open.as_deref(), fd), set);
        // Also if one step failed, because earlier steps have taken effect.
        match set.size {
            Some(size) => {
                self.changes.publish(cx.session, || Change::Data { ino: inode.ino, offset: size, len: u64::MAX });
            }
            None => self.attr_changed(cx.session, inode),
        }
        outcome?;
        Ok(self.attr(inode, &statx(fd, b"")?))
    }

    fn set_attributes(
        &self,
        cx: &Caller<'_>,
        inode: &Inode,
        (open, fd): (Option<&Open>, BorrowedFd<'_>),
        set: &SetAttr,
    ) -> Result<()> {
        if let Some(size) = set.size {
            let file = open.filter(|open| open.flags() & OFlags::ACCMODE != OFlags::RDONLY);
            self.truncate((cx, inode), file.map(|open| open.file.as_fd()), fd, size, set.clear_privileges)?;
        }
        if set.uid.is_some() || set.gid.is_some() {
            if set.uid == Some(u32::MAX) || set.gid == Some(u32::MAX) {
                return Err(Errno::INVAL);
            }
            // The host lets this server keep the sgid mark, although its group may differ; suid is cleared in any case.
            if !cx.is_root_or_unknown() {
                self.keeps_sgid_mark(cx, inode, fd)?;
            }
            let (uid, gid) = (set.uid.map(Uid::from_raw), set.gid.map(Gid::from_raw));
            // The user or group may exist on the client but not in this user namespace, so no file can belong to it.
            let unknown = |errno| if errno == Errno::INVAL { Errno::PERM } else { errno };
            rustix::fs::chownat(fd, "", uid, gid, AtFlags::EMPTY_PATH).map_err(unknown)?;
        } else if set.clear_privileges && set.size.is_none() && set.mode.is_none() {
            self.clear_privileges(cx, inode, fd)?;
        }
        if let Some(mode) = set.mode {
            self.chmod(inode, fd, mode)?;
        }
        if set.atime.is_some() || set.mtime.is_some() {
            let times = Timestamps { last_access: time(set.atime)?, last_modification: time(set.mtime)? };
            rustix::fs::utimensat(fd, "", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    }

    /// Returns a guard for shortening a file to `size`; see [`Windows::shortening`].
    pub(crate) fn shortening(by: SessionId, inode: &Inode, size: u64) -> Shortening {
        Windows::of_process().shortening(by, || Some(inode.found.key.file_id()), size)
    }

    /// Sets the size, through a writable descriptor of the client or a new one.
    fn truncate(
        &self,
        (cx, inode): (&Caller<'_>, &Inode),
        file: Option<BorrowedFd<'_>>,
        path: BorrowedFd<'_>,
        size: u64,
        clear_privileges: bool,
    ) -> Result<()> {
        match inode.found.kind {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::INVAL),
        }
        if i64::try_from(size).is_err() {
            return Err(Errno::INVAL);
        }
        let reopened: OwnedFd;
        let file = match file {
            Some(file) => file,
            None => {
                reopened = self.reopen(path, OFlags::WRONLY)?;
                reopened.as_fd()
            }
        };
        let _shortening = Self::shortening(cx.session, inode, size);
        // Before, because the growth could not be undone.
        Windows::of_process().growing(|| Some(inode.found.key.file_id()), file, size)?;
        // The kernel always removes file capabilities.
        let _guard = if clear_privileges { self.lose_privileges(cx, inode, file)? } else { None };
        rustix::fs::ftruncate(file, size)
    }

    /// Sets the permission bits of the file of a descriptor, `O_PATH` or not.
    pub(crate) fn chmod(&self, inode: &Inode, fd: BorrowedFd<'_>, mode: u32) -> Result<()> {
        if inode.found.kind == FileType::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        let mode = Mode::from_raw_mode(mode & 0o7777);
        rustix::fs::chmodat(&self.proc_fds, DecInt::from_fd(fd), mode, AtFlags::empty())
    }

    /// Clears suid and sgid, as far as the caller may not keep them.
    fn clear_privileges(&self, cx: &Caller<'_>, inode: &Inode, fd: BorrowedFd<'_>) -> Result<()> {
        if inode.found.kind != FileType::RegularFile {
            return Ok(());
        }
        self.clear_privileges_of(cx, inode, (fd, &statx(fd, b"")?))
    }

    fn clear_privileges_of(&self, cx: &Caller<'_>, inode: &Inode, (fd, st): (BorrowedFd<'_>, &Statx)) -> Result<()> {
        let mode = st.stx_mode.into();
        let kept = without_privileges(mode, st.stx_gid, cx);
        if kept == mode { Ok(()) } else { self.chmod(inode, fd, kept) }
    }

    /// Prepares a change of a file by a caller who may not keep suid and sgid; held until the change is done.
    ///
    /// For a thread without `CAP_FSETID` the host's kernel clears both in the change itself. For sgid without group
    /// execution it checks this thread's groups, so this function decides for the caller. If sgid stays, the thread
    /// keeps the capability.
    pub(crate) fn lose_privileges(
        &self,
        cx: &Caller<'_>,
        inode: &Inode,
        fd: BorrowedFd<'_>,
    ) -> Result<Option<WithoutFsetid>> {
        if self.keeps_sgid_mark(cx, inode, fd)? { Ok(None) } else { Creds::drop_fsetid().map(Some) }
    }

    /// Handles sgid without group execution: clears it for a caller outside of the group, otherwise clears suid only.
    /// Returns whether sgid stays.
    fn keeps_sgid_mark(&self, cx: &Caller<'_>, inode: &Inode, fd: BorrowedFd<'_>) -> Result<bool> {
        let st = statx(fd, b"")?;
        if inode.found.kind != FileType::RegularFile || !is_sgid_mark(st.stx_mode.into()) {
            return Ok(false);
        }
        self.clear_privileges_of(cx, inode, (fd, &st))?;
        Ok(cx.in_group_or_root(st.stx_gid))
    }

    pub(crate) fn readlink(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        let (inode, fd) = self.path(ino)?;
        if inode.found.kind != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        Ok(rustix::fs::readlinkat(fd.as_fd(), "", Vec::new())?.into_bytes())
    }

    pub(crate) fn statfs(&self, _: &Caller<'_>, ino: Ino) -> Result<Statfs> {
        let (_, fd) = self.path(ino)?;
        let host = rustix::fs::fstatvfs(fd.as_fd())?;
        let narrow = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        Ok(Statfs {
            blocks: host.f_blocks,
            bfree: host.f_bfree,
            bavail: host.f_bavail,
            files: host.f_files,
            ffree: host.f_ffree,
            bsize: narrow(host.f_bsize),
            namelen: narrow(host.f_namemax),
            frsize: narrow(host.f_frsize),
        })
    }

    /// Checks access on the host as the caller, for protocols whose client does not check.
    pub(crate) fn access(&self, cx: &Caller<'_>, ino: Ino, mask: u32) -> Result<()> {
        let (_, fd) = self.path(ino)?;
        let access = Access::from_bits(mask).ok_or(Errno::INVAL)?;
        if access.contains(Access::WRITE_OK) {
            let _operation = self.writable()?;
        }
        let _guard = self.creds.enter_plain(cx)?;
        rustix::fs::accessat(&self.proc_fds, DecInt::from_fd(fd.as_fd()), access, AtFlags::EACCESS)
    }
}

fn time(set: Option<SetTime>) -> Result<Timespec> {
    Ok(match set {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        // A larger value is a command to the kernel, not a time.
        Some(SetTime::At(at)) if at.nsec < 1_000_000_000 => Timespec { tv_sec: at.sec, tv_nsec: at.nsec.into() },
        Some(SetTime::At(_)) => return Err(Errno::INVAL),
    })
}
