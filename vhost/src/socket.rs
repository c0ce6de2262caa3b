//! The unix socket on which a device waits for its virtual machine monitor.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Whoever may connect acts with the server's rights, so that is its user alone, until the user says otherwise.
const MODE: u32 = 0o600;
/// One VMM at a time is served; others wait here.
const BACKLOG: i32 = 16;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path does not fit into an address.
    #[error("the socket path {path} is too long: unix sockets allow 107 bytes; choose a shorter one", path = .0.display())]
    TooLong(PathBuf),
    /// The folder is missing.
    #[error("the folder of the socket {path} does not exist; create it first", path = .0.display())]
    NoFolder(PathBuf),
    /// The folder is not for us to write to.
    #[error("no permission to create the socket {path}; choose a folder that you may write to", path = .0.display())]
    Permission(PathBuf),
    /// Something else is there.
    #[error("{path} exists and is not a socket; choose another path or remove it", path = .0.display())]
    NotASocket(PathBuf),
    /// Somebody else is listening.
    #[error("the socket {path} is in use by a running server; choose another path or stop that server", path = .0.display())]
    InUse(PathBuf),
    /// Anything else.
    #[error("cannot listen on {path}: {reason}", path = .path.display())]
    System {
        /// The socket's path.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
    },
}

/// A listening socket that only this user may connect to, and that takes its file along when it goes.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode number: by then somebody else's socket may be in its place.
    made: (u64, u64),
    stays: bool,
}

impl Socket {
    /// Listens on a path. A socket file that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// [`SocketError`]: a sentence with the path and what to do.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let address = SocketAddrUnix::new(path).map_err(|_| SocketError::TooLong(path.into()))?;
        let listener = match listen(&address, path) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path)?;
                listen(&address, path)
            }
            result => result,
        };
        let listener = listener.map_err(|errno| match errno {
            Errno::NOENT => SocketError::NoFolder(path.into()),
            Errno::ACCESS | Errno::PERM => SocketError::Permission(path.into()),
            errno => system(path, errno.into()),
        })?;
        let made = fs::symlink_metadata(path).map_err(|reason| system(path, reason))?;
        Ok(Self { listener, path: path.into(), made: (made.dev(), made.ino()), stays: false })
    }

    /// Makes this process the one that serves the socket, in the place of the one that made it: that one removes the file,
    /// and those who connect are told this one's number.
    ///
    /// # Errors
    /// [`SocketError::System`]: listen(2) was refused.
    pub fn take_over(&mut self) -> Result<(), SocketError> {
        self.leave_file();
        rustix::net::listen(&self.listener, BACKLOG).map_err(|errno| system(&self.path, errno.into()))
    }

    /// Leaves the file to another process, which has the socket, too.
    pub fn leave_file(&mut self) {
        self.stays = true;
    }

    /// The socket, for a server.
    ///
    /// # Errors
    /// [`SocketError::System`]: there is no descriptor left.
    pub fn listener(&self) -> Result<UnixListener, SocketError> {
        self.listener.try_clone().map_err(|reason| system(&self.path, reason))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if !self.stays && fs::symlink_metadata(&self.path).is_ok_and(|now| (now.dev(), now.ino()) == self.made) {
            // Left behind it is only stale, and replaced next time.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn system(path: &Path, reason: io::Error) -> SocketError {
    SocketError::System { path: path.into(), reason }
}

fn listen(address: &SocketAddrUnix, path: &Path) -> rustix::io::Result<UnixListener> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, address)?;
    // Nobody can connect before listen, so nobody comes in under the mode that the umask gave.
    rustix::fs::chmod(path, rustix::fs::Mode::from_raw_mode(MODE))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Removes a socket file that no process listens on; anything else in its place is an error.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system(path, error)),
    };
    if !found.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.into()));
    }
    match UnixStream::connect(path) {
        // A full backlog is a server too.
        Ok(_) => Err(SocketError::InUse(path.into())),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(SocketError::InUse(path.into())),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(|reason| system(path, reason))
        }
        Err(error) => Err(system(path, error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A folder of this test's own, removed afterwards.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ferry-socket-{}-{name}", std::process::id()));
            fs::create_dir(&path).expect("nobody else has this name");
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_socket_goes_with_its_server_and_is_its_users_alone() {
        let folder = Folder::new("goes");
        let path = folder.0.join("s");
        let socket = Socket::bind(&path).expect("a free path");
        assert_eq!(fs::metadata(&path).expect("a socket").permissions().mode() & 0o777, MODE);
        assert!(matches!(Socket::bind(&path), Err(SocketError::InUse(_))));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_successors_kept() {
        let folder = Folder::new("stale");
        let path = folder.0.join("s");
        drop(UnixListener::bind(&path).expect("a free path"));
        let first = Socket::bind(&path).expect("a stale socket");
        fs::remove_file(&path).expect("removed by hand");
        let _second = Socket::bind(&path).expect("a free path");
        drop(first);
        assert!(path.exists());
    }

    #[test]
    fn mistakes_are_named() {
        let folder = Folder::new("mistakes");
        let file = folder.0.join("file");
        fs::write(&file, "precious").expect("a file");
        for (path, words) in [
            (file.clone(), "exists and is not a socket"),
            (folder.0.join("no/s"), "does not exist"),
            (folder.0.join("x".repeat(120)), "too long"),
        ] {
            let error = Socket::bind(&path).expect_err(words).to_string();
            assert!(error.contains(words) && error.contains(&*path.to_string_lossy()), "{error}");
        }
        assert_eq!(fs::read(&file).expect("still there"), b"precious");
    }
}
