//! The client of running servers, and the shares that this server reports ([`ferry_control`]).

mod client;

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use ferry_control::{
    ExportKind, ExportReport, Owner, PathLack, ServedShare, ShareStatus, TransportReport, UsageReport,
};
use ferry_engine::{IoMode, RateLimiter};
use ferry_image::Objects;
use ferry_vfs::FileSystem;
use ferry_virtiofs::SessionStore;

use crate::flags::{Address, Kind, Share};
use crate::{paths, sandbox};

pub use client::{CHANGE_TIME, Client, Target, is_in_mount, manager_of, reports_of, statuses};

/// The owner of this server.
pub const OWNER: Owner = Owner { pid: sandbox::pid, may_access: sandbox::may_access };

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
        read_only: share.read_only,
        queues: is_device.then(|| share.queue_count()),
        ..ShareStatus::default()
    };
    let mut served = ServedShare::new(shown, name.into(), source);
    if let Some(cache) = share.cache.to_possible_value() {
        served.caches(cache.get_name());
    }
    served
}

/// A share is offered to virtual machines, one after another.
pub fn offered(
    served: &mut ServedShare,
    export: &ferry_virtiofs::Export,
    source: Arc<dyn FileSystem>,
    store: Option<Arc<SessionStore>>,
) {
    let (front_end, share, window) = (export.front_end(), Arc::clone(export.share()), export.window());
    served.counted(ExportKind::Virtiofs, Arc::clone(share.metrics()));
    served.exported(move || {
        let mut counts = held(&share);
        counts.extend([("dax_window_bytes", window.bytes()), ("dax_window_mapped_bytes", window.mapped_bytes())]);
        counts.extend(store.iter().map(|store| ("restarts_total", store.restarts())));
        counts.extend(source.counts());
        let report = device_report(ExportKind::Virtiofs, IoMode::Auto, front_end.is_connected(), counts);
        Some(report.with_requests(&share.metrics().snapshot()))
    });
}

/// A disk is offered to virtual machines, one after another. `counts` returns what its source counts.
pub fn offered_disk(
    served: &mut ServedShare,
    export: &ferry_blk::Export,
    io: IoMode,
    counts: impl Fn() -> Counts + Send + Sync + 'static,
) {
    let (front_end, metrics) = (export.front_end(), export.metrics());
    served.counted(ExportKind::Disk, Arc::clone(&metrics));
    served.exported(move || {
        let report = device_report(ExportKind::Disk, io, front_end.is_connected(), counts());
        Some(report.with_requests(&metrics.snapshot()))
    });
}

/// Numbers beside those of requests, as metrics are named.
pub type Counts = Vec<(&'static str, u64)>;

/// What clients of a share hold.
fn held(share: &ferry_serve::Share) -> Counts {
    let usage = share.usage();
    let mut counts =
        vec![("inodes", usage.inodes), ("open_files", usage.open_files), ("parked_locks", usage.parked_locks)];
    counts.extend(share.limiter().map(|limiter| waits(limiter)));
    counts
}

/// What a limit has done.
pub fn waits(limiter: &RateLimiter) -> (&'static str, u64) {
    ("limit_waits_total", limiter.waits())
}

fn device_report(kind: ExportKind, io: IoMode, is_connected: bool, mut counts: Counts) -> ExportReport {
    let (path, lacks) = device_path(io, ferry_engine::lacks_io_uring());
    counts.push(("ring_fallbacks_total", ferry_engine::ring_fallbacks()));
    let (clients, path) = (Some(is_connected.into()), Some(path.into()));
    ExportReport { kind, clients, path, lacks, usage: used(counts), ..ExportReport::default() }
}

/// The path of a device's requests and data, and the better one that it does not use.
fn device_path(io: IoMode, lacks_io_uring: bool) -> (&'static str, Vec<PathLack>) {
    let reason = match io {
        IoMode::Sync => "it was turned off",
        IoMode::Auto if lacks_io_uring => "a worker found none: this process may not use it, or the kernel has none",
        IoMode::Auto | IoMode::Uring => return ("vhost-user, data by io_uring", Vec::new()),
    };
    let lack = PathLack { path: "io_uring".into(), reason: reason.into(), remedy: None };
    ("vhost-user, data by system calls", vec![lack])
}

/// A share is offered to 9P clients.
pub fn offered_9p(
    served: &mut ServedShare,
    export: &ferry_ninep::Export,
    (source, limiter): (Arc<dyn FileSystem>, Arc<RateLimiter>),
    is_device: bool,
) {
    let (usage, metrics) = (export.usage_reader(), export.metrics());
    served.counted(ExportKind::Ninep, Arc::clone(&metrics));
    let path = if is_device { "vhost-user" } else { "sockets" };
    let report = move || {
        let usage = usage();
        let counts = [
            ("fids", usage.fids),
            ("connections", usage.connections),
            ("threads", usage.threads),
            ("buffered_bytes", usage.buffered_bytes),
            ("parked_locks", usage.parked_locks),
        ];
        let limited = [waits(&limiter)];
        let clients = Some(usage.connections as u64);
        let counts = counts.into_iter().map(|(name, value)| (name, value as u64)).chain(limited).chain(source.counts());
        let usage = used(counts);
        ExportReport { kind: ExportKind::Ninep, clients, path: Some(path.into()), usage, ..ExportReport::default() }
    };
    served.exported(move || Some(report().with_requests(&metrics.snapshot())));
}

/// Returns the status of an image that the kernel mounts: its server fetches what is missing.
pub fn served_image(image: &Path, dir: &Path, objects: &Arc<Objects>) -> ServedShare {
    const PATH: &str = "the kernel's EROFS, missing data by fanotify";
    let source = format!("image:{}", paths::absolute(image));
    let shown = ShareStatus { source: source.clone(), read_only: true, ..ShareStatus::default() };
    let mut served = ServedShare::served_by_kernel(shown, source);
    let explained =
        TransportReport { text: format!("requests by {PATH}"), json: serde_json::json!({ "path": "erofs" }) };
    served.mounted(dir.to_string_lossy().into_owned(), explained, || true);
    let objects = Arc::clone(objects);
    served.exported(move || {
        let usage = used(objects.counts());
        Some(ExportReport { kind: ExportKind::Mount, path: Some(PATH.into()), usage, ..ExportReport::default() })
    });
    served
}

fn used(counts: impl IntoIterator<Item = (&'static str, u64)>) -> Vec<UsageReport> {
    counts.into_iter().map(|(name, value)| UsageReport { name: name.into(), value, kind: None }).collect()
}

/// What a mount does now; `None` if it has ended.
fn mount_report(export: &ferry_fuse::Export, source: &dyn FileSystem) -> Option<ExportReport> {
    if export.has_ended() {
        return None;
    }
    let (explanation, stats) = (export.explain(), export.stats());
    let lacks = [("io_uring", &explanation.uring), ("passthrough", &explanation.passthrough)].into_iter();
    let lacks = lacks.filter(|(_, verdict)| !verdict.used).map(|(path, verdict)| PathLack {
        path: path.into(),
        reason: verdict.reason.clone().unwrap_or_default(),
        remedy: verdict.remedy.clone(),
    });
    let requests = match explanation.path {
        ferry_fuse::Path::Uring => "io_uring",
        _ => "/dev/fuse",
    };
    let passthrough = if explanation.passthrough.used { ", data by passthrough" } else { "" };
    let mut counts = held(export.share());
    counts.extend([
        ("system_calls_total", stats.system_calls),
        ("notifications_total", stats.notifications),
        ("message_bytes_total", stats.message_bytes),
        ("ring_fallbacks_total", export.ring_fallbacks()),
    ]);
    counts.extend(source.counts());
    let report = ExportReport {
        kind: ExportKind::Mount,
        path: Some(format!("{requests}{passthrough}")),
        lacks: lacks.collect(),
        usage: used(counts),
        ..ExportReport::default()
    };
    Some(report.with_requests(&export.share().metrics().snapshot()))
}

/// Adds the mount to the status of a share.
pub fn set_mounted(
    served: &mut ServedShare,
    path: &Path,
    export: &Arc<ferry_fuse::Export>,
    source: Arc<dyn FileSystem>,
) -> Result<()> {
    let explanation = export.explain();
    let explained = TransportReport { text: explanation.to_string(), json: serde_json::to_value(explanation)? };
    served.counted(ExportKind::Mount, Arc::clone(export.share().metrics()));
    let seen = Arc::downgrade(export);
    served.exported(move || mount_report(&*seen.upgrade()?, &*source));
    let export = Arc::downgrade(export);
    let is_there = move || export.upgrade().is_some_and(|export| !export.has_ended());
    served.mounted(path.to_string_lossy().into_owned(), explained, is_there);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_names_the_better_path_that_it_does_not_use() {
        for (io, lacks_io_uring, used, why) in [
            (IoMode::Auto, false, "io_uring", None),
            (IoMode::Uring, false, "io_uring", None),
            (IoMode::Auto, true, "system calls", Some("may not use it")),
            (IoMode::Sync, false, "system calls", Some("turned off")),
        ] {
            let (path, lacks) = device_path(io, lacks_io_uring);
            assert!(path.ends_with(used), "{io:?}: {path}");
            let reason = lacks.first().map(|lack| lack.reason.as_str());
            assert_eq!(reason.is_some(), why.is_some(), "{io:?}");
            assert!(why.is_none_or(|why| reason.is_some_and(|reason| reason.contains(why))), "{io:?}: {reason:?}");
        }
    }
}
