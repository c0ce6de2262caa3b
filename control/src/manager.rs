//! The socket of a manager: the process that starts and ends servers on request.
//!
//! A manager has one thread, because it forks. So nothing here waits: clients may send their request slowly and in pieces, and the
//! caller polls [`ManagerSocket::descriptors`].

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use ferry_vhost::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::{Error, FileName, Reply, socket_dir};

/// The maximum length of a request in bytes: a command line with a dozen paths of 4096 bytes as lists of numbers.
const REQUEST_BYTES_MAX: usize = 256 << 10;
/// The maximum time for a request. Clients send it at once.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long no client is accepted after one could not be.
const PAUSE: Duration = Duration::from_secs(1);
/// The maximum number of clients whose request is incomplete; others wait in the backlog of the socket.
const CLIENTS_MAX: usize = 8;

/// A request to a manager, as one line. The reply is a [`Reply`] with a list of sentences about the new state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ManagerRequest {
    /// Adds a share or disk.
    Add {
        /// `share` or `disk`, and the rest of its command line.
        words: Vec<FileName>,
        /// The base of relative paths.
        directory: FileName,
    },
    /// Ends the server of a share or disk.
    Remove {
        /// The process whose control socket reports it.
        pid: u32,
        /// The index in [`crate::Status::shares`]; `None`: the only one.
        share: Option<usize>,
        /// Whether to remove it while clients are connected.
        force: bool,
    },
    /// Reads the configuration file again, and serves what it lists.
    Reload {
        /// Whether to remove shares and disks while clients are connected.
        force: bool,
    },
}

/// A client whose request is complete.
#[derive(Debug)]
pub struct ManagerClient(UnixStream);

impl ManagerClient {
    /// Whether it has disconnected and needs no reply. One that only sends no more still reads.
    #[must_use]
    pub fn has_gone(&self) -> bool {
        // HUP and ERR are always reported.
        let mut polled = [PollFd::new(&self.0, PollFlags::empty())];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }

    /// Sends the reply, without waiting for a client that does not read.
    pub fn reply(mut self, result: Result<Vec<String>, String>) {
        let reply = match result {
            Ok(outcomes) => Reply::Ok(outcomes),
            Err(error) => Reply::Error(error),
        };
        let sent = serde_json::to_vec(&reply).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.0.write_all(&line)
        });
        if let Err(error) = sent {
            tracing::debug!("a client of the manager: {error}");
        }
    }
}

/// A client whose request is incomplete.
#[derive(Debug)]
struct Incomplete {
    stream: UnixStream,
    bytes: Vec<u8>,
    end: Instant,
}

/// The listening socket of a manager, and its clients. The file is removed when this is dropped.
#[derive(Debug)]
pub struct ManagerSocket {
    socket: Socket,
    listener: UnixListener,
    /// No client is accepted before this time.
    paused: Option<Instant>,
    clients: Vec<Incomplete>,
}

impl ManagerSocket {
    /// Creates the socket of this process.
    ///
    /// # Errors
    /// The directory of this user's servers cannot be used.
    pub fn bind() -> Result<Self, Error> {
        let directory = socket_dir::own()?;
        socket_dir::remove_dead(&directory);
        let socket = Socket::bind(&directory.join(socket_dir::manager_name(std::process::id())))?;
        let listener = socket.listener()?;
        listener.set_nonblocking(true)?;
        Ok(Self { socket, listener, paused: None, clients: Vec::new() })
    }

    /// Closes it in a child of the manager.
    pub fn leave(mut self) {
        self.socket.leave_file();
    }

    /// Returns the descriptors that become readable when [`Self::requests`] must be called.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let accepts = self.paused.is_none() && self.clients.len() < CLIENTS_MAX;
        let listener = accepts.then(|| self.listener.as_fd());
        listener.into_iter().chain(self.clients.iter().map(|client| client.stream.as_fd()))
    }

    /// Returns the time until [`Self::requests`] must be called even if nothing becomes readable.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        let ends = self.clients.iter().map(|client| client.end).chain(self.paused);
        ends.min().map(|end| end.saturating_duration_since(Instant::now()))
    }

    /// Accepts clients and reads their input; returns the complete requests. `may_access` returns whether a user has access.
    pub fn requests(&mut self, may_access: fn(u32) -> bool) -> Vec<(ManagerRequest, ManagerClient)> {
        self.paused.take_if(|end| *end <= Instant::now());
        while self.paused.is_none() && self.clients.len() < CLIENTS_MAX {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    // Such as EMFILE: the listener stays readable.
                    tracing::warn!("cannot accept a client of ferry add, remove or reload: {error}");
                    self.paused = Some(Instant::now() + PAUSE);
                    break;
                }
            };
            match admitted(&stream, may_access) {
                Ok(()) => self.clients.push(Incomplete { stream, bytes: Vec::new(), end: Instant::now() + TIMEOUT }),
                Err(error) => ManagerClient(stream).reply(Err(error.to_string())),
            }
        }
        let mut complete = Vec::new();
        for mut client in std::mem::take(&mut self.clients) {
            match client.read() {
                Some(Ok(request)) => complete.push((request, ManagerClient(client.stream))),
                Some(Err(why)) => ManagerClient(client.stream).reply(Err(why)),
                None => self.clients.push(client),
            }
        }
        complete
    }
}

/// Checks that a client has access; makes its socket nonblocking.
fn admitted(stream: &UnixStream, may_access: fn(u32) -> bool) -> Result<(), Error> {
    stream.set_nonblocking(true)?;
    // The peer's process may have no id in this namespace, which rustix does not allow for.
    let peer = nix::sys::socket::getsockopt(stream, nix::sys::socket::sockopt::PeerCredentials);
    let peer = peer.map_err(io::Error::from)?.uid();
    if may_access(peer) { Ok(()) } else { Err(Error::NoAccess(peer)) }
}

impl Incomplete {
    /// Returns the request or an error, once it is complete.
    fn read(&mut self) -> Option<Result<ManagerRequest, String>> {
        let mut piece = [0; 4096];
        while self.bytes.len() < REQUEST_BYTES_MAX && !self.bytes.contains(&b'\n') {
            match self.stream.read(&mut piece) {
                Ok(0) => return Some(parse(&self.bytes)),
                Ok(count) => self.bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < self.end => return None,
                Err(error) => return Some(Err(format!("the request did not arrive: {error}"))),
            }
        }
        Some(parse(&self.bytes))
    }
}

/// Parses the first line.
fn parse(bytes: &[u8]) -> Result<ManagerRequest, String> {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    serde_json::from_slice(line).map_err(|error| Error::InvalidRequest(error).to_string())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use super::*;

    fn requests() -> [ManagerRequest; 3] {
        [
            ManagerRequest::Add {
                words: vec![FileName(b"share".to_vec()), FileName(vec![0xff, b'/'])],
                directory: FileName(b"/srv".to_vec()),
            },
            ManagerRequest::Remove { pid: 7, share: None, force: true },
            ManagerRequest::Reload { force: false },
        ]
    }

    /// A socket in a directory of its own, and the directory.
    fn socket() -> (ManagerSocket, tempfile::TempDir) {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = Socket::bind(&directory.path().join("s")).expect("a free path");
        let listener = socket.listener().expect("a descriptor");
        listener.set_nonblocking(true).expect("a socket");
        (ManagerSocket { socket, listener, paused: None, clients: Vec::new() }, directory)
    }

    fn connect(directory: &tempfile::TempDir) -> UnixStream {
        UnixStream::connect(directory.path().join("s")).expect("it listens")
    }

    fn answer(client: UnixStream) -> String {
        client.set_read_timeout(Some(Duration::from_secs(10))).expect("a socket");
        let mut line = String::new();
        BufReader::new(client).read_line(&mut line).expect("an answer");
        line
    }

    #[test]
    fn requests_arrive_in_any_pieces() {
        for request in requests() {
            let line = serde_json::to_vec(&request).expect("it is text");
            assert_eq!(parse(&line).as_ref(), Ok(&request));
            let (mut manager, directory) = socket();
            let mut client = connect(&directory);
            for byte in &line {
                assert!(manager.requests(|_| true).is_empty());
                client.write_all(&[*byte]).expect("it reads");
            }
            assert!(manager.requests(|_| true).is_empty() && manager.left().is_some());
            client.write_all(b"\nmore").expect("it reads");
            let (came, from) = manager.requests(|_| true).pop().expect("a request");
            client.shutdown(std::net::Shutdown::Write).expect("a socket");
            assert_eq!((came, from.has_gone()), (request, false));
            from.reply(Ok(vec!["done".into()]));
            assert_eq!(answer(client), "{\"ok\":[\"done\"]}\n");
            assert_eq!((manager.left(), manager.descriptors().count()), (None, 1));
        }
    }

    /// As when no descriptor is left: the listener stays readable, and the manager must not try again and again.
    #[test]
    fn a_manager_that_cannot_accept_pauses() {
        let (mut manager, directory) = socket();
        // On it, accept(2) fails.
        let (unusable, _other) = UnixStream::pair().expect("descriptors");
        let listener = std::mem::replace(&mut manager.listener, std::os::fd::OwnedFd::from(unusable).into());
        assert!(manager.requests(|_| true).is_empty());
        assert_eq!(manager.descriptors().count(), 0);
        assert!(manager.left().is_some_and(|left| left <= PAUSE));
        let mut client = connect(&directory);
        client.write_all(b"{\"do\":\"reload\",\"force\":true}\n").expect("it waits");
        manager.listener = listener;
        assert!(manager.requests(|_| true).is_empty(), "not yet");
        std::thread::sleep(PAUSE);
        assert_eq!(manager.left(), Some(Duration::ZERO));
        assert_eq!(manager.requests(|_| true).len(), 1);
        assert_eq!((manager.left(), manager.descriptors().count()), (None, 1));
    }

    #[test]
    fn invalid_requests_and_other_users_are_refused_without_delay() {
        let (mut manager, directory) = socket();
        let endless = vec![b'x'; 4 * REQUEST_BYTES_MAX];
        for bytes in
            [&b"{\n"[..], b"\xff\xff\n", b"{\"do\":\"reload\"}\n", b"{\"do\":\"sail\",\"force\":true}\n", b"\n"]
        {
            let mut client = connect(&directory);
            client.write_all(bytes).expect("it reads");
            assert!(manager.requests(|_| true).is_empty());
            assert!(answer(client).starts_with("{\"error\":\"invalid request"), "{bytes:?}");
        }
        let client = connect(&directory);
        let mut sender = client.try_clone().expect("a descriptor");
        let sends = std::thread::spawn(move || sender.write_all(&endless));
        while !sends.is_finished() {
            assert!(manager.requests(|_| true).is_empty());
        }
        assert!(answer(client).starts_with("{\"error\":\"invalid request"));
        sends.join().expect("it ends").expect_err("the manager has left it");
        let mut client = connect(&directory);
        client.write_all(b"{\"do\":\"reload\",\"force\":true}\n").expect("it reads");
        drop(client);
        assert!(manager.requests(|_| true).pop().is_some_and(|(_, client)| client.has_gone()));
        let client = connect(&directory);
        assert!(manager.requests(|_| false).is_empty());
        assert!(answer(client).contains("has no access"));
        // Silent clients occupy places until their timeout; others wait.
        let silent: Vec<_> = (0..CLIENTS_MAX).map(|_| connect(&directory)).collect();
        manager.requests(|_| true);
        assert_eq!(manager.descriptors().count(), CLIENTS_MAX);
        drop(silent);
        let mut client = connect(&directory);
        client.write_all(b"{\"do\":\"reload\",\"force\":true}\n").expect("it waits");
        manager.requests(|_| true);
        assert_eq!(manager.requests(|_| true).len(), 1);
    }
}
