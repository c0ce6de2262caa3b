//! Extended attributes, also of objects that are never opened (symbolic links, device nodes).
//!
//! The calls that take a descriptor refuse `O_PATH`; those that take a path go through the magic links of
//! /proc/self/fd, relative to a descriptor of that directory (`*xattrat`, Linux 6.13) or, before that, to a working
//! directory of the thread's own.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use ferry_vfs::{Attr, Caller, Errno, FileType, Ino, Result, SessionId, Timespec, XattrFlags};
use rustix::fs::Statx;
use rustix::path::DecInt;

use crate::Dir;
use crate::creds::with_own_directory;
use crate::resolve::{ctime, key, statx};
use crate::sys;
use crate::table::Inode;

/// The largest value, and the largest list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const BYTES_MAX: usize = 65_536;
/// Room for nearly every value; the kernel allocates and clears as much as it is offered.
const BYTES_USUAL: usize = 512;
/// The longest name (`XATTR_NAME_MAX`).
const NAME_BYTES_MAX: usize = 255;
const S_ISGID: u32 = 0o2000;
/// Without multigrain timestamps two changes may have one time, within a tick of the clock (10 ms) and as far as a file server's clock is from ours.
/// What was changed longer ago than this, in seconds, gets another time by its next change.
const SETTLED_S: i64 = 2;
/// What an ACL can take away from a mode.
const GROUP_AND_OTHERS: u32 = 0o077;
const ACCESS_ACL: &CStr = c"system.posix_acl_access";

/// The kernel has no `*xattrat`.
static OLD_KERNEL: AtomicBool = AtomicBool::new(false);

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

fn c_name(name: &[u8]) -> Result<CString> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(Errno::RANGE);
    }
    CString::new(name).map_err(|_| Errno::INVAL)
}

/// Calls `read` with a small buffer and, if that is too small, with the largest.
fn grow(mut read: impl FnMut(&mut [u8]) -> Result<usize>) -> Result<Vec<u8>> {
    BUFFER.with_borrow_mut(|buffer| {
        buffer.resize(BYTES_MAX, 0);
        let len = match read(&mut buffer[..BYTES_USUAL]) {
            Err(Errno::RANGE) => read(buffer),
            other => other,
        }?;
        Ok(buffer[..len].to_vec())
    })
}

/// Whether each later change of an inode gets another time than `changed`, which statx has returned.
fn changes_show(inode: &Inode, changed: Timespec) -> bool {
    let is_multigrain = inode.found.mount.multigrain && inode.found.btime.is_some();
    is_multigrain || Timespec::now().sec.saturating_sub(changed.sec) > SETTLED_S
}

impl Dir {
    /// Runs `new`, or `old` where the kernel lacks the former, on the path by which /proc/self/fd knows `fd`.
    fn by_magic<T>(
        &self,
        fd: BorrowedFd<'_>,
        mut new: impl FnMut(BorrowedFd<'_>, &CStr) -> Result<T>,
        mut old: impl FnMut(&CStr) -> Result<T>,
    ) -> Result<T> {
        let path = DecInt::from_fd(fd);
        if !OLD_KERNEL.load(Ordering::Relaxed) {
            match new(self.proc_fds.as_fd(), path.as_c_str()) {
                Err(Errno::NOSYS) => OLD_KERNEL.store(true, Ordering::Relaxed),
                other => return other,
            }
        }
        with_own_directory(|| {
            rustix::process::fchdir(&self.proc_fds)?;
            old(path.as_c_str())
        })
    }

    pub(crate) fn xattr_value(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let name = c_name(name)?;
        let (_, fd) = self.path(ino)?;
        grow(|buffer| {
            let buffer = std::cell::RefCell::new(buffer);
            self.by_magic(
                fd.as_fd(),
                |dir, path| sys::getxattrat(dir, path, sys::FOLLOW_LINK, &name, &mut buffer.borrow_mut()),
                |path| rustix::fs::getxattr(path, name.as_c_str(), &mut **buffer.borrow_mut()),
            )
        })
    }

    /// Looks for an ACL also where the root's own file system has none: one that is mounted below may have. Whoever sets an ACL
    /// changes the time of the last change, so an inode without one is looked at once.
    pub(crate) fn mode_without_acl_of(&self, cx: &Caller<'_>, ino: Ino, attr: &Attr) -> u32 {
        self.looks_for_acls.store(true, Ordering::Relaxed);
        let inode = self.table.get(ino).ok();
        if inode.as_ref().is_some_and(|inode| inode.is_known_without_acl(attr.ctime)) {
            return attr.mode;
        }
        let mode = ferry_vfs::mode_without_acl(self, cx, ino, attr);
        if let Some(inode) = inode.filter(|inode| mode == attr.mode && changes_show(inode, attr.ctime)) {
            inode.set_known_without_acl(attr.ctime);
        }
        mode
    }

    /// Notes an inode that has no ACL when it is first found by a name, for clients that go by modes without ACLs. The attribute is read by
    /// the name, so the inode need not be opened. The name may lead to another inode meanwhile, but renaming an inode away and back
    /// changes its time of change, which is compared afterwards.
    pub(crate) fn look_for_acl(&self, inode: &Inode, (dir, name): (BorrowedFd<'_>, &[u8]), seen: &Statx) {
        let changed = ctime(seen);
        let is_in_question = self.looks_for_acls.load(Ordering::Relaxed)
            && !OLD_KERNEL.load(Ordering::Relaxed)
            && [FileType::RegularFile, FileType::Directory].contains(&inode.found.kind)
            && u32::from(seen.stx_mode) & GROUP_AND_OTHERS != 0
            && changes_show(inode, changed)
            && !inode.is_known_without_acl(changed);
        if !is_in_question {
            return;
        }
        let Ok(name_c) = CString::new(name) else { return };
        match sys::getxattrat(dir, &name_c, libc::AT_SYMLINK_NOFOLLOW, ACCESS_ACL, &mut []) {
            Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            _ => return,
        }
        if statx(dir, name).is_ok_and(|now| key(&now) == inode.found.key && ctime(&now) == changed) {
            inode.set_known_without_acl(changed);
        }
    }

    /// Notes an open inode that has no ACL.
    pub(crate) fn look_for_acl_of(&self, inode: &Inode, file: BorrowedFd<'_>, seen: &Statx) {
        let changed = ctime(seen);
        if self.looks_for_acls.load(Ordering::Relaxed)
            && changes_show(inode, changed)
            && let Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP) =
                rustix::fs::fgetxattr(file, ACCESS_ACL, &mut [0_u8; 1])
        {
            inode.set_known_without_acl(changed);
        }
    }

    pub(crate) fn xattr_names(&self, ino: Ino) -> Result<Vec<u8>> {
        let (_, fd) = self.path(ino)?;
        grow(|buffer| {
            let buffer = std::cell::RefCell::new(buffer);
            self.by_magic(
                fd.as_fd(),
                |dir, path| sys::listxattrat(dir, path, &mut buffer.borrow_mut()),
                |path| rustix::fs::listxattr(path, &mut **buffer.borrow_mut()),
            )
        })
    }

    pub(crate) fn set_xattr_value(
        &self,
        by: SessionId,
        ino: Ino,
        name: &[u8],
        (value, flags): (&[u8], XattrFlags),
        clear_sgid: bool,
    ) -> Result<()> {
        self.writable()?;
        let name = c_name(name)?;
        if value.len() > BYTES_MAX {
            return Err(Errno::TOOBIG);
        }
        let (inode, fd) = self.path(ino)?;
        self.by_magic(
            fd.as_fd(),
            |dir, path| sys::setxattrat(dir, path, &name, value, flags.bits()),
            |path| rustix::fs::setxattr(path, name.as_c_str(), value, flags),
        )?;
        let clear = || {
            let mode = u32::from(statx(fd.as_fd(), b"")?.stx_mode);
            if mode & S_ISGID == 0 { Ok(()) } else { self.chmod(&inode, fd.as_fd(), mode & !S_ISGID) }
        };
        let cleared = if clear_sgid { clear() } else { Ok(()) };
        self.attr_changed(by, &inode);
        cleared
    }

    pub(crate) fn remove_xattr_value(&self, by: SessionId, ino: Ino, name: &[u8]) -> Result<()> {
        self.writable()?;
        let name = c_name(name)?;
        let (inode, fd) = self.path(ino)?;
        self.by_magic(
            fd.as_fd(),
            |dir, path| sys::removexattrat(dir, path, &name),
            |path| rustix::fs::removexattr(path, name.as_c_str()),
        )?;
        self.attr_changed(by, &inode);
        Ok(())
    }
}
