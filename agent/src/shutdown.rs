//! Stops agents at once. The guest's kernel cannot interrupt the request in which they wait, so the server ends it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, Result};

use crate::sys;

/// The pause between two attempts to interrupt agents: an agent that was about to wait misses the first.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(20);

/// Ends the agents of a process.
#[derive(Debug)]
pub struct Shutdown {
    /// Readable once agents are to end.
    wake_fd: OwnedFd,
    is_over: AtomicBool,
    /// The roots of the mounts at which agents wait.
    roots: Mutex<Vec<Weak<OwnedFd>>>,
}

impl Shutdown {
    /// Creates it.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> std::io::Result<Self> {
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { wake_fd, is_over: AtomicBool::new(false), roots: Mutex::default() })
    }

    /// Stops all agents, and returns when none waits. During the call, the thread has the group id that marks
    /// replays.
    ///
    /// # Errors
    /// Only root can interrupt an agent. They end after their wait.
    pub fn end(&self) -> Result<()> {
        self.is_over.store(true, Ordering::Release);
        // Fails only if it is readable already.
        let _ = rustix::io::write(&self.wake_fd, &1_u64.to_ne_bytes());
        let before = sys::enter_replay_group()?;
        let outcome = self.interrupt_all();
        sys::set_effective_gid(before).and(outcome)
    }

    fn interrupt_all(&self) -> Result<()> {
        loop {
            let mut roots = std::mem::take(&mut *self.roots.lock().unwrap_or_else(PoisonError::into_inner));
            roots.retain(|root| root.upgrade().is_some_and(|root| sys::interrupt(&root) != Err(Errno::NOTTY)));
            if roots.is_empty() {
                return Ok(());
            }
            self.roots.lock().unwrap_or_else(PoisonError::into_inner).append(&mut roots);
            std::thread::sleep(INTERRUPT_INTERVAL);
        }
    }

    /// Whether agents are to end.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Adds the root of a mount at which an agent is about to wait.
    pub(crate) fn add(&self, root: &Arc<OwnedFd>) {
        let mut roots = self.roots.lock().unwrap_or_else(PoisonError::into_inner);
        roots.retain(|root| root.strong_count() > 0);
        roots.push(Arc::downgrade(root));
    }

    /// Pauses until agents are to end.
    pub(crate) fn sleep(&self, duration: Duration) {
        let timeout = Timespec::try_from(duration).ok();
        let _ = poll(&mut [PollFd::new(&self.wake_fd, PollFlags::IN)], timeout.as_ref());
    }

    /// Waits until a descriptor has an urgent condition; returns false if agents are to end.
    pub(crate) fn wait_urgent(&self, fd: BorrowedFd<'_>) -> Result<bool> {
        let mut fds = [PollFd::new(&fd, PollFlags::PRI), PollFd::from_borrowed_fd(self.wake_fd.as_fd(), PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => Ok(!self.is_over()),
            Err(error) => Err(error),
        }
    }
}
