//! The documents of container images: an index of several platforms, and the manifest of one image.

use std::collections::HashMap;

use ferry_image::{LayerError, LayerRef};
use serde::Deserialize;

use crate::manifest::{Blob, MANIFEST_TYPE, Sha256, excerpt};

/// The maximum number of layers; overlayfs allows 500.
const LAYERS_MAX: usize = 500;
/// The maximum configuration in bytes; those of large images have about 50 KB.
pub(crate) const CONFIG_BYTES_MAX: u64 = 8 << 20;
/// Set for a manifest whose layers are compressed by zstd, beside another one of the same image.
const ZSTD_KEY: &str = "io.github.containers.compression.zstd";

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: Option<HashMap<String, String>>,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Platform {
    os: String,
    architecture: String,
    variant: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    media_type: Option<String>,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

impl Descriptor {
    fn blob(&self) -> Result<Blob, String> {
        let sha256 = self.digest.strip_prefix("sha256:").and_then(Sha256::from_hex);
        let sha256 = sha256.ok_or_else(|| format!("{:?} is no digest by SHA-256", excerpt(&self.digest)))?;
        Ok(Blob { sha256, bytes: self.size })
    }

    /// The variant of the architecture, if not all of its machines have it.
    fn special_variant(&self) -> Option<&str> {
        let platform = self.platform.as_ref()?;
        let variant = platform.variant.as_deref().filter(|variant| !variant.is_empty())?;
        let is_common = matches!((&*platform.architecture, variant), ("amd64", "v1") | ("arm64", "v8" | "8"));
        (!is_common).then_some(variant)
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(key).map(String::as_str)
    }
}

/// A layer of a container image.
#[derive(Clone, Debug)]
pub(crate) struct ContainerLayer {
    pub blob: Blob,
    descriptor: Descriptor,
}

impl ContainerLayer {
    /// Returns how its table of contents is found and proved.
    pub(crate) fn table(&self) -> Result<LayerRef, LayerError> {
        let Descriptor { media_type, .. } = &self.descriptor;
        LayerRef::parse(self.blob.sha256.0, self.blob.bytes, media_type, |key| self.descriptor.annotation(key))
    }

    pub(crate) fn annotation(&self, key: &str) -> Option<&str> {
        self.descriptor.annotation(key)
    }

    pub(crate) fn is_zstd(&self) -> bool {
        self.descriptor.media_type.ends_with("zstd")
    }
}

/// A container image for one platform.
#[derive(Clone, Debug)]
pub(crate) struct Container {
    /// The manifest, as the registry has it.
    pub bytes: Vec<u8>,
    /// Its digest.
    pub manifest: Sha256,
    pub media_type: String,
    pub config: Blob,
    /// From the lowest to the highest.
    pub layers: Vec<ContainerLayer>,
}

/// A document of a container image.
pub(crate) enum Found {
    Container(Box<Container>),
    /// An index; the manifest for this machine has this digest.
    Index(Sha256),
}

/// Parses the manifest of a container image, or an index.
///
/// # Errors
///
/// What is wrong with it.
pub(crate) fn parse(bytes: Vec<u8>) -> Result<Found, String> {
    // A list would be taken for the fields in their order.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err("it is no JSON object".into());
    }
    let document: Document = serde_json::from_slice(&bytes).map_err(|error| excerpt(&error.to_string()))?;
    if let Some(manifests) = document.manifests {
        return pick(&manifests).map(Found::Index);
    }
    let config = document.config.ok_or("it has no configuration")?.blob()?;
    if document.layers.len() > LAYERS_MAX {
        return Err(format!("it has more than {LAYERS_MAX} layers"));
    }
    let layer = |descriptor: Descriptor| Ok(ContainerLayer { blob: descriptor.blob()?, descriptor });
    let layers = document.layers.into_iter().map(layer).collect::<Result<Vec<_>, String>>()?;
    let media_type = document.media_type.unwrap_or_else(|| MANIFEST_TYPE.into());
    Ok(Found::Container(Box::new(Container { manifest: Sha256::of(&bytes), bytes, media_type, config, layers })))
}

/// Picks the manifest for this machine.
fn pick(manifests: &[Descriptor]) -> Result<Sha256, String> {
    let architecture = ferry_image::architecture_here();
    let is_for = |found: &&Descriptor| match &found.platform {
        Some(platform) => (platform.os.as_str(), platform.architecture.as_str()) == ("linux", architecture),
        None => manifests.len() == 1,
    };
    let mut fitting: Vec<&Descriptor> = manifests.iter().filter(is_for).collect();
    let variants: Vec<&str> = fitting.iter().filter_map(|found| found.special_variant()).collect();
    if !fitting.is_empty() && variants.len() == fitting.len() {
        let variants = excerpt(&variants.join(", "));
        return Err(format!(
            "it has images for the variants {variants} of linux/{architecture} only: name one by @sha256:"
        ));
    }
    fitting.retain(|found| found.special_variant().is_none());
    // Of two compressions, zstd may have a table of contents.
    fitting.sort_by_key(|found| found.annotation(ZSTD_KEY) != Some("true"));
    let found = fitting.first().ok_or_else(|| {
        format!("it has no image for linux/{architecture}: name one of its images by @sha256:, if it has another one")
    })?;
    Ok(found.blob()?.sha256)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use serde_json::json;

    use super::*;

    fn digest(digit: &str) -> String {
        format!("sha256:{}", digit.repeat(64))
    }

    #[test]
    fn the_image_for_this_machine_is_picked_and_zstd_before_gzip() {
        let Ok(Found::Index(here)) =
            parse(json!({"manifests": [{"digest": digest("1"), "size": 1}]}).to_string().into())
        else {
            panic!("one without a platform is taken");
        };
        assert_eq!(here.to_string(), "1".repeat(64));
        let arch = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
        let entry = |digit: &str, arch: &str, zstd: bool| {
            let annotations = if zstd { json!({ZSTD_KEY: "true"}) } else { json!(null) };
            json!({"digest": digest(digit), "size": 1, "annotations": annotations,
                "platform": {"os": "linux", "architecture": arch}})
        };
        let entries = json!({"manifests": [
            entry("2", "s390x", false), entry("3", arch, false), entry("4", arch, true), entry("5", "unknown", false)]});
        let Ok(Found::Index(found)) = parse(entries.to_string().into()) else { panic!("there is one") };
        assert_eq!(found.to_string(), "4".repeat(64));
        // Not all machines of an architecture are alike.
        let special = |digit: &str, variant: &str| {
            let mut special = entry(digit, arch, true);
            special["platform"]["variant"] = variant.into();
            special
        };
        let common = if cfg!(target_arch = "x86_64") { "v1" } else { "v8" };
        for plain in [entry("6", arch, false), special("6", common)] {
            let entries = json!({"manifests": [special("7", "v3"), plain]});
            let Ok(Found::Index(found)) = parse(entries.to_string().into()) else { panic!("there is one") };
            assert_eq!(found.to_string(), "6".repeat(64));
        }
        let Err(error) = parse(json!({"manifests": [special("7", "v3")]}).to_string().into()) else { panic!("none") };
        assert!(error.contains("for the variants v3 of linux/"), "{error}");
        let none = json!({"manifests": [entry("2", "s390x", false)]});
        let Err(error) = parse(none.to_string().into()) else { panic!("there is none") };
        assert!(error.contains("no image for linux/"), "{error}");
    }

    #[test]
    fn documents_that_are_wrong_are_refused() {
        for (document, expected) in [
            (json!({}), "no configuration"),
            (json!([null, null, {"digest": digest("1"), "size": 1}]), "no JSON object"),
            (json!({"config": {"digest": "sha512:00", "size": 1}}), "no digest by SHA-256"),
            (json!({"config": {"digest": digest("1"), "size": -1}}), "invalid value"),
            (
                json!({"config": {"digest": digest("1"), "size": 1},
                "layers": vec![json!({"digest": digest("1"), "size": 1}); 501]}),
                "more than 500 layers",
            ),
        ] {
            let Err(error) = parse(document.to_string().into()) else { panic!("{expected}") };
            assert!(error.contains(expected), "{error}");
        }
    }
}
