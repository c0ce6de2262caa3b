//! The locks that QEMU takes on images (described in its `block/file-posix.c`): shared locks of single bytes, owned by
//! the open file description.
//!
//! A lock of byte `100 + p` means "permission p is in use", one of byte `200 + p` "no other process may use permission
//! p". An opener first takes its own bytes and then checks for conflicting ones.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::Error;

const USES: i64 = 100;
const FORBIDS: i64 = 200;

const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// How long to wait for a locked disk: a killed server's operations in the kernel usually end soon.
const PATIENCE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(20);

/// Locks a disk for this open file description, as long as it is open.
pub(crate) fn take(file: &File, path: &Path, writes: bool) -> Result<(), Error> {
    let end = Instant::now() + PATIENCE;
    loop {
        match try_take(file, path, writes) {
            Err(Error::InUse { .. }) if Instant::now() < end => std::thread::sleep(TICK),
            outcome => return outcome,
        }
    }
}

/// Shares the lock of a disk with another description that writes to it.
///
/// A process may end while the kernel still writes for it, because io_uring does not wait. The write keeps its
/// description open, and so this lock. Without it the next server could repeat the request and complete later ones to
/// the same sectors, which the old write would then overwrite.
pub(crate) fn hold(file: &impl AsRawFd) {
    // A failure to lock was logged before.
    let _ = set_shared(file, USES + WRITE);
}

fn try_take(file: &File, path: &Path, writes: bool) -> Result<(), Error> {
    let uses: &[i64] = if writes { &[READ, WRITE] } else { &[READ] };
    // A reader also requires that the disk does not change.
    let forbids = [WRITE, RESIZE];
    let bytes = uses.iter().map(|used| USES + used).chain(forbids.iter().map(|forbidden| FORBIDS + forbidden));
    for byte in bytes {
        match set_shared(file, byte) {
            Ok(()) => {}
            Err(error @ (Errno::NOTSUP | Errno::NOLCK | Errno::INVAL | Errno::NOSYS)) => {
                tracing::warn!(
                    "{} cannot be locked ({error}): make sure that no other process writes to it",
                    path.display()
                );
                return Ok(());
            }
            Err(error) => return Err(Error::Open { path: path.into(), reason: error.into() }),
        }
    }
    let in_use = |what| Err(Error::InUse { path: path.into(), what });
    for used in uses {
        if is_taken(file, FORBIDS + used) {
            return in_use(if *used == WRITE { "it forbids other writers" } else { "it requires exclusive use" });
        }
    }
    match forbids.iter().any(|forbidden| is_taken(file, USES + forbidden)) {
        true => in_use("it writes"),
        false => Ok(()),
    }
}

fn set_shared(file: &impl AsRawFd, byte: i64) -> rustix::io::Result<()> {
    let mut lock = describe(libc::F_RDLCK, byte);
    control(file, libc::F_OFD_SETLK, &mut lock)
}

/// Returns whether another process has locked the byte.
fn is_taken(file: &File, byte: i64) -> bool {
    let mut lock = describe(libc::F_WRLCK, byte);
    control(file, libc::F_OFD_GETLK, &mut lock).is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
}

fn describe(kind: libc::c_int, byte: i64) -> libc::flock {
    // SAFETY: `flock` consists of integers, for which zeros are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(kind).expect("lock types are small numbers");
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).expect("it is 0");
    lock.l_start = byte;
    lock.l_len = 1;
    lock
}

fn control(file: &impl AsRawFd, command: libc::c_int, lock: &mut libc::flock) -> rustix::io::Result<()> {
    loop {
        // SAFETY: the descriptor is open, and both commands take a pointer to a `flock` that lives until they return.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) } == 0 {
            return Ok(());
        }
        match Errno::from_io_error(&std::io::Error::last_os_error()) {
            Some(Errno::INTR) => {}
            error => return Err(error.unwrap_or(Errno::IO)),
        }
    }
}
