//! Makes the kernel drop its caches when the agent ends, for whatever reason.
//!
//! Where caches are leased, the server lets the guest's kernel cache for minutes, and the agent corrects the caches.
//! A killed agent cannot end that, and no request makes the kernel do so. So a second process waits for the end of
//! the first.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, Result};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::sys;

/// The minimum pause between two heartbeats.
const BEAT: Duration = Duration::from_millis(500);
/// An agent without a heartbeat for this long is stopped, or hangs.
const SILENCE: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };
/// How long the server may treat an ended agent as running, and let the kernel cache.
const LEASE: Timespec = Timespec { tv_sec: 2, tv_nsec: 500_000_000 };

/// Guards that outlive their agent for a while, to be reaped.
static ENDING: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Reaps guards that have ended.
fn reap() {
    lock(&ENDING).retain(|process| matches!(waitpid(Some(*process), WaitOptions::NOHANG), Ok(None) | Err(Errno::INTR)));
}

/// A process that waits for the end of this one.
#[derive(Debug)]
pub(crate) struct Guard {
    pipe: Option<OwnedFd>,
    process: Pid,
    last: Instant,
}

impl Guard {
    /// Starts a guard for the file system with this root.
    pub(crate) fn start(root: &OwnedFd) -> Result<Self> {
        reap();
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let picked = sys::open_for_reconfigure(root).ok();
        // SAFETY: the new process has one thread, and makes only system calls: no allocation, no lock.
        let process = unsafe { sys::fork(|| run(&read, picked.as_ref())) }?;
        Ok(Self { pipe: Some(write), process, last: Instant::now() })
    }

    /// Sends a heartbeat; returns whether the guard still runs.
    pub(crate) fn beat(&mut self) -> bool {
        if self.last.elapsed() < BEAT {
            return true;
        }
        self.last = Instant::now();
        let Some(pipe) = &self.pipe else { return false };
        // The pipe is full if the guard is stopped.
        matches!(rustix::io::write(pipe, b"."), Ok(_) | Err(Errno::AGAIN | Errno::INTR))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.pipe = None;
        lock(&ENDING).push(self.process);
        reap();
    }
}

/// Runs in the guard's process: returns when the agent has ended and no cache depends on it.
fn run(pipe: &OwnedFd, picked: Option<&OwnedFd>) {
    // A signal that ends the agent must not end its guard, and the guard must keep none of the agent's files open.
    let pipe_fd = pipe.as_raw_fd();
    if sys::detach(&mut [pipe_fd, picked.map_or(pipe_fd, OwnedFd::as_raw_fd)]).is_err() {
        return;
    }
    let drop_caches = || {
        let _ = sys::drop_unused_dentries(picked);
    };
    let mut has_dropped = false;
    loop {
        let mut fds = [PollFd::new(pipe, PollFlags::IN)];
        match poll(&mut fds, Some(&SILENCE)) {
            Ok(0) if has_dropped => {}
            Ok(0) => {
                drop_caches();
                has_dropped = true;
            }
            Ok(_) => match rustix::io::read(pipe.as_fd(), &mut [0; 64]) {
                Ok(0) => break,
                Ok(_) => has_dropped = false,
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => break,
            },
            Err(Errno::INTR) => {}
            Err(_) => break,
        }
    }
    drop_caches();
    let _ = rustix::thread::nanosleep(&LEASE);
    drop_caches();
}

#[cfg(test)]
mod tests {
    use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

    use super::*;

    /// A file system of its own. Else a guard of root drops the caches of the whole machine, on which other tests rely.
    fn own_file_system() -> Result<OwnedFd> {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
    }

    #[test]
    fn guards_that_have_ended_are_reaped() {
        let dir = own_file_system().unwrap_or_else(|_| std::fs::File::open("/").unwrap().into());
        let process = Guard::start(&dir).unwrap().process;
        let begin = Instant::now();
        while lock(&ENDING).contains(&process) {
            assert!(begin.elapsed() < Duration::from_secs(60), "it does not end");
            std::thread::sleep(Duration::from_millis(50));
            reap();
        }
        assert_eq!(waitpid(Some(process), WaitOptions::NOHANG).map(|_| ()), Err(Errno::CHILD));
    }
}
