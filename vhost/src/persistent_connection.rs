//! A front-end connection that survives a restart of the server.
//!
//! Messages are peeked at in the socket, forwarded through a socket pair to the code that serves any other
//! connection, and then committed: the [`ConnectionStore`] takes the message, records what the next server must know
//! of it, and sends the reply. A server that takes a connection over first forwards the recorded messages to that
//! code.

mod connection_store;
mod replay_log;

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::channel::{DESCRIPTORS_WAIT_MAX, FILES_MAX, HEADER_BYTES, has_left, number, warn_of_descriptors};
pub use connection_store::{Commit, ConnectionStore, InheritedConnection, Records};
use replay_log::ReplayLog;
pub(crate) use replay_log::was_added;

/// The longest body of a vhost-user message.
const BODY_BYTES_MAX: usize = 4096;
/// How long to wait for the rest of a partial message before peeking again.
const REST: Duration = Duration::from_millis(5);

/// Why no more messages are read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LostError {
    /// The front end is gone.
    #[error("the front end is gone")]
    HungUp,
    /// The server stops.
    #[error("the server stops")]
    Stopped,
    /// A message is too long.
    #[error("a message of {0} bytes; the maximum is {BODY_BYTES_MAX}")]
    Long(usize),
    /// The descriptors of a message cannot be received.
    #[error("a message has more than {FILES_MAX} descriptors, or this process has none left")]
    Files,
    /// Something else.
    #[error("the socket is lost: {0}")]
    System(Errno),
}

impl From<Errno> for LostError {
    fn from(error: Errno) -> Self {
        Self::System(error)
    }
}

/// A message or a reply.
#[derive(Debug, Default)]
pub(crate) struct Message {
    pub(crate) bytes: Vec<u8>,
    pub(crate) files: Vec<OwnedFd>,
}

/// A front end whose connection is stored.
#[derive(Debug)]
pub(crate) struct PersistentConnection {
    socket: UnixStream,
    /// The near end of the pair through which messages are forwarded.
    inner: UnixStream,
    /// `None` once it is lost: then this server takes messages and replies itself, and records nothing.
    store: Option<Arc<dyn ConnectionStore>>,
    replay_log: ReplayLog,
}

impl PersistentConnection {
    /// Serves a connection that is in `store`; messages are forwarded through `inner`.
    pub(crate) fn new(
        socket: UnixStream,
        inner: UnixStream,
        store: Arc<dyn ConnectionStore>,
        records: &Records,
    ) -> Self {
        Self { socket, inner, store: Some(store), replay_log: ReplayLog::of(records) }
    }

    /// Waits for a message, forwards a copy and leaves it in the socket.
    pub(crate) fn next(&self, stop: &OwnedFd) -> Result<Message, LostError> {
        let message = peek(&self.socket, stop)?;
        self.forward(&message.bytes, &message.files)?;
        Ok(message)
    }

    /// Forwards a message. The previous one was read, so there is room.
    pub(crate) fn forward(&self, bytes: &[u8], files: &[OwnedFd]) -> Result<(), LostError> {
        send(&self.inner, bytes, files)
    }

    /// Returns the reply to the last forwarded message.
    pub(crate) fn reply(&self) -> Result<Message, LostError> {
        let mut reply = Message { bytes: vec![0; 2 * (HEADER_BYTES + BODY_BYTES_MAX)], files: Vec::new() };
        let mut have = 0;
        while have < reply.bytes.len() {
            match receive(&self.inner, &mut reply.bytes[have..], Some(&mut reply.files), RecvFlags::empty()) {
                Ok(0) | Err(LostError::System(Errno::AGAIN)) => break,
                Ok(bytes) => have += bytes,
                Err(error) => return Err(error),
            }
        }
        reply.bytes.truncate(have);
        Ok(reply)
    }

    /// Records a message before it is executed, if it resets the device: the records of the rings are void then, and
    /// a reset can be executed twice.
    pub(crate) fn record_before(&mut self, message: &Message) -> Result<(), LostError> {
        match replay_log::resets(&message.bytes) {
            true => self.enter(message, &Message::default(), (0, false)),
            false => Ok(()),
        }
    }

    /// Records the bases of stopped queues. Those of running queues follow from their rings and the in-flight log.
    pub(crate) fn record_base(&mut self, stopped: Vec<(u8, u32)>) -> Result<(), LostError> {
        for (ring, base) in stopped {
            if let Some(entry) = self.replay_log.record_base(ring, base) {
                self.step(&entry, &Message::default(), &Message::default(), 0)?;
            }
        }
        Ok(())
    }

    /// Takes an executed message, records it if it `counts`, and replies. `runs`: whether queues ran before.
    pub(crate) fn commit(
        &mut self,
        message: &Message,
        reply: &Message,
        (counts, runs): (bool, bool),
    ) -> Result<(), LostError> {
        if counts {
            self.enter(message, reply, (message.bytes.len(), runs))
        } else {
            self.step(&replay_log::Entry::default(), message, reply, message.bytes.len())
        }
    }

    fn enter(&mut self, message: &Message, reply: &Message, (taken, runs): (usize, bool)) -> Result<(), LostError> {
        let entry = self.replay_log.enter(&message.bytes, runs);
        self.step(&entry, message, reply, taken)
    }

    fn step(
        &mut self,
        entry: &replay_log::Entry,
        message: &Message,
        reply: &Message,
        taken_bytes: usize,
    ) -> Result<(), LostError> {
        if let Some(store) = &self.store {
            let files = if entry.has_files { &message.files[..] } else { &[] };
            let outcome = store.commit(&Commit {
                taken_bytes,
                record: entry.record.as_ref().map(|(key, bytes)| (*key, &bytes[..], files)),
                drops: &entry.drops,
                reply: &reply.bytes,
                reply_files: &reply.files,
            });
            let Err(error) = outcome else { return Ok(()) };
            tracing::error!("a restart of this server will lose its guest: {error}");
            store.end();
            self.store = None;
        }
        // The store may have taken the message before it was lost.
        let left = peek_offset(&self.socket)?.min(taken_bytes);
        if left > 0 {
            take(&self.socket, left)?;
            send(&self.socket, &reply.bytes, &reply.files)?;
        }
        Ok(())
    }
}

/// Sends bytes and descriptors without blocking.
fn send(socket: &UnixStream, bytes: &[u8], files: &[OwnedFd]) -> Result<(), LostError> {
    if bytes.is_empty() {
        return Ok(());
    }
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(LostError::Files);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags))?;
    if sent == bytes.len() { Ok(()) } else { Err(Errno::AGAIN.into()) }
}

/// Takes bytes from a socket without blocking, and closes their descriptors.
fn take(socket: &UnixStream, bytes: usize) -> Result<(), LostError> {
    let (mut buffer, mut have) = (vec![0; bytes], 0);
    while have < bytes {
        match receive(socket, &mut buffer[have..], None, RecvFlags::empty())? {
            0 => return Err(LostError::HungUp),
            bytes => have += bytes,
        }
    }
    Ok(())
}

/// Peeks at a whole message, without taking it.
fn peek(socket: &UnixStream, stop: &OwnedFd) -> Result<Message, LostError> {
    let mut header = [0; HEADER_BYTES];
    fill(socket, &mut header, None, stop)?;
    let body = usize::try_from(number(&header, 8)).unwrap_or(usize::MAX);
    if body > BODY_BYTES_MAX {
        return Err(LostError::Long(body));
    }
    let mut message = Message { bytes: vec![0; HEADER_BYTES + body], files: Vec::new() };
    fill(socket, &mut message.bytes, Some(&mut message.files), stop)?;
    // With a message without descriptors, the kernel shows those of the next one that has some.
    if !replay_log::has_files(&message.bytes) {
        message.files.clear();
    }
    Ok(message)
}

/// Peeks at the first bytes of the socket. The kernel passes descriptors with every peek at their bytes.
fn fill(
    socket: &UnixStream,
    buffer: &mut [u8],
    mut files: Option<&mut Vec<OwnedFd>>,
    stop: &OwnedFd,
) -> Result<(), LostError> {
    set_peek_offset(socket, 0)?;
    let (mut have, mut begun) = (0, None);
    while have < buffer.len() {
        match receive(socket, &mut buffer[have..], files.as_deref_mut(), RecvFlags::PEEK) {
            Ok(0) => return Err(LostError::HungUp),
            Ok(bytes) => have += bytes,
            Err(LostError::System(Errno::AGAIN)) => wait(socket, stop, have > 0)?,
            Err(LostError::System(Errno::CONNRESET)) => return Err(LostError::HungUp),
            // Out of descriptors: the message is still in the socket.
            Err(LostError::Files) if files.as_ref().is_some_and(|files| files.len() < FILES_MAX) => {
                if has_left(socket) {
                    return Err(LostError::HungUp);
                }
                if begun.get_or_insert_with(warn_of_descriptors).elapsed() > DESCRIPTORS_WAIT_MAX {
                    return Err(LostError::Files);
                }
                files.iter_mut().for_each(|files| files.clear());
                set_peek_offset(socket, 0)?;
                have = 0;
                wait(socket, stop, true)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until the socket is readable; with a partial message (`in_part`), for a moment.
fn wait(socket: &UnixStream, stop: &OwnedFd, in_part: bool) -> Result<(), LostError> {
    let mut fds = [PollFd::new(stop, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
    let moment = Timespec::try_from(REST).map_err(|_| Errno::INVAL)?;
    let outcome = match in_part {
        true => poll(&mut fds[..1], Some(&moment)),
        false => poll(&mut fds, None),
    };
    match outcome {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    if fds[0].revents().is_empty() { Ok(()) } else { Err(LostError::Stopped) }
}

fn receive(
    socket: &UnixStream,
    buffer: &mut [u8],
    files: Option<&mut Vec<OwnedFd>>,
    flags: RecvFlags,
) -> Result<usize, LostError> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
    let mut none = [];
    let mut control = match files {
        Some(_) => RecvAncillaryBuffer::new(&mut space),
        None => RecvAncillaryBuffer::new(&mut none),
    };
    let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags))?;
    let Some(files) = files else { return Ok(received.bytes) };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    match received.flags.contains(ReturnFlags::CTRUNC) {
        true => Err(LostError::Files),
        false => Ok(received.bytes),
    }
}

/// Sets where the next peek begins (socket(7), `SO_PEEK_OFF`).
fn set_peek_offset(socket: &UnixStream, bytes: libc::c_int) -> Result<(), Errno> {
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the descriptor is open, and the kernel reads an `int` of this length from this variable, which outlives
    // the call.
    let outcome = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            std::ptr::from_ref(&bytes).cast(),
            length,
        )
    };
    if outcome == 0 { Ok(()) } else { Err(last_error()) }
}

/// Returns where the next peek begins: the number of peeked bytes that are still in the socket.
fn peek_offset(socket: &UnixStream) -> Result<usize, Errno> {
    let mut bytes: libc::c_int = 0;
    let mut length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the descriptor is open, and the kernel writes no more than an `int` of this length there, and its length.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            std::ptr::from_mut(&mut bytes).cast(),
            &raw mut length,
        )
    };
    if outcome == 0 { Ok(usize::try_from(bytes).unwrap_or(0)) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn send(socket: &UnixStream, request: u32, body: &[u8], files: &[OwnedFd]) {
        let length = u32::try_from(body.len()).unwrap();
        let message = [&[request, 1, length].map(u32::to_ne_bytes).concat()[..], body].concat();
        super::send(socket, &message, files).unwrap();
    }

    #[test]
    fn messages_are_seen_one_by_one_each_with_its_own_descriptors() {
        let (front_end, ours) = UnixStream::pair().unwrap();
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let stop = event();
        // As QEMU sends them: without waiting.
        send(&front_end, 8, &[0; 8], &[]);
        send(&front_end, 13, &0x100u64.to_ne_bytes(), &[]);
        send(&front_end, 5, &[0; 72], &[event(), event()]);
        send(&front_end, 12, &[0; 8], &[event()]);
        send(&front_end, 1, &[], &[]);
        for (request, body, files) in [(8, 8, 0), (13, 8, 0), (5, 72, 2), (12, 8, 1), (1, 0, 0)] {
            for _ in 0..2 {
                let message = peek(&ours, &stop).unwrap();
                let header = message.bytes.first_chunk().unwrap();
                assert_eq!((number(header, 0), message.bytes.len(), message.files.len()), (request, 12 + body, files));
                assert_eq!(peek_offset(&ours).unwrap(), 12 + body);
            }
            // Taking bytes reduces the offset, also within a message.
            take(&ours, 5).unwrap();
            assert_eq!(peek_offset(&ours).unwrap(), 7 + body);
            take(&ours, 7 + body).unwrap();
            assert_eq!(peek_offset(&ours).unwrap(), 0);
        }
        // A partial message is waited for.
        let header = [8u32, 1, 8].map(u32::to_ne_bytes).concat();
        super::send(&front_end, &header, &[]).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| peek(&ours, &stop));
            std::thread::sleep(4 * REST);
            super::send(&front_end, &[7; 8], &[]).unwrap();
            assert_eq!(waits.join().unwrap().unwrap().bytes[12..], [7; 8]);
        });
        take(&ours, 20).unwrap();
        rustix::io::write(&stop, &1u64.to_ne_bytes()).unwrap();
        assert!(matches!(peek(&ours, &stop), Err(LostError::Stopped)));
        drop(front_end);
        assert!(matches!(peek(&ours, &event()), Err(LostError::HungUp)));
        // Longer than any message.
        let (front_end, ours) = UnixStream::pair().unwrap();
        let header = [8u32, 1, u32::MAX].map(u32::to_ne_bytes).concat();
        super::send(&front_end, &header, &[]).unwrap();
        assert!(matches!(peek(&ours, &event()), Err(LostError::Long(_))));
    }
}
