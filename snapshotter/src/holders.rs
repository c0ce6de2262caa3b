//! Which snapshots hold which images, as `ferry image du` shows it.
//!
//! containerd's leases and images are not known here: containerd removes a snapshot when none of them needs it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ferry_control::HeldImage;

use crate::api::Kind;
use crate::error::Result;
use crate::metadata::Record;
use crate::snapshotter::Snapshotter;

/// The label by which Kubernetes says which container image a layer belongs to.
const IMAGE_LABEL: &str = "containerd.io/snapshot/cri.image-ref";
/// The maximum number of snapshots that are named of those that are based on one.
const USES_MAX: usize = 8;

impl Snapshotter {
    /// Returns the images of all snapshots, in the order of their names.
    pub(crate) fn held_images(&self) -> Result<Vec<HeldImage>> {
        let (mut found, mut uses) = (Vec::new(), BTreeMap::<String, (Vec<String>, u64)>::new());
        self.metadata.for_each(|name, record| {
            if !record.parent.is_empty() {
                let (names, count) = uses.entry(record.parent.clone()).or_default();
                *count += 1;
                if names.len() < USES_MAX {
                    names.push(name.to_owned());
                }
            }
            if let Some(image) = self.image_of(&record)? {
                let of_remote = || record.remote.as_ref().map(|remote| remote.container.clone());
                let container = record.labels.get(IMAGE_LABEL).cloned().or_else(of_remote);
                let image = image.strip_prefix(self.directories.root()).unwrap_or(&image).display().to_string();
                found.push(HeldImage { image, snapshot: name.to_owned(), container, uses: Vec::new(), uses_count: 0 });
            }
            Ok(())
        })?;
        for held in &mut found {
            (held.uses, held.uses_count) = uses.get(&held.snapshot).cloned().unwrap_or_default();
        }
        Ok(found)
    }

    /// Returns the file of the image of a snapshot, if it has one.
    fn image_of(&self, record: &Record) -> Result<Option<PathBuf>> {
        Ok(match &record.remote {
            Some(remote) => Some(self.lazy.image(remote)),
            None if record.image.is_some() => Some(self.directories.image(record.id)),
            None if record.kind() == Kind::Active && self.layers.is_applied(record.id)? => {
                Some(self.directories.applied(record.id))
            }
            None => None,
        })
    }
}
