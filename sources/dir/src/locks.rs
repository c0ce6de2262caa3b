//! POSIX and flock locks that are visible to processes of the host, too.
//!
//! The lock table ([`ferry_vfs::Locks`]) is common to all sources; this module adds the host's locks. A POSIX lock is
//! an open-file-description lock on a descriptor per inode and owner; a flock lock is on the handle's descriptor. The
//! kernel does not report when host processes release locks, so waiting requests are retried periodically.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use ferry_vfs::sync::lock;
use ferry_vfs::{
    Caller, Errno, Handle, Ino, Lock, LockKind, LockOutcome, LockOwner, Lockable, Locks, OFlags, Result, SessionId,
    Waiter,
};
use rustix::fs::FlockOperation;

use crate::Dir;
use crate::io::Open;
use crate::sys::{self, RawLock};

/// The minimum and maximum delay before a retry of a lock that a host process holds.
const RETRY_MIN: Duration = Duration::from_millis(10);
const RETRY_MAX: Duration = Duration::from_millis(100);
/// The end of the file.
const END: u64 = i64::MAX as u64;

/// All locks of a share.
#[derive(Debug, Default)]
pub(crate) struct HostLocks {
    pub(crate) table: Arc<Locks<Open>>,
    timer: Arc<Timer>,
}

/// The thread that tries again.
#[derive(Debug, Default)]
struct Timer {
    state: Mutex<TimerState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct TimerState {
    running: bool,
    /// A request has begun to wait since the last retry.
    fresh: bool,
    ended: bool,
}

impl Lockable for Open {
    /// The descriptor that holds an owner's locks.
    type Owner = OwnedFd;

    fn flags(&self) -> OFlags {
        self.flags
    }

    fn is_dir(&self) -> bool {
        self.inode.is_dir()
    }

    /// Sets a POSIX lock. It also releases an owner's locks at its end: closing the descriptor is not enough, because a
    /// forked child before its exec has a copy.
    fn set_posix(owner: &OwnedFd, lock: &Lock) -> Result<()> {
        let result = sys::ofd_set(owner.as_fd(), &raw(lock)).map_err(|error| match error {
            Errno::ACCESS => Errno::AGAIN,
            // The descriptor could only be opened for reading.
            Errno::BADF => Errno::NOLCK,
            other => other,
        });
        told(result, lock.kind, "unlock")
    }

    /// Sets a flock lock. As on Linux, the conflicting owner is unknown, and a failed conversion loses the held lock.
    fn set_flock(&self, kind: LockKind) -> Result<()> {
        let operation = match kind {
            LockKind::Read => FlockOperation::NonBlockingLockShared,
            LockKind::Write => FlockOperation::NonBlockingLockExclusive,
            LockKind::Unlock => FlockOperation::NonBlockingUnlock,
        };
        told(rustix::fs::flock(self.file.as_fd(), operation), kind, "flock")
    }

    fn get_posix(&self, owner: Option<&OwnedFd>, lock: &Lock) -> Result<Option<Lock>> {
        // The kernel ignores the owner's own locks only when asked through the owner's descriptor.
        let found = sys::ofd_get(owner.map_or(self.file.as_fd(), AsFd::as_fd), &raw(lock))?;
        Ok(found.map(|found| {
            let start = found.start.cast_unsigned();
            let end = if found.len == 0 { END } else { start.saturating_add(found.len.cast_unsigned()) - 1 };
            let kind = if found.kind == libc::F_RDLCK { LockKind::Read } else { LockKind::Write };
            // The lock of a host process, whose process id has no meaning on the client.
            let owner = LockOwner { session: SessionId::default(), id: 0 };
            Lock { kind, owner, start, end, pid: 0, flock: false }
        }))
    }
}

/// Logs an error that is unexpected and often has no caller to receive it.
fn told(result: Result<()>, kind: LockKind, call: &str) -> Result<()> {
    result.inspect_err(|error| {
        if kind == LockKind::Unlock {
            tracing::warn!(%error, "{call}");
        }
    })
}

fn raw(lock: &Lock) -> RawLock {
    let kind = match lock.kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
        LockKind::Unlock => libc::F_UNLCK,
    };
    let len = if lock.end >= END { 0 } else { lock.end - lock.start + 1 };
    // Both are at most i64::MAX, which the table guarantees.
    RawLock { kind, start: lock.start.cast_signed(), len: len.cast_signed() }
}

impl Drop for HostLocks {
    fn drop(&mut self) {
        lock(&self.timer.state).ended = true;
        self.timer.changed.notify_all();
    }
}

impl HostLocks {
    /// Starts the thread that retries, or wakes it.
    fn watch(&self) {
        let mut state = lock(&self.timer.state);
        state.fresh = true;
        if state.running {
            self.timer.changed.notify_all();
            return;
        }
        let (table, timer) = (Arc::downgrade(&self.table), Arc::clone(&self.timer));
        let spawned = std::thread::Builder::new().name("ferry-locks".into()).spawn(move || {
            // The calling worker may run at SCHED_IDLE, but other clients wait for this thread.
            if let Err(error) = sys::compete() {
                tracing::debug!(%error, "the thread that watches locks may be slow");
            }
            timer.run(&table);
        });
        match spawned {
            Ok(_) => state.running = true,
            Err(error) => tracing::warn!(%error, "locks held by host processes are not watched"),
        }
    }
}

impl Timer {
    fn run(&self, table: &Weak<Locks<Open>>) {
        let mut pause = RETRY_MIN;
        loop {
            let state = lock(&self.state);
            let (mut state, _) = self
                .changed
                .wait_timeout_while(state, pause, |state| !state.ended)
                .unwrap_or_else(PoisonError::into_inner);
            if state.ended {
                return;
            }
            pause = if std::mem::take(&mut state.fresh) { RETRY_MIN } else { (pause * 3 / 2).min(RETRY_MAX) };
            drop(state);
            let waits = table.upgrade().is_some_and(|table| table.retry());
            let mut state = lock(&self.state);
            if !waits && !state.fresh {
                state.running = false;
                return;
            }
        }
    }
}

impl Dir {
    /// Opens the descriptor for an owner's POSIX locks on a file.
    fn open_lock_file(&self, open: &Open) -> Result<OwnedFd> {
        let read = |errno| match errno {
            // Read locks are still possible.
            Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::TXTBSY => self.open_data(&open.inode, OFlags::RDONLY),
            other => Err(other),
        };
        let opened = if self.options.read_only {
            self.open_data(&open.inode, OFlags::RDONLY)
        } else {
            self.open_data(&open.inode, OFlags::RDWR).or_else(read)
        };
        match opened {
            Err(Errno::ACCESS) => self.open_data(&open.inode, OFlags::WRONLY),
            Err(Errno::MFILE | Errno::NFILE) => Err(Errno::NOLCK),
            other => other,
        }
    }

    pub(crate) fn set_lock(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        lock: &Lock,
        wait: Option<Waiter>,
    ) -> Result<LockOutcome> {
        let own = |open: &Arc<Open>| self.open_lock_file(open);
        let locked = self.locks.table.set(&self.handles, cx, (ino, handle), lock, wait, own);
        if matches!(locked, Ok(LockOutcome::Waiting)) {
            self.locks.watch();
        }
        locked
    }
}
