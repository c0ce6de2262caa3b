//! The directory of the keeper's socket. A user who can create names there could impersonate the keeper and get the
//! guest's memory and the VMM's connection. So the directory must belong to this user alone, and its path is resolved
//! once.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, chmodat, fstat, openat, unlinkat};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, bind};

/// The socket of a keeper, in its directory.
const SOCKET: &str = "keeper";
/// Only this user may enter.
const MODE: u32 = 0o700;
/// The same for the socket.
const SOCKET_MODE: Mode = Mode::from_raw_mode(0o600);

/// Why a directory cannot hold a keeper's socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// It cannot be created.
    #[error("cannot create the directory: {0}")]
    Make(io::Error),
    /// It cannot be opened.
    #[error("cannot open the directory: {0}")]
    Open(Errno),
    /// It is a symbolic link, or not a directory.
    #[error("the path is a symbolic link or not a directory; name the directory itself")]
    NotADirectory,
    /// It belongs to another user.
    #[error(
        "the directory belongs to user {owner}, and this server runs as user {user}; name a directory of user {user}'s own"
    )]
    Owner {
        /// Whose it is.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Other users have access.
    #[error("others may enter the directory, which has mode {0:04o}; it must be this user's alone: chmod 0700")]
    Mode(u32),
}

/// The directory of a keeper.
#[derive(Debug)]
pub struct Directory(OwnedFd);

impl Directory {
    /// Opens a directory; creates it if necessary.
    ///
    /// # Errors
    ///
    /// [`DirectoryError`]: another user could create names in it.
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        DirBuilder::new().recursive(true).mode(MODE).create(path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => DirectoryError::NotADirectory,
            _ => DirectoryError::Make(error),
        })?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, path, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::LOOP | Errno::NOTDIR => DirectoryError::NotADirectory,
            errno => DirectoryError::Open(errno),
        })?;
        let found = fstat(&directory).map_err(DirectoryError::Open)?;
        let (owner, user, mode) = (found.st_uid, rustix::process::geteuid().as_raw(), found.st_mode & 0o7777);
        if owner != user {
            return Err(DirectoryError::Owner { owner, user });
        }
        if mode & 0o077 != 0 {
            return Err(DirectoryError::Mode(mode));
        }
        Ok(Self(directory))
    }

    /// Returns the address of the keeper's socket, through this process's descriptor of the directory.
    pub(crate) fn address(&self) -> rustix::io::Result<SocketAddrUnix> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()));
        SocketAddrUnix::new(path.join(SOCKET))
    }

    /// Creates the socket, accessible to this user only.
    pub(crate) fn bind(&self, socket: &OwnedFd) -> rustix::io::Result<()> {
        bind(socket, &self.address()?)?;
        // Only this user can create names here, so the name is the socket's.
        chmodat(&self.0, SOCKET, SOCKET_MODE, AtFlags::empty())
    }

    /// Removes the socket that a keeper left.
    ///
    /// # Errors
    ///
    /// It cannot be removed. A missing socket is not an error.
    pub fn clear(&self) -> io::Result<()> {
        match unlinkat(&self.0, SOCKET, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}
