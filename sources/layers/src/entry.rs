//! The directory of a store of layers:
//!
//! ```text
//! ROOT/store/          the data of files that were read
//! ROOT/layers/NAME.img the image of a layer, by the digests of its blob and of its table of contents, and by the reference:
//!                      only its registry says where in the blob the table is
//! ROOT/entries/HASH    the layer that a reference and a digest name, in JSON
//! ROOT/lock            locked by the process that uses the directory
//! ```

use std::collections::{BTreeSet, HashSet};
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use ferry_image::{ExclusiveStore, Image, LiveSet, Store, hex};
use ferry_registry::StackedLayer;
use ferry_vfs::sync::lock;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use crate::error::{Error, IoContext, Result};

/// The number of gzip in containers/storage.
const GZIP: u8 = 2;
/// The number of zstd.
const ZSTD: u8 = 4;

/// A reference and a digest.
pub(crate) type Key = (String, String);

/// The layer that a reference and a digest name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub reference: String,
    /// The digest of the table of contents, or of the blob.
    pub name: String,
    pub blob: String,
    pub bytes: u64,
    pub toc: String,
    pub diff_id: String,
    pub diff_bytes: Option<u64>,
    pub is_zstd: bool,
    /// The number of uses that engines have begun and not ended.
    pub uses: u64,
}

/// The record of a layer in containers/storage.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Info<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    compressed_diff_digest: Option<&'a str>,
    compressed_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    diff_digest: Option<&'a str>,
    /// -1: unknown. Exports need it.
    diff_size: i64,
    toc_digest: &'a str,
    compression: u8,
}

impl Entry {
    pub(crate) fn new(reference: &str, name: &str, layer: &StackedLayer, toc: &str) -> Self {
        Self {
            reference: reference.into(),
            name: name.into(),
            blob: format!("sha256:{}", layer.blob),
            bytes: layer.bytes,
            toc: toc.into(),
            diff_id: format!("sha256:{}", layer.diff_id),
            diff_bytes: layer.diff_bytes,
            is_zstd: layer.is_zstd,
            uses: 0,
        }
    }

    /// Returns the record of the layer for engines.
    pub(crate) fn info(&self) -> Vec<u8> {
        // Nothing proves that the archive with this digest has the files of the table of contents, and engines would use it for
        // layers of other images, too. Engines that look layers up by blob need it. They want both digests or none: with the archive's
        // alone they refuse other images that have it.
        let is_by_blob = self.name == self.blob;
        let diff_digest = is_by_blob.then_some(&*self.diff_id);
        let compression = if self.is_zstd { ZSTD } else { GZIP };
        let (compressed_diff_digest, toc_digest) = (is_by_blob.then_some(&*self.blob), &*self.toc);
        let compressed_size = self.bytes;
        let diff_size = self.diff_bytes.and_then(|bytes| bytes.try_into().ok()).unwrap_or(-1);
        let info = Info { compressed_diff_digest, compressed_size, diff_digest, diff_size, toc_digest, compression };
        serde_json::to_vec(&info).unwrap_or_default()
    }
}

/// The directory.
#[derive(Debug)]
pub(crate) struct Entries {
    root: PathBuf,
    /// Held while a use is counted, and while unused entries are removed.
    counting: Mutex<()>,
    _lock: File,
}

impl Entries {
    /// Locks the directory, and removes files that no entry needs.
    pub(crate) fn open(root: &Path) -> Result<Self> {
        let root = std::path::absolute(root).doing("find", root)?;
        for directory in [root.clone(), root.join("layers"), root.join("entries")] {
            // Layers have set-user-id programs.
            DirBuilder::new().recursive(true).mode(0o700).create(&directory).doing("create", directory)?;
        }
        let path = root.join("lock");
        let lock_file = File::options().create(true).append(true).open(&path).doing("open", &path)?;
        match rustix::fs::flock(&lock_file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(Error::InUse(root)),
            locked => locked.map_err(io::Error::from).doing("lock", path)?,
        }
        drop(Store::create(&root.join("store"))?);
        let entries = Self { root, counting: Mutex::default(), _lock: lock_file };
        let waiting = || tracing::warn!("another process uses the store {}: waiting", entries.store().display());
        let store = ExclusiveStore::lock(&entries.store(), &waiting)?;
        entries.remove_unused(&store, |_| HashSet::new())?;
        Ok(entries)
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.root.join("store")
    }

    /// Returns the image of a layer.
    pub(crate) fn image(&self, entry: &Entry) -> PathBuf {
        let digits = |digest: &str| digest.trim_start_matches("sha256:").to_owned();
        let by = hex(&sha2::Sha256::digest(&entry.reference).into());
        self.root.join("layers").join(format!("{}-{}-{}.img", digits(&entry.blob), digits(&entry.toc), &by[..16]))
    }

    fn path(&self, reference: &str, name: &str) -> PathBuf {
        let hash = sha2::Sha256::new().chain_update(reference).chain_update([0]).chain_update(name).finalize();
        self.root.join("entries").join(hex(&hash.into()))
    }

    /// Returns an entry that was stored before.
    pub(crate) fn get(&self, reference: &str, name: &str) -> Result<Option<Entry>> {
        let found = read(&self.path(reference, name))?;
        Ok(found.filter(|entry| (&*entry.reference, &*entry.name) == (reference, name)))
    }

    pub(crate) fn put(&self, entry: &Entry) -> Result<()> {
        let (path, directory) = (self.path(&entry.reference, &entry.name), self.root.join("entries"));
        let mut new =
            tempfile::Builder::new().prefix(".new-").tempfile_in(&directory).doing("create a file in", &directory)?;
        let bytes = serde_json::to_vec(entry).map_err(|error| Error::Record { path: path.clone(), error })?;
        new.write_all(&bytes).doing("write to", &path)?;
        // Engines rely on the layer from now on.
        new.as_file().sync_all().doing("sync", &path)?;
        new.persist(&path).map_err(|error| error.error).doing("create", path)?;
        sync_directory(&directory)
    }

    /// Counts the begin (`known`) or the end of a use. Without a use the entry is removed; returns whether it was. `known` is the entry
    /// of an open layer, whose file may have been removed.
    pub(crate) fn count_use(&self, (reference, name): (&str, &str), known: Option<&Entry>) -> Result<bool> {
        let _counting = lock(&self.counting);
        let (found, is_begin) = (self.get(reference, name)?, known.is_some());
        let Some(mut entry) = found.or_else(|| known.map(|known| Entry { uses: 0, ..known.clone() })) else {
            return Ok(false);
        };
        entry.uses = if is_begin { entry.uses.saturating_add(1) } else { entry.uses.saturating_sub(1) };
        if is_begin || entry.uses > 0 {
            return self.put(&entry).map(|()| false);
        }
        let path = self.path(reference, name);
        fs::remove_file(&path).doing("remove", path)?;
        sync_directory(&self.root.join("entries")).map(|()| true)
    }

    /// Removes entries without a use, images without an entry, and packs without an image. `open` returns images that stay because
    /// they are open; its argument are those with an entry.
    pub(crate) fn remove_unused(
        &self,
        store: &ExclusiveStore,
        open: impl FnOnce(&HashSet<PathBuf>) -> HashSet<PathBuf>,
    ) -> Result<()> {
        let _counting = lock(&self.counting);
        let list = |directory: &Path| -> Result<Vec<PathBuf>> {
            let entries = fs::read_dir(directory).doing("list", directory)?;
            entries.map(|entry| Ok(entry.doing("list", directory)?.path())).collect()
        };
        let mut needed = HashSet::new();
        for path in list(&self.root.join("entries"))? {
            let is_new = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".new-"));
            match read(&path) {
                Ok(Some(entry)) if entry.uses > 0 && self.path(&entry.reference, &entry.name) == path => {
                    needed.insert(self.image(&entry));
                }
                // It may be one in use.
                Err(error @ Error::Io { .. }) if !is_new => return Err(error),
                // An entry without a use, an incomplete file of a killed process, or a damaged entry. Engines look layers up again.
                _ => fs::remove_file(&path).doing("remove", path)?,
            }
        }
        let open = open(&needed);
        needed.extend(open);
        let mut packs = BTreeSet::new();
        for path in list(&self.root.join("layers"))? {
            match Image::open(&path, None) {
                // Its packs are not known.
                Err(error @ ferry_image::Error::Io { .. }) if needed.contains(&path) && !path.is_dir() => {
                    return Err(error.into());
                }
                Ok(image) if needed.contains(&path) => packs.extend(image.packs().iter().map(|pack| pack.name)),
                _ if path.is_dir() => fs::remove_dir_all(&path).doing("remove", path)?,
                _ => fs::remove_file(&path).doing("remove", path)?,
            }
        }
        let report = store.collect(&LiveSet { packs, objects: BTreeSet::new() }, Duration::ZERO, false)?;
        if report.bytes > 0 {
            tracing::info!("removed {} bytes of layers that no engine uses", report.bytes);
        }
        Ok(())
    }
}

fn sync_directory(directory: &Path) -> Result<()> {
    File::open(directory).and_then(|directory| directory.sync_all()).doing("sync", directory)
}

fn read(path: &Path) -> Result<Option<Entry>> {
    match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        bytes => {
            let entry = serde_json::from_slice(&bytes.doing("read", path)?);
            entry.map(Some).map_err(|error| Error::Record { path: path.into(), error })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> Entry {
        let digest = |digit: &str| format!("sha256:{}", digit.repeat(64));
        Entry {
            reference: "h/a:1".into(),
            name: digest(name),
            blob: digest("b"),
            bytes: 7,
            toc: digest("c"),
            diff_id: digest("d"),
            diff_bytes: None,
            is_zstd: true,
            uses: 0,
        }
    }

    #[test]
    fn info_has_the_diff_digest_only_for_lookups_by_blob() {
        let info = |name: &str| serde_json::from_slice::<serde_json::Value>(&entry(name).info()).unwrap();
        let (blob, toc) = (info("b"), info("c"));
        assert_eq!(
            (&blob["diff-digest"], toc.get("diff-digest")),
            (&format!("sha256:{}", "d".repeat(64)).into(), None)
        );
        assert_eq!(toc["toc-digest"], format!("sha256:{}", "c".repeat(64)));
        assert_eq!(
            (&toc["compressed-size"], &toc["compression"], &toc["diff-size"]),
            (&7.into(), &4.into(), &(-1).into())
        );
    }

    #[test]
    fn entries_outlive_the_process_until_their_last_use_ends() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Entries::open(directory.path()).unwrap();
        let (entries, unused, entry) = (open(), entry("b"), entry("c"));
        entries.put(&unused).unwrap();
        assert!(matches!(Entries::open(directory.path()), Err(Error::InUse(_))));
        entries.put(&entry).unwrap();
        fs::write(entries.image(&entry), "not an image").unwrap();
        for is_begin in [true, true, false] {
            entries.count_use((&entry.reference, &entry.name), is_begin.then_some(&entry)).unwrap();
        }
        drop(entries);
        fs::write(directory.path().join("entries/.new-1"), "half").unwrap();
        fs::write(directory.path().join("layers/other.img"), "unused").unwrap();
        let entries = open();
        assert_eq!(entries.get(&entry.reference, &entry.name).unwrap(), Some(Entry { uses: 1, ..entry.clone() }));
        assert_eq!(fs::read_dir(directory.path().join("entries")).unwrap().count(), 1);
        assert_eq!(fs::read_dir(directory.path().join("layers")).unwrap().count(), 0, "no images");
        assert_eq!(entries.get("h/a:2", &entry.name).unwrap(), None);
        entries.count_use((&entry.reference, &entry.name), None).unwrap();
        entries.count_use((&entry.reference, &entry.name), None).unwrap();
        assert_eq!(entries.get(&entry.reference, &entry.name).unwrap(), None);
        fs::write(entries.path("h/a:1", "x"), "{}").unwrap();
        assert!(matches!(entries.get("h/a:1", "x"), Err(Error::Record { .. })));
    }

    #[test]
    fn nothing_is_removed_if_an_image_in_use_is_unreadable() {
        let directory = tempfile::tempdir().unwrap();
        let (entries, entry) = (Entries::open(directory.path()).unwrap(), Entry { uses: 1, ..entry("c") });
        entries.put(&entry).unwrap();
        let image = entries.image(&entry);
        // Opening it fails (ELOOP), as without a free descriptor.
        std::os::unix::fs::symlink(&image, &image).unwrap();
        drop(entries);
        let opened = Entries::open(directory.path());
        assert!(matches!(opened, Err(Error::Image(ferry_image::Error::Io { .. }))));
        assert!(image.is_symlink());
    }

    #[test]
    fn nothing_is_removed_if_an_entry_is_unreadable() {
        let directory = tempfile::tempdir().unwrap();
        let (entries, entry) = (Entries::open(directory.path()).unwrap(), entry("c"));
        let image = entries.image(&entry);
        fs::write(&image, "it may be in use").unwrap();
        fs::create_dir(entries.path("h/a:1", "x")).unwrap();
        drop(entries);
        assert!(matches!(Entries::open(directory.path()), Err(Error::Io { .. })));
        assert!(image.exists());
    }
}
