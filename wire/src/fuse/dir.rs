//! Directory listings (FUSE protocol 7.45, `fuse_dirent` and `fuse_direntplus`).

use std::mem::offset_of;

use ferry_vfs::{DirItem, DirOutput, Entry};
use zerocopy::IntoBytes;

use super::abi::{Attr, Dirent, EntryOut};
use super::reply::entry_out;
use super::reply_decode::entry;
use super::{Negotiated, Timeouts};
use crate::body::{Body, FieldError, ensure};
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
    #[must_use]
    pub fn with_dax(mut self, dax: bool) -> Self {
        self.set_dax(dax);
        self
    }

    /// As [`Self::with_dax`], in between.
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

/// One entry of a listing, as the client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Name, type, number, and the offset of the next entry.
    pub item: DirItem<'a>,
    /// The entry of a READDIRPLUS, its timeouts, and whether to use DAX; `None` for `.` and `..`.
    pub entry: Option<(Entry, Timeouts, bool)>,
}

/// A malformed listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed FUSE directory listing: {reason}")]
pub struct DirDecodeError {
    /// What was wrong.
    pub reason: &'static str,
}

/// Decodes a listing for the client. Ends after the first error.
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

    fn entry(&mut self) -> Result<DirEntry<'a>, FieldError> {
        let before = self.body.0.len();
        let entry_out: Option<EntryOut> = if self.plus { Some(self.body.take()?) } else { None };
        let dirent: Dirent = self.body.take()?;
        let name = self.body.bytes(dirent.namelen as usize)?;
        ensure(!name.is_empty() && !name.iter().any(|byte| matches!(byte, b'/' | 0)), "not a name")?;
        let used = before - self.body.0.len();
        self.body.bytes(used.next_multiple_of(ALIGN) - used)?;
        let kind = u8::try_from(dirent.kind).ok().filter(|kind| *kind < 16);
        let kind = dirent::to_file_type(kind.ok_or(FieldError::invalid("an unknown file type"))?);
        let item = DirItem { ino: dirent.ino, next: dirent.off, kind, name };
        let entry = match entry_out {
            Some(out) if out.nodeid != 0 => Some(entry(&out)?),
            _ => None,
        };
        Ok(DirEntry { item, entry })
    }
}

impl<'a> Iterator for DirEntries<'a> {
    type Item = Result<DirEntry<'a>, DirDecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.body.0.is_empty() {
            return None;
        }
        let entry = self.entry();
        if entry.is_err() {
            self.body.0 = &[];
        }
        Some(entry.map_err(|flaw| DirDecodeError { reason: flaw.reason }))
    }
}
