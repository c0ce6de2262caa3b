//! Packs of which something is damaged, and how they become whole again.
//!
//! ```text
//! STORE/packs/NAME.damaged   the digests of the objects that are damaged in the pack, a line for each
//! ```
//!
//! Whoever has looked at every byte notes there what is damaged. Builds do not take that from the pack, so what they have of it is
//! stored again; and when it can be had, from another pack or from a server, a copy of the pack that has it takes the pack's place.
//! Who has the old one open keeps that.
//!
//! Objects, and zeros up to the ends of their last blocks, are all that is in a pack, and its index tells how long it is. So a pack
//! whose objects are sound has the fs-verity digest that its index names, unless the index is wrong; and where only the zeros are something
//! else, nobody has to be asked. A pack of which the kernel has another fs-verity digest cannot be written to any more, and fs-verity cannot
//! be turned off: of it, too, a copy takes the place.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::FlockOperation;

use crate::format::chunk::{self, Found};
use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, IoContext, Result};
use crate::format::image::Image;
use crate::format::index::{Index, Object};
use crate::format::index::{look_at_object, read_object};
use crate::store::fetch::Fetch;
use crate::store::file_objects::remove_damaged;
use crate::store::layout::noted;
use crate::store::new_file::{self, NewFile};
use crate::store::packs::Store;
use crate::store::places::StorePlaces;
use crate::store::{fsverity, layout, parallel};

/// What became of damaged objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RepairCounts {
    /// How many have their right bytes again.
    pub repaired: usize,
    /// How many have not.
    pub left: usize,
}

/// Reads all of an image's packs or objects, and notes what is damaged, so that builds and pulls replace it; returns how much that
/// is. Damaged objects of a composefs image are files of their own, and are removed. What is not there is no damage.
///
/// # Errors
/// The store cannot be read or written to, or the image is damaged.
pub fn note_damage(image: &Image, folder: &Path) -> Result<usize> {
    if image.is_composefs() {
        return remove_damaged(image, folder);
    }
    let store = Store::open(folder)?;
    let mut found = 0;
    for pack in image.packs().iter().filter(|pack| store.has(pack.name)) {
        // Of a pack whose index is damaged nothing can be told: a pull replaces it.
        let Ok(index) = store.index(pack.name) else { continue };
        found += store.look_for_damage(&index)?;
    }
    Ok(found)
}

/// Replaces what is noted as damaged in the packs of an image by what other packs have, or `from` hands over.
///
/// # Errors
/// The store cannot be read or written to, or `from` has not got it, or nothing sound: all that is repaired which can be, and all packs are
/// named of which something cannot be had.
pub fn repair_packs(image: &Image, folder: &Path, from: Option<&dyn Fetch>) -> Result<RepairCounts> {
    // Most stores need not be looked at any further.
    let is_noted = |pack: &&crate::format::data::PackRef| layout::damage_path(folder, pack.name).exists();
    let noted: Vec<Digest> = image.packs().iter().filter(is_noted).map(|pack| pack.name).collect();
    if noted.is_empty() {
        return Ok(RepairCounts::default());
    }
    Store::open(folder)?.repair_each(noted, from)
}

/// Where the right bytes of objects of one pack come from.
struct Sources<'a> {
    places: &'a StorePlaces,
    /// `None` once it had no answer: the next one would be waited for as long. Who refuses one object may have others.
    from: Option<&'a dyn Fetch>,
    /// The first object that could not be fetched, and why not.
    failed: Option<(Digest, io::Error)>,
}

impl Store {
    /// What is noted as damaged in a pack.
    pub(crate) fn noted(&self, pack: Digest) -> HashSet<Digest> {
        noted(self.folder(), pack)
    }

    /// Looks at all bytes of a pack, and notes what is damaged; returns how many objects are.
    pub(crate) fn look_for_damage(&self, index: &Index) -> Result<usize> {
        let path = self.pack_path(index.pack);
        let file = File::open(&path).doing("open", &path)?;
        let damaged = Mutex::new(Vec::new());
        let look = |at: usize| -> Result<(), ()> {
            if look(&file, &index.objects[at]) != Some(Found::Sound) {
                damaged.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(at);
            }
            Ok(())
        };
        let _ = parallel::each(index.objects.len(), look);
        let mut damaged = damaged.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        damaged.sort_unstable();
        self.note(index, &damaged)?;
        Ok(damaged.len())
    }

    /// Notes which objects of a pack are damaged. A pack of a wrong length, or with a wrong fs-verity digest, has a note without any.
    fn note(&self, index: &Index, damaged: &[usize]) -> Result<()> {
        let path = layout::damage_path(self.folder(), index.pack);
        let is_of_use = || File::open(self.pack_path(index.pack)).is_ok_and(|file| !has_other_digest(&file, index));
        if damaged.is_empty() && self.is_whole(index) && is_of_use() {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).doing("remove", &path),
                _ => Ok(()),
            };
        }
        let lines: String = damaged.iter().map(|at| format!("{}\n", index.objects[*at].digest)).collect();
        let mut new = NewFile::begin(new_file::folder_of(&path))?;
        new.file.write_all(lines.as_bytes()).doing("write to", &*new.path)?;
        new.keep(&path)
    }

    /// Mends packs that have a note, also when that fails with one.
    pub(crate) fn repair_each(&self, packs: Vec<Digest>, from: Option<&dyn Fetch>) -> Result<RepairCounts> {
        let places = self.places()?;
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

    /// Puts a copy in the place of a pack, with the right bytes of what is damaged in it as far as they can be had. `places` tells
    /// where other packs have them.
    fn repair_pack(&self, pack: Digest, places: &StorePlaces, from: Option<&dyn Fetch>) -> Result<RepairCounts> {
        // Of two who repair a pack the later one would undo what the first one did.
        let Some(_lock) = lock_note(&layout::damage_path(self.folder(), pack))? else {
            return Ok(RepairCounts::default());
        };
        // One that is not all here, or whose index is damaged, is fetched as a whole.
        let Some(index) = self.index(pack).ok().filter(|_| self.has(pack)) else { return Ok(RepairCounts::default()) };
        let path = self.pack_path(pack);
        let old = File::open(&path).doing("open", &path)?;
        let noted = self.noted(pack);
        let noted = index.objects.iter().filter(|object| noted.contains(&object.digest));
        let bad: Vec<(&Object, Option<Found>)> = noted
            .map(|object| (object, look(&old, object)))
            .filter(|(_, found)| *found != Some(Found::Sound))
            .collect();
        let can_be_had = |(object, found): &(&Object, Option<Found>)| {
            *found == Some(Found::Padding) || from.is_some() || places.contains(&object.digest)
        };
        let has_wrong_form = !self.is_whole(&index) || has_other_digest(&old, &index);
        if !has_wrong_form && !bad.iter().any(can_be_had) {
            if bad.is_empty() {
                self.note(&index, &[])?;
            }
            return Ok(RepairCounts { repaired: 0, left: bad.len() });
        }
        let new = NewFile::begin(new_file::folder_of(&path))?;
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
            // What is still damaged has another digest.
            new.keep_sealed(&path, index.verity.filter(|_| left.is_empty()))?;
            self.note(&index, &left)
        };
        if let Err(error) = keep() {
            return Error::of_all(failed.into_iter().chain([error]).collect()).map_or(Ok(RepairCounts::default()), Err);
        }
        tracing::info!("repaired {repaired} objects of the pack {pack} in {}", self.folder().display());
        failed.map_or(Ok(RepairCounts { repaired, left: left.len() }), Err)
    }

    /// Copies a pack's objects, with the right bytes of those that are damaged; returns how many were put right, and which could not be.
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
            let found = look_at_object(old, object.block, object, &mut memory);
            match found {
                Ok(Found::Sound) => {}
                Ok(Found::Padding) => {
                    let bytes = usize::try_from(object.bytes).unwrap_or(usize::MAX).min(memory.len());
                    memory[bytes..].fill(0);
                    repaired += 1;
                }
                Ok(Found::Damaged) | Err(_) => match (sources.get(self, index.pack, object), found) {
                    (Some(right), _) => {
                        repaired += 1;
                        memory = right;
                    }
                    // Nobody is to find less there than before.
                    (None, Ok(_)) => left.push(at),
                    (None, Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        left.push(at);
                        continue;
                    }
                    // It may be sound, and be read another time.
                    (None, Err(error)) => return Err(error).doing("read", path),
                },
            }
            if !chunk::is_zero(&memory) {
                new.file.write_all_at(&memory, object.block * BLOCK_BYTES as u64).doing("write to", &*new.path)?;
            }
        }
        Ok((repaired, left))
    }
}

impl Sources<'_> {
    /// The bytes of an object, from another pack or from elsewhere, proved.
    fn get(&mut self, store: &Store, pack: Digest, object: &Object) -> Option<Vec<u8>> {
        if let Some((other, block)) = self.places.get(&object.digest) {
            let mut memory = Vec::new();
            let found = File::open(store.pack_path(other));
            if matches!(found.and_then(|file| read_object(&file, block, object, &mut memory)), Ok(true)) {
                return Some(memory);
            }
        }
        match fetch(self.from?, pack, object) {
            Ok(came) if Algorithm::Blake3.of(&came) == object.digest => return Some(came),
            Ok(_) => self.fail(object, io::Error::other("it came damaged")),
            Err(error) => {
                if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) {
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

    /// That something could not be fetched; `left` objects have not got their right bytes.
    fn error(self, pack: Digest, left: usize) -> Option<Error> {
        let (object, source) = self.failed?;
        let others = if left > 1 { format!(" and {} others of it", left - 1) } else { String::new() };
        Some(Error::Fetch { what: format!("the object {object} of the pack {pack}{others}"), source })
    }
}

/// Fetches as many bytes as an object has.
fn fetch(from: &dyn Fetch, pack: Digest, object: &Object) -> io::Result<Vec<u8>> {
    let begin = object.block * BLOCK_BYTES as u64;
    let mut came = Vec::new();
    from.read(pack, begin..begin + object.bytes, &mut |bytes| {
        if came.len() as u64 + bytes.len() as u64 > object.bytes {
            return Err(io::Error::other("more than was asked for"));
        }
        came.extend_from_slice(bytes);
        Ok(())
    })?;
    Ok(came)
}

/// Whether the kernel proves what is read of a pack by another fs-verity digest than its index names.
fn has_other_digest(file: &File, index: &Index) -> bool {
    index.verity.zip(fsverity::measure(file)).is_some_and(|(wanted, found)| wanted != found)
}

/// What there is of an object, if it can be read.
fn look(file: &File, object: &Object) -> Option<Found> {
    look_at_object(file, object.block, object, &mut Vec::new()).ok()
}

/// Waits for whoever else repairs a pack; `None` if nothing is left to repair. The lock ends with the file.
fn lock_note(path: &PathBuf) -> Result<Option<File>> {
    loop {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.doing("open", path)?,
        };
        rustix::fs::flock(&file, FlockOperation::LockExclusive).doing("lock", path)?;
        let ours = file.metadata().doing("look at", path)?;
        // Whoever had it before us may have written another one.
        if fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (ours.dev(), ours.ino())) {
            return Ok(Some(file));
        }
    }
}
