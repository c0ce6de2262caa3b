//! fs-verity for packs: with it the kernel itself proves each block that is read of a pack, to whoever reads it.
//!
//! A pack that is made for it has its digest in its index, which the pack's name proves, which the image's digest proves. Builds and pulls turn
//! it on where the file system has it; so does [`seal`] for a store that was copied, or whose packs came piece by piece.
//!
//! fs-verity cannot be turned off again, and what has it cannot be written to. So a pack is hashed before, and what is damaged in it is
//! repaired first.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::format::data::PackRef;
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, IoContext, Result};
use crate::format::image::Image;
use crate::format::index::Index;
use crate::store::fetch::Fetch;
use crate::store::fsverity::{self, Verity, verity_of};
use crate::store::packs::Store;
use crate::store::parallel;

/// How many packs of an image the kernel proves, and why it does not prove the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sealed {
    /// fs-verity is on, with the digest that the image names.
    pub on: usize,
    /// They were not made for it: nothing names their digest.
    pub unnamed: usize,
    /// The file system has no fs-verity.
    pub unavailable: usize,
    /// They are not all here, are open for writing, or belong to somebody else.
    pub left: usize,
}

/// Turns fs-verity on for those packs of an image that are made for it and are all here, where the file system has it. All of a pack is read
/// for that, twice: by us, and by the kernel. One that is damaged is repaired before, by what other packs have, or `from` hands over.
///
/// # Errors
/// A pack has another digest than its index names and cannot be repaired, or fs-verity cannot be turned on for it. It is on for the others,
/// and all are named for which it is not.
pub fn seal(image: &Image, folder: &Path, from: Option<&dyn Fetch>) -> Result<Sealed> {
    let mut sealed = Sealed::default();
    if image.packs().is_empty() {
        return Ok(sealed);
    }
    let store = Store::open(folder)?;
    let mut failures = Vec::new();
    for pack in image.packs() {
        match store.seal_pack(pack.name, from) {
            Ok(Outcome::On) => sealed.on += 1,
            Ok(Outcome::Unnamed) => sealed.unnamed += 1,
            Ok(Outcome::Unavailable) => sealed.unavailable += 1,
            Ok(Outcome::Left) => sealed.left += 1,
            Err(error) => failures.push(error),
        }
    }
    Error::of_all(failures).map_or(Ok(sealed), Err)
}

/// What became of a pack: see [`Sealed`].
enum Outcome {
    On,
    Unnamed,
    Unavailable,
    Left,
}

/// What became of turning it on.
enum Tried {
    /// Nothing is wrong.
    Done(Outcome),
    /// The pack has this digest, and not the one that its index names.
    Other(Digest),
}

/// Turns fs-verity on for an image's own file, where the file system has it and the file is ours; returns whether it is on.
///
/// # Errors
/// The system fails.
pub fn seal_image(path: &Path) -> Result<bool> {
    let file = File::open(path).doing("open", path)?;
    match fsverity::turn_on(&file) {
        Ok(found) => Ok(matches!(found, Verity::On(_))),
        Err(error) if is_left(&error) => {
            tracing::warn!("cannot turn fs-verity on for {}: {error}", path.display());
            Ok(false)
        }
        Err(error) => Err(error).doing("turn fs-verity on for", path),
    }
}

/// Whether the kernel proves each block that is read of a pack, by the digest that the image names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackProof {
    /// It does.
    Kernel,
    /// fs-verity is not on for the pack, though the file system has it.
    Off,
    /// The file system has no fs-verity.
    Unavailable,
    /// The pack was not made for it: its index names no digest.
    Unnamed,
}

impl Store {
    /// Turns fs-verity on for a pack, which is repaired if it is damaged.
    fn seal_pack(&self, pack: Digest, from: Option<&dyn Fetch>) -> Result<Outcome> {
        let Some(index) = self.index_of_whole(pack) else { return Ok(Outcome::Left) };
        let Some(wanted) = index.verity else { return Ok(Outcome::Unnamed) };
        let found = match self.turn_on_proved(&index, wanted)? {
            Tried::Done(outcome) => return Ok(outcome),
            Tried::Other(found) => found,
        };
        let (damaged, folder) = (self.look_for_damage(&index)?, self.folder().display());
        tracing::warn!("the pack {pack} in {folder} has the fs-verity digest {found}: {damaged} objects are damaged");
        let left = self.repair_each(vec![pack], from)?.left;
        match self.turn_on_proved(&index, wanted)? {
            Tried::Done(outcome) => Ok(outcome),
            Tried::Other(found) => {
                let why = match left {
                    0 => "the index is wrong".into(),
                    left => format!("{left} of its objects are damaged, and verify --repair --from fetches them"),
                };
                let reason = format!("it has the fs-verity digest {found}, but its index names {wanted}: {why}");
                Err(Error::Pack { store: self.folder().into(), pack, reason })
            }
        }
    }

    /// Turns fs-verity on for a pack that has the digest which its index names, and for no other.
    fn turn_on_proved(&self, index: &Index, wanted: Digest) -> Result<Tried> {
        let path = self.pack_path(index.pack);
        let file = File::open(&path).doing("open", &path)?;
        let mut verity = verity_of(&file);
        if verity == Verity::Off {
            let found = parallel::digest(&file, 0, index.blocks * BLOCK_BYTES as u64).doing("read", &path)?;
            if found != wanted {
                return Ok(Tried::Other(found));
            }
            verity = match fsverity::turn_on(&file) {
                Err(error) if is_left(&error) => {
                    tracing::warn!("cannot turn fs-verity on for {}: {error}", path.display());
                    return Ok(Tried::Done(Outcome::Left));
                }
                turned => turned.doing("turn fs-verity on for", &path)?,
            };
        }
        Ok(match verity {
            Verity::On(found) if found != wanted => Tried::Other(found),
            Verity::On(_) => Tried::Done(Outcome::On),
            Verity::Off | Verity::Unavailable => Tried::Done(Outcome::Unavailable),
        })
    }

    /// Looks whether the kernel proves what is read of a pack that is open.
    ///
    /// # Errors
    /// The pack has another digest than the image names, or its index is damaged.
    pub fn pack_proof(&self, pack: &PackRef, file: &File) -> Result<PackProof> {
        let Some(wanted) = self.index(pack.name)?.verity else { return Ok(PackProof::Unnamed) };
        match verity_of(file) {
            Verity::On(found) if found == wanted => Ok(PackProof::Kernel),
            Verity::On(found) => {
                let reason = format!(
                    "the kernel proves it by the fs-verity digest {found}, but its index names {wanted}: verify --repair replaces it"
                );
                Err(Error::Pack { store: self.folder().into(), pack: pack.name, reason })
            }
            Verity::Off => Ok(PackProof::Off),
            Verity::Unavailable => Ok(PackProof::Unavailable),
        }
    }
}

/// Whether fs-verity cannot be turned on now, or by us, and nothing else is wrong.
fn is_left(error: &io::Error) -> bool {
    use io::ErrorKind::{ExecutableFileBusy, PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), ExecutableFileBusy | PermissionDenied | ReadOnlyFilesystem)
}

impl Image {
    /// The digest that fs-verity has for the image's own file.
    pub fn verity_digest(&self) -> Digest {
        if self.is_composefs() { self.digest() } else { crate::Algorithm::Verity.of(self.as_bytes()) }
    }
}
