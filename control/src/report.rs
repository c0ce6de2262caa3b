//! What a server reports of itself: its shares, the exports of each, and who uses them.

use serde::{Deserialize, Serialize};

/// The version of [`ServerReport`], which a client names in its request. It grows when a field changes its meaning or is
/// removed; new fields do not change it.
pub const REPORT_VERSION: u32 = 1;

/// The answer to [`crate::Request::Report`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerReport {
    /// [`REPORT_VERSION`].
    pub version: u32,
    /// Its process.
    pub pid: u32,
    /// Seconds since it began to serve.
    pub uptime_s: u64,
    /// What it serves, in the order of [`crate::Status::shares`].
    pub shares: Vec<ShareReport>,
}

/// The status of a share in `--json` and `ferry log`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ShareStatus {
    /// The source.
    pub source: String,
    /// The tag that a guest mounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The path of the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtiofs: Option<String>,
    /// The number of the inherited socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<u16>,
    /// The address for 9P clients.
    #[serde(default, rename = "9p", skip_serializing_if = "Option::is_none")]
    pub ninep: Option<String>,
    /// The mount point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<String>,
    /// Whether the share is read-only.
    pub read_only: bool,
    /// The number of request queues of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<usize>,
}

/// A share.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ShareReport {
    /// What it is and where.
    #[serde(flatten)]
    pub share: ShareStatus,
    /// What its clients may keep, as the word of `--cache`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// The exports that tell more.
    #[serde(default)]
    pub exports: Vec<ExportReport>,
}

/// How a share is exported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExportKind {
    /// virtio-fs.
    #[default]
    Virtiofs,
    /// 9P.
    #[serde(rename = "9p")]
    Ninep,
    /// A mount on this host.
    Mount,
}

/// An export, and what uses it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ExportReport {
    /// How.
    pub kind: ExportKind,
    /// Connected virtual machine monitors or 9P connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<u64>,
    /// The path of requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Better paths that it does not use.
    #[serde(default)]
    pub lacks: Vec<PathLack>,
    /// Requests served so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// Bytes of files that clients read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// Bytes of files that clients wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_bytes: Option<u64>,
}

/// A better path that an export does not use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathLack {
    /// The path.
    pub path: String,
    /// Why not.
    pub reason: String,
    /// The command that enables it, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}
