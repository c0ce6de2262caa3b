//! Where images keep their files' bytes: packs, which images share.
//!
//! ```text
//! STORE/lock               held shared by builds, alone by what removes packs
//! STORE/packs/NAME         objects, each from a block's beginning on, in the order of the index
//! STORE/packs/NAME.index   for each object its length (8 bytes, little endian) and its BLAKE3 digest (32 bytes);
//!                          then, in packs for fs-verity, 64 ones and the pack's fs-verity digest (SHA-256, blocks of 4 KiB; 32 bytes)
//! STORE/packs/NAME.damaged what is known to be damaged in the pack, see [`crate::store::repair`]
//! STORE/packs/table        where to look for objects, see [`crate::format::pack_table`]
//! ```
//!
//! NAME is the BLAKE3 digest of the index. So whoever knows the name can prove the index by it, and each object by the index. Objects
//! are files, and pieces of 64 KiB of larger files ([`crate::format::chunk`]).
//!
//! A build is told whether it makes packs for fs-verity. Their digest is known whatever the file system can do, so their names do not
//! depend on that; where the file system has fs-verity, it is on for them ([`crate::seal()`]).
//!
//! Packs that are being fetched have names that end otherwise: [`crate::read::fetch`].

use std::fs::{self, File};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{Advice, FlockOperation};

use crate::format::digest::Digest;
use crate::format::error::{IoContext, Result};
use crate::format::image::Image;
use crate::format::index::{Index, pack_name};
use crate::store::layout::{
    DAMAGED_SUFFIX, INDEX_SUFFIX, Listing, index_path, is_whole, lock_path, packs_folder, read_index,
};
use crate::store::object_list;
use crate::store::places::StorePlaces;

/// How much of a pack is read before it is wanted, in bytes: more would push out of memory what is needed now.
const AHEAD_BYTES_MAX: u64 = 1 << 30;
/// In which pieces, in bytes: the usual read-ahead of a disk, of which the kernel does not take more at once.
const AHEAD_STEP_BYTES: usize = 128 << 10;

/// Whether a folder has packs or objects in it.
pub(crate) fn is_store(folder: &Path) -> Result<()> {
    match fs::metadata(packs_folder(folder)) {
        Err(_) if object_list::is_store(folder) => Ok(()),
        found => found.map(drop).doing("use as a store", folder),
    }
}

/// A folder of packs.
#[derive(Debug)]
pub struct Store {
    pub(crate) folder: PathBuf,
    /// Keeps others from removing packs.
    _lock: File,
}

impl Store {
    /// Opens a store, or makes one where there is none.
    ///
    /// # Errors
    /// The folder cannot be made or used.
    pub fn create(folder: &Path) -> Result<Self> {
        fs::create_dir_all(packs_folder(folder)).doing("make", packs_folder(folder))?;
        Self::open(folder)
    }

    /// Opens a store.
    ///
    /// # Errors
    /// There is none, or it cannot be used.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = lock_path(folder);
        is_store(folder)?;
        // A store that may not be written to is read all the same; one that never was has no lock, and nobody removes its packs.
        let lock = match File::options().create(true).append(true).open(&path).or_else(|_| File::open(&path)) {
            Ok(file) => file,
            Err(_) => File::open(folder).doing("open", folder)?,
        };
        rustix::fs::flock(&lock, FlockOperation::LockShared).doing("lock", &path)?;
        Ok(Self { folder: folder.into(), _lock: lock })
    }

    /// Where it is.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where a pack's bytes are.
    pub fn pack_path(&self, pack: Digest) -> PathBuf {
        packs_folder(&self.folder).join(pack.hex())
    }

    /// Whether a pack is all here.
    pub fn has(&self, pack: Digest) -> bool {
        self.index_path(pack).exists() && self.pack_path(pack).exists()
    }

    /// The index of a pack that is all here, if it is sound, and the pack is as long as it tells.
    pub(crate) fn index_of_whole(&self, pack: Digest) -> Option<Index> {
        self.index(pack).ok().filter(|index| self.is_whole(index))
    }

    pub(crate) fn index_path(&self, pack: Digest) -> PathBuf {
        index_path(&self.folder, pack)
    }

    /// Reads a pack's index, and proves it by the pack's name.
    ///
    /// # Errors
    /// It is missing, or not what the name says.
    pub fn index(&self, pack: Digest) -> Result<Index> {
        read_index(&self.folder, pack)
    }

    /// All packs there are, by name. A pack whose index is missing is one that is just being made or removed.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn packs(&self) -> Result<Vec<Digest>> {
        self.list().map(|listing| listing.packs)
    }

    /// What there is, by the names of files.
    pub(crate) fn list(&self) -> Result<Listing> {
        let folder = packs_folder(&self.folder);
        let mut listing = Listing::default();
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(listing),
            entries => entries.doing("list", &folder)?,
        };
        for entry in entries {
            let name = entry.doing("list", &folder)?.file_name();
            let name = name.as_encoded_bytes();
            let named = |suffix: &str| name.strip_suffix(suffix.as_bytes()).and_then(pack_name);
            listing.packs.extend(named(INDEX_SUFFIX));
            listing.noted.extend(named(DAMAGED_SUFFIX));
        }
        listing.packs.sort_unstable();
        Ok(listing)
    }

    /// Where each object of the store is. Of one that is in several packs, the place in the first pack by name. What is noted as damaged
    /// is left out.
    pub(crate) fn places(&self) -> Result<StorePlaces> {
        Ok(StorePlaces::open(&self.folder, self.list()?, false))
    }

    /// The same in those packs whose indexes have their fs-verity digests.
    pub(crate) fn places_with_verity(&self) -> Result<StorePlaces> {
        Ok(StorePlaces::open(&self.folder, self.list()?, true))
    }

    /// Whether a pack has the length that its index tells of.
    pub(crate) fn is_whole(&self, index: &Index) -> bool {
        is_whole(&self.folder, index)
    }

    /// Asks the kernel to read a pack from its beginning to its end, so much of it at most, before anybody wants it.
    ///
    /// # Errors
    /// The pack cannot be opened.
    pub fn read_ahead(&self, pack: Digest) -> Result<()> {
        let path = self.pack_path(pack);
        let file = File::open(&path).doing("open", &path)?;
        let bytes = file.metadata().doing("look at", &path)?.len().min(AHEAD_BYTES_MAX);
        for offset in (0..bytes).step_by(AHEAD_STEP_BYTES) {
            // Only an advice. The kernel takes no more than this at once.
            let _ = rustix::fs::fadvise(&file, offset, NonZeroU64::new(AHEAD_STEP_BYTES as u64), Advice::WillNeed);
        }
        Ok(())
    }

    /// Notes that a pack is used now, so that it is not removed before its new image is known. Who may not write that
    /// uses what others look after.
    pub(crate) fn freshen(&self, pack: Digest) {
        let touched = File::open(self.index_path(pack)).and_then(|index| index.set_modified(SystemTime::now()));
        if let Err(error) = touched {
            tracing::debug!("cannot note that the pack {pack} is used: {error}");
        }
    }
}

impl Image {
    /// Proves the digest of the tree: the one that the image was opened for, or, without one, what the image says. The indexes of its packs
    /// are read from a store.
    ///
    /// # Errors
    /// The image has another tree, or a pack's index is missing or damaged.
    pub fn prove_tree(&self, folder: &Path) -> Result<()> {
        if self.is_composefs() || (self.expected_tree().is_none() && self.tree().is_none()) {
            return Ok(());
        }
        let store = Store::open(folder)?;
        let indexes = self.packs().iter().map(|pack| store.index(pack.name)).collect::<Result<Vec<_>>>()?;
        self.prove_tree_by(&indexes.iter().collect::<Vec<_>>())
    }
}
