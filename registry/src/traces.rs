//! Lists of the files that the start of a container image needs, stored beside it as referrers. Nothing proves them, and nothing needs to:
//! they decide the order of requests.

use std::io::{Cursor, ErrorKind, Write};
use std::path::Path;
use std::time::SystemTime;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::files::{LIST_BYTES_MAX, list_beside, parent_dir, with_path};
use crate::http::Upload;
use crate::manifest::{Blob, CREATED_KEY, EMPTY, EMPTY_TYPE, MANIFEST_TYPE, Sha256, excerpt};
use crate::reference::{Reference, Version};
use crate::remote::{Document, Remote};

/// The type of a manifest with a list, and of the list.
const TRACE_TYPE: &str = "application/vnd.ferry.trace.v1";

#[derive(Deserialize)]
struct Descriptor {
    digest: String,
    #[serde(default)]
    size: u64,
    #[serde(default, rename = "artifactType")]
    artifact_type: Option<String>,
    #[serde(default)]
    annotations: Option<std::collections::HashMap<String, String>>,
}

impl Descriptor {
    fn sha256(&self) -> Option<Sha256> {
        self.digest.strip_prefix("sha256:").and_then(Sha256::from_hex)
    }

    fn created(&self) -> u64 {
        let created = self.annotations.as_ref().and_then(|all| all.get(CREATED_KEY)?.parse().ok());
        created.unwrap_or_default()
    }
}

/// Stores a list beside a container image; returns the digest of its manifest. With `expected`, the image must have a manifest with these
/// digits.
///
/// # Errors
///
/// The reference names another image or none, the list is too long, or the server refuses a request or is not reachable.
pub fn push_trace(remote: &Remote, expected: Option<&str>, list: &[u8]) -> Result<Sha256> {
    let refused = |reason: String| Error::Container { name: remote.reference().to_string(), reason };
    let Document::Container(container) = remote.find()?.0 else {
        return Err(refused(
            "it is an image of Ferry, of which the build has an order (ferry image build --order-from)".into(),
        ));
    };
    let subject = container.manifest;
    if let Some(expected) = expected.filter(|expected| *expected != subject.to_string()) {
        return Err(refused(format!("its manifest is sha256:{subject}, the container's is sha256:{expected}")));
    }
    let bytes = list.len() as u64;
    if bytes > LIST_BYTES_MAX {
        return Err(refused(format!("the list has {bytes} bytes; the maximum is {LIST_BYTES_MAX}")));
    }
    let put = |bytes: &[u8], kind: &str| -> Result<Value> {
        let blob = Blob { sha256: Sha256::of(bytes), bytes: bytes.len() as u64 };
        remote.put(blob, &mut Upload { reader: &mut Cursor::new(bytes), bytes: blob.bytes })?;
        Ok(json!({"mediaType": kind, "digest": format!("sha256:{}", blob.sha256), "size": blob.bytes}))
    };
    let annotations = json!({CREATED_KEY: now().to_string()});
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": TRACE_TYPE,
        "config": put(EMPTY, EMPTY_TYPE)?, "layers": [put(list, TRACE_TYPE)?], "annotations": annotations,
        "subject": {"mediaType": container.media_type, "digest": format!("sha256:{subject}"), "size": container.bytes.len()}});
    let manifest = manifest.to_string();
    let own = Sha256::of(manifest.as_bytes());
    let entry = json!({"mediaType": MANIFEST_TYPE, "digest": format!("sha256:{own}"), "size": manifest.len(),
        "artifactType": TRACE_TYPE, "annotations": annotations});
    remote.put_referrer(subject, manifest.as_bytes(), &entry)?;
    Ok(own)
}

/// Returns the time in seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Fetches the newest list that is stored beside a container image, to the place beside `image`; returns whether there is one.
///
/// # Errors
///
/// The server is not reachable, or its response is invalid.
pub fn pull_trace(remote: &Remote, container: &Reference, image: &Path) -> Result<bool> {
    #[derive(Deserialize)]
    struct List {
        manifests: Vec<Descriptor>,
    }
    #[derive(Deserialize)]
    struct Manifest {
        layers: Vec<Descriptor>,
        subject: Option<Descriptor>,
    }
    let Version::Digest(subject) = container.version else { return Ok(false) };
    let invalid = |reason: String| Error::Container {
        name: remote.reference().to_string(),
        reason: format!("its list of files to fetch first: {reason}"),
    };
    let parsed = |error: serde_json::Error| invalid(excerpt(&error.to_string()));
    let Some(list) = remote.referrers(subject, TRACE_TYPE)? else { return Ok(false) };
    let List { manifests } = serde_json::from_slice(&list).map_err(parsed)?;
    let traces = manifests.iter().filter(|entry| entry.artifact_type.as_deref() == Some(TRACE_TYPE));
    let Some(newest) = traces.max_by_key(|entry| entry.created()).and_then(Descriptor::sha256) else {
        return Ok(false);
    };
    let manifest: Manifest = serde_json::from_slice(&remote.manifest_of(newest)?).map_err(parsed)?;
    if manifest.subject.and_then(|found| found.sha256()) != Some(subject) {
        return Err(invalid("it is of another image".into()));
    }
    let layer = manifest.layers.first().and_then(|layer| Some(Blob { sha256: layer.sha256()?, bytes: layer.size }));
    let text = remote.read_all(layer.ok_or_else(|| invalid("it is not a trace list".into()))?, LIST_BYTES_MAX)?;
    write_beside(image, &text, true)?;
    Ok(true)
}

/// Writes the list of an image. One that is there is replaced, or stays.
pub(crate) fn write_beside(image: &Path, text: &[u8], replaces: bool) -> Result<()> {
    let list = list_beside(image);
    let mut new = with_path("create a file beside", image, tempfile::NamedTempFile::new_in(parent_dir(image)))?;
    with_path("write to", &list, new.write_all(text))?;
    let created = match replaces {
        true => new.persist(&list).map_err(|error| error.error),
        false => match new.persist_noclobber(&list).map_err(|error| error.error) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
            created => created,
        },
    };
    with_path("create", &list, created.map(drop))
}
