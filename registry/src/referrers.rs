//! Lists of the manifests that refer to another one: of the registry, or, where it keeps none, in an index with a tag
//! that follows from the digest of that manifest.
//!
//! Specification: OCI Distribution Specification 1.1, "Listing Referrers", "Referrers Tag Schema".

use std::collections::BTreeMap;

use ferry_image::Digest;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::manifest::{
    ARTIFACT_TYPE, Blob, CREATED_KEY, DIGEST_KEY, FIRST_BYTES_MAX, FIRST_KEY, FIRST_MAX, MANIFEST_TYPE, Sha256,
    TREE_KEY, excerpt,
};

/// The media type of an index.
pub(crate) const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";

/// An image that was made of a container image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Converted {
    pub manifest: Sha256,
    /// The digest of its tree.
    pub tree: Option<Digest>,
    /// The digest of the image.
    pub image: Option<Digest>,
    /// When it was made, in seconds since 1970; 0 if the list does not say it.
    pub created: u64,
    /// Blobs that a mount needs first, as far as the list says.
    pub first: Vec<Blob>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    digest: String,
    #[serde(default)]
    artifact_type: Option<String>,
    #[serde(default)]
    annotations: Option<std::collections::HashMap<String, String>>,
}

/// Returns the tag of the list of referrers.
pub(crate) fn tag(subject: Sha256) -> String {
    format!("sha256-{subject}")
}

/// Returns the entry of a manifest in a list.
pub(crate) fn entry(manifest: Sha256, bytes: u64, annotations: &BTreeMap<String, String>) -> Value {
    json!({"mediaType": MANIFEST_TYPE, "digest": format!("sha256:{manifest}"), "size": bytes,
        "artifactType": ARTIFACT_TYPE, "annotations": annotations})
}

/// Reads the blobs that a mount needs first. What is wrong is left out: they are found in the manifest, too.
fn first_blobs(text: &str) -> Vec<Blob> {
    let blob = |text: &str| {
        let (digits, bytes) = text.split_once(':')?;
        Some(Blob { sha256: Sha256::from_hex(digits)?, bytes: bytes.parse().ok()? })
    };
    text.split(',').filter_map(blob).filter(|blob| blob.bytes <= FIRST_BYTES_MAX).take(FIRST_MAX).collect()
}

fn document(list: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(list).map_err(|error| excerpt(&error.to_string()))
}

fn entries(list: &mut Value) -> Result<&mut Vec<Value>, String> {
    list.get_mut("manifests").and_then(Value::as_array_mut).ok_or_else(|| "it has no manifests".into())
}

/// Joins the pages of a list; `None` without any.
pub(crate) fn join(pages: Vec<Vec<u8>>) -> Result<Option<Vec<u8>>, String> {
    let mut pages = pages.into_iter();
    let Some(first) = pages.next() else { return Ok(None) };
    if pages.len() == 0 {
        return Ok(Some(first));
    }
    let mut list = document(&first)?;
    let all = entries(&mut list)?;
    for page in pages {
        all.append(entries(&mut document(&page)?)?);
    }
    Ok(Some(list.to_string().into_bytes()))
}

/// Adds an entry to a list; `None` if it is there already.
pub(crate) fn add(list: Option<&[u8]>, entry: &Value) -> Result<Option<Vec<u8>>, String> {
    let empty = || Ok(json!({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}));
    let mut list = list.map_or_else(empty, document)?;
    let manifests = entries(&mut list)?;
    if manifests.iter().any(|known| known.get("digest") == entry.get("digest")) {
        return Ok(None);
    }
    manifests.push(entry.clone());
    Ok(Some(list.to_string().into_bytes()))
}

/// Returns the images of Ferry in a list.
pub(crate) fn parse(list: &[u8]) -> Result<Vec<Converted>, String> {
    #[derive(Deserialize)]
    struct List {
        manifests: Vec<Entry>,
    }
    let list: List = serde_json::from_slice(list).map_err(|error| excerpt(&error.to_string()))?;
    let is_ours = |entry: &&Entry| entry.artifact_type.as_deref() == Some(ARTIFACT_TYPE);
    let converted = |entry: &Entry| {
        let annotation = |key: &str| entry.annotations.as_ref()?.get(key).map(String::as_str);
        let digest = |key: &str| Digest::parse(annotation(key)?.as_bytes());
        let manifest = Sha256::from_hex(entry.digest.strip_prefix("sha256:")?)?;
        let first = annotation(FIRST_KEY).map(first_blobs).unwrap_or_default();
        let created = annotation(CREATED_KEY).and_then(|created| created.parse().ok()).unwrap_or_default();
        Some(Converted { manifest, tree: digest(TREE_KEY), image: digest(DIGEST_KEY), created, first })
    };
    Ok(list.manifests.iter().filter(is_ours).filter_map(converted).collect())
}

/// Returns the newest image of those whose tree is known; of several the first.
pub(crate) fn newest(all: &[Converted]) -> Option<&Converted> {
    all.iter().rev().filter(|image| image.tree.is_some()).max_by_key(|image| image.created)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use ferry_image::Algorithm;

    use super::*;

    #[test]
    fn the_newest_image_is_used() {
        let tree = Some(Digest::new(Algorithm::Tree, [1; 32]));
        let image = |(byte, tree, created)| Converted {
            manifest: Sha256([byte; 32]),
            tree,
            image: None,
            created,
            first: Vec::new(),
        };
        let newest = |all: &[_]| {
            let all: Vec<_> = all.iter().copied().map(image).collect();
            super::newest(&all).map(|image| image.manifest.0[0])
        };
        assert_eq!(newest(&[]), None);
        assert_eq!(newest(&[(1, None, 9), (2, tree, 0), (3, tree, 0)]), Some(2));
        assert_eq!(newest(&[(1, tree, 0), (2, tree, 5), (3, tree, 6), (4, tree, 6)]), Some(3));
    }

    #[test]
    fn lists_keep_concurrent_additions() {
        let digest = |algorithm, byte| Digest::new(algorithm, [byte; 32]);
        let (tree, image) = (digest(Algorithm::Tree, 1), digest(Algorithm::Blake3, 2));
        let blob = |byte, bytes| Blob { sha256: Sha256([byte; 32]), bytes };
        let text = |blob: Blob| format!("{}:{}", blob.sha256, blob.bytes);
        let first = ["x".into(), text(blob(7, 9)), text(blob(8, FIRST_BYTES_MAX + 1)), "00:1".into(), text(blob(8, 1))];
        let first = [&first[..], &vec![text(blob(9, 2)); 9]].concat().join(",");
        let annotations = [
            (DIGEST_KEY, image.to_string()),
            (TREE_KEY, tree.to_string()),
            (FIRST_KEY, first),
            (CREATED_KEY, "5".into()),
        ];
        let annotations = annotations.map(|(key, value)| (key.to_owned(), value)).into();
        let (one, two) = (entry(Sha256([3; 32]), 5, &annotations), entry(Sha256([4; 32]), 5, &annotations));
        let signature = json!({"manifests": [{"digest": "sha256:00", "artifactType": "x", "other": 1}], "more": true});
        let list = add(Some(signature.to_string().as_bytes()), &one).unwrap().unwrap();
        let list = add(Some(&list), &two).unwrap().unwrap();
        assert_eq!(add(Some(&list), &one).unwrap(), None);
        let first = vec![blob(7, 9), blob(8, 1), blob(9, 2)];
        let converted = |byte| Converted {
            manifest: Sha256([byte; 32]),
            tree: Some(tree),
            image: Some(image),
            created: 5,
            first: first.clone(),
        };
        assert_eq!(parse(&list).unwrap(), [converted(3), converted(4)]);
        let found: Value = serde_json::from_slice(&list).unwrap();
        assert_eq!((&found["manifests"][0]["other"], &found["more"]), (&json!(1), &json!(true)));
        assert_eq!(parse(&add(None, &one).unwrap().unwrap()).unwrap(), [converted(3)]);
        for wrong in [&b"\xff"[..], b"{}", b"[]", b"{\"manifests\": 1}"] {
            assert!(add(Some(wrong), &one).is_err() && parse(wrong).is_err());
        }
    }
}
