//! Container images that start before their layers are fetched.
//!
//! ```text
//! ROOT/lazy/KEY/image      metadata of an image of the lower layers of a container image; KEY: its manifest and the number of layers
//! ROOT/lazy/KEY/image.trace the files to fetch first, if there is such a list
//! ROOT/lazy/KEY/about.toml its description, and the source of its data
//! ROOT/lazy/KEY/layer      where it is mounted
//! ROOT/lazy/KEY/process    the process that fetches what is read
//! ROOT/lazy/KEY/credentials.json those of the last pull, if it had any
//! ROOT/lazy/.new-*         an image that is being pulled
//! ```
//!
//! The record of such a snapshot has the number of layers that it represents. Its mount shows all of them merged.

mod active_pulls;
mod labels;
pub(crate) mod process;
pub(crate) mod pull_credentials;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ferry_image::{Digest, Image, Objects, error_chain};
use ferry_registry::{LazyImage, LazyOptions, Slots, list_beside};
use ferry_vfs::sync::lock;
use serde::{Deserialize, Serialize};

use self::active_pulls::ActivePulls;
use self::labels::split_tag;
pub use self::labels::{Request, TARGET, includes};
use self::process::{Job, MountState, Puller};
use self::pull_credentials::{Credentials, PullCredentials};
use crate::config::LazyConfig;
use crate::directories::Directories;
use crate::error::{Error, IoContext, Result, log_failure};
use crate::keys::Keys;
use crate::layers::unmount_in;
use crate::metadata::{RemoteLayers, Usage};

/// The maximum time that the first call for an image waits for its registry; after that the image is unpacked as usual.
const START_TIME: Duration = Duration::from_secs(30);
/// How long the decision about an image is cached, and how long its image may be without a snapshot. The calls of a pull follow one
/// another, but unpacked layers may come between them.
const PLAN_TIME: Duration = Duration::from_secs(600);
/// The maximum number of cached decisions.
const PLANS_MAX: usize = 200;
/// The maximum number of threads that wait for registries.
const WAITING_MAX: usize = 16;
/// The maximum number of processes that pull images: tables of contents may take much memory.
const PULLS_MAX: usize = 8;
/// The pause before a process that ended is started again; each failure doubles it, up to a maximum.
const RESTART_PAUSE: Duration = Duration::from_millis(250);
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(60);
/// A process that has run this long resets its count of restarts.
const STABLE_TIME: Duration = Duration::from_secs(600);
const NEW_PREFIX: &str = ".new-";

/// An image that can be shared.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SharedImage {
    pub path: PathBuf,
    pub digest: String,
    /// Where its data come from, and the directory with its manifest and credentials, if they need not be here.
    pub from: Option<(String, PathBuf)>,
}

/// The decision about an image that is being pulled.
#[derive(Clone, Debug)]
struct Plan {
    when: Instant,
    /// `None`: it does not start lazily.
    image: Option<Arc<LazyImage>>,
}

/// The description of an image.
#[derive(Debug, Serialize, Deserialize)]
struct About {
    digest: String,
    from: String,
    inodes: u64,
    packs: Vec<String>,
}

/// The images below one root.
#[derive(Debug)]
pub struct Lazy {
    directories: Directories,
    config: LazyConfig,
    /// By their references.
    plans: Mutex<BTreeMap<String, Plan>>,
    /// Locks of images: by reference while they are searched for, by key while they are mounted; and by repository while their
    /// credentials are written.
    held: Keys,
    /// While packs are stored before their image is recorded.
    pulling: ActivePulls,
    /// Whether garbage was not collected because of a pull.
    skipped: AtomicBool,
    /// The permits of pulling processes.
    pulls: Slots,
    /// Each thread that waits for a registry holds a clone, which is dropped even after a panic.
    waiting: Arc<()>,
    /// The keys of complete images.
    complete: Mutex<BTreeSet<String>>,
    /// The credentials of pulls.
    credentials: PullCredentials,
    /// The number and the last time of restarts, by key.
    restarts: Mutex<BTreeMap<String, (u32, Instant)>>,
}

fn key(container: &str, layers: usize) -> String {
    let digest = container.rsplit_once(':').map_or(container, |(_, digest)| digest);
    format!("{digest}-{layers}")
}

/// Returns the registry and the repository of `oci:HOST/NAME@DIGEST` or `oci:HOST/NAME:TAG`.
fn repository_of(reference: &str) -> &str {
    let name = reference.split_once(':').map_or("", |(_, rest)| rest);
    split_tag(name.split_once('@').map_or(name, |(name, _)| name)).0
}

impl RemoteLayers {
    fn key(&self) -> String {
        key(&self.container, self.layers as usize)
    }
}

impl Lazy {
    /// Creates the object; mounts and requests nothing.
    pub fn new(directories: Directories, config: LazyConfig) -> Self {
        let (plans, held, pulling, skipped, pulls, waiting, complete, credentials, restarts) = Default::default();
        Self { directories, config, plans, held, pulling, skipped, pulls, waiting, complete, credentials, restarts }
    }

    /// Returns the layers that a snapshot represents, if its image starts lazily; mounts the image. `below` is the number of
    /// snapshots below it.
    pub fn find(self: &Arc<Self>, request: &Request, below: usize) -> Option<RemoteLayers> {
        if !includes(&self.config.from, &request.repository) {
            return None;
        }
        let image = self.plan(request)?;
        let is_it = |found: &ferry_registry::LazyLayer, wanted: &String| found.digest == *wanted;
        let fits = image.layers.get(below..).is_some_and(|layers| {
            layers.len() >= request.layers.len() && layers.iter().zip(&request.layers).all(|(a, b)| is_it(a, b))
        });
        // The tag may name another image since containerd resolved it.
        let table = image.layers.get(below).and_then(|layer| layer.table.as_ref());
        if !fits || request.table.as_ref().is_some_and(|wanted| Some(wanted) != table) {
            tracing::warn!("layer {} of {} is not the one that is pulled: it is unpacked", below + 1, image.container);
            return None;
        }
        let layers = u32::try_from(below + 1).ok().filter(|_| below < image.covers)?;
        Some(RemoteLayers { container: image.container.clone(), layers })
    }

    /// Returns the image of a pull; the first call searches for it.
    fn plan(self: &Arc<Self>, request: &Request) -> Option<Arc<LazyImage>> {
        let reference = &request.reference;
        let _held = self.held.hold(reference);
        // Until it is cached or has a snapshot, only this keeps its packs.
        let _pulling = self.pulling.begin();
        let known = lock(&self.plans).get(reference).cloned();
        match known {
            Some(Plan { when, image: None }) if when.elapsed() < PLAN_TIME => return None,
            Some(Plan { image: Some(image), .. }) if self.is_here(&image) => {
                self.remember(reference, Some(Arc::clone(&image)));
                return Some(image);
            }
            _ => {}
        }
        let started = self.start_within(START_TIME, request);
        let image = match started {
            Ok(image) => {
                let LazyImage { layers, covers, container, .. } = &image;
                tracing::info!("{container}: {covers} of {} layers are read before they are here", layers.len());
                Some(Arc::new(image))
            }
            Err(error) => {
                tracing::info!("{}; its layers are unpacked", error_chain(&error));
                None
            }
        };
        self.remember(reference, image.clone());
        image
    }

    fn remember(&self, reference: &str, image: Option<Arc<LazyImage>>) {
        let mut plans = lock(&self.plans);
        plans.retain(|_, plan| plan.when.elapsed() < PLAN_TIME);
        if plans.len() < PLANS_MAX {
            plans.insert(reference.into(), Plan { when: Instant::now(), image });
        }
    }

    /// Whether the image of a snapshot was made.
    pub fn has(&self, remote: &RemoteLayers) -> bool {
        self.image(remote).exists()
    }

    /// Returns the file of a snapshot's image, which may not be made.
    pub fn image(&self, remote: &RemoteLayers) -> PathBuf {
        self.directory(&remote.key()).join("image")
    }

    fn is_here(&self, image: &LazyImage) -> bool {
        self.directory(&key(&image.container, image.covers)).join("image").exists()
    }

    /// Searches for an image on a thread, which continues after a timeout.
    fn start_within(self: &Arc<Self>, time: Duration, request: &Request) -> Result<LazyImage> {
        let failed = |reason: String| Error::Lazy { image: request.reference.clone(), reason };
        let waits = Arc::clone(&self.waiting);
        // Other than its own.
        if Arc::strong_count(&waits) - 1 > WAITING_MAX {
            return Err(failed(format!("{WAITING_MAX} other images wait for their registries")));
        }
        let (sender, receiver) = sync_channel(1);
        let (lazy, request) = (Arc::clone(self), request.clone());
        let start = move || {
            let mounted = lazy.pull(&request.reference, None).and_then(|(image, puller)| {
                lazy.mount(&key(&image.container, image.covers), puller)?;
                Ok(image)
            });
            drop(waits);
            // The caller has timed out.
            let _ = sender.send(mounted);
        };
        let thread = thread::Builder::new().name("lazy-start".into()).spawn(start);
        thread.map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        receiver.recv_timeout(time).unwrap_or_else(|_| {
            Err(failed(format!("its registry did not answer completely within {} s", time.as_secs())))
        })
    }

    /// Fetches the metadata of an image, and renames its directory to its key. The process that fetched it mounts it later.
    fn pull(&self, reference: &str, layers: Option<usize>) -> Result<(LazyImage, Option<Puller>)> {
        let repository = repository_of(reference);
        let options = LazyOptions {
            layers,
            trusts_converted: includes(&self.config.converted_from, repository),
            trusts_trace: includes(&self.config.traces_from, repository),
        };
        let _slot = self.pulls.enter(PULLS_MAX);
        let _pulling = self.pulling.begin();
        let lazy = self.directories.lazy();
        let new =
            tempfile::Builder::new().prefix(NEW_PREFIX).tempdir_in(&lazy).doing("create a directory in", &lazy)?;
        fs::create_dir(new.path().join("layer")).doing("create a directory in", new.path())?;
        if let Some(credentials) = self.credentials.get(repository).or_else(|| self.credentials_beside(repository)) {
            credentials.write(new.path())?;
        }
        let mut puller = Puller::start(&self.config, new.path(), &self.directories.store(), reference, options)?;
        let image = puller.image()?;
        let about = About {
            digest: image.digest.clone(),
            from: image.from.clone(),
            inodes: image.inodes,
            packs: image.packs.clone(),
        };
        let text = toml::to_string(&about).map_err(std::io::Error::other).doing("describe", new.path())?;
        let about_path = new.path().join("about.toml");
        fs::write(&about_path, text).doing("write to", &about_path)?;
        if let Some(manifest) = &image.manifest {
            let path = new.path().join("manifest");
            fs::write(&path, manifest).doing("write to", &path)?;
        }
        for path in [&about_path, &new.path().join("image")] {
            File::open(path).and_then(|file| file.sync_all()).doing("sync", path)?;
        }
        let key = key(&image.container, image.covers);
        let directory = self.directory(&key);
        let is_new = match fs::rename(new.path(), &directory) {
            // The image of an earlier pull; equal manifests have equal images.
            Err(error) if matches!(error.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists) => false,
            renamed => {
                renamed.doing("create", &directory)?;
                let _ = new.keep();
                true
            }
        };
        File::open(&lazy).and_then(|directory| directory.sync_all()).doing("sync", &lazy)?;
        Ok((image, Some(puller).filter(|_| is_new)))
    }

    fn directory(&self, key: &str) -> PathBuf {
        self.directories.lazy().join(key)
    }

    fn about(&self, key: &str) -> Result<Option<About>> {
        let path = self.directory(key).join("about.toml");
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.doing("read", &path)?,
        };
        toml::from_str(&text).map(Some).map_err(std::io::Error::other).doing("read", path)
    }

    /// Returns the mount point of a snapshot's layers. Mounts them if necessary, and starts their process again if it has ended.
    ///
    /// # Errors
    ///
    /// The image is incomplete, and its registry is not reachable.
    pub fn layer(self: &Arc<Self>, remote: &RemoteLayers) -> Result<PathBuf> {
        let key = remote.key();
        let _held = self.held.hold(&remote.container);
        // Another image shares only some of the layers.
        let puller = match self.about(&key)? {
            Some(_) => None,
            None => self.pull(&remote.container, Some(remote.layers as usize))?.1,
        };
        self.mount(&key, puller)
    }

    /// Returns the image of a snapshot that [`Self::layer`] has mounted, with what a process needs to serve it, too.
    ///
    /// # Errors
    ///
    /// It was not made.
    pub fn shared(&self, remote: &RemoteLayers) -> Result<SharedImage> {
        let key = remote.key();
        let about =
            self.about(&key)?.ok_or_else(|| Error::Lazy { image: key.clone(), reason: "it was removed".into() })?;
        let from = Some((about.from, self.directory(&key)));
        Ok(SharedImage { path: self.image(remote), digest: about.digest, from })
    }

    /// Returns containerd's socket, to which calls of images go on.
    pub(crate) fn image_service(&self) -> Option<&Path> {
        self.config.image_service.as_deref()
    }

    /// Remembers the credentials of a pull, for the images that it makes.
    pub(crate) fn begin_pull(&self, credentials: &Credentials) {
        self.credentials.add(credentials);
    }

    /// Lets all images of the repository use the credentials of a pull, because the registry has accepted them. Waits for no mount.
    pub(crate) fn finish_pull(&self, credentials: &Credentials) {
        let _held = self.held.hold(&credentials.repository);
        for key in self.keys().unwrap_or_default() {
            match self.about(&key) {
                Ok(Some(about)) if repository_of(&about.from) == credentials.repository => {
                    if let Err(error) = credentials.write(&self.directory(&key))
                        && self.directory(&key).exists()
                    {
                        tracing::warn!("the credentials of a pull are not used: {}", error_chain(&error));
                    }
                }
                Ok(_) => {}
                Err(error) => tracing::warn!("{}", error_chain(&error)),
            }
        }
    }

    /// Returns the credentials that images of a repository use, from a pull that this process may no longer know.
    fn credentials_beside(&self, repository: &str) -> Option<Credentials> {
        let keys = self.keys().unwrap_or_default();
        // Those of a pull that has not ended may be wrong.
        let mut ended = keys.iter().filter(|key| !key.starts_with(NEW_PREFIX));
        ended.find_map(|key| Credentials::read(&self.directory(key), repository))
    }

    /// Mounts an image, unless it is mounted and served; returns the mount point. `puller` is the process that pulled it.
    fn mount(self: &Arc<Self>, key: &str, puller: Option<Puller>) -> Result<PathBuf> {
        let _held = self.held.hold(key);
        let directory = self.directory(key);
        let at = directory.join("layer");
        let about =
            self.about(key)?.ok_or_else(|| Error::Lazy { image: key.into(), reason: "it was removed".into() })?;
        match process::mounted(&at, &directory.join("process"))? {
            MountState::Fuse => return Ok(at),
            MountState::Erofs if self.is_served(key, &about)? => return Ok(at),
            // The process of a mount on top of it also serves readers of the mount below.
            MountState::Erofs | MountState::Nothing => {}
            // The process resumes or replaces it.
            MountState::Dead => {}
        }
        if let Err(error) = self.list_first(key) {
            tracing::warn!("{}: files are fetched in the order of the layers", error_chain(&error));
        }
        let job = Job {
            image: &directory.join("image"),
            digest: &about.digest,
            store: &self.directories.store(),
            from: &about.from,
            directory: &directory,
            at: &at,
            process: &directory.join("process"),
        };
        process::mount(&self.config, &job, puller, self.on_end(key))?;
        Ok(at)
    }

    /// Returns the function to call when the process of an image ends.
    fn on_end(self: &Arc<Self>, key: &str) -> impl FnOnce() + Send + 'static {
        let (lazy, key) = (Arc::clone(self), key.to_owned());
        move || lazy.restart(&key)
    }

    /// Restarts a killed process, so that readers on the kernel's mount continue.
    fn restart(self: &Arc<Self>, key: &str) {
        let mut pause = RESTART_PAUSE;
        loop {
            thread::sleep(pause);
            pause = (pause * 2).min(RESTART_PAUSE_MAX);
            // It may have been unmounted, removed or started again meanwhile.
            match self.lacks_process(key).map(|lacks| lacks && self.may_restart(key)) {
                Ok(true) => {}
                Ok(false) => return,
                // It may pass, as too many open files do.
                Err(error) => {
                    tracing::warn!("{}", error_chain(&error));
                    continue;
                }
            }
            match self.mount(key, None) {
                Ok(_) => return,
                Err(error) => tracing::warn!("{}", error_chain(&error)),
            }
        }
    }

    /// Whether an image is mounted without a process that fetches missing data.
    fn lacks_process(&self, key: &str) -> Result<bool> {
        // A starting process may fail.
        let _held = self.held.hold(key);
        let Some(about) = self.about(key)? else { return Ok(false) };
        let directory = self.directory(key);
        Ok(match process::mounted(&directory.join("layer"), &directory.join("process"))? {
            MountState::Nothing | MountState::Fuse => false,
            MountState::Dead => true,
            MountState::Erofs => !self.is_served(key, &about)?,
        })
    }

    /// Counts a restart, unless there were too many.
    fn may_restart(&self, key: &str) -> bool {
        let mut restarts = lock(&self.restarts);
        let (count, last) = restarts.entry(key.into()).or_insert((0, Instant::now()));
        if last.elapsed() >= STABLE_TIME {
            *count = 0;
        }
        let may = *count < self.config.restarts;
        if may {
            (*count, *last) = (*count + 1, Instant::now());
            tracing::warn!("the process that fetches {key} has ended, and is started again");
        } else {
            tracing::error!(
                "the process that fetches {key} has ended after {count} restarts: it is started again with the next container"
            );
        }
        may
    }

    /// Replaces the layers' list of files to fetch first by a recorded one (`ferry image trace`), if there is one.
    fn list_first(&self, key: &str) -> Result<()> {
        let recorded = self.directories.traces().join(key.rsplit_once('-').map_or(key, |(manifest, _)| manifest));
        if !recorded.exists() {
            return Ok(());
        }
        let list = list_beside(&self.directory(key).join("image"));
        match fs::remove_file(&list) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error).doing("remove", list),
            _ => fs::hard_link(&recorded, &list).doing("create", list),
        }
    }

    /// Whether a mounted image is complete, or a process fetches missing data.
    fn is_served(&self, key: &str, about: &About) -> Result<bool> {
        let directory = self.directory(key);
        if lock(&self.complete).contains(key) || process::runs(&directory.join("process")) {
            return Ok(true);
        }
        let image = Image::open(&directory.join("image"), Digest::parse(about.digest.as_bytes()))?;
        let is_complete = Objects::open(&image, &self.directories.store()).is_ok();
        if is_complete {
            lock(&self.complete).insert(key.into());
        }
        Ok(is_complete)
    }

    /// Restarts ended processes of mounted images in the background; watches the others.
    pub fn revive(self: &Arc<Self>) {
        let lazy = Arc::clone(self);
        let revive = move || {
            for key in lazy.keys().unwrap_or_default() {
                process::watch(&lazy.directory(&key).join("process"), lazy.on_end(&key));
                let directory = lazy.directory(&key);
                let revived = match process::mounted(&directory.join("layer"), &directory.join("process")) {
                    Ok(MountState::Nothing) => Ok(()),
                    Ok(_) => lazy.mount(&key, None).map(drop),
                    Err(error) => Err(error),
                };
                if let Err(error) = revived {
                    tracing::warn!("{}", error_chain(&error));
                    process::on_thread(lazy.on_end(&key));
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("lazy-revive".into()).spawn(revive) {
            tracing::warn!("cannot start a thread: {error}");
        }
    }

    fn keys(&self) -> Result<BTreeSet<String>> {
        let lazy = self.directories.lazy();
        let entries = fs::read_dir(&lazy).doing("list", &lazy)?;
        entries.map(|entry| Ok(entry.doing("list", &lazy)?.file_name().to_string_lossy().into_owned())).collect()
    }

    /// Returns the space that the image of a snapshot takes now, including packs that it shares.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub fn usage(&self, remote: &RemoteLayers) -> Result<Usage> {
        use std::os::unix::fs::MetadataExt;
        let Some(about) = self.about(&remote.key())? else { return Ok(Usage::default()) };
        let packs = self.directories.store().join("packs");
        let files = about.packs.iter().flat_map(|pack| ["", ".part"].map(|end| packs.join(format!("{pack}{end}"))));
        let files = files.chain([self.directory(&remote.key()).join("image")]);
        let blocks: u64 = files.filter_map(|file| fs::metadata(file).ok()).map(|found| found.blocks()).sum();
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        Ok(Usage { bytes: number(blocks.saturating_mul(512)), inodes: number(about.inodes) })
    }

    /// Removes the image of a removed snapshot. Other mounts of it stay usable.
    ///
    /// # Errors
    ///
    /// The kernel or the file system refuses.
    pub fn remove(&self, remote: &RemoteLayers) -> Result<()> {
        self.discard(&remote.key())
    }

    fn discard(&self, key: &str) -> Result<()> {
        let _held = self.held.hold(key);
        let directory = self.directory(key);
        unmount_in(&directory)?;
        lock(&self.complete).remove(key);
        lock(&self.restarts).remove(key);
        self.directories.discard(&directory)
    }

    /// Whether the last [`Self::collect`] was skipped.
    pub fn has_skipped(&self) -> bool {
        self.skipped.load(Ordering::Relaxed)
    }

    /// Waits until no image is being pulled.
    pub fn wait_for_pulls(&self) {
        self.pulling.wait();
    }

    /// Removes images without a snapshot, unless an image is being pulled. Then calls `call` with whether there was any, and the names of
    /// the packs that the others need, or `None` if these are unknown. `known` returns the layers that snapshots represent.
    ///
    /// # Errors
    ///
    /// The images cannot be listed, or a function fails.
    pub fn collect(
        &self,
        known: impl FnOnce() -> Result<Vec<RemoteLayers>>,
        call: impl FnOnce(bool, Option<&BTreeSet<String>>) -> Result<()>,
    ) -> Result<()> {
        let quiet = self.pulling.block();
        self.skipped.store(quiet.is_none(), Ordering::Relaxed);
        let Some(_quiet) = quiet else { return Ok(()) };
        // Further images of a snapshot are created after its record.
        let mut keep: BTreeSet<String> = known()?.iter().map(RemoteLayers::key).collect();
        for plan in lock(&self.plans).values().filter(|plan| plan.when.elapsed() < PLAN_TIME) {
            keep.extend(plan.image.iter().map(|image| key(&image.container, image.covers)));
        }
        let (mut packs, mut is_less) = (Some(BTreeSet::new()), false);
        for key in self.keys()? {
            if !keep.contains(&key) {
                log_failure(self.discard(&key));
                is_less = true;
            }
            // It is there if it could not be removed.
            match self.about(&key) {
                Ok(about) => packs.iter_mut().for_each(|all| all.extend(about.iter().flat_map(|it| it.packs.clone()))),
                Err(error) => {
                    tracing::warn!("{}: no packs are removed", error_chain(&error));
                    packs = None;
                }
            }
        }
        call(is_less, packs.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As EMFILE or EIO: readers of missing data would wait for a process that never comes.
    #[test]
    fn a_restart_is_not_given_up_after_an_error() {
        let root = tempfile::tempdir().unwrap();
        let lazy = Arc::new(Lazy::new(Directories::create(root.path()).unwrap(), LazyConfig::default()));
        let about = lazy.directory("a").join("about.toml");
        fs::create_dir_all(&about).unwrap();
        lazy.about("a").unwrap_err();
        thread::scope(|scope| {
            let restart = scope.spawn(|| lazy.restart("a"));
            thread::sleep(4 * RESTART_PAUSE);
            let is_over = restart.is_finished();
            fs::remove_dir(about).unwrap();
            restart.join().unwrap();
            assert!(!is_over);
        });
    }

    fn lazy(root: &Path) -> Lazy {
        Lazy::new(Directories::create(root).unwrap(), LazyConfig::default())
    }

    fn add(lazy: &Lazy, key: &str, repository: &str) {
        let from = format!("oci:{repository}@sha256:0");
        let about = About { digest: "d".into(), from, inodes: 0, packs: vec![format!("pack-{key}")] };
        fs::create_dir_all(lazy.directory(key)).unwrap();
        fs::write(lazy.directory(key).join("about.toml"), toml::to_string(&about).unwrap()).unwrap();
    }

    #[test]
    fn one_image_that_fails_delays_no_others() {
        let root = tempfile::tempdir().unwrap();
        let lazy = lazy(root.path());
        let remote = RemoteLayers { container: "oci:h/a@sha256:b".into(), layers: 1 };
        for key in ["a", &remote.key(), "c"] {
            add(&lazy, key, "h/a");
        }
        fs::write(lazy.directory("file"), "").unwrap();
        let collect = || {
            let mut found = None;
            let known = || Ok(vec![remote.clone()]);
            let note = |is_less, packs: Option<&BTreeSet<String>>| {
                found = Some((is_less, packs.cloned()));
                Ok(())
            };
            lazy.collect(known, note).unwrap();
            found.unwrap()
        };
        assert_eq!(collect(), (true, Some(BTreeSet::from([format!("pack-{}", remote.key())]))));
        assert_eq!(lazy.keys().unwrap(), BTreeSet::from([remote.key()]));
        add(&lazy, "c", "h/a");
        fs::write(lazy.directory(&remote.key()).join("about.toml"), "damaged").unwrap();
        assert_eq!(collect(), (true, None));
        assert_eq!(lazy.keys().unwrap(), BTreeSet::from([remote.key()]));
    }

    #[test]
    fn a_collection_during_a_pull_is_skipped_and_can_wait() {
        let root = tempfile::tempdir().unwrap();
        let lazy = lazy(root.path());
        let collect = || lazy.collect(|| Ok(Vec::new()), |_, _| Ok(())).map(|()| lazy.has_skipped()).unwrap();
        let pulls = [lazy.pulling.begin(), lazy.pulling.begin()];
        assert!(collect());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| lazy.wait_for_pulls());
            let [first, second] = pulls;
            drop(first);
            assert!(collect() && !waiting.is_finished());
            drop(second);
        });
        assert!(!collect());
    }

    /// containerd is told that its pull has succeeded when this ends.
    #[test]
    fn credentials_wait_for_no_mount() {
        let root = tempfile::tempdir().unwrap();
        let lazy = lazy(root.path());
        add(&lazy, "a", "h.io/a");
        add(&lazy, "b", "h.io/b");
        let pull = crate::cri_api::PullImageRequest {
            image: Some(crate::cri_api::ImageSpec { image: "h.io/a:1".into() }),
            auth: Some(crate::cri_api::AuthConfig { auth: "bWU6eA==".into(), ..Default::default() }),
        };
        let credentials = Credentials::of(&pull).unwrap();
        let mounting = ["a", "b"].map(|key| lazy.held.hold(key));
        thread::scope(|scope| {
            let finish = scope.spawn(|| lazy.finish_pull(&credentials));
            let end = Instant::now() + Duration::from_secs(20);
            while !finish.is_finished() && Instant::now() < end {
                thread::sleep(Duration::from_millis(1));
            }
            let is_finished = finish.is_finished();
            drop(mounting);
            assert!(is_finished);
        });
        let read = |key: &str| Credentials::read(&lazy.directory(key), &credentials.repository);
        assert_eq!([read("a"), read("b")], [Some(credentials.clone()), None]);
    }

    #[test]
    fn restarts_are_counted_per_image_until_a_stable_run() {
        let root = tempfile::tempdir().unwrap();
        let config = LazyConfig { restarts: 2, ..LazyConfig::default() };
        let lazy = Lazy::new(Directories::create(root.path()).unwrap(), config);
        let may = |key: &str| lazy.may_restart(key);
        assert!(may("a") && may("a") && !may("a") && !may("a"));
        assert!(may("b"), "another image");
        if let Some((_, last)) = lock(&lazy.restarts).get_mut("a") {
            *last -= STABLE_TIME;
        }
        assert!(may("a") && may("a") && !may("a"));
    }
}
