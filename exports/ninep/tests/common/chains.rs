//! A guest's driver in the place of a socket: each message goes out in a chain of its own.

use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;

use ferry_driver::{Config, Driver, Error};
use ferry_wire::ninep::{Frame, READ_HEAD_BYTES, kind};

use super::{MSIZE, PATIENCE, Stream};

/// Room for a reply that is not data.
const ROOM: usize = 16 << 10;

/// How the driver connects.
pub fn config() -> Config {
    Config { first_queues: 0, queue_size: 1024, device_features: 1, ..Config::default() }
}

pub struct Chains {
    pub driver: Driver,
    timeout: Duration,
    /// Replies that were not read yet.
    rest: Vec<u8>,
}

impl Chains {
    pub fn connect(path: &Path) -> Self {
        Self { driver: Driver::connect(path, config()).unwrap(), timeout: PATIENCE, rest: Vec::new() }
    }
}

impl Stream for Chains {
    fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout.unwrap_or(PATIENCE);
    }
}

impl Write for Chains {
    /// Takes a message as a whole.
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let room = match Frame::peek(message).unwrap().kind {
            kind::TREAD | kind::TREADDIR => {
                let wanted = u32::from_le_bytes(*message.last_chunk().unwrap()) as usize;
                READ_HEAD_BYTES + wanted.min(MSIZE as usize)
            }
            _ => ROOM,
        };
        // As Linux does it: the head apart from what follows, on both sides.
        let (head, rest) = message.split_at(message.len().min(23));
        let out: &[&[u8]] = if rest.is_empty() { &[head] } else { &[head, rest] };
        let queue = self.driver.queue(0);
        queue.submit(out, &[READ_HEAD_BYTES, room.max(ROOM) - READ_HEAD_BYTES]).unwrap();
        queue.publish();
        queue.kick();
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Chains {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            match self.driver.queue(0).wait(self.timeout) {
                // Nothing in it: a request that is not answered.
                Ok(done) => self.rest = done.reply,
                Err(Error::TimedOut(_)) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        let count = bytes.len().min(self.rest.len());
        bytes[..count].copy_from_slice(&self.rest[..count]);
        self.rest.drain(..count);
        Ok(count)
    }
}
