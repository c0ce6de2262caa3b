//! The process that stays outside: it passes signals on, waits, and says how it ended.

use std::fmt;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, Signal, WaitOptions, waitpid};

use crate::{Error, Result};

/// Signals that mean the server, and reach the process that everybody knows.
const PASSED_ON: [Signal; 5] = [Signal::TERM, Signal::INT, Signal::QUIT, Signal::USR1, Signal::USR2];

/// What stays outside of the namespaces: this process, with the server as its only child, which does not outlive it.
#[derive(Debug)]
pub struct Outside {
    child: Pid,
    /// Open as long as this process lives: how the child knows.
    _lives: OwnedFd,
}

/// How the server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this status.
    Status(u8),
    /// By this signal.
    Signal(i32),
}

impl End {
    /// The status for whoever waits for this process, as shells have it.
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
            Self::Signal(libc::SIGSYS) => f.write_str("SIGSYS: it made a system call that its seccomp filter forbids"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

impl Outside {
    pub(crate) fn new(child: Pid, lives: OwnedFd) -> Self {
        Self { child, _lives: lives }
    }

    /// The server's process, as this side sees it.
    #[must_use]
    pub fn server(&self) -> Pid {
        self.child
    }

    /// Passes signals on until the server has ended; they were held before the split. A terminal sends its signals to both processes: those are not passed
    /// on once more.
    ///
    /// # Errors
    /// The system's: signals cannot be caught.
    pub fn wait(self, signals: &Held) -> Result<End> {
        loop {
            match waitpid(Some(self.child), WaitOptions::NOHANG) {
                Ok(Some((_, status))) => {
                    if let Some(signal) = status.terminating_signal() {
                        return Ok(End::Signal(signal));
                    }
                    if let Some(status) = status.exit_status() {
                        return Ok(End::Status(u8::try_from(status).unwrap_or(u8::MAX)));
                    }
                }
                Ok(None) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::Told(format!("the server cannot be waited for: {errno}"))),
            }
            if let Some(signal) = signals.next()? {
                // It may be gone by now, which the next turn sees.
                let _ = rustix::process::kill_process(self.child, signal);
            }
        }
    }
}

/// Signals that are kept waiting, so that none is lost while a process begins or is split in two.
#[derive(Clone, Copy)]
pub struct Held {
    held: libc::sigset_t,
    before: libc::sigset_t,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Held")
    }
}

impl Held {
    /// Keeps those waiting that a server is ended with, in this thread, the only one.
    ///
    /// # Errors
    /// [`Error::Told`]: none that is known.
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
                _ => Err(Error::Told(format!("signals cannot be held: {}", std::io::Error::last_os_error()))),
            }
        }
    }

    /// Lets them come, once they are caught.
    ///
    /// # Errors
    /// [`Error::Told`]: none that is known.
    pub fn release(self) -> Result<()> {
        // SAFETY: sigprocmask is given a pointer to a set that lives for the call.
        match unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(Error::Told(format!("signals cannot be let go of: {}", std::io::Error::last_os_error()))),
        }
    }

    /// Waits; answers a signal to be passed on, if it is one.
    fn next(&self) -> Result<Option<Signal>> {
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
                _ => Err(Error::Told(format!("signals cannot be waited for: {error}"))),
            };
        }
        // A terminal's come from the kernel, to the whole group.
        let from_kernel = info.si_code == libc::SI_KERNEL;
        Ok(PASSED_ON.into_iter().find(|signal| signal.as_raw() == number && !from_kernel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_as_shells_do() {
        assert_eq!((End::Status(3).status(), End::Signal(9).status()), (3, 137));
        assert!(End::Signal(libc::SIGSYS).to_string().contains("seccomp"));
        assert_eq!(End::Signal(9).to_string(), "signal 9");
    }
}
