//! The client of running servers, and the shares that this server reports ([`ferry_control`]).

mod client;

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use ferry_control::{Owner, ServedShare, ShareStatus, TransportReport};
use ferry_vfs::FileSystem;

use crate::flags::{Address, Kind, Share};
use crate::{paths, sandbox};

pub use client::{Target, is_in_mount, statuses};

/// The owner of this server.
pub const OWNER: Owner = Owner { pid: sandbox::pid, is_ours: sandbox::is_ours };

/// Returns the status of a share before it is mounted; `name` is its name in the log.
pub fn served_share(share: &Share, name: &str, source: Arc<dyn FileSystem>) -> ServedShare {
    let is_device = share.virtiofs.is_some() || share.fd.is_some();
    let has_tag = is_device || matches!(share.ninep, Some(Address::VhostUser(_)));
    let shown = ShareStatus {
        source: match share.kind() {
            Kind::Dir(path) => paths::absolute(&path),
            _ => share.source.to_string_lossy().into_owned(),
        },
        tag: has_tag.then(|| share.tag_or_default().as_str().to_owned()),
        virtiofs: share.virtiofs.as_deref().map(paths::absolute),
        fd: share.fd,
        ninep: None,
        mount: None,
        read_only: share.read_only,
        queues: is_device.then(|| share.queue_count()),
    };
    ServedShare::new(shown, name.into(), source)
}

/// Adds the mount to the status of a share.
pub fn set_mounted(served: &mut ServedShare, path: &Path, export: &Arc<ferry_fuse::Export>) -> Result<()> {
    let explanation = export.explain();
    let explained = TransportReport { text: explanation.to_string(), json: serde_json::to_value(explanation)? };
    let export = Arc::downgrade(export);
    let is_there = move || export.upgrade().is_some_and(|export| !export.has_ended());
    served.mounted(path.to_string_lossy().into_owned(), explained, is_there);
    Ok(())
}
