//! The log of a running file server, and its control socket: `ferry log` and `ferry mount --explain` talk to it, whichever program
//! it is.
//!
//! Each server listens on a socket named after its process id, in a folder that only its user can enter. A client
//! sends one line of JSON ([`Request`]) and gets one line back ([`Answer`]); after a request to follow the log, lines of text.
//!
//! ```no_run
//! use ferry_control::{Control, Logging, Owner, ServedShare, ShareStatus};
//!
//! # fn source() -> std::sync::Arc<dyn ferry_vfs::FileSystem> { unimplemented!() }
//! let logging = Logging::start("info", false, None)?;
//! let shown = ShareStatus { source: "hello".into(), mount: Some("/mnt/hello".into()), ..ShareStatus::default() };
//! let served = ServedShare::new(shown, "hello".into(), source());
//! let control = Control::start(Control::bind(), vec![served].into(), logging, Owner::default());
//! // ... serve; then:
//! drop(control);
//! # Ok::<(), ferry_control::Error>(())
//! ```
#![forbid(unsafe_code)]

mod error;
mod escape;
mod log;
mod server;
mod shares;
mod socket_dir;

use serde::{Deserialize, Serialize};

pub use error::Error;
pub use escape::{printable, printable_json};
pub use log::{Logging, Syslog, nearest};
pub use server::{Control, Owner};
pub use shares::{HeldInode, ServedShare, ShareStatus};
pub use socket_dir::{Endpoint, sockets};

/// The longest line of a log, in bytes. What outside input makes longer is cut.
pub const LOG_LINE_BYTES_MAX: usize = 8 << 10;
/// The longest answer, in bytes: what a thousand shares are shown as.
pub const ANSWER_BYTES_MAX: usize = 4 << 20;

/// A request; one line.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// What is served, and what is logged: answers [`Status`].
    Status,
    /// By which paths the requests of a mount travel: answers [`TransportReport`].
    Explain {
        /// Which share of [`Status::shares`].
        share: usize,
    },
    /// Changes what is logged: answers [`Status`].
    Log {
        /// A level, a list, or one of the words of `ferry log`.
        level: String,
        /// Which share of [`Status::shares`]; all of them if there is none.
        share: Option<usize>,
        /// The file in it, from its root.
        file: Option<FileName>,
        /// Send the log's lines, and log as before when the client hangs up.
        follow: bool,
    },
}

/// A path, byte by byte: JSON has only text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FileName(pub Vec<u8>);

/// The answer to any request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer<T> {
    /// It was done.
    Ok(T),
    /// Why not, in a sentence.
    Error(String),
}

/// What a server serves and logs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Its process.
    pub pid: u32,
    /// What it serves.
    pub shares: Vec<ShareStatus>,
    /// The level of its log.
    pub log: String,
    /// Whose requests are logged, if any are.
    pub requests: Option<String>,
}

/// How the requests of a mount travel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TransportReport {
    /// For people.
    pub text: String,
    /// For programs.
    pub json: serde_json::Value,
}
