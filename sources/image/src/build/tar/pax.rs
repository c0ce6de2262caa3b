//! PAX headers: records that describe the next member, or all members that follow, beyond their own headers.
//!
//! Source: POSIX.1-2024, pax ("pax Header Block"), and GNU tar's manual ("Storing Sparse Files") for records of sparse
//! files.

use std::collections::BTreeMap;

use crate::build::tree_builder::Refusal;

/// The offsets and lengths of a sparse file's pieces in form 0.0, a record per number.
const SPARSE_PIECE: [&[u8]; 2] = [b"GNU.sparse.offset", b"GNU.sparse.numbytes"];
/// The keys that a global header may have: others differ between members.
const GLOBAL: [&[u8]; 3] = [b"mtime", b"uid", b"gid"];

/// How to read what tar readers disagree on: global headers (`g`), ambiguous names and sizes, missing padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Global headers apply to each member without a record of its own, as in GNU tar. The rest is refused.
    Archive,
    /// As Go's `archive/tar`, by which containerd and others read layers: it ignores global headers.
    Layer,
}

/// The records of a header, the last one per key.
#[derive(Clone, Debug, Default)]
pub(super) struct Pax {
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The numbers of [`SPARSE_PIECE`], in order.
    pub(super) pieces: Vec<Vec<u8>>,
}

impl Pax {
    /// Parses the records of a header.
    pub(super) fn parse(mut data: &[u8]) -> Result<Self, Refusal> {
        let mut pax = Self::default();
        while !data.is_empty() {
            let (record, rest) = record(data).ok_or("a PAX header whose records have wrong lengths")?;
            data = rest;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or("a PAX header with a record without =")?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            if SPARSE_PIECE.contains(&key) {
                if key != SPARSE_PIECE[pax.pieces.len() % 2] {
                    return Err("a sparse file whose offsets and lengths do not take turns".into());
                }
                pax.pieces.push(value.to_vec());
            } else {
                pax.records.insert(key.to_vec(), value.to_vec());
            }
        }
        Ok(pax)
    }

    /// Returns the value of a record; an empty one counts as absent.
    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.records.get(key).map(Vec::as_slice).filter(|value| !value.is_empty())
    }

    /// Parses a record as a decimal number.
    pub(super) fn number(&self, key: &[u8]) -> Option<Result<i64, Refusal>> {
        let value = self.get(key)?;
        let number = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        Some(number.ok_or_else(|| format!("its {} is not a number", key.escape_ascii())))
    }

    /// Returns all extended attributes.
    pub(super) fn xattrs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.records.iter().filter_map(|(key, value)| Some((key.strip_prefix(b"SCHILY.xattr.")?, value.as_slice())))
    }

    /// Returns whether it describes a sparse file.
    pub(super) fn has_sparse(&self) -> bool {
        !self.pieces.is_empty() || self.records.keys().any(|key| key.starts_with(b"GNU.sparse."))
    }

    /// Merges a global header.
    pub(super) fn add_global(&mut self, global: Self) -> Result<(), Refusal> {
        let is_of_one = |key: &[u8]| {
            matches!(key, b"path" | b"linkpath" | b"size")
                || key.starts_with(b"SCHILY.")
                || key.starts_with(b"GNU.sparse.")
        };
        if let Some(key) = global.records.keys().find(|key| is_of_one(key)) {
            return Err(format!("a PAX header gives all members the same {}", key.escape_ascii()));
        }
        if global.has_sparse() {
            return Err("a PAX header makes all members sparse".into());
        }
        self.records.extend(global.records.into_iter().filter(|(key, _)| GLOBAL.contains(&key.as_slice())));
        Ok(())
    }

    /// Returns the records of a member, completed by the global ones.
    pub(super) fn over(self, globals: &Self) -> Self {
        let mut records = globals.records.clone();
        records.extend(self.records);
        Self { records, pieces: self.pieces }
    }
}

/// Returns the first record without its length and end, and the rest.
fn record(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let blank = data.iter().take(20).position(|byte| *byte == b' ')?;
    let digits = std::str::from_utf8(&data[..blank]).ok();
    let digits = digits.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    let length: usize = digits.parse().ok()?;
    Some((data.get(blank + 1..length)?.strip_suffix(b"\n")?, &data[length..]))
}
