//! Notices that a disk has got another size.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use ferry_vhost::Server;

use crate::state::State;

/// How often to look: soon enough for whoever grows a disk by hand, and rarely enough to cost nothing.
/// (inotify would tell at once, but also of every single write of ours.)
const INTERVAL: Duration = Duration::from_secs(1);

/// A thread that looks at the size of a disk now and then.
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
