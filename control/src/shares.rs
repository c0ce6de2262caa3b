//! The shares of a server, and their status.

use std::sync::Arc;
use std::time::Instant;

use ferry_engine::metrics::Metrics;
use ferry_vfs::{Caller, FileSystem, Ino, Name};

use crate::descriptors;
use crate::{
    Error, ExportKind, ExportReport, HeldImage, REPORT_VERSION, ServerReport, ShareReport, ShareStatus, TransportReport,
};

impl ServerReport {
    pub(crate) fn of(shares: &[ServedShare], pid: u32, started: Instant) -> Self {
        let shares = shares.iter().map(ServedShare::report).collect();
        let (uptime_s, descriptors) = (started.elapsed().as_secs(), descriptors::count());
        let program = Some(env!("CARGO_PKG_VERSION").into());
        Self { version: REPORT_VERSION, pid, program, uptime_s, descriptors, shares }
    }
}

/// The setting of the whole process: its log level.
pub(crate) const LOG: &str = "log";

/// One share that is served.
pub struct ServedShare {
    start_status: ShareStatus,
    /// Its name in [`ferry_engine::requests::Filter`].
    name: String,
    /// `None`: the kernel serves the requests.
    source: Option<Arc<dyn FileSystem>>,
    mounted: Option<MountInfo>,
    cache: Option<String>,
    exports: Vec<ExportReporter>,
    images: Option<ImageReporter>,
    limit: Option<LimitReporter>,
    settings: Vec<(&'static str, Setter)>,
    metrics: Vec<(ExportKind, Arc<Metrics>)>,
}

/// Reports on an export; `None` if it has ended.
type ExportReporter = Box<dyn Fn() -> Option<ExportReport> + Send + Sync>;

/// Returns what holds the images of a snapshotter.
type ImageReporter = Box<dyn Fn() -> Vec<HeldImage> + Send + Sync>;

/// Returns the limit in force, as the words of `--limit`.
type LimitReporter = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// Checks the new value of a setting; returns its change, or why there is none.
type Setter = Box<dyn Fn(&str) -> Result<SettingChange, String> + Send + Sync>;

/// A change that was checked and cannot fail; returns what holds then.
pub type SettingChange = Box<dyn FnOnce() -> String>;

/// The transport of a mount, as last known.
struct MountInfo {
    transport: TransportReport,
    /// Another process may unmount it at any time.
    is_there: Box<dyn Fn() -> bool + Send + Sync>,
}

impl std::fmt::Debug for ServedShare {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServedShare").field("start_status", &self.start_status).finish_non_exhaustive()
    }
}

impl ServedShare {
    /// Creates a share; `name` is the name that its exports use.
    #[must_use]
    pub fn new(start_status: ShareStatus, name: String, source: Arc<dyn FileSystem>) -> Self {
        Self { source: Some(source), ..Self::served_by_kernel(start_status, name) }
    }

    /// As [`Self::new`], for a mount whose requests the kernel serves.
    #[must_use]
    pub fn served_by_kernel(start_status: ShareStatus, name: String) -> Self {
        let (exports, images, settings, metrics) = Default::default();
        let (source, mounted, cache, limit) = Default::default();
        Self { start_status, name, source, mounted, cache, exports, images, limit, settings, metrics }
    }

    /// Records an address for 9P clients.
    pub fn listens(&mut self, address: &str) {
        self.start_status.ninep = Some(address.to_owned());
    }

    /// Records a mount and its transport; `is_there` returns whether it is still mounted.
    pub fn mounted(
        &mut self,
        path: String,
        transport: TransportReport,
        is_there: impl Fn() -> bool + Send + Sync + 'static,
    ) {
        self.start_status.mount = Some(path);
        self.mounted = Some(MountInfo { transport, is_there: Box::new(is_there) });
    }

    /// Records what clients may keep, as the word of `--cache`.
    pub fn caches(&mut self, cache: &str) {
        self.cache = Some(cache.to_owned());
    }

    /// Adds an export; `report` is called whenever a client asks, and returns `None` once the export has ended.
    pub fn exported(&mut self, report: impl Fn() -> Option<ExportReport> + Send + Sync + 'static) {
        self.exports.push(Box::new(report));
    }

    /// Records what holds the images of a snapshotter; `images` is called whenever a client asks.
    pub fn holds(&mut self, images: impl Fn() -> Vec<HeldImage> + Send + Sync + 'static) {
        self.images = Some(Box::new(images));
    }

    /// Returns what holds the images.
    pub(crate) fn images(&self) -> Vec<HeldImage> {
        self.images.as_ref().map_or(Vec::new(), |images| images())
    }

    /// Records the counters of an export, for traces.
    pub fn counted(&mut self, kind: ExportKind, metrics: Arc<Metrics>) {
        self.metrics.push((kind, metrics));
    }

    /// Returns what a trace calls each export, with its counters.
    pub(crate) fn traced(&self) -> impl Iterator<Item = ((&'static str, String), Arc<Metrics>)> {
        self.metrics.iter().map(|(kind, metrics)| {
            let place = self.start_status.place(*kind).unwrap_or_default();
            let name = format!("{} {place} {}", kind.name(), self.start_status.source);
            ((kind.name(), name), Arc::clone(metrics))
        })
    }

    /// Records the limit of its rates; `limit` returns the one that holds when a client asks.
    pub fn limited(&mut self, limit: impl Fn() -> Option<String> + Send + Sync + 'static) {
        self.limit = Some(Box::new(limit));
    }

    /// Adds a setting that clients may change; `check` gets the new value, and changes nothing.
    pub fn settable(
        &mut self,
        setting: &'static str,
        check: impl Fn(&str) -> Result<SettingChange, String> + Send + Sync + 'static,
    ) {
        self.settings.push((setting, Box::new(check)));
    }

    /// Checks the new value of a setting; returns what changes it.
    pub(crate) fn check(&self, setting: &str, value: &str) -> Result<impl FnOnce() -> String, Error> {
        let Some((_, check)) = self.settings.iter().find(|(name, _)| *name == setting) else {
            let settable = self.settings.iter().map(|(name, _)| *name).chain([LOG]).collect();
            let (setting, share) = (setting.to_owned(), self.start_status.source.clone());
            return Err(Error::NotSettable { setting, share, settable });
        };
        let change = check(value).map_err(Error::Setting)?;
        Ok(move || {
            let outcome = change();
            tracing::info!(share = self.name, "set by ferry set: {outcome}");
            outcome
        })
    }

    /// Returns the current report.
    pub(crate) fn report(&self) -> ShareReport {
        ShareReport {
            share: self.current_status(),
            cache: self.cache.clone(),
            limit: self.limit.as_ref().and_then(|limit| limit()),
            exports: self.exports.iter().filter_map(|report| report()).collect(),
        }
    }

    /// Returns the status at start.
    #[must_use]
    pub fn status(&self) -> &ShareStatus {
        &self.start_status
    }

    /// Returns the current status.
    pub(crate) fn current_status(&self) -> ShareStatus {
        let mount = self.start_status.mount.clone().filter(|_| self.mount_info().is_some());
        ShareStatus { mount, ..self.start_status.clone() }
    }

    fn mount_info(&self) -> Option<&MountInfo> {
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
        let transport = self.mount_info().map(|mounted| mounted.transport.clone());
        transport.ok_or_else(|| Error::NotMounted(self.start_status.source.clone()))
    }

    /// Finds the inode of a file by its path from the root of the source.
    ///
    /// # Errors
    /// [`Error::NoFile`], or [`Error::ServedByKernel`].
    pub fn find(&self, path: &[u8]) -> Result<HeldInode, Error> {
        let cx = Caller::default();
        let source = self.source.as_ref().ok_or_else(|| Error::ServedByKernel(self.start_status.source.clone()))?;
        let mut held = HeldInode { source: Arc::clone(source), ino: Ino::ROOT };
        for part in path.split(|&byte| byte == b'/').filter(|part| !part.is_empty()) {
            let entry = Name::new(part).and_then(|name| source.lookup(&cx, held.ino, name));
            match entry {
                // The assignment releases the previous inode.
                Ok(entry) => held = HeldInode { source: Arc::clone(source), ino: entry.ino },
                Err(reason) => {
                    let path = String::from_utf8_lossy(path).into_owned();
                    return Err(Error::NoFile { path, share: self.start_status.source.clone(), reason });
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
        f.debug_tuple("HeldInode").field(&self.ino).finish()
    }
}

impl HeldInode {
    /// Returns the inode.
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
