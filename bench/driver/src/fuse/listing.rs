//! Decodes directory listings (FUSE protocol 7.45, `fuse_dirent` and `fuse_direntplus`).

use ferry_vfs::{DirItem, Entry, FileType};
use ferry_wire::fuse::Timeouts;
use ferry_wire::fuse::abi::{Dirent, EntryOut};

use super::body::{Body, Malformed, ensure};
use super::reply::entry;

/// The alignment of every entry in bytes (`FUSE_DIRENT_ALIGN`).
const ALIGN: usize = 8;

/// One entry of a listing, as the client decodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Name, type, number, and the offset of the next entry.
    pub item: DirItem<'a>,
    /// The entry of a READDIRPLUS, its timeouts, and whether to use DAX; `None` for READDIR and for entries without an inode
    /// (node ID 0), such as `.` and `..`.
    pub entry: Option<(Entry, Timeouts, bool)>,
}

/// Decodes a listing of READDIR or READDIRPLUS. Ends after the first error.
#[derive(Clone, Debug)]
pub struct DirEntries<'a> {
    body: Body<'a>,
    plus: bool,
}

impl<'a> DirEntries<'a> {
    /// Creates an iterator over the reply to READDIR, or to READDIRPLUS with `plus`.
    pub fn new(bytes: &'a [u8], plus: bool) -> Self {
        Self { body: Body(bytes), plus }
    }

    fn entry(&mut self) -> Result<DirEntry<'a>, Malformed> {
        let before = self.body.0.len();
        let entry_out: Option<EntryOut> = if self.plus { Some(self.body.take()?) } else { None };
        let dirent: Dirent = self.body.take()?;
        let name = self.body.bytes(dirent.namelen as usize)?;
        ensure(!name.is_empty() && !name.iter().any(|byte| matches!(byte, b'/' | 0)), "not a name")?;
        let used = before - self.body.0.len();
        self.body.bytes(used.next_multiple_of(ALIGN) - used)?;
        // The type bits of `st_mode`, shifted.
        ensure(dirent.kind < 16, "an unknown file type")?;
        let kind = FileType::from_raw_mode(dirent.kind << 12);
        let item = DirItem { ino: dirent.ino, next: dirent.off, kind, name };
        let entry = match entry_out {
            Some(out) if out.nodeid != 0 => Some(entry(&out)?),
            _ => None,
        };
        Ok(DirEntry { item, entry })
    }
}

impl<'a> Iterator for DirEntries<'a> {
    type Item = Result<DirEntry<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.body.0.is_empty() {
            return None;
        }
        let entry = self.entry();
        if entry.is_err() {
            self.body.0 = &[];
        }
        Some(entry)
    }
}
