//! Sparse files: the pieces in an archive, in GNU's old form and in the three forms of PAX.
//!
//! Source: GNU tar's manual ("Basic Tar Format", "Storing Sparse Files").

use super::header::Header;
use super::pax::Pax;
use crate::build::tree_builder::Refusal;

/// The maximum number of pieces of a sparse file, which are kept in memory.
pub(super) const PIECES_MAX: usize = 1 << 20;
/// The maximum size of a sparse file: its zeros are hashed, and a few bytes of an archive can claim exabytes.
const SPARSE_BYTES_MAX: u64 = 64 << 30;
/// The maximum length of a number in a map before the data, with its end.
pub(super) const DIGITS_MAX: usize = 21;

/// Pieces of a file: offset and length.
pub(super) type Pieces = Vec<(u64, u64)>;

/// Where a PAX header locates the pieces of a sparse file.
pub(super) enum Form {
    /// 0.0 and 0.1: in the header.
    InHeader(Pieces),
    /// 1.0: before the data.
    BeforeData,
}

/// A sparse file in a PAX header.
pub(super) struct Sparse {
    pub(super) form: Form,
    /// The file's length.
    pub(super) bytes: u64,
    /// The file's name, because the header has another one.
    pub(super) name: Option<Vec<u8>>,
}

impl Sparse {
    /// Parses the sparse file of a PAX header, if there is one.
    pub(super) fn of(pax: &Pax) -> Result<Option<Self>, Refusal> {
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

/// Returns the pieces of forms 0.0 and 0.1.
fn in_header(pax: &Pax) -> Result<Pieces, Refusal> {
    let numbers: Vec<&[u8]> = match pax.get(b"GNU.sparse.map") {
        Some(_) if !pax.pieces.is_empty() => return Err("a sparse file with two maps".into()),
        Some(map) => map.split(|byte| *byte == b',').collect(),
        None => pax.pieces.iter().map(Vec::as_slice).collect(),
    };
    let count = pax.number(b"GNU.sparse.numblocks").transpose()?;
    if !numbers.len().is_multiple_of(2) || count.is_some_and(|count| i64::try_from(numbers.len() / 2) != Ok(count)) {
        return Err("a sparse file whose map has not as many pieces as it says".into());
    }
    let number = |text: &[u8]| number(text).ok_or("a sparse file whose map is not numeric");
    Ok(numbers.chunks_exact(2).map(|pair| Ok((number(pair[0])?, number(pair[1])?))).collect::<Result<_, &str>>()?)
}

/// Parses decimal digits.
pub(super) fn number(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    text.parse().ok()
}

/// Verifies that the pieces are in order within the file, and that their length is that of the stored bytes.
pub(super) fn check(pieces: &[(u64, u64)], bytes: u64, stored: u64) -> Result<(), &'static str> {
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

/// Adds the pieces that a block lists; an empty one ends the list.
pub(super) fn listed(block: &Header, (from, count): (usize, usize), pieces: &mut Pieces) -> Result<(), Refusal> {
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
