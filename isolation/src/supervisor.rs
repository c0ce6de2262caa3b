//! The supervisor outside the namespaces: it forwards signals, waits for the server, and returns its exit status.

use std::cell::Cell;
use std::fmt;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, waitpid};

use crate::{Error, Result};

/// Signals that are forwarded to the server.
const FORWARDED: [Signal; 5] = [Signal::TERM, Signal::INT, Signal::QUIT, Signal::USR1, Signal::USR2];

/// A child of this process, which does not outlive it.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    /// Its end was returned, so another process may have its id.
    has_ended: Cell<bool>,
    /// Open while this process runs; the child polls the other end.
    _alive: OwnedFd,
}

impl Child {
    pub(crate) fn new(pid: Pid, alive: OwnedFd) -> Self {
        Self { pid, has_ended: Cell::new(false), _alive: alive }
    }

    /// Returns its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Sends it a signal, unless it has ended.
    pub fn signal(&self, signal: Signal) {
        if !self.has_ended.get() {
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }

    /// Returns how it ended, once, or `None` while it runs.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: the end was returned before.
    pub fn end(&self) -> Result<Option<End>> {
        match waitpid(Some(self.pid), WaitOptions::NOHANG) {
            Ok(Some((_, status))) => {
                let end = match (status.terminating_signal(), status.exit_status()) {
                    (Some(signal), _) => Some(End::Signal(signal)),
                    (None, Some(status)) => Some(End::Status(u8::try_from(status).unwrap_or(u8::MAX))),
                    (None, None) => None,
                };
                self.has_ended.set(end.is_some());
                Ok(end)
            }
            Ok(None) | Err(rustix::io::Errno::INTR) => Ok(None),
            Err(errno) => Err(Error::System(format!("cannot wait for the server: {errno}"))),
        }
    }
}

/// The process outside the namespaces. Its only child is the server, which does not outlive it.
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
            self.forward_signal(signals, &mut arrived)?;
        }
    }

    /// As [`Self::wait`], but returns `None` as soon as `event` is readable or its other end is closed.
    ///
    /// # Errors
    /// Those of the system: signals cannot be received, or no descriptor is left.
    pub fn wait_for(
        &self,
        event: BorrowedFd<'_>,
        signals: &BlockedSignals,
        mut arrived: impl FnMut(Signal),
    ) -> Result<Option<End>> {
        let signal_fd = signals.descriptor()?;
        loop {
            if let Some(end) = self.0.end()? {
                return Ok(Some(end));
            }
            let mut polled = [PollFd::new(&event, PollFlags::IN), PollFd::new(&signal_fd, PollFlags::IN)];
            match poll(&mut polled, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Error::System(format!("cannot wait for the server: {error}"))),
            }
            if !polled[1].revents().is_empty() {
                self.forward_signal(signals, &mut arrived)?;
            } else if !polled[0].revents().is_empty() {
                return Ok(None);
            }
        }
    }

    /// Waits for a signal and forwards it.
    fn forward_signal(&self, signals: &BlockedSignals, arrived: &mut impl FnMut(Signal)) -> Result<()> {
        if let Some(ReceivedSignal { signal, from_terminal }) = signals.next()? {
            arrived(signal);
            if !from_terminal {
                self.0.signal(signal);
            }
        }
        Ok(())
    }
}

/// A signal to forward to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedSignal {
    /// The signal.
    pub signal: Signal,
    /// A terminal sent it to all processes of the group.
    pub from_terminal: bool,
}

/// Blocked signals, so that none is lost while a process starts or splits.
#[derive(Clone, Copy)]
pub struct BlockedSignals {
    set: libc::sigset_t,
    previous: libc::sigset_t,
}

impl std::fmt::Debug for BlockedSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockedSignals")
    }
}

impl BlockedSignals {
    /// Blocks the signals that end a server in this thread, the only one.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: none is known.
    pub fn hold() -> Result<Self> {
        // SAFETY: a sigset_t is plain integers, for which zeros are valid; sigemptyset, sigaddset and sigprocmask are given
        // pointers to such that live for the call.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            let mut previous: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in FORWARDED.into_iter().chain([Signal::CHILD]) {
                libc::sigaddset(&raw mut set, signal.as_raw());
            }
            match libc::sigprocmask(libc::SIG_BLOCK, &raw const set, &raw mut previous) {
                0 => Ok(Self { set, previous }),
                _ => Err(Error::System(format!("cannot block signals: {}", std::io::Error::last_os_error()))),
            }
        }
    }

    /// Unblocks the signals, once they are handled.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: none is known.
    pub fn release(self) -> Result<()> {
        // SAFETY: sigprocmask is given a pointer to a set that lives for the call.
        match unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const self.previous, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(Error::System(format!("cannot unblock signals: {}", std::io::Error::last_os_error()))),
        }
    }

    /// Waits for a signal. Returns it if it is for a server.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: none is known.
    pub fn next(&self) -> Result<Option<ReceivedSignal>> {
        // SAFETY: a siginfo_t is plain data, for which zeros are valid, and sigwaitinfo is given pointers to it and to a set
        // that live for the call.
        let (number, info) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            (libc::sigwaitinfo(&raw const self.set, &raw mut info), info)
        };
        if number < 0 {
            let error = std::io::Error::last_os_error();
            return match error.kind() {
                std::io::ErrorKind::Interrupted => Ok(None),
                _ => Err(Error::System(format!("cannot wait for signals: {error}"))),
            };
        }
        // Signals of a terminal come from the kernel and go to the whole group.
        let from_terminal = info.si_code == libc::SI_KERNEL;
        let signal = FORWARDED.into_iter().find(|signal| signal.as_raw() == number);
        Ok(signal.map(|signal| ReceivedSignal { signal, from_terminal }))
    }

    /// Returns a descriptor for poll(2), readable when [`Self::next`] would not block.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: no descriptor is left.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        // SAFETY: signalfd is given a pointer to a set that lives for the call.
        let fd = unsafe { libc::signalfd(-1, &raw const self.set, libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(Error::System(format!("cannot poll signals: {}", std::io::Error::last_os_error())));
        }
        // SAFETY: the descriptor is new, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_statuses_follow_the_convention_of_shells() {
        assert_eq!((End::Status(3).status(), End::Signal(9).status()), (3, 137));
        assert!(End::Signal(libc::SIGSYS).to_string().contains("seccomp"));
        assert_eq!(End::Signal(9).to_string(), "signal 9");
    }

    /// Its number may be another process's by then.
    #[test]
    fn nothing_is_signalled_after_its_end() {
        let sleep = || std::process::Command::new("sleep").arg("60").spawn().expect("a process");
        let id = |process: &std::process::Child| Pid::from_child(process);
        let (mut first, mut other) = (sleep(), sleep());
        let (alive, _) = rustix::pipe::pipe().expect("descriptors");
        let mut child = Child::new(id(&first), alive);
        assert!(child.end().expect("it is a child").is_none());
        child.signal(Signal::KILL);
        while child.end().expect("it is a child").is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.pid = id(&other);
        child.signal(Signal::KILL);
        let ends = |process: &mut std::process::Child| process.try_wait().ok().flatten().is_some();
        std::thread::sleep(std::time::Duration::from_millis(100));
        let is_gone = ends(&mut other);
        let _ = (other.kill(), other.wait(), first.wait());
        assert!(!is_gone, "a process without guilt was killed");
    }
}
