//! Options of a store of layers.

use std::time::Duration;

/// Options of a store of layers.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether registries on other machines may be contacted without encryption.
    pub plain_http: bool,
    /// The number of following bytes that are fetched together with a chunk.
    pub ahead_bytes: u64,
    /// The maximum time of a lookup. After it the lookup fails with `ENOENT`; the search continues for later lookups.
    pub lookup_timeout: Duration,
    /// The maximum number of layers that are open at once, at least 4.
    pub layers_max: usize,
    /// The maximum memory of open layers in bytes: their images, and the indexes of their packs, which are about as long.
    pub memory_bytes_max: u64,
    /// How long the blob of a layer is kept after the last read. Engines read it once, when they push or save an image.
    pub blob_lifetime: Duration,
    /// How long after the end of the last use of a layer its data are removed.
    pub removal_delay: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            plain_http: false,
            ahead_bytes: 256 << 10,
            lookup_timeout: Duration::from_secs(20),
            layers_max: 256,
            memory_bytes_max: 1 << 30,
            blob_lifetime: Duration::from_secs(600),
            removal_delay: Duration::from_secs(10),
        }
    }
}
