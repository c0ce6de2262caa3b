//! The members of an archive, with their PAX and GNU headers.

use std::io::Read;
use std::path::{Path, PathBuf};

use ferry_vfs::Timespec;

use super::header::{GID, HEADER_BYTES, Header, LINK, MAJOR, MINOR, MODE, MTIME, SIZE, UID};
use super::pax::{Dialect, Pax};
use super::sparse::{Pieces, Sparse};
use crate::build::tree_builder::Refusal;
use crate::format::error::{Error, IoContext, Result};

/// The maximum size of a PAX header or a long name in bytes: it is kept in memory, and no path needs more.
const EXTRA_BYTES_MAX: u64 = 1 << 20;

/// The type of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    /// A hard link.
    Link,
    Symlink,
    Directory,
    /// A device or FIFO.
    Special,
}

/// A member.
pub(crate) struct Member {
    /// The offset of its header in the archive.
    pub offset: u64,
    pub path: Vec<u8>,
    pub link: Vec<u8>,
    pub kind: Kind,
    /// Type and permissions.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    /// In the kernel's 32-bit form.
    pub rdev: u32,
    pub mtime: Timespec,
    /// The file's length.
    pub bytes: u64,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Headers before a member that describe it.
#[derive(Default)]
struct Extra {
    pax: Option<Pax>,
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

/// Reads an archive from beginning to end.
pub(super) struct Members<R> {
    input: R,
    source: PathBuf,
    offset: u64,
    dialect: Dialect,
    /// Global PAX records, for all members that follow.
    of_all: Pax,
    /// The remaining data pieces of the current file, in reverse.
    pieces: Pieces,
    /// The number of bytes read of the current file.
    at: u64,
    /// The zeros that fill its last block.
    padding: u64,
}

impl<R: Read> Members<R> {
    pub(super) fn of(input: R, source: &Path, dialect: Dialect) -> Self {
        let (source, of_all) = (source.into(), Pax::default());
        Self { input, source, offset: 0, dialect, of_all, pieces: Vec::new(), at: 0, padding: 0 }
    }

    pub(super) fn refused(&self, offset: u64, reason: impl Into<String>) -> Error {
        Error::Input { path: self.source.clone(), at: format!("at byte {offset}"), reason: reason.into() }
    }

    /// Reads exactly this many bytes.
    fn take(&mut self, bytes: u64, into: &mut Vec<u8>) -> Result<()> {
        let count = self.input.by_ref().take(bytes).read_to_end(into).doing("read", &self.source)? as u64;
        self.offset += count;
        if count == bytes { Ok(()) } else { Err(self.cut_off()) }
    }

    /// Returns the next block. The archive may end only after its last block: an unreadable rest may hide members.
    pub(super) fn block(&mut self) -> Result<Option<Header>> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        self.input.by_ref().take(HEADER_BYTES as u64).read_to_end(&mut bytes).doing("read", &self.source)?;
        self.offset += bytes.len() as u64;
        if bytes.is_empty() {
            return Ok(None);
        }
        let header = bytes.try_into().map(Header);
        header.map(Some).map_err(|_| self.refused(self.offset, "the archive is cut off"))
    }

    /// Returns the next member. Read its file to the end with [`Self::piece`].
    pub(super) fn next(&mut self) -> Result<Option<Member>> {
        let mut extra = Extra::default();
        loop {
            let offset = self.offset;
            let Some(header) = self.block()?.filter(|header| !header.is_end()) else {
                let is_whole = extra.pax.is_none() && extra.name.is_none() && extra.link.is_none();
                return if is_whole { Ok(None) } else { Err(self.refused(offset, "the archive is cut off")) };
            };
            if !header.is_sound() {
                return Err(self.refused(offset, "not a member header: wrong checksum"));
            }
            let twice = || self.refused(offset, "a duplicate extended header");
            match header.kind() {
                b'x' if extra.pax.is_some() => return Err(twice()),
                b'L' if extra.name.is_some() => return Err(twice()),
                b'K' if extra.link.is_some() => return Err(twice()),
                b'x' => extra.pax = Some(self.pax(&header, offset)?),
                b'L' => extra.name = Some(self.long(&header, offset)?),
                b'K' => extra.link = Some(self.long(&header, offset)?),
                b'g' => {
                    let global = self.pax(&header, offset)?;
                    if self.dialect == Dialect::Archive {
                        self.of_all.add_global(global).map_err(|reason| self.refused(offset, reason))?;
                    }
                }
                // A volume label: not a file, and what precedes it describes no other member.
                b'V' => {
                    self.extra(&header, offset)?;
                    extra = Extra::default();
                }
                _ => return self.member(&header, offset, extra).map(Some),
            }
        }
    }

    /// Returns the data of a header that describes another one.
    fn extra(&mut self, header: &Header, offset: u64) -> Result<Vec<u8>> {
        let bytes = header.number(SIZE, "size").map_err(|reason| self.refused(offset, reason))?;
        let bytes = u64::try_from(bytes).ok().filter(|bytes| *bytes <= EXTRA_BYTES_MAX);
        let bytes = bytes.ok_or_else(|| self.refused(offset, "a header of more than 1 MiB"))?;
        let mut data = Vec::new();
        self.take(bytes, &mut data)?;
        self.take(bytes.next_multiple_of(HEADER_BYTES as u64) - bytes, &mut Vec::new())?;
        Ok(data)
    }

    fn long(&mut self, header: &Header, offset: u64) -> Result<Vec<u8>> {
        let mut name = self.extra(header, offset)?;
        name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
        Ok(name)
    }

    fn pax(&mut self, header: &Header, offset: u64) -> Result<Pax> {
        let data = self.extra(header, offset)?;
        Pax::parse(&data).map_err(|reason| self.refused(offset, reason))
    }

    fn member(&mut self, header: &Header, offset: u64, extra: Extra) -> Result<Member> {
        let refused = |members: &Self, reason: Refusal| members.refused(offset, reason);
        let pax = extra.pax.unwrap_or_default().over(&self.of_all);
        let sparse = Sparse::of(&pax).map_err(|reason| refused(self, reason))?;
        let name = sparse.as_ref().and_then(|sparse| sparse.name.clone());
        let known = |key: &[u8]| pax.get(key).map(<[u8]>::to_vec);
        let path = name.or_else(|| known(b"path")).or(extra.name).map_or_else(|| header.name(self.dialect), Ok);
        let path = path.map_err(|reason| refused(self, reason))?;
        let link = known(b"linkpath").or(extra.link).unwrap_or_else(|| header.text(LINK).to_vec());
        let described = describe(header, self.dialect, &pax, (path, link), offset);
        let (mut member, stored) = described.map_err(|reason| refused(self, reason))?;
        let is_old = header.kind() == b'S';
        let (mut pieces, left) = match sparse {
            Some(_) if is_old || member.kind != Kind::File => {
                return Err(refused(self, "conflicting sparse formats, or a sparse member that is not a file".into()));
            }
            Some(sparse) => self.pax_sparse(sparse, &mut member, stored)?,
            None if is_old => (self.old_sparse(header, &mut member, stored)?, stored),
            None => (vec![(0, stored)], stored),
        };
        pieces.reverse();
        self.pieces = pieces;
        self.at = 0;
        // A map before the data fills whole blocks.
        self.padding = left.next_multiple_of(HEADER_BYTES as u64) - left;
        Ok(member)
    }

    /// Skips the rest of the member's file.
    pub(super) fn skip(&mut self) -> Result<()> {
        let stored: u64 = std::mem::take(&mut self.pieces).iter().map(|(_, length)| length).sum();
        if self.discard(stored)? == stored { self.skip_padding() } else { Err(self.cut_off()) }
    }

    /// Skips the zeros that fill a file's last block. Go's `archive/tar` does not miss them after the last member, and some layers lack them.
    fn skip_padding(&mut self) -> Result<()> {
        let padding = std::mem::take(&mut self.padding);
        let is_whole = self.discard(padding)? == padding;
        if is_whole || self.dialect == Dialect::Layer { Ok(()) } else { Err(self.cut_off()) }
    }

    /// Reads this many bytes, or fewer at the end of the archive; returns their number.
    fn discard(&mut self, bytes: u64) -> Result<u64> {
        let count = std::io::copy(&mut self.input.by_ref().take(bytes), &mut std::io::sink());
        let count = count.doing("read", &self.source)?;
        self.offset += count;
        Ok(count)
    }

    fn cut_off(&self) -> Error {
        self.refused(self.offset, "the archive is cut off")
    }

    /// Reads what follows the last member, so that a decompressor verifies its checksum.
    pub(super) fn finish(mut self) -> Result<()> {
        std::io::copy(&mut self.input, &mut std::io::sink()).doing("read", &self.source).map(drop)
    }

    /// Appends the next bytes of a member's file, up to a maximum; returns whether there were any.
    pub(super) fn piece(&mut self, member: &Member, into: &mut Vec<u8>, bytes_max: u64) -> Result<bool> {
        while self.pieces.last().is_some_and(|(_, length)| *length == 0) {
            self.pieces.pop();
        }
        let left = (member.bytes - self.at).min(bytes_max);
        if left == 0 {
            self.skip_padding()?;
            return Ok(false);
        }
        let count = match self.pieces.last_mut() {
            Some((from, length)) if *from <= self.at => {
                let count = left.min(*length);
                *from += count;
                *length -= count;
                self.take(count, into)?;
                count
            }
            hole => {
                let end = hole.map_or(member.bytes, |(from, _)| *from);
                let count = left.min(end - self.at);
                into.resize(into.len() + usize::try_from(count).unwrap_or(usize::MAX), 0);
                count
            }
        };
        self.at += count;
        Ok(true)
    }
}

/// Returns the member that headers describe, and the number of its bytes in the archive.
fn describe(
    header: &Header,
    dialect: Dialect,
    pax: &Pax,
    (path, link): (Vec<u8>, Vec<u8>),
    offset: u64,
) -> Result<(Member, u64), Refusal> {
    let (kind, bits) = match header.kind() {
        b'0' | 0 | b'7' if path.ends_with(b"/") => (Kind::Directory, 0o040_000),
        b'0' | 0 | b'7' | b'S' => (Kind::File, 0o100_000),
        b'1' => (Kind::Link, 0),
        b'2' => (Kind::Symlink, 0o120_000),
        b'3' => (Kind::Special, 0o020_000),
        b'4' => (Kind::Special, 0o060_000),
        b'5' => (Kind::Directory, 0o040_000),
        b'6' => (Kind::Special, 0o010_000),
        kind => return Err(format!("a member of the unknown type '{}'", kind.escape_ascii())),
    };
    let number =
        |key: &str, place, what: &str| pax.number(key.as_bytes()).unwrap_or_else(|| header.number(place, what));
    let id =
        |key, place, what| u32::try_from(number(key, place, what)?).map_err(|_| format!("its {what} is too large"));
    let mut stored = u64::try_from(number("size", SIZE, "size")?).map_err(|_| "its size is below zero")?;
    // Go's reader expects no data after a member of another type, whatever its size. It takes type 0 with a slash for a file.
    if dialect == Dialect::Layer && kind != Kind::File && !matches!(header.kind(), b'0' | b'7') {
        stored = 0;
    }
    if stored > 0 && kind != Kind::File {
        return Err("it has data but is not a file: tar readers disagree on where it ends".into());
    }
    let permissions = u16::try_from(header.number(MODE, "mode")? & 0o7777).unwrap_or_default();
    let mtime = match pax.get(b"mtime") {
        Some(value) => time(value).ok_or("its mtime is invalid")?,
        None => Timespec { sec: header.number(MTIME, "time")?, nsec: 0 },
    };
    let xattrs = pax.xattrs().map(|(name, value)| (name.to_vec(), value.to_vec()));
    let rdev = if matches!(header.kind(), b'3' | b'4') {
        device(header.number(MAJOR, "device")?, header.number(MINOR, "device")?)?
    } else {
        0
    };
    let member = Member {
        offset,
        path,
        link,
        kind,
        mode: bits | permissions,
        uid: id("uid", UID, "user")?,
        gid: id("gid", GID, "group")?,
        rdev,
        mtime,
        bytes: stored,
        xattrs: xattrs.collect(),
    };
    Ok((member, stored))
}

/// Parses seconds with a fraction, as PAX writes times.
fn time(text: &[u8]) -> Option<Timespec> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let sec: i64 = whole.parse().ok()?;
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nsec: u32 = digits.parse().ok()?;
    // -0.5 is half a second before 0.
    if whole.starts_with('-') && nsec > 0 {
        return Some(Timespec { sec: sec.checked_sub(1)?, nsec: 1_000_000_000 - nsec });
    }
    Some(Timespec { sec, nsec })
}

/// Returns the kernel's 32-bit form of a device number.
pub(crate) fn device(major: i64, minor: i64) -> Result<u32, Refusal> {
    let wrong = || format!("the device number {major}:{minor} does not fit in 12 and 20 bits");
    let major = u32::try_from(major).ok().filter(|major| *major < 1 << 12).ok_or_else(wrong)?;
    let minor = u32::try_from(minor).ok().filter(|minor| *minor < 1 << 20).ok_or_else(wrong)?;
    Ok(minor & 0xff | major << 8 | (minor & !0xff) << 12)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// What cannot be read.
    struct Broken;

    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the disk is broken"))
        }
    }

    #[test]
    fn an_unreadable_header_is_not_the_end() {
        let archive = || io::Cursor::new([0; HEADER_BYTES]);
        let next = |input: &mut dyn Read| {
            Members::of(input, Path::new("archive"), Dialect::Archive).next().map(|found| found.is_none())
        };
        assert!(next(&mut io::empty()).expect("it is over"));
        assert!(next(&mut archive()).expect("it is over"));
        assert!(matches!(next(&mut Broken), Err(Error::Io { .. })));
        assert!(matches!(next(&mut archive().take(100).chain(Broken)), Err(Error::Io { .. })));
        assert!(matches!(next(&mut archive().take(100)), Err(Error::Input { .. })));
        let members = |input| Members::of(input, Path::new("archive"), Dialect::Archive);
        members(Box::new(archive()) as Box<dyn Read>).finish().expect("it can be read");
        assert!(matches!(members(Box::new(archive().chain(Broken))).finish(), Err(Error::Io { .. })));
    }
}
