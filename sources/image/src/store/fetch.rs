//! The source of missing packs and objects.

use std::ops::Range;
use std::sync::Arc;
use std::{fmt, io};

use crate::format::digest::{DIGEST_BYTES, Digest};

/// Receives bytes in order. After an error it receives no more.
pub type ByteSink<'a> = dyn FnMut(&[u8]) -> io::Result<()> + 'a;

/// Fetches the bytes of missing packs, which are verified afterwards.
///
/// The objects of a composefs image form such a pack without an index: concatenated in the order of
/// [`crate::file_objects`], and named by the image's digest.
///
/// A sink that refuses damaged data returns [`io::ErrorKind::InvalidData`]. If the data came from one of several servers, the error is then of the
/// kind [`io::ErrorKind::Interrupted`], and the next call asks another one.
pub trait Fetch: fmt::Debug + Send + Sync {
    /// Returns the index of a pack.
    ///
    /// # Errors
    ///
    /// It is not available, or longer than `bytes_max`.
    fn index(&self, pack: Digest, bytes_max: u64) -> io::Result<Vec<u8>>;

    /// Passes a range of a pack to `sink`, in order and each byte once.
    ///
    /// # Errors
    ///
    /// It is not available, or the error of `sink`.
    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()>;

    /// Passes a range of a container's layer to `sink`, in order and each byte once. The layer's blob has this SHA-256
    /// digest and this length.
    ///
    /// # Errors
    ///
    /// It is not available, also because only whole blobs are, or the error of `sink`.
    fn blob(
        &self,
        sha256: [u8; DIGEST_BYTES],
        bytes: u64,
        range: Range<u64>,
        sink: &mut ByteSink<'_>,
    ) -> io::Result<()> {
        let _ = (sha256, bytes, range, sink);
        Err(io::ErrorKind::NotFound.into())
    }
}

/// How a store obtains missing objects.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Their source.
    pub from: Arc<dyn Fetch>,
    /// How many bytes after a read object may be fetched together with it.
    pub ahead_bytes: u64,
    /// The maximum size of the image's incomplete packs in bytes; the least recently used objects are evicted first.
    pub cache_bytes: Option<u64>,
}

/// The maximum number of servers that are asked for a range, if all of them send damaged data.
pub(crate) const SERVERS_MAX: usize = 4;
/// The maximum size of a request of [`Objects::fetch_all`] in bytes; a larger object is fetched alone.
pub(crate) const RUN_BYTES_MAX: u64 = 4 << 20;
/// The same, of a server that is far.
pub(crate) const FAR_RUN_BYTES_MAX: u64 = 32 << 20;
