//! The report of a running snapshotter on the control socket: calls, snapshots and space.

use std::sync::{Arc, Weak};

use ferry_control::{ExportKind, ExportReport, HeldImage, ServedShare, ShareStatus, UsageReport};
use ferry_image::error_chain;

use crate::config::Config;
use crate::snapshotter::{Counts, Snapshotter};

/// Returns the report.
#[must_use]
pub fn served(config: &Config, snapshotter: &Arc<Snapshotter>) -> ServedShare {
    let shown = ShareStatus {
        source: config.root.display().to_string(),
        snapshotter: Some(config.address.display().to_string()),
        ..ShareStatus::default()
    };
    let mut served = ServedShare::served_by_kernel(shown, "snapshotter".into());
    // Its threads outlive the snapshotter, whose metadata must be closed by then.
    let snapshotter = Arc::downgrade(snapshotter);
    let of_images = Weak::clone(&snapshotter);
    served.holds(move || Weak::upgrade(&of_images).map_or(Vec::new(), |snapshotter| images(&snapshotter)));
    served.exported(move || Weak::upgrade(&snapshotter).map(|snapshotter| report(&snapshotter)));
    served
}

fn images(snapshotter: &Snapshotter) -> Vec<HeldImage> {
    snapshotter.held_images().unwrap_or_else(|error| {
        tracing::warn!("cannot tell what holds the images: {}", error_chain(&error));
        Vec::new()
    })
}

fn report(snapshotter: &Snapshotter) -> ExportReport {
    let usage = match snapshotter.counts() {
        Ok(Counts { active, committed, views, layer_directories, layer_mounts, store_bytes }) => [
            ("snapshots", Some("active"), active),
            ("snapshots", Some("committed"), committed),
            ("snapshots", Some("view"), views),
            ("layer_directories", None, layer_directories),
            ("layer_mounts", None, layer_mounts),
            ("store_bytes", None, store_bytes),
        ]
        .map(|(name, kind, value)| UsageReport { name: name.into(), kind: kind.map(Into::into), value })
        .into(),
        Err(error) => {
            tracing::warn!("cannot count the snapshots: {}", error_chain(&error));
            Vec::new()
        }
    };
    let report = ExportReport { kind: ExportKind::Snapshotter, path: Some("gRPC".into()), usage, ..Default::default() };
    let counted = report.with_requests(&snapshotter.metrics().snapshot());
    // Calls move no data of files.
    ExportReport { read_bytes: None, written_bytes: None, ..counted }
}
