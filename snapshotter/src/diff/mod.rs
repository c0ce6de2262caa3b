//! containerd's Diff service: a layer becomes an image while its archive is read, without a directory in between.
//!
//! Unsupported calls return `Unimplemented`, so that containerd asks its next differ.

mod api;
mod applied;
mod blob;
mod lower;

use std::fs;
use std::path::Path;

use ferry_image::{LayerRules, Store, UnpackReport, Whiteouts, error_chain, hex, unpack_layer};
use ferry_vfs::sync::lock;

pub use api::{Any, ApplyRequest, ApplyResponse, DIFF_SERVICE, Descriptor};
pub(crate) use applied::Applied;
pub use blob::Stop;

use crate::api::{Kind, Mount};
use crate::error::{Error, IoContext, Result};
use crate::idmap::IdMaps;
use crate::metadata::Record;
use crate::snapshotter::Snapshotter;
use blob::Blob;

/// The media type of an applied layer.
const ARCHIVE: &str = "application/vnd.oci.image.layer.v1.tar";

impl Snapshotter {
    /// Unpacks a layer into the empty active snapshot that has these mounts; returns the descriptor of its archive.
    ///
    /// # Errors
    ///
    /// [`Error::Unimplemented`]: another differ can do it; [`Error::NotFound`]: the snapshot was removed; [`Error::FailedPrecondition`]:
    /// it is committed, or has a layer already; [`Error::InvalidArgument`]; or the blob cannot be read or unpacked.
    pub fn apply(&self, request: &ApplyRequest, stop: &Stop) -> Result<Descriptor> {
        let ApplyRequest { diff, mounts, payloads } = request;
        let diff = diff.as_ref().ok_or_else(|| Error::InvalidArgument("the call names no layer".into()))?;
        if !payloads.is_empty() {
            return Err(Error::Unimplemented("a layer for other programs to unpack".into()));
        }
        let (key, id) = self.target(mounts)?;
        let _held = self.keys.hold(&key);
        let record = self.metadata.get(&key)?;
        self.check_target(&key, (&record, id), mounts)?;
        let blob = Blob::open(&self.containerd_root, diff, stop.clone())?;
        let report = self.unpack(blob, &record).inspect_err(|_| self.layers.note_garbage())?;
        let size = i64::try_from(report.bytes).unwrap_or(i64::MAX);
        let digest = format!("sha256:{}", hex(&report.sha256));
        tracing::debug!(
            "{} of {} bytes is in snapshot {key}, {} of them new",
            diff.digest,
            size,
            report.image.new_bytes
        );
        Ok(Descriptor { media_type: ARCHIVE.into(), digest, size, ..Descriptor::default() })
    }

    /// Finds the snapshot whose own directory is in the mounts.
    fn target(&self, mounts: &[Mount]) -> Result<(String, u64)> {
        let foreign =
            || Error::Unimplemented("the mounts are not those of an active snapshot of this snapshotter".into());
        let [Mount { r#type, source, options, .. }] = mounts else { return Err(foreign()) };
        let upper = match &**r#type {
            "bind" => Some(&**source),
            "overlay" => options.iter().find_map(|option| option.strip_prefix("upperdir=")),
            _ => None,
        };
        let upper = Path::new(upper.ok_or_else(foreign)?);
        let id = || upper.parent()?.file_name()?.to_str()?.parse().ok();
        let id: u64 = id().ok_or_else(foreign)?;
        if upper != self.directories.upper(id) {
            return Err(foreign());
        }
        let mut found = None;
        self.metadata.for_each(|name, record| {
            if record.id == id {
                found = Some((name.to_owned(), record.kind()));
            }
            Ok(())
        })?;
        match found {
            Some((key, Kind::Active)) => Ok((key, id)),
            // Another differ would fill a directory that an image has replaced.
            Some((name, Kind::Committed)) => {
                Err(Error::FailedPrecondition(format!("the snapshot of the mounts is committed, as {name}")))
            }
            Some(_) => Err(foreign()),
            None => Err(removed(upper)),
        }
    }

    fn check_target(&self, key: &str, (record, id): (&Record, u64), mounts: &[Mount]) -> Result<()> {
        if record.id != id {
            return Err(removed(&self.directories.upper(id)));
        }
        if record.kind() != Kind::Active {
            return Err(Error::FailedPrecondition(format!("snapshot {key} is not active")));
        }
        self.check_not_applied(key, record)?;
        let upper = self.directories.upper(id);
        let is_empty = fs::read_dir(&upper).doing("list", &upper)?.next().is_none();
        let why = match () {
            () if !self.layers.builds() => "layers stay directories here",
            () if IdMaps::of(&record.labels)?.is_some() => "the snapshot has the users of a container",
            () if !is_empty => "the snapshot has been written to",
            () if self.mounts(key)? != mounts => "the mounts are not those of the snapshot",
            () => return Ok(()),
        };
        Err(Error::Unimplemented(format!("cannot unpack an image into snapshot {key}: {why}")))
    }

    /// Checks that the directory of a snapshot has the expected contents.
    pub(crate) fn check_not_applied(&self, key: &str, record: &Record) -> Result<()> {
        if record.kind() != Kind::Active || !self.layers.is_applied(record.id)? {
            return Ok(());
        }
        let why =
            format!("snapshot {key} has a layer that was unpacked into it as an image: commit it before it is used");
        Err(Error::FailedPrecondition(why))
    }

    fn unpack(&self, blob: Blob, record: &Record) -> Result<UnpackReport> {
        let (layers, upper) = (self.lower(&record.parent, record.on_merged)?, self.directories.upper(record.id));
        let lower = |path: &Path| {
            let of_root = std::slice::from_ref(&upper);
            let found = lower::find(if path.as_os_str().is_empty() { of_root } else { &layers }, path);
            found.map_err(|error| ferry_image::Error::Io {
                what: "use the layers below",
                path: path.into(),
                source: std::io::Error::other(error),
            })
        };
        let disk = rustix::fs::statvfs(self.directories.store()).doing("inspect", self.directories.store())?;
        let rules = LayerRules {
            // Without a layer below there is nothing to remove.
            whiteouts: if record.parent.is_empty() { Whiteouts::Drop } else { Whiteouts::Overlay },
            lower: &lower,
            // A directory would need them all.
            file_bytes_max: disk.f_blocks.saturating_mul(disk.f_frsize),
            inode_share: self.layers.inode_share,
        };
        let _recording = self.layers.recording();
        let _building = lock(&self.layers.building);
        let path = blob.path.clone();
        let store = Store::create(&self.directories.store())?;
        let unpacked = unpack_layer(blob, &path, &self.directories.applied(record.id), store, &rules);
        unpacked.map_err(|error| match error {
            ferry_image::Error::Input { .. }
            | ferry_image::Error::CannotHold { .. }
            | ferry_image::Error::OwnIdentities
            | ferry_image::Error::TooLarge(_)
            | ferry_image::Error::TooManyPacks(_) => {
                tracing::warn!("a layer is left to containerd's other differs: {}", error_chain(&error));
                Error::Unimplemented(error_chain(&error))
            }
            error => error.into(),
        })
    }
}

/// Returns the error for mounts of a snapshot that was removed: no other differ can fill it, either.
fn removed(upper: &Path) -> Error {
    Error::NotFound(format!("of the mounts ({})", upper.display()))
}
