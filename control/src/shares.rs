//! The shares of a server, and their status.

use std::sync::Arc;

use ferry_vfs::{Caller, FileSystem, Ino, Name};
use serde::{Deserialize, Serialize};

use crate::{Error, TransportReport};

/// One share that is up.
pub struct ServedShare {
    shown: ShareStatus,
    /// What [`ferry_engine::requests::Filter`] calls it.
    name: String,
    source: Arc<dyn FileSystem>,
    mounted: Option<Mounted>,
}

/// The transport of a mount, as last known.
struct Mounted {
    explained: TransportReport,
    /// Another process may unmount it at any time.
    is_there: Box<dyn Fn() -> bool + Send + Sync>,
}

impl std::fmt::Debug for ServedShare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Served").field("shown", &self.shown).finish_non_exhaustive()
    }
}

/// The status of a share in `--json` and `ferry log`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ShareStatus {
    /// The source.
    pub source: String,
    /// What a guest mounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtiofs: Option<String>,
    /// The inherited socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<u16>,
    /// The address for 9P clients.
    #[serde(default, rename = "9p", skip_serializing_if = "Option::is_none")]
    pub ninep: Option<String>,
    /// The mount point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<String>,
    /// Whether nothing can be changed.
    pub read_only: bool,
    /// Request queues of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<usize>,
}

impl ServedShare {
    /// Creates a share; `name` is the name that its exports use.
    #[must_use]
    pub fn new(shown: ShareStatus, name: String, source: Arc<dyn FileSystem>) -> Self {
        Self { shown, name, source, mounted: None }
    }

    /// Records an address for 9P clients.
    pub fn listens(&mut self, address: &str) {
        self.shown.ninep = Some(address.to_owned());
    }

    /// Records a mount and its transport; `is_there` returns whether it is still mounted.
    pub fn mounted(
        &mut self,
        path: String,
        explained: TransportReport,
        is_there: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        self.shown.mount = Some(path);
        self.mounted = Some(Mounted { explained, is_there: Box::new(is_there) });
    }

    /// Returns the status at start.
    #[must_use]
    pub fn status(&self) -> &ShareStatus {
        &self.shown
    }

    /// Returns the current status.
    pub(crate) fn current_status(&self) -> ShareStatus {
        let mount = self.shown.mount.clone().filter(|_| self.is_mounted().is_some());
        ShareStatus { mount, ..self.shown.clone() }
    }

    fn is_mounted(&self) -> Option<&Mounted> {
        self.mounted.as_ref().filter(|mounted| (mounted.is_there)())
    }

    /// Returns its name in the request log.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the transport of its requests, if it is mounted.
    ///
    /// # Errors
    /// [`Error::NotMounted`].
    pub fn explain(&self) -> Result<TransportReport, Error> {
        let explained = self.is_mounted().map(|mounted| mounted.explained.clone());
        explained.ok_or_else(|| Error::NotMounted(self.shown.source.clone()))
    }

    /// Finds the inode of a file by its path from the root of the source.
    ///
    /// # Errors
    /// [`Error::NoFile`].
    pub fn find(&self, path: &[u8]) -> Result<HeldInode, Error> {
        let cx = Caller::default();
        let mut held = HeldInode { source: Arc::clone(&self.source), ino: Ino::ROOT };
        for part in path.split(|&byte| byte == b'/').filter(|part| !part.is_empty()) {
            let entry = Name::new(part).and_then(|name| self.source.lookup(&cx, held.ino, name));
            match entry {
                // The assignment releases the inode held before.
                Ok(entry) => held = HeldInode { source: Arc::clone(&self.source), ino: entry.ino },
                Err(reason) => {
                    let path = String::from_utf8_lossy(path).into_owned();
                    return Err(Error::NoFile { path, share: self.shown.source.clone(), reason });
                }
            }
        }
        Ok(held)
    }
}

/// A reference to an inode, so that its number is not reused.
pub struct HeldInode {
    source: Arc<dyn FileSystem>,
    ino: Ino,
}

impl std::fmt::Debug for HeldInode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Held").field(&self.ino).finish()
    }
}

impl HeldInode {
    /// The inode.
    #[must_use]
    pub fn ino(&self) -> Ino {
        self.ino
    }
}

impl Drop for HeldInode {
    fn drop(&mut self) {
        // The root has no references.
        if self.ino != Ino::ROOT {
            self.source.forget(self.ino, 1);
        }
    }
}
