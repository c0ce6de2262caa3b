//! The members of an archive, with what PAX and GNU headers say of them.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use ferry_vfs::Timespec;

use super::header::{
    GID, HEADER_BYTES, Header, LINK, MAJOR, MINOR, MODE, MTIME, SIZE, SPARSE, SPARSE_BYTES, SPARSE_MORE, SPARSE_NEXT,
    SPARSE_NEXT_MORE, UID,
};
use crate::error::{Doing, Error, Result};
use crate::grow::Refusal;

/// The longest PAX header, and the longest name: more than paths and attributes can have, and it is kept in memory.
const EXTRA_BYTES_MAX: u64 = 1 << 20;
/// The most pieces of a sparse file, which are kept in memory.
const PIECES_MAX: usize = 1 << 20;
/// The largest sparse file: its zeros are hashed, and a few bytes of an archive can ask for exabytes of them.
const SPARSE_BYTES_MAX: u64 = 64 << 30;

/// What a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    /// A hard link.
    Link,
    Symlink,
    Directory,
    /// A device or FIFO.
    Special,
}

/// One member.
pub(super) struct Member {
    /// Where its header is in the archive, in bytes.
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

/// What a PAX header says.
type Pax = BTreeMap<Vec<u8>, Vec<u8>>;

/// What comes before a member and is about it.
#[derive(Default)]
struct Extra {
    pax: Option<Pax>,
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

/// Reads an archive from its beginning to its end.
pub(super) struct Members<R> {
    input: R,
    source: PathBuf,
    offset: u64,
    /// Pieces of the current file that hold data and are still to come, in reverse: offset in the file, length.
    pieces: Vec<(u64, u64)>,
    /// How much of the current file has been read.
    at: u64,
    /// The zeros that fill its last block.
    padding: u64,
}

impl<R: Read> Members<R> {
    pub(super) fn of(input: R, source: &Path) -> Self {
        Self { input, source: source.into(), offset: 0, pieces: Vec::new(), at: 0, padding: 0 }
    }

    fn refused(&self, offset: u64, reason: impl Into<String>) -> Error {
        Error::Input { path: self.source.clone(), at: format!("at byte {offset}"), reason: reason.into() }
    }

    /// Reads so many bytes, all of which must be there.
    fn take(&mut self, bytes: u64, into: &mut Vec<u8>) -> Result<()> {
        let count = self.input.by_ref().take(bytes).read_to_end(into).doing("read", &self.source)? as u64;
        self.offset += count;
        if count == bytes { Ok(()) } else { Err(self.refused(self.offset, "the archive is cut off")) }
    }

    /// The next block. The archive ends only where there is nothing more: what cannot be read may be anything.
    fn block(&mut self) -> Result<Option<Header>> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        self.input.by_ref().take(HEADER_BYTES as u64).read_to_end(&mut bytes).doing("read", &self.source)?;
        self.offset += bytes.len() as u64;
        if bytes.is_empty() {
            return Ok(None);
        }
        let header = bytes.try_into().map(Header);
        header.map(Some).map_err(|_| self.refused(self.offset, "the archive is cut off"))
    }

    /// The next member. Its file is to be read with [`Self::piece`] to its end.
    pub(super) fn next(&mut self) -> Result<Option<Member>> {
        let mut extra = Extra::default();
        loop {
            let offset = self.offset;
            let Some(header) = self.block()?.filter(|header| !header.is_end()) else {
                let is_whole = extra.pax.is_none() && extra.name.is_none() && extra.link.is_none();
                return if is_whole { Ok(None) } else { Err(self.refused(offset, "the archive is cut off")) };
            };
            if !header.is_sound() {
                return Err(self.refused(offset, "no header of a member is there: its sum is wrong"));
            }
            let twice = || self.refused(offset, "two headers say the same of one member");
            match header.kind() {
                b'x' if extra.pax.is_some() => return Err(twice()),
                b'L' if extra.name.is_some() => return Err(twice()),
                b'K' if extra.link.is_some() => return Err(twice()),
                b'x' => extra.pax = Some(self.pax(&header, offset)?),
                b'L' => extra.name = Some(self.long(&header, offset)?),
                b'K' => extra.link = Some(self.long(&header, offset)?),
                b'g' => {
                    // What is said of all members would be easy to get wrong; git archive says nothing but a comment.
                    if self.pax(&header, offset)?.keys().any(|key| key != b"comment") {
                        return Err(self.refused(offset, "a PAX header for all members"));
                    }
                }
                _ => return self.member(&header, offset, extra).map(Some),
            }
        }
    }

    /// The data of a header that is about another one.
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
        records(&data).ok_or_else(|| self.refused(offset, "a PAX header whose records have wrong lengths"))
    }

    fn member(&mut self, header: &Header, offset: u64, extra: Extra) -> Result<Member> {
        let pax = extra.pax.unwrap_or_default();
        let known = |key: &[u8]| pax.get(key).filter(|value| !value.is_empty());
        let path = known(b"path").cloned().or(extra.name).unwrap_or_else(|| header.name());
        let link = known(b"linkpath").cloned().or(extra.link).unwrap_or_else(|| header.text(LINK).to_vec());
        let described = describe(header, &pax, path, link, offset);
        let (mut member, stored) = described.map_err(|reason| self.refused(offset, reason))?;
        self.pieces = vec![(0, stored)];
        if header.kind() == b'S' {
            self.sparse(header, &mut member, stored)?;
        }
        self.at = 0;
        self.padding = stored.next_multiple_of(HEADER_BYTES as u64) - stored;
        Ok(member)
    }

    /// Reads the map of a sparse file of GNU's kind.
    fn sparse(&mut self, header: &Header, member: &mut Member, stored: u64) -> Result<()> {
        let wrong = |members: &Self, reason: &str| members.refused(member.offset, format!("a sparse file {reason}"));
        let mut pieces = Vec::new();
        let mut more = header.0[SPARSE_MORE] != 0;
        listed(header, SPARSE, &mut pieces).map_err(|reason| self.refused(member.offset, reason))?;
        while more {
            let block = self.block()?.ok_or_else(|| wrong(self, "that is cut off"))?;
            more = block.0[SPARSE_NEXT_MORE] != 0;
            listed(&block, SPARSE_NEXT, &mut pieces).map_err(|reason| self.refused(member.offset, reason))?;
            if pieces.len() > PIECES_MAX {
                return Err(wrong(self, "of more than a million pieces"));
            }
        }
        let bytes = header.number(SPARSE_BYTES, "length").ok().and_then(|bytes| u64::try_from(bytes).ok());
        member.bytes = bytes.ok_or_else(|| wrong(self, "without a length"))?;
        if member.bytes > SPARSE_BYTES_MAX {
            return Err(wrong(self, "of more than 64 GiB"));
        }
        let mut end = 0;
        let mut sum: u64 = 0;
        for (at, length) in &pieces {
            let until = at.checked_add(*length).filter(|until| *at >= end && *until <= member.bytes);
            end = until.ok_or_else(|| wrong(self, "whose pieces overlap or end behind it"))?;
            sum += length;
        }
        if sum != stored {
            return Err(wrong(self, "whose pieces are not as long as its data"));
        }
        pieces.reverse();
        self.pieces = pieces;
        Ok(())
    }

    /// Passes over what is left of the member's file.
    pub(super) fn skip(&mut self) -> Result<()> {
        let stored: u64 = std::mem::take(&mut self.pieces).iter().map(|(_, length)| length).sum();
        let bytes = stored + std::mem::take(&mut self.padding);
        let count = std::io::copy(&mut self.input.by_ref().take(bytes), &mut std::io::sink());
        let count = count.doing("read", &self.source)?;
        self.offset += count;
        if count == bytes { Ok(()) } else { Err(self.refused(self.offset, "the archive is cut off")) }
    }

    /// Reads what follows the last member: the sum of what is packed stands at its end, and is looked at there.
    pub(super) fn finish(mut self) -> Result<()> {
        std::io::copy(&mut self.input, &mut std::io::sink()).doing("read", &self.source).map(drop)
    }

    /// Appends the next bytes of a member's file, no more than so many; answers whether there were any.
    pub(super) fn piece(&mut self, member: &Member, into: &mut Vec<u8>, bytes_max: u64) -> Result<bool> {
        while self.pieces.last().is_some_and(|(_, length)| *length == 0) {
            self.pieces.pop();
        }
        let left = (member.bytes - self.at).min(bytes_max);
        if left == 0 {
            let padding = std::mem::take(&mut self.padding);
            self.take(padding, &mut Vec::new())?;
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

/// Adds the pieces of a sparse file that a block lists; the list ends with an empty one.
fn listed(
    block: &Header,
    (from, count): (usize, usize),
    pieces: &mut Vec<(u64, u64)>,
) -> std::result::Result<(), Refusal> {
    for at in (0..count).map(|index| from + index * 24) {
        if block.0[at] == 0 {
            break;
        }
        let number = |at| {
            block
                .number((at, 12), "piece")
                .and_then(|number| u64::try_from(number).map_err(|_| "a piece before its beginning".into()))
        };
        pieces.push((number(at)?, number(at + 12)?));
    }
    Ok(())
}

/// The records of a PAX header; `None` if one is not as long as it says.
fn records(mut data: &[u8]) -> Option<Pax> {
    let mut pax = Pax::new();
    while !data.is_empty() {
        let blank = data.iter().take(20).position(|byte| *byte == b' ')?;
        let digits =
            std::str::from_utf8(&data[..blank]).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
        let length: usize = digits.parse().ok()?;
        let record = data.get(blank + 1..length)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|byte| *byte == b'=')?;
        pax.insert(record[..equals].to_vec(), record[equals + 1..].to_vec());
        data = &data[length..];
    }
    Some(pax)
}

/// What headers say of a member, and how many bytes of it are in the archive.
fn describe(
    header: &Header,
    pax: &Pax,
    path: Vec<u8>,
    link: Vec<u8>,
    offset: u64,
) -> std::result::Result<(Member, u64), Refusal> {
    if pax.keys().any(|key| key.starts_with(b"GNU.sparse.")) {
        return Err("a sparse file in a form of PAX that is not known here: use --format=gnu, or no --sparse".into());
    }
    let (kind, bits) = match header.kind() {
        b'0' | 0 | b'7' if path.ends_with(b"/") => (Kind::Directory, 0o040_000),
        b'0' | 0 | b'7' | b'S' => (Kind::File, 0o100_000),
        b'1' => (Kind::Link, 0),
        b'2' => (Kind::Symlink, 0o120_000),
        b'3' => (Kind::Special, 0o020_000),
        b'4' => (Kind::Special, 0o060_000),
        b'5' => (Kind::Directory, 0o040_000),
        b'6' => (Kind::Special, 0o010_000),
        kind => return Err(format!("a member of the kind '{}', which is not known here", kind.escape_ascii())),
    };
    let number = |key: &str, place, what: &str| match pax.get(key.as_bytes()).filter(|value| !value.is_empty()) {
        Some(value) => decimal(value).ok_or_else(|| format!("its {what} is no number")),
        None => header.number(place, what),
    };
    let id =
        |key, place, what| u32::try_from(number(key, place, what)?).map_err(|_| format!("its {what} is too large"));
    let stored = u64::try_from(number("size", SIZE, "size")?).map_err(|_| "its size is below zero")?;
    if stored > 0 && kind != Kind::File {
        return Err("it is no file and has data: programs do not agree on where they end".into());
    }
    let permissions = u16::try_from(header.number(MODE, "mode")? & 0o7777).unwrap_or_default();
    let mtime = match pax.get(&b"mtime"[..]).filter(|value| !value.is_empty()) {
        Some(value) => time(value).ok_or("its time is none")?,
        None => Timespec { sec: header.number(MTIME, "time")?, nsec: 0 },
    };
    let xattrs =
        pax.iter().filter_map(|(key, value)| Some((key.strip_prefix(b"SCHILY.xattr.")?.to_vec(), value.clone())));
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

fn decimal(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Seconds with a fraction, as PAX writes times.
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

/// The kernel's form of a device number in 32 bits.
fn device(major: i64, minor: i64) -> std::result::Result<u32, Refusal> {
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
    fn what_cannot_be_read_is_not_the_end() {
        let archive = || io::Cursor::new([0; HEADER_BYTES]);
        let next = |input: &mut dyn Read| Members::of(input, Path::new("archive")).next().map(|found| found.is_none());
        assert!(next(&mut io::empty()).expect("it is over"));
        assert!(next(&mut archive()).expect("it is over"));
        assert!(matches!(next(&mut Broken), Err(Error::Io { .. })));
        assert!(matches!(next(&mut archive().take(100).chain(Broken)), Err(Error::Io { .. })));
        assert!(matches!(next(&mut archive().take(100)), Err(Error::Input { .. })));
        let members = |input| Members::of(input, Path::new("archive"));
        members(Box::new(archive()) as Box<dyn Read>).finish().expect("it can be read");
        assert!(matches!(members(Box::new(archive().chain(Broken))).finish(), Err(Error::Io { .. })));
    }
}
