//! The files of incomplete packs: opens, counts and completes them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FlockOperation, SeekFrom};
use rustix::io::Errno;

use crate::format::data::PackRef;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, IoContext, Result};
use crate::format::index::Index;
use crate::format::plain_file;
use crate::read::cache_limit::CacheLimit;
use crate::read::fetch_locks::Progress;
use crate::read::pack::Pack;
use crate::read::partial::{PartialPack, PartialPacks};
use crate::store::layout::{self, INDEX_SUFFIX, PART_SUFFIX};
use crate::store::new_file::{self, NewFile};
use crate::store::packs::Store;

/// The maximum size of a fetched index: six million objects. It limits memory.
const INDEX_BYTES_MAX: u64 = 256 << 20;
/// How often a file may be renamed concurrently while it is opened.
const OPEN_TRIES_MAX: usize = 8;

/// The lock number for all of a pack: held to complete it, and to open it.
const WHOLE: Range<u64> = u32::MAX as u64..u32::MAX as u64 + 1;

/// Opens a pack that is missing or incomplete in the store; `None` if another process has just completed it.
pub(crate) fn open(common: &Arc<PartialPacks>, store: &Store, number: usize, wanted: &PackRef) -> Result<Option<Pack>> {
    let pack = wanted.name;
    let is_whole = || if store.index_of_whole(pack).is_some() { Progress::Done } else { Progress::Of(0) };
    let Some(_lock) = common.locks.take(pack, WHOLE, is_whole) else { return Ok(None) };
    let directory = layout::packs_directory(&common.store);
    let index = index(common, wanted)?;
    let path = directory.join(format!("{}{PART_SUFFIX}", pack.hex()));
    let flawed = |reason: &str| Error::Pack { store: common.store.clone(), pack, reason: reason.into() };
    if index.blocks != wanted.blocks {
        return Err(flawed(&format!("its index tells of {} blocks, the image of {}", index.blocks, wanted.blocks)));
    }
    let (file, reader) = lock_part(&path, common.limit.is_some())?.ok_or_else(|| {
        flawed("another ferry uses what is here of it, with or without a limit (--cache-size): wait for its end")
    })?;
    // A hole: what the index claims takes no space.
    file.set_len(wanted.blocks * BLOCK_BYTES as u64).doing("write to", &path)?;
    if let Some(limit) = &common.limit {
        adopt(&file, &index, number, limit).doing("look at", &path)?;
    }
    Ok(Some(Pack::new(file, reader.into(), index, wanted.ahead).with_holes(PartialPack::new(common, number))))
}

/// Counts the available objects of a pack with a cache limit.
fn adopt(file: &File, index: &Index, number: usize, limit: &CacheLimit) -> io::Result<()> {
    let mut at = 0;
    loop {
        let from = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(from) => from,
            Err(Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let to = rustix::fs::seek(file, SeekFrom::Hole(from))?;
        let (first, end) = (from / BLOCK_BYTES as u64, to.div_ceil(BLOCK_BYTES as u64));
        let objects = &index.objects;
        let begin = objects.partition_point(|object| object.block + object.blocks() <= first);
        let end = objects.partition_point(|object| object.block < end);
        for (number_in, object) in objects.iter().enumerate().take(end).skip(begin) {
            limit.keep((number, number_in), object.padded(), || {});
        }
        at = to;
    }
}

/// Returns the verified index of a pack, from the store or fetched.
fn index(common: &PartialPacks, wanted: &PackRef) -> Result<Index> {
    let pack = wanted.name;
    let path = layout::packs_directory(&common.store).join(format!("{}{PART_SUFFIX}{INDEX_SUFFIX}", pack.hex()));
    if let Ok(bytes) = plain_file::read(&path, INDEX_BYTES_MAX)
        && let Ok(index) = Index::of(&common.store, pack, &bytes)
    {
        return Ok(index);
    }
    // The number of blocks says nothing about the index of a layer's pack, in which objects share blocks.
    let fetched = common.missing.from.index(pack, INDEX_BYTES_MAX);
    let bytes = fetched.map_err(|source| Error::Fetch { what: format!("the index of the pack {pack}"), source })?;
    let index = Index::of(&common.store, pack, &bytes)?;
    let mut new = NewFile::begin(new_file::directory_of(&path))?;
    new.file.write_all(&bytes).doing("write to", &*new.path)?;
    new.keep(&path)?;
    Ok(index)
}

/// Opens the file of an incomplete pack twice, the second time for readers: exclusively with a cache limit, because
/// objects are evicted. `None` if it is used in the other way, here or elsewhere.
fn lock_part(path: &Path, alone: bool) -> Result<Option<(File, File)>> {
    for _ in 0..OPEN_TRIES_MAX {
        let file = layout::lockable_part(path).doing("open", path)?;
        let lock = if alone { FlockOperation::NonBlockingLockExclusive } else { FlockOperation::NonBlockingLockShared };
        match rustix::fs::flock(&file, lock) {
            Err(Errno::WOULDBLOCK) => return Ok(None),
            outcome => outcome.doing("lock", path)?,
        }
        // It may have been completed or removed meanwhile.
        let same = |found: fs::Metadata, ours: fs::Metadata| (found.dev(), found.ino()) == (ours.dev(), ours.ino());
        let ours = file.metadata().doing("look at", path)?;
        if let Ok(reader) = plain_file::open_to_read(path)
            && reader.metadata().is_ok_and(|found| same(found, ours))
        {
            return Ok(Some((file, reader)));
        }
    }
    Ok(None)
}

/// Completes a pack as a build does: durable first, the index last. One of several processes does it.
pub(crate) fn complete(pack: &Pack, common: &PartialPacks) -> Result<()> {
    let directory = layout::packs_directory(&common.store);
    let at = |suffix: &str| directory.join(format!("{}{suffix}", pack.index.pack.hex()));
    let (name, part, index) = (at(""), at(PART_SUFFIX), at(INDEX_SUFFIX));
    let is_ours = |path: &Path| {
        let (found, ours) = (fs::metadata(path), pack.file.metadata());
        matches!((found, ours), (Ok(found), Ok(ours)) if (found.dev(), found.ino()) == (ours.dev(), ours.ino()))
    };
    let is_whole = || if is_ours(&name) && index.exists() { Progress::Done } else { Progress::Of(0) };
    let Some(_lock) = common.locks.take(pack.index.pack, WHOLE, is_whole) else { return Ok(()) };
    // A collection of garbage would remove what has no name yet.
    let _store = Store::open(&common.store)?;
    // First what can fail for want of room: a pack without an index would be fetched again.
    let mut new = NewFile::begin(&directory)?;
    new.file.write_all(&pack.index.to_bytes()).doing("write to", &*new.path)?;
    new.file.sync_all().doing("sync", &*new.path)?;
    pack.file.sync_all().doing("sync", &part)?;
    pack.file.set_permissions(fs::Permissions::from_mode(0o444)).doing("change", &part)?;
    // The name may belong to another process's new file: then this one is already complete under its final name.
    if is_ours(&part) {
        fs::rename(&part, &name).doing("make", &name)?;
    } else if !name.exists() {
        // A new file of another process may have the first name: nothing is known of what that one has.
        let removed = io::Error::new(io::ErrorKind::NotFound, "its file was removed while it was fetched");
        return Err(removed).doing("make", &name);
    }
    new.keep(&index)?;
    let rest = at(&format!("{PART_SUFFIX}{INDEX_SUFFIX}"));
    match fs::remove_file(&rest) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).doing("remove", &rest),
        _ => Ok(()),
    }
}
