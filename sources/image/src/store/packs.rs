//! Packs: the bytes of files, which images share.
//!
//! ```text
//! STORE/lock               locked shared by builds, exclusively by what removes packs
//! STORE/packs/NAME         block-aligned objects in the order of the index
//! STORE/packs/NAME.index   see [`crate::format::index`]
//! STORE/packs/NAME.damaged recorded damage of the pack, see [`crate::store::repair`]
//! STORE/packs/table        the locations of objects, see [`crate::format::pack_table`]
//! ```
//!
//! NAME is the BLAKE3 digest of the index, so the name verifies the index, and the index verifies each object. Objects
//! are files, and chunks of 64 KiB of larger files ([`crate::format::chunk`]).
//!
//! A build can add the fs-verity digests of packs to their indexes. Names do not depend on whether the file system
//! supports fs-verity; where it does, fs-verity is enabled for such packs ([`crate::seal()`]).
//!
//! Incomplete packs have other suffixes: [`crate::read::fetch`].

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{Access, Advice, AtFlags, CWD, FlockOperation};
use tempfile::TempDir;

use crate::format::digest::Digest;
use crate::format::error::{IoContext, Result};
use crate::format::image::Image;
use crate::format::index::{Index, pack_name};
use crate::format::layer_index::LayerBlob;
use crate::format::plain_file;
use crate::store::layout::{
    self, DAMAGED_SUFFIX, INDEX_SUFFIX, Listing, PART_SUFFIX, index_path, is_whole, lock_path, packs_directory,
    read_index,
};
use crate::store::new_file::NEW_PREFIX;
use crate::store::object_list;
use crate::store::places::StorePlaces;

/// The maximum read-ahead of a pack in bytes: more would evict what is needed now.
const AHEAD_BYTES_MAX: u64 = 1 << 30;
/// The step of read-ahead in bytes: the usual maximum per request to the kernel.
const AHEAD_STEP_BYTES: usize = 128 << 10;

/// Returns an error unless a directory contains packs or objects.
pub(crate) fn is_store(directory: &Path) -> Result<()> {
    match fs::metadata(packs_directory(directory)) {
        Err(_) if object_list::is_store(directory) => Ok(()),
        found => found.map(drop).doing("use as a store", directory),
    }
}

/// A directory of packs.
#[derive(Debug)]
pub struct Store {
    pub(crate) directory: PathBuf,
    /// Prevents others from removing packs.
    _lock: File,
}

/// Whether this process may create files in a directory.
fn may_write(directory: &Path) -> bool {
    rustix::fs::accessat(CWD, directory, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
}

impl Store {
    /// Opens a store, or creates it.
    ///
    /// # Errors
    ///
    /// The directory cannot be created or used.
    pub fn create(directory: &Path) -> Result<Self> {
        fs::create_dir_all(packs_directory(directory)).doing("make", packs_directory(directory))?;
        Self::open(directory)
    }

    /// Opens a store.
    ///
    /// # Errors
    /// There is none, or it cannot be used.
    pub fn open(directory: &Path) -> Result<Self> {
        let path = lock_path(directory);
        is_store(directory)?;
        // A read-only store is usable. Who may not write to it removes no packs, but may not see who does.
        // Also to read: NFS takes a shared lock only then.
        let made = layout::lockable(File::options().read(true).create(true).append(true), &path);
        let is_read_only = |error: &io::Error| {
            matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
        };
        let opened = made.or_else(|error| match is_read_only(&error) {
            true => plain_file::open_to_read(&path),
            false => Err(error),
        });
        let lock = match opened {
            Err(error) if is_read_only(&error) && !may_write(&packs_directory(directory)) => {
                File::open(directory).doing("open", directory)?
            }
            opened => opened.doing("open", &path)?,
        };
        rustix::fs::flock(&lock, FlockOperation::LockShared).doing("lock", &path)?;
        Ok(Self { directory: directory.into(), _lock: lock })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Makes a directory for files that are needed for a while. If the process is killed, garbage collection removes it.
    ///
    /// # Errors
    ///
    /// It cannot be made.
    pub fn temporary_directory(&self) -> Result<TempDir> {
        let parent = packs_directory(&self.directory);
        tempfile::Builder::new().prefix(NEW_PREFIX).tempdir_in(&parent).doing("make a directory in", &parent)
    }

    /// Returns the path of a pack.
    pub fn pack_path(&self, pack: Digest) -> PathBuf {
        packs_directory(&self.directory).join(pack.hex())
    }

    /// Returns whether a pack is complete.
    pub fn has(&self, pack: Digest) -> bool {
        self.index_path(pack).exists() && self.pack_path(pack).exists()
    }

    /// Returns the index of a complete pack, if both the index and the pack's length are valid.
    pub(crate) fn index_of_whole(&self, pack: Digest) -> Option<Index> {
        self.index(pack).ok().filter(|index| self.is_whole(index))
    }

    pub(crate) fn index_path(&self, pack: Digest) -> PathBuf {
        index_path(&self.directory, pack)
    }

    /// Reads a pack's index, and verifies it by the pack's name.
    ///
    /// # Errors
    ///
    /// It is missing or damaged.
    pub fn index(&self, pack: Digest) -> Result<Index> {
        read_index(&self.directory, pack)
    }

    /// Returns the layer whose files a pack has, complete or not; `None` for other packs, and for unknown ones.
    pub fn layer_of(&self, pack: Digest) -> Option<LayerBlob> {
        let part = || plain_file::read(&self.part_index_path(pack), layout::INDEX_BYTES_MAX).ok();
        let index = self.index(pack).ok().or_else(|| Index::of(&self.directory, pack, &part()?).ok())?;
        index.layer
    }

    /// Returns whether there is an index of a pack, complete or not.
    pub fn has_index(&self, pack: Digest) -> bool {
        self.index_path(pack).exists() || self.part_index_path(pack).exists()
    }

    fn part_index_path(&self, pack: Digest) -> PathBuf {
        packs_directory(&self.directory).join(format!("{}{PART_SUFFIX}{INDEX_SUFFIX}", pack.hex()))
    }

    /// Returns all packs by name. A pack without an index is being written or removed.
    pub fn packs(&self) -> Result<Vec<Digest>> {
        self.list().map(|listing| listing.packs)
    }

    /// Returns what it contains, by file names.
    pub(crate) fn list(&self) -> Result<Listing> {
        let directory = packs_directory(&self.directory);
        let mut listing = Listing::default();
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(listing),
            entries => entries.doing("list", &directory)?,
        };
        for entry in entries {
            let name = entry.doing("list", &directory)?.file_name();
            let name = name.as_encoded_bytes();
            let named = |suffix: &str| name.strip_suffix(suffix.as_bytes()).and_then(pack_name);
            listing.packs.extend(named(INDEX_SUFFIX));
            listing.noted.extend(named(DAMAGED_SUFFIX));
        }
        listing.packs.sort_unstable();
        Ok(listing)
    }

    /// Returns the locations of all undamaged objects, or of those in packs with an fs-verity digest; for one in several
    /// packs that in the first pack by name.
    pub(crate) fn places(&self, with_verity: bool) -> Result<StorePlaces> {
        Ok(StorePlaces::open(&self.directory, self.list()?, with_verity))
    }

    /// Returns whether a pack has the length in its index.
    pub(crate) fn is_whole(&self, index: &Index) -> bool {
        is_whole(&self.directory, index)
    }

    /// Requests the kernel to read a pack ahead, up to a maximum.
    ///
    /// # Errors
    ///
    /// The pack cannot be opened.
    pub fn read_ahead(&self, pack: Digest) -> Result<()> {
        let path = self.pack_path(pack);
        let file = plain_file::open_to_read(&path).doing("open", &path)?;
        let bytes = file.metadata().doing("look at", &path)?.len().min(AHEAD_BYTES_MAX);
        for offset in (0..bytes).step_by(AHEAD_STEP_BYTES) {
            // Only advice, in steps of the kernel's maximum.
            let _ = rustix::fs::fadvise(&file, offset, NonZeroU64::new(AHEAD_STEP_BYTES as u64), Advice::WillNeed);
        }
        Ok(())
    }

    /// Marks a pack as used, if permitted, so that it is not removed before its new image is known.
    pub(crate) fn freshen(&self, pack: Digest) {
        let touched =
            plain_file::open_to_read(&self.index_path(pack)).and_then(|index| index.set_modified(SystemTime::now()));
        if let Err(error) = touched {
            tracing::debug!("cannot note that the pack {pack} is used: {error}");
        }
    }
}

impl Image {
    /// Verifies the requested digest of the tree, or that in the image, by the indexes of its packs in a store.
    ///
    /// # Errors
    ///
    /// The image has another tree, or a pack's index is missing or damaged.
    pub fn verify_tree(&self, directory: &Path) -> Result<()> {
        if self.is_composefs() || (self.expected_tree().is_none() && self.tree().is_none()) {
            return Ok(());
        }
        let store = Store::open(directory)?;
        let indexes = self.packs().iter().map(|pack| store.index(pack.name)).collect::<Result<Vec<_>>>()?;
        self.verify_tree_by(&indexes.iter().collect::<Vec<_>>())
    }
}
