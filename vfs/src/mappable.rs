//! Files that can be mapped into a client's memory.

use std::sync::Arc;

use crate::{Backing, Caller, Errno, Ino, Piece, Result};

/// A source whose regular files can be mapped into a client's memory, as the DAX window of virtio-fs does
/// ([`FileSystem::mappable`](crate::FileSystem::mappable)). A source implements [`Self::map`] or [`Self::map_pieces`];
/// the other one returns `NOSYS`.
#[allow(unused_variables, reason = "the defaults need none of their arguments")]
pub trait Mappable {
    /// Returns a descriptor of the whole file: the same bytes at the same offsets, open for reading, and for writing too
    /// if `writes`. The file need not be open: Linux refers to it by inode. The descriptor stays valid when the file is
    /// unlinked. The source does not see reads and writes through the mapping. Before a source shortens such a file, it
    /// has the file unmapped from all windows (`shortening` of the crate `ferry-engine`). An inode that is no regular file is
    /// `INVAL`; the other errors are those of `open(2)`.
    fn map(&self, cx: &Caller<'_>, ino: Ino, writes: bool) -> Result<Arc<Backing>> {
        Err(Errno::NOSYS)
    }

    /// Returns the pieces of a part of a file, in order, up to the end of the part or of the file. For sources whose
    /// files never change and have no descriptor as a whole: the client only reads the mapping. `offset`, `len` and
    /// the length of each piece except the last are multiples of 4096 bytes. Called before [`Self::map`]. The default
    /// returns `NOSYS`: the file is mapped by its descriptor. Other errors are those of reading the file.
    fn map_pieces(&self, cx: &Caller<'_>, ino: Ino, offset: u64, len: u64) -> Result<Vec<Piece>> {
        Err(Errno::NOSYS)
    }
}
