//! Files in a client's memory (DAX).

use ferry_vfs::{Ino, Result, SessionId};

/// Answers a request.
pub type Answer = Box<dyn FnOnce(Result<()>) + Send>;

/// Maps files into a window of the client's memory, where it reads and writes them without asking anybody (FUSE
/// SETUPMAPPING and REMOVEMAPPING). Requests are carried out one after another, in the order in which they come, and no
/// call waits for that. Answers may come before a call returns.
pub trait Mappings: Send + Sync {
    /// Whether this client has a window. Asked at INIT.
    fn is_open(&self) -> bool;

    /// Whether a client that leaves it to us uses the window for a regular file of so many bytes (`FUSE_ATTR_DAX`).
    fn takes(&self, file_bytes: u64) -> bool;

    /// Maps a part of a file.
    fn map(&self, mapping: Mapping, answer: Answer);

    /// Ends the mappings that lie in these ranges of the window: offsets and lengths.
    fn unmap(&self, by: SessionId, ranges: Vec<(u64, u64)>, answer: Answer);

    /// The client has forgotten an inode: it has no use for mappings of it.
    fn forget(&self, by: SessionId, ino: Ino);

    /// Brings what the client has stored in its window into the file, and what the file has got otherwise into the window,
    /// where that does not happen by itself.
    ///
    /// # Errors
    /// Those of writing to the file.
    fn settle(&self, ino: Ino) -> Result<()>;

    /// Brings what the client has stored in its window into the files, of all files.
    ///
    /// # Errors
    /// Those of writing to a file; the others are seen to all the same.
    fn store_all(&self) -> Result<()>;

    /// The client's session has ended: so do all mappings.
    fn clear(&self, answer: Answer);
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
    /// The client has the file open for writing. Mapped for writing from the beginning, it need not be mapped again when the
    /// client first writes to what it has read.
    pub may_write: bool,
}
