//! Listening for front ends.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::Device;
use crate::channel::{self, Channel};
use crate::connection::Connection;

/// Why a device cannot be served: a thread or descriptor cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot start serving: {0}")]
pub struct ServerError(io::Error);

/// A device being served on a socket, to one front end after another.
#[derive(Debug)]
pub struct Server {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    ended: Ended,
}

/// Tells when a server serves nobody any more.
#[derive(Clone, Debug, Default)]
pub struct Ended(Arc<(Mutex<bool>, Condvar)>);

impl Ended {
    /// Waits for that.
    pub fn wait(&self) {
        let (ended, changed) = &*self.0;
        let ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
        drop(changed.wait_while(ended, |ended| !*ended));
    }

    fn say(&self) {
        let (ended, changed) = &*self.0;
        *ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
    }
}

/// Do not wait.
const NOW: rustix::event::Timespec = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };

#[derive(Debug)]
struct Stop {
    event: OwnedFd,
    /// The front end that is connected now.
    stream: Mutex<Option<UnixStream>>,
    /// The front end had gone before it was time to stop.
    had_left: AtomicBool,
    /// How to reach the front end unasked.
    channel: Channel,
}

impl Server {
    /// Serves on a thread of its own, until stopped or dropped.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn start<D: Device>(listener: UnixListener, device: D, name: &str) -> Result<Self, ServerError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| ServerError(error.into()))?;
        let stop = Arc::new(Stop {
            event,
            stream: Mutex::new(None),
            had_left: AtomicBool::new(false),
            channel: Channel::default(),
        });
        let (mine, device) = (Arc::clone(&stop), Arc::new(device));
        let ended = Ended::default();
        let over = ended.clone();
        let serve = move || {
            serve(&listener, &device, &mine);
            over.say();
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(serve).map_err(ServerError)?;
        Ok(Self { stop, thread: Some(thread), ended })
    }

    /// For whoever waits until there is nobody to serve any more: after [`Self::stop`], or when the only front end of a
    /// device that [serves once](Device::serves_once) has gone, or when the socket is lost.
    pub fn ended(&self) -> Ended {
        self.ended.clone()
    }

    /// Tells the front end that the configuration space has changed, now or as soon as it can be told. One that
    /// connects later reads it anyway.
    pub fn config_changed(&self) {
        self.stop.channel.config_changed();
    }

    /// Stops taking requests, ends those that were taken, and lets go of the front end.
    pub fn stop(mut self) {
        self.stop_and_join();
    }

    fn stop_and_join(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let stream = self.stop.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let had_left = stream.as_ref().is_some_and(|stream| {
            let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
            poll(&mut fds, Some(&NOW)).is_ok_and(|ready| ready > 0)
        });
        self.stop.had_left.store(had_left, Ordering::Relaxed);
        let _ = rustix::io::write(&self.stop.event, &1u64.to_ne_bytes());
        if let Some(stream) = stream.as_ref() {
            // It may have gone by itself.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        drop(stream);
        if thread.join().is_err() {
            tracing::error!("the thread of a share panicked");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}

impl Stop {
    /// Waits for a front end. `None`: time to stop.
    fn accept(&self, listener: &UnixListener) -> io::Result<Option<UnixStream>> {
        loop {
            let mut fds =
                [PollFd::new(&self.event, PollFlags::IN), PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if !fds[0].revents().is_empty() {
                return Ok(None);
            }
            match listener.accept() {
                Ok((stream, _)) => return Ok(Some(stream)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Most likely out of descriptors: that passes.
                    tracing::error!("cannot accept a front end: {error}");
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        }
    }

    fn is_set(&self) -> bool {
        let mut fds = [PollFd::new(&self.event, PollFlags::IN)];
        poll(&mut fds, Some(&NOW)).is_ok_and(|ready| ready > 0)
    }
}

fn serve<D: Device>(listener: &UnixListener, device: &Arc<D>, stop: &Stop) {
    loop {
        let stream = match stop.accept(listener) {
            Ok(Some(stream)) => stream,
            Ok(None) => return,
            Err(error) => {
                tracing::error!("the socket is lost: {error}");
                return;
            }
        };
        *stop.stream.lock().unwrap_or_else(PoisonError::into_inner) = stream.try_clone().ok();
        if !stop.is_set() {
            tracing::debug!("a front end connected");
            stop.channel.begin();
            converse(device, stream, stop);
            stop.channel.end();
            tracing::debug!("the front end is gone");
        }
        *stop.stream.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if device.serves_once() {
            return;
        }
    }
}

/// Speaks with one front end until it goes or says something that cannot be.
fn converse<D: Device>(device: &Arc<D>, stream: UnixStream, stop: &Stop) {
    let Ok(watched) = stream.try_clone() else {
        tracing::error!("the front end is let go: there is no descriptor left");
        return;
    };
    let connection = Arc::new(Mutex::new(Connection::new(Arc::clone(device))));
    listen(device, stream, watched, &connection, &stop.channel);
    if !stop.is_set() || stop.had_left.load(Ordering::Relaxed) {
        connection.lock().unwrap_or_else(PoisonError::into_inner).gone();
    }
}

fn listen<D: Device>(
    device: &Arc<D>,
    stream: UnixStream,
    ours: UnixStream,
    connection: &Arc<Mutex<Connection<D>>>,
    channel: &Channel,
) {
    let mut requests = BackendReqHandler::from_stream(stream, Arc::clone(connection));
    loop {
        let acknowledges = || connection.lock().unwrap_or_else(PoisonError::into_inner).acknowledges();
        let takes_channel = device.changes_config() || device.window_bytes().is_some();
        let outcome = match channel::take(&ours, takes_channel, acknowledges) {
            Ok(Some(socket)) => {
                connection.lock().unwrap_or_else(PoisonError::into_inner).attach(&socket);
                channel.set(socket);
                continue;
            }
            Ok(None) => requests.handle_request(),
            Err(error) => Err(error),
        };
        match outcome {
            Ok(()) => {}
            Err(Error::Disconnected | Error::PartialMessage) => return,
            // The front end was told, if it asked to be; what it does next is up to it.
            Err(Error::ReqHandlerError(_) | Error::InvalidOperation(_)) => {}
            Err(error) => {
                tracing::error!("the front end is let go: {error}");
                return;
            }
        }
    }
}
