//! How the bytes of files are stored while an image is built: in packs ([`super::pack_writer`]) or as objects ([`super::object_writer`]).

use crate::build::hash_pool::Hashers;
use crate::build::scan::FoundFile;
use crate::build::trace::Trace;
use crate::format::digest::Digest;
use crate::format::error::{Error, Result};
use crate::format::tree::{Content, NodeId, Tree};

/// What a finished writer returns.
pub(crate) struct WriterOutput {
    pub bytes: Vec<u8>,
    /// The digest of the tree, if it differs from the image's.
    pub tree: Option<Digest>,
    /// The packs that the image needs.
    pub packs: Vec<Digest>,
}

/// Why a thread stops reading.
pub(crate) enum Stop {
    /// The build has failed elsewhere.
    Cancelled,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Memory that a thread reads files into.
pub(crate) trait Buffer: Send {
    /// Reads a file. `flush` takes a full buffer and replaces it with an empty one.
    fn read(&mut self, file: &FoundFile, flush: &mut dyn FnMut(&mut Self) -> Result<(), Stop>) -> Result<(), Stop>;
}

/// Stores the bytes of files of one image, and writes it.
pub(crate) trait ContentWriter {
    /// Whether the image has the composefs layout.
    const IS_COMPOSEFS: bool;
    /// The maximum number of files that a thread reads before the next thread's turn.
    const GROUP_FILES_MAX: usize;
    /// The buffer of the threads that read a directory.
    type Buffer: Buffer;

    /// Returns an empty buffer.
    fn new_buffer(&self) -> Self::Buffer;

    /// Returns how many buffers each of `threads` threads has, which bounds the memory of a build.
    fn buffers_per_thread(threads: usize) -> usize;

    /// Stores the contents of a buffer, and empties it. Returns the contents of the files that begin in it.
    fn add_buffer(&mut self, buffer: &mut Self::Buffer) -> Result<Vec<(NodeId, Content)>>;

    /// Stores a file of this length, which `fill` reads in order.
    fn add_file(&mut self, bytes: u64, fill: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<Content>;

    /// Bytes of all files that were added.
    fn data_bytes(&self) -> u64;

    /// Bytes that were not in the store before.
    fn new_bytes(&mut self) -> Result<u64>;

    /// Makes everything durable, and writes the image.
    fn finish(self, tree: Tree, order: Option<&Trace>) -> Result<WriterOutput>;
}

/// Takes the oldest item of a pool with more than `left` items.
pub(super) fn take_hashed<T: Send + 'static>(hashers: &mut Option<Hashers<T>>, left: usize) -> Option<T> {
    hashers.as_mut().filter(|hashers| hashers.len() > left)?.take()
}
