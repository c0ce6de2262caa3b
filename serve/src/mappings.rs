//! SETUPMAPPING and REMOVEMAPPING (DAX).

use std::ops::Range;

use ferry_state::MappedFile;
use ferry_vfs::{Ino, Result, SessionId};
use ferry_wire::fuse::InitFlags;

/// The INIT flags of a client that has a DAX window.
pub(crate) const MAPPING_FLAGS: InitFlags = InitFlags::MAP_ALIGNMENT.union(InitFlags::HAS_INODE_DAX);

/// The range of a whole file.
pub(crate) const WHOLE: Range<u64> = 0..u64::MAX;

/// Sends the reply to a request.
pub type MappingReply = Box<dyn FnOnce(Result<()>) + Send>;

/// Maps files into a window of the client's memory, which the client reads and writes without requests (FUSE
/// SETUPMAPPING and REMOVEMAPPING). Requests are executed one after another, in order, and no call waits for them. A
/// reply may be sent before the call returns.
pub trait Mappings: Send + Sync {
    /// Whether this client has a window. Called at INIT.
    fn is_open(&self) -> bool;

    /// Whether a client with per-inode DAX uses the window for a regular file of this many bytes (`FUSE_ATTR_DAX`).
    fn takes(&self, file_bytes: u64) -> bool;

    /// Maps a part of a file.
    fn map(&self, mapping: Mapping, reply: MappingReply);

    /// Unmaps these ranges of the window: offsets and lengths.
    fn unmap(&self, by: SessionId, ranges: Vec<(u64, u64)>, reply: MappingReply);

    /// Unmaps an inode that the client has forgotten.
    fn forget(&self, by: SessionId, ino: Ino);

    /// Synchronizes a part of the file (offsets) with the window where the mapping does not do so itself, and adapts
    /// the window to a new size of the file.
    ///
    /// # Errors
    /// Those of reading the file, and of writing to it.
    fn sync(&self, ino: Ino, part: Range<u64>) -> Result<()>;

    /// Synchronizes a whole file before its attributes are sent, unless they are the same as the last time.
    ///
    /// # Errors
    /// As for [`Self::sync`].
    fn sync_if_changed(&self, ino: Ino) -> Result<()>;

    /// Writes back what the client has stored in the window, before an operation that uses the file itself.
    ///
    /// # Errors
    /// As for [`Self::sync`].
    fn writeback(&self, ino: Ino, part: Range<u64>) -> Result<()>;

    /// Writes back all files.
    ///
    /// # Errors
    /// A file cannot be written; the others are written back nevertheless.
    fn writeback_all(&self) -> Result<()>;

    /// Takes over the mappings of the previous server for a restored session. Must be the first call.
    fn adopt(&self, by: SessionId, mapped: Vec<MappedFile>);

    /// Ends all mappings: the client's session has ended.
    fn clear(&self, reply: MappingReply);
}

/// A mapping request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The client's session.
    pub by: SessionId,
    /// The file.
    pub ino: Ino,
    /// First byte in the file.
    pub offset: u64,
    /// Length.
    pub len: u64,
    /// First byte in the window.
    pub window_offset: u64,
    /// The client will write there.
    pub write: bool,
    /// The client has the file open for writing. Mapped writable at once, the range need not be mapped again for a
    /// write.
    pub may_write: bool,
}
