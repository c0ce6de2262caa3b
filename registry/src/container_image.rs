//! The layers of a container image one by one, for engines that stack them.

use std::path::Path;
use std::sync::Arc;

use ferry_image::{BuildLayersError, Digest, LayerError, Store, build_layer};
use serde::Deserialize;

use crate::container::{CONFIG_BYTES_MAX, Container, ContainerLayer};
use crate::error::{Error, Result};
use crate::layers::{TABLES_MEMORY_MAX, fetch_blob, read_table, table_slot};
use crate::manifest::{Blob, Sha256};
use crate::remote::{Document, Remote};

/// The annotation of stargz's converter with the length of the unpacked archive.
const DIFF_BYTES_KEY: &str = "io.containers.estargz.uncompressed-size";

/// The part of a configuration that concerns layers.
#[derive(Deserialize)]
struct Configuration {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

/// A container image in a registry, whose manifest is known.
#[derive(Debug)]
pub struct ContainerImage {
    remote: Arc<Remote>,
    container: Box<Container>,
    layers: Vec<StackedLayer>,
}

/// A layer of a container image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackedLayer {
    /// The digest of its blob.
    pub blob: Sha256,
    /// The length of its blob.
    pub bytes: u64,
    /// The digest of its table of contents, if the manifest names one.
    pub toc: Option<Sha256>,
    /// The digest of the unpacked archive, as the configuration says. Only a program that unpacks the layer can check it.
    pub diff_id: Sha256,
    /// The length of the unpacked archive, if the manifest names it.
    pub diff_bytes: Option<u64>,
    /// Whether it is packed by zstd, and by gzip otherwise.
    pub is_zstd: bool,
}

impl ContainerImage {
    /// Fetches the manifest and the configuration. `None`: the reference names an image of Ferry's.
    ///
    /// # Errors
    ///
    /// The registry is not reachable, or its data are wrong.
    pub fn find(remote: &Arc<Remote>) -> Result<Option<Self>> {
        let (Document::Container(container), _) = remote.find()? else { return Ok(None) };
        let invalid = |reason: String| Error::Container { name: remote.reference().to_string(), reason };
        let bytes = remote.read_all(container.config, CONFIG_BYTES_MAX)?;
        let layers = stacked(&container.layers, &bytes).map_err(invalid)?;
        Ok(Some(Self { remote: Arc::clone(remote), container, layers }))
    }

    /// Returns the layers, from the lowest to the highest.
    pub fn layers(&self) -> &[StackedLayer] {
        &self.layers
    }

    /// Fetches the table of contents of a layer, and makes an image of it for overlayfs to stack. Its files stay in the registry.
    /// `output` appears when it is complete. Returns the image's digest.
    ///
    /// # Errors
    ///
    /// The table is missing, wrong or cannot be fetched; or the image cannot be written.
    pub fn pull_layer(&self, number: usize, output: &Path, store: &Path) -> Result<Digest> {
        let named = self.remote.reference().to_string();
        let refused = |reason: String| Error::Container {
            name: named.clone(),
            reason: format!("layer {} of {}: {reason}", number + 1, self.layers.len()),
        };
        let _slot = table_slot();
        let ContainerLayer { blob, .. } = self.layer(number)?;
        let table =
            self.layer(number)?.table().and_then(|table| table.fetch(&|range| read_table(&self.remote, *blob, &range)));
        let layer = table.map_err(|error| match error {
            LayerError::Refused(reason) => refused(reason),
            LayerError::Read(error) => match error.downcast::<Error>() {
                Ok(error) => error,
                Err(error) => Error::Sink(error),
            },
        })?;
        if layer.memory_bytes() > TABLES_MEMORY_MAX {
            return Err(refused(format!("its table of contents takes more than {TABLES_MEMORY_MAX} bytes of memory")));
        }
        build_layer(&layer, output, &Store::create(store)?).map_err(|error| match error {
            BuildLayersError::Refused(reason) => refused(reason),
            BuildLayersError::Image(error) => error.into(),
        })
    }

    fn layer(&self, number: usize) -> Result<&ContainerLayer> {
        let none = || Error::NoImage(format!("layer {} of {}", number + 1, self.remote.reference()));
        self.container.layers.get(number).ok_or_else(none)
    }
}

/// Fetches the whole blob of a layer to a new file, and verifies it. No manifest is needed.
///
/// # Errors
///
/// It cannot be fetched or written, or is damaged.
pub fn fetch_layer(remote: &Remote, sha256: Sha256, bytes: u64, output: &Path) -> Result<()> {
    fetch_blob(remote, Blob { sha256, bytes }, output, &|_| {})
}

/// Joins the layers of a manifest with those of a configuration.
fn stacked(layers: &[ContainerLayer], configuration: &[u8]) -> std::result::Result<Vec<StackedLayer>, String> {
    let Configuration { rootfs: RootFs { diff_ids } } =
        serde_json::from_slice(configuration).map_err(|error| format!("its configuration, line {}", error.line()))?;
    if diff_ids.len() != layers.len() {
        return Err(format!("it has {} layers, and its configuration names {}", layers.len(), diff_ids.len()));
    }
    let join = |(layer, diff_id): (&ContainerLayer, &String)| {
        let known = diff_id.strip_prefix("sha256:").and_then(Sha256::from_hex);
        Ok(StackedLayer {
            blob: layer.blob.sha256,
            bytes: layer.blob.bytes,
            // A wrong annotation is an error when the layer is pulled.
            toc: layer.table().ok().map(|table| Sha256(*table.toc())),
            diff_id: known.ok_or("its configuration names a layer by no digest by SHA-256")?,
            diff_bytes: layer.annotation(DIFF_BYTES_KEY).and_then(|bytes| bytes.parse().ok()),
            is_zstd: layer.is_zstd(),
        })
    };
    layers.iter().zip(&diff_ids).map(join).collect()
}
