//! Transfers a device's state to or from another host (vhost-user, "Migrating back-end state").
//!
//! The front end reads or writes the other end of the pipe while it sends us messages. So a separate thread runs the
//! transfer, and CHECK_DEVICE_STATE waits for it.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The most bytes of a state: ten million inodes with paths of a hundred bytes.
const STATE_BYTES_MAX: u64 = 1 << 30;

/// How long the other end may be silent, and how long CHECK_DEVICE_STATE waits.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(60);

/// How long a transfer may take to notice that its other end is closed, on a busy machine.
const END_MAX: Duration = Duration::from_secs(1);

/// How often the transfer is checked during that time.
const ABORT_POLL: Duration = Duration::from_millis(2);

/// A pipe with a timeout, whose use can be aborted.
struct AbortablePipe {
    pipe: File,
    /// Hangs up when the transfer is dropped.
    abort: PipeReader,
}

impl AbortablePipe {
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let longest = Timespec::try_from(SILENCE_MAX).map_err(io::Error::other)?;
        loop {
            let pipe = PollFd::from_borrowed_fd(self.pipe.as_fd(), flags);
            // POLLHUP is always reported.
            let abort = PollFd::from_borrowed_fd(self.abort.as_fd(), PollFlags::empty());
            let mut polled = [pipe, abort];
            match poll(&mut polled, Some(&longest)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) if !polled[1].revents().is_empty() => return Err(io::Error::other("the transfer was cancelled")),
                Err(rustix::io::Errno::INTR) => {}
                outcome => return Ok(outcome.map(drop)?),
            }
        }
    }
}

impl Read for AbortablePipe {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait(PollFlags::IN)?;
        self.pipe.read(bytes)
    }
}

impl Write for AbortablePipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(PollFlags::OUT)?;
        // As much as fits into a pipe that is not full: more would block.
        self.pipe.write(&bytes[..bytes.len().min(PIPE_BUF)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a pipe that is not full takes at once.
const PIPE_BUF: usize = 4096;

/// A running transfer; returns the received state, or nothing after sending. Dropping it cancels it.
#[derive(Debug)]
pub(crate) struct Transfer {
    thread: JoinHandle<io::Result<Option<Vec<u8>>>>,
    /// Open as long as the outcome is wanted, which tells the thread.
    abort: PipeWriter,
}

impl Transfer {
    /// Writes the state.
    pub(crate) fn save(state: Vec<u8>, to: File) -> io::Result<Self> {
        begin(to, move |mut to| to.write_all(&state).map(|()| None))
    }

    /// Reads a state until its end.
    pub(crate) fn load(from: File) -> io::Result<Self> {
        begin(from, |from| {
            let mut state = Vec::new();
            from.take(STATE_BYTES_MAX + 1).read_to_end(&mut state)?;
            match state.len() as u64 > STATE_BYTES_MAX {
                true => Err(io::Error::other(format!("it has more than {STATE_BYTES_MAX} bytes"))),
                false => Ok(Some(state)),
            }
        })
    }

    /// Whether it still runs. Waits for a transfer that the front end has cancelled by closing its end.
    pub(crate) fn is_running(&self) -> bool {
        let end = Instant::now() + END_MAX;
        while !self.thread.is_finished() {
            if Instant::now() > end {
                return true;
            }
            sleep(ABORT_POLL);
        }
        false
    }

    /// Waits for the end; returns the received state, if one was expected. The front end has passed on all of the state, so
    /// that takes no longer than `within`. `stop`: cancels the transfer when it is readable.
    pub(crate) fn end(self, stop: Option<BorrowedFd<'_>>, within: Duration) -> Result<Option<Vec<u8>>, String> {
        let end = Instant::now() + within;
        while !self.thread.is_finished() {
            // The thread has the other end of this pipe.
            let ended = PollFd::new(&self.abort, PollFlags::empty());
            let stop = stop.map(|stop| PollFd::from_borrowed_fd(stop, PollFlags::IN));
            let mut polled: Vec<_> = std::iter::once(ended).chain(stop).collect();
            let left = Timespec::try_from(end.saturating_duration_since(Instant::now()));
            match poll(&mut polled, Some(&left.map_err(|error| error.to_string())?)) {
                Ok(0) => return Err(format!("it has not ended within {within:?}")),
                Ok(_) if !polled[0].revents().is_empty() => break,
                Ok(_) => return Err("this server stops".to_owned()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        let outcome = self.thread.join().map_err(|_| "the thread that transferred it panicked".to_owned())?;
        outcome.map_err(|error| error.to_string())
    }
}

fn begin(
    pipe: File,
    run: impl FnOnce(AbortablePipe) -> io::Result<Option<Vec<u8>>> + Send + 'static,
) -> io::Result<Transfer> {
    let (reader, writer) = io::pipe()?;
    let pipe = AbortablePipe { pipe, abort: reader };
    let thread = Builder::new().name("migration".into()).spawn(move || run(pipe))?;
    Ok(Transfer { thread, abort: writer })
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn the_wait_for_a_transfer_ends_with_it_or_the_server_or_its_time() {
        let load = || {
            let (theirs, ours) = io::pipe().unwrap();
            (Transfer::load(OwnedFd::from(theirs).into()).unwrap(), ours)
        };
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let short = Duration::from_millis(50);
        let (transfer, mut ours) = load();
        let loaded = std::thread::spawn(move || transfer.end(None, SILENCE_MAX));
        ours.write_all(b"state").unwrap();
        drop(ours);
        assert_eq!(loaded.join().unwrap(), Ok(Some(b"state".to_vec())));
        let (transfer, ours) = load();
        assert!(transfer.end(Some(stop.as_fd()), short).unwrap_err().contains("not ended"));
        drop(ours);
        let (transfer, _ours) = load();
        rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
        assert!(transfer.end(Some(stop.as_fd()), SILENCE_MAX).unwrap_err().contains("stops"));
    }
}
