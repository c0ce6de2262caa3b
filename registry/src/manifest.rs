//! The manifest of an image: an OCI image manifest whose layers are the image, and the index and parts of each pack.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;

use ferry_image::{Algorithm, Digest, bytes_of_hex, hex};
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use crate::frames::Frames;

/// The size of a pack's parts in bytes: small enough for cheap retries and uploads in one piece, large enough that a
/// pack has few.
pub const PART_BYTES: u64 = 64 << 20;
/// The maximum part that is accepted from others, in bytes. Without ranges a whole part must be read.
const PART_BYTES_MAX: u64 = 1 << 30;
/// The maximum manifest in bytes, the limit of registries, too.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 4 << 20;

/// The media type of an OCI manifest.
pub(crate) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media types of container images and of indexes for several machines; the first two are OCI's, the others Docker's.
const CONTAINER_TYPES: [&str; 4] = [
    MANIFEST_TYPE,
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
pub(crate) const ARTIFACT_TYPE: &str = "application/vnd.ferry.image.v2";
pub(crate) const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
/// The blob that the specification defines for images without a configuration.
pub(crate) const EMPTY: &[u8] = b"{}";
const METADATA_TYPE: &str = "application/vnd.ferry.image.metadata.v2";
const INDEX_TYPE: &str = "application/vnd.ferry.pack.index.v2";
const PART_TYPE: &str = "application/vnd.ferry.pack.part.v2";
const PACKED_PART_TYPE: &str = "application/vnd.ferry.pack.part.v2+zstd";
pub(crate) const DIGEST_KEY: &str = "ferry.digest";
/// The digest of the tree, on a manifest that refers to a container image.
pub(crate) const TREE_KEY: &str = "ferry.tree";
/// When it was made, in seconds since 1970, on manifests of which the newest is used.
pub(crate) const CREATED_KEY: &str = "ferry.created";
/// The blobs that a mount needs first, on the same manifest: `DIGITS:BYTES,...`. Who has a list of referrers can ask for them together
/// with the manifest, which proves them.
pub(crate) const FIRST_KEY: &str = "ferry.first";
/// The maximum number of them, and of the bytes of each.
pub(crate) const FIRST_MAX: usize = 3;
pub(crate) const FIRST_BYTES_MAX: u64 = 8 << 20;
const PACK_KEY: &str = "ferry.pack";
/// Of compressed parts ([`crate::frames`]).
const BYTES_KEY: &str = "ferry.bytes";
const FRAMES_KEY: &str = "ferry.frames";

/// The name of a blob; written as 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sha256(pub(crate) [u8; 32]);

impl Sha256 {
    /// Reads 64 hexadecimal digits.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        bytes_of_hex(text.as_bytes()).map(Self)
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(sha2::Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

/// A blob in a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blob {
    pub sha256: Sha256,
    pub bytes: u64,
}

/// A part of a pack, or of composefs's objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub blob: Blob,
    /// Where its frames are, if it is compressed.
    pub frames: Option<Frames>,
}

impl Part {
    /// Its length in the pack, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.frames.as_ref().map_or(self.blob.bytes, |frames| frames.bytes)
    }
}

/// A pack in a manifest, or the objects of a composefs image, under the image's digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PackBlobs {
    /// `None` for composefs's objects, which the image locates.
    pub index: Option<Blob>,
    /// The pack's bytes, in order.
    pub parts: Vec<Part>,
}

impl PackBlobs {
    /// Returns the ranges of parts that form a range of the pack; `None` if it is too long.
    pub(crate) fn pieces(&self, range: &Range<u64>) -> Option<Vec<(&Part, Range<u64>)>> {
        let mut pieces = Vec::new();
        let mut begin = 0_u64;
        for part in &self.parts {
            let end = begin.checked_add(part.bytes())?;
            let (from, to) = (range.start.max(begin), range.end.min(end));
            if from < to {
                pieces.push((part, from - begin..to - begin));
            }
            begin = end;
        }
        (range.end <= begin).then_some(pieces)
    }
}

/// The container image that an image was made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    pub media_type: String,
    pub manifest: Blob,
    /// The tree that was made of it.
    pub tree: Digest,
    /// When, in seconds since 1970, if it is to be used instead of older ones.
    pub created: Option<u64>,
}

/// An image in a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub digest: Digest,
    pub image: Blob,
    pub packs: HashMap<Digest, PackBlobs>,
    pub subject: Option<Subject>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    schema_version: u32,
    media_type: Option<String>,
    artifact_type: Option<String>,
    config: Descriptor,
    layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    subject: Option<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

impl Descriptor {
    fn new(media_type: &str, blob: Blob, annotation: Option<(&str, Digest)>) -> Self {
        let annotations = annotation.map(|(key, value)| (key.into(), value.to_string())).into_iter().collect();
        Self { media_type: media_type.into(), digest: format!("sha256:{}", blob.sha256), size: blob.bytes, annotations }
    }

    fn of_part(part: &Part, pack: Digest) -> Self {
        let kind = if part.frames.is_some() { PACKED_PART_TYPE } else { PART_TYPE };
        let mut own = Self::new(kind, part.blob, Some((PACK_KEY, pack)));
        if let Some(frames) = &part.frames {
            own.annotations.insert(BYTES_KEY.into(), frames.bytes.to_string());
            own.annotations.insert(FRAMES_KEY.into(), frames.lengths());
        }
        own
    }

    fn frames(&self) -> Result<Frames, String> {
        let found =
            [BYTES_KEY, FRAMES_KEY].map(|key| self.annotations.get(key).map(String::as_str).unwrap_or_default());
        Ok(Frames::parse(found[0], found[1], self.size)?)
    }

    fn blob(&self) -> Result<Blob, String> {
        let sha256 = self.digest.strip_prefix("sha256:").and_then(Sha256::from_hex);
        let sha256 = sha256.ok_or_else(|| format!("{:?} is no digest", excerpt(&self.digest)))?;
        Ok(Blob { sha256, bytes: self.size })
    }

    fn annotation(&self, key: &str) -> Result<Digest, String> {
        let value = self.annotations.get(key).ok_or_else(|| format!("a layer without {key}"))?;
        Digest::parse(value.as_bytes()).ok_or_else(|| format!("{key} is {:?}, which is no digest", excerpt(value)))
    }
}

/// Returns the beginning of a text, short enough for an error message.
pub(crate) fn excerpt(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

/// Returns whether a manifest is that of a container image, or an index of several, as in podman and docker.
pub(crate) fn is_container(bytes: &[u8]) -> bool {
    #[derive(Default, Deserialize)]
    #[serde(rename_all = "camelCase", default)]
    struct Kind {
        media_type: Option<String>,
        artifact_type: Option<String>,
        manifests: Option<serde::de::IgnoredAny>,
        config: Option<Config>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Config {
        media_type: String,
    }
    let kind: Kind = serde_json::from_slice(bytes).unwrap_or_default();
    let is_image = kind.config.is_some_and(|config| config.media_type.contains(".image."));
    // Those of OCI may omit the media type.
    let is_known = kind.media_type.is_none_or(|found| CONTAINER_TYPES.contains(&found.as_str()));
    is_known && kind.artifact_type.is_none() && (is_image || kind.manifests.is_some())
}

/// Returns the accepted media types: those of Ferry and of container images. Without the latter, a registry would
/// report container images as missing.
pub(crate) fn accepted() -> String {
    CONTAINER_TYPES.join(", ")
}

impl Manifest {
    /// Decodes a manifest.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, String> {
        let document: Document = serde_json::from_slice(bytes).map_err(|error| excerpt(&error.to_string()))?;
        if document.schema_version != 2 || document.artifact_type.as_deref() != Some(ARTIFACT_TYPE) {
            return Err(format!("its artifactType is not {ARTIFACT_TYPE}"));
        }
        let mut image = None;
        let mut packs: HashMap<Digest, (Option<Blob>, Vec<Part>)> = HashMap::new();
        for layer in &document.layers {
            let blob = layer.blob()?;
            match layer.media_type.as_str() {
                METADATA_TYPE => {
                    if image.replace((layer.annotation(DIGEST_KEY)?, blob)).is_some() {
                        return Err("two images".into());
                    }
                }
                INDEX_TYPE => {
                    let pack = layer.annotation(PACK_KEY)?;
                    if packs.entry(pack).or_default().0.replace(blob).is_some() {
                        return Err(format!("two indexes of the pack {pack}"));
                    }
                }
                PART_TYPE | PACKED_PART_TYPE => {
                    let frames = (layer.media_type == PACKED_PART_TYPE).then(|| layer.frames()).transpose()?;
                    let part = Part { blob, frames };
                    if part.blob.bytes.max(part.bytes()) > PART_BYTES_MAX {
                        return Err(format!("a part of {} bytes", part.blob.bytes.max(part.bytes())));
                    }
                    packs.entry(layer.annotation(PACK_KEY)?).or_default().1.push(part);
                }
                other => return Err(format!("a layer of the unknown type {:?}", excerpt(other))),
            }
        }
        let (digest, image) = image.ok_or("no metadata")?;
        let whole = |(pack, (index, parts)): (Digest, (Option<Blob>, Vec<Part>))| match (pack.algorithm(), index) {
            (Algorithm::Blake3, None) => Err(format!("no index of the pack {pack}")),
            (Algorithm::Verity, Some(_)) => Err(format!("an index of composefs's objects {pack}")),
            (_, index) => Ok((pack, PackBlobs { index, parts })),
        };
        let packs = packs.into_iter().map(whole).collect::<Result<_, String>>()?;
        let tree = document.annotations.get(TREE_KEY).and_then(|tree| Digest::parse(tree.as_bytes()));
        let created = document.annotations.get(CREATED_KEY).and_then(|created| created.parse().ok());
        let subject = match document.subject.zip(tree) {
            Some((found, tree)) => {
                Some(Subject { manifest: found.blob()?, media_type: found.media_type, tree, created })
            }
            None => None,
        };
        Ok(Self { digest, image, packs, subject })
    }

    /// Returns the annotations of a converted image's manifest, which lists of referrers have, too; of others there are none.
    pub(crate) fn annotations(&self, order: &[Digest]) -> BTreeMap<String, String> {
        let Some(subject) = &self.subject else { return BTreeMap::new() };
        let indexes = order.iter().filter_map(|pack| self.packs.get(pack)?.index);
        let first = std::iter::once(self.image).chain(indexes).filter(|blob| blob.bytes <= FIRST_BYTES_MAX);
        let first: Vec<_> = first.take(FIRST_MAX).map(|blob| format!("{}:{}", blob.sha256, blob.bytes)).collect();
        let created = subject.created.map(|created| (CREATED_KEY, created.to_string()));
        [(DIGEST_KEY, self.digest.to_string()), (TREE_KEY, subject.tree.to_string()), (FIRST_KEY, first.join(","))]
            .into_iter()
            .chain(created)
            .map(|(key, value)| (key.into(), value))
            .collect()
    }

    /// Encodes the manifest, with packs in the order of the image.
    pub(crate) fn write(&self, order: &[Digest]) -> Vec<u8> {
        let mut layers = vec![Descriptor::new(METADATA_TYPE, self.image, Some((DIGEST_KEY, self.digest)))];
        for pack in order {
            let Some(PackBlobs { index, parts }) = self.packs.get(pack) else { continue };
            layers.extend(index.map(|index| Descriptor::new(INDEX_TYPE, index, Some((PACK_KEY, *pack)))));
            layers.extend(parts.iter().map(|part| Descriptor::of_part(part, *pack)));
        }
        let empty = Blob { sha256: Sha256::of(EMPTY), bytes: EMPTY.len() as u64 };
        let subject = |subject: &Subject| Descriptor::new(&subject.media_type, subject.manifest, None);
        let document = Document {
            subject: self.subject.as_ref().map(subject),
            annotations: self.annotations(order),
            schema_version: 2,
            media_type: Some(MANIFEST_TYPE.into()),
            artifact_type: Some(ARTIFACT_TYPE.into()),
            config: Descriptor::new(EMPTY_TYPE, empty, None),
            layers,
        };
        serde_json::to_vec_pretty(&document).expect("strings and numbers can be written")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use ferry_image::Algorithm;
    use serde_json::{Value, json};

    use super::*;

    fn blob(seed: u8, bytes: u64) -> Blob {
        Blob { sha256: Sha256([seed; 32]), bytes }
    }

    fn manifest() -> (Manifest, Digest) {
        let pack = Digest::new(Algorithm::Blake3, [9; 32]);
        let parts = [blob(3, 100), blob(4, 50)].map(|blob| Part { blob, frames: None });
        let blobs = PackBlobs { index: Some(blob(2, 80)), parts: parts.into() };
        (
            Manifest {
                digest: Digest::new(Algorithm::Blake3, [1; 32]),
                image: blob(1, 4096),
                packs: [(pack, blobs)].into(),
                subject: None,
            },
            pack,
        )
    }

    #[test]
    fn manifests_round_trip() {
        let (manifest, pack) = manifest();
        let bytes = manifest.write(&[pack]);
        assert_eq!(Manifest::read(&bytes).unwrap(), manifest);
        let tree = Digest::new(Algorithm::Tree, [7; 32]);
        let mut packed = manifest.clone();
        let frames = Frames::parse("300000", "CgAAFAAA", 30).unwrap();
        packed.packs.get_mut(&pack).unwrap().parts.push(Part { blob: blob(5, 30), frames: Some(frames) });
        assert_eq!(Manifest::read(&packed.write(&[pack])).unwrap(), packed);
        let range = packed.packs[&pack].pieces(&(149..300_150)).unwrap();
        assert_eq!(range.iter().map(|(_, range)| range.clone()).collect::<Vec<_>>(), [49..50, 0..300_000]);
        let subject =
            Some(Subject { media_type: MANIFEST_TYPE.into(), manifest: blob(8, 500), tree, created: Some(7) });
        let referrer = Manifest { subject, ..manifest };
        assert_eq!(Manifest::read(&referrer.write(&[pack])).unwrap(), referrer);
        let document: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(
            document["config"]["digest"],
            "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
        );
    }

    #[test]
    fn container_images_are_recognized() {
        let (manifest, pack) = manifest();
        assert!(!is_container(&manifest.write(&[pack])));
        let config = |kind: &str| json!({"schemaVersion": 2, "config": {"mediaType": kind}, "layers": []});
        let docker = "application/vnd.docker.distribution.manifest.v2+json";
        let mut typed = config("application/vnd.docker.container.image.v1+json");
        typed["mediaType"] = json!(docker);
        let mut chart = config("application/vnd.cncf.helm.config.v1+json");
        chart["mediaType"] = json!(MANIFEST_TYPE);
        for (document, expected) in [
            (config("application/vnd.oci.image.config.v1+json"), true),
            (typed, true),
            (json!({"schemaVersion": 2, "manifests": []}), true),
            (chart, false),
            (json!({"mediaType": "x", "manifests": []}), false),
            (json!({"artifactType": "x", "manifests": []}), false),
            (json!({"manifests": null}), false),
            (json!([]), false),
        ] {
            assert_eq!(is_container(document.to_string().as_bytes()), expected, "{document}");
        }
        assert!(!is_container(b"\xff"));
    }

    #[test]
    fn objects_of_composefs_have_no_index() {
        let (mut manifest, _) = manifest();
        let name = Digest::new(Algorithm::Verity, [1; 32]);
        let set = |index| [(name, PackBlobs { index, parts: vec![Part { blob: blob(3, 100), frames: None }] })].into();
        (manifest.digest, manifest.packs) = (name, set(None));
        assert_eq!(Manifest::read(&manifest.write(&[name])).unwrap(), manifest);
        manifest.packs = set(Some(blob(2, 80)));
        assert!(Manifest::read(&manifest.write(&[name])).unwrap_err().contains("an index of composefs's objects"));
    }

    #[test]
    fn ranges_are_found_in_parts() {
        let (manifest, pack) = manifest();
        let pieces = |range: Range<u64>| {
            let pieces = manifest.packs[&pack].pieces(&range);
            pieces.map(|pieces| {
                pieces.into_iter().map(|(part, range)| (part.blob.sha256.0[0], range)).collect::<Vec<_>>()
            })
        };
        assert_eq!(pieces(0..100), Some(vec![(3, 0..100)]));
        assert_eq!(pieces(90..110), Some(vec![(3, 90..100), (4, 0..10)]));
        assert_eq!(pieces(100..150), Some(vec![(4, 0..50)]));
        assert_eq!(pieces(5..5), Some(vec![]));
        assert_eq!(pieces(100..151), None);
        assert_eq!(pieces(u64::MAX - 1..u64::MAX), None);
    }

    #[test]
    fn manifests_of_other_images_are_refused() {
        let (manifest, pack) = manifest();
        let good: Value = serde_json::from_slice(&manifest.write(&[pack])).unwrap();
        let bad = |change: &dyn Fn(&mut Value)| {
            let mut document = good.clone();
            change(&mut document);
            Manifest::read(&serde_json::to_vec(&document).unwrap()).unwrap_err()
        };
        assert!(Manifest::read(b"{}").is_err());
        assert!(Manifest::read(b"\xff").is_err());
        assert!(bad(&|m| m["artifactType"] = json!("x")).contains("artifactType"));
        assert!(bad(&|m| m["schemaVersion"] = json!(1)).contains("artifactType"));
        assert!(bad(&|m| m["layers"] = json!([])).contains("no metadata"));
        assert!(bad(&|m| m["layers"][0]["digest"] = json!("sha512:00")).contains("no digest"));
        assert!(bad(&|m| m["layers"][0]["size"] = json!(-1)).contains("invalid value"));
        assert!(bad(&|m| m["layers"][0]["mediaType"] = json!("x")).contains("unknown type"));
        assert!(bad(&|m| m["layers"][0]["annotations"] = json!({})).contains("without ferry.digest"));
        assert!(bad(&|m| m["layers"][1]["annotations"]["ferry.pack"] = json!("zz")).contains("is no digest"));
        assert!(bad(&|m| m["layers"][2]["size"] = json!(u64::MAX)).contains("a part of"));
        assert!(bad(&|m| m["layers"][2]["mediaType"] = json!(PACKED_PART_TYPE)).contains("not a number"));
        assert!(bad(&|m| _ = m["layers"].as_array_mut().unwrap().remove(1)).contains("no index"));
        for twice in [0, 1] {
            assert!(
                bad(&|m| {
                    let again = m["layers"][twice].clone();
                    m["layers"].as_array_mut().unwrap().push(again);
                })
                .contains("two")
            );
        }
    }
}
