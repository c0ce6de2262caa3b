//! Options of a mount.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ferry_engine::RateLimiter;
pub use ferry_serve::Cache;

use crate::resume::Resumable;

/// How requests travel between the kernel and this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Path {
    /// The best available one.
    #[default]
    Auto,
    /// FUSE-over-io_uring, or an error that says why not.
    Uring,
    /// /dev/fuse.
    Devfuse,
}

impl FromStr for Path {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        match text {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "devfuse" => Ok(Self::Devfuse),
            _ => Err(PathError(text.into())),
        }
    }
}

/// Text that is no [`Path`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no path to the kernel; choose auto, uring or devfuse")]
pub struct PathError(String);

/// How an export is to behave.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct Options {
    /// The transport of requests. Default: the best available one; for a source with blocking calls
    /// ([`ferry_vfs::Features::waits`]) that is /dev/fuse.
    pub path: Path,
    /// Whether the kernel may read and write whole files of the source on its own; `None` (the default): if it can.
    pub passthrough: Option<bool>,
    /// What the kernel may keep. Default: [`Cache::Auto`].
    pub cache: Cache,
    /// How long the kernel may keep names; `None` (the default): as the cache mode says.
    pub entry_timeout: Option<Duration>,
    /// How long the kernel may keep attributes; `None` (the default): as the cache mode says.
    pub attr_timeout: Option<Duration>,
    /// How long the kernel may remember that a name does not exist; `None` (the default): as the cache mode says.
    pub negative_timeout: Option<Duration>,
    /// Let the page cache hold written data back. Excludes passthrough. Default: no.
    pub writeback: bool,
    /// Extended attributes and POSIX ACLs. Default: yes.
    pub xattr: bool,
    /// Files opened with `O_DIRECT` leave the page cache out altogether. Default: yes.
    pub direct_opens: bool,
    /// Locks are local to the mount, and closing a file opened for reading waits for no reply. Default: no.
    pub local_locks: bool,
    /// Only this mount reaches the source's files, so locks are local to it, and no close waits for a reply. Default: no.
    pub single_client: bool,
    /// Allow idmapped mounts (Linux 6.12). The kernel then sends the caller only with requests that create files, and
    /// the source treats other callers as unknown: root's fallocate and copies clear suid and sgid. Requires
    /// [`Self::default_permissions`]. Default: no.
    pub allow_idmap: bool,
    /// Allow access by users other than the one who mounts. Default: no.
    pub allow_other: bool,
    /// Nothing can be changed through this mount. Default: no.
    pub read_only: bool,
    /// The kernel checks permissions; sources expect it. Default: yes.
    pub default_permissions: bool,
    /// What the mount table shows as the source. Default: `ferry`.
    pub fsname: String,
    /// What the log calls it; `None` (the default): as the mount table does.
    pub name: Option<String>,
    /// The type in the mount table, after `fuse.`. Default: `ferry`.
    pub subtype: String,
    /// The source has other exports. With [`Cache::Always`], a file first opened for writing then does not use
    /// passthrough, so that the others are notified of each write. The kernel requires overlapping opens to agree: a file
    /// that is being read keeps passthrough when it is opened for writing, too, but its writes go through the server.
    /// Stores through a shared mapping are only notified at close. Default: no.
    pub shared: bool,
    /// The source's files lie on an overlayfs (a container's root) or another file system that is stacked on one. Only
    /// then can they be passed through; but no overlayfs can be put on such a mount. Default: no.
    pub stacked_source: bool,
    /// The number of entries per ring: how many requests of one CPU a single call serves. Default: 8.
    pub ring_depth: usize,
    /// How long a handler, a transfer, or a copy between files may take before its caller gets EIO; zero: no limit.
    /// Default: 120 s. Lock requests that wait are exempt. A transfer that the kernel cannot cancel (a hanging disk)
    /// continues in the background, with a thread and the memory of one request.
    pub handler_timeout: Duration,
    /// Threads that read /dev/fuse at least; 0 (the default): one, which is fastest for a single client (eight for a source
    /// whose calls wait), and as many more as requests keep busy.
    pub threads: usize,
    /// Limits the rate of requests. Data that the kernel accesses directly (passthrough) is not limited: switch it off.
    /// Default: none.
    pub limiter: Option<Arc<RateLimiter>>,
    /// Whether the connection may outlive this server, so that the next one resumes it (Linux 6.9, [`Export::resumable`]). Requests
    /// then go through one descriptor of /dev/fuse: the kernel fails those of a descriptor that is closed. Only for sources that a
    /// new server finds unchanged, with the same inode numbers, and whose clients open and change nothing. Default: no.
    ///
    /// [`Export::resumable`]: crate::Export::resumable
    pub outlives_server: bool,
    /// The connection of a server that has ended, which is resumed in place of mounting. Default: none.
    pub resumed: Option<Arc<Resumable>>,
    /// Further options of the mount itself.
    pub mount: crate::MountOptions,
}

/// Longer than working disks and networks take, and the limit at which kernels report a hung task.
const HANDLER_TIMEOUT: Duration = Duration::from_secs(120);

/// Enough that a burst of one CPU is served in one pass; more gained nothing.
const RING_DEPTH: usize = 8;

impl Default for Options {
    fn default() -> Self {
        Self {
            path: Path::Auto,
            passthrough: None,
            cache: Cache::Auto,
            entry_timeout: None,
            attr_timeout: None,
            negative_timeout: None,
            writeback: false,
            xattr: true,
            local_locks: false,
            single_client: false,
            allow_idmap: false,
            direct_opens: true,
            allow_other: false,
            read_only: false,
            default_permissions: true,
            fsname: "ferry".into(),
            name: None,
            subtype: "ferry".into(),
            shared: false,
            stacked_source: false,
            ring_depth: RING_DEPTH,
            handler_timeout: HANDLER_TIMEOUT,
            threads: 0,
            limiter: None,
            outlives_server: false,
            resumed: None,
            mount: crate::MountOptions::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_by_name() {
        for (text, path) in [("auto", Path::Auto), ("uring", Path::Uring), ("devfuse", Path::Devfuse)] {
            assert_eq!(text.parse(), Ok(path));
        }
        assert!("Uring".parse::<Path>().unwrap_err().to_string().contains("choose auto"));
    }
}
