//! The unix socket on which a device waits for its virtual machine monitor.
//!
//! The socket is created in a private directory (mode 0700), gets its mode and group there, and is then linked to its
//! path. The path of the directory is resolved once, so a user who can rename files there cannot redirect chmod and
//! chown to another file.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use ferry_vfs::random_u64;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, chmodat, chownat, fstat, linkat, mkdirat, openat, statat, unlinkat,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// A client acts with the server's rights, so by default only its user may connect.
const MODE: Mode = Mode::from_raw_mode(0o600);
/// The mode of a socket that a group may also use.
const MODE_OF_GROUP: Mode = Mode::from_raw_mode(0o660);
/// Connections that wait while another VMM is served.
const BACKLOG: i32 = 16;
/// How long a dying server may take to close a connection, on a machine with much to do.
const DYING: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };
/// The longest path that an address of a unix socket holds, in bytes (unix(7)).
const PATH_BYTES_MAX: usize = 107;
/// The longest name that fits behind `/proc/self/fd/`, the number of a descriptor, and a slash.
const SHOWN_BYTES_MAX: usize = PATH_BYTES_MAX - 25;
/// Attempts to find a free name for the private directory. Names are random, so a second attempt is rarely needed.
const NAMES_MAX: usize = 8;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path does not fit into an address.
    #[error("the socket path {path} is too long: unix sockets allow 107 bytes; choose a shorter one", path = .0.display())]
    TooLong(PathBuf),
    /// The directory is missing.
    #[error("the directory of the socket {path} does not exist; create it first", path = .0.display())]
    NoDirectory(PathBuf),
    /// The directory is not writable.
    #[error("no permission to create the socket {path}; choose a directory that you may write to", path = .0.display())]
    Permission(PathBuf),
    /// Another kind of file is there.
    #[error("{path} exists and is not a socket; choose another path or remove it", path = .0.display())]
    NotASocket(PathBuf),
    /// Another process is listening.
    #[error("the socket {path} is in use by a running server; choose another path or stop that server", path = .0.display())]
    InUse(PathBuf),
    /// The group cannot be set.
    #[error("cannot give {path} to the group {gid}: {reason}", path = .path.display())]
    Group {
        /// The socket's path.
        path: PathBuf,
        /// The group's number.
        gid: u32,
        /// The system's reason.
        reason: io::Error,
    },
    /// Another error.
    #[error("cannot listen on {path}: {reason}", path = .path.display())]
    System {
        /// The socket's path.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
    },
}

/// A listening socket that only this user, or a group as well, may connect to. Its file is removed on drop.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode number of its file, which may have been replaced by then. `None` if another process removes
    /// it.
    file: Option<(u64, u64)>,
}

impl Socket {
    /// Listens on a path, for this user alone. A stale socket file is replaced.
    ///
    /// # Errors
    /// [`SocketError`]: a sentence with the path and a remedy.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        Self::bind_for(path, None)
    }

    /// Listens on a path, for this user and a group, by its number.
    ///
    /// # Errors
    /// [`SocketError`]: a sentence with the path and a remedy.
    pub fn bind_for(path: &Path, gid: Option<u32>) -> Result<Self, SocketError> {
        if path.as_os_str().len() > PATH_BYTES_MAX {
            return Err(SocketError::TooLong(path.into()));
        }
        let failed = |errno| match errno {
            Errno::NOENT | Errno::NOTDIR => SocketError::NoDirectory(path.into()),
            Errno::ACCESS | Errno::PERM => SocketError::Permission(path.into()),
            errno => system(path, errno),
        };
        let name = path.file_name().ok_or_else(|| failed(Errno::ISDIR))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(CWD, parent, flags, Mode::empty()).map_err(failed)?;
        let private = PrivateDirectory::make(directory.as_fd(), name).map_err(failed)?;
        let listener = private.listen().map_err(failed)?;
        if let Some(gid) = gid {
            private.give(gid).map_err(|errno| SocketError::Group { path: path.into(), gid, reason: errno.into() })?;
        }
        let made = match private.publish(directory.as_fd(), name) {
            Err(Errno::EXIST) => {
                remove_stale(directory.as_fd(), name, path)?;
                match private.publish(directory.as_fd(), name) {
                    // Another server was as quick.
                    Err(Errno::EXIST) => return Err(SocketError::InUse(path.into())),
                    outcome => outcome,
                }
            }
            outcome => outcome,
        };
        let file = Some(made.map_err(failed)?);
        Ok(Self { listener, path: path.into(), file })
    }

    /// Makes this process the server of the socket, in place of the one that created it, which removes the file.
    ///
    /// # Errors
    /// [`SocketError::System`]: listen(2) was refused.
    pub fn take_over(&mut self) -> Result<(), SocketError> {
        self.leave_file();
        rustix::net::listen(&self.listener, BACKLOG).map_err(|errno| system(&self.path, errno))
    }

    /// Leaves the removal of the file to another process, which also has the socket.
    pub fn leave_file(&mut self) {
        self.file = None;
    }

    /// Returns a copy of the socket, for a server.
    ///
    /// # Errors
    /// [`SocketError::System`]: no descriptor is left.
    pub fn listener(&self) -> Result<UnixListener, SocketError> {
        let cloned = self.listener.try_clone();
        cloned.map_err(|reason| SocketError::System { path: self.path.clone(), reason })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let found = statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW);
        if self.file.is_some() && found.is_ok_and(|now| Some(identity(&now)) == self.file) {
            // A stale file is replaced next time.
            let _ = unlinkat(CWD, &self.path, AtFlags::empty());
        }
    }
}

fn system(path: &Path, errno: Errno) -> SocketError {
    SocketError::System { path: path.into(), reason: errno.into() }
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// Returns the path by which the kernel finds the file of a descriptor.
fn place(fd: BorrowedFd<'_>) -> PathBuf {
    Path::new("/proc/self/fd").join(fd.as_raw_fd().to_string())
}

/// A directory that only this user may enter, in the directory of the socket's path; removed on drop.
struct PrivateDirectory<'a> {
    parent: BorrowedFd<'a>,
    name: String,
    directory: OwnedFd,
    /// The socket's name in it.
    socket: &'a OsStr,
}

impl<'a> PrivateDirectory<'a> {
    fn make(parent: BorrowedFd<'a>, socket: &'a OsStr) -> rustix::io::Result<Self> {
        let make = |_| {
            let name = format!(".ferry-{:016x}", random_u64());
            mkdirat(parent, &name, Mode::RWXU).map(|()| name)
        };
        let mut made = (0..NAMES_MAX).map(make).skip_while(|made| matches!(made, Err(Errno::EXIST)));
        let name = made.next().unwrap_or(Err(Errno::EXIST))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(parent, &name, flags, Mode::empty())?;
        // Tools show the name at bind, so the final name is used if it fits.
        let socket = if socket.len() <= SHOWN_BYTES_MAX { socket } else { OsStr::new("s") };
        let made = Self { parent, name, directory, socket };
        // A user who can rename files in the parent may have put another directory there.
        let found = fstat(&made.directory)?;
        let is_private = found.st_uid == rustix::process::geteuid().as_raw() && found.st_mode & 0o077 == 0;
        if is_private { Ok(made) } else { Err(Errno::PERM) }
    }

    /// Creates the socket, for this user alone.
    fn listen(&self) -> rustix::io::Result<UnixListener> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(place(self.directory.as_fd()).join(self.socket))?)?;
        chmodat(&self.directory, self.socket, MODE, AtFlags::empty())?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(socket.into())
    }

    /// Also allows a group.
    fn give(&self, gid: u32) -> rustix::io::Result<()> {
        chownat(&self.directory, self.socket, None, Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW)?;
        chmodat(&self.directory, self.socket, MODE_OF_GROUP, AtFlags::empty())
    }

    /// Links it to its path, unless a file is there. Returns device and inode number.
    fn publish(&self, directory: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<(u64, u64)> {
        linkat(&self.directory, self.socket, directory, name, AtFlags::empty())?;
        Ok(identity(&statat(&self.directory, self.socket, AtFlags::SYMLINK_NOFOLLOW)?))
    }
}

impl Drop for PrivateDirectory<'_> {
    fn drop(&mut self) {
        // On an error an empty directory is left.
        let _ = unlinkat(&self.directory, self.socket, AtFlags::empty());
        let _ = unlinkat(self.parent, &self.name, AtFlags::REMOVEDIR);
    }
}

/// Removes a socket file that no process listens on; anything else in its place is an error.
fn remove_stale(directory: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<(), SocketError> {
    let failed = |errno| system(path, errno);
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match openat(directory, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        file => file.map_err(failed)?,
    };
    let found = fstat(&file).map_err(failed)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(SocketError::NotASocket(path.into()));
    }
    let address = SocketAddrUnix::new(place(file.as_fd())).map_err(failed)?;
    // A blocking connect would wait as long as the server is stopped.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connect = || {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &address).map(|()| socket)
    };
    let connected = match connect() {
        Ok(socket) if ends_soon(&socket) => connect(),
        first => first,
    };
    match connected {
        // A full backlog belongs to a running server.
        Ok(_) | Err(Errno::AGAIN) => Err(SocketError::InUse(path.into())),
        Err(Errno::CONNREFUSED) => unlinkat(directory, name, AtFlags::empty()).map_err(failed),
        Err(errno) => Err(failed(errno)),
    }
}

/// Returns whether the server closes a new connection within [`DYING`]: a killed server's confined processes, which
/// hold the socket, die a moment after it.
fn ends_soon(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    let found = retry_on_intr(|| rustix::event::poll(&mut polled, Some(&DYING)));
    found.is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A directory of this test's own, removed afterwards.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("ferry-socket-{}-{name}", std::process::id()));
            fs::create_dir(&path).expect("a new name");
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// A stopped server takes no connections: another server must get an error and not wait.
    #[test]
    fn a_server_whose_backlog_is_full_is_in_use() {
        let directory = Directory::new("full");
        let path = directory.0.join("s");
        let _listener = UnixListener::bind(&path).expect("a free path");
        let mut waiting = Vec::new();
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
            let socket = socket.expect("a socket");
            match rustix::net::connect(&socket, &SocketAddrUnix::new(&path).expect("a short path")) {
                Ok(()) => waiting.push(socket),
                outcome => break assert_eq!(outcome, Err(Errno::AGAIN)),
            }
        }
        let (done, result) = std::sync::mpsc::channel();
        std::thread::spawn(move || done.send(Socket::bind(&path)));
        let outcome = result.recv_timeout(std::time::Duration::from_secs(10)).expect("at once");
        assert!(matches!(outcome, Err(SocketError::InUse(_))), "{outcome:?}");
    }

    /// A killed server may seem to listen for a moment: an immediate restart succeeds.
    #[test]
    fn a_server_that_is_dying_is_replaced() {
        let directory = Directory::new("dying");
        let path = directory.0.join("s");
        let dying = UnixListener::bind(&path).expect("a free path");
        let death = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(100));
            drop(dying);
        });
        let outcome = Socket::bind(&path);
        death.join().expect("it only sleeps");
        assert!(outcome.is_ok(), "{outcome:?}");
    }

    #[test]
    fn a_socket_is_private_and_removed_with_its_server() {
        let directory = Directory::new("goes");
        let path = directory.0.join("s");
        let socket = Socket::bind(&path).expect("a free path");
        assert_eq!(fs::metadata(&path).expect("a socket").permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(&directory.0).expect("a directory").count(), 1, "nothing else is left");
        assert!(matches!(Socket::bind(&path), Err(SocketError::InUse(_))));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_successors_kept() {
        let directory = Directory::new("stale");
        let path = directory.0.join("s");
        drop(UnixListener::bind(&path).expect("a free path"));
        let first = Socket::bind(&path).expect("a stale socket");
        fs::remove_file(&path).expect("removed by hand");
        let _second = Socket::bind(&path).expect("a free path");
        drop(first);
        assert!(path.exists());
    }

    #[test]
    fn mistakes_are_named() {
        let directory = Directory::new("mistakes");
        let file = directory.0.join("file");
        fs::write(&file, "precious").expect("a file");
        for (path, words) in [
            (file.clone(), "exists and is not a socket"),
            (directory.0.join("no/s"), "does not exist"),
            (directory.0.join("x".repeat(120)), "too long"),
        ] {
            let error = Socket::bind(&path).expect_err(words).to_string();
            assert!(error.contains(words) && error.contains(&*path.to_string_lossy()), "{error}");
        }
        assert_eq!(fs::read(&file).expect("still there"), b"precious");
    }

    /// Another thread replaces the socket by links to other files all the time: their mode and group stay.
    #[test]
    fn no_other_files_mode_and_group_are_changed() {
        let directory = Directory::new("swapped");
        let (path, precious, aside) = (directory.0.join("s"), directory.0.join("precious"), directory.0.join("aside"));
        fs::write(&precious, "precious").expect("a file");
        // Another socket, so the file type alone cannot distinguish it.
        let other = UnixListener::bind(directory.0.join("other")).expect("a free path");
        for file in [&precious, &directory.0.join("other")] {
            fs::set_permissions(file, fs::Permissions::from_mode(0o444)).expect("it is ours");
        }
        let of =
            |path: &Path| fs::metadata(path).map(|found| (found.gid(), found.mode() & 0o7777)).expect("it is there");
        let before = [of(&precious), of(&directory.0.join("other"))];
        let gid = if rustix::process::geteuid().is_root() { 4321 } else { rustix::process::getegid().as_raw() };
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let targets = [&precious, &directory.0.join("other")];
                for number in 0.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    // Replaces any file, also a new socket.
                    if fs::rename(&path, &aside).is_err() {
                        continue;
                    }
                    let target = targets[number % 2];
                    let _ = match number % 4 {
                        0 | 1 => std::os::unix::fs::symlink(target, &path),
                        _ => fs::hard_link(target, &path),
                    };
                    std::thread::yield_now();
                    let _ = fs::remove_file(&path);
                }
            });
            for _ in 0..3000 {
                // It may find another file in its place.
                let _ = Socket::bind_for(&path, Some(gid));
            }
            over.store(true, Ordering::Relaxed);
        });
        assert_eq!([of(&precious), of(&directory.0.join("other"))], before);
        drop(other);
    }

    #[test]
    fn a_group_gets_the_socket_and_not_a_links_target() {
        let directory = Directory::new("group");
        let path = directory.0.join("s");
        let gid = if rustix::process::geteuid().is_root() { 4321 } else { rustix::process::getegid().as_raw() };
        let socket = Socket::bind_for(&path, Some(gid)).expect("a free path");
        let found = fs::symlink_metadata(&path).expect("a socket");
        assert_eq!((found.gid(), found.mode() & 0o777), (gid, 0o660));
        UnixStream::connect(&path).expect("it listens");
        drop(socket);
        std::os::unix::fs::symlink("/dev/null", &path).expect("a link");
        assert!(matches!(Socket::bind_for(&path, Some(gid)), Err(SocketError::NotASocket(_))));
        let names = fs::read_dir(&directory.0).expect("a directory").count();
        assert_eq!(names, 1, "what was made on the way is gone");
        // The longest name that an address has room for.
        let long = "x".repeat(PATH_BYTES_MAX - directory.0.as_os_str().len() - 1);
        Socket::bind(&directory.0.join(long)).expect("a free path");
    }
}
