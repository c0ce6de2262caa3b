//! TCP keepalive: how long a silent client may be unreachable.
//!
//! Linux sends no probes while data are unacknowledged, or the client has no room for them. TCP_USER_TIMEOUT limits
//! that time.

use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ferry_vfs::sync::lock;
use rustix::net::sockopt;

/// The idle time before the first probe, and the interval.
const IDLE: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_secs(15);
/// The number of probes: a client whose machine is gone loses its connection after 20 minutes. A suspended one may be back
/// until then; Linux does not reconnect a mount.
const PROBES: u32 = 76;
/// Others may wait for the locks of a client, which loses them after two minutes.
const PROBES_WITH_LOCKS: u32 = 4;

/// See the module. Sockets that are not TCP have none.
#[derive(Debug, Default)]
pub(crate) struct Keepalive {
    has_locks: Mutex<bool>,
}

/// Begins it on a new connection, which is closed in the end anyway if this fails.
pub(crate) fn begin(socket: impl AsFd) {
    let _ = sockopt::set_socket_keepalive(&socket, true);
    let _ = sockopt::set_tcp_keepidle(&socket, IDLE);
    let _ = sockopt::set_tcp_keepintvl(&socket, INTERVAL);
    limit(&socket, PROBES);
}

/// Sets the time limit: that of this many probes, also while none are sent.
fn limit(socket: impl AsFd, probes: u32) {
    let time_ms = u32::try_from((IDLE + INTERVAL * probes).as_millis()).unwrap_or(u32::MAX);
    let _ = sockopt::set_tcp_keepcnt(&socket, probes);
    let _ = sockopt::set_tcp_user_timeout(&socket, time_ms);
}

impl Keepalive {
    /// The number of owners that hold or wait for locks may have changed.
    pub(crate) fn update(&self, socket: impl AsFd, owners: &AtomicUsize) {
        let mut has_locks = lock(&self.has_locks);
        // Under the lock: the last of concurrent calls sees the last number.
        let now = owners.load(Ordering::Acquire) > 0;
        if std::mem::replace(&mut *has_locks, now) != now {
            limit(&socket, if now { PROBES_WITH_LOCKS } else { PROBES });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_client_with_locks_is_lost_sooner() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        begin(&socket);
        let patience = || {
            let [idle, interval] =
                [sockopt::tcp_keepidle(&socket), sockopt::tcp_keepintvl(&socket)].map(Result::unwrap);
            let unacknowledged = Duration::from_millis(sockopt::tcp_user_timeout(&socket).unwrap().into());
            [idle + interval * sockopt::tcp_keepcnt(&socket).unwrap(), unacknowledged]
        };
        let minutes = |minutes: u64| [Duration::from_secs(60 * minutes); 2];
        assert_eq!(patience(), minutes(20));
        let keepalive = Keepalive::default();
        keepalive.update(&socket, &AtomicUsize::new(1));
        assert_eq!(patience(), minutes(2));
        keepalive.update(&socket, &AtomicUsize::new(0));
        assert_eq!(patience(), minutes(20));
    }
}
