//! Enables fs-verity for packs, so that the kernel verifies each block for every reader.
//!
//! The digest of such a pack is in its index, which the image's digest verifies through the pack's name. Builds and
//! pulls enable fs-verity where supported; [`seal`] does so for a store that was copied or fetched in parts.
//!
//! fs-verity cannot be disabled, nor the file modified. So a pack is hashed first, and repaired if it is damaged.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::format::data::PackRef;
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, IoContext, Result};
use crate::format::image::Image;
use crate::format::index::Index;
use crate::format::plain_file;
use crate::store::fetch::Fetch;
use crate::store::fsverity::{self, Verity, verity_of};
use crate::store::packs::Store;
use crate::store::parallel;

/// How many packs of an image the kernel verifies, and why it does not verify others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SealReport {
    /// fs-verity is enabled, with the digest in the index.
    pub on: usize,
    /// They have no digest in their index.
    pub unnamed: usize,
    /// The file system has no fs-verity.
    pub unavailable: usize,
    /// They are incomplete, open for writing, or owned by another user.
    pub left: usize,
}

/// Enables fs-verity for an image's complete packs with a digest, where supported. It reads each pack twice: here, and
/// in the kernel. A damaged pack is first repaired from other packs, or from `from`.
///
/// # Errors
///
/// A pack has another digest than in its index and cannot be repaired, or fs-verity cannot be enabled. The others are
/// processed first, and the error names all failures.
pub fn seal(image: &Image, directory: &Path, from: Option<&dyn Fetch>) -> Result<SealReport> {
    let mut sealed = SealReport::default();
    if image.packs().is_empty() {
        return Ok(sealed);
    }
    let store = Store::open(directory)?;
    let mut failures = Vec::new();
    for pack in image.packs() {
        match store.seal_pack(pack.name, from) {
            Ok(PackProof::Kernel) => sealed.on += 1,
            Ok(PackProof::Unnamed) => sealed.unnamed += 1,
            Ok(PackProof::Unavailable) => sealed.unavailable += 1,
            Ok(PackProof::Off) => sealed.left += 1,
            Err(error) => failures.push(error),
        }
    }
    Error::of_all(failures).map_or(Ok(sealed), Err)
}

/// Enables fs-verity for an image's own file, where supported and permitted; returns whether it is enabled.
///
/// # Errors
///
/// The system's.
pub fn seal_image(path: &Path) -> Result<bool> {
    let file = File::open(path).doing("open", path)?;
    match fsverity::enable_if_supported(&file) {
        Ok(found) => Ok(matches!(found, Verity::On(_))),
        Err(error) if is_left(&error) => {
            tracing::warn!("cannot turn fs-verity on for {}: {error}", path.display());
            Ok(false)
        }
        Err(error) => Err(error).doing("turn fs-verity on for", path),
    }
}

/// Whether the kernel verifies each block of a pack, by the digest in its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackProof {
    /// It does.
    Kernel,
    /// Supported, but not enabled for the pack.
    Off,
    /// The file system has no fs-verity.
    Unavailable,
    /// The index of the pack has no digest.
    Unnamed,
}

impl Store {
    /// Enables fs-verity for a pack, which is repaired if it is damaged.
    fn seal_pack(&self, pack: Digest, from: Option<&dyn Fetch>) -> Result<PackProof> {
        let Some(index) = self.index_of_whole(pack) else { return Ok(PackProof::Off) };
        let Some(wanted) = index.verity else { return Ok(PackProof::Unnamed) };
        let found = match self.enable_verified(&index, wanted)? {
            Ok(proof) => return Ok(proof),
            Err(found) => found,
        };
        let (damaged, directory) = (self.look_for_damage(&index)?, self.directory().display());
        tracing::warn!(
            "the pack {pack} in {directory} has the fs-verity digest {found}: {damaged} objects are damaged"
        );
        let left = self.repair_each(vec![pack], from)?.left;
        match self.enable_verified(&index, wanted)? {
            Ok(proof) => Ok(proof),
            Err(found) => {
                let why = match left {
                    0 => "the index is wrong".into(),
                    left => format!("{left} of its objects are damaged, and verify --repair --from fetches them"),
                };
                let reason = format!("it has the fs-verity digest {found}, but its index names {wanted}: {why}");
                Err(Error::Pack { store: self.directory().into(), pack, reason })
            }
        }
    }

    /// Enables fs-verity for a pack if it has the digest in its index, otherwise returns its digest.
    fn enable_verified(&self, index: &Index, wanted: Digest) -> Result<Result<PackProof, Digest>> {
        let path = self.pack_path(index.pack);
        let file = plain_file::open_to_read(&path).doing("open", &path)?;
        let mut verity = verity_of(&file);
        if verity == Verity::Off {
            let found = parallel::digest(&file, 0, index.blocks * BLOCK_BYTES as u64).doing("read", &path)?;
            if found != wanted {
                return Ok(Err(found));
            }
            verity = match fsverity::enable_if_supported(&file) {
                Err(error) if is_left(&error) => {
                    tracing::warn!("cannot turn fs-verity on for {}: {error}", path.display());
                    return Ok(Ok(PackProof::Off));
                }
                turned => turned.doing("turn fs-verity on for", &path)?,
            };
        }
        Ok(match verity {
            Verity::On(found) if found != wanted => Err(found),
            Verity::On(_) => Ok(PackProof::Kernel),
            Verity::Off | Verity::Unavailable => Ok(PackProof::Unavailable),
        })
    }

    /// Returns whether the kernel verifies an open pack.
    ///
    /// # Errors
    ///
    /// The pack has another digest than the image names, or its index is damaged.
    pub fn pack_proof(&self, pack: &PackRef, file: &File) -> Result<PackProof> {
        let Some(wanted) = self.index(pack.name)?.verity else { return Ok(PackProof::Unnamed) };
        match verity_of(file) {
            Verity::On(found) if found == wanted => Ok(PackProof::Kernel),
            Verity::On(found) => {
                let reason = format!(
                    "the kernel proves it by the fs-verity digest {found}, but its index names {wanted}: verify --repair replaces it"
                );
                Err(Error::Pack { store: self.directory().into(), pack: pack.name, reason })
            }
            Verity::Off => Ok(PackProof::Off),
            Verity::Unavailable => Ok(PackProof::Unavailable),
        }
    }
}

/// Returns whether fs-verity cannot be enabled now, or by this user, without other errors.
fn is_left(error: &io::Error) -> bool {
    use io::ErrorKind::{ExecutableFileBusy, PermissionDenied, ReadOnlyFilesystem};
    matches!(error.kind(), ExecutableFileBusy | PermissionDenied | ReadOnlyFilesystem)
}

impl Image {
    /// Returns the fs-verity digest of the image's own file.
    pub fn verity_digest(&self) -> Digest {
        if self.is_composefs() { self.digest() } else { crate::Algorithm::Verity.of(self.as_bytes()) }
    }
}
