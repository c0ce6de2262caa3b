//! Committed layers as images of the deduplicated store, mounted by the kernel's EROFS.
//!
//! A layer is a directory until its image is built and mounted, and stays one if that is impossible. An image keeps overlayfs's
//! whiteouts and opaque directories. The layers below a container are merged to one more image, which shows what overlayfs would
//! show of them ([`Layers::merged`]).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::iter::successors;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, RwLock, RwLockReadGuard, TryLockError};
use std::time::{Duration, SystemTime};

use ferry_image::{
    Algorithm, BuildOptions, BuildReport, Digest, ExclusiveStore, Image, InodeShare, LiveSet, Store, build,
    error_chain, merge,
};
use ferry_vfs::sync::{lock, read};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::config::Images;
use crate::directories::{Directories, MERGED};
use crate::erofs;
use crate::error::{Error, IoContext, Result};
use crate::idmap::IdMaps;
use crate::idmapped;
use crate::metadata::LayerImage;
use crate::mounted;
use crate::overlay;
use crate::usage;

/// The maximum size of a layer's files in bytes, holes included, which are hashed like data.
const FILE_BYTES_MAX: u64 = 1 << 40;

/// The images of layers.
#[derive(Debug)]
pub struct Layers {
    pub(crate) directories: Directories,
    images: Images,
    /// Whether committed layers become images. Not set while that cannot be tested.
    builds: OnceLock<bool>,
    /// Whether images share the memory of equal files.
    pub(crate) inode_share: bool,
    /// One image is built at a time: a build uses all processors.
    pub(crate) building: Mutex<()>,
    /// Locked while mounts are inspected and changed.
    mounting: Mutex<()>,
    /// Read-locked from the start of a build until the image is recorded, so that its packs are not removed as garbage.
    recording: RwLock<()>,
    /// Whether the store may have packs without an image.
    has_garbage: AtomicBool,
    /// Layers that cannot be merged with those below, although there was space. Not retried before the next start.
    not_merged: Mutex<BTreeSet<u64>>,
    /// Layers that cannot be images, although there was space; likewise.
    not_built: Mutex<BTreeSet<u64>>,
}

impl Layers {
    /// Detects the features of the kernel and the file system. What a full disk prevents is tested again by [`Self::detect_again`].
    ///
    /// # Errors
    ///
    /// There is no overlayfs here; no EROFS, if images are required; or no shared memory, if `inode_share` says so.
    pub fn new(directories: Directories, images: Images, inode_share: bool) -> Result<Self> {
        let builds = match detect(&directories, images) {
            // A server that does not start cannot make room.
            Err(error) if may_pass(&error) => {
                tracing::warn!("{}: committed layers stay directories for now", error_chain(&error));
                OnceLock::new()
            }
            detected => detected?.into(),
        };
        if inode_share {
            let why = match builds.get() {
                Some(false) => Some("layers are not images here".into()),
                _ => InodeShare::missing(),
            };
            if let Some(why) = why {
                return Err(Error::FailedPrecondition(format!(
                    "inode-share = true needs Linux 7.0 or later with EROFS_FS_PAGE_CACHE_SHARE: {why}"
                )));
            }
        }
        Ok(Self {
            directories,
            images,
            builds,
            inode_share,
            building: Mutex::default(),
            mounting: Mutex::default(),
            recording: RwLock::default(),
            has_garbage: AtomicBool::new(true),
            not_merged: Mutex::default(),
            not_built: Mutex::default(),
        })
    }

    /// Whether committed layers become images now.
    pub(crate) fn builds(&self) -> bool {
        self.builds.get() == Some(&true)
    }

    /// Repeats the test of [`Self::new`] if a full disk has prevented it.
    ///
    /// # Errors
    ///
    /// The features are missing, or the disk is still full.
    pub(crate) fn detect_again(&self) -> Result<()> {
        let _building = lock(&self.building);
        if self.builds.get().is_none() {
            let _ = self.builds.set(detect(&self.directories, self.images)?);
        }
        Ok(())
    }

    /// Prevents the removal of packs. Held from before [`Self::build`] until its image is recorded.
    pub fn recording(&self) -> RwLockReadGuard<'_, ()> {
        read(&self.recording)
    }

    /// Builds an image of the directory of an active snapshot, and mounts it. Returns `None`, and leaves the directory, if that is
    /// impossible.
    pub fn build(&self, id: u64) -> Option<LayerImage> {
        if !self.builds() {
            return None;
        }
        // Its directory is removed below, which would break other mounts of it.
        let built = match self.is_mounted(id) {
            Ok(false) => self.try_build(id),
            Ok(true) => {
                tracing::warn!("layer {id} is still mounted, and stays a directory: it becomes an image later");
                return None;
            }
            Err(error) => Err(error),
        };
        built.inspect_err(|error| self.note_not_built(id, error)).ok()
    }

    /// As [`Self::build`], for a layer that was committed as a directory. One that can never be an image is not tried again.
    ///
    /// # Errors
    ///
    /// It cannot be an image, or not now.
    pub fn build_later(&self, id: u64) -> Result<Option<LayerImage>> {
        if lock(&self.not_built).contains(&id) || self.is_mounted(id)? {
            return Ok(None);
        }
        self.try_build(id).map(Some).inspect_err(|error| self.note_not_built(id, error))
    }

    /// Whether something has the directory of a layer mounted, also below others.
    ///
    /// # Errors
    ///
    /// The kernel's mount table cannot be read.
    pub fn is_mounted(&self, id: u64) -> Result<bool> {
        mounted::is_in_use(&self.directories.upper(id))
    }

    fn note_not_built(&self, id: u64, error: &Error) {
        let when = if may_pass(error) { ": it becomes an image when there is room" } else { "" };
        tracing::warn!("layer {id} stays a directory: {}{when}", error_chain(error));
        if !may_pass(error) {
            lock(&self.not_built).insert(id);
        }
        self.undo(id);
    }

    fn try_build(&self, id: u64) -> Result<LayerImage> {
        let upper = self.directories.upper(id);
        let bytes = usage::file_bytes(&upper)?;
        if bytes > FILE_BYTES_MAX {
            let why =
                format!("its files have {bytes} bytes, holes included, and those of an image {FILE_BYTES_MAX} at most");
            return Err(Error::FailedPrecondition(why));
        }
        let _building = lock(&self.building);
        // Remains of a commit with an unknown outcome.
        self.remove_image(id)?;
        let store = Store::create(&self.directories.store())?;
        let options = BuildOptions { inode_share: self.inode_share, ..BuildOptions::default() };
        let report = build(&upper, &self.directories.image(id), store, &options, &|_, _| {})?;
        let image = recorded(&report);
        self.mount(id, &image)?;
        Ok(image)
    }

    /// Removes an image that was not recorded.
    pub fn undo(&self, id: u64) {
        self.note_garbage();
        if let Err(error) = self.remove_image(id) {
            tracing::warn!("{}", error_chain(&error));
        }
    }

    pub(crate) fn remove_image(&self, id: u64) -> Result<()> {
        self.unmount(id)?;
        let path = self.directories.image(id);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.doing("remove", path),
        }
    }

    /// Mounts the image of a layer, unless it is mounted; returns where.
    ///
    /// # Errors
    ///
    /// The image is missing or damaged, or the kernel refuses it.
    pub fn mount(&self, id: u64, image: &LayerImage) -> Result<PathBuf> {
        self.mount_image(&self.directories.image(id), &image.digest, self.directories.layer(id))
    }

    /// Mounts the merged image of layers (highest first), unless it is mounted; returns the mount point. Builds the image if it is missing,
    /// and calls `record` with its digest. Returns `None` if overlayfs has to stack the layers.
    pub fn merged(
        &self,
        layers: &[(u64, &LayerImage)],
        digest: &str,
        record: impl FnOnce(&str) -> Result<()>,
    ) -> Option<PathBuf> {
        let id = layers.first()?.0;
        if lock(&self.not_merged).contains(&id) {
            return None;
        }
        let mount =
            |digest: &str| self.mount_image(&self.directories.merged_image(id), digest, self.directories.merged(id));
        if !digest.is_empty() {
            match mount(digest) {
                Ok(at) => return Some(at),
                Err(error) => tracing::warn!("layers {id} and below are merged once more: {}", error_chain(&error)),
            }
        }
        let made = self.merge(layers).and_then(|digest| {
            record(&digest)?;
            // A mount that an earlier process did not record.
            erofs::unmount_all(&self.directories.merged(id))?;
            mount(&digest)
        });
        made.inspect_err(|error| {
            tracing::warn!("layers {id} and below are not merged, but stacked by overlayfs: {}", error_chain(error));
            if !may_pass(error) {
                lock(&self.not_merged).insert(id);
            }
        })
        .ok()
    }

    /// Merges layers to one image; returns its digest. It does not wait for builds, because a start must not wait for a pull.
    fn merge(&self, layers: &[(u64, &LayerImage)]) -> Result<String> {
        let image = |(id, image): &(u64, &LayerImage)| {
            let path = self.directories.image(*id);
            Ok((path.clone(), digest_of(&path, &image.digest)?))
        };
        let images = layers.iter().map(image).collect::<Result<Vec<_>>>()?;
        let path = self.directories.merged_image(layers.first().map_or(0, |(id, _)| *id));
        Ok(merge(&images, &path, self.inode_share)?.to_string())
    }

    fn mount_image(&self, path: &Path, digest: &str, at: PathBuf) -> Result<PathBuf> {
        let _mounting = lock(&self.mounting);
        if !erofs::is_mounted(&at)? {
            let image = Image::open(path, Some(digest_of(path, digest)?))?;
            let store = Store::open(&self.directories.store())?;
            let packs: Vec<PathBuf> = image.packs().iter().map(|pack| store.pack_path(pack.name)).collect();
            // Images of the time before have no identities.
            let share = if self.inode_share { InodeShare::of(&image, path, &store)? } else { None };
            match fs::create_dir(&at) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error).doing("create", &at)?,
                _ => erofs::mount(&image, path, &packs, &at, share.as_ref())?,
            }
        }
        Ok(at)
    }

    /// Mounts layers a second time with the ids of a container, unless they are mounted; returns the mount points.
    ///
    /// # Errors
    ///
    /// The kernel refuses.
    pub fn idmap(&self, id: u64, layers: &[PathBuf], maps: &IdMaps) -> Result<Vec<PathBuf>> {
        let _mounting = lock(&self.mounting);
        let directory = self.directories.lower(id);
        // Layers that were stacked before and are merged now have other mounts.
        let name = |(number, layer): (usize, &PathBuf)| {
            if layer.ends_with(MERGED) { MERGED.to_owned() } else { number.to_string() }
        };
        let at: Vec<PathBuf> = layers.iter().enumerate().map(|layer| directory.join(name(layer))).collect();
        let mut namespace = None;
        for (layer, at) in layers.iter().zip(&at) {
            if erofs::shows(at, layer)? {
                continue;
            }
            erofs::unmount_all(at)?;
            let namespace = match &namespace {
                Some(namespace) => namespace,
                None => namespace.insert(idmapped::user_namespace(maps)?),
            };
            fs::create_dir_all(at).doing("create", at)?;
            idmapped::mount(layer, namespace.as_fd(), at)?;
        }
        Ok(at)
    }

    /// Returns a link to the only layer below a snapshot, whose ids containerd maps ([`overlay::engine_maps_ids`]).
    ///
    /// # Errors
    ///
    /// The link cannot be made.
    pub fn link(&self, id: u64, layer: &Path) -> Result<PathBuf> {
        let _mounting = lock(&self.mounting);
        let directory = self.directories.lower(id);
        let (link, new) = (directory.join("layer"), directory.join(".layer"));
        if fs::read_link(&link).is_ok_and(|found| found == layer) {
            return Ok(link);
        }
        fs::create_dir_all(&directory).doing("create", &directory)?;
        match fs::remove_file(&new) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error).doing("remove", &new)?,
            _ => symlink(layer, &new).doing("create", &new)?,
        }
        fs::rename(&new, &link).doing("rename", new)?;
        Ok(link)
    }

    /// Unmounts all mounts in the directory of a snapshot lazily: processes that use them keep them.
    ///
    /// # Errors
    ///
    /// The kernel refuses.
    pub fn unmount(&self, id: u64) -> Result<()> {
        let _mounting = lock(&self.mounting);
        unmount_in(&self.directories.snapshot(id))
    }

    /// Whether packs may be unused.
    pub fn has_garbage(&self) -> bool {
        self.has_garbage.load(Ordering::Relaxed)
    }

    /// Records that the image of a layer was removed.
    pub fn note_garbage(&self) {
        self.has_garbage.store(true, Ordering::Relaxed);
    }

    /// Removes packs that no image needs, if there can be any. `needed` returns the names of all packs of recorded images; none is
    /// recorded meanwhile. The packs in `incomplete` are needed, too, and may be missing.
    ///
    /// # Errors
    ///
    /// The store cannot be changed.
    pub fn collect(
        &self,
        incomplete: &BTreeSet<String>,
        needed: impl FnOnce() -> Result<BTreeSet<String>>,
    ) -> Result<()> {
        if !self.has_garbage.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let collected = self.collect_now(incomplete, needed);
        if collected.is_err() {
            self.note_garbage();
        }
        collected
    }

    fn collect_now(
        &self,
        incomplete: &BTreeSet<String>,
        needed: impl FnOnce() -> Result<BTreeSet<String>>,
    ) -> Result<()> {
        // A waiting writer blocks new readers, and containerd's database is locked while it commits.
        let _recording = match self.recording.try_write() {
            Ok(recording) => recording,
            Err(TryLockError::Poisoned(recording)) => recording.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.note_garbage();
                return Ok(());
            }
        };
        let needed = needed()?;
        let packs: BTreeSet<Digest> =
            needed.union(incomplete).filter_map(|name| Digest::from_hex(Algorithm::Blake3, name.as_bytes())).collect();
        drop(Store::create(&self.directories.store())?);
        // Another process, such as `ferry image du`, may use the store for any time.
        let Some(store) = ExclusiveStore::try_lock(&self.directories.store())? else {
            tracing::info!(
                "another process uses the store {}: it is cleaned up later",
                self.directories.store().display()
            );
            self.note_garbage();
            return Ok(());
        };
        let live = LiveSet { packs, objects: BTreeSet::new() };
        let report = store.collect(&live, Duration::ZERO, false)?;
        // Packs that an ending process still has open are removed the next time.
        let is_needed = |name: &str| {
            let pack = name.split('.').next().unwrap_or(name);
            Digest::from_hex(Algorithm::Blake3, pack.as_bytes()).is_none_or(|pack| live.packs.contains(&pack))
        };
        let files = fs::read_dir(self.directories.store().join("packs")).into_iter().flatten().flatten();
        if !files.map(|file| file.file_name()).all(|name| name.to_str().is_none_or(is_needed)) {
            self.note_garbage();
        }
        if report.bytes > 0 {
            tracing::info!("removed {} packs, {} bytes", report.removed.len(), report.bytes);
        }
        for pack in report.missing.iter().filter(|pack| needed.contains(&pack.hex())) {
            tracing::error!("the pack {} is missing: remove the images that need it, and pull them again", pack.hex());
        }
        Ok(())
    }
}

/// Unmounts what is mounted in a directory of a snapshot: its image, and idmapped layers.
///
/// # Errors
///
/// The kernel refuses.
pub fn unmount_in(directory: &Path) -> Result<()> {
    ["layer", MERGED].iter().try_for_each(|name| erofs::unmount_all(&directory.join(name)))?;
    let lower = directory.join("lower");
    // In the trash it may be an image's own, even a symbolic link.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = match openat(CWD, &lower, flags, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
        opened => opened.doing("open", &lower)?,
    };
    let inside = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    for entry in fs::read_dir(&inside).doing("list", &lower)? {
        erofs::unmount_all(&entry.doing("list", &lower)?.path())?;
    }
    Ok(())
}

/// Whether a failure has nothing to do with the layers: the disk was full, or the system had no memory, descriptors or threads left.
pub(crate) fn may_pass(error: &Error) -> bool {
    let is_short = |error: &io::Error| {
        use ErrorKind::{OutOfMemory, QuotaExceeded, StorageFull, WouldBlock};
        matches!(error.kind(), StorageFull | QuotaExceeded | OutOfMemory | WouldBlock)
            || matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
    };
    let mut causes = successors(Some(error as &dyn std::error::Error), |error| error.source());
    matches!(error, Error::Metadata(_)) || causes.any(|error| error.downcast_ref().is_some_and(is_short))
}

/// Returns the digest in the record of an image.
fn digest_of(image: &Path, recorded: &str) -> Result<Digest> {
    Digest::parse(recorded.as_bytes()).ok_or_else(|| {
        Error::FailedPrecondition(format!("the record of {} has no digest, but {recorded:?}", image.display()))
    })
}

fn recorded(report: &BuildReport) -> LayerImage {
    LayerImage { digest: report.digest.to_string(), packs: report.packs.iter().map(Digest::hex).collect() }
}

/// Tests the features that the configuration needs; returns whether committed layers become images.
fn detect(directories: &Directories, images: Images) -> Result<bool> {
    match probe(directories, images != Images::Never) {
        Err(error) if images == Images::Auto && !may_pass(&error) => {
            tracing::warn!("{}: committed layers stay directories", error_chain(&error));
            probe(directories, false).map(|()| false)
        }
        tried => tried.map(|()| images != Images::Never),
    }
}

/// Tests overlayfs, and with `images` EROFS below it, as they will be used; removes the files of the test.
fn probe(directories: &Directories, images: bool) -> Result<()> {
    let directory = directories.probe();
    let at = directory.join("layer");
    let clean = || {
        erofs::unmount_all(&at)?;
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.doing("remove", &directory),
        }
    };
    clean()?;
    let tried = (|| {
        for name in ["tree", "upper", "work", "layer"] {
            let path = directory.join(name);
            fs::create_dir_all(&path).doing("create", path)?;
        }
        if images {
            probe_image(&directory, &at)?;
        }
        overlay::check(&directory.join("upper"), &directory.join("work"), &at)
    })();
    let cleaned = clean();
    tried.and(cleaned)
}

/// Builds an image of two files, mounts it, and compares the kernel's view: before Linux 6.15 all files have the same time, which
/// confuses programs.
fn probe_image(directory: &Path, at: &Path) -> Result<()> {
    let tree = directory.join("tree");
    let contents = vec![7; 10_000];
    for (name, seconds) in [("old", 1_000_000_000), ("new", 1_700_000_000)] {
        let path = tree.join(name);
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let made = File::create(&path).and_then(|mut file| {
            file.write_all(&contents)?;
            file.set_modified(time)
        });
        made.doing("create", path)?;
    }
    let (path, store) = (directory.join("image"), directory.join("store"));
    let report = build(&tree, &path, Store::create(&store)?, &BuildOptions::default(), &|_, _| {})?;
    let image = Image::open(&path, Some(report.digest))?;
    let store = Store::open(&store)?;
    let packs: Vec<PathBuf> = report.packs.iter().map(|pack| store.pack_path(*pack)).collect();
    erofs::mount(&image, &path, &packs, at, None)?;
    for name in ["old", "new"] {
        let shown = |root: &Path| -> io::Result<_> {
            let path = root.join(name);
            Ok((fs::read(&path)?, fs::metadata(&path)?.modified()?))
        };
        let (expected, found) = (shown(&tree).doing("read", &tree)?, shown(at).doing("read", at)?);
        if expected != found {
            let why =
                "this kernel's EROFS shows other times or contents than images have (Linux 6.15 or later is needed)";
            return Err(Error::FailedPrecondition(why.into()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_a_system_that_is_short_of_something_may_pass() {
        for (errno, expected) in [
            (Errno::NOSPC, true),
            (Errno::DQUOT, true),
            (Errno::NOMEM, true),
            (Errno::MFILE, true),
            (Errno::NFILE, true),
            (Errno::AGAIN, true),
            (Errno::INVAL, false),
            (Errno::IO, false),
            (Errno::OPNOTSUPP, false),
        ] {
            let failed = Err::<(), _>(errno);
            assert_eq!(may_pass(&failed.doing("create", "x").unwrap_err()), expected, "{errno:?}");
            let source = io::Error::from(errno);
            let image = ferry_image::Error::Io { what: "create", path: "x".into(), source };
            assert_eq!(may_pass(&image.into()), expected, "{errno:?}");
        }
    }

    /// A removed directory may be the tree of an image.
    #[test]
    fn unmounting_follows_no_links_of_an_image() {
        let directory = tempfile::tempdir().unwrap();
        let lower = directory.path().join("lower");
        let elsewhere = tempfile::tempdir().unwrap();
        let mounted = elsewhere.path().join("mounted");
        fs::create_dir(&mounted).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        let is_root = rustix::mount::mount("tmpfs", &mounted, "tmpfs", flags, None).is_ok();
        std::os::unix::fs::symlink(elsewhere.path(), &lower).unwrap();
        let unmounted = unmount_in(directory.path());
        let stays = erofs::is_mount_point(&mounted).unwrap();
        erofs::unmount_all(&mounted).unwrap();
        assert!(unmounted.is_ok() && stays == is_root, "{unmounted:?}");
        fs::remove_file(&lower).unwrap();
        fs::write(&lower, "").unwrap();
        unmount_in(directory.path()).unwrap();
    }
}
