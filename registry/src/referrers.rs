//! Lists of the manifests that refer to another one: of the registry, or, where it keeps none, in an index with a tag
//! that follows from the digest of that manifest.
//!
//! Specification: OCI Distribution Specification 1.1, "Listing Referrers", "Referrers Tag Schema".

use ferry_image::Digest;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::manifest::{ARTIFACT_TYPE, DIGEST_KEY, MANIFEST_TYPE, Sha256, TREE_KEY, excerpt};

/// The media type of an index.
pub(crate) const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";

/// An image that was made of a container image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Converted {
    pub manifest: Sha256,
    /// The digest of its tree.
    pub tree: Option<Digest>,
    /// The digest of the image.
    pub image: Option<Digest>,
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
pub(crate) fn entry(manifest: Sha256, bytes: u64, tree: Digest, image: Digest) -> Value {
    json!({"mediaType": MANIFEST_TYPE, "digest": format!("sha256:{manifest}"), "size": bytes,
        "artifactType": ARTIFACT_TYPE,
        "annotations": {DIGEST_KEY: image.to_string(), TREE_KEY: tree.to_string()}})
}

/// Adds an entry to a list; `None` if it is there already.
pub(crate) fn add(list: Option<&[u8]>, entry: &Value) -> Result<Option<Vec<u8>>, String> {
    let mut list = match list {
        Some(list) => serde_json::from_slice(list).map_err(|error| excerpt(&error.to_string()))?,
        None => json!({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}),
    };
    let manifests = list.get_mut("manifests").and_then(Value::as_array_mut).ok_or("it has no manifests")?;
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
        let digest = |key: &str| Digest::parse(entry.annotations.as_ref()?.get(key)?.as_bytes());
        let manifest = Sha256::from_hex(entry.digest.strip_prefix("sha256:")?)?;
        Some(Converted { manifest, tree: digest(TREE_KEY), image: digest(DIGEST_KEY) })
    };
    Ok(list.manifests.iter().filter(is_ours).filter_map(converted).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use ferry_image::Algorithm;

    use super::*;

    #[test]
    fn lists_keep_what_others_have_added() {
        let digest = |algorithm, byte| Digest::new(algorithm, [byte; 32]);
        let (tree, image) = (digest(Algorithm::Tree, 1), digest(Algorithm::Blake3, 2));
        let (one, two) = (entry(Sha256([3; 32]), 5, tree, image), entry(Sha256([4; 32]), 5, tree, image));
        let signature = json!({"manifests": [{"digest": "sha256:00", "artifactType": "x", "other": 1}], "more": true});
        let list = add(Some(signature.to_string().as_bytes()), &one).unwrap().unwrap();
        let list = add(Some(&list), &two).unwrap().unwrap();
        assert_eq!(add(Some(&list), &one).unwrap(), None);
        let converted = |byte| Converted { manifest: Sha256([byte; 32]), tree: Some(tree), image: Some(image) };
        assert_eq!(parse(&list).unwrap(), [converted(3), converted(4)]);
        let found: Value = serde_json::from_slice(&list).unwrap();
        assert_eq!((&found["manifests"][0]["other"], &found["more"]), (&json!(1), &json!(true)));
        assert_eq!(parse(&add(None, &one).unwrap().unwrap()).unwrap(), [converted(3)]);
        for wrong in [&b"\xff"[..], b"{}", b"[]", b"{\"manifests\": 1}"] {
            assert!(add(Some(wrong), &one).is_err() && parse(wrong).is_err());
        }
    }
}
