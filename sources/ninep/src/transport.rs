//! Transports: how to connect to a server.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags};
use socket2::{Domain, SockAddr, SockRef, Socket, TcpKeepalive, Type};

/// The idle time before the first keepalive probe, the interval, and the number of probes. A wait for a lock has no time
/// limit, so only these find out that the server's machine is gone: after two minutes, when the server has dropped the locks.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_COUNT: u32 = 4;

/// Connects to a server, also after a lost connection.
pub trait Transport: fmt::Debug + Send + Sync + 'static {
    /// Connects. Neither this nor a write to the stream may take longer than `timeout`.
    ///
    /// # Errors
    /// The server cannot be reached.
    fn connect(&self, timeout: Duration) -> io::Result<Stream>;

    /// Returns the address for messages, such as `tcp:HOST:PORT`.
    fn address(&self) -> String;
}

/// A connection: a half for each direction, which are used by different threads at the same time.
pub struct Stream {
    /// From the server.
    pub reader: Box<dyn Read + Send>,
    /// To the server.
    pub writer: Box<dyn Write + Send>,
    /// Closes both halves, which wakes waiting threads.
    pub hang_up: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

/// A unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unix(pub PathBuf);

impl Unix {
    /// Returns the address of the socket. A path longer than an address holds is reached by its directory, which is
    /// open only until the connection, because the server may recreate it.
    fn socket_address(&self) -> io::Result<(SockAddr, Option<OwnedFd>)> {
        let short = SockAddr::unix(&self.0);
        let (Err(_), Some(directory), Some(name)) = (&short, self.0.parent(), self.0.file_name()) else {
            return Ok((short?, None));
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, directory, flags, Mode::empty())?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd())).join(name);
        Ok((SockAddr::unix(path)?, Some(directory)))
    }
}

impl Transport for Unix {
    fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // The timeout applies to connect, too, which waits while the server's backlog is full. A non-blocking connect
        // would fail at once, with nothing to poll for.
        socket.set_write_timeout(Some(timeout))?;
        let (address, _directory) = self.socket_address()?;
        socket.connect(&address).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "it takes no connections"),
            _ => error,
        })?;
        let stream = UnixStream::from(OwnedFd::from(socket));
        let (writer, other) = (stream.try_clone()?, stream.try_clone()?);
        let hang_up = Box::new(move || drop(other.shutdown(Shutdown::Both)));
        Ok(Stream { reader: Box::new(stream), writer: Box::new(writer), hang_up })
    }

    fn address(&self) -> String {
        format!("unix:{}", self.0.display())
    }
}

/// A TCP port of a host, by name or number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tcp {
    /// The host; an IPv6 address without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl Tcp {
    /// Connects to one of the host's addresses; also limits writes to `timeout`.
    pub(crate) fn socket(&self, timeout: Duration) -> io::Result<TcpStream> {
        let mut failed = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, timeout) {
                Ok(stream) if is_loop(&stream) => failed = io::ErrorKind::ConnectionRefused.into(),
                Ok(stream) => {
                    // Requests are written whole: waiting for more to fill a segment only delays them.
                    stream.set_nodelay(true)?;
                    stream.set_write_timeout(Some(timeout))?;
                    let probes = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
                    let socket = SockRef::from(&stream);
                    socket.set_tcp_keepalive(&probes.with_retries(KEEPALIVE_COUNT))?;
                    // Linux sends no probes while data are unacknowledged.
                    socket.set_tcp_user_timeout(Some(KEEPALIVE_IDLE + KEEPALIVE_INTERVAL * KEEPALIVE_COUNT))?;
                    return Ok(stream);
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }
}

impl Transport for Tcp {
    fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        let stream = self.socket(timeout)?;
        let (reader, writer) = (stream.try_clone()?, stream.try_clone()?);
        Ok(Stream { reader: Box::new(reader), writer: Box::new(writer), hang_up: ended_by(stream) })
    }

    fn address(&self) -> String {
        match self.host.contains(':') {
            true => format!("tcp:[{}]:{}", self.host, self.port),
            false => format!("tcp:{}:{}", self.host, self.port),
        }
    }
}

/// Returns whether a socket is connected to itself, which can happen to a port of the ephemeral range.
fn is_loop(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(here), Ok(there)) if here == there)
}

/// Returns a function that shuts a socket down.
pub(crate) fn ended_by(socket: TcpStream) -> Box<dyn Fn() + Send + Sync> {
    Box::new(move || drop(socket.shutdown(Shutdown::Both)))
}

/// A vsock port of a virtual machine or its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vsock {
    /// The context identifier: 1 is this machine, 2 its host.
    pub cid: u32,
    /// The port.
    pub port: u32,
}

impl Transport for Vsock {
    fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
        socket.connect_timeout(&SockAddr::vsock(self.cid, self.port), timeout)?;
        socket.set_write_timeout(Some(timeout))?;
        let (writer, other) = (socket.try_clone()?, socket.try_clone()?);
        let hang_up = Box::new(move || drop(other.shutdown(Shutdown::Both)));
        Ok(Stream { reader: Box::new(socket), writer: Box::new(writer), hang_up })
    }

    fn address(&self) -> String {
        format!("vsock:{}:{}", self.cid, self.port)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_with_a_long_path_is_reached() {
        let directory = tempfile::tempdir().unwrap();
        let long = directory.path().join("x".repeat(100));
        std::fs::create_dir(&long).unwrap();
        let directory = std::fs::File::open(&long).unwrap();
        let short = format!("/proc/self/fd/{}/s", directory.as_raw_fd());
        let _listener = UnixListener::bind(short).unwrap();
        Unix(long.join("s")).connect(Duration::from_secs(5)).unwrap();
        let missing = Unix(long.join("t")).connect(Duration::from_secs(5)).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_server_whose_machine_is_gone_is_noticed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Tcp { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
        let stream = server.socket(Duration::from_secs(5)).unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        let after = socket.tcp_keepalive_time().unwrap()
            + socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        assert_eq!(after, Duration::from_secs(120));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(after), "also while data are unacknowledged");
    }

    #[test]
    fn a_socket_connected_to_itself_is_detected() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        socket.connect(&socket.local_addr().unwrap()).unwrap();
        assert!(is_loop(&socket.into()));

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!is_loop(&TcpStream::connect(listener.local_addr().unwrap()).unwrap()));
    }
}
