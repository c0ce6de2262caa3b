//! Errors of the log and the control socket.

use std::io;
use std::path::PathBuf;

use ferry_vfs::Errno;
use ferry_vhost::SocketError;

/// Why a log, or a control socket, is not to be had, or a request is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No level, or a list with a word that is none.
    #[error(
        "cannot log at {level:?}{}; use off, error, warn, info, debug or trace, or a list like info,ferry_virtiofs=debug",
        nearest.map(|nearest| format!(": did you mean {nearest}?")).unwrap_or_default()
    )]
    Level {
        /// What was asked for.
        level: String,
        /// The level that looks most like it, if one does.
        nearest: Option<&'static str>,
    },
    /// Another part of the program logs on its own.
    #[error("cannot start logging: {0}")]
    Start(#[source] tracing_subscriber::util::TryInitError),
    /// The log cannot be changed.
    #[error("cannot change what is logged: {0}")]
    Reload(#[source] tracing_subscriber::reload::Error),
    /// There is no log of the system.
    #[error("--syslog: no log of the system at {}: start one, or leave --syslog out: {reason}", path.display())]
    Syslog {
        /// Where it should listen.
        path: PathBuf,
        /// What the system says.
        reason: io::Error,
    },
    /// The folder of sockets cannot be made.
    #[error("cannot make the folder {}: {reason}", folder.display())]
    Folder {
        /// Where it should be.
        folder: PathBuf,
        /// What the system says.
        reason: io::Error,
    },
    /// The folder of sockets is open to others.
    #[error("{} is not a folder of yours that nobody else can enter; remove it", .0.display())]
    NotPrivate(PathBuf),
    /// Somebody else listens there.
    #[error("what listens on {} is not process {pid} of user {owner}", path.display())]
    Stranger {
        /// Where.
        path: PathBuf,
        /// Which process was expected.
        pid: u32,
        /// Whose.
        owner: u32,
    },
    /// The socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A descriptor, or a thread.
    #[error("the control socket: {0}")]
    System(#[from] io::Error),
    /// The client may not.
    #[error("user {0} may not")]
    NotOurs(u32),
    /// The client does not speak as we do.
    #[error("this is no request: {0}")]
    NoRequest(serde_json::Error),
    /// There are fewer shares.
    #[error("there is no share number {0}")]
    NoShare(usize),
    /// The share has no such file.
    #[error("cannot find {path} in {share}: {reason}")]
    NoFile {
        /// From the root of the share.
        path: String,
        /// What is shared.
        share: String,
        /// What the source says.
        reason: Errno,
    },
    /// Only mounts have paths to the kernel.
    #[error("{0} is not mounted, only shared")]
    NotMounted(String),
    /// Files have no levels.
    #[error("for a file the level is requests, off or default, and not {0:?}; levels are for whole processes")]
    LevelOfFile(String),
}
