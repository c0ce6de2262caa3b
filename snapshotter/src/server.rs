//! The unix socket, and the process that serves it.

use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use std::{fs, future};

use anyhow::{Context, Result, bail};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustix::fs::Mode;
use tokio::signal::unix::{SignalKind, signal};

use crate::service::answer;
use crate::snapshotter::Snapshotter;

/// The maximum number of calls that run at once; further ones wait. containerd unpacks a few images at a time.
const CALLS_MAX: usize = 64;
/// The time in which calls can finish after SIGTERM. Interrupted calls can be repeated after a restart.
const SHUTDOWN_TIME: Duration = Duration::from_secs(10);

/// A listening socket. Its file stays: the next start replaces it.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
}

impl Socket {
    /// Listens on a path that only root can connect to. A socket without a listener is replaced.
    ///
    /// # Errors
    ///
    /// Another process listens there, or the path is another kind of file.
    pub fn bind(path: &Path) -> Result<Self> {
        if let Some(directory) = path.parent() {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
            made.with_context(|| format!("cannot create {}", directory.display()))?;
        }
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                bail!("{} is not a socket: choose another address, or remove it", path.display());
            }
            Ok(_) => match UnixStream::connect(path) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
                }
                Err(error) => return Err(error).with_context(|| format!("cannot use {}", path.display())),
                Ok(_) => bail!("another process listens on {}: stop it, or choose another address", path.display()),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("cannot inspect {}", path.display())),
        }
        // At no time can others connect.
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let listener = UnixListener::bind(path);
        rustix::process::umask(before);
        let listener = listener.with_context(|| format!("cannot listen on {}", path.display()))?;
        listener.set_nonblocking(true).context("cannot use the socket")?;
        Ok(Self { listener })
    }
}

/// Serves until SIGTERM or SIGINT. Mounts stay.
///
/// # Errors
///
/// The socket or signals cannot be used.
pub fn serve(snapshotter: &Arc<Snapshotter>, socket: Socket) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .max_blocking_threads(CALLS_MAX)
        .build()
        .context("cannot start the runtime")?;
    let snapshotter = Arc::clone(snapshotter);
    let outcome = runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(socket.listener).context("cannot use the socket")?;
        let mut signals = [SignalKind::terminate(), SignalKind::interrupt()]
            .map(signal)
            .into_iter()
            .collect::<io::Result<Vec<_>>>()
            .context("cannot wait for signals")?;
        tokio::spawn(accept(listener, snapshotter));
        notify_ready();
        future::poll_fn(|context| {
            let is_over = signals.iter_mut().any(|signal| signal.poll_recv(context).is_ready());
            if is_over { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        Ok(())
    });
    runtime.shutdown_timeout(SHUTDOWN_TIME);
    outcome
}

async fn accept(listener: tokio::net::UnixListener, snapshotter: Arc<Snapshotter>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Descriptors are short: others will be closed.
                tracing::warn!("cannot accept a connection: {error}");
                tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(100))).await.ok();
                continue;
            }
        };
        let snapshotter = Arc::clone(&snapshotter);
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(Arc::clone(&snapshotter), request));
            let served =
                http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
            if let Err(error) = served {
                tracing::debug!("a connection ended: {error}");
            }
        });
    }
}

/// Notifies the service manager that the server is ready (sd_notify(3)), if NOTIFY_SOCKET is set.
fn notify_ready() {
    let Some(socket) = ferry_agent::notification_socket("calls are answered") else { return };
    if let Err(error) = socket.send(b"READY=1") {
        tracing::warn!("cannot tell the service manager that calls are answered: {error}");
    }
}
