//! What the kernel proves of an image of the layout flat that it mounts, and what is believed.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ferry_image::{Image, PackProof, Store, Verity, verity_of};

/// Whether a mount is refused where the kernel cannot prove all that it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum VerityPolicy {
    /// Where the packs could be proved and are not.
    Auto,
    /// Always.
    Require,
}

/// What is to be mounted: files that stay the same, whatever gets their names.
#[derive(Debug, Default)]
pub struct Packs {
    /// Where the kernel finds them.
    pub paths: Vec<PathBuf>,
    /// Those that were looked at, which `paths` are of.
    pub files: Vec<File>,
}

/// How a pack is proved, in a word.
pub fn word(proof: PackProof) -> &'static str {
    match proof {
        PackProof::Kernel => "on",
        PackProof::Off => "off",
        PackProof::Unavailable => "unavailable",
        PackProof::Unnamed => "none",
    }
}

/// How each pack of an image is proved.
pub fn look(image: &Image, folder: &Path) -> Result<Vec<PackProof>> {
    if image.packs().is_empty() {
        return Ok(Vec::new());
    }
    let store = Store::open(folder)?;
    let look = |pack: &ferry_image::PackRef| -> Result<PackProof> {
        let path = store.pack_path(pack.name);
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(store.pack_proof(pack, &file)?)
    };
    image.packs().iter().map(look).collect()
}

/// Looks at the packs of an image whose digest was given, and at its own file, before the kernel reads them; says what it does not prove.
/// `elsewhere` tells of packs that are not all here.
pub fn check(
    (image, file, path): (&Image, &File, &Path),
    folder: &Path,
    elsewhere: &dyn Fn(usize) -> Option<PathBuf>,
    wanted: VerityPolicy,
) -> Result<Packs> {
    let mut packs = Packs::default();
    let mut believed = None;
    let unproved = |why: String| match wanted {
        VerityPolicy::Require => {
            bail!("{why}, so the kernel cannot prove the bytes of files, which --verity require asks for")
        }
        VerityPolicy::Auto => Ok(Some(why)),
    };
    let store = if image.packs().is_empty() { None } else { Some(Store::open(folder)?) };
    for (number, pack) in image.packs().iter().enumerate() {
        if let Some(path) = elsewhere(number) {
            believed = unproved(format!("the pack {} is not all in {}", pack.name, folder.display()))?;
            packs.paths.push(path);
            continue;
        }
        let Some(store) = &store else { continue };
        let name = store.pack_path(pack.name);
        let opened = File::open(&name).with_context(|| format!("cannot open {}", name.display()))?;
        match store.pack_proof(pack, &opened)? {
            PackProof::Kernel => {}
            PackProof::Off => bail!(
                "the pack {} in {} has no fs-verity, though its file system has: ferry image verify {} --store {} --repair turns it on",
                pack.name,
                folder.display(),
                path.display(),
                folder.display()
            ),
            PackProof::Unavailable => {
                believed = unproved(format!("the file system of {} has no fs-verity", folder.display()))?;
            }
            PackProof::Unnamed => {
                believed = unproved(format!("the pack {} was built without --verity", pack.name))?;
            }
        }
        packs.paths.push(super::mount::by_descriptor(&opened));
        packs.files.push(opened);
    }
    match verity_of(file) {
        Verity::On(found) if found == image.verity_digest() => {}
        Verity::On(_) => bail!("{} changed while it was read: try again", path.display()),
        // What can be said of both is said of the files.
        Verity::Off | Verity::Unavailable if believed.is_some() => {}
        Verity::Off | Verity::Unavailable => {
            let why = format!("{} has no fs-verity", path.display());
            if wanted == VerityPolicy::Require {
                bail!("{why}, so the kernel cannot prove what it reads of it, which --verity require asks for");
            }
            eprintln!("ferry: {why}: the kernel proves the bytes of files, and the rest was proved just now");
        }
    }
    if let Some(why) = believed {
        eprintln!(
            "ferry: {why}: the image was proved just now, and the bytes of files are believed as the store has them \
             (ferry mount image:{} proves each)",
            path.display()
        );
    }
    Ok(packs)
}
