//! Images of the layers of a container, read chunk by chunk where their tables of contents are proved, or as a whole.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use ferry_image::{
    BuildLayersError, BuildOptions, BuildReport, Digest, Image, Layer, LayerError, Store, Trace, build, build_layers,
    unneeded_packs,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::container::{CONFIG_BYTES_MAX, Container, ContainerLayer};
use crate::error::{Error, Result};
use crate::files::{LIST_BYTES_MAX, parent_dir, with_path};
use crate::http::{Slot, Slots};
use crate::manifest::{Blob, Sha256};
use crate::remote::Remote;
use crate::traces::write_beside;

/// The maximum size of a range of a layer that is kept in memory: a table of contents, compressed.
const TABLE_BYTES_MAX: u64 = 160 << 20;

/// The maximum memory that the parsed tables of contents of an image take, in bytes.
pub(crate) const TABLES_MEMORY_MAX: u64 = 512 << 20;
/// The number of tables that are fetched at once: each may take much memory.
const TABLE_REQUESTS: usize = 4;

/// How often an image is built again at most, to do without packs of which it needs little.
const COMPACT_BUILDS_MAX: usize = 3;
/// If an image that others fetch does not need more of a pack, it gets packs of its own.
const UNNEEDED_PERCENT: u64 = 50;
/// The same for an image whose files have an order: who orders them minds what is fetched.
const ORDERED_UNNEEDED_PERCENT: u64 = 10;

/// The number of images or layers of which tables of contents are in memory at once.
const TABLES_AT_ONCE: usize = 4;
static TABLES: Slots = Slots::new();

/// Waits until there is memory for the tables of contents of one more image.
pub(crate) fn table_slot() -> Slot<'static> {
    TABLES.enter(TABLES_AT_ONCE)
}

/// Why layers are not read chunk by chunk.
pub(crate) enum Refusal {
    /// They can be read as a whole.
    Whole(String),
    Failed(Error),
}

/// Fetches the tables of contents of all layers.
fn tables(remote: &Remote, container: &Container) -> std::result::Result<Vec<Layer>, Refusal> {
    let refused =
        |at: usize, reason: &str| Refusal::Whole(format!("layer {} of {}: {reason}", at + 1, container.layers.len()));
    // Before the first request, because one layer without a table is enough.
    let mut found = Vec::new();
    for (at, layer) in container.layers.iter().enumerate() {
        found.push(layer.table().map_err(|error| refused(at, &error.to_string()))?);
    }
    let fetch = |at: usize| {
        let blob = container.layers[at].blob;
        found[at].fetch(&|range| read_table(remote, blob, &range)).map_err(|error| match error {
            LayerError::Refused(reason) => refused(at, &reason),
            LayerError::Read(error) => match error.downcast::<Error>() {
                Ok(error @ Error::NoRanges { .. }) => refused(at, &error.to_string()),
                Ok(error) => Refusal::Failed(error),
                Err(error) => Refusal::Failed(Error::Sink(error)),
            },
        })
    };
    // Each is a round trip or two.
    let (next, bytes, tables) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= found.len() {
                return;
            }
            let table = fetch(at).and_then(|table: Layer| {
                let own = table.memory_bytes();
                let all = bytes.fetch_add(own, Ordering::Relaxed) + own;
                let too_large = || {
                    refused(at, &format!("the tables of contents take more than {TABLES_MEMORY_MAX} bytes of memory"))
                };
                if all > TABLES_MEMORY_MAX { Err(too_large()) } else { Ok(table) }
            });
            if table.is_err() {
                next.store(found.len(), Ordering::Relaxed);
            }
            tables.lock().unwrap_or_else(PoisonError::into_inner).push((at, table));
        }
    };
    thread::scope(|scope| (0..TABLE_REQUESTS.min(found.len())).for_each(|_| _ = scope.spawn(work)));
    let mut tables = tables.into_inner().unwrap_or_else(PoisonError::into_inner);
    tables.sort_by_key(|(at, _)| *at);
    tables.into_iter().map(|(_, table)| table).collect()
}

/// Returns a range of a layer.
pub(crate) fn read_table(remote: &Remote, blob: Blob, range: &Range<u64>) -> io::Result<Vec<u8>> {
    if range.end.saturating_sub(range.start) > TABLE_BYTES_MAX {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let mut bytes = Vec::new();
    let outcome = remote.read_part(blob, range, &mut |piece| {
        bytes.extend_from_slice(piece);
        Ok(())
    });
    outcome.map(|()| bytes).map_err(io::Error::other)
}

/// Makes an image of a container's tables of contents. Where they are not all there and right, pulls the whole image
/// and says why. Returns the digest, and the bytes of files that were new in the store.
///
/// # Errors
///
/// The registry is not reachable or its data are wrong, or the image is not the expected one.
pub(crate) fn pull_tables(
    remote: &Remote,
    container: &Container,
    output: &Path,
    store: &Path,
    (expected, jobs): (Option<Digest>, usize),
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(Digest, u64)> {
    let reason = match build_tables(remote, container, output, store, expected) {
        Ok(digest) => return Ok((digest, 0)),
        Err(Refusal::Whole(reason)) => reason,
        Err(Refusal::Failed(error)) => return Err(error),
    };
    tracing::warn!("{}: {reason}; the whole image is pulled", remote.reference());
    pull_whole(remote, container, output, store, (expected, jobs), progress)
}

/// The same, but the image is not pulled.
pub(crate) fn build_tables(
    remote: &Remote,
    container: &Container,
    output: &Path,
    store: &Path,
    expected: Option<Digest>,
) -> std::result::Result<Digest, Refusal> {
    let _slot = table_slot();
    let layers = tables(remote, container)?;
    let failed = |error: ferry_image::Error| Refusal::Failed(error.into());
    let directory = directory_beside(output).map_err(Refusal::Failed)?;
    let new = directory.path().join("image");
    let store = Store::create(store).map_err(failed)?;
    let digest = build_layers(&layers, &container.manifest.0, &new, &store).map_err(|error| match error {
        BuildLayersError::Refused(reason) => Refusal::Whole(reason),
        BuildLayersError::Image(error) => failed(error),
    })?;
    publish(remote, &new, output, (digest, expected)).map_err(Refusal::Failed)?;
    if let Err(error) = list_first(&layers, output) {
        tracing::warn!("{error}: nothing is fetched first");
    }
    Ok(digest)
}

/// Lists beside an image the files that its layers' converters want to be fetched first. A list that is there stays.
fn list_first(layers: &[Layer], image: &Path) -> Result<()> {
    let (mut trace, mut bytes) = (Trace::default(), 0);
    for path in layers.iter().flat_map(Layer::first) {
        // Each byte may be escaped.
        bytes += 2 * path.len() as u64 + 1;
        if bytes > LIST_BYTES_MAX {
            break;
        }
        trace.add(&path);
    }
    if trace.is_empty() {
        return Ok(());
    }
    let mut text = Vec::new();
    with_path("list files of", image, trace.write(&mut text))?;
    write_beside(image, &text, false)
}

/// Creates a directory for an image that gets its name when it is the right one.
fn directory_beside(output: &Path) -> Result<TempDir> {
    let parent = parent_dir(output);
    with_path("create a directory in", parent, tempfile::Builder::new().prefix(".new-").tempdir_in(parent))
}

/// Gives a new image its name if it is the expected one.
fn publish(remote: &Remote, new: &Path, output: &Path, (found, expected): (Digest, Option<Digest>)) -> Result<()> {
    if let Some(expected) = expected.filter(|expected| *expected != found) {
        let reason = format!("the image has the digest {found}, not {expected}");
        return Err(Error::Container { name: remote.reference().to_string(), reason });
    }
    with_path("create", output, fs::rename(new, output))?;
    let directory = parent_dir(output);
    with_path("sync", directory, File::open(directory).and_then(|directory| directory.sync_all()))
}

/// Fetches the index of a layer's pack again, for a store that has lost it. Not all layers need a table of contents.
pub(crate) fn index_of(remote: &Remote, container: &Container, pack: Digest) -> Option<Vec<u8>> {
    let _slot = table_slot();
    let tables = container.layers.iter().filter_map(|layer| Some((layer.blob, layer.table().ok()?)));
    let mut fetched = tables.filter_map(|(blob, table)| table.fetch(&|range| read_table(remote, blob, &range)).ok());
    fetched.find(|layer| layer.index().pack == pack).map(|layer| layer.index().to_bytes())
}

/// Fetches all layers of a container, and builds an image of them. Returns its digest, and the bytes of files that were
/// new in the store.
///
/// # Errors
///
/// The registry is not reachable or its data are wrong, or the image is not the expected one.
pub(crate) fn pull_whole(
    remote: &Remote,
    container: &Container,
    output: &Path,
    store: &Path,
    (expected, jobs): (Option<Digest>, usize),
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(Digest, u64)> {
    let build =
        |source: &Path, new: &Path| build(source, new, Store::create(store)?, &BuildOptions::default(), &|_, _| {});
    pull_and_build(remote, container, output, store, (expected, jobs), progress, build)
}

/// As [`pull_whole`], for an image that others fetch from a registry: it uses packs of other images only where it needs most of them.
pub(crate) fn pull_compact(
    remote: &Remote,
    container: &Container,
    output: &Path,
    store: &Path,
    (order, jobs): (Option<&Trace>, usize),
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(Digest, u64)> {
    let build = |source: &Path, new: &Path| {
        let mut options = BuildOptions { order: order.cloned(), ..BuildOptions::default() };
        let build = |options: &BuildOptions| build(source, new, Store::create(store)?, options, &|_, _| {});
        let mut built = build(&options)?;
        // What the pack of an order has was in the other packs.
        let unneeded_percent = if order.is_some() { ORDERED_UNNEEDED_PERCENT } else { UNNEEDED_PERCENT };
        // Objects of packs that are left out may be in further packs of others.
        for _ in 0..COMPACT_BUILDS_MAX {
            let damaged = |reason| ferry_image::Error::Invalid { path: new.into(), reason };
            let unneeded = unneeded_packs(&Image::open(new, None)?, unneeded_percent).map_err(damaged)?;
            if unneeded.is_empty() {
                break;
            }
            options.unused_packs.extend(unneeded);
            built = build(&options)?;
        }
        Ok(built)
    };
    pull_and_build(remote, container, output, store, (None, jobs), progress, build)
}

fn pull_and_build(
    remote: &Remote,
    container: &Container,
    output: &Path,
    store: &Path,
    (expected, jobs): (Option<Digest>, usize),
    progress: &(dyn Fn(u64, u64) + Sync),
    build: impl FnOnce(&Path, &Path) -> ferry_image::Result<BuildReport>,
) -> Result<(Digest, u64)> {
    // A part of the image needs it in memory.
    if container.config.bytes > CONFIG_BYTES_MAX {
        let reason =
            format!("its configuration has {} bytes; the maximum is {CONFIG_BYTES_MAX}", container.config.bytes);
        return Err(Error::Container { name: remote.reference().to_string(), reason });
    }
    let directory = directory_beside(output)?;
    let kept = Store::create(store)?;
    let bundle = kept.temporary_directory()?;
    fetch_bundle(remote, container, bundle.path(), jobs, progress)?;
    let (mut source, new) = (std::ffi::OsString::from("oci:"), directory.path().join("image"));
    source.push(bundle.path());
    let built = build(source.as_ref(), &new)?;
    drop((bundle, kept));
    let own = Image::open(&new, None)?.digest();
    let found = if expected == Some(own) { own } else { built.tree };
    publish(remote, &new, output, (found, expected))?;
    Ok((built.tree, built.new_bytes))
}

/// Fetches a container into an OCI image directory.
fn fetch_bundle(
    remote: &Remote,
    container: &Container,
    directory: &Path,
    jobs: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<()> {
    let blobs = directory.join("blobs/sha256");
    with_path("create", &blobs, fs::create_dir_all(&blobs))?;
    let write = |path: &Path, bytes: &[u8]| with_path("write to", path, fs::write(path, bytes));
    let (digest, size) = (format!("sha256:{}", container.manifest), container.bytes.len());
    let index = json!({"schemaVersion": 2,
        "manifests": [{"mediaType": container.media_type, "digest": digest, "size": size}]});
    write(&directory.join("oci-layout"), br#"{"imageLayoutVersion": "1.0.0"}"#)?;
    write(&directory.join("index.json"), index.to_string().as_bytes())?;
    write(&blobs.join(container.manifest.to_string()), &container.bytes)?;
    let mut wanted: Vec<Blob> = container.layers.iter().map(|ContainerLayer { blob, .. }| *blob).collect();
    wanted.push(container.config);
    wanted.sort_by_key(|blob| (blob.sha256.0, blob.bytes));
    wanted.dedup();
    let all = wanted.iter().map(|blob| blob.bytes).fold(0, u64::saturating_add);
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let failed = Mutex::new(None);
    let work = || {
        while failed.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            let Some(blob) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            let outcome = fetch_blob(remote, *blob, &blobs.join(blob.sha256.to_string()), &|bytes| {
                progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, all);
            });
            if let Err(error) = outcome {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| (0..jobs.max(1)).for_each(|_| _ = scope.spawn(work)));
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)?;
    shorten(remote, container, directory)
}

/// Removes the upper layers, which were not fetched, from a bundle's documents.
fn shorten(remote: &Remote, container: &Container, directory: &Path) -> Result<()> {
    let invalid = |error: serde_json::Error| Error::Container {
        name: remote.reference().to_string(),
        reason: format!("its manifest or configuration is invalid: {error}"),
    };
    let count = container.layers.len();
    let mut manifest: Value = serde_json::from_slice(&container.bytes).map_err(invalid)?;
    let blobs = directory.join("blobs/sha256");
    let Some(layers) = manifest.get_mut("layers").and_then(Value::as_array_mut).filter(|layers| layers.len() > count)
    else {
        return Ok(());
    };
    layers.truncate(count);
    let write = |path: &Path, bytes: &[u8]| with_path("write to", path, fs::write(path, bytes));
    let put = |document: &Value| {
        let bytes = document.to_string().into_bytes();
        write(&blobs.join(Sha256::of(&bytes).to_string()), &bytes)?;
        Ok::<_, Error>((format!("sha256:{}", Sha256::of(&bytes)), bytes.len()))
    };
    let path = blobs.join(container.config.sha256.to_string());
    let mut config: Value = serde_json::from_slice(&with_path("read", &path, fs::read(&path))?).map_err(invalid)?;
    if let Some(plain) = config.pointer_mut("/rootfs/diff_ids").and_then(Value::as_array_mut) {
        plain.truncate(count);
    }
    let (digest, size) = put(&config)?;
    (manifest["config"]["digest"], manifest["config"]["size"]) = (digest.into(), size.into());
    let (digest, size) = put(&manifest)?;
    let entry = json!({"mediaType": container.media_type, "digest": digest, "size": size});
    write(&directory.join("index.json"), json!({"schemaVersion": 2, "manifests": [entry]}).to_string().as_bytes())
}

/// Fetches a blob to a file, and verifies it.
pub(crate) fn fetch_blob(remote: &Remote, blob: Blob, path: &Path, progress: &dyn Fn(u64)) -> Result<()> {
    let file = with_path("create", path, File::create_new(path))?;
    let outcome = remote.read_verified(blob, &mut |at, piece| {
        progress(piece.len() as u64);
        file.write_all_at(piece, at)
    });
    match outcome {
        Err(Error::Sink(error)) => with_path("write to", path, Err(error)),
        outcome => outcome,
    }
}
