//! System calls that rustix lacks. All `unsafe` of this crate is here; every function is safe for any argument.
#![allow(unsafe_code, reason = "system calls; each block says why it is sound")]

use std::ffi::{CStr, c_int, c_long, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

use ferry_vfs::{Errno, OFlags, Result};

/// The maximum length of a host file handle in bytes (`MAX_HANDLE_SZ`).
const HANDLE_BYTES_MAX: usize = 128;
const HANDLE_BYTES_ROOM: c_uint = 128;
const _: () = assert!(HANDLE_BYTES_ROOM as usize == HANDLE_BYTES_MAX);
/// Handles of common local file systems (ext4 8 bytes, XFS 12, btrfs 20) fit without an allocation.
const HANDLE_BYTES_INLINE: usize = 24;
/// The first and the last pause of [`open_by_handle`]; each is twice the one before, 51 ms in all.
const CREATION_PAUSE_MIN: Duration = Duration::from_micros(50);
const CREATION_PAUSE_MAX: Duration = Duration::from_micros(50 << 9);

/// A host file handle (`name_to_handle_at`): identifies an inode of one file system during its lifetime.
#[derive(Clone, Debug)]
pub(crate) enum HostHandle {
    /// Held in place.
    Small { kind: i32, len: u8, bytes: [u8; HANDLE_BYTES_INLINE] },
    /// Held on the heap.
    Large { kind: i32, bytes: Box<[u8]> },
}

impl HostHandle {
    fn new(kind: i32, bytes: &[u8]) -> Self {
        let mut small = [0; HANDLE_BYTES_INLINE];
        match (small.get_mut(..bytes.len()), u8::try_from(bytes.len())) {
            (Some(room), Ok(len)) => {
                room.copy_from_slice(bytes);
                Self::Small { kind, len, bytes: small }
            }
            _ => Self::Large { kind, bytes: bytes.into() },
        }
    }

    /// Creates a handle from its parts. `None`: the bytes are too long.
    pub(crate) fn from_parts(kind: i32, bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= HANDLE_BYTES_MAX).then(|| Self::new(kind, bytes))
    }

    /// Its type and its bytes.
    pub(crate) fn parts(&self) -> (i32, &[u8]) {
        match self {
            Self::Small { kind, len, bytes } => (*kind, &bytes[..usize::from(*len)]),
            Self::Large { kind, bytes } => (*kind, bytes),
        }
    }
}

impl PartialEq for HostHandle {
    fn eq(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

impl Eq for HostHandle {}

/// `struct file_handle` with room for the longest handle.
#[repr(C)]
struct RawHandle {
    handle_bytes: c_uint,
    handle_type: c_int,
    f_handle: [u8; HANDLE_BYTES_MAX],
}

const _: () = assert!(std::mem::offset_of!(RawHandle, f_handle) == 8);

/// `struct xattr_args` of the `*xattrat` calls.
#[repr(C)]
struct XattrArgs {
    value: u64,
    size: u32,
    flags: u32,
}

const _: () = assert!(size_of::<XattrArgs>() == 16);

// The numbers of the xattrat calls (Linux 6.13) are the same on every architecture.
const SYS_SETXATTRAT: c_long = 463;
const SYS_GETXATTRAT: c_long = 464;
/// No flag: a symbolic link at the end of the path is followed.
pub(crate) const FOLLOW_LINK: libc::c_int = 0;
const SYS_LISTXATTRAT: c_long = 465;
const SYS_REMOVEXATTRAT: c_long = 466;

/// Creates a fanotify group. Its events identify inodes by their handles, names by the directory's handle, and contain
/// both where possible. Reads do not block.
pub(crate) fn fanotify_group() -> Result<OwnedFd> {
    let flags = libc::FAN_CLASS_NOTIF | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK | libc::FAN_REPORT_DFID_NAME_TARGET;
    // SAFETY: no pointers.
    let fd = unsafe { libc::fanotify_init(flags, 0) };
    owned(check(fd.into())?)
}

/// Subscribes a fanotify group to events of the whole file system of `on`.
pub(crate) fn fanotify_mark_file_system(group: BorrowedFd<'_>, on: BorrowedFd<'_>, mask: u64) -> Result<()> {
    let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
    // SAFETY: the path may be null, which means `on` itself.
    let result = unsafe { libc::fanotify_mark(group.as_raw_fd(), flags, mask, on.as_raw_fd(), std::ptr::null()) };
    check(result.into()).map(drop)
}

/// A path of one component with a NUL, on the stack.
struct Component([u8; 257]);

impl Component {
    fn new(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > 255 || bytes.contains(&0) {
            return Err(Errno::INVAL);
        }
        let mut path = [0; 257];
        path[..bytes.len()].copy_from_slice(bytes);
        Ok(Self(path))
    }

    fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }
}

fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn check(result: c_long) -> Result<usize> {
    usize::try_from(result).map_err(|_| errno())
}

/// Calls `name_to_handle_at` for a name in a directory (without following it), or for the descriptor if it is empty.
pub(crate) fn name_to_handle(dir: BorrowedFd<'_>, name: &[u8]) -> Result<HostHandle> {
    let path = Component::new(name)?;
    let mut raw = RawHandle { handle_bytes: HANDLE_BYTES_ROOM, handle_type: 0, f_handle: [0; HANDLE_BYTES_MAX] };
    let mut mount_id: c_int = 0;
    let flags = if name.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
    // SAFETY: `path` is NUL-terminated and lives through the call; `raw` is a `file_handle` with the room that
    // `handle_bytes` announces; `mount_id` is a writable int.
    check(unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            dir.as_raw_fd(),
            path.as_ptr(),
            &raw mut raw,
            &raw mut mount_id,
            flags,
        )
    })?;
    let bytes = raw.f_handle.get(..raw.handle_bytes as usize).ok_or(Errno::OVERFLOW)?;
    Ok(HostHandle::new(raw.handle_type, bytes))
}

/// Calls `open_by_handle_at`; `mount` is any open descriptor on the file system.
///
/// Linux returns ENOMEM also while a new file takes the inode number of a removed one (`iget_locked()` finds an inode
/// with `I_CREATING`). This soon ends, so the call is retried.
pub(crate) fn open_by_handle(mount: BorrowedFd<'_>, handle: &HostHandle, flags: OFlags) -> Result<OwnedFd> {
    let mut pause = CREATION_PAUSE_MIN;
    loop {
        match try_open_by_handle(mount, handle, flags) {
            Err(Errno::NOMEM) if pause <= CREATION_PAUSE_MAX => std::thread::sleep(pause),
            result => return result,
        }
        pause *= 2;
    }
}

fn try_open_by_handle(mount: BorrowedFd<'_>, handle: &HostHandle, flags: OFlags) -> Result<OwnedFd> {
    let (kind, bytes) = handle.parts();
    let mut raw = RawHandle { handle_bytes: 0, handle_type: kind, f_handle: [0; HANDLE_BYTES_MAX] };
    raw.f_handle.get_mut(..bytes.len()).ok_or(Errno::STALE)?.copy_from_slice(bytes);
    raw.handle_bytes = c_uint::try_from(bytes.len()).map_err(|_| Errno::STALE)?;
    // SAFETY: `raw` is a `file_handle` with as many bytes as `handle_bytes` says.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw mut raw, (flags | OFlags::CLOEXEC).bits())
    })?;
    owned(fd)
}

fn owned(fd: usize) -> Result<OwnedFd> {
    let fd = c_int::try_from(fd).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Closes a descriptor and returns its error, which dropping it does not.
pub(crate) fn close(fd: OwnedFd) -> Result<()> {
    // SAFETY: the descriptor is ours to close, exactly once: `into_raw_fd` gives it up.
    check(unsafe { libc::close(fd.into_raw_fd()) }.into()).map(drop)
}

/// Calls `getdents64`; returns the number of bytes in `buffer`, 0 at the end.
pub(crate) fn getdents(dir: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize> {
    // SAFETY: the kernel writes at most `buffer.len()` bytes to `buffer`.
    check(unsafe { libc::syscall(libc::SYS_getdents64, dir.as_raw_fd(), buffer.as_mut_ptr(), buffer.len()) })
}

/// Calls `setfsuid` for this thread; returns the previous id. Failure is not reported.
pub(crate) fn setfsuid(uid: u32) -> u32 {
    // SAFETY: no pointers. The raw call changes this thread only.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a uid_t in a long")]
    unsafe {
        libc::syscall(libc::SYS_setfsuid, uid) as u32
    }
}

/// Calls `setfsgid` for this thread; returns the previous id. Failure is not reported.
pub(crate) fn setfsgid(gid: u32) -> u32 {
    // SAFETY: no pointers. The raw call changes this thread only.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a gid_t in a long")]
    unsafe {
        libc::syscall(libc::SYS_setfsgid, gid) as u32
    }
}

/// Sets the supplementary groups of this thread (libc's `setgroups` sets those of the process).
pub(crate) fn setgroups(groups: &[u32]) -> Result<()> {
    // SAFETY: the kernel reads `groups.len()` group ids from `groups`.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) }).map(drop)
}

/// Restores normal scheduling of the calling thread if it runs at `SCHED_IDLE`.
pub(crate) fn compete() -> Result<()> {
    // `struct sched_param` of the kernel.
    let priority: libc::c_int = 0;
    // musl's functions for scheduling policies only fail.
    // SAFETY: the first call touches no memory; `priority` outlives the second, which only reads it.
    let result = unsafe {
        if libc::syscall(libc::SYS_sched_getscheduler, 0) != c_long::from(libc::SCHED_IDLE) {
            return Ok(());
        }
        libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_OTHER, &raw const priority)
    };
    check(result).map(drop)
}

/// Gives this thread its own umask and working directory.
pub(crate) fn unshare_fs() -> Result<()> {
    // SAFETY: no pointers; CLONE_FS leaves descriptors and memory shared.
    check(unsafe { libc::syscall(libc::SYS_unshare, libc::CLONE_FS) }).map(drop)
}

/// What `F_OFD_GETLK` and `F_OFD_SETLK` take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawLock {
    /// `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
    pub(crate) kind: i32,
    /// First byte.
    pub(crate) start: i64,
    /// Length; 0 for "to the end".
    pub(crate) len: i64,
}

fn raw_flock(lock: &RawLock) -> libc::flock {
    #[allow(clippy::cast_possible_truncation, reason = "F_RDLCK, F_WRLCK and F_UNLCK are 0, 1 and 2")]
    libc::flock {
        l_type: lock.kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: lock.start,
        l_len: lock.len,
        l_pid: 0,
    }
}

/// `F_OFD_SETLK`: acquires, converts or releases a lock of the open file description; never waits.
pub(crate) fn ofd_set(fd: BorrowedFd<'_>, lock: &RawLock) -> Result<()> {
    let raw = raw_flock(lock);
    // SAFETY: `raw` is a `struct flock` that lives through the call.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const raw) };
    check(result.into()).map(drop)
}

/// `F_OFD_GETLK`: a lock that conflicts.
pub(crate) fn ofd_get(fd: BorrowedFd<'_>, lock: &RawLock) -> Result<Option<RawLock>> {
    let mut raw = raw_flock(lock);
    // SAFETY: `raw` is a writable `struct flock` that lives through the call.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut raw) };
    check(result.into())?;
    let kind = i32::from(raw.l_type);
    Ok((kind != libc::F_UNLCK).then_some(RawLock { kind, start: raw.l_start, len: raw.l_len }))
}

/// The size of the argument buffer of the file-flag ioctls, which use at most 28 bytes (`struct fsxattr`).
pub(crate) const IOCTL_BYTES_MAX: usize = 32;

/// The ioctls whose argument is at most [`IOCTL_BYTES_MAX`] bytes of plain data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileIoctl {
    /// `FS_IOC_GETFLAGS`.
    GetFlags,
    /// `FS_IOC_SETFLAGS`.
    SetFlags,
    /// `FS_IOC_FSGETXATTR`.
    GetXflags,
    /// `FS_IOC_FSSETXATTR`.
    SetXflags,
}

/// Runs one of the known ioctls on `argument`, in place.
pub(crate) fn file_ioctl(
    fd: BorrowedFd<'_>,
    command: FileIoctl,
    argument: &mut [u64; IOCTL_BYTES_MAX / 8],
) -> Result<()> {
    // `Ioctl` is signed with musl.
    #[allow(clippy::cast_possible_wrap, reason = "the kernel reads 32 bits")]
    const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f_u32 as libc::Ioctl;
    const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401c_5820;
    let request = match command {
        FileIoctl::GetFlags => libc::FS_IOC_GETFLAGS,
        FileIoctl::SetFlags => libc::FS_IOC_SETFLAGS,
        FileIoctl::GetXflags => FS_IOC_FSGETXATTR,
        FileIoctl::SetXflags => FS_IOC_FSSETXATTR,
    };
    // SAFETY: each of these reads or writes at most 28 bytes (a long, or `struct fsxattr`) at the pointer, where
    // there are 32, aligned for both.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, argument.as_mut_ptr().cast::<c_void>()) };
    check(result.into()).map(drop)
}

/// `getxattrat` on the entry `path` of `dir`, with [`FOLLOW_LINK`] or `AT_SYMLINK_NOFOLLOW`; `NOSYS` before Linux 6.13.
pub(crate) fn getxattrat(
    dir: BorrowedFd<'_>,
    path: &CStr,
    flags: libc::c_int,
    name: &CStr,
    value: &mut [u8],
) -> Result<usize> {
    let mut args = XattrArgs {
        value: value.as_mut_ptr() as u64,
        size: u32::try_from(value.len()).map_err(|_| Errno::INVAL)?,
        flags: 0,
    };
    // SAFETY: both strings are NUL-terminated; `args` names `value` and its length, which the kernel writes to.
    check(unsafe {
        libc::syscall(
            SYS_GETXATTRAT,
            dir.as_raw_fd(),
            path.as_ptr(),
            flags,
            name.as_ptr(),
            &raw mut args,
            size_of::<XattrArgs>(),
        )
    })
}

/// `setxattrat`; see [`getxattrat`].
pub(crate) fn setxattrat(dir: BorrowedFd<'_>, path: &CStr, name: &CStr, value: &[u8], flags: u32) -> Result<()> {
    let args =
        XattrArgs { value: value.as_ptr() as u64, size: u32::try_from(value.len()).map_err(|_| Errno::INVAL)?, flags };
    // SAFETY: both strings are NUL-terminated; `args` names `value` and its length, which the kernel reads.
    check(unsafe {
        libc::syscall(
            SYS_SETXATTRAT,
            dir.as_raw_fd(),
            path.as_ptr(),
            0,
            name.as_ptr(),
            &raw const args,
            size_of::<XattrArgs>(),
        )
    })
    .map(drop)
}

/// `listxattrat`; see [`getxattrat`].
pub(crate) fn listxattrat(dir: BorrowedFd<'_>, path: &CStr, list: &mut [u8]) -> Result<usize> {
    // SAFETY: `path` is NUL-terminated; the kernel writes at most `list.len()` bytes to `list`.
    check(unsafe { libc::syscall(SYS_LISTXATTRAT, dir.as_raw_fd(), path.as_ptr(), 0, list.as_mut_ptr(), list.len()) })
}

/// `removexattrat`; see [`getxattrat`].
pub(crate) fn removexattrat(dir: BorrowedFd<'_>, path: &CStr, name: &CStr) -> Result<()> {
    // SAFETY: both strings are NUL-terminated.
    check(unsafe { libc::syscall(SYS_REMOVEXATTRAT, dir.as_raw_fd(), path.as_ptr(), 0, name.as_ptr()) }).map(drop)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn handles_compare_by_value_whatever_their_size() {
        for len in [0, 8, HANDLE_BYTES_INLINE, HANDLE_BYTES_INLINE + 1, HANDLE_BYTES_MAX] {
            let bytes = vec![7; len];
            assert_eq!(HostHandle::new(1, &bytes), HostHandle::new(1, &bytes));
            assert_ne!(HostHandle::new(1, &bytes), HostHandle::new(2, &bytes));
            assert_eq!(HostHandle::new(1, &bytes).parts(), (1, &bytes[..]));
        }
    }

    #[test]
    fn names_with_nul_or_too_long_are_no_components() {
        let dir = std::fs::File::open("/").unwrap();
        for bad in [&b"a\0b"[..], &[b'x'; 256]] {
            assert_eq!(name_to_handle(dir.as_fd(), bad).unwrap_err(), Errno::INVAL);
        }
    }

    /// The kernel returns ENOMEM for about one of two thousand of these calls, while a file is being created.
    #[test]
    fn the_handle_of_a_removed_file_is_stale_while_its_number_is_taken_again() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let mount = std::fs::File::open(dir.path()).unwrap();
        let removed = dir.path().join("removed");
        std::fs::write(&removed, "").unwrap();
        let handle = name_to_handle(mount.as_fd(), b"removed").unwrap();
        std::fs::remove_file(&removed).unwrap();
        let done = AtomicBool::new(false);
        let mut outcomes = HashSet::new();
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (path, done) = (dir.path().join(thread.to_string()), &done);
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        std::fs::write(&path, "").unwrap();
                        std::fs::remove_file(&path).unwrap();
                    }
                });
            }
            for _ in 0..100_000 {
                outcomes.insert(open_by_handle(mount.as_fd(), &handle, OFlags::PATH).err());
            }
            done.store(true, Ordering::Relaxed);
        });
        if outcomes == HashSet::from([Some(Errno::PERM)]) {
            return ferry_skip::skip!("needs root");
        }
        assert_eq!(outcomes, HashSet::from([Some(Errno::STALE)]));
    }
}
