//! A connection with a deadline, for clients that send or read slowly.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The maximum bytes of one system call: a longer one could wait several times for the socket's timeout.
const PIECE_BYTES: usize = 64 << 10;

/// A stream with a deadline.
#[derive(Debug)]
pub(crate) struct TimedStream<'a> {
    stream: &'a UnixStream,
    end: Instant,
}

impl<'a> TimedStream<'a> {
    /// Sets the deadline after this time.
    pub(crate) fn new(stream: &'a UnixStream, time: Duration) -> Self {
        Self { stream, end: Instant::now() + time }
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for TimedStream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(bytes)
    }
}

impl Write for TimedStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(&bytes[..bytes.len().min(PIECE_BYTES)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_millis(200);
    /// The allowance for a loaded machine.
    const SLACK: Duration = Duration::from_secs(20);

    #[test]
    fn slow_clients_meet_the_deadline() {
        let (own, client) = UnixStream::pair().expect("two sockets");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut byte = [0];
                // Until the other side is closed.
                while (&client).write_all(b"x").is_ok() && (&client).read_exact(&mut byte).is_ok() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let begun = Instant::now();
            let error =
                TimedStream::new(&own, TIME).write_all(&vec![0; 64 << 20]).expect_err("the peer does not read so much");
            assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
            let mut bytes = Vec::new();
            let mut input = TimedStream::new(&own, TIME);
            let error = input.read_to_end(&mut bytes).expect_err("the client never ends");
            assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
            assert!(!bytes.is_empty() && begun.elapsed() < SLACK);
            own.shutdown(std::net::Shutdown::Both).expect("an open socket");
        });
    }
}
