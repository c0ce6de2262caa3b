//! The service manager that started this process, such as systemd: it passes listening sockets (sd_listen_fds(3)) and wants to be told
//! when the service is ready (sd_notify(3)).
//!
//! Both protocols are a few environment variables, so no library is needed. The notification socket is connected before the sandbox
//! hides its path. Only the process that the service manager knows keeps it: a server that reads what a guest says cannot reach the
//! manager. Passed sockets are matched with shares and disks by their addresses, so that one configuration file works with a
//! socket unit and without.

use std::fs;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result, anyhow, ensure};
use ferry_vfs::sync::lock;
use rustix::net::AddressFamily;

use crate::flags::{Address, Share};
use crate::output::say;
use crate::paths::start_dir;
use crate::status::misuse;

/// The number of the first passed descriptor (`SD_LISTEN_FDS_START`).
const FIRST_FD: u16 = 3;

/// More sockets than any unit passes; descriptors have 16-bit numbers in the flags, too.
const SOCKETS_MAX: u16 = 4096;

/// The connected notification socket, in the process that the service manager knows.
static NOTIFICATIONS: Mutex<Option<UnixDatagram>> = Mutex::new(None);

/// The socket of a disk: its path, or the number of its descriptor.
pub type DiskSocket<'a> = (Option<&'a Path>, Option<u16>);

/// The passed sockets: those of TCP that no share has taken yet, and all unix ones.
static SOCKETS: Mutex<Vec<Passed>> = Mutex::new(Vec::new());

/// A passed socket.
#[derive(Debug)]
enum Passed {
    Unix(PathBuf, UnixListener),
    Tcp(SocketAddr, TcpListener),
}

/// Connects to the service manager, if there is one that wants to be told.
pub fn connect() {
    *lock(&NOTIFICATIONS) = ferry_agent::notification_socket("this server is ready");
}

/// Tells the service manager that all is served that can be, and gives back what the start needed.
pub fn ready() {
    tell("READY=1");
    ferry_engine::release_startup_memory();
}

/// Notifies the service manager that this server is stopping, for whatever reason.
pub fn stopping() {
    tell("STOPPING=1");
}

fn tell(what: &str) {
    // Not send(2), which the filter of a process that waits for a sandboxed server does not allow.
    if let Some(socket) = &*lock(&NOTIFICATIONS)
        && let Err(error) = rustix::io::write(socket, what.as_bytes())
    {
        say(format_args!("cannot tell the service manager {what}: {error}"));
    }
}

/// Leaves the service manager to the process that it knows: to be called by a child that serves.
pub fn leave() {
    *lock(&NOTIFICATIONS) = None;
}

/// Takes over the sockets that the service manager passes, for the shares and disks that would listen at the same addresses. To be called
/// before this process opens descriptors of its own.
///
/// # Errors
/// A socket is passed that no share or disk listens on, or that is of no use.
pub fn inherit<'a>(shares: &[Share], disks: impl Iterator<Item = DiskSocket<'a>> + Clone) -> Result<()> {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let (pid, count) = (variable("LISTEN_PID"), variable("LISTEN_FDS"));
    // Otherwise these are of another process, which has started this one.
    if pid != std::process::id().to_string() {
        return Ok(());
    }
    let count = count.parse::<u16>().ok().filter(|count| *count <= SOCKETS_MAX);
    let count = count
        .with_context(|| format!("LISTEN_FDS={}: this is not a number up to {SOCKETS_MAX}", variable("LISTEN_FDS")))?;
    let by_number: Vec<u16> =
        shares.iter().filter_map(|share| share.fd).chain(disks.clone().filter_map(|(_, fd)| fd)).collect();
    let wanted = Wanted::of(shares, disks);
    for number in (FIRST_FD..FIRST_FD + count).filter(|number| !by_number.contains(number)) {
        let passed = Passed::from(number, inherited(number)?)?;
        ensure_wanted(&wanted, number, &passed).map_err(misuse)?;
        lock(&SOCKETS).push(passed);
    }
    Ok(())
}

/// Takes over an inherited descriptor, which children of this process do not inherit. The caller takes each number once, before this
/// process opens descriptors of its own.
pub fn inherited(number: u16) -> Result<OwnedFd> {
    let what = format!("descriptor {number}");
    let taken = format!("/proc/self/fd/{number}");
    ensure!(
        number > 2 && fs::symlink_metadata(taken).is_ok(),
        "{what} is not open; start ferry with a listening unix socket as {what}"
    );
    // SAFETY: from_raw_fd needs an open descriptor that nothing else owns. It is open: that was just seen. It was
    // inherited, and the caller takes each number once, before this process opens descriptors of its own.
    let fd = unsafe { OwnedFd::from_raw_fd(RawFd::from(number)) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).with_context(|| format!("cannot use {what}"))?;
    Ok(fd)
}

/// Closes the sockets that no share or disk of this process takes: they are another child's.
pub fn close_sockets() {
    lock(&SOCKETS).clear();
}

/// Returns the passed socket of a path. It stays here, for a server that takes the place of another one.
pub fn passed_unix(path: &Path) -> Option<UnixListener> {
    lock(&SOCKETS).iter().find_map(|passed| match passed {
        Passed::Unix(other, listener) if is_same(other, path) => listener.try_clone().ok(),
        _ => None,
    })
}

/// Returns the passed socket of an address, once.
pub fn take_tcp(host: &str, port: u16) -> Option<TcpListener> {
    let mut sockets = lock(&SOCKETS);
    if sockets.is_empty() {
        return None;
    }
    let addresses = resolve(host, port);
    let at = sockets.iter().position(|passed| matches!(passed, Passed::Tcp(own, _) if addresses.contains(own)))?;
    match sockets.swap_remove(at) {
        Passed::Tcp(_, listener) => Some(listener),
        Passed::Unix(..) => None,
    }
}

/// Where shares and disks listen.
#[derive(Default)]
struct Wanted {
    paths: Vec<PathBuf>,
    addresses: Vec<SocketAddr>,
}

impl Wanted {
    fn of<'a>(shares: &[Share], disks: impl Iterator<Item = DiskSocket<'a>>) -> Self {
        let mut wanted = Self::default();
        for share in shares {
            wanted.paths.extend(share.virtiofs.clone());
            match &share.ninep {
                Some(Address::Unix(path) | Address::VhostUser(path)) => wanted.paths.push(path.clone()),
                Some(Address::Tcp(host, port) | Address::Tls(host, port)) => {
                    wanted.addresses.extend(resolve(host, *port));
                }
                Some(Address::Vsock(..)) | None => {}
            }
        }
        wanted.paths.extend(disks.filter_map(|(path, _)| path.map(Path::to_owned)));
        wanted
    }
}

/// What cannot be resolved is reported when it is listened on.
fn resolve(host: &str, port: u16) -> Vec<SocketAddr> {
    (host, port).to_socket_addrs().map(Iterator::collect).unwrap_or_default()
}

/// Whether two paths lead to one socket: `/var/run` may be a link to `/run`.
fn is_same(one: &Path, other: &Path) -> bool {
    let other = start_dir().join(other);
    let real = |path: &Path| path.canonicalize().ok();
    one == other || real(one).is_some_and(|one| real(&other) == Some(one))
}

fn ensure_wanted(wanted: &Wanted, number: u16, passed: &Passed) -> Result<()> {
    let (address, is_wanted) = match passed {
        Passed::Unix(path, _) => (path.display().to_string(), wanted.paths.iter().any(|other| is_same(path, other))),
        Passed::Tcp(address, _) => (format!("tcp:{address}"), wanted.addresses.contains(address)),
    };
    ensure!(
        is_wanted,
        "the service manager passes a socket at {address} (descriptor {number}), and no share or disk listens there: give one this \
         address, or fd = {number}"
    );
    Ok(())
}

impl Passed {
    fn from(number: u16, fd: OwnedFd) -> Result<Self> {
        let is_listening = rustix::net::sockopt::socket_acceptconn(&fd) == Ok(true);
        ensure!(
            is_listening,
            "descriptor {number} of the service manager is not a listening socket: use ListenStream= and Accept=no in the socket unit"
        );
        let family = rustix::net::sockopt::socket_domain(&fd).context("cannot use a passed socket")?;
        if family == AddressFamily::UNIX {
            let listener = UnixListener::from(fd);
            let address = listener.local_addr().context("cannot use a passed socket")?;
            let path = address
                .as_pathname()
                .ok_or_else(|| anyhow!("descriptor {number} of the service manager has no path"))?;
            return Ok(Self::Unix(path.to_owned(), listener));
        }
        ensure!(
            [AddressFamily::INET, AddressFamily::INET6].contains(&family),
            "descriptor {number} of the service manager is neither a unix nor a TCP socket"
        );
        let listener = TcpListener::from(fd);
        let address = listener.local_addr().context("cannot use a passed socket")?;
        Ok(Self::Tcp(address, listener))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_the_same_through_links() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let _listener = UnixListener::bind(&path).expect("a socket");
        std::os::unix::fs::symlink(directory.path(), directory.path().join("link")).expect("a link");
        assert!(is_same(&path, &path) && is_same(&path, &directory.path().join("link/s")));
        assert!(!is_same(&path, &directory.path().join("t")) && !is_same(Path::new("/no/a"), Path::new("/no/b")));
    }
}
