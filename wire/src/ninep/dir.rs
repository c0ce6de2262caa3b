//! The entries of directory listings (9P2000.L, Rreaddir): `qid[13] offset[8] type[1] name[s]`.

use ferry_vfs::{DirItem, FileType};

use super::numbers::{Qid, QidKind};
use crate::body::Body;
use crate::dirent;

/// Bytes of an entry without its name.
const FIXED_BYTES: usize = Qid::BYTES + 8 + 1 + 2;

/// Returns the size of an entry with this name, in bytes.
pub fn dirent_bytes(name: &[u8]) -> usize {
    FIXED_BYTES + name.len()
}

/// Appends entries to a listing of limited length.
#[derive(Debug)]
pub struct DirWriter<'a> {
    out: &'a mut Vec<u8>,
    end: usize,
}

impl<'a> DirWriter<'a> {
    /// Creates a writer that appends at most `bytes_max` bytes to `out`.
    pub fn new(out: &'a mut Vec<u8>, bytes_max: usize) -> Self {
        let end = out.len().saturating_add(bytes_max);
        Self { out, end }
    }

    /// Returns whether an entry with this name fits.
    pub fn fits(&self, name: &[u8]) -> bool {
        self.end.saturating_sub(self.out.len()) >= dirent_bytes(name)
    }

    /// Appends an entry if it fits, and returns whether it did. The version in its qid is 0 (unknown), because a
    /// listing does not stat the files.
    pub fn push(&mut self, item: &DirItem<'_>) -> bool {
        let Ok(name_bytes) = u16::try_from(item.name.len()) else { return false };
        if !self.fits(item.name) {
            return false;
        }
        self.out.push(QidKind::of(item.kind).0);
        self.out.extend_from_slice(&0_u32.to_le_bytes());
        self.out.extend_from_slice(&item.ino.to_le_bytes());
        self.out.extend_from_slice(&item.next.to_le_bytes());
        self.out.push(dirent::from_file_type(item.kind));
        self.out.extend_from_slice(&name_bytes.to_le_bytes());
        self.out.extend_from_slice(item.name);
        true
    }
}

/// One entry of a listing, for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Which file.
    pub qid: Qid,
    /// The offset of the next entry.
    pub next: u64,
    /// Its type.
    pub kind: FileType,
    /// Its name, unchecked: the client must check it.
    pub name: &'a [u8],
}

/// Iterates over a listing; ends early where it is cut off.
#[derive(Clone, Debug)]
pub struct DirEntries<'a>(Body<'a>);

impl<'a> DirEntries<'a> {
    /// Creates an iterator over the data of an Rreaddir.
    pub fn new(data: &'a [u8]) -> Self {
        Self(Body(data))
    }
}

impl<'a> Iterator for DirEntries<'a> {
    type Item = DirEntry<'a>;

    fn next(&mut self) -> Option<DirEntry<'a>> {
        let b = &mut self.0;
        let (qid, next, kind, bytes) = (b.qid().ok()?, b.u64().ok()?, b.u8().ok()?, b.u16().ok()?);
        let name = b.bytes(bytes.into()).ok()?;
        Some(DirEntry { qid, next, kind: dirent::to_file_type(kind), name })
    }
}
