//! The socket on which we tell the front end what it did not ask for (vhost-user, "Back-end communication").
//!
//! The `vhost` crate takes the socket, waits for answers without end, and has no message for a change of the configuration space. So the one request
//! that carries it is taken from under its nose: the header is looked at without being read.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recv, recvmsg, send, sendmsg,
};
use vhost::vhost_user::{Error, Result};

/// How long a message waits for its descriptors.
pub(crate) const DESCRIPTORS_WAIT_MAX: Duration = Duration::from_secs(30);
/// The most descriptors of a message and its reply: the limit of vhost-user, and one.
pub(crate) const FILES_MAX: usize = 33;
/// A header: request, flags, and the length of what follows, each of four bytes.
pub(crate) const HEADER_BYTES: usize = 12;
const SET_BACKEND_REQ_FD: u32 = 21;
const CONFIG_CHANGE_MSG: u32 = 2;
/// Flags: the version, and the bits of a reply and of the wish for one.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;
/// How often a wait for an answer looks whether the connection is over. Shutting the socket down would end the wait at once, and with
/// `--state` it would end the front end's device, too: the socket is the next server's.
const TICK: Duration = Duration::from_millis(50);
/// Answers that are passed over: each server that was killed has left one or two.
const STALE_MAX: u32 = 64;
/// The request has no payload; some front ends send a number.
const PAYLOAD_BYTES_MAX: usize = 8;

#[derive(Debug, Default)]
struct State {
    connected: bool,
    socket: Option<OwnedFd>,
    /// There is something to tell, and nobody yet to be told.
    owes: bool,
}

/// The way to the front end, while there is one.
#[derive(Debug, Default)]
pub(crate) struct Channel(Mutex<State>);

impl Channel {
    /// A front end is there. `owes`: the configuration space may have changed since it has read that, from a server before this one.
    pub(crate) fn begin(&self, owes: bool) {
        *lock(&self.0) = State { connected: true, owes, ..State::default() };
    }

    /// The front end is gone.
    pub(crate) fn end(&self) {
        *lock(&self.0) = State::default();
    }

    /// The front end can be reached here.
    pub(crate) fn set(&self, socket: OwnedFd) {
        let mut state = lock(&self.0);
        state.socket = Some(socket);
        if state.owes {
            state.tell();
        }
    }

    /// Tells the front end, as soon as it can be reached, to read the configuration space again.
    pub(crate) fn config_changed(&self) {
        let mut state = lock(&self.0);
        if state.connected {
            state.tell();
        }
    }
}

impl State {
    fn tell(&mut self) {
        self.owes = self.socket.is_none();
        if let Some(socket) = &self.socket {
            let message = header(CONFIG_CHANGE_MSG, VERSION, 0);
            if let Err(error) = send(socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                tracing::error!("the front end cannot be told that the configuration changed: {error}");
            }
        }
    }
}

fn header(request: u32, flags: u32, bytes: u32) -> [u8; HEADER_BYTES] {
    let mut message = [0; HEADER_BYTES];
    for (place, number) in message.chunks_exact_mut(4).zip([request, flags, bytes]) {
        place.copy_from_slice(&number.to_ne_bytes());
    }
    message
}

/// A number in a header.
pub(crate) fn number(message: &[u8; HEADER_BYTES], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&message[at..at + 4]);
    u32::from_ne_bytes(bytes)
}

/// Why the line to the front end is of no use any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionBroken {
    #[error("the front end cannot be asked: {0}")]
    Send(Errno),
    #[error("the front end does not answer: {0}")]
    Receive(Errno),
    #[error("the front end hung up")]
    HungUp,
    #[error("the front end answers something else")]
    Nonsense,
    #[error("the front end does not answer within {0:?}")]
    Silence(Duration),
    #[error("the connection is over")]
    Over,
}

/// When an answer is not waited for any longer.
pub(crate) struct WaitLimit<'a> {
    /// The front end is silent for this long.
    pub(crate) within: Duration,
    /// The connection is over. It is asked every [`TICK`].
    pub(crate) is_over: &'a dyn Fn() -> bool,
}

/// Asks the front end something, and waits for its answer: 0 is yes. The socket must not block. `may_be_stale`: answers to another kind of
/// request may come first, to servers before this one, which nobody waits for any more.
pub(crate) fn ask(
    line: &UnixStream,
    (request, body): (u32, &[u8]),
    file: Option<BorrowedFd<'_>>,
    wait_limit: &WaitLimit<'_>,
    may_be_stale: bool,
) -> std::result::Result<u64, ConnectionBroken> {
    let end = Instant::now() + wait_limit.within;
    let length = u32::try_from(body.len()).expect("our own requests are short");
    let message = [&header(request, VERSION | NEED_REPLY, length), body].concat();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(file) = &file {
        control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(file)));
    }
    // There was no other question that was not answered: if this one finds no room, nobody reads there.
    let sent =
        sendmsg(line, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).map_err(ConnectionBroken::Send)?;
    if sent < message.len() {
        return Err(ConnectionBroken::Send(Errno::AGAIN));
    }
    for _ in 0..=if may_be_stale { STALE_MAX } else { 0 } {
        let (head, outcome) = receive_answer(line, end, wait_limit)?;
        if head == (request, VERSION | REPLY, 8) {
            return Ok(outcome);
        }
    }
    Err(ConnectionBroken::Nonsense)
}

/// An answer: the three numbers of its header, but for flags that say nothing in one; and what it is.
fn receive_answer(
    line: &UnixStream,
    end: Instant,
    wait_limit: &WaitLimit<'_>,
) -> std::result::Result<((u32, u32, u32), u64), ConnectionBroken> {
    let mut answer = [0; HEADER_BYTES + 8];
    let mut have = 0;
    while have < answer.len() {
        let left = end.saturating_duration_since(Instant::now());
        let tick = Timespec::try_from(left.min(TICK)).map_err(|_| ConnectionBroken::Silence(wait_limit.within))?;
        match poll(&mut [PollFd::new(line, PollFlags::IN)], Some(&tick)) {
            Ok(0) if left.is_zero() => return Err(ConnectionBroken::Silence(wait_limit.within)),
            Ok(0) if (wait_limit.is_over)() => return Err(ConnectionBroken::Over),
            Ok(0) => continue,
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(ConnectionBroken::Receive(error)),
        }
        match recv(line, &mut answer[have..], RecvFlags::empty()) {
            Ok((_, 0)) => return Err(ConnectionBroken::HungUp),
            Ok((_, bytes)) => have += bytes,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(ConnectionBroken::Receive(error)),
        }
    }
    let (head, outcome) = answer.split_at(HEADER_BYTES);
    let head: &[u8; HEADER_BYTES] = head.try_into().expect("it was split there");
    let head = (number(head, 0), number(head, 4) & (VERSION_MASK | REPLY), number(head, 8));
    Ok((head, u64::from_ne_bytes(outcome.try_into().expect("it was split there"))))
}

/// Waits for the next request, until its descriptors can be received. With none left, the kernel would drop them, and the rest of the
/// message be taken for another one. Returns whether it may be read; not if `is_over` says that nobody wants that any more.
pub(crate) fn wait_for_descriptors(stream: &UnixStream, is_over: impl Fn() -> bool) -> bool {
    let mut begun = None;
    loop {
        let mut message = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
        // Whatever fails, the next to read meets it again.
        let Ok(seen) = recvmsg(stream, &mut [IoSliceMut::new(&mut message)], &mut control, flags) else { return true };
        let received = control.drain().map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => files.count(),
            _ => 0,
        });
        if !seen.flags.contains(ReturnFlags::CTRUNC) || received.sum::<usize>() >= FILES_MAX {
            return true;
        }
        if is_over() {
            return false;
        }
        if begun.get_or_insert_with(warn_of_descriptors).elapsed() > DESCRIPTORS_WAIT_MAX {
            return true;
        }
        std::thread::sleep(TICK);
    }
}

/// Whether the peer of a socket has hung up.
pub(crate) fn has_left(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Tells that a message waits for descriptors; returns the time.
pub(crate) fn warn_of_descriptors() -> Instant {
    tracing::warn!(
        "cannot receive the descriptors of a vhost-user message (out of file descriptors?); the message waits"
    );
    Instant::now()
}

/// Waits for the next request, and takes it if it brings the socket and is `wanted`.
pub(crate) fn take(stream: &UnixStream, wanted: bool, acknowledges: impl Fn() -> bool) -> Result<Option<OwnedFd>> {
    if !wanted {
        return Ok(None);
    }
    let mut message = [0; HEADER_BYTES];
    let seen = match recv(stream, &mut message, RecvFlags::PEEK | RecvFlags::WAITALL) {
        Ok((seen, _)) => seen,
        // Whatever it is, the next to read meets it again.
        Err(_) => return Ok(None),
    };
    if seen < HEADER_BYTES || number(&message, 0) != SET_BACKEND_REQ_FD {
        return Ok(None);
    }
    let socket = receive(stream)?;
    if number(&message, 4) & NEED_REPLY != 0 && acknowledges() {
        let outcome = u64::from(socket.is_none()).to_ne_bytes();
        let reply = [&header(SET_BACKEND_REQ_FD, VERSION | REPLY, 8)[..], &outcome].concat();
        (&*stream).write_all(&reply).map_err(|_| Error::Disconnected)?;
    }
    socket.map(Some).ok_or(Error::IncorrectFds)
}

fn receive(mut stream: &UnixStream) -> Result<Option<OwnedFd>> {
    let mut message = [0; HEADER_BYTES];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut message)], &mut control, flags);
    if received.map_err(|error| Error::SocketError(error.into()))?.bytes < HEADER_BYTES {
        return Err(Error::Disconnected);
    }
    let socket = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let mut payload = [0; PAYLOAD_BYTES_MAX];
    let bytes = usize::try_from(number(&message, 8)).unwrap_or(usize::MAX);
    let payload = payload.get_mut(..bytes).ok_or(Error::InvalidMessage)?;
    stream.read_exact(payload).map_err(|_| Error::Disconnected)?;
    Ok(socket)
}
