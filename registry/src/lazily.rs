//! Container images whose files are read before the layers are here, for a program that wants to know what that covers.

use std::path::Path;
use std::sync::Arc;
use std::thread;

use ferry_image::{Image, error_chain};
use serde::{Deserialize, Serialize};

use crate::container::Container;
use crate::error::{Error, Result};
use crate::layers::{self, Refusal};
use crate::manifest::Sha256;
use crate::packs::Packs;
use crate::pull::open_metadata;
use crate::reference::{Reference, Version};
use crate::referrers::{self, Converted};
use crate::remote::{Document, Remote};
use crate::traces::pull_trace;

/// The annotation with the digest of a table of contents of eStargz.
const TABLE_KEY: &str = "containerd.io/snapshot/stargz/toc.digest";
/// The number of layers that are fetched at once, where the image has to be pulled.
const JOBS: usize = 4;

/// What is wanted of a container image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LazyOptions {
    /// An image of exactly so many layers, from the lowest; they are pulled if their tables of contents are not there or wrong.
    /// Otherwise of as many as have tables of contents.
    pub layers: Option<usize>,
    /// Whether an image that was stored beside the container image ([`crate::convert`]) is taken for it. Nothing proves that it is
    /// the same one.
    pub trusts_converted: bool,
    /// Whether the list of files to fetch first that is stored beside the container image is fetched, too.
    pub trusts_trace: bool,
}

/// A layer of a container image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LazyLayer {
    /// The digest of its blob.
    pub digest: String,
    /// The digest of its table of contents of eStargz, as the manifest says.
    pub table: Option<String>,
}

/// An image of the lower layers of a container image, in words that another program reads, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LazyImage {
    /// All layers of the container image, from the lowest.
    pub layers: Vec<LazyLayer>,
    /// The number of them that it shows.
    pub covers: usize,
    /// The reference of the container image, by the digest of its manifest.
    pub container: String,
    /// The digest of the image.
    pub digest: String,
    /// The number of its inodes.
    pub inodes: u64,
    /// The names of the packs that it needs.
    pub packs: Vec<String>,
    /// The reference by which its data are fetched.
    pub from: String,
    /// The manifest that this names ([`crate::Options::manifest`]).
    pub manifest: Option<String>,
}

/// Makes an image of the tables of contents of a container image's layers, or fetches the metadata of its converted image. Returns what
/// it is, and the source of its files, which are fetched when they are read.
///
/// # Errors
///
/// The registry is not reachable or its data are wrong, or the lowest layer has no table of contents.
pub fn pull_lazily(
    remote: &Arc<Remote>,
    output: &Path,
    store: &Path,
    options: LazyOptions,
) -> Result<(LazyImage, Arc<Packs>)> {
    let trace = |digest| {
        if let Err(error) = pull_trace(remote, &reference(remote, digest), output) {
            tracing::warn!("{}: it is not used", error_chain(&error));
        }
    };
    thread::scope(|scope| {
        let known = match remote.reference().version {
            Version::Digest(digest) if options.trusts_trace => {
                scope.spawn(move || trace(digest));
                Some(digest)
            }
            _ => None,
        };
        let (container, found) = pull_image(remote, output, store, options)?;
        if options.trusts_trace && known != Some(container) {
            trace(container);
        }
        Ok(found)
    })
}

/// Returns the reference of a manifest beside the one that is named.
fn reference(remote: &Remote, manifest: Sha256) -> Reference {
    Reference { location: remote.reference().location.clone(), version: Version::Digest(manifest) }
}

/// The same without the list; returns the digest of the container image's manifest, too.
fn pull_image(
    remote: &Arc<Remote>,
    output: &Path,
    store: &Path,
    options: LazyOptions,
) -> Result<(Sha256, (LazyImage, Arc<Packs>))> {
    let refused = |reason: String| Error::Container { name: remote.reference().to_string(), reason };
    // At the same time, where the manifest's digest is known: a container waits for the answer.
    let (found, known) = thread::scope(|scope| {
        let known = match remote.reference().version {
            Version::Digest(digest) if options.trusts_converted => {
                Some((digest, scope.spawn(move || remote.converted(digest))))
            }
            _ => None,
        };
        (remote.find(), known.and_then(|(digest, known)| Some((digest, known.join().ok()?))))
    });
    let Document::Container(container) = found?.0 else {
        return Err(refused("it is an image of Ferry".into()));
    };
    let all = container.layers.len();
    let described = |layer: &crate::container::ContainerLayer| LazyLayer {
        digest: format!("sha256:{}", layer.blob.sha256),
        table: layer.annotation(TABLE_KEY).map(str::to_owned),
    };
    let found = |covers, from: Option<(Sha256, Arc<Packs>)>| {
        let of_container =
            || (container.manifest, Arc::new(Packs::of_container(Arc::clone(remote), container.clone())));
        let (from, packs) = from.unwrap_or_else(of_container);
        let image = Image::open(output, None)?;
        let found = LazyImage {
            layers: container.layers.iter().map(described).collect(),
            covers,
            container: reference(remote, container.manifest).to_string(),
            digest: image.digest().to_string(),
            inodes: image.inodes(),
            packs: image.packs().iter().map(|pack| pack.name.hex()).collect(),
            from: reference(remote, from).to_string(),
            manifest: remote.known_manifest(from).and_then(|manifest| String::from_utf8(manifest).ok()),
        };
        Ok((container.manifest, (found, packs)))
    };
    if options.trusts_converted && options.layers.is_none_or(|layers| layers == all) {
        let known = match known {
            Some((digest, known)) if digest == container.manifest => known,
            _ => remote.converted(container.manifest),
        };
        match known.and_then(|known| converted(remote, &container, &known, output, store)) {
            Ok(Some(converted)) => return found(all, Some(converted)),
            Ok(None) => {}
            Err(error) => tracing::warn!("{error}: the image that was converted of it is not used"),
        }
    }
    let tables = container.layers.iter().map(|layer| layer.table());
    let covers = tables.take_while(std::result::Result::is_ok).count();
    match options.layers {
        Some(layers) if layers == 0 || layers > all => Err(refused(format!("it has {all} layers, not {layers}"))),
        Some(layers) => {
            layers::pull_tables(remote, &lowest(&container, layers), output, store, (None, JOBS), &|_, _| {})?;
            found(layers, None)
        }
        None => {
            let none = || refused("it has no layers".into());
            if covers == 0 {
                let lowest = container.layers.first().ok_or_else(none)?;
                let reason = lowest.table().err().map(|error| error.to_string()).unwrap_or_default();
                return Err(refused(format!("layer 1 of {all}: {reason}")));
            }
            match layers::build_tables(remote, &lowest(&container, covers), output, store, None) {
                Ok(_) => found(covers, None),
                Err(Refusal::Whole(reason)) => Err(refused(reason)),
                Err(Refusal::Failed(error)) => Err(error),
            }
        }
    }
}

/// Returns the container without its upper layers.
fn lowest(container: &Container, layers: usize) -> Container {
    let mut lowest = container.clone();
    lowest.layers.truncate(layers);
    lowest
}

/// Fetches the metadata of the image that was converted of a container image; returns its manifest and its packs, if there is one.
fn converted(
    remote: &Arc<Remote>,
    container: &Container,
    known: &[Converted],
    output: &Path,
    store: &Path,
) -> Result<Option<(Sha256, Arc<Packs>)>> {
    let Some(found) = referrers::newest(known) else { return Ok(None) };
    let (manifest, name) = remote.converted_image(found)?;
    let invalid = |reason: &str| Error::Manifest { name: remote.reference().to_string(), reason: reason.into() };
    if manifest.subject.as_ref().is_none_or(|subject| subject.manifest.sha256 != container.manifest) {
        return Err(invalid("it was made of another container image"));
    }
    let packs = open_metadata(remote, (manifest, name), output, store, found.tree)?;
    Ok(Some((name, packs)))
}
