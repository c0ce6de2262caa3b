//! The agent of one mount.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ferry_wire::events::{Kind, MESSAGE_BYTES_MAX, Message, Record};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::guard::Guard;
use crate::mounts::{MountId, is_mount_root};
use crate::replay::Replayer;
use crate::shutdown::Shutdown;
use crate::sys;

/// The pause after messages with changes of data: changes during it are merged into one event.
const INTERVAL: Duration = Duration::from_millis(5);
/// The pause after a temporary error, such as a restart of the server.
const RETRY: Duration = Duration::from_secs(1);

/// When an agent without events checks whether it is still served: a later agent of the mount may have replaced it.
const HEARD_MAX: Duration = Duration::from_millis(100);

/// Why an agent cannot run.
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
    /// Nothing is mounted there.
    #[error("nothing is mounted on {}: mount the share there first, or let the agent wait for it (--wait)", path.display())]
    NotMounted {
        /// The mount point.
        path: PathBuf,
    },
    /// Replays are recognized by their group, which only root can take.
    #[error("only root can replay events")]
    Permission,
    /// The server sends no events.
    #[error("{} sends no events: share it with --events, and name its mount point in the guest", path.display())]
    NoEvents {
        /// The mount point.
        path: PathBuf,
    },
    /// A mount that is read-only has no calls that could be replayed.
    #[error(
        "{} is mounted read-only, so nothing can be replayed there: mount it without -o ro (a server with --read-only \
         refuses writes all the same)",
        path.display()
    )]
    ReadOnly {
        /// The mount point.
        path: PathBuf,
    },
    /// The server sends events to another agent.
    #[error("another agent serves {}: end one of them", path.display())]
    Other {
        /// The mount point.
        path: PathBuf,
    },
    /// The mount table cannot be watched.
    #[error("cannot wait for {}", path.display())]
    Wait {
        /// The mount point.
        path: PathBuf,
        /// Why.
        source: Errno,
    },
}

impl AgentError {
    /// Returns whether a retry would fail without a change of configuration.
    pub(crate) fn is_misuse(&self) -> bool {
        matches!(self, Self::Permission | Self::NoEvents { .. } | Self::ReadOnly { .. } | Self::Other { .. })
    }

    /// Whether a mount that comes later would help.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::NotMounted { .. } | Self::Open { source: Errno::NOENT | Errno::NOTDIR, .. })
    }
}

/// How an agent ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentEnd {
    /// It was ended by [`Shutdown::end`].
    Stopped,
    /// Its mount was unmounted, or another mount covers it.
    Unmounted,
}

/// The agent of one mount.
#[derive(Debug)]
pub struct Agent {
    path: PathBuf,
    root: Arc<OwnedFd>,
    mount: MountId,
    shutdown: Arc<Shutdown>,
    /// The guard, if caches are leased.
    guard: Option<Guard>,
}

fn open(path: &Path, shutdown: &Shutdown) -> Result<(Arc<OwnedFd>, MountId), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = Arc::new(rustix::fs::open(path, flags, Mode::empty())?);
    let mount = MountId::of(root.as_fd())?;
    shutdown.add(&root);
    Ok((root, mount))
}

impl Agent {
    /// Opens a mount.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path, shutdown: &Arc<Shutdown>) -> Result<Self, AgentError> {
        let (root, mount) = open(path, shutdown).map_err(|source| AgentError::Open { path: path.into(), source })?;
        Ok(Self { path: path.into(), root, mount, shutdown: Arc::clone(shutdown), guard: None })
    }

    /// Replays events. Calls `ready` when the server has this agent's request, and often afterwards: later events are
    /// replayed. During the call, the thread has another group for file access.
    ///
    /// # Errors
    /// [`AgentError`].
    pub fn run(mut self, ready: &mut dyn FnMut()) -> Result<AgentEnd, AgentError> {
        let before = sys::enter_replay_group().map_err(|_| AgentError::Permission)?;
        self.interrupt_later();
        let outcome = self.replay_all(ready);
        if let Err(error) = sys::set_effective_gid(before) {
            tracing::warn!("the thread keeps the group of replays: {error}");
        }
        outcome
    }

    /// Makes the first wait end soon.
    fn interrupt_later(&self) {
        let root = Arc::downgrade(&self.root);
        let interrupt = move || {
            std::thread::sleep(HEARD_MAX);
            if let Some(root) = root.upgrade()
                && sys::enter_replay_group().is_ok()
            {
                let _ = sys::interrupt(&root);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("ready".into()).spawn(interrupt) {
            tracing::debug!(%error, "ready only after the first event");
        }
    }

    /// Whether the path leads to another mount now. A busy mount may have been unmounted lazily.
    fn is_unmounted(&self) -> bool {
        MountId::at(&self.path) != Ok(self.mount)
    }

    /// Opens the path again. Another mount may be there by now, or none.
    fn reopen(&mut self) {
        if let Ok((root, mount)) = open(&self.path, &self.shutdown) {
            (self.root, self.mount) = (root, mount);
            // The next one is that of the new mount.
            self.guard = None;
        }
    }

    /// Returns the error for a directory that has no events.
    fn without_events(&self) -> AgentError {
        let path = self.path.clone();
        if is_mount_root(self.root.as_fd()) { AgentError::NoEvents { path } } else { AgentError::NotMounted { path } }
    }

    fn replay_all(&mut self, ready: &mut dyn FnMut()) -> Result<AgentEnd, AgentError> {
        // The mount point may be on a read-only file system.
        if is_mount_root(self.root.as_fd()) && sys::is_read_only(&self.root) {
            return Err(AgentError::ReadOnly { path: self.path.clone() });
        }
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        let mut last_error = None;
        while !self.shutdown.is_over() {
            let path = || self.path.clone();
            match sys::wait(&self.root, &mut buffer) {
                Ok(()) => {}
                Err(Errno::NOTTY | Errno::NOSYS | Errno::INVAL) => return Err(self.without_events()),
                Err(Errno::PERM | Errno::ACCESS) => return Err(AgentError::Permission),
                Err(Errno::BUSY) => return Err(AgentError::Other { path: path() }),
                Err(Errno::INTR) => {
                    ready();
                    continue;
                }
                Err(error) => {
                    if self.is_unmounted() {
                        return Ok(AgentEnd::Unmounted);
                    }
                    // Once: a server may be away for hours.
                    if last_error.replace(error) != Some(error) {
                        tracing::warn!("{}: waiting for the server: {error}", self.path.display());
                    }
                    self.shutdown.sleep(RETRY);
                    self.reopen();
                    continue;
                }
            }
            if last_error.take().is_some() {
                tracing::info!("{}: the server is back", self.path.display());
            }
            let message = match Message::decode(&buffer) {
                Ok(message) => message,
                Err(error) => {
                    tracing::warn!("{}: ignoring an invalid message of the server: {error}", self.path.display());
                    self.shutdown.sleep(RETRY);
                    continue;
                }
            };
            if message.is_lossy() {
                forget(&self.root, &self.path);
            }
            if message.is_leased() {
                self.keep_guard();
            }
            ready();
            match self.replay(&message) {
                // Without events only the mount table is checked.
                Replayed::Nothing if self.is_unmounted() => return Ok(AgentEnd::Unmounted),
                Replayed::Nothing | Replayed::Names => {}
                Replayed::Data => self.shutdown.sleep(INTERVAL),
                // Leased caches of an agent that cannot replay would be stale for minutes.
                Replayed::Refused => return Err(AgentError::ReadOnly { path: self.path.clone() }),
            }
        }
        Ok(AgentEnd::Stopped)
    }

    /// Makes the kernel drop its caches when this process ends: starts a guard if there is none.
    fn keep_guard(&mut self) {
        if self.guard.as_mut().is_some_and(Guard::beat) {
            return;
        }
        match Guard::start(&self.root) {
            Ok(guard) => self.guard = Some(guard),
            Err(error) => tracing::warn!(
                "{}: old files may be cached for minutes after the agent's end: cannot start a process that drops them then: {error}",
                self.path.display()
            ),
        }
    }

    fn replay(&mut self, message: &Message<'_>) -> Replayed {
        let mut replayed = Replayed::Nothing;
        let mut replayer = Replayer::new(&self.root);
        for record in message.records() {
            let record = match record {
                Ok(record) => record,
                Err(error) => {
                    tracing::warn!("{}: ignoring the rest of a message: {error}", self.path.display());
                    self.shutdown.sleep(RETRY);
                    break;
                }
            };
            if let Some(guard) = &mut self.guard {
                guard.beat();
            }
            replayed = replayed.max(if is_of_name(&record) { Replayed::Names } else { Replayed::Data });
            match replayer.replay(&record) {
                Ok(()) => {}
                Err(Errno::ROFS) => return Replayed::Refused,
                Err(error) => tracing::debug!(?record, %error, "not replayed"),
            }
        }
        replayed
    }
}

/// The contents of a message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Replayed {
    Nothing,
    Names,
    Data,
    /// The mount has become read-only.
    Refused,
}

fn is_of_name(record: &Record<'_>) -> bool {
    matches!(record.kind, Kind::Created | Kind::Removed | Kind::Renamed)
}

/// Makes the kernel drop its unused caches of a mount, because events were missed.
fn forget(root: &OwnedFd, path: &Path) {
    tracing::info!("{}: events may have been missed: dropping its caches", path.display());
    if let Err(error) = sys::drop_unused_dentries(sys::open_for_reconfigure(root).ok().as_ref()) {
        tracing::warn!("{}: old data may be cached until it expires: cannot drop caches: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// The server ended, its mount was unmounted, and the path leads to the bare directory.
    #[test]
    fn a_mount_that_is_gone_is_no_misuse() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("share");
        symlink("/proc", &path).expect("links can be made");
        let shutdown = Arc::new(Shutdown::new().expect("a descriptor"));
        let mut agent = Agent::open(&path, &shutdown).expect("/proc is mounted");
        assert!(agent.without_events().is_misuse(), "another file system");
        fs::remove_file(&path).expect("links can be removed");
        fs::create_dir(&path).expect("directories can be made");
        agent.reopen();
        let error = agent.without_events();
        assert!(error.is_missing() && !error.is_misuse(), "{error:?}");
    }
}
