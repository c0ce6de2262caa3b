//! The server side of the control socket.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferry_engine::requests::{self, Filter};
use ferry_vhost::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::log::Lines;
use crate::shares::LOG;
use crate::timed_stream::TimedStream;
use crate::{
    Error, HeldInode, Logging, REPORT_VERSION, Reply, Request, ServedShare, ServerReport, Setting, Status, socket_dir,
};

/// The maximum length of a request in bytes: a path of 4096 bytes as a list of numbers, and the other fields.
const REQUEST_BYTES_MAX: u64 = 32 * 1024;
/// The maximum time for a request, a reply or a log line. Clients send and read at once.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of concurrent clients; more than follow one log in practice.
const CLIENTS_MAX: usize = 16;
/// The maximum number of followers of the log among them. Other clients disconnect soon, so `ferry status` always gets in.
const FOLLOWERS_MAX: usize = CLIENTS_MAX - 4;
/// The interval at which a silent follower's connection is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The pause after a failed accept, so that a permanent failure (no descriptors) does not use a whole CPU.
const PAUSE: Duration = Duration::from_millis(100);

/// A listening control socket; removed when dropped.
#[derive(Debug)]
pub struct Control {
    /// Removes its file when dropped.
    _socket: Socket,
    listener: UnixListener,
    ended: Arc<AtomicBool>,
}

/// The owner of a server.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The process id as its clients see it.
    pub pid: fn() -> u32,
    /// Returns whether a user has access.
    pub may_access: fn(u32) -> bool,
}

/// The owner is this process; root and its own user have access.
impl Default for Owner {
    fn default() -> Self {
        let may_access = |peer| peer == 0 || peer == rustix::process::geteuid().as_raw();
        Self { pid: std::process::id, may_access }
    }
}

impl Control {
    /// Creates the socket. On failure it logs a warning and the server runs without one.
    #[must_use]
    pub fn bind() -> Option<Socket> {
        let bind = || {
            let directory = socket_dir::own()?;
            socket_dir::remove_dead(&directory);
            Ok(Socket::bind(&directory.join(std::process::id().to_string()))?)
        };
        bind().map_err(|error| warn_unreachable(&error)).ok()
    }

    /// Starts listening if there is a socket.
    #[must_use]
    pub fn start(socket: Option<Socket>, shares: Arc<[ServedShare]>, logging: Logging, owner: Owner) -> Option<Self> {
        Self::listen(socket?, shares, logging, owner).map_err(|error| warn_unreachable(&error)).ok()
    }

    fn listen(socket: Socket, shares: Arc<[ServedShare]>, logging: Logging, owner: Owner) -> Result<Self, Error> {
        let listener = socket.listener()?;
        let accepting = socket.listener()?;
        let ended = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&ended);
        let own = LogSettings { level: logging.default_level().to_owned(), requests: None };
        let server = Arc::new(Server {
            shares,
            logging,
            owner,
            started: Instant::now(),
            clients: AtomicUsize::new(0),
            state: Mutex::new(State { own, followers: Vec::new(), followers_ever: 0 }),
        });
        let accept = move || {
            while !end.load(Ordering::Acquire) {
                match accepting.accept() {
                    Ok((client, _)) if !end.load(Ordering::Acquire) => Server::accept_requests(&server, client),
                    Ok(_) => {}
                    Err(_) => std::thread::sleep(PAUSE),
                }
            }
        };
        std::thread::Builder::new().name("control".into()).spawn(accept)?;
        Ok(Self { _socket: socket, listener, ended })
    }
}

fn warn_unreachable(error: &Error) {
    tracing::warn!("no control socket, so ferry status, log and set cannot reach this process: {error}");
}

impl Drop for Control {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // Wakes the thread, which then ends.
        if let Err(error) = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both) {
            tracing::debug!("the control socket: {error}");
        }
    }
}

struct Server {
    shares: Arc<[ServedShare]>,
    logging: Logging,
    owner: Owner,
    started: Instant,
    clients: AtomicUsize,
    state: Mutex<State>,
}

/// The log settings, with those of the followers.
struct State {
    /// The permanent settings.
    own: LogSettings,
    /// The settings of the followers in order of arrival, with their numbers.
    followers: Vec<(u64, LogRequest)>,
    /// The number of followers so far.
    followers_ever: u64,
}

/// The level and the logged requests.
#[derive(Clone, Debug, PartialEq)]
struct LogSettings {
    level: String,
    requests: Option<Requests>,
}

/// The requests that are logged.
#[derive(Clone)]
struct Requests {
    /// Their description for users.
    description: String,
    filter: Filter,
    /// The files whose requests are logged. They are held so that their inode numbers are not reused.
    held: Vec<Arc<HeldInode>>,
}

impl PartialEq for Requests {
    fn eq(&self, other: &Self) -> bool {
        (&self.description, &self.filter) == (&other.description, &other.filter)
    }
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Requests")
            .field("description", &self.description)
            .field("filter", &self.filter)
            .finish_non_exhaustive()
    }
}

/// A log request of `ferry log`.
#[derive(Clone)]
enum LogRequest {
    /// This level, and no requests.
    Only(String),
    Level(String),
    NoRequests,
    Requests(Requests),
}

impl Requests {
    /// Merges two filters. A filter names one share at most, so filters of several shares become one that matches all shares.
    fn and(mut self, other: &Self) -> Self {
        let (mine, others) = (&mut self.filter, &other.filter);
        if mine.share != others.share {
            *mine = Filter::default();
        } else if others.inodes.is_empty() || mine.inodes.len() + others.inodes.len() > requests::INODES_MAX {
            mine.inodes.clear();
        } else if !mine.inodes.is_empty() {
            mine.inodes.extend(&others.inodes);
        }
        if self.description != other.description {
            self.description = format!("{}, {}", self.description, other.description);
        }
        self.held.extend(other.held.iter().cloned());
        self
    }
}

impl State {
    /// Returns the effective settings: the level of the last follower that set one, and the requests of all followers.
    fn logged(&self) -> LogSettings {
        let mut logged = self.own.clone();
        for (_, requested) in &self.followers {
            match requested {
                LogRequest::Only(level) => logged = LogSettings { level: level.clone(), requests: None },
                LogRequest::Level(level) => logged.level.clone_from(level),
                LogRequest::NoRequests => logged.requests = None,
                LogRequest::Requests(_) => {}
            }
        }
        // Last: no follower loses lines because another one disables them.
        for (_, requested) in &self.followers {
            if let LogRequest::Requests(own) = requested {
                logged.requests = Some(match logged.requests {
                    Some(requests) => requests.and(own),
                    None => own.clone(),
                });
            }
        }
        logged
    }
}

/// A follower of the log; its settings are removed when it is dropped.
struct Follower<'a> {
    server: &'a Server,
    number: u64,
}

impl Drop for Follower<'_> {
    fn drop(&mut self) {
        let mut state = self.server.lock();
        let place = state.followers.iter().position(|(number, _)| *number == self.number);
        let gone = place.map(|place| state.followers.remove(place));
        if let Err(error) = self.server.apply(&state) {
            tracing::warn!("cannot remove the log settings of a follower: {error}");
        }
        drop(state);
        // Its inodes are released without the lock, because the source may block.
        drop(gone);
    }
}

/// The place of a client among [`CLIENTS_MAX`], free when dropped.
struct ClientSlot(Arc<Server>);

impl Drop for ClientSlot {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Server {
    fn accept_requests(server: &Arc<Self>, client: UnixStream) {
        let before = server.clients.fetch_add(1, Ordering::AcqRel);
        let slot = ClientSlot(Arc::clone(server));
        if before >= CLIENTS_MAX {
            // Without waiting: this thread accepts all clients.
            if client.set_nonblocking(true).is_ok() {
                let _ = reply::<Status>(&client, Err(Error::Busy(CLIENTS_MAX)));
            }
            return;
        }
        let serve = move || {
            if let Err(error) = slot.0.serve(&client) {
                tracing::debug!("a client of the control socket: {error}");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("control-client".into()).spawn(serve) {
            tracing::debug!("cannot start a thread for a client of the control socket: {error}");
        }
    }

    fn serve(&self, client: &UnixStream) -> Result<(), Error> {
        // The peer's process may have no id in this namespace, which rustix does not allow for.
        let peer = nix::sys::socket::getsockopt(client, nix::sys::socket::sockopt::PeerCredentials);
        let peer = peer.map_err(io::Error::from)?.uid();
        if !(self.owner.may_access)(peer) {
            return reply::<Status>(client, Err(Error::NoAccess(peer)));
        }
        let mut line = Vec::new();
        BufReader::new(TimedStream::new(client, TIMEOUT).take(REQUEST_BYTES_MAX)).read_until(b'\n', &mut line)?;
        let request = match serde_json::from_slice(&line) {
            Ok(request) => request,
            Err(error) => return reply::<Status>(client, Err(Error::InvalidRequest(error))),
        };
        match request {
            Request::Status => reply(client, Ok(self.status())),
            Request::Report { version } => reply(client, self.report(version)),
            Request::Images => reply(client, Ok(self.shares.iter().flat_map(ServedShare::images).collect::<Vec<_>>())),
            Request::Set { share, settings } => reply(client, self.set(share, &settings)),
            Request::Explain { share } => reply(client, self.share(share).and_then(ServedShare::explain)),
            Request::Log { level, share, file, follow } => {
                let file = file.map(|file| file.0);
                // Before the change, so that no later line is missed.
                let lines = follow.then(|| self.logging.listen());
                let changed = self
                    .parse_log_request(&level, share, file.as_deref())
                    .and_then(|requested| self.change(requested, follow));
                // Dropped in any case, which removes its settings.
                let (changed, follower) = match changed {
                    Ok(follower) => (Ok(self.status()), follower),
                    Err(error) => (Err(error), None),
                };
                reply(client, changed)?;
                client.set_write_timeout(Some(TIMEOUT))?;
                match (lines, &follower) {
                    (Some(lines), Some(_)) => send_lines(client, &lines),
                    _ => Ok(()),
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn share(&self, index: usize) -> Result<&ServedShare, Error> {
        self.shares.get(index).ok_or(Error::NoShare(index))
    }

    /// Changes all settings, or none.
    fn set(&self, share: Option<usize>, settings: &[Setting]) -> Result<Vec<String>, Error> {
        let is_twice = |(at, one): &(usize, &Setting)| settings[..*at].iter().any(|other| other.name == one.name);
        if let Some((_, twice)) = settings.iter().enumerate().find(is_twice) {
            return Err(Error::SettingTwice(twice.name.clone()));
        }
        let (of_process, of_share): (Vec<_>, Vec<_>) = settings.iter().partition(|setting| setting.name == LOG);
        let mut changes = Vec::new();
        for Setting { name, value } in of_share {
            let share = share.or((self.shares.len() == 1).then_some(0)).ok_or(Error::SeveralShares)?;
            changes.push(self.share(share)?.check(name, value)?);
        }
        // Only this step can still fail.
        let mut outcomes = Vec::new();
        for Setting { value, .. } in of_process {
            self.change(self.parse_log_request(value, None, None)?, false)?;
            outcomes.push(format!("log {}", self.status().log));
        }
        outcomes.extend(changes.into_iter().map(|change| change()));
        Ok(outcomes)
    }

    fn status(&self) -> Status {
        let LogSettings { level, requests } = self.lock().logged();
        Status {
            pid: (self.owner.pid)(),
            shares: self.shares.iter().map(ServedShare::current_status).collect(),
            log: level,
            requests: requests.map(|requests| requests.description),
        }
    }

    fn report(&self, version: u32) -> Result<ServerReport, Error> {
        if version != REPORT_VERSION {
            return Err(Error::ReportVersion { own: REPORT_VERSION, requested: version });
        }
        Ok(ServerReport::of(&self.shares, (self.owner.pid)(), self.started))
    }

    /// Interprets the words of `ferry log`.
    fn parse_log_request(&self, level: &str, share: Option<usize>, file: Option<&[u8]>) -> Result<LogRequest, Error> {
        Ok(match level {
            "default" => LogRequest::Only(self.logging.default_level().to_owned()),
            "off" if file.is_some() => LogRequest::NoRequests,
            "off" => LogRequest::Only("off".into()),
            "requests" => LogRequest::Requests(self.requests(share, file)?),
            _ if file.is_some() => return Err(Error::LevelOfFile(level.into())),
            level => LogRequest::Level(level.to_owned()),
        })
    }

    /// Returns the filter for a share and a file in it.
    fn requests(&self, share: Option<usize>, file: Option<&[u8]>) -> Result<Requests, Error> {
        let Some(share) = share.map(|index| self.share(index)).transpose()? else {
            return Ok(Requests { description: "all".into(), filter: Filter::default(), held: Vec::new() });
        };
        let filter = Filter { share: Some(share.name().into()), inodes: Vec::new() };
        let Some(file) = file else {
            return Ok(Requests { description: share.status().source.clone(), filter, held: Vec::new() });
        };
        let held = share.find(file)?;
        requests::record_path(share.name(), file, held.ino());
        let description = format!("{} in {}", String::from_utf8_lossy(file), share.status().source);
        Ok(Requests { description, filter: Filter { inodes: vec![held.ino()], ..filter }, held: vec![Arc::new(held)] })
    }

    /// Applies a log request: permanently, or for the follower only.
    fn change(&self, requested: LogRequest, follow: bool) -> Result<Option<Follower<'_>>, Error> {
        let mut state = self.lock();
        if follow {
            if state.followers.len() >= FOLLOWERS_MAX {
                return Err(Error::TooManyFollowers(FOLLOWERS_MAX));
            }
            state.followers_ever += 1;
            let number = state.followers_ever;
            state.followers.push((number, requested));
            let applied = self.apply(&state);
            drop(state);
            // If it cannot be applied, it is removed.
            let follower = Follower { server: self, number };
            return applied.map(|()| Some(follower));
        }
        let mut own = state.own.clone();
        match requested {
            LogRequest::Only(level) => own = LogSettings { level, requests: None },
            LogRequest::Level(level) => own.level = level,
            LogRequest::NoRequests => own.requests = None,
            LogRequest::Requests(requests) => own.requests = Some(requests),
        }
        let before = std::mem::replace(&mut state.own, own);
        // A follower's level may hide it, so its validity is checked here.
        let applied = self.logging.set(&state.own.level, false).and_then(|()| self.apply(&state));
        let gone = if applied.is_ok() { before } else { std::mem::replace(&mut state.own, before) };
        drop(state);
        // Without the lock, as when a follower ends.
        drop(gone);
        applied.map(|()| None)
    }

    /// Applies the effective settings. Called under the lock, so that the effective settings match the last state.
    fn apply(&self, state: &State) -> Result<(), Error> {
        let logged = state.logged();
        self.logging.keep_requests(state.own.requests.is_some());
        self.logging.set(&logged.level, logged.requests.is_some())?;
        requests::watch(logged.requests.as_ref().map(|requests| requests.filter.clone()));
        Ok(())
    }
}

/// Sends one line.
fn reply<T: serde::Serialize>(client: &UnixStream, result: Result<T, Error>) -> Result<(), Error> {
    let reply = match result {
        Ok(value) => Reply::Ok(value),
        Err(error) => Reply::Error(error.to_string()),
    };
    let mut line = serde_json::to_vec(&reply).map_err(io::Error::from)?;
    line.push(b'\n');
    Ok(TimedStream::new(client, TIMEOUT).write_all(&line)?)
}

/// Sends the log until the client disconnects.
fn send_lines(mut client: &UnixStream, lines: &Lines) -> Result<(), Error> {
    loop {
        match lines.receiver.recv_timeout(POLL_INTERVAL) {
            Ok(line) => match client.write_all(&line) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                // A client that is too slow is disconnected.
                result => result?,
            },
            Err(RecvTimeoutError::Timeout) if client_closed(client) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

fn client_closed(client: &UnixStream) -> bool {
    let mut polled = [PollFd::new(client, PollFlags::RDHUP)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferry_vfs::Ino;

    fn requests(description: &str, share: Option<&str>, inodes: &[u64]) -> Requests {
        let inodes = inodes.iter().copied().map(Ino).collect();
        Requests {
            description: description.into(),
            filter: Filter { share: share.map(Into::into), inodes },
            held: Vec::new(),
        }
    }

    fn level_and_description(state: &State) -> (String, Option<String>) {
        let LogSettings { level, requests } = state.logged();
        (level, requests.map(|requests| requests.description))
    }

    #[test]
    fn the_remaining_followers_determine_the_log() {
        let own = LogSettings { level: "info".into(), requests: None };
        let mut state = State { own, followers: Vec::new(), followers_ever: 0 };
        let shown = |level: &str, description: Option<&str>| (level.to_owned(), description.map(str::to_owned));
        state.followers.push((1, LogRequest::Requests(requests("a", Some("s"), &[1]))));
        state.followers.push((2, LogRequest::Requests(requests("b", Some("s"), &[2]))));
        assert_eq!(level_and_description(&state), shown("info", Some("a, b")));
        assert_eq!(state.logged().requests.unwrap().filter.inodes, [Ino(1), Ino(2)]);
        state.followers.push((3, LogRequest::Only("debug".into())));
        assert_eq!(level_and_description(&state), shown("debug", Some("a, b")), "the other followers keep theirs");
        state.followers.remove(0);
        assert_eq!(level_and_description(&state), shown("debug", Some("b")), "the first has disconnected");
        state.own.level = "warn".into();
        state.followers.pop();
        assert_eq!(
            level_and_description(&state),
            shown("warn", Some("b")),
            "the permanent level was changed meanwhile"
        );
        state.followers.clear();
        assert_eq!(state.logged(), state.own);
    }

    #[test]
    fn a_client_whose_request_panics_frees_its_place() {
        static CLIENTS: AtomicUsize = AtomicUsize::new(0);
        let may_access = |_| {
            assert!(CLIENTS.fetch_add(1, Ordering::SeqCst) >= CLIENTS_MAX, "a fault");
            true
        };
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let socket = Socket::bind(&path).expect("a free path");
        let owner = Owner { pid: std::process::id, may_access };
        let _control = Control::listen(socket, Arc::from([]), Logging::detached(), owner).expect("a thread");
        let ask = || {
            let mut client = UnixStream::connect(&path).expect("it listens");
            let _ = client.write_all(b"{\"do\":\"status\"}\n");
            let mut reply = String::new();
            let _ = client.read_to_string(&mut reply);
            reply
        };
        (0..CLIENTS_MAX).for_each(|_| assert_eq!(ask(), ""));
        assert!(ask().starts_with("{\"ok\""), "{}", ask());
    }

    #[test]
    fn a_merged_filter_matches_the_requests_of_both() {
        let many: Vec<u64> = (0..requests::INODES_MAX as u64).collect();
        for ((share, inodes), (other, others), expected) in [
            ((Some("s"), &[1][..]), (Some("s"), &[2][..]), (Some("s"), &[1, 2][..])),
            ((Some("s"), &[1]), (Some("s"), &[]), (Some("s"), &[])),
            ((Some("s"), &[]), (Some("s"), &[2]), (Some("s"), &[])),
            ((Some("s"), &[1]), (Some("t"), &[2]), (None, &[])),
            ((None, &[]), (Some("t"), &[2]), (None, &[])),
            ((Some("s"), &many), (Some("s"), &[99]), (Some("s"), &[])),
        ] {
            let both = requests("a", share, inodes).and(&requests("b", other, others));
            assert_eq!(both, requests("a, b", expected.0, expected.1));
        }
    }
}
