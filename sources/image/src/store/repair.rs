//! Records and repairs damage in packs.
//!
//! ```text
//! STORE/packs/NAME.damaged   the digests of damaged objects in the pack, one per line
//! ```
//!
//! A full check writes this record. Builds do not reuse recorded objects, so they store them again. When another pack
//! or a server has the objects, a repaired copy replaces the pack; processes that have the old one open keep it.
//!
//! A pack consists of objects and their zero padding, and its index has their lengths. So a pack of valid objects has
//! the fs-verity digest in its index, unless the index is wrong, and wrong padding is repaired without fetching. A pack
//! with another fs-verity digest cannot be modified, so it is replaced by a copy, too.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::format::chunk::{self, ChunkState};
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, IoContext, Result};
use crate::format::image::Image;
use crate::format::index::look_at_object;
use crate::format::index::{Index, Object};
use crate::format::plain_file;
use crate::store::fetch::{Fetch, SERVERS_MAX};
use crate::store::file_objects::remove_damaged;
use crate::store::layout::noted;
use crate::store::new_file::{self, NewFile};
use crate::store::packs::Store;
use crate::store::places::StorePlaces;
use crate::store::{fsverity, layer_fetch, layout, parallel};

/// The outcome of a repair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RepairCounts {
    /// The number of repaired objects.
    pub repaired: usize,
    /// The number of objects that are still damaged.
    pub left: usize,
}

/// Reads all packs or objects of an image, and records damage, so that builds and pulls replace it; returns the number
/// of damaged objects. Damaged objects of a composefs image are removed. Missing ones are not counted.
///
/// # Errors
///
/// The store cannot be read or written, or the image is damaged.
pub fn note_damage(image: &Image, directory: &Path) -> Result<usize> {
    if image.is_composefs() {
        return remove_damaged(image, directory);
    }
    let store = Store::open(directory)?;
    let mut found = 0;
    for pack in image.packs().iter().filter(|pack| store.has(pack.name)) {
        // A pack with a damaged index is replaced by a pull.
        let Ok(index) = store.index(pack.name) else { continue };
        found += store.look_for_damage(&index)?;
    }
    Ok(found)
}

/// Replaces recorded damage in an image's packs by objects of other packs, or of `from`.
///
/// # Errors
///
/// The store cannot be read or written, or an object is not available or damaged in `from`, too. Everything else is
/// repaired first, and the error names all packs that are not.
pub fn repair_packs(image: &Image, directory: &Path, from: Option<&dyn Fetch>) -> Result<RepairCounts> {
    // Most stores have no record.
    let is_noted = |pack: &&crate::format::data::PackRef| layout::damage_path(directory, pack.name).exists();
    let noted: Vec<Digest> = image.packs().iter().filter(is_noted).map(|pack| pack.name).collect();
    if noted.is_empty() {
        return Ok(RepairCounts::default());
    }
    Store::open(directory)?.repair_each(noted, from)
}

/// The sources of valid objects for a pack.
struct Sources<'a> {
    places: &'a StorePlaces,
    /// `None` after it failed to respond: the next request would wait as long. Refusing an object does not count.
    from: Option<&'a dyn Fetch>,
    /// The first object that could not be fetched, and why.
    failed: Option<(Digest, io::Error)>,
}

impl Store {
    /// Returns the recorded damage of a pack.
    pub(crate) fn noted(&self, pack: Digest) -> HashSet<Digest> {
        noted(self.directory(), pack)
    }

    /// Reads a pack, and records damage; returns the number of damaged objects.
    pub(crate) fn look_for_damage(&self, index: &Index) -> Result<usize> {
        let path = self.pack_path(index.pack);
        let file = plain_file::open_to_read(&path).doing("open", &path)?;
        let damaged = Mutex::new(Vec::new());
        let look = |at: usize| -> Result<(), ()> {
            if look(&file, &index.objects[at]) != Some(ChunkState::Sound) {
                lock(&damaged).push(at);
            }
            Ok(())
        };
        let _ = parallel::each(index.objects.len(), look);
        let mut damaged = damaged.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        damaged.sort_unstable();
        self.note(index, &damaged)?;
        Ok(damaged.len())
    }

    /// Records the damaged objects of a pack. One with a wrong length or fs-verity digest gets an empty record.
    fn note(&self, index: &Index, damaged: &[usize]) -> Result<()> {
        let path = layout::damage_path(self.directory(), index.pack);
        let is_of_use =
            || plain_file::open_to_read(&self.pack_path(index.pack)).is_ok_and(|file| !has_other_digest(&file, index));
        if damaged.is_empty() && self.is_whole(index) && is_of_use() {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).doing("remove", &path),
                _ => Ok(()),
            };
        }
        let lines: String = damaged.iter().map(|at| format!("{}\n", index.objects[*at].digest)).collect();
        let mut new = NewFile::begin(new_file::directory_of(&path))?;
        new.file.write_all(lines.as_bytes()).doing("write to", &*new.path)?;
        new.keep(&path)
    }

    /// Repairs packs with a record; one failure does not stop the others.
    pub(crate) fn repair_each(&self, packs: Vec<Digest>, from: Option<&dyn Fetch>) -> Result<RepairCounts> {
        let places = self.places(false)?;
        let (mut all, mut failures) = (RepairCounts::default(), Vec::new());
        for pack in packs {
            match self.repair_pack(pack, &places, from) {
                Ok(RepairCounts { repaired, left }) => {
                    all = RepairCounts { repaired: all.repaired + repaired, left: all.left + left }
                }
                Err(error) => failures.push(error),
            }
        }
        Error::of_all(failures).map_or(Ok(all), Err)
    }

    /// Replaces a pack by a copy with repaired objects, as far as possible. `places` has those of other packs.
    fn repair_pack(&self, pack: Digest, places: &StorePlaces, from: Option<&dyn Fetch>) -> Result<RepairCounts> {
        // Of two concurrent repairs the later one would undo the earlier one.
        let Some(_lock) = lock_note(&layout::damage_path(self.directory(), pack))? else {
            return Ok(RepairCounts::default());
        };
        // An incomplete pack, or one with a damaged index, is fetched as a whole.
        let Some(index) = self.index(pack).ok().filter(|_| self.has(pack)) else { return Ok(RepairCounts::default()) };
        let path = self.pack_path(pack);
        let old = plain_file::open_to_read(&path).doing("open", &path)?;
        let noted = self.noted(pack);
        let noted = index.objects.iter().filter(|object| noted.contains(&object.digest));
        let bad: Vec<(&Object, Option<ChunkState>)> = noted
            .map(|object| (object, look(&old, object)))
            .filter(|(_, found)| *found != Some(ChunkState::Sound))
            .collect();
        let can_be_had = |(object, found): &(&Object, Option<ChunkState>)| {
            *found == Some(ChunkState::Padding) || from.is_some() || places.contains(&object.digest)
        };
        let has_wrong_form = !self.is_whole(&index) || has_other_digest(&old, &index);
        if !has_wrong_form && !bad.iter().any(can_be_had) {
            if bad.is_empty() {
                self.note(&index, &[])?;
            }
            return Ok(RepairCounts { repaired: 0, left: bad.len() });
        }
        let new = NewFile::begin(new_file::directory_of(&path))?;
        let mut sources = Sources { places, from, failed: None };
        let (repaired, left) = match self.copy_repaired((&old, &path), &new, &index, &mut sources) {
            Ok(copied) => copied,
            Err(error) => {
                return Err(match sources.error(pack, 1) {
                    Some(before) => Error::Several(vec![before, error]),
                    None => error,
                });
            }
        };
        let failed = sources.error(pack, left.len());
        if repaired == 0 && !has_wrong_form {
            return failed.map_or(Ok(RepairCounts { repaired, left: left.len() }), Err);
        }
        let keep = || -> Result<()> {
            new.file.set_len(index.blocks * BLOCK_BYTES as u64).doing("write to", &*new.path)?;
            // With remaining damage the digest differs.
            new.keep_sealed(&path, index.verity.filter(|_| left.is_empty()))?;
            self.note(&index, &left)
        };
        if let Err(error) = keep() {
            return Error::of_all(failed.into_iter().chain([error]).collect()).map_or(Ok(RepairCounts::default()), Err);
        }
        tracing::info!("repaired {repaired} objects of the pack {pack} in {}", self.directory().display());
        failed.map_or(Ok(RepairCounts { repaired, left: left.len() }), Err)
    }

    /// Copies a pack's objects and replaces damaged ones; returns the number of repaired ones, and those that are not.
    fn copy_repaired(
        &self,
        (old, path): (&File, &Path),
        new: &NewFile,
        index: &Index,
        sources: &mut Sources<'_>,
    ) -> Result<(usize, Vec<usize>)> {
        let (mut repaired, mut left) = (0, Vec::new());
        for (at, object) in index.objects.iter().enumerate() {
            let mut memory = Vec::new();
            let found = look_at_object(old, object.begin(), object, &mut memory);
            match found {
                Ok(ChunkState::Sound) => {}
                Ok(ChunkState::Padding) => {
                    let bytes = usize::try_from(object.bytes).unwrap_or(usize::MAX).min(memory.len());
                    memory[bytes..].fill(0);
                    repaired += 1;
                }
                Ok(ChunkState::Damaged) | Err(_) => match (sources.get(self, index, object), found) {
                    (Some(right), _) => {
                        repaired += 1;
                        memory = right;
                    }
                    // The copy must not have less than the original.
                    (None, Ok(_)) => left.push(at),
                    (None, Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        left.push(at);
                        continue;
                    }
                    // It may be intact, and readable later.
                    (None, Err(error)) => return Err(error).doing("read", path),
                },
            }
            if !chunk::is_zero(&memory) {
                new.file.write_all_at(&memory, object.begin()).doing("write to", &*new.path)?;
            }
        }
        Ok((repaired, left))
    }
}

impl Sources<'_> {
    /// Returns the verified bytes of an object, from another pack or a server.
    fn get(&mut self, store: &Store, index: &Index, object: &Object) -> Option<Vec<u8>> {
        if let Some((other, from)) = self.places.find(&object.digest) {
            let mut memory = vec![0; usize::try_from(object.bytes).unwrap_or_default()];
            let found = plain_file::open_to_read(&store.pack_path(other))
                .and_then(|file| file.read_exact_at(&mut memory, from));
            if found.is_ok() && object.proves(&memory) {
                return Some(memory);
            }
        }
        let from = self.from?;
        let mut came = fetch(from, index, object);
        for _ in 1..SERVERS_MAX {
            // A server that sent something damaged is left out.
            if !came.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {
                break;
            }
            came = fetch(from, index, object);
        }
        match came {
            Ok(came) => return Some(came),
            Err(error) => {
                let is_of_object = matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData
                );
                if !is_of_object {
                    self.from = None;
                }
                self.fail(object, error);
            }
        }
        None
    }

    fn fail(&mut self, object: &Object, error: io::Error) {
        self.failed.get_or_insert((object.digest, error));
    }

    /// Returns an error if fetching failed; `left` objects are still damaged.
    fn error(self, pack: Digest, left: usize) -> Option<Error> {
        let (object, source) = self.failed?;
        let others = if left > 1 { format!(" and {} others of it", left - 1) } else { String::new() };
        Some(Error::Fetch { what: format!("the object {object} of the pack {pack}{others}"), source })
    }
}

/// Fetches the bytes of an object, which are proved.
fn fetch(from: &dyn Fetch, index: &Index, object: &Object) -> io::Result<Vec<u8>> {
    let mut came = Vec::new();
    layer_fetch::read(from, index, object.begin()..object.end(), &mut |bytes| {
        if came.len() as u64 + bytes.len() as u64 > object.bytes {
            return Err(io::Error::other("more than was asked for"));
        }
        came.extend_from_slice(bytes);
        if came.len() as u64 == object.bytes && !object.proves(&came) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it came damaged"));
        }
        Ok(())
    })?;
    match object.proves(&came) {
        true => Ok(came),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "it came damaged")),
    }
}

/// Returns whether the kernel verifies a pack by another fs-verity digest than that in its index.
fn has_other_digest(file: &File, index: &Index) -> bool {
    index.verity.zip(fsverity::measure(file)).is_some_and(|(wanted, found)| wanted != found)
}

/// Returns the state of an object, if it is readable.
fn look(file: &File, object: &Object) -> Option<ChunkState> {
    look_at_object(file, object.begin(), object, &mut Vec::new()).ok()
}

/// The maximum wait for a concurrent repair of a pack: every process can lock its record of damage.
const REPAIR_TIME: Duration = Duration::from_secs(60);
const REPAIR_TICK: Duration = Duration::from_millis(20);

/// Waits for a concurrent repair of a pack; `None` if nothing is left to repair. The file holds the lock.
fn lock_note(path: &PathBuf) -> Result<Option<File>> {
    let end = Instant::now() + REPAIR_TIME;
    loop {
        // To write, too: NFS takes an exclusive lock only then.
        let file = match plain_file::open(File::options().read(true).write(true), path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.doing("open", path)?,
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < end => {
                thread::sleep(REPAIR_TICK);
                continue;
            }
            Err(Errno::WOULDBLOCK) => {
                let kept =
                    io::Error::new(io::ErrorKind::WouldBlock, "another process keeps it locked: is that a repair?");
                return Err(kept).doing("lock", path);
            }
            locked => locked.doing("lock", path)?,
        }
        let ours = file.metadata().doing("look at", path)?;
        // Its previous owner may have replaced it.
        if fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (ours.dev(), ours.ino())) {
            return Ok(Some(file));
        }
    }
}
