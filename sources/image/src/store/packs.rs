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

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustix::fs::{Advice, FlockOperation, OFlags};
use tempfile::TempPath;

use crate::format::chunk::{self, Batch, PIECE_BYTES, Piece};
use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Doing, Error, Result};
use crate::format::verity::{Hasher, hash_block};
use crate::store::fsverity::{self, Verity};
use crate::store::object_list;
use crate::store::places::StorePlaces;

/// The size of one entry of an index, in bytes.
pub(crate) const RECORD_BYTES: usize = 40;
/// What stands for a length in the last entry, which is not an object but the digest of the whole pack. No object is so long.
const WHOLE_PACK: u64 = u64::MAX;
/// The largest index that is read: more objects than an image can have blocks make no sense, and memory is to be bounded.
const INDEX_BYTES_MAX: u64 = 1 << 32;

/// How much of a pack is read before it is wanted, in bytes: more would push out of memory what is needed now.
const AHEAD_BYTES_MAX: u64 = 1 << 30;
/// In which pieces, in bytes: the usual read-ahead of a disk, of which the kernel does not take more at once.
const AHEAD_STEP_BYTES: usize = 128 << 10;
/// What ends the name of a pack's index.
pub(crate) const INDEX_SUFFIX: &str = ".index";
/// What ends the name of a pack that is not all here.
pub(crate) const PART_SUFFIX: &str = ".part";

/// What ends the name of the note of what is damaged in a pack.
pub(crate) const DAMAGED_SUFFIX: &str = ".damaged";

/// What begins the name of a file that is not complete.
pub(crate) const NEW_PREFIX: &str = ".new-";

/// What holds the store's lock.
pub(crate) fn lock_path(folder: &Path) -> PathBuf {
    folder.join("lock")
}

/// Where the packs are.
pub(crate) fn packs_folder(folder: &Path) -> PathBuf {
    folder.join("packs")
}

/// Where it is noted what is damaged in a pack.
pub(crate) fn damage_path(folder: &Path, pack: Digest) -> PathBuf {
    packs_folder(folder).join(format!("{}{DAMAGED_SUFFIX}", pack.hex()))
}

/// Where the index of a pack is.
fn index_path(folder: &Path, pack: Digest) -> PathBuf {
    packs_folder(folder).join(format!("{}{INDEX_SUFFIX}", pack.hex()))
}

/// Reads the index of a pack of a store, and proves it by the pack's name.
pub(crate) fn read_index(folder: &Path, pack: Digest) -> Result<Index> {
    let path = index_path(folder, pack);
    let mut bytes = Vec::new();
    let file = File::open(&path).doing("open", &path)?;
    file.take(INDEX_BYTES_MAX).read_to_end(&mut bytes).doing("read", &path)?;
    Index::of(folder, pack, &bytes)
}

/// Whether a pack of a store has the length that its index tells of.
pub(crate) fn is_whole(folder: &Path, index: &Index) -> bool {
    let bytes = index.blocks.saturating_mul(BLOCK_BYTES as u64);
    fs::metadata(packs_folder(folder).join(index.pack.hex())).is_ok_and(|metadata| metadata.len() == bytes)
}

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
    folder: PathBuf,
    /// Keeps others from removing packs.
    _lock: File,
}

/// What there is in a store.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// Packs with an index, by name.
    pub packs: Vec<Digest>,
    /// Packs of which something is noted as damaged.
    pub noted: Vec<Digest>,
}

/// What is in a pack.
#[derive(Debug)]
pub struct Index {
    /// The pack's name.
    pub pack: Digest,
    /// For each object its first block, length in bytes, and digest; by block.
    pub objects: Vec<Object>,
    /// How many blocks the pack has.
    pub blocks: u64,
    /// The digest of all of the pack, as fs-verity makes it; packs of before have none.
    pub verity: Option<Digest>,
}

/// Bytes in a pack: a file's, or a piece's of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// The first block in the pack.
    pub block: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// What they are.
    pub digest: Digest,
}

impl Index {
    /// What the bytes of a pack's index in a store say, once they are proved by the pack's name.
    pub(crate) fn of(store: &Path, pack: Digest, bytes: &[u8]) -> Result<Self> {
        let flawed = |reason: &str| Error::Pack { store: store.into(), pack, reason: reason.into() };
        if pack.algorithm().of(bytes) != pack || !bytes.len().is_multiple_of(RECORD_BYTES) {
            return Err(flawed("its index is damaged"));
        }
        let mut objects = Vec::with_capacity(bytes.len() / RECORD_BYTES);
        let (mut block, mut verity) = (0_u64, None);
        for record in bytes.chunks_exact(RECORD_BYTES) {
            let (length, digest) = record.split_at(8);
            let bytes = length.try_into().map_or(0, u64::from_le_bytes);
            let digest = digest.try_into().unwrap_or_default();
            if verity.is_some() {
                return Err(flawed("its index goes on behind its end"));
            }
            if bytes == WHOLE_PACK {
                verity = Some(Digest::new(Algorithm::Verity, digest));
                continue;
            }
            let digest = Digest::new(Algorithm::Blake3, digest);
            if bytes > PIECE_BYTES as u64 {
                return Err(flawed(
                    "its index tells of larger pieces than there are: another version of ferry has made it",
                ));
            }
            objects.push(Object { block, bytes, digest });
            block = block
                .checked_add(bytes.div_ceil(BLOCK_BYTES as u64))
                .ok_or_else(|| flawed("the lengths in its index are too large"))?;
        }
        Ok(Self { pack, objects, blocks: block, verity })
    }

    /// The objects that begin at a block: one without bytes begins where the next one does.
    pub(crate) fn objects_at(&self, block: u64) -> impl Iterator<Item = &Object> {
        let from = self.objects.partition_point(|object| object.block < block);
        self.objects[from..].iter().take_while(move |object| object.block == block)
    }

    /// The object that begins at a block and has so many bytes.
    pub(crate) fn object_at(&self, block: u64, bytes: u64) -> Option<&Object> {
        self.objects_at(block).find(|object| object.bytes == bytes)
    }

    /// The bytes that say the same.
    pub fn to_bytes(&self) -> Vec<u8> {
        let objects = self.objects.iter().map(|object| record(object.bytes, object.digest));
        objects.chain(self.verity.map(|digest| record(WHOLE_PACK, digest))).flatten().collect()
    }
}

/// An entry of an index.
fn record(bytes: u64, digest: Digest) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[..8].copy_from_slice(&bytes.to_le_bytes());
    record[8..].copy_from_slice(digest.bytes());
    record
}

impl Object {
    /// How many blocks it takes.
    pub(crate) fn blocks(&self) -> u64 {
        self.bytes.div_ceil(BLOCK_BYTES as u64)
    }

    /// How many bytes these have.
    pub(crate) fn padded(&self) -> u64 {
        self.blocks() * BLOCK_BYTES as u64
    }
}

/// Which pack and which block an object is at.
pub(crate) type Places = HashMap<Digest, (Digest, u64)>;

/// Which pieces are hashed for fs-verity, too, when they are read: that takes longer than hashing them by BLAKE3.
#[derive(Clone, Debug)]
pub(crate) enum Leaves {
    /// None.
    No,
    /// Those that are not in these packs already.
    OfNew(Arc<StorePlaces>),
}

impl Leaves {
    pub(crate) fn are_wanted(&self, digest: &Digest) -> bool {
        match self {
            Self::No => false,
            Self::OfNew(places) => !places.contains(digest),
        }
    }
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

    fn index_path(&self, pack: Digest) -> PathBuf {
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

    /// Begins a new pack, in whose index its fs-verity digest is to be, or not.
    pub(crate) fn begin(self: &Arc<Self>, has_verity: bool) -> Result<NewPack> {
        let folder = packs_folder(&self.folder);
        let New { file, path } = New::begin(&folder)?;
        let is_direct = set_direct(&file, true);
        let (store, index, verity) = (Arc::clone(self), Vec::new(), has_verity.then(Hasher::default));
        Ok(NewPack { store, file, path, index, blocks: 0, verity, is_direct })
    }
}

/// The pack that a file's name is of.
pub(crate) fn pack_name(hex: &[u8]) -> Option<Digest> {
    Digest::from_hex(Algorithm::Blake3, hex)
}

/// Has a file written past the kernel's cache, or not; answers whether that is so.
fn set_direct(file: &File, is_direct: bool) -> bool {
    let flags = if is_direct { OFlags::DIRECT } else { OFlags::empty() };
    rustix::fs::fcntl_setfl(file, flags).is_ok() && is_direct
}

/// A pack that is being made. It is nowhere to be seen until it is finished.
///
/// It is written past the kernel's cache where the file system can do that: copying it there and having it written out at the end takes
/// longer than all else.
pub(crate) struct NewPack {
    store: Arc<Store>,
    file: File,
    path: TempPath,
    index: Vec<u8>,
    blocks: u64,
    /// Makes the digest of all blocks, if that is to be in the index.
    verity: Option<Hasher>,
    is_direct: bool,
}

impl NewPack {
    /// Appends those pieces of a batch that `wants` takes, which is told where they go. What is all zeros becomes a hole.
    pub(crate) fn add(&mut self, batch: &Batch, mut wants: impl FnMut(Digest, usize, u64) -> bool) -> Result<()> {
        // Neighbours are written together.
        let mut run = Run { at: self.blocks, from: 0, to: 0 };
        let bytes = batch.as_bytes();
        let mut from = 0;
        for Piece { padded, bytes: length, digest, leaves } in batch.pieces() {
            let to = from + padded.len();
            if wants(digest, length, self.blocks) {
                let blocks = (padded.len() / BLOCK_BYTES) as u64;
                if chunk::is_zero(padded) {
                    self.write(&bytes[run.from..run.to], run.at)?;
                    run = Run { at: self.blocks + blocks, from: to, to };
                } else if run.to == from {
                    run.to = to;
                } else {
                    self.write(&bytes[run.from..run.to], run.at)?;
                    run = Run { at: self.blocks, from, to };
                }
                match (&mut self.verity, leaves) {
                    (None, _) => {}
                    (Some(verity), Some(leaves)) => leaves.iter().for_each(|leaf| verity.add_block(leaf)),
                    (Some(verity), None) => {
                        padded.chunks(BLOCK_BYTES).for_each(|block| verity.add_block(&hash_block(block)));
                    }
                }
                self.index.extend_from_slice(&record(length as u64, digest));
                self.blocks += blocks;
            }
            from = to;
        }
        self.write(&bytes[run.from..run.to], run.at)
    }

    fn write(&mut self, bytes: &[u8], block: u64) -> Result<()> {
        let at = block * BLOCK_BYTES as u64;
        match self.file.write_all_at(bytes, at) {
            // File systems may take the flag and then not like what comes.
            Err(error) if self.is_direct && error.kind() == std::io::ErrorKind::InvalidInput => {
                self.is_direct = set_direct(&self.file, false);
                self.file.write_all_at(bytes, at).doing("write to", &*self.path)
            }
            outcome => outcome.doing("write to", &*self.path),
        }
    }

    /// Makes it durable and gives it its name; `None` if it holds nothing. The index comes last: with it, all of the pack is there.
    pub(crate) fn finish(mut self) -> Result<Option<Digest>> {
        if self.blocks == 0 {
            return Ok(None);
        }
        let verity = self.verity.as_mut().map(Hasher::finish);
        self.index.extend(verity.iter().flat_map(|digest| record(WHOLE_PACK, *digest)));
        let pack = Algorithm::Blake3.of(&self.index);
        let (store, path, file) = (self.store, self.path, self.file);
        file.set_len(self.blocks * BLOCK_BYTES as u64).doing("write to", &*path)?;
        New { file, path }.keep_sealed(&store.pack_path(pack), verity)?;
        let mut index = New::begin(&packs_folder(&store.folder))?;
        index.file.write_all(&self.index).doing("write to", &*index.path)?;
        index.keep(&store.index_path(pack))?;
        Ok(Some(pack))
    }
}

/// Neighbouring pieces of a batch, and the block that they go to.
struct Run {
    at: u64,
    from: usize,
    to: usize,
}

/// A file that is not there until it is complete. If that never happens, it goes.
pub(crate) struct New {
    pub file: File,
    pub path: TempPath,
}

impl New {
    /// Begins a file in this folder.
    pub(crate) fn begin(folder: &Path) -> Result<Self> {
        let file = tempfile::Builder::new().prefix(NEW_PREFIX).tempfile_in(folder).doing("make a file in", folder)?;
        let (file, path) = file.into_parts();
        Ok(Self { file, path })
    }

    /// Makes it durable under its name, readable by everybody, with what stood there before replaced.
    pub(crate) fn keep(self, name: &Path) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        self.file.set_permissions(fs::Permissions::from_mode(0o444)).doing("change", &*self.path)?;
        self.file.sync_all().doing("sync", &*self.path)?;
        Self::name(self.path, name)
    }

    /// The same; with its fs-verity digest, fs-verity is on for the file where the file system has it: nobody can change it any more then,
    /// and the kernel proves what is read of it.
    pub(crate) fn keep_sealed(self, name: &Path, verity: Option<Digest>) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let Some(verity) = verity else { return self.keep(name) };
        let Self { file, path } = self;
        file.set_permissions(fs::Permissions::from_mode(0o444)).doing("change", &*path)?;
        // Nobody may have it open for writing when fs-verity is turned on.
        drop(file);
        let file = File::open(&path).doing("open", &*path)?;
        if let Verity::On(found) = fsverity::turn_on(&file).doing("turn fs-verity on for", &*path)?
            && found != verity
        {
            return Err(Error::Unlike { path: name.into(), wanted: verity, found });
        }
        file.sync_all().doing("sync", &*path)?;
        Self::name(path, name)
    }

    /// Gives a file that is durable its name.
    fn name(path: TempPath, name: &Path) -> Result<()> {
        path.persist(name).map_err(|error| error.error).doing("make", name)?;
        let folder = folder_of(name);
        File::open(folder).and_then(|folder| folder.sync_all()).doing("sync", folder)
    }
}

/// The folder that a file is in.
pub(crate) fn folder_of(name: &Path) -> &Path {
    name.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Entries of objects, and one of a whole pack, in any order; and some bytes that may be too many.
    fn entries() -> impl Strategy<Value = Vec<u8>> {
        let length = prop_oneof![0..=PIECE_BYTES as u64, Just(WHOLE_PACK), Just(PIECE_BYTES as u64 + 1), any::<u64>()];
        let entry =
            (length, any::<[u8; 32]>()).prop_map(|(length, digest)| [&length.to_le_bytes()[..], &digest].concat());
        let likely = (0..=PIECE_BYTES as u64, any::<[u8; 32]>());
        let likely = likely.prop_map(|(length, digest)| [&length.to_le_bytes()[..], &digest].concat());
        let entries = prop::collection::vec(prop_oneof![9 => likely, 1 => entry], 0..20);
        (entries, prop_oneof![9 => Just(0), 1 => 0_usize..40]).prop_map(|(entries, more)| {
            let mut bytes = entries.concat();
            bytes.extend(std::iter::repeat_n(0, more));
            bytes
        })
    }

    fn index_of(bytes: &[u8]) -> Result<Index> {
        Index::of(Path::new("store"), Algorithm::Blake3.of(bytes), bytes)
    }

    proptest! {
        #[test]
        fn indexes_are_read_as_they_are_written_or_refused(bytes in entries()) {
            if let Ok(index) = index_of(&bytes) {
                prop_assert_eq!(index.to_bytes(), &bytes[..]);
                prop_assert_eq!(index.objects.len() + usize::from(index.verity.is_some()), bytes.len() / RECORD_BYTES);
                prop_assert_eq!(index.blocks, index.objects.iter().map(Object::blocks).sum::<u64>());
            }
        }
    }

    #[test]
    fn the_digest_of_the_whole_pack_is_the_last_entry_and_the_only_one() {
        let (object, whole) = (record(5000, chunk::digest(b"x")), record(WHOLE_PACK, Algorithm::Verity.of(b"x")));
        let index = index_of(&[object, whole].concat()).expect("it is right");
        assert_eq!((index.blocks, index.verity), (2, Some(Algorithm::Verity.of(b"x"))));
        assert_eq!(index_of(&object).expect("it is right").verity, None);
        for wrong in [[whole, object], [whole, whole]] {
            let error = index_of(&wrong.concat()).expect_err("something follows the end").to_string();
            assert!(error.contains("goes on behind its end"), "{error}");
        }
    }
}
