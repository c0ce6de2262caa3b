//! The log of a running file server, and its control socket. `ferry log`, `ferry status` and `ferry mount --explain` connect to it,
//! whichever program serves.
//!
//! Each server listens on a socket named after its process id, in a directory that only its user can enter. A client
//! sends one line of JSON ([`Request`]) and receives one line ([`Reply`]). After a request to follow the log, it
//! receives lines of text.
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

mod descriptors;
mod error;
mod escape;
mod log;
mod manager;
mod metrics_server;
mod openmetrics;
mod report;
mod server;
mod shares;
mod socket_dir;
mod timed_stream;
mod trace;

use serde::{Deserialize, Serialize};

pub use descriptors::open_descriptor_table;
pub use error::Error;
pub use escape::{printable, printable_json};
pub use log::{LogLevel, Logging, Syslog, nearest};
pub use manager::{ManagerClient, ManagerRequest, ManagerSocket};
pub use metrics_server::{MetricsAddress, MetricsAddressError, MetricsServer, MetricsSocket};
pub use openmetrics::{MetricsFormat, metrics_text};
pub use report::{
    BucketReport, ErrorReport, ExportKind, ExportReport, OperationReport, PathLack, REPORT_VERSION, ServerReport,
    ShareReport, ShareStatus, UsageReport,
};
pub use server::{Control, Owner};
pub use shares::{HeldInode, ServedShare, SettingChange};
pub use socket_dir::{Endpoint, managers, sockets};
pub use trace::{TRACE_SECONDS_MAX, Trace, TraceFile, TraceOptions};

/// The maximum length of a log line in bytes. Lines that outside input makes longer are cut.
pub const LOG_LINE_BYTES_MAX: usize = 8 << 10;
/// The maximum length of a reply in bytes: the report of a thousand shares, each with the latencies of a dozen operations.
pub const REPLY_BYTES_MAX: usize = 16 << 20;

/// A request; one line.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Returns the shares and the log settings: [`Status`].
    Status,
    /// Returns the exports of all shares, and who uses them: [`ServerReport`].
    Report {
        /// The client's [`REPORT_VERSION`].
        version: u32,
    },
    /// Returns the transport of a mount's requests: [`TransportReport`].
    Explain {
        /// The index in [`Status::shares`].
        share: usize,
    },
    /// Returns which snapshots hold the images of a snapshotter: a list of [`HeldImage`].
    Images,
    /// Changes settings of a share while it is served, all or none; returns a list of sentences that say what holds now.
    Set {
        /// The index in [`Status::shares`]; `None`: the only one.
        share: Option<usize>,
        /// What to change.
        settings: Vec<Setting>,
    },
    /// Changes the log settings; returns [`Status`].
    Log {
        /// A level, a list, or one of the words of `ferry log`.
        level: String,
        /// The index in [`Status::shares`]; `None`: all shares.
        share: Option<usize>,
        /// The file, as a path from the root of the share.
        file: Option<FileName>,
        /// Send the log's lines, and restore the settings when the client disconnects.
        follow: bool,
    },
}

/// An image of a snapshotter's store, and a snapshot that holds it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldImage {
    /// Its path below the root of the snapshotter.
    pub image: String,
    /// The name of the snapshot.
    pub snapshot: String,
    /// The container image that the snapshot is a layer of, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The names of some snapshots that are based on it.
    pub uses: Vec<String>,
    /// How many there are.
    pub uses_count: u64,
}

/// A setting and its new value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// The name.
    pub name: String,
    /// The value, as on the command line.
    pub value: String,
}

/// A path as bytes, because JSON only has text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FileName(pub Vec<u8>);

/// The reply to a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply<T> {
    /// The result.
    Ok(T),
    /// Why the request failed, in a sentence.
    Error(String),
}

/// The shares and log settings of a server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// The process id.
    pub pid: u32,
    /// The shares.
    pub shares: Vec<ShareStatus>,
    /// The log level.
    pub log: String,
    /// The files whose requests are logged, if any are.
    pub requests: Option<String>,
}

/// The transport of a mount's requests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TransportReport {
    /// For people.
    pub text: String,
    /// For programs.
    pub json: serde_json::Value,
}
