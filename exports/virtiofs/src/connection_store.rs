//! Connections of front ends in the store of the guest's session.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use ferry_state::{FRONT_END_AWAITED, SessionStore};
use ferry_vhost::{Commit, InheritedConnection};

/// The connection's part of the store.
#[derive(Debug)]
pub(crate) struct ConnectionStore(pub(crate) Arc<SessionStore>);

impl ferry_vhost::ConnectionStore for ConnectionStore {
    fn take(&self) -> Option<InheritedConnection> {
        let left = self.0.take_connection()?;
        Some(InheritedConnection { socket: left.socket, records: left.records })
    }

    fn reconnect_timeout(&self) -> Option<Duration> {
        self.0.has_client().then_some(FRONT_END_AWAITED)
    }

    fn put(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.0.keep_connection(socket).map_err(io::Error::other)
    }

    fn commit(&self, commit: &Commit<'_>) -> io::Result<()> {
        let Commit { taken_bytes, record, drops, reply, reply_files } = *commit;
        let commit = ferry_state::Commit { taken_bytes, record, drops, reply, reply_files };
        self.0.commit(&commit).map_err(io::Error::other)
    }

    fn end(&self) {
        self.0.end_connection();
    }
}
