//! The byte stream of a connection, plain or inside TLS.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(feature = "tls")]
use std::sync::{
    Mutex,
    atomic::{AtomicBool, Ordering},
};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

#[cfg(feature = "tls")]
use ferry_vfs::sync::lock;

#[cfg(feature = "tls")]
use crate::tls::{Channel, Tls};

type Result<T> = std::result::Result<T, Errno>;

/// The byte stream; see the module. One thread at a time reads and one at a time writes; they may be different.
#[derive(Debug)]
pub(crate) struct Stream {
    fd: OwnedFd,
    #[cfg(feature = "tls")]
    tls: Option<Sealed>,
}

/// A TLS channel, and its state that epoll does not see.
#[cfg(feature = "tls")]
#[derive(Debug)]
struct Sealed {
    channel: Mutex<Channel>,
    unread: AtomicBool,
    unsent: AtomicBool,
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Receives what a socket has, without waiting.
pub(crate) fn take(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize> {
    rustix::net::recv(fd, bytes, RecvFlags::DONTWAIT).map(|(count, _)| count)
}

/// Receives into several pieces.
fn give_all(fd: BorrowedFd<'_>, pieces: &[IoSlice<'_>]) -> Result<usize> {
    rustix::net::sendmsg(fd, pieces, &mut SendAncillaryBuffer::default(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}

/// Sends as much as a socket accepts, without waiting.
#[cfg(feature = "tls")]
pub(crate) fn give(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize> {
    rustix::net::send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}

impl Stream {
    /// A connection without encryption.
    pub(crate) fn plain(fd: OwnedFd) -> Self {
        Self {
            fd,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// A connection that begins with a handshake.
    #[cfg(feature = "tls")]
    pub(crate) fn sealed(fd: OwnedFd, tls: &Tls) -> Option<Self> {
        let channel = Mutex::new(Channel::new(tls)?);
        let sealed = Sealed { channel, unread: AtomicBool::new(false), unsent: AtomicBool::new(false) };
        Some(Self { fd, tls: Some(sealed) })
    }

    /// Reads available bytes; 0 at the end.
    pub(crate) fn recv(&self, bytes: &mut [u8]) -> Result<usize> {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.tls {
            return sealed.with(|channel| channel.recv(self.fd.as_fd(), bytes));
        }
        take(self.fd.as_fd(), bytes)
    }

    /// Accepts as many bytes of the pieces as there is room for, at least of the first. None is empty.
    pub(crate) fn send(&self, pieces: &[IoSlice<'_>]) -> Result<usize> {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.tls {
            let first = pieces.first().map_or(&[][..], |piece| piece);
            return sealed.with(|channel| channel.send(self.fd.as_fd(), first));
        }
        give_all(self.fd.as_fd(), pieces)
    }

    /// Sends buffered bytes; returns whether some were sent.
    pub(crate) fn flush(&self) -> Result<bool> {
        #[cfg(feature = "tls")]
        if let Some(sealed) = self.tls.as_ref().filter(|sealed| sealed.unsent.load(Ordering::Acquire)) {
            return sealed.with(|channel| channel.flush(self.fd.as_fd()));
        }
        Ok(false)
    }

    /// Returns whether there is data to read although the socket is empty.
    pub(crate) fn unread(&self) -> bool {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.tls {
            return sealed.unread.load(Ordering::Acquire);
        }
        false
    }

    /// Returns whether accepted bytes are still unsent.
    pub(crate) fn unsent(&self) -> bool {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.tls {
            return sealed.unsent.load(Ordering::Acquire);
        }
        false
    }

    /// Sends the closing message, if the socket accepts it; returns why the client was refused, if it was.
    pub(crate) fn close(&self) -> Option<String> {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.tls {
            return lock(&sealed.channel).close(self.fd.as_fd());
        }
        None
    }

    /// Returns whether the handshake is incomplete.
    pub(crate) fn is_handshaking(&self) -> bool {
        #[cfg(feature = "tls")]
        if let Some(sealed) = &self.tls {
            return lock(&sealed.channel).is_handshaking();
        }
        false
    }
}

#[cfg(feature = "tls")]
impl Sealed {
    fn with<T>(&self, act: impl FnOnce(&mut Channel) -> T) -> T {
        let mut channel = lock(&self.channel);
        let outcome = act(&mut channel);
        self.unread.store(channel.unread(), Ordering::Release);
        self.unsent.store(channel.unsent(), Ordering::Release);
        outcome
    }
}
