//! The metrics over HTTP, on a loopback address or a unix socket: `GET /metrics`.
//!
//! One thread serves all clients. A client that exceeds its bytes or its time is dropped. When there are too many, so is the oldest one
//! whose request is incomplete. So silent or invalid clients cost little, and exclude no others.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferry_vhost::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketFlags, accept_with, send};

use crate::openmetrics::{MetricsFormat, metrics_text};
use crate::{Error, ServedShare, ServerReport};

/// The maximum number of clients: a few collectors, and users.
const CLIENTS_MAX: usize = 8;
/// The maximum length of a request in bytes: collectors send some hundred.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// The maximum time for a request and its reply.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failed accept, so that a permanent failure (no descriptors) does not use a whole CPU.
const PAUSE: Duration = Duration::from_millis(100);
/// The prefix of the path of a socket.
const UNIX: &str = "unix:";

/// The address of the metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address of this machine only.
    Loopback(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

/// An invalid address for metrics.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetricsAddressError {
    /// It is neither a loopback address nor a socket.
    #[error("{0:?} is not an address for metrics: choose 127.0.0.1:PORT, [::1]:PORT or unix:PATH")]
    Unknown(String),
    /// Other machines could connect.
    #[error(
        "{0} can be reached from other machines, and metrics are served to every client that connects: choose 127.0.0.1:PORT, [::1]:PORT or \
         unix:PATH, and put a proxy that checks its clients before it"
    )]
    Remote(SocketAddr),
}

impl FromStr for MetricsAddress {
    type Err = MetricsAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || MetricsAddressError::Unknown(text.into());
        if let Some(path) = text.strip_prefix(UNIX) {
            return if path.is_empty() { Err(unknown()) } else { Ok(Self::Unix(path.into())) };
        }
        let local = text.strip_prefix("localhost:").and_then(|port| port.parse().ok());
        let local = local.map(|port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
        match local.or_else(|| text.parse().ok()).ok_or_else(unknown)? {
            address if address.ip().is_loopback() => Ok(Self::Loopback(address)),
            address => Err(MetricsAddressError::Remote(address)),
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loopback(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

impl MetricsAddress {
    /// Makes a path relative to a directory.
    pub fn resolve(&mut self, directory: &Path) {
        if let Self::Unix(path) = self {
            *path = directory.join(&path);
        }
    }
}

/// A listening socket for metrics. Create it before the sandbox hides paths and the network.
#[derive(Debug)]
pub struct MetricsSocket {
    listener: OwnedFd,
    /// Removes its file when dropped.
    file: Option<Socket>,
}

impl MetricsSocket {
    /// Listens; a unix socket is for this user only.
    ///
    /// # Errors
    /// [`Error::Metrics`]: the address is in use, or not this machine's; [`Error::Socket`].
    pub fn bind(address: &MetricsAddress) -> Result<Self, Error> {
        match address {
            MetricsAddress::Loopback(address) => {
                let failed = |reason| Error::Metrics { address: *address, reason };
                let listener = TcpListener::bind(address).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                tracing::info!("metrics at http://{}/metrics", listener.local_addr().map_err(failed)?);
                Ok(Self { listener: listener.into(), file: None })
            }
            MetricsAddress::Unix(path) => {
                let socket = Socket::bind(path)?;
                let listener = socket.listener()?;
                listener.set_nonblocking(true)?;
                Ok(Self { listener: listener.into(), file: Some(socket) })
            }
        }
    }

    /// Has another process remove its file.
    pub fn leave_file(&mut self) {
        self.file.iter_mut().for_each(Socket::leave_file);
    }
}

/// Serves metrics until it is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    socket: Arc<MetricsSocket>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Starts the thread; `pid` is the process id as clients see it.
    ///
    /// # Errors
    /// [`Error`]: there is no thread.
    pub fn start(socket: MetricsSocket, shares: Arc<[ServedShare]>, pid: fn() -> u32) -> Result<Self, Error> {
        let (socket, ended, started) = (Arc::new(socket), Arc::<AtomicBool>::default(), Instant::now());
        let (listening, end) = (Arc::clone(&socket), Arc::clone(&ended));
        let report = move |format| metrics_text(&[ServerReport::of(&shares, pid(), started)], format, false);
        let serve = move || serve(&listening.listener, &end, &report);
        let thread = Some(std::thread::Builder::new().name("metrics".into()).spawn(serve)?);
        Ok(Self { socket, ended, thread })
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // Wakes the thread, which then ends.
        if let Err(error) = rustix::net::shutdown(&self.socket.listener, rustix::net::Shutdown::Both) {
            tracing::debug!("the socket for metrics: {error}");
        }
        // It holds the shares, which end next. A panic there was logged.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A client and its progress.
struct Client {
    stream: OwnedFd,
    /// The time at which it is dropped.
    end: Instant,
    request: Vec<u8>,
    /// The reply, and the number of its bytes that were sent.
    reply: Option<(Vec<u8>, usize)>,
}

fn serve(listener: &OwnedFd, ended: &AtomicBool, report: &dyn Fn(MetricsFormat) -> String) {
    let mut clients: Vec<Client> = Vec::new();
    while !ended.load(Ordering::Acquire) {
        let now = Instant::now();
        clients.retain(|client| client.end > now);
        let wait = clients.iter().map(|client| client.end - now).min();
        let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
        let mut polled = vec![PollFd::new(listener, PollFlags::IN)];
        polled.extend(clients.iter().map(Client::polled));
        if poll(&mut polled, wait.as_ref()).is_err() {
            continue;
        }
        let ready: Vec<_> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        let mut ready_clients = ready[1..].iter();
        clients.retain_mut(|client| !ready_clients.next().is_some_and(|ready| *ready) || client.go_on(report));
        if ready[0] && !ended.load(Ordering::Acquire) {
            match accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(stream) => {
                    if clients.len() >= CLIENTS_MAX {
                        let incomplete = clients.iter().position(|client| client.reply.is_none());
                        clients.remove(incomplete.unwrap_or_default());
                    }
                    clients.push(Client { stream, end: now + TIMEOUT, request: Vec::new(), reply: None });
                }
                Err(Errno::AGAIN) => {}
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }
}

impl Client {
    fn polled(&self) -> PollFd<'_> {
        let flags = if self.reply.is_some() { PollFlags::OUT } else { PollFlags::IN };
        PollFd::new(&self.stream, flags)
    }

    /// Reads or writes without blocking; returns whether the client needs more.
    fn go_on(&mut self, report: &dyn Fn(MetricsFormat) -> String) -> bool {
        match self.try_go_on(report) {
            Ok(goes_on) => goes_on,
            Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
        }
    }

    fn try_go_on(&mut self, report: &dyn Fn(MetricsFormat) -> String) -> Result<bool, Errno> {
        if let Some((reply, sent)) = &mut self.reply {
            *sent += send(&self.stream, &reply[*sent..], SendFlags::NOSIGNAL)?;
            return Ok(*sent < reply.len());
        }
        let mut bytes = [0; 1024];
        let count = rustix::io::read(&self.stream, &mut bytes)?;
        self.request.extend_from_slice(&bytes[..count]);
        let is_whole = self.request.windows(4).any(|end| end == b"\r\n\r\n");
        if is_whole || self.request.len() > REQUEST_BYTES_MAX {
            self.reply = Some((reply_to(&self.request, is_whole, report), 0));
            return Ok(true);
        }
        Ok(count > 0)
    }
}

/// Returns the whole reply to a request, whose head must be complete.
fn reply_to(request: &[u8], is_whole: bool, report: &dyn Fn(MetricsFormat) -> String) -> Vec<u8> {
    let head = String::from_utf8_lossy(request).to_ascii_lowercase();
    let mut words = head.lines().next().unwrap_or_default().split(' ');
    let (method, path, version) = (words.next(), words.next(), words.next().unwrap_or_default());
    let accepts = |kind| head.lines().any(|line| line.starts_with("accept:") && line.contains(kind));
    let wants_older = accepts("text/plain") && !accepts("application/openmetrics-text");
    let (status, kind, body) = match (method, path) {
        _ if !is_whole => {
            ("431 Request Header Fields Too Large", "text/plain", "The request is too long.\n".to_owned())
        }
        _ if !version.starts_with("http/1.") => ("400 Bad Request", "text/plain", "This is not HTTP.\n".into()),
        (Some("get"), Some("/metrics")) => match wants_older {
            true => ("200 OK", "text/plain; version=0.0.4; charset=utf-8", report(MetricsFormat::Prometheus)),
            false => (
                "200 OK",
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
                report(MetricsFormat::OpenMetrics),
            ),
        },
        (Some("get"), _) => ("404 Not Found", "text/plain", "The metrics are at /metrics.\n".into()),
        _ => ("405 Method Not Allowed", "text/plain", "Only GET is served.\n".into()),
    };
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_local_addresses_are_accepted() {
        for (text, address) in [
            ("127.0.0.1:9100", Some(MetricsAddress::Loopback(([127, 0, 0, 1], 9100).into()))),
            ("127.8.0.1:1", Some(MetricsAddress::Loopback(([127, 8, 0, 1], 1).into()))),
            ("localhost:80", Some(MetricsAddress::Loopback(([127, 0, 0, 1], 80).into()))),
            ("unix:/run/m.sock", Some(MetricsAddress::Unix("/run/m.sock".into()))),
        ] {
            assert_eq!(text.parse().ok(), address, "{text}");
        }
        assert!("[::1]:9100".parse::<MetricsAddress>().is_ok());
        for (text, why) in [
            ("0.0.0.0:9100", "other machines"),
            ("[::]:9100", "other machines"),
            ("10.1.2.3:9100", "other machines"),
            ("9100", "not an address"),
            (":9100", "not an address"),
            ("unix:", "not an address"),
            ("example.org:9100", "not an address"),
            ("127.0.0.1:99999", "not an address"),
            ("", "not an address"),
        ] {
            let error = text.parse::<MetricsAddress>().expect_err(text).to_string();
            assert!(error.contains(why) && error.contains("127.0.0.1:PORT"), "{text}: {error}");
        }
    }

    #[test]
    fn silent_clients_do_not_displace_one_that_gets_its_reply() {
        use std::io::{Read, Write};
        use std::os::unix::net::{UnixListener, UnixStream};

        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).expect("a free path");
        listener.set_nonblocking(true).expect("a socket");
        let (listener, ended) = (OwnedFd::from(listener), AtomicBool::new(false));
        let received = std::thread::scope(|scope| {
            // More than the socket's buffer takes.
            scope.spawn(|| serve(&listener, &ended, &|_| "x".repeat(16 << 20)));
            let displace = || -> std::io::Result<_> {
                let mut collector = UnixStream::connect(&path)?;
                collector.set_read_timeout(Some(TIMEOUT))?;
                collector.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")?;
                let mut reply = vec![0; 1];
                collector.read_exact(&mut reply)?;
                let silent = (0..4 * CLIENTS_MAX).map(|_| UnixStream::connect(&path));
                let silent = silent.collect::<std::io::Result<Vec<_>>>()?;
                let mut displaced = &silent[2 * CLIENTS_MAX];
                displaced.set_read_timeout(Some(TIMEOUT))?;
                let count = displaced.read(&mut [0])?;
                collector.read_to_end(&mut reply)?;
                Ok((count, reply.len()))
            };
            let received = displace();
            ended.store(true, Ordering::Release);
            let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
            received
        });
        let (of_displaced, of_collector) = received.expect("a reply");
        assert!(of_displaced == 0 && of_collector > 16 << 20, "{of_displaced}, {of_collector}");
    }

    #[test]
    fn requests_get_the_matching_status() {
        let report = |format: MetricsFormat| format!("{format:?}");
        for (request, parts) in [
            (
                "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
                &["200 OK", "openmetrics-text; version=1.0.0", "\r\n\r\nOpenMetrics"][..],
            ),
            ("GET /metrics HTTP/1.0\r\nAccept: text/plain\r\n\r\n", &["200 OK", "version=0.0.4", "\r\n\r\nPrometheus"]),
            (
                "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;q=0.6,text/plain;q=0.3\r\n\r\n",
                &["200 OK", "\r\n\r\nOpenMetrics"],
            ),
            ("GET / HTTP/1.1\r\n\r\n", &["404 Not Found"]),
            ("POST /metrics HTTP/1.1\r\n\r\n", &["405 "]),
            ("\u{0}\u{1b}[2J\r\n\r\n", &["400 Bad Request"]),
            ("\r\n\r\n", &["400 Bad Request"]),
        ] {
            let reply = String::from_utf8(reply_to(request.as_bytes(), true, &report)).expect("text");
            assert!(parts.iter().all(|part| reply.contains(part)), "{request:?}: {reply:?}");
        }
    }
}
