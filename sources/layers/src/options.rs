//! How layers are found and fetched.

use std::time::Duration;

/// How layers are found and fetched.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether registries on other machines may be contacted without encryption.
    pub plain_http: bool,
    /// Bytes that are fetched together with a chunk.
    pub ahead_bytes: u64,
    /// How long a lookup may take. Later the layer does not exist, and is found by a later lookup.
    pub lookup_timeout: Duration,
    /// The maximum number of layers that are open at once, at least 4.
    pub layers_max: usize,
    /// The maximum memory of open layers, in bytes: of their images, and of the indexes of their packs, which are about as long.
    pub memory_bytes_max: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            plain_http: false,
            ahead_bytes: 256 << 10,
            lookup_timeout: Duration::from_secs(20),
            layers_max: 256,
            memory_bytes_max: 1 << 30,
        }
    }
}
