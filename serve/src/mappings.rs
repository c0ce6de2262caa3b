//! SETUPMAPPING and REMOVEMAPPING (DAX).

use std::ops::Range;

use ferry_state::MappedFile;
use ferry_vfs::{Ino, Result, SessionId};
use ferry_wire::fuse::InitFlags;

/// What INIT says for a client that has a window.
pub(crate) const MAPPING_FLAGS: InitFlags = InitFlags::MAP_ALIGNMENT.union(InitFlags::HAS_INODE_DAX);

/// All of a file, as a part of it.
pub(crate) const WHOLE: Range<u64> = 0..u64::MAX;

/// Replies to a request.
pub type MappingReply = Box<dyn FnOnce(Result<()>) + Send>;

/// Maps files into a window of the client's memory, where it reads and writes them without asking anybody (FUSE
/// SETUPMAPPING and REMOVEMAPPING). Requests are carried out one after another, in the order in which they come, and no
/// call waits for that. Answers may come before a call returns.
pub trait Mappings: Send + Sync {
    /// Whether this client has a window. Asked at INIT.
    fn is_open(&self) -> bool;

    /// Whether a client that leaves it to us uses the window for a regular file of so many bytes (`FUSE_ATTR_DAX`).
    fn takes(&self, file_bytes: u64) -> bool;

    /// Maps a part of a file.
    fn map(&self, mapping: Mapping, answer: MappingReply);

    /// Ends the mappings that lie in these ranges of the window: offsets and lengths.
    fn unmap(&self, by: SessionId, ranges: Vec<(u64, u64)>, answer: MappingReply);

    /// The client has forgotten an inode: it has no use for mappings of it.
    fn forget(&self, by: SessionId, ino: Ino);

    /// Synchronizes the window and the file, where that does not happen on its own: in this part of the file (offsets),
    /// and where it has become longer or shorter.
    ///
    /// # Errors
    /// Those of reading the file, and of writing to it.
    fn sync(&self, ino: Ino, part: Range<u64>) -> Result<()>;

    /// The same for all of a file of which the client is about to be told the attributes, unless they are those of the last time.
    ///
    /// # Errors
    /// As for [`Self::sync`].
    fn sync_if_changed(&self, ino: Ino) -> Result<()>;

    /// As [`Self::sync`], for somebody who is going to use the file itself: what has not been stored to in the window need not be looked at.
    ///
    /// # Errors
    /// As for [`Self::sync`].
    fn writeback(&self, ino: Ino, part: Range<u64>) -> Result<()>;

    /// The same for all of all files.
    ///
    /// # Errors
    /// Those of writing to a file; the others are seen to all the same.
    fn writeback_all(&self) -> Result<()>;

    /// What the server before this one had mapped for the client, which goes on in this session. To be called before anything else.
    fn adopt(&self, by: SessionId, mapped: Vec<MappedFile>);

    /// The client's session has ended: so do all mappings.
    fn clear(&self, answer: MappingReply);
}

/// What is to be mapped, and where.
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
    /// The client is going to write there.
    pub write: bool,
    /// The client has the file open for writing: mapped for writing from the beginning, it need not be mapped again.
    pub may_write: bool,
}
