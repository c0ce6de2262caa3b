//! Digests of bytes in memory.

use crate::format::digest::{Algorithm, Digest};
use crate::format::verity::Hasher;

impl Algorithm {
    /// The digest of bytes that are in memory.
    pub fn of(self, bytes: &[u8]) -> Digest {
        match self {
            Self::Blake3 | Self::Tree => Digest::new(self, blake3::hash(bytes).into()),
            Self::Verity => {
                let mut hasher = Hasher::default();
                hasher.update(bytes);
                hasher.finish()
            }
        }
    }
}
