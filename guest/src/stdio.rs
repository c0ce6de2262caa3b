//! The host's ends of the guest's lines: relays between them and this process's files.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// The chunk size of a relay in bytes. The guest starts a program for each chunk of its standard input.
const CHUNK_BYTES: usize = 64 * 1024;

/// The interval of checks of the terminal's size.
const SIZE_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// A descriptor of this process's own, to be read or written without its buffers.
pub(crate) fn own(stream: impl AsFd) -> io::Result<File> {
    Ok(stream.as_fd().try_clone_to_owned()?.into())
}

/// The rows and columns of the terminal that standard input and output both are.
pub(crate) fn terminal_size() -> Option<(u16, u16)> {
    let (stdin, stdout) = (io::stdin(), io::stdout());
    let both = rustix::termios::isatty(&stdin) && rustix::termios::isatty(&stdout);
    both.then(|| tcgetwinsize(&stdout).map_or((24, 80), |size| (size.ws_row, size.ws_col)))
}

/// Copies what the guest writes until it ends.
pub(crate) fn copy_out(mut from: UnixStream, mut to: File) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            // The machine was killed while bytes for it were in flight.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error),
        };
        to.write_all(&buffer[..count])?;
    }
}

/// Sends standard input over the control line, with its length before each piece.
pub(crate) fn send_input(mut from: File, mut control: UnixStream) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match wait_readable(&from, &control, None)? {
            Ready::Input => {}
            Ready::Nothing => continue,
            Ready::GuestGone => return Ok(()),
        }
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return control.write_all(b"eof\n");
        }
        control.write_all(format!("data {count}\n").as_bytes())?;
        control.write_all(&buffer[..count])?;
    }
}

/// Sends what is typed to the guest's terminal, and the terminal's size when it changes.
pub(crate) fn send_keys(mut size: (u16, u16), mut line: UnixStream, mut control: UnixStream) -> io::Result<()> {
    let mut from = own(io::stdin())?;
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match wait_readable(&from, &control, Some(&SIZE_INTERVAL))? {
            Ready::Input => match from.read(&mut buffer)? {
                0 => return Ok(()),
                count => line.write_all(&buffer[..count])?,
            },
            Ready::Nothing => {
                let now = terminal_size().unwrap_or(size);
                if now != size {
                    control.write_all(format!("size {} {}\n", now.0, now.1).as_bytes())?;
                    size = now;
                }
            }
            Ready::GuestGone => return Ok(()),
        }
    }
}

enum Ready {
    Input,
    GuestGone,
    Nothing,
}

fn wait_readable(from: &File, control: &UnixStream, timeout: Option<&Timespec>) -> io::Result<Ready> {
    let mut fds = [PollFd::new(from, PollFlags::IN), PollFd::new(control, PollFlags::empty())];
    match poll(&mut fds, timeout) {
        Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(Ready::Nothing),
        Ok(_) => {}
        Err(error) => return Err(error.into()),
    }
    if fds[1].revents().is_empty() { Ok(Ready::Input) } else { Ok(Ready::GuestGone) }
}

/// The terminal in raw mode, until this is dropped.
#[derive(Debug)]
pub(crate) struct RawTerminal {
    terminal: OwnedFd,
    before: Termios,
}

impl RawTerminal {
    pub(crate) fn new() -> io::Result<Self> {
        let terminal = io::stdin().as_fd().try_clone_to_owned()?;
        let before = tcgetattr(&terminal)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&terminal, OptionalActions::Drain, &raw)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // The terminal may be gone, and the error cannot be reported.
        let _ = tcsetattr(&self.terminal, OptionalActions::Drain, &self.before);
    }
}
