//! The supervisor outside the namespaces: it forwards signals, waits for the server, and returns its exit status.

use std::fmt;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, waitpid};

use crate::{Error, Result};

/// Signals to the known process that are meant for the server.
const PASSED_ON: [Signal; 5] = [Signal::TERM, Signal::INT, Signal::QUIT, Signal::USR1, Signal::USR2];

/// A child of this process, which does not outlive it.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    /// Open as long as this process lives; the child polls the other end.
    _lives: OwnedFd,
}

impl Child {
    pub(crate) fn new(pid: Pid, lives: OwnedFd) -> Self {
        Self { pid, _lives: lives }
    }

    /// Sends it a signal. If it has ended already, [`Self::end`] reports that.
    pub fn signal(&self, signal: Signal) {
        let _ = rustix::process::kill_process(self.pid, signal);
    }

    /// Returns how it ended, once, or `None` while it runs.
    ///
    /// # Errors
    ///
    /// [`Error::Told`]: the end was returned before.
    pub fn end(&self) -> Result<Option<End>> {
        match waitpid(Some(self.pid), WaitOptions::NOHANG) {
            Ok(Some((_, status))) => Ok(match (status.terminating_signal(), status.exit_status()) {
                (Some(signal), _) => Some(End::Signal(signal)),
                (None, Some(status)) => Some(End::Status(u8::try_from(status).unwrap_or(u8::MAX))),
                (None, None) => None,
            }),
            Ok(None) | Err(rustix::io::Errno::INTR) => Ok(None),
            Err(errno) => Err(Error::Told(format!("cannot wait for the server: {errno}"))),
        }
    }
}

/// The process outside of the namespaces, with the server as its only child, which does not outlive it.
#[derive(Debug)]
pub struct Supervisor(Child);

/// How the server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this status.
    Status(u8),
    /// By this signal.
    Signal(i32),
}

impl End {
    /// Returns the exit status in the convention of shells.
    #[must_use]
    pub fn status(self) -> u8 {
        match self {
            Self::Status(status) => status,
            Self::Signal(signal) => u8::try_from(signal).map_or(u8::MAX, |signal| signal.saturating_add(128)),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "status {status}"),
            Self::Signal(libc::SIGSYS) => f.write_str("SIGSYS: its seccomp filter forbids a system call that it made"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

impl Supervisor {
    pub(crate) fn new(child: Child) -> Self {
        Self(child)
    }

    /// Returns the server's process id in this namespace.
    #[must_use]
    pub fn server(&self) -> Pid {
        self.0.pid
    }

    /// Forwards signals until the server has ended; they were blocked before the split. A terminal sends its signals to
    /// both processes, so those are not forwarded. `arrived` is called with each signal first.
    ///
    /// # Errors
    ///
    /// Those of the system: signals cannot be received.
    pub fn wait(self, signals: &BlockedSignals, mut arrived: impl FnMut(Signal)) -> Result<End> {
        loop {
            if let Some(end) = self.0.end()? {
                return Ok(end);
            }
            self.pass_on(signals, &mut arrived)?;
        }
    }

    /// The same, but returns `None` as soon as there is something to read from `event`, or its other end is closed.
    ///
    /// # Errors
    /// The system's: signals cannot be caught, or no descriptor is left.
    pub fn wait_for(
        &self,
        event: BorrowedFd<'_>,
        signals: &BlockedSignals,
        mut arrived: impl FnMut(Signal),
    ) -> Result<Option<End>> {
        let arrives = signals.descriptor()?;
        loop {
            if let Some(end) = self.0.end()? {
                return Ok(Some(end));
            }
            let mut polled = [PollFd::new(&event, PollFlags::IN), PollFd::new(&arrives, PollFlags::IN)];
            match poll(&mut polled, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Error::Told(format!("a server cannot be waited for: {error}"))),
            }
            if !polled[1].revents().is_empty() {
                self.pass_on(signals, &mut arrived)?;
            } else if !polled[0].revents().is_empty() {
                return Ok(None);
            }
        }
    }

    /// Waits for a signal, and passes it on.
    fn pass_on(&self, signals: &BlockedSignals, arrived: &mut impl FnMut(Signal)) -> Result<()> {
        if let Some(Arrival { signal, from_terminal }) = signals.next()? {
            arrived(signal);
            if !from_terminal {
                self.0.signal(signal);
            }
        }
        Ok(())
    }
}

/// A signal for a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Which one.
    pub signal: Signal,
    /// A terminal has sent it to all processes of the group.
    pub from_terminal: bool,
}

/// Blocked signals, so that none is lost while a process starts or splits.
#[derive(Clone, Copy)]
pub struct BlockedSignals {
    held: libc::sigset_t,
    before: libc::sigset_t,
}

impl std::fmt::Debug for BlockedSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Held")
    }
}

impl BlockedSignals {
    /// Blocks the signals that end a server in this thread, the only one.
    ///
    /// # Errors
    ///
    /// [`Error::Told`]: none is known.
    pub fn hold() -> Result<Self> {
        // SAFETY: a sigset_t is plain integers, for which zeros are valid; sigemptyset, sigaddset and sigprocmask are given
        // pointers to such that live for the call.
        unsafe {
            let mut held: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut held);
            for signal in PASSED_ON.into_iter().chain([Signal::CHILD]) {
                libc::sigaddset(&raw mut held, signal.as_raw());
            }
            match libc::sigprocmask(libc::SIG_BLOCK, &raw const held, &raw mut before) {
                0 => Ok(Self { held, before }),
                _ => Err(Error::Told(format!("cannot block signals: {}", std::io::Error::last_os_error()))),
            }
        }
    }

    /// Unblocks the signals, once they are handled.
    ///
    /// # Errors
    ///
    /// [`Error::Told`]: none is known.
    pub fn release(self) -> Result<()> {
        // SAFETY: sigprocmask is given a pointer to a set that lives for the call.
        match unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(Error::Told(format!("cannot unblock signals: {}", std::io::Error::last_os_error()))),
        }
    }

    /// Waits; returns the signal if it is for a server.
    ///
    /// # Errors
    ///
    /// [`Error::Told`]: none is known.
    pub fn next(&self) -> Result<Option<Arrival>> {
        // SAFETY: a siginfo_t is plain data, for which zeros are valid, and sigwaitinfo is given pointers to it and to a set
        // that live for the call.
        let (number, info) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            (libc::sigwaitinfo(&raw const self.held, &raw mut info), info)
        };
        if number < 0 {
            let error = std::io::Error::last_os_error();
            return match error.kind() {
                std::io::ErrorKind::Interrupted => Ok(None),
                _ => Err(Error::Told(format!("cannot wait for signals: {error}"))),
            };
        }
        // Those of a terminal come from the kernel and go to the whole group.
        let from_terminal = info.si_code == libc::SI_KERNEL;
        let signal = PASSED_ON.into_iter().find(|signal| signal.as_raw() == number);
        Ok(signal.map(|signal| Arrival { signal, from_terminal }))
    }

    /// Returns a descriptor for poll(2), readable when [`Self::next`] would not block.
    ///
    /// # Errors
    ///
    /// [`Error::Told`]: no descriptor is left.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        // SAFETY: signalfd is given a pointer to a set that lives for the call.
        let fd = unsafe { libc::signalfd(-1, &raw const self.held, libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(Error::Told(format!("cannot poll signals: {}", std::io::Error::last_os_error())));
        }
        // SAFETY: the descriptor is new, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_become_the_statuses_of_shells() {
        assert_eq!((End::Status(3).status(), End::Signal(9).status()), (3, 137));
        assert!(End::Signal(libc::SIGSYS).to_string().contains("seccomp"));
        assert_eq!(End::Signal(9).to_string(), "signal 9");
    }
}
