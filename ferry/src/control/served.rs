//! What is served: as the server holds it, and as it is shown.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use ferry_vfs::{Caller, FileSystem, Ino, Name};
use serde::{Deserialize, Serialize};

use super::Explained;
use crate::cli::Share;
use crate::exports;
use crate::share;

/// One share that is up.
pub struct Served {
    shown: Shown,
    /// What [`ferry_engine::requests::Filter`] calls it.
    name: String,
    source: Arc<dyn FileSystem>,
    mount: Option<Arc<ferry_fuse::Export>>,
}

impl std::fmt::Debug for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Served").field("shown", &self.shown).finish_non_exhaustive()
    }
}

/// One share, as `--json` and `ferry log` show it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Shown {
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

impl Served {
    /// A share before it is mounted.
    pub fn new(share: &Share, source: Arc<dyn FileSystem>) -> Self {
        let is_device = share.virtiofs.is_some() || share.fd.is_some();
        let has_tag = is_device || matches!(share.ninep, Some(crate::ninep::Address::VhostUser(_)));
        let shown = Shown {
            source: match share.kind() {
                crate::source::Kind::Dir(path) => share::shown(&path),
                _ => share.source.to_string_lossy().into_owned(),
            },
            tag: has_tag.then(|| share.tag_or_default().as_str().to_owned()),
            virtiofs: share.virtiofs.as_deref().map(share::shown),
            fd: share.fd,
            ninep: None,
            mount: None,
            read_only: share.read_only,
            queues: is_device.then(|| exports::device_options(share).queues),
        };
        Self { shown, name: exports::name(share), source, mount: None }
    }

    /// It can be reached by 9P clients.
    pub fn listens(&mut self, address: &str) {
        self.shown.ninep = Some(address.to_owned());
    }

    /// It is mounted.
    pub fn mounted(&mut self, path: PathBuf, export: Arc<ferry_fuse::Export>) {
        self.shown.mount = Some(path.to_string_lossy().into_owned());
        self.mount = Some(export);
    }

    /// What others are shown of it.
    pub fn shown(&self) -> &Shown {
        &self.shown
    }

    /// What the log of requests calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// By which paths its requests travel, if it is mounted.
    pub fn explain(&self) -> Result<Explained> {
        let Some(mount) = &self.mount else { bail!("{} is not mounted, only shared", self.shown.source) };
        let explanation = mount.explain();
        Ok(Explained { text: explanation.to_string(), json: serde_json::to_value(explanation)? })
    }

    /// The inode of a file, from the root of the source.
    pub fn find(&self, path: &[u8]) -> Result<Held> {
        let cx = Caller::default();
        let mut held = Held { source: Arc::clone(&self.source), ino: Ino::ROOT };
        for part in path.split(|&byte| byte == b'/').filter(|part| !part.is_empty()) {
            let entry = Name::new(part).and_then(|name| self.source.lookup(&cx, held.ino, name));
            match entry {
                // What was held before is given back here.
                Ok(entry) => held = Held { source: Arc::clone(&self.source), ino: entry.ino },
                Err(error) => {
                    bail!("cannot find {} in {}: {error}", String::from_utf8_lossy(path), self.shown.source)
                }
            }
        }
        Ok(held)
    }
}

/// A reference to an inode, so that its number stays its own.
pub struct Held {
    source: Arc<dyn FileSystem>,
    ino: Ino,
}

impl Held {
    /// The inode.
    pub fn ino(&self) -> Ino {
        self.ino
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The root is nobody's reference.
        if self.ino != Ino::ROOT {
            self.source.forget(self.ino, 1);
        }
    }
}
