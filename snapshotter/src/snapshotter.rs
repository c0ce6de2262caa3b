//! The implementation of the calls. Nothing here is asynchronous: calls run on threads.
//!
//! The order of steps makes `kill -9` harmless. A directory exists before its record, and is removed after it; an image is mounted before
//! it is recorded, and only then the directory that it replaces is removed. [`Snapshotter::open`] removes the remains of such steps.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use ferry_engine::metrics::Metrics;
use ferry_vfs::sync::read;
use rustix::fs::syncfs;

use crate::api::{Info, Kind, Labels, Mount};
use crate::config::Config;
use crate::diff::Applied;
use crate::directories::{Directories, MERGED, Owner};
use crate::erofs;
use crate::error::{Error, IoContext, Result, log_failure};
use crate::filter::Filter;
use crate::idmap::IdMaps;
use crate::keys::Keys;
use crate::layers::{Layers, unmount_in};
use crate::lazy::{Lazy, Request, TARGET};
use crate::metadata::{Commit, LAYERS_MAX, Metadata, Record, RemoteLayers, Usage, too_deep};
use crate::virtiofs::Shares;
use crate::{calls, overlay, usage};

/// The maximum length of a name or key in bytes; those of containerd have about 200.
pub const NAME_BYTES_MAX: usize = 4096;
/// The maximum length of a label with its name in bytes, as in containerd.
pub const LABEL_BYTES_MAX: usize = 4096;
/// The maximum number of labels of a snapshot; containerd sets about ten.
pub const LABELS_MAX: usize = 1024;
/// How long regular expressions may be matched in a call: some million ordinary matches.
const PATTERNS_TIME: Duration = Duration::from_secs(10);
/// Idmapped mounts below overlayfs need Linux 5.19.
const IDMAP_KERNEL: (u32, u32) = (5, 19);

/// All snapshots below one root.
#[derive(Debug)]
pub struct Snapshotter {
    pub(crate) metadata: Metadata,
    pub(crate) directories: Directories,
    pub(crate) layers: Layers,
    /// Whether new snapshots are based on merged images.
    merges: bool,
    /// Images that are fetched on demand.
    pub(crate) lazy: Arc<Lazy>,
    /// Views that virtual machines have.
    pub(crate) shares: Shares,
    pub(crate) keys: Keys,
    /// Read-locked from when the directories below a new snapshot are looked up until its record is there.
    pub(crate) adding: RwLock<()>,
    /// Whether a thread makes images of directories.
    pub(crate) converting: Arc<AtomicBool>,
    /// Whether a thread waits for the end of pulls, to collect garbage.
    pub(crate) collecting: Arc<AtomicBool>,
    /// containerd's own root.
    pub(crate) containerd_root: PathBuf,
    metrics: Arc<Metrics>,
}

/// The counts of a snapshotter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub active: u64,
    pub committed: u64,
    pub views: u64,
    /// Committed ones that are directories, and no images.
    pub layer_directories: u64,
    /// Mounted images of layers.
    pub layer_mounts: u64,
    /// Bytes on disk of the store.
    pub store_bytes: u64,
}

/// A new snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewSnapshot {
    /// Its name.
    pub key: String,
    /// The name of the committed snapshot below it, or nothing.
    pub parent: String,
    /// Its labels.
    pub labels: Labels,
}

impl Snapshotter {
    /// Opens or creates the root of all snapshots, and removes the remains of a killed process. Existing mounts are kept.
    ///
    /// # Errors
    ///
    /// Another process uses the root, its metadata is damaged, or the kernel lacks a required feature.
    pub fn open(config: &Config) -> Result<Self> {
        let directories = Directories::create(&config.root)?;
        // Locks the root.
        let metadata = Metadata::open(&directories.metadata())?;
        log_failure(directories.empty_trash(unmount_in));
        let layers = Layers::new(directories.clone(), config.images, config.inode_share)?;
        let shares = Shares::new(config.virtiofs.clone(), config.lazy.clone())?;
        let lazy = Arc::new(Lazy::new(directories.clone(), config.lazy.clone()));
        let (keys, adding, metrics) = (Keys::default(), RwLock::default(), calls::metrics());
        let (containerd_root, merges) = (config.containerd_root.clone(), config.merge);
        let snapshotter = Self {
            metadata,
            directories,
            layers,
            merges,
            lazy,
            shares,
            keys,
            adding,
            converting: Arc::default(),
            collecting: Arc::default(),
            containerd_root,
            metrics,
        };
        snapshotter.finish_interrupted()?;
        log_failure(snapshotter.cleanup());
        snapshotter.lazy.revive();
        Ok(snapshotter)
    }

    /// Returns a snapshot.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]
    pub fn stat(&self, key: &str) -> Result<Info> {
        Ok(self.metadata.get(key)?.info(key))
    }

    /// Changes all labels, or those in `paths` (`labels`, or `labels.` and a name). Labels with an empty value are removed.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::InvalidArgument`]: a path names another field, which cannot be changed.
    pub fn update(&self, info: &Info, paths: &[String]) -> Result<Info> {
        let mut updates = Vec::new();
        for path in paths {
            match path.strip_prefix("labels.") {
                Some(label) => updates.push(Some(label)),
                None if path == "labels" => updates.push(None),
                None => {
                    let why = format!("cannot change {path} of snapshot {}: only labels can change", info.name);
                    return Err(Error::InvalidArgument(why));
                }
            }
        }
        if paths.is_empty() {
            updates.push(None);
        }
        let changed = self.metadata.update(&info.name, |labels| {
            for update in updates {
                match update {
                    None => labels.clone_from(&info.labels),
                    Some(label) => {
                        labels.insert(label.into(), info.labels.get(label).cloned().unwrap_or_default());
                    }
                }
            }
            *labels = checked_labels(std::mem::take(labels))?;
            Ok(())
        })?;
        Ok(changed.info(&info.name))
    }

    /// Returns the space that a snapshot takes, without what is below it.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], or its directory cannot be read.
    pub fn usage(&self, key: &str) -> Result<Usage> {
        let record = self.metadata.get(key)?;
        self.usage_of(&record).map_err(|error| self.failure(key, &record, error))
    }

    fn usage_of(&self, record: &Record) -> Result<Usage> {
        if let Some(remote) = &record.remote {
            return self.lazy.usage(remote);
        }
        if let (Kind::Active, Some(applied)) = (record.kind(), self.layers.applied(record.id)?) {
            return Ok(applied.usage);
        }
        if record.kind() == Kind::Active { usage::of(&self.directories.upper(record.id)) } else { Ok(record.usage) }
    }

    /// Returns the mounts of an active snapshot or a view.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::FailedPrecondition`]: it is committed; or a layer is damaged.
    pub fn mounts(&self, key: &str) -> Result<Vec<Mount>> {
        let record = self.metadata.get(key)?;
        if record.kind() == Kind::Committed {
            return Err(Error::FailedPrecondition(format!("snapshot {key} is committed, and has no mounts")));
        }
        self.check_not_applied(key, &record)?;
        let mounts = self.lower(&record.parent, record.on_merged).and_then(|lower| self.mounts_of(&record, &lower));
        mounts.map_err(|error| self.failure(key, &record, error))
    }

    /// Replaces the error of a call by [`Error::NotFound`] if its snapshot was removed or committed meanwhile.
    fn failure(&self, key: &str, record: &Record, error: Error) -> Error {
        match self.metadata.get(key) {
            Ok(found) if found.id == record.id => error,
            Ok(_) | Err(Error::NotFound(_)) => Error::NotFound(key.into()),
            Err(_) => error,
        }
    }

    /// Adds a writable snapshot; returns its mounts. If labels name a layer of an image that is fetched on demand, a committed snapshot
    /// is added instead, with the name in a label.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyExists`], also when a committed snapshot was added; [`Error::NotFound`]: there is no such parent; [`Error::InvalidArgument`]: it is not committed, or a
    /// name or label cannot be.
    pub fn prepare(&self, new: NewSnapshot) -> Result<Vec<Mount>> {
        match Request::of(&new.labels) {
            Some(request) if self.add_remote(&request, &new)? => Err(Error::AlreadyExists(request.target)),
            _ => self.add(Kind::Active, new),
        }
    }

    /// Adds the committed snapshot of a layer that is fetched on demand; returns whether it exists. Otherwise the layer has to
    /// be unpacked.
    fn add_remote(&self, request: &Request, new: &NewSnapshot) -> Result<bool> {
        let NewSnapshot { key, parent, labels } = new;
        let target = &request.target;
        check_name(key)?;
        check_name(target)?;
        // Two pulls of one image run at the same time.
        let _held = self.keys.hold(target);
        let is_known = |record: &Record| record.remote.is_some() && record.parent == *parent;
        match (self.metadata.get(target), self.metadata.get(key)) {
            (Ok(known), _) => {
                if !is_known(&known) || known.remote.as_ref().is_some_and(|remote| self.lazy.has(remote)) {
                    return Ok(is_known(&known));
                }
                // It may belong to another image, whose registry may not be there any more.
                let Some(remote) = self.find_lazy(request, parent)? else { return Ok(false) };
                self.metadata.set_remote(target, remote)?;
                return Ok(true);
            }
            (_, Ok(_)) => return Err(Error::AlreadyExists(key.clone())),
            _ => {}
        }
        let Some(remote) = self.find_lazy(request, parent)? else { return Ok(false) };
        let labels = checked_labels(labels.clone())?;
        let record = Record { remote: Some(remote), ..Record::new(Kind::Committed, parent, labels) };
        match self.metadata.insert(target, record, |_| Ok(())) {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists(_)) => Ok(is_known(&self.metadata.get(target)?)),
            Err(error) => Err(error),
        }
    }

    fn find_lazy(&self, request: &Request, parent: &str) -> Result<Option<RemoteLayers>> {
        Ok(self.lazy.find(request, self.metadata.chain(parent)?.len()))
    }

    /// Adds a read-only snapshot; returns its mounts.
    ///
    /// # Errors
    ///
    /// As [`Self::prepare`].
    pub fn view(&self, new: NewSnapshot) -> Result<Vec<Mount>> {
        self.add(Kind::View, new)
    }

    fn add(&self, kind: Kind, NewSnapshot { key, parent, labels }: NewSnapshot) -> Result<Vec<Mount>> {
        check_name(&key)?;
        let labels = checked_labels(labels)?;
        self.check_shared(kind, &labels)?;
        let idmaps = IdMaps::of(&labels)?;
        if idmaps.is_some() {
            check_idmaps()?;
        }
        // Before the snapshot exists, so that a repeated call does not fail with AlreadyExists.
        if self.metadata.get(&key).is_ok() {
            return Err(Error::AlreadyExists(key));
        }
        // The parent is not removed before this snapshot is based on it.
        let held = (self.keys.hold(&parent), read(&self.adding));
        let lower = self.lower_held(&parent, self.merges && !is_unpacked(&key, &labels))?;
        if lower.len() >= LAYERS_MAX {
            return Err(too_deep(&key));
        }
        // The container's root has the owner and permissions of the root of the layer below.
        let mut owner = lower.first().map_or(Ok(Owner::ROOT), |path| Owner::of(path))?;
        if let Some(maps) = &idmaps {
            (owner.uid, owner.gid) = maps.root;
        }
        let is_writable = kind == Kind::Active;
        let create = |id| self.directories.add(id, owner, is_writable);
        let on_merged = lower.iter().any(|path| path.ends_with(MERGED));
        let record = Record { on_merged, ..Record::new(kind, &parent, labels) };
        let record = self.metadata.insert(&key, record, create)?;
        drop(held);
        let mounts = self.mounts_of(&record, &lower);
        if mounts.is_err() {
            log_failure(self.remove(&key));
        }
        mounts
    }

    /// Mounts the images of a committed snapshot and those below it; returns their directories, nearest first, or a single one with all
    /// layers merged.
    pub(crate) fn lower(&self, name: &str, may_merge: bool) -> Result<Vec<PathBuf>> {
        let _held = self.keys.hold(name);
        self.lower_held(name, may_merge)
    }

    /// As [`Self::lower`], with the name locked, so that the snapshot is not removed and its layers are merged once.
    fn lower_held(&self, name: &str, may_merge: bool) -> Result<Vec<PathBuf>> {
        let chain = self.metadata.chain(name)?;
        if may_merge && let Some(merged) = self.merged(&chain) {
            return Ok(vec![merged]);
        }
        let mut lower = Vec::new();
        for (name, record) in chain {
            if record.kind() != Kind::Committed {
                return Err(Error::InvalidArgument(format!("the parent {name} is not committed")));
            }
            if let Some(remote) = &record.remote {
                // It shows those below it, too.
                lower.push(self.lazy.layer(remote)?);
                break;
            }
            lower.push(match &record.image {
                Some(image) => self.layers.mount(record.id, image)?,
                None => self.directories.upper(record.id),
            });
        }
        Ok(lower)
    }

    /// Returns the directory with all layers of a chain merged, if that is possible.
    fn merged(&self, chain: &[(String, Record)]) -> Option<PathBuf> {
        let (name, record) = chain.first().filter(|_| (2..LAYERS_MAX).contains(&chain.len()))?;
        let images = chain.iter().map(|(_, record)| Some((record.id, record.image.as_ref()?)));
        let images = images.collect::<Option<Vec<_>>>()?;
        self.layers.merged(&images, &record.merged, |digest| self.metadata.set_merged(name, digest).map(drop))
    }

    fn mounts_of(&self, record: &Record, lower: &[PathBuf]) -> Result<Vec<Mount>> {
        if let Some(shared) = self.shared_mounts(record)? {
            return Ok(shared);
        }
        let (upper, work) = (self.directories.upper(record.id), self.directories.work(record.id));
        let (kind, maps) = (record.kind(), IdMaps::of(&record.labels)?);
        let by_engine = maps.as_ref().filter(|maps| overlay::engine_maps_ids(kind, lower, maps));
        let own = match (&maps, lower) {
            (None, _) => None,
            (Some(_), [only]) if by_engine.is_some() => Some(vec![self.layers.link(record.id, only)?]),
            (Some(maps), _) => Some(self.layers.idmap(record.id, lower, maps)?),
        };
        let lower = own.as_deref().unwrap_or(lower);
        Ok(overlay::Layers { kind, upper: &upper, work: &work, lower, maps: by_engine }.mounts())
    }

    /// Commits an active snapshot.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyExists`]; [`Error::NotFound`]; [`Error::FailedPrecondition`]: it is not active, or has the users of a container;
    /// [`Error::InvalidArgument`]: a name, a label or the parent cannot be.
    pub fn commit(&self, name: &str, key: &str, parent: &str, labels: Labels) -> Result<()> {
        check_name(name)?;
        let labels = checked_labels(labels)?;
        let _held = self.keys.hold(key);
        let record = self.metadata.check_commit(key, name, parent)?;
        if IdMaps::of(&record.labels)?.is_some() {
            let why = format!(
                "snapshot {key} has the users of a container (the label {}), and other containers would see other users: \
                 commit what has no such label",
                crate::idmap::UID_LABEL
            );
            return Err(Error::FailedPrecondition(why));
        }
        let recording = self.layers.recording();
        let (usage, image) = match self.layers.applied(record.id)? {
            Some(_) if record.parent.is_empty() && !parent.is_empty() => {
                let why = format!(
                    "snapshot {key} was unpacked without a layer below, so what its layer removes is not known, and cannot be \
                     committed with the parent {parent}: do not set `rebase` for this snapshotter in containerd's configuration"
                );
                return Err(Error::FailedPrecondition(why));
            }
            Some(Applied { usage, image }) => {
                self.layers.adopt(record.id, &image)?;
                (usage, Some(image))
            }
            None => (usage::of(&self.directories.upper(record.id))?, self.layers.build(record.id)),
        };
        let has_image = image.is_some();
        if !has_image {
            // The record of a layer must not outlive its files: containerd does not unpack it again.
            let upper = self.directories.upper(record.id);
            File::open(&upper).and_then(|directory| Ok(syncfs(directory)?)).doing("sync", upper)?;
        }
        let mut committed = self.metadata.commit(key, Commit { name, parent, labels, usage, image });
        if committed.is_err() {
            // After a failure of the disk, only the database knows.
            match self.metadata.get(name) {
                Ok(found) if found.id == record.id => committed = Ok(()),
                Ok(_) | Err(Error::NotFound(_)) if has_image => self.layers.undo(record.id),
                _ => {}
            }
        }
        drop(recording);
        if has_image && committed.is_ok() {
            log_failure(self.remove_upper(record.id));
        }
        committed
    }

    /// Removes a snapshot on which no other one is based.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::FailedPrecondition`]: another one is based on it.
    pub fn remove(&self, key: &str) -> Result<()> {
        let _held = self.keys.hold(key);
        let record = self.metadata.remove(key)?;
        // The snapshot no longer exists, so later failures are only logged: the next cleanup removes the remains.
        if record.image.is_some() || self.layers.is_applied(record.id).unwrap_or(true) || record.remote.is_some() {
            self.layers.note_garbage();
        }
        if let Some(remote) = &record.remote {
            log_failure(self.lazy.remove(remote));
        }
        self.shares.end(record.id, &self.directories.snapshot(record.id));
        log_failure(self.layers.unmount(record.id));
        log_failure(self.directories.discard(&self.directories.snapshot(record.id)));
        Ok(())
    }

    /// Calls a function with each snapshot that a filter selects.
    ///
    /// # Errors
    ///
    /// The metadata cannot be read, or regular expressions take too long.
    pub fn walk(&self, filter: &Filter, mut call: impl FnMut(Info)) -> Result<()> {
        let end = filter.has_patterns().then(|| Instant::now() + PATTERNS_TIME);
        self.metadata.for_each(|name, record| {
            if end.is_some_and(|end| Instant::now() > end) {
                let seconds = PATTERNS_TIME.as_secs();
                return Err(Error::InvalidArgument(format!(
                    "the filters did not end after {seconds} s: simpler regular expressions are needed"
                )));
            }
            let info = record.info(name);
            if filter.matches(&info) {
                call(info);
            }
            Ok(())
        })
    }

    /// Returns the counters of calls.
    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Counts the snapshots, and what they take.
    pub(crate) fn counts(&self) -> Result<Counts> {
        let mut counts = Counts::default();
        self.metadata.for_each(|_, record| {
            *match record.kind() {
                Kind::View => &mut counts.views,
                Kind::Committed => &mut counts.committed,
                _ => &mut counts.active,
            } += 1;
            counts.layer_directories += u64::from(record.kind() == Kind::Committed && record.is_directory());
            for at in [self.directories.layer(record.id), self.directories.merged(record.id)] {
                counts.layer_mounts += u64::from(record.image.is_some() && erofs::is_mounted(&at)?);
            }
            Ok(())
        })?;
        counts.store_bytes = u64::try_from(usage::of(&self.directories.store())?.bytes).unwrap_or(0);
        Ok(counts)
    }
}

fn check_name(name: &str) -> Result<()> {
    match name.len() {
        0 => Err(Error::InvalidArgument("the name of a snapshot is empty".into())),
        1..=NAME_BYTES_MAX => Ok(()),
        bytes => Err(Error::InvalidArgument(format!(
            "the name of a snapshot has {bytes} bytes: {NAME_BYTES_MAX} are possible"
        ))),
    }
}

/// Returns labels without those that have no value, as containerd does.
fn checked_labels(mut labels: Labels) -> Result<Labels> {
    labels.retain(|_, value| !value.is_empty());
    if labels.len() > LABELS_MAX {
        let count = labels.len();
        return Err(Error::InvalidArgument(format!("{count} labels are too many: {LABELS_MAX} are possible")));
    }
    match labels.iter().find(|(name, value)| name.len() + value.len() > LABEL_BYTES_MAX) {
        Some((name, _)) => {
            let shown: String = name.chars().take(64).collect();
            Err(Error::InvalidArgument(format!("the label {shown} is longer than {LABEL_BYTES_MAX} bytes")))
        }
        None => Ok(labels),
    }
}

/// Whether containerd unpacks a layer into a snapshot. Its lower layers are not merged, because each is the parent of one other.
fn is_unpacked(key: &str, labels: &Labels) -> bool {
    labels.contains_key(TARGET) || key.rsplit('/').next().is_some_and(|key| key.starts_with("extract-"))
}

/// Checks that this kernel can idmap layers.
fn check_idmaps() -> Result<()> {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= IDMAP_KERNEL {
        return Ok(());
    }
    let (major, minor) = IDMAP_KERNEL;
    Err(Error::FailedPrecondition(format!(
        "the label {} needs idmapped layers, which Linux {major}.{minor} or later has, and this is {release}",
        crate::idmap::UID_LABEL
    )))
}
