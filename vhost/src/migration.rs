//! A device's state on its way to another host, or from there (vhost-user, "Migrating back-end state").
//!
//! The other end of the pipe is the front end's, which reads or writes while it speaks with us: so a thread of its own does
//! the transfer, and CHECK_DEVICE_STATE waits for it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The most bytes that a state may have: ten million inodes with paths of a hundred bytes.
const STATE_BYTES_MAX: u64 = 1 << 30;

/// How long the other end may do nothing: this server could not even end as long as somebody waits for it.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// A pipe whose other end must not keep us waiting for ever.
struct Watched(File);

impl Watched {
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let longest = Timespec::try_from(SILENCE_MAX).map_err(io::Error::other)?;
        loop {
            match poll(&mut [PollFd::from_borrowed_fd(self.0.as_fd(), flags)], Some(&longest)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Err(rustix::io::Errno::INTR) => {}
                outcome => return Ok(outcome.map(drop)?),
            }
        }
    }
}

impl Read for Watched {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait(PollFlags::IN)?;
        self.0.read(bytes)
    }
}

impl Write for Watched {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(PollFlags::OUT)?;
        // As much as fits into a pipe that is not full: more would wait for the other end.
        self.0.write(&bytes[..bytes.len().min(PIPE_BUF)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a pipe takes at once if it takes anything.
const PIPE_BUF: usize = 4096;

/// A transfer under way: of bytes that come, or (with none to answer) that go.
#[derive(Debug)]
pub(crate) struct Transfer(JoinHandle<io::Result<Option<Vec<u8>>>>);

impl Transfer {
    /// Writes the state.
    pub(crate) fn save(state: Vec<u8>, to: File) -> io::Result<Self> {
        let mut to = Watched(to);
        begin(move || to.write_all(&state).map(|()| None))
    }

    /// Reads a state until it ends.
    pub(crate) fn load(from: File) -> io::Result<Self> {
        begin(move || {
            let mut state = Vec::new();
            Watched(from).take(STATE_BYTES_MAX + 1).read_to_end(&mut state)?;
            match state.len() as u64 > STATE_BYTES_MAX {
                true => Err(io::Error::other(format!("it has more than {STATE_BYTES_MAX} bytes"))),
                false => Ok(Some(state)),
            }
        })
    }

    /// Waits for the end. Answers the state that came, if one was to come.
    pub(crate) fn end(self) -> Result<Option<Vec<u8>>, String> {
        let outcome = self.0.join().map_err(|_| "the thread that transferred it panicked".to_owned())?;
        outcome.map_err(|error| error.to_string())
    }
}

fn begin(run: impl FnOnce() -> io::Result<Option<Vec<u8>>> + Send + 'static) -> io::Result<Transfer> {
    Builder::new().name("migration".into()).spawn(run).map(Transfer)
}
