//! Sparse files: which pieces of a file are in the archive, in GNU's old form and in its three forms of PAX.
//!
//! Source: GNU tar's manual ("Basic Tar Format", "Storing Sparse Files").

use std::io::Read;

use super::header::{HEADER_BYTES, Header, SPARSE, SPARSE_BYTES, SPARSE_MORE, SPARSE_NEXT, SPARSE_NEXT_MORE};
use super::member::{Member, Members};
use super::pax::Pax;
use crate::build::tree_builder::Refusal;
use crate::format::error::Result;

/// The most pieces of a sparse file, which are kept in memory.
const PIECES_MAX: usize = 1 << 20;
/// The largest sparse file: its zeros are hashed, and a few bytes of an archive can ask for exabytes of them.
const SPARSE_BYTES_MAX: u64 = 64 << 30;
/// The longest number in a map that stands before the data, with its end.
const DIGITS_MAX: usize = 21;

/// Pieces of a file: offset, length.
pub(super) type Pieces = Vec<(u64, u64)>;

/// How a PAX header tells the pieces of a sparse file.
enum Form {
    /// 0.0 and 0.1: in the header.
    InHeader(Pieces),
    /// 1.0: before the data.
    BeforeData,
}

/// What a PAX header says of a sparse file.
pub(super) struct Sparse {
    form: Form,
    /// The file's length.
    bytes: u64,
    /// The file's name, for the header has another one.
    pub(super) name: Option<Vec<u8>>,
}

impl Sparse {
    /// Reads what a PAX header says, if it says something of a sparse file.
    pub(super) fn of(pax: &Pax) -> std::result::Result<Option<Self>, Refusal> {
        if !pax.has_sparse() {
            return Ok(None);
        }
        let form = match (pax.get(b"GNU.sparse.major"), pax.get(b"GNU.sparse.minor")) {
            (Some(b"1"), Some(b"0")) => Form::BeforeData,
            (None, None) | (Some(b"0"), Some(b"0" | b"1")) => Form::InHeader(in_header(pax)?),
            (major, minor) => {
                let text = |number: Option<&[u8]>| number.unwrap_or(b"?").escape_ascii().to_string();
                return Err(format!(
                    "a sparse file in the form {}.{}, which is not known here",
                    text(major),
                    text(minor)
                ));
            }
        };
        let bytes = pax.number(b"GNU.sparse.realsize").or_else(|| pax.number(b"GNU.sparse.size"));
        let bytes = bytes.ok_or("a sparse file without a length")??;
        let bytes = u64::try_from(bytes).map_err(|_| "a sparse file without a length")?;
        Ok(Some(Self { form, bytes, name: pax.get(b"GNU.sparse.name").map(<[u8]>::to_vec) }))
    }
}

/// The pieces of the forms 0.0 and 0.1.
fn in_header(pax: &Pax) -> std::result::Result<Pieces, Refusal> {
    let numbers: Vec<&[u8]> = match pax.get(b"GNU.sparse.map") {
        Some(_) if !pax.pieces.is_empty() => return Err("a sparse file with two maps".into()),
        Some(map) => map.split(|byte| *byte == b',').collect(),
        None => pax.pieces.iter().map(Vec::as_slice).collect(),
    };
    let count = pax.number(b"GNU.sparse.numblocks").transpose()?;
    if !numbers.len().is_multiple_of(2) || count.is_some_and(|count| i64::try_from(numbers.len() / 2) != Ok(count)) {
        return Err("a sparse file whose map has not as many pieces as it says".into());
    }
    let number = |text: &[u8]| number(text).ok_or("a sparse file whose map has something else than numbers");
    Ok(numbers
        .chunks_exact(2)
        .map(|pair| Ok((number(pair[0])?, number(pair[1])?)))
        .collect::<std::result::Result<_, &str>>()?)
}

/// Decimal digits.
fn number(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    text.parse().ok()
}

impl<R: Read> Members<R> {
    /// Reads the map of a sparse file of GNU's old kind, of which so many bytes are in the archive; returns the pieces that are.
    pub(super) fn old_sparse(&mut self, header: &Header, member: &mut Member, stored: u64) -> Result<Pieces> {
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
        check(&pieces, member.bytes, stored).map_err(|reason| wrong(self, reason))?;
        Ok(pieces)
    }

    /// The same of one that a PAX header tells of. Returns, too, how many bytes are left behind the map.
    pub(super) fn pax_sparse(&mut self, sparse: Sparse, member: &mut Member, stored: u64) -> Result<(Pieces, u64)> {
        member.bytes = sparse.bytes;
        let (pieces, left) = match sparse.form {
            Form::InHeader(pieces) => (pieces, stored),
            Form::BeforeData => self.map_before_data(member.offset, stored)?,
        };
        let wrong = |reason| self.refused(member.offset, format!("a sparse file {reason}"));
        check(&pieces, member.bytes, left).map_err(wrong)?;
        Ok((pieces, left))
    }

    /// Reads a map that fills the first blocks of a file's data: lines with the number of pieces, and each one's offset and length.
    fn map_before_data(&mut self, offset: u64, stored: u64) -> Result<(Pieces, u64)> {
        let wrong = |members: &Self, reason: &str| members.refused(offset, format!("a sparse file {reason}"));
        let (mut left, mut line, mut numbers) = (stored, Vec::new(), Vec::new());
        let mut count = None;
        while count.is_none_or(|count| numbers.len() < count) {
            if left < HEADER_BYTES as u64 {
                return Err(wrong(self, "whose map is cut off"));
            }
            left -= HEADER_BYTES as u64;
            let block = self.block()?.ok_or_else(|| wrong(self, "whose map is cut off"))?;
            for byte in block.0 {
                if byte != b'\n' {
                    line.push(byte);
                    if line.len() > DIGITS_MAX {
                        return Err(wrong(self, "whose map has something else than numbers"));
                    }
                    continue;
                }
                let found = number(&line).ok_or_else(|| wrong(self, "whose map has something else than numbers"))?;
                line.clear();
                if count.is_none() {
                    let pieces = usize::try_from(found).ok().filter(|pieces| *pieces <= PIECES_MAX);
                    count = Some(2 * pieces.ok_or_else(|| wrong(self, "of more than a million pieces"))?);
                } else {
                    numbers.push(found);
                }
                if count.is_some_and(|count| numbers.len() == count) {
                    break;
                }
            }
        }
        Ok((numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(), left))
    }
}

/// Whether the pieces follow each other in the file, and are as long as what is in the archive.
fn check(pieces: &[(u64, u64)], bytes: u64, stored: u64) -> std::result::Result<(), &'static str> {
    if bytes > SPARSE_BYTES_MAX {
        return Err("of more than 64 GiB");
    }
    let (mut end, mut sum) = (0, 0_u64);
    for (at, length) in pieces {
        let until = at.checked_add(*length).filter(|until| *at >= end && *until <= bytes);
        end = until.ok_or("whose pieces overlap or end behind it")?;
        sum += length;
    }
    if sum == stored { Ok(()) } else { Err("whose pieces are not as long as its data") }
}

/// Adds the pieces of a sparse file that a block lists; the list ends with an empty one.
fn listed(block: &Header, (from, count): (usize, usize), pieces: &mut Pieces) -> std::result::Result<(), Refusal> {
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
