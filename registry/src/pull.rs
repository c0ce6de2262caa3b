//! Pulling: the metadata, then what is missing in the store, all or none of it.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ferry_image::{Algorithm, Digest, Image, Missing, Objects, repair_packs, seal, seal_image, told};
use sha2::Digest as _;

use crate::error::{Error, Result};
use crate::manifest::{Blob, Manifest, Sha256};
use crate::packs::Packs;
use crate::remote::Remote;

/// The largest image that is pulled, in bytes: metadata of some ten million files. It is read into memory.
const IMAGE_BYTES_MAX: u64 = 1 << 30;

/// How an image is pulled.
#[derive(Clone, Debug)]
pub struct PullOptions {
    /// Go on only if the image has this digest.
    pub digest: Option<Digest>,
    /// How many requests at a time.
    pub jobs: usize,
    /// Get the metadata alone: what files hold is fetched when it is read.
    pub metadata_only: bool,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self { digest: None, jobs: 4, metadata_only: false }
    }
}

/// What was pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// The digest of the image's tree, proved.
    pub digest: Digest,
    /// What names the manifest: who writes it behind the image's name gets this one and no other.
    pub manifest: Sha256,
    /// Bytes of files that were not here before.
    pub fetched_bytes: u64,
}

/// Pulls an image. What is in the store is not fetched, unless it is noted there as damaged, and what a pull that failed or was killed has
/// left is used. The image gets its name when all is there. Packs that are made for fs-verity are hashed where the file system has it, and
/// repaired if they are damaged; then they have it on, and so has the image. Whoever calls holds the store open, so that nothing of it is
/// removed meanwhile.
///
/// # Errors
/// The server cannot be reached, or what comes is not what it should be; what was had so far is kept. What is damaged and cannot be
/// repaired keeps nothing else from coming.
pub fn pull(
    remote: &Arc<Remote>,
    output: &Path,
    store: &Path,
    options: &PullOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Pulled> {
    let Opened { image, new, packs, manifest } = open(remote, output, options.digest)?;
    let repaired = repair_packs(&image, store, Some(&*packs)).map_err(Error::from);
    let fetched = fetch(&image, store, &packs, options, progress);
    let fetched_bytes = match (repaired, fetched) {
        (Ok(_), fetched) => fetched?,
        // It is repaired by a pull that gets what the files hold.
        (Err(error), Ok(bytes)) if options.metadata_only => {
            tracing::warn!("{}: what is damaged in the store stays so", told(&error));
            bytes
        }
        (Err(error), Ok(_)) => return Err(error),
        (Err(one), Err(two)) => return Err(Error::Both(Box::new(one), Box::new(two))),
    };
    let is_sealed = !options.metadata_only && seal(&image, store, Some(&*packs))?.on > 0;
    if let Some(new) = new {
        keep(new, output)?;
    }
    if is_sealed {
        seal_image(output)?;
    }
    Ok(Pulled { digest: image.shown_digest(), manifest, fetched_bytes })
}

/// Gets what is missing in the store; returns how many bytes of files came. Afterwards nobody has it open for writing.
fn fetch(
    image: &Image,
    store: &Path,
    packs: &Arc<Packs>,
    options: &PullOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<u64> {
    let missing = Missing { from: Arc::<Packs>::clone(packs), ahead_bytes: 0, cache_bytes: None };
    let objects = Objects::open_repaired(image, store, Some(missing))?;
    objects.prove_tree(image)?;
    if !options.metadata_only {
        let fetched = objects.fetch_all(options.jobs, &AtomicBool::new(false), progress).map_err(Error::from);
        let outcome = fetched.and_then(|()| Ok(objects.complete()?));
        // Where nothing came, nothing is kept.
        outcome.map_err(|error| match objects.fetched_bytes() {
            0 => error,
            _ => Error::Incomplete(Box::new(error)),
        })?;
    }
    Ok(objects.fetched_bytes())
}

/// Gets the metadata of an image, and to prove the digest of a tree the indexes of its packs, unless an image is at `output` already, and answers what fetches the rest of it. What is there
/// stays: a name on a server may mean another image by now; nothing is asked then, for nothing may be missing ([`Packs::ask`]).
///
/// # Errors
/// The server cannot be reached, or what comes is not what it should be.
pub fn pull_metadata(remote: &Arc<Remote>, output: &Path, store: &Path, digest: Option<Digest>) -> Result<Arc<Packs>> {
    if output.exists() {
        return Ok(Arc::new(Packs::later(Arc::clone(remote))));
    }
    let Opened { image, new, packs, .. } = open(remote, output, digest)?;
    if digest.is_some_and(|digest| digest.algorithm() == Algorithm::Tree) {
        let missing = Missing { from: Arc::<Packs>::clone(&packs), ahead_bytes: 0, cache_bytes: None };
        Objects::open_repaired(&image, store, Some(missing))?.prove_tree(&image)?;
    }
    if let Some(new) = new {
        keep(new, output)?;
    }
    Ok(packs)
}

/// An image whose metadata is here.
struct Opened {
    image: Image,
    /// If it was fetched, the file that it is in.
    new: Option<tempfile::NamedTempFile>,
    packs: Arc<Packs>,
    manifest: Sha256,
}

fn open(remote: &Arc<Remote>, output: &Path, wanted: Option<Digest>) -> Result<Opened> {
    let (manifest, name) = remote.manifest()?;
    let Manifest { digest, image: blob, packs } = manifest;
    let wrong = |reason| Error::Manifest { name: remote.reference().to_string(), reason };
    let tree = wanted.filter(|wanted| wanted.algorithm() == Algorithm::Tree);
    if let Some(wanted) = wanted.filter(|wanted| tree.is_none() && *wanted != digest) {
        return Err(wrong(format!("the image has the digest {digest}, not {wanted}")));
    }
    if blob.bytes > IMAGE_BYTES_MAX {
        return Err(wrong(format!("an image of {} bytes, which may have {IMAGE_BYTES_MAX}", blob.bytes)));
    }
    let (image, new) = match Image::open(output, Some(digest)) {
        Ok(image) => (image, None),
        Err(_) => {
            let new = fetch_image(remote, blob, output)?;
            (Image::open(new.path(), Some(digest))?, Some(new))
        }
    };
    // What the image says is proved when the indexes of its packs are here.
    if let Some(wanted) = tree.filter(|wanted| image.tree() != Some(*wanted)) {
        return Err(wrong(format!("the image has the digest {}, not {wanted}", image.shown_digest())));
    }
    let packs = Arc::new(Packs::new(Arc::clone(remote), packs));
    Ok(Opened { image, new, packs, manifest: name })
}

fn doing<T>(what: &'static str, path: &Path, outcome: std::io::Result<T>) -> Result<T> {
    outcome.map_err(|source| Error::Io { what, path: path.into(), source })
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The image beside the place that it will have, proved by its name on the server.
fn fetch_image(remote: &Remote, blob: Blob, output: &Path) -> Result<tempfile::NamedTempFile> {
    let folder = folder_of(output);
    let mut new = doing("make a file in", folder, tempfile::Builder::new().prefix(".new-").tempfile_in(folder))?;
    let mut hasher = sha2::Sha256::new();
    let outcome = remote.read(blob, &(0..blob.bytes), &mut |piece| {
        hasher.update(piece);
        new.write_all(piece)
    });
    match outcome {
        Err(Error::Sink(error)) => return doing("write to", new.path(), Err(error)),
        outcome => outcome?,
    }
    if Sha256(hasher.finalize().into()) != blob.sha256 {
        let reason = format!("the blob sha256:{} came damaged", blob.sha256);
        return Err(Error::Manifest { name: remote.reference().to_string(), reason });
    }
    Ok(new)
}

/// Durable first, then its name.
fn keep(new: tempfile::NamedTempFile, output: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    doing("change", new.path(), new.as_file().set_permissions(std::fs::Permissions::from_mode(0o444)))?;
    doing("sync", new.path(), new.as_file().sync_all())?;
    doing("make", output, new.persist(output).map_err(|error| error.error))?;
    let folder = folder_of(output);
    doing("sync", folder, std::fs::File::open(folder).and_then(|folder| folder.sync_all()))
}
