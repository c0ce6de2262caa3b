//! Pulling: the metadata, then everything missing in the store, or nothing.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use ferry_image::{Algorithm, Digest, FetchOptions, Image, Objects, error_chain, repair_packs, seal, seal_image};

use crate::container::Container;
use crate::error::{Error, Result};
use crate::files::{parent_dir, with_path};
use crate::layers;
use crate::manifest::{Blob, Manifest, Sha256};
use crate::packs::Packs;
use crate::remote::{Document, Remote};

/// The maximum image in bytes: metadata of some ten million files. It is read into memory.
const IMAGE_BYTES_MAX: u64 = 1 << 30;

/// The default number of concurrent requests.
const JOBS: usize = 4;

/// How an image is pulled.
#[derive(Clone, Debug)]
pub struct PullOptions {
    /// Continue only if the image has this digest.
    pub digest: Option<Digest>,
    /// The number of concurrent requests.
    pub jobs: usize,
    /// Fetch only the metadata: file contents are fetched when they are read.
    pub metadata_only: bool,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self { digest: None, jobs: JOBS, metadata_only: false }
    }
}

/// The outcome of [`pull`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullOutcome {
    /// The verified digest of the image's tree.
    pub digest: Digest,
    /// The digest of the manifest. Written after the image's name, it identifies exactly this image.
    pub manifest: Sha256,
    /// Bytes of files that were not in the store.
    pub fetched_bytes: u64,
}

/// Pulls an image; a container's image is pulled as a whole, and built. It skips objects in the store, unless they are recorded as damaged, and continues interrupted pulls.
/// The image gets its name when everything is there. Packs for fs-verity are enabled where the file system supports it,
/// and repaired if damaged; then the image is enabled, too. The caller holds the store open, so that nothing is removed
/// meanwhile.
///
/// # Errors
///
/// The server is not reachable, or its response is invalid; the received part is kept. Damaged objects that cannot be
/// repaired do not prevent the others from being fetched.
pub fn pull(
    remote: &Arc<Remote>,
    output: &Path,
    store: &Path,
    options: &PullOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<PullOutcome> {
    let opened = match remote.find()? {
        (Document::Image(found), name) => open(remote, (*found, name), output, store, options.digest)?,
        (Document::Container(container), _) => match of_digest(remote, &container, options.digest)? {
            Some(found) => open(remote, found, output, store, options.digest)?,
            None => {
                let how = (options.digest, options.jobs);
                let pull = if options.metadata_only { layers::pull_tables } else { layers::pull_whole };
                let (digest, fetched_bytes) = pull(remote, &container, output, store, how, progress)?;
                return Ok(PullOutcome { digest, manifest: container.manifest, fetched_bytes });
            }
        },
    };
    let LocalImage { image, new, packs, manifest } = opened;
    let repaired = repair_packs(&image, store, Some(&*packs)).map_err(Error::from);
    let fetched = fetch(&image, store, &packs, options, progress);
    let fetched_bytes = match (repaired, fetched) {
        (Ok(_), fetched) => fetched?,
        // A full pull repairs it.
        (Err(error), Ok(bytes)) if options.metadata_only => {
            tracing::warn!("{}: damaged objects in the store are not repaired", error_chain(&error));
            bytes
        }
        (Err(error), Ok(_)) => return Err(error),
        (Err(one), Err(two)) => return Err(Error::Both(Box::new(one), Box::new(two))),
    };
    let is_sealed = !options.metadata_only && seal(&image, store, Some(&*packs))?.on > 0;
    if let Some(new) = new {
        publish(new, output)?;
    }
    if is_sealed {
        seal_image(output)?;
    }
    Ok(PullOutcome { digest: image.shown_digest(), manifest, fetched_bytes })
}

/// Fetches everything missing in the store; returns the number of bytes. Afterwards no process has it open for writing.
fn fetch(
    image: &Image,
    store: &Path,
    packs: &Arc<Packs>,
    options: &PullOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<u64> {
    let missing = FetchOptions { from: Arc::<Packs>::clone(packs), ahead_bytes: 0, cache_bytes: None };
    let objects = Objects::open_repaired(image, store, Some(missing))?;
    objects.verify_tree(image)?;
    if !options.metadata_only {
        let fetched = objects.fetch_all(options.jobs, &AtomicBool::new(false), progress).map_err(Error::from);
        let outcome = fetched.and_then(|()| Ok(objects.complete()?));
        // If nothing was received, nothing is kept.
        outcome.map_err(|error| match objects.fetched_bytes() {
            0 => error,
            _ => Error::Incomplete(Box::new(error)),
        })?;
    }
    Ok(objects.fetched_bytes())
}

/// Fetches the metadata of an image, and the indexes of its packs to verify the digest of a tree, unless an image is at
/// `output` already. Returns the source of its contents. An existing image stays, because a name on a server may refer
/// to another image by now. Then nothing is requested ([`Packs::fetch_manifest`]).
///
/// Of a container image, the tables of contents of its layers are fetched. If one is missing or wrong, or the server
/// sends whole blobs only, the whole image is pulled.
///
/// # Errors
///
/// The server is not reachable, or its response is invalid.
pub fn pull_metadata(remote: &Arc<Remote>, output: &Path, store: &Path, digest: Option<Digest>) -> Result<Arc<Packs>> {
    if output.exists() {
        return Ok(Arc::new(Packs::on_demand(Arc::clone(remote))));
    }
    match remote.find()? {
        (Document::Image(found), name) => open_metadata(remote, (*found, name), output, store, digest),
        (Document::Container(container), _) => match of_digest(remote, &container, digest)? {
            Some(found) => open_metadata(remote, found, output, store, digest),
            None => {
                layers::pull_tables(remote, &container, output, store, (digest, JOBS), &|_, _| {})?;
                Ok(Arc::new(Packs::of_container(Arc::clone(remote), container)))
            }
        },
    }
}

/// Fetches the metadata of an image, and with the digest of a tree the indexes that verify it.
pub(crate) fn open_metadata(
    remote: &Arc<Remote>,
    found: (Manifest, Sha256),
    output: &Path,
    store: &Path,
    digest: Option<Digest>,
) -> Result<Arc<Packs>> {
    let LocalImage { image, new, packs, .. } = open(remote, found, output, store, digest)?;
    if digest.is_some_and(|digest| digest.algorithm() == Algorithm::Tree) {
        let missing = FetchOptions { from: Arc::<Packs>::clone(&packs), ahead_bytes: 0, cache_bytes: None };
        Objects::open_repaired(&image, store, Some(missing))?.verify_tree(&image)?;
    }
    if let Some(new) = new {
        publish(new, output)?;
    }
    Ok(packs)
}

/// Returns the converted image with a digest that is stored beside a container image ([`crate::convert`]). Without a
/// digest nothing would prove that it is the same image: all users with write access to the repository can add one.
fn of_digest(remote: &Remote, container: &Container, digest: Option<Digest>) -> Result<Option<(Manifest, Sha256)>> {
    let Some(digest) = digest else { return Ok(None) };
    let found = remote.converted(container.manifest)?;
    let found = found.iter().find(|found| [found.tree, found.image].contains(&Some(digest)));
    found.map(|found| remote.converted_image(found)).transpose()
}

/// An image with local metadata.
struct LocalImage {
    image: Image,
    /// Its temporary file, if it was fetched.
    new: Option<tempfile::NamedTempFile>,
    packs: Arc<Packs>,
    manifest: Sha256,
}

fn open(
    remote: &Arc<Remote>,
    (manifest, name): (Manifest, Sha256),
    output: &Path,
    store: &Path,
    expected: Option<Digest>,
) -> Result<LocalImage> {
    let Manifest { digest, image: blob, packs, .. } = manifest;
    let invalid = |reason| Error::Manifest { name: remote.reference().to_string(), reason };
    let tree = expected.filter(|expected| expected.algorithm() == Algorithm::Tree);
    if let Some(expected) = expected.filter(|expected| tree.is_none() && *expected != digest) {
        return Err(invalid(format!("the image has the digest {digest}, not {expected}")));
    }
    if blob.bytes > IMAGE_BYTES_MAX {
        return Err(invalid(format!("an image of {} bytes; the maximum is {IMAGE_BYTES_MAX}", blob.bytes)));
    }
    let packs = Arc::new(Packs::new(Arc::clone(remote), packs));
    let (image, new) = match Image::open(output, Some(digest)) {
        Ok(image) => (image, None),
        Err(_) => {
            let new = thread::scope(|scope| {
                let _indexes = tree.map(|_| scope.spawn(|| packs.fetch_indexes(store)));
                fetch_image(remote, blob, output)
            })?;
            (Image::open(new.path(), Some(digest))?, Some(new))
        }
    };
    // The indexes of its packs verify the image.
    if let Some(expected) = tree.filter(|expected| image.tree() != Some(*expected)) {
        return Err(invalid(format!("the image has the digest {}, not {expected}", image.shown_digest())));
    }
    Ok(LocalImage { image, new, packs, manifest: name })
}

/// Fetches the image to a file beside its destination, verified by its blob digest.
fn fetch_image(remote: &Remote, blob: Blob, output: &Path) -> Result<tempfile::NamedTempFile> {
    let directory = parent_dir(output);
    let new =
        with_path("create a file in", directory, tempfile::Builder::new().prefix(".new-").tempfile_in(directory))?;
    match remote.read_verified(blob, &mut |at, piece| new.as_file().write_all_at(piece, at)) {
        Err(Error::Sink(error)) => with_path("write to", new.path(), Err(error)),
        outcome => outcome.map(|()| new),
    }
}

/// Makes a new image durable, then gives it its name.
fn publish(new: tempfile::NamedTempFile, output: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    with_path("change", new.path(), new.as_file().set_permissions(std::fs::Permissions::from_mode(0o444)))?;
    with_path("sync", new.path(), new.as_file().sync_all())?;
    with_path("create", output, new.persist(output).map_err(|error| error.error))?;
    let directory = parent_dir(output);
    with_path("sync", directory, std::fs::File::open(directory).and_then(|directory| directory.sync_all()))
}
