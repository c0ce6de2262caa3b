//! Extended attributes, also of files that are never opened (symbolic links, device nodes).
//!
//! Calls that take a descriptor refuse `O_PATH`. Calls that take a path use the magic links of /proc/self/fd: relative
//! to a descriptor of that directory (`*xattrat`, Linux 6.13), or before that, relative to the thread's own working
//! directory.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use ferry_vfs::{Attr, Caller, Errno, FileType, Ino, Result, Timespec, XattrFlags};
use rustix::fs::Statx;
use rustix::path::DecInt;

use crate::Dir;
use crate::creds::with_own_directory;
use crate::resolve::{ctime, key, statx};
use crate::sys;
use crate::table::Inode;

/// The maximum size of a value, and of a list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const BYTES_MAX: usize = 65_536;
/// Enough for nearly every value; the kernel allocates and clears a buffer of the given size.
const BYTES_USUAL: usize = 512;
/// The longest name (`XATTR_NAME_MAX`).
const NAME_BYTES_MAX: usize = 255;
const S_ISGID: u32 = 0o2000;
/// Without multigrain timestamps two changes within a clock tick (10 ms), or within the clock skew of a file server,
/// may have equal times. After this many seconds the next change has another time.
const SETTLED_S: i64 = 2;
/// The permissions that an ACL can restrict.
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

/// Returns whether each later change of an inode gets another time than `changed`, which statx returned.
fn changes_show(inode: &Inode, changed: Timespec) -> bool {
    let is_multigrain = inode.found.mount.multigrain && inode.found.btime.is_some();
    is_multigrain || Timespec::now().sec.saturating_sub(changed.sec) > SETTLED_S
}

impl Dir {
    /// Runs `new`, or `old` if the kernel lacks the former, on the path of `fd` in /proc/self/fd.
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

    pub(crate) fn getxattr(&self, _: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
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

    /// Looks for an ACL even if the root's own file system has none, because a mount below may have them. Setting an
    /// ACL changes the change time, so an inode without one is checked once.
    pub(crate) fn mode_without_acl(&self, cx: &Caller<'_>, ino: Ino, attr: &Attr) -> u32 {
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

    /// Records an inode without an ACL when it is first found by name, for clients that check modes without ACLs. The
    /// attribute is read by name, so the inode need not be opened. If the name refers to another inode meanwhile, the
    /// rename changes the inode's change time, which is compared afterwards.
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

    /// Records an open inode without an ACL.
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

    pub(crate) fn listxattr(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
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

    pub(crate) fn setxattr(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
        clear_sgid: bool,
    ) -> Result<()> {
        let _operation = self.writable()?;
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
        self.attr_changed(cx.session, &inode);
        cleared
    }

    pub(crate) fn removexattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        let _operation = self.writable()?;
        let name = c_name(name)?;
        let (inode, fd) = self.path(ino)?;
        self.by_magic(
            fd.as_fd(),
            |dir, path| sys::removexattrat(dir, path, &name),
            |path| rustix::fs::removexattr(path, name.as_c_str()),
        )?;
        self.attr_changed(cx.session, &inode);
        Ok(())
    }
}
