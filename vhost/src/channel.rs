//! The socket for requests of the back end to the front end (vhost-user, "Back-end communication").
//!
//! The `vhost` crate would keep the socket, wait for replies without a limit, and lacks CONFIG_CHANGE_MSG. So the one
//! request that carries the socket is intercepted: its header is peeked at.

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

/// How long a message waits until its descriptors can be received.
pub(crate) const DESCRIPTORS_WAIT_MAX: Duration = Duration::from_secs(30);
/// The most descriptors of a message and its reply: the limit of vhost-user, plus one.
pub(crate) const FILES_MAX: usize = 33;
/// A header: request, flags, and the length of the body, four bytes each.
pub(crate) const HEADER_BYTES: usize = 12;
const SET_BACKEND_REQ_FD: u32 = 21;
const CONFIG_CHANGE_MSG: u32 = 2;
/// Header flags: the version, and the bits of a reply and of a request for one.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;
/// How often a wait for a reply checks whether the connection has ended. A shutdown of the socket would end the wait
/// at once, but with `--state` also the front end's device: the next server needs the socket.
const TICK: Duration = Duration::from_millis(50);
/// The most stale replies that are skipped: each killed server has left one or two.
const STALE_MAX: u32 = 64;
/// The request has no payload, but some front ends send a number.
const PAYLOAD_BYTES_MAX: usize = 8;

#[derive(Debug, Default)]
struct State {
    connected: bool,
    socket: Option<OwnedFd>,
    /// The front end has not read the configuration space since it changed.
    is_change_pending: bool,
}

/// The back-end channel of the current connection.
#[derive(Debug, Default)]
pub(crate) struct Channel(Mutex<State>);

impl Channel {
    /// Begins with a front end. `is_change_pending`: the configuration space may have changed since the front end
    /// read it from a previous server.
    pub(crate) fn begin(&self, is_change_pending: bool) {
        *lock(&self.0) = State { connected: true, is_change_pending, ..State::default() };
    }

    /// Ends with the front end.
    pub(crate) fn end(&self) {
        *lock(&self.0) = State::default();
    }

    /// Sets the socket.
    pub(crate) fn set(&self, socket: OwnedFd) {
        let mut state = lock(&self.0);
        state.socket = Some(socket);
        state.send_pending_change();
    }

    /// Tells the front end, as soon as there is a socket, to read the configuration space again.
    pub(crate) fn config_changed(&self) {
        let mut state = lock(&self.0);
        if !state.connected {
            return;
        }
        if state.socket.is_none() {
            tracing::warn!(
                "the guest does not learn before its next start that its device has changed: the VMM takes no messages of this server \
                 (VHOST_USER_SET_BACKEND_REQ_FD)"
            );
        }
        state.is_change_pending = true;
        state.send_pending_change();
    }

    /// Repeats a change after which the front end has not read the configuration space: QEMU drops the message while
    /// the device is stopped.
    pub(crate) fn device_started(&self) {
        lock(&self.0).send_pending_change();
    }

    /// Called when the front end reads the configuration space.
    pub(crate) fn config_requested(&self) {
        lock(&self.0).is_change_pending = false;
    }
}

impl State {
    fn send_pending_change(&self) {
        if let Some(socket) = self.socket.as_ref().filter(|_| self.is_change_pending) {
            let message = header(CONFIG_CHANGE_MSG, VERSION, 0);
            if let Err(error) = send(socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                tracing::error!("cannot notify the front end of a configuration change: {error}");
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

/// Returns a number of a header.
pub(crate) fn number(message: &[u8; HEADER_BYTES], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&message[at..at + 4]);
    u32::from_ne_bytes(bytes)
}

/// Why the back-end channel is unusable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionBroken {
    #[error("cannot send a request to the front end: {0}")]
    Send(Errno),
    #[error("cannot receive the reply of the front end: {0}")]
    Receive(Errno),
    #[error("the front end hung up")]
    HungUp,
    #[error("unexpected reply from the front end")]
    Nonsense,
    #[error("no reply from the front end within {0:?}")]
    Silence(Duration),
    #[error("the connection has ended")]
    Over,
}

/// When a wait for a reply ends.
pub(crate) struct WaitLimit<'a> {
    /// The longest wait.
    pub(crate) within: Duration,
    /// Whether the connection has ended; called every [`TICK`].
    pub(crate) is_over: &'a dyn Fn() -> bool,
}

/// Sends a request to the front end and waits for the reply: 0 is success. The socket must be non-blocking.
/// `may_be_stale`: replies to the other kind of request, of previous servers, may come first and are skipped.
pub(crate) fn request_reply(
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
    // All earlier requests were answered, so a full socket means that the front end does not read.
    let sent =
        sendmsg(line, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).map_err(ConnectionBroken::Send)?;
    if sent < message.len() {
        return Err(ConnectionBroken::Send(Errno::AGAIN));
    }
    for _ in 0..=if may_be_stale { STALE_MAX } else { 0 } {
        let (head, outcome) = receive_reply(line, end, wait_limit)?;
        if head == (request, VERSION | REPLY, 8) {
            return Ok(outcome);
        }
    }
    Err(ConnectionBroken::Nonsense)
}

/// Receives a reply: the three numbers of its header, without flags that do not matter, and its value.
fn receive_reply(
    line: &UnixStream,
    end: Instant,
    wait_limit: &WaitLimit<'_>,
) -> std::result::Result<((u32, u32, u32), u64), ConnectionBroken> {
    let mut reply = [0; HEADER_BYTES + 8];
    let mut have = 0;
    while have < reply.len() {
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
        match recv(line, &mut reply[have..], RecvFlags::empty()) {
            Ok((_, 0)) => return Err(ConnectionBroken::HungUp),
            Ok((_, bytes)) => have += bytes,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(ConnectionBroken::Receive(error)),
        }
    }
    let (head, outcome) = reply.split_at(HEADER_BYTES);
    let head: &[u8; HEADER_BYTES] = head.try_into().expect("it was split there");
    let head = (number(head, 0), number(head, 4) & (VERSION_MASK | REPLY), number(head, 8));
    Ok((head, u64::from_ne_bytes(outcome.try_into().expect("it was split there"))))
}

/// Waits for the next request until its descriptors can be received. Without free descriptors, the kernel would drop
/// them, and the rest of the message would be taken for another one. Returns whether to read the message; `false` if
/// `is_over`.
pub(crate) fn wait_for_descriptors(stream: &UnixStream, is_over: impl Fn() -> bool) -> bool {
    let mut begun = None;
    loop {
        let mut message = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
        // The next read returns the error.
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

/// Returns whether the peer of a socket has hung up.
pub(crate) fn has_left(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Logs that a message waits for descriptors; returns the time.
pub(crate) fn warn_of_descriptors() -> Instant {
    tracing::warn!(
        "cannot receive the descriptors of a vhost-user message (out of file descriptors?); the message waits"
    );
    Instant::now()
}

/// Waits for the next request, and takes it if it carries the socket and is `wanted`.
pub(crate) fn take(stream: &UnixStream, wanted: bool, acknowledges: impl Fn() -> bool) -> Result<Option<OwnedFd>> {
    if !wanted {
        return Ok(None);
    }
    let mut message = [0; HEADER_BYTES];
    let seen = match recv(stream, &mut message, RecvFlags::PEEK | RecvFlags::WAITALL) {
        Ok((seen, _)) => seen,
        // The next read returns the error.
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
