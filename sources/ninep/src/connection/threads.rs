//! The two threads of a connection: one reads replies, one sends queued requests.

use std::io::{self, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_vfs::sync::{self, lock};
use ferry_wire::ninep::{Frame, HEADER_BYTES, READ_HEAD_BYTES, Tag, kind};

use super::Connection;
use super::pending::{Bytes, Message};

/// The read buffer in bytes: short replies are read many at a time; longer data are read into their destination.
const READ_BYTES: usize = 64 << 10;

pub(super) fn start(connection: &Arc<Connection>, reader: Box<dyn Read + Send>) -> io::Result<()> {
    let (reading, sending) = (Arc::clone(connection), Arc::clone(connection));
    let name = |what: &str| std::thread::Builder::new().name(format!("9p-{what}"));
    let started = name("reader").spawn(move || {
        let reader = ActivityReader { connection: Arc::clone(&reading), reader };
        let mut reader = BufReader::with_capacity(READ_BYTES, reader);
        loop {
            if let Err(error) = read_reply(&reading, &mut reader) {
                return reading.fail(&error.to_string());
            }
        }
    });
    let started = started.and_then(|_| name("sender").spawn(move || send(&sending)));
    if started.is_err() {
        connection.fail("no thread can be started");
    }
    started.map(drop)
}

/// Records received data, even within a long reply.
struct ActivityReader {
    connection: Arc<Connection>,
    reader: Box<dyn Read + Send>,
}

impl Read for ActivityReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.reader.read(bytes).inspect(|_| self.connection.heard.note())
    }
}

fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<()> {
    reader.read_exact(buffer).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "the server closed the connection"),
        _ => error,
    })
}

/// Reads one reply and wakes its waiter.
fn read_reply(connection: &Connection, reader: &mut BufReader<ActivityReader>) -> io::Result<()> {
    let mut head = [0; HEADER_BYTES];
    fill(reader, &mut head)?;
    let frame = Frame::peek(&head).ok_or_else(|| wrong("a reply without a header"))?;
    let size = usize::try_from(frame.bytes).unwrap_or(usize::MAX);
    if size < HEADER_BYTES || frame.bytes > connection.msize.load(Ordering::Relaxed) {
        return Err(wrong(format!("a reply claims to have {size} bytes")));
    }
    let asked = {
        let state = lock(&connection.state);
        let slot = if frame.tag == Tag::NONE {
            // A Tversion is the only request in flight, and there are at most two: the first requests of a connection.
            [0, 1].into_iter().find(|&slot| state.table.kind(slot) == Some(kind::TVERSION))
        } else {
            Some(frame.tag.0)
        };
        slot.and_then(|slot| state.table.kind(slot).map(|asked| (slot, asked)))
    };
    let Some((tag, asked)) = asked else {
        return Err(wrong(format!("a reply to a request {} that was not sent", frame.tag.0)));
    };
    if frame.kind != kind::RLERROR && frame.kind != asked + 1 {
        return Err(wrong(format!("a request of type {asked} got a reply of type {}", frame.kind)));
    }
    let message = match frame.kind == kind::TREAD + 1 {
        true => read_data(connection, reader, tag, size)?,
        false => {
            let mut bytes = Bytes::zeros(size);
            bytes[..HEADER_BYTES].copy_from_slice(&head);
            fill(reader, &mut bytes[HEADER_BYTES..])?;
            Message { bytes, ..Message::default() }
        }
    };
    let answered = lock(&connection.state).table.answer(tag, message);
    if let Some((wake, answer)) = answered {
        connection.room.notify_one();
        connection.work.notify_one();
        wake.wake(answer);
    }
    Ok(())
}

/// Reads data into the buffer of its request.
fn read_data(
    connection: &Connection,
    reader: &mut BufReader<ActivityReader>,
    tag: u16,
    size: usize,
) -> io::Result<Message> {
    let mut count = [0; 4];
    fill(reader, &mut count)?;
    let count = usize::try_from(u32::from_le_bytes(count)).unwrap_or(usize::MAX);
    let buffer = lock(&connection.state).table.fill(tag);
    let Some(mut buffer) = buffer else { return Err(wrong("data that were not requested")) };
    if size.checked_sub(READ_HEAD_BYTES) != Some(count) || count > buffer.len() {
        return Err(wrong(format!(
            "{count} bytes of data in a reply of {size}, where {} were requested",
            buffer.len()
        )));
    }
    fill(reader, &mut buffer[..count])?;
    Ok(Message { count, buffer: Some(buffer), ..Message::default() })
}

/// Sends queued requests while there are free slots.
fn send(connection: &Connection) {
    loop {
        let mut state = lock(&connection.state);
        let (mut request, wake) = loop {
            if state.broken.is_some() {
                return;
            }
            if state.table.in_flight() < connection.depth
                && let Some(next) = state.queue.pop_front()
            {
                break next;
            }
            state = sync::wait(&connection.work, state);
        };
        let (tag, _) = connection.register(&mut state, &mut request, wake, true);
        drop(state);
        connection.write(tag, request);
    }
}
