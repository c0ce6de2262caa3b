//! Verification by the kernel (fs-verity) for mounts of the flat layout.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ferry_image::{Image, PackProof, Store, Verity, verity_of};

use crate::paths::descriptor_path;

/// Whether a mount is refused if the kernel cannot verify all reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum VerityPolicy {
    /// Refused if the packs could have fs-verity and do not.
    Auto,
    /// Always refused.
    Require,
}

/// The packs to mount: open files, whatever their names lead to later.
#[derive(Debug, Default)]
pub struct Packs {
    /// The paths by which the kernel opens them.
    pub paths: Vec<PathBuf>,
    /// The open files that `paths` lead to.
    pub files: Vec<File>,
}

/// Returns the word for the verification of a pack.
pub fn word(proof: PackProof) -> &'static str {
    match proof {
        PackProof::Kernel => "on",
        PackProof::Off => "off",
        PackProof::Unavailable => "unavailable",
        PackProof::Unnamed => "none",
    }
}

/// Returns the verification of each pack of an image.
pub fn look(image: &Image, directory: &Path) -> Result<Vec<PackProof>> {
    if image.packs().is_empty() {
        return Ok(Vec::new());
    }
    let store = Store::open(directory)?;
    let look = |pack: &ferry_image::PackRef| -> Result<PackProof> {
        let path = store.pack_path(pack.name);
        // The files of layers may be on the server only.
        if store.layer_of(pack.name).is_some() {
            return Ok(PackProof::Unnamed);
        }
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(store.pack_proof(pack, &file)?)
    };
    image.packs().iter().map(look).collect()
}

/// Checks the packs and the file of an image whose digest was given, before the kernel reads them; reports what it does not
/// verify. `elsewhere` returns the paths of incomplete packs.
pub fn check(
    (image, file, path): (&Image, &File, &Path),
    directory: &Path,
    elsewhere: &dyn Fn(usize) -> Option<PathBuf>,
    wanted: VerityPolicy,
) -> Result<Packs> {
    let mut packs = Packs::default();
    let mut believed = None;
    let unproved = |why: String| match wanted {
        VerityPolicy::Require => {
            bail!("{why}, so the kernel cannot verify the data of files, which --verity require demands")
        }
        VerityPolicy::Auto => Ok(Some(why)),
    };
    let store = if image.packs().is_empty() { None } else { Some(Store::open(directory)?) };
    for (number, pack) in image.packs().iter().enumerate() {
        if let Some(path) = elsewhere(number) {
            believed = unproved(format!("the pack {} is incomplete in {}", pack.name, directory.display()))?;
            packs.paths.push(path);
            continue;
        }
        let Some(store) = &store else { continue };
        let name = store.pack_path(pack.name);
        let opened = File::open(&name).with_context(|| format!("cannot open {}", name.display()))?;
        match store.pack_proof(pack, &opened)? {
            PackProof::Kernel => {}
            PackProof::Off => bail!(
                "the pack {} in {} has no fs-verity, though its file system supports it: ferry image verify {} --store {} --repair enables it",
                pack.name,
                directory.display(),
                path.display(),
                directory.display()
            ),
            PackProof::Unavailable => {
                believed = unproved(format!("the file system of {} has no fs-verity", directory.display()))?;
            }
            PackProof::Unnamed => {
                believed = unproved(format!("the pack {} was built without --verity", pack.name))?;
            }
        }
        packs.paths.push(descriptor_path(&opened));
        packs.files.push(opened);
    }
    match verity_of(file) {
        Verity::On(found) if found == image.verity_digest() => {}
        Verity::On(_) => bail!("{} changed while it was read: try again", path.display()),
        // The message about the files covers both.
        Verity::Off | Verity::Unavailable if believed.is_some() => {}
        Verity::Off | Verity::Unavailable => {
            let why = format!("{} has no fs-verity", path.display());
            if wanted == VerityPolicy::Require {
                bail!("{why}, so the kernel cannot verify reads of it, which --verity require demands");
            }
            eprintln!("ferry: {why}: the kernel verifies the data of files; the metadata was verified just now");
        }
    }
    if let Some(why) = believed {
        eprintln!(
            "ferry: {why}: the image was verified just now, but the data of files in the store is not verified \
             (ferry mount image:{} verifies each read)",
            path.display()
        );
    }
    Ok(packs)
}
