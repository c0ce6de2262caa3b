//! The keeper: a process that holds descriptors across restarts, and its protocol.
//!
//! Messages are packets: a verb and a key of 8 bytes each, some with descriptors, some with bytes. A server sends put,
//! drop, clear, and the commits of `connection.rs`. The keeper sends a put per descriptor, a record per message of the
//! front end, and an end. It serves one server at a time. The connection of the next one waits until the previous one
//! is closed: that is when no operation of that process is left, not even in the kernel (`SessionStore::line` is
//! registered with every ring).

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, accept_with, connect, recvmsg, sendmsg, socket_with,
};

use crate::connection::{self, Commit, FILES_MAX, Records};
use crate::directory::Directory;

const PUT: u64 = 1;
const DROP: u64 = 2;
const CLEAR: u64 = 3;
const END: u64 = 4;
const RECORD: u64 = 5;
const COMMIT: u64 = 6;
const DONE: u64 = 7;
const HANG_UP: u64 = 8;
const HEAD_BYTES: usize = 16;
/// The maximum length of a packet in bytes: a commit with a message and a reply of the maximum length of vhost-user.
const PACKET_BYTES_MAX: usize = 16 << 10;

/// The key of the connection to the front end.
pub(crate) const CONNECTION: u64 = 2;
/// Keys from this one belong to a client and are cleared with it.
const CLEARED_FROM: u64 = crate::session_store::FILES;
/// How long the previous, killed server may take to end, including its operations in the kernel.
const BEFORE_MAX: Duration = Duration::from_secs(60);
/// How long descriptors are kept without a server, while the guest is connected.
pub const SERVER_AWAITED: Duration = Duration::from_secs(10 * 60);
/// How long a guest's files and locks are kept after its front end has hung up. A front end that reconnects does so
/// after about a second; files and locks of a guest that has ended block others.
pub const FRONT_END_AWAITED: Duration = Duration::from_secs(5);

/// The delay between tries to get descriptors or memory.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Why the keeper is not available.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// There is no keeper.
    #[error("cannot reach the keeper of the state: {0}")]
    Connect(Errno),
    /// A process of another user listens there.
    #[error("what listens there belongs to user {peer}, not to user {user}; name another --state")]
    Stranger {
        /// The listener's user.
        peer: u32,
        /// The user of this process.
        user: u32,
    },
    /// The previous server is still running.
    #[error("the state is in use by another server; stop it first, or name another --state")]
    InUse,
    /// It is gone.
    #[error("the keeper of the state is gone: {0}")]
    Gone(Errno),
    /// This process cannot hold all its descriptors.
    #[error(
        "this process may not have as many files open as the keeper of the state holds; raise its limit (ulimit -n)"
    )]
    NoRoom,
    /// The keeper has no room for the state of the next server.
    #[error("the keeper of the state has no descriptors left")]
    Full,
    /// Protocol error.
    #[error(
        "the keeper of the state speaks another protocol version; end the process ferry-keeper, and restart the guest"
    )]
    Nonsense,
}

/// A connection to the keeper, with the descriptors that it holds.
#[derive(Debug)]
pub struct KeeperConnection {
    socket: OwnedFd,
    held: HashMap<u64, OwnedFd>,
    records: Records,
    keeper: Option<u32>,
}

/// A packet that came.
pub(crate) struct Packet {
    verb: u64,
    pub(crate) key: u64,
    pub(crate) body: Vec<u8>,
    pub(crate) files: Vec<OwnedFd>,
    /// Some of its descriptors were lost for lack of room.
    pub(crate) is_cut: bool,
}

fn send(
    socket: BorrowedFd<'_>,
    (verb, key): (u64, u64),
    parts: &[&[u8]],
    files: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let head = [verb.to_le_bytes(), key.to_le_bytes()].concat();
    let bytes = [&[&head[..]], parts].concat();
    let bytes: Vec<_> = bytes.into_iter().map(IoSlice::new).collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::TOOMANYREFS);
    }
    retry_on_intr(|| sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)).map(drop)
}

/// Receives the next packet; `None` at the end.
fn receive(socket: BorrowedFd<'_>) -> Result<Option<Packet>, Errno> {
    let mut bytes = vec![0; PACKET_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags))?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            files.extend(came);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.bytes < HEAD_BYTES || received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::BADMSG);
    }
    bytes.truncate(received.bytes);
    let body = bytes.split_off(HEAD_BYTES);
    let number = |at: usize| bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
    let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
    Ok(Some(Packet { verb: number(0), key: number(8), body, files, is_cut }))
}

fn wait(fd: BorrowedFd<'_>, within: Duration) -> Result<bool, Errno> {
    let left = Timespec::try_from(within).map_err(|_| Errno::INVAL)?;
    retry_on_intr(|| poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&left))).map(|ready| ready > 0)
}

fn stream() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Checks that the peer is this user.
fn is_ours(socket: &OwnedFd) -> Result<(), KeeperError> {
    // A peer in another PID namespace has id 0 here, which rustix's type excludes.
    let peer = nix::sys::socket::getsockopt(socket, nix::sys::socket::sockopt::PeerCredentials);
    let peer = peer.map_err(|error| KeeperError::Gone(Errno::from_raw_os_error(error as i32)))?.uid();
    let user = rustix::process::geteuid().as_raw();
    if peer == user { Ok(()) } else { Err(KeeperError::Stranger { peer, user }) }
}

/// Creates the keeper's listening socket.
///
/// # Errors
///
/// `EADDRINUSE` if there is a keeper already.
pub fn listen(directory: &Directory) -> io::Result<OwnedFd> {
    let socket = stream()?;
    directory.bind(&socket)?;
    // The current server, the next one, and a mistaken one.
    rustix::net::listen(&socket, 4)?;
    Ok(socket)
}

impl KeeperConnection {
    /// Connects to the keeper of a directory and receives its descriptors once the previous server has ended.
    ///
    /// # Errors
    ///
    /// [`KeeperError::Connect`]: there is no keeper; or another [`KeeperError`].
    pub fn reach(directory: &Directory) -> Result<Self, KeeperError> {
        let reach = || {
            let socket = stream()?;
            connect(&socket, &directory.address()?)?;
            Ok(socket)
        };
        let socket = reach().map_err(KeeperError::Connect)?;
        is_ours(&socket)?;
        let (mut held, mut records) = (HashMap::new(), Records::new());
        loop {
            if !wait(socket.as_fd(), BEFORE_MAX).map_err(KeeperError::Gone)? {
                return Err(KeeperError::InUse);
            }
            let Some(packet) = receive(socket.as_fd()).map_err(KeeperError::Gone)? else {
                return Err(KeeperError::Gone(Errno::CONNRESET));
            };
            match (packet.verb, packet.key, packet.files.len()) {
                _ if packet.is_cut => return Err(KeeperError::NoRoom),
                (PUT, key, 1) => held.extend(packet.files.into_iter().map(|file| (key, file))),
                (RECORD, key, _) => drop(records.insert(key, (packet.body, packet.files))),
                (END, count, 0) if count == (held.len() + records.len()) as u64 => {
                    // A keeper of an older version does not send its process id.
                    let keeper = packet.body.try_into().ok().map(u32::from_le_bytes);
                    return Ok(Self { socket, held, records, keeper });
                }
                _ => return Err(KeeperError::Nonsense),
            }
        }
    }

    /// Returns the keeper's process id, if it sent one.
    pub(crate) fn keeper(&self) -> Option<u32> {
        self.keeper
    }

    pub(crate) fn take(self) -> (OwnedFd, HashMap<u64, OwnedFd>, Records) {
        (self.socket, self.held, self.records)
    }

    /// Stores a descriptor.
    pub(crate) fn put(line: BorrowedFd<'_>, key: u64, file: BorrowedFd<'_>) -> Result<(), KeeperError> {
        send(line, (PUT, key), &[], &[file]).map_err(KeeperError::Gone)
    }

    /// Has a descriptor closed.
    pub(crate) fn drop_key(line: BorrowedFd<'_>, key: u64) -> Result<(), KeeperError> {
        send(line, (DROP, key), &[], &[]).map_err(KeeperError::Gone)
    }

    /// Closes all files of the client, because it has ended or another one has replaced it.
    pub(crate) fn clear(line: BorrowedFd<'_>, is_another: bool) -> Result<(), KeeperError> {
        send(line, (CLEAR, is_another.into()), &[], &[]).map_err(KeeperError::Gone)
    }

    /// Makes the keeper forget the connection and its records.
    pub(crate) fn forget_connection(line: BorrowedFd<'_>) -> Result<(), KeeperError> {
        send(line, (HANG_UP, 0), &[], &[]).map_err(KeeperError::Gone)
    }

    /// Commits a step of the connection, and waits until it is done. One thread at a time.
    pub(crate) fn commit(line: BorrowedFd<'_>, commit: &Commit<'_>) -> Result<(), KeeperError> {
        let (numbers, files) = commit.encode();
        let parts = [&numbers[..], commit.record_bytes(), commit.reply];
        let sent = send(line, (COMMIT, 0), &parts, &files);
        sent.map_err(KeeperError::Gone)?;
        match receive(line).map_err(KeeperError::Gone)? {
            Some(Packet { verb: DONE, key: 1, .. }) => Ok(()),
            Some(Packet { verb: DONE, .. }) => Err(KeeperError::Full),
            Some(_) => Err(KeeperError::Nonsense),
            None => Err(KeeperError::Gone(Errno::CONNRESET)),
        }
    }
}

/// Holds descriptors for servers that connect to a [`listen`]ing socket, one after another. Returns when a server
/// without a client ends, none has come for [`SERVER_AWAITED`] (or [`FRONT_END_AWAITED`]), or `end` is readable.
///
/// # Errors
///
/// The socket is unusable.
pub fn keep(listener: &OwnedFd, end: &OwnedFd) -> io::Result<()> {
    let mut held = HeldDescriptors::default();
    while wait_for_server(listener, end, held.files.get(&CONNECTION))? {
        let server = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(server) => server,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // The failure is temporary, and waiting servers stay queued.
                let _ = poll(&mut [PollFd::new(end, PollFlags::IN)], Some(&PAUSE));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if is_ours(&server).is_ok() {
            // However this server ends, the next one is served.
            let _ = serve(server.as_fd(), end, &mut held);
            if !held.has_client && !held.files.contains_key(&CONNECTION) {
                break;
            }
        }
    }
    Ok(())
}

/// Waits for the next server. Returns `false` when it is time to end.
fn wait_for_server(listener: &OwnedFd, end: &OwnedFd, connection: Option<&OwnedFd>) -> Result<bool, Errno> {
    let begun = Instant::now();
    let mut hung_up = connection.is_none().then_some(begun);
    loop {
        let last = hung_up.map_or(begun + SERVER_AWAITED, |at| at + FRONT_END_AWAITED);
        let left = last.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        let mut fds = vec![PollFd::new(end, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        // Messages stay in the socket for the next server.
        let connection = connection.filter(|_| hung_up.is_none());
        fds.extend(connection.map(|socket| PollFd::new(socket, PollFlags::RDHUP)));
        match poll(&mut fds, Some(&timeout)) {
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error),
            Ok(0) => return Ok(false),
            Ok(_) => {}
        }
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if is_ready[0] || is_ready[1] {
            return Ok(!is_ready[0]);
        }
        hung_up = Some(Instant::now());
    }
}

/// The keeper's state.
#[derive(Default)]
struct HeldDescriptors {
    files: HashMap<u64, OwnedFd>,
    records: Records,
    has_client: bool,
}

/// Receives the next packet of a server; `None` when it is gone, or it is time to end.
fn next(server: BorrowedFd<'_>, end: &OwnedFd) -> Result<Option<Packet>, Errno> {
    let mut fds = [PollFd::new(end, PollFlags::IN), PollFd::from_borrowed_fd(server, PollFlags::IN)];
    retry_on_intr(|| poll(&mut fds, None))?;
    if fds[0].revents().is_empty() { receive(server) } else { Ok(None) }
}

fn serve(server: BorrowedFd<'_>, end: &OwnedFd, held: &mut HeldDescriptors) -> Result<(), Errno> {
    for (key, file) in &held.files {
        send(server, (PUT, *key), &[], &[file.as_fd()])?;
    }
    for (key, (bytes, files)) in &held.records {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send(server, (RECORD, *key), &[bytes], &files)?;
    }
    let own = std::process::id().to_le_bytes();
    send(server, (END, (held.files.len() + held.records.len()) as u64), &[&own], &[])?;
    while let Some(mut packet) = next(server, end)? {
        match packet.verb {
            // If its descriptor was lost for lack of room, the previous one under this key is outdated.
            PUT => match packet.files.pop() {
                Some(file) => drop(held.files.insert(packet.key, file)),
                None => drop(held.files.remove(&packet.key)),
            },
            DROP => drop(held.files.remove(&packet.key)),
            CLEAR => {
                held.files.retain(|key, _| *key < CLEARED_FROM);
                held.has_client = packet.key == 1;
            }
            HANG_UP => {
                held.files.remove(&CONNECTION);
                held.records.clear();
            }
            COMMIT => {
                // The descriptor of the connection, or those of this packet, may be lost for lack of room.
                let socket = held.files.get(&CONNECTION).filter(|_| !packet.is_cut);
                let is_done = socket.is_some();
                if let Some(socket) = socket {
                    connection::apply_commit(packet, socket.as_fd(), &mut held.records)?;
                }
                send(server, (DONE, is_done.into()), &[], &[])?;
            }
            _ => return Err(Errno::BADMSG),
        }
    }
    Ok(())
}
