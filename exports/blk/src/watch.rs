//! Detects changes of a disk's size.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use ferry_vhost::Server;

use crate::state::State;

/// The interval of checks, which cost nothing. inotify would also report every write of this process.
const INTERVAL: Duration = Duration::from_secs(1);

/// A thread that checks the size of a disk periodically.
pub(crate) struct Watch {
    end: Sender<()>,
    thread: JoinHandle<()>,
}

impl Watch {
    pub(crate) fn start(state: Arc<State>, server: Arc<Server>) -> io::Result<Self> {
        let (end, ended) = channel();
        let look = move || {
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if state.refresh_geometry() {
                    server.config_changed();
                }
            }
        };
        let thread = std::thread::Builder::new().name("blk-size".into()).spawn(look)?;
        Ok(Self { end, thread })
    }

    pub(crate) fn stop(self) {
        drop(self.end);
        if self.thread.join().is_err() {
            tracing::error!("the thread that looks at the disk's size panicked");
        }
    }
}
