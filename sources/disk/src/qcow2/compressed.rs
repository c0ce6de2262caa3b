//! Compressed clusters.

use std::io::{self, Read};

use super::shape::{Compression, damaged};

/// The maximum zstd window, larger than any cluster. Without it an image could make zstd allocate 128 MiB.
const ZSTD_WINDOW_BITS_MAX: u32 = 22;

/// Decompresses a cluster; other bytes may follow its compressed data.
pub(super) fn decompress(kind: Compression, compressed: &[u8], cluster: &mut [u8]) -> io::Result<()> {
    let outcome = match kind {
        Compression::Deflate => flate2::read::DeflateDecoder::new(compressed).read_exact(cluster),
        Compression::Zstd => zstd::Decoder::with_buffer(compressed).and_then(|mut decoder| {
            decoder.window_log_max(ZSTD_WINDOW_BITS_MAX)?;
            decoder.read_exact(cluster)
        }),
    };
    outcome.map_err(|error| damaged(format!("a compressed cluster cannot be decompressed: {error}")))
}
