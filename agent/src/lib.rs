//! The agent in a guest. It asks the server of a mount for what others do to the files that the guest knows, and replays
//! each event as the same system call on the mount. The server recognises these calls and changes nothing. The guest's
//! kernel raises the events for everybody who watches, and corrects what it has cached.
//!
//! ```no_run
//! let agent = ferry_agent::Agent::open("/mnt/work".as_ref())?;
//! // Returns only when it cannot go on.
//! agent.run()?;
//! # Ok::<(), ferry_agent::AgentError>(())
//! ```

mod replay;
mod sys;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferry_wire::events::{MESSAGE_BYTES_MAX, Message, Record};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use replay::Replayer;

/// The pause after messages with changes of data: those of the meantime are one event.
const INTERVAL: Duration = Duration::from_millis(5);
/// The pause after an error that may pass, such as a server that is started again.
const RETRY: Duration = Duration::from_secs(1);

/// Why an agent cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The mount cannot be opened.
    #[error("cannot open {}", path.display())]
    Open {
        /// The mount point.
        path: PathBuf,
        /// Why.
        source: Errno,
    },
    /// Replays are recognised by their group, which only root can take.
    #[error("only root can replay events")]
    Permission,
    /// The server tells nothing.
    #[error("{} tells of no events: share it with --events, and name its mount point in the guest", path.display())]
    NoEvents {
        /// The mount point.
        path: PathBuf,
    },
    /// The server tells somebody else.
    #[error("another agent serves {}: end one of them", path.display())]
    Other {
        /// The mount point.
        path: PathBuf,
    },
}

/// The agent of one mount.
#[derive(Debug)]
pub struct Agent {
    path: PathBuf,
    root: OwnedFd,
}

fn open(path: &Path) -> Result<OwnedFd, AgentError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|source| AgentError::Open { path: path.into(), source })
}

impl Agent {
    /// Opens a mount.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path) -> Result<Self, AgentError> {
        Ok(Self { path: path.into(), root: open(path)? })
    }

    /// Replays events until that is no longer possible. The calling thread takes another group for files meanwhile.
    ///
    /// # Errors
    /// [`AgentError`] says why it is not possible.
    pub fn run(self) -> Result<std::convert::Infallible, AgentError> {
        let before = sys::take_group().map_err(|_| AgentError::Permission)?;
        let outcome = self.replay_all();
        if let Err(error) = sys::give_back(before) {
            tracing::warn!("the thread keeps the group of replays: {error}");
        }
        outcome
    }

    fn replay_all(mut self) -> Result<std::convert::Infallible, AgentError> {
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        loop {
            let path = || self.path.clone();
            match sys::wait(&self.root, &mut buffer) {
                Ok(()) => {}
                Err(Errno::NOTTY | Errno::NOSYS | Errno::INVAL) => return Err(AgentError::NoEvents { path: path() }),
                Err(Errno::PERM | Errno::ACCESS) => return Err(AgentError::Permission),
                Err(Errno::BUSY) => return Err(AgentError::Other { path: path() }),
                Err(Errno::INTR) => continue,
                Err(error) => {
                    tracing::warn!("{}: waiting for the server: {error}", self.path.display());
                    std::thread::sleep(RETRY);
                    // It may be another mount by now.
                    if let Ok(root) = open(&self.path) {
                        self.root = root;
                    }
                    continue;
                }
            }
            let message = match Message::decode(&buffer) {
                Ok(message) => message,
                Err(error) => {
                    tracing::warn!("{}: the server's message is not used: {error}", self.path.display());
                    std::thread::sleep(RETRY);
                    continue;
                }
            };
            if message.is_lossy() {
                sys::drop_caches(&self.path);
            }
            let mut has_data = false;
            let mut replayer = Replayer::new(&self.root);
            for record in message.records() {
                let record = match record {
                    Ok(record) => record,
                    Err(error) => {
                        tracing::warn!("{}: the rest of a message is not used: {error}", self.path.display());
                        std::thread::sleep(RETRY);
                        break;
                    }
                };
                has_data |= !is_of_name(&record);
                if let Err(error) = replayer.replay(&record) {
                    tracing::debug!(?record, %error, "not replayed");
                }
            }
            if has_data {
                std::thread::sleep(INTERVAL);
            }
        }
    }
}

fn is_of_name(record: &Record<'_>) -> bool {
    use ferry_wire::events::Kind;
    matches!(record.kind, Kind::Created | Kind::Removed | Kind::Renamed)
}
