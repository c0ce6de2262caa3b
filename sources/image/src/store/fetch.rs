//! Where missing packs and objects come from.

use std::ops::Range;
use std::sync::Arc;
use std::{fmt, io};

use crate::format::digest::Digest;

/// What takes bytes as they come. With an error it wants no more.
pub type ByteSink<'a> = dyn FnMut(&[u8]) -> io::Result<()> + 'a;

/// Where the bytes of packs come from that a store has not got. What comes is proved afterwards.
///
/// Of composefs's objects those of an image are such a pack, without an index: one behind the other, in the order of
/// [`crate::file_objects`], and its name is the image's digest.
pub trait Fetch: fmt::Debug + Send + Sync {
    /// All bytes of a pack's index.
    ///
    /// # Errors
    /// It cannot be had, or is longer than `bytes_max`.
    fn index(&self, pack: Digest, bytes_max: u64) -> io::Result<Vec<u8>>;

    /// Hands over a range of a pack, in order and each byte once.
    ///
    /// # Errors
    /// It cannot be had, or what `sink` said.
    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()>;
}

/// How a store gets what it has not got.
#[derive(Clone, Debug)]
pub struct Missing {
    /// Where from.
    pub from: Arc<dyn Fetch>,
    /// How many bytes may be asked for together with an object that is read: what follows it in its pack.
    pub ahead_bytes: u64,
    /// The most that is kept of the image's incomplete packs, in bytes; what was not used for longest goes first.
    pub cache_bytes: Option<u64>,
}

/// The most that one request of [`Objects::fetch_all`] asks for, in bytes; a larger object is asked for alone.
pub(crate) const RUN_BYTES_MAX: u64 = 4 << 20;
