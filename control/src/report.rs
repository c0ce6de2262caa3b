//! The report of a server: its shares, their exports, and their use.

use ferry_engine::metrics::{OperationSnapshot, Snapshot, bucket_end_ns};
use nix::errno::Errno;
use serde::{Deserialize, Serialize};

/// The version of [`ServerReport`], which a client names in its request. It grows when a field changes its meaning or is
/// removed; new fields do not change it.
pub const REPORT_VERSION: u32 = 1;

/// The reply to [`crate::Request::Report`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerReport {
    /// [`REPORT_VERSION`].
    pub version: u32,
    /// Its process id.
    pub pid: u32,
    /// The version of its program; `None`: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// The time in seconds since it began to serve.
    pub uptime_s: u64,
    /// The number of its open descriptors; `None`: unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub descriptors: Option<u64>,
    /// Its shares, in the order of [`crate::Status::shares`].
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
    /// The path of the socket of a disk, whose source is its file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The socket on which containerd connects, of a snapshotter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshotter: Option<String>,
    /// Whether the share is read-only.
    pub read_only: bool,
    /// The number of request queues of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<usize>,
}

/// A share.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ShareReport {
    /// Its source and addresses.
    #[serde(flatten)]
    pub share: ShareStatus,
    /// The cache policy, as the word of `--cache`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// The current rate limit, as the words of `--limit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// The reports of its exports.
    #[serde(default)]
    pub exports: Vec<ExportReport>,
}

impl ShareStatus {
    /// Returns where clients find this export: a socket, an address or a mount point.
    #[must_use]
    pub fn place(&self, kind: ExportKind) -> Option<String> {
        match kind {
            ExportKind::Virtiofs => self.virtiofs.clone().or_else(|| self.descriptor()),
            ExportKind::Disk => self.disk.clone().or_else(|| self.descriptor()),
            ExportKind::Ninep => self.ninep.clone(),
            ExportKind::Mount => self.mount.clone(),
            ExportKind::Snapshotter => self.snapshotter.clone(),
        }
    }

    fn descriptor(&self) -> Option<String> {
        self.fd.map(|fd| format!("descriptor {fd}"))
    }
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
    /// A disk.
    Disk,
    /// Snapshots for containerd.
    Snapshotter,
}

impl ExportKind {
    /// All kinds, in the order in which they are shown.
    pub const ALL: [Self; 5] = [Self::Virtiofs, Self::Ninep, Self::Mount, Self::Disk, Self::Snapshotter];

    /// Returns the word for it in text and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Virtiofs => "virtiofs",
            Self::Ninep => "9p",
            Self::Mount => "mount",
            Self::Disk => "disk",
            Self::Snapshotter => "snapshotter",
        }
    }
}

/// An export and its use.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ExportReport {
    /// The kind.
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
    /// The number of completed requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// The number of bytes of files that clients have read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// The number of bytes of files that clients have written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_bytes: Option<u64>,
    /// The number of failed requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors: Option<u64>,
    /// The number of requests in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<u64>,
    /// The requested operations.
    #[serde(default)]
    pub operations: Vec<OperationReport>,
    /// Other counters.
    #[serde(default)]
    pub usage: Vec<UsageReport>,
}

/// The requests of one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationReport {
    /// Its name.
    pub name: String,
    /// The number of completed requests.
    pub requests: u64,
    /// The number of requests in flight.
    pub in_flight: u64,
    /// The number of data bytes.
    pub bytes: u64,
    /// The sum of the latencies in nanoseconds.
    pub latency_ns: u64,
    /// The failed requests, by error.
    pub errors: Vec<ErrorReport>,
    /// The requests by latency.
    pub buckets: Vec<BucketReport>,
}

/// The requests that failed with one error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReport {
    /// The error, as `ENOENT`.
    pub errno: String,
    /// The number.
    pub requests: u64,
}

/// The requests with similar latency.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BucketReport {
    /// The upper bound of the latency in nanoseconds; `None`: unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_ns: Option<u64>,
    /// The number.
    pub requests: u64,
}

/// Another counter of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReport {
    /// The name of the metric without `ferry_`.
    pub name: String,
    /// The label `kind`, if the metric has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// The number.
    pub value: u64,
}

impl ExportReport {
    /// Adds the counters of its requests.
    #[must_use]
    pub fn with_requests(self, counted: &Snapshot) -> Self {
        let bytes =
            |name: &str| counted.operations.iter().find(|operation| operation.name == name).map_or(0, |one| one.bytes);
        let operations: Vec<_> = counted.operations.iter().map(OperationReport::of).collect();
        let errors = operations.iter().flat_map(|operation| &operation.errors).map(|error| error.requests);
        let mut usage = self.usage;
        usage.push(UsageReport { name: "invalid_requests_total".into(), value: counted.invalid, kind: None });
        Self {
            requests: Some(counted.requests()),
            read_bytes: Some(bytes("read")),
            written_bytes: Some(bytes("write")),
            errors: Some(errors.sum()),
            in_flight: Some(counted.in_flight()),
            operations,
            usage,
            ..self
        }
    }
}

impl OperationReport {
    fn of(counted: &OperationSnapshot) -> Self {
        let errors = counted.errors.iter();
        let errors = errors.map(|(number, requests)| ErrorReport { errno: errno_name(*number), requests: *requests });
        let buckets = counted.buckets.iter().enumerate().filter(|(_, requests)| **requests > 0);
        let buckets = buckets.map(|(at, requests)| BucketReport { end_ns: bucket_end_ns(at), requests: *requests });
        Self {
            name: counted.name.clone(),
            requests: counted.requests(),
            in_flight: counted.in_flight,
            bytes: counted.bytes,
            latency_ns: counted.latency_ns,
            errors: errors.collect(),
            buckets: buckets.collect(),
        }
    }
}

/// Returns the name of an error, such as `ENOENT`, or its number. Errors above those of Linux are counted as 0.
pub(crate) fn errno_name(number: i32) -> String {
    match (number, Errno::from_raw(number)) {
        (0, _) => "other".into(),
        (_, Errno::UnknownErrno) => number.to_string(),
        (_, known) => format!("{known:?}"),
    }
}

/// A better path that an export does not use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathLack {
    /// The path.
    pub path: String,
    /// The reason.
    pub reason: String,
    /// The command that enables it, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_names_of_their_own() {
        let names: std::collections::BTreeSet<_> = (0..=133).map(errno_name).collect();
        assert_eq!(names.len(), 134, "{names:?}");
        assert_eq!([2, 41, 0].map(errno_name), ["ENOENT", "41", "other"]);
    }

    #[test]
    fn a_report_of_an_older_program_has_no_version_of_it() {
        let report: ServerReport =
            serde_json::from_str(r#"{"version":1,"pid":7,"uptime_s":1,"shares":[]}"#).expect("a report");
        assert_eq!(report.program, None);
    }
}
