//! The unix sockets that servers listen on: created here, or inherited.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry_vhost::{Socket, SocketError};
use rustix::net::AddressFamily;

use crate::service_manager;

/// The time in which a killed server ends.
const RETRY_TIME: Duration = Duration::from_secs(2);
/// The interval of retries in that time.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A listening socket. The file of a created one is removed with it.
#[derive(Debug)]
pub enum ListenSocket {
    Made(Socket),
    Inherited(UnixListener),
}

impl ListenSocket {
    /// Listens on a path. Replaces a socket file without a listener.
    pub fn bind(path: &Path) -> Result<Self> {
        Self::bind_for(path, None)
    }

    /// The same, and lets a group connect, by its name or number.
    pub fn bind_for(path: &Path, group: Option<&str>) -> Result<Self> {
        if let Some(listener) = service_manager::passed_unix(path) {
            ensure!(
                group.is_none(),
                "--socket-group: the service manager has made the socket {}: write SocketGroup= in its socket unit",
                path.display()
            );
            return Ok(Self::Inherited(listener));
        }
        let gid = group.map(number_of).transpose()?;
        let in_use = |error: &SocketError| matches!(error, SocketError::InUse(_));
        Ok(Self::Made(retry_in_use(|| Socket::bind_for(path, gid), in_use)?))
    }

    /// Takes over a listening socket that this process has inherited.
    pub fn inherit(number: u16) -> Result<Self> {
        let fd = service_manager::inherited(number)?;
        let what = format!("descriptor {number}");
        let listening = rustix::net::sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX)
            && rustix::net::sockopt::socket_acceptconn(&fd) == Ok(true);
        ensure!(listening, "{what} is not a listening unix socket; bind and listen before starting ferry");
        Ok(Self::Inherited(fd.into()))
    }

    /// Serves in place of the process that created the socket, which removes its file.
    pub fn take_over(&mut self) -> Result<()> {
        match self {
            Self::Made(socket) => Ok(socket.take_over()?),
            Self::Inherited(_) => Ok(()),
        }
    }

    /// Leaves its file to another process.
    pub fn leave(&mut self) {
        if let Self::Made(socket) = self {
            socket.leave_file();
        }
    }

    /// Returns the socket, for a server.
    pub fn listener(&self) -> Result<UnixListener> {
        match self {
            Self::Made(socket) => Ok(socket.listener()?),
            Self::Inherited(listener) => listener.try_clone().context("cannot use the inherited socket"),
        }
    }
}

/// Retries for a while if a socket is in use: a server may take a moment to end after the process that the user killed.
pub fn retry_in_use<T, E>(mut make: impl FnMut() -> Result<T, E>, in_use: impl Fn(&E) -> bool) -> Result<T, E> {
    let end = Instant::now() + RETRY_TIME;
    loop {
        match make() {
            Err(error) if in_use(&error) && Instant::now() < end => std::thread::sleep(RETRY_INTERVAL),
            outcome => return outcome,
        }
    }
}

/// Returns the number of a group.
fn number_of(group: &str) -> Result<u32> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let found = nix::unistd::Group::from_name(group).with_context(|| format!("cannot look up the group {group}"))?;
    Ok(found.with_context(|| format!("there is no group {group:?} on this host"))?.gid.as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!((number_of("root").ok(), number_of("77").ok()), (Some(0), Some(77)));
        let error = number_of("no such group").expect_err("there is none").to_string();
        assert!(error.contains("no such group"), "{error}");
    }

    #[test]
    fn closed_descriptors_cannot_be_inherited() {
        let error = ListenSocket::inherit(999).expect_err("not open").to_string();
        assert!(error.contains("descriptor 999 is not open"), "{error}");
    }
}
