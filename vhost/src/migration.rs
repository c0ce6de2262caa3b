//! A device's state on its way to another host, or from there (vhost-user, "Migrating back-end state").
//!
//! The other end of the pipe is the front end's, which reads or writes while it speaks with us: so a thread of its own does
//! the transfer, and CHECK_DEVICE_STATE waits for it.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The most bytes that a state may have: ten million inodes with paths of a hundred bytes.
const STATE_BYTES_MAX: u64 = 1 << 30;

/// How long the other end may do nothing: this server could not even end as long as somebody waits for it.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// How long a transfer may take to notice that its other end is closed, on a busy machine.
const END_MAX: Duration = Duration::from_secs(1);

/// How often it is looked at meanwhile.
const ABORT_POLL: Duration = Duration::from_millis(2);

/// A pipe whose other end must not keep us waiting for ever.
struct AbortablePipe {
    pipe: File,
    /// Ends when nobody wants the outcome any more.
    wanted: PipeReader,
}

impl AbortablePipe {
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let longest = Timespec::try_from(SILENCE_MAX).map_err(io::Error::other)?;
        loop {
            let pipe = PollFd::from_borrowed_fd(self.pipe.as_fd(), flags);
            // That it has ended is told without being asked for.
            let wanted = PollFd::from_borrowed_fd(self.wanted.as_fd(), PollFlags::empty());
            let mut polled = [pipe, wanted];
            match poll(&mut polled, Some(&longest)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) if !polled[1].revents().is_empty() => return Err(io::Error::other("nobody wants it any more")),
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
        // As much as fits into a pipe that is not full: more would wait for the other end.
        self.pipe.write(&bytes[..bytes.len().min(PIPE_BUF)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a pipe takes at once if it takes anything.
const PIPE_BUF: usize = 4096;

/// A transfer under way: of bytes that come, or (with none to answer) that go. It is given up when it is dropped.
#[derive(Debug)]
pub(crate) struct Transfer {
    thread: JoinHandle<io::Result<Option<Vec<u8>>>>,
    /// Open as long as somebody wants the outcome: how the thread knows.
    _wanted: PipeWriter,
}

impl Transfer {
    /// Writes the state.
    pub(crate) fn save(state: Vec<u8>, to: File) -> io::Result<Self> {
        begin(to, move |mut to| to.write_all(&state).map(|()| None))
    }

    /// Reads a state until it ends.
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

    /// Whether it is still under way. One that the front end has given up, by closing its end, is waited for.
    pub(crate) fn is_under_way(&self) -> bool {
        let end = Instant::now() + END_MAX;
        while !self.thread.is_finished() {
            if Instant::now() > end {
                return true;
            }
            sleep(ABORT_POLL);
        }
        false
    }

    /// Waits for the end. Returns the state that arrived, if one was expected.
    pub(crate) fn end(self) -> Result<Option<Vec<u8>>, String> {
        let outcome = self.thread.join().map_err(|_| "the thread that transferred it panicked".to_owned())?;
        outcome.map_err(|error| error.to_string())
    }
}

fn begin(
    pipe: File,
    run: impl FnOnce(AbortablePipe) -> io::Result<Option<Vec<u8>>> + Send + 'static,
) -> io::Result<Transfer> {
    let (reader, writer) = io::pipe()?;
    let pipe = AbortablePipe { pipe, wanted: reader };
    let thread = Builder::new().name("migration".into()).spawn(move || run(pipe))?;
    Ok(Transfer { thread, _wanted: writer })
}
