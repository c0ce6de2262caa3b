//! The private socket directory of each user.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Once;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::Error;

/// The directory of root's servers.
const ROOT_DIR: &str = "/run/ferry";
/// The parent of systemd's directories of logged-in users.
const USERS_DIR: &str = "/run/user";
/// The maximum number of names that are read in a directory of another user.
const NAMES_MAX: usize = 1024;
/// Only the user may enter.
const MODE: u32 = 0o700;

/// The end of the name of a manager's socket.
const MANAGER: &str = ".manager";

/// Returns the name of the socket of a manager.
pub(crate) fn manager_name(pid: u32) -> String {
    format!("{pid}{MANAGER}")
}

/// Returns the directory of this user's servers; creates it if necessary.
pub(crate) fn own() -> Result<PathBuf, Error> {
    let uid = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| Path::new(directory).is_absolute());
    let directory = match runtime {
        _ if uid == 0 => ROOT_DIR.into(),
        Some(runtime) => Path::new(&runtime).join("ferry"),
        None => format!("/tmp/ferry-{uid}").into(),
    };
    let created = fs::DirBuilder::new().recursive(uid == 0).mode(MODE).create(&directory);
    if let Err(error) = created.or_else(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    }) {
        return Err(Error::Directory { directory, reason: error });
    }
    check(&directory, uid)?;
    Ok(directory)
}

/// Checks that only this user has access: any user could have created the directory in `/tmp` before.
fn check(directory: &Path, uid: u32) -> Result<(), Error> {
    let found =
        fs::symlink_metadata(directory).map_err(|reason| Error::Directory { directory: directory.into(), reason })?;
    let private = found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0;
    if private { Ok(()) } else { Err(Error::NotPrivate(directory.into())) }
}

/// Removes the sockets of killed servers, once for this process and those that it forks afterwards: each of many servers of one
/// manager would look at the sockets of all others.
pub(crate) fn remove_dead(directory: &Path) {
    static REMOVED: Once = Once::new();
    REMOVED.call_once(|| remove_dead_now(directory));
}

fn remove_dead_now(directory: &Path) {
    for path in entries(directory) {
        let is_socket = fs::symlink_metadata(&path).is_ok_and(|found| found.file_type().is_socket());
        let name = path.file_name().and_then(|name| name.to_str());
        let pid = name.and_then(|name| name.strip_suffix(MANAGER).unwrap_or(name).parse().ok());
        let Some(pid) = pid.and_then(rustix::process::Pid::from_raw).filter(|_| is_socket) else { continue };
        let has_ended = rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH);
        // In a container that shares the directory, a running server may have an id that is unknown here.
        let is_refused = || connect_now(&path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
        if has_ended
            && is_refused()
            && let Err(error) = fs::remove_file(&path)
        {
            tracing::debug!("cannot remove the socket {} of a dead server: {error}", path.display());
        }
    }
}

/// Connects without waiting for the server: a stopped server with a full backlog would block the caller.
fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(rustix::io::Errno::AGAIN) => {
            Err(io::Error::new(ErrorKind::TimedOut, "it accepts no connections: is it stopped?"))
        }
        outcome => outcome.map_err(io::Error::from),
    }?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// A control socket, as found in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The process id in its name.
    pub pid: u32,
    /// The owner of the directory.
    pub owner: u32,
    /// Its path.
    pub path: PathBuf,
}

impl Endpoint {
    /// Returns that of a server of this user.
    ///
    /// # Errors
    /// The directory of this user's servers cannot be used.
    pub fn own(pid: u32) -> Result<Self, Error> {
        Ok(Self { pid, owner: rustix::process::geteuid().as_raw(), path: own()?.join(pid.to_string()) })
    }

    /// Returns that of a manager of the same user.
    #[must_use]
    pub fn of_manager(&self, pid: u32) -> Self {
        Self { pid, owner: self.owner, path: self.path.with_file_name(manager_name(pid)) }
    }

    /// Connects if the listening process has this id and owner. The contents of another user's directory are under that
    /// user's control.
    ///
    /// # Errors
    ///
    /// No process listens, or another one does.
    pub fn connect(&self) -> Result<UnixStream, Error> {
        let stranger = || Error::Stranger { path: self.path.clone(), pid: self.pid, owner: self.owner };
        // The path is resolved once, because a symbolic link could lead to another program's socket.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(&self.path, flags, Mode::empty()).map_err(io::Error::from)?;
        let found = rustix::fs::fstat(&file).map_err(io::Error::from)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket || found.st_uid != self.owner {
            return Err(stranger());
        }
        let stream = connect_now(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())))?;
        // A peer in another PID namespace has id 0 here, which rustix's type excludes.
        let peer = nix::sys::socket::getsockopt(&stream, nix::sys::socket::sockopt::PeerCredentials);
        let peer = peer.map_err(io::Error::from)?;
        let is_expected = peer.uid() == self.owner && u32::try_from(peer.pid()).ok() == Some(self.pid);
        if is_expected { Ok(stream) } else { Err(stranger()) }
    }
}

/// Returns the sockets of all servers that this user may use. Root sees those of all users.
#[must_use]
pub fn sockets() -> Vec<Endpoint> {
    endpoints("")
}

/// The same for managers.
#[must_use]
pub fn managers() -> Vec<Endpoint> {
    endpoints(MANAGER)
}

/// Returns the sockets whose names end so.
fn endpoints(suffix: &str) -> Vec<Endpoint> {
    let user = rustix::process::geteuid();
    let own = own().ok();
    let mut found: Vec<_> =
        own.iter().flat_map(|directory| endpoints_in(directory, user.as_raw(), suffix, usize::MAX)).collect();
    if user.is_root() {
        let of_users = entries(Path::new(USERS_DIR)).map(|user| (number_at(&user, ""), user.join("ferry")));
        let in_tmp = entries(Path::new("/tmp")).map(|path| (number_at(&path, "ferry-"), path));
        for (owner, directory) in of_users.chain(in_tmp) {
            if let Some(owner) = owner.filter(|owner| check(&directory, *owner).is_ok()) {
                found.extend(endpoints_in(&directory, owner, suffix, NAMES_MAX));
            }
        }
    }
    found
}

/// Returns the sockets in a directory, among its first names.
fn endpoints_in(directory: &Path, owner: u32, suffix: &str, names_max: usize) -> impl Iterator<Item = Endpoint> {
    entries(directory).take(names_max).filter_map(move |path| {
        let pid = number(path.file_name()?.to_str()?.strip_suffix(suffix)?)?;
        let is_socket = fs::symlink_metadata(&path).is_ok_and(|found| found.file_type().is_socket());
        is_socket.then_some(Endpoint { pid, owner, path })
    })
}

/// Returns the number in the name of a file, after a prefix.
fn number_at(path: &Path, prefix: &str) -> Option<u32> {
    number(path.file_name()?.to_str()?.strip_prefix(prefix)?)
}

/// Parses a number that is written as Ferry writes it: `07` and `+7` would be further names of 7.
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number: &u32| number.to_string() == text)
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(directory).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_client_connects_only_to_the_process_named_by_the_path() {
        let directory = tempfile::tempdir().expect("a directory");
        let (pid, owner) = (std::process::id(), rustix::process::geteuid().as_raw());
        let at = |name: &str| directory.path().join(name);
        let _listener = std::os::unix::net::UnixListener::bind(at("s")).expect("a free path");
        std::os::unix::fs::symlink(at("s"), at("link")).expect("a link");
        fs::write(at("file"), "").expect("a file");
        let connect = |name: &str, pid, owner| Endpoint { pid, owner, path: at(name) }.connect();
        connect("s", pid, owner).expect("this process listens");
        for (name, pid, owner) in [("s", 1, owner), ("s", pid, owner + 1), ("link", pid, owner), ("file", pid, owner)] {
            let error = connect(name, pid, owner).expect_err(name);
            assert!(matches!(error, Error::Stranger { .. }), "{name}: {error}");
        }
    }

    /// A stopped server, as by Ctrl-Z or a debugger, must not block the start and listing of others.
    #[test]
    fn a_server_that_accepts_no_connections_does_not_block() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(std::process::id().to_string());
        let _listener = std::os::unix::net::UnixListener::bind(&path).expect("a free path");
        let mut waiting = Vec::new();
        let full = loop {
            match connect_now(&path) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), ErrorKind::TimedOut);
        let (sender, receiver) = std::sync::mpsc::channel();
        let dir = directory.path().to_owned();
        std::thread::spawn(move || {
            remove_dead_now(&dir);
            let endpoint = Endpoint { pid: std::process::id(), owner: rustix::process::geteuid().as_raw(), path };
            let _ = sender.send(endpoint.connect());
        });
        let outcome = receiver.recv_timeout(std::time::Duration::from_secs(10)).expect("at once");
        assert!(outcome.is_err_and(|error| error.to_string().contains("is it stopped?")));
        assert!(directory.path().join(std::process::id().to_string()).exists());
    }

    #[test]
    fn servers_of_one_manager_look_for_dead_sockets_once() {
        let directory = tempfile::tempdir().expect("a directory");
        // Above the kernel's limit of process ids.
        let path = directory.path().join("4194305");
        let is_removed = |remove: fn(&Path)| {
            drop(std::os::unix::net::UnixListener::bind(&path).expect("a free path"));
            remove(directory.path());
            fs::remove_file(&path).is_err()
        };
        assert!(is_removed(remove_dead_now));
        is_removed(remove_dead);
        assert!(!is_removed(remove_dead));
    }

    /// A user cannot make root's listing long.
    #[test]
    fn a_process_has_one_socket_and_a_directory_a_few() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let _listener = std::os::unix::net::UnixListener::bind(at("7")).expect("a free path");
        for other in ["07", "007", "+7", "7.manager", "07.manager", "x", "4294967296"] {
            fs::hard_link(at("7"), at(other)).expect("a link");
        }
        fs::write(at("8"), "").expect("a file");
        let found = |suffix, names_max| -> Vec<_> {
            endpoints_in(directory.path(), 1, suffix, names_max).map(|found| (found.pid, found.owner)).collect()
        };
        assert_eq!((found("", usize::MAX), found(MANAGER, usize::MAX)), (vec![(7, 1)], vec![(7, 1)]));
        (100..200).for_each(|pid| fs::hard_link(at("7"), at(&pid.to_string())).expect("a link"));
        assert_eq!(found("", usize::MAX).len(), 101);
        assert!((1..=20).contains(&found("", 20).len()));
    }

    #[test]
    fn directories_that_others_can_enter_are_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ferry-1");
        let uid = rustix::process::geteuid().as_raw();
        fs::create_dir(&path).expect("a directory");
        for (mode, good) in [(0o700, true), (0o710, false), (0o777, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
            assert_eq!(check(&path, uid).is_ok(), good, "{mode:o}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("it is ours");
        assert!(check(&path, uid + 1).is_err());
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        assert!(check(&link, uid).is_err());
    }
}
