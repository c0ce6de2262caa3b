//! Directories of an image: sorted blocks of sorted names.

use ferry_vfs::{FileType, Name};

use super::{Data, Image, ImageResult, Inode, Nid, read_at};
use crate::format::erofs::{BLOCK_BYTES, Dirent};
use crate::format::error::Flaw;

/// The type of a character device in a directory.
const STUB_KIND: u8 = 3;
/// The upper limit of entries in a block: each takes at least 13 bytes.
const ENTRIES_MAX: u64 = 1 << 9;

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The name, including `.` and `..`.
    pub name: &'a [u8],
    /// The inode.
    pub nid: Nid,
    /// The file type in the directory (`FT_*`).
    pub kind: u8,
    /// The position after it.
    pub next: u64,
}

impl Image {
    /// Returns the block of a directory at a position, and the number of its valid bytes.
    fn dir_block<'a>(&self, (whole, rest): (&'a [u8], &'a [u8]), number: usize) -> Option<&'a [u8]> {
        let at = number.checked_mul(BLOCK_BYTES)?;
        if at < whole.len() {
            return whole.get(at..whole.len().min(at + BLOCK_BYTES));
        }
        (at == whole.len() && !rest.is_empty()).then_some(rest)
    }

    fn dir_bytes(&self, inode: &Inode) -> ImageResult<(&[u8], &[u8])> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        if inode.kind() != FileType::Directory {
            return Err(flaw("an invalid directory"));
        }
        match self.data(inode)? {
            Data::Near(whole, rest) => Ok((whole, rest)),
            _ => Err(flaw("a directory outside of the image")),
        }
    }

    /// Returns the entries of a directory from a position: 0, or [`Entry::next`]. An error ends the iteration.
    ///
    /// # Errors
    ///
    /// It is not a directory.
    pub fn entries(&self, inode: &Inode, from: u64) -> ImageResult<Entries<'_>> {
        let entries = self.all_entries(inode, from)?;
        Ok(Entries { hides_stubs: self.is_composefs, ..entries })
    }

    /// As [`Self::entries`], with composefs's whiteouts, which overlayfs hides.
    pub(crate) fn all_entries(&self, inode: &Inode, from: u64) -> ImageResult<Entries<'_>> {
        let bytes = self.dir_bytes(inode)?;
        Ok(Entries { image: self, bytes, at: inode.xattrs.0 as u64, next: from, hides_stubs: false })
    }

    fn is_stub(&self, nid: Nid) -> bool {
        self.inode(nid).is_ok_and(|inode| inode.kind() == FileType::CharacterDevice && inode.rdev() == 0)
    }

    /// Finds a name in a directory.
    ///
    /// # Errors
    /// The directory is damaged.
    pub fn lookup(&self, dir: &Inode, name: Name<'_>) -> ImageResult<Option<Nid>> {
        Ok(self.find(dir, name.as_bytes())?.filter(|nid| !(self.is_composefs && self.is_stub(*nid))))
    }

    /// The parent of a directory.
    ///
    /// # Errors
    /// The directory is damaged.
    pub fn parent(&self, dir: &Inode) -> ImageResult<Nid> {
        let missing = Flaw { what: "a directory without a parent", offset: dir.xattrs.0 as u64 };
        self.find(dir, b"..")?.ok_or(missing)
    }

    /// Both the blocks and the names in each of them are sorted.
    fn find(&self, dir: &Inode, name: &[u8]) -> ImageResult<Option<Nid>> {
        let bytes = self.dir_bytes(dir)?;
        let at = dir.xattrs.0 as u64;
        let (mut low, mut high) = (0, (bytes.0.len() + bytes.1.len()).div_ceil(BLOCK_BYTES));
        while low < high {
            let middle = low + (high - low) / 2;
            let block = Block::of(self.dir_block(bytes, middle).unwrap_or_default(), at)?;
            if name < block.entry(0)?.name {
                high = middle;
                continue;
            }
            if name > block.entry(block.count - 1)?.name {
                low = middle + 1;
                continue;
            }
            let (mut from, mut to) = (0, block.count);
            while from < to {
                let index = from + (to - from) / 2;
                let entry = block.entry(index)?;
                match name.cmp(entry.name) {
                    std::cmp::Ordering::Equal => return Ok(Some(entry.nid)),
                    std::cmp::Ordering::Less => to = index,
                    std::cmp::Ordering::Greater => from = index + 1,
                }
            }
            return Ok(None);
        }
        Ok(None)
    }
}

/// A block of a directory.
struct Block<'a> {
    bytes: &'a [u8],
    count: usize,
    at: u64,
}

impl<'a> Block<'a> {
    fn of(bytes: &'a [u8], at: u64) -> ImageResult<Self> {
        let flaw = |what| Flaw { what, offset: at };
        let first: Dirent = read_at(bytes, 0).map_err(|_| flaw("a directory's block without entries"))?;
        let names = usize::from(first.name_offset.get());
        if names == 0 || !names.is_multiple_of(size_of::<Dirent>()) || names > bytes.len() {
            return Err(flaw("a directory's block with an impossible number of entries"));
        }
        Ok(Self { bytes, count: names / size_of::<Dirent>(), at })
    }

    fn entry(&self, index: usize) -> ImageResult<Entry<'a>> {
        let flaw = |what| Flaw { what, offset: self.at };
        let offset = |index| -> ImageResult<(Dirent, usize)> {
            let entry: Dirent = read_at(self.bytes, index * size_of::<Dirent>())?;
            Ok((entry, usize::from(entry.name_offset.get())))
        };
        let (entry, from) = offset(index)?;
        let is_last = index + 1 == self.count;
        let to = if is_last { self.bytes.len() } else { offset(index + 1)?.1 };
        let name = self.bytes.get(from..to).ok_or_else(|| flaw("a name outside of its block"))?;
        // The last name of a block ends with the block, or with a zero.
        let name = match name.iter().position(|byte| *byte == 0) {
            Some(end) if is_last => &name[..end],
            _ => name,
        };
        if !matches!(name, b"." | b"..") && Name::new(name).is_err() {
            return Err(flaw("an invalid name"));
        }
        Ok(Entry { name, nid: Nid(entry.nid.get()), kind: entry.kind, next: 0 })
    }
}

/// Iterates over the entries of a directory.
#[derive(Debug)]
pub struct Entries<'a> {
    image: &'a Image,
    bytes: (&'a [u8], &'a [u8]),
    at: u64,
    /// The number of the block, and in the upper bits that of the entry in it.
    next: u64,
    hides_stubs: bool,
}

impl<'a> Iterator for Entries<'a> {
    type Item = ImageResult<Entry<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let entry = self.step()?;
            let is_hidden =
                |entry: &Entry<'_>| self.hides_stubs && entry.kind == STUB_KIND && self.image.is_stub(entry.nid);
            if !entry.as_ref().is_ok_and(is_hidden) {
                return Some(entry);
            }
        }
    }
}

impl<'a> Entries<'a> {
    fn step(&mut self) -> Option<ImageResult<Entry<'a>>> {
        let (block, index) = (self.next / ENTRIES_MAX, self.next % ENTRIES_MAX);
        let bytes = self.image.dir_block(self.bytes, usize::try_from(block).ok()?)?;
        let entry = Block::of(bytes, self.at).and_then(|block| {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            if index >= block.count {
                return Err(Flaw { what: "a position where no entry is", offset: self.at });
            }
            Ok((block.entry(index)?, index + 1 == block.count))
        });
        match entry {
            Ok((entry, is_last)) => {
                self.next = if is_last { (block + 1) * ENTRIES_MAX } else { self.next + 1 };
                Some(Ok(Entry { next: self.next, ..entry }))
            }
            Err(flaw) => {
                self.next = u64::MAX;
                Some(Err(flaw))
            }
        }
    }
}
