//! The unix sockets that shares listen on.

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Whoever may connect acts with the server's rights, so that is its user alone, until the user says otherwise.
const MODE: u32 = 0o600;
/// One VMM at a time is served; others wait here.
const BACKLOG: i32 = 16;

/// A listening socket that takes its file along when it goes.
#[derive(Debug)]
pub struct Bound {
    pub listener: UnixListener,
    file: Option<(PathBuf, (u64, u64))>,
}

impl Bound {
    /// Listens on a path. A socket file that nobody listens on any more is replaced.
    pub fn bind(path: &Path) -> Result<Self> {
        let shown = path.display();
        let Ok(address) = SocketAddrUnix::new(path) else {
            bail!("the socket path {shown} is too long: unix sockets allow 107 bytes; choose a shorter one");
        };
        let listener = match listen(&address, path) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path)?;
                listen(&address, path)
            }
            result => result,
        };
        let listener = match listener {
            Ok(listener) => listener,
            Err(Errno::NOENT) => bail!("the folder of the socket {shown} does not exist; create it first"),
            Err(Errno::ACCESS | Errno::PERM) => {
                bail!("no permission to create the socket {shown}; choose a folder that you may write to")
            }
            Err(error) => bail!("cannot listen on {shown}: {}", io::Error::from(error)),
        };
        let made = fs::symlink_metadata(path).with_context(|| format!("cannot look at the socket {shown}"))?;
        Ok(Self { listener, file: Some((path.into(), (made.dev(), made.ino()))) })
    }

    /// Takes over a socket that whoever started this process is already listening on.
    pub fn inherit(number: u16) -> Result<Self> {
        let what = format!("descriptor {number}");
        let taken = format!("/proc/self/fd/{number}");
        ensure!(
            number > 2 && fs::symlink_metadata(taken).is_ok(),
            "{what} is not open; start ferry with a listening unix socket as {what}"
        );
        // SAFETY: from_raw_fd needs an open descriptor that nothing else owns. It is open: that was just seen. It was
        // inherited, and the caller takes each number once, before this process opens descriptors of its own.
        let fd = unsafe { OwnedFd::from_raw_fd(RawFd::from(number)) };
        let listening = rustix::net::sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX)
            && rustix::net::sockopt::socket_acceptconn(&fd) == Ok(true);
        ensure!(listening, "{what} is not a listening unix socket; bind and listen before starting ferry");
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).with_context(|| format!("cannot use {what}"))?;
        Ok(Self { listener: fd.into(), file: None })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some((path, made)) = &self.file
            && fs::symlink_metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == *made)
        {
            // Left behind it is only stale, and replaced next time.
            let _ = fs::remove_file(path);
        }
    }
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
fn remove_stale(path: &Path) -> Result<()> {
    let shown = path.display();
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot look at {shown}")),
    };
    ensure!(found.file_type().is_socket(), "{shown} exists and is not a socket; choose another path or remove it");
    match UnixStream::connect(path) {
        Ok(_) => bail!("the socket {shown} is in use by a running server; choose another path or stop that server"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).with_context(|| format!("cannot replace the stale socket {shown}"))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            bail!("the socket {shown} is in use by a busy server; choose another path or stop that server")
        }
        Err(error) => Err(error).with_context(|| format!("{shown} exists, and whether it is in use cannot be told")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_socket_goes_with_its_server() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let bound = Bound::bind(&path).expect("a free path");
        assert_eq!(fs::metadata(&path).expect("a socket").permissions().mode() & 0o777, MODE);
        let error = Bound::bind(&path).expect_err("in use").to_string();
        assert!(error.contains("in use by a running server"), "{error}");
        drop(bound);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        drop(UnixListener::bind(&path).expect("a free path"));
        assert!(path.exists());
        Bound::bind(&path).expect("a stale socket");
    }

    #[test]
    fn mistakes_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        fs::write(&file, "precious").expect("a file");
        for (path, words) in [
            (file.clone(), "exists and is not a socket"),
            (folder.path().join("no/s"), "does not exist"),
            (folder.path().join("x".repeat(120)), "too long"),
        ] {
            let error = Bound::bind(&path).expect_err(words).to_string();
            assert!(error.contains(words) && error.contains(&*path.to_string_lossy()), "{error}");
        }
        assert_eq!(fs::read(&file).expect("still there"), b"precious");
        let error = Bound::inherit(999).expect_err("not open").to_string();
        assert!(error.contains("descriptor 999 is not open"), "{error}");
    }

    #[test]
    fn a_successor_keeps_its_socket() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let first = Bound::bind(&path).expect("a free path");
        fs::remove_file(&path).expect("removed by hand");
        let _second = Bound::bind(&path).expect("a free path");
        drop(first);
        assert!(path.exists());
    }
}
