//! Reports the transport of requests and data, and why a faster one is not used.

use std::fmt;

use crate::Path;
use crate::machine::{NoUring, uring_allowed};

/// Whether a feature is used, and if not, why.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Verdict {
    /// It is used.
    pub used: bool,
    /// Why not, and how to enable it.
    pub reason: Option<String>,
    /// The command that enables it, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Verdict {
    pub(crate) fn used() -> Self {
        Self { used: true, reason: None, remedy: None }
    }

    pub(crate) fn not(reason: impl ToString) -> Self {
        Self { used: false, reason: Some(reason.to_string()), remedy: None }
    }

    pub(crate) fn no_uring(reason: &NoUring) -> Self {
        Self { remedy: reason.remedy().map(str::to_owned), ..Self::not(reason) }
    }
}

/// Returns whether a mount could use FUSE-over-io_uring, as far as this shows before a mount.
pub fn uring_verdict() -> Verdict {
    uring_allowed().map_or_else(|reason| Verdict::no_uring(&reason), |()| Verdict::used())
}

/// The transport of a mount's requests and data.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Explanation {
    /// The transport of requests: [`Path::Uring`] or [`Path::Devfuse`].
    pub path: Path,
    /// FUSE-over-io_uring.
    pub uring: Verdict,
    /// Passthrough of whole files.
    pub passthrough: Verdict,
    /// Notifications of the kernel about changes made elsewhere.
    pub notifications: Verdict,
    /// The number of rings, one per possible CPU; 0 without io_uring.
    pub rings: usize,
    /// Entries of each ring.
    pub ring_depth: usize,
    /// The minimum number of threads that read /dev/fuse.
    pub readers: usize,
    /// The maximum READ and WRITE in bytes.
    pub max_write_bytes: u32,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.path, &self.uring.reason) {
            (Path::Uring, _) => writeln!(
                f,
                "Requests go through io_uring: {} rings, one for each CPU, of {} entries.",
                self.rings, self.ring_depth
            )?,
            (_, reason) => {
                let threads = if self.readers == 1 { "thread" } else { "threads" };
                writeln!(f, "Requests go through /dev/fuse, read by {} {threads} and more when needed.", self.readers)?;
                if let Some(reason) = reason {
                    writeln!(f, "Not through io_uring: {reason}.")?;
                }
            }
        }
        match &self.passthrough.reason {
            None => writeln!(f, "The kernel reads and writes files of the source directly (passthrough).")?,
            Some(reason) => {
                writeln!(f, "Data pass through this process, not straight to the source's files: {reason}.")?
            }
        }
        match &self.notifications.reason {
            None => write!(f, "The kernel is told of changes that are made through other exports of the source."),
            Some(reason) => write!(f, "The kernel is not told of changes that are made elsewhere: {reason}."),
        }
    }
}

#[cfg(test)]
mod tests {
    use ferry_wire::fuse::WRITE_BYTES_MAX;

    use super::*;

    #[test]
    fn reports_missing_features_and_remedies() {
        let mut explanation = Explanation {
            path: Path::Devfuse,
            uring: Verdict::no_uring(&NoUring::Parameter),
            passthrough: Verdict::not("it needs CAP_SYS_ADMIN"),
            notifications: Verdict::used(),
            rings: 0,
            ring_depth: 0,
            readers: 2,
            max_write_bytes: WRITE_BYTES_MAX,
        };
        let text = explanation.to_string();
        assert!(text.contains("echo Y > /sys/module/fuse/parameters/enable_uring"), "{text}");
        assert!(text.contains("options fuse enable_uring=1") && text.contains("CAP_SYS_ADMIN"), "{text}");
        assert!(text.contains("read by 2 threads and more when needed"), "{text}");
        explanation.readers = 1;
        explanation.notifications = Verdict::not("it keeps nothing");
        let text = explanation.to_string();
        assert!(text.contains("read by 1 thread and more") && text.contains("not told of changes"), "{text}");
        explanation = Explanation { path: Path::Uring, rings: 2, ring_depth: 8, ..explanation };
        assert!(explanation.to_string().starts_with("Requests go through io_uring: 2 rings"));
        let json = serde_json::to_value(&explanation).unwrap();
        assert_eq!(json["path"], "uring");
        assert_eq!(json["passthrough"]["used"], false);
        assert_eq!(json["uring"]["remedy"], "echo Y > /sys/module/fuse/parameters/enable_uring");
        assert!(json["passthrough"].get("remedy").is_none(), "{json}");
    }
}
