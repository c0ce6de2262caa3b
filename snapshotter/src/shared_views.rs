//! Which views are shared by virtio-fs, and which image each has.

use std::sync::Arc;

use crate::api::{Kind, Labels, Mount};
use crate::error::{Error, Result, log_failure};
use crate::idmap::IdMaps;
use crate::lazy::{SharedImage, process};
use crate::metadata::Record;
use crate::snapshotter::Snapshotter;
use crate::virtiofs::VIRTIOFS_LABEL;

impl Snapshotter {
    /// Checks that a new snapshot can be shared, if its labels ask for it.
    pub(crate) fn check_shared(&self, kind: Kind, labels: &Labels) -> Result<()> {
        let refused = |why: &str| Err(Error::InvalidArgument(format!("the label {VIRTIOFS_LABEL}: {why}")));
        match () {
            () if !labels.contains_key(VIRTIOFS_LABEL) => Ok(()),
            () if kind != Kind::View => refused("only a view can be shared by virtio-fs, because images are read-only"),
            () if IdMaps::of(labels)?.is_some() => refused("a share has the users of the image"),
            // Whether there is a directory for it.
            () => self.shares.socket(0).map(drop),
        }
    }

    /// Returns the mounts of a view that is shared by virtio-fs, and starts its process; `None`: it is mounted on this host.
    pub(crate) fn shared_mounts(&self, record: &Record) -> Result<Option<Vec<Mount>>> {
        if record.kind() != Kind::View || !record.labels.contains_key(VIRTIOFS_LABEL) {
            return Ok(None);
        }
        let image = self.shared_image(&record.parent)?;
        let directory = self.directories.snapshot(record.id);
        Ok(Some(vec![self.shares.serve((record.id, &directory), &self.directories.store(), &image)?]))
    }

    /// Returns the one image of a committed snapshot and all below it.
    fn shared_image(&self, parent: &str) -> Result<SharedImage> {
        let chain = if parent.is_empty() { Vec::new() } else { self.metadata.chain(parent)? };
        let of = |path, digest: &str| Ok(SharedImage { path, digest: digest.into(), from: None });
        match &*chain {
            [(_, Record { remote: Some(remote), .. }), ..] => self.lazy.shared(remote),
            [(_, Record { id, image: Some(image), .. })] => of(self.directories.image(*id), &image.digest),
            [(_, Record { id, merged, .. }), ..] if !merged.is_empty() => {
                of(self.directories.merged_image(*id), merged)
            }
            _ => Err(Error::FailedPrecondition(format!(
                "snapshot {parent} cannot be shared by virtio-fs: there is no one image of all its layers (see the log)"
            ))),
        }
    }

    /// Starts the processes of views again that ended with the machine or were killed, in the background; those that run go on.
    pub fn revive_shares(self: &Arc<Self>) {
        let snapshotter = Arc::downgrade(self);
        process::on_thread(move || {
            let mut views = Vec::new();
            let Some(all) = snapshotter.upgrade() else { return };
            log_failure(all.metadata.for_each(|name, record| {
                if record.labels.contains_key(VIRTIOFS_LABEL) && record.kind() == Kind::View {
                    views.push(name.to_owned());
                }
                Ok(())
            }));
            drop(all);
            for name in views {
                let Some(all) = snapshotter.upgrade() else { return };
                log_failure(all.mounts(&name).map(drop));
            }
        });
    }
}
