//! The process that holds descriptors, and the way to it.
//!
//! Messages are packets of 16 bytes, a verb and a key, some with a descriptor. To the keeper: put, drop, clear. From it, to
//! whoever has connected: a put for each descriptor, and an end. It serves one at a time; the next one's connection waits until
//! the one before is closed, and that is when nothing of its process is left: also what the kernel still did for it
//! (`Kept::line` is registered with every ring).

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, recvmsg, sendmsg, socket_with,
};

const PUT: u64 = 1;
const DROP: u64 = 2;
const CLEAR: u64 = 3;
const END: u64 = 4;
const MESSAGE_BYTES: usize = 16;

/// Keys from here on are a client's, and cleared with it.
const CLEARED_FROM: u64 = crate::kept::FILES;
/// How long a server that was killed may take to go, with all that the kernel does for it.
const BEFORE_MAX: Duration = Duration::from_secs(60);
/// How long descriptors are held for a server that does not come.
const AFTER_MAX: Duration = Duration::from_secs(10 * 60);

/// Why the keeper cannot be spoken with.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// Nobody is there.
    #[error("the keeper of the state cannot be reached: {0}")]
    Connect(Errno),
    /// The one before is still there.
    #[error("the state is in use by another server; end that first, or name another --state")]
    InUse,
    /// It is gone.
    #[error("the keeper of the state is gone: {0}")]
    Gone(Errno),
    /// It says what cannot be.
    #[error("the keeper of the state speaks another language; end the process ferry-keeper, and start the guest anew")]
    Nonsense,
}

/// A connection to the keeper, with what it holds.
#[derive(Debug)]
pub struct Line {
    socket: OwnedFd,
    held: HashMap<u64, OwnedFd>,
}

fn message(verb: u64, key: u64) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    bytes[..8].copy_from_slice(&verb.to_le_bytes());
    bytes[8..].copy_from_slice(&key.to_le_bytes());
    bytes
}

fn send(socket: BorrowedFd<'_>, verb: u64, key: u64, file: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let bytes = message(verb, key);
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(file) = &file {
        control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(file)));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return other.map(drop),
        }
    }
}

/// The next message; `None` at the end.
#[allow(clippy::type_complexity, reason = "verb, key, descriptor")]
fn receive(socket: BorrowedFd<'_>) -> Result<Option<(u64, u64, Option<OwnedFd>)>, Errno> {
    let mut bytes = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    match received.bytes {
        0 => return Ok(None),
        MESSAGE_BYTES => {}
        _ => return Err(Errno::BADMSG),
    }
    let number = |at: usize| bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
    Ok(Some((number(0), number(8), file)))
}

fn wait(fd: BorrowedFd<'_>, within: Duration) -> Result<bool, Errno> {
    let left = Timespec::try_from(within).map_err(|_| Errno::INVAL)?;
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            other => return other.map(|ready| ready > 0),
        }
    }
}

fn stream() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Makes the socket on which a keeper is reached, for this user only.
///
/// # Errors
/// `EADDRINUSE` when there is one.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = stream()?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    // The one that is served, the one that comes after, and one that is there by mistake.
    rustix::net::listen(&socket, 4)?;
    Ok(socket)
}

impl Line {
    /// Connects to the keeper that listens at `path`, and takes what it has, as soon as the server before is gone.
    ///
    /// # Errors
    /// [`LineError::Connect`]: there is no keeper; the others.
    pub fn reach(path: &Path) -> Result<Self, LineError> {
        let reach = || {
            let socket = stream()?;
            connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(socket)
        };
        let socket = reach().map_err(LineError::Connect)?;
        let mut held = HashMap::new();
        loop {
            if !wait(socket.as_fd(), BEFORE_MAX).map_err(LineError::Gone)? {
                return Err(LineError::InUse);
            }
            match receive(socket.as_fd()).map_err(LineError::Gone)? {
                Some((PUT, key, Some(file))) => drop(held.insert(key, file)),
                Some((END, count, None)) if count == held.len() as u64 => return Ok(Self { socket, held }),
                Some(_) => return Err(LineError::Nonsense),
                None => return Err(LineError::Gone(Errno::CONNRESET)),
            }
        }
    }

    pub(crate) fn take(self) -> (OwnedFd, HashMap<u64, OwnedFd>) {
        (self.socket, self.held)
    }

    /// Has a descriptor held.
    pub(crate) fn put(line: BorrowedFd<'_>, key: u64, file: BorrowedFd<'_>) -> Result<(), LineError> {
        send(line, PUT, key, Some(file)).map_err(LineError::Gone)
    }

    /// Has a descriptor closed.
    pub(crate) fn drop_key(line: BorrowedFd<'_>, key: u64) -> Result<(), LineError> {
        send(line, DROP, key, None).map_err(LineError::Gone)
    }

    /// Has all files of the client closed, because there is none any more, or another one.
    pub(crate) fn clear(line: BorrowedFd<'_>, is_another: bool) -> Result<(), LineError> {
        send(line, CLEAR, is_another.into(), None).map_err(LineError::Gone)
    }
}

/// Holds descriptors for servers that connect to a [`listen`]ing socket, one after another, until one ends that has no client,
/// or none has come for a while.
///
/// # Errors
/// The socket is lost.
pub fn keep(listener: &OwnedFd) -> io::Result<()> {
    let mut held = Held::default();
    let us = rustix::process::geteuid();
    while wait(listener.as_fd(), AFTER_MAX)? {
        let server = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(server) => server,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(error) => return Err(error.into()),
        };
        if socket_peercred(&server).is_ok_and(|peer| peer.uid == us) {
            // Whatever ends it, the next one is served.
            let _ = serve(server.as_fd(), &mut held);
            if !held.has_client {
                break;
            }
        }
    }
    Ok(())
}

/// What a keeper has.
#[derive(Default)]
struct Held {
    files: HashMap<u64, OwnedFd>,
    has_client: bool,
}

fn serve(server: BorrowedFd<'_>, held: &mut Held) -> Result<(), Errno> {
    for (key, file) in &held.files {
        send(server, PUT, *key, Some(file.as_fd()))?;
    }
    send(server, END, held.files.len() as u64, None)?;
    while let Some((verb, key, file)) = receive(server)? {
        match (verb, file) {
            (PUT, Some(file)) => drop(held.files.insert(key, file)),
            // There was no room for it here: what was under this key before is not it.
            (PUT, None) | (DROP, _) => drop(held.files.remove(&key)),
            (CLEAR, _) => {
                held.files.retain(|key, _| *key < CLEARED_FROM);
                held.has_client = key == 1;
            }
            _ => return Err(Errno::BADMSG),
        }
    }
    Ok(())
}
