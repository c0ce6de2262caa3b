//! The JSON documents of an image directory, with limits.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::blob::{Blob, BlobDigest, open_untrusted};
use crate::format::error::{Error, IoContext, Result};

/// The maximum size of a manifest, index or configuration in bytes: `ferry-registry` pulls configurations up to it.
const JSON_BYTES_MAX: u64 = 8 << 20;
/// The maximum number of layers; overlayfs allows 500.
const LAYERS_MAX: usize = 500;
/// The maximum nesting of indexes.
const DEPTH_MAX: usize = 4;

/// The prefixes of media types of layers. Non-distributable layers are read like others if they are in the directory.
const LAYER_TYPES: [&str; 4] = [
    "application/vnd.oci.image.layer.v1.",
    "application/vnd.oci.image.layer.nondistributable.v1.",
    "application/vnd.docker.image.rootfs.diff.",
    "application/vnd.docker.image.rootfs.foreign.diff.",
];

const TAG: &str = "org.opencontainers.image.ref.name";

/// A reference to a blob.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    #[serde(default)]
    media_type: String,
    pub digest: BlobDigest,
    pub size: u64,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Clone, Debug, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    variant: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layout {
    image_layout_version: String,
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Config {
    rootfs: Rootfs,
}

#[derive(Deserialize)]
struct Rootfs {
    #[serde(rename = "type")]
    kind: String,
    diff_ids: Vec<BlobDigest>,
}

/// A layer of an image.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub blob: BlobDigest,
    pub bytes: u64,
    /// The digest of the unpacked archive.
    pub plain: BlobDigest,
}

fn flaw(path: &Path, at: &str, reason: impl Into<String>) -> Error {
    Error::Input { path: path.into(), at: at.into(), reason: reason.into() }
}

fn parse<T: DeserializeOwned>(bytes: &[u8], path: &Path, at: &str) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| flaw(path, at, format!("it is not what it should be ({error})")))
}

/// Reads a file of the directory with a fixed name.
fn read_file<T: DeserializeOwned>(path: &Path, at: &str) -> Result<T> {
    let file = open_untrusted(path)?;
    if !file.metadata().doing("look at", path)?.is_file() {
        return Err(flaw(path, at, "it is not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(JSON_BYTES_MAX + 1).read_to_end(&mut bytes).doing("read", path)?;
    if bytes.len() as u64 > JSON_BYTES_MAX {
        return Err(flaw(path, at, "it has more than 8 MiB"));
    }
    parse(&bytes, path, at)
}

/// Reads a JSON blob, and verifies it before it is parsed.
fn read_blob<T: DeserializeOwned>(directory: &Path, of: &Descriptor, what: &'static str) -> Result<T> {
    let mut blob = Blob::open(directory, of.digest, of.size, what)?;
    let path = blob.path.clone();
    if of.size > JSON_BYTES_MAX {
        return Err(flaw(&path, what, "it has more than 8 MiB"));
    }
    let mut bytes = Vec::new();
    blob.read_to_end(&mut bytes).doing("read", &path)?;
    blob.finish()?;
    parse(&bytes, &path, what)
}

impl Descriptor {
    fn tag(&self) -> Option<&str> {
        self.annotations.as_ref()?.get(TAG).map(String::as_str)
    }

    fn is_index(&self) -> bool {
        matches!(
            self.media_type.as_str(),
            "application/vnd.oci.image.index.v1+json" | "application/vnd.docker.distribution.manifest.list.v2+json"
        )
    }

    fn is_manifest(&self) -> bool {
        matches!(
            self.media_type.as_str(),
            "application/vnd.oci.image.manifest.v1+json" | "application/vnd.docker.distribution.manifest.v2+json"
        )
    }

    /// Returns whether this may be the image for a platform; a descriptor without a platform may be.
    fn is_for(&self, wanted: &str) -> bool {
        let Some(platform) = &self.platform else { return true };
        let mut parts = wanted.split('/');
        let (os, architecture, variant) = (parts.next(), parts.next(), parts.next());
        Some(platform.os.as_str()) == os
            && Some(platform.architecture.as_str()) == architecture
            && variant.is_none_or(|variant| platform.variant() == non_default(&platform.architecture, variant))
    }

    fn has_variant(&self) -> bool {
        self.platform.as_ref().is_some_and(|platform| platform.variant().is_some())
    }

    /// Returns whether this is a known type of layer. The compression is detected from its first bytes.
    fn is_layer(&self) -> bool {
        let kind = LAYER_TYPES.iter().find_map(|prefix| self.media_type.strip_prefix(prefix));
        matches!(kind, Some("tar" | "tar+gzip" | "tar.gzip" | "tar+zstd" | "tar.zstd"))
    }
}

impl Platform {
    fn variant(&self) -> Option<&str> {
        non_default(&self.architecture, self.variant.as_deref()?)
    }
}

/// Returns a variant, or an empty string if it is the default of its architecture.
fn non_default<'a>(architecture: &str, variant: &'a str) -> Option<&'a str> {
    let is_usual = matches!((architecture, variant), (_, "") | ("amd64", "v1") | ("arm64", "v8" | "8"));
    Some(variant).filter(|_| !is_usual)
}

/// Returns the layers of an image, the lowest first: of the image with this tag, or the only one, for this platform
/// (`os/architecture`, optionally with a variant).
pub(super) fn layers(directory: &Path, tag: Option<&str>, platform: &str) -> Result<Vec<Layer>> {
    let path = directory.join("oci-layout");
    let layout: Layout = read_file(&path, "the layout")?;
    if !layout.image_layout_version.starts_with("1.") {
        let version = layout.image_layout_version;
        return Err(flaw(&path, "the layout", format!("the version {version:?} is not known here")));
    }
    let path = directory.join("index.json");
    let index: Index = read_file(&path, "the index")?;
    let found = pick(index.manifests, tag, platform).map_err(|reason| flaw(&path, "the index", reason))?;
    of_manifest(directory, &manifest(directory, found, platform)?)
}

/// Follows a descriptor to its manifest.
fn manifest(directory: &Path, mut found: Descriptor, platform: &str) -> Result<Descriptor> {
    for _ in 0..DEPTH_MAX {
        if !found.is_index() {
            return Ok(found);
        }
        let index: Index = read_blob(directory, &found, "an index")?;
        let path = blob_path(directory, found.digest);
        found = pick(index.manifests, None, platform).map_err(|reason| flaw(&path, "an index", reason))?;
    }
    Err(flaw(directory, "an index", "indexes name indexes, deeper than programs do"))
}

fn blob_path(directory: &Path, name: BlobDigest) -> PathBuf {
    directory.join("blobs").join(name.to_string().replace(':', "/"))
}

fn pick(mut all: Vec<Descriptor>, tag: Option<&str>, platform: &str) -> Result<Descriptor, String> {
    let tags = |all: &[Descriptor]| {
        let mut tags: Vec<String> = all.iter().filter_map(Descriptor::tag).map(|tag| format!("{tag:?}")).collect();
        tags.dedup();
        if tags.is_empty() { "none".to_owned() } else { tags.join(", ") }
    };
    if let Some(tag) = tag {
        let known = tags(&all);
        all.retain(|found| found.tag() == Some(tag));
        if all.is_empty() {
            return Err(format!("no image has the tag {tag:?}; there are {known}"));
        }
    }
    all.retain(|found| found.is_index() || found.is_manifest());
    if all.len() > 1 {
        all.retain(|found| found.is_for(platform));
        // Without a requested variant, the image without one runs everywhere.
        if all.iter().any(|found| !found.has_variant()) {
            let wants_one = platform.split('/').nth(2).is_some();
            all.retain(|found| wants_one || !found.has_variant());
        }
    }
    match all.len() {
        0 => Err(format!("it has no image for {platform}")),
        1 => Ok(all.remove(0)),
        _ if all.iter().all(Descriptor::has_variant) => {
            let variants: Vec<&str> =
                all.iter().filter_map(|found| found.platform.as_ref().and_then(Platform::variant)).collect();
            Err(format!("it has images for the variants {} of {platform}: name one of them", variants.join(", ")))
        }
        _ => Err(format!("it has several images for {platform}: name one by its tag ({})", tags(&all))),
    }
}

fn of_manifest(directory: &Path, found: &Descriptor) -> Result<Vec<Layer>> {
    let path = blob_path(directory, found.digest);
    let refused = |reason: String| flaw(&path, "a manifest", reason);
    let manifest: Manifest = read_blob(directory, found, "a manifest")?;
    let config: Config = read_blob(directory, &manifest.config, "a configuration")?;
    let plain = config.rootfs.diff_ids;
    if config.rootfs.kind != "layers" || plain.len() != manifest.layers.len() {
        let (named, count) = (plain.len(), manifest.layers.len());
        return Err(refused(format!("it has {count} layers, and its configuration {named}")));
    }
    if manifest.layers.len() > LAYERS_MAX {
        return Err(refused(format!("it has more than {LAYERS_MAX} layers")));
    }
    let layer = |(layer, plain): (Descriptor, BlobDigest)| {
        if !layer.is_layer() {
            return Err(refused(format!("a layer of the kind {:?}, which is not known here", layer.media_type)));
        }
        Ok(Layer { blob: layer.digest, bytes: layer.size, plain })
    };
    manifest.layers.into_iter().zip(plain).map(layer).collect()
}
