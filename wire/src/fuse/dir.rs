//! Directory listings (FUSE protocol 7.45, `fuse_dirent` and `fuse_direntplus`).

use std::mem::offset_of;

use ferry_vfs::{DirItem, DirOutput, Entry};
use zerocopy::IntoBytes;

use super::abi::{Attr, Dirent, EntryOut};
use super::reply::entry_out;
use super::{Negotiated, Timeouts};
use crate::dirent;

/// The alignment of every entry in bytes (`FUSE_DIRENT_ALIGN`).
const ALIGN: usize = 8;

/// Writes a listing for READDIR or READDIRPLUS into the caller's buffer.
///
/// ```
/// use ferry_vfs::{DirItem, DirOutput, FileType};
/// use ferry_wire::fuse::{DirWriter, Negotiated, Timeouts};
///
/// let mut buffer = Vec::new();
/// let mut listing = DirWriter::new(&mut buffer, 64, false, Timeouts::default(), &Negotiated::BEFORE_INIT);
/// let item = DirItem { ino: 7, next: 1, kind: FileType::RegularFile, name: b"ferry" };
/// assert!(listing.fits(item.name));
/// listing.push(&item, None);
/// assert!(listing.fits(item.name));
/// listing.push(&item, None);
/// assert!(!listing.fits(item.name));
/// assert_eq!(buffer.len(), 64);
/// ```
#[derive(Debug)]
pub struct DirWriter<'b> {
    out: &'b mut Vec<u8>,
    /// The maximum length of `out`.
    end: usize,
    plus: bool,
    timeouts: Timeouts,
    dax: bool,
    session: &'b Negotiated,
}

impl<'b> DirWriter<'b> {
    /// Creates a listing of at most `bytes_max` bytes after the contents of `out`.
    pub fn new(
        out: &'b mut Vec<u8>,
        bytes_max: usize,
        plus: bool,
        timeouts: Timeouts,
        session: &'b Negotiated,
    ) -> Self {
        let end = out.len().saturating_add(bytes_max);
        Self { out, end, plus, timeouts, dax: false, session }
    }

    /// Marks the following entries for DAX, with [`super::InitFlags::HAS_INODE_DAX`].
    pub fn set_dax(&mut self, dax: bool) {
        self.dax = dax;
    }

    /// Sets the cache timeouts of the following entries.
    pub fn set_timeouts(&mut self, timeouts: Timeouts) {
        self.timeouts = timeouts;
    }

    /// Returns the position of the next entry in the buffer.
    #[must_use]
    pub fn position(&self) -> usize {
        self.out.len()
    }

    /// Changes the mode of the READDIRPLUS entry at this position of the buffer, if there is one.
    pub fn set_mode(listing: &mut [u8], position: usize, mode: u32) {
        let at = position + offset_of!(EntryOut, attr) + offset_of!(Attr, mode);
        if let Some(bytes) = listing.get_mut(at..at + size_of_val(&mode)) {
            bytes.copy_from_slice(&mode.to_ne_bytes());
        }
    }

    /// Returns the size of an entry with this name, in bytes.
    fn entry_bytes(&self, name: &[u8]) -> usize {
        let entry = if self.plus { size_of::<EntryOut>() } else { 0 };
        (entry + size_of::<Dirent>() + name.len()).next_multiple_of(ALIGN)
    }
}

impl DirOutput for DirWriter<'_> {
    fn fits(&self, name: &[u8]) -> bool {
        self.entry_bytes(name) <= self.end - self.out.len()
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        debug_assert!(self.fits(item.name), "the source did not check that the entry fits");
        if !self.fits(item.name) {
            return;
        }
        let begin = self.out.len();
        if self.plus {
            // An inode number of 0 means "no entry", as for `.` and `..`.
            let entry = entry.map_or(EntryOut::ZERO, |entry| entry_out(entry, self.timeouts, self.dax, self.session));
            self.out.extend_from_slice(entry.as_bytes());
        }
        let namelen = u32::try_from(item.name.len()).expect("an entry that fits is short");
        let dirent = Dirent { ino: item.ino, off: item.next, namelen, kind: dirent::from_file_type(item.kind).into() };
        self.out.extend_from_slice(dirent.as_bytes());
        self.out.extend_from_slice(item.name);
        self.out.resize(begin + (self.out.len() - begin).next_multiple_of(ALIGN), 0);
    }
}
