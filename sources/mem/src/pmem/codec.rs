//! Log payloads: items, each a kind (u8) and its fields. Numbers are little-endian; a u32 length precedes bytes.
//!
//! | kind | item | fields |
//! | --- | --- | --- |
//! | 1 | make | ino, meta, target, count of xattrs (u32), (name, value)..., place? |
//! | 2 | link | ino, place, time |
//! | 3 | unlink | place, time |
//! | 4 | rename | from, to, exchange (u8), whiteout? (ino, meta), time |
//! | 5 | attr | ino, meta |
//! | 6 | xattr | ino, name, value?, meta |
//! | 7 | free | ino |
//! | 8 | map | ino, size, first and last-plus-one logical block, count of pieces (u32), (logical, block, count)... |
//!
//! ino: u64. place: directory (u64), name. time: seconds (i64), nanoseconds (u32). meta: mode, uid, gid, rdev (u32), atime,
//! mtime, ctime, btime. `?`: a byte 0 or 1 in front. The top bit of a piece's block: allocated, not written.
#![forbid(unsafe_code)]

use ferry_vfs::{Ino, Name, Timespec};

use super::extents::Piece;
use crate::store::{At, Meta, Record, Xattr};

/// Marks a piece without data.
const UNWRITTEN: u64 = 1 << 63;
/// The minimum size of a piece or xattr in a payload, which bounds their number.
const PIECE_BYTES: usize = 24;
const XATTR_BYTES_MIN: usize = 8;

/// A payload that does not parse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// It ends within an item.
    #[error("a log record ends in the middle of an item")]
    Short,
    /// An unknown kind of item.
    #[error("a log record has an item of the unknown kind {0}")]
    Kind(u8),
    /// An invalid value of a field.
    #[error("a log record has a {field} that no program writes")]
    Value {
        /// The field.
        field: &'static str,
    },
}

/// A record of the store: the size of a file, and the location of a range of its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Map {
    pub(crate) ino: Ino,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Logical blocks: the pieces replace the previous ones.
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) pieces: Vec<Piece>,
}

/// One item of a payload.
#[derive(Debug)]
pub(crate) enum Item<'a> {
    /// The tree's.
    Tree(Record<'a>),
    /// The store's.
    Map(Map),
}

/// Appends a record of the tree.
pub(crate) fn put_record(to: &mut Vec<u8>, record: &Record<'_>) {
    match record {
        Record::Make { ino, meta, target, xattrs, at } => {
            to.push(1);
            put_u64(to, ino.0);
            put_meta(to, meta);
            put_bytes(to, target);
            put_u32(to, u32::try_from(xattrs.len()).unwrap_or(u32::MAX));
            for xattr in *xattrs {
                put_bytes(to, xattr.name);
                put_bytes(to, xattr.value);
            }
            put_option(to, at.as_ref(), put_at);
        }
        Record::Link { ino, at, time } => {
            to.push(2);
            put_u64(to, ino.0);
            put_at(to, at);
            put_time(to, time);
        }
        Record::Unlink { at, time } => {
            to.push(3);
            put_at(to, at);
            put_time(to, time);
        }
        Record::Rename { from, to: target, exchange, whiteout, time } => {
            to.push(4);
            put_at(to, from);
            put_at(to, target);
            to.push((*exchange).into());
            put_option(to, whiteout.as_ref(), |to, (ino, meta)| {
                put_u64(to, ino.0);
                put_meta(to, meta);
            });
            put_time(to, time);
        }
        Record::Attr { ino, meta } => {
            to.push(5);
            put_u64(to, ino.0);
            put_meta(to, meta);
        }
        Record::Xattr { ino, name, value, meta } => {
            to.push(6);
            put_u64(to, ino.0);
            put_bytes(to, name);
            put_option(to, value.as_ref(), |to, value| put_bytes(to, value));
            put_meta(to, meta);
        }
        Record::Free { ino } => {
            to.push(7);
            put_u64(to, ino.0);
        }
    }
}

/// Appends a record of the store.
pub(crate) fn put_map(to: &mut Vec<u8>, map: &Map) {
    to.push(8);
    for value in [map.ino.0, map.size, map.from, map.to] {
        put_u64(to, value);
    }
    put_u32(to, u32::try_from(map.pieces.len()).unwrap_or(u32::MAX));
    for piece in &map.pieces {
        put_u64(to, piece.logical);
        put_u64(to, piece.block | if piece.written { 0 } else { UNWRITTEN });
        put_u64(to, piece.count);
    }
}

/// Bytes that [`put_map`] appends.
pub(crate) fn map_bytes(pieces: usize) -> usize {
    1 + 4 * 8 + 4 + pieces * PIECE_BYTES
}

/// Decodes a payload, item by item.
///
/// # Errors
///
/// The payload's, or the first one that `each` returns.
pub(crate) fn for_each<E: From<CodecError>>(
    payload: &[u8],
    mut each: impl FnMut(&Item<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let mut input = Reader(payload);
    while let Some((&kind, rest)) = input.0.split_first() {
        input.0 = rest;
        if kind == 1 {
            // A record borrows its attributes, so their vector belongs to this iteration.
            let mut xattrs = Vec::new();
            let (ino, meta, target, at) = input.make(&mut xattrs)?;
            each(&Item::Tree(Record::Make { ino, meta, target, xattrs: &xattrs, at }))?;
        } else {
            each(&input.item(kind)?)?;
        }
    }
    Ok(())
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], CodecError> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(CodecError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CodecError> {
        self.take(N)?.try_into().map_err(|_| CodecError::Short)
    }

    fn u64(&mut self) -> Result<u64, CodecError> {
        self.array().map(u64::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, CodecError> {
        self.array().map(u32::from_le_bytes)
    }

    fn flag(&mut self) -> Result<bool, CodecError> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => Err(CodecError::Value { field: "flag" }),
        }
    }

    fn ino(&mut self) -> Result<Ino, CodecError> {
        self.u64().map(Ino)
    }

    fn bytes(&mut self) -> Result<&'a [u8], CodecError> {
        let bytes = self.u32()? as usize;
        self.take(bytes)
    }

    /// Takes a count of elements of this minimum size, which limits the memory for them.
    fn count(&mut self, bytes_each: usize) -> Result<usize, CodecError> {
        let count = self.u32()? as usize;
        if count > self.0.len() / bytes_each { Err(CodecError::Short) } else { Ok(count) }
    }

    fn time(&mut self) -> Result<Timespec, CodecError> {
        let (sec, nsec) = (i64::from_le_bytes(self.array()?), self.u32()?);
        if nsec >= 1_000_000_000 { Err(CodecError::Value { field: "time" }) } else { Ok(Timespec { sec, nsec }) }
    }

    fn meta(&mut self) -> Result<Meta, CodecError> {
        Ok(Meta {
            mode: self.u32()?,
            uid: self.u32()?,
            gid: self.u32()?,
            rdev: self.u32()?,
            atime: self.time()?,
            mtime: self.time()?,
            ctime: self.time()?,
            btime: self.time()?,
        })
    }

    fn at(&mut self) -> Result<At<'a>, CodecError> {
        let dir = self.ino()?;
        let name = Name::new(self.bytes()?).map_err(|_| CodecError::Value { field: "name" })?;
        Ok(At { dir, name })
    }

    /// Takes all fields of a make except the extended attributes, which it adds to `xattrs`.
    #[allow(clippy::type_complexity, reason = "the fields of a record, taken apart at once")]
    fn make(&mut self, xattrs: &mut Vec<Xattr<'a>>) -> Result<(Ino, Meta, &'a [u8], Option<At<'a>>), CodecError> {
        let (ino, meta, target) = (self.ino()?, self.meta()?, self.bytes()?);
        for _ in 0..self.count(XATTR_BYTES_MIN)? {
            xattrs.push(Xattr { name: self.bytes()?, value: self.bytes()? });
        }
        let at = if self.flag()? { Some(self.at()?) } else { None };
        Ok((ino, meta, target, at))
    }

    fn item(&mut self, kind: u8) -> Result<Item<'a>, CodecError> {
        Ok(Item::Tree(match kind {
            2 => Record::Link { ino: self.ino()?, at: self.at()?, time: self.time()? },
            3 => Record::Unlink { at: self.at()?, time: self.time()? },
            4 => {
                let (from, to, exchange) = (self.at()?, self.at()?, self.flag()?);
                let whiteout = if self.flag()? { Some((self.ino()?, self.meta()?)) } else { None };
                Record::Rename { from, to, exchange, whiteout, time: self.time()? }
            }
            5 => Record::Attr { ino: self.ino()?, meta: self.meta()? },
            6 => {
                let (ino, name) = (self.ino()?, self.bytes()?);
                let value = if self.flag()? { Some(self.bytes()?) } else { None };
                Record::Xattr { ino, name, value, meta: self.meta()? }
            }
            7 => Record::Free { ino: self.ino()? },
            8 => return self.map().map(Item::Map),
            kind => return Err(CodecError::Kind(kind)),
        }))
    }

    fn map(&mut self) -> Result<Map, CodecError> {
        let (ino, size, from, to) = (self.ino()?, self.u64()?, self.u64()?, self.u64()?);
        let mut next = from;
        let mut pieces = Vec::new();
        for _ in 0..self.count(PIECE_BYTES)? {
            let (logical, block, count) = (self.u64()?, self.u64()?, self.u64()?);
            let end = logical.checked_add(count).filter(|end| count > 0 && logical >= next && *end <= to);
            next = end.ok_or(CodecError::Value { field: "piece" })?;
            pieces.push(Piece { logical, block: block & !UNWRITTEN, count, written: block & UNWRITTEN == 0 });
        }
        if from > to || i64::try_from(size).is_err() {
            return Err(CodecError::Value { field: "size" });
        }
        Ok(Map { ino, size, from, to, pieces })
    }
}

fn put_u64(to: &mut Vec<u8>, value: u64) {
    to.extend_from_slice(&value.to_le_bytes());
}

fn put_u32(to: &mut Vec<u8>, value: u32) {
    to.extend_from_slice(&value.to_le_bytes());
}

fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    put_u32(to, u32::try_from(bytes.len()).unwrap_or(u32::MAX));
    to.extend_from_slice(bytes);
}

fn put_time(to: &mut Vec<u8>, time: &Timespec) {
    to.extend_from_slice(&time.sec.to_le_bytes());
    put_u32(to, time.nsec);
}

fn put_meta(to: &mut Vec<u8>, meta: &Meta) {
    [meta.mode, meta.uid, meta.gid, meta.rdev].into_iter().for_each(|value| put_u32(to, value));
    [meta.atime, meta.mtime, meta.ctime, meta.btime].iter().for_each(|time| put_time(to, time));
}

fn put_at(to: &mut Vec<u8>, at: &At<'_>) {
    put_u64(to, at.dir.0);
    put_bytes(to, at.name.as_bytes());
}

fn put_option<T>(to: &mut Vec<u8>, value: Option<&T>, put: impl Fn(&mut Vec<u8>, &T)) {
    to.push(value.is_some().into());
    if let Some(value) = value {
        put(to, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<u8> {
        let time = Timespec { sec: -5, nsec: 999_999_999 };
        let meta = Meta { mode: 0o100_644, uid: 1, gid: 2, rdev: 3, atime: time, ..Meta::default() };
        let name = Name::new(b"name").unwrap();
        let (at, to) = (At { dir: Ino(1), name }, At { dir: Ino(2), name });
        let xattrs = [Xattr { name: b"user.a", value: b"" }, Xattr { name: b"user.b", value: b"value" }];
        let mut payload = Vec::new();
        for record in [
            Record::Make { ino: Ino(9), meta, target: b"target", xattrs: &xattrs, at: Some(at) },
            Record::Make { ino: Ino(9), meta, target: b"", xattrs: &[], at: None },
            Record::Link { ino: Ino(9), at, time },
            Record::Unlink { at, time },
            Record::Rename { from: at, to, exchange: true, whiteout: None, time },
            Record::Rename { from: at, to, exchange: false, whiteout: Some((Ino(7), meta)), time },
            Record::Attr { ino: Ino(9), meta },
            Record::Xattr { ino: Ino(9), name: b"user.a", value: None, meta },
            Record::Xattr { ino: Ino(9), name: b"user.a", value: Some(b"x"), meta },
            Record::Free { ino: Ino(9) },
        ] {
            put_record(&mut payload, &record);
        }
        let piece = |logical, written| Piece { logical, block: logical + 50, count: 2, written };
        put_map(
            &mut payload,
            &Map { ino: Ino(9), size: 5000, from: 0, to: 9, pieces: vec![piece(1, true), piece(5, false)] },
        );
        payload
    }

    fn again(payload: &[u8]) -> Result<Vec<u8>, CodecError> {
        let mut out = Vec::new();
        for_each(payload, |item| {
            match item {
                Item::Tree(record) => put_record(&mut out, record),
                Item::Map(map) => put_map(&mut out, map),
            }
            Ok::<_, CodecError>(())
        })?;
        Ok(out)
    }

    #[test]
    fn every_item_round_trips() {
        assert_eq!(again(&all()), Ok(all()));
        let mut count = 0;
        for_each(&all(), |_| {
            count += 1;
            Ok::<_, CodecError>(())
        })
        .unwrap();
        assert_eq!(count, 11);
    }

    #[test]
    fn truncations_are_detected_except_between_items() {
        let all = all();
        for end in 0..all.len() {
            if let Ok(short) = again(&all[..end]) {
                assert_eq!(short, all[..end]);
            }
        }
    }

    #[test]
    fn bad_values_are_refused() {
        let map = |from, to, logical, count| {
            let mut payload = Vec::new();
            let pieces = vec![Piece { logical, block: 1, count, written: true }];
            put_map(&mut payload, &Map { ino: Ino(2), size: 1, from, to, pieces });
            again(&payload)
        };
        for (from, to, logical, count) in [(0, 4, 2, 3), (2, 4, 1, 1), (0, 4, 1, 0), (0, 4, u64::MAX, 2), (5, 4, 5, 1)]
        {
            assert_eq!(map(from, to, logical, count), Err(CodecError::Value { field: "piece" }));
        }
        assert_eq!(again(&[99]), Err(CodecError::Kind(99)));
        assert_eq!(again(&[7, 0]), Err(CodecError::Short));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_parsed_without_a_panic(mut payload: Vec<u8>, at in 0usize..400, byte: u8) {
            let _ = again(&payload);
            payload = all();
            let at = at % payload.len();
            payload[at] = byte;
            if let Ok(out) = again(&payload) {
                proptest::prop_assert_eq!(out, payload);
            }
        }
    }
}
