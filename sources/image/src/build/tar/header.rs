//! A header: 512 bytes of text fields.

use super::pax::Dialect;
use crate::build::tree_builder::Refusal;

/// The size of a header, and the unit of padding, in bytes.
pub(crate) const HEADER_BYTES: usize = 512;

/// Fields: first byte, length.
pub(super) const NAME: (usize, usize) = (0, 100);
pub(super) const MODE: (usize, usize) = (100, 8);
pub(super) const UID: (usize, usize) = (108, 8);
pub(super) const GID: (usize, usize) = (116, 8);
pub(super) const SIZE: (usize, usize) = (124, 12);
pub(super) const MTIME: (usize, usize) = (136, 12);
const SUM: (usize, usize) = (148, 8);
const KIND: usize = 156;
pub(super) const LINK: (usize, usize) = (157, 100);
const MAGIC: (usize, usize) = (257, 8);
pub(super) const MAJOR: (usize, usize) = (329, 8);
pub(super) const MINOR: (usize, usize) = (337, 8);
const PREFIX: (usize, usize) = (345, 155);
/// GNU's times of access and change, in the prefix's place.
const TIMES: [(usize, usize); 2] = [(345, 12), (357, 12)];
/// GNU sparse files: four pieces, whether more follow in a block of their own, the file's length.
pub(super) const SPARSE: (usize, usize) = (386, 4);
pub(super) const SPARSE_MORE: usize = 482;
pub(super) const SPARSE_BYTES: (usize, usize) = (483, 12);
/// The same fields in a following block.
pub(super) const SPARSE_NEXT: (usize, usize) = (0, 21);
pub(super) const SPARSE_NEXT_MORE: usize = 504;

/// A block of an archive.
pub(super) struct Header(pub [u8; HEADER_BYTES]);

/// Returns whether an archive may begin with these bytes.
pub(crate) fn is_header(bytes: &[u8]) -> bool {
    bytes.try_into().is_ok_and(|bytes| {
        let header = Header(bytes);
        header.is_end() || header.is_sound()
    })
}

impl Header {
    pub(super) fn field(&self, (from, length): (usize, usize)) -> &[u8] {
        &self.0[from..from + length]
    }

    /// Returns a text field, up to its first zero.
    pub(super) fn text(&self, place: (usize, usize)) -> &[u8] {
        let field = self.field(place);
        &field[..field.iter().position(|byte| *byte == 0).unwrap_or(field.len())]
    }

    /// The kind of member.
    pub(super) fn kind(&self) -> u8 {
        self.0[KIND]
    }

    /// Returns whether this is the end of the archive.
    pub(super) fn is_end(&self) -> bool {
        self.0.iter().all(|byte| *byte == 0)
    }

    /// Returns whether the checksum is right; old programs summed signed bytes.
    pub(super) fn is_sound(&self) -> bool {
        let Ok(sum) = self.number(SUM, "sum") else { return false };
        let in_sum = |at: &usize| (SUM.0..SUM.0 + SUM.1).contains(at);
        let all = || self.0.iter().enumerate().map(move |(at, byte)| if in_sum(&at) { b' ' } else { *byte });
        let unsigned: i64 = all().map(i64::from).sum();
        let signed: i64 = all().map(|byte| i64::from(byte.cast_signed())).sum();
        sum == unsigned || sum == signed
    }

    /// Returns the name, with ustar's prefix. Go before 1.8 wrote that prefix into GNU headers, too (golang/go issue 21005).
    pub(super) fn name(&self, dialect: Dialect) -> Result<Vec<u8>, Refusal> {
        let (prefix, name, magic) = (self.text(PREFIX), self.text(NAME), self.field(MAGIC));
        let is_no_time = |place| self.field(place)[0] != 0 && self.number(place, "time").is_err();
        let is_of_old_go = magic == b"ustar  \0" && prefix.is_ascii() && TIMES.into_iter().any(is_no_time);
        if is_of_old_go && dialect == Dialect::Archive {
            return Err("a GNU header with a prefix: tar readers disagree on its name".into());
        }
        let has_prefix = (is_of_old_go || magic.starts_with(b"ustar\0")) && !prefix.is_empty();
        Ok(if has_prefix { [prefix, b"/", name].concat() } else { name.to_vec() })
    }

    /// Parses a number: octal digits, or, where the first bit is set, GNU's binary form.
    pub(super) fn number(&self, place: (usize, usize), what: &str) -> Result<i64, Refusal> {
        let field = self.field(place);
        let wrong = || format!("its {what} is not a number");
        if field[0] & 0x80 != 0 {
            // The second bit is the sign.
            let first = i128::from(((field[0] << 1).cast_signed()) >> 1);
            let fold = |number: i128, byte: &u8| number.checked_mul(256).map(|number| number | i128::from(*byte));
            let number = field[1..].iter().try_fold(first, fold).ok_or_else(wrong)?;
            return i64::try_from(number).map_err(|_| format!("its {what} is too large"));
        }
        let digits = field.split(|byte| *byte == 0).next().unwrap_or_default().trim_ascii();
        if digits.is_empty() {
            return Ok(0);
        }
        // `from_str_radix` would accept a sign.
        let text = std::str::from_utf8(digits).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        text.and_then(|text| i64::from_str_radix(text, 8).ok()).ok_or_else(wrong)
    }
}
