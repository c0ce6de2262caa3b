//! Packs of which something is damaged, and how they become whole again.
//!
//! ```text
//! STORE/packs/NAME.damaged   the digests of the objects that are damaged in the pack, a line for each
//! ```
//!
//! Whoever has looked at every byte notes there what is damaged. Builds do not take that from the pack, so what they have of it is
//! stored again; and when it can be had, from another pack or from a server, a copy of the pack that has it takes the pack's place.
//! Who has the old one open keeps that.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::FlockOperation;

use crate::composefs::lacking::remove_damaged;
use crate::digest::{Algorithm, Digest};
use crate::erofs::BLOCK_BYTES;
use crate::error::{Doing, Error, Result};
use crate::fetch::Fetch;
use crate::image::Image;
use crate::pack::read_object;
use crate::store::{self, DAMAGED_SUFFIX, Index, New, Object, Places, Store};
use crate::{parallel, piece};

/// What became of damaged objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// How many have their right bytes again.
    pub mended: usize,
    /// How many have not.
    pub left: usize,
}

/// Reads all of an image's packs or objects, and notes what is damaged, so that builds and pulls replace it; answers how much that
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
/// The store cannot be read or written to, or `from` has not got it, or nothing sound. A pack of which that is so is as it was; the
/// others are mended.
pub fn mend(image: &Image, folder: &Path, from: Option<&dyn Fetch>) -> Result<Mended> {
    let mut all = Mended::default();
    // Most stores need not be looked at any further.
    let is_noted = |pack: &&crate::image::PackRef| store::damage_path(folder, pack.name).exists();
    let noted: Vec<Digest> = image.packs().iter().filter(is_noted).map(|pack| pack.name).collect();
    if noted.is_empty() {
        return Ok(all);
    }
    let store = Store::open(folder)?;
    let places = store.places()?;
    each_of(noted, |pack| {
        let Mended { mended, left } = store.mend_pack(pack, &places, from)?;
        all = Mended { mended: all.mended + mended, left: all.left + left };
        Ok(())
    })?;
    Ok(all)
}

/// Does something with each pack, also when it fails with one; answers the first failure, and logs others.
fn each_of(packs: Vec<Digest>, mut work: impl FnMut(Digest) -> Result<()>) -> Result<()> {
    let mut outcome = Ok(());
    for error in packs.into_iter().filter_map(|pack| work(pack).err()) {
        if outcome.is_ok() {
            outcome = Err(error);
        } else {
            tracing::warn!("{error}: what is damaged in the store stays so");
        }
    }
    outcome
}

impl Store {
    /// What is noted as damaged in a pack.
    pub(crate) fn noted(&self, pack: Digest) -> HashSet<Digest> {
        let Ok(lines) = fs::read(store::damage_path(self.folder(), pack)) else { return HashSet::new() };
        lines.split(|byte| *byte == b'\n').filter_map(Digest::parse).collect()
    }

    /// Looks at all bytes of a pack, and notes what is damaged; answers how many objects are.
    fn look_for_damage(&self, index: &Index) -> Result<usize> {
        let path = self.pack_path(index.pack);
        let file = File::open(&path).doing("open", &path)?;
        let damaged = Mutex::new(Vec::new());
        let look = |at: usize| -> std::result::Result<(), ()> {
            if !is_sound(&file, &index.objects[at]) {
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

    /// Notes which objects of a pack are damaged. A pack of a wrong length has a note without any.
    fn note(&self, index: &Index, damaged: &[usize]) -> Result<()> {
        let path = store::damage_path(self.folder(), index.pack);
        if damaged.is_empty() && self.is_whole(index) {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).doing("remove", &path),
                _ => Ok(()),
            };
        }
        let lines: String = damaged.iter().map(|at| format!("{}\n", index.objects[*at].digest)).collect();
        let mut new = New::begin(store::folder_of(&path))?;
        new.file.write_all(lines.as_bytes()).doing("write to", &*new.path)?;
        new.keep(&path)
    }

    /// Mends every pack that has a note, as far as other packs have what is damaged in it.
    pub(crate) fn mend_all(&self) -> Result<()> {
        let folder = store::packs_folder(self.folder());
        let mut noted = Vec::new();
        for entry in fs::read_dir(&folder).doing("list", &folder)? {
            let name = entry.doing("list", &folder)?.file_name();
            let pack = name.as_encoded_bytes().strip_suffix(DAMAGED_SUFFIX.as_bytes());
            noted.extend(pack.and_then(store::pack_name));
        }
        if noted.is_empty() {
            return Ok(());
        }
        let places = self.places()?;
        each_of(noted, |pack| self.mend_pack(pack, &places, None).map(drop))
    }

    /// Puts a copy in the place of a pack, with the right bytes of what is damaged in it as far as they can be had. `places` tells
    /// where other packs have them.
    fn mend_pack(&self, pack: Digest, places: &Places, from: Option<&dyn Fetch>) -> Result<Mended> {
        // Of two who mend a pack the later one would undo what the first one did.
        let Some(_lock) = lock_note(&store::damage_path(self.folder(), pack))? else { return Ok(Mended::default()) };
        // One that is not all here, or whose index is damaged, is fetched as a whole.
        let Some(index) = self.index(pack).ok().filter(|_| self.has(pack)) else { return Ok(Mended::default()) };
        let path = self.pack_path(pack);
        let old = File::open(&path).doing("open", &path)?;
        let noted = self.noted(pack);
        let is_bad = |at: &usize| {
            let object = &index.objects[*at];
            noted.contains(&object.digest) && !is_sound(&old, object)
        };
        let bad: Vec<usize> = (0..index.objects.len()).filter(is_bad).collect();
        let can_be_had = |at: &usize| from.is_some() || places.contains_key(&index.objects[*at].digest);
        if self.is_whole(&index) && !bad.iter().any(can_be_had) {
            if bad.is_empty() {
                self.note(&index, &bad)?;
            }
            return Ok(Mended { mended: 0, left: bad.len() });
        }
        let new = New::begin(store::folder_of(&path))?;
        let (mut mended, mut left) = (0, Vec::new());
        for (at, object) in index.objects.iter().enumerate() {
            let mut memory = Vec::new();
            let read = read_object(&old, object.block, object, &mut memory);
            if !matches!(read, Ok(true)) {
                let is_cut_off = |error: &io::Error| error.kind() == io::ErrorKind::UnexpectedEof;
                match self.replacement(pack, object, places, from)? {
                    Some(found) => {
                        mended += 1;
                        memory = found;
                    }
                    // Nobody is to find less there than before.
                    None => match read {
                        Err(error) if is_cut_off(&error) => {
                            left.push(at);
                            continue;
                        }
                        // It may be sound, and be read another time.
                        Err(error) => return Err(error).doing("read", &path),
                        Ok(_) => left.push(at),
                    },
                }
            }
            if !piece::is_zero(&memory) {
                new.file.write_all_at(&memory, object.block * BLOCK_BYTES as u64).doing("write to", &*new.path)?;
            }
        }
        new.file.set_len(index.blocks * BLOCK_BYTES as u64).doing("write to", &*new.path)?;
        // What is still damaged has another digest.
        new.keep_sealed(&path, index.verity.filter(|_| left.is_empty()))?;
        self.note(&index, &left)?;
        tracing::info!("mended {mended} objects of the pack {pack} in {}", self.folder().display());
        Ok(Mended { mended, left: left.len() })
    }

    /// The bytes of an object, from another pack or from elsewhere, proved.
    fn replacement(
        &self,
        pack: Digest,
        object: &Object,
        places: &Places,
        from: Option<&dyn Fetch>,
    ) -> Result<Option<Vec<u8>>> {
        if let Some((other, block)) = places.get(&object.digest) {
            let mut memory = Vec::new();
            let found = File::open(self.pack_path(*other));
            if matches!(found.and_then(|file| read_object(&file, *block, object, &mut memory)), Ok(true)) {
                return Ok(Some(memory));
            }
        }
        let Some(from) = from else { return Ok(None) };
        let begin = object.block * BLOCK_BYTES as u64;
        let mut came = Vec::new();
        let outcome = from.read(pack, begin..begin + object.bytes, &mut |bytes| {
            if came.len() as u64 + bytes.len() as u64 > object.bytes {
                return Err(io::Error::other("more than was asked for"));
            }
            came.extend_from_slice(bytes);
            Ok(())
        });
        let failed = |source| Error::Fetch { what: format!("the object {} of the pack {pack}", object.digest), source };
        outcome.map_err(failed)?;
        if came.len() as u64 != object.bytes || Algorithm::Blake3.of(&came) != object.digest {
            return Err(failed(io::Error::other("it came damaged")));
        }
        Ok(Some(came))
    }
}

/// Whether an object can be read, and is what its digest says.
fn is_sound(file: &File, object: &Object) -> bool {
    matches!(read_object(file, object.block, object, &mut Vec::new()), Ok(true))
}

/// Waits for whoever else mends a pack; `None` if nothing is left to mend. The lock ends with the file.
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
