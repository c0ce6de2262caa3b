//! The system calls that `rustix` does not have.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use ferry_vfs::Ino;
use ferry_wire::events::{ANNOUNCE, ANNOUNCEMENT_BYTES, Announcement, INTERRUPT, MESSAGE_BYTES_MAX, REPLAY_GID, WAIT};
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, StatxFlags, accessat, statx};
use rustix::io::{Errno, Result};
use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fspick};
use rustix::process::{Gid, Pid, Resource, getrlimit};

/// `FILEID_INO64_GEN`, the type of FUSE's handles: two halves of the inode number, and its generation.
const HANDLE_TYPE: c_int = 0x81;
const HANDLE_WORDS: usize = 3;

/// Descriptors up to this number are closed one by one, in less than a second. The agent has few.
const DESCRIPTORS_MAX: u32 = 1 << 20;

/// `struct file_handle` with FUSE's handle.
#[repr(C)]
struct FileHandle {
    bytes: u32,
    kind: c_int,
    words: [u32; HANDLE_WORDS],
}

const _: () = assert!(size_of::<FileHandle>() == 8 + 4 * HANDLE_WORDS);

/// Sets the group of replays for this thread's file access; returns the previous one.
pub(crate) fn enter_replay_group() -> Result<Gid> {
    let before = rustix::process::getegid();
    // The server recognizes only root.
    if !rustix::process::geteuid().is_root() {
        return Err(Errno::PERM);
    }
    set_effective_gid(Gid::from_raw(REPLAY_GID))?;
    Ok(before)
}

/// Sets the effective group of this thread alone.
pub(crate) fn set_effective_gid(group: Gid) -> Result<()> {
    let real = rustix::process::getgid();
    rustix::thread::set_thread_res_gid(real, group, real)
}

/// Waits for a message; the rest of the buffer is undefined.
pub(crate) fn wait(root: &OwnedFd, buffer: &mut [u8]) -> Result<()> {
    assert!(buffer.len() >= MESSAGE_BYTES_MAX, "the kernel writes as many bytes as the command says");
    // SAFETY: WAIT only writes, at most MESSAGE_BYTES_MAX bytes, which the buffer has and which stays borrowed.
    unsafe { ioctl(root, WAIT, buffer.as_mut_ptr().cast()) }
}

/// Announces an event; returns the mode of what was created.
pub(crate) fn announce(root: &OwnedFd, number: u64) -> Result<u32> {
    let mut bytes: [u8; ANNOUNCEMENT_BYTES] = Announcement { number, mode: 0 }.encode();
    // SAFETY: ANNOUNCE reads and writes ANNOUNCEMENT_BYTES bytes, which the array has and which stays borrowed.
    unsafe { ioctl(root, ANNOUNCE, bytes.as_mut_ptr().cast()) }?;
    Announcement::decode(&bytes).map(|reply| reply.mode).map_err(|_| Errno::PROTO)
}

/// Makes the agent that waits at a mount check whether it must end.
pub(crate) fn interrupt(root: &OwnedFd) -> Result<()> {
    // SAFETY: INTERRUPT neither reads nor writes an argument.
    unsafe { ioctl(root, INTERRUPT, std::ptr::null_mut()) }
}

/// Whether a mount is read-only.
pub(crate) fn is_read_only(root: &OwnedFd) -> bool {
    accessat(root, c".", Access::WRITE_OK, AtFlags::empty()) == Err(Errno::ROFS)
}

/// Opens a mounted file system for [`drop_unused_dentries`], without keeping its mount busy.
pub(crate) fn open_for_reconfigure(root: &OwnedFd) -> Result<OwnedFd> {
    fspick(root, "", FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC)
}

/// Reconfigures a file system without changing anything: the kernel drops its names that are not in use, and FUSE
/// keeps no inode without a name. If that fails, as before Linux 5.2, those of all file systems are dropped. It
/// allocates nothing.
pub(crate) fn drop_unused_dentries(picked: Option<&OwnedFd>) -> Result<()> {
    let dropped = picked.ok_or(Errno::NOSYS).and_then(|picked| fsconfig_reconfigure(picked.as_fd()));
    dropped.or_else(|_| {
        let file = rustix::fs::open(c"/proc/sys/vm/drop_caches", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(file, b"3").map(drop)
    })
}

/// # Safety
/// `argument` is valid for what the command reads and writes there.
unsafe fn ioctl(root: &OwnedFd, command: u32, argument: *mut c_void) -> Result<()> {
    // musl's commands are signed.
    #[allow(clippy::cast_possible_wrap, clippy::cast_lossless, reason = "the same bits")]
    let command = command as libc::Ioctl;
    // SAFETY: the descriptor is open, and the caller vouches for the argument.
    let result = unsafe { libc::ioctl(root.as_raw_fd(), command, argument) };
    if result < 0 { Err(last_error()) } else { Ok(()) }
}

/// Opens an inode that the kernel knows, as a path. `revalidate`: its name is looked up at the server.
pub(crate) fn open_inode(root: &OwnedFd, ino: Ino, revalidate: bool) -> Result<OwnedFd> {
    #[allow(clippy::cast_possible_truncation, reason = "the halves of the number")]
    let words = [(ino.0 >> 32) as u32, ino.0 as u32, 0];
    let mut handle = FileHandle { bytes: 4 * 3, kind: HANDLE_TYPE, words };
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: the descriptor is open, and the handle has as many bytes as it says and lives through the call.
    let fd =
        unsafe { libc::syscall(libc::SYS_open_by_handle_at, root.as_raw_fd(), std::ptr::from_mut(&mut handle), flags) };
    let Ok(fd) = c_int::try_from(fd) else { return Err(Errno::BADF) };
    if fd < 0 {
        return Err(last_error());
    }
    // SAFETY: the call has returned a new descriptor, which has no other owner.
    let opened = unsafe { OwnedFd::from_raw_fd(fd) };
    keep_name(&opened, if revalidate { AtFlags::STATX_FORCE_SYNC } else { AtFlags::empty() });
    Ok(opened)
}

/// Looks an inode's name up. Linux treats an inode found by its handle as expired (`fuse_get_dentry`) and forgets it
/// with its last user, so later events would be missed. If the server replies that the name is stale, the kernel
/// looks up each part of the path again.
fn keep_name(opened: &OwnedFd, flags: AtFlags) {
    let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
    if let Ok(path) = rustix::fs::readlink(link, Vec::new()) {
        // If another file has the name now, no event is lost.
        let _ = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW | flags, StatxFlags::TYPE);
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Runs a function in a new process, which then ends.
///
/// # Safety
/// The function only does what is allowed between `fork` and `exec`: no allocation, no lock.
pub(crate) unsafe fn fork(child: impl FnOnce()) -> Result<Pid> {
    // SAFETY: the caller vouches for what the new process does.
    match unsafe { libc::fork() } {
        0 => {
            child();
            // SAFETY: it takes a number, and runs nothing of the parent's.
            unsafe { libc::_exit(0) }
        }
        pid if pid > 0 => Pid::from_raw(pid).ok_or(Errno::CHILD),
        _ => Err(last_error()),
    }
}

/// Makes this process independent of the one that it was forked from: of its terminal, of signals that end services,
/// and of all of its descriptors but these, which are sorted.
pub(crate) fn detach(keep: &mut [RawFd]) -> Result<()> {
    rustix::process::setsid()?;
    rustix::process::chdir(c"/")?;
    rustix::thread::set_name(c"ferry-guard")?;
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        // SAFETY: signals are ignored, which needs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    keep.sort_unstable();
    let mut first = 0;
    for kept in keep {
        let kept = u32::try_from(*kept).map_err(|_| Errno::BADF)?;
        if kept > first {
            close_range(first, kept - 1);
        }
        first = kept + 1;
    }
    close_range(first, u32::MAX);
    Ok(())
}

fn close_range(first: u32, last: u32) {
    // SAFETY: no descriptor that is closed is used afterwards.
    if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0_u32) } < 0 {
        close_each(first, last);
    }
}

/// As `close_range`, which Linux has since 5.9.
fn close_each(first: u32, last: u32) {
    let limit = getrlimit(Resource::Nofile).current.and_then(|limit| u32::try_from(limit).ok());
    for fd in first..=last.min(limit.unwrap_or(u32::MAX)).min(DESCRIPTORS_MAX) {
        // SAFETY: as in `close_range`.
        unsafe { libc::close(fd.cast_signed()) };
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_getfd};

    use super::*;

    #[test]
    fn descriptors_are_closed_without_close_range() {
        let file = std::fs::File::open("/").unwrap();
        // No other thread of this process has such numbers.
        let [first, second, other] = [800, 801, 900].map(|least| fcntl_dupfd_cloexec(&file, least).unwrap());
        let [first, second] = [first, second].map(std::os::fd::IntoRawFd::into_raw_fd);
        close_each(first.cast_unsigned(), second.cast_unsigned());
        for closed in [first, second] {
            // SAFETY: the kernel checks the number.
            assert!(unsafe { libc::fcntl(closed, libc::F_GETFD) } < 0);
        }
        assert_eq!(fcntl_getfd(&other), Ok(FdFlags::CLOEXEC));
    }
}
