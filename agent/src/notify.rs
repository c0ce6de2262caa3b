//! Tells the service manager when events are replayed (sd_notify(3)).

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the mounts that are not ready yet.
#[derive(Debug)]
pub(crate) struct Readiness {
    left: AtomicUsize,
    socket: Option<UnixDatagram>,
}

impl Readiness {
    /// `count`: how often [`Self::mount_ready`] is called before all is ready.
    pub(crate) fn new(count: usize) -> Self {
        Self { left: AtomicUsize::new(count), socket: notification_socket("events are replayed") }
    }

    /// One more mount is ready.
    pub(crate) fn mount_ready(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.notify("READY=1");
        }
    }

    /// The agents end.
    pub(crate) fn stopping(&self) {
        self.notify("STOPPING=1");
    }

    fn notify(&self, what: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(what.as_bytes())
        {
            tracing::warn!("cannot tell the service manager {what}: {error}");
        }
    }
}

/// Connects to the service manager, if it waits for a notification when `ready`. A failure is a warning: the variable
/// may have been inherited from another service.
#[must_use]
pub fn notification_socket(ready: &str) -> Option<UnixDatagram> {
    let name = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty())?;
    let warn = |error: &std::io::Error| {
        tracing::warn!("cannot tell the service manager when {ready}: NOTIFY_SOCKET={}: {error}", name.display());
    };
    connect(name.as_bytes()).inspect_err(warn).ok()
}

fn connect(name: &[u8]) -> std::io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    let address = match name {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name))?,
        _ => return Err(std::io::Error::other("this is neither a path nor an abstract address (@NAME)")),
    };
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mount_notifies() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).expect("a socket");
        manager.set_nonblocking(true).expect("a socket");
        let socket = connect(path.as_os_str().as_bytes()).expect("connected");
        let readiness = Readiness { left: AtomicUsize::new(2), socket: Some(socket) };
        let mut buffer = [0; 32];
        readiness.mount_ready();
        assert!(manager.recv(&mut buffer).is_err(), "one of two");
        readiness.mount_ready();
        readiness.stopping();
        for expected in ["READY=1", "STOPPING=1"] {
            let bytes = manager.recv(&mut buffer).expect("a message");
            assert_eq!(&buffer[..bytes], expected.as_bytes());
        }
        let name = format!("@ferry-test-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name[1..]).expect("an address");
        let manager = UnixDatagram::bind_addr(&address).expect("a socket");
        connect(name.as_bytes()).expect("connected").send(b"READY=1").expect("sent");
        assert_eq!(manager.recv(&mut buffer).expect("a message"), 7);
        for name in ["vsock:2:1", "notify", "/no/such/socket", "@no-such-socket-of-ferry-agent"] {
            connect(name.as_bytes()).expect_err(name);
        }
    }
}
