//! Listening for front ends.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::Device;
use crate::connection::Connection;

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Somebody serves there already.
    #[error("socket {0} is in use by another process; stop that, or choose another path")]
    InUse(PathBuf),
    /// Something else has the path.
    #[error("{0} exists and is not a socket; choose another path")]
    NotASocket(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen on {path}: {reason}")]
    Bind {
        /// The path.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
    },
    /// A thread or descriptor cannot be had.
    #[error("cannot start serving: {0}")]
    Start(io::Error),
}

/// Makes a listening socket at `path`. A socket that a dead server left behind is replaced.
///
/// # Errors
/// [`ServerError`], when the path is taken or cannot be made.
pub fn bind(path: &Path) -> Result<UnixListener, ServerError> {
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(ServerError::NotASocket(path.into()));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(ServerError::InUse(path.into()));
        }
        std::fs::remove_file(path).map_err(|reason| ServerError::Bind { path: path.into(), reason })?;
    }
    UnixListener::bind(path).map_err(|reason| ServerError::Bind { path: path.into(), reason })
}

/// A device being served on a socket, to one front end after another.
#[derive(Debug)]
pub struct Server {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Stop {
    event: OwnedFd,
    /// The front end that is connected now.
    stream: Mutex<Option<UnixStream>>,
}

impl Server {
    /// Serves on a thread of its own, until stopped or dropped.
    ///
    /// # Errors
    /// [`ServerError::Start`].
    pub fn start<D: Device>(listener: UnixListener, device: D, name: &str) -> Result<Self, ServerError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| ServerError::Start(error.into()))?;
        let stop = Arc::new(Stop { event, stream: Mutex::new(None) });
        let (mine, device) = (Arc::clone(&stop), Arc::new(device));
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || serve(&listener, &device, &mine))
            .map_err(ServerError::Start)?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Stops taking requests, ends those that were taken, and lets go of the front end.
    pub fn stop(mut self) {
        self.stop_and_join();
    }

    /// Waits until the server has come to an end by itself, because its socket broke.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn stop_and_join(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let _ = rustix::io::write(&self.stop.event, &1u64.to_ne_bytes());
        if let Some(stream) = self.stop.stream.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            // It may have gone by itself.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
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
        poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
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
            converse(device, stream);
            tracing::debug!("the front end is gone");
        }
        *stop.stream.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Speaks with one front end until it goes or says something that cannot be.
fn converse<D: Device>(device: &Arc<D>, stream: UnixStream) {
    let connection = Arc::new(Mutex::new(Connection::new(Arc::clone(device))));
    let mut requests = BackendReqHandler::from_stream(stream, connection);
    loop {
        match requests.handle_request() {
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
