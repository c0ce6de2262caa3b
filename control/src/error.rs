//! Errors of the log and the control socket.

use std::io;
use std::path::PathBuf;

use ferry_vfs::Errno;
use ferry_vhost::SocketError;

/// Why logging or a control socket is not available, or a request is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not a level, or a list with an unknown word.
    #[error(
        "cannot log at {level:?}{}; use off, error, warn, info, debug or trace, or a list like info,ferry_virtiofs=debug",
        nearest.map(|nearest| format!(": did you mean {nearest}?")).unwrap_or_default()
    )]
    Level {
        /// The requested level.
        level: String,
        /// The most similar level, if one is similar.
        nearest: Option<&'static str>,
    },
    /// Another logger is installed in this process.
    #[error("cannot start logging: {0}")]
    Start(tracing_subscriber::util::TryInitError),
    /// The log cannot be changed.
    #[error("cannot change the log filter: {0}")]
    Reload(tracing_subscriber::reload::Error),
    /// There is no system log.
    #[error("--syslog: no system log at {}: start one, or omit --syslog: {reason}", path.display())]
    Syslog {
        /// The path at which it should listen.
        path: PathBuf,
        /// The error of the system.
        reason: io::Error,
    },
    /// The socket directory cannot be created.
    #[error("cannot create the directory {}: {reason}", directory.display())]
    Directory {
        /// Its path.
        directory: PathBuf,
        /// The error of the system.
        reason: io::Error,
    },
    /// Other users have access to the socket directory.
    #[error("{} is not a private directory of this user; remove it", .0.display())]
    NotPrivate(PathBuf),
    /// Another process listens on the socket.
    #[error("the listener on {} is not process {pid} of user {owner}", path.display())]
    Stranger {
        /// The path of the socket.
        path: PathBuf,
        /// The expected process.
        pid: u32,
        /// The expected user.
        owner: u32,
    },
    /// The address for metrics cannot be listened on.
    #[error(
        "cannot listen on {address} for metrics: {reason}{}",
        if reason.kind() == io::ErrorKind::AddrInUse { "; choose another port, or 0 for any" } else { "" }
    )]
    Metrics {
        /// The address.
        address: std::net::SocketAddr,
        /// The error of the system.
        reason: io::Error,
    },
    /// The file of a trace cannot be created.
    #[error(
        "cannot create {} for the trace: {reason}{}",
        path.display(),
        if reason.kind() == io::ErrorKind::AlreadyExists { "; remove it, or choose another name" } else { "" }
    )]
    Trace {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        reason: io::Error,
    },
    /// The socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A system call failed.
    #[error("the control socket: {0}")]
    System(io::Error),
    /// The user of the client has no access.
    #[error("user {0} has no access to this server: run ferry as root, or as the user that started it")]
    NoAccess(u32),
    /// The client sent an invalid request.
    #[error("invalid request: {0}; use the ferry that this process was started with")]
    InvalidRequest(serde_json::Error),
    /// The client is of another version.
    #[error("the server has version {own} of reports, not {requested}; use the ferry that it was started with")]
    ReportVersion {
        /// The server's version.
        own: u32,
        /// The client's version.
        requested: u32,
    },
    /// The index of a share is too large.
    #[error("share number {0} has been removed meanwhile; ferry status shows what is served")]
    NoShare(usize),
    /// The share does not contain the file.
    #[error("cannot find {path} in {share}: {reason}")]
    NoFile {
        /// From the root of the share.
        path: String,
        /// The source of the share.
        share: String,
        /// The error of the source.
        reason: Errno,
    },
    /// Only requests that reach this server are logged.
    #[error("the kernel serves the requests of {0}: they do not reach this server, so they cannot be logged")]
    ServedByKernel(String),
    /// Only mounts have a transport.
    #[error("{0} is not mounted, only shared")]
    NotMounted(String),
    /// A setting is of one share.
    #[error("this process serves several shares: name one of them by its socket, mount point or directory")]
    SeveralShares,
    /// The setting is unknown, or cannot be changed while the share is served.
    #[error(
        "{setting:?} cannot be changed while {share} is served{}; start it again with the new value",
        if settable.is_empty() { String::new() } else { format!(" (what can be: {})", settable.join(", ")) }
    )]
    NotSettable {
        /// The name of the setting.
        setting: String,
        /// The source of the share.
        share: String,
        /// The settings that can be changed.
        settable: Vec<&'static str>,
    },
    /// A setting is given twice.
    #[error("{0:?} is given twice; nothing has changed")]
    SettingTwice(String),
    /// All places for clients are taken.
    #[error("{0} clients are connected already, which is the most; end a ferry log --follow")]
    Busy(usize),
    /// All places for followers of the log are taken.
    #[error("{0} clients follow this log already, which is the most; end a ferry log --follow")]
    TooManyFollowers(usize),
    /// The value of a setting is wrong, or it cannot be changed now. Nothing has changed.
    #[error("{0}")]
    Setting(String),
    /// Files have no levels.
    #[error("the level of a file is requests, off or default, not {0:?}; other levels apply to whole processes")]
    LevelOfFile(String),
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}
