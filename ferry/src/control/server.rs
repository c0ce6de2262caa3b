//! The server's side of the control socket.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferry_engine::requests::{self, Filter};
use ferry_vhost::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::served::Held;
use super::{Answer, Request, Served, Status, place};
use crate::logging::Logging;

/// A path of 4096 bytes as a list of numbers, and what goes with it.
const REQUEST_BYTES_MAX: u64 = 32 * 1024;
/// A client has its request ready before it connects.
const PATIENCE: Duration = Duration::from_secs(5);
/// More people than will ever follow one server's log.
const CLIENTS_MAX: usize = 16;
/// How often a follower who hears nothing is looked at.
const GLANCE: Duration = Duration::from_millis(250);
/// A pause after a failure to accept: one that lasts, such as no descriptors, must not take a CPU.
const PAUSE: Duration = Duration::from_millis(100);

/// A control socket that is being listened on; it goes when this is dropped.
#[derive(Debug)]
pub struct Control {
    /// Takes its file along.
    _socket: Socket,
    listener: UnixListener,
    ended: Arc<AtomicBool>,
}

impl Control {
    /// Makes the socket. What is served is worth more than its control: without a socket, this says so and does without.
    pub fn bind() -> Option<Socket> {
        let bind = || {
            let folder = place::own()?;
            place::remove_dead(&folder);
            Ok(Socket::bind(&folder.join(std::process::id().to_string()))?)
        };
        bind().map_err(not_found).ok()
    }

    /// Listens, if there is a socket.
    pub fn start(socket: Option<Socket>, shares: Arc<[Served]>, logging: Logging) -> Option<Self> {
        Self::listen(socket?, shares, logging).map_err(not_found).ok()
    }

    fn listen(socket: Socket, shares: Arc<[Served]>, logging: Logging) -> Result<Self> {
        let listener = socket.listener()?;
        let accepting = socket.listener()?;
        let ended = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&ended);
        let server = Arc::new(Server {
            shares,
            logging,
            clients: AtomicUsize::new(0),
            state: Mutex::new(State { level: crate::started_level(), requests: None, held: None }),
        });
        let accept = move || {
            while !end.load(Ordering::Acquire) {
                match accepting.accept() {
                    Ok((client, _)) if !end.load(Ordering::Acquire) => Server::welcome(&server, client),
                    Ok(_) => {}
                    Err(_) => std::thread::sleep(PAUSE),
                }
            }
        };
        std::thread::Builder::new().name("control".into()).spawn(accept)?;
        Ok(Self { _socket: socket, listener, ended })
    }
}

#[allow(clippy::needless_pass_by_value, reason = "what map_err wants")]
fn not_found(error: anyhow::Error) {
    tracing::warn!("ferry log will not find this process: {error:#}");
}

impl Drop for Control {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // Wakes the thread, which then sees that it has ended.
        if let Err(error) = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both) {
            tracing::debug!("the control socket: {error}");
        }
    }
}

struct Server {
    shares: Arc<[Served]>,
    logging: Logging,
    clients: AtomicUsize,
    state: Mutex<State>,
}

/// What is logged.
#[derive(Clone)]
struct State {
    level: String,
    /// Whose requests, for people.
    requests: Option<(String, Filter)>,
    /// The file whose requests are logged: its number must stay its own.
    held: Option<Arc<Held>>,
}

impl Server {
    fn welcome(server: &Arc<Self>, client: UnixStream) {
        if server.clients.fetch_add(1, Ordering::AcqRel) >= CLIENTS_MAX {
            server.clients.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        let serving = Arc::clone(server);
        let serve = move || {
            if let Err(error) = serving.serve(&client) {
                tracing::debug!("a client of the control socket: {error:#}");
            }
            serving.clients.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(error) = std::thread::Builder::new().name("control-client".into()).spawn(serve) {
            server.clients.fetch_sub(1, Ordering::AcqRel);
            tracing::debug!("no thread for a client of the control socket: {error}");
        }
    }

    fn serve(&self, client: &UnixStream) -> Result<()> {
        // Its process may have no number here, which the other library does not allow for.
        let peer = nix::sys::socket::getsockopt(client, nix::sys::socket::sockopt::PeerCredentials)?.uid();
        ensure!(crate::sandbox::is_ours(peer), "user {peer} may not");
        client.set_read_timeout(Some(PATIENCE))?;
        client.set_write_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new(client.take(REQUEST_BYTES_MAX)).read_line(&mut line).context("no request came")?;
        let request = match serde_json::from_str(&line) {
            Ok(request) => request,
            Err(error) => return answer::<Status>(client, Err(anyhow::anyhow!("this is no request: {error}"))),
        };
        match request {
            Request::Status => answer(client, Ok(self.status())),
            Request::Explain { share } => answer(client, self.share(share).and_then(Served::explain)),
            Request::Log { level, share, file, follow } => {
                let before = self.lock().clone();
                let file = file.map(|file| file.0);
                // From before the change, so that no line after it is missed.
                let lines = follow.then(|| self.logging.listen());
                let changed = self.log(&level, share, file.as_deref());
                let failed = changed.is_err();
                answer(client, changed.map(|()| self.status()))?;
                if let Some(lines) = lines.filter(|_| !failed) {
                    let followed = send(client, &lines);
                    self.set(before)?;
                    followed?;
                }
                Ok(())
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn share(&self, index: usize) -> Result<&Served> {
        self.shares.get(index).with_context(|| format!("there is no share number {index}"))
    }

    fn status(&self) -> Status {
        let state = self.lock();
        Status {
            pid: crate::sandbox::pid(),
            shares: self.shares.iter().map(|share| share.shown().clone()).collect(),
            log: state.level.clone(),
            requests: state.requests.as_ref().map(|(whose, _)| whose.clone()),
        }
    }

    /// Does what the words of `ferry log` say.
    fn log(&self, level: &str, share: Option<usize>, file: Option<&[u8]>) -> Result<()> {
        let mut state = self.lock().clone();
        match level {
            "default" => state = State { level: crate::started_level(), requests: None, held: None },
            "off" if file.is_some() => (state.requests, state.held) = (None, None),
            "off" => state = State { level: "off".into(), requests: None, held: None },
            "requests" => {
                let (whose, filter, held) = self.whose(share, file)?;
                (state.requests, state.held) = (Some((whose, filter)), held);
            }
            _ if file.is_some() => {
                bail!(
                    "for a file the level is requests, off or default, and not {level:?}; levels are for whole processes"
                )
            }
            level => state.level = level.to_owned(),
        }
        self.set(state)
    }

    /// Whose requests a share and a file in it mean.
    fn whose(&self, share: Option<usize>, file: Option<&[u8]>) -> Result<(String, Filter, Option<Arc<Held>>)> {
        let Some(share) = share.map(|index| self.share(index)).transpose()? else {
            return Ok(("all".into(), Filter::default(), None));
        };
        let filter = Filter { share: Some(share.name().into()), inodes: Vec::new() };
        let Some(file) = file else { return Ok((share.shown().source.clone(), filter, None)) };
        let held = share.find(file)?;
        let whose = format!("{} in {}", String::from_utf8_lossy(file), share.shown().source);
        Ok((whose, Filter { inodes: vec![held.ino()], ..filter }, Some(Arc::new(held))))
    }

    fn set(&self, state: State) -> Result<()> {
        self.logging.set(&state.level, state.requests.is_some())?;
        requests::watch(state.requests.as_ref().map(|(_, filter)| filter.clone()));
        *self.lock() = state;
        Ok(())
    }
}

/// Sends one line.
fn answer<T: serde::Serialize>(mut client: &UnixStream, result: Result<T>) -> Result<()> {
    let answer = match result {
        Ok(value) => Answer::Ok(value),
        Err(error) => Answer::Error(format!("{error:#}")),
    };
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    client.write_all(&line).context("the client did not take its answer")
}

/// Sends the log until the client hangs up.
fn send(mut client: &UnixStream, lines: &Receiver<Vec<u8>>) -> Result<()> {
    loop {
        match lines.recv_timeout(GLANCE) {
            Ok(line) => match client.write_all(&line) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                result => result.context("a follower is too slow")?,
            },
            Err(RecvTimeoutError::Timeout) if hung_up(client) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

fn hung_up(client: &UnixStream) -> bool {
    let mut polled = [PollFd::new(client, PollFlags::RDHUP)];
    let found = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    found.is_ok_and(|found| found > 0)
}
